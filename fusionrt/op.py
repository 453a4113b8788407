"""An operator: one traced expression, run on whatever device its tensors are on.

The flow of a call: key (dtypes, shapes, strides, device) -> plan, built once -> launch. Gradients
are operators again: the same expression differentiated, with every gradient of a broadcast operand
summed to that operand's shape. That class is closed under differentiation, so second and higher
derivatives need nothing more.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fusionrt import dispatch, layout, random
from fusionrt.array import is_foreign, to_torch
from fusionrt.autograd import is_watched, record
from fusionrt.expr import Expr, argument, emit, gradients, leaves, substitute, through_output
from fusionrt.problem import Operand, Problem, Result

Args = Sequence[Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STORAGE = {getattr(torch, name): name for name in (
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")}
PLAIN = (torch.Tensor, torch.nn.Parameter)
_collected: contextvars.ContextVar[list[Problem] | None] = contextvars.ContextVar("collected", default=None)
_meta_means: contextvars.ContextVar[str] = contextvars.ContextVar("meta_means", default="cuda")
# A number is what a traced graph can hold of an operator.
OPERATORS: weakref.WeakValueDictionary[int, Operator] = weakref.WeakValueDictionary()
_handles = itertools.count()
_PLANS_KEPT = 4096  # a thread; with more shapes than that alive, plans are built anew


class Operator:
    """`outputs` are expressions over `a0`, `a1`, ...; output k is summed to the shape of argument
    `targets[k]` and takes its dtype, or has the full shape and the promoted dtype (None)."""

    def __init__(self, name: str, params: Sequence[str], outputs: Sequence[Expr],
                 targets: Sequence[int | None] | None = None) -> None:
        self.name, self.params, self.outputs = name, tuple(params), tuple(outputs)
        self.targets = tuple(targets) if targets else (None,) * len(self.outputs)
        self.used = frozenset(leaves(self.outputs, "arg"))
        self.streams = tuple(dict.fromkeys(leaves(self.outputs, "random")))
        self.local = threading.local()  # plans: a plan's buffers belong to one thread
        self.handle = next(_handles)
        OPERATORS[self.handle] = self
        self._gradients: dict[tuple[bool, ...], Operator] = {}
        self._reads: dict[tuple[bool, ...], tuple[tuple[bool, ...], bool]] = {}
        self.reads_output = False  # of a gradient: the output is among its arguments

    def __repr__(self) -> str:
        return f"<fusionrt operator {self.name}({', '.join(self.params)})>"

    @functools.cached_property
    def digest(self) -> str:
        """Of what is computed; two operators of one name may differ."""
        text = repr((emit(self.outputs, "{} = {}"), self.targets))
        return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()

    # -- calling ---------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Any:
        """Any arguments: torch tensors, other arrays, numbers."""
        watched = is_watched()
        if not watched:  # a traced call has symbolic sizes, which a key would make constants
            key = call_key(args)
            site = self.local.__dict__.setdefault("sites", {}).get(key)
            if site is not None:
                return self._resume(key, site, args)
        if any(map(is_foreign, args)):
            return self._call_foreign(args)
        tensors = self._check_types(args)
        if watched or any(type(t) not in PLAIN for t in tensors):
            from fusionrt import library
            return library.call(self.handle, *args)
        plan = self.plan(args)
        run = self._run(plan, args)
        if tensors[0].device.type != "meta":
            if len(self.local.sites) >= _PLANS_KEPT:
                self.local.sites.clear()
            self.local.sites[key] = dispatch.guard(*tensors), run
        return run(*args)

    def _resume(self, key: tuple[Any, ...], site: tuple[Any, Any], args: Args) -> Any:
        """A kind of call that was made before, but not last: the entry function's next guess."""
        check, run = site
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if not check(*tensors):  # made under another dispatch state: autocast, inference mode
            site = self.local.sites[key] = dispatch.guard(*tensors), run
        self.local.site = site
        return run(*args)

    def _run(self, plan: Callable[..., Any], args: Args) -> Callable[..., Any]:
        """The plan, with what a call of these arguments needs beside it: random numbers, a gradient."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        device, streams = tensors[0].device, bool(self.streams)
        if not any(t.requires_grad for t in tensors):
            return (lambda *args: plan(*args, self.draw(device))) if streams else plan

        def recorded(*args: Any) -> Any:
            rng = self.draw(device) if streams else None
            if torch.is_grad_enabled():
                return record(self, plan, rng, *args)
            return plan(*args, rng) if streams else plan(*args)

        return recorded

    def draw(self, device: torch.device) -> random.Rng:
        return random.draw(device, self.counters)

    @functools.cached_property
    def counters(self) -> int:
        """Philox counters that an element's draws take."""
        return 1 + max(int(s.removeprefix("random")) for s in self.streams)

    def apply(self, args: Args, rng: random.Rng | None) -> Any:
        """Run with given random numbers, and record a gradient if one will be needed."""
        plan = self.plan(args)
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return record(self, plan, rng, *args)
        return plan(*args, rng) if self.streams else plan(*args)

    def launch(self, args: Args, rng: random.Rng | None = None) -> Any:
        """Run, without autograd: a tensor, or a tuple of several."""
        plan = self.plan(args)
        return plan(*args, rng) if self.streams else plan(*args)

    def plan(self, args: Args) -> Callable[..., Any]:
        """A callable of the arguments (and random numbers), made once for each kind of call."""
        plans = self.local.__dict__.setdefault("plans", {})
        key = call_key(args)
        plan = plans.get(key)
        if plan is None or _collected.get() is not None:
            if len(plans) >= _PLANS_KEPT:
                plans.clear()
            plan = plans[key] = self._plan(args, 16)
        return plan

    def _resolving(self, *args: Any) -> Any:
        """torch negates some views lazily (`z.conj().imag`): kernels read memory as it is."""
        n = len(self.params)
        resolved = [a.resolve_neg() if isinstance(a, torch.Tensor) else a for a in args[:n]]
        return self.launch(resolved, *args[n:])

    def _call_foreign(self, args: Args) -> Any:
        converted, restore = [], None
        for name, a in zip(self.params, args, strict=True):
            if is_foreign(a):
                a, back = to_torch(a, self.name, name)
                restore = restore or back
            converted.append(a)
        out = self(*converted)
        if restore is None or any(isinstance(a, torch.Tensor) for a in args):
            return out  # among other arrays torch's tensors decide: they may need a gradient
        return tuple(map(restore, out)) if isinstance(out, tuple) else restore(out)

    # -- checks ----------------------------------------------------------------------------------

    def _check_types(self, args: Args) -> list[torch.Tensor]:
        tensors = []
        for name, a in zip(self.params, args, strict=True):
            if isinstance(a, torch.Tensor):
                tensors.append(a)
            elif not isinstance(a, int | float):
                raise TypeError(f"{self.name}: {name} must be a tensor, an array or a number, "
                                f"got {type(a).__name__}")
        if not tensors:
            raise TypeError(f"{self.name}: at least one argument must be a tensor or an array, got "
                            + ", ".join(f"{n}={type(a).__name__}"
                                        for n, a in zip(self.params, args, strict=True)))
        return tensors

    def check(self, args: Args) -> tuple[layout.Ints, torch.device]:
        """The broadcast shape and the one device; raises before anything is written."""
        named = [(n, a) for n, a in zip(self.params, args, strict=True) if isinstance(a, torch.Tensor)]
        device = named[0][1].device
        for name, t in named:
            if t.dtype not in STORAGE:
                raise TypeError(f"{self.name}: {name} has dtype {t.dtype}; supported are "
                                + ", ".join(STORAGE.values()))
            if t.layout != torch.strided:
                raise TypeError(f"{self.name}: {name} must be a dense tensor, got {t.layout}")
            if t.device != device:
                raise ValueError(f"{self.name}: all tensors must be on one device, got "
                                 + ", ".join(f"{n} on {t.device}" for n, t in named))
        if device.type not in ("cuda", "cpu", "meta"):
            raise ValueError(f"{self.name}: {named[0][0]} must be on a CUDA device or the CPU, got {device}")
        shape = layout.broadcast_shapes([t.shape for _, t in named])
        if shape is None:
            names = [n for n, _ in named]
            raise ValueError(f"{self.name}: {', '.join(names[:-1])} and {names[-1]} must broadcast, got "
                             + " and ".join(str(tuple(t.shape)) for _, t in named))
        return shape, device

    def compute_dtype(self, args: Args) -> torch.dtype:
        """The promoted dtype, as torch's: tensors with dimensions outrank those without."""
        ranks: dict[bool, torch.dtype] = {}
        for a in args:
            if isinstance(a, torch.Tensor):
                has_dim = a.dim() > 0
                ranks[has_dim] = torch.promote_types(ranks.get(has_dim, a.dtype), a.dtype)
        wide, zero = ranks.get(True), ranks.get(False)
        dtype = wide or zero
        if wide is not None and zero is not None and zero.is_floating_point and not wide.is_floating_point:
            dtype = torch.promote_types(wide, zero)
        assert dtype is not None
        return dtype

    def output_dtypes(self, args: Args) -> list[torch.dtype]:
        promoted = self.compute_dtype(args)
        dtypes = []
        for root, target in zip(self.outputs, self.targets, strict=True):
            if target is not None:
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

    def allocate(self, args: Args, shape: Sequence[int]) -> list[torch.Tensor]:
        """The outputs. A full one has the layout of the first argument of full shape (so channels_last
        stays); a reduced one, or one that no argument has the shape of, is contiguous."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        model = next((t for t in tensors if _leads(t, shape)), None)
        outputs = []
        for dtype, target in zip(self.output_dtypes(args), self.targets, strict=True):
            size = tuple(shape) if target is None else args[target].shape
            if model is None or size != tuple(shape):
                outputs.append(torch.empty(size, dtype=dtype, device=tensors[0].device))
            else:
                outputs.append(torch.empty_like(model, dtype=dtype))
        return outputs

    # -- plans -----------------------------------------------------------------------------------

    def problem(self, args: Args, shape: layout.Ints, outputs: Sequence[torch.Tensor]) -> tuple[
            Problem, list[layout.Ints]]:
        """The kernel to build, and each output's strides over the uncollapsed domain."""
        full = next((o for o in outputs if tuple(o.shape) == shape), None)
        walk = full.stride() if full is not None else _reference_strides(args, shape)
        order = layout.memory_order(shape, walk)
        inputs = [(i, a) for i, a in enumerate(args) if isinstance(a, torch.Tensor) and f"a{i}" in self.used]
        over = [layout.expand_strides(a.shape, a.stride(), shape) for _, a in inputs]
        reduced = [target is not None and any(
            n != 1 and (d < len(shape) - o.dim() or o.shape[d - len(shape) + o.dim()] == 1)
            for d, n in enumerate(shape)) for target, o in zip(self.targets, outputs, strict=True)]
        out_over = [layout.reduced_strides(o.shape, shape, order) if r else
                    layout.expand_strides(shape, walk, shape)
                    for o, r in zip(outputs, reduced, strict=True)]
        domain = layout.collapse(shape, order, [*over, *out_over])
        operands = [Operand(f"a{i}", STORAGE[a.dtype], s)
                    for (i, a), s in zip(inputs, domain.strides, strict=False)]
        results = [Operand(f"out{k}", STORAGE[o.dtype], s) for k, (o, s) in
                   enumerate(zip(outputs, domain.strides[len(inputs):], strict=True))]
        double = any(o.dtype == torch.float64 for o in outputs) or self.compute_dtype(args) == torch.float64
        scalars = tuple(f"a{i}" for i, a in enumerate(args)
                        if not isinstance(a, torch.Tensor) and f"a{i}" in self.used)
        return Problem(self.name, tuple(operands), scalars, self.outputs, tuple(results),
                       tuple(reduced), domain.sizes, "float64" if double else "float32",
                       self.streams), out_over

    def _plan(self, args: Args, alignment: int) -> Callable[..., Any]:
        shape, device = self.check(args)
        if any(isinstance(a, torch.Tensor) and a.is_neg() for a in args):
            return self._resolving
        outputs = self.allocate(args, shape)
        if 0 in shape:
            return lambda *args: _pack([o.zero_() for o in self.allocate(args[:len(self.params)], shape)])
        problem, out_over = self.problem(args, shape, outputs)
        if device.type == "meta":
            collected = _collected.get()
            if collected is not None:
                collected.append(problem)
            return lambda *args: _pack(self.allocate(args[:len(self.params)], shape))
        results = [Result(tuple(o.shape), o.stride(), o.dtype, over[len(shape) - o.dim():])
                   for o, over in zip(outputs, out_over, strict=True)]
        if device.type == "cpu":
            from fusionrt.cpu import pointwise as cpu
            return cpu.build(problem, results, len(args))
        from fusionrt.runtime import launch
        return launch.build(launch.Call(problem, results, len(args), device.index), alignment,
                            self._misaligned)

    def _misaligned(self, *args: Any) -> Any:
        """The same call for pointers that are not multiples of 16 bytes."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        alignment = min((t.data_ptr() & -t.data_ptr() for t in tensors if t.data_ptr()), default=16)
        plans = self.local.__dict__.setdefault("misaligned", {})
        key = (alignment, *call_key(args[:len(self.params)]))
        if key not in plans:
            if len(plans) >= _PLANS_KEPT:
                plans.clear()
            plans[key] = self._plan(args[:len(self.params)], min(8, alignment))
        return plans[key](*args)

    # -- derivatives -----------------------------------------------------------------------------

    def gradient(self, needed: tuple[bool, ...], given: tuple[bool, ...]) -> Operator:
        """The operator of the backward pass: arguments are this one's, perhaps its output, and the
        `given` gradients of its outputs; results the gradients of the `needed` arguments, each in that
        one's shape."""
        key = (*needed, *given)
        if key not in self._gradients:
            n = len(self.params)
            positions = [k for k, is_given in enumerate(given) if is_given]
            seeds: dict[Expr, Expr] = {}
            for i, k in enumerate(positions):
                seed = argument(f"a{n + i}")
                out = self.outputs[k]
                seeds[out] = seeds[out] + seed if out in seeds else seed
            wrt = [i for i in range(n) if needed[i]]
            roots = gradients(seeds, [argument(f"a{i}") for i in wrt])
            names = [f"grad_output{k}" if len(given) > 1 else "grad_output" for k in positions]
            shorter = self._from_output(roots)
            if shorter is not None:
                roots, names = shorter, ["output", *names]
            flags = "".join(str(int(flag)) for flag in key)
            made = Operator(f"{self.name}_backward_{flags}", [*self.params, *names], roots, wrt)
            made.reads_output = shorter is not None
            self._gradients[key] = made
        return self._gradients[key]

    def _from_output(self, roots: list[Expr]) -> list[Expr] | None:
        """The gradients by means of the output, if they need fewer arguments then (relu(a + b))."""
        if len(self.outputs) > 1 or self.targets[0] is not None or self.outputs[0].op in ("arg", "const"):
            return None
        # It stands before the incoming gradient: results have the layout of the first full argument.
        at, after = (argument(f"a{len(self.params) + k}") for k in (0, 1))
        found = substitute(roots, {**through_output(self.outputs[0], at), at: after})
        fewer = len(leaves(found, "arg")) < len(leaves(roots, "arg"))
        return found if fewer else None

    @functools.cached_property
    def shared(self) -> list[tuple[int, list[int]]]:
        """Of a gradient operator: targets whose gradient equals, shapes permitting, an argument (an
        incoming gradient) or the gradient of an earlier target."""
        found = []
        for k, (root, target) in enumerate(zip(self.outputs, self.targets, strict=True)):
            candidates = [int(str(root.args[0])[1:])] if root.op == "arg" else []
            candidates += [t for t, other in zip(self.targets[:k], self.outputs, strict=False)
                           if other is root and t is not None]
            if candidates and target is not None:
                found.append((target, candidates))
        return found

    def read_by_backward(self, needed: tuple[bool, ...]) -> tuple[tuple[bool, ...], bool]:
        """Which arguments' values the gradients of the needed ones depend on, and whether the output's."""
        if needed not in self._reads:
            n, any_gradient = len(self.params), any(self.differentiable) and any(needed)
            gradient = self.gradient(needed, self.differentiable) if any_gradient else None
            used = gradient.used if gradient is not None else frozenset()
            self._reads[needed] = (tuple(f"a{i}" in used for i in range(n)),
                                   gradient is not None and gradient.reads_output)
        return self._reads[needed]

    @functools.cached_property
    def differentiable(self) -> tuple[bool, ...]:
        """Which outputs have a gradient: not truth values, not integers."""
        return tuple(not (root.is_truth or root.op.startswith(("cast_int", "cast_uint", "cast_bool")))
                     for root in self.outputs)


@contextlib.contextmanager
def collecting(device: str = "cuda") -> Iterator[list[Problem]]:
    """Calls on meta tensors compute nothing; in here they list the kernels that they would need on
    a `device` ("cuda" or "cpu")."""
    problems: list[Problem] = []
    token, meaning = _collected.set(problems), _meta_means.set(device)
    try:
        yield problems
    finally:
        _collected.reset(token)
        _meta_means.reset(meaning)


def device_type(tensor: torch.Tensor) -> str:
    """Of a meta tensor, the device that it stands for."""
    return _meta_means.get() if tensor.device.type == "meta" else tensor.device.type


def call_key(args: Args) -> tuple[Any, ...]:
    """All that a plan depends on."""
    key: list[Any] = []
    for a in args:
        if isinstance(a, torch.Tensor):
            key += (type(a), a.shape, a.dtype, a.stride(), a.device, a.requires_grad, a.is_neg())
        else:
            key.append(type(a))
    return tuple(key)


def _leads(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Has the full shape and a memory order of its own (an expanded tensor has none)."""
    return tensor.shape == tuple(shape) and all(
        stride != 0 or size == 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _reference_strides(args: Args, shape: layout.Ints) -> layout.Ints:
    """Memory order of the domain when no output has its full shape."""
    model = next((a for a in args if isinstance(a, torch.Tensor) and _leads(a, shape)), None)
    if model is None:
        return tuple(reversed(layout.dense(tuple(reversed(shape)))))
    return tuple(torch.empty_like(model, device="meta").stride())


def _pack(outputs: list[torch.Tensor]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
