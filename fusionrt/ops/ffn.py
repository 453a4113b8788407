"""Feed-forward blocks: linear, activation, dropout, linear; and gated ones, act(gate) * up, then linear.

Between torch's matrix products stands one kernel, and one in the backward pass, which has the gradients of
activation, dropout and biases and writes over memory that the block owns. Kept for the backward pass, beside
the operands: the first product and the hidden layer; with `recompute` the first product alone; the hidden
layer alone where derivatives follow from it (relu, with dropout as well). Eager torch keeps the first two and
a mask, of gated blocks the activated gate. What is kept is let go as soon as the backward pass has read it.

Shapes: x (..., K), weights (hidden, K) and (N, hidden), results (..., N), of `linear_swiglu` (..., hidden).
Dtypes: float16, bfloat16, float32, float64, the same for all; autocast as in `linear_activation`. All tensors
have first and second derivatives. Raises TypeError or ValueError, with the name of the argument, for what
does not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusionrt import autocast
from fusionrt.activation import activated, by_value, finishing, resolve
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.expr import Expr
from fusionrt.op import Operator
from fusionrt.ops import linear_path
from fusionrt.ops.activations import is_tanh
from fusionrt.ops.dropout import scale_of_kept
from fusionrt.ops.pointwise import swish_multiply
from fusionrt.problem import unpack
from fusionrt.random import Rng
from fusionrt.row_fusion import Run, per_call, row_operator
from fusionrt.sites import Sites
from fusionrt.tape import Doing, Taped, forget, lets_go, note_hooks, taken, taped
from fusionrt.watching import is_recorded, seen_by_torch

Tensor = torch.Tensor
sites = Sites()


class Shape(NamedTuple):
    """Of a block: hidden = f(*parts of x W^T + b, *numbers), result = hidden V^T + c; its tensors are x, V, c
    and the `inner` ones, W and b.

    Of two parts, gate and up, each has a weight and a bias, or one weight, one bias have both.
    """

    parts: int
    weights: int
    numbers: tuple[float, ...] = ()

    @property
    def packed(self) -> bool:
        return self.weights < self.parts


# -- the steps -------------------------------------------------------------------------------------

def _products(do: Doing, shape: Shape, rows: Tensor, inner: Sequence[Any]) -> Tensor:
    """x W^T + b, of two weights side by side."""
    weights, biases = inner[:shape.weights], inner[shape.weights:]
    if shape.weights == 1:
        product: Tensor = do(F.linear, rows, weights[0], biases[0])
        return product
    z: Tensor = do(Tensor.new_empty, rows, (rows.shape[0], weights[0].shape[0] * 2))
    for weight, bias, part in zip(weights, biases, do(torch.chunk, z, 2, 1), strict=True):
        do(_linear_into, part, rows, weight, bias)
    return z


def _linear_into(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _hidden(do: Doing, operator: Operator, shape: Shape, z: Tensor, rng: Rng | None) -> Tensor:
    parts = (z,) if shape.parts == 1 else do(torch.chunk, z, shape.parts, 1)
    made: Tensor = do.launch(operator, [*parts, *shape.numbers], rng)
    return made


def _inside(do: Doing, operator: Operator, shape: Shape, z: Tensor | None, hidden: Tensor | None,
            grad_hidden: Tensor, rng: Rng | None, biases: Mapping[int, Tensor], forward: bool, owned: bool
            ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
    """What stands between the products of a backward pass: the gradient of x W^T + b, those of the `biases`
    of its parts, and with `forward` the hidden layer. They take the memory of `grad_hidden` and, if that is
    `owned`, of the product."""
    # Where the product is not read, it is only asked what shape it has.
    parts = ((grad_hidden,) if z is None else (z,) if shape.parts == 1 else
             do(torch.chunk, z, shape.parts, 1))
    grad_z = None if z is None or shape.parts == 1 else z if owned else do(torch.empty_like, z)
    memory = do(torch.chunk, grad_z, 2, 1) if shape.parts == 2 and not owned else ()
    kernel = linear_path.backward_kernel(operator, shape.parts, tuple(biases), forward, len(memory))
    args = [*parts, *shape.numbers, *([hidden] if kernel.saved else []), grad_hidden]
    given, made = len(args) - 1, shape.parts + len(biases)  # places of grad_hidden and of the hidden layer
    args += [*biases.values(), *memory]
    if shape.parts == 2:
        first = len(args) - 2 if memory else 0
        into = {0: first, 1: first + 1, made: given}
    else:
        into = {0: given, made: 0} if owned else {0: given}
    found = unpack(do.launch(kernel.over(into), args, rng))
    of_biases = dict(zip(biases, found[shape.parts:], strict=False))
    return found[0] if grad_z is None else grad_z, of_biases, found[made] if forward else None


def _of_products(do: Doing, grad_z: Tensor, x: Tensor, weights: Sequence[Tensor], needed: Sequence[bool]
                 ) -> list[Tensor | None]:
    """The gradients of x and of the weights."""
    if len(weights) == 1:
        return linear_path.of_product(do, grad_z, x, weights[0], needed)
    parts, of_x = do(torch.chunk, grad_z, 2, 1), None
    if needed[0]:
        of_x = do(Tensor.addmm_, do(torch.mm, parts[0], weights[0]), parts[1], weights[1])
        of_x = of_x if x.dim() == 2 else do(Tensor.view, of_x, x.shape)
    rows = linear_path.as_rows(do, x)
    return [of_x, *(do(torch.mm, do(Tensor.t, part), rows) if need else None
                    for part, need in zip(parts, needed[1:], strict=False))]


def _biases(do: Doing, shape: Shape, inner: Sequence[Any], needed: Sequence[bool]) -> dict[int, Tensor]:
    """Those whose gradients are needed, by their part."""
    wanted = [b if need else None for b, need in zip(inner, needed, strict=True)][shape.weights:]
    each = do(torch.chunk, wanted[0], 2) if shape.packed and wanted[0] is not None else wanted
    return {k: b for k, b in enumerate(each) if b is not None}


def _of_biases(do: Doing, shape: Shape, found: Mapping[int, Tensor]) -> list[Tensor | None]:
    if shape.packed:
        return [do(_joined, *found.values()) if found else None]
    return [found.get(k) for k in range(shape.parts)]


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


# -- the block -------------------------------------------------------------------------------------

def _inferring(operator: Operator, shape: Shape, x: Tensor, out_weight: Tensor, out_bias: Tensor | None,
               *inner: Any) -> Run:
    """Without gradients: the hidden layer takes the memory of the product, or of the gate."""
    if shape.parts == 1:
        way = linear_path.way_of(operator, x, inner[0], inner[1])

    def run(do: Doing, x: Tensor, out_weight: Tensor, out_bias: Tensor | None, *inner: Any) -> Tensor:
        rng = linear_path.drawn(do, operator, x)
        if shape.parts == 1:
            hidden, _ = linear_path.product(do, way, operator, x, inner[0], inner[1], None, shape.numbers,
                                            rng)
            out: Tensor = do(F.linear, hidden, out_weight, out_bias)
            return out
        z = _products(do, shape, linear_path.as_rows(do, x), inner)
        hidden = _hidden(do, operator.over({0: 0}), shape, z, rng)
        return linear_path.shaped(do, do(F.linear, hidden, out_weight, out_bias), x)

    return taped(run)


def _composed(run: Run, shape: Shape, recompute: bool, x: Tensor, out_weight: Tensor, out_bias: Tensor | None,
              *inner: Any) -> Tensor:
    """By ops that have gradients of their own."""
    products = [F.linear(x, weight, bias) for weight, bias in zip(
        inner[:shape.weights], inner[shape.weights:], strict=True)]
    parts = products[0].chunk(2, -1) if shape.packed else products

    def rest(*parts: Tensor) -> Tensor:
        return F.linear(run(*parts, *shape.numbers), out_weight, out_bias)

    found: Tensor = checkpoint(rest, *parts, use_reentrant=False) if recompute else rest(*parts)
    return found


class FeedForward:
    """In memory of its own, for tensors of one kind."""

    def __init__(self, operator: Operator, shape: Shape, recompute: bool, *tensors: Any) -> None:
        x, _, _, *inner = tensors
        self.operator, self.shape, self.recompute = operator, shape, recompute
        self.way = linear_path.KERNEL if shape.parts > 1 else linear_path.way_of(
            operator, x, inner[0], inner[1], linear_path.reads_product(operator))
        self.needed = [t is not None and t.requires_grad for t in tensors]
        self.apply = Taped(self, len(tensors)).apply

    def forward(self, do: Doing, ctx: Any, x: Tensor, out_weight: Tensor, out_bias: Tensor | None, *inner: Any
                ) -> Tensor:
        operator, shape = self.operator, self.shape
        note_hooks(do, ctx)
        rng, rows = linear_path.drawn(do, operator, x), linear_path.as_rows(do, x)
        do.set(ctx, "rng", rng)
        if shape.parts == 1:
            hidden, z = linear_path.product(do, self.way, operator, rows, inner[0], inner[1], None,
                                            shape.numbers, rng, linear_path.reads_product(operator))
        else:
            z = _products(do, shape, rows, inner)
            hidden = _hidden(do, operator, shape, z, rng)
        do.save(ctx, x, out_weight, out_bias, *inner, z,
                None if z is not None and self.recompute else hidden)
        return linear_path.shaped(do, do(F.linear, hidden, out_weight, out_bias), x)

    def backward(self, do: Doing, ctx: Any, saved: list[Any], grad_output: Tensor) -> tuple[Any, ...]:
        operator, shape, needed = self.operator, self.shape, self.needed
        owned = lets_go(do, ctx)
        x, out_weight, out_bias, *inner, z, hidden = taken(saved)
        if owned:
            forget(do, ctx)
        rng, grad_output = do.get(ctx, "rng"), linear_path.as_rows(do, grad_output)
        of_bias = linear_path.of_bias(do, grad_output, out_bias) if needed[2] else None
        inside, missing = needed[0] or any(needed[3:]), hidden is None and needed[1]
        if missing and not inside:
            hidden, missing = _hidden(do, operator, shape, z, rng), False
        of_weight = do(torch.mm, do(Tensor.t, grad_output), hidden) if needed[1] and not missing else None
        if not inside:
            return None, of_weight, of_bias, *(None for _ in inner)
        hidden = hidden if z is None else None  # before the memory of its gradient is asked for
        grad_z, of_biases, made = _inside(
            do, operator, shape, z, hidden, do(torch.mm, grad_output, out_weight), rng,
            _biases(do, shape, inner, needed[3:]), missing, owned)
        z = None
        of_weight = of_weight if made is None else do(torch.mm, do(Tensor.t, grad_output), made)
        hidden = made = None
        of_x, *of_weights = _of_products(do, grad_z, x, inner[:shape.weights], (needed[0], *needed[3:]))
        return of_x, of_weight, of_bias, *of_weights, *_of_biases(do, shape, of_biases)

    def again(self, ctx: Any, saved: list[Any], grad_output: Tensor) -> tuple[Any, ...]:
        def composed(*tensors: Any) -> Tensor:
            return _composed(lambda *args: linear_path.applied(self.operator, args, ctx.rng), self.shape,
                             False, *tensors)

        return tuple(linear_path.differentiated(composed, saved[:-2], grad_output, self.needed))


def _block(make: Callable[[], Any], shape: Shape, recompute: bool, key: tuple[Any, ...] | None,
           tensors: Sequence[Any]) -> Any:
    """`make` gives the function of the hidden layer."""
    given = autocast.cast(*tensors)
    if key is None or seen_by_torch(*given):
        # In a graph; torch.func and dispatch modes know no checkpoints.
        return _composed(make(), shape, recompute and torch.compiler.is_dynamo_compiling(), *given)
    operator: Operator = make().operator

    def choose() -> Run:
        if not is_recorded(*given):
            return _inferring(operator, shape, *given)
        run: Run = FeedForward(operator, shape, recompute, *given).apply
        return run

    return autocast.chosen(sites, key, given, choose)(*given)


@per_call
def gating(op: str, activation: Any) -> Run:
    """activation(gate) * up in one kernel."""

    def expression(gate: Expr, up: Expr) -> Expr:
        return activated(op, gate, activation) * up

    return row_operator(expression, name=op, row_dims=0)


def _gated(op: str, activation: str, recompute: bool, arrays: dict[str, Any]) -> Any:
    x, gate, up, down, gate_bias, up_bias, down_bias = arrays.values()
    inner = (gate, gate_bias) if up is None else (gate, up, gate_bias, up_bias)
    tensors, key = (x, down, down_bias, *inner), None
    if not torch.compiler.is_dynamo_compiling():
        key = (op, activation, recompute)
        run = sites.find(key, tensors)
        if run is not None:
            return run(*tensors)
    width = _width(op, x, gate, up, gate_bias, up_bias)
    linear_path.check(op, ("x", x), ("down_weight", down), ("down_bias", down_bias), width)
    make = functools.partial(gating, op, activation)
    return _block(make, Shape(2, len(inner) // 2), recompute, key, tensors)


def _width(op: str, x: Any, gate: Any, up: Any, gate_bias: Any, up_bias: Any) -> int:
    """Of the gated hidden layer, of operands that fit."""
    linear_path.check(op, ("x", x), ("gate_weight", gate), ("gate_bias", gate_bias))
    if up is None and (gate.shape[0] % 2 or up_bias is not None):
        came = f"{gate.shape[0]} rows" if up_bias is None else "an up_bias"
        raise ValueError(f"{op}: without up_weight, gate_weight and gate_bias hold both, the gate's rows "
                         f"first, got {came}")
    if up is not None:
        linear_path.check(op, ("x", x), ("up_weight", up), ("up_bias", up_bias))
        if up.shape != gate.shape:
            raise ValueError(f"{op}: gate_weight and up_weight must have one shape, got {tuple(gate.shape)} "
                             f"and {tuple(up.shape)}")
    rows: int = gate.shape[0]
    return rows // 2 if up is None else rows


# -- ops -------------------------------------------------------------------------------------------

FFN = "x weight2 bias2 weight1 bias1"  # in the order of `Shape`


def _example(make: Make) -> tuple[Any, ...]:
    return make(ROWS, 1024), make(COLUMNS, 1024), make(COLUMNS), make(1024, COLUMNS), make(1024)


@public(example=_example, asks=(sites, FFN), arrays=FFN)
def ffn(x: Any, weight1: Any, bias1: Any, weight2: Any, bias2: Any, activation: Any = "gelu", *,
        dropout_p: float = 0.0, training: bool = True, recompute: bool = False) -> Any:
    """dropout(activation(x W1^T + b1), dropout_p) W2^T + b2.

    x: (..., K), weight1: (H, K), bias1: (H,) or None, weight2: (N, H), bias2: (N,) or None, of one dtype.
    `activation`, the mask: as in `linear_activation`. `recompute`: the backward pass computes the hidden
    layer, of shape (..., H), again from the product x W1^T, and only that is kept.
    Source: F.linear(F.dropout(activation(F.linear(x, weight1, bias1)), dropout_p, training), weight2, bias2).

        ffn(x, linear1.weight, linear1.bias, linear2.weight, linear2.bias, "gelu", dropout_p=0.1)
    """
    tensors, key = (x, weight2, bias2, weight1, bias1), None
    if not torch.compiler.is_dynamo_compiling():
        activation = by_value("ffn", activation)
        key = ("ffn", activation, dropout_p, training, recompute)
        run = sites.find(key, tensors)
        if run is not None:
            return run(*tensors)
    linear_path.check("ffn", ("x", x), ("weight1", weight1), ("bias1", bias1))
    linear_path.check("ffn", ("x", x), ("weight2", weight2), ("bias2", bias2), weight1.shape[0])
    scale = scale_of_kept("ffn", dropout_p, training, "dropout_p")
    shape = Shape(1, 1, () if scale is None else (float(dropout_p), scale))
    if key is not None:
        resolve("ffn", activation)  # what cannot be a key of `finishing` has an error of its own
    make = functools.partial(finishing, "ffn", activation, False, False, scale is not None)
    return _block(make, shape, recompute, key, tensors)


@public(example=lambda make: (make(ROWS, 1024), make(COLUMNS, 1024), make(COLUMNS, 1024)),
        arrays="x gate_weight up_weight gate_bias up_bias")
def linear_swiglu(x: Any, gate_weight: Any, up_weight: Any = None, *, gate_bias: Any = None,
                  up_bias: Any = None) -> Any:
    """silu(x G^T + g) * (x U^T + u): torch's products and one kernel, `swiglu_mlp` without its last layer.

    x: (..., K), gate_weight, up_weight: (H, K); biases (H,) or None. Without up_weight gate_weight is
    (2H, K), the gate's rows first, and so is gate_bias.
    Source: F.silu(F.linear(x, G, g)) * F.linear(x, U, u).

        linear_swiglu(x, gate.weight, up.weight)
    """
    op = "linear_swiglu"
    _width(op, x, gate_weight, up_weight, gate_bias, up_bias)
    gate = F.linear(x, gate_weight, gate_bias)
    both = gate.chunk(2, -1) if up_weight is None else (gate, F.linear(x, up_weight, up_bias))
    return swish_multiply(*both)


GATED = "x down_weight down_bias gate_weight up_weight gate_bias up_bias"  # in the order of `Shape`


def _gated_example(make: Make) -> tuple[Any, ...]:
    return make(ROWS, 1024), make(COLUMNS, 1024), make(COLUMNS, 1024), make(1024, COLUMNS)


@public(example=_gated_example, asks=(sites, GATED), arrays=GATED)
def swiglu_mlp(x: Any, gate_weight: Any, up_weight: Any, down_weight: Any, *, gate_bias: Any = None,
               up_bias: Any = None, down_bias: Any = None, recompute: bool = False) -> Any:
    """(silu(x G^T + g) * (x U^T + u)) D^T + d: the feed-forward block of LLaMA.

    x: (..., K), gate_weight, up_weight: (H, K), down_weight: (N, H); biases (H,), (H,), (N,), or None.
    Without up_weight gate_weight is (2H, K), the gate's rows first, and so is gate_bias. `recompute`: as in
    `ffn`.
    Source: F.linear(F.silu(F.linear(x, G, g)) * F.linear(x, U, u), D, d); Shazeer 2020.

        swiglu_mlp(x, gate.weight, up.weight, down.weight)
        swiglu_mlp(x, gate_up.weight, None, down.weight)
    """
    return _gated("swiglu_mlp", "silu", recompute, {
        "x": x, "gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight,
        "gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias})


@public(example=_gated_example, asks=(sites, GATED), arrays=GATED)
def geglu_mlp(x: Any, gate_weight: Any, up_weight: Any, down_weight: Any, *, gate_bias: Any = None,
              up_bias: Any = None, down_bias: Any = None, approximate: str = "none", recompute: bool = False
              ) -> Any:
    """(gelu(x G^T + g) * (x U^T + u)) D^T + d: the feed-forward block of Gemma.

    `approximate`: "none" (erf) or "tanh"; all else as in `swiglu_mlp`.
    Source: F.linear(F.gelu(F.linear(x, G, g)) * F.linear(x, U, u), D, d); Shazeer 2020.

        geglu_mlp(x, gate.weight, up.weight, down.weight, approximate="tanh")
    """
    activation = "gelu_tanh" if is_tanh("geglu_mlp", approximate) else "gelu"
    return _gated("geglu_mlp", activation, recompute, {
        "x": x, "gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight,
        "gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias})
