"""Converted models on disk: weights in safetensors, and what is known of them as JSON beside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.nn import Module

from fusionrt.bench.results import dumps
from fusionrt.convert.model import ModelConverter, conversion_report, record_of
from fusionrt.files import whole, write

FORMAT = 1


def _safetensors(who: str) -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"{who}: safetensors is not installed: pip install 'fusionrt[models]'") from error
    return safetensors.torch


def save_converted(converted: Module, path: str | Path) -> tuple[Path, Path]:
    """Write PATH.safetensors, the weights, and PATH.json: versions, statistics, validation and benchmark.

    The weights are those of the original's `state_dict`, tied ones once: safetensors.torch.load_model loads
    them into the class without fusionrt, `load_converted` with what was converted. Returns both paths.

    Raises:
        TypeError: `converted` is not what `auto_convert_model` returned, or `path` no path.
        ImportError: safetensors is not installed.

        save_converted(fast, "models/resnet50")
    """
    record_of(converted)
    tensors = _safetensors("save_converted")
    weights, facts = _paths("save_converted", path)
    weights.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", "fusionrt": str(FORMAT)}
    with whole(weights) as file:
        tensors.save_model(converted, str(file), metadata)  # contiguous: channels_last is not kept
    content = {"format": FORMAT, **conversion_report(converted).as_dict()}
    write(facts, dumps(content, indent=1) + "\n")
    return weights, facts


def load_converted(model: Module, path: str | Path) -> Module:
    """Load what `save_converted` wrote into `model`, in place, and return it converted in the same way.

    model: of the class and configuration that was saved, on any device. It is not validated once more.

    Raises:
        FileNotFoundError: one of the two files is not there.
        ValueError: PATH.json is of a later version, or no such file.
        RuntimeError: the weights are of another model.
        TypeError: `model` is no module, or `path` no path.
        ImportError: safetensors is not installed.

        fast = load_converted(torchvision.models.resnet50(), "models/resnet50")
    """
    tensors = _safetensors("load_converted")
    if not isinstance(model, Module):
        raise TypeError(f"load_converted: model must be a module, got {type(model).__name__}")
    weights, facts = _paths("load_converted", path)
    for file in (weights, facts):
        if not file.exists():
            raise FileNotFoundError(f"load_converted: there is no {file}")
    content = _facts(facts)
    tensors.load_model(model, str(weights))
    converter = ModelConverter(validate_accuracy=False, measure=False)
    known = tuple(name for name in converter.options.passes if name in content["passes"])
    converter.options = converter.options._replace(passes=known, excluded=frozenset(content["excluded"]))
    return converter.convert_model(model)


def _paths(op: str, path: str | Path) -> tuple[Path, Path]:
    """A model's name may hold dots: only the ending of one of the two files is taken off."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{op}: path must be a str or a Path, got {type(path).__name__}")
    stem = str(os.fspath(path)).removesuffix(".safetensors").removesuffix(".json")
    return Path(f"{stem}.safetensors"), Path(f"{stem}.json")


def _facts(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
        content["passes"], content["excluded"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"load_converted: {path} was not written by save_converted: {error}") from error
    if version > FORMAT:
        raise ValueError(f"load_converted: {path} has format {version}, this fusionrt knows up to {FORMAT}")
    return dict(content)
