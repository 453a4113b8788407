"""Whole models: an existing PyTorch model becomes fast in one line, and is proved to compute the same.

    fast = fusionrt.auto_convert_model(model, (1, 3, 224, 224))     # same class, same parameters
    fast = torch.compile(model, backend="fusionrt")                 # the same without the proof

    converter = fusionrt.convert.ModelConverter()
    fast = converter.convert_model(model, example_inputs={"input_ids": ids})
    print(converter.report())

One file an idea: `model` (the entry), `forward` and `sharing` (what a converted module is); the proof:
`inputs`, `validate`, `rollback`, `undisturbed`, `contents`, `random_states`; the captured graph: `capture`,
`tracing`, `graph`, `effects`, `purity`, `aliases`, `match`, `revalue`, `last_copies`; one kernel of many
calls: `cluster`, `members`, `pointwise`, `fused`, `tail`; `passes`, and what rewritten graphs call: `calls`,
`derived`, `kept_masks`, `packed_conv`, `packed_linear`, `max_pool`, `squeeze_excite`; `kernels` (compiled
ahead), `replay`, `training`, `cuda_graphs`; `stats`, `speed`, `report`, `save`, `registry` (models by name),
`command` (`fusionrt convert`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusionrt import lazy

_MODULE = {
    "ModelConverter": "model", "ModelUnavailable": "registry", "Options": "capture", "PASSES": "passes",
    "Report": "report", "ValidationError": "validate", "auto_convert_model": "model", "backend": "capture",
    "conversion_report": "model",
    "load_converted": "save", "save_converted": "save", "validate_optimization": "validate",
}
_SUBMODULES = ("capture", "forward", "inputs", "model", "passes", "registry", "rollback", "save", "sharing",
               "speed", "stats", "validate")

__getattr__, __dir__, __all__ = lazy.attach(__name__, _MODULE, _SUBMODULES)

if TYPE_CHECKING:
    from fusionrt.convert.capture import Options as Options
    from fusionrt.convert.capture import backend as backend
    from fusionrt.convert.model import ModelConverter as ModelConverter
    from fusionrt.convert.model import auto_convert_model as auto_convert_model
    from fusionrt.convert.model import conversion_report as conversion_report
    from fusionrt.convert.passes import PASSES as PASSES
    from fusionrt.convert.registry import ModelUnavailable as ModelUnavailable
    from fusionrt.convert.report import Report as Report
    from fusionrt.convert.save import load_converted as load_converted
    from fusionrt.convert.save import save_converted as save_converted
    from fusionrt.convert.validate import ValidationError as ValidationError
    from fusionrt.convert.validate import validate_optimization as validate_optimization
