"""Results and gradients of operands with any strides, and of operands that are broadcast."""

import pytest
import torch
from checking import BF16, F32, evaluate, make
from pointwise_ops import check_op

import fusionrt as frt
from fusionrt.catalogue import OPS

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
    out, _ = check_op("gelu", (x,), again=lambda: (LAYOUTS[layout](new),))
    if "overlapping" not in layout:
        assert strides(out) == strides(torch.relu(x)) or 0 in x.stride()
    contiguous = new(*x.shape)
    out, grads = check_op("add_relu", (x, contiguous))
    if x.is_contiguous(memory_format=torch.channels_last) or layout == "transposed":
        assert strides(out) == strides(x) == strides(grads[0])
    check_op("add_relu", (contiguous, x))
    check_op("add_sigmoid", (x, LAYOUTS[layout](new)))
    assert out.shape == x.shape


def test_channels_last_stays(device):
    x = make((2, 6, 4, 5), BF16, device).contiguous(memory_format=torch.channels_last)
    channel, image = make((6, 1, 1), BF16, device), make((2, 6, 4, 5), BF16, device)
    for args in [(x, channel), (channel, x), (x, image), (x, x), (x, make((), BF16, device))]:
        out, grads = check_op("bias_gelu", args)
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
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_broadcasting(shapes, dtype, device):
    check_op("add_sigmoid", [make(s, dtype, device) for s in shapes])


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
    check_op("add_mul_add", [make(s, dtype, device) for s in shapes])


@pytest.mark.covering(1)
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
    check_op("prelu_bias", args, {"bias_first": bias_first})


def test_prelu_number(device):
    x, bias = make((5, 7), F32, device), make((7,), F32, device)
    out, grads = evaluate(frt.prelu_bias, (x, 0.25, bias), {})
    truth, their = evaluate(
        OPS["prelu_bias"].reference, (x, torch.full((1,), 0.25, device=device), bias), {}
    )
    torch.testing.assert_close(out, truth)
    torch.testing.assert_close(grads[0], their[0])
    torch.testing.assert_close(grads[1], their[2])
