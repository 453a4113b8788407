"""Models of every family, small: converted, validated, nothing undone, outputs of their own types."""

import model_zoo
import pytest
import torch
from convert_net import one_thread  # noqa: F401  (a fixture)
from torch.utils import _pytree as pytree

import fusionrt as frt
from fusionrt.convert.model import record_of
from fusionrt.convert.validate import leaves

# On a CPU, where every kernel is compiled by Numba first, others that are built alike stand for these.
SLOW = ("resnet50", "densenet", "vgg", "mobilenet_v2", "deit", "roberta")
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in model_zoo.ZOO]


@pytest.fixture(autouse=True)
def packages(request):
    """They belong to the `test` extra; a machine that is lent for its GPU may lack them."""
    if request.node.get_closest_marker("gpu"):
        for name in ("torchvision", "timm", "transformers"):
            pytest.importorskip(name)


def check(name, device, dtype):
    case = model_zoo.ZOO[name]()
    model = case.model.to(device, dtype)
    inputs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype), case.inputs)
    fast = frt.auto_convert_model(model, example_inputs=inputs)
    record = record_of(fast)
    assert record.verdict.accepted, record.verdict
    assert record.rolled_back == {}
    assert sum(record.counts.values()) > 0
    with torch.no_grad():
        got, own = (m(**inputs) if isinstance(inputs, dict) else m(*inputs) for m in (fast, model))
    assert type(got) is type(own)
    assert [key for key, _ in leaves(got)] == [key for key, _ in leaves(own)]


@pytest.mark.parametrize("name", NAMES)
def test_every_family(name):
    check(name, "cpu", torch.float32)


def test_generation_with_masks_and_a_cache(device):
    """Dynamic shapes, and outputs that hold more than tensors."""
    case = model_zoo.ZOO["gpt2"]()
    model, ids = case.model.to(device), case.inputs["input_ids"].to(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    fast = frt.auto_convert_model(model, example_inputs={"input_ids": ids, "attention_mask": mask})
    assert record_of(fast).verdict.accepted
    settings = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fast.generate(ids, **settings), model.generate(ids, **settings))
    with torch.inference_mode():
        got, own = fast(input_ids=ids), model(input_ids=ids)
    torch.testing.assert_close(got.logits, own.logits, rtol=1e-4, atol=1e-4)
    assert type(got.past_key_values) is type(own.past_key_values)
    torch.testing.assert_close(got.past_key_values.layers[1].keys, own.past_key_values.layers[1].keys,
                               rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", model_zoo.ZOO)
def test_every_family_on_a_gpu(name, dtype):
    check(name, "cuda", dtype)
