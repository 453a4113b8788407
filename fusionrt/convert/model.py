"""`auto_convert_model`: a model that computes the same with fewer kernels, and the proof that it does."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from fusionrt.arguments import as_device, as_float
from fusionrt.convert import stats
from fusionrt.convert.capture import DEFAULT, Options
from fusionrt.convert.forward import Forward, attach, detach
from fusionrt.convert.inputs import Inputs, are_inputs, find, given
from fusionrt.convert.passes import PASSES
from fusionrt.convert.report import Report
from fusionrt.convert.rollback import rolled_back
from fusionrt.convert.sharing import own_tensors, shared_clone
from fusionrt.convert.speed import device_of
from fusionrt.convert.undisturbed import undisturbed
from fusionrt.convert.validate import Judge, ValidationError, Verdict
from fusionrt.dtypes import name_of

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


def auto_convert_model(model: Module, input_shape: Any = None, *, example_inputs: Any = None,
                       device: str | torch.device | None = None, validate_accuracy: bool = True,
                       accuracy_threshold: float | None = None, strict: bool = False,
                       passes: Sequence[str] | None = None, cuda_graphs: bool = True,
                       fresh_outputs: bool = True) -> Module:
    """A module of the same class on the same parameters, whose forward pass runs fused kernels.

    The original runs on unchanged. Its parameters and buffers are the result's: what trains, loads or moves
    it does so to both. The result has the same `state_dict` keys; it can be trained, pickled, deep-copied and
    wrapped. Moved, cast, or loaded by `assign=True`, it takes tensors of its own while anyone holds the
    original or a part of it, so an optimizer made before goes on with the original's; where nobody does, its
    parameters stay the same objects, as torch's do. (Of one of its parts, `to`, `half` and such change the
    original's part; `assign=True` of the original gives parameters to that alone; a buffer registered later,
    as torch.nn.utils.prune does, is one of both.) What follows from weights alone is kept until autograd's
    version of one changes: after a write that this does not see (`p.data.mul_(2)`, `p.detach().numpy()`, a
    buffer that p is a view of) call torch.autograd.graph.increment_version(p).

    model:              any module that is not wrapped or compiled yet.
    input_shape:        of the argument, or a list of shapes, for validation: what the model takes (floating
                        numbers or token ids) is found by trying. Tensors here are taken as example_inputs.
    example_inputs:     a tensor, a tuple of arguments, or a mapping of keyword arguments. Without either the
                        first call's arguments serve for validation, and hooks hear the runs of it. Arguments
                        that cannot be copied (a generator, a lock) would be used up by those: the model is
                        then not validated, and its report says so.
    device:             where the converted module goes; default: where the model is.
    validate_accuracy:  compare original and converted with a float64 run on random inputs, in evaluation
                        mode; a replacement that makes the error larger than twice the original's own is
                        undone, and reported by `fusionrt.convert.conversion_report`. (The padding of an
                        nn.TransformerEncoder is what torch.compile makes of it, not its fast path's zeros;
                        an attention's row of which an added mask lets nothing pass is zeros, not NaN.)
    accuracy_threshold: the error allowed instead, over the largest number of each output.
    strict:             raise ValidationError instead of undoing replacements.
    passes:             names of `fusionrt.convert.PASSES`, in order; default: all of them.
    cuda_graphs:        replay CUDA graphs for shapes that come again. In training a forward pass can then be
                        differentiated once, unless the first ones were differentiated twice.
    fresh_outputs:      False: what a replayed graph returns may be overwritten by the next call.

    Raises:
        TypeError: `model` is no module or a wrapped one, `input_shape` no shape; `passes` is a str.
        ValueError: the model fails with these inputs, or takes none of this shape; an unknown pass.
        ValidationError: the captured model is wrong even without replacements; or `strict`.

        fast = fusionrt.auto_convert_model(model, (1, 3, 224, 224))
    """
    _check_options("auto_convert_model", passes, accuracy_threshold)
    converter = ModelConverter(validate_accuracy, accuracy_threshold, strict=strict, passes=passes,
                               cuda_graphs=cuda_graphs, fresh_outputs=fresh_outputs, measure=False)
    return converter.convert_model(model, input_shape, device, example_inputs=example_inputs)


def _check_options(op: str, passes: Sequence[str] | None, accuracy_threshold: float | None) -> None:
    if isinstance(passes, str):
        raise TypeError(f"{op}: passes must be a list of names, got {passes!r}")
    for name in passes or ():
        if name not in PASSES:
            raise ValueError(f"{op}: no pass is called {name!r}; there are {', '.join(PASSES)}")
    allowed = 0.0 if accuracy_threshold is None else accuracy_threshold
    if not as_float(op, "accuracy_threshold", allowed) >= 0:
        raise ValueError(f"{op}: accuracy_threshold must be at least 0, got {accuracy_threshold}")


class ModelConverter:
    """Converts models and keeps the statistics of the last one. Arguments as for `auto_convert_model`.

    measure: kernels, memory and time of both models, where there are inputs to run them on.

        converter = ModelConverter()
        fast = converter.convert_model(model, (1, 3, 224, 224))
        converter.conversion_stats["speedup_achieved"]
        print(converter.report())
    """

    def __init__(self, validate_accuracy: bool = True, accuracy_threshold: float | None = None, *,
                 strict: bool = False, passes: Sequence[str] | None = None, cuda_graphs: bool = True,
                 fresh_outputs: bool = True, measure: bool = True) -> None:
        _check_options("ModelConverter", passes, accuracy_threshold)
        self.validate_accuracy, self.accuracy_threshold = validate_accuracy, accuracy_threshold
        self.strict, self.measure = strict, measure
        self.options = DEFAULT._replace(passes=DEFAULT.passes if passes is None else tuple(passes),
                                        cuda_graphs=cuda_graphs, fresh_outputs=fresh_outputs)
        self._converted: Module | None = None

    def convert_model(self, model: Module, input_shape: Any = None, device: str | torch.device | None = None,
                      *, example_inputs: Any = None) -> Module:
        """As `auto_convert_model`."""
        began = time.perf_counter()
        _check(model)
        if example_inputs is None and input_shape is not None and are_inputs(input_shape):
            input_shape, example_inputs = None, input_shape
        original = _placed(model, device)
        held = stats.held_by_graphs(device_of(original)) if self.measure else 0
        inputs = _inputs(original, input_shape, example_inputs)
        converted = shared_clone(original)
        forward = attach(converted, self.options)
        forward.record = _record(model, original, self.options)
        forward.record.seconds = time.perf_counter() - began
        if inputs is not None:
            self._prove(converted, original, inputs, held)
        elif self.validate_accuracy or self.measure:
            forward.first = FirstCall(self, converted, held)
        self._converted = converted
        return converted

    def _prove(self, converted: Module, original: Module, inputs: Inputs, held: int) -> None:
        forward: Forward = vars(converted)["forward"]
        record: stats.Record = forward.record
        try:
            inputs.fresh()
        except TypeError as error:  # the caller's own would be used up
            record.verdict = Verdict(None, str(error)) if self.validate_accuracy else None
            return
        if self.validate_accuracy:
            began = time.perf_counter()
            record.verdict, record.rolled_back = self._validated(converted, original, inputs)
            record.options, record.graphs = forward.options, forward.graphs
            record.seconds += time.perf_counter() - began
        if self.measure:
            record.gain = stats.measure(original, converted, inputs, held)

    def _validated(self, converted: Module, original: Module, inputs: Inputs
                   ) -> tuple[Verdict, dict[str, str]]:
        judge = Judge(original, inputs, self.accuracy_threshold)
        verdict = judge(converted)
        if verdict.accepted is not False:
            return verdict, {}
        if self.strict:
            raise ValidationError(f"auto_convert_model: {type(original).__name__}: {verdict}")

        def attempt(options: Options) -> tuple[bool, str, list[str]]:
            trial = shared_clone(original)
            forward = attach(trial, options)
            found = judge(trial)
            return found.accepted is not False, str(found), [
                key for graph in forward.graphs for key in graph.replacements]

        forward: Forward = vars(converted)["forward"]
        options, left_out = rolled_back(attempt, forward.options)
        forward.use(options)
        return judge(converted), left_out

    @property
    def conversion_stats(self) -> dict[str, Any]:
        """Of the last conversion: how many replacements of each kind, kernels of a call, bytes at its peak,
        and the speed-up; None where nothing was captured or measured."""
        return stats.conversion_stats(record_of(self._last))

    def report(self) -> Report:
        """Of the last conversion: print it, or `to_json`, `to_html`."""
        return conversion_report(self._last)

    @property
    def _last(self) -> Module:
        if self._converted is None:
            raise ValueError("ModelConverter: no model has been converted yet")
        return self._converted


class FirstCall:
    """Proves a converted module with the arguments of its first call, by what it has become by then: its
    dtype, its hooks, other layers. A copy made before has a proof of its own."""

    def __init__(self, converter: ModelConverter, converted: Module, held: int) -> None:
        self.converter, self.converted, self.held = copy.copy(converter), converted, held
        self.converter._converted = None

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        original, inputs = _placed(self.converted, None), Inputs(args, kwargs)
        self.converter._prove(self.converted, original, inputs, self.held)


def conversion_report(converted: Module) -> Report:
    """What was replaced in a converted module, what it gained, how accurate it is.

        print(fusionrt.convert.conversion_report(fast))
    """
    return Report(record_of(converted))


def record_of(converted: Module) -> stats.Record:
    forward = vars(converted).get("forward") if isinstance(converted, Module) else None
    if not isinstance(forward, Forward):
        raise TypeError("a module that auto_convert_model returned is expected, got "
                        f"{type(converted).__name__}")
    record: stats.Record = forward.record
    record.graphs = record.graphs or forward.graphs
    return record


def _check(model: Module) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"auto_convert_model: model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("auto_convert_model: model is TorchScript; pass the module that it was made from")
    if type(model).__name__ in WRAPPERS and type(model).__module__.startswith("torch."):
        raise TypeError(f"auto_convert_model: model is wrapped in {type(model).__name__}; convert the module "
                        "inside, then wrap the result")
    lazy = [name for name, p in [*model.named_parameters(), *model.named_buffers()] if is_lazy(p)]
    if lazy:
        raise ValueError(f"auto_convert_model: {', '.join(lazy)} of model have no shape yet; call the model "
                         "once before")


def _placed(model: Module, device: str | torch.device | None) -> Module:
    """An eager clone on the device. It is what the converted module is compared with: the model itself is
    not run."""
    made = shared_clone(model)
    detach(made)
    if device is None:
        return made
    where = as_device("auto_convert_model", device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    if all(t.device == where for t in [*made.parameters(), *made.buffers()]):
        return made
    own_tensors(made)
    return made.to(where)


def _inputs(original: Module, input_shape: Any, example_inputs: Any) -> Inputs | None:
    device = device_of(original)
    if example_inputs is not None:
        return given(example_inputs, device)
    if input_shape is None:
        return None
    with undisturbed(original):
        return find(original, input_shape, device)


def _record(model: Module, original: Module, options: Options) -> stats.Record:
    dtypes = {name_of(p.dtype) for p in original.parameters() if p.is_floating_point()}
    device = device_of(original)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return stats.Record(type(model).__name__, options, where, ", ".join(sorted(dtypes)))
