"""The ops by family, on CUDA tensors only: `kernels.elementwise.add_relu`, `kernels.fused_bias_gelu`."""

from types import ModuleType
from typing import Any

from fusionrt import op_names, ops

# Modules of `fusionrt.ops`.
_FAMILIES = {"elementwise": ("pointwise", "quantize", "activations"),
             "fusion": ("pointwise", "dropout", "norm", "batch_norm", "embedding", "linear", "ffn",
                        "convolution", "attention", "softmax"),
             "activation": ("activations",),
             "quantization": ("quantize",), "normalization": ("norm", "batch_norm"),
             "reduction": ("reduction",), "attention": ("attention", "qkv", "softmax", "rotary"),
             "convolution": ("convolution",),
             "loss": ("loss", "cross_entropy", "linear_cross_entropy")}


class _Family(ModuleType):
    """Members are found when they are asked for, as are those of `ops`."""

    def __init__(self, name: str, modules: tuple[str, ...]) -> None:
        super().__init__(f"{__name__}.{name}", f"CUDA kernels of the family {name}.")
        members = {op for module in modules for op in op_names.OPS[module]}
        self.__all__ = sorted(members | {alias for alias, op in op_names.ALIASES.items() if op in members})

    def __getattr__(self, name: str) -> Any:
        if name not in self.__all__:
            raise AttributeError(f"module {self.__name__!r} has no op {name!r}")
        return getattr(ops, name).cuda

    def __dir__(self) -> list[str]:
        return self.__all__


elementwise, fusion, activation, quantization, normalization, reduction, attention, convolution, loss = (
    _Family(name, modules) for name, modules in _FAMILIES.items())


def __getattr__(name: str) -> Any:
    try:
        return getattr(ops, name).cuda
    except AttributeError:
        raise AttributeError(f"module 'fusionrt.kernels' has no op {name!r}") from None
