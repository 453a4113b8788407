"""What our ops are compared with, where it is installed: a rival is a name and a function for each op.

A rival that cannot run says why; rows and listings then say "absent", and never a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusionrt.catalogue import Op

Function = Callable[..., Any]


@dataclass(frozen=True)
class Rival:
    """`missing(device)`: why it cannot run there, or None. `find(op)`: a function with the op's signature,
    or None if the rival has no such op."""

    name: str
    what: str
    missing: Callable[[str], str | None]
    find: Callable[[Op], Function | None]
    overwrites: bool = False                # its backward pass writes over tensors that it was given
    synchronises: frozenset[str] = frozenset()  # ops that wait for the device: no CUDA graph can hold them


def choose(names: Sequence[str]) -> list[Rival]:
    """Raises ValueError for a name that is no rival's."""
    for name in names:
        if name not in RIVALS:
            raise ValueError(f"no rival {name!r}; there are {', '.join(RIVALS)}")
    return [RIVALS[name] for name in dict.fromkeys(names)]


def _never(device: str) -> str | None:
    return None


def _package(module: str, package: str) -> Callable[[str], str | None]:
    """Of a library of GPU kernels."""
    def missing(device: str) -> str | None:
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed"
        return None if device == "cuda" else "it needs a GPU"
    return missing


# -- torch -----------------------------------------------------------------------------------------

def _compiler_missing(device: str) -> str | None:
    if device == "cuda":
        return None if importlib.util.find_spec("triton") else "triton is not installed"
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    return None if any(c and shutil.which(c) for c in compilers) else "there is no C++ compiler"


def _compiled(mode: str | None) -> Callable[[Op], Function]:
    def compiled(op: Op) -> Function:
        from torch._functorch import config
        # A compiled backward pass may otherwise overwrite what it was given, and run only once.
        config.donated_buffer = False
        return torch.compile(op.reference, mode=mode, dynamic=False, fullgraph=True)
    return compiled


def fresh_compilers() -> None:
    """All references share one code object, of which Dynamo compiles eight versions and no more: forget those
    of the ops before."""
    if "torch._dynamo" in sys.modules:  # it takes a second to import
        torch._dynamo.reset()


# -- libraries -------------------------------------------------------------------------------------
# Imported where they are, so names and signatures are theirs: liger-kernel 0.8, apex and transformer-engine
# of 2025. A version without one of them has no such op.

def _from(functions: Callable[[], Mapping[str, Function | None]]) -> Callable[[Op], Function | None]:
    return lambda op: functions().get(op.__name__)


def _liger() -> Mapping[str, Function | None]:
    functional = importlib.import_module("liger_kernel.transformers.functional")

    def layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
        return functional.liger_layer_norm(x, weight, bias, eps)

    def rms_norm(x: Any, shape: Any, weight: Any, eps: float = 1e-6) -> Any:
        # In place would mean into the incoming gradient, which other variants read as well.
        return functional.liger_rms_norm(x, weight, eps, in_place=False)

    def softmax(x: Any, dim: int = -1) -> Any:
        return functional.liger_softmax(x)

    def cross_entropy(logits: Any, target: Any) -> Any:
        return functional.liger_cross_entropy(logits, target)

    return {"swish_multiply": functional.liger_swiglu, "geglu": functional.liger_geglu,
            "relu_squared": getattr(functional, "liger_relu_squared", None), "layer_norm": layer_norm,
            "rms_norm": rms_norm, "cross_entropy": cross_entropy,
            "softmax": softmax if hasattr(functional, "liger_softmax") else None}


def _apex() -> Mapping[str, Function | None]:
    normalization = importlib.import_module("apex.normalization.fused_layer_norm")

    def layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
        return normalization.fused_layer_norm_affine(x, weight, bias, shape, eps)

    def rms_norm(x: Any, shape: Any, weight: Any, eps: float = 1e-6) -> Any:
        return normalization.fused_rms_norm_affine(x, weight, shape, eps)

    return {"layer_norm": layer_norm, "rms_norm": rms_norm}


def _transformer_engine() -> Mapping[str, Function | None]:
    engine = importlib.import_module("transformer_engine.pytorch")

    def with_parameters(kind: str, names: Sequence[str]) -> Function:
        """Its norms are modules; ours are functions of the parameters."""
        modules: dict[Any, Any] = {}

        def norm(x: Any, shape: Any, *parameters: Any) -> Any:
            key = (shape, parameters[0].dtype)
            if key not in modules:
                module = getattr(engine, kind)(shape[0])
                modules[key] = module.to(x.device, parameters[0].dtype)
            given = dict(zip(names, parameters, strict=True))
            return torch.func.functional_call(modules[key], given, (x,))

        return norm

    return {"layer_norm": with_parameters("LayerNorm", ("weight", "bias")),
            "rms_norm": with_parameters("RMSNorm", ("weight",))}


RIVALS = {rival.name: rival for rival in (
    Rival("eager", "the unfused torch formula", _never, lambda op: op.reference),
    Rival("compile", "torch.compile of that formula", _compiler_missing, _compiled(None)),
    # Without CUDA graphs of its own: device times are those of a graph's replay anyway.
    Rival("compile-max", "the same with mode max-autotune-no-cudagraphs", _compiler_missing,
          _compiled("max-autotune-no-cudagraphs")),
    Rival("liger", "liger-kernel (its geglu is the tanh form)", _package("liger_kernel", "liger-kernel"),
          _from(_liger), overwrites=True, synchronises=frozenset({"cross_entropy"})),
    Rival("apex", "NVIDIA apex", _package("apex", "apex"), _from(_apex)),
    Rival("transformer-engine", "NVIDIA transformer-engine",
          _package("transformer_engine", "transformer-engine"), _from(_transformer_engine)))}
