"""In a graph a kernel begins before the one ahead has ended, and waits by itself for what that one writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checking import captured, needs_nvrtc
from machine_code import reads_too_early

from fusionrt import ops
from fusionrt.problem import Problem
from fusionrt.rehearsal import collecting
from fusionrt.runtime import compiler, launch

SOURCES = Path(__file__).parents[1] / "kernels_src"


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_every_kernel_waits(path: Path) -> None:
    """One that does not would read what is not there yet."""
    for kernel in path.read_text().split("__global__")[1:]:
        body = re.split(r"^}", kernel, maxsplit=1, flags=re.MULTILINE)[0]
        assert "wait_for_kernel_before();" in body
        assert "return" not in body.split("wait_for_kernel_before();")[0]


@needs_nvrtc
@pytest.mark.parametrize(("arch", "rows", "columns", "dtype"), [
    ("sm_90", 512, 4096, torch.float32), ("sm_90", 1024, 2048, torch.float32),
    ("sm_90", 1024, 4096, torch.bfloat16), ("sm_90", 2048, 2048, torch.bfloat16),
    ("sm_100", 64, 4096, torch.float32), ("sm_100", 512, 4096, torch.bfloat16)])
def test_nothing_is_read_before_the_wait(arch, rows, columns, dtype) -> None:
    """The compiler had moved loads of read-only memory to before it."""
    with collecting("cuda", True) as needed:
        x = torch.empty(rows, columns, dtype=dtype, device="meta", requires_grad=True)
        for op in (ops.softmax, lambda x: ops.layer_norm(x, (columns,))):
            y = op(x)
            y.backward(torch.empty_like(y))
    sources = [s for problem in needed if isinstance(problem, Problem) for s in launch.sources(problem)]
    texts = {source.text: source for source in sources}
    assert len(texts) >= 4
    for text, source in texts.items():
        entry = compiler.build(compiler.seen_by(arch, text), source.entry, arch, "rows")
        assert reads_too_early(entry.payload) == []


@pytest.mark.gpu
@pytest.mark.parametrize("rows, columns", [(512, 4096), (1024, 2048)])
@pytest.mark.parametrize("ahead", [(8192, 256), (4096, 512), (2048, 1024)])
def test_a_gradient_behind_a_kernel_that_lets_it_begin(rows, columns, ahead) -> None:
    """What the kernel ahead writes is other in each replay."""
    x, v = torch.randn(rows, columns, device="cuda", requires_grad=True), torch.empty(*ahead, device="cuda")

    def run():
        y = ops.softmax(x)  # in here: a backward pass goes to the stream of its forward pass
        return torch.autograd.grad(y, x, ops.softmax(v).view(rows, columns))

    inputs, wanted = [torch.randn(*ahead, device="cuda") * scale for scale in (1, 5)], []
    for given in inputs:
        v.copy_(given)
        wanted.append(run()[0].clone())
    graph, found = captured(run)
    for k in range(200):
        v.copy_(inputs[k % 2])
        graph.replay()
        assert torch.equal(found[0], wanted[k % 2])


def chain(x, y, weight, bias, square):
    """Kernels of several templates, and between them those of torch and of its library, copies and forks."""
    z = ops.layer_norm(ops.add_relu(x, y), x.shape[-1:], weight, bias)
    copy = torch.zeros_like(z)
    copy.copy_(z)
    z = ops.bias_gelu(copy, bias) @ square
    z = ops.softmax(ops.swish_multiply(z, x))
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        left = ops.bias_relu(z, bias)
    right = ops.bias_silu(z, bias)
    torch.cuda.current_stream().wait_stream(beside)
    z = ops.add_relu(left, right)
    ones = torch.empty_like(z).fill_(1.0)
    z = ops.rms_norm(ops.add_relu(z, ones), z.shape[-1:], weight)
    leaf = bias.detach().requires_grad_()
    return z, *torch.autograd.grad(ops.bias_gelu(z, leaf).float().sum(), leaf), z.sum(0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, columns", [(1, 64), (33, 256), (4096, 1024), (16384, 2048)])
def test_a_chain_in_a_graph_has_the_bits_of_calls(rows, columns, dtype) -> None:
    x, y = (torch.randn(rows, columns, device="cuda", dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(columns, device="cuda", dtype=dtype) for _ in range(2))
    square = torch.randn(columns, columns, device="cuda", dtype=dtype) / columns ** 0.5
    wanted = [t.clone() for t in chain(x, y, weight, bias, square)]
    graph, found = captured(lambda: chain(x, y, weight, bias, square))
    for _ in range(20):
        for t in found:
            t.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
