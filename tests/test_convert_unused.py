"""What nobody uses is erased, but for what is called for its effect, or would change later random numbers."""

import pytest
import torch
from convert_checks import compiled
from torch.nn import functional as F
from torch.testing import assert_close

X = torch.rand(4, 8)
logged = []


@torch.library.custom_op("fusionrt_test::log", mutates_args=())
def log(x: torch.Tensor) -> None:
    logged.append(x.shape)


@log.register_fake
def _(x):
    return None


def check_sum(x):
    torch._check(x.sum().item() > 1000)


def assert_large(x):
    torch.ops.aten._assert_async.msg((x > 1000).all(), "too small")


@pytest.mark.parametrize("function", [check_sum, assert_large])
def test_checks_stay(function):
    def checked(x):
        function(x)
        return x.exp() * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True), pytest.raises(RuntimeError):
        compiled(checked)[0](X)


def test_calls_that_return_nothing_stay():
    def noted(x):
        torch.ops.fusionrt_test.log.default(x)
        return x.exp() * 2

    logged.clear()
    assert_close(compiled(noted)[0](X), noted(X))
    assert logged == [(4, 8), (4, 8)]


def attend(x, p):
    heads = x.view(1, 1, 4, 8)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)


DRAWS = {
    "read by what is not used": lambda x: torch.rand(8) * 2, "in place": lambda x: torch.rand(8).add_(1),
    "gumbel": lambda x: F.gumbel_softmax(x), "binomial": lambda x: torch.binomial(x.round() + 1, x),
    "pool": lambda x: F.fractional_max_pool2d(x[None, None], 2, output_size=(2, 3)),
    "overload": lambda x: torch.ops.aten.bernoulli.default(x)}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_stay(draw):
    def function(x):
        draw(x)
        return x * torch.rand(8)

    found = []
    for run in (function, compiled(function)[0]):
        torch.manual_seed(0)
        found.append(run(X))
    assert_close(*found)


def attend_in_heads(x, p):
    width, (w, b, w_out) = 8, torch.ones(40, 8).split((24, 8, 8))
    return F.multi_head_attention_forward(x[:, None], x[:, None], x[:, None], width, 2, w, b.flatten()[:24],
                                          None, None, False, p, w_out, None)


@pytest.mark.parametrize(("call", "stays"), [
    (lambda x: attend(x, 0.5), True), (lambda x: attend(x, 0.0), False), (F.normalize, False),
    (lambda x: attend_in_heads(x, 0.5), True), (lambda x: attend_in_heads(x, 0.0), False)])
def test_what_draws_nothing_goes(call, stays):
    def function(x):
        call(x)
        return x * 2

    run, found = compiled(function, passes=("unused",))
    run(X)
    assert (found[0].graph_after > 1) == stays


def test_what_writes_to_what_is_not_used_goes():
    """An optimizer with momentum would take zeros for a gradient."""
    def function(a, b):
        a, b = a * 1, b * 1
        v, z = b.exp(), F.layer_norm(a + b, (8,)).add(a)
        z.add_(1)
        z.mul_(2)
        return v * 2

    a, b = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
    compiled(function)[0](a, b).sum().backward()
    assert a.grad is None
    assert_close(b.grad, 2 * b.detach().exp())
