"""How the threads of a GPU are laid out over rows: what a kernel and its launch need to know of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusionrt.problem import Operand, Problem
from fusionrt.rowwise import schedule, with_sums
from fusionrt.runtime.carried import how_many
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.instructions import instructions
from fusionrt.runtime.row_operands import (
    columns,
    held,
    is_dense,
    late,
    n_rows,
    repeats,
    segment_sums,
    segments,
    sums,
    varies,
    weights,
)
from fusionrt.runtime.source import ITEMSIZE

REGISTERS = 65536          # of a multiprocessor
SHARED = 224 << 10         # bytes of a multiprocessor, less what blocks need beside their stages
MANY_BLOCKS = 6 * MULTIPROCESSORS
WORKING = 32               # registers of a thread beside those that it keeps
OF_CHANNELS = 8            # registers that find the weights of a pack's channel
MOST_IN_REGISTERS, MOST_PACKS = 8, 4    # packs a thread
CLUSTERS = (1, 2, 4, 8, 16)
MANY_ROWS = 16384          # from which on, if they are narrow, they wait for blocks to begin
AT_ONCE = 32               # words of a thread's row and of the weights beside it
MANY_WORDS = 64            # of a thread's row, which are most of its registers
MANY_ELEMENTS = 1 << 24    # from which on threads that work at length on much are enough
ROOM_FOR_PAIRS, ROOM_BESIDE_SUMS = 40, 64  # registers of a thread
LIGHT = 10                 # instructions an element; of more, many threads that come and go hide the latency


class Layout(NamedTuple):
    kind: str                # registers, staged, streamed
    width: int               # elements of a pack: one access of a thread
    packs: int               # that a thread holds, or looks at together
    threads: int             # that share a row within a block
    rows: int                # that a block works on at a time
    blocks: int              # that a multiprocessor holds at a time
    cluster: int = 1         # blocks that share a row
    stages: int = 0          # rows that a block has in shared memory
    persistent: bool = False
    part: int = 0            # packs of a row that a stage has, where it has not all
    weights: bool = False    # beside its stages a block has its part of the weights in shared memory
    moved: bool = False      # from stages into registers as soon as they have come
    overlaps: bool = False   # if so: the first pass of the next row comes before the last one of this
    ahead: bool = False      # whoever has a row fetched asks the L2 for a later one
    carries: bool = False    # what passes leave to later ones waits in registers
    pieces: int = 0          # of a row, each for a block, which tells the others nothing
    late: bool = False       # what only the last pass reads is read there, and has no place in a stage
    turns: int = 1           # short rows that a team has one after the other, all on their way at once
    ragged: bool = False     # rows begin and end within packs

    @property
    def block(self) -> int:
        return self.threads * self.rows

    @property
    def blocks_a_row(self) -> int:
        """That share it."""
        return max(self.cluster, self.pieces)


def grid(problem: Problem, made: Layout, at_a_time: int) -> int:
    """Blocks that have rows of their own, no more than the device holds where they stay; a cluster
    counts as one."""
    needed = -(-n_rows(problem) // (made.rows * made.turns))
    if not made.persistent:
        return needed
    n_sums = len(sums(problem))
    if n_sums:  # each block leaves partial sums: with few rows they would outweigh the rows themselves
        one_each = max(1, at_a_time // made.blocks)
        at_a_time = min(at_a_time, max(one_each, n_rows(problem) // (8 * n_sums * made.rows)))
    return min(needed, max(1, at_a_time))


def rows_ahead(made: Layout, at_a_time: int) -> int:
    """How far ahead the L2 is asked: for the next row of blocks that stay, and of others for a sixth of what
    is worked on (half of it took an eighth of the speed, all of it a quarter)."""
    return at_a_time * made.rows if made.persistent else max(1, at_a_time // 6)


def span(problem: Problem, made: Layout) -> int:
    """Columns of a row that one block has: whole packs, which the copy engine can take."""
    if made.pieces:
        return made.threads * made.packs * made.width
    copied = [*held(problem), *(weights(problem) if made.weights else ())]
    step = max(made.width, 16 // min([ITEMSIZE[o.dtype] for o in copied], default=4))
    return -(-columns(problem) // (made.cluster * step)) * step


def has_weights_at_once(problem: Problem, made: Layout) -> bool:
    """Whether threads ask for the weights together with the row, and wait once: where a row is short."""
    words = sum(max(4, ITEMSIZE[o.dtype] * made.width) for o in (*held(problem), *weights(problem))) // 4
    few = made.packs * words <= AT_ONCE
    return made.kind == "registers" and not sums(problem) and is_small(problem) and few


def has_room_to_carry(problem: Problem, made: Layout) -> bool:
    if made.kind == "streamed" or not how_many(problem.roots):
        return False
    of_row, staying = a_pack(problem, made.width)
    staying += of_row if made.kind == "registers" or made.moved else 0
    return made.packs * staying <= left(made.block * made.blocks)


def lets_next_begin(problem: Problem, made: Layout) -> bool:
    """Whether the next kernel may begin as soon as all blocks of this one have. Its blocks take the places
    that are left and lie less evenly: 3 to 12 % less time where there are many, up to a half more of one or
    two for each multiprocessor (and of pointwise ops)."""
    passing = made.kind != "staged" and made.blocks_a_row == 1 and not (made.persistent or made.pieces)
    return passing and is_small(problem) and n_rows(problem) > MANY_BLOCKS * made.rows


def asks_every(problem: Problem, made: Layout) -> int:
    """Of how many packs one asks whether the row has it: each, or, if all threads have all their packs, of
    two, where there are registers for what both have on their way; of rows in registers of four."""
    full = columns(problem) == made.blocks_a_row * made.threads * made.packs * made.width and not made.ragged
    if not full or made.kind == "streamed" or (made.part and not made.moved):
        return 1
    summed, (of_row, staying) = bool(sums(problem)), a_pack(problem, made.width)
    if made.kind == "registers" and not summed:
        long = is_small(problem) and (instructions(problem.roots) > LIGHT or word(problem) > 1)
        return min(1 if made.packs * of_row >= MANY_WORDS else 2 if long else 4, made.packs)  # others spill
    staying += of_row if made.moved else 0
    left = REGISTERS // (made.block * made.blocks) - made.packs * staying
    return 2 if made.rows > 1 or left >= (ROOM_BESIDE_SUMS if summed else ROOM_FOR_PAIRS) else 1


def shared_bytes(problem: Problem, made: Layout) -> int:
    of_segments = segment_bytes(problem, made.block)
    if made.kind != "staged":
        return of_segments
    of_sums = 4 * word(problem) * made.width * made.block if made.rows > 1 and sums(problem) else 0
    of_rows = made.stages * made.rows * stage_bytes(problem, made) + of_segments
    return max(of_rows + (weight_bytes(problem, made) if made.weights else 0), of_sums)


def stage_bytes(problem: Problem, made: Layout) -> int:
    """Of one row: its operands one after the other."""
    return sum(operand_bytes(o, problem, made) for o in in_stages(problem, made))


def in_stages(problem: Problem, made: Layout) -> list[Operand]:
    apart = late(problem) if made.late else []
    return [o for o in held(problem) if o not in apart]


def operand_bytes(operand: Operand, problem: Problem, made: Layout) -> int:
    """Of a row in a stage, or a part of one; of a weight."""
    in_part = made.part and varies(operand, problem)
    columns = made.threads * made.width * made.part if in_part else span(problem, made)
    return -(-columns * ITEMSIZE[operand.dtype] // 128) * 128


def segment_bytes(problem: Problem, block: int) -> int:
    """A value of each warp's for each of a row's segments."""
    found = segments(problem)
    return 0 if found is None else 4 * word(problem) * len(segment_sums(problem)) * block // 32 * found.each


def weight_bytes(problem: Problem, made: Layout) -> int:
    return sum(operand_bytes(o, problem, made) for o in weights(problem))


# -- of a problem ----------------------------------------------------------------------------------

def can_be_staged(problem: Problem) -> bool:
    return bool(held(problem)) and can_be_copied(problem, held(problem))


def can_be_copied(problem: Problem, operands: Sequence[Operand]) -> bool:
    """The copy engine takes runs of memory, in multiples of 16 bytes."""
    return all(is_dense(o, problem) and all(step * ITEMSIZE[o.dtype] % 16 == 0 for step in (
        columns(problem), *o.strides[problem.row_dims:])) for o in operands)


def looks(problem: Problem) -> int:
    """How many passes look at the columns at all."""
    n = problem.row_dims
    in_full = {k for k, o in enumerate(problem.outputs) if any(o.strides[:n]) or columns(problem) == 1}
    return sum(bool(one.found) or not in_full.isdisjoint(one.outputs)
               for one in schedule(with_sums(problem.roots)))


def is_small(problem: Problem) -> bool:
    return problem.domain.numel < MANY_ELEMENTS


def is_heavy(problem: Problem) -> bool:
    """Whether instructions are the bound: then a thread has as many packs as it can, and a multiprocessor as
    many threads."""
    light = instructions(problem.roots) <= LIGHT or is_small(problem)
    return not (light or sums(problem) or problem.streams or word(problem) > 1)


def repeat(problem: Problem) -> bool:
    return any(repeats(o, problem) for o in weights(problem))


def a_pack(problem: Problem, pack: int) -> tuple[int, int]:
    """Registers that a pack of the row takes, and those that stay taken: of its sums, of what is carried."""
    words = sum(max(4, ITEMSIZE[o.dtype] * pack) for o in held(problem)) // 4
    return max(1, words), (len(sums(problem)) + how_many(problem.roots)) * pack * word(problem)


def word(problem: Problem) -> int:
    return 2 if problem.acc == "float64" else 1


def power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def blocks_of(registers: int, block: int) -> int:
    """Blocks that fit on a multiprocessor when a thread needs so many registers."""
    return max(1, min(2048 // block, REGISTERS // (-(-registers // 8) * 8 * block)))


def left(threads: int) -> int:
    """Registers that each of a multiprocessor's threads can keep, beside those that it works with."""
    return max(0, REGISTERS // threads - WORKING)
