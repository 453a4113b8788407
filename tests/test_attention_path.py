"""By which kernels attention is computed: for each machine and kind of call, and what is called then."""

import pytest
import torch
from checking import BF16, F16, F32, F64

import fusionrt as frt
from fusionrt.ops import attention_path as path
from fusionrt.ops.attention_masked import laid_out

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
NEW, OLD = 91900, 91002  # cuDNN
PLAIN = path.Kind(BF16, 8, 8, 300, 300, 64, 64, False, False, False, False, 0.0, True)
LONG = {"queries": path.LONG, "keys": path.LONG, "recorded": False}


@pytest.mark.parametrize("machine, changes, expected", [
    ((HOPPER, NEW), {}, ["cudnn", "flash", "efficient", "chunks"]),
    (((10, 0), NEW), {"causal": True}, ["cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {"causal": True, "queries": 128, "keys": 128}, ["efficient", "cudnn", "flash", "chunks"]),
    ((HOPPER, NEW), {"causal": True, "queries": 128, "keys": 128, "recorded": False},
     ["cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {"causal": True, "queries": 256, "keys": 256}, ["cudnn", "flash", "efficient", "chunks"]),
    ((AMPERE, NEW), {}, ["flash", "efficient", "chunks"]),
    (((12, 0), NEW), {}, ["flash", "efficient", "chunks"]),
    ((TURING, NEW), {"dtype": F16}, ["efficient", "chunks"]),
    ((TURING, NEW), {}, ["chunks"]),
    ((HOPPER, OLD), {}, ["flash", "efficient", "chunks"]),
    ((HOPPER, OLD), {"queries": 256, "keys": 512}, ["cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {"queries": 1}, ["flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {"dropout_p": 0.1}, ["flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {"dropout_p": 0.125}, ["cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {"masked": True}, ["efficient", "chunks"]),
    ((HOPPER, NEW), {"masked": True, "recorded": False}, ["cudnn", "efficient", "chunks"]),
    ((HOPPER, NEW), {"masked": True, "queries": 256, "keys": 512}, ["cudnn", "efficient", "chunks"]),
    ((HOPPER, NEW), {"causal": True, "queries": 400}, ["hopper", "efficient", "chunks"]),
    ((HOPPER, NEW), {"causal": True, "queries": 400, "head_dim": 80}, ["efficient", "chunks"]),
    ((AMPERE, NEW), {"causal": True, "queries": 400}, ["efficient", "chunks"]),
    ((HOPPER, NEW), {"band": True}, ["hopper", "flash", "chunks"]),
    ((AMPERE, NEW), {"band": True}, ["flash", "chunks"]),
    ((HOPPER, NEW), {"band": True, "dropout_p": 0.1}, ["flash", "chunks"]),
    ((HOPPER, NEW), {"scored": True}, ["hopper", "chunks"]),
    ((HOPPER, NEW), LONG, ["hopper", "cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {**LONG, "recorded": True}, ["cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {**LONG, "causal": True}, ["cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {**LONG, "causal": True, "head_dim": 128, "value_dim": 128},
     ["hopper", "cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {**LONG, "queries": 1}, ["flash", "efficient", "chunks"]),
    (((10, 0), NEW), LONG, ["cudnn", "flash", "efficient", "chunks"]),
    ((HOPPER, NEW), {"scored": True, "head_dim": 80, "value_dim": 80}, ["chunks"]),
    ((HOPPER, NEW), {"scored": True, "value_dim": 128}, ["chunks"]),
    ((HOPPER, NEW), {"scored": True, "masked": True}, ["chunks"]),
    ((HOPPER, NEW), {"scored": True, "positive": False}, ["chunks"]),
    ((HOPPER, NEW), {"scored": True, "dtype": F32}, ["chunks"]),
    (((10, 0), NEW), {"scored": True}, ["chunks"]),
    ((HOPPER, NEW), {"band": True, "dtype": F32}, ["chunks"]),
    ((HOPPER, NEW), {"band": True, "masked": True}, ["chunks"]),
    ((HOPPER, NEW), {"dtype": F32}, ["efficient", "chunks"]),
    ((HOPPER, NEW), {"dtype": F64}, ["chunks"]),
    ((HOPPER, NEW), {"ours": True}, ["chunks"]),
    ((HOPPER, NEW), {"head_dim": 36, "value_dim": 36}, ["flash", "chunks"]),
    ((HOPPER, NEW), {"value_dim": 128}, ["cudnn", "efficient", "chunks"]),
    (((8, 6), NEW), {"head_dim": 256, "value_dim": 256}, ["efficient", "chunks"]),
    (((8, 6), NEW), {"head_dim": 256, "value_dim": 256, "recorded": False}, ["flash", "efficient", "chunks"]),
], ids=str)
def test_candidates(machine, changes, expected):
    assert path.candidates(PLAIN._replace(**changes), *machine) == expected


@pytest.mark.parametrize("options, called", [
    ({}, "_scaled_dot_product_cudnn_attention"),
    ({"window": 64, "causal": True}, "fusionrt.attention_hopper"),
    ({"window": 64, "causal": True, "dim": 96}, "_flash_attention_forward"),
    ({"dim": 256}, "_scaled_dot_product_flash_attention"),
    ({"dtype": F32, "causal": True}, "_scaled_dot_product_efficient_attention"),
    ({"mask": (2, 1, 1, 300)}, "fusionrt.masked_attention"),
    ({"softcap": 2.0}, "fusionrt.attention_hopper"),
    ({"softcap": 2.0, "dim": 96}, "fusionrt.attention_chunks"),
    ({"disabled": "cudnn"}, "_scaled_dot_product_flash_attention"),
    ({"length": path.LONG}, "fusionrt.attention_hopper"),
    ({"length": path.LONG, "disabled": "cudnn"}, "_scaled_dot_product_flash_attention"),
], ids=str)
def test_what_is_called_on_a_gpu(options, called, monkeypatch):
    """Of tensors without memory, on any machine; results have the layout of the operands."""
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Calls(TorchDispatchMode):
        names = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names = (*self.names, str(func))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(path, "_hardware", lambda index: (HOPPER, NEW))
    options = {"dtype": BF16, "dim": 64, "length": 300, "disabled": None, **options}
    disabled, dtype, dim, length = (options.pop(name) for name in ("disabled", "dtype", "dim", "length"))
    if disabled:
        monkeypatch.setattr(torch._C, f"_get_{disabled}_sdp_enabled", lambda: False)
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(2, length, 8, dim, dtype=dtype, device="cuda").transpose(1, 2)
        if "mask" in options:
            options["mask"] = torch.empty(options["mask"], dtype=torch.bool, device="cuda")
        with Calls() as calls:
            out = frt.attention(q, q, q, **options)
    assert any(called in name for name in calls.names)
    assert out.shape == q.shape and out.stride() == q.stride()


@pytest.mark.parametrize("of_output", ["rows", "heads"])
def test_gradients_lie_as_outputs(of_output):
    """cuDNN's plan for a call may be one of a call whose gradient lay otherwise."""
    out = torch.empty(2, 3, 5, 8)
    out = out if of_output == "heads" else torch.empty(2, 5, 3, 8).transpose(1, 2)
    grads = {"heads": torch.randn(2, 3, 5, 8), "rows": torch.randn(2, 5, 3, 8).transpose(1, 2),
             "sum": torch.ones(()).expand(2, 3, 5, 8), "odd": torch.randn(241)[1:].view(2, 3, 5, 8)}
    for name, grad in grads.items():
        found = laid_out(grad, out.stride())
        assert (found is grad) == (name == of_output)
        assert found.stride() == out.stride() and found.data_ptr() % 16 == 0
        torch.testing.assert_close(found, grad, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_that_lie_otherwise_than_earlier_ones(masked):
    q, k, v = (torch.randn(2, 4, 88, 64, device="cuda", dtype=BF16).requires_grad_() for _ in range(3))
    mask = torch.rand(88, 88, device="cuda") < 0.9 if masked else None
    grad = torch.randn_like(q)
    found = []
    for other in (grad, grad.transpose(1, 2).contiguous().transpose(1, 2)):
        found.append(torch.autograd.grad(frt.attention(q, k, v, mask=mask), (q, k, v), other))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
