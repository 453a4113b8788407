"""Numbers among the arguments of ops: what is none is refused by name, in each call."""

import itertools

import numpy as np
import pytest
import torch

import fusionrt as frt
from fusionrt.data import image_preprocess, sliding_window


@pytest.mark.parametrize("dim", [1.0, "a", None])
def test_a_dimension_that_is_no_integer(dim):
    x = torch.randn(4, 8)
    frt.ops.sum(x, 1), frt.softmax(x, 1)
    with pytest.raises(TypeError, match=f"softmax: dim must be an integer, got {dim!r}"):
        frt.softmax(x, dim)
    if dim is not None:
        with pytest.raises(TypeError, match=f"sum: dim must be None, an int or ints, got {dim!r}"):
            frt.ops.sum(x, dim)


X, IDS = torch.randn(2, 3, 4, 8), torch.zeros(2, 3, dtype=torch.int64)
NUMBERS = [
    ("var", (X,), "correction", "number"),
    ("huber_loss", (X, X), "delta", "number"),
    ("smooth_l1_loss", (X, X), "beta", "number"),
    ("attention", (X, X, X), "scale", "number"),
    ("attention", (X, X, X), "softcap", "number"),
    ("embedding_position", (IDS, X[0, 0]), "scale", "number"),
    ("embedding_position", (IDS, X[0, 0]), "padding_idx", "integer"),
    ("rotary_embedding", (X,), "base", "number"),
    ("rotary_embedding", (X,), "scaling", "number"),
    ("rotary_embedding", (X,), "rotary_dim", "integer"),
    ("rotary_embedding", (X,), "offset", "integer"),
    ("multihead_attention", (X[0], X[0], X[0]), "num_heads", "integer"),
    ("qkv_heads", (X[0],), "num_heads", "integer"),
    ("sliding_window", (X, 2, "var"), "correction", "number"),
    ("sliding_window", (X, 2), "dim", "integer"),
    ("softmax", (X,), "dim", "integer"),
    ("layer_norm", (X,), "normalized_shape", "integer"),
    ("rms_norm", (X,), "normalized_shape", "integer"),
    ("group_norm", (X,), "num_groups", "integer"),
    ("cross_entropy", (X[0, 0], IDS[0, :1].expand(4)), "ignore_index", "integer"),
    ("linear_cross_entropy", (X[0, 0], X[0, 0], IDS[0, :1].expand(4)), "ignore_index", "integer"),
]


@pytest.mark.parametrize("op, args, name, kind", NUMBERS, ids=[f"{op} {name}" for op, _, name, _ in NUMBERS])
def test_what_is_no_number(op, args, name, kind):
    function = getattr(frt, op) if hasattr(frt, op) else getattr(frt.data, op)
    for value in ("2", *([8.0, 1.5, True] if kind == "integer" else [])):
        with pytest.raises(TypeError, match=f"{op}: {name} must be an? {kind}, got {value!r}"):
            function(*args, **{name: value})


def test_what_equals_an_integer_is_none():
    x, weight = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 3, 3)
    for name, value in itertools.product(("stride", "padding", "dilation", "groups"), (True, 1.0, None)):
        for op in (frt.conv_activation, frt.depthwise_conv2d)[:1 if name == "groups" else 2]:
            expected = f"{op.__name__}: {name} must be an? (positive )?integer.*, got {value}"
            with pytest.raises(ValueError, match=expected):
                op(x, weight, **{name: value})
            op(x, weight, **{name: 1})
            with pytest.raises(ValueError, match=expected):
                op(x, weight, **{name: value})
    with pytest.raises(ValueError, match=r"attention: window must be .*, got \(1, True\)"):
        frt.attention(X, X, X, window=(1, True))
    with pytest.raises(TypeError, match="var: dim must be None, an int or ints, got True"):
        frt.var(X, True)


def test_integers_of_numpy_and_arrays():
    """An array of any dtype has `__index__`, which fails in the middle of things or does not."""
    x, one, two = torch.randn(1, 2, 4, 4), np.int64(1), np.int32(2)
    assert torch.equal(frt.var(x, (one, two)), frt.var(x, (1, 2)))
    assert torch.equal(sliding_window(x, two, stride=one), sliding_window(x, 2, stride=1))
    assert torch.equal(frt.attention(x, x, x, window=two), frt.attention(x, x, x, window=2))
    conv = frt.conv_activation
    assert torch.equal(conv(x, x, padding=(one, two)), conv(x, x, padding=(1, 2)))
    images = [torch.randint(256, (9, 12, 3), dtype=torch.uint8)]
    resized = [image_preprocess(images, n(4), resize=n(6)) for n in (int, np.int64)]
    assert torch.equal(*resized)
    for value in (torch.tensor(1), torch.tensor(1.0), np.array(1.0)):
        with pytest.raises(TypeError, match="softmax: dim must be an integer, got"):
            frt.softmax(x, dim=value)
        with pytest.raises(TypeError, match="var: dim must be None, an int or ints, got"):
            frt.var(x, dim=value)
    with pytest.raises(ValueError, match=r"resize must be a number of pixels or .*, got True"):
        image_preprocess(images, 4, resize=True)


@pytest.mark.parametrize(("call", "text"), [
    (lambda n: frt.leaky_relu(torch.ones(3), n), "leaky_relu: negative_slope must be"),
    (lambda n: frt.layer_norm(torch.ones(3), 3, eps=n), "layer_norm: eps must be"),
    (lambda n: frt.batch_norm(torch.ones(2, 3), torch.zeros(3), torch.ones(3), training=True, momentum=n),
     "batch_norm: momentum must be"),
])
def test_numbers_beyond_float64_in_each_call(call, text):
    """The first call of a kind, one like the last, and one that comes after others."""
    for _ in range(4):
        with pytest.raises(ValueError, match=f"{text} a number that float64 has, got one beyond it"):
            call(10**400)
        call(2)
