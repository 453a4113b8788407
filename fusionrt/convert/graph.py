"""A small vocabulary over torch.fx graphs: what a node's value is, and replacing calls by others."""

from __future__ import annotations

import functools
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusionrt.convert.effects import NONE, Effect, Facts, as_recorded, value
from fusionrt.convert.purity import is_pure

VALUE, KEY, EFFECT = "example_value", "fusionrt_key", "fusionrt_effect"
# Inputs of a call from which it computes something that it keeps for later calls.
DERIVED = "fusionrt_derived"


def is_tensor(node: Any) -> bool:
    return isinstance(value(node), torch.Tensor)


def is_weight(n: Node) -> bool:
    """A parameter, or what Dynamo marks: buffers of modules."""
    marks = n.meta.get("tensor_dict") or {}
    return isinstance(value(n), torch.nn.Parameter) or "_dynamo_static_input_type" in marks


def same(a: Any, b: Any) -> bool:
    """Of sizes, strides and sequences of them: known to be equal, without a new guard on symbols."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    a, b = (n.node.expr if isinstance(n, torch.SymInt) else n for n in (a, b))
    return bool(a == b)


def hint(size: Any, unknown: float) -> float:
    """A size or stride as it was seen, of those that vary."""
    found: float = size if isinstance(size, int) else size.node.hint if size.node.has_hint() else unknown
    return found


def key(node: Node) -> str:
    """The name by which a replacement that ends at this node can be excluded: Dynamo's, whatever replaced
    the node since."""
    found: str = node.meta.get(KEY, node.name)
    return found


def arguments(node: Node, **defaults: Any) -> dict[str, Any] | None:
    """The arguments of a call by name, of a function whose parameters, in order, have these names and
    defaults; None where it has others."""
    if len(node.args) > len(defaults) or not set(node.kwargs) <= set(defaults):
        return None
    return defaults | dict(zip(defaults, node.args, strict=False)) | dict(node.kwargs)


def present(**options: Any) -> dict[str, Any]:
    """Those that are not None: for arguments whose default that is."""
    return {name: option for name, option in options.items() if option is not None}


class Edits:
    """The graph under work, and what was replaced in it: `counts` by statistic, `replacements` by key."""

    def __init__(self, gm: GraphModule, excluded: frozenset[str] = frozenset()) -> None:
        self.gm, self.graph, self.excluded = gm, gm.graph, excluded
        self.counts: Counter[str] = Counter()
        self.replacements: list[str] = []
        self._pass = ""
        self._erased: set[Node] = set()
        self._facts: Facts | None = None
        self._before: Facts | None = None  # the latest that there were
        self._is_sorted = True

    @property
    def calls(self) -> int:
        return sum(n.op.startswith("call") for n in self.graph.nodes)

    def run(self, name: str, function: Callable[[Edits], None]) -> None:
        self._pass = name
        self.changed()
        function(self)

    @property
    def facts(self) -> Facts:
        """As they were when the pass, or its last `changed`, began; with the calls that were made since."""
        if self._facts is None:
            self._facts = self._before = Facts(self.graph, self._before)
        return self._facts

    def changed(self) -> None:
        """Facts are to be found anew."""
        self._facts = None

    def nodes(self) -> Iterator[Node]:
        """Those that stand in the graph now, but for what is erased meanwhile."""
        return (n for n in list(self.graph.nodes) if n not in self._erased)

    # -- replacing -----------------------------------------------------------------------------------

    def allows(self, last: Node, old: Sequence[Node] = ()) -> bool:
        """Whether a call at the place of `last` may stand for it and the `old` ones: that is not excluded, no
        barrier is in between, nobody writes to what they read, and nobody in between sees what they write."""
        if f"{self._pass}:{key(last)}" in self.excluded:
            return False
        facts = self.facts
        moved = {n for n in old if n is not last}
        written = {c for n in moved for t in facts.effects[n].writes for c in facts.classes[t]}
        touched = {c for n in moved for a in (n, *n.all_input_nodes) for c in facts.classes[a]}
        others = {n for c in written for n in facts.readers[c]} - {*moved, last}
        first = min((facts.position[n] for n in moved), default=facts.position[last])
        return (all(facts.region[n] == facts.region[last] for n in moved)
                and touched & facts.written <= written
                and not any(first < facts.position[n] < facts.position[last] for n in others))

    def note(self, node: Node, statistic: str | None) -> None:
        self.replacements.append(f"{self._pass}:{key(node)}")
        if statistic is not None:
            self.counts[statistic] += 1

    def call(self, target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], at: Node,
             given: Any = None, effects: Effect = NONE) -> Node:
        """A new call before `at`, which gives the value `given`, or that of `at`."""
        functions = {k: v for k, v in kwargs.items() if callable(v)}  # for which fx has no spelling
        if functions:
            target = _with_constants(target, tuple(functions.items()))
        with self.graph.inserting_before(at):
            made = self.graph.call_function(target, tuple(args), {
                k: v for k, v in kwargs.items() if k not in functions})
        made.meta.update({VALUE: value(at) if given is None else as_recorded(given), KEY: key(at),
                          EFFECT: effects})
        self.facts.add(made, at)
        self._is_sorted = False
        return made

    def replace(self, old: Sequence[Node], last: Node, target: Callable[..., Any], args: Sequence[Any],
                statistic: str | None, effects: Effect = NONE, **kwargs: Any) -> Node:
        """One call in the place of the nodes `old`, of which only `last` has other users."""
        self.note(last, statistic)
        made = self.call(target, args, kwargs, last, effects=effects)
        last.replace_all_uses_with(made)
        self.erase(old)
        return made

    def erase(self, nodes: Sequence[Node]) -> None:
        """Calls that nobody uses, users last; and what only they have used, unless it would be missed."""
        left = list(nodes)
        while left:
            n = left.pop()
            if n in self._erased or n.users:
                continue
            operands = [a for a in n.all_input_nodes if a.op != "placeholder" and is_pure(a)]
            self.graph.erase_node(n)
            self._erased.add(n)
            left += reversed(operands)

    def sort(self) -> None:
        """Put nodes before their users again, otherwise in the order in which they stand; barriers and calls
        that touch memory that is written to keep their order. Where no call was made they stand so."""
        if self._is_sorted:
            return
        self._is_sorted = True
        self.changed()
        facts, before = self.facts, ordered(self.facts)
        after: dict[Node, list[Node]] = defaultdict(list)
        waits = {}
        for n in facts.nodes:
            earlier = {*n.all_input_nodes, *before[n]}
            waits[n] = len(earlier)
            for e in earlier:
                after[e].append(n)
        ready = [(facts.region[n], facts.position[n], n) for n in facts.nodes if not waits[n]]
        heapq.heapify(ready)
        output, left = facts.nodes[-1], len(facts.nodes)
        while ready:
            n, left = heapq.heappop(ready)[2], left - 1
            if n is not output:
                output.prepend(n)
            for later in after[n]:
                waits[later] -= 1
                if not waits[later]:
                    heapq.heappush(ready, (facts.region[later], facts.position[later], later))
        if left:
            raise RuntimeError(f"convert: {left} calls of the rewritten graph wait for each other")
        self.changed()


def called(n: Node) -> Any:
    """Whose call it is, also where functions among its options are part of the target."""
    return n.target.func if isinstance(n.target, functools.partial) else n.target


def options_of(n: Node) -> dict[str, Any]:
    return {**(n.target.keywords if isinstance(n.target, functools.partial) else {}), **n.kwargs}


@functools.lru_cache(1024)
def _with_constants(target: Callable[..., Any], constants: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    made: Any = functools.partial(target, **dict(constants))
    made.__name__ = made.__qualname__ = target.__name__
    made.__module__ = target.__module__
    found: Callable[..., Any] = made
    return found


def ordered(facts: Facts) -> dict[Node, list[Node]]:
    """What must run before each node, beside what it reads: of calls on memory that is written to the
    earlier writers, and of a writer the earlier readers."""
    before: dict[Node, list[Node]] = {n: [] for n in facts.nodes}
    writer: dict[int, Node] = {}
    readers: dict[int, list[Node]] = defaultdict(list)
    for n in facts.nodes:
        written = {c for t in facts.effects[n].writes for c in facts.classes[t]}
        touched = {c for operand in n.all_input_nodes for c in facts.classes[operand]} & facts.written
        for c in touched | written:
            if c in writer:
                before[n].append(writer[c])
            if c in written:
                before[n] += [r for r in readers[c] if r is not n]
                writer[c], readers[c] = n, []
            else:
                readers[c].append(n)
    return before
