"""From a cluster of calls to a call of one operator of the expression layer."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from fusionrt.convert.cluster import Cluster
from fusionrt.convert.effects import value
from fusionrt.convert.graph import Edits, hint, is_tensor, same
from fusionrt.convert.members import evaluate, layer_norm, rms_norm, softmax
from fusionrt.dtypes import FLOATS
from fusionrt.expr import Expr, TraceError, argument, cast
from fusionrt.fusion import trace
from fusionrt.op import promoted_dtype
from fusionrt.row_fusion import row_operator

Run = Callable[..., Any]


def fuse_cluster(edits: Edits, cluster: Cluster, statistic: str) -> bool:
    """Replace its calls by one; False where that cannot be: they are then left as they are."""
    results, operands = cluster.results, _arranged(cluster)
    if not results or not operands:
        return False
    try:
        run, n_outputs = _operator(cluster, operands, results)
    except TraceError:  # an output that has no cast, a row that is none of ours
        return False
    last = cluster.nodes[-1]
    edits.note(last, statistic)
    args = _detached(edits, cluster, operands)
    if n_outputs == 1:
        results[0].replace_all_uses_with(edits.call(run, args, {}, results[0]))
    else:
        made = edits.call(run, args, {}, last, given=tuple(value(n) for n in results))
        recorded = any(value(n).requires_grad for n in results)
        for k, n in enumerate(results):
            part = edits.call(operator.getitem, (made, k), {}, last, given=value(n))
            if recorded and not value(n).requires_grad and value(n).is_floating_point():
                part = edits.call(torch.detach, (part,), {}, last, given=value(n))
            n.replace_all_uses_with(part)
    edits.erase(cluster.nodes)
    return True


def _detached(edits: Edits, cluster: Cluster, operands: Sequence[Node]) -> list[Node]:
    """The operands; those from which no gradient comes (of which only a mask is made) without one, as they
    would get zeros in the place of none."""
    differentiable: set[Node] = set()
    for n in reversed(cluster.nodes):
        if value(n).requires_grad and (n in cluster.results or not differentiable.isdisjoint(n.users)):
            differentiable.add(n)
    if not differentiable and not torch.is_grad_enabled():
        return list(operands)
    return [edits.call(torch.detach, (a,), {}, cluster.nodes[-1], given=value(a).detach())
            if is_tensor(a) and value(a).requires_grad and differentiable.isdisjoint(a.users) else a
            for a in operands]


# -- the operator ------------------------------------------------------------------------------------

def _operator(cluster: Cluster, operands: Sequence[Node], results: Sequence[Node]) -> tuple[Run, int]:
    """The function of the operands, and how many outputs it has: the results, and for a recorded row what
    its gradient reads, which spares the backward pass reductions."""
    row, natural = cluster.row, promoted_dtype([value(n) for n in operands if is_tensor(n)])
    full = [k for k, n in enumerate(operands) if is_tensor(n) and value(n).dtype in FLOATS
            and same(value(n).shape, cluster.shape)]
    if row is not None and not full:
        raise TraceError("a row needs an operand of its shape")
    if row is not None and any(value(n).dtype == torch.bool for n in results):
        raise TraceError("results of rows are numbers")
    recorded = any(value(n).requires_grad for n in results)
    with_terms = recorded and row is not None and not (row.rule is softmax and results == [row.node])
    summed = _summed(cluster) if with_terms else None
    if summed is not None:
        full.sort(key=lambda k: value(operands[k]).dtype != value(summed).dtype)
    natural = natural if row is None else value(operands[full[0]]).dtype
    kept = [n for n in (summed,) if n is not None and n not in results and value(n).dtype == natural]

    def compute(**args: Expr) -> tuple[Any, ...]:
        known, terms = computed(cluster, dict(zip(operands, args.values(), strict=True)))
        found = [_finished(known[n], value(n).dtype, natural) for n in results]
        return *found, *(known[n] for n in kept), *(terms if with_terms else ())

    signature = _signature([Any if is_tensor(n) else float for n in operands])
    name, names = "_".join(dict.fromkeys(m.name for m in cluster.members)), list(signature.parameters)
    name = name[:60].rstrip("_")
    compute.__signature__ = signature  # type: ignore[attr-defined]
    made: Any = row_operator(
        compute, names, name=name, row_dims=row.row_dims if row else 0, like=names[full[0]] if row else "",
        uniform=[p for p, n in zip(names, operands, strict=True) if _one_a_row(n, cluster)])
    made.__module__ = __name__  # that fx can name it
    return made, len(made.operator.outputs)


def _summed(cluster: Cluster) -> Node | None:
    """What is normalised, where it is made here of more bytes than its own: it is kept in their place."""
    row, inside = cluster.row, set(cluster.nodes)
    first: Any = row.node.args[0] if row is not None and row.rule in (layer_norm, rms_norm) else None
    if first not in inside:
        return None
    read, todo = set(), [first]
    while todo:
        n = todo.pop()
        todo += [a for a in n.all_input_nodes if a in inside]
        read |= {a for a in n.all_input_nodes if a not in inside and is_tensor(a)
                 and same(value(a).shape, cluster.shape)}
    return first if sum(value(a).dtype.itemsize for a in read) > value(first).dtype.itemsize else None


def _signature(annotations: Sequence[Any]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(f"x{k}", kind, annotation=a)
                              for k, a in enumerate(annotations)])


def computed(cluster: Cluster, known: dict[Node, Any]) -> tuple[dict[Node, Any], Sequence[Expr]]:
    """The values of all members, added to those of the operands; and what the gradient of a row reads."""
    terms: Sequence[Expr] = ()
    for m in cluster.members:
        known[m.node] = evaluate(m, known)
        if m.row_dims:
            known[m.node], terms = known[m.node]
    return known, terms


def traced(cluster: Cluster, operands: Sequence[Node], results: Sequence[Node]) -> tuple[Expr, ...]:
    """The results of a pointwise cluster as expressions of `a0`, `a1`, ..., the operands."""
    arguments = [argument(f"a{k}") for k in range(len(operands))]

    def compute(*args: Expr) -> tuple[Any, ...]:
        known, _ = computed(cluster, dict(zip(operands, args, strict=True)))
        return tuple(known[n] for n in results)

    return trace(compute, "cluster", arguments, _signature([Any] * len(operands)))


def _finished(found: Expr, dtype: torch.dtype, natural: torch.dtype) -> Expr:
    own = found.op.removeprefix("cast_") if found.op.startswith("cast_") else "bool" if found.is_truth else ""
    return found if (getattr(torch, own) if own else natural) == dtype else cast(found, dtype)


def _one_a_row(n: Node, cluster: Cluster) -> bool:
    """Whether it has one value a row. A row that is of one value is a row."""
    t, dims = value(n), cluster.row.row_dims if cluster.row else 0
    return (isinstance(t, torch.Tensor) and t.dim() == len(cluster.shape) and not same(t.shape, cluster.shape)
            and all(same(size, 1) for size in t.shape[t.dim() - dims:]))


# -- layout ------------------------------------------------------------------------------------------

def _arranged(cluster: Cluster) -> list[Node]:
    """The operands, first one whose memory order gives the results the strides that torch's would have, on
    which views of them rely; none at all if there is no such operand."""
    operands, results = cluster.operands(), cluster.results
    full = [n for n in operands if is_tensor(n) and same(value(n).shape, cluster.shape) and all(
        not same(stride, 0) or same(size, 1)
        for size, stride in zip(value(n).shape, value(n).stride(), strict=True))]
    if not full:
        contiguous = _dense(cluster.shape, range(len(cluster.shape) - 1, -1, -1))
        return operands if all(lies(r, contiguous) for r in results) else []
    for n in full:
        t = value(n)
        strides = _dense(t.shape, sorted(range(t.dim()), key=lambda d: (hint(t.stride(d), math.inf), -d)))
        if all(lies(r, strides) for r in results):
            return [n, *(o for o in operands if o is not n)]
    return []


def _dense(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Strides without gaps; `order` from the innermost dimension."""
    strides = [1] * len(shape)
    step: Any = 1
    for d in order:
        strides[d] = step
        step = step * shape[d]
    return strides


def lies(result: Node, strides: Sequence[Any]) -> bool:
    """Whether a value has these strides, as far as they matter."""
    t = value(result)
    return all(same(size, 1) or same(own, stride)
               for size, own, stride in zip(t.shape, t.stride(), strides, strict=True))
