"""How far a result may be off, and the check of an op against its reference.

For every op's tests, pointwise or structured:

    check(frt.softmax, (x,), {"dim": 1})     # the result and every gradient, as accurate as torch's

and where more has to be looked at: `evaluate` gives a function's result and gradients, `accumulated`
what a summed gradient is made of, `assert_as_accurate` compares with the truth.
"""

import functools
import math
import sys
import threading

import pytest
import torch

import fusionrt
from fusionrt.sites import Sites

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
F16, BF16, F32, F64 = DTYPES
needs_nvrtc = pytest.mark.skipif(not fusionrt.EXTENSION_LOADED, reason="no CuPy or no NVRTC")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def forget(monkeypatch, module):
    """As if the ops of this module had not chosen yet what to do for any kind of call, and as if what they
    choose now were not theirs."""
    monkeypatch.setattr(module, "sites", Sites())
    for op in vars(module).values():
        if "_frt_sites" in getattr(op, "__globals__", ()):
            monkeypatch.setitem(op.__globals__, "_frt_local", threading.local())
            monkeypatch.setitem(op.__globals__, "_frt_remember", lambda *_: None)


# --- comparisons ----------------------------------------------------------------------------------


def ulp(exact, dtype):
    """The spacing of dtype's numbers at |exact|, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(info.tiny, info.max))[1] - 1
    return torch.ldexp(torch.full_like(exact, info.eps, dtype=torch.float64), exponent)


def assert_as_accurate(ours, torchs, exact, extra=0.0, near=None):
    """|ours - exact| is at most 2 ulp and twice torch's worst error nearby.

    "Nearby": among the 64 neighbours of an element in the order of `near` (for a function of one
    variable, that variable), so that neither a small result hides behind the error of a large one,
    nor a lucky one of torch's counts as its accuracy; or, without `near`, anywhere.
    `extra`, a number or one for each element, is allowed on top.
    Where torch or the exact result leaves the dtype's range, ours equals one of them.
    In float64 `exact` is torch's own result: what is allowed is 16 ulp and 16 ulp of 1.
    """
    assert ours.dtype == torchs.dtype
    assert ours.shape == torchs.shape == exact.shape
    dtype = ours.dtype
    extra, near = (
        torch.as_tensor(v).expand(exact.shape) for v in (extra, 0.0 if near is None else near)
    )
    rounded = exact.to(dtype).double().cpu().flatten()
    ours, torchs, exact, extra, near = (
        t.detach().double().cpu().flatten() for t in (ours, torchs, exact, extra, near)
    )
    inside = torchs.isfinite() & rounded.isfinite()
    found = ours[~inside]
    same = [(found == o) | (found.isnan() & o.isnan()) for o in (torchs[~inside], rounded[~inside])]
    assert (same[0] | same[1]).all()
    ours, torchs, exact, extra, near = (t[inside] for t in (ours, torchs, exact, extra, near))
    if not exact.numel():
        return
    if dtype == torch.float64:
        allowed = 16 * (ulp(exact, dtype) + torch.finfo(dtype).eps) + extra
    else:
        order = near.argsort()
        theirs = (torchs - exact).abs()
        if near.min() == near.max():
            worst = theirs.max()
        else:
            worst = torch.empty_like(theirs)
            worst[order] = torch.nn.functional.max_pool1d(theirs[order][None], 65, 1, 32)[0]
        allowed = 2 * worst + 2 * ulp(exact, dtype) + extra
    error = (ours - exact).abs()
    error[error.isnan()] = math.inf
    at = (error / allowed).argmax()
    assert error[at] <= allowed[at], (
        f"{ours[at]:.9g} against {exact[at]:.9g} (torch {torchs[at]:.9g}): error {error[at]:.3g}, "
        f"allowed {allowed[at]:.3g}; near {near[at]:.9g}"
    )


def assert_same_bits(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    a, b = a.detach().contiguous(), b.detach().contiguous()
    assert torch.equal(
        a.view(torch.uint8) if a.dim() else a.reshape(1).view(torch.uint8),
        b.view(torch.uint8) if b.dim() else b.reshape(1).view(torch.uint8),
    )


# --- functions and their gradients ----------------------------------------------------------------


def make(shape, dtype, device):
    """Normal numbers of standard deviation 2, or all the numbers of int8."""
    if not dtype.is_floating_point:
        return torch.randint(-128, 128, shape, device=device).to(dtype)
    return (torch.randn(shape, device=device, dtype=F64) * 2).to(dtype)


# Of a tensor of shape (6, 10, 14): rows that do not lie in memory one after the other.
VIEWS = {
    "transposed": lambda x: x.transpose(1, 2),
    "every other": lambda x: x[..., ::2],
    "from the second": lambda x: x[:, :, 1:],
    "rows apart": lambda x: x[:, ::3],
    "permuted": lambda x: x.permute(2, 0, 1),
    "broadcast rows": lambda x: x[:, :1].expand(6, 9, 14),
    "broadcast columns": lambda x: x[..., :1].expand(6, 10, 8),
    "one row": lambda x: x[0, 0],
}


def making(device, sizes):
    """For an op's example: float32 operands that want gradients, and others; `sizes` for some of its own."""
    def make(*shape, dtype=torch.float32, high=None):
        shape = tuple(sizes.get(n, n) for n in shape)
        if dtype.is_floating_point:
            return (torch.rand(shape, device=device) + 0.1).to(dtype).requires_grad_()
        if dtype == torch.bool:
            return torch.rand(shape, device=device) < 0.5
        few = min(sizes.values(), default=2)
        return torch.randint(0, min(high or few, few), shape, device=device).to(dtype)

    return make


def is_floating(value):
    return torch.is_tensor(value) and value.is_floating_point()


def wide(value):
    """A floating tensor in float64, anything else as it is."""
    return value.double() if is_floating(value) else value


def evaluate(function, args, kwargs=None, grad_output=None):
    """function(*args, **kwargs), one tensor, and its gradients: of the floating tensors in `args`.

    Tensors in `kwargs` are constants. `grad_output` is ones unless given, and takes the result's
    dtype. A result that has no gradient comes with [].
    """
    args = [
        a.detach().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in args
    ]
    out = function(*args, **(kwargs or {}))
    if not out.requires_grad:
        return out, []
    if grad_output is None:
        grad_output = torch.ones_like(out)
    wanted = [a for a in args if is_floating(a)]
    return out.detach(), torch.autograd.grad(out, wanted, grad_output.to(out.dtype))


def derivatives(function, args):
    """The results, and first and second derivatives for random incoming gradients.

    All second derivatives at once: gradgradcheck takes them in every combination, and each combination
    is a kernel to be compiled.
    """
    args = [a.detach().requires_grad_() if is_floating(a) else a for a in args]
    wanted = [a for a in args if is_floating(a)]
    outs = function(*args)
    outs = outs if isinstance(outs, tuple) else (outs,)
    numbers = torch.Generator().manual_seed(1)

    def random(like):
        return torch.randn(like.shape, dtype=like.dtype, generator=numbers).to(like.device)

    incoming = [random(out).requires_grad_() for out in outs]
    first = torch.autograd.grad(outs, wanted, incoming, create_graph=True)
    total = sum((f * random(f)).sum() for f in first)
    second = torch.autograd.grad(total, [*wanted, *incoming], allow_unused=True, materialize_grads=True)
    return [*outs, *first, *second]


def accumulated(function, args, kwargs, grad_output):
    """Sum of the magnitudes of what is added up in the gradient of each floating tensor in `args`.

    `function` is the formula for operands that were all expanded to grad_output's shape. For the
    weight and bias of a norm that is `normalized(x) * weight + bias`, not torch's layer_norm, which
    takes no weight of full shape.
    """
    full = [a.expand(grad_output.shape) if torch.is_tensor(a) else a for a in args]
    grads = evaluate(function, full, kwargs, grad_output)[1]
    operands = [a for a in args if is_floating(a)]
    return [g.abs().sum_to_size(a.shape) for g, a in zip(grads, operands, strict=True)]


def lost(magnitude, dtype):
    """What a sum may lose whose terms are computed in acc_t: it does not shrink when they cancel."""
    return magnitude * (2.0**-50 if dtype == F64 else 2.0**-22)


def check(function, args, kwargs=None, *, reference=None, exact=None, magnitudes=None, extra=0.0,
          again=None):
    """Result and gradients are as accurate as torch's own; the inputs are as they were.

    Returns both, as `evaluate` does, which also says what is differentiated.

    reference: the unfused torch formula; function.reference unless given.
    exact: the truth when its arguments are float64; the reference unless given.
    magnitudes: what is added up in each gradient, a function of the float64 args, kwargs and
        grad_output; `accumulated` of the reference unless given. Asked only when an operand has
        fewer elements than the result, and used for those.
    extra: allowed for the result besides, as for a sum `lost(x.abs().sum(dim), x.dtype)`.
    again: makes other arguments of the same kind, for where these are too few to judge by.
    """
    kwargs, reference = kwargs or {}, reference or function.reference
    exact, magnitudes = exact or reference, magnitudes or functools.partial(accumulated, reference)
    before = [torch.clone(a) if torch.is_tensor(a) else a for a in args]

    def compared(args):
        return comparisons(function, args, kwargs, reference, exact, magnitudes, extra)

    (out, grads), first = compared(args)
    for a, b in zip(args, before, strict=True):
        assert a is b or torch.equal(a.nan_to_num(), b.nan_to_num())
    try:
        for each in first:
            assert_as_accurate(*each)
    except AssertionError:
        if out.numel() > FEW:
            raise
        # Torch's worst error is one of few here, which may be a lucky one: judge more of them together.
        draws = [first, *(compared(again() if again else args)[1] for _ in range(64))]
        for each in zip(*draws, strict=True):
            assert_as_accurate(*(None if part[0] is None else torch.cat(part)
                                 for part in zip(*each, strict=True)))
    return out, grads


def check_in_norm(function, args, kwargs=None, reference=None, grad_output=None):
    """For sums of many products, whose single elements may have any relative error: as vectors, and at their
    worst, errors of the result and of every gradient are at most twice torch's. In float64 torch's own
    result is the truth. Returns ours."""
    kwargs, reference = kwargs or {}, reference or function.reference
    wide_args, wide_kwargs = [wide(a) for a in args], {k: wide(v) for k, v in kwargs.items()}
    shape = reference(*wide_args, **wide_kwargs).shape

    def drawn(grad_output=None):
        if grad_output is None:
            grad_output = torch.randn(shape, dtype=F64, device=args[0].device)
        made = [evaluate(f, a, k, grad_output.to(args[0].dtype)) for f, a, k in (
            (function, args, kwargs), (reference, args, kwargs), (reference, wide_args, wide_kwargs))]
        return made[0], list(zip(*((out, *grads) for out, grads in made), strict=True))

    found, triples = drawn(grad_output)
    for k, (ours, theirs, true) in enumerate(triples):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape == true.shape
        if not is_near_in_norm(ours, theirs, true):
            # Few numbers of torch's may be lucky ones: judge more of them together.
            assert grad_output is None and ours.numel() <= FEW
            draws = [triples[k], *(drawn()[1][k] for _ in range(64))]
            together = (torch.cat([t.flatten() for t in part]) for part in zip(*draws, strict=True))
            assert is_near_in_norm(*together)
    return found


def is_near_in_norm(ours, theirs, true):
    if not true.numel():
        return True
    eps, near = torch.finfo(ours.dtype).eps, True
    for size, slack in ((torch.linalg.norm, eps / 8), (lambda t: t.abs().max(), eps)):
        least = 64 * eps if ours.dtype == F64 else slack
        allowed = 2 * size((theirs.double() - true).flatten()) + least * size(true.flatten())
        near = near and bool(size((ours.double() - true).flatten()) <= allowed)
    return near


FEW = 4096  # elements


def comparisons(function, args, kwargs, reference, exact, magnitudes, extra):
    """Result and gradients for one random grad_output; and of each, flat, what `assert_as_accurate` takes:
    ours, torch's, the truth, what is allowed besides, and what is near what."""
    wide_args, wide_kwargs = [wide(a) for a in args], {k: wide(v) for k, v in kwargs.items()}
    shape = reference(*wide_args, **wide_kwargs).shape
    grad_output = torch.randn(shape, dtype=F64, device=args[0].device)
    out, grads = evaluate(function, args, kwargs, grad_output)
    grad_output = grad_output.to(out.dtype)
    theirs, their_grads = evaluate(reference, args, kwargs, grad_output)
    true, true_grads = evaluate(exact, wide_args, wide_kwargs, grad_output.double())
    assert len(grads) == len(their_grads) == len(true_grads)
    summed = [grad.numel() < out.numel() for grad in grads]
    sizes = magnitudes(wide_args, wide_kwargs, grad_output.double()) if any(summed) else [0.0] * len(grads)
    made = [(out, theirs, true, extra, true)]
    for *triple, size, is_sum in zip(grads, their_grads, true_grads, sizes, summed, strict=True):
        made.append((*triple, lost(size, out.dtype) if is_sum else 0.0, None))
    for ours, torchs, truth, _, _ in made:
        assert ours.shape == torchs.shape == truth.shape
    return (out, grads), [tuple(flat(part, each[0]) for part in each) for each in made]


def flat(part, like):
    """A tensor or number as a vector of like's number of elements."""
    if part is None:
        return None
    return torch.as_tensor(part, device=like.device).detach().expand(like.shape).flatten()


def captured(step):
    """A CUDA graph of step(), called once before on another stream, and what it returned in there."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def frames(function):
    """The names of the Python functions that a call of it enters."""
    entered = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: event == "call" and entered.append(frame.f_code.co_name))
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered
