"""Convolutions with bias, norm, activation, dropout and residual, against torch in float64."""

import copy
import gc

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, F64, assert_same_bits, check_in_norm, evaluate, needs_nvrtc
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.op_names import OPS
from fusionrt.ops import convolution_cudnn, folding, transposition
from fusionrt.runtime import compiler
from fusionrt.runtime.kernel import Kernel

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def images(*shape, dtype=F64, device="cpu", last=False):
    x = torch.randn(shape, dtype=F64, device=device).to(dtype)
    return x.to(memory_format=LAST[x.dim()]) if last else x


def norm_of(channels, dtype=F64, device="cpu"):
    """running_mean, running_var, weight, bias"""
    made = torch.randn(4, channels, dtype=F64, device=device)
    made[1] = made[1].abs() + 0.5
    return [row.to(dtype) for row in made]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def same(function, args, **options):
    """Result and gradients in float64, with and without a recorded gradient."""
    found, expected = evaluate(function, args, options), evaluate(function.reference, args, options)
    close(found, expected)
    with torch.no_grad():
        before = [a.clone() if torch.is_tensor(a) else a for a in args]
        alone = function(*args, **options)
        close(alone, expected[0])
        if "residual" not in options:  # which decides the layout of torch's sum
            assert alone.stride() == found[0].stride() == expected[0].stride()
        for a, b in zip(args, before, strict=True):
            assert a is b or torch.equal(a, b)
    return found


# --- formulas

SHAPES = [((2, 6, 9), (4, 6, 3), False), ((2, 6, 7, 8), (4, 6, 3, 2), False),
          ((2, 6, 7, 8), (4, 6, 3, 2), True),
          ((2, 6, 4, 5, 6), (4, 6, 2, 3, 2), False), ((2, 6, 4, 5, 6), (4, 6, 2, 3, 2), True)]
OPTIONS = [{}, {"stride": 2, "padding": 1}, {"padding": "valid", "dilation": 2}, {"padding": "same"},
           {"groups": 2}]


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("shape, kernel, last", SHAPES, ids=str)
def test_dimensions_and_options(shape, kernel, last, device):
    x, weight, bias = images(*shape, device=device, last=last), *(
        images(*s, device=device) for s in (kernel, (4,)))
    for options in OPTIONS:
        weights = weight[:, :3] if "groups" in options else weight
        same(frt.conv_activation, (x, weights, bias, "silu"), **options)
    same(frt.conv_activation, (x, weight, None, None))
    unit, residual = images(4, 6, *(1,) * (x.dim() - 2), device=device), torch.randn_like(x[:, :4])
    same(frt.conv_activation, (x, unit, bias, "silu"), residual=residual)


# Of hardsigmoid torch's gradient has 1 / 6 in float32, on a GPU hardswish has.
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in ("relu", "gelu", "mish") else pytest.mark.slow)
    for name in OPS["activations"] if name not in ("hardsigmoid", "hardswish")])
def test_every_activation(name, device):
    x, weight, bias = images(2, 6, 7, 8, device=device, last=True), images(5, 6, 3, 3, device=device), images(
        5, device=device)
    same(frt.conv_activation, (x, weight, bias, name), padding=1)


def test_functions_as_activations(device):
    x, weight = images(2, 6, 7, 8, device=device), images(5, 6, 3, 3, device=device)
    for function in (frt.fuse(lambda y: frt.relu(y) * 0.5 + y), lambda y: frt.relu(y) * 0.5 + y):
        found = evaluate(frt.conv_activation, (x, weight, None, function))
        expected = evaluate(lambda x, w: F.relu(F.conv2d(x, w)) * 0.5 + F.conv2d(x, w), (x, weight))
        close(found, expected)


@pytest.mark.parametrize("shape, kernel, last", [SHAPES[2], *(
    pytest.param(*case, marks=pytest.mark.slow) for case in (SHAPES[0], SHAPES[1], SHAPES[4]))], ids=str)
def test_norm_at_inference(shape, kernel, last, device):
    x, weight, bias = images(*shape, device=device, last=last), *(
        images(*s, device=device) for s in (kernel, (4,)))
    mean, var, scale, shift = norm_of(4, device=device)
    frozen = {"running_mean": mean, "running_var": var}

    def with_constants(function):
        def run(x, weight, bias, scale, shift, **options):
            return function(x, weight, bias, *frozen.values(), scale, shift, **options)

        run.reference = with_constants(function.reference) if hasattr(function, "reference") else None
        return run

    run = with_constants(frt.conv_bn_act)
    y, _ = same(run, (x, weight, bias, scale, shift))
    same(run, (x, weight, bias, scale, shift), residual=torch.randn_like(y), activation="silu")
    same(run, (x, weight, None, None, None), activation=None, eps=1e-3)


@pytest.mark.parametrize("last", [pytest.param(False, marks=pytest.mark.slow), True])
def test_norm_in_training(last, device):
    x, weight, bias = images(3, 6, 7, 8, device=device, last=last), images(4, 6, 3, 3, device=device), images(
        4, device=device)
    mean, var, scale, shift = norm_of(4, device=device)
    residual = images(3, 4, 7, 8, device=device, last=last)
    results = []
    for function in (frt.conv2d_bn_act, frt.conv2d_bn_act.reference):
        running = mean.clone(), var.clone()

        def run(x, weight, scale, shift, residual, function=function, running=running):
            return function(x, weight, bias, *running, scale, shift, residual=residual, activation="silu",
                            padding=1, training=True, momentum=0.3)

        results.append([*evaluate(run, (x, weight, scale, shift, residual)), *running])
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)
    y = frt.conv2d_bn_act(x, weight, None, None, None, training=True)
    close(y, frt.conv2d_bn_act.reference(x, weight, None, None, None, training=True))


def test_group_norm(device):
    x, weight, bias = (images(*s, device=device) for s in ((3, 6, 7, 8), (8, 6, 3, 3), (8,)))
    scale, shift = norm_of(8, device=device)[2:]
    residual = images(3, 8, 5, 6, device=device)
    same(frt.conv_group_norm, (x, weight, bias, 2, scale, shift), activation="silu", residual=residual)
    same(frt.conv_group_norm, (x, weight[:, :3], None, 4), groups=2)


@pytest.mark.parametrize("training", [False, True])
def test_depthwise_separable(training, device):
    x = images(3, 6, 8, 9, device=device, last=True)
    weights = images(6, 1, 3, 3, device=device), images(4, 6, 1, 1, device=device)
    norms = norm_of(6, device=device), norm_of(4, device=device)
    residual = images(3, 4, 4, 5, device=device, last=True)
    found, expected = (function(x, *weights, depthwise_norm=[t.clone() for t in norms[0]],
                                pointwise_norm=[t.clone() for t in norms[1]], training=training, stride=2,
                                pointwise_activation=None, residual=residual)
                       for function in (frt.depthwise_separable, frt.depthwise_separable.reference))
    close(found, expected)
    same(frt.depthwise_separable, (x, *weights, images(6, device=device), images(4, device=device)),
         activation="silu")


def test_arguments_in_another_order(device):
    x, weight, bias = (images(*s, device=device) for s in ((2, 6, 7, 8), (4, 6, 3, 3), (4,)))
    mean, var, scale, shift = norm_of(4, device=device)
    y = F.batch_norm(F.conv2d(x, weight, bias, 2, 1), mean, var, scale, shift)
    for function, expected in ((frt.ops.fused_conv2d_batchnorm, y),
                               (frt.ops.fused_conv2d_batchnorm_relu, y.relu())):
        close(function(x, weight, bias, scale, shift, mean, var, stride=2, padding=1), expected)


@pytest.mark.covering(1)
@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize("casting", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_wider_residual_decides_the_dtype(recorded, casting, groups, device):
    """Also where torch casts the operands, with and without a gradient."""
    x, weight, residual, of = (images(*s, device=device).float() for s in (
        (4, 6, 9, 9), (6, 6 // groups, 3, 3), (4, 6, 9, 9), (4, 6)))
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_(recorded)
    norm = of[0], of[1].square() + 0.5, of[2], of[3]
    options = {"padding": 1, "groups": groups, "residual": residual}
    x16, weight16 = x.bfloat16(), weight.bfloat16()
    if not casting:
        x, weight = x16, weight16
    for op, more in ((frt.conv_activation, ("silu",)), (frt.conv_bn_act, norm)):
        with torch.autocast(device, torch.bfloat16, enabled=casting):
            found = op(x, weight, None, *more, **options)
        expected = op.reference(x16.float(), weight16.float(), None, *more, **options)
        assert found.dtype == torch.float32
        # The convolution's own result is rounded, before the norm: at most half an ulp of bfloat16.
        rounding = 2**-8 * F.conv2d(x16.float(), weight16.float(), None, 1, 1, 1, groups).abs()
        slope = (of[2] / norm[1].sqrt()).abs()[:, None, None] if op is frt.conv_bn_act else 1.1
        assert ((found - expected).abs() <= rounding * slope + 1e-4 * (1 + expected.abs())).all()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_one_image_needs_no_dimension(dims, device):
    x, residual = images(6, *(9,) * dims, device=device), images(4, *(7,) * dims, device=device)
    weight, bias = images(4, 6, *(3,) * dims, device=device), images(4, device=device)
    for options in ({}, {"residual": residual}):
        found = frt.conv_activation(x, weight, bias, "silu", **options)
        more = {name: t[None] for name, t in options.items()}
        close(found, frt.conv_activation(x[None], weight, bias, "silu", **more)[0])
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    close(frt.conv_activation(x, weight, bias), convolve(x, weight, bias))


# --- dropout

def test_dropout_keeps_what_torch_would(device):
    x, weight, bias = (images(*s, device=device) for s in ((4, 6, 9, 9), (32, 6, 3, 3), (32,)))
    plain = frt.conv_activation(x, weight, bias, "gelu")
    torch.manual_seed(5)
    y = frt.conv_gelu_dropout(x, weight, bias, 0.25)
    kept = y != 0
    assert 0.72 < kept.double().mean() < 0.78
    close(y[kept], plain[kept] / 0.75)
    torch.manual_seed(5)
    assert_same_bits(y, frt.ops.fused_conv_gelu_dropout(x, weight, bias, 0.25))
    torch.manual_seed(5)
    args = [t.requires_grad_() for t in (x, weight, bias)]
    recorded = frt.conv_gelu_dropout(*args, 0.25)
    assert_same_bits(recorded, y)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(frt.conv_activation(*args, "gelu"), args, grad * kept / 0.75)
    close(torch.autograd.grad(recorded, args, grad), expected)
    close(frt.conv_gelu_dropout(x, weight, bias, 0.25, training=False), plain)
    tanh = F.gelu(F.conv2d(x, weight, bias), approximate="tanh")
    close(frt.conv_gelu_dropout(x, weight, bias, 0.25, False, approximate="tanh"), tanh)
    assert not frt.conv_activation(x, weight, bias, "gelu", dropout_p=1.0, residual=torch.zeros_like(y)).any()


# --- accuracy

ACCURACY = [BF16, F32, pytest.param(F16, marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", ACCURACY, ids=str)
def test_as_accurate_as_torch(dtype, device):
    x, weight, bias = (images(*s, dtype=dtype, device=device, last=len(s) == 4) for s in (
        (4, 16, 12, 12), (32, 16, 3, 3), (32,)))
    check_in_norm(frt.conv_activation, (x, weight, bias, "gelu"), {"padding": 1})
    mean, var, scale, shift = norm_of(32, F32, device)
    running = {"running_mean": mean * 4, "running_var": var * 100}
    residual = images(4, 32, 12, 12, dtype=dtype, device=device)

    def inference(function):
        def run(x, weight, scale, shift, **constants):  # silu: on which side of relu's kink few lie is luck
            return function(x, weight, None, constants["running_mean"], constants["running_var"], scale,
                            shift, activation="silu", residual=constants["residual"], padding=1)

        return run

    for wrap in (lambda f: f, torch.no_grad()):
        check_in_norm(wrap(inference(frt.conv_bn_act)), (x, weight, scale, shift),
                      {**running, "residual": residual},
                      wrap(inference(frt.conv_bn_act.reference)), residual.double())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("offset", [0, 3])
def test_a_norm_in_16_bit_weights_costs_no_accuracy(dtype, offset):
    """As cuDNN computes what `folding` gives it: in float32, rounded once."""
    x, weight = images(4, 64, 14, 14, dtype=dtype).relu(), (images(64, 64, 3, 3) / 24).to(dtype)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    mean, var = exact.mean((0, 2, 3)), exact.var((0, 2, 3))
    norm = [t.float() for t in (mean + offset * var.sqrt() * torch.randn(64), var, *norm_of(64)[2:])]
    true = F.relu(F.batch_norm(exact, *(t.double() for t in norm)))
    theirs = F.relu(F.batch_norm(F.conv2d(x, weight, padding=1), *norm))
    mean, var, scale, shift = norm
    factor = scale * torch.rsqrt(var + 1e-5)
    w, b = (weight.float() * factor[:, None, None, None]).to(dtype), (shift - mean * factor).to(dtype)
    ours = F.relu(F.conv2d(x.float(), w.float(), b.float(), padding=1)).to(dtype)
    for size in (torch.linalg.norm, lambda t: t.abs().max()):
        assert size((ours.double() - true).flatten()) <= 2 * size((theirs.double() - true).flatten())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ACCURACY, ids=str)
@pytest.mark.parametrize("channels", [3, 37, 64])
def test_planes_stay_planes_and_are_as_accurate(channels, dtype, monkeypatch):
    """Those that go through cuDNN's kernel of channels_last images."""
    turned, turn = [], transposition.channels_last
    monkeypatch.setattr(transposition, "channels_last", lambda x: turned.append(x) or turn(x))
    x, weight = (images(*s, dtype=dtype, device="cuda") for s in ((4, channels, 15, 14),
                                                                  (64, channels, 3, 3)))
    norm, more = norm_of(64, F32, "cuda"), {"stride": 2, "padding": 1}
    with torch.no_grad():
        for _ in range(3):
            y = frt.conv_bn_act(x, weight, None, *norm, **more)
        theirs = frt.conv_bn_act.reference(x, weight, None, *norm, **more)
        true = frt.conv_bn_act.reference(x.double(), weight.double(), None, *(t.double() for t in norm),
                                         **more)
    assert len(turned) == 3 or dtype == F32  # whose rounding may be another one
    assert y.is_contiguous() and y.dtype == theirs.dtype and y.shape == theirs.shape
    assert (y.double() - true).norm() <= 2 * (theirs.double() - true).norm()


# --- what was folded

def folded_from(conv, bn):
    return folding.folded(conv.weight, (conv.bias, bn.running_mean, bn.running_var, bn.weight, bn.bias),
                          bn.eps, F32)


def expected_from(conv, bn):
    scale = bn.weight / (bn.running_var + bn.eps).sqrt()
    return conv.weight * scale[:, None, None, None], (conv.bias - bn.running_mean) * scale + bn.bias


CHANGES = {
    "a step of an optimizer": lambda conv, bn: torch.optim.SGD(conv.parameters(), 1.0).step(),
    "a statistic": lambda conv, bn: bn.running_var.mul_(2),
    "training, which changes no version": lambda conv, bn: bn.train()(torch.randn(8, 5, 2, 2, device="cuda")),
    "a norm's weight": lambda conv, bn: bn.weight.detach().neg_(),
    "another bias": lambda conv, bn: setattr(conv, "bias", torch.nn.Parameter(torch.ones(5, device="cuda"))),
    "a state": lambda conv, bn: bn.load_state_dict({k: v + 1 for k, v in bn.state_dict().items()}),
    "a state that replaces": lambda conv, bn: conv.load_state_dict(
        {k: v + 1 for k, v in conv.state_dict().items()}, assign=True),
    "other memory": lambda conv, bn: setattr(conv.weight, "data", torch.ones_like(conv.weight)),
    "dtypes there and back": lambda conv, bn: (conv.double(), conv.weight.detach().add_(1), conv.float()),
    "another layout": lambda conv, bn: (
        conv.to(memory_format=torch.channels_last), conv.weight.detach().add_(1)),
    "another eps": lambda conv, bn: setattr(bn, "eps", 0.5),
    "data, which changes no version": lambda conv, bn: conv.weight.data.neg_(),
    "a step of ours": lambda conv, bn: frt.optim.SGD(conv.parameters(), 1.0).step(),
}


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_folded_is_never_stale(change):
    conv, bn = torch.nn.Conv2d(4, 5, 3).cuda(), torch.nn.BatchNorm2d(5).cuda().eval()
    conv.weight.grad, conv.bias.grad = torch.randn_like(conv.weight), torch.randn_like(conv.bias)
    bn.running_mean.normal_()
    weight, bias = folded_from(conv, bn)
    torch.testing.assert_close((weight, bias), expected_from(conv, bn))
    first = weight.clone(), bias.clone()
    weight.zero_()
    assert folded_from(conv, bn)[0] is weight
    assert not weight.any(), "once for each version"
    weight.copy_(first[0])
    CHANGES[change](conv, bn)
    found = folded_from(conv, bn)
    torch.testing.assert_close(found, expected_from(conv, bn))
    with torch.no_grad():
        assert not all(map(torch.equal, found, first))


@pytest.mark.gpu
def test_a_graph_folds_what_there_is_when_it_runs():
    conv, bn = torch.nn.Conv2d(4, 5, 3).cuda(), torch.nn.BatchNorm2d(5).cuda().eval()
    folded_from(conv, bn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = folded_from(conv, bn)
    with torch.no_grad():
        conv.weight.add_(1)
        bn.running_var.add_(1)
    graph.replay()
    torch.testing.assert_close(found, expected_from(conv, bn))
    torch.testing.assert_close(folded_from(conv, bn), expected_from(conv, bn))


@pytest.mark.gpu
def test_what_was_folded_lives_as_long_as_the_weight():
    conv, bn = torch.nn.Conv2d(4, 5, 3).cuda(), torch.nn.BatchNorm2d(5).cuda()
    gc.collect()
    before = len(folding._folded)
    folded_from(conv, bn)
    folded_from(copy.deepcopy(conv), bn)
    gc.collect()
    assert len(folding._folded) == before + 1
    del conv
    gc.collect()
    assert len(folding._folded) == before


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
def test_kernel_compiles(arch):
    for of in (("float32",) * 5, (None, "float16", "float32", None, "bfloat16")):
        for many in (False, True):
            kernel = folding.kernel(folding.Form("float32", "bfloat16", of, False), many)
            found = compiler.cubin(kernel.text, kernel.stem, arch, kernel.name)[0].metadata
            assert (found["spills"], found["stack"], found["warnings"]) == (0, 0, 0)


@pytest.mark.gpu
def test_what_is_repeated_is_looked_at_ahead(monkeypatch):
    """By one kernel, and as thoroughly: writes that change no version are seen."""
    layers = [(torch.nn.Conv2d(4, n, 3, bias=n > 5).cuda(), norm_of(n, F32, "cuda")) for n in (5, 8, 33)]
    launched, launch = [], Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *args, **more: (
        launched.append(self), launch(self, *args, **more)))

    def fold():
        return [folding.folded(conv.weight, (conv.bias, *norm), 1e-5, F32) for conv, norm in layers]

    ahead = folding.Ahead()
    with torch.no_grad():
        with ahead.noting():
            fold()
        assert len(launched) == 3 + 2  # of each; of both kinds, with a bias and without
        for conv, (mean, *_) in layers:
            conv.weight.data.mul_(2)
            mean.data.add_(1)
        launched.clear()
        with ahead.looking():
            found = fold()
        assert len(launched) == 2
        folding._folded.clear()
        for ours, alone in zip(found, fold(), strict=True):
            assert torch.equal(ours[0], alone[0]) and torch.equal(ours[1], alone[1])


# --- around torch

def test_autocast(device):
    x, weight, bias = (images(*s, dtype=F32, device=device) for s in ((2, 6, 7, 8), (4, 6, 3, 3), (4,)))
    norm = norm_of(4, F32, device)
    for function, args in ((frt.conv_activation, (x, weight, bias, "gelu")),
                           (frt.conv_bn_act, (x, weight, bias, *norm))):
        true = function.reference(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))
        for needs in (False, True):
            with torch.autocast(device, dtype=BF16):
                found = function(x.requires_grad_(needs), *args[1:])
                theirs = function.reference(*args)
            assert found.dtype == theirs.dtype == BF16
            assert (found.double() - true).norm() <= 2 * (theirs.double() - true).norm()


def test_torch_compile(device):
    x, weight, bias = (images(*s, device=device) for s in ((2, 6, 7, 8), (6, 1, 3, 3), (6,)))
    norm, pointwise = norm_of(6, device=device), images(5, 6, 1, 1, device=device)
    x = x.to(memory_format=torch.channels_last)

    def layers(x, weight, pointwise):
        y = frt.depthwise_conv2d(x, weight, bias, "silu", padding=1)
        y = frt.conv2d_bn_act(y, weight, None, *norm, groups=6, padding="same")
        return frt.conv_activation(y, pointwise, None, "silu", residual=y[:, :5])

    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager")
    close(evaluate(compiled, (x, weight, pointwise)), evaluate(layers, (x, weight, pointwise)))
    with torch.no_grad():
        close(compiled(x, weight, pointwise), layers(x, weight, pointwise))


def test_arrays_of_numpy():
    x, weight, bias = (images(*s) for s in ((2, 6, 7, 8), (4, 6, 3, 3), (4,)))
    norm = norm_of(4)
    expected = frt.conv_activation(x, weight, bias, "silu")
    found = frt.conv_activation(x.numpy(), weight.numpy(), bias.numpy(), "silu")
    np.testing.assert_array_equal(found, expected.numpy())
    found = frt.conv2d_bn_act(x.numpy(), weight, None, *norm)
    assert torch.equal(found, frt.conv2d_bn_act(x, weight, None, *norm))
    found = frt.conv_group_norm(x.numpy(), weight.numpy(), None, 2, activation="silu")
    np.testing.assert_array_equal(found, frt.conv_group_norm(x, weight, None, 2, activation="silu").numpy())


def test_without_elements(device):
    x, weight = images(0, 6, 7, 8, device=device), images(4, 6, 3, 3, device=device)
    for needs in (False, True):
        y = frt.conv_activation(x.requires_grad_(needs), weight, None, "silu")
        assert y.shape == (0, 4, 5, 6)
        assert frt.conv2d_bn_act(x, weight, None, *norm_of(4, device=device)).shape == (0, 4, 5, 6)


# --- errors

X, WEIGHT, BIAS = torch.zeros(2, 6, 7, 8), torch.zeros(4, 6, 3, 3), torch.zeros(4)
WRONG = [
    (TypeError, "x must be a tensor or an array, got str", lambda: frt.conv_activation("x", WEIGHT)),
    (TypeError, "weight must be a tensor or an array, got None", lambda: frt.conv_activation(X, None)),
    (TypeError, "x must be of a floating-point dtype, got torch.int64",
     lambda: frt.conv_activation(X.long(), WEIGHT)),
    (TypeError, "weight must have x's dtype, torch.float32, got torch.float64",
     lambda: frt.conv_activation(X, WEIGHT.double())),
    (ValueError,
     r"x and weight must have the same 3 to 5 dimensions, .* got shapes \(6, 7\) and \(4, 6, 3, 3\)",
     lambda: frt.conv_activation(X[0, :, :, 0], WEIGHT)),
    (ValueError, r"weight must have the shape .* for C = 6 and groups = 2, got \(4, 6, 3, 3\)",
     lambda: frt.conv_activation(X, WEIGHT, groups=2)),
    (ValueError, r"weight must fit into x with its padding, got shapes \(4, 6, 3, 3\) and \(2, 6, 2, 8\)",
     lambda: frt.conv_activation(X[:, :, :2], WEIGHT)),
    (ValueError, "groups must be a positive integer, got 0",
     lambda: frt.conv_activation(X, WEIGHT, groups=0)),
    (ValueError, "stride must be an integer of at least 1, or 2 of them, got 0",
     lambda: frt.conv_activation(X, WEIGHT, stride=0)),
    (ValueError, r"dilation must be an integer of at least 1, or 2 of them, got \(1, 1, 1\)",
     lambda: frt.conv_activation(X, WEIGHT, dilation=(1, 1, 1))),
    (ValueError, "padding must be numbers, 'same' or 'valid', got 'full'",
     lambda: frt.conv_activation(X, WEIGHT, padding="full")),
    (ValueError, r"bias must have one value a channel, shape \(4,\), got \(6,\)",
     lambda: frt.conv_activation(X, WEIGHT, torch.zeros(6), "relu")),
    (ValueError, r"residual must have the result's shape \(2, 4, 5, 6\), got \(2, 4, 7, 8\)",
     lambda: frt.conv_activation(X, WEIGHT, residual=X[:, :4])),
    (ValueError, "momentum must be a number, got None, the mean over all batches: that needs their number",
     lambda: frt.conv_bn_act(X, WEIGHT, None, BIAS, BIAS, training=True, momentum=None)),
    (ValueError, "approximate must be 'none' or 'tanh', got 'erf'",
     lambda: frt.conv_gelu_dropout(X, WEIGHT, approximate="erf")),
    (ValueError, "dropout_p must be a probability in .0, 1., got 2", lambda: frt.conv_activation(
        X, WEIGHT, dropout_p=2)),
    (ValueError, "activation must be None, a function of one traced value, or one of .* got 'rulu'",
     lambda: frt.conv_activation(X, WEIGHT, activation="rulu")),
    (ValueError, r"running_mean must have one value a channel, shape \(4,\), got \(3,\)",
     lambda: frt.conv_bn_act(X, WEIGHT, None, BIAS[:3], BIAS)),
    (ValueError, "without training both are needed, got NoneType and NoneType",
     lambda: frt.conv_bn_act(X, WEIGHT, None, None, None)),
    (ValueError, r"conv2d_bn_act: x must have 4 dimensions, \(N, C, H, W\), got shape \(2, 6, 7\)",
     lambda: frt.conv2d_bn_act(X[..., 0], WEIGHT[..., 0], None, BIAS, BIAS)),
    (ValueError, "num_groups must divide the 4 channels of the result, got 3",
     lambda: frt.conv_group_norm(X, WEIGHT, None, 3)),
    (ValueError, r"a norm must be \(running_mean, running_var, weight, bias\), got 2 values",
     lambda: frt.depthwise_separable(X, torch.zeros(6, 1, 3, 3), WEIGHT[..., :1, :1],
                                     depthwise_norm=(BIAS, BIAS))),
]


def test_images_without_rows(device):
    """Padding alone would be a result; torch refuses it."""
    x = images(2, 4, 0, 5, dtype=F32, device=device, last=True)
    with pytest.raises(RuntimeError, match=r"got input shape: \[2, 4, 0, 5\]"):
        frt.depthwise_conv2d(x, torch.ones(4, 1, 3, 3, device=device), padding=2)


@pytest.mark.parametrize("error, message, call", WRONG, ids=[message[:30] for _, message, _ in WRONG])
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()


# --- cuDNN's fused kernels

@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_relu_by_cudnn(dtype, with_residual, monkeypatch):
    asked = []
    by_cudnn = convolution_cudnn._run

    def noted(*args):
        asked.append(by_cudnn(*args))
        return asked[-1]

    monkeypatch.setattr(convolution_cudnn, "_run", noted)
    x, weight = images(4, 64, 14, 14, dtype=dtype, device="cuda", last=True), (
        images(64, 64, 3, 3, device="cuda") / 24).to(dtype)
    norm, residual = norm_of(64, F32, "cuda"), None
    if with_residual:
        residual = images(4, 64, 14, 14, dtype=dtype, device="cuda")
    arguments = {"residual": residual, "padding": 1}

    def run(function):
        return torch.no_grad()(lambda x, weight, **more: function(x, weight, None, *more.pop("norm"), **more))

    wide = {**arguments, "norm": norm}
    theirs = run(frt.conv2d_bn_act.reference)(x, weight, **wide)
    true = run(frt.conv2d_bn_act.reference)(x.double(), weight.double(), padding=1,
                                            norm=[t.double() for t in norm],
                                            residual=None if residual is None else residual.double())
    ours = run(frt.conv2d_bn_act)(x, weight, **wide)
    assert len(asked) == 1
    assert asked[0] is not None, "cuDNN has no kernel for this"
    assert ours.is_contiguous(memory_format=torch.channels_last)
    for size in (torch.linalg.norm, lambda t: t.abs().max()):
        assert size((ours.double() - true).flatten()) <= 2 * size((theirs.double() - true).flatten())


@pytest.mark.gpu
def test_nan_passes_relu_by_cudnn():
    x, weight = (images(*s, dtype=F16, device="cuda", last=True) for s in ((2, 32, 8, 8), (32, 32, 1, 1)))
    x[0, 0, 0, 0], x[1, 0, 0, 0] = torch.nan, torch.inf
    y = frt.conv2d_bn_act(x, weight, None, *norm_of(32, F32, "cuda"))
    expected = frt.conv2d_bn_act.reference(x, weight, None, *norm_of(32, F32, "cuda"))
    assert y[0, :, 0, 0].isnan().all()
    assert torch.equal(expected[0, :, 0, 0].isnan(), y[0, :, 0, 0].isnan())


@pytest.mark.gpu
def test_what_cudnn_refuses_is_ours(monkeypatch):
    def refused(*args):
        raise RuntimeError("Unable to find an engine")

    x, weight = (images(*s, dtype=F16, device="cuda", last=True) for s in ((2, 32, 8, 8), (32, 32, 1, 1)))
    norm = norm_of(32, F32, "cuda")
    monkeypatch.setattr(convolution_cudnn, "_refused", set())
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cudnn_convolution_relu", refused)
        y = frt.conv2d_bn_act(x, weight, None, *norm)
        assert torch.equal(frt.conv2d_bn_act(x, weight, None, *norm), y)
        assert len(convolution_cudnn._refused) == 1
    torch.testing.assert_close(y, frt.conv2d_bn_act.reference(x, weight, None, *norm), rtol=1e-2, atol=1e-2)
