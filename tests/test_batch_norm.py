"""Norms of channels against torch in float64: batch, instance and group norm."""

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, assert_as_accurate, assert_same_bits, evaluate, make, wide
from torch.nn import functional as F

import fusionrt as frt
from fusionrt.rehearsal import collecting

SHAPES = [(5, 4), (5, 4, 3), (3, 4, 5, 6), (1, 4, 5, 6), (2, 4, 3, 2, 3)]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
CASES = [(shape, False) for shape in SHAPES] + [(shape, True) for shape in SHAPES if len(shape) > 3]
cases = pytest.mark.parametrize("shape, channels_last", CASES, ids=str)
of_images = pytest.mark.parametrize("shape, channels_last", [c for c in CASES if len(c[0]) > 2], ids=str)


def images(shape, channels_last, dtype=torch.float64, device="cpu"):
    x = make(shape, dtype, device)
    return x.contiguous(memory_format=LAST[x.dim()]) if channels_last else x


def of_channels(x, dtype=None):
    return torch.randn(x.shape[1], dtype=dtype or x.dtype, device=x.device)


def running(x, dtype=None):
    dtype = dtype or x.dtype
    return of_channels(x, dtype), torch.rand(x.shape[1], dtype=dtype, device=x.device) + 0.5


def in_memory(x):
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def everything(function, tensors, constants):
    """Result, gradients, gradients of those (but of one image alone), and the constants, which may change."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    twice = len(tensors[0]) > 1
    constants = [c.clone() for c in constants]
    y = function(tensors, constants)
    grad = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)).to(y.device)
    first = torch.autograd.grad(y, tensors, grad, create_graph=twice)
    total = sum(g.square().sum() for g in first)
    if total.requires_grad:
        second = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
    else:
        second = map(torch.zeros_like, tensors)
    return [y, *first, *second, *constants]


def compare(ours, torchs, tensors, constants=()):
    """In float64, where both are exact."""
    found, expected = (everything(f, tensors, constants) for f in (ours, torchs))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return found[0]


# --- formulas


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape, channels_last, affine", [
    *((*case, True) for case in CASES), ((3, 4, 5, 6), False, False), ((3, 4, 5, 6), True, False)], ids=str)
def test_batch_norm(shape, channels_last, training, affine, device):
    x = images(shape, channels_last, device=device)
    tensors = [x, *([of_channels(x), of_channels(x)] if affine else [])]
    weights = {"weight": 1, "bias": 2} if affine else {}

    def with_(function):
        return lambda t, c: function(
            t[0],
            c[0],
            c[1],
            training=training,
            momentum=0.2,
            eps=1e-3,
            **{name: t[k] for name, k in weights.items()},
        )

    y = compare(with_(frt.batch_norm), with_(F.batch_norm), tensors, running(x))
    assert in_memory(y) == in_memory(x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("op", [frt.batch_norm, frt.group_norm, frt.instance_norm])
def test_a_wider_residual_decides_the_dtype(op, training, device):
    x = torch.randn(3, 4, 5, 6, device=device).bfloat16().requires_grad_()
    r = torch.randn(3, 4, 5, 6, device=device).requires_grad_()
    mean, var = torch.randn(4, device=device), torch.rand(4, device=device) + 0.5
    first = {frt.group_norm: (2,), frt.batch_norm: (mean, var)}.get(op, ())
    options = {"training": training} if op is frt.batch_norm else {}
    again = [t.clone() if torch.is_tensor(t) else t for t in first]
    found = op(x, *first, residual=r, **options)
    expected = op.reference(x.float(), *again, **options) + r
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(y.square().sum(), (x, r)) for y in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@cases
def test_epilogue_and_residual(shape, channels_last, device):
    x = images(shape, channels_last, device=device)
    tensors = [x, of_channels(x), of_channels(x), torch.randn_like(x)]
    for op, *first in (
        (frt.batch_norm,),
        (frt.group_norm, 2),
        *([(frt.instance_norm,)] if x.dim() > 2 else []),
    ):
        more = {"training": True} if op is frt.batch_norm else {}

        def run(t, c, op=op, first=first, more=more):
            return op(t[0], *first, weight=t[1], bias=t[2], residual=t[3], epilogue="sigmoid", **more)

        def reference(t, c, op=op, first=first, more=more):
            return torch.sigmoid(op.reference(t[0], *first, weight=t[1], bias=t[2], **more) + t[3])

        compare(run, reference, tensors)


@pytest.mark.covering(1)
@cases
def test_batch_norm_relu(shape, channels_last, device):
    x = images(shape, channels_last, device=device)
    compare(
        lambda t, c: frt.batch_norm_relu(*t, *c),
        lambda t, c: frt.batch_norm_relu.reference(*t, *c),
        [x, of_channels(x), of_channels(x)],
        running(x),
    )


@pytest.mark.covering(1)
@of_images
@pytest.mark.parametrize("use_input_stats", [True, False])
def test_instance_norm(shape, channels_last, use_input_stats, device):
    x = images(shape, channels_last, device=device)

    def with_(function):
        return lambda t, c: function(t[0], c[0], c[1], t[1], t[2], use_input_stats, 0.3, 1e-4)

    compare(with_(frt.instance_norm), with_(F.instance_norm), [x, of_channels(x), of_channels(x)], running(x))
    compare(lambda t, c: frt.instance_norm(t[0]), lambda t, c: F.instance_norm(t[0]), [x])


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape, channels_last, groups", [
    *((*case, 2) for case in CASES),
    *(((3, 4, 5, 6), last, groups) for last in (False, True) for groups in (1, 4))], ids=str)
def test_group_norm(shape, channels_last, groups, device):
    x = images(shape, channels_last, device=device)
    y = compare(
        lambda t, c: frt.group_norm(t[0], groups, t[1], t[2]),
        lambda t, c: F.group_norm(t[0], groups, *t[1:]),
        [x, of_channels(x), of_channels(x)],
    )
    assert in_memory(y) == in_memory(x)


# --- accuracy


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)  # the formulas above are compared in float64
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", ["batch_norm", "group_norm", "instance_norm", "inference"])
def test_accuracy(name, channels_last, dtype, device):
    x = images((6, 8, 9, 15), channels_last, dtype, device)
    weight, bias = of_channels(x), of_channels(x)
    mean, var = running(x, F32)

    def run(op):
        if name == "group_norm":
            return lambda x, w, b: op(x, 4, w, b)
        if name == "instance_norm":
            return lambda x, w, b: op(x, None, None, w, b)
        if name == "inference":
            return lambda x, w, b: op(x, mean.to(x.dtype), var.to(x.dtype), w, b)
        return lambda x, w, b: op(x, None, None, w, b, True)

    op = getattr(frt, "batch_norm" if name == "inference" else name)
    grad = torch.randn(x.shape, device=device)
    wanted = evaluate(run(op.reference), [wide(t) for t in (x, weight, bias)], None, grad.to(dtype).double())
    torchs = evaluate(run(op.reference), (x, weight, bias), None, grad.to(dtype))
    ours = evaluate(run(op), (x, weight, bias), None, grad.to(dtype))
    summed = grad.double().abs().sum((0, 2, 3)) * 2.0**-22 * 4
    for a, b, c, extra in zip(
        (ours[0], *ours[1]),
        (torchs[0], *torchs[1]),
        (wanted[0], *wanted[1]),
        (1e-6, 1e-6, summed, summed),
        strict=True,
    ):
        assert_as_accurate(a, b, c, extra)


def test_a_weight_of_another_dtype(device):
    x = images((4, 6, 5, 5), True, torch.bfloat16, device)
    weight, bias = of_channels(x, torch.float32), of_channels(x, torch.float32)
    mean, var = running(x, torch.float32)
    y = frt.batch_norm(x, mean, var, weight, bias)
    assert y.dtype == torch.bfloat16
    expected = F.batch_norm(x.float(), mean, var, weight, bias)
    torch.testing.assert_close(y, expected.bfloat16())
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(frt.batch_norm(x, None, None, weight, bias, True).float().sum(), weight)
    assert grad.dtype == torch.float32


@pytest.mark.covering(1)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
def test_channels_far_from_0(channels_last, offset, device):
    x = images((16, 8, 16, 16), channels_last, torch.float32, device) + offset
    x[0] -= 50  # what comes first is not typical
    (mean, var), theirs, exact = (
        [torch.zeros(8, dtype=d, device=device), torch.ones(8, dtype=d, device=device)]
        for d in (torch.float32, torch.float32, torch.float64)
    )
    frt.batch_norm(x, mean, var, None, None, True, 1.0)
    F.batch_norm(x, *theirs, None, None, True, 1.0)
    F.batch_norm(x.double(), *exact, None, None, True, 1.0)
    assert_as_accurate(mean, theirs[0], exact[0])
    assert_as_accurate(var, theirs[1], exact[1])


@pytest.mark.covering(1)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("value", [0.1, 1e4, 1e37, 1e-40])
def test_equal_elements(channels_last, value, device):
    x = torch.full((7, 4, 9, 9), value, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    bias, var = of_channels(x), torch.ones(4, device=device)
    y = frt.batch_norm(x, torch.zeros(4, device=device), var, None, bias, True, 1.0)
    assert torch.equal(y, bias.view(-1, 1, 1).expand_as(y))
    assert not var.any()
    assert torch.equal(frt.group_norm(x, 2, None, bias), y)
    assert torch.equal(frt.instance_norm(x, bias=bias), y)


def test_nan_stays_in_its_channel(device):
    x = torch.randn(3, 4, 5, 5, device=device)
    x[1, 2, 0, 0] = float("nan")
    y = frt.batch_norm(x, training=True)
    assert y[:, 2].isnan().all()
    assert not y[:, [0, 1, 3]].isnan().any()


# --- running statistics


@pytest.mark.parametrize("momentum", [0.1, None])
def test_as_the_module_of_torch(momentum, device):
    torchs = torch.nn.BatchNorm2d(4, momentum=momentum, dtype=torch.float64, device=device)
    mean, var = torch.zeros_like(torchs.running_mean), torch.ones_like(torchs.running_var)
    count = torch.tensor(0, device=device)
    for _ in range(3):
        x = torch.randn(3, 4, 5, 6, dtype=torch.float64, device=device)
        y = frt.batch_norm(
            x, mean, var, torchs.weight, torchs.bias, True, momentum, num_batches_tracked=count
        )
        torch.testing.assert_close(y, torchs(x))
        torch.testing.assert_close(
            (mean, var, count), (torchs.running_mean, torchs.running_var, torchs.num_batches_tracked)
        )
    torch.testing.assert_close(frt.batch_norm(x, mean, var, torchs.weight, torchs.bias), torchs.eval()(x))


def test_saved_statistics_are_not_the_running_ones(device):
    """A second batch before the first one's backward changes nothing."""
    x, mean, var = (
        torch.randn(6, 3, device=device, requires_grad=True),
        torch.zeros(3, device=device),
        torch.ones(3, device=device),
    )
    y = frt.batch_norm(x, mean, var, training=True)
    (before,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    frt.batch_norm(torch.randn(6, 3, device=device) * 9, mean, var, training=True)
    assert_same_bits(before, torch.autograd.grad(y.square().sum(), x)[0])


# --- edges and errors


def test_one_value_a_channel():
    with pytest.raises(
        ValueError,
        match=r"batch_norm: Expected more than 1 value per channel when training, got "
        r"input size \(1, 3\)",
    ):
        frt.batch_norm(torch.randn(1, 3), training=True)
    with pytest.raises(ValueError, match="group_norm: Expected more than 1 value per channel when training"):
        frt.group_norm(torch.ones(1, 4), 4)
    with pytest.raises(ValueError, match="instance_norm: Expected more than 1 spatial element when training"):
        frt.instance_norm(torch.randn(2, 3, 1))
    assert frt.batch_norm(torch.randn(1, 3), torch.zeros(3), torch.ones(3)).shape == (1, 3)


def test_no_elements(device):
    x = torch.randn(0, 4, 3, 3, device=device, requires_grad=True)
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    for y in (
        frt.batch_norm(x, mean, var),
        frt.batch_norm(x, mean, var, training=True),
        frt.group_norm(x, 2),
        frt.instance_norm(x),
    ):
        assert y.shape == x.shape
        assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    assert not mean.any()
    assert var.tolist() == [1] * 4


C = torch.ones(4)
ERRORS = [
    (
        lambda x: frt.batch_norm(x),
        ValueError,
        "batch_norm: without the batch's statistics running_mean and running_var are needed, got None",
    ),
    (
        lambda x: frt.batch_norm(x, C, None, training=True),
        ValueError,
        "batch_norm: running_mean and running_var go together: give both or neither",
    ),
    (
        lambda x: frt.batch_norm(x, C, C, C[:3]),
        ValueError,
        r"batch_norm: weight must have one value a channel, shape \(4,\), got \(3,\)",
    ),
    (
        lambda x: frt.batch_norm(x, C, C, residual=x[:1]),
        ValueError,
        r"batch_norm: residual must have x's shape \(2, 4, 3\), got \(1, 4, 3\)",
    ),
    (
        lambda x: frt.batch_norm(C, C, C),
        ValueError,
        r"batch_norm: x must have at least 2 dimensions, \(N, C, ...\), got shape \(4,\)",
    ),
    (
        lambda x: frt.batch_norm(x, C, C, training=True, momentum=None),
        ValueError,
        "batch_norm: momentum None is the mean over all batches and needs num_batches_tracked",
    ),
    (
        lambda x: frt.batch_norm(x, C, C, 2.0),
        TypeError,
        "batch_norm: weight must be a tensor or an array, got float",
    ),
    (lambda x: frt.group_norm(x, 3), ValueError, "group_norm: num_groups must divide the 4 channels, got 3"),
    (
        lambda x: frt.instance_norm(C.view(2, 2)),
        ValueError,
        "instance_norm: x must have at least 3 dimensions",
    ),
    (
        lambda x: frt.batch_norm(x, C, C, epilogue="rely"),
        ValueError,
        "batch_norm: epilogue must be None, a function of one traced value, or one of elu, .* got 'rely'",
    ),
    (
        lambda x: frt.batch_norm(x, C, C, training=True, eps=0),
        ValueError,
        "batch_norm: eps must be positive for statistics of the batch, got 0",
    ),
    (
        lambda x: frt.batch_norm(x, C.clone().requires_grad_(), C, training=True),
        ValueError,
        "batch_norm: running_mean is written to and must not require a gradient",
    ),
    (
        lambda x: frt.instance_norm(x, C, C, momentum=None),
        ValueError,
        "instance_norm: momentum must be a number, got None",
    ),
    (lambda x: frt.group_norm(x.int(), 2), TypeError, "group_norm: x must be a floating-point tensor"),
]


def test_what_is_refused_writes_nothing():
    x, several = torch.randn(2, 4, 3), torch.zeros(2, dtype=torch.int64)
    refused = [
        ({"x": x.int()}, TypeError, "x must be a floating-point tensor"),
        ({"epilogue": 3}, TypeError, "epilogue must be None, a name, or a function of one traced value, got"),
        ({"weight": C * 1j}, TypeError, "weight has dtype torch.complex64"),
        ({"momentum": "0.1"}, TypeError, "momentum must be a number or None, got '0.1'"),
        ({"running_var": C.int()}, TypeError, "running_var .* a floating dtype, got torch.int32"),
        ({"running_var": C.to("meta")}, ValueError, "running_var .* x, cpu, got one on meta"),
        ({"running_var": C[:1].expand(4)}, ValueError, r"running_var .* apart in memory, got strides \(0,\)"),
        ({"num_batches_tracked": several}, ValueError, r"must be one number .* torch.int64 of shape \(2,\)"),
    ]
    for change, kind, text in refused:
        names = ("running_mean", "running_var", "num_batches_tracked")
        args = {"x": x, **dict(zip(names, (C * 0, C * 1, torch.tensor(0)), strict=True)), **change}
        written = [args[name] for name in names if not args[name].is_meta]
        before = [t.clone() for t in written]
        with pytest.raises(kind, match=f"batch_norm: .*{text}"):
            frt.batch_norm(**{"training": True, **args})
        assert all(map(torch.equal, written, before))


@pytest.mark.parametrize("call, kind, text", ERRORS, ids=[text[:40] for _, _, text in ERRORS])
def test_errors(call, kind, text):
    with pytest.raises(kind, match=text):
        call(torch.randn(2, 4, 3))


def test_arrays():
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    mean, var = np.zeros(4, np.float32), np.ones(4, np.float32)
    y = frt.batch_norm(x, mean, var, training=True, momentum=1.0)
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(mean, x.mean((0, 2)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(y.std((0, 2)), np.ones(4), rtol=1e-4)


def test_two_backward_calls_give_the_same_bits(device):
    x = torch.randn(16, 32, 14, 14, device=device).contiguous(memory_format=torch.channels_last)
    args = [x, of_channels(x), of_channels(x)]
    first, second = (
        evaluate(lambda x, w, b: frt.batch_norm(x, None, None, w, b, True, epilogue=frt.relu), args)
        for _ in range(2)
    )
    for a, b in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("channels_last", [False, True])
def test_kernels(channels_last):
    """In training one pass over x that finds the statistics, one that normalises; backward two passes. What
    blocks find of rows that they share is joined. On a device that has clusters, or holds all blocks, it is
    one kernel."""
    from fusionrt.runtime import launch

    x = torch.empty(8, 64, 28, 28, dtype=torch.bfloat16, device="meta")
    x = (x.contiguous(memory_format=torch.channels_last) if channels_last else x).requires_grad_()
    weight, bias = (torch.empty(64, device="meta", requires_grad=True) for _ in range(2))
    with collecting() as problems:
        y = frt.batch_norm(x, None, None, weight, bias, True, epilogue=frt.relu)
        torch.autograd.grad(y.sum(), (x, weight, bias))
    entries = [source.entry for p in problems for source in launch.sources(p)]
    apart = ["pointwise_reduce", "join_partials"]
    elements = "pointwise_walk" if channels_last else "pointwise"
    in_one = "pointwise_resident" if channels_last else "pointwise_planes"
    assert entries == [in_one, *apart, elements] * 2
    with torch.no_grad(), collecting() as problems:
        frt.batch_norm_relu(x, weight, bias, weight, weight)
    assert [source.entry for p in problems for source in launch.sources(p)] == [elements]


def test_inside_torch_compile():
    x, weight = torch.randn(4, 3, 6, 6), torch.randn(3)

    def function(x, weight):
        y = frt.batch_norm(x, None, None, weight, None, True, epilogue=frt.relu)
        return frt.group_norm(y, 3) + 1

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for a, b in zip(
        *((lambda r: (r[0], *r[1]))(evaluate(f, (x, weight))) for f in (compiled, function)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_arrays_beside_tensors():
    """Tensors decide what comes out, as they may need a gradient."""
    x, weight = torch.randn(3, 4), torch.rand(4)
    for run in (lambda x, w: frt.batch_norm(x, weight=w, training=True),
                lambda x, w: frt.group_norm(x, 2, w),
                lambda x, w: frt.instance_norm(x.reshape(1, 4, 3), weight=w)):
        expected = run(x, weight)
        for given, w in ((x.clone().requires_grad_(), weight.numpy()),
                         (x.numpy(), weight.clone().requires_grad_())):
            found = run(given, w)
            assert isinstance(found, torch.Tensor)
            torch.testing.assert_close(found, expected)
            found.sum().backward()
        assert isinstance(run(x.numpy(), weight.numpy()), np.ndarray)


def test_no_channels_in_training():
    assert frt.batch_norm(torch.randn(3, 0), training=True).shape == (3, 0)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        frt.batch_norm(torch.randn(1, 3), training=True)


def test_an_ensemble_in_training():
    """By vmap over modules: each member's statistics move."""
    members = [frt.nn.FusedConv2dBNReLU(4, 5, 3).train() for _ in range(3)]
    x = torch.randn(2, 4, 6, 6)
    state, buffers = torch.func.stack_module_state(members)
    base = members[0].__class__(4, 5, 3).to("meta")
    buffers = {name: b.clone() for name, b in buffers.items()}
    found = torch.vmap(lambda p, b: torch.func.functional_call(base, (p, b), (x,)))(state, buffers)
    expected = torch.stack([member(x) for member in members])
    torch.testing.assert_close(found, expected)
    for name, moved in buffers.items():
        torch.testing.assert_close(moved, torch.stack([dict(m.named_buffers())[name] for m in members]))
