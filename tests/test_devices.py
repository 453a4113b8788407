"""Several GPUs of one machine: whatever is current, the tensors' own one computes, and computes the same."""

import copy
import functools

import pytest
import torch
from torch import nn

import fusionrt as frt
from fusionrt import catalogue, optim, settling
from fusionrt.bench.case import BOTH, FORWARD, Case

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def on(device, tree):
    """Copies of the tensors of nested tuples there."""
    if isinstance(tree, tuple | list):
        return tuple(on(device, item) for item in tree)
    return tree.to(device) if isinstance(tree, torch.Tensor) else tree


def tensors(results):
    return [t for t in (results if isinstance(results, tuple | list) else (results,))
            if isinstance(t, torch.Tensor)]


def assert_same(found, expected, rtol=0.0):
    """On the second device and on the first; the same bits unless told."""
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        assert (a.device.index, b.device.index) == (1, 0)
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=rtol, atol=rtol, equal_nan=True)


ON_CPUS = {"cpu_fused_attention", "optimized_cpu_attention"}


@pytest.mark.parametrize("name", sorted(catalogue.OPS.keys() - ON_CPUS))
def test_every_op(name):
    case = Case(name, "float32", 1 << 14, "cuda:0", columns=128)
    there = copy.copy(case)
    there.device, there.inputs = "cuda:1", [on("cuda:1", args) for args in case.inputs]
    for direction in (FORWARD, BOTH)[:1 + case.differentiable]:
        results = []
        for one in (there, case):
            torch.manual_seed(5)
            if direction == BOTH:
                one.__dict__["_seeds"] = on(one.device, case._seeds)
            call, = one.calls(one.op, direction)
            results.append(call())
            assert torch.cuda.current_device() == 0
        assert_same(*results)


def test_calls_that_are_made_again(monkeypatch):
    """In machine code, which leaves a call from another device to Python."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    x, y = (torch.randn(64, 256, device="cuda:1", requires_grad=True) for _ in range(2))
    for current in (0, 1) * 4:
        with torch.cuda.device(current):
            out = frt.add_relu(x, y)
            grad, = torch.autograd.grad(out, x, y)
            kept = frt.gelu_dropout(x.detach(), 0.5)
        assert {t.device.index for t in (out, grad, kept)} == {1}
        torch.testing.assert_close(out, torch.relu(x + y), rtol=0, atol=0)
        torch.testing.assert_close(grad, y * (x + y > 0), rtol=0, atol=0)
        dropped = kept == 0
        assert 0.45 < dropped.float().mean() < 0.55
        torch.testing.assert_close(kept, torch.where(dropped, 0, 2 * nn.functional.gelu(x)))


def heads(device, **options):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, 256, 64, generator=generator).to(device, torch.bfloat16).requires_grad_()
            for _ in range(3)]


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (32, 0)}, {"softcap": 20.0}], ids=str)
def test_attention(options):
    results = []
    for device in ("cuda:1", "cuda:0"):
        q, k, v = heads(device)
        out = frt.attention(q, k, v, **options)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    assert_same(*results, rtol=1e-2)  # cuDNN sums in any order


def layers(device, *made):
    torch.manual_seed(0)
    return nn.Sequential(*(make() for make in made)).to(device)


@pytest.mark.parametrize("make", [optim.AdamW, functools.partial(optim.SGD, momentum=0.9)],
                         ids=["adamw", "sgd"])
def test_an_optimizer_of_parameters_on_both(make):
    def trained(devices):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(33, 65).to(d)) for d in devices]
        optimizer = make(params, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for p in params:
                p.grad = p.detach().sin()
            optimizer.step()
        assert [p.device.index for p in params] == [torch.device(d).index for d in devices]
        return [p.detach().cpu() for p in params]

    both, one = trained(["cuda:0", "cuda:1"] * 2), trained(["cuda:0"] * 4)
    assert all(torch.equal(a, b) for a, b in zip(both, one, strict=True))


def test_a_converted_model_on_the_other():
    model = layers("cuda:1", lambda: nn.Conv2d(3, 32, 3, bias=False), lambda: nn.BatchNorm2d(32), nn.ReLU,
                   lambda: nn.AdaptiveAvgPool2d(1), nn.Flatten, lambda: nn.Linear(32, 64), nn.GELU).eval()
    x = torch.randn(4, 3, 32, 32, device="cuda:1")
    fast = frt.auto_convert_model(model, example_inputs=(x,))
    with torch.no_grad():
        for _ in range(4):  # compiles, records a graph, replays it
            found = fast(x)
        assert found.device.index == 1 and torch.cuda.current_device() == 0
        torch.testing.assert_close(found, model(x), rtol=1e-2, atol=1e-2)


# -- a process for each ----------------------------------------------------------------------------

def train(module, x, target, steps=3):
    optimizer = optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        frt.cross_entropy(module(x), target).backward()
        optimizer.step()


def net(device):
    torch.manual_seed(0)
    return nn.Sequential(frt.nn.FusedMLP(64, 256, activation="gelu"), frt.nn.FusedRMSNorm(64),
                         nn.Linear(64, 10)).to(device)


def data():
    torch.manual_seed(1)
    return torch.randn(32, 64), torch.randint(10, (32,))


def worker(rank, folder):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    try:
        module = net(f"cuda:{rank}")
        wrapped = nn.parallel.DistributedDataParallel(module, device_ids=[rank])
        x, target = (t.chunk(2)[rank].to(f"cuda:{rank}") for t in data())
        train(wrapped, x, target)
        torch.save({k: v.cpu() for k, v in module.state_dict().items()}, f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


def test_ddp_with_a_process_on_each(tmp_path):
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    alone = net("cuda:0")
    train(alone, *on("cuda:0", data()))
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for key, value in alone.state_dict().items():
        assert torch.equal(both[0][key], both[1][key])
        torch.testing.assert_close(both[0][key], value.cpu(), rtol=1e-3, atol=1e-4)
