"""torch.compile, export, make_fx, fake and meta tensors: each op is one opaque functional op."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import library, reference

ROOT = Path(__file__).parents[1]


@frt.fuse
def gate(x, y, scale=2.0):
    return frt.sigmoid(x) * y * scale, x + y, x > y


def torch_gate(x, y, scale=2.0):
    return torch.sigmoid(x) * y * scale, x + y, x > y


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaves(device, *shapes, dtype=torch.float32):
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def compiled(function, dynamic=None):
    """The function compiled without graph breaks, and a count of its compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


def results(function, args):
    """What the function gives, and the gradients of the sum of its first two results."""
    outs = function(*args)
    outs = outs if isinstance(outs, tuple) else (outs,)
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    return outs, torch.autograd.grad([o.square().sum() for o in outs[:2]], wanted)


def ours_in(graph_module):
    """The names of fusionrt's ops in a graph."""
    targets = [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    return [t.name() for t in targets if getattr(t, "namespace", "") == "fusionrt"]


# --- forward and backward

CASES = {
    "bias_gelu": ((6, 8), (8,)), "gelu": ((6, 8),), "swish_multiply": ((6, 8), (6, 8)),
    "add_relu": ((6, 8), (6, 8)), "prelu_bias": ((6, 8), (8,), (8,)), "mish_scale": ((6, 8), ()),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_compiled_ops_agree_with_torch(device, name, dynamic):
    function, counter = compiled(lambda *args: getattr(frt, name)(*args), dynamic)
    for rows in (6, 6, 9):
        args = leaves(device, (rows, 8), *CASES[name][1:])
        if len(args) > 1 and args[1].shape == (6, 8):
            args = leaves(device, (rows, 8), (rows, 8))
        assert_close(results(function, args), results(getattr(reference, name), args))
    assert counter.frame_count == (1 if dynamic else 2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_several_results(device, dynamic):
    function, _ = compiled(lambda x, y: gate(x, y, 3.0), dynamic)
    args = leaves(device, (6, 8), (8,))
    assert_close(results(function, args), results(lambda *a: torch_gate(*a, 3.0), args))


def test_layouts_of_compiled_results_are_those_of_eager_ones(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    views = {"channels_last": x.to(memory_format=torch.channels_last),
             "permuted": x.permute(3, 1, 0, 2), "sliced": x[:, ::2], "unaligned": x[..., 1:],
             "expanded": x[:, :1].expand(2, 3, 4, 5)}
    function, _ = compiled(lambda x, bias: frt.bias_gelu(x, bias))
    for name, view in views.items():
        bias = torch.randn(view.shape[-1], device=device)
        ours, eager = function(view, bias), frt.bias_gelu(view, bias)
        assert ours.stride() == eager.stride(), name
        assert_close(ours, reference.bias_gelu(view, bias))


def test_mark_dynamic_serves_every_size(device):
    function, counter = compiled(lambda x, bias: frt.bias_gelu(x, bias).sin())
    bias = torch.randn(8, device=device, requires_grad=True)
    for rows in (5, 7, 128):
        x = torch.randn(rows, 8, device=device, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        assert_close(results(function, (x, bias)),
                     results(lambda x, b: reference.bias_gelu(x, b).sin(), (x, bias)))
    assert counter.frame_count == 1


def test_numbers_can_change(device):
    """Integers and tensors without recompilation; a float with no more than torch's own ops need,
    as Dynamo makes a constant of a float that is not an operand of arithmetic."""
    (x,) = leaves(device, (6, 8))
    counts = []
    for op in (frt.leaky_relu, F.leaky_relu):
        for slopes in (range(2, 7), [0.5, 0.25, 0.125, 0.1, -1.0]):
            torch._dynamo.reset()
            function, counter = compiled(lambda x, slope, op=op: op(x, slope))
            for slope in slopes:
                y = function(x, slope)
                assert_close(y, F.leaky_relu(x, float(slope)))
                (g,) = torch.autograd.grad(y.sum(), x)
                assert_close(g, torch.where(x > 0, 1.0, float(slope)))
            counts.append(counter.frame_count)
    assert counts[:2] <= counts[2:]
    assert counts[0] <= 2
    function, counter = compiled(lambda x, scale: frt.mish_scale(x, scale))
    for scale in (0.5, 0.25, 0.125):
        assert_close(function(x, torch.tensor(scale, device=device)), scale * F.mish(x))
    assert counter.frame_count == 1


def test_no_grad_and_autocast(device):
    x, bias = leaves(device, (6, 8), 8)
    linear = torch.nn.Linear(8, 8).to(device)
    function, _ = compiled(lambda x, bias: frt.bias_gelu(linear(x), bias))
    with torch.no_grad():
        y = function(x, bias)
    assert not y.requires_grad
    assert_close(y, reference.bias_gelu(linear(x), bias).detach())
    with torch.autocast(device, torch.bfloat16):
        y, z = function(x, bias), reference.bias_gelu(linear(x), bias)
    assert y.dtype == z.dtype == torch.float32
    assert_close(y, z, rtol=2e-2, atol=2e-2)


def test_torch_func_inside(device):
    x, bias = (t.detach() for t in leaves(device, (5, 8), 8))

    def per_sample(op):
        return torch.func.vmap(torch.func.grad(lambda b, x: op(x, b).square().sum()), (None, 0))

    function, _ = compiled(lambda x, bias: per_sample(frt.bias_gelu)(bias, x))
    assert_close(function(x, bias), per_sample(reference.bias_gelu)(bias, x))


# --- randomness


def test_compiled_dropout(device):
    function, counter = compiled(lambda x: frt.gelu_dropout(x, 0.25).sin())
    (x,) = leaves(device, (64, 64))
    y = function(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    dropped = y == 0
    assert 0.2 < dropped.float().mean() < 0.3
    assert torch.equal(g == 0, dropped)
    expected = torch.where(dropped, 0, F.gelu(x) / 0.75).sin()
    assert_close(y, expected)
    assert_close(g, torch.autograd.grad(expected.sum(), x)[0])
    assert not torch.equal(function(x) == 0, dropped)  # another call, another mask
    torch.manual_seed(3)
    first = function(x), function(x)
    torch.manual_seed(3)
    assert_close((function(x), function(x)), first, rtol=0, atol=0)
    assert counter.frame_count == 1


def test_recomputed_dropout_has_the_same_mask(device):
    """A checkpoint inside of a compiled function draws again what it drew."""
    from torch.utils.checkpoint import checkpoint
    (x,) = leaves(device, (64, 64))
    function, _ = compiled(
        lambda x: checkpoint(lambda x: frt.gelu_dropout(x, 0.5) * x, x, use_reentrant=False))
    y = function(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    expected = torch.where(y == 0, 0, 2 * F.gelu(x) * x)
    assert_close(y, expected)
    assert_close(g, torch.autograd.grad(expected.sum(), x)[0])


# --- what the graph holds


def saved_by(function, args):
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = function(*args)
    return out, saved


def test_compiled_dropout_add_saves_nothing_of_full_size(device):
    args = leaves(device, (64, 32), (64, 32))
    function, _ = compiled(lambda x, r: frt.dropout_add(x, r, 0.5))
    out, saved = saved_by(function, args)
    assert [t.numel() for t in saved if isinstance(t, torch.Tensor)] == [2]  # seed and offset
    grads = torch.autograd.grad(out.sum(), args)
    assert_close(grads[0], torch.where(out == args[1], 0.0, 2.0))
    assert_close(grads[1], torch.ones_like(out))


def test_compiled_bias_gelu_saves_its_inputs(device):
    args = leaves(device, (64, 32), 32)
    function, _ = compiled(lambda x, b: frt.bias_gelu(x, b).sum())
    out, saved = saved_by(function, args)
    assert sorted(t.data_ptr() for t in saved) == sorted(a.data_ptr() for a in args)
    out.backward()
    assert_close([a.grad for a in args],
                 list(torch.autograd.grad(reference.bias_gelu(*args).sum(), args)))


def test_no_graph_breaks(device):
    x, bias = leaves(device, (6, 8), 8)

    def function(x, bias):
        y = frt.gelu_dropout(frt.bias_gelu(x, bias, approximate="tanh"), 0.5)
        a, b, c = gate(y, x, 0.5)
        return frt.quantize_int8(frt.add_relu(a, b), 0.1), c

    explained = torch._dynamo.explain(function)(x, bias)
    assert explained.graph_count == 1
    assert explained.graph_break_count == 0


def opcheck_cases(device):
    """Operator, arguments: contiguous, permuted and broadcast ones, numbers, random numbers."""
    def leaf(*shape):
        return torch.randn(shape, device=device, requires_grad=True)

    bias_gelu = frt.ops.pointwise._bias_gelu.operator
    backward = bias_gelu.gradient((True, True), (True,))
    rng = torch.randint(2**62, (2,), device=device)
    image = torch.randn(2, 3, 4, 5, device=device)
    yield "contiguous", bias_gelu, (leaf(6, 8), leaf(8))
    yield "permuted", bias_gelu, (leaf(8, 6).detach().t().requires_grad_(), leaf(8))
    yield "channels_last", bias_gelu, (
        image.to(memory_format=torch.channels_last).requires_grad_(), leaf(3, 1, 1))
    yield "strided", bias_gelu, (image[:, ::2, 1:].requires_grad_(), leaf(5))
    yield "both broadcast", bias_gelu, (leaf(6, 1), leaf(8))
    yield "expanded", bias_gelu, (leaf(6, 1).detach().expand(6, 8).requires_grad_(), leaf(6, 8))
    yield "a scalar", bias_gelu, (leaf(6, 8), leaf())
    yield "empty", bias_gelu, (leaf(0, 8), leaf(8))
    yield "backward", backward, (leaf(6, 8), leaf(8), leaf(6, 8))
    yield "backward permuted", backward, (
        image.permute(3, 0, 1, 2).requires_grad_(), leaf(4), image.permute(3, 0, 1, 2) * 2)
    yield "numbers", gate.operator, (leaf(6, 8), leaf(8), 3.0)
    yield "only a number", bias_gelu, (leaf(6, 8), 2.0)
    yield "random", frt.ops.dropout._dropout_add.operator, (leaf(6, 8), leaf(6, 8), 0.5, 2.0, rng)


@pytest.mark.parametrize("case", [name for name, *_ in opcheck_cases("cpu")])
def test_opcheck(device, case):
    operator, args = next((op, args) for name, op, args in opcheck_cases(device) if name == case)
    overload = library.overload(operator, args[:len(operator.params)])
    checked = torch.library.opcheck(overload, args)
    assert set(checked.values()) == {"SUCCESS"}, checked


def test_two_functions_of_one_name(device):
    def make(body):
        def same_name(x):
            return body(x)
        return frt.fuse(same_name)

    one, two, again = make(lambda x: x * 2), make(lambda x: x + 10), make(lambda x: x * 2)
    function, _ = compiled(lambda x: one(x) + two(x) - again(x))
    (x,) = leaves(device, (6,))
    assert_close(results(function, (x,)), results(lambda x: x + 10, (x,)))


# --- whole modules, with Inductor


class Block(torch.nn.Module):
    def __init__(self, ops):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8)
        self.bias = torch.nn.Parameter(torch.randn(16))
        self.ops = ops

    def forward(self, x):
        return self.down(self.ops.bias_gelu(self.up(x), self.bias)) + self.ops.silu(x)


def test_inductor_trains_a_module(device):
    ours, theirs = Block(frt).to(device), Block(reference).to(device)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, theirs)]
    steps = torch.compile(ours, fullgraph=True, dynamic=True), theirs
    for rows in (6, 6, 11):
        x = torch.randn(rows, 8, device=device)
        for module, optimizer in zip(steps, optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    assert_close(ours.state_dict(), theirs.state_dict())


def test_inductor_dropout_and_unread_inputs(device):
    """What only lends its shape to the backward pass is one element, not a tensor of full size."""
    x, residual = leaves(device, (64, 32), (64, 32))
    function = torch.compile(lambda x, r: frt.dropout_add(x * 2, r, 0.5), fullgraph=True)
    out, saved = saved_by(function, (x, residual))
    assert sum(t.numel() for t in saved if isinstance(t, torch.Tensor)) == 2
    grads = torch.autograd.grad(out.sum(), (x, residual))
    assert_close(grads[0], torch.where(out == residual, 0.0, 4.0))
    assert_close(grads[1], torch.ones_like(out))


@pytest.mark.gpu
def test_cuda_graph_trees_draw_new_masks():
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    function = torch.compile(lambda x: frt.dropout_add(x, 0.0 * x, 0.5), mode="reduce-overhead",
                             fullgraph=True)
    masks = []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        y = function(x)
        (g,) = torch.autograd.grad(y.sum(), x)
        masks.append((y != 0).clone())
        assert torch.equal(g != 0, masks[-1])
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(masks))


def test_the_first_call_ever_is_compiled(tmp_path):
    """Dynamo traces the lazy import of an op, its first plan and its first gradient."""
    code = """
import torch, fusionrt as frt
@frt.fuse
def gate(x, y):
    return frt.sigmoid(x) * y
@torch.compile(backend="aot_eager", fullgraph=True)
def function(x, bias):
    return gate(frt.bias_gelu(x, bias), x).sum()
x, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
ours = torch.autograd.grad(function(x, bias), (x, bias))
y = torch.sigmoid(torch.nn.functional.gelu(x + bias)) * x
torch.testing.assert_close(ours, torch.autograd.grad(y.sum(), (x, bias)))
print("equal")
"""
    env = os.environ | {"PYTHONPATH": str(ROOT), "FUSIONRT_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "equal\n"), run.stderr


# --- graphs without execution


def test_export(device):
    class Model(torch.nn.Module):
        def forward(self, x, bias):
            return frt.bias_gelu(x, bias), gate(x, bias, 0.5)[2]

    x, bias = torch.randn(6, 8, device=device), torch.randn(8, device=device)
    for strict in (False, True):
        program = torch.export.export(Model(), (x, bias), strict=strict, dynamic_shapes={
            "x": {0: torch.export.Dim("n", min=2)}, "bias": None})
        assert len(ours_in(program.graph_module)) == 2
        other = torch.randn(9, 8, device=device)
        for run in (program, program.run_decompositions()):
            y, is_greater = run.module()(other, bias)
            assert_close(y, reference.bias_gelu(other, bias))
            assert torch.equal(is_greater, other > bias)


@pytest.mark.parametrize("function", [
    lambda x: frt.sum(x, 1), lambda x: frt.var(x, (0, 2)), lambda x: frt.logsumexp(x), frt.argmax,
    lambda x: frt.mse_loss(x, 2 * x), lambda x: frt.kl_div(x, x.exp(), "batchmean"),
    lambda x: frt.cross_entropy(x.flatten(1), torch.zeros_like(x[:, 0, 0], dtype=torch.int64)),
    lambda x: frt.conv_activation(x, torch.ones_like(x[:1, :, :3]).expand(4, -1, -1), None, "relu"),
    lambda x: frt.conv_bn_act(x, x.new_ones(5, 8, 3), None, x.new_zeros(5), x.new_ones(5))],
    ids=["sum", "var", "logsumexp", "argmax", "mse_loss", "kl_div", "cross_entropy", "conv_activation",
         "conv_bn_act"])
def test_sizes_stay_open_in_an_export(function, device):
    class Model(torch.nn.Module):
        def forward(self, x):
            return function(x)

    sizes = {0: torch.export.Dim("n", min=2), 2: torch.export.Dim("m", min=4, max=64)}
    program = torch.export.export(Model(), (torch.randn(6, 8, 5, device=device),), dynamic_shapes=(sizes,),
                                  strict=False)
    other = torch.randn(9, 8, 7, device=device)
    assert_close(program.module()(other), function(other))


def test_a_saved_program_finds_its_ops(tmp_path, device):
    x, bias = torch.randn(6, 8, device=device), torch.randn(8, device=device)

    class Model(torch.nn.Module):
        def forward(self, x, bias):
            return frt.bias_gelu(x, bias)

    torch.export.save(torch.export.export(Model(), (x, bias)), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    assert_close(loaded(x, bias), reference.bias_gelu(x, bias))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_op(device, mode):
    x, bias = torch.randn(6, 8, device=device), torch.randn(8, device=device)
    frt.bias_gelu(x, bias)  # a plan exists

    def step(x, bias):
        with torch.enable_grad():
            x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
            return torch.autograd.grad(frt.bias_gelu(x, bias).sum(), (x, bias))

    graph = make_fx(step, tracing_mode=mode)(x, bias)
    names = ours_in(graph)
    assert len(names) == 2
    assert "bias_gelu_backward" in names[1]
    x, bias = torch.randn(6, 8, device=device), torch.randn(8, device=device)
    x.requires_grad_()
    bias.requires_grad_()
    assert_close(graph(x, bias), torch.autograd.grad(reference.bias_gelu(x, bias).sum(), (x, bias)))


def test_fake_tensors_compute_nothing(device):
    image = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    frt.bias_gelu(image, image[0, 0, 0])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(image).requires_grad_()
        y = frt.bias_gelu(fake, fake[0, 0, 0])
        assert (y.shape, y.stride(), y.device) == (image.shape, image.stride(), image.device)
        y.sum().backward()
        assert fake.grad.stride() == image.stride()
        z = frt.bias_gelu(image, image[0, 0, 0])  # real ones, among fake ones
        assert (type(z), z.stride()) == (type(y), image.stride())
        assert [o.dtype for o in gate(fake, fake)] == [torch.float32, torch.float32, torch.bool]
        assert frt.gelu_dropout(fake, 0.5).shape == image.shape


def test_meta_tensors_compute_nothing():
    x = torch.empty(4, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.empty(8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        y = frt.gelu_dropout(frt.bias_gelu(x, bias), 0.5)
        assert (y.device.type, y.shape, y.dtype) == ("meta", (4, 8), torch.bfloat16)
        grads = torch.autograd.grad(y.sum(), (x, bias))
        assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in (x, bias)]
        assert {g.device.type for g in grads} == {"meta"}


@pytest.mark.parametrize("dynamic", [True, None])
def test_numbers_that_vary_are_no_graph_break(dynamic, device):
    """Dynamo makes symbols of them, at once or when they change."""
    x, rotary = torch.randn(2, 5, 16), frt.nn.FusedMultiheadAttention(16, 4, rotary=True)
    x, rotary, steps = x.to(device), rotary.to(device), torch.rand(5, device=device) + 0.1
    q = torch.ones(2, 5, dtype=torch.int8, device=device)
    calls = {
        "module": lambda v: rotary(x, x, x)[0] * v,
        "rotary": lambda v: frt.rotary_embedding(x.view(2, 5, 2, 8), base=v),
        "quantize": lambda v: frt.quantize_int8(x, v),
        "dequantize": lambda v: frt.dequantize_int8(q, v, v),
        "quantize channels": lambda v: frt.quantize_int8(x, steps, v, dim=1),
        "dequantize channels": lambda v: frt.dequantize_int8(q, steps, v, dim=1),
        "prelu of a number": lambda v: frt.prelu_bias(x, v, 0.5 * v),
        "prelu and a number": lambda v: frt.prelu_bias(x, steps, v, bias_first=False),
    }
    for call in calls.values():
        torch._dynamo.reset()
        run = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for value in (0.25, 0.5, 2.0):
            torch.testing.assert_close(run(value), call(value))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: frt.attention(x, x, x, alibi_slopes=torch.tensor([0.5, 0.25])), (3, 2, 6, 8)),
        (lambda x: frt.attention(x, x, x, mask=torch.ones(2, 1, 6).bool()), (3, 2, 6, 8)),
        (lambda x: frt.softmax(x, mask=torch.ones(3, 5).bool()), (4, 3, 5)),
        (lambda x: frt.rotary_embedding(x, cos=torch.ones(3, 9, 4), sin=torch.ones(9, 4).expand(3, 9, 4)),
         (3, 6, 2, 8)),
        (lambda x: frt.qkv_heads(x, 2, base=1e4, position_ids=torch.arange(6)), (3, 6, 48)),
        (lambda x: frt.embedding_position(torch.ones(x.shape[:2], dtype=torch.int64), x[0], x[0],
                                          position_ids=torch.arange(6)), (3, 6, 8)),
        (lambda x: frt.prelu_bias(x, torch.ones(3), 1.0), (2, 3, 5)),
    ],
)  # fmt: skip
def test_a_symbol_may_equal_a_number(function, x):
    """Sizes of one value, which Dynamo writes in two ways."""
    x = torch.randn(x)
    run = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    assert_close(run(x), function(x))


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "sum", "argmax", "var"])
def test_dimensions_that_are_variables(op):
    """Dynamo takes the numbers of a call, and of a closure, for such where sizes vary."""
    def call(x, dim):
        return getattr(frt, op)(x, dim)

    for dim in (0, -1):
        run = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
        for size in (5, 7):
            x = torch.randn(size, 4, 6)
            torch.testing.assert_close(run(x, dim), call(x, dim))


def test_losses_that_broadcast():
    """Which warn otherwise."""
    run = torch.compile(frt.l1_loss, fullgraph=True, dynamic=True, backend="eager")
    x, y = torch.randn(5, 6), torch.randn(6)
    torch.testing.assert_close(run(x, y), (x - y).abs().mean())


def test_graphs_stay_where_a_function_is_called_without_dynamo_later(device):
    """Its code, which they are guarded by, is written when it is first called or traced: these here never
    were before."""
    x, block = torch.randn(3, 8, device=device), frt.nn.TransformerBlock(8, 2).to(device).eval()
    functions = [frt.fuse(lambda x, k=k: frt.sigmoid(x) * (x + k), name=f"number{k}") for k in range(10)]

    def calls(x):
        for function in functions:
            x = function(x)
        return block(x[None])[0]

    compiled = torch.compile(calls, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), calls(x))
    with torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(x), calls(x))
