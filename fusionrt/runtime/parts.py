"""A problem in parts, each the work of one kernel."""

from collections.abc import Sequence
from typing import NamedTuple

from fusionrt.graph import leaves
from fusionrt.layout import Reduction, reduction
from fusionrt.problem import Problem
from fusionrt.runtime.abreast import side_by_side


class Part(NamedTuple):
    """One kernel of a problem: the part of the outputs that it computes."""

    problem: Problem
    outputs: tuple[int, ...]            # which of the whole problem's outputs
    rows: Reduction | None

    @classmethod
    def of(cls, problem: Problem, outputs: tuple[int, ...], kept: Sequence[bool]) -> "Part":
        seen, rows = side_by_side(problem, reduction(problem.domain, kept))
        return cls(seen, outputs, rows)

    @property
    def kept(self) -> int:
        """Sums of each kind that come of it."""
        assert self.rows is not None
        return self.rows.kept // self.problem.abreast


def split(problem: Problem) -> list[Part]:
    """One part has the full outputs and one pattern of reduced ones; there is another part for each pattern
    that is not a coarsening of one at hand (x[N, 1] * y[1, M] has two)."""
    if problem.across:
        kept = tuple(map(any, zip(*(o.strides for o in problem.outputs), strict=True)))
        return [Part.of(problem, tuple(range(len(problem.outputs))), kept)]
    patterns: dict[tuple[bool, ...], list[int]] = {}
    for k in sorted(problem.summed, key=lambda k: -sum(s != 0 for s in problem.outputs[k].strides)):
        kept = tuple(s != 0 for s in problem.outputs[k].strides)
        finer = next((p for p in patterns if all(a <= b for a, b in zip(kept, p, strict=True))), kept)
        patterns.setdefault(finer, []).append(k)
    full = problem.full
    if not patterns:
        return [Part(_part(problem, full), tuple(full), None)]
    parts = []
    for kept, members in patterns.items():
        chosen = tuple(full + members)
        full = []
        parts.append(Part.of(_part(problem, chosen), chosen, kept))
    return parts


def _part(problem: Problem, chosen: Sequence[int]) -> Problem:
    roots = tuple(problem.roots[k] for k in chosen)
    used = {*leaves(roots, "arg"), *leaves(roots, "mask"), *leaves(roots, "row_size")}
    random = set(leaves(roots, "random"))
    return problem._replace(
        inputs=tuple(o for o in problem.inputs if o.name in used),
        scalars=tuple(s for s in problem.scalars if s in used), roots=roots,
        outputs=tuple(problem.outputs[k] for k in chosen),
        reduced=tuple(problem.reduced[k] for k in chosen),
        streams=problem.streams if random else ())
