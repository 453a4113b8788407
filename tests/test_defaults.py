"""Under another default device or dtype than torch's own, results are as without."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import data, optim

TOKENS, TARGET = torch.tensor([[0, 3, 6], [6, 2, 0]]), torch.tensor([1, 0, 5, 3])
IMAGE = torch.randint(256, (2, 40, 50, 3), dtype=torch.uint8)
CALLS = {
    "fused": (frt.fuse(lambda x, y: frt.sigmoid(x) * y + 0.5 * x), (4, 6), (6,)),
    "layer_norm": (lambda x, w: frt.layer_norm(x, (6,), w), (4, 6), (6,)),
    "softmax": (lambda x: frt.softmax(x, causal=True), (6, 6)),
    "long rows": (frt.softmax, (64, 5000)),
    "sum": (lambda x: frt.ops.sum(x, 0), (40, 6)),
    "batch_norm": (lambda x, w: frt.batch_norm(x, None, None, w, training=True), (4, 6, 5), (6,)),
    "cross_entropy": (lambda x: frt.cross_entropy(x, TARGET), (4, 6)),
    "across": (lambda x: frt.cross_entropy(x.t(), TARGET), (6, 4)),
    "mse_loss": (frt.mse_loss, (4, 6), (4, 6)),
    "dropout": (lambda x: frt.gelu_dropout(x, 0.5), (4, 6)),
    "linear": (frt.linear_gelu, (4, 6), (5, 6), (5,)),
    "attention": (lambda x: frt.attention(x, x, x, softcap=3.0), (1, 2, 8, 4)),
    "rotary": (frt.rotary_embedding, (2, 4, 2, 8)),
    "embedding": (lambda x: frt.embedding_position(TOKENS, x), (7, 6)),
    "sliding_window": (lambda x: data.sliding_window(x, 8), (4, 50)),
}


def gradients(call, shapes):
    torch.manual_seed(5)
    tensors = [torch.randn(*s, dtype=torch.float32, device="cpu").requires_grad_() for s in shapes]
    out = call(*tensors)
    return out, *torch.autograd.grad(out.square().sum(), tensors)


@pytest.mark.parametrize(("call", "shapes"), [(call, shapes) for call, *shapes in CALLS.values()], ids=CALLS)
def test_default_device(call, shapes):
    expected = gradients(call, shapes)
    with torch.device("meta"):  # as set_default_device("cuda") would
        found = gradients(call, shapes)
    assert_close(found, expected, rtol=0, atol=0)


def test_default_device_of_numpy():
    x = torch.randn(4, 6, device="cpu").numpy()
    expected = frt.gelu(x)
    with torch.device("meta"):
        assert (frt.gelu(x) == expected).all()


@contextlib.contextmanager
def default(what):
    """Device or dtype."""
    if isinstance(what, str):
        with torch.device(what):
            yield
        return
    torch.set_default_dtype(what)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = pytest.mark.parametrize("what", ["meta", torch.bfloat16, torch.float64], ids=str)


def stepped(**options):
    param = torch.nn.Parameter(torch.linspace(-1, 1, 8192, dtype=torch.float32, device="cpu"))
    optimizer = optim.AdamW([param], lr=0.1, **options)
    for _ in range(3):
        param.grad = torch.linspace(-0.2, 0.1, 8192, dtype=torch.float32, device="cpu")
        optimizer.step()
    return param.detach(), optimizer.state_dict()["state"][0]


@pytest.mark.covering(1)
@DEFAULTS
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}], ids=str)
def test_steps(options, what):
    expected = stepped(**options)
    with default(what):
        found = stepped(**options)
    assert_close(found, expected, rtol=0, atol=0)


@DEFAULTS
def test_data(what):
    def made():
        torch.manual_seed(5)
        images = data.image_preprocess(IMAGE, 16, contrast=0.5, brightness=1.2)
        return images, data.random_parameters(IMAGE).boxes, data.token_preprocess(
            TOKENS, special_ids=[2], mask_probability=0.5, mask_id=1, vocab_size=7)

    expected = made()
    with default(what):
        found = made()
    assert_close(found, expected, rtol=0, atol=0)


# What torch makes where nobody says on which device, or of which dtype.
SAYS_DEVICE = {"empty", "zeros", "ones", "full", "arange", "tensor", "rand", "randn", "randint", "randperm",
               "empty_strided", "linspace", "eye", "as_tensor", "scalar_tensor", "asarray"}
SAYS_DTYPE = {"empty", "zeros", "ones", "empty_strided", "linspace", "eye"}


def test_every_factory_says_where_and_what():
    package = Path(frt.__file__).parent
    for path in package.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch."):
                name, said = ast.unparse(call.func)[6:], {k.arg for k in call.keywords}
                place = f"{path.relative_to(package)}:{call.lineno}: {ast.unparse(call)}"
                assert name not in SAYS_DEVICE or "device" in said, place
                assert name not in SAYS_DTYPE or said & {"dtype", None} or "'meta'" in place, place
