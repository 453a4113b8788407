"""Cross-entropy: one kernel over the logits, another one for their gradient.

The loss of a row of logits x with the class t, the weights w of classes (1 unless given) and C classes:

    (1 - label_smoothing) w[t] (lse - x[t]) + label_smoothing / C sum_c w[c] (lse - x[c]) + z_loss lse^2

with lse = log(sum_c exp(x[c])). With the probabilities q of classes it is

    sum_c w[c] ((1 - label_smoothing) q[c] + label_smoothing / C) (lse - x[c]) + z_loss lse^2

Logits may be capped: softcap tanh(x / softcap) in the place of x. The kernel reads the logits once and
leaves a maximum and a sum of exponentials for each row; with these the other one reads the logits and
writes their gradient. Losses are computed in float32 (float64 for doubles), reduced, and rounded once.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusionrt import autocast, deferred
from fusionrt.arguments import as_int, check_number
from fusionrt.array import check_dense, check_writeable
from fusionrt.catalogue import COLUMNS, ROWS, Make, public
from fusionrt.counted import integers
from fusionrt.dispatch import Run
from fusionrt.dtypes import name_of
from fusionrt.op import promoted_dtype
from fusionrt.ops.cross_entropy_rows import count_wrong, gradient_of, losses_of, reduced, reduction_of
from fusionrt.problem import unpack
from fusionrt.rehearsal import device_type
from fusionrt.settling import planned_once
from fusionrt.sites import Sites
from fusionrt.tape import Doing, Taped, taken
from fusionrt.watching import is_recorded, seen_by_torch, transforms_active

MOST_CLASSES = 1 << 24  # which float32 tells apart
FEW_ROWS = 1 << 15      # whose losses one block of threads adds
FEWEST_ROWS = 2048      # whose losses the last block of the kernel over the logits adds


class Call(NamedTuple):
    """The arguments of a call after its checks: classes last, a target of classes with size 1 there."""

    op: str
    params: tuple[str, ...]      # of the kernel over the logits
    args: tuple[Any, ...]        # and its arguments, logits and target first
    reduction: str
    dtype: torch.dtype           # of the result
    n_classes: int
    of_classes: bool
    has_shares: bool             # the mean divides by weights, which the kernel over the logits gives
    rounds: bool                 # the kernel over the logits has the result, of the logits' dtype
    of_doubles: bool             # the target or the weights are of 64 bits

    @property
    def narrowed(self) -> str | None:
        """The result's dtype, if losses are reduced in a wider one."""
        narrow = self.dtype.itemsize < 4 or (self.of_doubles and self.dtype == torch.float32)
        return name_of(self.dtype) if narrow else None

    def without_tensors(self) -> Call:
        """For what outlives the call."""
        rest = tuple(None if isinstance(a, torch.Tensor) else a for a in self.args)
        # Dynamo of torch 2.6 traces no `_replace`.
        return Call(self.op, self.params, rest, self.reduction, self.dtype, self.n_classes, self.of_classes,
                    self.has_shares, self.rounds, self.of_doubles)


def checked(op: str, input: Any, target: Any, weight: Any, ignore_index: int, reduction: str,
            label_smoothing: float, z_loss: float, softcap: float | None, weight_name: str = "weight"
            ) -> Call:
    """`input`: logits of shape (C,), (N, C) or (N, C, d1, ...)."""
    check_options(op, ignore_index, reduction, label_smoothing, z_loss, softcap)
    for name, value in (("input", input), ("target", target), (weight_name, weight)):
        if not isinstance(value, torch.Tensor) and (value is not None or name != weight_name):
            raise TypeError(f"{op}: {name} must be a tensor or an array, got {type(value).__name__}")
        if value is not None:
            check_dense(op, name, value)
    n_classes = input.shape[input.dim() > 1] if input.dim() else 0
    if n_classes == 0:
        raise ValueError(f"{op}: input must have at least one class, got shape {tuple(input.shape)}")
    if n_classes > MOST_CLASSES and input.dtype != torch.float64:
        raise ValueError(f"{op}: input must have at most 2^24 classes unless it is float64, got {n_classes}")
    if weight is not None and tuple(weight.shape) != (n_classes,):
        raise ValueError(f"{op}: {weight_name} must have one value for each of the {n_classes} classes, got "
                         f"shape {tuple(weight.shape)}")
    _check_target(op, input, target, ignore_index)
    target, ignore_index = with_exact_ignored(target, ignore_index)
    logits, of_classes = _classes_last(input), not target.is_floating_point()
    target = _classes_last(target) if not of_classes else _one_a_row(target, input)
    named: dict[str, Any] = {}
    if of_classes:
        named["ignore_index"] = ignore_index
        if logits.stride(-1) != 1 and logits.dim() > 1:
            named["columns"] = integers(0, n_classes, logits)  # rows lie across memory: classes are compared
    options = (("weight", weight), ("label_smoothing", label_smoothing or None), ("z_loss", z_loss or None),
               ("softcap", softcap))
    named.update({name: value for name, value in options if value is not None})
    wide = logits.dtype if of_classes else promoted_dtype((logits, target, weight))
    dtype, has_shares = result_dtype(logits.device, wide), weight is not None and reduction == "mean"
    return Call(op, ("input", "target", *named.keys()), (logits, target, *named.values()), reduction, dtype,
                n_classes, of_classes, of_classes and has_shares,
                rounds=reduction == "none" and dtype == logits.dtype,
                of_doubles=torch.float64 in [t.dtype for t in (target, weight) if t is not None])


def check_options(op: str, ignore_index: Any, reduction: Any, label_smoothing: Any, z_loss: Any, softcap: Any
                  ) -> None:
    """Raises TypeError and ValueError for those that a loss cannot have."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not -2**63 <= as_int(op, "ignore_index", ignore_index) < 2**63:
        raise ValueError(f"{op}: ignore_index must be one of int64's integers, got {ignore_index}")
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        check_number(op, name, value)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing!r}")
    if softcap is not None:
        check_number(op, "softcap", softcap)
        if not 0 < softcap < math.inf:
            raise ValueError(f"{op}: softcap must be positive and finite, or None, got {softcap!r}")


def with_exact_ignored(target: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, int]:
    """Kernels compare classes in float32: another number to ignore in the place of one that this rounds."""
    if target.is_floating_point() or _is_exact(ignore_index):
        return target, ignore_index
    target = target.long()
    return torch.where(target == ignore_index, -1, target.masked_fill(target == -1, -2)), -1


def _is_exact(ignore_index: int) -> bool:
    return -MOST_CLASSES < ignore_index < MOST_CLASSES


def _classes_last(of_all: torch.Tensor) -> torch.Tensor:
    return of_all if of_all.dim() <= 2 else of_all.movedim(1, -1)


def _one_a_row(target: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    return target.unsqueeze(-1) if input.dim() > 1 else target.view(1)


def result_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """float32 under autocast, as torch's."""
    return torch.promote_types(dtype, torch.float32) if autocast.is_on(device) else dtype


def _check_target(op: str, input: torch.Tensor, target: torch.Tensor, ignore_index: int) -> None:
    shape, found = tuple(input.shape), tuple(target.shape)
    if target.is_floating_point():
        if found != shape:
            raise ValueError(f"{op}: target must have the shape of input, {shape}, for probabilities of "
                             f"classes, got {found}")
        if ignore_index >= 0:
            raise ValueError(f"{op}: ignore_index is for a target of classes, got {ignore_index} with "
                             "probabilities")
        return
    if target.dtype == torch.bool:
        raise TypeError(f"{op}: target must hold integers (classes) or floating-point probabilities, got "
                        "torch.bool")
    expected = shape[:1] + shape[2:] if len(shape) > 1 else ()
    if found != expected and (len(shape) > 1 or found != (1,)):
        raise ValueError(f"{op}: target must have the shape {expected} for classes and an input of the shape "
                         f"{shape}, got {found}")


sites = Sites()
ARRAYS = "input target weight"


def _run(call: Call, in_place: bool) -> Any:
    return _chosen(call, in_place)(*call.args)


def _chosen(call: Call, in_place: bool) -> Run:
    """What to do with the arguments of this call and of others like it."""
    with_gradient = is_recorded(*call.args)
    if in_place:
        _check_in_place(call.op, call.args[0])
    tensors = [a for a in call.args if isinstance(a, torch.Tensor)]
    plain = not seen_by_torch(*tensors)
    if plain and with_gradient and not any(t.requires_grad for t in tensors[1:]):
        return LogitsAlone(call, in_place).run
    run = _forward(call, with_gradient, planned=plain and not with_gradient)
    return lambda *args: run(*args)[0]


def _repeated(call: Call, in_place: bool) -> Run:
    """As `_run`, for the user's tensors of another call of the kind."""
    run, of_classes, op, n_classes = _chosen(call, in_place), call.of_classes, call.op, call.n_classes
    names = call.params[2:]
    rest = [None if isinstance(a, torch.Tensor) else a for a in call.args[2:]]
    weight_at, columns_at = (names.index(name) if name in names else None for name in ("weight", "columns"))
    if of_classes and call.args[0].dim() == 2 and weight_at is columns_at is None and not in_place:
        return lambda input, target, weight: run(input, target.unsqueeze(-1), *rest)

    def again(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> Any:
        more = rest.copy()
        if weight_at is not None:
            more[weight_at] = weight
        if columns_at is not None:
            more[columns_at] = integers(0, n_classes, input)  # anew, as a capture has its own
        if in_place:
            _check_in_place(op, input)
        last = _one_a_row(target, input) if of_classes else _classes_last(target)
        return run(_classes_last(input), last, *more)

    return again


def _forward(call: Call, with_gradient: bool, planned: bool = False) -> Run:
    """A function of the arguments: the result, what it was divided by and, `with_gradient`, what the kernel
    of the gradient reads. Operators, each with derivatives of any order of its own unless `planned`."""
    rows = call.args[1].numel() if call.of_classes else 0
    side_by_side = "columns" not in call.params and device_type(call.args[0]) == "cuda"
    if planned and call.reduction != "none" and 0 < rows <= FEWEST_ROWS and side_by_side:
        return _in_one(call.without_tensors(), with_gradient)
    kernel: Any = losses_of(call.params, with_gradient, call.rounds)
    read = gradient_of(call.params, call.rounds, False, False).saved if planned and with_gradient else ()
    kernel = planned_once(kernel.operator) if planned else kernel
    dim, has_shares, call = call.args[0].dim(), call.has_shares, call.without_tensors()
    reduce = None if call.reduction == "none" else reducing(call, dim, planned)

    def run(*args: Any) -> tuple[Any, Any, Sequence[Any]]:
        found = unpack(kernel(*args))
        losses, stats = found[0], [found[k] for k in read]
        if reduce is None:
            check_classes(call, args)
            return torch.ops.aten._unsafe_view(losses, losses.shape[:-1]), None, stats  # to be written to
        return *reduce(args, losses, found[1] if has_shares else None), stats

    return run


def _in_one(call: Call, with_gradient: bool) -> Run:
    """As `_forward`, in one launch, whose last block reduces the losses. That takes a user half as long where
    the host is what takes time. (The device takes 7 to 15 % longer for 2048 rows, and two thirds for 16 Ki: a
    block ends when it has counted itself.)"""
    mean = call.reduction == "mean"
    kernel = planned_once(reduced(call.params, with_gradient, mean, call.narrowed))
    message = functools.partial(_wrong_classes, call.op, call.n_classes, call.args[2], None)

    def run(*args: Any) -> tuple[Any, Any, Sequence[Any]]:
        found = deferred.written(args[0].device, kernel, args, message)
        if not with_gradient:
            return found, None, ()
        *stats, result, count = found if mean else (*found, None)
        return result, count, stats

    return run


class LogitsAlone:
    """A kind of call whose logits alone need a gradient. Their first derivative is one kernel, which divides
    by what a mean divides by as well; where it is differentiated in turn, the operators are."""

    def __init__(self, call: Call, in_place: bool) -> None:
        self.call, self.in_place = call.without_tensors(), in_place
        self.places = [k for k, a in enumerate(call.args) if isinstance(a, torch.Tensor)]
        self.losses = _forward(call, True, planned=True)
        gradient = gradient_of(call.params, call.rounds, call.reduction == "mean", in_place)
        self.gradient, self.n_stats = gradient.operator, len(gradient.saved)
        tensors, apply = operator.itemgetter(*self.places), Taped(self, len(self.places)).apply
        self.run: Run = lambda *args: apply(*tensors(args))

    def forward(self, do: Doing, ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        result, count, *stats = do(self._results, *tensors)
        do.save(ctx, *tensors, *stats, *([count] if isinstance(count, torch.Tensor) else []))
        made: torch.Tensor = result
        return made

    def _results(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        result, count, stats = self.losses(*self._args(tensors))
        return result, count, *stats

    def backward(self, do: Doing, ctx: Any, saved: list[Any], grad_output: torch.Tensor) -> tuple[Any, ...]:
        read, n = taken(saved), len(self.places)
        if self.call.reduction == "none":
            grad_output = do(torch.Tensor.unsqueeze, grad_output, -1)
        args = [*self._args(read), *read[n:n + self.n_stats], grad_output]
        if self.call.reduction == "mean":
            args.append(read[-1] if self.call.of_classes else math.prod(read[0].shape[:-1]))
        grad = do.launch(self.gradient, args)
        if self.in_place:  # whoever saved the logits is told
            do(torch.autograd.graph.increment_version, read[0])
            grad = do(torch.Tensor.detach, grad)
        return grad, *[None] * (n - 1)

    def again(self, ctx: Any, saved: list[Any], grad_output: torch.Tensor) -> tuple[Any, ...]:
        if self.in_place and torch.is_grad_enabled():
            raise RuntimeError(f"{self.call.op}: inplace_backward has no second derivative")
        args = self._args(saved)
        with torch.enable_grad():
            result = _forward(self.call._replace(args=args), True)(*args)[0]
        grad, = torch.autograd.grad(result, args[0], grad_output, create_graph=torch.is_grad_enabled())
        return grad, *[None] * (len(self.places) - 1)

    def _args(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Of the call, with these tensors first."""
        args = list(self.call.args)
        for k, tensor in zip(self.places, tensors, strict=False):
            args[k] = tensor
        return tuple(args)


def _check_in_place(op: str, logits: torch.Tensor) -> None:
    check_writeable(op, input=logits)
    if logits.is_leaf and logits.requires_grad:
        raise ValueError(f"{op}: inplace_backward overwrites input, which must not be a leaf that requires a "
                         "gradient")
    if not logits.is_contiguous():
        raise ValueError(f"{op}: inplace_backward needs an input that is contiguous with the classes last, "
                         f"got strides {logits.stride()} of shape {tuple(logits.shape)}")


def reducing(call: Call, dim: int, planned: bool = False) -> Run:
    """The sum or mean of losses with size 1 in the last of `dim` dimensions, and what it divided by: a
    function of the arguments, the losses and, where the mean divides by weights, these."""
    mean, of_classes, n_classes = call.reduction == "mean", call.of_classes, call.n_classes
    params = ["loss", "target", "ignore_index", "n_classes"] if of_classes else ["loss", "factor"]
    params += ["share"] if call.has_shares else []
    flags = mean, call.narrowed, dim
    kernel: Any = reduction_of(tuple(params), *flags)
    kernel = planned_once(kernel.operator) if planned else kernel
    telling = _telling((*params, "wrong"), *flags) if of_classes and planned else None

    def run(args: Sequence[Any], losses: torch.Tensor, share: Any) -> tuple[Any, Any]:
        rows = losses.numel()
        if of_classes:
            given = losses, args[1], args[2], n_classes, *(() if share is None else (share,))
            if telling is not None and rows <= FEW_ROWS and device_type(losses) == "cuda":
                found = deferred.written(losses.device, telling, given, _message(call, args))
            else:
                found = kernel(*given)
                deferred.check(found[1], _message(call, args))
        else:
            found = (kernel(losses, 1 / max(1, rows) if mean else 1.0),)
        if not mean:
            return found[0], 1
        return found[0] if rows else found[0] * math.nan, found[2] if of_classes else rows

    return run


def _telling(*flags: Any) -> Run:
    """The reduction, which writes the number of wrong classes to its last argument: memory of the host, in a
    capture of the device, which one plan serves."""
    kernel: Any = reduction_of(*flags)
    operator = kernel.operator
    return planned_once(operator.over({1: len(operator.params) - 1}))


def check_classes(call: Call, args: Sequence[Any]) -> None:
    if call.of_classes:
        deferred.check(count_wrong(args[1], args[2], call.n_classes), _message(call, args))


def _message(call: Call, args: Sequence[Any]) -> deferred.Message:
    target = args[1] if args[1].device.type == "cpu" else None  # it is not kept alive for long
    return functools.partial(_wrong_classes, call.op, call.n_classes, args[2], target)


def _wrong_classes(op: str, n_classes: int, ignore_index: int, target: torch.Tensor | None, count: int
                   ) -> str:
    such = ""
    if target is not None and not transforms_active():
        found = target.numpy()  # by no operation that dispatch modes would see
        such = f" such as {found[(found != ignore_index) & ((found < 0) | (found >= n_classes))][0]}"
    return (f"{op}: target must be in [0, {n_classes}) or ignore_index ({ignore_index}), got {count} other "
            f"value{'s' * (count > 1)}{such}")


def _held(number: Any) -> Any:
    """A tensor may hold another one in the next call."""
    return number.item() if isinstance(number, torch.Tensor) else number


def _example(make: Make) -> tuple[Any, ...]:
    return make(ROWS, COLUMNS), make(ROWS, dtype=torch.int64, high=COLUMNS)


@public(example=_example, asks=(sites, ARRAYS), arrays=ARRAYS)
def cross_entropy(input: Any, target: Any, weight: Any = None, ignore_index: int = -100,
                  reduction: str = "mean", label_smoothing: float = 0.0, *, z_loss: float = 0.0,
                  softcap: float | None = None, inplace_backward: bool = False) -> Any:
    """The cross-entropy of logits and classes, or probabilities of classes.

    `input`: logits of shape (C,), (N, C) or (N, C, d1, ...), of dtype float16, bfloat16, float32 or float64.
    `target`: integers of shape (), (N,) or (N, d1, ...), in [0, C) or `ignore_index`; or probabilities of
    the shape of input. `weight`: one value a class, of any floating dtype. `reduction`: "none", "sum", or
    "mean": the sum divided by that of weight[target] over the rows that are not ignored (NaN if there are
    none), of probabilities by the number of rows. `label_smoothing`: a number in [0, 1]. `z_loss` adds
    z_loss logsumexp(row)^2 to a row's loss. `softcap`: logits are softcap tanh(input / softcap). The result
    has input's dtype, of probabilities the promoted one of all tensors, under autocast at least float32.
    First and second derivatives of input, weight and probabilities.

    `inplace_backward`: the backward pass writes the gradient into the memory of input, which must not be a
    leaf, and is no longer there after it. Whoever saved input for a backward pass of its own, a second one
    through this op included, gets torch's error on modified tensors; in torch.compile it has no effect.

    A class out of range: its row has the loss NaN and the gradient 0, and IndexError is raised: on a CPU at
    once; on a GPU, which is not waited for, by a later call of the op, when the number of such classes has
    arrived (or by `fusionrt.deferred.examine(wait=True)`). In torch.compile, while a graph is captured, and
    on a GPU under torch.func's transforms, NaN is all there is. Raises ValueError and TypeError for arguments
    that do not fit.
    Source: torch.nn.functional.cross_entropy; z-loss: Chowdhery et al. 2022; softcap: Gemma 2.

        cross_entropy(torch.randn(8, 512), torch.randint(512, (8,)), label_smoothing=0.1)
    """
    tensors, key = (input, target, weight), None
    if not torch.compiler.is_dynamo_compiling():
        key = (ignore_index, type(ignore_index), reduction, label_smoothing, z_loss, softcap,
               inplace_backward)
        run = sites.find(key, tensors)
        if run is not None:
            return run(*tensors)
    numbers = ignore_index, label_smoothing, z_loss, softcap
    if key is not None and any(isinstance(n, torch.Tensor) for n in numbers):
        ignore_index, label_smoothing, z_loss, softcap = map(_held, numbers)
        return cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing, z_loss=z_loss,
                             softcap=softcap, inplace_backward=inplace_backward)
    call = checked("cross_entropy", input, target, weight, ignore_index, reduction, label_smoothing, z_loss,
                   softcap)
    if key is None or seen_by_torch(*tensors) or not _is_exact(ignore_index):
        return _run(call, inplace_backward)
    return sites.keep(key, tensors, _repeated(call, inplace_backward))(*tensors)
