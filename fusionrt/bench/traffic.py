"""Bytes: the least that a call must move, what an unfused chain moves, and what a copy reaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusionrt.array import is_foreign, to_torch
from fusionrt.bench import ceilings, timing

_CUDA = 2  # of DLPack's device types


def arrays(tree: Any) -> list[Any]:
    """Torch tensors and other libraries' arrays, in any nesting of tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) or is_foreign(leaf)]


def tensors(tree: Any) -> list[torch.Tensor]:
    """The arrays as torch tensors on the same memory."""
    return [a if isinstance(a, torch.Tensor) else to_torch(a, "benchmark", "array")[0] for a in arrays(tree)]


def device_of(tree: Any, wanted: str | torch.device | None = None) -> torch.device:
    """Where a call on these inputs runs: as asked, or on the GPU that holds an array, or the CPU.

    Without any array it is the GPU if there is one.
    """
    if wanted is not None:
        if str(wanted).partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"benchmark: device must be cpu or cuda, got {wanted}")
        device = torch.device(wanted)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"benchmark: device is {device}, and there is no CUDA device")
        return _numbered(device)
    found = arrays(tree)
    on_gpu = (d for d in map(_device, found) if d.type == "cuda")
    first = next(on_gpu, None)
    if first is None and not found and torch.cuda.is_available():
        first = torch.device("cuda")
    return torch.device("cpu") if first is None else _numbered(first)


def _device(array: Any) -> torch.device:
    if isinstance(array, torch.Tensor):
        return array.device
    kind, index = array.__dlpack_device__() if hasattr(array, "__dlpack_device__") else (1, 0)
    return torch.device("cuda", index) if kind == _CUDA else torch.device("cpu")


def _numbered(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


# -- the least ---------------------------------------------------------------------------------------

def extent(array: Any) -> int:
    """Bytes of the elements that lie apart in memory: an expanded dimension and windows that overlap count
    once."""
    if not isinstance(array, torch.Tensor):
        return int(array.nbytes)
    apart = math.prod(n if stride or not n else 1
                      for n, stride in zip(array.shape, array.stride(), strict=True))
    return min(apart * array.itemsize, _span(array))


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def least_bytes(inputs: Any, outputs: Any) -> int:
    """Every input read once and every output written once, in bytes of their own dtypes.

    Memory that several of the inputs share counts once; an array that is both input and output (an op in
    place) is read and written. Numbers count nothing.

        least_bytes((x, bias), y)    # x.nbytes + bias.nbytes + y.nbytes
    """
    return sum(_together(tensors(tree)) for tree in (inputs, outputs))


def _together(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all. Those whose ranges of memory meet have no more than lies between their ends."""
    views = {(*_where(t), t.dtype, t.shape, t.stride()): t for t in tensors}
    total = held = first = end = 0
    device = ""
    for (where, start), size, span in sorted((_where(t), extent(t), _span(t)) for t in views.values()):
        if where != device or start >= end:
            total += min(held, end - first)
            device, first, end, held = where, start, start, 0
        end, held = max(end, start + span), held + size
    return total + min(held, end - first)


def _where(tensor: torch.Tensor) -> tuple[str, int]:
    """The memory that it lies in, and at which address; a meta tensor has memory of its own."""
    if tensor.is_meta or not tensor.numel():
        return str(id(tensor)), 0
    return str(tensor.device), tensor.data_ptr()


# -- the unfused chain -------------------------------------------------------------------------------

class Chain(NamedTuple):
    """What torch's ops of a call move when each of them is a kernel of its own."""

    bytes: int                 # every op's inputs read and outputs written
    launches: int
    ops: tuple[str, ...]       # in order

    def bound(self, least: int) -> float:
        """The most that fusion can gain where memory decides: bytes of the chain / least bytes."""
        return self.bytes / least if least else math.nan


def unfused(function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
            ) -> Chain:
    """Run it once and count, below autograd, the ops that do work, and the tensors in and out of each.

    Views, detachments and uninitialised allocations count nothing. What one op does inside is not seen:
    some (dropout, batch norm, softmax of the CPU) launch more than one kernel.

        unfused(lambda x, b: torch.relu(x + b), (x, b)).launches    # 2
    """
    with _Counting() as seen:
        function(*args, **(kwargs or {}))
    return Chain(seen.bytes, len(seen.ops), tuple(seen.ops))


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.ops = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if not func.is_view and not name.startswith(_IDLE):
            read = [] if name in _FILLS or name.endswith("_like") else _read(func, args, kwargs)
            self.bytes += _together(read) + _together(_leaves(out))
            self.ops.append(name)
        return out


_IDLE = ("empty", "new_empty", "detach", "_unsafe_view", "lift_fresh", "resize_", "set_")
_FILLS = ("fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_",
          "new_zeros", "new_ones", "new_full")  # what they are given is only written, or only a model


def _read(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    out = {a.name for a in func._schema.arguments if a.is_out}
    given = [value for name, value in kwargs.items() if name not in out]
    return _leaves((args, given))


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# -- the ceiling -------------------------------------------------------------------------------------

def copy_rate(nbytes: int, device: torch.device) -> float:
    """TB/s of a copy that moves as many bytes (4 GiB at most, so that it fits), measured now;
    on a GPU once a size and process."""
    nbytes = min(max(nbytes, 1 << 10), 4 << 30)
    if device.type == "cpu":
        return float(ceilings.cpu_copy(nbytes)["GB/s"]) / 1e3
    with torch.cuda.device(device), timing.stream():
        return float(ceilings.copy(nbytes)["TB/s"])
