"""Linear layers at inference on a CPU, by weights that are packed once."""

import threading

import pytest
import torch
from convert_checks import called, check, compiled
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from fusionrt.convert import derived
from fusionrt.convert.packed_conv import ACTIVATIONS
from fusionrt.convert.packed_linear import LEAST_ROWS, PackedLinear, can_pack

pytestmark = pytest.mark.skipif(not can_pack(), reason="torch was built without oneDNN")

TORCH = {None: lambda x: x, "relu": F.relu, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
         "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "relu6": F.relu6, "gelu": F.gelu,
         "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def packed_calls(function, *args):
    return called(function, *args).count("packed_linear")


def layer(width=24, out=40, activation=None):
    linear = nn.Linear(width, out)
    return linear, lambda x: TORCH[activation](linear(x))


@pytest.mark.covering(1)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("shape", [(LEAST_ROWS, 24), (2, 5, 24), (3, 4, 5, 24)])
@torch.no_grad()
def test_as_accurate_as_the_layer(activation, shape):
    linear, function = layer(activation=activation)
    x = torch.randn(shape)
    run, _ = compiled(function)
    own, ours = function(x), run(x)
    w, b = linear.weight.double(), linear.bias.double()
    exact = TORCH[activation](F.linear(x.double(), w, b))
    limit = 2 * (own - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (ours - exact).abs().max() <= limit
    assert packed_calls(function, x) == 1


@torch.no_grad()
def test_which_layers_are_packed():
    linear, function = layer()
    conv1d, bias = nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(40))
    x = torch.randn(LEAST_ROWS, 24)
    assert packed_calls(lambda x: F.linear(x, linear.weight), x) == 1          # without a bias
    assert packed_calls(lambda x: torch.addmm(bias, x, conv1d), x) == 1        # as GPT-2 has them
    assert packed_calls(function, x[:-1]) == 0                                 # few rows
    assert packed_calls(lambda x: F.linear(x, linear.weight * 2), x) == 0      # no weight of its own
    assert packed_calls(lambda x: F.linear(x, x[:, :24]), x) == 0
    assert packed_calls(lambda x: F.softplus(linear(x)), x) == 0               # oneDNN has no name for it
    assert packed_calls(linear.double(), x.double()) == 0


def test_layers_that_record_gradients_are_left():
    _, function = layer(activation="gelu")
    x = torch.randn(LEAST_ROWS, 24)
    assert "packed_linear" not in called(function, x, grad=True)
    check(function, x)


@torch.no_grad()
def test_layouts_of_the_operand():
    _, function = layer(activation="gelu")
    _, plain = layer()
    for x in (torch.randn(24, 16).t(), torch.randn(16, 48)[:, ::2], torch.randn(16, 24)[::2],
              torch.randn(1, 24).expand(9, 24), torch.randn(6, 4, 24).transpose(0, 1)):
        check(function, x, rtol=1e-5, atol=1e-6)
        check(plain, x, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_weight_as_torch_mm_wants_it():
    w, b = nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(40))
    check(lambda x: F.gelu(torch.addmm(b, x, w)), torch.randn(16, 24), calls=3, rtol=1e-5, atol=1e-5)
    check(lambda x: torch.addmm(b, x, w), torch.randn(16, 24), calls=3, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "gelu"])
@torch.no_grad()
def test_weights_that_change_between_calls(activation):
    """Of a square matrix: transposed, it has the same memory and the same shape."""
    linear, function = layer(24, 24, activation)
    other, x = nn.Linear(24, 24), torch.randn(16, 24)
    run, _ = compiled(function)
    for change in (lambda: None, lambda: linear.weight.mul_(2), lambda: linear.bias.add_(1),
                   lambda: linear.load_state_dict(other.state_dict()),
                   lambda: setattr(linear.weight, "data", torch.randn(24, 24)),
                   lambda: setattr(linear.weight, "data", linear.weight.data.t()),
                   lambda: setattr(linear, "weight", nn.Parameter(torch.randn(24, 24)))):
        change()
        for _ in range(2):
            assert_close(run(x), function(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_memory_of_a_weight_that_is_given_to_another():
    """Freed and had again between two calls: the address and the version are the same."""
    weight = nn.Parameter(torch.randn(512, 512))
    packed, x = PackedLinear(16), torch.randn(16, 512)
    for _ in range(20):
        address, version = weight.data_ptr(), weight._version
        assert_close(packed(x, weight, None), F.linear(x, weight))
        weight.data = torch.empty(0)
        weight.data = torch.randn(512, 512)
        if (weight.data_ptr(), weight._version) == (address, version):
            break
    assert_close(packed(x, weight, None), F.linear(x, weight))


def test_weights_of_inference_mode_are_packed_in_each_call():
    """Whose versions tell nothing."""
    with torch.inference_mode():
        weight, x = torch.randn(24, 24), torch.randn(16, 24)
        packed = PackedLinear(16)
        for _ in range(2):
            assert_close(packed(x, weight, None), F.linear(x, weight))
            weight.mul_(2)


@torch.no_grad()
def test_numbers_of_rows_that_vary():
    """A second one makes Dynamo capture any number; then oneDNN packs, once for all."""
    for activation in (None, "gelu"):
        linear, function = layer(activation=activation)
        run, found = compiled(function)
        for rows in (16, 32, 9, 100, 1, 16):
            x = torch.randn(rows, 24)
            assert_close(run(x), function(x), rtol=1e-5, atol=1e-5)
        assert len(found) <= 3  # of 16 rows, any, one
        assert len(derived.kept[linear.weight]) <= 2


@torch.no_grad()
def test_attention_of_one_input_packs_both_its_layers():
    for batch_first in (False, True):
        mha = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
        x = torch.randn(3, 8, 32)
        check(lambda x, mha=mha: mha(x, x, x, need_weights=False)[0], x, calls=2, rtol=1e-5, atol=1e-5)
        assert {len(derived.kept[w]) for w in (mha.in_proj_weight, mha.out_proj.weight)} == {1}
        mha.in_proj_weight.mul_(1.5)
        check(lambda x, mha=mha: mha(x, x, x, need_weights=False)[0], x, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_several_threads():
    """One model in all of them; what is kept, and the kernels' arguments, are nobody's alone."""
    model = nn.Sequential(nn.Linear(24, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 24)).eval()
    run, _ = compiled(model)
    inputs = [torch.randn(16, 24) for _ in range(8)]
    run(inputs[0])
    wrong: list[int] = []

    def work(k):
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(run(inputs[k]), model(inputs[k]), rtol=1e-4, atol=1e-5):
                    wrong.append(k)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
