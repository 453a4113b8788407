"""How far a result is from the exact one, which somebody computed in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fusionrt.array import is_foreign, to_torch
from fusionrt.bench import traffic
from fusionrt.dtypes import name_of

PERCENTILES = (50, 90, 99, 99.9, 100)
# rtol, atol: those of torch.testing.assert_close.
TOLERANCES = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5),
              torch.float64: (1e-7, 1e-7)}


@dataclass(frozen=True)
class Accuracy:
    """Errors of a result. Percentiles are of the elements that are finite in both; 100 is the worst.

    `relative` leaves out elements whose exact value is 0. A ulp is the distance of two neighbouring
    numbers of the result's dtype at the exact value: 0.5 at most means that everything is rounded
    correctly. Of integers, ulps are units.
    """

    dtype: str
    elements: int
    absolute: Mapping[float, float]    # percentile -> error
    relative: Mapping[float, float]
    ulp_max: float
    ulp_mean: float
    nan: int          # elements that are NaN in one of the two only
    inf: int          # that are infinite in one only, or with the other sign, the exact one rounded
    mismatches: int   # that differ from the exact one rounded to the dtype
    outside: int      # beyond the tolerances; NaN and infinities that differ are

    @property
    def max_abs(self) -> float:
        return self.absolute[100]

    @property
    def max_rel(self) -> float:
        return self.relative[100]

    @property
    def ok(self) -> bool:
        """Nothing is beyond the tolerances."""
        return self.outside == 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON, where keys are text."""
        found = asdict(self)
        for kind in ("absolute", "relative"):
            found[kind] = {str(q): value for q, value in found[kind].items()}
        return found

    def __str__(self) -> str:
        return (f"{self.dtype}: error {self.max_abs:.3g} at most ({self.absolute[99]:.3g} of 99 %), "
                f"relative {self.max_rel:.3g}, {self.ulp_max:.3g} ulp at most and {self.ulp_mean:.3g} on "
                f"average; {self.nan} NaN, {self.inf} infinities and {self.mismatches} of "
                f"{self.elements} elements differ, {self.outside} beyond the tolerances")


def accuracy(result: Any, exact: Any, rtol: float | None = None, atol: float | None = None) -> Accuracy:
    """Compare two arrays of one shape; `exact` in float64 (integers: of any integer dtype).

    `rtol` and `atol` are what |result - exact| <= atol + rtol * |exact| allows; by default those of
    torch.testing.assert_close for the result's dtype.

    Raises TypeError for what is no array of numbers, ValueError for shapes that differ.

        accuracy(torch.sigmoid(x), torch.sigmoid(x.double())).ulp_max
    """
    result, exact = _tensor(result, "result"), _tensor(exact, "exact")
    if result.is_complex() or exact.is_complex():  # parts of numbers are numbers
        result, exact = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else
                         torch.stack((t, torch.zeros_like(t)), -1) for t in (result, exact))
    if result.shape != exact.shape:
        raise ValueError(f"accuracy: result and exact must have one shape, got {tuple(result.shape)} and "
                         f"{tuple(exact.shape)}")
    dtype, exact = result.dtype, exact.to(result.device)
    default = TOLERANCES.get(dtype, (0.0, 0.0))
    rtol, atol = (given if given is not None else d for given, d in zip((rtol, atol), default, strict=True))
    if not dtype.is_floating_point:
        return _of_integers(result, exact, rtol, atol)
    found, exact = result.double(), exact.double()
    unit = ulp(exact, dtype)
    rounded = ((exact / unit).round() * unit).to(dtype).double()  # torch alone rounds to float32 before
    nan = found.isnan() != rounded.isnan()
    inf = (found.isinf() | rounded.isinf()) & (found != rounded) & ~found.isnan() & ~rounded.isnan()
    same = (found == rounded) | (found.isnan() & rounded.isnan())
    finite = found.isfinite() & rounded.isfinite()
    found, exact = found[finite], exact[finite]
    error, size = (found - exact).abs(), exact.abs()
    ulps = error / unit[finite]
    outside = int((error > atol + rtol * size).sum()) + int(nan.sum()) + int(inf.sum())
    return Accuracy(name_of(dtype), result.numel(), _percentiles(error),
                    _percentiles((error / size)[size > 0]), *_worst_and_mean(ulps), int(nan.sum()),
                    int(inf.sum()), int((~same).sum()), outside)


def _of_integers(result: torch.Tensor, exact: torch.Tensor, rtol: float, atol: float) -> Accuracy:
    nan, inf = exact.isnan(), exact.isinf()
    finite = ~(nan | inf)
    high, low, exact_high, exact_low = (half[finite] for half in (*_halves(result), *_halves(exact)))
    error = ((high - exact_high) * _HALF + (low - exact_low)).abs()
    size = (exact_high * _HALF + exact_low).abs()
    lost = int(nan.sum()) + int(inf.sum())
    return Accuracy(name_of(result.dtype), result.numel(), _percentiles(error),
                    _percentiles((error / size)[size > 0]), *_worst_and_mean(error), int(nan.sum()),
                    int(inf.sum()), lost + int((error > 0).sum()),
                    lost + int((error > atol + rtol * size).sum()))


_HALF = 2.0**32


def _halves(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiples of 2^32 and the rest, in float64, which alone ends at 2^53."""
    if whole.dtype.is_floating_point:
        whole = whole.double().round()
        high = (whole / _HALF).floor()
        return high, whole - high * _HALF
    is_unsigned, whole = whole.dtype == torch.uint64, whole.to(torch.int64)
    high = whole >> 32
    return (high & 0xFFFFFFFF if is_unsigned else high).double(), (whole & 0xFFFFFFFF).double()


def ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of dtype's numbers at |exact|, in float64; that of subnormal numbers below the least
    normal one."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.double().abs().clamp(info.tiny, info.max))[1] - 1
    return torch.ldexp(torch.full_like(exact, info.eps, dtype=torch.float64), exponent)


def _percentiles(error: torch.Tensor) -> dict[float, float]:
    """By the nearest rank from above, so that each is an error that occurred; 0 of nothing."""
    if not error.numel():
        return dict.fromkeys(PERCENTILES, 0.0)
    ordered = error.flatten().sort().values  # torch.quantile refuses more than 2^24 elements
    # Of 99.9 % of 10000: 9990, where 99.9 / 100 * 10000 is slightly more.
    ranks = [max(0, math.ceil(round(q * ordered.numel() / 100, 6)) - 1) for q in PERCENTILES]
    return dict(zip(PERCENTILES, ordered[ranks].tolist(), strict=True))


def _worst_and_mean(values: torch.Tensor) -> tuple[float, float]:
    return (float(values.max()), float(values.mean())) if values.numel() else (0.0, 0.0)


def _tensor(value: Any, name: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.is_nested or value.is_quantized or value.layout is not torch.strided:
            what = "meta" if value.is_meta else "nested" if value.is_nested else value.layout
            raise TypeError(f"accuracy: {name} must be a dense tensor that holds numbers, got {what}, "
                            f"{value.dtype}")
        return value.detach()
    if is_foreign(value):
        return to_torch(value, "accuracy", name)[0]
    raise TypeError(f"accuracy: {name} must be a tensor or an array, got {type(value).__name__}")


def exactly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
            ) -> Any:
    """The function's result on the same arguments in float64 and complex128, dtypes among them too, and a
    module's weights; integers stay as they are."""
    if isinstance(function, torch.nn.Module):
        function = copy.deepcopy(function).double()
    args, more = pytree.tree_map(_double, (args, dict(kwargs or {})))
    return function(*args, **more)


def _double(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.complex128 if value.is_complex else torch.float64 if value.is_floating_point else value
    if isinstance(value, torch.Tensor):
        wanted = _double(value.dtype)
        if wanted == value.dtype:
            return value
        if not value.is_leaf:  # nor will it be, so that it can be worked on in place
            return value.to(wanted)
        return value.detach().to(wanted).requires_grad_(value.requires_grad)
    if is_foreign(value) and (value.dtype.kind in "fc" or value.dtype.name == "bfloat16"):
        return value.astype("complex128" if value.dtype.kind == "c" else "float64")
    return value


def comparable(tree: Any) -> list[Any]:
    """The arrays of a result, of dicts by their keys: two functions need not have filled theirs in the same
    order. Python's numbers are arrays in the precision that Python has; so is a list of nothing else."""
    return traffic.arrays(_in_order(tree))


def _in_order(tree: Any) -> Any:
    if _is_number(tree) or (type(tree) is list and tree and all(map(_is_number, tree))):
        return np.asarray(tree)
    if type(tree) in (tuple, list):
        return [_in_order(one) for one in tree]
    if type(tree) is dict:
        return {key: _in_order(tree[key]) for key in sorted(tree, key=repr)}
    return tree


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


def of_results(result: Any, exact: Any) -> Accuracy | None:
    """Of whatever a function returned: the least accurate of its arrays. None where there is none."""
    results, exacts = comparable(result), comparable(exact)
    if len(results) != len(exacts):
        raise ValueError(f"accuracy: as many results as exact ones are needed, got {len(results)} and "
                         f"{len(exacts)}")
    found = [accuracy(r, e) for r, e in zip(results, exacts, strict=True)]
    return max(found, key=lambda a: (a.outside, a.ulp_max), default=None)
