"""What a call in a captured graph does besides computing its result: writes, order, aliases.

A pass moves and merges calls by these facts, so what is not known to be harmless is a barrier: nothing
moves across it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

# Modules whose functions have no effect but those that their names and arguments show.
_KNOWN = frozenset({"torch", "torch.nn.functional", "torch.functional", "torch._C._nn", "torch._C._special",
                    "torch._C._linalg", "torch._C._fft", "_operator", "math", "builtins", "fusionrt.library"})
_BARRIERS = ("set_", "manual_seed", "seed", "use_deterministic", "setattr", "delattr", "delitem", "print",
             "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_", "_")
_HARMLESS = ("_log_api_usage_once", "_transformer_encoder_layer_fwd", "_native_multi_head_attention")
_BARRIER_METHODS = frozenset({
    "backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "reinforce", "resize",
    "resize_as", "module_load", "record_stream", "numpy", "data_ptr", "untyped_storage", "storage", "detach_",
    "share_memory_", "requires_grad_", "set_", "resize_", "resize_as_", "rename_", "__setstate__", "swap_"})
# May return their operand itself, whatever fake tensors make of them.
_MAY_ALIAS = frozenset({
    "dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d",
    "dropout3d", "contiguous", "reshape", "reshape_as", "flatten", "ravel", "to", "type", "type_as", "float",
    "double", "half", "bfloat16", "cpu", "cuda", "squeeze", "expand_as", "resolve_conj", "resolve_neg",
    "pin_memory", "getattr"})
IN_PLACE = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod,
    operator.ipow: operator.pow, operator.iand: operator.and_, operator.ior: operator.or_,
    operator.ixor: operator.xor, operator.ilshift: operator.lshift, operator.irshift: operator.rshift,
    operator.imatmul: operator.matmul}


class Effect(NamedTuple):
    writes: tuple[Node, ...] = ()
    barrier: bool = False


_autograd: Any = torch._C._autograd
_made: Any = _autograd._get_creation_meta  # of a view
NONE, BARRIER = Effect(), Effect(barrier=True)


def value(node: Any) -> Any:
    """What Dynamo found that a node gives, with fake tensors."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def as_recorded(found: Any) -> Any:
    """The value; without gradients torch says of a view of a parameter that it requires one, which nothing
    records. (Of one that was written to it refuses to say `grad_fn`.)"""
    if (not torch.is_grad_enabled() and isinstance(found, torch.Tensor) and found.requires_grad
            and found._is_view() and _made(found) == _autograd.CreationMeta.NO_GRAD_MODE):
        return found.detach()
    return found


def effect(node: Node) -> Effect:
    if node.op in ("placeholder", "get_attr", "output"):
        return NONE
    if "fusionrt_effect" in node.meta:  # a call of ours
        known: Effect = node.meta["fusionrt_effect"]
        return known
    if node.op == "call_method":
        return _of_method(node)
    if node.op == "call_function":
        return _of_function(node)
    return BARRIER


def _of_method(node: Node) -> Effect:
    name = str(node.target)
    if name in _BARRIER_METHODS:
        return BARRIER
    if name.startswith("__"):
        plain = f"__{name[3:]}" if name.startswith("__i") else ""  # of __iadd__
        writes = name == "__setitem__" or plain in vars(torch._C.TensorBase)
    else:
        writes = name.endswith("_")
    return _writes(node.args[:1]) if writes else _by_arguments(node)


def _of_function(node: Node) -> Effect:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):  # Dynamo's for tensors' properties since torch 2.14
        schemas = [getattr(target, name)._schema for name in target.overloads()]
        return BARRIER if any(s.is_mutable or not s.returns for s in schemas) else NONE
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        if not schema.is_mutable:
            return NONE if schema.returns else BARRIER  # a check, a log
        named = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
        return _writes([named.get(a.name) for a in schema.arguments
                        if a.alias_info is not None and a.alias_info.is_write])
    if target in IN_PLACE or target is operator.setitem:
        return _writes(node.args[:1])
    name, module = getattr(target, "__name__", "_"), getattr(target, "__module__", None)
    if name in _HARMLESS:
        return NONE
    if module not in _KNOWN or name.startswith(_BARRIERS):
        return BARRIER
    in_place = name.endswith("_") and module != "_operator"  # which has `and_`
    return _writes(node.args[:1]) if in_place else _by_arguments(node)


def _by_arguments(node: Node) -> Effect:
    """Of a function whose arguments say what it writes to."""
    if "out" in node.kwargs:
        return _writes([node.kwargs["out"]])
    if node.kwargs.get("inplace") is True or _inplace_by_position(node):
        return _writes(node.args[:1] or [node.kwargs.get("input")])
    return _writes(_statistics(node))


# The place of `inplace` among the arguments.
INPLACE_AT = {getattr(F, name): at for name, at in {
    "relu": 1, "relu6": 1, "silu": 1, "mish": 1, "hardswish": 1, "hardsigmoid": 1, "selu": 1, "elu": 2,
    "celu": 2, "leaky_relu": 2, "dropout": 3, "dropout1d": 3, "dropout2d": 3, "dropout3d": 3,
    "alpha_dropout": 3, "feature_alpha_dropout": 3, "hardtanh": 3, "rrelu": 4, "threshold": 3}.items()}


def _inplace_by_position(node: Node) -> bool:
    at = INPLACE_AT.get(node.target) if node.op == "call_function" else None
    return at is not None and len(node.args) > at and bool(node.args[at])


# Functions that move statistics: the argument that says so, its place, the written ones and their places.
_UPDATES: dict[Any, tuple[str, int, dict[str, int]]] = {
    F.batch_norm: ("training", 5, {"running_mean": 1, "running_var": 2}),
    torch.batch_norm: ("training", 5, {"running_mean": 3, "running_var": 4}),
    F.instance_norm: ("use_input_stats", 5, {"running_mean": 1, "running_var": 2}),
    torch.instance_norm: ("use_input_stats", 5, {"running_mean": 3, "running_var": 4}),
    F.embedding: ("max_norm", 3, {"weight": 1}),
    F.embedding_bag: ("max_norm", 3, {"weight": 1}),
}


def _statistics(node: Node) -> list[Any]:
    if node.op != "call_function" or node.target not in _UPDATES:
        return []
    flag, at, written = _UPDATES[node.target]
    default = node.target is F.instance_norm
    given = node.args[at] if len(node.args) > at else node.kwargs.get(flag, default)
    if given is None or given is False:
        return []
    return [node.args[k] if len(node.args) > k else node.kwargs.get(name) for name, k in written.items()]


def _writes(targets: Any) -> Effect:
    found: list[Node] = []
    map_arg(tuple(targets), found.append)
    return Effect(tuple(found)) if found else NONE


class _Own(NamedTuple):
    """What a node tells by itself, and of which state: torch.fx gives it other objects where that changes."""

    state: tuple[Any, ...]
    effect: Effect
    lies_in: list[tuple[int, torch.dtype]]


def _own(n: Node, before: _Own | None) -> _Own:
    state = n.target, n.args, n.kwargs, value(n)
    if before is not None and all(map(operator.is_, state, before.state)):
        return before
    return _Own(state, effect(n), [(t.untyped_storage()._cdata, t.dtype) for t in tensors(state[-1])])


class Facts:
    """Of one graph, for one pass: the order of its nodes, the regions that barriers divide it into, which
    values share memory, and which memory is written to. `before`: earlier ones of the graph, of which is
    taken what is still so."""

    def __init__(self, graph: Graph, before: Facts | None = None) -> None:
        known: dict[Node, _Own] = {} if before is None else before._known
        self.nodes = list(graph.nodes)
        self.position = {n: k for k, n in enumerate(self.nodes)}
        self._known: dict[Node, _Own] = {n: _own(n, known.get(n)) for n in self.nodes}
        self.effects = {n: its.effect for n, its in self._known.items()}
        barriers = itertools.accumulate((self.effects[n].barrier for n in self.nodes), initial=0)
        self.region = dict(zip(self.nodes, barriers, strict=False))
        lies_in = {n: its.lies_in for n, its in self._known.items()}
        self._same = _Partition()
        for n in self.nodes:
            if getattr(n.target, "__name__", n.target) in _MAY_ALIAS:
                for operand in n.all_input_nodes:
                    for (a, dtype), (b, its) in itertools.product(lies_in[n], lies_in[operand]):
                        if dtype == its:
                            self._same.join(a, b)
        self.classes = {n: self._classes(memory for memory, _ in its) for n, its in lies_in.items()}
        written = (t for n in self.nodes for t in self.effects[n].writes)
        self.written = frozenset(c for t in written for c in self.classes[t])

    def _classes(self, memory: Iterable[int]) -> frozenset[int]:
        return frozenset(map(self._same.find, memory))

    def add(self, node: Node, at: Node) -> None:
        """A call that was made at the place of another one."""
        self.region[node], self.position[node] = self.region[at], self.position[at]
        self.effects[node] = effect(node)
        self.classes[node] = self._classes(t.untyped_storage()._cdata for t in tensors(value(node)))
        for operand in node.all_input_nodes:
            for c in self.classes[operand]:
                self.readers[c].add(node)

    def is_written(self, node: Node) -> bool:
        """Whether some call writes to the memory of this value, before or after."""
        return not self.written.isdisjoint(self.classes[node])

    @functools.cached_property
    def members(self) -> dict[int, list[Node]]:
        """The nodes whose values lie in each piece of memory."""
        found: dict[int, list[Node]] = defaultdict(list)
        for n in self.nodes:
            for c in self.classes[n]:
                found[c].append(n)
        return found

    @functools.cached_property
    def readers(self) -> dict[int, set[Node]]:
        """The calls that get a value in each piece of memory."""
        found: dict[int, set[Node]] = defaultdict(set)
        for n in self.nodes:
            for operand in n.all_input_nodes:
                for c in self.classes[operand]:
                    found[c].add(n)
        return found


class _Partition:
    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, key: int) -> int:
        while key in self._parents:
            key = self._parents[key]
        return key

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self._parents[a] = b


def tensors(given: Any) -> Iterator[torch.Tensor]:
    """Those with memory of their own kind, in a value or a sequence of values."""
    if isinstance(given, torch.Tensor):
        if given.layout == torch.strided:
            yield given
    elif isinstance(given, (tuple, list)):
        for item in given:
            yield from tensors(item)
