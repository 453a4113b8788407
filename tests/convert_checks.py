"""What tests of rewritten graphs compare: a function as it is, and compiled with the backend."""

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.testing import assert_close

from fusionrt.convert.capture import Found, Options, backend


def leaf(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)


def randomised(model: nn.Module) -> nn.Module:
    """Statistics and weights of norms that are none of 0 and 1."""
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, _BatchNorm):
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 1.5)
            if isinstance(m, _BatchNorm | nn.LayerNorm | nn.GroupNorm):
                m.weight.uniform_(0.5, 1.5)
                m.bias.normal_()
    return model


def compiled(function: Any, **options: Any) -> tuple[Any, list[Found]]:
    """The function compiled, and what was found in its graphs, as they come."""
    torch._dynamo.reset()
    found: list[Found] = []
    chosen = Options(on_graph=found.append, **options)
    return torch.compile(function, backend=lambda gm, inputs: backend(gm, inputs, options=chosen)), found


def compiled_apart(model: Any, backend: Any = backend) -> Any:
    """Without forgetting what was compiled before; all are of one code, and so share what is captured."""
    return torch.compile(lambda x: model(x), backend=backend)


def graph_of(function: Any, *args: Any, grad: bool = False) -> Any:
    """The rewritten graph."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    run = torch.compile(function, backend=lambda gm, inputs: graphs.append(gm) or backend(gm, inputs))
    with torch.set_grad_enabled(grad):
        run(*args)
    return graphs[0]


def called(function: Any, *args: Any, grad: bool = False) -> list[str]:
    """Names of the calls in it."""
    nodes = graph_of(function, *args, grad=grad).graph.nodes
    return [getattr(n.target, "__name__", n.target) for n in nodes if n.op.startswith("call")]


def of_pass(name: str, **values: Any) -> list[tuple[Any, str, Any]]:
    """Constants of a pass, each for the `setattr` of a monkeypatch."""
    return [(sys.modules[f"fusionrt.convert.passes.{name}"], key, value) for key, value in values.items()]


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, tuple | list) else []


def plain(value: Any) -> Any:
    """The value with its tensors' shapes in their places."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def assert_as_accurate(function: Any, *args: torch.Tensor) -> None:
    """Results and gradients are at most twice as far from a float64 run as the function's own are."""
    run, _ = compiled(function)
    own, ours = outcome(function, copies(args)), outcome(run, copies(args))
    with without_autocast():
        exact = outcome(function, [a.detach().double().requires_grad_(a.requires_grad) for a in args])
    for a, b, reference in zip(tensors(own), tensors(ours), tensors(exact), strict=True):
        limit = (a - reference).abs().max() * 2 + 1e-6 * reference.abs().max()
        assert (b - reference).abs().max() <= limit


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Also for functions that ask for it."""
    enter = torch.autocast.__enter__
    torch.autocast.__enter__ = lambda self: self
    leave, torch.autocast.__exit__ = torch.autocast.__exit__, lambda self, *_: None
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave


def copies(args: Any) -> list[Any]:
    """Leaves of their own, equal in all that a call sees."""
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a
            for a in args]


def outcome(function: Any, args: Any, seed: int = 0) -> tuple[Any, list[Any], list[Any]]:
    """Results, arguments afterwards, gradients of the arguments."""
    torch.manual_seed(seed)
    result = function(*args)
    recorded = [t for t in tensors(result) if t.requires_grad]
    if recorded:
        torch.autograd.backward(recorded, [
            torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)
            for t in recorded])
    given = [a for a in args if isinstance(a, torch.Tensor)]
    return result, [a.detach() for a in given], [a.grad for a in given]


def check(function: Any, *args: Any, calls: int = 1, options: Any = None, **tolerances: Any) -> Counter[str]:
    """The compiled function does what the function does: results, their dtypes, strides and whether they are
    recorded, gradients, what is written to arguments. Returns what was counted in all graphs."""
    run, found = compiled(function, **(options or {}))
    for _ in range(calls):
        expected, ours = outcome(function, copies(args)), outcome(run, copies(args))
        assert_close(tensors(ours), tensors(expected), **tolerances)
        assert plain(ours) == plain(expected)
        for a, b in zip(tensors(ours[0]), tensors(expected[0]), strict=True):
            assert (a.dtype, a.stride(), a.requires_grad) == (b.dtype, b.stride(), b.requires_grad)
    assert found
    return sum((Counter(f.counts) for f in found), Counter())


def check_module(model: nn.Module, *inputs: Any, grad: bool = True, options: Any = None,
                 **tolerances: Any) -> Counter[str]:
    """The same of a module: its results, gradients of its parameters and inputs, its buffers afterwards."""
    model.zero_grad()
    twin = copy.deepcopy(model)
    run, found = compiled(twin, **(options or {}))
    with torch.set_grad_enabled(grad):
        expected, ours = outcome(model, copies(inputs)), outcome(run, copies(inputs))
    assert_close(tensors(ours), tensors(expected), **tolerances)
    for (name, a), (_, b) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}", **tolerances)
    assert_close(dict(twin.named_buffers()), dict(model.named_buffers()), **tolerances)
    return sum((Counter(f.counts) for f in found), Counter())
