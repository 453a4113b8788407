"""Does a converted model still compute the same? Both are measured against a float64 run of the original."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fusionrt.convert.inputs import Inputs, given, relaid, varied
from fusionrt.convert.random_states import seed_torch
from fusionrt.convert.sharing import own_tensors, shared_clone
from fusionrt.convert.speed import times
from fusionrt.convert.undisturbed import is_plain, undisturbed
from fusionrt.dtypes import name_of
from fusionrt.errors import one_line
from fusionrt.ops.convolution_cudnn import convolves_in_tf32

SAMPLES, MOST_SAMPLES = 3, 16
FEW = 4096       # elements: the worst error of fewer may be a lucky one
PATIENCE = 5.0   # seconds; slow models get two samples
HOPELESS = 16.0  # times the original's error: no more samples are needed to see that
ITSELF = {torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float32: 1e-4}  # where nothing more exact runs


class ValidationError(RuntimeError):
    """A converted model does not compute what the original does."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """`error`, `own_error`: of the converted and of the original model, the largest difference from the exact
    run, over the largest exact number; of that output which comes nearest to what is allowed. `accepted` is
    None where nothing can be said. `exact`: the dtype of the exact run, or "the original itself"."""

    accepted: bool | None
    reason: str
    error: float | None = None
    own_error: float | None = None
    samples: int = 0
    exact: str = ""

    def __str__(self) -> str:
        if self.error is None or self.own_error is None:
            return self.reason
        return (f"{self.reason}: error {self.error:.2g}, the original's own {self.own_error:.2g}, against "
                f"{self.exact} on {self.samples} inputs")


Leaves = dict[str, Any]  # of a result, by the names that `leaves` gives them


# -- what a model returns --------------------------------------------------------------------------

def leaves(output: Any, name: str = "output", inside: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every tensor and number of a nested result, by a name that says the types of what holds it. A Python
    float is a tensor too: it may be as inexact. Sparse tensors are compared as dense ones, nested ones by
    their parts."""
    if isinstance(output, float):
        yield name, torch.tensor(output, dtype=torch.float64, device="cpu")
    elif isinstance(output, Tensor) and output.is_nested:
        for k, part in enumerate(output.unbind()):
            yield f"{name} (nested)[{k}]", part
    elif isinstance(output, Tensor) and output.layout is not torch.strided:
        yield f"{name} ({output.layout})", output.to_dense()
    elif isinstance(output, (Tensor, int, str, type(None))):
        yield name, output
    elif not any(output is outer for outer in inside):
        kind, inside = type(output).__name__, (*inside, output)
        for key, value in _parts(output):
            yield from leaves(value, f"{name} ({kind}){key}", inside)


def _parts(output: Any) -> list[tuple[str, Any]]:
    if isinstance(output, Mapping):
        return [(f".{key}", value) for key, value in output.items()]
    if isinstance(output, (tuple, list)):
        return [(f"[{k}]", value) for k, value in enumerate(output)]
    return [(f".{key}", value) for key, value in getattr(output, "__dict__", {}).items()
            if not isinstance(value, Module) and not callable(value)]


def check_structure(found: Leaves, expected: Leaves) -> None:
    """Raises ValidationError unless both have the same types, shapes, dtypes, devices and numbers."""
    if list(found) != list(expected):
        missing, other = (", ".join(sorted(a.keys() - b.keys())) or "nothing"
                          for a, b in ((expected, found), (found, expected)))
        raise ValidationError(f"returned {other} instead of {missing}")
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            if found[name] != value:
                raise ValidationError(f"{name} is {found[name]!r} instead of {value!r}")
            continue
        for what in ("dtype", "shape", "device"):
            if getattr(found[name], what) != getattr(value, what):
                raise ValidationError(f"{name} has {what} {getattr(found[name], what)} instead of "
                                      f"{getattr(value, what)}")


def _shapes(found: Leaves) -> dict[str, torch.Size | None]:
    """They may depend on the numbers, of which others have other roundings."""
    return {name: value.shape if isinstance(value, Tensor) else None for name, value in found.items()}


@dataclasses.dataclass
class _Output:
    """One tensor of the result, over all samples. Errors are the largest absolute ones, of integers the
    number of wrong ones."""

    dtype: torch.dtype
    elements: int = 0
    scale: float = 0.0
    error: float = 0.0
    own: float = 0.0

    def add(self, got: Tensor, owns: Sequence[Tensor], exact: Tensor) -> None:
        """`owns`: what the original computes, in one way or several."""
        self.elements += exact.numel()
        if not exact.is_floating_point() and not exact.is_complex():
            self.error += float((got != exact).sum())
            self.own += max(float((own != exact).sum()) for own in owns)
            self.scale = float(self.elements)
            return
        # Where the original itself overflows, nothing is demanded.
        judged = exact.isfinite() & torch.stack([own.isfinite() for own in owns]).all(0)
        got, exact, *owns = (t.to(exact.dtype)[judged] for t in (got, exact, *owns))
        if exact.numel():
            self.scale = max(self.scale, exact.abs().max().item())
            self.own = max(self.own, *((own - exact).abs().max().item() for own in owns))
            error = (got - exact).abs().max().item()
            self.error = max(self.error, error if error == error else torch.inf)  # NaN where none belongs

    def allowed(self, threshold: float | None) -> float:
        if threshold is not None:
            return threshold * self.scale
        eps = torch.finfo(self.dtype).eps if self.dtype.is_floating_point or self.dtype.is_complex else 0.0
        return 2 * self.own + 2 * eps * self.scale

    def excess(self, threshold: float | None) -> float:
        """Of the error over what is allowed; above 1 is too much."""
        allowed = self.allowed(threshold)
        return self.error / allowed if allowed else 0.0 if self.error == 0 else torch.inf


# -- judging ---------------------------------------------------------------------------------------

class Judge:
    """Judges candidates by one `reference`, on the given inputs and on random variations of them.

    Accepted is an error of at most twice the reference's own (and 2 eps of the largest number), or at most
    `threshold` times the largest exact number of that output. All that is run in evaluation mode: in
    training, masks of dropout are no two runs' own, and gradients are not looked at.
    """

    def __init__(self, reference: Module, inputs: Inputs, threshold: float | None = None) -> None:
        self.reference, self.inputs, self.threshold = reference, inputs, threshold
        own = max((p.itemsize for p in reference.parameters() if p.is_floating_point()), default=4)
        self.wider = [d for d in (torch.float64, torch.float32) if d.itemsize > own]
        self._wide: dict[torch.dtype, tuple[Module, set[int]]] = {}
        self._unwritten: set[int] = set()  # as for `undisturbed`; of a wide module each has its own
        self.has_fast_path = True

    def __call__(self, candidate: Module) -> Verdict:
        verdict = self._judged(candidate)
        if verdict.accepted is False and self._is_ambiguous():
            # Padding is zeros in the eager encoder's fast path, numbers in a compiled one, and in either
            # where gradients are recorded.
            self.has_fast_path = False
            verdict = self._judged(candidate)
        return verdict

    def _is_ambiguous(self) -> bool:
        return self.has_fast_path and torch.backends.mha.get_fastpath_enabled() and any(
            isinstance(m, torch.nn.TransformerEncoder) for m in self.reference.modules())

    def _own(self, module: Module, unwritten: set[int], inputs: Inputs, seed: int = 0) -> Leaves:
        """A run of the reference, or of it in another dtype."""
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(before and self.has_fast_path)
        try:
            return run(module, inputs, seed, unwritten)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    def _judged(self, candidate: Module) -> Verdict:
        outputs: dict[str, _Output] = {}
        samples, began = 0, time.monotonic()
        while samples < MOST_SAMPLES:
            inputs = self.inputs if samples == 0 else varied(self.inputs, samples)
            own = self._reference_run(inputs, samples)
            if own is None:
                break
            try:
                got = run(candidate, inputs, unwritten=set(self._unwritten))
                check_structure(got, own)
            except Exception as error:  # of the candidate, whatever it is
                return Verdict(False, _what(error), samples=samples + 1)
            self._add(outputs, got, own, inputs)
            samples += 1
            if samples >= (SAMPLES if time.monotonic() - began < PATIENCE else 2) and self._decided(outputs):
                break
        return self._verdict(outputs, samples)

    def _reference_run(self, inputs: Inputs, samples: int) -> Leaves | None:
        """None where the model does not take just any numbers."""
        try:
            return self._own(self.reference, self._unwritten, inputs)
        except Exception as error:
            if samples:
                return None
            raise ValueError(f"auto_convert_model: the model itself fails with {inputs.describe()}: "
                             f"{_what(error)}") from error

    def _add(self, outputs: dict[str, _Output], got: Leaves, own: Leaves, inputs: Inputs) -> None:
        exact, owns = self._exact(own, inputs), self._originals(own, inputs)
        for name, value in own.items():
            if isinstance(value, Tensor):
                outputs.setdefault(name, _Output(value.dtype)).add(
                    got[name], [found[name] for found in owns], exact[name])

    def _originals(self, own: Leaves, inputs: Inputs) -> list[Leaves]:
        """What the original computes under these settings: where cuDNN may take TF32, it does so for one
        memory format of images and not for the other."""
        other = relaid(inputs) if convolves_in_tf32() else None
        if other is None:
            return [own]
        try:
            again = self._own(self.reference, self._unwritten, other)
            check_structure(again, own)
        except Exception:  # a view that there is not of this memory format
            return [own]
        return [own, again]

    def _exact(self, own: Leaves, inputs: Inputs) -> Leaves:
        """The most exact run that works: the model may have casts or kernels that know no float64."""
        while self.wider:
            try:
                found = self._wide_run(self.wider[0], inputs)
                if _shapes(found) == _shapes(own):
                    return found
            except Exception:  # OutOfMemoryError too
                self._wide.clear()
            del self.wider[0]
        return own

    def _wide_run(self, dtype: torch.dtype, inputs: Inputs) -> Leaves:
        if dtype not in self._wide:
            made = shared_clone(self.reference)
            own_tensors(made)
            pairs = zip(self.reference.parameters(), made.to(dtype).parameters(), strict=True)
            self._wide[dtype] = made, {id(wide) for p, wide in pairs if id(p) in self._unwritten}
        wide = inputs.map(lambda t: t.to(dtype) if t.is_floating_point() else t)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return self._own(*self._wide[dtype], wide)

    def _limit(self, output: _Output) -> float | None:
        if self.threshold is None and not self.wider:
            return ITSELF.get(output.dtype, 1e-9)
        return self.threshold

    def _decided(self, outputs: Mapping[str, _Output]) -> bool:
        worst = max((o.excess(self._limit(o)) for o in outputs.values()), default=0.0)
        elements = min((o.elements for o in outputs.values()), default=FEW)
        return worst <= 1 or worst > HOPELESS or elements >= FEW

    def _verdict(self, outputs: Mapping[str, _Output], samples: int) -> Verdict:
        if not outputs:
            return Verdict(None, "it returns no tensor", samples=samples)
        if all(o.scale == o.error == 0 for o in outputs.values()):
            return Verdict(None, "every result is zero, whatever the inputs are", samples=samples)
        worst = max(outputs.values(), key=lambda o: o.excess(self._limit(o)))
        accepted = worst.excess(self._limit(worst)) <= 1
        scale = worst.scale or 1.0
        doubtful = not accepted or worst.own > 0.1 * scale
        if doubtful and self._is_random():
            return Verdict(None, "two runs of the original differ: its results are random", samples=samples)
        return Verdict(accepted, "accepted" if accepted else "too inaccurate", worst.error / scale,
                       worst.own / scale, samples, name_of(self.wider[0])
                       if self.wider else "the original itself")

    def _is_random(self) -> bool:
        """Differences of rounding, as of atomic additions, do not make it so."""
        once, again = (self._own(self.reference, self._unwritten, self.inputs, seed) for seed in (1, 2))
        if _shapes(once) != _shapes(again):
            return True
        pairs = [(once[name].double(), again[name].double()) for name in once
                 if isinstance(once[name], Tensor) and once[name].is_floating_point()]
        return any(bool(((a - b).abs() > 1e-2 * a.abs().max()).any()) for a, b in pairs)


def run(module: Module, inputs: Inputs, seed: int = 0, unwritten: set[int] | None = None) -> Leaves:
    """What a call returns that leaves no trace, neither in the module nor in the inputs. `unwritten`: as for
    `undisturbed`."""
    args, kwargs = inputs.fresh()
    with undisturbed(module, unwritten=unwritten) as state:
        seed_torch(seed)
        found = dict(leaves(module(*args, **kwargs)))
        own = {t.untyped_storage().data_ptr() for t in state}
        return {name: v.clone() if isinstance(v, Tensor) and is_plain(v)
                and v.untyped_storage().data_ptr() in own else v for name, v in found.items()}


def _what(error: Exception) -> str:
    """In one line. Dynamo wraps what a backend raised."""
    if isinstance(error, ValidationError):
        return str(error)
    return one_line(getattr(error, "inner_exception", None) or error, 300)


# -- the optimised against the original ------------------------------------------------------------

def validate_optimization(original: Module, converted: Module, inputs: Any) -> tuple[float, float]:
    """(largest absolute difference of any output, how many times as fast the converted module is).

    original, converted: modules of the same results; run in evaluation mode without gradients.
    inputs: a tensor, a tuple of arguments, or a mapping of keyword arguments.

    Times are medians of calls that follow each other, both taking turns after a warm-up, until the device
    has finished them. Differences of integers are differences too; NaN in one only is infinite.

    Raises ValidationError where the results are not of one structure, shape or dtype, TypeError where inputs
    cannot be copied, and for what is no module.

        difference, speedup = fusionrt.validate_optimization(model, fast, (images,))
    """
    for name, module in (("original", original), ("converted", converted)):
        if not isinstance(module, Module):
            raise TypeError(f"validate_optimization: {name} must be a module, got {type(module).__name__}")
    made = given(inputs, None)
    found, expected = run(converted, made), run(original, made)
    check_structure(found, expected)
    with undisturbed(original, converted):
        taken = times({"original": original, "converted": converted}, made)
    return _largest_difference(found, expected), taken["original"] / taken["converted"]


def _largest_difference(found: Leaves, expected: Leaves) -> float:
    worst = 0.0
    for name, a in found.items():
        if isinstance(a, Tensor) and a.numel():
            a, b = a.double(), expected[name].double()
            same = (a == b) | (a.isnan() & b.isnan())
            worst = max(worst, (a - b).abs().nan_to_num(torch.inf).masked_fill(same, 0.0).max().item())
    return worst
