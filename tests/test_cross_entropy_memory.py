"""Memory of cross-entropy: what a call takes, the gradient in that of the logits, streams and captures."""

import pytest
import torch
from checking import BF16, F32, assert_same_bits, evaluate
from test_cross_entropy import kinds, logits, reductions, targets

import fusionrt as frt
from fusionrt.settling import SETTLED_AFTER

# --- the gradient in the memory of the logits


def product(device):
    h, w = (
        torch.randn(20, 8, device=device, requires_grad=True),
        torch.randn(50, 8, device=device, requires_grad=True),
    )
    return h, w, torch.randint(50, (20,), device=device)


@reductions
@kinds
def test_gradient_in_place(kind, reduction, device):
    h, w, target = product(device)
    x = h @ w.T
    target = target if kind == "classes" else targets(kind, x.detach())
    out = frt.cross_entropy(x, target, reduction=reduction, inplace_backward=True)
    expected = frt.cross_entropy(h @ w.T, target, reduction=reduction)
    assert_same_bits(out, expected)
    g = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad(o, (h, w), g) for o in (out, expected)), strict=True):
        assert_same_bits(a, b)
    x = h @ w.T
    where = x.data_ptr()
    (grad,) = torch.autograd.grad(
        frt.cross_entropy(x, target, reduction=reduction, inplace_backward=True), x, g
    )
    assert grad.data_ptr() == where


@pytest.mark.parametrize("use", ["of its own", "before", "after", "twice"])
def test_whoever_saved_the_logits_is_told(use, device):
    h, w, target = product(device)
    x = torch.tanh(h @ w.T) if use == "before" else h @ w.T
    out = frt.cross_entropy(x, target, inplace_backward=True)
    if use == "of its own":
        (x * x).sum()
        total = out
    elif use == "after":
        total = (x * x).sum() + out  # the gradient of a product is computed after this one's
    else:
        total = out
    if use == "of its own":
        total.backward()  # nobody needs x any more
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward(retain_graph=True)
        total.backward()


def test_refused_in_place(device):
    h, w, target = product(device)
    with pytest.raises(
        ValueError, match="cross_entropy: inplace_backward overwrites input, which must not be a leaf"
    ):
        frt.cross_entropy(
            w.detach().requires_grad_(),
            torch.zeros(50, dtype=torch.int64, device=device),
            inplace_backward=True,
        )
    with pytest.raises(ValueError, match=r"contiguous with the classes last, got strides \(1, 20\)"):
        frt.cross_entropy((w @ h.T).T, target, inplace_backward=True)
    x = h @ w.T
    with pytest.raises(RuntimeError, match="inplace_backward has no second derivative"):
        torch.autograd.grad(frt.cross_entropy(x, target, inplace_backward=True), x, create_graph=True)


# --- calls


@pytest.mark.gpu
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_memory_of_a_call(needs_gradient):
    """The result; for a gradient a row's maximum and sum, and what the mean divides by."""
    x = logits((33, 65), F32, "cuda").requires_grad_(needs_gradient)
    target = torch.randint(65, (33,), device="cuda")

    def allocated():
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    for _ in range(2 * SETTLED_AFTER):
        before = allocated()
        frt.cross_entropy(x, target)
    assert allocated() - before == (4 if needs_gradient else 1)


@pytest.mark.gpu
def test_graph_capture():
    x, target = logits((33, 65), F32, "cuda").requires_grad_(), torch.randint(65, (33,), device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # what has no values yet has targets out of range
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(frt.cross_entropy(x, target), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = frt.cross_entropy(x, target)
        (grad,) = torch.autograd.grad(out, x)
    with torch.no_grad():
        x.copy_(logits((33, 65), F32, "cuda"))
    graph.replay()
    (expected, (theirs,)) = evaluate(frt.cross_entropy, (x, target))
    assert_same_bits(out, expected)
    assert_same_bits(grad, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(512, 2048), (3, 70_001)], ids=str)
def test_streams_and_graphs_beside_each_other(shape):
    """Blocks count themselves in memory of the stream, or of the graph."""
    x, target = logits(shape, BF16, "cuda"), torch.randint(shape[1], shape[:1], device="cuda")
    first, second, graph = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    expected = frt.cross_entropy(x, target)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=first):
        captured = frt.cross_entropy(x, target)
    found = []
    for _ in range(2 * SETTLED_AFTER):
        for stream in (first, second):
            with torch.cuda.stream(stream):
                found.append(frt.cross_entropy(x, target))
        graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, expected)
    assert_same_bits(torch.stack(found), expected.expand(len(found)))


@pytest.mark.gpu
def test_another_stream_may_be_the_next():
    """Classes that lie across memory are found by their numbers, which are made once."""
    x, target = logits((2, 77, 50, 3), F32, "cuda"), torch.randint(77, (2, 50, 3), device="cuda")
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(200_000_000)
        frt.cross_entropy(x, target)
    with torch.cuda.stream(second):
        found = frt.cross_entropy(x, target)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(x, target))


@pytest.mark.gpu
def test_what_a_capture_makes_is_its_own():
    def operands(n_classes):
        return logits((2, n_classes, 50, 3), F32, "cuda"), torch.randint(n_classes, (2, 50, 3), device="cuda")

    frt.cross_entropy(*operands(23))
    args = operands(29)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        frt.cross_entropy(*args)  # never replayed
    torch.testing.assert_close(frt.cross_entropy(*args), torch.nn.functional.cross_entropy(*args))
