"""Sums over rows of no whole packs, several of which are seen as one."""

import pytest
import torch
from checking import BF16, F16, F32, F64, assert_same_bits, check, lost, needs_nvrtc

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler, launch
from fusionrt.runtime.parts import split

ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
dtypes = pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
shapes = pytest.mark.parametrize("shape", [
    (1 << 17, 33), (1 << 20, 7), (8192, 1023), (96, 50257), (1 << 16, 40), (1 << 15, 33 * 8), (12 << 16, 9),
    (1 << 22, 1)], ids=str)
OPS = {name: getattr(torch, name) for name in ("sum", "mean", "amax", "var", "logsumexp")}


def gradients(x, bias, residual):
    return frt.bias_dropout_add(x, bias, residual, p=0.25)


def problems(function, *operands):
    with collecting() as found:
        y = function(*operands)
        if y.requires_grad:
            y.backward(torch.empty_like(y))
    return found


def of(dtype, *shapes):
    return [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]


def side_by_side(*needed):
    return [part.problem.abreast for p in needed for part in split(p) if part.rows is not None]


def test_how_many():
    """As many as are whole packs and leave few threads without any, where that many divide the rows."""
    def bias(dtype, rows, columns):
        return side_by_side(*problems(frt.bias_gelu, *of(dtype, (rows, columns), (columns,))))

    assert bias(BF16, 1 << 20, 33) == [32] and bias(F32, 1 << 20, 33) == [16]
    assert bias(BF16, 1 << 22, 7) == [8] and bias(F32, 1 << 22, 7) == [4]
    assert bias(BF16, 640, 50257) == [8] and bias(F32, 644, 50257) == [4]
    assert bias(BF16, 1 << 20, 40) == [16]  # five packs
    assert bias(BF16, 1 << 20, 64) == bias(BF16, 8192, 4096) == bias(BF16, 1 << 20, 24) == [1]
    assert bias(BF16, (1 << 20) + 1, 33) == [1]
    assert bias(BF16, 4096, 33) == [1]  # would leave too few blocks


def test_what_keeps_its_rows():
    x, column = of(BF16, (1 << 20, 33), (1 << 20, 1))
    assert side_by_side(*problems(lambda x: frt.var(x, 0), x.detach())) == [32]
    assert side_by_side(*problems(lambda x: frt.var(x, 0), x.detach()[:1 << 16])) == [1]  # gains nothing
    assert side_by_side(*problems(lambda x: frt.argmax(x, 0), x.detach())) == [1]  # places
    assert side_by_side(*problems(lambda x: frt.sum(x, 0), x.detach()[:, :32])) == [1]  # gaps
    scaled = problems(frt.multiply_relu, x, column)
    assert set(side_by_side(*scaled)) == {1}  # what changes from row to row would be gathered
    assert side_by_side(*problems(frt.bias_gelu, x, *of(BF16, (1,)))) == [1]  # one sum of all


@needs_nvrtc
@pytest.mark.covering(1)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("name", [*OPS, "gradients", "mask"])
def test_no_kernel_spills(name, dtype, arch):
    x, bias, residual = of(dtype, (1 << 17, 33), (33,), (1 << 17, 33))
    found = (problems(gradients, x, bias, residual) if name == "gradients" else
             problems(frt.bias_relu, x, bias) if name == "mask" else
             problems(lambda x: getattr(frt, name)(x, 0), x.detach()))
    assert max(side_by_side(*found)) > 1
    summing = [p for p in found if max(side_by_side(p), default=1) > 1]
    for source in {s.text: s for p in summing for s in launch.sources(p)}.values():
        made = compiler.build(source.text, source.entry, compiler.target(source.entry, arch), "rows")
        assert not made.metadata["spills"]


@pytest.mark.gpu
@dtypes
@shapes
@pytest.mark.parametrize("op", OPS)
def test_reductions(op, shape, dtype):
    x = torch.randn(shape, device="cuda").add(0.5).to(dtype)
    magnitude = {"sum": x.double().abs().sum(0), "mean": x.double().abs().mean(0)}.get(op)
    check(lambda x: getattr(frt, op)(x, 0), (x,), reference=lambda x: OPS[op](x, 0),
          extra=0.0 if magnitude is None else lost(magnitude, dtype))


@pytest.mark.gpu
@dtypes
@shapes
@pytest.mark.parametrize("op", ["bias_gelu", "bias_relu", "scale_bias_sigmoid"])
def test_gradients(op, shape, dtype):
    """Of operands at whole packs, and one element further."""
    function, columns = getattr(frt, op), shape[1]
    for offset in (0, 1):
        def at(n, offset=offset):
            return torch.randn(n + offset, device="cuda").to(dtype)[offset:]

        x, grad = at(shape[0] * columns).view(shape), at(shape[0] * columns).view(shape)
        vectors = [at(columns) for _ in range(1 + (op == "scale_bias_sigmoid"))]
        leaves = [t.detach().requires_grad_() for t in (x, *vectors)]
        exact = [t.detach().double().requires_grad_() for t in (x, *vectors)]
        found = torch.autograd.grad(function(*leaves), leaves, grad)
        again = torch.autograd.grad(function(*leaves), leaves, grad)
        truth = torch.autograd.grad(function.reference(*exact), exact, grad.double())
        eps = torch.finfo(dtype).eps
        for ours, same, true in zip(found, again, truth, strict=True):
            assert_same_bits(ours, same)
            terms = shape[0] ** 0.5 if true.dim() == 1 else 1
            assert (ours.double() - true).abs().max() <= 4 * eps * (true.abs().max() + terms)


@pytest.mark.gpu
@dtypes
def test_the_same_random_numbers(dtype):
    """Forward and backward, whatever the packs."""
    x, bias = (torch.rand(s, device="cuda").add(1).to(dtype).requires_grad_() for s in ((1 << 15, 33), (33,)))
    residual = torch.zeros_like(x, requires_grad=True)
    y = gradients(x, bias, residual)
    grad = torch.randn_like(y)
    of_x, of_bias, of_residual = torch.autograd.grad(y, (x, bias, residual), grad)
    kept = y.detach() != 0
    assert 0.74 < kept.double().mean() < 0.76
    assert_same_bits(of_residual, grad)
    assert not of_x[~kept].any() and (of_x[kept] != 0).double().mean() > 0.99
    total = torch.where(kept, grad.double() / 0.75, 0.0).sum(0)
    assert (of_bias.double() - total).abs().max() <= 4 * torch.finfo(dtype).eps * total.abs().max() + 1e-3
