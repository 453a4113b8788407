"""torch.optim.Optimizer with a step of a handful of launches, whatever the number of parameters."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from fusionrt import guards
from fusionrt.arguments import as_float
from fusionrt.cpu.team import torch_alone
from fusionrt.dtypes import FLOATS, name_of
from fusionrt.optim import kernels
from fusionrt.optim import state as states
from fusionrt.optim.bucket import Bucket, Member, WiderGradient
from fusionrt.optim.kernels import Coefficients, Common, Kind, Squares
from fusionrt.optim.quantised import SMALLEST
from fusionrt.optim.state import Format
from fusionrt.optim.table import CAPACITY

STATE_DTYPES = (None, torch.float32, torch.bfloat16, "8bit")
# Of the rounding by chance. Always the same, so that the replicas of a data-parallel run stay equal.
SEED = 0x5DEECE66D
# How a group's state is kept is this optimizer's affair: checkpoints have all of it in floating point.
_STORAGE = ("master_weights", "state_dtype")


class Held(NamedTuple):
    """The launches, and what they were made for."""

    groups: list[dict[str, Any]]
    params: list[torch.Tensor]
    values: list[Any]            # of all states
    tensors: list[torch.Tensor]  # parameters, and those of their states that kernels know
    addresses: list[int]
    layouts: list[Any]
    guard: guards.Check          # true where the layouts are these: a quarter of the time that lists take
    options: list[Any]           # of each group
    waiting: list[torch.Tensor]  # parameters that never had a gradient
    buckets: list[Bucket]


class FusedOptimizer(torch.optim.Optimizer):
    """What the optimizers of fusionrt.optim have in common. Beside torch.optim's own arguments each takes

    * `master_weights`: keep a float32 copy of float16 and bfloat16 parameters and update that. It follows
      what others write into a parameter, as `load_state_dict` of the model does, but not what autograd does
      not see: writes through `.data`, or between replays of a CUDA graph.
    * `state_dtype`: of the moments. None: the parameter's, as torch. torch.float32. torch.bfloat16: with
      stochastic rounding, so that changes below its resolution are kept on average. "8bit": one byte an
      element (fusionrt/optim/quantised.py); parameters of less than 4096 elements keep float32.
    * `clip_grad_norm`: scale the gradients so that their norm, over all groups that have this option, is at
      most this, as torch.nn.utils.clip_grad_norm_ but inside of the step. The gradients stay as they are.
    * `skip_nonfinite`: groups with this option do nothing in a step one of whose gradients, in any group that
      has it or clips, is NaN or infinite (of float32 or less, what is beyond 1e19 may count as that). One
      pass over the gradients serves this and clipping.

    They work with torch.amp.GradScaler as torch's fused ones do: the step unscales, and does nothing if an
    infinity was found. It leaves the gradients as they are, scaled, where torch writes them back: who reads
    them after it calls `scaler.unscale_(optimizer)` before. No step waits for the device. A step in a CUDA
    graph needs one before the capture.

    `foreach`, `fused` and `capturable` are accepted where torch's class has them, and change nothing: every
    step is fused and capturable, a learning rate may be a tensor. `differentiable=True` raises ValueError.
    """

    _step_supports_amp_scaling = True
    tells_versions = True  # those of parameters, as torch's fused ones do not
    rule: ClassVar[str]
    _held: Held | None = None
    _wide: frozenset[torch.Tensor] = frozenset()  # of 16 bits, that had gradients of float32
    _loading: dict[str, Any] | None = None
    _checked: Sequence[list[Any]] = ()

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._check(defaults)
        super().__init__(params, defaults)

    def _check(self, options: dict[str, Any]) -> None:
        """Refuse what a group, or its default, cannot have; a rule adds what is its own."""
        owner, lr = type(self).__name__, options["lr"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"{owner}: lr must be a number or a tensor of one element, "
                             f"got shape {tuple(lr.shape)}")
        if not (isinstance(lr, torch.Tensor) and lr.device.type != "cpu"):
            not_negative(owner, "lr", lr)
        not_negative(owner, "weight_decay", options["weight_decay"])
        if options.get("differentiable"):
            raise ValueError(f"{owner}: differentiable=True is not supported: a step is no operation of "
                             "autograd; use torch.optim for that")
        if options.get("foreach") and options.get("fused"):
            raise RuntimeError(f"{owner}: `fused` and `foreach` cannot be `True` together.")
        if options["state_dtype"] not in STATE_DTYPES:
            raise ValueError(f"{owner}: state_dtype must be None, torch.float32, torch.bfloat16 or '8bit', "
                             f"got {options['state_dtype']!r}")
        most = options["clip_grad_norm"]
        if most is not None and not number(owner, "clip_grad_norm", most) > 0.0:
            raise ValueError(f"{owner}: clip_grad_norm must be positive, got {most}")

    def _check_groups(self) -> None:
        """What was put into a group since the last step, before anything is written."""
        now = [list(group.values()) for group in self.param_groups]
        for group, values, before in itertools.zip_longest(
                self.param_groups, now, self._checked[:len(now)], fillvalue=()):
            if not _same(values, before):
                self._check(self.defaults | dict(group))
        self._checked = now

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """torch's names of the states, the first moment's first."""
        raise NotImplementedError

    def _saved(self, state: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """What a checkpoint has of a parameter with states of these names: torch can load it."""
        return states.in_float(state, names)

    def _coefficients(self, group: dict[str, Any]) -> Coefficients:
        raise NotImplementedError

    def _flags(self, group: dict[str, Any]) -> dict[str, bool]:
        """Those fields of `Kind` that follow from the group's options."""
        return {}

    # -- the step ----------------------------------------------------------------------------------

    @torch._disable_dynamo  # it would take addresses for constants
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; returns what `closure`, if any, returns.

        Raises RuntimeError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_groups()
        try:
            buckets, gathered = self._gathered()
        except WiderGradient:
            self._held = None
            buckets, gathered = self._gathered()
        work = [(bucket, addresses) for bucket, (addresses, _) in zip(buckets, gathered, strict=True)
                if any(addresses)]
        squares = _squares([(b, g) for b, g in work if _needs_norm(b.group)])
        for bucket, addresses in work:
            bucket.follow()
            common = self._common(bucket, squares.get(bucket.device))
            coefficients = self._coefficients(bucket.group)
            scalars = kernels.prepare(bucket.table, bucket.kind, addresses, coefficients, common)
            kernels.step(bucket.table, bucket.kind, addresses, coefficients, scalars, SEED)
            bucket.written(addresses)
        return loss

    def _gathered(self) -> tuple[list[Bucket], list[tuple[list[int], list[torch.Tensor]]]]:
        """With the gradients of each, and their copies, which have to live until the end."""
        buckets = self._buckets()
        return buckets, [bucket.gradients() for bucket in buckets]

    def _common(self, bucket: Bucket, squares: Squares | None) -> Common:
        group = bucket.group
        most = group["clip_grad_norm"]

        def here(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(bucket.device, torch.float32, non_blocking=True)

        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr = float(lr) if lr.device.type == "cpu" else here(lr)
        return Common(lr, float(group["weight_decay"]), group["maximize"],
                      here(getattr(self, "grad_scale", None)), here(getattr(self, "found_inf", None)),
                      squares if _needs_norm(group) else None, math.inf if most is None else float(most),
                      skip_nonfinite=bool(group["skip_nonfinite"]))

    # -- which launches ----------------------------------------------------------------------------

    def _options(self, group: dict[str, Any]) -> Any:
        return (self._state_names(group), self._flags(group), group["state_dtype"], group["master_weights"])

    def _values(self) -> list[Any]:
        # What is no parameter's is somebody else's, such as a number of steps.
        return [value for state in self.state.values() if isinstance(state, dict) for value in state.values()]

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _is_current(self, held: Held) -> bool:
        """Whether nothing but gradients has changed since. Every step asks: it costs half a microsecond a
        parameter. A state that is the same tensor may have moved (`.data =`, `share_memory_`)."""
        params = self._params()
        return (_same(self.param_groups, held.groups) and _same(params, held.params)
                and _same(self._values(), held.values)
                and list(map(torch.Tensor.data_ptr, held.tensors)) == held.addresses
                and (held.guard(*params) or list(map(_layout, params)) == held.layouts)
                and [self._options(group) for group in self.param_groups] == held.options
                and not any(param.grad is not None for param in held.waiting))

    def _buckets(self) -> list[Bucket]:
        if self._held is None or not self._is_current(self._held):
            self._held = self._made()
        return self._held.buckets

    @torch_alone()
    def _made(self) -> Held:
        buckets: list[Bucket] = []
        waiting: list[torch.Tensor] = []
        tensors = self._params()
        position = itertools.count()
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"parameter {k} of group {number}"
                                                 for k in range(len(group["params"]))]
            chosen: dict[Any, list[Member]] = {}
            for param, name in zip(group["params"], names, strict=True):
                place = next(position)
                if param.grad is None and not self.state.get(param) and not self._had_no_state(param):
                    waiting.append(param)
                    continue
                kind, form = self._kind(group, param, name)
                member = Member(param, self.state[param], place, name)
                chosen.setdefault((param.device, kind, form), []).append(member)
            for (device, kind, form), members in chosen.items():
                self._conform(device, form, members)
                tensors += [t for m in members for t in states.kept(m.state, form)]
                buckets += [Bucket(type(self).__name__, group, kind, form, members[k:k + CAPACITY])
                            for k in range(0, len(members), CAPACITY)]
        params = self._params()
        return Held(list(self.param_groups), params, self._values(), tensors, [t.data_ptr() for t in tensors],
                    list(map(_layout, params)), guards.guard(*params),
                    [self._options(group) for group in self.param_groups], waiting, buckets)

    def _had_no_state(self, param: torch.Tensor) -> bool:
        """Whether it takes part without one, as in SGD without momentum."""
        buckets = [] if self._held is None else self._held.buckets
        stateless = [b for b in buckets if not b.kind.states and not b.kind.master]
        return any(member.param is param for bucket in stateless for member in bucket.members)

    def _conform(self, device: torch.device, form: Format, members: Sequence[Member]) -> None:
        counters = torch.zeros(len(members), dtype=torch.float32, device=device).unbind()
        for member, counter in zip(members, counters, strict=True):
            states.conform(member.param, member.state, form, counter)
            if not member.state:
                self.state.pop(member.param, None)  # torch keeps none either; one may be given twice

    def _kind(self, group: dict[str, Any], param: torch.Tensor, name: str) -> tuple[Kind, Format]:
        owner = type(self).__name__
        _check_parameter(owner, param, name)
        names, chosen = self._state_names(group), group["state_dtype"]
        half = param.dtype in (torch.float16, torch.bfloat16)
        if param.dtype == torch.float64 and chosen is not None:
            raise ValueError(f"{owner}: state_dtype={chosen} is for parameters of at most 32 bits, but "
                             f"{name} is float64; give it a group with state_dtype=None")
        dtype = param.dtype if chosen is None else chosen
        if chosen == "8bit":
            dtype = torch.uint8 if param.numel() >= SMALLEST else torch.float32
        elif chosen is None and group["master_weights"] and half:
            dtype = torch.float32
        master = bool(group["master_weights"] and half)
        wide = half and (param in self._wide if param.grad is None else param.grad.dtype == torch.float32)
        self._wide |= {param} if wide else frozenset()
        stored = name_of(param.dtype)
        kind = Kind(self.rule, stored, "float32" if wide else stored, name_of(dtype) if names else "float32",
                    len(names), master, stochastic=bool(names) and chosen == torch.bfloat16,
                    **self._flags(group))
        return kind, Format(names, dtype, master)

    # -- torch's protocol --------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where they differ from the optimizer's."""
        if isinstance(param_group, dict):  # torch says what else it must be
            self._check(self.defaults | param_group)
        super().add_param_group(param_group)

    @torch_alone()
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: its optimizer of the same name can load it. 8-bit states are decoded into
        float32; loaded again they get the same codes."""
        handle = self.register_state_dict_post_hook(_in_torch_terms, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    @torch_alone()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this optimizer or of torch's gave. Options come from it, but for
        `master_weights` and `state_dtype`, which say how this optimizer keeps the states."""
        seen: dict[str, Any] = {}

        def see(_: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            for group in given["param_groups"]:
                self._check(self.defaults | {k: v for k, v in group.items() if k not in _STORAGE})
            seen.update(given)

        # Registered last, so that it sees what the user's hooks have made of it.
        handle = self.register_load_state_dict_pre_hook(see)
        self._loading = seen
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        storage = [{k: group[k] for k in _STORAGE} for group in getattr(self, "param_groups", ())]
        super().__setstate__(state)
        self._held, self._checked = None, ()
        for number, group in enumerate(self.param_groups):
            if self._loading is not None:
                group.update(storage[number])
            for key, default in self.defaults.items():
                group.setdefault(key, default)
        if self._loading is not None:
            self._take(self._loading)

    def _take(self, given: dict[str, Any]) -> None:
        """torch has rounded all states to the dtype of the parameter: take them as they were given."""
        saved = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(saved, params, strict=True):
            for name, value in given["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    # Steps change it in place: the giver may be another optimizer, whose weights are in it.
                    device = value.device if name == states.STEP else param.device
                    self.state[param][name] = value.detach().to(device, copy=True)


def _in_torch_terms(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(optimizer, FusedOptimizer)
    names = {key: optimizer._state_names(group) for saved, group in
             zip(given["param_groups"], optimizer.param_groups, strict=True) for key in saved["params"]}
    given["state"] = {key: optimizer._saved(state, names[key]) if key in names else state
                      for key, state in given["state"].items()}
    return given


def _needs_norm(group: dict[str, Any]) -> bool:
    return bool(group["clip_grad_norm"] is not None or group["skip_nonfinite"])


def _clips(bucket: Bucket) -> bool:
    return bucket.group["clip_grad_norm"] is not None


def _squares(work: Sequence[tuple[Bucket, list[int]]]) -> dict[torch.device, Squares]:
    """On every device those of all gradients, in any number of parts."""
    parts: dict[torch.device, list[tuple[Bucket, list[int]]]] = {}
    for bucket, addresses in sorted(work, key=lambda item: not _clips(item[0])):
        parts.setdefault(bucket.device, []).append((bucket, addresses))
    found = {}
    for device, members in parts.items():
        sizes = [kernels.norm_parts(bucket.table) for bucket, _ in members]
        sums = torch.empty(sum(sizes), dtype=torch.float64, device=device)
        for (bucket, addresses), out in zip(members, sums.split(sizes), strict=True):
            kernels.squares(bucket.table, addresses, bucket.kind.grad, out)
        clipped = sum(size for (bucket, _), size in zip(members, sizes, strict=True) if _clips(bucket))
        found[device] = Squares(sums, clipped)
    return found if len(found) < 2 else _of_all_devices(found)


def _of_all_devices(found: dict[torch.device, Squares]) -> dict[torch.device, Squares]:
    parts = [sums[:clipped].sum() for sums, clipped in found.values()]
    parts += [sums[clipped:].sum() for sums, clipped in found.values()]
    return {device: Squares(torch.stack([part.to(device, non_blocking=device.type == "cuda")
                                         for part in parts]), len(found)) for device in found}


def _layout(param: torch.Tensor) -> tuple[Any, ...]:
    return param.shape, param.stride(), param.dtype, param.device


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


# -- what is refused -------------------------------------------------------------------------------

def _check_parameter(owner: str, param: torch.Tensor, name: str) -> None:
    if param.dtype not in FLOATS:
        raise TypeError(f"{owner}: {name} is {name_of(param.dtype)}, expected float16, bfloat16, float32 or "
                        "float64")
    if param.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{owner}: {name} lies on {param.device}, expected a CPU or CUDA device")
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(param):
        raise TypeError(f"{owner}: {name} is a {type(param).__name__}, which has no memory of its own; "
                        "expected a plain tensor")
    if param.is_neg():
        raise ValueError(f"{owner}: {name} is a view that negates what its memory holds, expected a plain "
                         "tensor; make it one with resolve_neg()")
    if not states.is_dense(param):
        raise ValueError(f"{owner}: {name} of shape {tuple(param.shape)} has strides {param.stride()}, "
                         "expected a tensor that fills its memory; make it contiguous")


def number(owner: str, name: str, value: Any) -> float:
    """Of what a step can read without waiting for a device."""
    if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or value.numel() != 1):
        raise ValueError(f"{owner}: {name} must be a number or a CPU tensor of one element, got shape "
                         f"{tuple(value.shape)} on {value.device}")
    return as_float(owner, name, value)


def not_negative(owner: str, name: str, value: Any) -> None:
    if not number(owner, name, value) >= 0.0:
        raise ValueError(f"{owner}: {name} must not be negative, got {float(value)}")


def two_betas(owner: str, betas: Any) -> None:
    try:
        first, second = betas
    except (TypeError, ValueError):
        raise TypeError(f"{owner}: betas must be two numbers, got {betas!r}") from None
    for name, value in (("betas[0]", first), ("betas[1]", second)):
        if not 0.0 <= number(owner, name, value) < 1.0:
            raise ValueError(f"{owner}: {name} must be in [0, 1), got {float(value)}")
