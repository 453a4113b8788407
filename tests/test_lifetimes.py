"""What a first call of its kind builds and keeps holds none of its tensors."""

import gc

import pytest
import torch
from checking import making

from fusionrt import deferred
from fusionrt.catalogue import COLUMNS, OPS, ROWS
from fusionrt.watching import PLAIN

SIZES = {ROWS: 23, COLUMNS: 40, 32: 2, 56: 9}  # of no other test: plans are new
ON_A_CPU = ("batch_norm", "conv2d_bn_act", "cross_entropy", "depthwise_separable", "group_norm", "layer_norm",
            "linear_gelu", "multihead_attention", "rms_norm", "softmax", "std", "swish_multiply")
HOLDING = {"argmax", "argmin"}  # indices, for the next gradient
OF_A_CPU = {"cpu_fused_attention", "optimized_cpu_attention"}


def run(op, device):
    args = op.example(making(device, SIZES))
    outs = op(*args)
    graded = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if getattr(o, "requires_grad", False)]
    if graded:
        torch.autograd.backward(graded, [torch.ones_like(o) for o in graded])


def with_memory():
    """All tensors, but for those of one element, by which an argument is described that is not kept."""
    gc.collect()
    return {id(o): o for o in gc.get_objects() if type(o) in PLAIN and o.layout is torch.strided
            and o.untyped_storage().nbytes() > 8}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_die(device, only_new_objects):
    deferred.check(torch.zeros((), dtype=torch.int64, device=device), str)  # whose memory is for all calls

    def left_by(names):
        before = with_memory()
        for name in names:
            run(OPS[name], device)
        return [tuple(t.shape) for key, t in with_memory().items() if key not in before]

    names = ON_A_CPU if device == "cpu" else sorted({*OPS} - HOLDING - OF_A_CPU)
    left = {name: left_by([name]) for name in names}
    assert not {name: shapes for name, shapes in left.items() if shapes}


def test_images_whose_channels_are_not_theirs_alone(device, only_new_objects):
    """The kernels of a norm's stages, and those of its gradient."""
    from fusionrt.ops import group_norm

    before = with_memory()
    x = torch.randn(2, 6, 5, 3, device=device).contiguous(memory_format=torch.channels_last).requires_grad_()
    group_norm(x, 3).sum().backward()
    del x
    assert [tuple(t.shape) for t in with_memory().values() if id(t) not in before] == []
