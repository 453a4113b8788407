"""The text of errors, and that nothing is computed before one is raised."""


import numpy as np
import pytest
import torch

import fusionrt as frt
from fusionrt import nn as fnn
from fusionrt.data import sliding_window
from fusionrt.op import Operator

A, B = torch.zeros(4, 8), torch.zeros(4, 16)
INT = torch.zeros(3, dtype=torch.int64)
Q = torch.zeros(4, 8, dtype=torch.int8)
SUPPORTED = "float16, bfloat16, float32, float64, int8, uint8, int16, int32, int64, bool"


class Opaque:
    pass


def sparse_gradient():
    """After a dense one, whose plan it must not get."""
    x = torch.randn(3, 5, requires_grad=True)
    torch.autograd.grad(frt.softplus(x), x, torch.ones(3, 5))
    torch.autograd.grad(frt.softplus(x), x, torch.ones(3, 5).to_sparse())


CASES = [
    # shapes
    (
        lambda: frt.swish_multiply(A, B),
        ValueError,
        "swish_multiply: x and gate must broadcast, got (4, 8) and (4, 16)",
    ),
    (
        lambda: frt.bias_gelu(A, torch.zeros(4)),
        ValueError,
        "bias_gelu: x and bias must broadcast, got (4, 8) and (4,)",
    ),
    (
        lambda: frt.add_mul_add(A, A, B, A),
        ValueError,
        "add_mul_add: x, y, z and w must broadcast, got (4, 8) and (4, 8) and (4, 16) and (4, 8)",
    ),
    (
        lambda: frt.add_relu(torch.zeros(0), torch.zeros(2)),
        ValueError,
        "add_relu: a and b must broadcast, got (0,) and (2,)",
    ),
    (
        lambda: frt.prelu_bias(torch.zeros(7, 5), torch.zeros(7, 1), torch.zeros(5)),
        ValueError,
        "prelu_bias: alpha must have 1 element or one for each of the 5 channels "
        "(dimension 1 of x), got (7, 1)",
    ),
    *[(lambda k=k, v=v: frt.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), **{k: v}), TypeError, text)
      for k, v, text in (
          ("weight", [1, 1, 1], "cross_entropy: weight must be a tensor or an array, got list"),
          ("z_loss", "a", "cross_entropy: z_loss must be a number, got 'a'"),
          ("label_smoothing", None, "cross_entropy: label_smoothing must be a number, got None"),
          ("softcap", "a", "cross_entropy: softcap must be a number, got 'a'"))],
    (
        lambda: frt.linear_cross_entropy(torch.zeros(2, 4), torch.zeros(3, 4), torch.tensor([0, 1]),
                                         class_weight=[1, 1, 1]),
        TypeError,
        "linear_cross_entropy: class_weight must be a tensor or an array, got list",
    ),
    (
        lambda: frt.instance_norm(torch.zeros(2, 3, 4), eps="a"),
        TypeError,
        "instance_norm: eps must be a number, got 'a'",
    ),
    *[(lambda k=k, v=v: frt.conv_bn_act(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 3, 3), None,
                                        *torch.ones(4, 1), **{"stride": 2, k: v}), error, text)
      for k, v, error, text in (
          ("eps", None, TypeError, "conv_bn_act: eps must be a number, got None"),
          ("momentum", "a", TypeError, "conv_bn_act: momentum must be a number, got 'a'"),
          ("padding", "same", ValueError,
           "conv_bn_act: padding 'same' needs a stride of 1, got (2, 2); pad by numbers"))],
    (
        lambda: frt.depthwise_separable(None, torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 1, 1)),
        TypeError,
        "depthwise_separable: x must be a tensor or an array, got NoneType",
    ),
    (
        lambda: frt.nn.FusedMLP(4, 8, names=("a", "a")),
        ValueError,
        "FusedMLP: names must be two different ones, got ('a', 'a')",
    ),
    (
        lambda: frt.nn.FusedCrossEntropyLoss(label_smoothing=2),
        ValueError,
        "FusedCrossEntropyLoss: label_smoothing must be in [0, 1], got 2",
    ),
    (
        lambda: frt.nn.FusedLinearCrossEntropyLoss(reduction="most"),
        ValueError,
        "FusedLinearCrossEntropyLoss: reduction must be 'mean', 'sum' or 'none', got 'most'",
    ),
    (
        lambda: frt.add_relu(torch.ones(3, 3), torch.eye(3).to_sparse_csr()),
        TypeError,
        "add_relu: b must be a dense tensor, got torch.sparse_csr",
    ),
    (
        lambda: frt.fuse(name=3),
        TypeError,
        "fuse: name must be text, got 3",
    ),
    (
        lambda: frt.warmup(arch=3),
        TypeError,
        "warmup: names must be text or a list, got 3",
    ),
    (
        lambda: frt.quantize_int8(torch.zeros(4), np.float32(0)),
        ValueError,
        "quantize_int8: scale must be a finite positive number, got np.float32(0.0)",
    ),
    (
        lambda: frt.quantize_int8(torch.zeros(4), 0.5, dim=1),
        IndexError,
        "quantize_int8: dim must be in [-1, 1), got 1",
    ),
    (
        lambda: frt.dequantize_int8(torch.zeros(4, dtype=torch.int8), 0.5, dtype=3),
        ValueError,
        "dequantize_int8: dtype must be one of float16, bfloat16, float32, got 3",
    ),
    (
        lambda: frt.prelu_bias(torch.zeros(2, 3, 4), torch.zeros(4), torch.zeros(4)),
        ValueError,
        "prelu_bias: alpha must have 1 element or one for each of the 3 channels "
        "(dimension 1 of x), got (4,)",
    ),
    (
        lambda: frt.prelu_bias(None, torch.zeros(3), torch.zeros(3)),
        TypeError,
        "prelu_bias: x must be a tensor, an array or a number, got NoneType",
    ),
    # dtypes and layouts
    (
        lambda: frt.relu(INT),
        TypeError,
        "relu: needs a floating-point tensor, got only x of torch.int64; convert one with .float()",
    ),
    (
        lambda: frt.add_relu(INT, INT > 0),
        TypeError,
        "add_relu: needs a floating-point tensor, got only a of "
        "torch.int64, b of torch.bool; convert one with .float()",
    ),
    (
        lambda: frt.relu(A.to(torch.complex64)),
        TypeError,
        f"relu: x has dtype torch.complex64; supported are {SUPPORTED}",
    ),
    (
        lambda: frt.add_relu(A, A.to(torch.float8_e4m3fn)),
        TypeError,
        f"add_relu: b has dtype torch.float8_e4m3fn; supported are {SUPPORTED}",
    ),
    (
        lambda: frt.relu(A.to_sparse()),
        TypeError,
        "relu: x must be a dense tensor, got torch.sparse_coo",
    ),
    (
        lambda: frt.cross_entropy(torch.zeros(2, 3).to_sparse_csr(), torch.zeros(2, dtype=torch.int64)),
        TypeError,
        "cross_entropy: input must be a dense tensor, got torch.sparse_csr",
    ),
    (
        lambda: frt.linear_cross_entropy(A.to_sparse(), torch.eye(8), torch.zeros(4, dtype=torch.int64)),
        TypeError,
        "linear_cross_entropy: hidden must be a dense tensor, got torch.sparse_coo",
    ),
    (
        lambda: frt.batch_norm(torch.zeros(2, 3).to_sparse_csr(), training=True),
        TypeError,
        "batch_norm: x must be a dense tensor, got torch.sparse_csr",
    ),
    (
        sparse_gradient,
        TypeError,
        "softplus: grad_output must be a dense tensor, got torch.sparse_coo",
    ),
    # numbers
    (
        lambda: frt.bias_gelu(torch.zeros(3), 10**400),
        ValueError,
        "bias_gelu: bias must be a number that float64 has, got one beyond it",
    ),
    (
        lambda: frt.huber_loss(torch.zeros(3), torch.zeros(3), delta=10**400),
        ValueError,
        "huber_loss: delta must be a number that float64 has, got one beyond it",
    ),
    (
        lambda: frt.cross_entropy(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), ignore_index=10**30),
        ValueError,
        f"cross_entropy: ignore_index must be one of int64's integers, got {10**30}",
    ),
    (
        lambda: frt.optim.clip_grad_norm_([torch.zeros(3)], "a"),
        TypeError,
        "clip_grad_norm_: max_norm must be a number, got 'a'",
    ),
    (
        lambda: frt.optim.ema_update_([torch.zeros(3)], [torch.zeros(3)], "a"),
        TypeError,
        "ema_update_: decay must be a number, got 'a'",
    ),
    # arguments
    (
        lambda: frt.exp(torch.zeros(3)),
        frt.TraceError,
        "exp: works on traced values, in a fused function, got Tensor: call torch.exp on tensors; one that a "
        "fused function needs must be an argument of it",
    ),
    (
        lambda: frt.kl_div(torch.zeros(3), torch.zeros(3), reduction="foo"),
        ValueError,
        "kl_div: reduction must be 'mean', 'sum', 'batchmean' or 'none', got 'foo'",
    ),
    (
        lambda: frt.rms_norm_gelu(A, None),
        TypeError,
        "rms_norm_gelu: weight must be a tensor or an array, got NoneType",
    ),
    (
        lambda: frt.add_norm(torch.zeros(2, 3), None),
        ValueError,
        "add_norm: residual must be a tensor of shape (2, 3), got NoneType",
    ),
    (
        lambda: frt.layer_norm(torch.zeros(2, 3), 3, epilogue=lambda a, b: a),
        TypeError,
        "layer_norm: epilogue must be a function of one traced value, got <lambda>(a, b)",
    ),
    (
        lambda: frt.layer_norm(torch.zeros(2, 3), 3, epilogue=lambda a: (a, a)),
        TypeError,
        "layer_norm: epilogue must give one traced value, got tuple",
    ),
    (
        lambda: frt.row_reduce(torch.zeros(2, 3), -1, lambda a: None),
        TypeError,
        "row_reduce: map must give one traced value, got NoneType",
    ),
    (
        lambda: frt.depthwise_separable(
            torch.zeros(1, 3, 8, 8), torch.zeros(3, 1, 3, 3), torch.zeros(4, 3, 3, 3)),
        ValueError,
        "depthwise_separable: pointwise_weight must have the shape (C', C, 1, 1), got (4, 3, 3, 3)",
    ),
    (
        lambda: frt.gelu_dropout(torch.zeros(3), 0.5, "False"),
        TypeError,
        "gelu_dropout: training must be True or False, got 'False'",
    ),
    (lambda: frt.relu("A"), TypeError, "relu: x must be a tensor, an array or a number, got str"),
    (
        lambda: frt.relu(None),
        TypeError,
        "relu: x must be a tensor, an array or a number, got NoneType",
    ),
    (
        lambda: frt.add_relu(A, [1.0]),
        TypeError,
        "add_relu: b must be a tensor, an array or a number, got list",
    ),
    (
        lambda: frt.add_relu(Opaque(), A),
        TypeError,
        "add_relu: a must be a tensor, an array or a number, got Opaque",
    ),
    (
        lambda: frt.add_relu(A, 1j),
        TypeError,
        "add_relu: b must be a tensor, an array or a number, got complex",
    ),
    (
        lambda: frt.leaky_relu(A, "0.1"),
        TypeError,
        "leaky_relu: negative_slope must be a tensor, an array or a number, got str",
    ),
    (
        lambda: frt.add_relu(1, 2.0),
        TypeError,
        "add_relu: at least one argument must be a tensor or an array, got a=int, b=float",
    ),
    (lambda: frt.relu(np.zeros(3, object)), TypeError, None),
    # options
    (
        lambda: frt.bias_gelu(A, A, approximate="erf"),
        ValueError,
        "bias_gelu: approximate must be 'none' or 'tanh', got 'erf'",
    ),
    (
        lambda: frt.swish_multiply(A, A, activate="y"),
        ValueError,
        "swish_multiply: activate must be 'x' or 'gate', got 'y'",
    ),
    (
        lambda: frt.swish_multiply("a", A, activate="gate"),
        TypeError,
        "swish_multiply: x must be a tensor, an array or a number, got str",
    ),
    (
        lambda: frt.geglu(A, A, approximate=None),
        ValueError,
        "geglu: approximate must be 'none' or 'tanh', got None",
    ),
    (
        lambda: frt.gelu_dropout(A, approximate="x"),
        ValueError,
        "gelu_dropout: approximate must be 'none' or 'tanh', got 'x'",
    ),
    (
        lambda: frt.gelu_dropout(A, 1.5),
        ValueError,
        "gelu_dropout: p must be a probability in [0, 1], got 1.5",
    ),
    (
        lambda: frt.relu_dropout(A, -0.1, training=False),
        ValueError,
        "relu_dropout: p must be a probability in [0, 1], got -0.1",
    ),
    (
        lambda: frt.dropout_add(A, A, float("nan")),
        ValueError,
        "dropout_add: p must be a probability in [0, 1], got nan",
    ),
    (
        lambda: frt.bias_dropout_add(A, A, A, 2),
        ValueError,
        "bias_dropout_add: p must be a probability in [0, 1], got 2",
    ),
    # quantisation
    (
        lambda: frt.quantize_int8(A, 0.0),
        ValueError,
        "quantize_int8: scale must be a finite positive number, got 0.0",
    ),
    (
        lambda: frt.quantize_int8(A, -1),
        ValueError,
        "quantize_int8: scale must be a finite positive number, got -1",
    ),
    (
        lambda: frt.quantize_int8(A, float("nan")),
        ValueError,
        "quantize_int8: scale must be a finite positive number, got nan",
    ),
    (
        lambda: frt.quantize_int8(A, 1.0, float("inf")),
        ValueError,
        "quantize_int8: zero_point must be a finite number, got inf",
    ),
    (
        lambda: frt.quantize_int8(A, torch.ones(4), dim=1),
        ValueError,
        "quantize_int8: scale must have one value for each of the 8 channels along dim 1, got (4,)",
    ),
    (
        lambda: frt.quantize_int8(A, 1.0, torch.ones(8), dim=-2),
        ValueError,
        "quantize_int8: zero_point must have one value for each of the 4 channels along "
        "dim -2, got (8,)",
    ),
    (
        lambda: frt.quantize_int8(A, torch.ones(4), dim=2),
        IndexError,
        "quantize_int8: dim must be in [-2, 2), got 2",
    ),
    (
        lambda: frt.dequantize_int8(A, 1.0),
        TypeError,
        "dequantize_int8: q must be an int8 tensor, got torch.float32",
    ),
    (
        lambda: frt.dequantize_int8(Q.to(torch.uint8), 1.0),
        TypeError,
        "dequantize_int8: q must be an int8 tensor, got torch.uint8",
    ),
    (
        lambda: frt.dequantize_int8(Q, 0.0),
        ValueError,
        "dequantize_int8: scale must be a finite positive number, got 0.0",
    ),
    (
        lambda: frt.dequantize_int8(Q, 1.0, dtype=torch.int32),
        ValueError,
        "dequantize_int8: dtype must be one of float16, bfloat16, float32, got int32",
    ),
    (
        lambda: frt.dequantize_int8(Q, 1.0, dtype="double"),
        ValueError,
        "dequantize_int8: dtype must be one of float16, bfloat16, float32, got double",
    ),
    # devices
    (lambda: frt.relu.cuda(A), TypeError, "relu: x must be a CUDA tensor, got one on cpu"),
    (
        lambda: frt.bias_gelu.cuda(A, A),
        TypeError,
        "bias_gelu: x must be a CUDA tensor, got one on cpu",
    ),
    (
        lambda: frt.relu.cuda(np.zeros(3)),
        TypeError,
        "relu: x must be a CUDA tensor, got one on cpu",
    ),
    (
        lambda: frt.relu.cpu(A.to("meta")),
        TypeError,
        "relu: x must be a CPU tensor, got one on meta",
    ),
    (
        lambda: frt.add_relu(A, A.to("meta")),
        ValueError,
        "add_relu: all tensors must be on one device, got a on cpu, b on meta",
    ),
    (
        lambda: frt.fuse(name="mine")(lambda x, y: x + y)(A, B),
        ValueError,
        "mine: x and y must broadcast, got (4, 8) and (4, 16)",
    ),
]


HEADS = torch.zeros(2, 4, 8, 16)


def of_two(a, b):
    return a + b


CASES += [
    (call, TypeError, f"{said} must be a function of one traced value, got of_two(a, b)")
    for said, call in {
        "softmax: epilogue": lambda: frt.softmax(A, epilogue=of_two),
        "add_norm: epilogue": lambda: frt.add_norm(A, A, epilogue=of_two),
        "batch_norm: epilogue": lambda: frt.batch_norm(A, A[0], A[0], epilogue=of_two),
        "linear_activation: activation": lambda: frt.linear_activation(A, A, None, of_two),
        "conv_activation: activation": lambda: frt.conv_activation(
            HEADS, torch.zeros(4, 4, 3, 3), None, of_two),
        "ffn: activation": lambda: frt.ffn(A, A, None, A.T, None, of_two),
        "row_reduce: map": lambda: frt.row_reduce(A, -1, of_two)}.items()]
CASES += [(lambda mask=mask: frt.attention_score_softmax(HEADS, HEADS, mask=mask), kind,
           f"attention_score_softmax: mask must {said}") for mask, kind, said in (
    ("a", TypeError, "be a tensor or an array, got str"),
    (INT, TypeError, "be boolean (True lets a score pass) or floating-point (added to the scores), got "
     "torch.int64"),
    (torch.zeros(3, 8), ValueError, "broadcast to the shape of scores, (2, 4, 8, 8), got (3, 8)"),
    (torch.zeros(1, 2, 4, 8, 8), ValueError,
     "broadcast to the shape of scores, (2, 4, 8, 8), got (1, 2, 4, 8, 8)"),
    (torch.zeros(8, 8, device="meta"), ValueError, "be on q's device, cpu, got meta"))]
CASES += [
    (lambda: frt.attention_dropout("a"), TypeError,
     "attention_dropout: scores must be a tensor or an array, got str"),
    (lambda: frt.attention_dropout(A, mask=B), ValueError,
     "attention_dropout: mask must broadcast to the shape of scores, (4, 8), got (4, 16)"),
    (lambda: frt.attention_score_softmax(HEADS, HEADS, "a"), TypeError,
     "attention_score_softmax: scale must be a number, got 'a'"),
    *((lambda offset=offset: frt.rotary_embedding(HEADS, offset=offset), ValueError,
       f"rotary_embedding: offset must be in [-2**63, 2**63 - 4), got {offset}")
      for offset in (10**30, -10**30, 2**63 - 4)),
    (lambda: frt.qkv_heads(torch.zeros(2, 5, 96), 4, base=1e4, offset=2**63), ValueError,
     f"qkv_heads: offset must be in [-2**63, 2**63 - 5), got {2**63}"),
    (lambda: sliding_window(A, 3, stride=10**30), ValueError,
     f"sliding_window: stride must be less than 2**63, got {10**30}"),
    (lambda: fnn.FusedLinear(16.0, 32), TypeError, "FusedLinear: in_features must be an integer, got 16.0"),
    (lambda: fnn.FusedLinearReLU(16, None), TypeError,
     "FusedLinearReLU: out_features must be an integer, got None"),
    (lambda: fnn.FusedLinear(-1, 32), ValueError, "FusedLinear: in_features must be at least 0, got -1"),
    (lambda: fnn.FusedMLP(16, 3.5), TypeError, "FusedMLP: hidden_features must be an integer, got 3.5"),
    (lambda: fnn.FusedSwiGLU(16, 3, "a"), TypeError, "FusedSwiGLU: out_features must be an integer, got 'a'"),
    (lambda: fnn.FusedMultiheadAttention(16.0, 4), TypeError,
     "FusedMultiheadAttention: embed_dim must be an integer, got 16.0"),
    (lambda: fnn.TransformerBlock(16, 4, 32.0), TypeError,
     "TransformerBlock: dim_feedforward must be an integer, got 32.0"),
    (lambda: fnn.EmbeddingPosition(16, 8, 4.0), TypeError,
     "EmbeddingPosition: max_positions must be an integer, got 4.0"),
]


@pytest.mark.parametrize(("call", "kind", "text"), CASES, ids=[c[2] for c in CASES])
def test_text(call, kind, text):
    with pytest.raises(kind) as caught:
        call()
    assert text is None or str(caught.value) == text


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [c for c in CASES if c[2]][::5],
    ids=[c[2] for c in CASES if c[2]][::5],
)
def test_the_same_after_a_good_call_and_with_gradients(call, kind, text):
    """The plan of a good call lets no bad one through; neither does autograd's way."""
    frt.add_relu(A, A), frt.relu(A), frt.bias_gelu(A, A)
    A.requires_grad_()
    try:
        with pytest.raises(kind) as caught:
            call()
    finally:
        A.requires_grad_(False)
    assert str(caught.value) == text


@pytest.mark.gpu
def test_devices():
    x = torch.zeros(4, 8)
    with pytest.raises(
        ValueError,
        match=r"^add_relu: all tensors must be on one device, got a on cpu, b on cuda:0$",
    ):
        frt.add_relu(x, x.cuda())
    with pytest.raises(
        ValueError,
        match=r"^bias_gelu: all tensors must be on one device, got x on cuda:0, bias on cpu$",
    ):
        frt.bias_gelu(x.cuda(), x[0])
    frt.relu.cuda(x.cuda())
    with pytest.raises(TypeError, match=r"^relu: x must be a CPU tensor, got one on cuda$"):
        frt.relu.cpu(x.cuda())


def test_nothing_is_computed_before_an_error(monkeypatch):
    monkeypatch.setattr(Operator, "allocate", lambda *a: pytest.fail("allocated"))
    monkeypatch.setattr(Operator, "build", lambda *a: pytest.fail("planned"))
    state = torch.get_rng_state()
    for call in (
        lambda: frt.swish_multiply(A, B),
        lambda: frt.relu("A"),
        lambda: frt.quantize_int8(A, 0.0),
        lambda: frt.add_relu(A, A.to_sparse()),
        lambda: frt.gelu_dropout(A, 2.0),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_bad_grad_output():
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(frt.gelu(x), x, torch.ones(4, 9))


def test_meta_and_cpu_tensors_do_not_share_plans():
    """Both have the device number -1."""
    for _ in range(2):
        x = torch.randn(6, 7)
        assert torch.equal(frt.relu(x), torch.relu(x))
        assert frt.relu(x.to("meta")).is_meta
        assert frt.add_relu(x.to("meta").requires_grad_(), x.to("meta")).is_meta
        assert torch.equal(frt.add_relu(x, x), torch.relu(x + x))
        with pytest.raises(ValueError, match="all tensors must be on one device"):
            frt.add_relu(x, x.to("meta"))


def test_images_without_channels_have_none_to_convolve():
    with pytest.raises(ValueError, match="depthwise_conv2d: x must have at least one channel, got shape"):
        frt.depthwise_conv2d(torch.zeros(2, 0, 8, 8), torch.zeros(0, 1, 3, 3))


def test_a_number_of_which_a_batch_has_none():
    x = torch.randn(3, 4)
    for nothing in (None, "x"):
        with pytest.raises(TypeError, match="kl_div: input must be a tensor, an array or a number"):
            frt.kl_div(nothing, x, "batchmean")


def test_an_epilogue_of_more_than_an_element():
    with pytest.raises(frt.TraceError, match=r"layer_norm: torch\.softmax cannot be fused"):
        frt.layer_norm(torch.randn(4, 8), 8, epilogue=torch.nn.Softmax(-1))


def test_epilogues_of_nothing():
    x = torch.randn(4, 8)
    for epilogue in (lambda v: 1.0, lambda v: frt.exp(v * 0 + 1) * 0 + 1):
        assert torch.equal(frt.softmax(x, epilogue=epilogue), torch.ones(4, 8))
        assert torch.equal(frt.layer_norm(x, 8, epilogue=epilogue), torch.ones(4, 8))
