"""Ops in torch's autograd: higher derivatives, saved tensors, modes, streams and graphs."""

import itertools

import pytest
import torch
from checking import BF16, F32, F64, assert_same_bits, derivatives, make
from pointwise_ops import DIFFERENTIABLE, example

import fusionrt as frt
from fusionrt import data
from fusionrt.catalogue import COLUMNS, OPS, ROWS
from fusionrt.ops.convolution import IMAGES


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_same_bits_every_time(name, dtype, device):
    """Backward twice over one graph, and everything again."""
    args, kwargs = example(name, (33, 17), dtype, device)
    args = [a.requires_grad_() if torch.is_tensor(a) else a for a in args]
    wanted = [a for a in args if torch.is_tensor(a)]
    out, again = OPS[name](*args, **kwargs), OPS[name](*args, **kwargs)
    assert_same_bits(out, again)
    grad_output = torch.randn_like(out)
    first = torch.autograd.grad(out, wanted, grad_output, retain_graph=True)
    for other in (out, again):
        for a, b in zip(first, torch.autograd.grad(other, wanted, grad_output), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivative(name, device):
    args, kwargs = example(name, (4, 3), F64, device)
    args = [a.requires_grad_() if torch.is_tensor(a) else a for a in args]
    function = lambda *args: OPS[name](*args, **kwargs)  # noqa: E731
    assert torch.autograd.gradcheck(function, args)
    assert torch.autograd.gradgradcheck(function, args, fast_mode=True)


@pytest.mark.parametrize(
    "shapes", [((3, 1), (1, 4), (4,), ()), ((2, 3), (3,), (2, 1), (2, 3))], ids=str
)
def test_derivatives_of_broadcast_operands(shapes, device):
    args = [make(s, F64, device) for s in shapes]
    function = frt.fuse(lambda a, b, c, d: frt.tanh(a * b + c) * frt.exp(d * a))
    for ours, torchs in zip(*(derivatives(f, args) for f in (
            function, lambda a, b, c, d: torch.tanh(a * b + c) * torch.exp(d * a))), strict=True):
        torch.testing.assert_close(ours, torchs)


def test_third_derivative(device):
    x = torch.linspace(-2, 2, 9, dtype=F64, device=device, requires_grad=True)
    ours, theirs = frt.tanh(x), torch.tanh(x)
    for _ in range(3):
        ours, theirs = (
            torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in (ours, theirs)
        )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "wanted", [p for p in itertools.product([False, True], repeat=4) if any(p)][::2], ids=str
)
def test_only_the_gradients_that_are_needed(wanted, device):
    shapes = [(33, 17), (17,), (33, 1), ()]
    args = [make(s, F32, device).requires_grad_(w) for s, w in zip(shapes, wanted, strict=True)]
    frt.add_mul_add(*args).sum().backward()
    grads = [a.grad for a in args]
    truth = [a.detach().requires_grad_() for a in args]
    OPS["add_mul_add"].reference(*truth).sum().backward()
    for grad, true, is_wanted in zip(grads, truth, wanted, strict=True):
        assert (grad is not None) == is_wanted
        if is_wanted:
            torch.testing.assert_close(grad, true.grad, rtol=1e-5, atol=1e-3)


def test_only_the_bias_wants_a_gradient(device):
    x, bias = make((33, 17), F32, device), make((17,), F32, device).requires_grad_()
    out = frt.bias_gelu(x, bias)
    assert out.requires_grad
    out.sum().backward()
    truth = bias.detach().double().requires_grad_()
    OPS["bias_gelu"].reference(x.double(), truth).sum().backward()
    torch.testing.assert_close(bias.grad.double(), truth.grad, rtol=1e-5, atol=1e-5)
    assert x.grad is None


def test_no_grad_and_inference_mode(device):
    x = make((33, 17), F32, device).requires_grad_()
    expected = frt.gelu(x)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = frt.gelu(x)
            assert not out.requires_grad
            assert_same_bits(out, expected)
    assert frt.gelu(x).requires_grad
    with torch.inference_mode():
        inside = frt.gelu(x.clone())
    assert_same_bits(inside, expected)
    assert_same_bits(frt.relu(inside), torch.relu(inside))


def test_a_changed_input_is_noticed(device):
    x = make((33, 17), F32, device).requires_grad_()
    y = x * 1
    out = frt.gelu(y)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_input_that_the_gradient_does_not_read_may_change(device):
    x, residual = make((33, 17), F32, device), make((33, 17), F32, device).requires_grad_()
    y = residual * 1
    out = frt.fuse(lambda a, b: a * 2 + b)(x, y)
    with torch.no_grad():
        y.mul_(2)
    out.sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(x))


def test_strided_and_expanded_grad_output(device):
    x = make((33, 17), F32, device).requires_grad_()
    for grad_output in (
        make((17, 33), F32, device).t(),
        make((), F32, device).expand(33, 17),
        make((33, 34), F32, device)[:, ::2],
    ):
        (grad,) = torch.autograd.grad(frt.silu(x), x, grad_output)
        (truth,) = torch.autograd.grad(torch.nn.functional.silu(x), x, grad_output)
        torch.testing.assert_close(grad, truth)


def test_functorch(device):
    x, b = make((5, 7), F64, device), make((7,), F64, device)
    ours = torch.func.grad(lambda x: frt.bias_gelu(x, b).sum())(x)
    torch.testing.assert_close(
        ours, torch.func.grad(lambda x: OPS["bias_gelu"].reference(x, b).sum())(x)
    )


@pytest.mark.gpu
def test_streams_and_graph_capture():
    x, bias = (
        make((33, 17), F32, "cuda").requires_grad_(),
        make((17,), F32, "cuda").requires_grad_(),
    )

    def step():
        return torch.autograd.grad(frt.bias_gelu(x, bias), (x, bias), torch.ones_like(x))

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.detach().mul_(2)
        x.detach().mul_(0.5)
        found = step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for others in (found, captured):
        for a, b in zip(expected, others, strict=True):
            assert_same_bits(a, b)


# --- a gradient's memory is nobody else's

@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_that_are_the_incoming_one_add_up(compiled, device):
    """Autograd adds to what it takes for its own."""
    p, q = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))

    def both(p, q):
        return frt.dropout_add(p, q, training=False) * 3

    function = torch.compile(both, backend="aot_eager") if compiled else both
    for _ in range(3):
        function(p, q).sum().backward()
    assert p.grad.tolist() == q.grad.tolist() == [9.0] * 4
    grad = torch.ones(4, device=device)
    for _ in range(3):
        frt.dropout_add(p, q, training=False).backward(grad)
    assert grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", [n for n in OPS if n not in ("quantize_int8", "dequantize_int8")])
def test_gradients_share_no_memory(name, device):
    """With each other, with the incoming ones, with the operands; the first time and later."""
    if "cpu_" in name and device == "cuda":
        pytest.skip("refuses a GPU")
    leaves = []

    def made(*shape, dtype=F32, high=None):
        shape = [{ROWS: 8, COLUMNS: 16, IMAGES[-1]: 7}.get(n, n) for n in shape]
        if not dtype.is_floating_point:
            return torch.randint(0, min(high or 2, 2), shape, device=device).to(dtype)
        leaves.append(torch.randn(shape, device=device, dtype=dtype).requires_grad_())
        return leaves[-1]

    args = OPS[name].example(made)
    for _ in range(3):
        results = OPS[name](*args)
        results = [r for r in (results if isinstance(results, tuple) else (results,))
                   if torch.is_tensor(r) and r.requires_grad]
        if not results:
            return
        grads = [torch.randn_like(r) for r in results]
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(results, grads)
        found = [*grads, *leaves, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        memory = [t.untyped_storage().data_ptr() for t in found if t.numel()]
        assert len(set(memory)) == len(memory)


def zeros(like, *shape):
    return torch.zeros(shape, dtype=torch.int64, device=like.device)


HEADS = (2, 3, 5, 8)
CHANGED = {
    "rotary_embedding": (lambda q: frt.rotary_embedding(q), HEADS[1:]),
    "qkv_heads with a bias": (lambda x: frt.qkv_heads(x, 2, bias=x[0, 0]), (2, 5, 48)),
    "qkv_heads rotated": (lambda x: frt.qkv_heads(x, 2, base=1e4), (2, 5, 48)),
    "embedding": (lambda w: frt.embedding_position(zeros(w, 2, 3), w), (9, 8)),
    "embedding with a norm": (lambda w: frt.embedding_position(zeros(w, 2, 3), w, layer_norm=(w[0], w[1])),
                              (9, 8)),
    "linear_cross_entropy": (lambda x: frt.linear_cross_entropy(x, x[0], zeros(x, 2, 5), reduction="none"),
                             (2, 5, 8)),
    "sliding_window": (lambda x: data.sliding_window(x, 3, dim=1), HEADS),
    "depthwise_conv2d": (lambda x: frt.depthwise_conv2d(x, x[0, :, None, :3, :3]), HEADS),
}


@pytest.mark.parametrize("name", CHANGED)
def test_results_may_be_changed_in_place(name, device):
    """They are no views, which of an autograd.Function torch refuses to change."""
    function, shape = CHANGED[name]
    x = torch.randn(shape, device=device, requires_grad=True)

    def gradient(times):
        found = function(x)
        results = found if isinstance(found, tuple) else (found,)
        return torch.autograd.grad(sum(times(out).sum() for out in results), x)

    torch.testing.assert_close(gradient(lambda out: out.mul_(2.0)), gradient(lambda out: out * 2.0))


def test_results_that_the_backward_pass_reads_may_be_changed_without_one(device):
    q = torch.randn(HEADS, device=device, requires_grad=True)
    out = frt.attention(q, q, q, softcap=2.0)
    expected = out.detach() + 1
    assert_same_bits(out.add_(1.0).detach(), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@frt.fuse
def of_some(x, y, compared):
    return x * 2, frt.where(compared > 0, y * 3, y * 3), x > y


@pytest.mark.parametrize("needed", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_follows_from_no_graded_argument_requires_no_gradient(needed, compiled, device):
    args = [torch.randn(4, device=device, requires_grad=bool(need)) for need in needed]
    function = torch.compile(of_some, backend="aot_eager", fullgraph=True) if compiled else of_some
    outs = function(*args)
    assert [out.requires_grad for out in outs] == [bool(needed[0]), bool(needed[1]), False]
    for out, x, factor in zip(outs, args, (2.0, 3.0), strict=False):
        if out.requires_grad:
            found, = torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert torch.equal(found, torch.full_like(x, factor))
