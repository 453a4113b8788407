"""Rows that lie across memory, in stages.

A kernel over rows wants each row in one piece: the channels of an image or the columns of a matrix are not.
There every stage is one pass over the whole domain, in the order of memory, that finds sums and maxima of
all rows; the elements are a pointwise kernel after that.

    (x - mean) / sqrt(variance + eps)     # stage: mean, 1 / sqrt(variance + eps)     elements: the rest
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fusionrt import layout
from fusionrt.expr import Expr, argument, exp, node, row_sum, where
from fusionrt.graph import leaves, substitute, toposort
from fusionrt.layout import Ints
from fusionrt.primitives import REDUCTION
from fusionrt.problem import Output, Problem, pack, pose, unpack
from fusionrt.rehearsal import device_type
from fusionrt.rowwise import schedule, spelled_out, with_sums

if TYPE_CHECKING:
    from fusionrt.row_op import RowOperator

# Elements of a row side by side, too few for a CPU's loop; elements in all, of which stages then take less.
SHORT_RUN, MANY_SHORT = 64, 1 << 16

# -- expressions -----------------------------------------------------------------------------------

def factored(roots: Sequence[Expr]) -> list[Expr]:
    """With factors that are one value a row outside of the sums: sum(g * weight) and sum(g) are one sum."""
    made: dict[Expr, Expr] = {}
    place: dict[Expr, int] = {}
    for n in toposort(roots):
        if n.op == "row_sum":
            uniform, rest = _factors(substitute([a for a in n.args if isinstance(a, Expr)], made)[0])
            # a * b and b * a are one as well.
            rest.sort(key=lambda factor: place.setdefault(factor, len(place)))
            made[n] = functools.reduce(operator.mul, uniform, row_sum(functools.reduce(operator.mul, rest)))
    return substitute(roots, made)


def _factors(e: Expr) -> tuple[list[Expr], list[Expr]]:
    """Of a product the uniform factors and the others; of anything else itself."""
    operands = [a for a in e.args if isinstance(a, Expr)]
    if e.op not in ("mul", "neg") or e.uniform:
        return [], [e]
    uniform, rest = [node("const", "-1.0")] if e.op == "neg" else [], []
    for a in operands:
        more, others = ([a], []) if a.uniform else _factors(a)
        uniform += more
        rest += others
    return uniform, rest


def split(roots: Sequence[Expr], n_args: int, numbers: Collection[str], online: bool
          ) -> tuple[list[list[Expr]], list[Expr]]:
    """The values that each stage computes, one a row, and the roots by means of them: value after value
    they are arguments `n_args`, `n_args` + 1, ... `numbers` are the arguments that are Python numbers."""
    stages: list[list[Expr]] = []
    roots = list(roots) if online else _one_by_one(roots)
    while found := schedule(roots := with_sums(roots), online)[0].found:
        border = _border(roots, {v for f in found for v in f.values if v is not None}, numbers)
        names = {value: argument(f"a{n_args + k}", True) for k, value in enumerate(border)}
        n_args += len(border)
        stages.append(border)
        roots = substitute(roots, names)
    return stages, list(roots)


def _one_by_one(roots: Sequence[Expr]) -> list[Expr]:
    """For where a pass finds no two values of which one needs the other."""
    roots = spelled_out(roots)
    tops = [n for n in toposort(roots) if n.op == "row_top"]
    # A row of -inf alone has exponentials relative to 0.
    finite = {top: where(top == -math.inf, 0, top) for top in tops}
    relative = {n: exp(substitute([a for a in n.args if isinstance(a, Expr)], finite)[0])
                for n in toposort(roots) if n.op == "exp"}
    return substitute(roots, relative)


def _border(roots: Sequence[Expr], values: Collection[Expr], numbers: Collection[str]) -> list[Expr]:
    """What follows from values and numbers alone and is a root, or an operand of what does not."""
    follows = dict.fromkeys(values, True)  # and whether it depends on a value
    border: dict[Expr, None] = {}
    for n in toposort(roots, follows.copy()):
        operands = [a for a in n.args if isinstance(a, Expr)]
        if n.op in ("const", "row_size") or (n.op == "arg" and n.args[0] in numbers):
            follows[n] = False
        elif (operands and n.uniform and n.primitive.of_row != REDUCTION
              and all(a in follows for a in operands)):
            follows[n] = any(follows[a] for a in operands)
        else:
            border |= dict.fromkeys(a for a in operands if follows.get(a))
    border |= dict.fromkeys(r for r in roots if follows.get(r))
    return list(border)


# -- plans -----------------------------------------------------------------------------------------

class Pass(NamedTuple):
    """One pass over memory, before it is a kernel; `found` and `outputs` as a stage's."""

    problem: Problem
    args: list[Any]
    shape: Ints
    made: list[Output]
    found: tuple[int, ...]
    outputs: tuple[int, ...]


class Stage(NamedTuple):
    """One kernel: its callable, which of its results the next ones take, which are the operator's outputs."""

    run: Callable[..., Any]
    draws: bool                # whether it takes random numbers
    found: tuple[int, ...]     # a position among the results for each value
    outputs: tuple[int, ...]   # the operator's output that each of the first results is


class Plan:
    """The stages of one kind of call of an operator."""

    def __init__(self, op: RowOperator, args: Sequence[Any], shape: Ints, outputs: Sequence[torch.Tensor],
                 order: Sequence[int], alignment: int) -> None:
        self.op, self.args, self.shape, self.outputs = op, list(args), shape, outputs
        self.order, self.alignment, self.acc = order, alignment, op.acc_dtype(args)
        self.on_gpu, self.inner = device_type(outputs[0]) == "cuda", dict[int, int]()
        self.double = op.is_double(args)
        first = len(shape) - op.row_dims
        self.one_a_row = self.of_values = op.one_a_row(shape)
        self.expanded: list[int] = []  # arguments that get the shape of values
        self.row_size = math.prod(shape[first:])
        columns = {d for d in range(first, len(shape)) if shape[d] != 1}
        missing = [layout.missing(o.shape, shape) for o in outputs]
        uniform = [op.is_one_a_row(k) for k in range(len(outputs))]
        self.spread = [op.is_spread(k) and not m for k, m in enumerate(missing)]
        self.of_rows = [u or s or (bool(m) and m >= columns)
                        for u, s, m in zip(uniform, self.spread, missing, strict=True)]
        self.summed = [not of_rows and bool(m) for of_rows, m in zip(self.of_rows, missing, strict=True)]
        # Dimensions that one value a row is summed over after the kernels: a weight that several rows share.
        self.later = {k: tuple(sorted(m - columns)) for k, m in enumerate(missing)
                      if self.of_rows[k] and m - columns}
        each = zip(op.outputs, uniform, self.spread, self.of_rows, strict=True)
        self.roots = [row_sum(r) if of_rows and not (u or s) else r for r, u, s, of_rows in each]

    def build(self, online: bool) -> Callable[..., Any]:
        """`online`: one pass finds what belongs together, as a GPU does; a CPU's second pass is cheap."""
        n = len(self.args)
        numbers = {f"a{i}" for i, a in enumerate(self.args) if not isinstance(a, torch.Tensor)}
        values, roots = split(factored(self.roots), n, numbers, online)
        names = {argument(f"a{n + k}", True): value
                 for k, value in enumerate(v for stage in values for v in stage)}
        wanted = {k: names[root] for k, root in enumerate(roots) if self.of_rows[k] and root in names}
        rest = [k for k in range(len(roots)) if k not in wanted]
        read = set(leaves([roots[k] for k in rest] + [v for stage in values for v in stage], "arg"))
        if values and not any(self.of_rows[k] for k in rest):
            self._keep_inner(values)
        passes = []
        for stage in values:
            kept = [v for k, v in enumerate(stage, len(self.args)) if f"a{k}" in read]
            here = set(stage)
            passes.append(self._finding(stage, kept, {k: v for k, v in wanted.items() if v in here}))
        for of_rows in (False, True):
            chosen = [k for k in rest if self.of_rows[k] == of_rows]
            if chosen:
                passes.append(self._elements(roots, chosen, self.one_a_row if of_rows else self.shape))
        stages = self._compiled(passes)
        in_one = (len(stages) == 1 and not (self.later or any(self.spread) or self.expanded)
                  and stages[0].outputs == tuple(range(len(roots))))
        if in_one or self.outputs[0].is_meta:
            return stages[0].run
        return self._run(stages, n)

    def _keep_inner(self, values: Sequence[Sequence[Expr]]) -> None:
        """Where a row has a few neighbours of memory (the channels of a group), each is found apart; they
        are joined with the partial values. So packs are whole, and each column of memory has its values."""
        first = len(self.shape) - self.op.row_dims
        inner = list(itertools.takewhile(lambda d: d >= first, self.order))
        beside = list(itertools.takewhile(lambda d: d < first, self.order[len(inner):]))
        width = 16 // self.outputs[0].element_size()
        few = math.prod(self.shape[d] for d in inner) < (width if self.on_gpu else SHORT_RUN)
        whole = not self.on_gpu or math.prod(self.shape[d] for d in (*inner, *beside)) % width == 0
        positions = any(n.op == "row_first" for stage in values for n in toposort(stage))
        if not (self.op.of_channels and inner and beside and few and whole) or positions:
            return
        self.inner = {d: self.shape[d] for d in inner}
        self.of_values = tuple(n if d in self.inner else one for d, (n, one) in enumerate(
            zip(self.shape, self.one_a_row, strict=True)))
        for k, a in enumerate(self.args):
            if isinstance(a, torch.Tensor) and tuple(a.shape) == self.one_a_row:
                self.args[k] = torch.empty(self.of_values, dtype=a.dtype, device="meta")
                self.expanded.append(k)

    def _compiled(self, passes: Sequence[Pass]) -> list[Stage]:
        """A kernel for each; or one, which computes the elements together with what they follow from."""
        wanted = self.op.of_channels or not self.on_gpu
        joined = self._joined(*passes) if wanted and len(passes) == 2 else None
        if joined is not None:
            run = self._run_of(joined)
            if not self.outputs[0].is_meta:  # other devices want the others
                return [Stage(run, False, (), joined.outputs)]
        return [Stage(self._run_of(one), one.problem.draws, one.found, one.outputs)
                for one in passes]

    def _run_of(self, one: Pass) -> Callable[..., Any]:
        return self.op.compile(one.args, one.shape, one.problem, one.made, self.alignment)

    def _joined(self, first: Pass, second: Pass) -> Pass | None:
        """Both in one kernel, where that is possible."""
        plain = first.problem.across and all(map(_in_order, first.made)) and not any(second.problem.reduced)
        if not plain or self.alignment < 16 or second.shape != self.shape:
            return None
        n = len(first.made)
        then = second.problem._replace(outputs=tuple(
            o._replace(name=f"out{k}") for k, o in enumerate(second.problem.outputs, n)))
        read = {o.name for o in then.inputs}
        found = tuple((f"a{k}", f"out{place}") for k, place in enumerate(first.found, len(first.args))
                      if f"a{k}" in read)
        names = {k: f"out{at}" for at, k in (*enumerate(first.outputs), *enumerate(second.outputs, n))}
        outputs = tuple(sorted(names))
        problem = first.problem._replace(then=then, found=found, returned=tuple(names[k] for k in outputs))
        if not self._fits_one_kernel(problem):
            return None
        return Pass(problem, first.args, self.shape, [*first.made, *second.made], (), outputs)

    def _fits_one_kernel(self, problem: Problem) -> bool:
        if not self.on_gpu:
            from fusionrt.cpu import across
            alone = problem.then is not None and {o.name for o in problem.then.outputs} == {*problem.returned}
            return alone and across.joins(problem)
        from fusionrt.runtime import planes, resident
        device = self.outputs[0].device
        return planes.fits(problem, device) or resident.fits(problem, device)

    def _finding(self, stage: Sequence[Expr], kept: Sequence[Expr], wanted: dict[int, Expr]) -> Pass:
        """One pass over the domain; a value is stored as an output wants it, and as arithmetic does."""
        made = [self._made(k, value, True) for k, value in wanted.items()]
        places = {v: k for k, (v, o) in enumerate(zip(wanted.values(), made, strict=True))
                  if (o.shape, o.dtype) == (self.of_values, self.acc)}
        kept = [v for v in kept if v not in places]
        made += [self._value(v) for v in kept]
        inner = math.prod(self.inner.values()) if kept else 1
        once = [k for k, o in enumerate(made) if inner > 1 and o.shape != self.of_values]
        walked = [o._replace(over=self._walk(self.of_values)) if k in once else o for k, o in enumerate(made)]
        problem = self._posed(walked, self.shape, self.order)._replace(
            across=True, inner=inner, once=tuple(f"out{k}" for k in once))
        args = list(self.args)
        # What nobody reads is an argument as well, whichever.
        places |= {v: k for k, v in enumerate(kept, len(wanted))}
        dense = layout.contiguous(self.of_values)
        strides = [made[places[v]].strides if v in places else dense for v in stage]
        self.args += [torch.empty_strided(self.of_values, each, dtype=self.acc, device="meta")
                      for each in strides]
        return Pass(problem, args, self.shape, made, tuple(places.get(v, 0) for v in stage), tuple(wanted))

    def _value(self, root: Expr) -> Output:
        """One a row, for kernels that follow: it lies in memory as rows are walked, and they read it so."""
        made = Output(root, self.acc, self.of_values, layout.contiguous(self.of_values),
                      self._walk(self.of_values), True)
        return made._replace(strides=made.walk_strides)

    def _elements(self, roots: Sequence[Expr], chosen: Sequence[int], shape: Ints) -> Pass:
        """A pointwise kernel over the domain, or over one value a row."""
        order = (self.order if shape == self.shape else
                 [d for d in reversed(range(len(shape))) if shape[d] != 1])
        made = [self._made(k, roots[k], self.summed[k]) for k in chosen]
        problem = self._posed(made, shape, order)
        return Pass(problem, list(self.args), shape, made, (), tuple(chosen))

    def _made(self, k: int, root: Expr, reduced: bool) -> Output:
        """Output k as a kernel computes it."""
        o = self.outputs[k]
        if k in self.later or self.spread[k]:
            strides, dtype = layout.contiguous(self.one_a_row), o.dtype if self.spread[k] else self.acc
            walk = self._walk(self.one_a_row) if reduced else strides
            return Output(root, dtype, self.one_a_row, strides, walk, reduced)
        over = self._walk(o.shape) if reduced else layout.expand_strides(o.shape, o.stride(), self.shape)
        return Output(root, o.dtype, tuple(o.shape), tuple(o.stride()), over, reduced)

    def _walk(self, shape: Sequence[int]) -> Ints:
        return layout.reduced_strides(shape, self.shape, self.order)

    def _posed(self, made: Sequence[Output], shape: Ints, order: Sequence[int]) -> Problem:
        return pose(self.op.name, self.args, shape, order, made, self.double, row_size=self.row_size)

    def _run(self, stages: Sequence[Stage], n: int) -> Callable[..., Any]:
        spread = [k for k, is_spread in enumerate(self.spread) if is_spread]
        later = sums_later(self.later, self.outputs)
        results: list[Any] = [None] * len(self.outputs)
        # Not this plan itself: it has the tensors of the call that it is made of.
        expanded, of_values, whole = self.expanded, self.of_values, self.shape

        def run(*args: Any) -> Any:
            rng, given, found = args[n:], list(args[:n]), list(results)
            for k in expanded:
                given[k] = given[k].expand(of_values).contiguous()
            for stage in stages:
                computed = unpack(stage.run(*given, *(rng if stage.draws else ())))
                for k, value in zip(stage.outputs, computed, strict=False):
                    found[k] = value
                given += [computed[k] for k in stage.found]
            later(found)
            for k in spread:
                found[k] = found[k].expand(whole)
            return pack(found)

        return where_aligned(run, self.op, self.args[:n], self.alignment)


def _in_order(output: Output) -> bool:
    """Whether it lies in memory as the walk finds it."""
    each = zip(output.shape, output.strides, output.walk_strides, strict=True)
    return all(size == 1 or own == walked for size, own, walked in each)


def where_aligned(run: Callable[..., Any], op: RowOperator, args: Sequence[Any], alignment: int
                  ) -> Callable[..., Any]:
    """Several kernels of `op` for pointers of this alignment, as one: which plan a call has is asked once, as
    what a kernel would do for others is the whole operator's work."""
    pointers = [k for k, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_cuda]
    if alignment < 16 or not pointers:
        return run

    def either(*args: Any) -> Any:
        if any(args[k].data_ptr() & 15 for k in pointers):
            return op.misaligned(*args)
        return run(*args)

    return either


def sums_later(dims: Mapping[int, Ints], outputs: Sequence[torch.Tensor]) -> Callable[[list[Any]], None]:
    """Sums, after the kernels, over the `dims` of some outputs, which then have these shapes and dtypes."""
    targets = [(k, over, tuple(outputs[k].shape), outputs[k].dtype) for k, over in dims.items()]

    def run(found: list[Any]) -> None:
        for k, over, shape, dtype in targets:
            found[k] = found[k].sum(over).view(shape).to(dtype)

    return run
