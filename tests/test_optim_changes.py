"""What others do to parameters, gradients and states between two steps, and tensors that are not plain."""

import pytest
import torch
import torch.distributed as dist
from test_optim import apart
from torch.testing import assert_close

from fusionrt import optim


def made(value, dtype=torch.float32, rule=optim.SGD, device="cpu", **options):
    param = torch.nn.Parameter(torch.full((5000,), value, dtype=dtype, device=device))
    return param, rule([param], **{"lr": 0.1} | options)


def stepped(param, optimizer, grad=1.0):
    param.grad = torch.full_like(param, grad)
    optimizer.step()


MOVES = {
    "data": lambda t: setattr(t, "data", t.data.clone()),
    "shared": lambda t: t.share_memory_(),
    "resized": lambda t: moved(t),
}


def moved(t):
    kept, storage = t.clone(), t.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    t.copy_(kept)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize(("rule", "options"), [(optim.SGD, {"momentum": 0.9}), (optim.AdamW, {})], ids=str)
def test_states_that_move(rule, options, move, device):
    param, optimizer = made(1.0, rule=rule, device=device, **options)
    other, reference = made(1.0, rule=getattr(torch.optim, rule.__name__), device=device, **options)
    for _ in range(3):
        stepped(param, optimizer)
        stepped(other, reference)
        taken = [torch.ones(5000, device=device) for _ in range(4)]  # the memory that was given back
        for state in optimizer.state[param].values():
            if device == "cpu" or move is not MOVES["shared"]:
                move(state)
    assert all((t == 1).all() for t in taken)
    assert apart([param], [other]) <= 1e-6


def test_a_parameter_of_another_dtype_in_the_same_memory(device):
    param, optimizer = made(1.0, torch.float16, device=device)
    stepped(param, optimizer)
    param.grad = None
    param.data = param.data.view(torch.bfloat16)
    with torch.no_grad():
        param.fill_(1.0)
    stepped(param, optimizer)
    assert_close(param.detach(), torch.full_like(param, 0.9), rtol=2.0**-8, atol=0)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no gradients of other dtypes")
@pytest.mark.parametrize("later", [False, True])
def test_gradients_of_float32(later, device):
    param, optimizer = made(1.0, torch.bfloat16, master_weights=True, lr=1.0, device=device)
    if later:
        stepped(param, optimizer, 0.0)
        param.grad = None
    param.grad_dtype = torch.float32
    param.grad = torch.full((5000,), 1.001, device=device)
    optimizer.step()
    assert_close(optimizer.state[param]["master_weight"], torch.full((5000,), -0.001, device=device),
                 rtol=1e-4, atol=0)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no gradients of other dtypes")
def test_gradients_of_float32_of_some_parameters_at_a_time(device):
    params = [torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16, device=device)) for _ in range(4)]
    optimizer, tables = optim.SGD(params, lr=1.0, momentum=0.5), []
    for step in range(8):
        for k, param in enumerate(params):
            param.grad_dtype = torch.float32
            param.grad = torch.full((9,), 0.25, device=device) if k % 2 == step % 2 else None
        optimizer.step()
        tables.append([bucket.table for bucket in optimizer._buckets()])
    assert all(a is b for last in tables[2:] for a, b in zip(last, tables[1], strict=True))


def test_what_users_keep_beside_the_states():
    param, optimizer = made(1.0, momentum=0.9)
    stepped(param, optimizer)
    optimizer.state[param]["my_scale"] = torch.ones(())
    optimizer.state[param]["mask"] = torch.eye(3).to_sparse()
    optimizer.state["global_step"] = 5
    stepped(param, optimizer)
    found = optimizer.state_dict()["state"]
    assert found["global_step"] == 5 and {"my_scale", "mask"} < found[0].keys()


def test_parameters_that_negate_their_memory_are_refused():
    param = torch.nn.Parameter(torch._neg_view(torch.arange(4.0)))
    param.grad = torch.ones(4)
    with pytest.raises(ValueError, match="SGD: parameter 0 of group 0 is a view that negates what its memory "
                                         "holds, expected a plain tensor; make it one with resolve_neg"):
        optim.SGD([param], lr=0.1).step()


def test_clipping_of_nothing():
    param = torch.nn.Parameter(torch.zeros(0))
    param.grad = torch.zeros(0)
    torch.full((64,), 7.0)  # memory that is not 0
    assert optim.clip_grad_norm_([param], 1.0) == 0


@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_averages_of_any_decay_are_torchs(decay, device):
    for average, value in ((torch.tensor([1e8]), torch.tensor([1.0])), torch.randn(2, 10000)):
        average, value = average.to(device), value.to(device)
        expected = average.clone().lerp_(value, 1 - decay)
        optim.ema_update_([average], [value], decay)
        assert_close(average, expected, rtol=1e-6, atol=1e-7)
        assert decay or torch.equal(average, value)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_distributed_tensors_are_torchs(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    def tensor(value):
        return distribute_tensor(torch.full((4, 4), value), mesh, [Shard(0)])

    param = torch.nn.Parameter(tensor(1.0))
    param.grad = tensor(10.0)
    assert float(optim.clip_grad_norm_([param], 1.0)) == 40
    assert_close(param.grad.full_tensor(), torch.full((4, 4), 0.25))
    average = tensor(0.0)
    optim.ema_update_([average], [tensor(1.0)], 0.5)
    assert_close(average.full_tensor(), torch.full((4, 4), 0.5))


@pytest.mark.parametrize("options", [
    {}, {"state_dtype": torch.bfloat16},
    pytest.param({"state_dtype": "8bit"}, marks=pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
        reason="torch wants all keys that the states have, our scales among them"))], ids=str)
def test_flattened_checkpoints(options):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    models = [torch.nn.Linear(70, 70) for _ in range(2)]
    first, second = (optim.AdamW(model.parameters(), **options) for model in models)
    models[0](torch.randn(3, 70)).sum().backward()
    first.step()
    given = get_optimizer_state_dict(models[0], first, options=flat)
    set_optimizer_state_dict(models[1], second, given, options=flat)
    assert_close(second.state_dict()["state"], first.state_dict()["state"])
