"""Images from one layout to the other: exactly torch's copies."""

import pytest
import torch
from checking import BF16, F16, F32, needs_nvrtc

from fusionrt.ops import transposition
from fusionrt.runtime import compiler

SHAPES = [(1, 16, 1, 1), (2, 64, 8, 8), (3, 65, 7, 9), (2, 66, 7, 10), (2, 31, 64, 2), (1, 130, 1, 33),
          (0, 16, 4, 4), (70000, 16, 1, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(shape, dtype, odd):
    room = torch.randn(torch.Size(shape).numel() + odd, device="cuda").to(dtype)
    x = room[int(odd):].view(shape)
    last = transposition.channels_last(x)
    assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, x, rtol=0, atol=0)
    back = transposition.contiguous(last)
    assert back.is_contiguous()
    torch.testing.assert_close(back, x, rtol=0, atol=0)


@pytest.mark.gpu
def test_few_channels_and_many_elements():
    x = torch.randn(2, 3, 5, 7, device="cuda")
    torch.testing.assert_close(transposition.channels_last(x), x, rtol=0, atol=0)
    x = torch.zeros(2**15 + 1, 64, 32, 32, device="cuda", dtype=F16)  # more than 2^31 elements
    x[-1].normal_()
    last = transposition.channels_last(x)
    assert torch.equal(last[-1], x[-1])
    x.fill_(1)
    assert torch.equal(transposition.contiguous(last)[-1], last[-1])


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("kind", [(2, 2), (2, 1), (4, 1)], ids=str)
def test_kernel_compiles(kind, arch):
    kernel = transposition.kernel(*kind)
    found = compiler.cubin(kernel.text, kernel.stem, arch, kernel.name)[0].metadata
    assert (found["spills"], found["stack"], found["warnings"]) == (0, 0, 0)
