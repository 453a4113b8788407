"""Which way the product of a linear layer takes: cuBLASLt's epilogue, ours, or torch's and a kernel."""

import pytest
import torch
from checking import BF16, F16, F32, F64, check_in_norm, forget
from test_linear import M, N, operands
from torch.nn import functional as F

import fusionrt as frt
from fusionrt import reference
from fusionrt.activation import finishing
from fusionrt.ops import gemm, gemv, linear, linear_path
from fusionrt.rehearsal import Source, collecting
from fusionrt.runtime import device as cuda


def test_cublaslts_epilogue(monkeypatch, device):
    """Taken for what it has. torch has the same op for a CPU, where its gelu is the erf form."""
    calls = []
    original = torch._addmm_activation
    monkeypatch.setattr(torch, "_addmm_activation", lambda *a, **k: calls.append(k) or original(*a, **k))
    where = torch.device("cuda:9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    decide = linear_path.route
    monkeypatch.setattr(linear_path, "route", lambda device, *args: decide(where, *args))
    forget(monkeypatch, linear)
    monkeypatch.setattr(gemm, "chosen", lambda *args: False)
    for rows in ((M,), (2, 3)):
        x, weight, bias = operands(F32, device, rows)
        check_in_norm(frt.linear_activation, (x, weight, bias, "relu"))
        with torch.no_grad():
            form = "tanh" if device == "cuda" else "none"
            torch.testing.assert_close(frt.linear_activation(x, weight, bias, frt.gelu_tanh),
                                       reference.linear_gelu(x, weight, bias, approximate=form))
        assert calls == [{"use_gelu": False}, {"use_gelu": True}]
        calls.clear()
    frt.linear_relu(x, weight)
    frt.linear_activation(x, weight, bias, "relu", dropout_p=0.5)
    frt.linear_activation(x, weight, bias, "gelu")
    assert calls == []


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("way", linear_path.OWN)
def test_our_product(way, fits, monkeypatch):
    """Where `route` says so, if it takes the operands: forward, with what a gradient needs, and residuals."""
    calls = []

    def planned(x, weight, bias, epilogue, residual, keep):
        def product(x, weight, bias, residual):
            calls.append((epilogue, residual is not None, keep))
            z = F.linear(x, weight, bias)
            y = F.gelu(z)
            return y if residual is None else y + residual, z if keep else None

        return product

    monkeypatch.setattr(linear_path, "route", lambda *args: way)
    forget(monkeypatch, linear)
    monkeypatch.setattr(linear_path.OWN[way], "supports", lambda *args: fits)
    monkeypatch.setattr(linear_path.OWN[way], "Planned", planned)
    args = operands(F32, "cpu", (2, 3))
    residual = torch.randn(2, 3, N)
    out, _ = check_in_norm(frt.linear_activation, (*args, "gelu"))
    with torch.no_grad():
        torch.testing.assert_close(frt.linear_gelu(*args), out)
        torch.testing.assert_close(frt.linear_activation(*args, "gelu", residual=residual), out + residual)
    plain, added = (finishing("op", "gelu", False, with_residual, False).operator.outputs[0]
                    for with_residual in (False, True))
    assert calls == ([(plain, False, True), (plain, False, False), (added, True, False)] if fits else [])


@pytest.mark.parametrize("error", linear_path.UNAVAILABLE)
def test_without_our_product(error, monkeypatch):
    """While a graph is captured, or where nothing may be compiled."""
    def product(*args):
        raise error("linear_activation")

    monkeypatch.setattr(linear_path, "route", lambda *args: linear_path.GEMM)
    forget(monkeypatch, linear)
    monkeypatch.setattr(gemm, "supports", lambda *args: True)
    monkeypatch.setattr(gemm, "Planned", product)
    check_in_norm(frt.linear_activation, (*operands(F32, "cpu", (2, 3)), "gelu"))


def test_route(monkeypatch):
    """By cuBLASLt where it can be asked, by our product where that says that it is faster."""
    gpu, capability = torch.device("cuda:9"), (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    relu, tanh, silu = (finishing("op", name, False, False, False).operator.outputs[0]
                        for name in ("relu", "gelu_tanh", "silu"))
    ours = []
    monkeypatch.setattr(gemm, "chosen", lambda *args: ours.append(args) or (args[5] is silu and args[0] > 64))
    monkeypatch.setattr(gemv, "chosen", lambda m, *rest: m < 4)

    def way(epilogue, library=True, device=gpu, dtype=BF16, m=8, rows=True):
        linear_path.route.cache_clear()
        return linear_path.route(device, dtype, m, 16, 32, epilogue, library, rows)

    assert way(relu) == way(tanh) == linear_path.EPILOGUE
    assert ours[-1] == (8, 16, 32, BF16, gpu, tanh, True)
    assert way(relu, library=False) == way(silu) == way(relu, dtype=F64) == linear_path.KERNEL
    assert way(relu, device=torch.device("cpu")) == linear_path.KERNEL
    assert way(silu, m=128) == linear_path.GEMM
    assert way(silu, m=3) == way(relu, m=3) == linear_path.GEMV
    assert way(silu, m=128, rows=False) == way(silu, m=3, rows=False) == linear_path.KERNEL
    assert way(relu, m=3, rows=False) == linear_path.EPILOGUE
    capability = (8, 9)
    assert way(tanh) == linear_path.KERNEL
    assert way(relu) == linear_path.EPILOGUE
    linear_path.route.cache_clear()


def test_a_weight_of_columns_is_cuBLASs(monkeypatch):
    """As that of the Conv1D of transformers: its activation is cuBLASLt's, where that has it."""
    asked = []
    monkeypatch.setattr(linear_path, "route", lambda *args: asked.append(args[-1]) or linear_path.KERNEL)
    forget(monkeypatch, linear)
    x, weight, bias = operands(F32, "cpu", (3,))
    with torch.no_grad():
        for w in (weight, weight.t().contiguous().t()):
            found = frt.linear_activation(x, w, bias, "gelu")
            torch.testing.assert_close(found, F.gelu(F.linear(x, weight, bias)))
    assert asked == [True, False]


@pytest.mark.parametrize(("rows", "way"), [(512, "gemm_sm90"), (4, "gemv")])
def test_one_rehearsals_way_is_not_anothers(rows, way, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_90")
    monkeypatch.setattr(cuda, "multiprocessors", lambda index: 132)
    x, weight = (torch.empty(n, 1024, device="meta", dtype=F16) for n in (rows, 1024))
    for device in ("cuda", "cuda:9", "cpu", "cuda:9", "cuda"):
        with torch.no_grad(), collecting(device) as needed:
            frt.linear_activation(x, weight, activation="silu")
        ours = [kernel.entry for kernel in needed if isinstance(kernel, Source)]
        assert ours == ([way] if device == "cuda:9" else [])
