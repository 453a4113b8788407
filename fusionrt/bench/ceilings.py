"""What the memory of this machine can do, measured in the same run as what is compared with it."""

from __future__ import annotations

import functools

import torch

from fusionrt.bench import sampling, timing


def copy(nbytes: int) -> dict[str, float | str | int]:
    """The best rate of a device copy that moves `nbytes` (half read, half written), in TB/s.

    Both torch's `copy_`, issued eagerly (in a graph it becomes a memcpy node, which is slower from
    1 GB on), and an elementwise kernel, replayed as everything else is. Sizes are rounded to four
    significant bits, so that neighbours share a measurement.
    """
    return _copy(_rounded(nbytes), torch.cuda.current_device())


def _rounded(nbytes: int) -> int:
    drop = max(0, nbytes.bit_length() - 4)
    return ((nbytes + (1 << drop >> 1)) >> drop) << drop


@functools.cache
def _copy(nbytes: int, device: int) -> dict[str, float | str | int]:
    sources = [torch.randn(nbytes // 8, device="cuda") for _ in range(timing.n_sets(nbytes))]
    pairs = [(one, torch.empty_like(one)) for one in sources]
    chosen = [pairs[i % len(pairs)] for i in range(timing.n_calls(nbytes))]
    times = {"torch.neg": timing.replayed({"": [functools.partial(torch.neg, src, out=dst)
                                                for src, dst in chosen]})[""].us}
    if nbytes >= timing.LARGE:
        copies = [functools.partial(dst.copy_, src) for src, dst in chosen]
        times["copy_"] = sampling.issued({"": copies})[""].us
    best = min(times, key=lambda name: times[name])
    rate = round(nbytes / times[best] / 1e6, 3)
    return {"bytes": nbytes, "us": times[best], "TB/s": rate, "by": best}


def read(nbytes: int) -> dict[str, float | str | int]:
    """The rate in TB/s of a kernel that reads `nbytes` and writes nothing, kernels_src/read.cu."""
    return _read(_rounded(nbytes), torch.cuda.current_device())


@functools.cache
def _read(nbytes: int, device: int) -> dict[str, float | str | int]:
    from fusionrt.runtime.kernel import Kernel
    from fusionrt.runtime.source import members, pointer

    blocks = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    kernel = Kernel("read", "read", [pointer("unsigned", "x"), pointer("unsigned", "out", const=False),
                                     *members("long long", "vectors"), *members("unsigned", "never")])
    sets = [torch.randn(nbytes // 4, device="cuda") for _ in range(timing.n_sets(nbytes))]
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    never = (1 << 32) - 1
    calls = [functools.partial(kernel, out.device, blocks, sets[i % len(sets)].data_ptr(), out.data_ptr(),
                               nbytes // 16, never) for i in range(timing.n_calls(nbytes))]
    us = timing.replayed({"": calls})[""].us
    return {"bytes": nbytes, "us": us, "TB/s": round(nbytes / us / 1e6, 3), "by": "read.cu"}


def cpu_copy(nbytes: int) -> dict[str, float | str | int]:
    """The same on the CPU, in GB/s: `copy_` with torch's threads, into memory that is there already."""
    return _cpu_copy(max(4096, _rounded(nbytes)))


@functools.cache
def _cpu_copy(nbytes: int) -> dict[str, float | str | int]:
    src = torch.randn(nbytes // 8, dtype=torch.float32, device="cpu")
    dst = torch.empty_like(src)
    us = timing.cpu({"": lambda: dst.copy_(src)})[""].us
    return {"bytes": nbytes, "us": us, "GB/s": round(nbytes / us / 1e3, 2), "by": "copy_"}
