"""Whose parameters and buffers are whose, after moves, loads and copies."""

import copy
import pickle

import pytest
import torch
from convert_net import Net, X, assert_same, one_thread, small_net  # noqa: F401  (fixtures)
from torch import nn

import fusionrt as frt


def converted(model):
    return frt.auto_convert_model(model, validate_accuracy=False)


def same(left, right):
    return [a is b for a, b in zip(left, right, strict=True)]


def test_parameters_stay_where_nobody_holds_the_original():
    """An optimizer made before a cast, ties to weights outside and hooks go on, as torch's."""
    fast = converted(Net().eval())
    fast.norm.register_buffer("more", torch.ones(2))
    params, seen = list(fast.parameters()), []
    params[0].register_hook(seen.append)
    optimizer = torch.optim.SGD(params, lr=1.0)
    fast.double()
    assert all(same(fast.parameters(), params))
    assert {p.dtype for p in fast.parameters()} == {torch.float64}
    before = params[0].detach().clone()
    fast(X.double()).sum().backward()
    optimizer.step()
    assert len(seen) == 1 and not torch.equal(fast.first.weight, before)


def test_a_part_of_the_original_is_left_alone():
    net = Net().eval()
    part, fast = net.first, converted(net)
    del net
    fast.double()
    assert part.weight.dtype == torch.float32


def test_two_conversions_do_not_move_each_other():
    net = Net().eval()
    fast, other = converted(net), converted(net)
    del net
    fast.double()
    assert {t.dtype for t in (*other.parameters(), other.scale)} == {torch.float32}
    params = list(other.parameters())
    other.double()
    assert all(same(other.parameters(), params))


def test_hooks_and_attributes_of_parameters_come_along(net):
    fast, seen = converted(net), []
    weight, bias = net.first.weight, net.first.bias
    weight.no_decay = True
    weight.register_hook(lambda grad: seen.append("gradient"))
    handle = bias.register_post_accumulate_grad_hook(lambda param: seen.append(param))
    fast.double()
    assert fast.first.weight is not weight and fast.first.weight.no_decay
    fast(X.double()).sum().backward()
    assert len(seen) == 2 and "gradient" in seen and any(found is fast.first.bias for found in seen)
    handle.remove()
    fast(X.double()).sum().backward()
    assert len(seen) == 3


def test_assigned_weights_are_the_converted_ones_alone(net):
    fast = converted(net)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    given = {name: t + 1 for name, t in before.items()}
    fast.load_state_dict(given, assign=True)
    assert all(torch.equal(t, given[name]) for name, t in fast.state_dict().items())
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    net.load_state_dict(given)
    assert_same(fast(X), net(X))


def test_assigned_weights_of_a_part(net):
    """A converted module within another one, which loads it."""
    whole = nn.ModuleDict({"part": converted(net)})
    whole.load_state_dict({name: t + 1 for name, t in whole.state_dict().items()}, assign=True)
    assert torch.equal(whole["part"].scale, net.scale + 1)
    assert torch.equal(whole["part"].first.weight, net.first.weight + 1)


def test_replicas_run_on_their_own_parameters(net):
    """As torch.nn.DataParallel makes them, for which it takes two GPUs."""
    fast = converted(net)
    fast(X)
    replica = fast._replicate_for_data_parallel()
    for name, module in fast._modules.items():
        replica._modules[name] = module._replicate_for_data_parallel()
        for key, param in module._parameters.items():
            setattr(replica._modules[name], key, param.detach() * 2)
    replica.layers, replica.scale = [replica.first], net.scale
    doubled = Net().eval()
    doubled.load_state_dict({k: v if "running" in k or "batches" in k or k == "scale" else 2 * v
                             for k, v in net.state_dict().items()})
    assert_same(replica(X), doubled(X))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
                         ids=["deepcopy", "pickle"])
def test_copies_of_both_do_not_move_each_other(copied):
    net = Pickled(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    original, fast = copied((net, converted(net)))
    assert original[0].weight is fast[0].weight
    fast.double()
    assert original[0].weight.dtype == original[1].running_mean.dtype == torch.float32


class Pickled(nn.Sequential):
    pass


def test_what_torch_loads_a_module_with(net):
    missing: list[str] = []
    state = {name: t + 1 for name, t in net.state_dict().items()}
    converted(net)._load_from_state_dict(state, "", {}, strict=True, missing_keys=missing, unexpected_keys=[],
                                         error_msgs=[])
    assert not missing and torch.equal(net.scale, state["scale"])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_steps_of_torchs_fused_optimizers_are_seen(optimizer):
    """They change no version of a parameter."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    fast, x = frt.auto_convert_model(model), torch.randn(16, 8)
    stepping = optimizer(fast.parameters(), lr=0.3, fused=True)
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
        fast(x).square().sum().backward()
        stepping.step()


def test_steps_count_where_torch_wrote():
    """Not parameters without a gradient, nor those of our own optimizers, which tell of themselves."""
    used, frozen = (nn.Parameter(torch.randn(3)) for _ in range(2))
    used.grad = torch.ones(3)
    stepping = torch.optim.SGD([used, frozen], lr=0.1, fused=True)
    before = used._version, frozen._version
    stepping.step()
    assert (used._version > before[0], frozen._version) == (True, before[1])
    half = nn.Parameter(torch.randn(3).bfloat16())
    half.grad = torch.ones_like(half)
    ours = frt.optim.SGD([half], lr=0.1, fused=True, master_weights=True)
    ours.step()
    version = half._version
    ours.step()
    assert half._version == version + 1
