"""The three kernels of a step, each with its launch: the gradients' norm, what the elements of a tensor
share, the update. Addresses are all that they get; who calls keeps the tensors alive."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from fusionrt.dtypes import SIGNIFICANT_BITS, acc_of
from fusionrt.laid import address
from fusionrt.optim import cpu_text
from fusionrt.optim.table import CAPACITY, CHUNK, SCALARS, Table, hold
from fusionrt.runtime import source
from fusionrt.runtime.source import ITEMSIZE, Field, members, pointer

if TYPE_CHECKING:
    from fusionrt.cpu.kernel import Kernel as CPUKernel
    from fusionrt.runtime.kernel import Kernel

BLOCK = 256
NORM_BLOCKS = 8  # for each multiprocessor; each adds up several chunks
RULES = ("ADAM", "SGD", "LION", "AVERAGE", "SCALE")


class Kind(NamedTuple):
    """What one launch can serve: a rule with its flags, and the dtypes."""

    rule: str
    param: str
    grad: str
    state: str = "float32"
    states: int = 0           # of each element: Adam has 2, with amsgrad 3
    master: bool = False      # the parameter in float32 beside one of 16 bits
    stochastic: bool = False  # rounding of bfloat16 states
    decoupled: bool = False
    nesterov: bool = False

    @property
    def acc(self) -> str:
        return acc_of(self.param)

    @property
    def streams(self) -> list[str]:
        """The dtypes that pass through memory."""
        return [self.param, self.grad, *[self.state] * self.states, *["float32"] * self.master]


class Coefficients(NamedTuple):
    """A rule's constants: Adam's and Lion's betas, SGD's momentum; a weight is that of the new value."""

    beta1: float = 0.0
    weight1: float = 0.0
    beta2: float = 0.0
    weight2: float = 0.0
    eps: float = 0.0


class Squares(NamedTuple):
    """Sums of the squares of all gradients, in float64; the first `clipped` are of those that are clipped."""

    sums: torch.Tensor
    clipped: int


class Common(NamedTuple):
    """What the tensors of a launch share in one step. Tensors lie on its device; None: there is none."""

    lr: float | torch.Tensor = 0.0  # a tensor is float32
    weight_decay: float = 0.0
    maximize: bool = False
    grad_scale: torch.Tensor | None = None  # float32, as found_inf
    found_inf: torch.Tensor | None = None
    squares: Squares | None = None
    max_norm: float = math.inf
    norm: torch.Tensor | None = None        # gets the norm
    skip_nonfinite: bool = False            # do nothing where one of the sums is not finite


# -- the kernels -----------------------------------------------------------------------------------

_GRADS = Field(f"const void* grads[{CAPACITY}]", "Q" * CAPACITY)
_PADDING = (0,) * CAPACITY
# Of what tensors of a launch share in a step: tensors, of which some may be absent, and numbers.
_ABSENT = ("lr_tensor", "grad_scale", "found_inf", "squares", "norm")
_RATES = ("lr", "weight_decay", "beta1", "beta2", "max_norm")


def _constants(kind: Kind, **flags: bool) -> list[str]:
    return [f"enum {{ {', '.join(RULES)} }};", *source.definitions(RULE=kind.rule, CHUNK=CHUNK, **flags),
            source.template("optimizer.cuh")]


def _gpu(kind: Kind, stem: str, fields: Sequence[Field], constants: Sequence[str]) -> Kernel:
    from fusionrt.runtime.kernel import Kernel
    return Kernel(f"{kind.rule.lower()}: {stem}", stem, fields, constants, acc=kind.acc,
                  significant_bits=SIGNIFICANT_BITS[kind.acc], block=BLOCK)


@functools.cache
def step_kernel(kind: Kind) -> Kernel:
    quantised = kind.states and kind.state == "uint8"
    width = 8 if quantised else 16 // max(ITEMSIZE[d] for d in kind.streams)
    number = "d" if kind.acc == "float64" else "f"
    fields = [_GRADS, pointer("Tensor", "tensors"), pointer("Chunk", "chunks"), pointer("Scalars", "scalars"),
              *members("unsigned long long", "seed"),
              *(Field(f"acc_t {name}", number) for name in Coefficients._fields)]
    return _gpu(kind, "optimizer_step", fields, [
        *source.definitions(param_t=f"{kind.param}_t", grad_t=f"{kind.grad}_t", state_t=f"{kind.state}_t",
                            STATES=kind.states, W=width),
        *_constants(kind, MASTER=kind.master, STOCHASTIC=kind.stochastic, DECOUPLED=kind.decoupled,
                    NESTEROV=kind.nesterov)])


@functools.cache
def prepare_kernel(kind: Kind, maximize: bool) -> Kernel:
    fields = [_GRADS, pointer("Tensor", "tensors"), pointer("Scalars", "scalars", const=False),
              pointer("float", "lr_tensor"), pointer("float", "grad_scale"), pointer("float", "found_inf"),
              pointer("double", "squares"), pointer("acc_t", "norm", const=False),
              *members("double", *_RATES),
              *members("unsigned", "n_squares", "n_clipped", "n_tensors", "skip_nonfinite")]
    return _gpu(kind, "optimizer_prepare", fields,
                _constants(kind, MAXIMIZE=maximize, DECOUPLED=kind.decoupled))


@functools.cache
def norm_kernel(dtype: str) -> Kernel:
    kind = Kind("SCALE", dtype, dtype)
    fields = [_GRADS, pointer("Tensor", "tensors"), pointer("Chunk", "chunks"),
              pointer("double", "squares", const=False), *members("unsigned", "n_chunks")]
    return _gpu(kind, "gradient_norm", fields, [*source.definitions(grad_t=f"{dtype}_t"), *_constants(kind)])


_CPU_TABLE = {"grads": "int64", "tensors": "int64"}


@functools.cache
def cpu_step(kind: Kind) -> CPUKernel:
    from fusionrt.cpu.kernel import Kernel
    return Kernel(f"{kind.rule.lower()}: optimizer_step", cpu_text.step(kind), kind.acc, integers=("seed",),
                  pointers={**_CPU_TABLE, "chunks": "int32", "prepared": "float64"},
                  scalars=Coefficients._fields, before=cpu_text.functions(kind))


@functools.cache
def cpu_prepare(kind: Kind) -> CPUKernel:
    from fusionrt.cpu.kernel import Kernel
    return Kernel(f"{kind.rule.lower()}: optimizer_prepare", cpu_text.prepare(kind), "float64", pointers={
        **_CPU_TABLE, "prepared": "float64", **dict.fromkeys(_ABSENT, "")}, scalars=_RATES, integers=(
        "n_squares", "n_clipped", "n_tensors", "maximize", "skip_nonfinite"))


@functools.cache
def cpu_norm(dtype: str) -> CPUKernel:
    from fusionrt.cpu.kernel import Kernel
    return Kernel("gradient_norm", cpu_text.norm(dtype), "float64",
                  pointers={**_CPU_TABLE, "chunks": "int32", "squares": "float64"})


# -- their launches --------------------------------------------------------------------------------

def norm_parts(table: Table) -> int:
    """How many sums of squares `squares` writes."""
    if table.is_of_cpu:
        return table.n_chunks
    from fusionrt.runtime.device import multiprocessors
    return min(table.n_chunks, NORM_BLOCKS * multiprocessors(table.device.index))


def squares(table: Table, grads: Sequence[int], dtype: str, out: torch.Tensor) -> None:
    """Of the gradients at these addresses, as norm_parts(table) sums in float64."""
    if not table.n_chunks:
        return
    if table.is_of_cpu:
        held = (ctypes.c_uint64 * len(grads))(*grads)
        kernel = cpu_norm(dtype)
        kernel(table.device, table.n_chunks, kernel.given(
            grads=ctypes.addressof(held), tensors=table.tensors.data_ptr(), chunks=table.chunks.data_ptr(),
            squares=out.data_ptr()), work=table.work)
        return
    norm_kernel(dtype)(table.device, len(out), *grads, *_PADDING[len(grads):], table.tensors.data_ptr(),
                       table.chunks.data_ptr(), out.data_ptr(), table.n_chunks)


def prepare(table: Table, kind: Kind, grads: Sequence[int], coefficients: Coefficients, common: Common
            ) -> torch.Tensor:
    """Count the step and compute each tensor's scalars: they are returned, for `step`."""
    size = SCALARS["cpu" if table.is_of_cpu else kind.acc]
    scalars = torch.empty(table.n_tensors * size, dtype=torch.uint8, device=table.device)
    sums, clipped = common.squares or (None, 0)
    lr_tensor, lr = (common.lr, 0.0) if isinstance(common.lr, torch.Tensor) else (None, common.lr)
    addresses = [address(t) for t in (lr_tensor, common.grad_scale, common.found_inf, sums, common.norm)]
    rates = lr, common.weight_decay, coefficients.beta1, coefficients.beta2, common.max_norm
    n_squares = 0 if sums is None else len(sums)
    if table.is_of_cpu:
        held = (ctypes.c_uint64 * len(grads))(*grads)
        kernel = cpu_prepare(kind)
        kernel(table.device, 1, kernel.given(
            grads=ctypes.addressof(held), tensors=table.tensors.data_ptr(), prepared=scalars.data_ptr(),
            n_squares=n_squares, n_clipped=clipped, n_tensors=table.n_tensors, maximize=common.maximize,
            skip_nonfinite=common.skip_nonfinite, **dict(zip(_ABSENT, addresses, strict=True)),
            **dict(zip(_RATES, rates, strict=True))))
        return scalars
    prepare_kernel(kind, common.maximize)(
        table.device, -(-table.n_tensors // BLOCK), *grads, *_PADDING[len(grads):], table.tensors.data_ptr(),
        scalars.data_ptr(), *addresses, *rates, n_squares, clipped, table.n_tensors,
        common.skip_nonfinite)
    return scalars


def step(table: Table, kind: Kind, grads: Sequence[int], coefficients: Coefficients,
         scalars: torch.Tensor | None = None, seed: int = 0) -> None:
    """Update the tensors of the table; a gradient at address 0 is absent. AVERAGE alone has no `scalars`."""
    if not table.n_chunks:
        return
    prepared = address(scalars)
    if table.is_of_cpu:
        held = (ctypes.c_uint64 * len(grads))(*grads)
        kernel = cpu_step(kind)
        kernel(table.device, table.n_chunks, kernel.given(
            grads=ctypes.addressof(held), tensors=table.tensors.data_ptr(), chunks=table.chunks.data_ptr(),
            prepared=prepared, seed=seed - (seed >> 63 << 64), **coefficients._asdict()), work=table.work)
        return
    hold(table)
    step_kernel(kind)(table.device, table.n_chunks, *grads, *_PADDING[len(grads):], table.tensors.data_ptr(),
                      table.chunks.data_ptr(), prepared, seed, *coefficients)
