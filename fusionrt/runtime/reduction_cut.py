"""How blocks and threads share the rows of a reduction: lanes, tiles, chunks, what each reads at a time."""

from fusionrt.layout import Reduction
from fusionrt.problem import MASK, Problem
from fusionrt.runtime import accumulators
from fusionrt.runtime.access import REDUCE_BLOCK, is_fixed, owned
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.geometry import is_flat
from fusionrt.runtime.vectors import is_narrow, vector_width, words_of

REDUCE_UNROLL, NARROW_UNROLL = 2, 8
REDUCE_BLOCKS = MULTIPROCESSORS * 16
# Blocks that stay, where they leave many rows of partial sums, or read bits; up to so many side by side.
STAYING_BLOCKS, STAYING_TILES, STAYING_TILES_OF_MASKS = MULTIPROCESSORS * 3, 15, 64
MANY_WORDS = 40  # of operands, which a thread of a reduction has in registers at a time
COUNTED = 512    # elements that 64 Philox counters serve: see philox.cuh
ALONE, ALONE_THREADS = 64, 1 << 16  # rows that a thread has, at most; threads that are enough then


def is_final(problem: Problem, rows: Reduction, width: int) -> bool:
    """Whether every block has all of its sums, and computes the outputs of rows that lie across memory."""
    whole = problem.across and problem.inner == problem.abreast == 1
    return whole and n_chunks(problem, rows, width) == 1


def is_joined(problem: Problem, rows: Reduction, width: int) -> bool:
    """Whether all is reduced to one value of each kind: the block that ends last joins what all have left."""
    alone = not rows.keeps_columns and rows.n_groups == 1 and problem.inner == 1
    return alone and not is_final(problem, rows, width)


def is_alone(problem: Problem, rows: Reduction, width: int) -> bool:
    """Whether a thread has all rows of its columns: of few rows, where it then need not ask another one."""
    threads = rows.n_groups * rows.columns // width
    whole = problem.across and problem.inner == problem.abreast == 1 and problem.then is None
    return whole and rows.keeps_columns and rows.n_rows <= ALONE and threads >= ALONE_THREADS


def needs_no_other(problem: Problem, rows: Reduction) -> bool:
    """Whether the kernel, of 16-byte aligned operands, has no partial values left for another one."""
    width = vector_width(problem, 16)
    return is_final(problem, rows, width) or is_joined(problem, rows, width)


def twins(problem: Problem, rows: Reduction, width: int) -> bool:
    """Whether two lanes of a reduction share Philox counters: a vector is two of them, and the columns are
    whole blocks, of which lanes lie 16 apart in the two halves."""
    return (bool(problem.streams) and rows.keeps_columns and width == 8 and rows.columns % COUNTED == 0
            and not is_alone(problem, rows, width))


def n_lanes(problem: Problem, rows: Reduction, width: int) -> int:
    """Threads side by side along the columns, or threads that share a group's sum."""
    vectors = max(1, rows.columns // width)
    if is_alone(problem, rows, width):
        return REDUCE_BLOCK
    if not rows.keeps_columns:
        return REDUCE_BLOCK if rows.n_rows * vectors >= 4 * REDUCE_BLOCK else 32
    return min(32, 1 << (vectors - 1).bit_length())


def reduction_grid(problem: Problem, rows: Reduction, width: int) -> tuple[int, int]:
    """Blocks in all, and blocks that share a sum."""
    chunks = n_chunks(problem, rows, width)
    return tiles(problem, rows, width) * chunks, chunks


def tiles(problem: Problem, rows: Reduction, width: int) -> int:
    """Blocks that have columns, or groups, of their own."""
    lanes = n_lanes(problem, rows, width)
    if is_alone(problem, rows, width):
        return -(-rows.n_groups * (rows.columns // width) // REDUCE_BLOCK)
    if rows.keeps_columns:
        return -(-rows.columns // (lanes * width)) * rows.n_groups
    return -(-rows.n_groups * lanes // REDUCE_BLOCK)


def n_chunks(problem: Problem, rows: Reduction, width: int) -> int:
    """Blocks that share the sum of one group and column tile: enough to fill a large GPU, with work for
    several iterations each; across memory no more than it holds at a time, as a few that are left over would
    take as long as all others. A constant of the shape, so that results are too."""
    if is_alone(problem, rows, width):
        return 1
    lanes, vectors = n_lanes(problem, rows, width), max(1, rows.columns // width)
    steps = rows.n_rows * lanes // REDUCE_BLOCK if rows.keeps_columns else rows.n_rows * vectors // lanes
    if problem.across:
        blocks = MULTIPROCESSORS * across_blocks(problem, width)
        wanted = max(2, blocks // tiles(problem, rows, width)) if tiles(problem, rows, width) < blocks else 1
    else:
        masked, n_tiles = any(o.dtype == MASK for o in problem.inputs), tiles(problem, rows, width)
        few = STAYING_TILES_OF_MASKS if masked else STAYING_TILES if problem.abreast > 1 else 0
        wanted = -(-(STAYING_BLOCKS if n_tiles <= few else REDUCE_BLOCKS) // n_tiles)
    return max(1, min(wanted, steps // (2 * REDUCE_UNROLL)))


def reduction_unroll(problem: Problem, rows: Reduction, width: int, staying: int = 0) -> tuple[int, int]:
    """Packs that a thread reads at a time, and blocks of a multiprocessor."""
    if problem.across:
        return across_unroll(problem, rows, width, staying)
    if problem.acc == "float64":
        return 1, 1
    many = words_of(problem, width) > MANY_WORDS
    if is_narrow(problem, width) and not many:
        return NARROW_UNROLL, 3
    # Packs of eight elements (16-bit operands): four blocks, which hide what they wait for, rather than two
    # packs at a time where both would spill. Two packs of doubles spill as well, and four blocks of what
    # draws, or reads six operands, for two sums.
    wide, n_values = width > 4, accumulators.n_values(accumulators.groups(problem))
    fits = not wide or registers(problem, rows, width, REDUCE_UNROLL, n_values) <= 64
    apart = not all(is_flat(o, problem.sizes) for o in problem.full_outputs)
    crowded = apart or ((bool(problem.streams) or len(problem.inputs) > 5) and sum(problem.reduced) > 1)
    return REDUCE_UNROLL if fits else 1, 2 if many or not wide else 4 - crowded


def across_blocks(problem: Problem, width: int) -> int:
    """Blocks of a multiprocessor where several share a sum. Packs of doubles are read one at a time, and
    narrow ones are few bytes."""
    return 4 if problem.acc == "float64" or is_narrow(problem, width) else 2


def across_unroll(problem: Problem, rows: Reduction, width: int, staying: int = 0) -> tuple[int, int]:
    """Packs that a thread of a reduction across memory reads at a time, and blocks of a multiprocessor: it
    writes nothing, so that what is on its way decides."""
    if problem.acc == "float64":
        return 1, across_blocks(problem, width)
    # Of moments, the count is one for all columns, and nothing is lost yet.
    kept = sum(min(2, len(g.places)) for g in accumulators.groups(problem))
    # More blocks where each has many sums of its own: what follows its last row is time without reading.
    blocks = staying or across_blocks(problem, width) + is_final(problem, rows, width)
    fits = (u for u in ((16, 8, 4) if is_narrow(problem, width) else (8, 4)) if 65536 // (
        REDUCE_BLOCK * (registers(problem, rows, width, u, kept) - 8)) >= blocks)
    return next(fits, 2), blocks


def registers(problem: Problem, rows: Reduction, width: int, at_once: int, values: int = 0) -> int:
    """Estimate of what a thread takes that owns `values` a column and reads `at_once` rows at a time."""
    inputs = tuple(o for o in problem.inputs if is_fixed(o, owned(rows)))
    fixed = words_of(problem._replace(inputs=inputs), width)
    kept = values * width * (2 if problem.acc == "float64" else 1)
    moving = at_once * (words_of(problem, width) - fixed)
    return 40 + -(-(fixed + kept + moving + 2 * max(0, len(problem.inputs) - 4)) // 8) * 8
