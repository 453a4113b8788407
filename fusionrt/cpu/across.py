"""Rows that lie across memory, on the CPU: a kernel that finds sums and maxima of all rows, and a small
pointwise one for what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from fusionrt.cpu import columns, pointwise
from fusionrt.expr import Expr, argument, node
from fusionrt.graph import leaves, substitute
from fusionrt.problem import MASK, Operand, Output, Problem, pack, unpack
from fusionrt.rowwise import schedule


def n_read(problem: Problem) -> int:
    """How many of the first arguments hold all that the problem reads."""
    names = [*(o.name for o in problem.inputs), *(s for s in problem.scalars if s != "row_size")]
    return 1 + max((int(name[1:]) for name in names), default=-1)


def divided(problem: Problem) -> tuple[Problem, Problem]:
    """What finds the values, and what computes the outputs from them: they follow the arguments read."""
    values = [v for f in schedule(problem.roots, False)[0].found for v in f.values if v is not None]
    like = problem.outputs[0].strides
    used = {*leaves(values, "arg"), *leaves(values, "row_size")}
    finding = problem._replace(
        roots=tuple(values),
        outputs=tuple(Operand(f"out{k}", "float64", like) for k in range(len(values))),
        reduced=(True,) * len(values),
        scalars=tuple(s for s in problem.scalars if s in used),
    )
    totals = [argument(f"a{n_read(problem) + k}", True) for k in range(len(values))]
    names = {
        v: total / node("row_size", "row_size") if v.op == "moment_mean" else total
        for v, total in zip(values, totals, strict=True)
    }
    roots = tuple(substitute(problem.roots, names))
    kept = math.prod(size for size, stride in zip(problem.sizes, like, strict=True) if stride)
    read = set(leaves(roots, "arg"))
    given = tuple(Operand(str(a.args[0]), "float64", (1,)) for a in totals if a.args[0] in read)
    scalars = tuple(s for s in problem.scalars if s != "row_size" and s in read)
    scalars += ("row_size",) if leaves(roots, "row_size") else ()
    following = problem._replace(
        inputs=given,
        scalars=scalars,
        roots=roots,
        acc="float64",
        outputs=tuple(o._replace(strides=(1,)) for o in problem.outputs),
        reduced=(False,) * len(roots),
        sizes=(kept,),
        streams=(),
        across=False,
    )
    return finding, following


def joins(problem: Problem) -> bool:
    """Whether one kernel finds the values and computes the elements of `problem.then`: where these need sums
    as they are, and no operand beside (of two gained 10 to 30 %, of one, beside another, it lost as much)."""
    then, (finding, following) = problem.then, divided(problem)
    assert then is not None
    here = {*(o.name for o in problem.inputs), *(name for name, _ in problem.found)}
    plain = problem.inner == 1 and then.sizes == problem.sizes and then.acc == problem.acc
    drawn = then.streams or problem.streams or then.taken or any(o.dtype == MASK for o in then.inputs)
    in_order = all(o.strides[0] == 1 for o in then.outputs) and here.issuperset(o.name for o in then.inputs)
    return (plain and not drawn and in_order and all(root.op == "arg" for root in following.roots)
            and columns.serves(_joined(problem, finding, following)))


def _joined(problem: Problem, finding: Problem, following: Problem) -> Problem:
    first = n_read(problem)
    sums = [f"out{int(str(root.args[0])[1:]) - first}" for root in following.roots]
    found = tuple((name, sums[int(output.removeprefix("out"))]) for name, output in problem.found)
    return finding._replace(found=found)


def kernels(problem: Problem) -> list[tuple[ModuleType, Problem]]:
    """Who writes each, and of which problem: of values and elements in one, of sums and maxima themselves, or
    of what finds the values and what follows from them."""
    finding, following = divided(problem)
    if problem.then is not None:
        return [(columns, _joined(problem, finding, following))]
    writer = columns if columns.serves(finding) else pointwise
    if writer is columns and problem.inner == 1 and _is_found(problem, following):
        return [(columns, finding._replace(outputs=problem.outputs))]
    return [(writer, finding), (pointwise, following)]


def _is_found(problem: Problem, following: Problem) -> bool:
    """Sums and maxima themselves: nothing follows from them."""
    n = n_read(problem)
    return all(root is argument(f"a{n + k}", True) for k, root in enumerate(following.roots))


def build(problem: Problem, results: Sequence[Output], n_args: int) -> Callable[..., Any]:
    """A callable of the operator's arguments (and random numbers)."""
    (writer, finding), *rest = kernels(problem)
    if problem.then is not None:
        in_one: Callable[..., Any] = writer.build(finding, results[len(problem.outputs):], n_args)
        return in_one
    n, in_order = n_read(problem), [r._replace(strides=r.walk_strides) for r in results]
    if not rest:
        return _as_declared(writer.build(finding, in_order, n_args), results)
    ((_, following),) = rest
    if problem.inner > 1:
        return _of_inner(problem, writer, finding, following, results, n_args)
    values = [
        Output(root, torch.float64, r.shape, r.walk_strides, r.over, True)
        for root, r in zip(finding.roots, [results[0]] * len(finding.roots), strict=True)
    ]
    find = writer.build(finding, values, n_args)
    finish = pointwise.build(following, in_order, n + len(values))

    def call(*args: Any) -> Any:
        return finish(*args[:n], *unpack(find(*args)))

    return _as_declared(call, results)


def _of_inner(problem: Problem, writer: ModuleType, finding: Problem, following: Problem,
              results: Sequence[Output], n_args: int) -> Callable[..., Any]:
    """Of rows with a few neighbours in memory (the channels of a group), which are found apart, and then
    joined, so that each of them has its row's values; an output may want those of one of them."""
    n, kept, inner = n_read(problem), following.sizes[0], problem.inner

    def flat(root: Expr, dtype: torch.dtype) -> Output:
        return Output(root, dtype, (kept,), (1,), (1,), True)

    find = writer.build(finding, [flat(root, torch.float64) for root in finding.roots], n_args)
    finish = pointwise.build(following, [flat(r.root, r.dtype) for r in results], n + len(finding.roots))
    tops = [root.op in pointwise.TOPS for root in finding.roots]
    places = [(r.shape, r.walk_strides, o.name in problem.once)
              for r, o in zip(results, problem.outputs, strict=True)]

    def joined(found: torch.Tensor, is_top: bool) -> torch.Tensor:
        each = found.view(-1, inner)
        row = each.amax(1, keepdim=True) if is_top else each.sum(1, keepdim=True)
        return row.expand(-1, inner).reshape(-1)

    def placed(made: torch.Tensor, shape: Sequence[int], strides: Sequence[int], once: bool) -> torch.Tensor:
        return (made.view(-1, inner)[:, 0].contiguous() if once else made).as_strided(shape, strides)

    def call(*args: Any) -> Any:
        found = map(joined, unpack(find(*args)), tops)
        made = unpack(finish(*args[:n], *found))
        return pack([placed(one, *place) for one, place in zip(made, places, strict=True)])

    return _as_declared(call, results)


def _as_declared(run: Callable[..., Any], results: Sequence[Output]) -> Callable[..., Any]:
    """`run`, which gives results in the order in which rows are walked, giving them as they are to lie."""
    reordered = [tuple(r.strides) != tuple(r.walk_strides) for r in results]
    if not any(reordered):
        return run

    def call(*args: Any) -> Any:
        return pack([made.contiguous() if again else made
                     for made, again in zip(unpack(run(*args)), reordered, strict=True)])

    return call
