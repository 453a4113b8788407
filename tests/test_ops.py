"""Every op against its reference: values, gradients, layouts, special values, randomness."""

import inspect
import itertools
import math

import pytest
import torch
from conftest import DTYPES, assert_as_accurate, assert_same_bits, dtypes
from torch.utils.checkpoint import checkpoint

import fusionrt as frt
import fusionrt.ops  # registers them
from fusionrt.catalogue import COLUMNS, OPS, ROWS
from fusionrt.op import STORAGE

F16, BF16, F32, F64 = DTYPES
ALL = sorted(OPS)
RANDOM = [n for n in ALL if "training" in inspect.signature(OPS[n]).parameters]
DIFFERENTIABLE = [n for n in ALL if n not in ("quantize_int8", "dequantize_int8")]
UNARY = [n for n in DIFFERENTIABLE if len(OPS[n].example(lambda *shape, **_: shape)) == 1]
SHAPES = [(33, 17), (0,), (4, 0, 3), (17,), (1023,), (5, 7, 9), (3, 1, 11), (31, 333)]
# Arguments besides those of the op's example: op, what to append, keyword arguments.
VARIANTS = [
    ("leaky_relu", (0.2,), {}),
    ("elu", (1.5,), {}),
    ("softplus", (2.0, 3.0), {}),
    *((name, (), {"approximate": "tanh"}) for name in ("bias_gelu", "geglu", "gelu_dropout")),
    ("prelu_bias", (), {"bias_first": False}),
]


def prelu(x, alpha, bias, *, bias_first=True):
    """torch's takes no alpha of full shape."""
    y = x + bias if bias_first else x
    y = torch.where(y > 0, y, alpha * y)
    return y if bias_first else y + bias


def exact_gelu(x):
    """torch's own cancels in the tail: 1 + erf(x)."""
    return x * torch.erfc(x * -math.sqrt(0.5)) * 0.5


def exact_sigmoid(x):
    """torch's own is exact, its derivative is not: s (1 - s)."""
    return 1 / (1 + torch.exp(-x.clamp(min=-700)))


def exact_gelu_tanh(x):
    return x * exact_sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


# In float64, where the reference is not exact enough to be compared with.
EXACT = {
    "gelu": exact_gelu,
    "gelu_tanh": exact_gelu_tanh,
    "bias_gelu": lambda x, bias: exact_gelu(x + bias),
    "geglu": lambda x, gate: exact_gelu(x) * gate,
    "gelu_dropout": lambda x, training: exact_gelu(x),
    "sigmoid": exact_sigmoid,
    "add_sigmoid": lambda a, b: exact_sigmoid(a + b),
    "scale_bias_sigmoid": lambda x, w, b: exact_sigmoid(x * w + b),
    # torch's own have float32's 1/6, on CUDA in the results as well
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardswish": lambda x: x * ((x + 3).clamp(0, 6) / 6),
}


def exact(name, kwargs):
    return EXACT[name] if name in EXACT and "approximate" not in kwargs else OPS[name].reference


def make(shape, dtype, device):
    if not dtype.is_floating_point:
        return torch.randint(-128, 128, shape, device=device).to(dtype)
    return (torch.randn(shape, device=device, dtype=F64) * 2).to(dtype)


def example(name, shape, dtype, device):
    """The op's typical arguments, in another size."""

    def sized(*full, dtype=dtype):
        assert full in ((ROWS, COLUMNS), (COLUMNS,), ())
        return make({2: shape, 1: shape[-1:], 0: ()}[len(full)], dtype, device)

    args = list(OPS[name].example(sized))
    if name == "prelu_bias" and len(shape) != 2:
        args[1] = make((), dtype, device)
    return args, ({"training": False} if name in RANDOM else {})


def evaluate(function, args, kwargs, grad_output=None):
    """The result and the gradients of all floating tensors, [] if it has none."""
    args = [
        a.detach().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in args
    ]
    out = function(*args, **kwargs)
    if not out.requires_grad:
        return out, []
    wanted = [a for a in args if torch.is_tensor(a) and a.requires_grad]
    if grad_output is None:
        grad_output = torch.ones_like(out)
    return out.detach(), torch.autograd.grad(out, wanted, grad_output.to(out.dtype))


def check(name, args, kwargs=None):
    """Result and gradients are as accurate as torch's own; the inputs are as they were."""
    op, kwargs, before = (
        OPS[name],
        kwargs or {},
        [torch.clone(a) if torch.is_tensor(a) else a for a in args],
    )
    wide = [a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    grad_output = torch.randn(op.reference(*wide, **kwargs).shape, dtype=F64, device=args[0].device)
    out, grads = evaluate(op, args, kwargs, grad_output.to(op.reference(*args, **kwargs).dtype))
    grad_output = grad_output.to(out.dtype)
    theirs, their_grads = evaluate(op.reference, args, kwargs, grad_output)
    true, true_grads = evaluate(exact(name, kwargs), wide, kwargs, grad_output.double())
    assert_as_accurate(out, theirs, true, near=true)
    assert len(grads) == len(their_grads) == len(true_grads)
    tensors = [a for a in args if torch.is_tensor(a) and a.is_floating_point()]
    sizes = (
        accumulated(name, wide, kwargs, grad_output.double())
        if grads and any(t.shape != out.shape for t in tensors)
        else [None] * len(grads)
    )
    for t, grad, their, true, size in zip(
        tensors, grads, their_grads, true_grads, sizes, strict=True
    ):
        # A sum's terms are computed in acc_t: what they lose does not shrink when they cancel.
        extra = 0.0 if t.shape == out.shape else size * (2.0**-50 if out.dtype == F64 else 2.0**-22)
        assert_as_accurate(grad, their, true, extra)
    for a, b in zip(args, before, strict=True):
        assert a is b or torch.equal(a.nan_to_num(), b.nan_to_num())
    return out, grads


def accumulated(name, wide, kwargs, grad_output):
    """Sum of the magnitudes of what is added up in each gradient."""
    over = list(wide)
    if name == "prelu_bias" and wide[1].dim() == 1:
        over[1] = wide[1].reshape(-1, *[1] * (wide[0].dim() - 2))
    full = [a.expand(grad_output.shape) if torch.is_tensor(a) else a for a in over]
    function = prelu if name == "prelu_bias" else OPS[name].reference
    return [
        g.abs().sum_to_size(o.shape).reshape(a.shape)
        for g, o, a in zip(
            evaluate(function, full, kwargs, grad_output)[1],
            *(
                [t for t in ts if torch.is_tensor(t) and t.is_floating_point()]
                for ts in (over, wide)
            ),
            strict=True,
        )
    ]


# --- accuracy -------------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("name", [n for n in ALL if n != "quantize_int8"])
def test_accuracy(name, dtype, device):
    check(name, *example(name, (33, 17), dtype, device))
    check(name, *example(name, (1023,), dtype, device))


@pytest.mark.parametrize("name", UNARY)
@dtypes
def test_accuracy_everywhere(name, dtype, device):
    """Tails and roots of a function and its derivative, against torch's accuracy just there."""
    x = torch.cat(
        [torch.linspace(a, -a, 5001, dtype=F64, device=device) for a in (-3, -12, -100)]
    ).to(dtype)
    kwargs = {"training": False} if name in RANDOM else {}
    out, (grad,) = evaluate(OPS[name], (x,), kwargs)
    theirs, (their_grad,) = evaluate(OPS[name].reference, (x,), kwargs)
    true, (true_grad,) = evaluate(exact(name, kwargs), (x.double(),), kwargs)
    assert_as_accurate(out, theirs, true, near=x)
    if name.startswith("hard"):  # in float64 the kinks of the reference are not torch's
        grad = torch.where(x.abs() == 3, their_grad, grad)
        true_grad = torch.where(x.abs() == 3, their_grad.double(), true_grad)
    assert_as_accurate(grad, their_grad, true_grad, near=x)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("name", [n for n in ALL if "quantize" not in n])
def test_single_elements(name, shape, device):
    """Many calls: by a single element nobody's accuracy can be judged."""
    drawn = [example(name, shape, F32, device) for _ in range(65)]
    kwargs = drawn[0][1]

    def results(function, convert=lambda a: a):
        return torch.stack([function(*map(convert, args), **kwargs) for args, _ in drawn])

    def wide(a):
        return a.double() if torch.is_tensor(a) and a.is_floating_point() else a

    def gradients(function, convert=lambda a: a):
        found = [evaluate(function, list(map(convert, args)), kwargs)[1] for args, _ in drawn]
        return [torch.stack(grads) for grads in zip(*found, strict=True)]

    op, true = OPS[name], results(exact(name, kwargs), wide)
    assert_as_accurate(results(op), results(op.reference), true, near=true)
    triples = (gradients(op), gradients(op.reference), gradients(exact(name, kwargs), wide))
    for grad, their_grad, true_grad in zip(*triples, strict=True):
        assert_as_accurate(grad, their_grad, true_grad)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [n for n in ALL if n != "quantize_int8"])
def test_shapes(name, shape, device):
    args, kwargs = example(name, shape, F32, device)
    out, _ = check(name, args, kwargs)
    assert out.is_contiguous()


@pytest.mark.parametrize(("name", "more", "kwargs"), VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_options(name, more, kwargs, dtype, device):
    args, fixed = example(name, (33, 17), dtype, device)
    check(name, [*args, *more], {**fixed, **kwargs})


@pytest.mark.parametrize("name", ["leaky_relu", "elu"])
def test_tensor_parameters(name, device):
    """What is a number in torch may be a tensor: per channel, with a gradient."""
    x, slope = make((33, 17), F64, device), make((17,), F64, device)
    out, grads = evaluate(OPS[name], (x, slope), {}, torch.ones(33, 17, device=device))
    columns = [evaluate(OPS[name].reference, (x[:, j], float(slope[j])), {}) for j in range(17)]
    torch.testing.assert_close(out, torch.stack([c[0] for c in columns], 1))
    torch.testing.assert_close(grads[0], torch.stack([c[1][0] for c in columns], 1))
    negative = torch.where(x > 0, 0, x if name == "leaky_relu" else x.expm1()).sum(0)
    torch.testing.assert_close(grads[1], negative)


def test_large_sums(device):
    """Gradients of broadcast operands that take several blocks or tasks."""
    for shape, other in [
        ((1031, 257), (257,)),
        ((257, 1031), (257, 1)),
        ((40_001,), ()),
        ((7, 333, 65), (333, 1)),
        ((300_000, 3), (3,)),
        ((3, 100_003), (3, 1)),
    ]:
        for dtype in (F32, BF16):
            x, bias = make(shape, dtype, device), make(other, dtype, device)
            check("add_sigmoid", (x, bias))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("broadcast", [False, True])
def test_more_elements_than_32_bits_count(broadcast):
    rows, columns = 2**21 + 3, 1031
    x = torch.randn(rows, columns, dtype=BF16, device="cuda").requires_grad_()
    b = torch.randn((columns,) if broadcast else (rows, columns), dtype=BF16, device="cuda")
    assert x.numel() > 2**31
    b.requires_grad_()
    out = frt.add_relu(x, b)
    grads = torch.autograd.grad(out, (x, b), torch.ones_like(out))
    expected_bias = torch.zeros(columns, dtype=F64, device="cuda")
    with torch.no_grad():
        for part in torch.arange(rows, device="cuda").split(2**17):
            part = slice(int(part[0]), int(part[-1]) + 1)
            truth = torch.relu(x[part].float() + (b if broadcast else b[part]).float()).to(BF16)
            assert torch.equal(out[part], truth)
            assert torch.equal(grads[0][part], (truth > 0).to(BF16))
            expected_bias += (truth > 0).sum(0)
            if not broadcast:
                assert torch.equal(grads[1][part], (truth > 0).to(BF16))
    if broadcast:
        torch.testing.assert_close(grads[1].double(), expected_bias, rtol=2**-8, atol=0)


# --- layouts and broadcasting ---------------------------------------------------------------------

LAYOUTS = {
    "unaligned": lambda new: new(33 * 17 + 1)[1:].view(33, 17),
    "odd rows, unaligned": lambda new: new(33 * 17 + 3)[3:].view(33, 17),
    "transposed": lambda new: new(17, 33).t(),
    "every other column": lambda new: new(33, 34)[:, ::2],
    "part of the columns": lambda new: new(33, 40)[:, 3:20],
    "every other row": lambda new: new(66, 17)[::2],
    "expanded rows": lambda new: new(1, 17).expand(33, 17),
    "expanded columns": lambda new: new(33, 1).expand(33, 17),
    "expanded scalar": lambda new: new().expand(33, 17),
    "permuted": lambda new: new(5, 7, 9).permute(1, 2, 0),
    "permuted and strided": lambda new: new(9, 14, 5).permute(1, 2, 0)[::2, :, 1:],
    "channels_last": lambda new: new(2, 6, 4, 5).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda new: new(2, 3, 4, 2, 5).contiguous(
        memory_format=torch.channels_last_3d
    ),
    "overlapping": lambda new: new(49).as_strided((33, 17), (1, 1)),
}


def strides(tensor):
    """Of the dimensions that have an extent: others have any stride."""
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_layouts(layout, dtype, device):
    def new(*shape):
        return make(shape, dtype, device)

    x = LAYOUTS[layout](new)
    out, _ = check("gelu", (x,))
    if "overlapping" not in layout:
        assert strides(out) == strides(torch.relu(x)) or 0 in x.stride()
    contiguous = new(*x.shape)
    out, grads = check("add_relu", (x, contiguous))
    if x.is_contiguous(memory_format=torch.channels_last) or layout == "transposed":
        assert strides(out) == strides(x) == strides(grads[0])
    check("add_relu", (contiguous, x))
    check("add_sigmoid", (x, LAYOUTS[layout](new)))
    assert out.shape == x.shape


def test_channels_last_stays(device):
    x = make((2, 6, 4, 5), BF16, device).contiguous(memory_format=torch.channels_last)
    channel, image = make((6, 1, 1), BF16, device), make((2, 6, 4, 5), BF16, device)
    for args in [(x, channel), (channel, x), (x, image), (x, x), (x, make((), BF16, device))]:
        out, grads = check("bias_gelu", args)
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert [g.shape for g in grads] == [a.shape for a in args]


BROADCASTS = [
    ((5, 7, 9), (9,)),
    ((2, 3, 4, 5), (3, 1, 1)),
    ((33, 17), ()),
    ((), (33, 17)),
    ((9,), (5, 7, 9)),
    ((33, 1), (1, 17)),
    ((1, 17), (33, 1)),
    ((33, 17), (1, 17)),
    ((4, 5, 6), (1, 5, 1)),
    ((4, 1, 6), (1, 5, 1)),
    ((5, 1, 9), (1, 7, 1)),
    ((2, 3, 1, 5), (3, 4, 1)),
    ((1,), (33, 17)),
    ((3, 1, 1), (2, 3, 4, 5)),
    ((16, 32), (32,)),
    ((16, 32), (16, 1)),
    ((0, 3), (3,)),
    ((3, 0), (3, 1)),
    ((1, 1), ()),
    ((6, 1, 4, 1, 2), (1, 3, 1, 5, 2)),
]


@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_broadcasting(shapes, device):
    for dtype in (F32, BF16):
        check("add_sigmoid", [make(s, dtype, device) for s in shapes])


@pytest.mark.parametrize(
    "shapes",
    [
        ((33, 17), (17,), (33, 1), ()),
        ((33, 1), (1, 17), (), (33, 17)),
        ((33, 1), (1, 17), (33, 17), (17,)),
        ((33, 1), (1, 17), (33, 1), (1, 17)),
        ((2, 3, 4, 5), (3, 1, 1), (5,), (2, 1, 1, 1)),
        ((4, 5, 6), (1, 5, 1), (1, 5, 6), (4, 1, 1)),
        ((), (), (7,), ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_broadcasting_four(shapes, dtype, device):
    check("add_mul_add", [make(s, dtype, device) for s in shapes])


@pytest.mark.parametrize(
    ("shape", "alpha", "bias"),
    [
        ((4, 6, 3, 5), (6,), (6, 1, 1)),
        ((4, 6, 3, 5), (1,), (5,)),
        ((4, 6, 3), (6,), ()),
        ((7,), (1,), (7,)),
        ((4, 6), (6,), (6,)),
        ((4, 6), (), (4, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias_first", [True, False])
def test_prelu_channels(shape, alpha, bias, bias_first, device):
    args = [make(s, F32, device) for s in (shape, alpha, bias)]
    check("prelu_bias", args, {"bias_first": bias_first})


def test_prelu_number(device):
    x, bias = make((5, 7), F32, device), make((7,), F32, device)
    out, grads = evaluate(frt.prelu_bias, (x, 0.25, bias), {})
    truth, their = evaluate(
        OPS["prelu_bias"].reference, (x, torch.full((1,), 0.25, device=device), bias), {}
    )
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(grads[0], their[0])
    torch.testing.assert_close(grads[1], their[2])


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (BF16, F32),
        (F32, BF16),
        (F16, BF16),
        (BF16, F16),
        (F32, F64),
        (F16, torch.int32),
        (torch.bool, F32),
        (torch.uint8, BF16),
        (torch.int64, F32),
    ],
    ids=str,
)
def test_mixed_dtypes(x, bias, device):
    args = make((33, 17), x, device), make((17,), bias, device)
    out, grads = check("multiply_relu", args)
    assert out.dtype == torch.result_type(*args)
    assert [g.dtype for g in grads] == [a.dtype for a in args if a.is_floating_point()]


def test_mixed_dtypes_in_a_reduction_to_the_wider(device):
    args = [
        make(s, d, device) for s, d in [((33, 17), BF16), ((17,), F32), ((33, 1), F16), ((), F64)]
    ]
    out, _ = check("add_mul_add", args)
    assert out.dtype == F32


def test_promotion_is_that_of_torch():
    """For every pair of dtypes, with and without dimensions. Meta tensors: no kernel is built."""
    for (a, b), (m, n) in itertools.product(
        itertools.product(STORAGE, repeat=2), itertools.product([(3,), ()], repeat=2)
    ):
        x, y = torch.empty(m, dtype=a, device="meta"), torch.empty(n, dtype=b, device="meta")
        expected = torch.result_type(x, y)
        if expected.is_floating_point:
            assert frt.add_relu(x, y).dtype == expected, (x, y)
        else:
            with pytest.raises(TypeError, match="needs a floating-point tensor"):
                frt.add_relu(x, y)


# --- special values -------------------------------------------------------------------------------

FINITE = [
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-39,
    1.1754944e-38,
    0.5,
    -0.5,
    1.0,
    -1.0,
    3.0,
    -3.0,
    6.0,
    -6.0,
    20.0,
    20.1,
    -20.0,
    90.0,
    -90.0,
    110.0,
    -110.0,
    1e4,
    -1e4,
]
SPECIALS = [*FINITE, 1e10, -1e10, 3.4028235e38, -3.4028235e38, math.inf, -math.inf, math.nan]


def specials(name, values, dtype, device):
    """Every pair of the values, whatever the number of tensors."""
    pairs = torch.tensor(values, dtype=F64).to(dtype).to(device)
    a, b = (t.flatten().contiguous() for t in torch.meshgrid(pairs, pairs, indexing="ij"))
    args, kwargs = example(name, a.shape, dtype, device)
    order = itertools.cycle([a, b, b.flip(0), a.flip(0)])
    return [next(order) if torch.is_tensor(t) and t.shape == a.shape else t for t in args], kwargs


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_special_values(name, dtype, device):
    args, kwargs = specials(name, SPECIALS, dtype, device)
    out, theirs = OPS[name](*args, **kwargs), OPS[name].reference(*args, **kwargs)
    wide = exact(name, kwargs)(
        *(a.double() if torch.is_tensor(a) else a for a in args), **kwargs
    ).to(dtype)
    for mask in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = (mask(out) != mask(theirs)) & (mask(out) != mask(wide))
        assert not wrong.any(), [
            a[wrong] for a in (*args, out, theirs, wide) if torch.is_tensor(a) and a.dim()
        ]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_at_kinks_and_far_out(name, device):
    args, kwargs = specials(name, FINITE, F32, device)
    grads, theirs = (evaluate(f, args, kwargs)[1] for f in (OPS[name], OPS[name].reference))
    wide = [a.double() if torch.is_tensor(a) else a for a in args]
    for a, b, c in zip(grads, theirs, evaluate(exact(name, kwargs), wide, kwargs)[1], strict=True):
        wrong = ~torch.isclose(a, b, rtol=1e-4, atol=1e-37, equal_nan=True) & ~torch.isclose(
            a, c.float(), rtol=1e-4, atol=1e-37, equal_nan=True
        )
        assert not wrong.any(), [
            t[wrong] for t in (*args, a, b, c) if torch.is_tensor(t) and t.dim()
        ]


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_same_bits_every_time(name, dtype, device):
    """Backward twice over one graph, and everything again."""
    args, kwargs = example(name, (33, 17), dtype, device)
    args = [a.requires_grad_() if torch.is_tensor(a) else a for a in args]
    wanted = [a for a in args if torch.is_tensor(a)]
    out, again = OPS[name](*args, **kwargs), OPS[name](*args, **kwargs)
    assert_same_bits(out, again)
    grad_output = torch.randn_like(out)
    first = torch.autograd.grad(out, wanted, grad_output, retain_graph=True)
    for other in (out, again):
        for a, b in zip(first, torch.autograd.grad(other, wanted, grad_output), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivative(name, device):
    args, kwargs = example(name, (4, 3), F64, device)
    args = [a.requires_grad_() if torch.is_tensor(a) else a for a in args]
    function = lambda *args: OPS[name](*args, **kwargs)  # noqa: E731
    assert torch.autograd.gradcheck(function, args)
    assert torch.autograd.gradgradcheck(function, args, fast_mode=True)


@pytest.mark.parametrize(
    "shapes", [((3, 1), (1, 4), (4,), ()), ((2, 3), (3,), (2, 1), (2, 3))], ids=str
)
def test_derivatives_of_broadcast_operands(shapes, device):
    args = [make(s, F64, device).requires_grad_() for s in shapes]
    function = frt.fuse(lambda a, b, c, d: frt.tanh(a * b + c) * frt.exp(d * a))
    assert torch.autograd.gradcheck(function, args)
    assert torch.autograd.gradgradcheck(function, args, fast_mode=True)


def test_third_derivative(device):
    x = torch.linspace(-2, 2, 9, dtype=F64, device=device, requires_grad=True)
    ours, theirs = frt.tanh(x), torch.tanh(x)
    for _ in range(3):
        ours, theirs = (
            torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in (ours, theirs)
        )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "wanted", [p for p in itertools.product([False, True], repeat=4) if any(p)][::2], ids=str
)
def test_only_the_gradients_that_are_needed(wanted, device):
    shapes = [(33, 17), (17,), (33, 1), ()]
    args = [make(s, F32, device).requires_grad_(w) for s, w in zip(shapes, wanted, strict=True)]
    frt.add_mul_add(*args).sum().backward()
    grads = [a.grad for a in args]
    truth = [a.detach().requires_grad_() for a in args]
    OPS["add_mul_add"].reference(*truth).sum().backward()
    for grad, true, is_wanted in zip(grads, truth, wanted, strict=True):
        assert (grad is not None) == is_wanted
        if is_wanted:
            torch.testing.assert_close(grad, true.grad, rtol=1e-5, atol=1e-3)


def test_only_the_bias_wants_a_gradient(device):
    x, bias = make((33, 17), F32, device), make((17,), F32, device).requires_grad_()
    out = frt.bias_gelu(x, bias)
    assert out.requires_grad
    out.sum().backward()
    truth = bias.detach().double().requires_grad_()
    OPS["bias_gelu"].reference(x.double(), truth).sum().backward()
    torch.testing.assert_close(bias.grad.double(), truth.grad, rtol=1e-5, atol=1e-5)
    assert x.grad is None


def test_no_grad_and_inference_mode(device):
    x = make((33, 17), F32, device).requires_grad_()
    expected = frt.gelu(x)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = frt.gelu(x)
            assert not out.requires_grad
            assert_same_bits(out, expected)
    assert frt.gelu(x).requires_grad
    with torch.inference_mode():
        inside = frt.gelu(x.clone())
    assert_same_bits(inside, expected)
    assert_same_bits(frt.relu(inside), torch.relu(inside))


def test_a_changed_input_is_noticed(device):
    x = make((33, 17), F32, device).requires_grad_()
    y = x * 1
    out = frt.gelu(y)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_input_that_the_gradient_does_not_read_may_change(device):
    x, residual = make((33, 17), F32, device), make((33, 17), F32, device).requires_grad_()
    y = residual * 1
    out = frt.fuse(lambda a, b: a * 2 + b)(x, y)
    with torch.no_grad():
        y.mul_(2)
    out.sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(x))


def test_strided_and_expanded_grad_output(device):
    x = make((33, 17), F32, device).requires_grad_()
    for grad_output in (
        make((17, 33), F32, device).t(),
        make((), F32, device).expand(33, 17),
        make((33, 34), F32, device)[:, ::2],
    ):
        (grad,) = torch.autograd.grad(frt.silu(x), x, grad_output)
        (truth,) = torch.autograd.grad(torch.nn.functional.silu(x), x, grad_output)
        torch.testing.assert_close(grad, truth)


def test_functorch(device):
    x, b = make((5, 7), F64, device), make((7,), F64, device)
    ours = torch.func.grad(lambda x: frt.bias_gelu(x, b).sum())(x)
    torch.testing.assert_close(
        ours, torch.func.grad(lambda x: OPS["bias_gelu"].reference(x, b).sum())(x)
    )


@pytest.mark.gpu
def test_streams_and_graph_capture():
    x, bias = (
        make((33, 17), F32, "cuda").requires_grad_(),
        make((17,), F32, "cuda").requires_grad_(),
    )

    def step():
        return torch.autograd.grad(frt.bias_gelu(x, bias), (x, bias), torch.ones_like(x))

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.detach().mul_(2)
        x.detach().mul_(0.5)
        found = step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for others in (found, captured):
        for a, b in zip(expected, others, strict=True):
            assert_same_bits(a, b)


# --- dropout --------------------------------------------------------------------------------------


def dropout_case(name, n, device, dtype=F32):
    """Arguments whose result is zero only where dropped, and the result with nothing dropped."""
    x = torch.randn(n, dtype=F64, device=device).abs().add(0.1).to(dtype)
    zeros = [
        torch.zeros(n, dtype=dtype, device=device)
        for _ in range(len(OPS[name].example(make_nothing)) - 1)
    ]
    return [x, *zeros], OPS[name](x, *zeros, training=False)


def make_nothing(*shape):
    return None


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", RANDOM)
def test_dropout(name, p, device):
    n = 2**18 + 5
    args, whole = dropout_case(name, n, device)
    x = args[0].requires_grad_()
    torch.manual_seed(7)
    out = OPS[name](*args, p)
    torch.manual_seed(7)
    assert_same_bits(out, OPS[name](*args, p))
    assert not torch.equal(out, OPS[name](*args, p))
    mask = out != 0
    rate = mask.double().mean().item()
    assert abs(rate - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n) + 2**-16
    scale = torch.tensor(1 / (1 - p), dtype=F32, device=device)
    assert torch.equal(out[mask], (whole * scale)[mask])
    grad, again = (
        torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)[0] for _ in range(2)
    )
    assert_same_bits(grad, again)
    assert torch.equal(grad != 0, mask)
    (whole_grad,) = torch.autograd.grad(OPS[name](*args, training=False).sum(), x)
    torch.testing.assert_close(grad, torch.where(mask, whole_grad * scale, 0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", RANDOM)
def test_dropout_extremes(name, device):
    args, whole = dropout_case(name, 1023, device)
    assert_same_bits(OPS[name](*args, 0.0), whole)
    assert_same_bits(OPS[name](*args, 0.5, False), whole)
    assert_same_bits(OPS[name](*args, p=1.0), torch.zeros_like(whole))
    x = args[0].requires_grad_()
    (grad,) = torch.autograd.grad(OPS[name](*args, 1.0).sum(), x)
    assert_same_bits(grad, torch.zeros_like(x))


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
def test_dropout_mask_does_not_depend_on_the_dtype(name, dtype, device):
    masks = []
    for d in (F32, dtype):
        args, _ = dropout_case(name, 1023, device, d)
        torch.manual_seed(3)
        masks.append(OPS[name](*args, 0.3) != 0)
    assert torch.equal(*masks)


def test_dropout_adds_the_residual_and_the_bias(device):
    x, residual = (make((33, 17), F32, device).requires_grad_() for _ in range(2))
    bias = make((17,), F32, device).requires_grad_()
    out = frt.bias_dropout_add(x, bias, residual, 0.4)
    grad_output = torch.randn_like(out)
    grads = torch.autograd.grad(out, (x, bias, residual), grad_output)
    kept = (grads[0] != 0).float() / 0.6
    torch.testing.assert_close(out, (x + bias) * kept + residual, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[0], grad_output * kept)
    torch.testing.assert_close(grads[1], (grad_output * kept).sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(grads[2], grad_output)
    kept = torch.autograd.grad(frt.dropout_add(x, residual, 0.4).sum(), x)[0]
    assert 0.4 < (kept != 0).double().mean() < 0.8


def test_dropout_of_every_layout_has_the_mask_of_its_memory(device):
    x = make((64, 48), F32, device).abs() + 0.1
    torch.manual_seed(1)
    straight = frt.relu_dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(frt.relu_dropout(x.t(), 0.5).t() != 0, straight != 0)


def test_second_derivative_of_dropout_has_the_same_mask(device):
    x = (make((1023,), F64, device).abs() + 0.1).requires_grad_()
    out = frt.gelu_dropout(x, 0.5)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(out != 0, first != 0)
    assert torch.equal(out != 0, second != 0)


def test_checkpoint_repeats_the_mask(device):
    x = make((33, 17), F32, device).requires_grad_()

    def layer(x):
        return frt.gelu_dropout(frt.gelu_dropout(x * 2, 0.5) + 1, 0.3)

    def gradient(function):
        torch.manual_seed(11)
        torch.rand(3, device=device)  # a state that is not that of a fresh seed
        x.grad = None
        function().square().sum().backward()
        return x.grad

    plain = gradient(lambda: layer(x))
    assert_same_bits(plain, gradient(lambda: layer(x)))
    for reentrant in (False, True):
        assert_same_bits(
            plain,
            gradient(
                lambda r=reentrant: checkpoint(
                    layer, x * 1, use_reentrant=r, preserve_rng_state=True
                )
            ),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", RANDOM)
def test_masks_of_a_cpu_and_a_gpu_are_the_same(name):
    for n in (1, 7, 1023, 2**17 + 3):
        masks = []
        for device in ("cpu", "cuda"):
            args, _ = dropout_case(name, n, device)
            torch.manual_seed(5)
            masks.append([(OPS[name](*args, 0.5) != 0).cpu() for _ in range(3)])
        assert all(map(torch.equal, *masks))
        assert n < 1000 or not torch.equal(masks[0][0], masks[0][1])


# --- quantisation ---------------------------------------------------------------------------------


def quantize_values(dtype, device, scale):
    """Ties, neighbours of ties, values out of range, NaN, and a million others."""
    ties = torch.arange(-300, 300, dtype=F32, device=device) * scale + 0.5 * scale
    near = [torch.nextafter(ties, torch.full_like(ties, s)) for s in (-math.inf, math.inf)]
    special = torch.tensor(SPECIALS, dtype=F32, device=device)
    many = torch.randn(2**20, device=device) * 60 * scale
    return torch.cat([ties, *near, special, many]).to(dtype)


@dtypes
@pytest.mark.parametrize("zero_point", [0.0, 3, -7.0])
def test_quantize(dtype, zero_point, device):
    for scale in (0.5, 0.05, 1 / 3, 1e-3):
        x = quantize_values(dtype, device, scale)
        out = frt.quantize_int8(x, scale, zero_point)
        assert out.dtype == torch.int8
        assert torch.equal(out, OPS["quantize_int8"].reference(x, scale, zero_point))
        assert not out[x.isnan()].any()
    assert not frt.quantize_int8(x.float().requires_grad_(), 0.5).requires_grad


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_quantize_per_channel(dim, dtype, device):
    x = make((31, 65, 33), dtype, device)
    scale = torch.rand(x.shape[dim], device=device) * 0.1 + 0.01
    zero_point = torch.randint(-9, 9, scale.shape, device=device).float()
    reference = OPS["quantize_int8"].reference
    for args in (
        (scale,),
        (scale, 2.0),
        (scale, zero_point),
        (0.05, zero_point),
        (scale[0], zero_point),
    ):
        assert torch.equal(frt.quantize_int8(x, *args, dim=dim), reference(x, *args, dim=dim))
    assert torch.equal(frt.quantize_int8(x, scale[0]), reference(x, scale[0]))


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_dequantize(dtype, device):
    q = torch.arange(-128, 128, device=device).to(torch.int8)
    scale = torch.rand(256, device=device) + 0.1
    zero_point = torch.randint(-9, 9, (256,), device=device).float()
    reference = OPS["dequantize_int8"].reference
    for args, kwargs in [
        ((0.05,), {}),
        ((0.05, 3.0), {}),
        ((scale, zero_point), {"dim": 0}),
        ((scale,), {}),
    ]:
        out = frt.dequantize_int8(q, *args, **kwargs, dtype=dtype)
        theirs = reference(q, *args, **kwargs, dtype=dtype)
        assert_as_accurate(
            out,
            theirs,
            reference(
                q, *(a.double() if torch.is_tensor(a) else a for a in args), **kwargs, dtype=F64
            ),
        )
    assert torch.equal(out, frt.dequantize_int8(q, scale, dtype=str(dtype)))


def test_dequantize_gradients(device):
    q = torch.randint(-128, 128, (33, 17), device=device).to(torch.int8)
    args = [
        (torch.rand(17, device=device) + 0.1).requires_grad_(),
        make((17,), F32, device).requires_grad_(),
    ]
    grad_output = torch.randn(33, 17, device=device)
    wide = [a.detach().double().requires_grad_() for a in args]
    truth = (q.double() - wide[1]) * wide[0]
    torch.testing.assert_close(
        torch.autograd.grad(frt.dequantize_int8(q, *args, dim=1), args, grad_output),
        torch.autograd.grad(truth, wide, grad_output.double()),
        check_dtype=False,
        rtol=1e-5,
        atol=1e-4,
    )


def test_quantize_then_dequantize(device):
    x = make((33, 17), F32, device).clamp(-6, 6)
    back = frt.dequantize_int8(frt.quantize_int8(x, 0.05, 3), 0.05, 3)
    assert (back - x).abs().max() <= 0.025 * (1 + 1e-5)
