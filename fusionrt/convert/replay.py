"""CUDA graphs of inference: a call of known inputs is copied into them, and replayed.

The first call of a kind runs as it is, the second is captured, later ones are replays. Weights are read where
they lie, so what is written to them is seen: every model whose forward pass is the same captured graph has
CUDA graphs of its own. Other inputs are read where they lay as well until they move; from then on they are
copied into buffers of the CUDA graph. What follows from weights and is kept (several stacked as one) belongs
to these very tensors, and is captured anew when their versions tell.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.fx import GraphModule, Node

from fusionrt.convert import cuda_graphs, derived
from fusionrt.convert.effects import Facts, tensors, value
from fusionrt.convert.graph import DERIVED, is_weight
from fusionrt.convert.last_copies import without_last_copies
from fusionrt.convert.purity import draws
from fusionrt.ops import folding

Run = Callable[..., Any]
Key = TypeVar("Key")
Value = TypeVar("Value")
_SETTINGS = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")  # of the host alone
# A capture that served fewer calls than FEW was in vain; after IN_VAIN of them in a row there are no more.
FEW, IN_VAIN = 4, 4
_DATA_PTR, _REFERENT = torch.Tensor.data_ptr, weakref.ref.__call__
MODELS = 64  # sets of weights, whose CUDA graphs are kept: blocks of one class may be as many


class Roles(NamedTuple):
    """Inputs by their places: weights; those from which something kept follows, weights or not; those that
    are written to, which must stay where they are. `vary`: sizes of inputs do."""

    weights: Sequence[int] = ()
    sources: Sequence[int] = ()
    written: Sequence[int] = ()
    vary: bool = False


def replayed(gm: GraphModule, run: Run, written: Sequence[int], fresh: bool, kept: int) -> Run:
    """`run`, by replays where that gives the same. `written`: inputs that the graph writes to."""
    device = device_of_graph(gm)
    if device is None or not _replays(gm):
        return run
    bare = without_last_copies(gm) if fresh else None
    return Replays(run, device, roles_of(gm, written), fresh, kept, *(bare or ()))


def device_of_graph(gm: GraphModule) -> torch.device | None:
    """The one GPU that everything is on, if it is so."""
    devices = {t.device for n in gm.graph.nodes for t in tensors(value(n))}
    device = devices.pop() if devices else None
    return device if device is not None and device.type == "cuda" and not devices else None


def _replays(gm: GraphModule) -> bool:
    """Whether a replay does all that a call does, without gradients. Random numbers may have to be drawn
    again, by a call that records gradients (a checkpoint's): in a graph they would be others."""
    return is_repeatable(gm) and not any(map(draws, gm.graph.nodes)) and not any(
        t.requires_grad for n in gm.graph.nodes if n.op.startswith("call") for t in tensors(value(n)))


def is_repeatable(gm: GraphModule) -> bool:
    """Whether a call does nothing on the host, and gives no views of inputs."""
    facts = Facts(gm.graph)
    given = {c for n in facts.nodes if n.op in ("placeholder", "get_attr") for c in facts.classes[n]}
    output = next(n for n in facts.nodes if n.op == "output")
    return (all(given.isdisjoint(facts.classes[a]) for a in output.all_input_nodes)
            and not any(facts.effects[n].barrier and getattr(n.target, "__name__", "") not in _SETTINGS
                        for n in facts.nodes))


def roles_of(gm: GraphModule, written: Sequence[int]) -> Roles:
    inputs: list[Node] = [n for n in gm.graph.nodes if n.op == "placeholder"]
    sources = {n for u in gm.graph.nodes for n in u.meta.get(DERIVED, ())}
    sizes = [size for n in inputs for size in getattr(value(n), "shape", [None])]
    return Roles([k for k, n in enumerate(inputs) if is_weight(n)],
                 [k for k, n in enumerate(inputs) if n in sources], written,
                 not all(isinstance(size, int) for size in sizes))


class Captured(NamedTuple):
    graph: Any  # torch.cuda.CUDAGraph
    places: list[int]  # where each input is read; 0: it is copied, or no tensor
    buffers: dict[int, torch.Tensor]
    sources: list[weakref.ref[torch.Tensor]]
    versions: list[int]
    results: Callable[[], tuple[Any, ...]]
    held: list[Any]  # what was kept and is read by the graph


class Kind:
    """One kind of inputs: where they lay in the last call, and what was captured."""

    def __init__(self) -> None:
        self.places: list[int] | None = None
        self.moving: set[int] = set()
        self.captured: Captured | None = None
        self.served = self.in_vain = 0

    def drop(self) -> None:
        if self.captured is not None:
            self.in_vain = self.in_vain + 1 if self.served < FEW else 0
        self.captured, self.served = None, 0


class Replays:
    """What a graph becomes: a function of its inputs. `fresh`: results are the caller's own. `kept`: kinds of
    inputs of one set of weights. `bare`: what is captured, if not `run`; whose results are to have `strides`.
    """

    def __init__(self, run: Run, device: torch.device, roles: Roles, fresh: bool, kept: int,
                 bare: Run | None = None, strides: Mapping[int, Sequence[int]] | None = None) -> None:
        self.run, self.device, self.roles, self.fresh, self.kept = run, device, roles, fresh, kept
        self.bare, self.strides = bare or run, strides
        self.weights, self.sources = picked({*roles.weights, *roles.sources}), picked(roles.sources)
        self.models: OrderedDict[tuple[int, ...], OrderedDict[Any, Kind]] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():  # into a graph of someone else's
            return self.run(*args)
        turn = cuda_graphs.turn_of(self.device)
        with turn.lock, cuda_graphs.current(self.device):
            places = places_of(args)
            kind = self._kind(args, places)
            captured = kind.captured
            if captured is None or not self._serves(captured, args, places):
                kind.drop()
                last, kind.places = kind.places, places
                if last is None or kind.in_vain >= IN_VAIN or captured is not None:
                    return self.run(*args)
                kind.moving |= {k for k, place in enumerate(places) if place != last[k]}
                if kind.moving.isdisjoint(self.roles.written):
                    captured = kind.captured = self._capture(args, places, kind.moving, turn)
                if captured is None:
                    kind.in_vain = IN_VAIN
                    return self.run(*args)
            kind.served += 1
            turn.after_others()
            with torch.no_grad():  # the caller's may need a gradient, which nobody records here
                for k, buffer in captured.buffers.items():
                    buffer.copy_(args[k])
            captured.graph.replay()
            return captured.results()

    def forget(self) -> None:
        """What was captured, until it is asked for again."""
        self.models.clear()

    def _kind(self, args: Sequence[Any], places: Sequence[int]) -> Kind:
        key: Any = torch.is_inference_mode_enabled(), cuda_graphs.settings()
        if self.roles.vary:
            key = key, *((a.shape, a.stride()) if isinstance(a, torch.Tensor) else a for a in args)
        return recent(recent(self.models, self.weights(places), OrderedDict, MODELS), key, Kind, self.kept)

    def _serves(self, captured: Captured, args: Sequence[Any], places: list[int]) -> bool:
        if captured.buffers:
            places = places.copy()
            for k in captured.buffers:
                places[k] = 0
        if places != captured.places:
            return False
        # An address alone tells nothing: another tensor may lie where one was.
        sources = self.sources(args)
        return (all(map(operator.is_, map(_REFERENT, captured.sources), sources))
                and list(map(version, sources)) == captured.versions)

    def _capture(self, args: Sequence[Any], places: Sequence[int], moving: set[int], turn: cuda_graphs.Turn
                 ) -> Captured | None:
        """None where that cannot be done, which only trying tells."""
        graph, norms = torch.cuda.CUDAGraph(), folding.Ahead()
        turn.after_others()
        try:
            with turn.aside(), cuda_graphs.casting_anew():
                # Memory of this stream, which waits for all replays before it gets any again.
                buffers = {k: cuda_graphs.buffer_like(args[k]) for k in moving
                           if isinstance(args[k], torch.Tensor)}
                given = [buffers.get(k, a) for k, a in enumerate(args)]
                with torch.no_grad():
                    for k, buffer in buffers.items():
                        buffer.copy_(args[k])
                with (unchanged([args[k] for k in self.roles.written]),
                      norms.noting() if not self.roles.written else contextlib.nullcontext()):
                    self.bare(*given)  # libraries set themselves up for the stream; what is kept is made
                held = [*_kept_of(args), norms]
                with turn.capturing():
                    results = cuda_graphs.into(graph, turn.pool if self.fresh else None,
                                               lambda: _looking(norms, self.bare, given))
        except RuntimeError:  # a call that no graph can hold, or no memory for one
            turn.recover()
            return None
        if self.fresh:
            turn.forgetful.add(self)
        sources = self.sources(args)
        return Captured(graph, [0 if k in buffers else place for k, place in enumerate(places)], buffers,
                        list(map(weakref.ref, sources)), list(map(version, sources)),
                        cuda_graphs.copies_of(results, self.strides) if self.fresh else
                        lambda: tuple(results), held)


@contextlib.contextmanager
def unchanged(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """Tensors that are as they were in the end, whatever happens."""
    before = [t.detach().clone() for t in written]
    try:
        yield
    finally:
        for t, content in zip(written, before, strict=True):
            t.detach().copy_(content)


def picked(places: Iterable[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What stands at these places of a sequence."""
    chosen = sorted(places)
    if len(chosen) > 1:
        return operator.itemgetter(*chosen)
    return lambda given: tuple(given[k] for k in chosen)


def places_of(args: Sequence[Any]) -> list[int]:
    try:
        return list(map(_DATA_PTR, args))  # of hundreds of weights, in each call
    except TypeError:  # numbers are among them
        return [a.data_ptr() if isinstance(a, torch.Tensor) else 0 for a in args]


def recent(found: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], most: int) -> Value:
    """What is found by the key, made where there is nothing: then what was not asked for longest goes."""
    if key not in found:
        found[key] = make()
        if len(found) > most:
            found.popitem(last=False)
    found.move_to_end(key)
    return found[key]


def _looking(norms: folding.Ahead, run: Run, given: Sequence[Any]) -> Any:
    with norms.looking():
        return run(*given)


def version(t: torch.Tensor) -> int:
    """Tensors of the inference mode have none; from them nothing is kept."""
    try:
        return t._version
    except RuntimeError:
        return 0


def _kept_of(args: Sequence[Any]) -> list[Any]:
    given = [a for a in args if isinstance(a, torch.Tensor)]
    return [folding.kept_for(a) for a in given] + [
        entry for a in given for entry in list(derived.kept.get(a, {}).values())]  # gone graphs take theirs
