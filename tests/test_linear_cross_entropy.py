"""Cross-entropy of a linear layer in chunks."""

import numpy as np
import pytest
import torch
from checking import BF16, F16, F32, F64, assert_same_bits
from torch.nn import functional

import fusionrt as frt
from fusionrt import reference
from fusionrt.ops.linear_cross_entropy import Gradients

REDUCTIONS = ("none", "mean", "sum")
TOLERANCE = {F16: 4e-3, BF16: 3e-2, F32: 2e-6, F64: 1e-14}


def operands(dtype, device, rows=(1001,), classes=519, width=64):
    hidden = torch.randn(*rows, width, device=device).to(dtype)
    weight = (torch.randn(classes, width, device=device) / 8).to(dtype)
    bias = torch.randn(classes, device=device).to(dtype)
    target = torch.randint(classes, rows, device=device)
    target.view(-1)[::7] = -100
    return hidden, weight, target, bias


def results(function, hidden, weight, target, bias, grad_output=None, **options):
    leaves = [t.detach().requires_grad_() for t in (hidden, weight, bias)]
    out = function(leaves[0], leaves[1], target, leaves[2], **options)
    g = torch.ones_like(out) if grad_output is None else grad_output.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, g)]


def compare(hidden, weight, target, bias, **options):
    """Norms of errors: products and sums of 1001 terms have no error of a single element to speak of."""

    def wide(t):
        return t.double() if torch.is_tensor(t) and t.is_floating_point() else t

    g = torch.randn(
        target.shape[: hidden.dim() - 1] if options.get("reduction") == "none" else (), device=hidden.device
    )
    found = results(frt.linear_cross_entropy, hidden, weight, target, bias, g, **options)
    exact = results(
        reference.linear_cross_entropy,
        *map(wide, (hidden, weight, target, bias)),
        g.to(hidden.dtype),
        **{k: wide(v) for k, v in options.items()},
    )
    for ours, true, dtype in zip(
        found, exact, (hidden.dtype, hidden.dtype, weight.dtype, bias.dtype), strict=True
    ):
        assert ours.dtype == dtype
        assert ours.shape == true.shape
        assert (ours.double() - true).norm() <= TOLERANCE[dtype] * true.norm()


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_results_and_gradients(reduction, dtype, device):
    compare(*operands(dtype, device), reduction=reduction)


@pytest.mark.covering(1)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
def test_options(kind, reduction, device):
    hidden, weight, target, bias = operands(F64, device, (3, 150))
    target = target if kind == "classes" else torch.randn(3, 150, 519, dtype=F64, device=device).softmax(-1)
    compare(
        hidden,
        weight,
        target,
        bias,
        reduction=reduction,
        class_weight=torch.rand(519, dtype=F64, device=device),
        label_smoothing=0.1,
        z_loss=0.01,
        softcap=5.0,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_bias_and_only_the_gradients_that_are_needed(reduction, device):
    hidden, weight, target, _ = operands(F64, device)
    hidden.requires_grad_()
    ours, theirs = (
        f(hidden, weight, target, reduction=reduction).sum()
        for f in (frt.linear_cross_entropy, reference.linear_cross_entropy)
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(o, hidden)[0] for o in (ours, theirs)))
    with torch.no_grad():
        torch.testing.assert_close(
            frt.linear_cross_entropy(hidden, weight, target, reduction=reduction).sum(), theirs
        )


def test_float16_gradients_are_no_worse_than_torchs(device):
    """Those of logits are taken for an incoming gradient of 1: torch's are denormal."""
    hidden, weight, target, bias = operands(F16, device, (4001,))
    exact = results(reference.linear_cross_entropy, hidden.double(), weight.double(), target, bias.double())
    found, theirs = (
        results(f, hidden, weight, target, bias)
        for f in (frt.linear_cross_entropy, reference.linear_cross_entropy)
    )
    for ours, torchs, true in zip(found[1:], theirs[1:], exact[1:], strict=True):
        assert (ours.double() - true).norm() <= (torchs.double() - true).norm()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice(reduction, device):
    args = operands(F32, device)
    hidden = args[0].requires_grad_()
    out = frt.linear_cross_entropy(*args, reduction=reduction)
    g = torch.randn_like(out)
    first, again = (torch.autograd.grad(out, hidden, g, retain_graph=True)[0] for _ in range(2))
    assert_same_bits(first, again)


def test_never_all_logits(monkeypatch, device):
    """No more rows than a chunk's go through the product at a time."""
    seen = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, *rest: seen.append(len(x)) or linear(x, *rest)
    )
    args = operands(F32, device, (2000,))
    frt.linear_cross_entropy(*args)
    assert seen == [128] * 15 + [80]


def test_autocast(device):
    hidden, weight, target, bias = operands(F32, device)
    with torch.autocast(device, dtype=BF16):
        found = results(frt.linear_cross_entropy, hidden, weight, target, bias)
        theirs = results(reference.linear_cross_entropy, hidden, weight, target, bias)
    for ours, torchs in zip(found, theirs, strict=True):
        assert ours.dtype == torchs.dtype == F32
        assert (ours - torchs).norm() <= 1e-2 * torchs.norm()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_backward_pass_under_autocast(reduction, device):
    """Which had not been on before."""
    hidden, weight, target, bias = operands(F32, device)
    for operand in (hidden, weight, bias):
        operand.requires_grad_()
    loss = frt.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction).sum()
    expected = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=reduction == "none")
    loss = frt.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction).sum()
    with torch.autocast(device, dtype=BF16):
        found = torch.autograd.grad(loss, (hidden, weight, bias))
    torch.testing.assert_close(found, expected)


def test_no_rows_and_all_ignored(device):
    hidden, weight, target, bias = operands(F32, device)
    assert frt.linear_cross_entropy(hidden[:0], weight, target[:0], bias).isnan()
    assert frt.linear_cross_entropy(hidden[:0], weight, target[:0], bias, reduction="sum") == 0
    assert frt.linear_cross_entropy(hidden, weight, torch.full_like(target, -100), bias).isnan()


def test_arrays():
    hidden, weight, target, bias = operands(F32, "cpu", (33,))
    found = frt.linear_cross_entropy(*(t.numpy() for t in (hidden, weight, target, bias)))
    assert isinstance(found, np.ndarray)
    torch.testing.assert_close(
        torch.from_numpy(found), reference.linear_cross_entropy(hidden, weight, target, bias)
    )


def test_compiled(device):
    args = operands(F32, device)
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    graph = torch.compile(frt.linear_cross_entropy, fullgraph=True, backend=backend)
    for reduction in REDUCTIONS:
        compiled, plain = (
            results(f, *args, reduction=reduction) for f in (graph, frt.linear_cross_entropy)
        )
        for a, b in zip(compiled, plain, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"target": torch.zeros(5, dtype=torch.int64)},
            ValueError,
            r"target must have the shape \(4,\), got \(5,\)",
        ),
        (
            {"weight": torch.ones(7, 5)},
            ValueError,
            r"shapes \(..., H\) and \(V, H\), got \(4, 3\) and \(7, 5\)",
        ),
        (
            {"weight": torch.ones(7, 3).double()},
            TypeError,
            "weight must have hidden's dtype, torch.float32, got torch.float64",
        ),
        ({"bias": torch.ones(3)}, ValueError, r"bias must have the shape \(7,\), got \(3,\)"),
        (
            {"class_weight": torch.ones(3)},
            ValueError,
            r"class_weight must have one value for each of the 7 classes",
        ),
        (
            {"class_weight": torch.ones(7, requires_grad=True)},
            ValueError,
            "class_weight gets no gradient here",
        ),
        ({"target": torch.full((4,), 7)}, IndexError, r"linear_cross_entropy: target must be in \[0, 7\)"),
        ({"hidden": "x"}, TypeError, "hidden must be a tensor or an array, got str"),
    ],
)
def test_errors(change, kind, message):
    args = {
        "hidden": torch.ones(4, 3),
        "weight": torch.ones(7, 3),
        "target": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(kind, match=message):
        frt.linear_cross_entropy(**args | change)


@pytest.mark.gpu
def test_memory():
    """A quarter of torch's at most."""
    hidden, weight, target, _ = operands(BF16, "cuda", (8192,), 32768, 1024)
    peaks = []
    for function in (frt.linear_cross_entropy, reference.linear_cross_entropy):
        leaves = [t.detach().requires_grad_() for t in (hidden, weight)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(*leaves, target).backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= peaks[1] / 4


@pytest.mark.parametrize("rows", [0, 4])
def test_no_target_that_counts(rows, device):
    """The mean of nothing is NaN, its gradients are zeros, as torch's."""
    hidden, weight = (torch.randn(n, 8, device=device, requires_grad=True) for n in (rows, 11))
    loss = frt.linear_cross_entropy(hidden, weight, torch.full((rows,), -100, device=device))
    loss.backward()
    assert loss.isnan()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_second_derivatives_are_refused(device):
    hidden, weight = (torch.randn(n, 8, device=device, requires_grad=True) for n in (4, 11))
    loss = frt.linear_cross_entropy(hidden, weight, torch.arange(4, device=device))
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradient_is_computed_where_none_is_recorded(mode, monkeypatch):
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    target, added = torch.randint(5, (6,)), []
    monkeypatch.setattr(Gradients, "add", lambda self, *_: added.append(self))
    with mode():
        loss = frt.linear_cross_entropy(hidden, weight, target)
        expected = functional.cross_entropy(hidden @ weight.T, target)
    torch.testing.assert_close(loss, expected)
    assert not added and not loss.requires_grad


def test_in_torch_func():
    target = torch.tensor([0, 1])
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: torch"):
        torch.func.grad(lambda h: frt.linear_cross_entropy(h, torch.ones(4, 3), target))(torch.ones(2, 3))


def test_autocast_leaves_doubles_alone():
    hidden, weight = torch.randn(4, 8).double(), torch.randn(5, 8).double()
    target = torch.tensor([0, 1, 2, 4])
    with torch.autocast("cpu", torch.bfloat16):
        found = frt.linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(hidden @ weight.T, target))


def test_several_incoming_gradients_at_a_time():
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    target = torch.randint(5, (6,))
    loss = frt.linear_cross_entropy(hidden, weight, target)
    found = torch.autograd.grad(loss, [hidden, weight], torch.tensor([1.0, -2.0]), is_grads_batched=True)
    logits = functional.linear(hidden, weight)
    expected = torch.autograd.grad(functional.cross_entropy(logits, target), [hidden, weight])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, torch.stack([theirs, -2 * theirs]))
    losses = frt.linear_cross_entropy(hidden, weight, target, reduction="none")
    with pytest.raises(NotImplementedError, match="one incoming gradient at a time"):
        torch.autograd.grad(losses, hidden, torch.eye(6), is_grads_batched=True)
