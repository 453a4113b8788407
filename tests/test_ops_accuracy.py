"""Every op is as accurate as torch's own, results and gradients, in every size."""

import pytest
import torch
from checking import (
    BF16,
    F32,
    F64,
    assert_as_accurate,
    assert_same_bits,
    dtypes,
    evaluate,
    make,
    wide,
)
from pointwise_ops import ALL, RANDOM, UNARY, check_op, exact, example

import fusionrt as frt
from fusionrt.catalogue import OPS
from fusionrt.runtime import pointwise

SHAPES = [(33, 17), (0,), (4, 0, 3), (17,), (1023,), (5, 7, 9), (3, 1, 11), (31, 333)]
# Arguments besides those of the op's example: op, what to append, keyword arguments.
VARIANTS = [
    ("leaky_relu", (0.2,), {}),
    ("elu", (1.5,), {}),
    ("softplus", (2.0, 3.0), {}),
    *((name, (), {"approximate": "tanh"}) for name in ("gelu", "bias_gelu", "geglu", "gelu_dropout")),
    ("swish_multiply", (), {"activate": "gate"}),
    ("prelu_bias", (), {"bias_first": False}),
]


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("shape", [(33, 17), (1023,)], ids=str)
@pytest.mark.parametrize("name", [n for n in ALL if n != "quantize_int8"])
def test_accuracy(name, shape, dtype, device):
    check_op(name, *example(name, shape, dtype, device))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", UNARY)
@dtypes
def test_accuracy_everywhere(name, dtype, device):
    """Tails and roots of a function and its derivative, against torch's accuracy just there."""
    x = torch.cat(
        [torch.linspace(a, -a, 5001, dtype=F64, device=device) for a in (-3, -12, -100)]
    ).to(dtype)
    kwargs = {"training": False} if name in RANDOM else {}
    out, (grad,) = evaluate(OPS[name], (x,), kwargs)
    theirs, (their_grad,) = evaluate(OPS[name].reference, (x,), kwargs)
    true, (true_grad,) = evaluate(exact(name, kwargs), (x.double(),), kwargs)
    assert_as_accurate(out, theirs, true, near=x)
    if name.startswith("hard"):  # in float64 the kinks of the reference are not torch's
        grad = torch.where(x.abs() == 3, their_grad, grad)
        true_grad = torch.where(x.abs() == 3, their_grad.double(), true_grad)
    assert_as_accurate(grad, their_grad, true_grad, near=x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("name", [n for n in ALL if "quantize" not in n])
def test_single_elements(name, shape, device):
    """Many calls: by a single element nobody's accuracy can be judged."""
    drawn = [example(name, shape, F32, device) for _ in range(65)]
    kwargs = drawn[0][1]

    def results(function, convert=lambda a: a):
        return torch.stack([function(*map(convert, args), **kwargs) for args, _ in drawn])

    def gradients(function, convert=lambda a: a):
        found = [evaluate(function, list(map(convert, args)), kwargs)[1] for args, _ in drawn]
        return [torch.stack(grads) for grads in zip(*found, strict=True)]

    op, true = OPS[name], results(exact(name, kwargs), wide)
    assert_as_accurate(results(op), results(op.reference), true, near=true)
    triples = (gradients(op), gradients(op.reference), gradients(exact(name, kwargs), wide))
    for grad, their_grad, true_grad in zip(*triples, strict=True):
        assert_as_accurate(grad, their_grad, true_grad)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [n for n in ALL if n != "quantize_int8"])
def test_shapes(name, shape, device):
    args, kwargs = example(name, shape, F32, device)
    out, _ = check_op(name, args, kwargs)
    assert out.is_contiguous()


@pytest.mark.gpu
@pytest.mark.covering(2)
@dtypes
@pytest.mark.parametrize("columns", [1000, 999])
@pytest.mark.parametrize("name", ALL)
def test_many_elements(name, columns, dtype):
    """Few elements have a kernel of their own: what it makes of the first rows, the other one makes of them
    in a matrix that has more, masks of dropout as well."""
    rows, few = 701, 33
    assert few * columns < pointwise.FEW < rows * columns
    args, _ = example(name, (rows, columns), dtype, "cuda")
    seeds = make((rows, columns), dtype, "cuda")

    def found(some):
        torch.manual_seed(7)
        leaves = [a.requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in some]
        out = OPS[name](*leaves)
        full = [a for a in leaves if torch.is_tensor(a) and a.shape == out.shape and a.requires_grad]
        return [out, *(torch.autograd.grad(out, full, seeds[:len(out)].to(out.dtype))
                       if out.requires_grad else ())]

    first = [a[:few].detach() if torch.is_tensor(a) and a.dim() == 2 else a for a in args]
    for whole, part in zip(found(args), found(first), strict=True):
        assert_same_bits(whole[:few], part)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "more", "kwargs"), VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_options(name, more, kwargs, dtype, device):
    args, fixed = example(name, (33, 17), dtype, device)
    check_op(name, [*args, *more], {**fixed, **kwargs})


@pytest.mark.parametrize("name", ["leaky_relu", "elu"])
def test_tensor_parameters(name, device):
    """What is a number in torch may be a tensor: per channel, with a gradient."""
    x, slope = make((33, 17), F64, device), make((17,), F64, device)
    out, grads = evaluate(OPS[name], (x, slope), {}, torch.ones(33, 17, device=device))
    columns = [evaluate(OPS[name].reference, (x[:, j], float(slope[j])), {}) for j in range(17)]
    torch.testing.assert_close(out, torch.stack([c[0] for c in columns], 1))
    torch.testing.assert_close(grads[0], torch.stack([c[1][0] for c in columns], 1))
    negative = torch.where(x > 0, 0, x if name == "leaky_relu" else x.expm1()).sum(0)
    torch.testing.assert_close(grads[1], negative)


def test_large_sums(device):
    """Gradients of broadcast operands that take several blocks or tasks."""
    for shape, other in [
        ((1031, 257), (257,)),
        ((257, 1031), (257, 1)),
        ((40_001,), ()),
        ((7, 333, 65), (333, 1)),
        ((300_000, 3), (3,)),
        ((3, 100_003), (3, 1)),
    ]:
        for dtype in (F32, BF16):
            x, bias = make(shape, dtype, device), make(other, dtype, device)
            check_op("add_sigmoid", (x, bias))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("broadcast", [False, True])
def test_more_elements_than_32_bits_count(broadcast):
    rows, columns = 2**21 + 3, 1031
    x = torch.randn(rows, columns, dtype=BF16, device="cuda").requires_grad_()
    b = torch.randn((columns,) if broadcast else (rows, columns), dtype=BF16, device="cuda")
    assert x.numel() > 2**31
    b.requires_grad_()
    out = frt.add_relu(x, b)
    grads = torch.autograd.grad(out, (x, b), torch.ones_like(out))
    expected_bias = torch.zeros(columns, dtype=F64, device="cuda")
    with torch.no_grad():
        for part in torch.arange(rows, device="cuda").split(2**17):
            part = slice(int(part[0]), int(part[-1]) + 1)
            truth = torch.relu(x[part].float() + (b if broadcast else b[part]).float()).to(BF16)
            assert torch.equal(out[part], truth)
            assert torch.equal(grads[0][part], (truth > 0).to(BF16))
            expected_bias += (truth > 0).sum(0)
            if not broadcast:
                assert torch.equal(grads[1][part], (truth > 0).to(BF16))
    if broadcast:
        torch.testing.assert_close(grads[1].double(), expected_bias, rtol=2**-8, atol=0)
