"""An operator on rows: the last dimensions of the domain form a row, whose sums and maxima the
expression may use (norms, softmax, losses).

A call is one kernel over the rows; a sum over several rows that this kernel cannot take along
(a weight's gradient, where rows are too wide) is a pointwise kernel of its own.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fusionrt import layout, stages
from fusionrt.definition import SCALAR
from fusionrt.expr import Expr, row_sum
from fusionrt.graph import toposort
from fusionrt.layout import Ints
from fusionrt.op import Args, Operator, promoted_dtype
from fusionrt.primitives import COLUMN
from fusionrt.problem import Output, Problem, pack, pose, unpack
from fusionrt.rehearsal import device_type
from fusionrt.rowwise import is_total

# Where all outputs are one value a row, a kernel over rows takes at most ROW_SHARED threads for one; with
# fewer threads in all than that, and rows longer than that, the whole machine takes all rows together.
ROW_SHARED, MANY_THREADS, FEW_COLUMNS = 4096, 1 << 17, 1 << 15


class Along(enum.IntEnum):
    """Sums that a kernel over rows takes along: over the rows alone, or over segments of them as well."""

    NONE, ROWS, SEGMENTS = range(3)

    def takes(self, missing: set[int], rows: set[int], columns: set[int]) -> bool:
        """`missing`: the dimensions that are summed over, not all columns."""
        if missing & columns:
            return self == Along.SEGMENTS
        return self >= Along.ROWS and missing == rows


class RowOperator(Operator):
    """As Operator, over rows of the last `row_dims` dimensions. A uniform output has one value a row, in
    the dtype of the arithmetic; other outputs, and those that are `rounded`, have the dtype of argument
    `like`, or the given `dtype`; one of float64 is computed in it. Where one takes the memory of an argument,
    rows are runs of memory, and a row's elements follow from reductions and elements in their own place.
    `untold`: outputs that a call on a GPU does not give: the kernel alone reads them, or whoever gave their
    memory has it. `double_on_cpu`: arithmetic there is in float64, as torch's of variances is. `of_channels`:
    rows are channels of images, or groups of them; their stages are as was measured to be fastest for
    these."""

    def __init__(self, *definition: Any, row_dims: int = 1, like: int = 0, rounded: Collection[int] = (),
                 untold: Collection[int] = (), double_on_cpu: bool = False, of_channels: bool = False,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(*definition)
        self.row_dims, self.like, self.rounded = row_dims, like, frozenset(rounded)
        self.untold = frozenset(untold)
        self.double_on_cpu, self.of_channels, self.dtype = double_on_cpu, of_channels, dtype
        self.traits = (row_dims, like, double_on_cpu, *sorted(self.rounded), *sorted(self.untold), dtype)

    def derived(self, *definition: Any) -> Operator:
        return RowOperator(*definition, row_dims=self.row_dims, like=self.like, of_channels=self.of_channels)

    def check(self, args: Args) -> tuple[Ints, torch.device]:
        shape, device = super().check(args)
        for k, (name, a) in enumerate(zip(self.params, args, strict=False)):
            if k in self.uniform and isinstance(a, torch.Tensor) and any(
                    n != 1 for n in a.shape[-self.row_dims:]):
                raise ValueError(f"{self.name}: {name} must be a number, or a tensor with one value a row, "
                                 f"got one of shape {tuple(a.shape)}")
        return shape, device

    def output_shapes(self, args: Args, shape: Sequence[int]) -> list[tuple[int, ...]]:
        return [tuple(args[target].shape) if isinstance(target, int) else () if target == SCALAR else
                self.one_a_row(shape) if root.uniform else tuple(shape)
                for root, target in zip(self.outputs, self.targets, strict=True)]

    def output_dtypes(self, args: Args) -> list[torch.dtype]:
        like = self.dtype or args[self.like].dtype
        if not like.is_floating_point:
            raise TypeError(f"{self.name}: {self.params[self.like]} must be a floating-point tensor, got one "
                            f"of {like}")
        return [args[target].dtype if isinstance(target, int) else
                self.acc_dtype(args) if root.uniform and k not in self.rounded else
                getattr(torch, root.op.removeprefix("cast_")) if root.op.startswith("cast_") else like
                for k, (root, target) in enumerate(zip(self.outputs, self.targets, strict=True))]

    def one_a_row(self, shape: Sequence[int]) -> Ints:
        """The shape of one value a row."""
        return *shape[:len(shape) - self.row_dims], *(1,) * self.row_dims

    def is_one_a_row(self, k: int) -> bool:
        """Whether output k has one value a row."""
        target = self.targets[k]
        return target in self.uniform if isinstance(target, int) else self.outputs[k].uniform

    def is_spread(self, k: int) -> bool:
        """Whether output k is one value a row that all elements share: the gradient of a sum."""
        return self.outputs[k].uniform and not self.is_one_a_row(k)

    def acc_dtype(self, args: Args) -> torch.dtype:
        return torch.float64 if torch.float64 in (self.dtype, promoted_dtype(args)) else torch.float32

    def allocate(self, args: Args, shape: Sequence[int]) -> list[torch.Tensor]:
        """As Operator's; what all elements of a row share is an expanded tensor."""
        outputs = super().allocate(args, shape)
        return [o.new_empty(self.one_a_row(shape)).expand(shape)
                if self.is_spread(k) and o.shape == tuple(shape) else o for k, o in enumerate(outputs)]

    def is_double(self, args: Args) -> bool:
        """Whether the arithmetic is in float64."""
        on_cpu = self.double_on_cpu and _device(args) == "cpu"
        return on_cpu or self.acc_dtype(args) == torch.float64

    # -- plans -----------------------------------------------------------------------------------

    def build(self, args: Args, shape: Ints, outputs: Sequence[torch.Tensor], alignment: int
              ) -> Callable[..., Any]:
        order = super().walk(args, shape, outputs)
        if self._lie_across(args, shape, outputs, order):
            return stages.Plan(self, args, shape, outputs, order, alignment).build(_device(args) == "cuda")
        parts = self._parts(args, shape, outputs, self._rows_first(order, shape), alignment)
        runs = []
        for part in parts:
            problem = self._posed(args, shape, part)
            runs.append((self.compile(args, shape, problem, part.outputs, alignment), problem.draws, part))
        if outputs[0].is_meta or (len(parts) == 1 and not parts[0].later):
            return runs[0][0]
        later = stages.sums_later({k: dims for part in parts for k, dims in part.later.items()}, outputs)
        n_args, n_outputs = len(self.params), len(outputs)  # which are memory: not to be kept with the plan

        def run(*args: Any) -> Any:
            found: list[Any] = [None] * n_outputs
            for run, draws, part in runs:
                values = unpack(run(*(args if draws else args[:n_args])))
                for k, value in zip(part.positions, values, strict=True):
                    found[k] = value
            later(found)
            return pack(found)

        return stages.where_aligned(run, self, args[:len(self.params)], alignment)

    def _lie_across(self, args: Args, shape: Ints, outputs: Sequence[torch.Tensor], order: Sequence[int]
                    ) -> bool:
        """Whether rows are not runs of memory, or not needed, or too few for so many columns."""
        first = len(shape) - self.row_dims
        of_row = [d >= first for d in order]
        rows = math.prod(shape[:first])
        columns = math.prod(shape[first:])
        small = [k for k in range(len(outputs)) if self.is_one_a_row(k)]
        if self.into or any(map(is_total, self.outputs)):
            return False
        between = any(not a and b for a, b in itertools.pairwise(of_row))
        if self.order is not None and between:  # a walk that is given stays as it is
            return True
        if not any(map(_needs_rows, self.outputs)):
            return not small
        if any(n.primitive.of_row == COLUMN for n in toposort(self.outputs)):
            return False
        if any(map(self.is_spread, range(len(outputs)))):
            return True
        if len(small) == len(outputs) and rows * ROW_SHARED < MANY_THREADS and columns > FEW_COLUMNS:
            return True
        if _device(args) == "cpu":
            run = math.prod(shape[d] for d in itertools.takewhile(lambda d: d >= first, order))
            short = (self.of_channels and between and run < stages.SHORT_RUN
                     and rows * columns >= stages.MANY_SHORT)
            return bool(of_row) and columns > 1 and (short or not of_row[0])
        return between

    def walk(self, args: Args, shape: Ints, outputs: Sequence[torch.Tensor]) -> Sequence[int]:
        """As Operator's; where a kernel runs over rows, their dimensions before the others."""
        order = super().walk(args, shape, outputs)
        across = self._lie_across(args, shape, outputs, order)
        return order if across else self._rows_first(order, shape)

    def _rows_first(self, order: Sequence[int], shape: Ints) -> list[int]:
        first = len(shape) - self.row_dims
        return [d for d in order if d >= first] + [d for d in order if d < first]

    def _parts(self, args: Args, shape: Ints, outputs: Sequence[torch.Tensor], order: Sequence[int],
               alignment: int) -> list[Part]:
        """The kernels of a call; the one over the rows with all the sums that it can take along."""
        if all(target is None for target in self.targets):  # there are none
            return self._divided(args, shape, order, outputs, Along.NONE)
        first = next(a for a in args if isinstance(a, torch.Tensor))
        if device_type(first) == "cuda":
            from fusionrt.runtime import device, row_choice
            clusters = device.clusters_on(first.device)
            for along in (Along.SEGMENTS, Along.ROWS):
                parts = self._divided(args, shape, order, outputs, along)
                if row_choice.takes_sums(self._posed(args, shape, parts[0]), alignment, clusters):
                    return parts
        else:
            from fusionrt.cpu import rows
            parts = self._divided(args, shape, order, outputs, Along.ROWS)
            if rows.takes_sums(self._posed(args, shape, parts[0])):
                return parts
        return self._divided(args, shape, order, outputs, Along.NONE)

    def _divided(self, args: Args, shape: Ints, order: Sequence[int], outputs: Sequence[torch.Tensor],
                 along: Along) -> list[Part]:
        on_rows, sums = Part(self.row_dims, order), Part(0, order)
        first = len(shape) - self.row_dims
        columns = {d for d in range(first, len(shape)) if shape[d] != 1}
        rows = {d for d in range(first) if shape[d] != 1}
        for k, (o, root, target) in enumerate(zip(outputs, self.outputs, self.targets, strict=True)):
            missing = layout.missing(o.shape, shape) if target is not None else set()
            over = layout.expand_strides(o.shape, o.stride(), shape)
            taken = self.taken(k, args, o.dtype, o.shape)
            made = Output(root, o.dtype, tuple(o.shape), tuple(o.stride()), over, False, taken)
            if is_total(root):
                on_rows.add(k, made)
            elif missing >= columns and missing and (columns or self.is_one_a_row(k)):  # a value a row
                made = made._replace(root=root if self.is_one_a_row(k) else row_sum(root))
                later = tuple(sorted(missing - columns))
                on_rows.add(k, self._value_a_row(made, args, shape) if later else made, later)
            elif not missing:
                on_rows.add(k, made)
            elif (taken_along := along.takes(missing, rows, columns)) or not _needs_rows(root):
                summed = made._replace(over=layout.reduced_strides(o.shape, shape, order), reduced=True)
                (on_rows if taken_along else sums).add(k, summed)
            else:
                on_rows.add(k, self._in_full(args, shape, order, root), tuple(sorted(missing)))
        return [part for part in (on_rows, sums) if part.outputs]

    def _value_a_row(self, made: Output, args: Args, shape: Ints) -> Output:
        """Of what is to be summed over rows after the kernel."""
        one_a_row = self.one_a_row(shape)
        strides = layout.contiguous(one_a_row)
        return Output(made.root, self.acc_dtype(args), one_a_row, strides,
                      layout.expand_strides(one_a_row, strides, shape), False)

    def _in_full(self, args: Args, shape: Ints, order: Sequence[int], root: Expr) -> Output:
        """Of what is to be summed after the kernel."""
        walk = layout.reduced_strides(shape, shape, order)
        return Output(root, self.acc_dtype(args), shape, walk, walk, False)

    def _posed(self, args: Args, shape: Ints, part: Part) -> Problem:
        if part.problem is None:
            part.problem = pose(self.name, args, shape, part.order, part.outputs, self.is_double(args),
                                part.row_dims)
            if self.untold:
                each = zip(part.positions, part.problem.outputs, strict=True)
                told = tuple(o.name for k, o in each if k not in self.untold)
                part.problem = part.problem._replace(returned=told)
        return part.problem


class Part:
    """One kernel of a call, over rows of `row_dims` dimensions or, without any, a pointwise one."""

    def __init__(self, row_dims: int, order: Sequence[int]) -> None:
        self.row_dims, self.order = row_dims, order
        self.problem: Problem | None = None     # of all its outputs
        self.outputs: list[Output] = []
        self.positions: list[int] = []          # of the outputs among the operator's
        self.later: dict[int, Ints] = {}        # position -> dimensions to sum after the kernel

    def add(self, position: int, output: Output, later: Ints = ()) -> None:
        self.outputs.append(output)
        self.positions.append(position)
        if later:
            self.later[position] = later


def _device(args: Args) -> str:
    return device_type(next(a for a in args if isinstance(a, torch.Tensor)))


def _needs_rows(root: Expr) -> bool:
    return any(n.primitive.of_row for n in toposort([root]))
