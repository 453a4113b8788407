"""The ops by family, on CUDA tensors only: `kernels.elementwise.add_relu`, `kernels.fused_bias_gelu`."""

from types import ModuleType
from typing import Any

from fusionrt import ops
from fusionrt.ops import activations, dropout, pointwise, quantize

_FAMILIES = {"elementwise": (pointwise, quantize, activations), "fusion": (pointwise, dropout),
             "activation": (activations,), "quantization": (quantize,)}


def _family(name: str, modules: tuple[ModuleType, ...]) -> ModuleType:
    family = ModuleType(f"{__name__}.{name}", f"CUDA kernels of the family {name}.")
    members = {op for module in modules for op in ops.__all__ if hasattr(module, op)}
    for op in members | {alias for alias, op in ops.ALIASES.items() if op in members}:
        setattr(family, op, getattr(ops, op).cuda)
    return family


elementwise, fusion, activation, quantization = (
    _family(name, modules) for name, modules in _FAMILIES.items())


def __getattr__(name: str) -> Any:
    try:
        return getattr(ops, name).cuda
    except AttributeError:
        raise AttributeError(f"module 'fusionrt.kernels' has no op {name!r}") from None
