"""A stage over memory and the elements that follow from it, in one kernel: pointwise_resident.cu.

Its blocks stay until all have met, so the device must hold all of them at a time. What they keep in shared
memory between the two passes is not read again.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fusionrt.layout import Reduction
from fusionrt.problem import Operand, Problem
from fusionrt.rehearsal import stands_for
from fusionrt.runtime import accumulators, pointwise, reduction_cut, vectors
from fusionrt.runtime import device as cuda
from fusionrt.runtime.access import REDUCE_BLOCK, Again, access_mode
from fusionrt.runtime.geometry import INDEX_LIMIT, is_flat
from fusionrt.runtime.parts import split
from fusionrt.runtime.source import (
    ITEMSIZE,
    Field,
    Params,
    Specialisation,
    arithmetic,
    assemble,
    definitions,
    members,
    pointer,
)

RESERVED = 1 << 10  # bytes of shared memory that every block takes
REGISTERS = 1 << 16


def rows(problem: Problem) -> Reduction:
    part, = split(problem)
    assert part.rows is not None
    return part.rows


def fits(problem: Problem, device: torch.device) -> bool:
    """Whether one kernel can compute the elements of `problem.then` as well, and the device holds it."""
    index = stands_for(device).index
    return _is_matrix(problem) and (index is None or shape(problem, index) is not None)


def _is_matrix(problem: Problem) -> bool:
    """Both passes are over one, the columns of which are kept, and several blocks share a column."""
    then, made, sizes = problem.then, rows(problem), problem.sizes
    if then is None or then.sizes != sizes or len(sizes) != 2 or not made.keeps_columns or problem.inner > 1:
        return False
    width = vectors.vector_width(problem, 16)
    packs = 1 < width == vectors.vector_width(then, 16) and sizes[0] % width == 0
    if not packs or problem.acc != "float32" or problem.domain.numel >= INDEX_LIMIT:
        return False
    modes = {access_mode(o, sizes, width) for o in (*problem.inputs, *then.inputs)}
    flat = all(is_flat(o, sizes) for o in then.outputs)
    shared = not reduction_cut.is_final(problem, made, width) and _most_chunks(problem, made, width) > 1
    random = bool(problem.streams or then.streams)
    return modes <= {"flat", "vector", "scalar"} and flat and shared and not random


def kept(problem: Problem) -> list[Operand]:
    """What both passes read: whole packs of the first one's operands."""
    assert problem.then is not None
    read = {o.name for o in problem.then.inputs}
    return [o for o in problem.inputs if o.name in read and is_flat(o, problem.sizes)]


def pack_bytes(problem: Problem) -> int:
    """Of the operands that are kept, a thread's."""
    return sum(ITEMSIZE[o.dtype] for o in kept(problem)) * vectors.vector_width(problem, 16)


def blocks(problem: Problem) -> int:
    """On a multiprocessor: three where several operands are read and registers allow two packs of each, which
    was 1 to 3 % faster; of one operand two, which keep more packs on their way, were 2 to 8 % faster."""
    made, width = rows(problem), vectors.vector_width(problem, 16)
    sums = sum(min(2, len(g.places)) for g in accumulators.groups(problem))
    registers = reduction_cut.registers(problem, made, width, 2, sums) - 8
    return 3 if len(kept(problem)) > 1 and 3 * registers * REDUCE_BLOCK <= REGISTERS else 2


def generate(problem: Problem) -> Specialisation:
    then, made = problem.then, rows(problem)
    assert then is not None
    again = Again(frozenset(name for name, _ in problem.found),
                            frozenset(o.name for o in kept(problem)))
    staying = blocks(problem)
    first = pointwise.body(problem, 16, made, staying=staying)
    second = pointwise.body(then, 16, again=again)
    width = vectors.vector_width(problem, 16)
    unroll, _ = reduction_cut.across_unroll(problem, made, width, staying)
    at_once = min(unroll, pointwise.walk_unroll(then, width))
    constants = definitions(MIN_BLOCKS=staying, AT_ONCE=at_once, KEPT_BYTES=pack_bytes(problem))
    fields = [pointer("unsigned", "arrived", const=False), *members("int", "kept", "side")]
    params = Joined(fields, first.params, second.params)
    text = assemble("pointwise_resident", arithmetic(problem.acc, then.significant_bits), [
        "namespace finding {", *first.lines, "}", "namespace elements {", *second.lines, "}",
        params.declaration, *constants, *_keeping(problem, width),
        *recalling(problem, width)])
    values = (*first.values, *second.values, ("arrived",), ("packs_kept",), ("side",))
    return Specialisation(text, "pointwise_resident", params, values)


class Joined(Params):
    """The parameters of both passes, then those of the kernel."""

    def __init__(self, fields: Sequence[Field], first: Params, second: Params) -> None:
        super().__init__(fields)
        self.declaration = self.declaration.replace(
            "{\n", "{\n    finding::Params finding;\n    elements::Params elements;\n", 1)
        formats = [part.packer.format + "x" * (-part.packer.size % 8) for part in (first, second)]
        self.packer = struct.Struct("=" + "".join(f.lstrip("=") for f in (*formats, self.packer.format)))


def places(problem: Problem, width: int) -> list[tuple[Operand, str]]:
    """What is kept, and the text of where: `{}` is the place of a pack of each of a block's threads."""
    made, before = [], 0
    for o in kept(problem):
        nbytes, pack = ITEMSIZE[o.dtype] * width, f"Pack<{o.dtype}_t, finding::VEC>"
        at = f"{before} * finding::BLOCK + threadIdx.x * {nbytes}"
        made.append((o, f"*reinterpret_cast<{pack}*>({{}} + {at})"))
        before += nbytes
    return made


def _keeping(problem: Problem, width: int) -> list[str]:
    tile = "const finding::Tile<finding::VEC>& tile"
    return [f"__device__ __forceinline__ void keep(unsigned char* to, {tile}) {{",
            *(f"    {place.format('to')} = tile.{o.name};" for o, place in places(problem, width)), "}"]


def recalling(problem: Problem, width: int) -> list[str]:
    tile = "elements::Tile<finding::VEC>"
    return [f"__device__ __forceinline__ {tile} recall(unsigned char* from, const elements::Params& p, "
            f"finding::index_t i, const {tile}& fixed) {{",
            f"    {tile} tile = elements::load_rest<finding::VEC>(p, i, fixed);",
            *(f"    tile.{o.name} = {place.format('from')};" for o, place in places(problem, width)),
            "    return tile;", "}"]


# -- the launch ------------------------------------------------------------------------------------

class Shape(NamedTuple):
    grid: int
    chunks: int
    packs: int     # of a thread in shared memory
    shared: int    # bytes of these, of a block
    side: int


def shape(problem: Problem, device: int) -> Shape | None:
    """None where the device does not hold all blocks at a time."""
    made, width = rows(problem), vectors.vector_width(problem, 16)
    tiles = reduction_cut.tiles(problem, made, width)
    chunks = min(_most_chunks(problem, made, width), blocks(problem) * cuda.multiprocessors(device) // tiles)
    if chunks < 2:
        return None
    grid = tiles * chunks
    groups = accumulators.groups(problem)
    static = 4 * max(len(g.places) for g in groups) * REDUCE_BLOCK * width
    static += 4 * accumulators.n_values(groups) * REDUCE_BLOCK
    of_multiprocessor, of_block = cuda.shared_bytes(device)
    here = math.ceil(grid / cuda.multiprocessors(device))
    room = min(of_multiprocessor // here - RESERVED, of_block) - static
    if room < 0:
        return None
    a_pack = REDUCE_BLOCK * pack_bytes(problem)
    needed = math.ceil(made.n_rows / (chunks * _depth(problem, made, width)))
    packs = max(0, min(needed, room // a_pack)) if a_pack else 0
    # Few columns: the threads of a block share them.
    side = min(5, max(0, (-(-made.columns // grid) - 1).bit_length()))
    return Shape(grid, chunks, packs, packs * a_pack, side)


def _depth(problem: Problem, rows: Reduction, width: int) -> int:
    """Rows that a block looks at together."""
    return REDUCE_BLOCK // reduction_cut.n_lanes(problem, rows, width)


def _most_chunks(problem: Problem, rows: Reduction, width: int) -> int:
    """Blocks that share a column, so that each has several turns."""
    return rows.n_rows // (4 * _depth(problem, rows, width))
