"""Clusters: every maximal pointwise subgraph is one kernel that does what torch's calls do, or is left
alone."""

import functools
from random import Random

import pytest
import torch
from convert_checks import assert_as_accurate, check, check_module, compiled, leaf, tensors
from convert_net import one_thread  # noqa: F401  (a fixture)
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from fusionrt.convert.capture import Options, backend

# -- whole functions -----------------------------------------------------------------------------------


def test_a_chain_is_one_kernel(device):
    x, y, b = leaf(4, 8, device=device), leaf(4, 8, device=device), leaf(8, device=device)
    counts = check(lambda x, y, b: torch.relu(x * y + b) * 2, x, y, b)
    assert counts == {"pointwise_cluster": 1}


def test_promotion_is_torchs():
    half, single, double = (torch.randn(4, 8, dtype=t)
                            for t in (torch.bfloat16, torch.float32, torch.float64))
    flag, small, ids = (torch.rand(4, 8) > 0.5, torch.randint(-9, 9, (4, 8), dtype=torch.int8),
                        torch.randint(9, (4, 8)))
    scalar, wide = torch.tensor(1.5), torch.tensor(1.5, dtype=torch.float64)

    def promoted(half, single, double, flag, small, ids, scalar, wide):
        return (half * 2 + 1, (half + single) * 2, half * wide + scalar, (double + half) * 0.5,
                flag * 2.5 - 1, small / 2 + flag, ids / 2 + half, (half > 0.1) & flag,
                (single * 2).to(torch.bfloat16), ids.float() * 3, (small.float() + 1).half())

    counts = check(promoted, half, single, double, flag, small, ids, scalar, wide, rtol=2**-7, atol=2**-7)
    assert counts["pointwise_cluster"] >= 9


def test_long_integers_are_left_alone():
    """The arithmetic is in float32: 2 ** 24 + 1 is not among its numbers."""
    ids = torch.tensor([2**24 + 1, 2**24, 3])

    def function(ids):
        return ids + 1 > 2**24 + 1, (ids == 2**24 + 1) & (ids > 0), ids * 2 - 1

    counts = check(function, ids)
    assert counts["pointwise_cluster"] <= 1  # of truth values alone


def test_sums_of_truth_values_are_truth_values():
    flag = torch.tensor([True, True, False])
    check(lambda a: ((a + a) * 1.0, (a + a).float() * 2, a * a), flag)


def test_truth_values_of_rows(device):
    """Results of rows are numbers: such a row is not ours, but for truth values that stay within."""
    def asked(x, y):
        chosen = F.softmax(x, -1)
        return chosen, chosen > 0.2, x.masked_fill(F.layer_norm(x + y, (6,)) > 0, 0.5)

    x, y = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
    with torch.no_grad():
        assert check(asked, x, y) == {"norm": 1}


@pytest.mark.parametrize("shape", [(3, 1), (1, 1), (1,)])
def test_rows_of_one_value_keep_their_dtype(shape):
    """They are no sums over a row, which are float32."""
    check(lambda x: (torch.softmax(x * 2, -1), F.layer_norm(x + 1, (1,)).relu()),
          torch.randn(shape, dtype=torch.bfloat16, requires_grad=True))


def test_explicit_roundings_stay():
    x = torch.tensor([1 + 2.0**-10, 70000.0, 3e-8])
    check(lambda x: ((x * 1.0).half().float() * 2, (x + 0).to(torch.bfloat16).float() * 2), x, rtol=0, atol=0)


def test_numbers_are_compared_in_the_dtype_of_the_tensor():
    x = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float16)
    check(lambda x: ((x >= 0.1) & (x < 0.3), x.clamp(0.1, 0.3) * 2), x.requires_grad_(), rtol=0, atol=0)


def test_only_convex_sets_are_fused():
    """exp(x) needs nothing of the matmul; its product with what comes from it is another kernel."""

    def function(x, y):
        h = x * 2
        a = h.exp()
        c = (h @ y).sum() + h
        return torch.sigmoid(a * c), a.sum()

    counts = check(function, leaf(4, 8), leaf(8, 4))
    assert counts == {"pointwise_cluster": 2}


def test_two_clusters_do_not_wait_for_each_other():
    """a -> b and b -> a through calls in between: one of the ways must be given up."""

    def function(x, y, w):
        a = torch.relu(x) * 2
        b = torch.tanh(y) * 2
        left, right = a @ w, b @ w
        a = a + right
        b = b + left
        return a * 2, b * 3

    check(function, leaf(4, 4), leaf(4, 4), leaf(4, 4))


def test_values_that_others_need_are_results_of_the_kernel(device):
    def function(x, b):
        h = x + b
        y = torch.relu(h) * 2
        return y @ y.T, h @ h.T, y.sum()

    counts = check(function, leaf(4, 8, device=device), leaf(8, device=device))
    assert counts == {"pointwise_cluster": 1}


def program(seed):
    """A dozen calls, of pointwise functions, matmuls, sums, views and writes: kind, two operands, which
    kind."""
    random = Random(seed)
    return [(random.randrange(9), random.randrange(99), random.randrange(99)) for _ in range(14)]


def run_program(steps, x, y, w):
    values = [x, y]
    for kind, i, j in steps:
        a, b = values[i % len(values)], values[j % len(values)]
        if kind < 4:
            c = (a + b, a * 0.5 - b, torch.relu(a) + 1, torch.tanh(a * b))[kind]
        elif kind == 4:
            c = (a @ w) * 0.5
        elif kind == 5:
            c = a - b.mean()
        elif kind == 6:
            c = a.t().contiguous().t()
        else:
            c = a * 1.5
            c += b
            c = torch.relu_(c) if kind == 7 else c
        values.append(c)
    return values[-1], values[len(values) // 2] * 2, sum(v.mean() for v in values)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 60))])
def test_random_programs(seed):
    steps = program(seed)
    check(lambda x, y, w: run_program(steps, x, y, w), leaf(4, 4), leaf(4, 4), leaf(4, 4), rtol=1e-4,
          atol=1e-4)


# -- what is left alone ----------------------------------------------------------------------------------


def test_writes_to_arguments_and_views_keep_their_order():
    def function(x, y):
        a = x * 2 + 1
        x.add_(1)
        b = x * 2 + 1
        v = y[0]
        v *= 3
        c = torch.relu(y) + 1
        y[1] = 5.0
        y.view(-1).copy_(y.flatten() * 2)
        return a, b, c, y + 1, torch.tanh(v * 2)

    check(function, torch.randn(4, 8), torch.randn(4, 8))


def test_writes_through_views_where_nothing_is_recorded():
    """Of what requires a gradient: to ask such a view for its `grad_fn` is an error."""
    def function(w):
        w[0].mul_(3)
        return torch.sigmoid(w) * 2

    run, found = compiled(function)
    w = torch.randn(3, 4)
    with torch.no_grad():
        ours, own = (w.clone().requires_grad_() for _ in range(2))
        assert_close((run(ours), ours), (function(own), own))
    assert found


def test_in_place_calls_on_values_of_the_function_are_fused(device):
    def function(x, b):
        y = x @ x.T
        y += b
        y.mul_(2).relu_()
        z = F.silu(y * 1.5, inplace=True)
        F.dropout(z, 0.5, training=False, inplace=True)
        return z

    counts = check(function, leaf(8, 8, device=device), leaf(8, device=device))
    assert counts == {"pointwise_cluster": 1}


@pytest.mark.parametrize("training", [True, False])
def test_writes_through_views_of_what_dropped_nothing(training):
    """It is the argument itself."""
    def function(x, y):
        dropped = F.dropout(F.dropout(x, 0.0 if training else 0.3, training), 0.3, False, inplace=True)
        dropped[0].mul_(3)
        return y * 2 + 1, x.sum()

    assert check(function, torch.randn(3, 4), torch.randn(3, 4)) == {"pointwise_cluster": 1}


def test_in_place_calls_that_views_see_stay():
    def function(x):
        y = x @ x.T
        view = y[0]
        y.mul_(2)
        return view + 1, torch.relu(y) + 1

    check(function, torch.randn(8, 8))


def test_an_in_place_call_keeps_its_dtype():
    def function(x, y):
        a = x @ x.T
        a += y
        a.mul_(2)
        return torch.relu(a) + 1

    check(function, torch.randn(4, 4, dtype=torch.bfloat16), torch.randn(4, 4))


def test_index_put_and_masked_writes():
    def function(x, index):
        y = torch.relu(x) * 2
        y.index_put_((index,), torch.zeros(()))
        y[y > 1] = 0
        return y * 2 + 1

    check(function, torch.randn(6, 3), torch.tensor([1, 4]))


def test_random_numbers():
    """As many are dropped as should be, the same with the same seed; the rest is scaled."""
    run, found = compiled(lambda x: F.dropout(torch.relu(x) + 1, 0.25) * 2)
    x = torch.ones(1 << 16)
    torch.manual_seed(3)
    first = run(x)
    torch.manual_seed(3)
    assert_close(run(x), first, rtol=0, atol=0)
    assert found[0].counts == {"pointwise_cluster": 1}
    assert abs((first == 0).float().mean().item() - 0.25) < 0.01
    assert_close(first[first != 0].unique(), torch.tensor([4 / 0.75]))
    assert not torch.equal(run(x), first)


def test_dropout_outside_of_training_is_its_operand():
    counts = check(lambda x: F.dropout(x, 0.5, False) * 2 + 1, leaf(4, 8))
    assert counts == {"pointwise_cluster": 1}


@pytest.mark.parametrize("dynamic", [True, None])
def test_sizes_that_vary(dynamic):
    """Symbols as shapes and as numbers; one graph serves them all."""

    def function(x, b, scale):
        return torch.relu(x * x.shape[0] + b) / scale, F.layer_norm(x + b, (8,))

    torch._dynamo.reset()
    found = []
    heard = functools.partial(backend, options=Options(on_graph=found.append))
    run = torch.compile(function, dynamic=dynamic, backend=heard)
    b = torch.randn(8)
    for rows, scale in ((4, 2), (7, 3), (12, 4), (5, 5)):
        x = torch.randn(rows, 8)
        assert_close(run(x, b, scale), function(x, b, scale))
    assert len(found) == (1 if dynamic else 2)
    assert found[-1].counts == {"pointwise_cluster": 1, "norm": 1}


def test_graph_breaks():
    def function(x):
        y = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return torch.tanh(y) + 1

    counts = check(function, leaf(4, 8))
    assert counts == {"pointwise_cluster": 2}


def test_autocast_within():
    def function(x, w):
        h = torch.relu(x) * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = h @ w
            h = torch.tanh(h) * 2 + x
            s = torch.softmax(h.to(torch.bfloat16) * 0.5, -1)
        return h * 2 + 1, s

    assert_as_accurate(function, leaf(8, 8), leaf(8, 8))
    run, found = compiled(function)
    run(leaf(8, 8), leaf(8, 8))
    assert found[0].counts == {"pointwise_cluster": 2, "softmax": 1}  # autocast's bounds are not crossed


def test_autocast_around():
    def function(x, w, b):
        h = F.layer_norm(x @ w, (8,), b, b)
        return F.softmax(h * 0.5, -1), torch.relu(h) + 1

    run, _found = compiled(function)
    args = [leaf(8, 8), leaf(8, 8), leaf(8)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, expected = run(*args), function(*args)
    assert_close(ours, expected, rtol=1e-2, atol=1e-2)
    assert [t.dtype for t in ours] == [t.dtype for t in expected]


def test_regions_without_gradients():
    def function(x):
        h = torch.relu(x) * 2
        with torch.no_grad():
            m = h * 3 + 1
        return h.detach() * h + 1, m, h * m

    check(function, leaf(4, 8))


def test_masks_take_no_part_in_gradients():
    """A parameter of which only a mask is made has no gradient, rather than one of zeros."""
    x, w = leaf(4, 8), leaf(4, 8)
    counts = check(lambda x, w: (w > 0).float() * x * 2, x, w)
    assert counts == {"pointwise_cluster": 1}
    run, _ = compiled(lambda x, w: ((w > 0).float() * x * 2, x.detach() * 2 + 1))
    product, constant = run(x, w)
    product.sum().backward()
    assert w.grad is None
    assert x.grad is not None
    assert not constant.requires_grad
    check(lambda w: torch.eye(4).masked_fill(w > 0, 0.1), leaf(4, 4))  # nor has what is made of nothing else


def test_hooks_see_whole_gradients():
    seen = []

    def function(x):
        h = x * 2
        h.register_hook(lambda g: seen.append(g) or g * 0.5)
        return torch.tanh(h) + h

    check(function, leaf(4, 8))
    assert len(seen) == 2
    assert_close(seen[1], seen[0])


def test_results_along_the_way_have_whole_gradients():
    run, _ = compiled(lambda x: (h := torch.relu(x) * 2, torch.tanh(h) + 1))
    x = leaf(4, 8)
    hidden, y = run(x)
    (ours,) = torch.autograd.grad(y.sum(), hidden)
    assert_close(ours, 1 - torch.tanh(hidden) ** 2)


def test_complex_and_other_tensors():
    z = torch.randn(4, 8, dtype=torch.complex64)
    check(lambda z, x: (z * 2 + 1, z.real * 2 + x, z.conj().imag * 2 + 1, torch.bitwise_not(x.int() + 1)), z,
          torch.randn(4, 8))


def test_results_that_are_no_tensors():
    counts = check(lambda x: (torch.relu(x) * 2, x.shape[0], None, {"a": (x + 1) * 2}, "text"), leaf(4, 8))
    assert counts == {"pointwise_cluster": 2}


def test_transforms_of_functions_stay_torchs():
    x = torch.randn(4, 8)
    for function in (lambda x: torch.vmap(lambda a: torch.relu(a * 2) + 1)(x),
                     lambda x: torch.func.grad(lambda a: (torch.tanh(a) * 2).sum())(x) * 2 + 1):
        run, found = compiled(function)
        assert_close(run(x), function(x))
        assert not any(graph.counts for graph in found)


def test_functions_with_gradients_of_their_own():
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2 + 1

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    counts = check(lambda x: torch.tanh(Tripled.apply(torch.relu(x) * 2)) + 1, leaf(4, 8))
    assert counts == {"pointwise_cluster": 2}


def test_gradients_within():
    check(lambda x: torch.autograd.grad((torch.tanh(x) * 2).sum(), x)[0] * 2 + 1, leaf(4, 8))


def test_an_in_place_call_by_itself_stays_in_place():
    graphs = []
    torch._dynamo.reset()
    run = torch.compile(lambda x, w: torch.relu_(x @ w) @ w,
                        backend=lambda gm, inputs: graphs.append(gm) or backend(gm, inputs))
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    assert_close(run(x, w), torch.relu(x @ w) @ w)
    assert torch.relu_ in [n.target for n in graphs[0].graph.nodes]


def test_subclasses_of_tensor_stay_torchs():
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(4, 8).as_subclass(Tagged)
    run, found = compiled(lambda x: torch.relu(x) * 2)
    assert type(run(x)) is Tagged
    assert_close(run(x), torch.relu(x) * 2)
    assert not any(graph.counts for graph in found)


def test_inputs_that_come_to_share_memory():
    """Captured with inputs apart, of which one is written to; then called with two views of one."""

    def function(x, y):
        a = x * 2 + 1
        y.mul_(2)
        return torch.relu(a), y + 1

    run, _ = compiled(function)
    for make in (lambda: (torch.ones(8), torch.ones(8)), lambda: (b := torch.ones(16), b)[:1] * 2,
                 lambda: (b := torch.ones(16), (b[:8], b[:8]))[1], lambda: (torch.ones(8), torch.ones(8))):
        ours, eager = make(), make()
        assert_close((run(*ours), ours), (function(*eager), eager))


@pytest.mark.parametrize("layout", ["channels_last", "permuted", "sliced", "expanded"])
def test_strides_are_torchs(layout, device):
    x = torch.randn(2, 3, 4, 5, device=device)
    views = {"channels_last": x.to(memory_format=torch.channels_last), "permuted": x.permute(3, 1, 0, 2),
             "sliced": x[:, ::2], "expanded": x[:, :1].expand(2, 3, 4, 5)}
    run, _ = compiled(lambda x, y: (torch.relu(x) * 2 + 1, torch.tanh(y * x) + y))
    y = torch.randn(views[layout].shape, device=device)
    ours, expected = (run(views[layout], y),
                      (torch.relu(views[layout]) * 2 + 1, torch.tanh(y * views[layout]) + y))
    assert_close(ours, expected)
    assert [t.stride() for t in tensors(ours)] == [t.stride() for t in expected]


def test_shared_modules_and_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            h = self.norm(self.embed(ids))
            h = self.norm(torch.relu(h) + h)
            return self.head(self.norm(h))

    counts = check_module(Tied(), torch.randint(10, (2, 6)))
    assert counts["norm"] >= 2


def test_too_many_operands_are_several_kernels():
    args = [leaf(8) for _ in range(40)]
    counts = check(lambda *args: sum(torch.relu(a) * k for k, a in enumerate(args, 1)), *args)
    assert counts["pointwise_cluster"] >= 3


def test_what_only_dead_code_reads_has_no_gradient():
    """An optimizer with momentum would take zeros for one."""
    def function(a, b):
        a, b = a * 1, b * 1
        v = b.exp()
        F.layer_norm(a + b, (6,)).add(a)
        return v, v * 2

    a, b = (torch.randn(3, 6, requires_grad=True) for _ in range(2))
    sum(out.sum() for out in torch.compile(function, backend="fusionrt")(a, b)).backward()
    assert a.grad is None
    assert_close(b.grad, 3 * b.detach().exp())
