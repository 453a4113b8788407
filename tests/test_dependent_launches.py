"""In a graph a kernel begins before the one ahead has ended, and waits by itself for what that one writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checking import captured

from fusionrt import ops

SOURCES = Path(__file__).parents[1] / "kernels_src"


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.cu")), ids=lambda path: path.stem)
def test_every_kernel_waits(path: Path) -> None:
    """One that does not would read what is not there yet."""
    for kernel in path.read_text().split("__global__")[1:]:
        body = re.split(r"^}", kernel, maxsplit=1, flags=re.MULTILINE)[0]
        assert "wait_for_kernel_before();" in body
        assert "return" not in body.split("wait_for_kernel_before();")[0]


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
