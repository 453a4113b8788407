"""Ops that draw: rates, seeds, and one mask in forward, backward and recomputation."""

import math

import pytest
import torch
from checking import BF16, F16, F32, F64, assert_same_bits, make, needs_nvrtc
from pointwise_ops import RANDOM
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusionrt as frt
from fusionrt.catalogue import OPS
from fusionrt.ops.dropout import _bias_dropout_add
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler, launch


def dropout_case(name, n, device, dtype=F32):
    """Arguments whose result is zero only where dropped, and the result with nothing dropped."""
    x = torch.randn(n, dtype=F64, device=device).abs().add(0.1).to(dtype)
    zeros = [
        torch.zeros(n, dtype=dtype, device=device)
        for _ in range(len(OPS[name].example(make_nothing)) - 1)
    ]
    return [x, *zeros], OPS[name](x, *zeros, training=False)


def make_nothing(*shape):
    return None


@pytest.mark.covering(1)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", RANDOM)
def test_dropout(name, p, device):
    n = 2**18 + 5
    args, whole = dropout_case(name, n, device)
    x = args[0].requires_grad_()
    torch.manual_seed(7)
    out = OPS[name](*args, p)
    torch.manual_seed(7)
    assert_same_bits(out, OPS[name](*args, p))
    assert not torch.equal(out, OPS[name](*args, p))
    mask = out != 0
    rate = mask.double().mean().item()
    assert abs(rate - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n) + 2**-16
    scale = torch.tensor(1 / (1 - p), dtype=F32, device=device)
    assert torch.equal(out[mask], (whole * scale)[mask])
    grad, again = (
        torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)[0] for _ in range(2)
    )
    assert_same_bits(grad, again)
    assert torch.equal(grad != 0, mask)
    (whole_grad,) = torch.autograd.grad(OPS[name](*args, training=False).sum(), x)
    torch.testing.assert_close(grad, torch.where(mask, whole_grad * scale, 0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_extremes(name, device):
    args, whole = dropout_case(name, 1023, device)
    assert_same_bits(OPS[name](*args, 0.0), whole)
    assert_same_bits(OPS[name](*args, 0.5, False), whole)
    assert_same_bits(OPS[name](*args, p=1.0), torch.zeros_like(whole))
    x = args[0].requires_grad_()
    (grad,) = torch.autograd.grad(OPS[name](*args, 1.0).sum(), x)
    assert_same_bits(grad, torch.zeros_like(x))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
def test_dropout_mask_does_not_depend_on_the_dtype(name, dtype, device):
    masks = []
    for d in (F32, dtype):
        args, _ = dropout_case(name, 1023, device, d)
        torch.manual_seed(3)
        masks.append(OPS[name](*args, 0.3) != 0)
    assert torch.equal(*masks)


def test_dropout_adds_the_residual_and_the_bias(device):
    x, residual = (make((33, 17), F32, device).requires_grad_() for _ in range(2))
    bias = make((17,), F32, device).requires_grad_()
    out = frt.bias_dropout_add(x, bias, residual, 0.4)
    grad_output = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, bias, residual), grad_output)
    kept = (grads[0] != 0).float() / 0.6
    torch.testing.assert_close(out, (x + bias) * kept + residual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[0], grad_output * kept)
    torch.testing.assert_close(grads[1], (grad_output * kept).sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(grads[2], grad_output)
    kept = torch.autograd.grad(frt.dropout_add(x, residual, 0.4).sum(), x)[0]
    assert 0.4 < (kept != 0).double().mean() < 0.8


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("shape", [(301, 512), (65, 3, 1536), (64, 264), (1000, 24), (33, 1030)])
def test_gradient_of_a_dropped_bias(shape, dtype, device):
    """Whole blocks of columns, in which lanes of a GPU share what they draw, and others."""
    x = torch.full(shape, 64.0, dtype=dtype, device=device, requires_grad=True)
    bias, residual = torch.zeros(shape[-1:], dtype=dtype, device=device), torch.zeros_like(x)
    out = frt.bias_dropout_add(x, bias.requires_grad_(), residual, 0.25)
    grad_output = make(shape, dtype, device)
    found = torch.autograd.grad(out, (x, bias), grad_output)
    expected = torch.where(out != 0, grad_output.double() / 0.75, 0)
    tolerance = 2 * torch.finfo(dtype).eps
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0].double(), expected, rtol=tolerance, atol=smallest)
    total = expected.flatten(0, -2).sum(0)
    torch.testing.assert_close(found[1].double(), total, rtol=tolerance, atol=1e-4)


@needs_nvrtc
def test_lanes_that_share_what_they_draw():
    """Where vectors are two Philox counters and rows whole blocks of them; on every GPU without spills."""
    backward = _bias_dropout_add.operator.gradient(
        (True, True, False, False, False), (True,), (True, True, False, False, False)
    )
    for columns, dtype, shared in ((1024, BF16, True), (1024, F32, False), (264, BF16, False)):
        x = torch.empty(64, columns, dtype=dtype, device="meta")
        with collecting("cuda") as problems:
            backward.launch((x, x[0], x, 0.5, 2.0, x), (0, 0, None))
        reduce, _ = launch.sources(problems[0])
        assert f"TWINS = {str(shared).lower()};" in reduce.text
        for arch in compiler.ARCHITECTURES if shared else ():
            made = compiler.build(reduce.text, reduce.entry, arch, "bias_dropout_add").metadata
            assert made["spills"] == 0


def test_threads_that_have_their_columns_alone_share_no_draws():
    """Their lanes lie beside each other, not in the halves of a block."""
    x = torch.empty(128, 8, 4096, dtype=BF16, device="meta").transpose(1, 2).requires_grad_()
    with collecting("cuda") as problems:
        y = frt.dropout_add_layer_norm(x, torch.empty_like(x), p=0.5)
        forward = len(problems)
        y.backward(torch.empty_like(y))
    for of_a_pass in (problems[:forward], problems[forward:]):
        texts = [source.text for problem in of_a_pass for source in launch.sources(problem)]
        assert any("ALONE = true;" in text for text in texts)
        assert not any("ALONE = true;" in text and "TWINS = true;" in text for text in texts)


@pytest.mark.parametrize("n", [4096, 4104])
def test_norms_across_memory_see_the_mask_that_they_apply(n, device):
    shape = (128 if device == "cuda" else 8, 8, n)
    x = (make(shape, F32, device).abs() + 0.5).to(BF16).transpose(1, 2).requires_grad_()
    weight, bias = torch.randn(8, device=device), torch.randn(8, device=device)
    y, s = frt.dropout_add_layer_norm(x, torch.zeros_like(x), weight, bias, 0.5, return_sum=True)
    exact = x.detach().double().requires_grad_()
    expected = F.layer_norm(torch.where(s != 0, 2 * exact, 0), (8,), weight.double(), bias.double())
    grad = torch.randn_like(y)
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad)[0].double(),
                               torch.autograd.grad(expected, exact, grad.double())[0], rtol=3e-2, atol=3e-2)


def test_dropout_of_every_layout_has_the_mask_of_its_memory(device):
    x = make((64, 48), F32, device).abs() + 0.1
    torch.manual_seed(1)
    straight = frt.relu_dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(frt.relu_dropout(x.t(), 0.5).t() != 0, straight != 0)


def test_second_derivative_of_dropout_has_the_same_mask(device):
    x = (make((1023,), F64, device).abs() + 0.1).requires_grad_()
    out = frt.gelu_dropout(x, 0.5)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(out != 0, first != 0)
    assert torch.equal(out != 0, second != 0)


def test_checkpoint_repeats_the_mask(device):
    x = make((33, 17), F32, device).requires_grad_()

    def layer(x):
        return frt.gelu_dropout(frt.gelu_dropout(x * 2, 0.5) + 1, 0.3)

    def gradient(function):
        torch.manual_seed(11)
        torch.rand(3, device=device)  # a state that is not that of a fresh seed
        x.grad = None
        function().square().sum().backward()
        return x.grad

    plain = gradient(lambda: layer(x))
    assert_same_bits(plain, gradient(lambda: layer(x)))
    for reentrant in (False, True):
        assert_same_bits(
            plain,
            gradient(
                lambda r=reentrant: checkpoint(
                    layer, x * 1, use_reentrant=r, preserve_rng_state=True
                )
            ),
        )


@pytest.mark.parametrize("name", RANDOM)
def test_each_of_many_calls_is_checked(name, device):
    """The short way of calls like the one before is for a probability that drops some, in training."""
    args, whole = dropout_case(name, 1023, device)
    for p in (0.5, 0.5, 0.9, 0.5):
        torch.manual_seed(7)
        out = OPS[name](*args, p)
        assert_same_bits(out[out != 0], (whole * torch.tensor(1 / (1 - p), device=device))[out != 0])
        torch.manual_seed(7)
        assert_same_bits(out, OPS[name](*args, torch.tensor(p, dtype=F64).item(), True))
    assert_same_bits(OPS[name](*args, 0.5, False), whole)
    assert_same_bits(OPS[name](*args, 0), whole)
    assert not OPS[name](*args, 1).any()
    for p in (-0.5, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"{name}: p must be a probability"):
            OPS[name](*args, p)
    with pytest.raises(TypeError, match=f"{name}: p must be a number, got Tensor"):
        OPS[name](*args, torch.tensor(0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("name", RANDOM)
def test_masks_of_a_cpu_and_a_gpu_are_the_same(name):
    for n in (1, 7, 1023, 2**17 + 3):
        masks = []
        for device in ("cpu", "cuda"):
            args, _ = dropout_case(name, n, device)
            torch.manual_seed(5)
            masks.append([(OPS[name](*args, 0.5) != 0).cpu() for _ in range(3)])
        assert all(map(torch.equal, *masks))
        assert n < 1000 or not torch.equal(masks[0][0], masks[0][1])


@pytest.mark.parametrize("name", ["gelu_dropout", "relu_dropout", "dropout_add"])
def test_a_probability_that_is_an_argument_may_be_one(name, device):
    op = getattr(frt, name)
    fused = frt.fuse((lambda x, p: op(x, x, p)) if name == "dropout_add" else (lambda x, p: op(x, p)))
    x = torch.ones(3, device=device, requires_grad=True)
    y = fused(x, 1.0)
    rest = 1.0 if name == "dropout_add" else 0.0
    assert y.tolist() == [rest] * 3
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [rest] * 3
