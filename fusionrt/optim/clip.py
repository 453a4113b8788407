"""Clip gradients to a global norm: one pass that reads them, and one that scales them if it must."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusionrt.arguments import as_float, as_tensors
from fusionrt.dtypes import name_of
from fusionrt.optim import kernels
from fusionrt.optim.kernels import Coefficients, Common, Kind, Squares
from fusionrt.optim.state import is_dense
from fusionrt.optim.table import CAPACITY, Table, shared_table


@torch._disable_dynamo
@torch.no_grad()
def clip_grad_norm_(parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float,
                    norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
                    ) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_: scale all gradients by max_norm / (norm + 1e-6) if that is below 1.

    Returns the norm over all of them before, on the first one's device, in float32, or float64 if a
    gradient is. Gradients that need no scaling are read once and not written. A `norm_type` other than 2,
    gradients on several devices, sparse ones, DTensors and ones that do not fill their memory are torch's
    business.
    `foreach` changes nothing. Raises ValueError for a negative `max_norm`, TypeError for what is no tensor,
    RuntimeError if `error_if_nonfinite` and the norm is not finite; that alone waits for the device. Inside
    of a step, `clip_grad_norm=` of the optimizers saves the second pass.

        norm = fusionrt.optim.clip_grad_norm_(model.parameters(), 1.0)
    """
    max_norm = as_float("clip_grad_norm_", "max_norm", max_norm)
    if max_norm < 0:  # it would turn all gradients round
        raise ValueError(f"clip_grad_norm_: max_norm must not be negative, got {max_norm}")
    given = as_tensors("clip_grad_norm_", "parameters", parameters)
    grads = [p.grad for p in given if p.grad is not None]
    if float(norm_type) != 2.0 or not all(map(_is_plain, grads)) or len({g.device for g in grads}) != 1:
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    launches = _launches(grads)
    device, wide = grads[0].device, any(g.dtype == torch.float64 for g in grads)
    sizes = [kernels.norm_parts(table) for table, _, _ in launches]
    squares = torch.empty(sum(sizes), dtype=torch.float64, device=device)
    for (table, dtype, addresses), out in zip(launches, squares.split(sizes), strict=True):
        kernels.squares(table, addresses, dtype, out)
    if error_if_nonfinite and not squares.sum().isfinite():
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {float(squares.sum().sqrt())}, so "
                           "they cannot be clipped; to scale them anyway, set error_if_nonfinite=False")
    norms = {dtype: torch.zeros((), dtype=getattr(torch, dtype), device=device)
             for dtype in ("float32", "float64")}
    for table, dtype, addresses in launches:
        kind = Kind("SCALE", dtype, dtype)
        common = Common(squares=Squares(squares, clipped=len(squares)), max_norm=float(max_norm),
                        norm=norms[kind.acc])
        scalars = kernels.prepare(table, kind, addresses, Coefficients(), common)
        kernels.step(table, kind, addresses, Coefficients(), scalars)
    torch.autograd.graph.increment_version(grads)
    return norms["float64" if wide else "float32"]


def _is_plain(grad: torch.Tensor) -> bool:
    return (grad.layout is torch.strided and grad.device.type in ("cpu", "cuda") and grad.is_floating_point()
            and grad.itemsize > 1 and (grad.is_contiguous() or is_dense(grad))
            and not is_traceable_wrapper_subclass(grad))


def _launches(grads: Iterable[torch.Tensor]) -> list[tuple[Table, str, list[int]]]:
    """By dtype, at most CAPACITY gradients each."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    found = []
    for dtype, members in by_dtype.items():
        name = name_of(dtype)
        for start in range(0, len(members), CAPACITY):
            part = members[start:start + CAPACITY]
            table = shared_table(part[0].device, None, tuple(g.numel() for g in part))
            found.append((table, name, [g.data_ptr() for g in part]))
    return found
