"""Gradients from a mask of one bit an element: the same as from what it stands for."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusionrt
from fusionrt import fuse, mask, where
from fusionrt.mask import Masking
from fusionrt.precompile import Calls, Kind, Summary, _jobs, _rehearse
from fusionrt.problem import MASK
from fusionrt.rehearsal import collecting
from fusionrt.runtime import pointwise, vectors

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@fuse
def hinge(x, y, slope: float = 0.25):
    return where(x * y < 1, (1 - x) * 2, (1 - x) * slope)


@fuse
def read_anyway(x):
    return where(x > 0, x * x, x)


@fuse
def two_truths(x):
    return where(x > 0, where(x < 6, x, 0), x * 2)


def bias(x):
    return torch.linspace(-1, 1, x.shape[-1], device=x.device, dtype=x.dtype)


# The op of one tensor, and its gradient by x, y = op(x) and g.
OPS = {
    "add_relu": (lambda x: fusionrt.add_relu(x, torch.full_like(x, 0.25)), lambda x, y, g: g * (y > 0)),
    "bias_relu": (lambda x: fusionrt.bias_relu(x, bias(x)), lambda x, y, g: g * (y > 0)),
    "relu": (fusionrt.ops.relu, lambda x, y, g: g * (y > 0)),
    "leaky_relu": (lambda x: fusionrt.ops.leaky_relu(x, 0.125),
                   lambda x, y, g: torch.where(x > 0, g, g * 0.125)),
    "relu_dropout": (lambda x: fusionrt.relu_dropout(x, 0.5), lambda x, y, g: 2 * g * (y > 0)),
    "hinge": (lambda x: hinge(x, torch.full_like(x, 2)),
              lambda x, y, g: torch.where(x * 2 < 1, -2 * g, -0.25 * g)),
}


@pytest.fixture
def of_few(monkeypatch):
    """Masks of any number of elements."""
    monkeypatch.setattr(mask, "FROM", 0)


def lying(t, dims):
    """The same values; None: one value, expanded."""
    return t.mean().expand(t.shape) if dims is None else t.transpose(*dims).contiguous().transpose(*dims)


def test_who_leaves_a_mask():
    def kinds(op, dtype, rows=8192):
        with collecting("cuda") as needed:
            _rehearse(op, dtype, rows, 4096, True)
        return {o.dtype for p in needed for o in (*p.inputs, *p.outputs)}

    for op in (hinge, *(getattr(fusionrt.ops, name) for name in OPS if name != "hinge")):
        assert MASK in kinds(op, torch.bfloat16), op.__name__
        assert MASK not in kinds(op, torch.bfloat16, rows=64), op.__name__
        assert MASK not in kinds(op, torch.float64), op.__name__
    for op in (read_anyway, two_truths, fusionrt.ops.reglu, fusionrt.ops.relu_squared, fusionrt.ops.gelu):
        assert MASK not in kinds(op, torch.float32), op.__name__


@pytest.mark.parametrize("dtype", DTYPES)
def test_whoever_writes_a_mask_writes_whole_vectors(of_few, dtype):
    """Of many elements and of few, in the last block as well."""
    for op in (hinge, *(getattr(fusionrt.ops, name) for name in OPS if name != "hinge")):
        for rows in (1, 8192):
            with collecting("cuda") as needed:
                _rehearse(op, dtype, rows, 4096, True)
            masked = [p for p in needed if any(o.dtype == MASK for o in p.outputs)]
            assert masked, op.__name__
            for problem in masked:
                width = vectors.vector_width(problem, 16)
                assert width % 4 == 0 and pointwise.grid(problem, width).kernel != "pointwise_of_few"
                assert mask.WHOLE % (pointwise.BLOCK * width * vectors.unroll(problem, width)) == 0


def test_a_warmup_serves_few_elements_and_many():
    summary = Summary()
    kind = Kind("cuda", clusters=True)
    jobs = _jobs([fusionrt.add_relu], Calls([torch.float32], [4096], [], True), kind, ["sm_90"], summary)
    texts = {job.text for job, _ in jobs}
    assert not summary.failed
    assert sorted("store_mask(p" in text for text in texts) == [False] * 3 + [True]
    assert sorted("load_mask<W>(p" in text for text in texts) == [False] * 3 + [True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_gradients(of_few, name, dtype):
    op, gradient = OPS[name]
    for shape in ((64, 128), (3, 16, 256), (2, 8, 16, 16), (1, 4096), (1 << 10, 384)):
        for lies in ((-1, -2), (0, -1), (0, 0)):
            x = lying(torch.randn(shape, device="cuda", dtype=dtype), lies).requires_grad_()
            for comes in ((0, 0), (-1, -2), None):
                g = lying(torch.randn(shape, device="cuda", dtype=dtype), comes)
                y = op(x)
                assert isinstance(y.grad_fn._forward_cls.recorded.op, Masking)
                found, = torch.autograd.grad(y, x, g)
                torch.testing.assert_close(found, gradient(x, y, g).to(dtype), rtol=1e-3, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_of_many_elements(dtype):
    """Without being asked: two thirds of the bytes are read."""
    x = torch.randn(1 << 11, 1 << 11, device="cuda", dtype=dtype, requires_grad=True)
    b = torch.randn(1 << 11, device="cuda", dtype=dtype, requires_grad=True)
    y = fusionrt.bias_relu(x, b)
    assert isinstance(y.grad_fn._forward_cls.recorded.op, Masking)
    assert [t.numel() for t in y.grad_fn.saved_tensors] == [x.numel() // 4]
    assert not isinstance(fusionrt.bias_relu(x[:1024], b).grad_fn._forward_cls.recorded.op, Masking)
    g = torch.randn_like(y)
    of_x, of_b = torch.autograd.grad(y, (x, b), g, retain_graph=True)
    expected = g * (y > 0)
    assert torch.equal(of_x, expected)
    torch.testing.assert_close(of_b.double(), expected.double().sum(0), rtol=1e-2, atol=1e-2)
    for wanted, before in ((x, of_x), (b, of_b)):  # one alone, and again
        assert torch.equal(torch.autograd.grad(y, wanted, g, retain_graph=True)[0], before)
    with torch.no_grad():
        assert torch.equal(fusionrt.bias_relu(x, b), y)


@pytest.mark.gpu
def test_misaligned(of_few):
    for offset in (1, 2, 3):
        values = torch.randn(2, 64 * 64 + offset, device="cuda", dtype=torch.bfloat16)
        x, g = (v[offset:].view(64, 64) for v in values)
        y = fusionrt.ops.relu(x.requires_grad_())
        assert isinstance(y.grad_fn._forward_cls.recorded.op, Masking)
        found, = torch.autograd.grad(y, x, g)
        assert torch.equal(y, torch.relu(x)) and torch.equal(found, g * (y > 0))


@pytest.mark.gpu
@pytest.mark.parametrize("first", [0, 1])
def test_misaligned_calls_walk_as_aligned_ones(of_few, first):
    """An expanded argument, whose copy would lie otherwise, and a kind of call that is known already."""
    rows = torch.randn(1, 16, 1, 1, device="cuda")
    for offset in (first, 1 - first):
        values = torch.randn(4 * 16 * 64 + offset, device="cuda")[offset:]
        x = values.view(4, 8, 8, 16).permute(0, 3, 1, 2).requires_grad_()
        y = fusionrt.add_relu(rows.expand(x.shape), x)
        assert isinstance(y.grad_fn._forward_cls.recorded.op, Masking)
        g = torch.randn(x.shape, device="cuda")
        assert torch.equal(torch.autograd.grad(y, x, g)[0], g * (y > 0))


@pytest.mark.gpu
def test_elements_that_are_left_over_have_none(of_few):
    x = torch.randn(4096 + 8, device="cuda", requires_grad=True)
    y = fusionrt.ops.relu(x)
    assert not isinstance(y.grad_fn._forward_cls.recorded.op, Masking)
    assert torch.equal(torch.autograd.grad(y, x, x.detach())[0], x.detach() * (y > 0))


@pytest.mark.gpu
def test_as_torch_uses_it(of_few):
    """Gradients of gradients, of a batch of them, checkpoints, captured graphs, saved tensors elsewhere."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = fusionrt.ops.leaky_relu(x, 0.5)
    g = torch.randn_like(y, requires_grad=True)
    first, = torch.autograd.grad(y, x, g, create_graph=True)
    of_g, = torch.autograd.grad(first, g, torch.ones_like(first), retain_graph=True)
    torch.testing.assert_close(of_g, torch.where(x > 0, 1.0, 0.5))
    many = torch.randn(3, *y.shape, device="cuda")
    found, = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, many * torch.where(x > 0, 1.0, 0.5))

    y = checkpoint(fusionrt.relu_dropout, x, 0.5, use_reentrant=False)
    found, = torch.autograd.grad(y, x, g)
    torch.testing.assert_close(found, 2 * g * (y > 0))
    with torch.autograd.graph.save_on_cpu():
        y = fusionrt.ops.relu(x)
    assert torch.equal(torch.autograd.grad(y, x, g)[0], g * (y > 0))

    graph, static = torch.cuda.CUDAGraph(), torch.randn(64, 64, device="cuda", requires_grad=True)
    incoming = g.detach()
    torch.autograd.grad(fusionrt.relu_dropout(static, 0.5), static, incoming)
    with torch.cuda.graph(graph):
        out = fusionrt.relu_dropout(static, 0.5)
        of_static, = torch.autograd.grad(out, static, incoming)
    kept = set()
    for _ in range(3):
        graph.replay()
        assert torch.equal(of_static, 2 * incoming * (out > 0))
        kept.add(int((out > 0).sum()))
    assert len(kept) > 1
