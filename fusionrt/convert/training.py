"""CUDA graphs of training: the forward pass of a captured graph is one replay, its backward pass another.

The first calls run as they are, and are watched: who differentiates a pass twice, or its gradients, is left
to torch. Then both passes are captured, in memory of their own, where what the forward pass saves lies until
the backward pass. So a forward pass whose predecessor may still be differentiated runs as it is.

Gradients of parameters are not copied: `.grad` is the memory that the graphs write, the forward pass too. A
parameter that still has its `.grad` then (whoever accumulates) gets a copy of what was there. A step before
which others hold gradients of the last one runs as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from fusionrt.convert import cuda_graphs, replay
from fusionrt.convert.effects import value
from fusionrt.convert.purity import draws
from fusionrt.tape import no_hooks
from fusionrt.watching import is_watched

Run = Callable[..., Any]
WATCHED = 2  # calls, before one is captured
KEPT = 4     # sets of weights
_use_count: Callable[[int], int] = torch._C._storage_Use_Count


def trained(gm: GraphModule, run: Run, written: Sequence[int]) -> Run:
    """`run`, by replays where that gives the same. `written`: inputs that the graph writes to."""
    device, roles = replay.device_of_graph(gm), replay.roles_of(gm, written)
    if device is None or not replay.is_repeatable(gm) or not _trains(gm, roles):
        return run
    return Training(run, device, roles, any(map(draws, gm.graph.nodes)))


def _trains(gm: GraphModule, roles: replay.Roles) -> bool:
    """Whether sizes are known, and what is written to is a buffer of a module."""
    inputs = [value(n) for n in gm.graph.nodes if n.op == "placeholder"]
    return (not roles.vary and not roles.sources and set(roles.written) <= set(roles.weights)
            and not any(inputs[k].requires_grad for k in roles.written))


class Passes(NamedTuple):
    """What was captured. Inputs by their places: `buffers`, which are copied, and `leaves`, which get
    gradients; `recorded`: outputs that can be differentiated; `seeds`: the gradients of those that are. (Of 0
    for the others gradients would be NaN where a derivative is infinite.)"""

    forward: Any  # torch.cuda.CUDAGraph
    backward: Any
    buffers: dict[int, torch.Tensor]
    outputs: Sequence[Any]
    results: Callable[[], tuple[Any, ...]]
    recorded: Sequence[int]
    seeds: dict[int, torch.Tensor]
    leaves: Sequence[int]
    grads: Sequence[torch.Tensor | None]
    holders: Sequence[int]  # how many hold each gradient's memory if nobody else does
    reached: dict[int, list[bool]]  # which leaves each of several outputs is computed from

    def behind(self, given: Sequence[int]) -> list[bool]:
        """The leaves that these outputs are computed from."""
        if not self.reached:
            return [True] * len(self.leaves)
        return [any(self.reached[k][n] for k in given) for n in range(len(self.leaves))]


class Step:
    """One forward pass: alive as long as it may be differentiated."""

    done = False


class Model:
    """One set of weights."""

    def __init__(self) -> None:
        self.calls, self.is_left_alone = 0, False
        self.differentiated: set[int] = set()  # outputs of the calls that were watched
        self.passes: Passes | None = None
        self.last: Callable[[], Step | None] = lambda: None

    def is_pending(self) -> bool:
        step = self.last()
        return step is not None and not step.done

    def watch(self, outputs: Any) -> Any:
        """Look at how a call that runs as it is will be differentiated; it should be in one backward pass."""
        seen = set()

        def noted(k: int, grad: torch.Tensor) -> None:
            seen.add(torch._C._current_graph_task_id())
            self.differentiated.add(k)
            self.is_left_alone |= torch.is_grad_enabled() or len(seen) > 1

        for k, out in _recorded(outputs).items():
            out.register_hook(functools.partial(noted, k))
        return outputs


class Training:
    """What a graph whose calls record gradients becomes: a function of its inputs."""

    def __init__(self, run: Run, device: torch.device, roles: replay.Roles, draws: bool = False) -> None:
        self.run, self.device, self.roles, self.draws = run, device, roles, draws
        self.weights = replay.picked(roles.weights)
        self.models: OrderedDict[tuple[Any, ...], Model] = OrderedDict()

    def __call__(self, *args: Any) -> Any:
        if (torch.cuda.is_current_stream_capturing() or is_watched() or not torch.is_grad_enabled()
                or not no_hooks()):  # a checkpoint's would call this again, while it is captured
            return self.run(*args)
        turn = cuda_graphs.turn_of(self.device)
        with turn.lock, cuda_graphs.current(self.device):
            kind = self.weights(replay.places_of(args)), cuda_graphs.settings()
            model = replay.recent(self.models, kind, Model, KEPT)
            model.calls += 1
            if model.is_left_alone or model.is_pending():
                return self.run(*args)
            if model.passes is None:
                if model.calls <= WATCHED:
                    return model.watch(self.run(*args))
                model.passes = self._capture(args, turn, model.differentiated)
                model.is_left_alone = model.passes is None
            if model.passes is None or _held(model.passes, args):
                return self.run(*args)
            turn.after_others()
            _spare(model.passes, args)
            return tuple(Replayed.apply(self, model, *args))

    def _capture(self, args: Sequence[Any], turn: cuda_graphs.Turn, wanted: set[int]) -> Passes | None:
        """None where that cannot be done, which only trying tells. `wanted`: outputs that are differentiated,
        all if it is empty."""
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        turn.after_others()
        try:
            turn.forget()
            with turn.aside(), cuda_graphs.casting_anew():
                buffers = {k: cuda_graphs.buffer_like(a) for k, a in enumerate(args)
                           if k not in self.roles.weights and isinstance(a, torch.Tensor)}
                # Hooks of the parameters are not part of a graph: these have none.
                given = [_leaf(buffers.get(k, a), a) for k, a in enumerate(args)]
                leaves = list(_recorded(given))
                reached = self._warm_up(args, given, buffers)
                with turn.capturing(), cuda_graphs.growing_segments():
                    outputs = cuda_graphs.into(forward, pool, lambda: self.run(*given))
                    recorded = _recorded(outputs)
                    seeds = {k: torch.empty_like(o) for k, o in recorded.items() if k in (wanted or recorded)}
                    grads = cuda_graphs.into(backward, pool, lambda: _gradients(outputs, given, seeds))
                if any(grad is not None and grad.layout is not torch.strided for grad in grads):
                    raise RuntimeError("a gradient has no memory that stays where it is")
        except RuntimeError:  # a call that no graph can hold, or no memory for it
            turn.recover()
            return None
        outputs = [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs]
        return Passes(forward, backward, buffers, outputs, cuda_graphs.copies_of(outputs), list(recorded),
                      seeds, leaves, grads, list(map(_holders, grads)), reached)

    def again(self, passes: Passes, args: Sequence[Any], grads: Sequence[torch.Tensor | None]
              ) -> list[torch.Tensor | None]:
        """The gradients of a step of which other results are differentiated than of those before: of a call
        that runs as it is, from what its forward pass was replayed with."""
        given = [_leaf(passes.buffers.get(k, a), a) for k, a in enumerate(args)]
        with torch.enable_grad(), replay.unchanged([args[k] for k in self.roles.written]):
            outputs = self.run(*given)
            found = _gradients(outputs, given, {k: g for k, g in enumerate(grads) if g is not None})
        of_leaves = dict(zip(_recorded(given), found, strict=True))
        return [of_leaves.get(k) for k in range(len(args))]

    def _warm_up(self, args: Sequence[Any], given: Sequence[Any], buffers: Iterable[int]
                 ) -> dict[int, list[bool]]:
        """One step, of all gradients, some of which callers may not have asked for: kernels are loaded. What
        it has written to is as it was, and so are generators. Returns which leaves each of several outputs is
        computed from."""
        with torch.no_grad():
            for k in buffers:
                given[k].copy_(args[k])
        generators = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [], self.draws)
        with generators, replay.unchanged([args[k] for k in self.roles.written]):
            outputs = self.run(*given)
            seeds = {k: torch.zeros_like(o) for k, o in _recorded(outputs).items()}
            several = len(seeds) > 1
            _gradients(outputs, given, seeds, several)
            reached = {k: [grad is not None for grad in _gradients(outputs, given, {k: seed}, several)]
                       for k, seed in seeds.items() if several}
        del outputs, seeds
        torch.cuda.empty_cache()  # what it and the calls before have left is what the graphs will need
        return reached


def _recorded(values: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Those with a gradient, by their places."""
    return {k: v for k, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad}


def _gradients(outputs: Sequence[Any], given: Sequence[Any], seeds: Mapping[int, torch.Tensor],
               retain_graph: bool = False) -> Sequence[torch.Tensor | None]:
    """By the thread that asks: that of torch's engine may be in the backward pass of another model, which
    waits for the turn that the asking one has."""
    with torch.autograd.set_multithreading_enabled(False):
        return torch.autograd.grad([outputs[k] for k in seeds], list(_recorded(given).values()),
                                   list(seeds.values()), retain_graph=retain_graph, allow_unused=True)


def _leaf(tensor: Any, like: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.detach().requires_grad_(like.requires_grad)


def _holders(grad: torch.Tensor | None) -> int:
    return 0 if grad is None else _use_count(grad.untyped_storage()._cdata)


def _held(passes: Passes, args: Sequence[Any]) -> bool:
    """Whether others than the parameters hold gradients of the last step."""
    return any(_holders(grad) > before + _is_of(args[k], grad)
               for k, grad, before in zip(passes.leaves, passes.grads, passes.holders, strict=True))


def _spare(passes: Passes, args: Sequence[Any]) -> None:
    """Parameters' gradients out of the memory that the next step writes to: they will be added to."""
    for k, grad in zip(passes.leaves, passes.grads, strict=True):
        if _is_of(args[k], grad):
            own = args[k].grad  # the same object, which others may have by now
            own.data = own.detach().clone()


def _is_of(parameter: torch.Tensor, grad: torch.Tensor | None) -> bool:
    """Whether this is the memory of its `.grad`."""
    own = parameter.grad if parameter.is_leaf else None
    return own is not None and grad is not None and own.data_ptr() == grad.data_ptr()


class Replayed(torch.autograd.Function):
    """One step."""

    @staticmethod
    def forward(ctx: Any, training: Training, model: Model, *args: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)  # what only results without a gradient are computed from has none
        passes: Any = model.passes
        for k, buffer in passes.buffers.items():
            buffer.copy_(args[k])
        passes.forward.replay()
        ctx.device, ctx.passes, ctx.step = training.device, passes, Step()
        if len(passes.seeds) < len(passes.recorded):
            ctx.again, ctx.draws = functools.partial(training.again, passes, args), training.draws
        ctx.inputs = [args[k] for k in passes.leaves]
        ctx.sources = [args[k] for k in passes.leaves if k not in passes.buffers]
        ctx.versions = list(map(replay.version, ctx.sources)), replay.places_of(ctx.sources)
        model.last = weakref.ref(ctx.step)
        results: tuple[Any, ...] = passes.results()
        ctx.mark_non_differentiable(*(r for k, r in enumerate(results)
                                      if isinstance(r, torch.Tensor) and k not in passes.recorded))
        ctx.model = weakref.ref(model)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        passes, step, model = ctx.passes, ctx.step, ctx.model()
        others = any(grads[k] is not None for k in passes.recorded if k not in passes.seeds)
        if (step.done or torch.is_grad_enabled() or others) and model is not None:
            model.is_left_alone, model.passes = True, None
        if step.done or torch.is_grad_enabled() or (others and ctx.draws):
            how = ("only through the results that the first calls were" if others else
                   "once, without create_graph")
            raise RuntimeError(
                "fusionrt: this forward pass was a replay of a CUDA graph, which can be differentiated "
                f"{how}. The next calls of the model will be none; nor are those of "
                "torch.compile(model, backend=\"fusionrt\", options={\"cuda_graphs\": False})")
        if ctx.versions != (list(map(replay.version, ctx.sources)), replay.places_of(ctx.sources)):
            raise RuntimeError("fusionrt: a parameter needed for a gradient has been modified by an inplace "
                               "operation between the forward and the backward pass, or lies elsewhere since")
        if others:
            step.done = True
            return None, None, *ctx.again(grads)
        turn = cuda_graphs.turn_of(ctx.device)
        with turn.lock, cuda_graphs.current(ctx.device):
            turn.after_others()
            for k, seed in passes.seeds.items():
                grad = grads[k]
                seed.zero_() if grad is None else seed.copy_(grad)
            passes.backward.replay()
            step.done = True
        found: list[Any] = [None] * len(ctx.needs_input_grad)
        behind = passes.behind([k for k in passes.seeds if grads[k] is not None])
        for k, parameter, grad, before, is_behind in zip(passes.leaves, ctx.inputs, passes.grads,
                                                         passes.holders, behind, strict=True):
            if grad is not None and is_behind:
                alone = parameter.is_leaf and k not in passes.buffers and _holders(grad) == before
                found[2 + k] = grad.detach() if alone else grad.clone()
        return tuple(found)
