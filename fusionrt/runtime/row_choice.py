"""How the threads of a GPU are laid out over rows, and where a row waits between the passes over it.

* registers: a row is loaded by the threads that work on it and stays with them; blocks come and go. At the
  rate of a copy up to 32 KB a row, for norms with moments up to 64.
* staged: the copy engine (Hopper's `cp.async.bulk`) brings rows into shared memory. Wide rows are shared by
  as few blocks of a cluster as can, which wait for each other. Where sums over rows fill the registers, or
  the widest rows have weights, blocks stay, and their next rows come while they work on one, in parts where
  there is no room for two, or into the place that a row leaves as it is `moved` on into registers. The L2 is
  asked for rows `ahead` of those for which there is room.
* streamed: every pass reads the row anew. For what is wider than all that, or cannot be copied in bulk.

Where nothing is found in a row, as for a gradient of cross-entropy, a block has a piece of one, in registers.
"""

from __future__ import annotations

import functools

from fusionrt.problem import Problem
from fusionrt.runtime.row_layout import Layout, can_be_staged, has_room_to_carry, looks
from fusionrt.runtime.row_operands import (
    columns,
    held,
    is_ragged,
    segment_sums,
    segments,
    sums,
    width,
)
from fusionrt.runtime.row_registers import in_pieces, in_registers, is_alone, streamed
from fusionrt.runtime.row_staged import staged
from fusionrt.runtime.source import ITEMSIZE

MOST_SEGMENTS, SHORTEST_SEGMENT = 64, 8    # of a row; packs of one, so that few have part in those of a warp


@functools.lru_cache(4096)
def layout(problem: Problem, alignment: int, clusters: bool) -> Layout:
    """`clusters`: of an architecture that has them, and the copy engine."""
    made = _layout(problem, alignment, clusters)._replace(ragged=is_ragged(problem, alignment))
    return made._replace(carries=has_room_to_carry(problem, made))


def _layout(problem: Problem, alignment: int, clusters: bool) -> Layout:
    pack = width(problem, alignment)
    if not sums(problem) and looks(problem) == 1:
        return in_pieces(problem, pack) or streamed(problem, pack, clusters)
    kept = in_registers(problem, pack)
    if kept is not None and not sums(problem) and not (clusters and is_alone(problem, kept)):
        return kept
    fetched = staged(problem, pack) if clusters and alignment >= 16 and can_be_staged(problem) else None
    return fetched or kept or streamed(problem, pack, clusters)


def takes_sums(problem: Problem, alignment: int, clusters: bool) -> bool:
    """Whether the kernel can keep sums over rows in registers, or find those of segments."""
    made = layout(problem, alignment, clusters)
    if made.kind == "streamed" or made.pieces:
        return False
    if not segment_sums(problem):
        return True
    found = segments(problem)
    if found is None or found.each > MOST_SEGMENTS or sums(problem):
        return False
    wide = 2 * made.width * max((ITEMSIZE[o.dtype] for o in held(problem)), default=0) >= 16
    long = columns(problem) >= SHORTEST_SEGMENT * made.width * found.each
    return wide and long and made.threads >= 32 and not made.persistent
