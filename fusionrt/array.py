"""The boundary: arrays that are not torch's cross by DLPack, once, and go back as what they were."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Container
from typing import Any, ParamSpec, TypeVar

import torch

from fusionrt.dtypes import FLOATS
from fusionrt.expr import Expr

P = ParamSpec("P")
R = TypeVar("R")
Restore = Callable[[torch.Tensor], Any]


def is_foreign(value: object) -> bool:
    return not isinstance(value, (torch.Tensor, int, float)) and (
        hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__"))


def shape_of(value: Any) -> Any:
    """None of a number, which Dynamo may trace and not ask for what it has not, of a traced value of `fuse`,
    and of what is no array."""
    return None if isinstance(value, (int, float, Expr)) else getattr(value, "shape", None)


def to_torch(value: Any, op: str, name: str) -> tuple[torch.Tensor, Restore]:
    """The same memory as a torch tensor, and how to turn a result into the caller's kind."""
    numpy, cupy = sys.modules.get("numpy"), sys.modules.get("cupy")
    try:
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            return _from_numpy(numpy, value), _to_numpy
        if cupy is not None and isinstance(value, cupy.ndarray):
            return torch.from_dlpack(value), cupy.from_dlpack
        if not hasattr(value, "__dlpack__"):  # a picture of Pillow's, say
            numpy = importlib.import_module("numpy")
            return _from_numpy(numpy, numpy.asarray(value)), _to_numpy
        return torch.from_dlpack(value), type(value).from_dlpack if hasattr(
            type(value), "from_dlpack") else _library_from_dlpack(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise TypeError(f"{op}: {name} ({type(value).__module__}.{type(value).__qualname__}) cannot be "
                        f"viewed as a tensor: {error}") from error


def converted(op: str, arrays: dict[str, Any], numbers: Container[str] | None = None
              ) -> tuple[list[Any], Callable[[Any], Any]]:
    """All as torch tensors, and what a result becomes: torch's among other arrays decide, as they may
    need a gradient. Beside them NumPy's scalars are `numbers`, all or those of some names."""
    has_torch, numpy = any(isinstance(a, torch.Tensor) for a in arrays.values()), sys.modules.get("numpy")

    def as_torch(name: str, a: Any) -> tuple[Any, Any]:
        if has_torch and numpy is not None and isinstance(a, numpy.generic) and (
                numbers is None or name in numbers):
            number = a.item()  # beside tensors, on whatever device these are
            if not isinstance(number, numpy.generic):  # as longdouble's is
                return number, None
        return to_torch(a, op, name) if is_foreign(a) else (a, None)

    found = [as_torch(name, a) for name, a in arrays.items()]
    backs = [back for _, back in found if back is not None]
    return [a for a, _ in found], (lambda result: result) if has_torch else backs[0]


def taking_arrays(function: Callable[P, R], names: str, numbers: Container[str] | None = None
                  ) -> Callable[P, R]:
    """`function`, whose arguments of these names may be other arrays as well, as `converted` takes them."""
    named, signature = names.split(), inspect.signature(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Any:
        if not (any(map(is_foreign, args)) or any(map(is_foreign, kwargs.values()))):
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        arrays = {name: given.arguments[name] for name in named if name in given.arguments}
        if not any(map(is_foreign, arrays.values())):  # what was, is an option
            return function(*args, **kwargs)
        found, restore = converted(function.__name__, arrays, numbers)
        given.arguments.update(zip(arrays, found, strict=True))
        result: Any = function(*given.args, **given.kwargs)
        return tuple(map(restore, result)) if isinstance(result, tuple) else restore(result)

    return called


def check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse sparse tensors and nested ones."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        found = "a nested one" if tensor.is_nested else tensor.layout
        raise TypeError(f"{op}: {name} must be a dense tensor, got {found}")


def check_floating(op: str, name: str, value: Any) -> None:
    """Refuse what is no dense tensor of a floating dtype."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor or an array, got {type(value).__name__}")
    check_dense(op, name, value)
    if value.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} must have a floating dtype (float16, bfloat16, float32, float64), "
                        f"got {value.dtype}")


def check_writeable(op: str, **tensors: Any) -> None:
    """Raises ValueError for arrays that cannot be written to: for what `op` is about to write to."""
    if torch.compiler.is_dynamo_compiling():  # which has torch's tensors alone
        return
    for name, tensor in tensors.items():
        reason = getattr(tensor, _NOT_WRITEABLE, None)
        if reason is not None:
            raise ValueError(f"{op}: {name} would be written to, but {reason}; pass a copy")


_NOT_WRITEABLE = "_fusionrt_not_writeable"  # why


class _Writeable:
    """Read-only memory shown as writeable, as torch warns about it. Who writes asks `check_writeable`."""

    def __init__(self, array: Any) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _from_numpy(numpy: Any, value: Any) -> torch.Tensor:
    masked = sys.modules.get("numpy.ma")
    if masked is not None and isinstance(value, masked.MaskedArray):
        raise TypeError("it has a mask, which would be lost: fill it, or pass its data and mask")
    value = numpy.asarray(value)
    is_bfloat16 = value.dtype.name == "bfloat16"  # ml_dtypes: NumPy itself knows no such type
    if is_bfloat16:
        value = value.view(numpy.int16)
    reason = None if value.flags.writeable else "is a read-only array"
    if any(step < 0 for step in value.strides):  # which torch has not
        value, reason = value.copy(), "is an array with negative strides"
    tensor = torch.from_numpy(value if value.flags.writeable else numpy.asarray(_Writeable(value)))
    tensor = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    if reason is not None:
        setattr(tensor, _NOT_WRITEABLE, reason)
    return tensor


def _to_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        try:
            bfloat16 = importlib.import_module("ml_dtypes").bfloat16
        except ImportError:
            raise TypeError("a bfloat16 result needs ml_dtypes to become a NumPy array: pip install "
                            "ml_dtypes") from None
        return tensor.view(torch.int16).numpy().view(bfloat16)
    return tensor.numpy()


def _library_from_dlpack(value: Any) -> Restore:
    """`from_dlpack` of the array library that `value` belongs to (array API standard)."""
    namespace = value.__array_namespace__() if hasattr(value, "__array_namespace__") else None
    found = getattr(namespace, "from_dlpack", None)
    return found if found is not None else (lambda tensor: tensor)
