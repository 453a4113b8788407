"""Linear layers with what follows them: bias, activation, dropout, residual.

Product and bias are torch's (cuBLAS, oneDNN), in the precision that torch is set to. What follows is one
kernel of ours, which writes over the product where nobody needs that, or cuBLASLt's own epilogue; or all of
it is one kernel of ours (`ops.gemm`, `ops.gemv`). `route` decides. In a backward pass one kernel has
the gradients of activation, dropout and bias, and two products follow.

Shapes: x (..., K), weight (N, K), bias (N,), results (..., N). Dtypes: float16, bfloat16, float32, float64,
the same for all three; a residual may have another one, and the result then has the wider. Under autocast
they are cast as torch.nn.functional.linear casts its own. All tensors have first and second derivatives.
Raises TypeError or ValueError, with the name of the argument, for what does not fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from fusionrt import autocast, random
from fusionrt.activation import by_value, finishing, resolve
from fusionrt.array import converted, is_foreign
from fusionrt.autograd import Dispatched
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.dispatch import Run
from fusionrt.dtypes import FLOATS
from fusionrt.errors import CaptureError, MissingKernelError
from fusionrt.expr import Expr, argument
from fusionrt.op import Operator
from fusionrt.ops import gemm, gemv
from fusionrt.ops.activations import is_tanh
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.problem import unpack
from fusionrt.random import Rng
from fusionrt.rehearsal import stands_for
from fusionrt.replay import straight
from fusionrt.settling import planned_once
from fusionrt.sites import Sites
from fusionrt.watching import is_batched, is_recorded, is_watched, seen_by_torch

Tensor = torch.Tensor
NAMES = ("x", "weight", "bias", "residual")
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


def product(way: str, operator: Operator, x: Tensor, weight: Tensor, bias: Any, residual: Tensor | None,
            numbers: Numbers, rng: Rng | None, keep: bool = False) -> tuple[Tensor, Tensor | None]:
    """operator(x W^T + b, residual, *numbers), without autograd, and x W^T + b if it is to be kept;
    otherwise its memory is the result's."""
    if way != KERNEL:
        rows = rows_of(x)
        if way == EPILOGUE:
            is_gelu = operator.outputs[0] is _alone("gelu_tanh")
            return shaped(torch._addmm_activation(bias, rows, weight.t(), use_gelu=is_gelu), x), None
        added = None if residual is None else rows_of(residual)
        if OWN[way].supports(rows, weight, bias, added):
            try:
                out, z = OWN[way].linear(rows, weight, bias, operator.outputs[0], added, keep)
            except UNAVAILABLE:
                pass
            else:
                return shaped(out, x), None if z is None else shaped(z, x)
    z = F.linear(x, weight, bias)
    z = torch.ops.aten._unsafe_view(z, z.shape) if z._is_view() else z
    kernel = operator if keep else operator.over({0: 0})
    return kernel.launch([z, *(() if residual is None else (residual,)), *numbers], rng), z if keep else None


def shaped(rows: Tensor, x: Tensor) -> Tensor:
    """Rows in the dimensions of x; of an autograd.Function a view could not be changed in place."""
    return rows if x.dim() == 2 else torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[1]))


# -- gradients -------------------------------------------------------------------------------------

class LinearActivation(torch.autograd.Function):
    """operator(x W^T + b, residual, *numbers). Kept is the product, or the result where that is enough, as
    for relu."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, way: str, numbers: Numbers, x: Tensor, weight: Tensor,
                bias: Tensor | None, residual: Tensor | None) -> Tensor:
        ctx.operator, ctx.numbers, ctx.owned = operator, numbers, no_hooks()
        ctx.rng = operator.draw(x.device) if operator.streams else None
        ctx.residual = None if residual is None else residual.dtype
        out, z = product(way, operator, x, weight, bias, residual, numbers, ctx.rng, reads_product(operator))
        ctx.order = operator.drawn((out,), (out,))
        ctx.save_for_backward(x, weight, bias, z, out if reads_result(operator) else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        operator, needed = ctx.operator, ctx.needs_input_grad[3:]
        x, weight, bias, z, out = ctx.saved_tensors
        of_residual = grad_output.to(ctx.residual) if needed[3] else None
        if not any(needed[:3]):
            return None, None, None, None, None, None, of_residual
        # What is not read is only asked what shape it has.
        spare = z is None or ctx.residual is not None
        unread = x.new_empty(()).expand(grad_output.shape) if spare else None
        more = [*(() if ctx.residual is None else (unread,)), *ctx.numbers]
        if again(grad_output):
            def composed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return applied(operator, [F.linear(x, weight, bias), *more], ctx.rng)

            grads = differentiated(composed, (x, weight, bias), grad_output, needed)
            return None, None, None, *grads, of_residual
        kernel = backward_kernel(operator, 1, (0,) if needed[2] else ()).walking(ctx.order)
        if z is not None and let_go(ctx) and ctx.owned:
            kernel = kernel.over({0: 0})
        args = [unread if z is None else z, *more, *([out] if kernel.saved else []), grad_output]
        grad, *of_bias = unpack(kernel.launch([*args, bias] if needed[2] else args, ctx.rng))
        return (None, None, None, *of_product(grad, x, weight, needed), of_bias[0] if of_bias else None,
                of_residual)


_record = straight(LinearActivation)
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


def no_hooks() -> bool:
    """Whoever keeps saved tensors by hooks of his own may need them as they are."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: True)
    return hooks(True) is None


def let_go(ctx: Any) -> bool:
    """Forget what was saved, unless the graph is kept; whether that was done."""
    forget = getattr(ctx, "maybe_clear_saved_tensors", None)
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)()
    if forget is None or kept:
        return False
    forget()
    return True


def again(grad_output: Tensor) -> bool:
    """Whether a backward pass is to be differentiated, or seen by torch, operation by operation."""
    return torch.is_grad_enabled() or is_watched() or is_batched(grad_output)


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
    with torch.enable_grad():
        # Each its own, where one is passed twice. (Compiled autograd takes views to be of the inputs anew.)
        given = [id(t) for t in tensors if t is not None]
        twice = len(set(given)) < len(given)
        views = [t.view_as(t) if twice and t is not None else t for t in tensors]
        out = function(*views)
    wanted = [t for t, need in zip(views, needed, strict=False) if need and t is not None]
    found = iter(torch.autograd.grad(out, wanted, grad_output, create_graph=torch.is_grad_enabled()))
    return [next(found) if need else None for need in needed[:len(tensors)]]


def rows_of(t: Tensor) -> Tensor:
    """As a matrix, also where rows have no elements."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def of_product(grad: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of x and weight, given that of x W^T."""
    rows, of_x = rows_of(grad), None
    if needed[0]:
        of_x = rows @ weight
        of_x = of_x if x.dim() == 2 else of_x.view(x.shape)
    return [of_x, rows.t() @ rows_of(x) if needed[1] else None]


def of_bias(grad: Tensor, bias: Tensor) -> Tensor:
    """The gradient of a bias, given that of the rows that it was added to."""
    found: Tensor = _SUM.launch((grad, bias))
    return found


# -- calls -----------------------------------------------------------------------------------------

sites = Sites()


def _linear(op: str, x: Any, weight: Any, bias: Any, activation: Any, dropout_p: float = 0.0,
            residual: Any = None, training: bool = True) -> Any:
    tensors, key = (x, weight, bias, residual), None
    if not torch.compiler.is_dynamo_compiling():
        activation = by_value(op, activation)
        key = (op, activation, dropout_p, training, bias is None, residual is None, *shapes(x, weight))
        run = sites.find(key, tensors)
        if run is not None:
            return run(*tensors)
    if any(map(is_foreign, tensors)):
        (x, weight, bias, residual), restore = converted(op, dict(zip(NAMES, tensors, strict=True)))
        return restore(_linear(op, x, weight, bias, activation, dropout_p, residual, training))
    check(op, ("x", x), ("weight", weight), ("bias", bias))
    if residual is not None:
        _check_residual(op, x, weight, residual)
    scale = scale_of_kept(op, dropout_p, training, "dropout_p")
    numbers = () if scale is None else (float(dropout_p), scale)
    given = (*autocast.cast(x, weight, bias), residual)
    if key is not None and not seen_by_torch(*given):
        run = _chosen(op, activation, numbers, *given)
        return run(*given) if autocast.is_on(x.device) else sites.keep(key, tensors, run)(*tensors)
    x, weight, bias, _ = given
    if activation is None and scale is None and residual is None:
        return F.linear(x, weight, bias)
    finish = finishing(op, activation, False, residual is not None, scale is not None)
    return finish(F.linear(x, weight, bias), *(() if residual is None else (residual,)), *numbers)


def _chosen(op: str, activation: Any, numbers: Numbers, x: Tensor, weight: Tensor, bias: Tensor | None,
            residual: Tensor | None) -> Run:
    """For tensors like these: a function of them."""
    if activation is None and not numbers and residual is None:
        return lambda x, weight, bias, residual: F.linear(x, weight, bias)
    resolve(op, activation)  # what cannot be a key of `finishing` has an error of its own
    finish = finishing(op, activation, False, residual is not None, bool(numbers))
    operator: Operator = finish.operator
    if not is_recorded(x, weight, bias, residual):
        return inferring(operator, numbers, x, weight, bias)
    # A sum's gradient needs no kernel, and an activation that gives integers has none.
    if (activation is not None or numbers) and operator.differentiable[0]:
        way = way_of(operator, x, weight, bias, reads_product(operator))
        return lambda *tensors: _record(operator, way, numbers, *tensors)

    def composed(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
        return finish(F.linear(x, weight, bias), *(() if residual is None else (residual,)), *numbers)

    return composed


def inferring(operator: Operator, numbers: Numbers, x: Tensor, weight: Tensor, bias: Tensor | None) -> Run:
    """`product`, decided once."""
    way = way_of(operator, x, weight, bias)
    if way != KERNEL:
        return lambda x, weight, bias, residual: product(
            way, operator, x, weight, bias, residual, numbers, None)[0]
    finish = planned_once(operator.over({0: 0}))

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Any:
        z = F.linear(x, weight, bias)
        args = (z, *numbers) if residual is None else (z, residual, *numbers)
        return finish(*args, operator.draw(x.device)) if operator.streams else finish(*args)

    return run


@functools.lru_cache(4096)
def reads_product(operator: Operator, parts: int = 1) -> bool:
    """Whether its gradient needs the first `parts` arguments, or can do with the result."""
    return any(operator.read_by_backward(_first(operator, parts))[0][:parts])


@functools.lru_cache(4096)
def reads_result(operator: Operator, parts: int = 1) -> bool:
    return bool(operator.read_by_backward(_first(operator, parts))[1])


def _first(operator: Operator, parts: int) -> tuple[bool, ...]:
    return tuple(k < parts for k in range(len(operator.params)))


def shapes(*values: Any) -> list[Any]:
    return [getattr(value, "shape", None) for value in values]


# -- checks ----------------------------------------------------------------------------------------

def check(op: str, x: tuple[str, Any], weight: tuple[str, Any], bias: tuple[str, Any],
          width: int | None = None) -> None:
    """A linear layer's operands, with their names; `width`: of its input, if that is not x."""
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


def _check_residual(op: str, x: Tensor, weight: Tensor, residual: Any) -> None:
    shape = (*x.shape[:-1], weight.shape[0])
    if not isinstance(residual, Tensor):
        raise TypeError(f"{op}: residual must be a tensor or an array, got {type(residual).__name__}")
    if tuple(residual.shape) != shape:
        raise ValueError(f"{op}: residual must have the shape {shape}, got {tuple(residual.shape)}")


# -- ops -------------------------------------------------------------------------------------------

def _example(make: Make) -> tuple[Any, ...]:
    return make(ROWS, 1024), make(COLUMNS, 1024), make(COLUMNS)


@public(example=lambda make: (*_example(make), "gelu"))
def linear_activation(x: Any, weight: Any, bias: Any = None, activation: Any = None, *,
                      dropout_p: float = 0.0, residual: Any = None, training: bool = True) -> Any:
    """residual + dropout(activation(x W^T + b), dropout_p).

    x: (..., K), weight: (N, K), bias: (N,), of one dtype; residual: (..., N). `activation`: None, the name of
    one of the catalogue ("relu", "gelu", "gelu_tanh", "silu", ...), or a function of one traced value, as
    `fuse` takes them; define it once, outside of a loop. The mask is that of torch's generator's state,
    computed anew in the backward pass.
    Source: residual + F.dropout(activation(F.linear(x, weight, bias)), dropout_p, training).
    Raises TypeError or ValueError, with the argument, for what does not fit.

        linear_activation(x, weight, bias, "silu")
        linear_activation(x, weight, bias, lambda y: fusionrt.relu(y) * 0.5, dropout_p=0.1, residual=x)
    """
    return _linear("linear_activation", x, weight, bias, activation, dropout_p, residual, training)


@public(example=_example)
def linear_relu(x: Any, weight: Any, bias: Any = None) -> Any:
    """relu(x W^T + b). Arguments as in `linear_activation`.

    Source: torch.relu(F.linear(x, weight, bias)). Only the result is kept for the backward pass.

        linear_relu(torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32))
    """
    return _linear("linear_relu", x, weight, bias, "relu")


@public(example=_example)
def linear_gelu(x: Any, weight: Any, bias: Any = None, *, approximate: str = "none") -> Any:
    """gelu(x W^T + b). Arguments as in `linear_activation`.

    `approximate`: "none" (erf) or "tanh". Raises ValueError for another `approximate`.
    Source: F.gelu(F.linear(x, weight, bias), approximate=approximate).

        linear_gelu(torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32), approximate="tanh")
    """
    activation = "gelu_tanh" if is_tanh("linear_gelu", approximate) else "gelu"
    return _linear("linear_gelu", x, weight, bias, activation)


@public(example=_example)
def linear_relu_dropout(x: Any, weight: Any, bias: Any = None, p: float = 0.5, training: bool = True) -> Any:
    """dropout(relu(x W^T + b), p). Arguments as in `linear_activation`.

    Source: F.dropout(torch.relu(F.linear(x, weight, bias)), p, training). Only the result is kept for the
    backward pass. Raises ValueError for p outside [0, 1].

        linear_relu_dropout(torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32), 0.1)
    """
    scale_of_kept("linear_relu_dropout", p, training)
    return _linear("linear_relu_dropout", x, weight, bias, "relu", p, None, training)


@public(example=_example)
def linear_gelu_dropout(x: Any, weight: Any, bias: Any = None, p: float = 0.5, training: bool = True, *,
                        approximate: str = "none") -> Any:
    """dropout(gelu(x W^T + b), p). Arguments as in `linear_activation`.

    `approximate`: "none" (erf) or "tanh". Raises ValueError for p outside [0, 1] or another `approximate`.
    Source: F.dropout(F.gelu(F.linear(x, weight, bias), approximate=approximate), p, training).

        linear_gelu_dropout(torch.randn(8, 64), torch.randn(32, 64), torch.zeros(32), 0.1)
    """
    activation = "gelu_tanh" if is_tanh("linear_gelu_dropout", approximate) else "gelu"
    scale_of_kept("linear_gelu_dropout", p, training)
    return _linear("linear_gelu_dropout", x, weight, bias, activation, p, None, training)
