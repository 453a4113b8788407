"""In torch's company: autograd, autocast, hooks, checkpoints, DDP, subclasses."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checking import making
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fusionrt as frt
from fusionrt import library, reference
from fusionrt.catalogue import COLUMNS, OPS, ROWS


@frt.fuse
def gate_and_sum(x, y, scale=2.0):
    """Two results of which one has no gradient would be too easy: three."""
    return frt.sigmoid(x) * y * scale, x + y, x > y


class Block(torch.nn.Module):
    """An MLP with fused activations, or with torch's own."""

    def __init__(self, ops=frt, p=0.0):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8)
        self.bias = torch.nn.Parameter(torch.randn(16))
        self.act, self.add, self.p = ops.bias_gelu, ops.dropout_add, p

    def forward(self, x):
        return self.add(self.down(self.act(self.up(x), self.bias)), x, self.p)


def pair(device, p=0.0):
    """The same block twice: ours, and torch's."""
    ours = Block(frt, p).to(device)
    theirs = Block(reference, p).to(device)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def leaves(device, *shapes, dtype=torch.float32):
    return [torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]


def same_gradients(ours, theirs):
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")


# --- names


def test_functions_are_not_hidden_by_their_modules():
    import fusionrt.fusion  # noqa: F401
    assert frt.fuse.__name__ == "fuse"
    assert callable(frt.fuse)


# --- modes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_dtypes_of_the_unfused_formula(device, dtype):
    ours, theirs = pair(device)
    x = torch.randn(5, 8, device=device)
    with torch.autocast(device, dtype):
        y, z = ours(x), theirs(x)
        hidden = frt.gelu(ours.up(x))
    assert y.dtype == z.dtype == torch.float32  # the residual is float32
    assert hidden.dtype == dtype
    assert_close(y, z, rtol=2e-2, atol=2e-2)
    y.square().sum().backward()
    z.square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype == torch.float32
        assert_close(a.grad, b.grad, rtol=5e-2, atol=1e-1)


def test_no_grad_records_nothing(device):
    x, bias = leaves(device, (4, 8), 8)
    with torch.no_grad():
        y = frt.bias_gelu(x, bias)
    assert not y.requires_grad
    assert_close(y, reference.bias_gelu(x, bias).detach())
    with torch.no_grad(), torch.enable_grad():
        assert frt.bias_gelu(x, bias).requires_grad
    assert not torch.no_grad()(frt.gelu)(x).requires_grad


def test_inference_mode(device):
    x, bias = leaves(device, (4, 8), 8)
    with torch.inference_mode():
        y = frt.bias_gelu(x, bias)
    assert y.is_inference()
    assert_close(y.clone(), reference.bias_gelu(x, bias).detach())
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        frt.bias_gelu(y, bias)


def test_anomaly_mode(device):
    x, bias = leaves(device, (4, 8), 8)
    with torch.autograd.set_detect_anomaly(True):
        frt.bias_gelu(x, bias).sum().backward()
    expected = torch.autograd.grad(reference.bias_gelu(x, bias).sum(), (x, bias))
    assert_close((x.grad, bias.grad), expected)


# --- parameters, modules


def test_parameters_go_in_and_plain_tensors_come_out(device):
    weight = torch.nn.Parameter(torch.randn(4, 8, device=device))
    for _ in range(2):  # through the general path, then through the plan
        y = frt.gelu(weight)
        assert type(y) is torch.Tensor
        assert y.requires_grad
        assert not y.is_leaf
    with torch.no_grad():
        assert type(frt.gelu(weight)) is torch.Tensor
    weight.requires_grad_(False)
    assert not frt.gelu(weight).requires_grad


def test_a_training_step(device):
    ours, theirs = pair(device)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs)]
    for _ in range(3):
        x = torch.randn(6, 8, device=device)
        losses = []
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(module(x).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert_close(*losses)
    assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def test_deepcopy_and_pickle_of_modules(device):
    block = Block(p=0.25).to(device)
    block.fused = gate_and_sum
    x = torch.randn(6, 8, device=device)

    def run(module):
        torch.manual_seed(5)
        return module(x), *module.fused(x, x + 1)[:2]

    expected = run(block)
    for module in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert module.act is frt.bias_gelu
        assert module.fused is gate_and_sum
        assert_close(run(module), expected, rtol=0, atol=0)


def test_ddp_with_one_process(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        ours, theirs = pair("cpu")
        wrapped = torch.nn.parallel.DistributedDataParallel(ours)
        seen = []
        for name, p in ours.named_parameters():
            p.register_hook(lambda grad, name=name: seen.append(name))
        x = torch.randn(5, 8)
        for _ in range(2):
            wrapped.zero_grad()
            theirs.zero_grad()
            wrapped(x).square().sum().backward()
            theirs(x).square().sum().backward()
            same_gradients(ours, theirs)
        assert sorted(seen) == sorted(2 * [name for name, _ in ours.named_parameters()])
        del wrapped  # torch deadlocks at times when it outlives its process group
    finally:
        destroy_process_group()


# --- the graph


def test_hooks_and_retained_graphs(device):
    x, bias = leaves(device, (4, 8), 8)
    expected = torch.autograd.grad(
        reference.swish_multiply(reference.bias_gelu(x, bias), x).sum(), (x, bias))
    seen = []
    x.register_hook(lambda grad: seen.append(grad.clone()))
    bias.register_hook(lambda grad: 2 * grad)
    hidden = frt.bias_gelu(x, bias)
    hidden.retain_grad()
    y = frt.swish_multiply(hidden, x)
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    assert_close(first, expected[0])
    assert_close(bias.grad, 2 * expected[1])
    assert_close(sum(seen), first)
    assert hidden.grad.shape == hidden.shape
    y.sum().backward()
    assert_close(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_module_hooks(device):
    class Act(torch.nn.Module):
        def forward(self, x):
            return frt.gelu(x)

    module, calls = Act(), []
    module.register_forward_hook(lambda m, args, out: calls.append(out.detach()))
    module.register_full_backward_hook(lambda m, gin, gout: calls.append((gin[0], gout[0])))
    (x,) = leaves(device, (4, 8))
    module(x).sum().backward()
    assert_close(calls[0], F.gelu(x).detach())
    assert_close(calls[1], (x.grad, torch.ones_like(x)))


def test_double_and_triple_backward(device):
    (x,) = leaves(device, (7,), dtype=torch.float64)
    chains = []
    for op in (frt.gelu, F.gelu):
        y, found = op(x).sum(), []
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            found.append(y)
        chains.append(found)
    assert_close(*chains)


def test_gradgradcheck_with_broadcasting(device):
    inputs = leaves(device, (3, 4), (4,), dtype=torch.float64)
    assert torch.autograd.gradcheck(frt.bias_gelu, inputs)
    assert torch.autograd.gradgradcheck(frt.bias_gelu, inputs)


def test_gradient_penalty(device):
    """The usual use of create_graph: a loss on the gradient, in a training step."""
    found = []
    x, bias = leaves(device, (6, 8), 8)
    for op in (frt.bias_gelu, reference.bias_gelu):
        (gradient,) = torch.autograd.grad(op(x, bias).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), (x, bias)))
    assert_close(*found)


def test_an_input_changed_before_backward_is_noticed(device):
    (x,) = leaves(device, (4, 8))
    y = x * 1
    out = frt.gelu(y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_results_that_get_no_gradient(device):
    x, y = leaves(device, (4, 8), (4, 8))
    a, b, c = gate_and_sum(x, y)
    assert (a.requires_grad, b.requires_grad, c.requires_grad) == (True, True, False)
    assert c.dtype == torch.bool
    a2, b2 = torch.sigmoid(x) * y * 2, x + y
    assert_close((a, b), (a2, b2))
    for ours, theirs in (((a,), (a2,)), ((b,), (b2,)), ((a, b), (a2, b2))):
        assert_close(*(torch.autograd.grad([o.sum() for o in outs], (x, y), retain_graph=True)
                       for outs in (ours, theirs)))
    (g,) = torch.autograd.grad(b.sum() * 0 + a.sum(), y)
    assert_close(g, (torch.sigmoid(x) * 2).detach())


def test_gradients_only_where_needed(device):
    x, bias = leaves(device, (4, 8), 8)
    y = frt.bias_gelu(x.detach(), bias)
    y.sum().backward()
    assert x.grad is None
    assert_close(bias.grad, torch.autograd.grad(reference.bias_gelu(x, bias).sum(), bias)[0])


def test_backward_from_several_threads(device):
    x, bias = leaves(device, (64, 8), 8)
    expected = torch.autograd.grad(reference.bias_gelu(x, bias).sum(), (x, bias))
    found = {}

    def work(i):
        found[i] = torch.autograd.grad(frt.bias_gelu(x, bias).sum(), (x, bias))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8
    for grads in found.values():
        assert_close(grads, expected)


def test_vectorised_jacobian(device):
    x, bias = leaves(device, (3, 4), 4)
    ours, theirs = (torch.autograd.functional.jacobian(op, (x, bias), vectorize=True)
                    for op in (frt.bias_gelu, reference.bias_gelu))
    assert_close(ours, theirs)
    torch.manual_seed(3)
    y = frt.gelu_dropout(x, 0.5)
    grads = torch.autograd.grad(y, x, torch.eye(12, device=device).reshape(12, 3, 4),
                                is_grads_batched=True)[0].reshape(12, 12)
    one_by_one = torch.func.jacrev(lambda x: F.gelu(x))(x.detach()).reshape(12, 12)
    kept = (y != 0).flatten()
    assert_close(grads, one_by_one * 2 * kept.float())


# --- memory


SAVED = {  # op: arguments' shapes, which of them (or the output, where that is less) the backward reads
    "bias_gelu": (((4, 8), (8,)), (0, 1)), "gelu": (((4, 8),), (0,)),
    "swish_multiply": (((4, 8), (4, 8)), (0, 1)), "add_relu": (((4, 8), (4, 8)), ("output",)),
    "dropout_add": (((4, 8), (4, 8)), ()), "bias_dropout_add": (((4, 8), (8,), (4, 8)), ()),
    "gelu_dropout": (((4, 8),), (0,)), "add_mul_add": (((4, 8),) * 4, (0, 1, 2)),
}


@pytest.mark.parametrize("name", SAVED)
def test_only_what_backward_reads_is_saved(device, name):
    shapes, reads = SAVED[name]
    args, saved = leaves(device, *shapes), []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = getattr(frt, name)(*args)
    expected = [(out if i == "output" else args[i]).data_ptr() for i in reads]
    assert [t.data_ptr() for t in saved] == expected
    out.sum().backward()
    assert all(a.grad.shape == a.shape for a in args)


def test_a_scaled_sum_saves_what_the_needed_gradients_read(device):
    """Without a gradient for z, (x + y) * z + w reads z alone."""
    *args, z, w = leaves(device, *[(4, 8)] * 4)
    z.requires_grad_(False)
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frt.add_mul_add(*args, z, w)
    assert [t.data_ptr() for t in saved] == [z.data_ptr()]


def test_saved_tensor_hooks_may_change_the_storage(device):
    x, bias = leaves(device, (16, 8), 8)
    expected = torch.autograd.grad(reference.bias_gelu(x, bias).sum(), (x, bias))
    with save_on_cpu():
        y = frt.bias_gelu(x, bias)
    assert_close(torch.autograd.grad(y.sum(), (x, bias)), expected)
    strided = []  # what comes back may lie differently in memory

    def unpack(t):
        strided.append(t)
        return t.t().contiguous().t() if t.dim() == 2 else t.repeat_interleave(2)[::2]

    with saved_tensors_hooks(lambda t: t.clone(), unpack):
        y = frt.bias_gelu(x, bias)
    assert_close(torch.autograd.grad(y.sum(), (x, bias)), expected)
    assert len(strided) == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(device, use_reentrant):
    ours, _ = pair(device, p=0.5)
    x = torch.randn(6, 8, device=device, requires_grad=True)
    grads = []
    for run in (ours, lambda x: checkpoint(ours, x, use_reentrant=use_reentrant)):
        torch.manual_seed(11)
        y = run(x)
        frt.gelu_dropout(x, 0.5)  # draws in between: the checkpoint has to restore the state
        x.grad = None
        y.square().sum().backward()
        grads.append(x.grad)
    assert_close(*grads, rtol=0, atol=0)


def test_selective_checkpoint_knows_our_ops(device):
    x, bias = leaves(device, (6, 8), 8)
    seen = []

    def policy(ctx, func, *args, **kwargs):
        if func.namespace == "fusionrt":
            seen.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def function(x, bias):
        return frt.bias_gelu(x, bias).sin()

    y = checkpoint(function, x, bias, use_reentrant=False,
                   context_fn=lambda: create_selective_checkpoint_contexts(policy))
    grads = torch.autograd.grad(y.sum(), (x, bias))
    assert seen[0] is False
    assert_close(grads, torch.autograd.grad(reference.bias_gelu(x, bias).sin().sum(), (x, bias)))


# --- modes and subclasses that look at every operation


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_one_operation(device):
    x, bias = leaves(device, (4, 8), 8)
    expected = frt.bias_gelu(x, bias)  # the plan exists
    torch.autograd.grad(expected.sum(), (x, bias), retain_graph=True)  # and that of the backward pass
    with Log() as log:
        y = frt.bias_gelu(x, bias)
    assert log.names == [library.overload(frt.ops.pointwise._bias_gelu.operator, (x, bias)).name()]
    assert_close(y, expected, rtol=0, atol=0)
    with Log() as log:
        grads = torch.autograd.grad(expected.sum(), (x, bias))
    assert any(name.startswith("fusionrt::bias_gelu_backward") for name in log.names)
    assert_close(grads, torch.autograd.grad(reference.bias_gelu(x, bias).sum(), (x, bias)))


class Tagged(torch.Tensor):
    pass


def test_plain_subclasses_stay(device):
    x, bias = leaves(device, (4, 8), 8)
    tagged = x.detach().as_subclass(Tagged).requires_grad_()
    y = frt.bias_gelu(tagged, bias)
    assert type(y) is Tagged
    y.sum().backward()
    expected = torch.autograd.grad(reference.bias_gelu(x, bias).sum(), (x, bias))
    assert_close((tagged.grad.as_subclass(torch.Tensor), bias.grad), expected)


def test_wrapper_subclasses(device):
    from torch.testing._internal.two_tensor import TwoTensor
    a, b = leaves(device, (4, 8), (4, 8))
    bias = torch.randn(8, device=device, requires_grad=True)
    both = TwoTensor(a.detach(), b.detach()).requires_grad_()
    y = frt.bias_gelu(both, bias)
    assert type(y) is TwoTensor
    assert_close(y.a, reference.bias_gelu(a, bias))
    assert_close(y.b, reference.bias_gelu(b, bias))
    (g,) = torch.autograd.grad(y.sum(), both)
    assert_close(g.b, torch.autograd.grad(reference.bias_gelu(b, bias).sum(), b)[0])


# --- what cannot be served


def test_unsupported_tensors_are_refused_by_name(device):
    x = torch.randn(4, 4, device=device)
    with pytest.raises(TypeError, match=r"gelu: x must be a dense tensor, got torch\.sparse_coo"):
        frt.gelu(x.to_sparse())
    with pytest.raises(TypeError, match=r"gelu: x has dtype torch\.complex64"):
        frt.gelu(x.to(torch.complex64))
    with pytest.raises(TypeError, match="bias must be a tensor, an array or a number, got str"):
        frt.bias_gelu(x, "1")
    with pytest.raises(ValueError, match=r"x and bias must broadcast, got \(4, 4\) and \(3,\)"):
        frt.bias_gelu(x, x[0, :3])
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        frt.bias_gelu(x, torch.empty(4, device="meta"))


def test_conjugate_and_negative_views(device):
    """A lazy negation is a bit of the tensor, not of its memory."""
    x = torch.randn(4, 4, device=device)
    lazy = torch.complex(x, x).conj().imag
    assert lazy.is_neg()
    assert_close(frt.gelu(lazy), F.gelu(-x))
    plain = torch.complex(x, x).imag  # another tensor of the same strides
    assert_close(frt.gelu(plain), F.gelu(x))
    assert_close(frt.mish_scale(x, lazy[0, 0]), reference.mish_scale(x, -x[0, 0]))
    y = lazy.clone().requires_grad_()
    assert_close(torch.autograd.grad(frt.gelu(torch.complex(y, -y).conj().imag).sum(), y),
                 torch.autograd.grad(F.gelu(y).sum(), y))


# --- with and without gradients


@pytest.mark.parametrize("name", sorted(OPS))
def test_gradients_after_a_call_without(name, device):
    """What a thread has chosen for its first call, which records nothing, is not for the next one."""
    op, device = OPS[name], "cpu" if "cpu" in name else device
    args = [torch.randn_like(a).requires_grad_() if torch.is_tensor(a) and a.requires_grad else a
            for a in op.example(making(device, {ROWS: 13, COLUMNS: 64, 32: 3, 56: 11}))]

    def of(found):
        return [out for out in (found if isinstance(found, tuple) else (found,)) if out.requires_grad]

    if not of(op(*args)):
        pytest.skip("has no gradient")

    def gradients(before):
        torch.zeros(1, device=device)  # a new thread has no context: cuBLAS would warn
        if before:
            with torch.no_grad():
                op(*args)
        torch.manual_seed(3)
        loss = sum(out.sin().sum() for out in of(op(*args)))
        return torch.autograd.grad(loss, [a for a in args if torch.is_tensor(a) and a.requires_grad])

    with (ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other,
          torch.backends.cudnn.flags(enabled=True, deterministic=True)):  # else it may add in any order
        after, alone = one.submit(gradients, True).result(), other.submit(gradients, False).result()
    assert_close(after, alone, rtol=0, atol=0, equal_nan=True)


def test_jit_trace(device):
    a, b, c, d = (torch.randn(4, device=device) for _ in range(4))
    traced = torch.jit.trace(frt.add_relu, (a, b))
    assert_close(traced(c, d), torch.relu(c + d))
    assert "fusionrt::add_relu" in str(traced.graph)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(layout, device):
    """torch's guard ends the process where a strided one has no sizes."""
    for _ in range(3):
        frt.relu(torch.ones(3, device=device))
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout, device=device)
    with pytest.raises(TypeError, match="relu: x must be a dense tensor, got a nested one"):
        frt.relu(x)
    for _ in range(2):
        frt.layer_norm(torch.ones(2, 3, device=device), (3,))
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        frt.layer_norm(x, (3,))


def test_errors_of_shapes_are_the_same_under_fake_tensors_and_vmap():
    text = r"bias_gelu: x and bias must broadcast, got \(2, 3\)"
    with FakeTensorMode(), pytest.raises(ValueError, match=text):
        frt.bias_gelu(torch.ones(2, 3), torch.ones(4))
    with pytest.raises(ValueError, match=r"bias_gelu: x and bias must broadcast, got \(3,\) and \(4,\)"):
        torch.vmap(frt.bias_gelu)(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"bias_gelu: x and bias must broadcast, got \(3,\) and \(4,\)"):
        torch.vmap(frt.bias_gelu, (0, None))(torch.ones(2, 3), torch.ones(4))
