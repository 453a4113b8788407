"""The check of a module against torch's formula, on the module's own parameters."""

import copy

import torch


def outcome(function, module, inputs, grad_output=None):
    """function(*inputs), one tensor, with the gradients of floating inputs and of the parameters that have
    one."""
    inputs = [t.detach().requires_grad_() if t.is_floating_point() else t for t in inputs]
    out = function(*inputs)
    leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
    grad_output = torch.ones_like(out) if grad_output is None else grad_output.to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_output)]


def check_module(module, reference, *inputs):
    """Result and gradients of module(*inputs) are as accurate as those of torch's formula.

    That is reference(module, *inputs). Against the same in float64 the error is at most twice its worst one,
    and 16 ulp of the largest value (one in 16-bit dtypes; 64 in float64, where nothing is more exact).
    """
    def wide(t):
        return t.double() if t.is_floating_point() else t

    with torch.no_grad():
        shape = reference(module, *inputs).shape
    numbers = torch.Generator().manual_seed(7)
    grad_output = torch.randn(shape, generator=numbers, dtype=torch.float64)
    exact_module = copy.deepcopy(module).double()
    ours = outcome(module, module, inputs, grad_output)
    theirs = outcome(lambda *args: reference(module, *args), module, inputs, grad_output)
    exact = outcome(lambda *args: reference(exact_module, *args), exact_module, [wide(t) for t in inputs],
                    grad_output)
    names = ["result", *(f"input {i}" for i, t in enumerate(inputs) if t.is_floating_point()),
             *(name for name, p in module.named_parameters() if p.requires_grad)]
    for name, a, b, truth in zip(names, ours, theirs, exact, strict=True):
        assert a.dtype == b.dtype, (name, a.dtype, b.dtype)
        assert a.shape == truth.shape, (name, a.shape, truth.shape)
        error, torchs = ((t.double() - truth).abs().max().item() for t in (a, b))
        ulps = {torch.float64: 64, torch.float32: 16}.get(a.dtype, 1)
        allowed = 2 * torchs + ulps * torch.finfo(a.dtype).eps * truth.abs().max().item()
        assert error <= allowed, f"{name}: error {error:.3g}, torch's {torchs:.3g}, allowed {allowed:.3g}"


def assert_equal_state(ours, theirs):
    """Keys, shapes and dtypes, in the same order."""
    state, other = ours.state_dict(), theirs.state_dict()
    assert list(state) == list(other)
    assert [(t.shape, t.dtype) for t in state.values()] == [(t.shape, t.dtype) for t in other.values()]


def assert_loads_both_ways(ours, theirs, *inputs):
    """Weights of one make the other compute the same, in eval mode."""
    ours.eval(), theirs.eval()
    assert_equal_state(ours, theirs)
    for give, take in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for t in give.state_dict().values():
                if t.is_floating_point():
                    t.uniform_(0.5, 1.5).mul_(torch.randn_like(t).sign() if t.dim() > 1 else 1)
        take.load_state_dict(give.state_dict())
        with torch.no_grad():
            found, expected = first(ours(*inputs)), first(theirs(*inputs))
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def first(out):
    return out[0] if isinstance(out, tuple) else out
