"""Feed-forward blocks: their results, their gradients, and what memory they take."""

import contextlib
import functools
import importlib

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
    forget,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusionrt as frt
from fusionrt import reference, tape
from fusionrt.bench import memory

M, H, K, N = 33, 40, 24, 16


def operands(dtype, device, rows=(M,), h=H, k=K, n=N):
    """x, weight1, bias1, weight2, bias2."""
    x, bias1, bias2 = (torch.randn(shape, device=device).to(dtype) for shape in ((*rows, k), (h,), (n,)))
    weight1, weight2 = (
        (torch.randn(shape, device=device) / shape[1] ** 0.5).to(dtype) for shape in ((h, k), (n, h)))
    return [x, weight1, bias1, weight2, bias2]


def gated_operands(dtype, device, rows=(M,), h=H):
    """x, gate, up, down, and their biases."""
    x, gate, gate_bias, down, down_bias = operands(dtype, device, rows, h)
    up, up_bias = operands(dtype, device, rows, h)[1:3]
    return [x, gate, up, down, gate_bias, up_bias, down_bias]


def gated(function, packed=False, **options):
    """Of the operands in a row; with `packed` gate and up as one."""
    def run(x, gate, up, down, gate_bias=None, up_bias=None, down_bias=None):
        biases = {"gate_bias": gate_bias, "up_bias": up_bias, "down_bias": down_bias}
        if packed:
            gate, up = torch.cat([gate, up]), None
            both = None if gate_bias is None else torch.cat([gate_bias, up_bias])
            biases |= {"gate_bias": both, "up_bias": None}
        return function(x, gate, up, down, **biases, **options)

    return run


# --- accuracy


@dtypes
@pytest.mark.parametrize("activation", [pytest.param("relu", marks=pytest.mark.gpu), "gelu"])
def test_as_accurate_as_torch(activation, dtype, device):
    args = (*operands(dtype, device), activation)
    before = [a.clone() for a in args[:5]]
    out, _ = check_in_norm(frt.ffn, args)
    with torch.no_grad():
        assert_same_bits(frt.ffn(*args), out)
    for tensor, was in zip(args, before, strict=False):
        assert_same_bits(tensor, was)


@dtypes
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_swiglu_is_as_accurate_as_torch(packed, dtype, device):
    args = gated_operands(dtype, device)[:4]
    out, _ = check_in_norm(gated(frt.swiglu_mlp, packed), args, reference=gated(reference.swiglu_mlp, packed))
    with torch.no_grad():
        assert_same_bits(gated(frt.swiglu_mlp, packed)(*args), out)


@pytest.mark.covering(1)
@dtypes
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
@pytest.mark.parametrize("biased", [False, True])
def test_swiglu_without_its_last_layer(biased, packed, dtype, device):
    x, gate, up, _, *biases, _ = gated_operands(dtype, device)

    def of(function):
        def run(x, gate, up, gate_bias=None, up_bias=None):
            if not packed:
                return function(x, gate, up, gate_bias=gate_bias, up_bias=up_bias)
            both = torch.cat([gate_bias, up_bias]) if biased else None
            return function(x, torch.cat([gate, up]), gate_bias=both)

        return run

    check_in_norm(of(frt.linear_swiglu), (x, gate, up, *biases[:2 * biased]),
                  reference=of(reference.linear_swiglu))
    assert frt.ops.fused_swiglu is frt.linear_swiglu


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_geglu_with_biases(packed, approximate, device):
    args = gated_operands(F32, device)
    options = {"approximate": approximate, "recompute": packed}
    check_in_norm(gated(frt.geglu_mlp, packed, **options), args,
                  reference=gated(reference.geglu_mlp, packed, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [(1, 768, 3072), (64, 1024, 2816), (2048, 1024, 4096)])
def test_at_sizes_of_models(shape, recompute):
    m, k, h = shape
    options = {"recompute": recompute}
    args = operands(BF16, "cuda", (m,), h, k, k)
    for activation in ("relu", "gelu", "silu"):
        check_in_norm(frt.ffn, (*args, activation), options)
    up = operands(BF16, "cuda", (m,), h, k, k)[1]
    args = (args[0], args[1], up, args[3])
    for packed in (False, True):
        check_in_norm(gated(frt.swiglu_mlp, packed, **options), args,
                      reference=gated(reference.swiglu_mlp, packed))


@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (0,), (2, 0)], ids=str)
def test_shapes(rows, device):
    several = gated_operands(F32, device, rows)[:4]
    for ours, theirs, args in ((frt.ffn, reference.ffn, operands(F32, device, rows)),
                               (gated(frt.swiglu_mlp), gated(reference.swiglu_mlp), several)):
        (out, grads), (expected, expected_grads) = (evaluate(f, args) for f in (ours, theirs))
        with torch.no_grad():
            found = ours(*args)
        for a, b in zip((out, found, *grads), (expected, expected, *expected_grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("h", [7, pytest.param(12, marks=pytest.mark.gpu)])
def test_layouts(h, device):
    """Parts of the product that vectors do not fit, operands that lie across."""
    dtype = F32 if device == "cpu" else BF16
    x, gate, up, down, *_ = gated_operands(dtype, device, (12, 10), h)
    args = [x.transpose(0, 1), gate.t().contiguous().t(), up, down[::2]]
    for packed in (False, True):
        check_in_norm(gated(frt.swiglu_mlp, packed), args, reference=gated(reference.swiglu_mlp, packed))
    args = [x[..., 1:], gate[:, 1:], None, down[::2], None]
    out, _ = check_in_norm(frt.ffn, args)
    check_in_norm(frt.ffn, args, grad_output=torch.ones((), dtype=F64, device=device).expand(out.shape))


# --- dropout and recomputation


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_dropout(activation, device):
    """The mask is that of the linear layer alone, in the backward pass as well, computed again or not."""
    args = [t.requires_grad_() for t in operands(F32, device, (200,))]

    def seeded(function, **options):
        torch.manual_seed(5)
        out = function(*args, activation, dropout_p=0.25, **options)
        return [out, *torch.autograd.grad(out.square().sum(), args)]

    def apart(x, weight1, bias1, weight2, bias2, activation, dropout_p):
        hidden = frt.linear_activation(x, weight1, bias1, activation, dropout_p=dropout_p)
        return F.linear(hidden, weight2, bias2)

    ours, again = seeded(frt.ffn), seeded(frt.ffn, recompute=True)
    for a, b, c in zip(ours, again, seeded(apart), strict=True):
        assert_same_bits(a, b)
        torch.testing.assert_close(a, c)
    with torch.no_grad():
        torch.manual_seed(5)
        assert_same_bits(frt.ffn(*args, activation, dropout_p=0.25), ours[0])
        torch.testing.assert_close(frt.ffn(*args, activation, dropout_p=0.25, training=False),
                                   reference.ffn(*args, activation))


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_recomputed_gradients_are_the_same(packed, device):
    args = [t.requires_grad_() for t in gated_operands(BF16, device)[:4]]
    found = []
    for recompute in (False, True):
        out = gated(frt.swiglu_mlp, packed, recompute=recompute)(*args)
        found.append(torch.autograd.grad(out.sum(), args))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


# --- memory


def bytes_kept(function, args):
    """For the backward pass, beside the operands."""
    found = {}

    def note(tensor):
        found[tensor.data_ptr(), tensor.nbytes] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(*args)
    own = {(a.data_ptr(), a.nbytes) for a in args}
    return sum(size for key, size in found.items() if key not in own)


@pytest.mark.parametrize(("options", "ours", "theirs"), [
    ({}, 2, 2), ({"recompute": True}, 1, 2), ({"activation": "relu"}, 1, 1), ({"dropout_p": 0.1}, 2, 3),
    ({"dropout_p": 0.1, "recompute": True}, 1, 3), ({"activation": "relu", "dropout_p": 0.1}, 1, 3)], ids=str)
def test_what_is_kept(options, ours, theirs):
    """Times the bytes of the hidden layer; on a CPU, where masks are numbers."""
    args = [t.requires_grad_() for t in operands(F32, "cpu")]
    hidden = M * H * 4
    assert bytes_kept(functools.partial(frt.ffn, **options), args) == ours * hidden
    options.pop("recompute", None)
    assert bytes_kept(functools.partial(reference.ffn, **options), args) == theirs * hidden


@pytest.mark.parametrize("packed", [False, True], ids=["apart", "packed"])
def test_what_gated_blocks_keep(packed):
    args = [t.requires_grad_() for t in gated_operands(F32, "cpu")[:4]]
    if packed:  # its own leaf: what torch.cat makes is kept too
        args = [args[0], torch.cat(args[1:3]).detach().requires_grad_(), args[3]]

    def kept(function, **options):
        if packed:
            return bytes_kept(lambda x, both, down: function(x, both, None, down, **options), args)
        return bytes_kept(functools.partial(function, **options), args)

    hidden = M * H * 4
    assert kept(frt.swiglu_mlp) == 3 * hidden
    assert kept(frt.swiglu_mlp, recompute=True) == 2 * hidden
    assert kept(reference.swiglu_mlp) == 4 * hidden


@pytest.mark.covering(1)
@pytest.mark.parametrize(("kind", "options", "at_most"), [
    ("ffn", {}, 0.8), ("ffn", {"dropout_p": 0.1}, 0.7), ("ffn", {"recompute": True}, 0.8),
    ("ffn", {"activation": "relu", "dropout_p": 0.1}, 0.7), ("swiglu", {}, 0.65),
    ("swiglu", {"recompute": True}, 0.65)], ids=str)
def test_peak_memory_of_a_training_step(kind, options, at_most, device):
    """Beyond the operands, against eager torch. Of a row, x, result and both gradients are a quarter of the
    hidden layer each; eager torch has three of those at its peak (four or five with a mask, six of gated
    blocks), a block of ours two (three)."""
    m, h, k = 2048, 1024, 256
    dtype = F32 if device == "cpu" else BF16
    args = operands(dtype, device, (m,), h, k, k)
    ours, theirs = frt.ffn, reference.ffn
    if kind == "swiglu":
        args = [args[0], args[1], torch.randn_like(args[1]), args[3]]
        ours, theirs = frt.swiglu_mlp, reference.swiglu_mlp
    args = [a.requires_grad_() for a in args]
    grad_output = torch.randn(m, k, device=device, dtype=dtype)

    def measured(function):
        def step():
            return torch.autograd.grad(function(*args, **options), args, grad_output)

        step()
        return memory.measure(step, torch.device(device))

    found, expected = measured(ours), measured(theirs)
    assert 0 < found.peak <= at_most * expected.peak
    if kind == "swiglu":
        assert found.allocations < expected.allocations


@pytest.mark.parametrize("kind", ["ffn", "swiglu"])
def test_nothing_is_overwritten_that_is_asked_for_again(kind, device):
    """Backward passes of a graph that is kept, and under hooks that keep tensors as they are."""
    ours = {"ffn": functools.partial(frt.ffn, recompute=True), "swiglu": gated(frt.swiglu_mlp)}[kind]
    args = operands(F32, device) if kind == "ffn" else gated_operands(F32, device)[:4]
    args = [t.requires_grad_() for t in args]
    out = ours(*args)
    grad_output = torch.randn_like(out)
    first, again, last = (torch.autograd.grad(out, args, grad_output, retain_graph=k < 2) for k in range(3))
    for a, b, c in zip(first, again, last, strict=True):
        assert_same_bits(a, b)
        assert_same_bits(a, c)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, args, grad_output)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append((t, t.clone())) or len(kept) - 1, lambda k: kept[k][0]):
        out = ours(*args)
    for a, b in zip(first, torch.autograd.grad(out, args, grad_output), strict=True):
        assert_same_bits(a, b)
    for tensor, copy in kept:
        assert_same_bits(tensor, copy)


# --- torch's machinery


def test_second_derivatives(device):
    args, several = operands(F64, device, (3,), 4, 5, 2), gated_operands(F64, device, (3,), 4)[:4]
    for ours, theirs, tensors in ((frt.ffn, reference.ffn, args),
                                  (gated(frt.swiglu_mlp, True), gated(reference.swiglu_mlp), several)):
        for a, b in zip(*(derivatives(f, tensors) for f in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b)


def test_second_derivative_of_a_dropped_block(device):
    """Random numbers are those of the forward pass."""
    args = [t.requires_grad_() for t in operands(F64, device)]
    torch.manual_seed(9)
    out = frt.ffn(*args, dropout_p=0.5)
    plain = torch.autograd.grad(out.sum(), args, retain_graph=True)
    twice = torch.autograd.grad(out.sum(), args, create_graph=True)
    for a, b in zip(plain, twice, strict=True):
        torch.testing.assert_close(a, b)


def test_batched_gradients_and_transforms(device):
    args = [t.requires_grad_() for t in operands(F64, device, (3,))]
    grads = torch.randn(5, 3, N, dtype=F64, device=device)
    ours, theirs = (torch.autograd.grad(f(*args), args, grads, is_grads_batched=True) for f in (
        frt.ffn, reference.ffn))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    def of_a_row(function):
        return torch.func.grad(lambda row: function(row, *args[1:], recompute=True).sum())

    torch.testing.assert_close(*(torch.func.vmap(of_a_row(f))(args[0]) for f in (frt.ffn, reference.ffn)))


def test_only_the_gradients_that_are_needed(device):
    """Frozen layers, frozen biases, weights alone; the hidden layer is made again only where it is read."""
    for recompute in (False, True):
        for wanted in ((0,), (3,), (4,), (1, 2), (0, 1, 2), (2,), (3, 4)):
            args = [t.requires_grad_(k in wanted) for k, t in enumerate(operands(F64, device))]
            leaves = [args[k] for k in wanted]
            ours, theirs = (torch.autograd.grad(f(*args, recompute=recompute).square().sum(), leaves)
                            for f in (frt.ffn, reference.ffn))
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b)


def test_tied_weights(device):
    x, weight, _, down, *_ = gated_operands(F64, device)
    ours, theirs = (derivatives(lambda x, w, down, f=f: f(x, w, w, down), [x, weight, down])
                    for f in (frt.swiglu_mlp, reference.swiglu_mlp))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast(device):
    args = operands(F32, device)
    leaves = [a.requires_grad_() for a in args]
    with torch.autocast(device, dtype=BF16):
        ours, theirs = (f(*leaves) for f in (frt.ffn, reference.ffn))
    assert ours.dtype == theirs.dtype == BF16
    grads = (torch.autograd.grad(o.float().square().sum(), leaves) for o in (ours, theirs))
    for a, b in zip(*grads, strict=True):
        assert a.dtype == b.dtype == F32
        assert (a - b).norm() <= 3e-2 * b.norm()


def test_checkpoint(device):
    args = [t.requires_grad_() for t in gated_operands(F32, device)[:4]]
    out = checkpoint(gated(frt.swiglu_mlp), *args, use_reentrant=False)
    expected = frt.swiglu_mlp(*args)
    for a, b in zip(*(torch.autograd.grad(o.sum(), args) for o in (out, expected)), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.gpu), True])
def test_compiled(recompute, device):
    """In a graph as well what is computed again is not kept."""
    args = [t.requires_grad_() for t in operands(F32, device, (2, 50))]
    torch.compiler.reset()

    def function(*args):
        return frt.ffn(*args, recompute=recompute)

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert bytes_kept(compiled, args) == bytes_kept(function, args) == (2 - recompute) * 100 * H * 4
    ours, theirs = compiled(*args), reference.ffn(*args)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), args) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_step_in_a_cuda_graph(dropout_p):
    args = [t.requires_grad_() for t in operands(BF16, "cuda", (64,), 256, 128, 128)]
    torch.manual_seed(3)

    def step():
        y = frt.ffn(*args, dropout_p=dropout_p, recompute=True)
        return y, *torch.autograd.grad(y.sum(), args)

    graph, (out, *grads) = captured(step)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(out.clone())
    assert torch.equal(*masks) == (dropout_p == 0)
    if not dropout_p:
        expected = reference.ffn(*args)
        torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
        for a, b in zip(grads, torch.autograd.grad(expected.sum(), args), strict=True):
            assert (a - b).norm() <= 3e-2 * b.norm()


def test_arrays():
    args = operands(F32, "cpu")
    found = frt.ffn(*(t.numpy() for t in args))
    assert isinstance(found, np.ndarray)
    torch.testing.assert_close(torch.from_numpy(found), reference.ffn(*args))
    args = gated_operands(F32, "cpu")[:4]
    found = frt.swiglu_mlp(*(t.numpy() for t in args))
    assert isinstance(found, np.ndarray)
    torch.testing.assert_close(torch.from_numpy(found), reference.swiglu_mlp(*args))


def test_older_torch(monkeypatch, device):
    """Without what tells whether the graph is kept, nothing is let go early, and nothing overwritten."""
    monkeypatch.setattr(tape, "_CAN_FORGET", False)
    forget(monkeypatch, importlib.import_module("fusionrt.ops.ffn"))
    args = gated_operands(F32, device)[:4]
    check_in_norm(gated(frt.swiglu_mlp, recompute=True), args, reference=gated(reference.swiglu_mlp))


# --- errors


@pytest.mark.parametrize(("change", "kind", "message"), [
    ({"x": "x"}, TypeError, "x must be a tensor or an array, got str"),
    ({"weight1": torch.ones(7, 5)}, ValueError,
     r"x and weight1 must have shapes \(..., K\) and \(N, K\), got \(4, 3\) and \(7, 5\)"),
    ({"bias1": torch.ones(3)}, ValueError, r"bias1 must have the shape \(7,\), got \(3,\)"),
    ({"weight2": torch.ones(2, 6)}, ValueError, r"weight2 must have the shape \(N, 7\), got \(2, 6\)"),
    ({"weight2": torch.ones(2, 7).half()}, TypeError,
     "weight2 must have x's dtype, torch.float32, got torch.float16"),
    ({"bias2": torch.ones(3)}, ValueError, r"bias2 must have the shape \(2,\), got \(3,\)"),
    ({"activation": "swish"}, ValueError, "activation must be None, .* got 'swish'"),
    ({"activation": ["relu"]}, TypeError, "activation must be None, .* got list"),
    ({"dropout_p": torch.tensor(0.0)}, TypeError, "dropout_p must be a number, got Tensor"),
    ({"dropout_p": -1}, ValueError, r"dropout_p must be a probability in \[0, 1\], got -1")])
def test_errors(change, kind, message):
    args = {"x": torch.ones(4, 3), "weight1": torch.ones(7, 3), "bias1": torch.ones(7),
            "weight2": torch.ones(2, 7), "bias2": torch.ones(2), **change}
    with pytest.raises(kind, match=f"ffn: {message}"):
        frt.ffn(**args)


@pytest.mark.parametrize(("change", "message"), [
    ({"up_weight": torch.ones(5, 3)},
     r"gate_weight and up_weight must have one shape, got \(6, 3\) and \(5, 3\)"),
    ({"down_weight": torch.ones(2, 3)}, r"down_weight must have the shape \(N, 6\), got \(2, 3\)"),
    ({"up_weight": None}, r"down_weight must have the shape \(N, 3\), got \(2, 6\)"),
    ({"up_weight": None, "gate_weight": torch.ones(5, 3)},
     "without up_weight, gate_weight and gate_bias hold both, .* got 5 rows"),
    ({"up_weight": None, "up_bias": torch.ones(6)},
     "without up_weight, gate_weight and gate_bias hold both, .* got an up_bias"),
    ({"up_bias": torch.ones(3)}, r"up_bias must have the shape \(6,\), got \(3,\)")])
def test_errors_of_gated_blocks(change, message):
    args = {"x": torch.ones(4, 3), "gate_weight": torch.ones(6, 3), "up_weight": torch.ones(6, 3),
            "down_weight": torch.ones(2, 6), **change}
    with pytest.raises(ValueError, match=f"swiglu_mlp: {message}"):
        frt.swiglu_mlp(**args)
    with pytest.raises(ValueError, match="geglu_mlp: approximate must be 'none' or 'tanh', got 'erf'"):
        frt.geglu_mlp(**args, approximate="erf")


@pytest.mark.skipif(not hasattr(torch._dynamo.compiled_autograd, "_enable"), reason="no compiled autograd")
@pytest.mark.parametrize("width", [16, 24, 8])
def test_compiled_autograd(width):
    """Of a forward pass that is not compiled."""
    module, x, grads = frt.nn.FusedMLP(width, 32), torch.randn(4, width), []
    for context in (contextlib.nullcontext, lambda: torch._dynamo.compiled_autograd._enable(
            torch.compile(backend="aot_eager"))):
        module.zero_grad()
        with context():
            module(x).square().sum().backward()
        grads.append([p.grad.clone() for p in module.parameters()])
    torch.testing.assert_close(*grads)
