"""Checkpoints of fusionrt.optim: to torch and back, resumed, copied, with options of their own."""

import copy
import io
import pickle

import pytest
import torch
from test_optim import apart, copies, parameters
from test_optim_protocol import SHAPES, steps

from fusionrt.optim import SGD, Adam, AdamW

ALIKE = [(AdamW, {"amsgrad": True}), (Adam, {"weight_decay": 0.1}), (SGD, {}),
         (SGD, {"momentum": 0.9, "dampening": 0.1})]
STORED = [{}, {"state_dtype": "8bit"}, {"state_dtype": torch.float32}, {"state_dtype": torch.bfloat16},
          {"master_weights": True}]


def saved(optimizer):
    """As from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def step(optimizer, grad):
    optimizer.param_groups[0]["params"][0].grad = grad
    optimizer.step()


@pytest.mark.parametrize(("rule", "options"), ALIKE)
def test_checkpoints_go_to_torch_and_back(rule, options, device):
    ours = parameters(device, shapes=SHAPES)
    theirs = copies(ours)
    torchs = getattr(torch.optim, rule.__name__)
    optimizer, reference = rule(ours, 1e-2, **options), torchs(theirs, 1e-2, **options)
    for _ in range(2):
        steps(3, (optimizer, ours), (reference, theirs))
        given, optimizer = saved(optimizer), rule(ours, 0.5, **options)
        optimizer.load_state_dict(saved(reference))
        reference = torchs(theirs, 0.5, **options)
        reference.load_state_dict(given)
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] == 1e-2
    steps(3, (optimizer, ours), (reference, theirs))
    assert apart(ours, theirs) <= 1e-6


@pytest.mark.parametrize("options", STORED, ids=str)
def test_a_resumed_run_is_the_same(options, device):
    ours = parameters(device, torch.bfloat16, SHAPES)
    optimizer = AdamW(ours, 1e-2, **options)
    steps(3, (optimizer, ours))
    others = copies(ours)
    resumed = AdamW(others, 1e-2, **options)
    resumed.load_state_dict(saved(optimizer))
    steps(3, (optimizer, ours), (resumed, others))
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


def test_torch_loads_8_bit_states_and_master_weights(device):
    ours = parameters(device, shapes=SHAPES)
    theirs = copies(ours)
    optimizer = AdamW(ours, 1e-3, state_dtype="8bit")
    steps(5, (optimizer, ours))
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a)
    reference = torch.optim.AdamW(theirs)
    reference.load_state_dict(saved(optimizer))
    assert reference.state[theirs[0]]["exp_avg"].dtype == torch.float32
    assert optimizer.state[ours[0]]["exp_avg"].dtype == torch.uint8  # a checkpoint is a copy
    steps(1, (optimizer, ours), (reference, theirs))
    assert apart(ours, theirs) <= 1e-4  # one step of codes, at most 9 % of 1e-3


def test_storage_options_stay_those_of_the_optimizer(device):
    ours = parameters(device, shapes=SHAPES)
    optimizer = AdamW(ours, 1e-2)
    steps(2, (optimizer, ours))
    small = AdamW(copies(ours), state_dtype="8bit")
    small.load_state_dict(saved(optimizer))
    steps(1, (small, small.param_groups[0]["params"]))
    state = small.state[small.param_groups[0]["params"][0]]
    assert state["exp_avg"].dtype == torch.uint8 and state["step"].item() == 3


def test_a_step_of_the_receiver_is_not_counted_by_the_giver(device):
    ours = parameters(device, shapes=SHAPES)
    others = copies(ours)
    optimizer, other = AdamW(ours), AdamW(others)
    steps(2, (optimizer, ours))
    other.load_state_dict(optimizer.state_dict())
    steps(1, (other, others))
    assert optimizer.state[ours[0]]["step"].item() == 2 and other.state[others[0]]["step"].item() == 3


@pytest.mark.parametrize("pickled", [False, True])
def test_copies_of_an_optimizer(pickled, device):
    ours = parameters(device, shapes=SHAPES)
    optimizer = AdamW(ours, 1e-2, clip_grad_norm=1.0)
    steps(2, (optimizer, ours))
    other = pickle.loads(pickle.dumps(optimizer)) if pickled else copy.deepcopy(optimizer)
    others = other.param_groups[0]["params"]
    steps(2, (optimizer, ours), (other, others))
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


def test_weights_of_the_receiver_are_its_own(device):
    """A run that branches off from another one, by the other's live state."""
    first, second = (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16, device=device)) for _ in range(2))
    giver, receiver = (AdamW([p], 0.1, weight_decay=0.0, master_weights=True) for p in (first, second))
    step(giver, torch.ones_like(first))
    receiver.load_state_dict(giver.state_dict())
    before, kept = first.detach().clone(), {k: v.clone() for k, v in giver.state[first].items()}
    step(receiver, -torch.ones_like(second))
    assert torch.equal(first, before)
    assert all(torch.equal(v, kept[k]) for k, v in giver.state[first].items())


def test_what_others_put_into_8_bit_states_is_refused(device):
    """States that grow with their parameter, and those that somebody casts."""
    def grown(name, value):
        return torch.cat((value, torch.zeros_like(value))) if name in ("exp_avg", "exp_avg_sq") else value

    for change in (grown, lambda name, value: value.float()):
        p = torch.nn.Parameter(torch.randn(8192, device=device))
        optimizer = AdamW([p], state_dtype="8bit")
        step(optimizer, torch.randn_like(p))
        state = {name: change(name, value) for name, value in optimizer.state.pop(p).items()}
        new = torch.nn.Parameter(torch.randn(state["exp_avg"].shape, device=device))
        optimizer.param_groups[0]["params"][0], optimizer.state[new] = new, state
        with pytest.raises(RuntimeError, match=r"8-bit state exp_avg must have .* by way of state_dict"):
            step(optimizer, torch.randn_like(new))
        with pytest.raises(RuntimeError, match="8-bit state exp_avg must have"):
            optimizer.state_dict()


def test_hooks_of_loading_see_torchs_terms_and_may_change_them():
    ours = parameters("cpu", shapes=[(64, 64)])
    optimizer = AdamW(ours, state_dtype="8bit")
    steps(1, (optimizer, ours))
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, given: seen.append(given["state"][0]["exp_avg"].dtype))
    given = optimizer.state_dict()
    other = AdamW(copies(ours))
    other.register_load_state_dict_pre_hook(
        lambda _, d: d | {"state": {0: {k: torch.full_like(v, 7) for k, v in d["state"][0].items()}}})
    other.load_state_dict(given)
    assert seen == [torch.float32]
    assert {v.unique().item() for v in other.state[other.param_groups[0]["params"][0]].values()} == {7}


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5},
                                     {"momentum": 0.9, "master_weights": True}])
def test_a_checkpoint_from_before_the_first_step_that_counts(options):
    """As after GradScaler's first overflow: torch's SGD has no momentum yet, and takes the gradient."""
    lr, theirs = 1.0, {name: value for name, value in options.items() if name != "master_weights"}
    p = torch.nn.Parameter(torch.zeros(1))
    first = SGD([p], lr=lr, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale((p * float("inf")).sum()).backward()
    scaler.step(first)
    assert "step" not in saved(first)["state"].get(0, {})
    second = torch.optim.SGD([p], lr=lr, **theirs)
    second.load_state_dict(saved(first))
    for _ in range(3):
        p.grad = torch.ones(1)
        second.step()
    q, momentum = torch.nn.Parameter(torch.zeros(1)), 0.0
    for k in range(3):
        momentum = 1.0 if k == 0 else 0.9 * momentum + 1 - options.get("dampening", 0)
        q.data -= momentum
    torch.testing.assert_close(p, q)
    third = SGD([q], lr=lr, **options)
    third.load_state_dict(saved(second))
    for one, its in ((second, p), (third, q)):
        its.grad = torch.ones(1)
        one.step()
    torch.testing.assert_close(q, p)


def test_options_of_a_checkpoint_are_checked():
    p = torch.nn.Parameter(torch.zeros(3))
    given = torch.optim.AdamW([p], differentiable=True).state_dict()
    optimizer = AdamW([p])
    with pytest.raises(ValueError, match="AdamW: differentiable=True is not supported"):
        optimizer.load_state_dict(given)
    assert not optimizer.param_groups[0]["differentiable"]


def test_flattened_checkpoints_from_before_the_first_step():
    """torch writes an empty mapping in the place of a state that there is not."""
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = SGD([p], lr=1.0, momentum=0.9)
    given = optimizer.state_dict()
    given["state"] = {0: {"step": {}, "momentum_buffer": {}}}
    optimizer.load_state_dict(given)
    optimizer.state_dict()
    for _ in range(2):
        p.grad = torch.ones(3)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -2.9))
    optimizer.state[p]["step"] = 2
    assert optimizer.state_dict()["state"][0]["momentum_buffer"] is not None


def test_hooks_may_mend_the_options_of_a_checkpoint():
    p = torch.nn.Parameter(torch.zeros(3))
    given, optimizer = torch.optim.AdamW([p], differentiable=True).state_dict(), AdamW([p])
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: state["param_groups"][0].update(differentiable=False))
    optimizer.load_state_dict(given)
    assert optimizer.param_groups[0]["differentiable"] is False
    p.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -1e-3))
