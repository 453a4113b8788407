"""An operator: one traced expression, run on whatever device its tensors are on.

The flow of a call: key (dtypes, shapes, strides, device) -> plan, built once -> launch.
"""

from __future__ import annotations

import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fusionrt import guards, layout, random, rehearsal, settling
from fusionrt.arguments import BEYOND, as_float
from fusionrt.array import check_dense, converted, is_foreign
from fusionrt.autograd import Dispatched
from fusionrt.definition import SCALAR, Definition
from fusionrt.dtypes import HALVES, STORAGE
from fusionrt.expr import cast
from fusionrt.graph import substitute, toposort
from fusionrt.laid import in_memory, is_lazy
from fusionrt.problem import Output, Problem, pack, pose
from fusionrt.properties import kept_property
from fusionrt.sites import Way, alike, keep
from fusionrt.watching import PLAIN, is_recorded, is_watched

if TYPE_CHECKING:
    from fusionrt.recording import Recording

Args = Sequence[Any]
Run = Callable[..., Any]
EXACT = (torch.bool, torch.int16, torch.int32, torch.int64)  # results of integers that float32 may miss
# A number is what a traced graph can hold of an operator.
OPERATORS: weakref.WeakValueDictionary[int, Operator] = weakref.WeakValueDictionary()
_handles = itertools.count()


class Remembered(threading.local):
    """What a thread knows of an operator's calls: a plan's buffers belong to one thread. Of what is asked in
    each call also the last one, and those by the first tensor, as a model calls an op for several shapes in
    turn: to see that a call is like another takes a fifth of the time that a key does."""

    def __init__(self) -> None:
        self.plans: dict[tuple[Any, ...], Run] = {}
        self.misaligned: dict[tuple[Any, ...], Run] = {}
        self.calls: dict[tuple[Any, ...], Way] = {}
        self.site: tuple[bool, guards.Check, Run] | None = None  # of the entry function: see `dispatch.entry`
        self.others: dict[tuple[Any, ...], tuple[bool, guards.Check, Run]] = {}
        self.launches: dict[Run, Way] = {}  # by plan
        self.launched: Way | None = None
        self.others_launched: dict[tuple[Any, ...], Way] = {}
        self.recordings: dict[tuple[Run, tuple[bool, ...]], Recording] = {}


class Operator(Definition):
    """A definition, and the plans of its calls."""

    def __init__(self, *definition: Any) -> None:
        super().__init__(*definition)
        self.local = Remembered()
        self.handle = next(_handles)
        OPERATORS[self.handle] = self
        self.untold: frozenset[int] = frozenset()  # outputs that a call does not give
        self.into: Mapping[int, int] = {}  # output -> the argument whose memory it takes: see `over`
        self._variants: dict[tuple[Any, ...], Operator] = {}
        self.masked: dict[tuple[bool, ...], Any] = {}  # see mask.py
        self.entry_tensors: list[bool] | None = None  # which arguments the entry function takes for tensors

    def __repr__(self) -> str:
        return f"<fusionrt operator {self.name}({', '.join(self.params)})>"

    leaves_mask = False           # a call gives one as well, which its gradients read

    def derived(self, *definition: Any) -> Operator:
        return Operator(*definition)

    def over(self, into: Mapping[int, int]) -> Operator:
        """The same, but output k takes the memory of argument `into[k]`, where that has its shape and dtype
        and elements apart. For `launch`, by whoever owns that argument: autograd is not told."""
        return self._variant("into", dict(into), *into.items())

    def walking(self, order: layout.Ints | None) -> Operator:
        """The same, but walked in this order of dimensions, innermost first: that in which a forward pass
        drew the random numbers that its gradient draws again. None: in an order of its own."""
        return self if order is None or not self.streams else self._variant("order", order, *order)

    def _variant(self, name: str, value: Any, *key: Any) -> Operator:
        made = self._variants.get((name, key))
        if made is None:
            made = copy.copy(self)
            vars(made).update({name: value}, local=Remembered(), _variants={})
            vars(made).pop("digest", None)
            if name == "outputs":  # gradients of others, too
                vars(made).update(_gradients={}, _behind={}, _reads={}, masked={})
            self._variants[name, key] = made
        return made

    # -- calling ---------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Any arguments: torch tensors, other arrays, numbers."""
        watched = is_watched()
        self._refuse_sparse(args)
        if not watched:  # a traced call has symbolic sizes, which a key would make constants
            key = call_key(args)
            known = self.local.calls.get(key)
            if known is not None:
                try:
                    return self._resume(known, args)
                except BEYOND:
                    self.check_types(args)
                    raise
        if any(map(is_foreign, args)):
            return self._call_foreign(args)
        tensors = self.check_types(args)
        if watched or any(type(t) not in PLAIN for t in tensors):
            if torch.compiler.is_dynamo_compiling():
                Dispatched.allow()
            return Dispatched.call(self.handle, *args)
        run = self.way(args)
        if tensors[0].device.type != "meta":
            keep(self.local.calls, key, Way(guards.guard(*tensors), run))
        return run(*args)

    def _resume(self, known: Way, args: Args) -> Any:
        """A kind of call that was made before, but not last: the entry function's next guess."""
        tensors, local = [a for a in args if isinstance(a, torch.Tensor)], self.local
        if not known.check(*tensors):  # made under another dispatch state: autocast, inference mode
            known.check = guards.guard(*tensors)
        of_all = [isinstance(a, torch.Tensor) for a in args] != self.entry_tensors
        check = guards.guard_all(known.check, args) if of_all else known.check
        first = alike(tensors[0])

        def use(run: Run) -> None:
            known.run, local.site = run, (of_all, check, run)
            keep(local.others, first, local.site)

        use(settling.until_settled(known.run, use))
        return known.run(*args)

    def way(self, args: Args, in_this_mode: bool = False) -> Run:
        """The plan, with what a call of these arguments needs beside it: random numbers, a gradient;
        `in_this_mode`: where gradients are recorded as they are now, or not."""
        self._refuse_sparse(args)
        tensors = self.check_types(args)
        streams = bool(self.streams)
        draw = random.drawing(tensors[0].device, self.counters) if streams else None
        if not any(t.requires_grad for t in tensors) or (in_this_mode and not torch.is_grad_enabled()):
            plan = self.plan(args)
            return settling.with_draws(plan, draw, self.counters) if draw else plan
        from fusionrt import recording  # a program without gradients needs none of it
        if in_this_mode and draw is None:
            return recording.recorded(self, args)
        return recording.in_either_mode(self, draw)

    def draw(self, device: torch.device) -> random.Rng:
        return random.draw(device, self.counters)

    @kept_property
    def counters(self) -> int:
        """Philox counters that an element's draws take."""
        return 1 + max(int(s.removeprefix("random")) for s in self.streams)

    def apply(self, args: Args, rng: random.Rng | None) -> Any:
        """Run with given random numbers, and record a gradient if one will be needed."""
        if is_recorded(*args):
            from fusionrt.recording import recording_of
            return recording_of(self, args).apply(*args, *((rng,) if self.streams else ()))
        return self.launch(args, rng)

    def launch(self, args: Args, rng: random.Rng | None = None) -> Any:
        """Run, without autograd: a tensor, or a tuple of several."""
        last = self.local.launched
        is_like_last = last is not None and not rehearsal.is_on() and last.check(*args)
        plan = last.run if last is not None and is_like_last else self._found(args)
        return plan(*args, rng) if self.streams else plan(*args)

    def _found(self, args: Args) -> Run:
        """The plan; of one that was found before, also by which to begin at the next launch, and at later
        ones with such a first tensor."""
        tensors, local = [a for a in args if isinstance(a, torch.Tensor)], self.local
        other = local.others_launched.get(alike(tensors[0]))
        if other is not None and not rehearsal.is_on() and other.check(*args):
            local.launched = other
            return other.run
        plan = self.plan(args)
        known = local.launches.get(plan)
        if known is None:
            keep(local.launches, plan, Way(guards.guard_all(guards.guard(*tensors), args), plan).counting())
            return plan
        local.launched = known
        keep(local.others_launched, alike(tensors[0]), known)
        return known.run

    def plan(self, args: Args) -> Run:
        """A callable of the arguments (and random numbers), made once for each kind of call."""
        key = call_key(args)
        plan = self.local.plans.get(key)
        if plan is None or rehearsal.is_on():
            plan = self._plan(args, 16)
            keep(self.local.plans, key, plan)
        return plan

    def _resolving(self, *args: Any) -> Any:
        n = len(self.params)
        resolved = [in_memory(a) if isinstance(a, torch.Tensor) else a for a in args[:n]]
        return self.launch(resolved, *args[n:])

    def _call_foreign(self, args: Args) -> Any:
        tensors, restore = converted(self.name, dict(zip(self.params, args, strict=True)))
        out = self(*tensors)
        return tuple(map(restore, out)) if isinstance(out, tuple) else restore(out)

    # -- checks ----------------------------------------------------------------------------------

    def _refuse_sparse(self, args: Args) -> None:
        """Nested ones too: neither have the strides by which calls are known."""
        for name, a in zip(self.params, args, strict=True):
            if isinstance(a, torch.Tensor):
                check_dense(self.name, name, a)

    def check_types(self, args: Args) -> list[torch.Tensor]:
        tensors = []
        for name, a in zip(self.params, args, strict=True):
            if isinstance(a, torch.Tensor):
                tensors.append(a)
            elif isinstance(a, (torch.SymInt, torch.SymFloat)):  # of a tracer's sizes, which stay open
                continue
            elif not isinstance(a, (int, float)):
                raise TypeError(f"{self.name}: {name} must be a tensor, an array or a number, "
                                f"got {type(a).__name__}")
            else:
                as_float(self.name, name, a)  # those beyond float64 are refused
        if not tensors:
            raise TypeError(f"{self.name}: at least one argument must be a tensor or an array, got "
                            + ", ".join(f"{n}={type(a).__name__}"
                                        for n, a in zip(self.params, args, strict=True)))
        return tensors

    def check(self, args: Args) -> tuple[layout.Ints, torch.device]:
        """The broadcast shape and the one device; raises before anything is written."""
        named = [(n, a) for n, a in zip(self.params, args, strict=True) if isinstance(a, torch.Tensor)]
        device = named[0][1].device
        # What is only memory for a result may be of the host, whose memory a GPU's kernel reaches.
        memory = {self.params[at] for at in self.into.values() if f"a{at}" not in self.used}
        for name, t in named:
            if t.dtype not in STORAGE:
                raise TypeError(f"{self.name}: {name} has dtype {t.dtype}; supported are "
                                + ", ".join(STORAGE.values()))
            check_dense(self.name, name, t)
            if t.device != device and name not in memory:
                raise ValueError(f"{self.name}: all tensors must be on one device, got "
                                 + ", ".join(f"{n} on {t.device}" for n, t in named))
        if device.type not in ("cuda", "cpu", "meta"):
            raise ValueError(f"{self.name}: {named[0][0]} must be on a CUDA device or the CPU, got {device}")
        for k, (name, a) in enumerate(zip(self.params, args, strict=True)):
            kind = getattr(a, "dtype", type(a))
            if f"a{k}" in self.flags and kind not in (torch.bool, bool):
                raise TypeError(f"{self.name}: {name} is joined by &, | or ~, which take conditions: it must "
                                f"be bool, got {kind}; bits cannot be fused")
        shape = layout.broadcast_shapes([t.shape for _, t in named])
        if shape is None:
            names = [n for n, _ in named]
            raise ValueError(f"{self.name}: {', '.join(names[:-1])} and {names[-1]} must broadcast, got "
                             + " and ".join(str(tuple(t.shape)) for _, t in named))
        return shape, device

    def output_dtypes(self, args: Args) -> list[torch.dtype]:
        promoted = promoted_dtype(args)
        dtypes = []
        for root, target in zip(self.outputs, self.targets, strict=True):
            if isinstance(target, int):
                dtypes.append(args[target].dtype)
            elif root.is_truth:
                dtypes.append(torch.bool)
            elif root.op.startswith("cast_"):
                dtypes.append(getattr(torch, root.op.removeprefix("cast_")))
            elif promoted.is_floating_point:
                dtypes.append(promoted)
            else:
                raise TypeError(f"{self.name}: needs a floating-point tensor, got only " + ", ".join(
                    f"{n} of {a.dtype}" for n, a in zip(self.params, args, strict=True)
                    if isinstance(a, torch.Tensor)) + "; convert one with .float()")
        return dtypes

    # -- outputs ---------------------------------------------------------------------------------

    def output_shapes(self, args: Args, shape: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(args[target].shape) if isinstance(target, int) else () if target == SCALAR else
                tuple(shape) for target in self.targets]

    def allocate(self, args: Args, shape: Sequence[int]) -> list[torch.Tensor]:
        """The outputs. A full one has the layout of the first argument of full shape (so channels_last
        stays), or that of a given order; a reduced one, or one that no argument has the shape of, is
        contiguous."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        model = next((t for t in tensors if layout.leads(t.shape, t.stride(), shape)), None)
        outputs = []
        each = zip(self.output_dtypes(args), self.output_shapes(args, shape), strict=True)
        for k, (dtype, size) in enumerate(each):
            taken = self.taken(k, args, dtype, size)
            if taken is not None:
                outputs.append(args[taken])
            elif self.order is not None and size == tuple(shape):
                outputs.append(torch.empty_strided(size, layout.ordered(size, self.order), dtype=dtype,
                                                   device=tensors[0].device))
            elif model is None or size != tuple(shape):
                outputs.append(torch.empty(size, dtype=dtype, device=tensors[0].device))
            else:
                outputs.append(torch.empty_like(model, dtype=dtype))
        return outputs

    def taken(self, k: int, args: Args, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
        """The argument whose memory output k takes, if it takes one."""
        at = self.into.get(k)
        return at if at is not None and args[at].dtype == dtype and layout.leads(
            args[at].shape, args[at].stride(), shape) else None

    # -- plans -----------------------------------------------------------------------------------

    def _plan(self, args: Args, alignment: int) -> Run:
        shape, _ = self.check(args)
        if any(isinstance(a, torch.Tensor) and is_lazy(a) for a in args):
            return lambda *args: self._resolving(*args)  # an object of its own for each kind of call
        outputs = self.allocate(args, shape)
        if 0 in shape:
            return lambda *args: self._given(
                [o.zero_() for o in self.allocate(args[:len(self.params)], shape)])
        return self._of_what_is_written(outputs).build(args, shape, outputs, alignment)

    def _given(self, outputs: Sequence[torch.Tensor]) -> Any:
        return pack([o for k, o in enumerate(outputs) if k not in self.untold])

    def _of_what_is_written(self, outputs: Sequence[torch.Tensor]) -> Operator:
        """The same, but what follows from an output of 16 bits (the norm of a sum with a residual) is of its
        rounded values: a gradient reads those, and far from 0 the exact ones have other statistics."""
        inner = {a for root in self.outputs for n in toposort([root]) for a in n.args}
        rounded = {root: cast(root, o.dtype) for root, o, target in zip(
            self.outputs, outputs, self.targets, strict=True)
            if target is None and root in inner and not root.uniform and o.dtype in HALVES
            and not root.op.startswith("cast_")}
        if not rounded:
            return self
        roots = tuple(substitute(self.outputs, rounded))
        return self._variant("outputs", roots, *roots)

    def build(self, args: Args, shape: layout.Ints, outputs: Sequence[torch.Tensor], alignment: int
              ) -> Run:
        order = self.walk(args, shape, outputs)
        made = [self.output(k, o, args, shape, order) for k, o in enumerate(outputs)]
        promoted = promoted_dtype(args)
        exact = any(o.dtype in EXACT for o in outputs) and not promoted.is_floating_point
        double = exact or any(o.dtype == torch.float64 for o in outputs) or promoted in (
            torch.float64, torch.int32, torch.int64)  # integers as exact as can be
        return self.compile(args, shape, pose(self.name, args, shape, order, made, double), made, alignment)

    def output(self, k: int, o: torch.Tensor, args: Args, shape: layout.Ints, order: Sequence[int]) -> Output:
        """Output k, to be allocated as `o` is."""
        reduced = self.targets[k] is not None and bool(layout.missing(o.shape, shape))
        over = (layout.reduced_strides(o.shape, shape, order) if reduced else
                layout.expand_strides(o.shape, o.stride(), shape))
        return Output(self.outputs[k], o.dtype, tuple(o.shape), o.stride(), over, reduced,
                      self.taken(k, args, o.dtype, o.shape))

    def walk(self, args: Args, shape: layout.Ints, outputs: Sequence[torch.Tensor]) -> Sequence[int]:
        """Dimensions in the order in which elements are walked, innermost first."""
        return memory_order(args, shape, outputs) if self.order is None else self.order

    def drawn(self, args: Args, outputs: Sequence[torch.Tensor]) -> layout.Ints | None:
        """The walk of a call that drew random numbers, an element's by its place in that walk."""
        if not self.streams:
            return None
        shape = layout.broadcast_shapes([a.shape for a in args if isinstance(a, torch.Tensor)])
        assert shape is not None
        try:
            return tuple(self.walk(args, shape, outputs))
        except RuntimeError as error:  # of a traced program whose sizes follow from values
            if type(error).__name__ != "GuardOnDataDependentSymNode":
                raise
            return None

    def compile(self, args: Args, shape: layout.Ints, problem: Problem, outputs: Sequence[Output],
                alignment: int) -> Run:
        """A callable of the arguments (and random numbers) on the device that they are on."""
        device = next(a.device for a in args if isinstance(a, torch.Tensor))
        if device.type == "meta":
            rehearsal.note(problem)
            return lambda *args: self._given(self.allocate(args[:len(self.params)], shape))
        if device.type == "cpu":
            from fusionrt.cpu import build
            return build(problem, outputs, len(args))
        from fusionrt.runtime import launch
        return launch.build(launch.Call(problem, outputs, len(args), device.index), alignment,
                            self.misaligned)

    def misaligned(self, *args: Any) -> Any:
        """The same call for pointers that are not multiples of 16 bytes."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        alignment = min((t.data_ptr() & -t.data_ptr() for t in tensors if t.data_ptr()), default=16)
        key = (alignment, *call_key(args[:len(self.params)]))
        plan = self.local.misaligned.get(key)
        if plan is None:
            plan = self._plan(args[:len(self.params)], min(8, alignment))
            keep(self.local.misaligned, key, plan)
        return plan(*args)


def promoted_dtype(args: Args) -> torch.dtype:
    """As torch's: tensors with dimensions outrank those without, unless these are of a higher kind."""
    ranks: dict[bool, torch.dtype] = {}
    for a in args:
        if isinstance(a, torch.Tensor):
            has_dim = a.dim() > 0
            ranks[has_dim] = torch.promote_types(ranks.get(has_dim, a.dtype), a.dtype)
    wide, zero = ranks.get(True), ranks.get(False)
    dtype = wide or zero
    if wide is not None and zero is not None and _rank(zero) > _rank(wide):
        dtype = torch.promote_types(wide, zero)
    assert dtype is not None
    return dtype


def _rank(dtype: torch.dtype) -> int:
    """Of kinds of numbers: truth values, integers, floating-point."""
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


def call_key(args: Args) -> tuple[Any, ...]:
    """All that a plan depends on."""
    key: list[Any] = []
    for a in args:
        if isinstance(a, torch.Tensor):
            key += (type(a), a.shape, a.dtype, a.stride(), a.device, a.requires_grad, is_lazy(a))
        else:
            key.append(type(a))
    return tuple(key)


def memory_order(args: Args, shape: layout.Ints, outputs: Sequence[torch.Tensor]) -> list[int]:
    """Dimensions in the order of memory, innermost first: of the outputs of full shape, or else of what they
    would be."""
    full = next((o for o in outputs if tuple(o.shape) == shape), None)
    model = next((a for a in args if isinstance(a, torch.Tensor) and layout.leads(
        a.shape, a.stride(), shape)), None)
    if full is not None:
        strides = tuple(full.stride())
    elif model is not None:
        strides = tuple(torch.empty_like(model, device="meta").stride())
    else:
        strides = layout.contiguous(shape)
    return layout.memory_order(shape, strides)
