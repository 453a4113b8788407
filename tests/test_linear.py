"""Linear layers with bias, activation, dropout and residual."""

import functools

import numpy as np
import pytest
import torch
from checking import (
    BF16,
    F32,
    F64,
    assert_same_bits,
    captured,
    check_in_norm,
    derivatives,
    dtypes,
    evaluate,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusionrt as frt
from fusionrt import reference
from fusionrt.op_names import OPS

M, N, K = 33, 40, 24
# On a CPU: of each kind one; a GPU runs the others as well.
ACTIVATIONS = [pytest.param(a, marks=() if a in ("relu", "gelu") else pytest.mark.gpu)
               for a in OPS["activations"]]


def operands(dtype, device, rows=(M,), n=N, k=K):
    x = torch.randn(*rows, k, device=device).to(dtype)
    weight = (torch.randn(n, k, device=device) / k**0.5).to(dtype)
    return x, weight, torch.randn(n, device=device).to(dtype)


def half_of_relu(y):
    return frt.relu(y) * 0.5 + 1


@functools.lru_cache(1)
def users():
    return frt.fuse(half_of_relu)


# --- accuracy


@dtypes
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_as_accurate_as_torch(activation, dtype, device):
    args = (*operands(dtype, device), activation)
    before = [a.clone() for a in args[:3]]
    out, _ = check_in_norm(frt.linear_activation, args)
    with torch.no_grad():  # which writes over the product: not over anything of the caller's
        assert_same_bits(frt.linear_activation(*args), out)
    for tensor, was in zip(args, before, strict=False):
        assert_same_bits(tensor, was)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_without_bias(activation, device):
    x, weight, _ = operands(F32, device)
    out, grads = check_in_norm(frt.linear_activation, (x, weight, None, activation))
    assert len(grads) == 2
    with torch.no_grad():
        assert_same_bits(frt.linear_activation(x, weight, activation=activation), out)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 3072, 768), (32, 1024, 512), (512, 3072, 768)])
def test_every_activation_at_sizes_of_models(shape, activation):
    m, n, k = shape
    check_in_norm(frt.linear_activation, (*operands(BF16, "cuda", (m,), n, k), activation))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("allowed", [True, False], ids=["tf32", "ieee"])
def test_float32_as_torch_is_set(allowed, activation, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
    check_in_norm(frt.linear_activation, (*operands(F32, "cuda", (256,), 512, 384), activation))


@pytest.mark.parametrize("function", [half_of_relu, users, None], ids=["plain", "fused", "none"])
def test_a_users_function(function, device):
    function = function() if function is users else function
    args = (*operands(F32, device), function)
    check_in_norm(frt.linear_activation, args, reference=lambda *a, **k: reference.linear_activation(
        *a[:3], None if function is None else lambda y: torch.relu(y) * 0.5 + 1, **k))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_residual(dtype, device):
    """Of float32 with bfloat16 operands too: the result is the wider, as torch's."""
    x, weight, bias = operands(BF16, device)
    residual = torch.randn(M, N, device=device).to(dtype)
    for activation in ("gelu", None):
        def function(x, weight, bias, residual, f=frt.linear_activation, activation=activation):
            return f(x, weight, bias, activation, residual=residual)

        args, before = (x, weight, bias, residual), residual.clone()
        out, _ = check_in_norm(function, args, reference=functools.partial(
            function, f=reference.linear_activation))
        assert out.dtype == dtype
        assert_same_bits(function(*args), function(*args))
        assert_same_bits(residual, before)


# --- dropout


@pytest.mark.parametrize("activation", ["relu", "gelu", None])
def test_dropout(activation, device):
    """The same seed gives the same mask with and without gradients, which are those of that mask."""
    x, weight, bias = (t.requires_grad_() for t in operands(F64, device, (400,)))
    torch.manual_seed(5)
    out = frt.linear_activation(x, weight, bias, activation, dropout_p=0.25)
    with torch.no_grad():
        torch.manual_seed(5)
        assert_same_bits(frt.linear_activation(x, weight, bias, activation, dropout_p=0.25), out)
    plain = reference.linear_activation(x, weight, bias, activation)
    kept = (out != 0) | (plain == 0)
    assert 0.72 < (kept & (plain != 0)).sum() / (plain != 0).sum() < 0.78
    expected = plain * kept / 0.75
    torch.testing.assert_close(out, expected)
    grad_output = torch.randn_like(out)
    grads = (torch.autograd.grad(o, (x, weight, bias), grad_output) for o in (out, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("op", ["linear_relu_dropout", "linear_gelu_dropout"])
def test_named_with_dropout(op, device):
    x, weight, bias = operands(F32, device)
    function, activation = getattr(frt, op), op.split("_")[1]
    torch.manual_seed(6)
    out = function(x, weight, bias, 0.5)
    torch.manual_seed(6)
    assert_same_bits(out, frt.linear_activation(x, weight, bias, activation, dropout_p=0.5))
    plain = frt.linear_activation(x, weight, bias, activation)
    assert_same_bits(function(x, weight, bias, 0.5, False), plain)
    assert not function(x, weight, bias, 1.0).any()
    torch.testing.assert_close(function(x, weight, bias, 0.0), function.reference(x, weight, bias, 0.0))


def test_dropout_and_residual(device):
    x, weight, bias = operands(F32, device)
    residual = torch.randn(M, N, device=device)
    torch.manual_seed(7)
    dropped = frt.linear_activation(x, weight, bias, "gelu", dropout_p=0.5)
    torch.manual_seed(7)
    out = frt.linear_activation(x, weight, bias, "gelu", dropout_p=0.5, residual=residual)
    torch.testing.assert_close(out, dropped + residual)
    torch.testing.assert_close(frt.linear_activation(
        x, weight, bias, "gelu", dropout_p=0.5, residual=residual, training=False),
        F.gelu(F.linear(x, weight, bias)) + residual)


# --- names


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_named(approximate, device):
    args = operands(F32, device)
    check_in_norm(frt.linear_gelu, args, {"approximate": approximate})
    check_in_norm(frt.linear_relu, args)
    assert frt.ops.fused_linear_relu is frt.linear_relu
    with pytest.raises(ValueError, match="linear_gelu: approximate must be 'none' or 'tanh', got 'erf'"):
        frt.linear_gelu(*args, approximate="erf")


# --- shapes and layouts


@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_shapes(rows, device):
    x, weight, bias = operands(F32, device, rows)
    for activation in ("relu", "gelu"):
        args = (x, weight, bias, activation)
        (out, grads), (expected, expected_grads) = (evaluate(f, args) for f in (
            frt.linear_activation, reference.linear_activation))
        with torch.no_grad():
            found = frt.linear_activation(*args)
        assert found.shape == (*rows, N)
        for a, b in zip((out, found, *grads), (expected, expected, *expected_grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_layouts(device):
    x, weight, bias = operands(F32 if device == "cpu" else BF16, device, (12, 10))
    views = {"x": (x.transpose(0, 1), weight, bias), "x's columns": (x[..., ::2], weight[:, ::2], bias),
             "weight": (x, weight.t().contiguous().t(), bias), "bias": (x, weight[::2], bias[::2]),
             "offset": (x[..., 1:], weight[:, 1:], bias)}
    for args in views.values():
        check_in_norm(frt.linear_activation, (*args, "gelu"))
        # A sum's gradient has no memory of its own; a transposed one lies across.
        like = frt.linear_activation(*args, "gelu")
        check_in_norm(frt.linear_activation, (*args, "gelu"), grad_output=torch.ones(
            (), dtype=F64, device=device).expand(like.shape))
        across = torch.randn(like.shape[::-1], dtype=F64, device=device).permute(2, 1, 0)
        check_in_norm(frt.linear_activation, (*args, "relu"), grad_output=across)


# --- what is kept, and in which memory


@pytest.mark.parametrize("of_whole", [
    lambda t: t.chunk(2, 1), lambda t: (t[:, ::2], t[:, 1::2]), lambda t: t.t().chunk(2, 1),
    lambda t: (t[1:, 3:20], t[1:, 23:]), lambda t: (t[:1], t[1:2])],
    ids=["halves", "every other", "transposed", "offset", "rows"])
def test_results_in_the_memory_of_operands(of_whole, device):
    @frt.fuse
    def both(a, b, c):
        return a * c + b, frt.cast(b - c, "float32")

    kernel = both.operator.over({0: 0, 1: 1})
    for dtype in (F32, BF16) if device == "cuda" else (F32,):
        whole = torch.randn(34, 40, device=device).to(dtype)
        a, b = (t.clone() for t in of_whole(whole))
        outside = torch.ones_like(whole, dtype=torch.bool)
        for part in of_whole(outside):
            part.zero_()
        before, c = whole.clone(), torch.randn_like(a)
        parts = of_whole(whole)
        expected = both(a, b, c)
        found = kernel.launch([*parts, c])
        assert found[0] is parts[0]
        assert (found[1] is parts[1]) == (dtype == F32)  # that of another dtype has memory of its own
        for ours, theirs in zip(found, expected, strict=True):
            assert_same_bits(ours, theirs)
        assert_same_bits(whole[outside], before[outside])


def kept_for_backward(function, *args, **kwargs):
    found = {}

    def note(tensor):
        found[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = function(*args, **kwargs)
    own = {(a.data_ptr(), a.nbytes) for a in args if torch.is_tensor(a)}
    return sum(size for key, size in found.items() if key not in own), out


@pytest.mark.parametrize(("activation", "dropout_p", "ours", "theirs"), [
    ("relu", 0.0, 1, 1), ("relu", 0.5, 1, 2), ("gelu", 0.0, 1, 1), ("gelu", 0.5, 1, 2), ("tanh", 0.0, 1, 1),
    (None, 0.5, 0, 1)])
def test_what_is_kept(activation, dropout_p, ours, theirs):
    """Times the bytes of the result; eager torch also keeps masks, on a CPU as numbers."""
    args = [t.requires_grad_() for t in operands(F32, "cpu")]
    found, out = kept_for_backward(frt.linear_activation, *args, activation, dropout_p=dropout_p)
    assert found == ours * out.nbytes
    found, _ = kept_for_backward(reference.linear_activation, *args, activation, dropout_p=dropout_p)
    assert found == theirs * out.nbytes


def test_inference_takes_the_memory_of_the_product(monkeypatch, device):
    made = []
    product = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: made.append(product(*args)) or made[-1])
    args = operands(F32, device, (3, 5))
    for activation in ("gelu", users()):
        assert frt.linear_activation(*args, activation).data_ptr() == made[-1].data_ptr()
    x = args[0].requires_grad_()
    assert frt.linear_activation(x, *args[1:], "gelu").data_ptr() != made[-1].data_ptr()
    assert frt.linear_activation(x, *args[1:], users()).data_ptr() != made[-1].data_ptr()


def test_a_kept_graph_and_kept_tensors_stay_as_they_are(device):
    """Otherwise the gradient takes the memory of the product."""
    args = [t.requires_grad_() for t in operands(F32, device)]
    out = frt.linear_gelu(*args)
    grad_output = torch.randn_like(out)
    first, again, last = (torch.autograd.grad(out, args, grad_output, retain_graph=k < 2) for k in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append((t, t.clone())) or len(kept) - 1, lambda k: kept[k][0]):
        out = frt.linear_gelu(*args)
    hooked = torch.autograd.grad(out, args, grad_output)
    for a, *others in zip(first, again, last, hooked, strict=True):
        for b in others:
            assert_same_bits(a, b)
    for tensor, copy in kept:
        assert_same_bits(tensor, copy)


# --- torch's machinery


def test_second_derivatives(device):
    for activation in ("relu", "silu"):
        args = [t.requires_grad_() for t in operands(F64, device, (3,), 4, 5)]
        ours, theirs = (derivatives(lambda *a, f=f: f(*a, activation), args) for f in (  # noqa: B023
            frt.linear_activation, reference.linear_activation))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
    assert torch.autograd.gradgradcheck(lambda *a: frt.linear_activation(*a, "silu"), args)


def test_derivative_of_a_dropped_result_twice(device):
    x, weight, bias = (t.requires_grad_() for t in operands(F64, device, (50,)))
    out = frt.linear_gelu_dropout(x, weight, bias, 0.5)
    kept = out != 0
    expected = F.gelu(F.linear(x, weight, bias)) * kept * 2
    (ours,), (theirs,) = (torch.autograd.grad(o.sum(), x, create_graph=True) for o in (out, expected))
    torch.testing.assert_close(ours, theirs)
    second = (torch.autograd.grad(g.square().sum(), (x, weight)) for g in (ours, theirs))
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b)


def test_batched_gradients_and_transforms(device):
    x, weight, bias = (t.requires_grad_() for t in operands(F64, device, (3,)))
    for function in (frt.linear_relu, frt.linear_gelu):
        theirs = reference.linear_relu if function is frt.linear_relu else reference.linear_gelu
        grads = torch.randn(5, 3, N, dtype=F64, device=device)
        ours, expected = (torch.autograd.grad(f(x, weight, bias), (x, weight, bias), grads,
                                              is_grads_batched=True) for f in (function, theirs))
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b)
        each = [torch.func.vmap(torch.func.grad(lambda row, f=f: f(row, weight, bias).sum()))(x)
                for f in (function, theirs)]
        torch.testing.assert_close(*each)


def test_one_tensor_twice(device):
    square = torch.randn(K, K, dtype=F64, device=device, requires_grad=True)
    ours, theirs = (derivatives(lambda w, f=f: f(w, w, w[0]), [square]) for f in (
        frt.linear_gelu, reference.linear_gelu))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", range(4))
def test_only_the_gradients_that_are_needed(frozen, device):
    args = [*operands(F64, device), torch.randn(M, N, dtype=F64, device=device)]
    args = [t.requires_grad_(i != frozen) for i, t in enumerate(args)]
    wanted = [t for t in args if t.requires_grad]

    def grads(f):
        out = f(*args[:3], "gelu", residual=args[3])
        return torch.autograd.grad(out, wanted, torch.ones_like(out))

    for a, b in zip(grads(frt.linear_activation), grads(reference.linear_activation), strict=True):
        torch.testing.assert_close(a, b)


def test_result_may_be_changed_in_place(device):
    """No view to autograd; but what the gradient reads must not change."""
    x, weight, bias = (t.requires_grad_() for t in operands(F32, device, (2, 3)))
    out = frt.linear_gelu(x, weight, bias)
    out += 1
    out.sum().backward()
    assert x.grad is not None
    out = frt.linear_relu(x, weight, bias)
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_autocast(device):
    args = operands(F32, device)
    before = [a.clone() for a in args]
    with torch.autocast(device, dtype=BF16):
        for residual in (None, torch.randn(M, N, device=device)):
            found = [f(*args, "gelu", residual=residual) for f in (
                frt.linear_activation, reference.linear_activation)]
            assert found[0].dtype == found[1].dtype == (BF16 if residual is None else F32)
            torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
        for a, was in zip(args, before, strict=True):
            assert_same_bits(a, was)
        leaves = [a.detach().requires_grad_() for a in args]
        ours, theirs = (f(*leaves, "gelu") for f in (frt.linear_activation, reference.linear_activation))
    for a, b in zip(*(torch.autograd.grad(o.float().sum(), leaves) for o in (ours, theirs)), strict=True):
        assert a.dtype == b.dtype == F32
        assert (a - b).norm() <= 2e-2 * b.norm()


def test_checkpoint(device):
    args = [t.requires_grad_() for t in operands(F32, device)]
    torch.manual_seed(8)
    out = checkpoint(frt.linear_gelu_dropout, *args, 0.5, use_reentrant=False)
    torch.manual_seed(8)
    expected = frt.linear_gelu_dropout(*args, 0.5)
    assert_same_bits(out, expected)
    for a, b in zip(*(torch.autograd.grad(o.sum(), args) for o in (out, expected)), strict=True):
        assert_same_bits(a, b)


def test_compiled(device):
    args = [t.requires_grad_() for t in operands(F32, device, (2, 5))]
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"

    def function(x, weight, bias):
        y = frt.linear_relu(x, weight, bias)
        return frt.linear_activation(y, weight.mT, None, "gelu", residual=x)

    compiled, plain = (f(*args) for f in (torch.compile(function, fullgraph=True, backend=backend), function))
    torch.testing.assert_close(compiled, plain)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), args) for o in (compiled, plain)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "silu"])
def test_in_a_cuda_graph(activation):
    x, weight, bias = operands(BF16, "cuda", (64,), 256, 128)
    graph, out = captured(lambda: frt.linear_activation(x, weight, bias, activation))
    x.copy_(torch.randn_like(x))
    graph.replay()
    expected = reference.linear_activation(x, weight, bias, activation)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_no_number_passes_as_in_torch():
    x, weight, bias = operands(BF16, "cuda", (64,), 256, 128)
    x[3, 5] = float("nan")
    x[7, 5] = float("inf")
    for activation in ("relu", "gelu_tanh", "silu"):
        found = frt.linear_activation(x, weight, bias, activation)
        expected = reference.linear_activation(x, weight, bias, activation)
        assert torch.equal(found.isnan(), expected.isnan())


def test_arrays():
    x, weight, bias = operands(F32, "cpu")
    arrays = (t.numpy() for t in (x, weight, bias))
    found = frt.linear_activation(*arrays, "gelu", residual=np.zeros((M, N), np.float32))
    assert isinstance(found, np.ndarray)
    torch.testing.assert_close(torch.from_numpy(found), reference.linear_gelu(x, weight, bias))


# --- errors


@pytest.mark.parametrize(("change", "kind", "message"), [
    ({"x": "x"}, TypeError, "x must be a tensor or an array, got str"),
    ({"x": torch.ones(())}, ValueError, r"shapes \(..., K\) and \(N, K\), got \(\) and \(7, 3\)"),
    ({"weight": torch.ones(7, 5)}, ValueError, r"shapes \(..., K\) and \(N, K\), got \(4, 3\) and \(7, 5\)"),
    ({"weight": torch.ones(7, 3).double()}, TypeError,
     "weight must have x's dtype, torch.float32, got torch.float64"),
    ({"weight": torch.ones(7, 3, device="meta")}, ValueError, "weight must be on x's device, cpu, got meta"),
    ({"bias": torch.ones(3)}, ValueError, r"bias must have the shape \(7,\), got \(3,\)"),
    ({"bias": 1.0}, TypeError, "bias must be a tensor or an array, got float"),
    ({"x": torch.ones(4, 3).int(), "weight": torch.ones(7, 3).int(), "bias": None}, TypeError,
     "x must be of a floating-point dtype, got torch.int32"),
    ({"residual": torch.ones(7)}, ValueError, r"residual must have the shape \(4, 7\), got \(7,\)"),
    ({"residual": "x"}, TypeError, "residual must be a tensor or an array, got str"),
    ({"dropout_p": 1.5}, ValueError, r"dropout_p must be a probability in \[0, 1\], got 1.5"),
    ({"dropout_p": torch.tensor(0.0)}, TypeError, "dropout_p must be a number, got Tensor"),
    ({"activation": "gelus"}, ValueError,
     "activation must be None, a function of one traced value, or one of elu, gelu, .*, tanh, got 'gelus'"),
    ({"activation": 3}, TypeError,
     "activation must be None, a name, or a function of one traced value, got int"),
    ({"activation": ["relu"]}, TypeError,
     "activation must be None, a name, or a function of one traced value, got list"),
    ({"activation": ([],)}, TypeError, "activation must be None, a name, .* got tuple"),
    ({"activation": lambda y: (y, y)}, TypeError, "activation must give one traced value, got tuple"),
])
def test_errors(change, kind, message):
    args = {"x": torch.ones(4, 3), "weight": torch.ones(7, 3), "bias": torch.ones(7), "activation": "relu",
            **change}
    with pytest.raises(kind, match=f"linear_activation: .*{message}"):
        frt.linear_activation(**args)


@pytest.mark.parametrize("activation", [
    F.relu, F.gelu, F.silu, torch.nn.ReLU(), torch.nn.GELU("tanh"), torch.nn.LeakyReLU(0.3)],
    ids=["relu", "gelu", "silu", "ReLU", "GELU", "LeakyReLU"])
def test_activations_of_torch(activation):
    x, weight = torch.randn(3, 6), torch.randn(8, 6)
    found = frt.linear_activation(x, weight, None, activation)
    torch.testing.assert_close(found, activation(x @ weight.T))


class Doubled(torch.nn.GELU):
    def forward(self, x):
        return 2 * x * torch.sigmoid(x)


def test_a_module_of_the_users_is_traced():
    x, weight = torch.randn(3, 6), torch.randn(8, 6)
    found = frt.linear_activation(x, weight, None, Doubled())
    torch.testing.assert_close(found, 2 * F.silu(x @ weight.T))


def test_a_module_with_parameters_is_no_activation():
    with pytest.raises(TypeError, match=r"linear_activation: activation must be .* module without .*PReLU"):
        frt.linear_activation(torch.ones(3, 6), torch.ones(8, 6), None, torch.nn.PReLU())
