"""The ops by family, on CUDA tensors only: `kernels.elementwise.add_relu`, `kernels.fused_bias_gelu`."""

from types import ModuleType
from typing import Any

from fusionrt import ops

# Modules of `fusionrt.ops`.
_FAMILIES = {"elementwise": ("pointwise", "quantize", "activations"),
             "fusion": ("pointwise", "dropout", "norm", "batch_norm", "embedding", "linear", "ffn",
                        "convolution"),
             "activation": ("activations",),
             "quantization": ("quantize",), "normalization": ("norm", "batch_norm"),
             "reduction": ("reduction",), "attention": ("attention", "qkv", "softmax", "rotary"),
             "convolution": ("convolution",),
             "loss": ("loss", "cross_entropy", "linear_cross_entropy")}


def _family(name: str, modules: tuple[str, ...]) -> ModuleType:
    family = ModuleType(f"{__name__}.{name}", f"CUDA kernels of the family {name}.")
    members = {op for op in ops.__all__ if getattr(ops, op).__module__.rpartition(".")[2] in modules}
    for op in members | {alias for alias, op in ops.ALIASES.items() if op in members}:
        setattr(family, op, getattr(ops, op).cuda)
    return family


elementwise, fusion, activation, quantization, normalization, reduction, attention, convolution, loss = (
    _family(name, modules) for name, modules in _FAMILIES.items())


def __getattr__(name: str) -> Any:
    try:
        return getattr(ops, name).cuda
    except AttributeError:
        raise AttributeError(f"module 'fusionrt.kernels' has no op {name!r}") from None
