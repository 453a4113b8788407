"""Rows that threads keep in registers from pass to pass, or look at once, or read anew for every pass."""

from __future__ import annotations

from fusionrt.problem import Problem
from fusionrt.rowwise import is_total, schedule, with_sums
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.instructions import instructions
from fusionrt.runtime.row_layout import (
    LIGHT,
    MANY_ROWS,
    MANY_WORDS,
    MOST_IN_REGISTERS,
    MOST_PACKS,
    OF_CHANNELS,
    Layout,
    a_pack,
    blocks_of,
    is_heavy,
    is_small,
    looks,
    power,
    repeat,
    word,
)
from fusionrt.runtime.row_operands import columns, held, is_uniform, n_rows, segment_sums, sums, weights
from fusionrt.runtime.source import ITEMSIZE

LITTLE, FEW_PACKS, SOME_PACKS = 1 << 16, 3, 6  # packs of all rows, up to which a thread has few
IN_FLIGHT = {1: 16, 2: 32, 4: 16, 8: 16}  # item size -> words of a row that a thread has on their way
MOST_IN_FLIGHT = 32
PIECE = 256, 2             # threads and their packs, of a row of which nothing is found
MANY_IN_TURNS = 1 << 18    # rows
AT_EDGES = 8               # registers for what is in no pack
FEW_ROWS = 8               # long rows that take a cluster each


def in_registers(problem: Problem, pack: int) -> Layout | None:
    packs_a_row = -(-columns(problem) // pack)
    of_row, staying = a_pack(problem, pack)
    summed, heavy = bool(sums(problem)), is_heavy(problem)
    most = max(1, 64 // (2 * of_row + staying) if summed else 4 * MOST_IN_REGISTERS // of_row)
    wanted = min(most, _packs_wanted(problem, pack, of_row))
    threads = _threads(packs_a_row, wanted, _fewest(problem, pack), 512 if heavy else 256)
    packs = -(-packs_a_row // threads)
    if packs > most:
        return None
    if is_small(problem) and not summed:
        return _of_small(problem, pack, threads)
    # Blocks begin a few hundred nanoseconds apart: with less than 8 KB each, rows would wait for them.
    short = n_rows(problem) >= MANY_ROWS and packs * of_row <= 16
    made = _of_registers(problem, pack, threads, 256 if (threads > 32 if summed else short) else 128)
    return _in_turns(problem, made)


def _threads(packs_a_row: int, packs: int, fewest: int, most: int) -> int:
    return min(most, max(power(-(-packs_a_row // packs)), fewest))


def _fewest(problem: Problem, pack: int) -> int:
    """Threads of a row: eight read a whole line of 128 bytes. Of many short rows of single elements a thread
    has eight, as what it does once is as much as that, or four where it also writes them: one by one, of each
    of a warp's rows one, they are parts of as many of the L2's sectors."""
    packs_a_row = -(-columns(problem) // pack)
    narrow = pack * max([ITEMSIZE[o.dtype] for o in held(problem)], default=4) < 16
    if narrow and n_rows(problem) >= MANY_ROWS and not sums(problem):
        writes = any(not is_uniform(o, problem) for o in problem.outputs)
        return min(8, power(-(-packs_a_row // (4 if writes else MOST_IN_REGISTERS))))
    return min(8, power(packs_a_row))


def _packs_wanted(problem: Problem, pack: int, of_row: int) -> int:
    if is_small(problem) and not sums(problem):
        return FEW_PACKS if _is_little(problem, pack) else SOME_PACKS
    if n_rows(problem) < 1024:
        return 1
    narrowest = min((ITEMSIZE[o.dtype] for o in held(problem)), default=4)
    in_flight = MOST_IN_FLIGHT if is_heavy(problem) else IN_FLIGHT[narrowest]
    return min(MOST_PACKS if is_small(problem) else MOST_IN_REGISTERS, max(1, in_flight // of_row))


def _in_turns(problem: Problem, made: Layout) -> Layout:
    """Blocks begin some hundred nanoseconds after each other, in which threads should read 16 bytes each: of
    rows of which one has less, several."""
    each = made.packs * made.width * max([ITEMSIZE[o.dtype] for o in held(problem)], default=4)
    whole = sums(problem) or segment_sums(problem) or any(map(is_total, problem.roots))
    if whole or made.threads > 8 or n_rows(problem) < MANY_IN_TURNS or each > 8:
        return made
    turns, (of_row, staying) = 16 // each, a_pack(problem, made.width)
    needed = 40 * word(problem) + turns * made.packs * (of_row + staying + 2)
    return made._replace(turns=turns, blocks=min(made.blocks, blocks_of(needed, made.block)))


def _of_small(problem: Problem, pack: int, threads: int) -> Layout:
    """Blocks begin some nanoseconds after each other and threads of several warps wait for each other, which
    is much of a small problem. So few threads have a row, fewer where all rows then begin at once, and two
    blocks on a multiprocessor are one of twice as many threads: up to a third less than a pack a thread."""
    made = _of_registers(problem, pack, threads, 128)
    of_row, _ = a_pack(problem, pack)
    fewer, most = made, min(MOST_IN_REGISTERS, MANY_WORDS // of_row)
    while not _begins_at_once(problem, fewer) and 2 * fewer.packs <= most and fewer.threads > 8:
        fewer = _of_registers(problem, pack, fewer.threads // 2, 128)
    made = fewer if _begins_at_once(problem, fewer) else made
    two = _is_little(problem, pack) and 2 * n_rows(problem) > 3 * MULTIPROCESSORS * made.rows
    return _of_registers(problem, pack, made.threads, 256) if two else made


def _is_little(problem: Problem, pack: int) -> bool:
    return n_rows(problem) * -(-columns(problem) // pack) <= LITTLE


def _begins_at_once(problem: Problem, made: Layout) -> bool:
    return n_rows(problem) <= MULTIPROCESSORS * made.blocks * made.rows


def _of_registers(problem: Problem, pack: int, threads: int, block: int) -> Layout:
    """Of `block` threads, or as many as have a row."""
    rows = max(1, block // threads)
    of_row, staying = a_pack(problem, pack)
    summed, heavy = bool(sums(problem)), is_heavy(problem)
    packs = -(-columns(problem) // (pack * threads))
    working = (48 if summed else 32 if threads > 256 else 36 + pack if heavy else 44) * word(problem)
    working += OF_CHANNELS * repeat(problem) * (2 if problem.sizes[0] % pack else 1)
    working += AT_EDGES * bool(columns(problem) % pack)
    needed = working + packs * (of_row * (2 if summed else 1) + staying)
    return Layout("registers", pack, packs, threads, rows, blocks_of(needed, threads * rows),
                  persistent=summed)


def is_alone(problem: Problem, made: Layout) -> bool:
    """Rows of groups of which a multiprocessor's registers hold one: shared memory holds several."""
    return repeat(problem) and made.blocks == 1 and made.block >= 512


def in_pieces(problem: Problem, pack: int) -> Layout | None:
    """As for a pointwise op, blocks come and go, with a few packs a thread, on their way together with what
    belongs to the row. (Blocks that go on to another piece have nothing on its way while they work.) What a
    thread does once is much for the few elements of narrow packs."""
    finds = segment_sums(problem) or any(one.found for one in schedule(with_sums(problem.roots)))
    if finds or pack * max([ITEMSIZE[o.dtype] for o in held(problem)], default=4) < 16:
        return None
    packs_a_row, (block, packs) = -(-columns(problem) // pack), PIECE
    threads = min(block, max(min(8, power(packs_a_row)), power(-(-packs_a_row // packs))))
    pieces = -(-packs_a_row // (threads * packs))
    filled = pieces == 1 and threads == block  # by a row; one alone took 7 % longer than two
    rows = 2 if filled else block // threads
    of_row, _ = a_pack(problem, pack)
    working = 40 * word(problem) + OF_CHANNELS * repeat(problem) + packs * of_row
    return Layout("registers", pack, packs, threads, rows, blocks_of(working, threads * rows), pieces=pieces)


def streamed(problem: Problem, pack: int, clusters: bool) -> Layout:
    """Threads take several turns, so that what they do once a row counts little. Few rows have all threads
    that they can use; a single long one (the losses of a batch) is shared by a cluster."""
    of_row, _ = a_pack(problem, pack)
    packs_a_row = -(-columns(problem) // pack)
    gathers = bool(columns(problem) % pack and weights(problem))
    most = 2 if gathers or (instructions(problem.roots) > LIGHT and looks(problem) > 1) else 4
    alone = sums(problem) or repeat(problem)
    packs = 1 if alone else 1 << (max(1, min(most, 16 // of_row)).bit_length() - 1)
    block, line = 256 if n_rows(problem) >= MANY_ROWS else 128, _fewest(problem, pack)
    one_turn = power(-(-packs_a_row // packs))
    sums_alone = word(problem) == 1 and all(is_uniform(o, problem) for o in problem.outputs)
    if sums_alone and one_turn <= 8 and n_rows(problem) >= MANY_ROWS:
        fit = blocks_of(max(40, 24 + packs * of_row), block)
        made = Layout("registers", pack, -(-packs_a_row // line), line, block // line, fit)
        return _in_turns(problem, made)
    few_blocks = is_small(problem) and n_rows(problem) > MULTIPROCESSORS
    threads = _threads(packs_a_row, FEW_PACKS if few_blocks else 1, line, 512)
    if n_rows(problem) >= 1024:  # four turns, or eight where blocks would be large
        threads = max(line, min(256, one_turn // 4), min(512, one_turn // 8))
    rows = max(1, block // threads)
    working = 48 * word(problem) + OF_CHANNELS * repeat(problem)
    blocks = blocks_of(working + packs * of_row, threads * rows)
    few = clusters and n_rows(problem) <= FEW_ROWS
    cluster = min(8, power(packs_a_row // (threads * packs))) if few else 1
    return Layout("streamed", pack, packs, threads, rows, blocks, cluster)
