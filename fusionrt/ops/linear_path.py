"""How a linear layer and what follows it are computed.

The product is torch's, and one kernel of ours follows, which writes over the product where nobody needs that;
or cuBLASLt's own epilogue does; or all of it is one kernel of ours (`gemm`, `gemv`). `route` decides. In a
backward pass one kernel has the gradients of activation, dropout and bias, and two products follow.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt import autocast, random
from fusionrt.activation import finishing
from fusionrt.array import check_dense
from fusionrt.autograd import Dispatched
from fusionrt.dispatch import Run
from fusionrt.dtypes import FLOATS
from fusionrt.errors import CaptureError, MissingKernelError
from fusionrt.expr import Expr, argument
from fusionrt.op import Operator
from fusionrt.ops import gemm, gemv
from fusionrt.ops.product import Results
from fusionrt.problem import unpack
from fusionrt.random import Rng
from fusionrt.rehearsal import stands_for
from fusionrt.tape import PLAINLY, Doing, Taped, forget, lets_go, note_hooks, taken, taped
from fusionrt.watching import is_watched

Tensor = torch.Tensor
Numbers = tuple[float, ...]
EPILOGUE, GEMM, GEMV, KERNEL = "epilogue", "gemm", "gemv", "kernel"
OWN = {GEMM: gemm, GEMV: gemv}
EPILOGUES = ("relu", "gelu_tanh")  # that cuBLASLt applies after a bias
# Our products, of which there are too many for a warm-up, may neither be compiled while a graph is captured
# nor where that is switched off; what takes their place is warmed up.
UNAVAILABLE = (CaptureError, MissingKernelError)


# -- which way -------------------------------------------------------------------------------------

@functools.lru_cache(4096)
def route(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int, epilogue: Expr, library: bool,
          rows: bool = True) -> str:
    """How epilogue(x W^T + b, residual) of an m x n product over k is computed: EPILOGUE by cuBLASLt's own,
    if the `library` can be asked (there is a bias, and the product is not kept), GEMM by our product, which
    has the expression inside, GEMV by that of few rows, both where W lies in `rows`, KERNEL by a product and
    a kernel. Measured by benchmarks/linear.py."""
    if rows and gemv.chosen(m, n, k, dtype, device, epilogue):
        return GEMV
    name = next((name for name in EPILOGUES if epilogue is _alone(name)), None) if library else None
    has = (name is not None and device.type == "cuda" and device.index is not None  # as it has in no warm-up
           and dtype != torch.float64 and min(n, k) > 1)
    if has and name == "gelu_tanh":  # slow on Ada, and on the Blackwell of graphics cards
        has = torch.cuda.get_device_capability(device) not in ((8, 9), (12, 0), (12, 1))
    if rows and gemm.chosen(m, n, k, dtype, device, epilogue, has):
        return GEMM
    return EPILOGUE if has else KERNEL


def _alone(activation: str) -> Expr:
    """The expression of an activation after a product, and nothing else."""
    expression: Expr = finishing("linear_activation", activation, False, False, False).operator.outputs[0]
    return expression


def way_of(operator: Operator, x: Tensor, weight: Tensor, bias: Any, keep: bool = False) -> str:
    """For `product`."""
    n, k = weight.shape
    device = stands_for(x.device) if x.is_meta else x.device
    return route(device, x.dtype, math.prod(x.shape[:-1]), n, k, operator.outputs[0],
                 bias is not None and not keep, weight.stride(1) == 1)


def product(do: Doing, way: str, operator: Operator, x: Tensor, weight: Tensor, bias: Any,
            residual: Tensor | None, numbers: Numbers, rng: Rng | None, keep: bool = False) -> Results:
    """operator(x W^T + b, residual, *numbers), without autograd, and x W^T + b if it is to be kept;
    otherwise its memory is the result's."""
    if way == EPILOGUE:
        by = functools.partial(torch._addmm_activation, use_gelu=operator.outputs[0] is _alone("gelu_tanh"))
        return shaped(do, do(by, bias, as_rows(do, x), do(Tensor.t, weight)), x), None
    if way != KERNEL:
        results: Results = do(_Own(way, operator, numbers, keep), x, weight, bias, residual, rng)
        return results
    z = do(F.linear, x, weight, bias)
    z = do(_unsafe_view, z, z.shape) if z._is_view() else z
    kernel = operator if keep else operator.over({0: 0})
    out = do.launch(kernel, [z, *(() if residual is None else (residual,)), *numbers], rng)
    return out, z if keep else None


class _Own:
    """`product` by a kernel of ours, where it can be had and memory lies such that it can, of tensors that
    lie alike."""

    def __init__(self, way: str, operator: Operator, numbers: Numbers, keep: bool) -> None:
        self.way, self.operator, self.numbers, self.keep = way, operator, numbers, keep
        self.planned: Callable[..., Results | None] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Any, residual: Tensor | None, rng: Rng | None
                 ) -> Results:
        rows, added = rows_of(x), None if residual is None else rows_of(residual)
        try:
            found = self._found(rows, weight, bias, added)
        except UNAVAILABLE:
            found = None
        if found is None:
            return product(PLAINLY, KERNEL, self.operator, x, weight, bias, residual, self.numbers, rng,
                           self.keep)
        out, z = found
        return shaped(PLAINLY, out, x), None if z is None else shaped(PLAINLY, z, x)

    def _found(self, rows: Tensor, weight: Tensor, bias: Any, added: Tensor | None) -> Results | None:
        by = OWN[self.way]
        if self.planned is None and by.supports(rows, weight, bias, added):
            self.planned = by.Planned(rows, weight, bias, self.operator.outputs[0], added, self.keep)
        return None if self.planned is None else self.planned(rows, weight, bias, added)


def shaped(do: Doing, rows: Tensor, x: Tensor) -> Tensor:
    """Rows in the dimensions of x; of an autograd.Function a view could not be changed in place."""
    made: Tensor = rows if x.dim() == 2 else do(_unsafe_view, rows, (*x.shape[:-1], rows.shape[1]))
    return made


# The overload's own function, which Python's two around it only call: 5.6 and 3.0 us.
_unsafe_view = torch.ops.aten._unsafe_view.default._op


def inferring(operator: Operator, numbers: Numbers, x: Tensor, weight: Tensor, bias: Tensor | None) -> Run:
    """`product`, decided once."""
    way = way_of(operator, x, weight, bias)

    def run(do: Doing, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        return product(do, way, operator, x, weight, bias, residual, numbers, drawn(do, operator, x))[0]

    return taped(run)


# -- gradients -------------------------------------------------------------------------------------

class LinearActivation:
    """operator(x W^T + b, residual, *numbers) of tensors of one kind. Kept is the product, or the result
    where that is enough, as for relu."""

    def __init__(self, operator: Operator, numbers: Numbers, *tensors: Any) -> None:
        x, weight, bias, residual = tensors
        self.operator, self.numbers = operator, numbers
        self.keep = reads_product(operator)
        self.way = way_of(operator, x, weight, bias, self.keep)
        self.needed = [t is not None and t.requires_grad for t in tensors]
        self.residual = None if residual is None else residual.dtype
        self.apply = Taped(self, len(tensors)).apply

    def forward(self, do: Doing, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None,
                residual: Tensor | None) -> Tensor:
        operator = self.operator
        note_hooks(do, ctx)
        rng = drawn(do, operator, x)
        out, z = product(do, self.way, operator, x, weight, bias, residual, self.numbers, rng, self.keep)
        do.set(ctx, "rng", rng)
        do.set(ctx, "order", operator.drawn((out,), (out,)))
        do.save(ctx, x, weight, bias, z, out if reads_result(operator) else None)
        return out

    def backward(self, do: Doing, ctx: Any, saved: list[Any], grad_output: Tensor) -> tuple[Any, ...]:
        operator, needed = self.operator, self.needed
        owned = lets_go(do, ctx)
        x, weight, bias, z, out = taken(saved)
        of_residual = do(Tensor.to, grad_output, self.residual) if needed[3] else None
        if not any(needed[:3]):
            return None, None, None, of_residual
        kernel = backward_kernel(operator, 1, (0,) if needed[2] else ()).walking(ctx.order)
        if owned:
            forget(do, ctx)
            kernel = kernel if z is None else kernel.over({0: 0})
        # What is not read is only asked what shape it has.
        unread = do.fixed(x.new_empty(()).expand(grad_output.shape))
        given = unread if z is None else z
        args = [given, *self._more(unread), *([out] if kernel.saved else []), grad_output]
        found = do.launch(kernel, [*args, bias] if needed[2] else args, do.get(ctx, "rng"))
        grad, *of_bias = unpack(found)
        return (*of_product(do, grad, x, weight, needed), of_bias[0] if of_bias else None, of_residual)

    def again(self, ctx: Any, saved: list[Any], grad_output: Tensor) -> tuple[Any, ...]:
        x, weight, bias, *_ = saved
        more = self._more(x.new_empty(()).expand(grad_output.shape))

        def composed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return applied(self.operator, [F.linear(x, weight, bias), *more], ctx.rng)

        of_residual = grad_output.to(self.residual) if self.needed[3] else None
        return *differentiated(composed, (x, weight, bias), grad_output, self.needed), of_residual

    def _more(self, residual: Tensor) -> list[Any]:
        """Of the operator's arguments, those that are no product."""
        return [*(() if self.residual is None else (residual,)), *self.numbers]


def drawn(do: Doing, operator: Operator, x: Tensor) -> Any:
    """Random numbers, where the operator draws some."""
    return do(random.drawing(x.device, operator.counters)) if operator.streams else None


_SUM = Operator("sum of rows", ["rows", "like"], [argument("a0")], [1])


@functools.lru_cache(4096)
def backward_kernel(operator: Operator, parts: int, sums: tuple[int, ...], forward: bool = False,
                    memory: int = 0) -> Operator:
    """Gradients of the first `parts` arguments; sums of those in `sums` to the shapes of as many further
    arguments, the biases; with `forward` the operator's result. `memory`: of more arguments, which `over`
    may name."""
    gradient = operator.gradient(_first(operator, parts), (True,))
    n, named = len(gradient.params), [*(f"bias{k}" for k in sums), *(f"memory{k}" for k in range(memory))]
    made = Operator(gradient.name, [*gradient.params, *named],
                    [*gradient.outputs, *(gradient.outputs[k] for k in sums), *operator.outputs[:forward]],
                    [*gradient.targets, *range(n, n + len(sums)), *operator.targets[:forward]])
    made.saved = gradient.saved
    return made


def applied(operator: Operator, args: Sequence[Any], rng: Rng | None) -> Tensor:
    """With a gradient of its own, and given random numbers."""
    if is_watched():
        packed = None if rng is None else random.packed(rng, args[0].device)
        found: Tensor = Dispatched.apply(operator, args, packed)
    else:
        found = operator.apply(args, rng)
    return found


def differentiated(function: Callable[..., Tensor], tensors: Sequence[Tensor | None], grad_output: Tensor,
                   needed: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of function(*tensors), by ops that have gradients of their own."""
    if not any(needed[:len(tensors)]):
        return [None] * len(tensors)
    # Dynamo compiles anew for each `id`; that of torch 2.15 cannot go on within a `with` if it breaks here.
    given = [t for t in tensors if t is not None]
    twice = any(a is b for a, b in itertools.combinations(given, 2))
    with torch.enable_grad():
        # Each its own, where one is passed twice. (Compiled autograd takes views to be of the inputs anew.)
        views = [t.view_as(t) if twice and t is not None else t for t in tensors]
        out = function(*views)
    wanted = [t for t, need in zip(views, needed, strict=False) if need and t is not None]
    found = iter(torch.autograd.grad(out, wanted, grad_output, create_graph=torch.is_grad_enabled()))
    return [next(found) if need else None for need in needed[:len(tensors)]]


def of_product(do: Doing, grad: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]) -> list[Any]:
    """The gradients of x and weight, given that of x W^T."""
    rows, of_x = as_rows(do, grad), None
    if needed[0]:
        of_x = do(torch.mm, rows, weight)
        of_x = of_x if x.dim() == 2 else do(Tensor.view, of_x, x.shape)
    return [of_x, do(torch.mm, do(Tensor.t, rows), as_rows(do, x)) if needed[1] else None]


def of_bias(do: Doing, grad: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a bias, given that of the rows that it was added to."""
    found: Tensor = do.launch(_SUM, [grad, bias])
    return found


@functools.lru_cache(4096)
def reads_product(operator: Operator, parts: int = 1) -> bool:
    """Whether its gradient needs the first `parts` arguments, or can do with the result."""
    return any(operator.read_by_backward(_first(operator, parts))[0][:parts])


@functools.lru_cache(4096)
def reads_result(operator: Operator, parts: int = 1) -> bool:
    return bool(operator.read_by_backward(_first(operator, parts))[1])


def _first(operator: Operator, parts: int) -> tuple[bool, ...]:
    return tuple(k < parts for k in range(len(operator.params)))


# -- operands --------------------------------------------------------------------------------------

def rows_of(t: Tensor) -> Tensor:
    return as_rows(PLAINLY, t)


def as_rows(do: Doing, t: Tensor) -> Tensor:
    """As a matrix, also where rows have no elements."""
    return t if t.dim() == 2 else do(Tensor.reshape, t, (math.prod(t.shape[:-1]), t.shape[-1]))


def check(op: str, x: tuple[str, Any], weight: tuple[str, Any], bias: tuple[str, Any],
          width: int | None = None) -> None:
    """A linear layer's operands, with their names; `width`: of its input, if that is not x."""
    for name, value in (x, weight, bias):
        if isinstance(value, Tensor):
            check_dense(op, name, value)
    a, w, b = x[1], weight[1], bias[1]
    fits = (isinstance(a, Tensor) and isinstance(w, Tensor) and w.dim() == 2 and a.dim() > 0
            and w.shape[1] == (a.shape[-1] if width is None else width) and a.device == w.device
            and (b is None or (isinstance(b, Tensor) and b.shape == w.shape[:1] and b.device == a.device)))
    same = fits and a.dtype == w.dtype and (b is None or b.dtype == w.dtype) and a.dtype in FLOATS
    if not same and not (fits and autocast.is_on(a.device)):
        raise _misfit(op, x, weight, bias, width)


def _misfit(op: str, x: tuple[str, Any], weight: tuple[str, Any], bias: tuple[str, Any], width: int | None
            ) -> Exception:
    (x_name, a), (weight_name, w), (bias_name, b) = x, weight, bias
    named = [x, weight] if b is None else [x, weight, bias]
    for name, value in named:
        if not isinstance(value, Tensor):
            return TypeError(f"{op}: {name} must be a tensor or an array, got {type(value).__name__}")
        if value.device != a.device:
            return ValueError(f"{op}: {name} must be on {x_name}'s device, {a.device}, got {value.device}")
    if width is not None and (w.dim() != 2 or w.shape[1] != width):
        return ValueError(f"{op}: {weight_name} must have the shape (N, {width}), got {tuple(w.shape)}")
    if width is None and (a.dim() == 0 or w.dim() != 2 or a.shape[-1] != w.shape[1]):
        return ValueError(f"{op}: {x_name} and {weight_name} must have shapes (..., K) and (N, K), got "
                          f"{tuple(a.shape)} and {tuple(w.shape)}")
    if b is not None and b.shape != w.shape[:1]:
        return ValueError(f"{op}: {bias_name} must have the shape {tuple(w.shape[:1])}, got {tuple(b.shape)}")
    if a.dtype not in FLOATS:
        return TypeError(f"{op}: {x_name} must be of a floating-point dtype, got {a.dtype}")
    name, value = next((name, value) for name, value in named if value.dtype != a.dtype)
    return TypeError(f"{op}: {name} must have {x_name}'s dtype, {a.dtype}, got {value.dtype}")
