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
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusionrt.expr import Expr, toposort
from fusionrt.problem import Operand, Problem
from fusionrt.rowwise import schedule, with_sums
from fusionrt.runtime.carried import how_many
from fusionrt.runtime.instructions import instructions
from fusionrt.runtime.row_operands import (
    columns,
    held,
    is_dense,
    is_uniform,
    n_rows,
    repeats,
    segment_sums,
    segments,
    sums,
    varies,
    weights,
    width,
)
from fusionrt.runtime.source import ITEMSIZE

REGISTERS = 65536          # of a multiprocessor
SHARED = 224 << 10         # bytes of a multiprocessor, less what blocks need beside their stages
MOST_STAGES, MOST_BLOCKS, MOST_PACKS = 4, 4, 4
WORKING = 32               # registers of a thread beside those that it keeps
MOST_SEGMENTS, SHORTEST_SEGMENT = 64, 8    # of a row; packs of one, so that few have part in those of a warp
OF_CHANNELS = 8            # registers that find the weights of a pack's channel
PART = 64 << 10            # bytes of a row that a block takes which comes and goes
MOST_PASSING = 6           # such blocks on a multiprocessor
MOST_IN_REGISTERS = 8      # packs a thread
CLUSTERS = (1, 2, 4, 8, 16)
LONG_SUMS = 2048           # columns from which on blocks of a multiprocessor add up their sums
FEW_ROWS = 8               # long rows that take a cluster each
ONE_TURN, FEW_TURNS = 528, 4096   # rows of gradients: four for each multiprocessor of an H200, and more
MANY_ROWS = 16384          # from which on, if they are narrow, they wait for blocks to begin
IN_FLIGHT = {1: 16, 2: 32, 4: 16, 8: 16}  # item size -> words of a row that a thread has on their way
MOST_IN_FLIGHT = 32


class Choice(NamedTuple):
    """A layout of rows that have weights, as it was measured."""

    most: float              # columns, or packs, of a row up to which it is taken
    threads: int
    packs: int
    rows: int                # that a multiprocessor has at a time
    stages: int              # of a row; blocks with one come and go, without one the row is in registers
    weights: bool = True     # in shared memory; or a block finds its part in the L1
    ahead: bool = False
    part: int = 0
    moved: bool = False      # then blocks stay, whatever the stages
    overlaps: bool = False


# By columns.
GRADIENTS = Choice(4096, 256, 2, 2, 2), Choice(32768, 256, 4, 2, 3), Choice(math.inf, 512, 4, 1, 2)
# By packs. The first number is the elements of one: of 16 bits there are twice as many instructions a byte.
PASSING: dict[str, Any] = {"weights": False, "ahead": True}
MOVED: dict[str, Any] = {"moved": True, "ahead": True}
OVERLAPPED: dict[str, Any] = {"moved": True, "overlaps": True}
SUMS = dict.fromkeys((4, 8), (
    Choice(4096, 1024, 4, 2, 1, **PASSING), Choice(16384, 256, 8, 1, 3, ahead=True, **OVERLAPPED),
    Choice(32768, 512, 8, 1, 1, ahead=True, **OVERLAPPED), Choice(math.inf, 512, 8, 1, 1, **OVERLAPPED)))
MOMENTS = {
    4: (Choice(4096, 512, 8, 2, 0, weights=False),
        Choice(16384, 256, 8, 1, 4, part=4, ahead=True, **OVERLAPPED),
        Choice(32768, 256, 8, 1, 2, ahead=True, **OVERLAPPED), Choice(math.inf, 512, 8, 1, 1, **OVERLAPPED)),
    8: (Choice(4096, 512, 8, 2, 0, weights=False), Choice(8192, 128, 16, 6, 1, **PASSING),
        Choice(math.inf, 1024, 4, 1, 1, **MOVED))}
SEVERAL = {  # operands
    4: (Choice(2048, 512, 4, 3, 1, **PASSING), Choice(4096, 256, 4, 6, 1, **PASSING),
        Choice(8192, 512, 4, 3, 1, **PASSING), Choice(16384, 256, 8, 1, 1, ahead=True, **OVERLAPPED),
        Choice(32768, 1024, 2, 1, 4, part=1, **MOVED), Choice(math.inf, 256, 16, 1, 3, part=4, moved=True)),
    8: (Choice(2048, 512, 4, 3, 1, **PASSING), Choice(4096, 256, 4, 6, 1, **PASSING),
        Choice(8192, 512, 4, 3, 1, **PASSING), Choice(16384, 1024, 2, 1, 1, **MOVED),
        Choice(math.inf, 512, 4, 1, 4, part=1, **OVERLAPPED))}
HEAVY = {  # moments, and more instructions than LIGHT
    4: (Choice(8192, 512, 8, 1, 1, **MOVED), Choice(16384, 128, 16, 6, 1, **PASSING),
        Choice(math.inf, 512, 8, 1, 1, ahead=True, **OVERLAPPED)),
    8: (Choice(math.inf, 512, 8, 1, 1, ahead=True, **OVERLAPPED),)}
UNWEIGHTED = {8: (Choice(math.inf, 256, 16, 1, 1, weights=False, **MOVED),)}  # others gain nothing
LONG_HEAVY, LONG_UNWEIGHTED = 4096, 1 << 17  # packs, or columns, from which on these are taken
LONG_GRADIENTS = 4096      # columns from which on
SHORT_GRADIENTS = 1024     # the same of many rows, whose blocks are then as many teams as make 768 threads
LEAST_CARRYING = 512       # and of those that carry
MANY_ELEMENTS = 1 << 24    # from which on threads that work at length on much are enough
WALKS = 512                # blocks of all rows, for each that works at a time, from which on it pays to stay
TURNS = 256                # and to leave a row to fewer and larger blocks
ROOM_FOR_PAIRS, ROOM_BESIDE_SUMS = 40, 64  # registers of a thread
PIECE = 256, 2             # threads and their packs, of a row of which nothing is found
LIGHT = 10                 # instructions an element; of more, many threads that come and go hide the latency


class Layout(NamedTuple):
    kind: str                # registers, staged, streamed
    width: int               # elements of a pack: one access of a thread
    packs: int               # that a thread holds, or looks at together
    threads: int             # that share a row within a block
    rows: int                # that a block works on at a time
    cluster: int             # blocks that share a row
    stages: int              # rows that a block has in shared memory
    blocks: int              # that a multiprocessor holds at a time
    persistent: bool
    part: int = 0            # packs of a row that a stage has, where it has not all
    weights: bool = False    # beside its stages a block has its part of the weights in shared memory
    moved: bool = False      # from stages into registers as soon as they have come
    overlaps: bool = False   # if so: the first pass of the next row comes before the last one of this
    ahead: bool = False      # whoever has a row fetched asks the L2 for a later one
    carries: bool = False    # what passes leave to later ones waits in registers
    pieces: int = 0          # of a row, each for a block, which tells the others nothing

    @property
    def block(self) -> int:
        return self.threads * self.rows

    @property
    def blocks_a_row(self) -> int:
        """That share it."""
        return max(self.cluster, self.pieces)


# -- the choice ------------------------------------------------------------------------------------

@functools.lru_cache(4096)
def layout(problem: Problem, alignment: int, clusters: bool) -> Layout:
    """`clusters`: of an architecture that has them, and the copy engine."""
    made = _layout(problem, alignment, clusters)
    return made._replace(carries=_has_room_to_carry(problem, made))


def _layout(problem: Problem, alignment: int, clusters: bool) -> Layout:
    if not sums(problem) and looks(problem) == 1:
        pack = width(problem, alignment)
        return _in_pieces(problem, pack) or _streamed(problem, pack, clusters)
    in_registers = _in_registers(problem, width(problem, alignment))
    if in_registers is not None and not sums(problem) and not (
            clusters and _is_alone(problem, in_registers)):
        return in_registers
    if clusters and alignment >= 16 and can_be_staged(problem):
        staged = _staged(problem, width(problem, alignment))
        if staged is not None:
            return staged
    return in_registers or _streamed(problem, width(problem, alignment), clusters)


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


def grid(problem: Problem, made: Layout, at_a_time: int) -> int:
    """Blocks that have rows of their own, no more than the device holds where they stay; a cluster
    counts as one."""
    needed = -(-n_rows(problem) // made.rows)
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
    copied = held(problem) + (weights(problem) if made.weights else [])
    step = max(made.width, 16 // min([ITEMSIZE[o.dtype] for o in copied], default=4))
    return -(-columns(problem) // (made.cluster * step)) * step


def asks_every(problem: Problem, made: Layout) -> int:
    """Of how many packs one asks whether the row has it: each, or, if all threads have all their packs, of
    two, where there are registers for what both have on their way; of rows in registers of four."""
    full = columns(problem) == made.blocks_a_row * made.threads * made.packs * made.width
    if not full or made.kind == "streamed" or (made.part and not made.moved):
        return 1
    summed = bool(sums(problem))
    if made.kind == "registers" and not summed:
        return min(4, made.packs)
    of_row, staying = _a_pack(problem, made.width)
    staying += of_row if made.moved else 0
    left = REGISTERS // (made.block * made.blocks) - made.packs * staying
    return 2 if made.rows > 1 or left >= (ROOM_BESIDE_SUMS if summed else ROOM_FOR_PAIRS) else 1


def shared_bytes(problem: Problem, made: Layout) -> int:
    of_segments = segment_bytes(problem, made.block)
    if made.kind != "staged":
        return of_segments
    of_sums = 4 * _word(problem) * made.width * made.block if made.rows > 1 and sums(problem) else 0
    of_rows = made.stages * made.rows * stage_bytes(problem, made) + of_segments
    return max(of_rows + (weight_bytes(problem, made) if made.weights else 0), of_sums)


def stage_bytes(problem: Problem, made: Layout) -> int:
    """Of one row: its operands one after the other."""
    return sum(operand_bytes(o, problem, made) for o in held(problem))


def operand_bytes(operand: Operand, problem: Problem, made: Layout) -> int:
    """Of a row in a stage, or a part of one; of a weight."""
    in_part = made.part and varies(operand, problem)
    columns = made.threads * made.width * made.part if in_part else span(problem, made)
    return -(-columns * ITEMSIZE[operand.dtype] // 128) * 128


def segment_bytes(problem: Problem, block: int) -> int:
    """A value of each warp's for each of a row's segments."""
    found = segments(problem)
    return 0 if found is None else 4 * _word(problem) * len(segment_sums(problem)) * block // 32 * found.each


def weight_bytes(problem: Problem, made: Layout) -> int:
    return sum(operand_bytes(o, problem, made) for o in weights(problem))


def can_be_staged(problem: Problem) -> bool:
    return bool(held(problem)) and _can_be_copied(problem, held(problem))


def _can_be_copied(problem: Problem, operands: Sequence[Operand]) -> bool:
    """The copy engine takes runs of memory, in multiples of 16 bytes."""
    return all(is_dense(o, problem) and all(step * ITEMSIZE[o.dtype] % 16 == 0 for step in (
        columns(problem), *o.strides[problem.row_dims:])) for o in operands)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _blocks(registers: int, block: int) -> int:
    """Blocks that fit on a multiprocessor when a thread needs so many registers."""
    return max(1, min(2048 // block, REGISTERS // (-(-registers // 8) * 8 * block)))


def _a_pack(problem: Problem, pack: int) -> tuple[int, int]:
    """Registers that a pack of the row takes, and those that stay taken: of its sums, of what is carried."""
    words = sum(max(4, ITEMSIZE[o.dtype] * pack) for o in held(problem)) // 4
    return max(1, words), (len(sums(problem)) + how_many(problem.roots)) * pack * _word(problem)


def _word(problem: Problem) -> int:
    return 2 if problem.acc == "float64" else 1


def _has_room_to_carry(problem: Problem, made: Layout) -> bool:
    if made.kind == "streamed" or not how_many(problem.roots):
        return False
    of_row, staying = _a_pack(problem, made.width)
    staying += of_row if made.kind == "registers" or made.moved else 0
    return made.packs * staying <= _left(made.block * made.blocks)


def _left(threads: int) -> int:
    """Registers that each of a multiprocessor's threads can keep, beside those that it works with."""
    return max(0, REGISTERS // threads - WORKING)


def _in_registers(problem: Problem, pack: int) -> Layout | None:
    packs_a_row = -(-columns(problem) // pack)
    of_row, staying = _a_pack(problem, pack)
    summed, heavy = bool(sums(problem)), _is_heavy(problem)
    most = max(1, 64 // (2 * of_row + staying) if summed else 4 * MOST_IN_REGISTERS // of_row)
    narrowest = min((ITEMSIZE[o.dtype] for o in held(problem)), default=4)
    wanted = max(1, (MOST_IN_FLIGHT if heavy else IN_FLIGHT[narrowest]) // of_row)
    wanted = min(most, wanted, MOST_IN_REGISTERS if problem.domain.numel >= MANY_ELEMENTS else MOST_PACKS)
    wanted = wanted if n_rows(problem) >= 1024 else 1
    # Eight threads read a whole line of 128 bytes.
    threads = max(_power(-(-packs_a_row // wanted)), min(8, _power(packs_a_row)))
    threads = min(512 if heavy else 256, threads)
    packs = -(-packs_a_row // threads)
    if packs > most:
        return None
    # Blocks begin a few hundred nanoseconds apart: with less than 8 KB each, rows would wait for them.
    small = n_rows(problem) >= MANY_ROWS and packs * of_row <= 16
    rows = max(1, (256 if (threads > 32 if summed else small) else 128) // threads)
    working = (48 if summed else 32 if threads > 256 else 36 + pack if heavy else 44) * _word(problem)
    working += OF_CHANNELS * _repeat(problem) * (2 if problem.sizes[0] % pack else 1)
    needed = working + packs * (of_row * (2 if summed else 1) + staying)
    return Layout("registers", pack, packs, threads, rows, 1, 0, _blocks(needed, threads * rows), summed)


def _is_alone(problem: Problem, made: Layout) -> bool:
    """Rows of groups of which a multiprocessor's registers hold one: shared memory holds several."""
    return _repeat(problem) and made.blocks == 1 and made.block >= 512


def _repeat(problem: Problem) -> bool:
    return any(repeats(o, problem) for o in weights(problem))


def _is_heavy(problem: Problem) -> bool:
    """Whether instructions are the bound: then a thread has as many packs as it can, and a multiprocessor as
    many threads."""
    light = instructions(problem.roots) <= LIGHT or problem.domain.numel < MANY_ELEMENTS
    return not (light or sums(problem) or problem.streams or _word(problem) > 1)


def _staged(problem: Problem, pack: int) -> Layout | None:
    measured = _measured(problem, pack)
    if measured is not None:
        return measured
    if sums(problem):
        staying = _at_full_width(problem, pack) or _staying(problem, pack)
        if staying is None:
            return _in_parts(problem, pack)
        return _as_teams(problem, staying) if staying.cluster == 1 else staying
    passing = _passing(problem, pack)
    alone = passing is not None and passing.blocks == 1 and not weights(problem)
    return (_in_parts(problem, pack) if alone else None) or passing


def _measured(problem: Problem, pack: int) -> Layout | None:
    """Weights read from the L2 for every row are as many bytes as the row, of a layer norm twice as many, and
    the L2 has not much more than twice the memory's rate: blocks stay and have their part in shared memory.
    Rows of up to 64 KB are better off in one block that comes and goes, with the weights in the L1."""
    summed, (_, staying) = bool(sums(problem)), _a_pack(problem, pack)
    of_columns = weights(problem)
    if _word(problem) > 1 or problem.streams or (of_columns and not _can_keep(problem, of_columns)):
        return None
    packs_a_row = -(-columns(problem) // pack)
    for choice in _choices(problem, pack):
        cluster = _power(-(-packs_a_row // (choice.threads * choice.packs)))
        length = columns(problem) if summed else packs_a_row
        if length > choice.most or cluster > CLUSTERS[-1] or (
                choice.packs * staying > _left(choice.threads * choice.rows)):
            continue
        made = _chosen(problem, pack, choice, cluster)
        if not summed and n_rows(problem) * cluster < (WALKS if made.persistent else TURNS) * choice.rows:
            return None
        if shared_bytes(problem, made) * made.blocks <= SHARED:
            return made
    return None


def _chosen(problem: Problem, pack: int, choice: Choice, cluster: int) -> Layout:
    packs = -(-columns(problem) // (pack * choice.threads * cluster))
    in_teams = choice.weights and (cluster == 1 or not sums(problem))
    rows, blocks = (choice.rows, 1) if in_teams else (1, choice.rows)
    part, stages = choice.part, choice.stages
    if part and packs % part:  # of a row that is a little shorter
        part, stages = 1, stages * part
    return Layout("staged" if stages else "registers", pack, packs, choice.threads, rows, cluster, stages,
                  blocks, stages > 1 or choice.moved, part if part < packs else 0, choice.weights,
                  choice.moved, choice.overlaps, choice.ahead)


def _choices(problem: Problem, pack: int) -> tuple[Choice, ...]:
    light, packs_a_row = instructions(problem.roots) <= LIGHT, -(-columns(problem) // pack)
    if sums(problem):
        if not weights(problem):
            return ()
        if how_many(problem.roots):
            return _carrying(problem, pack)
        if columns(problem) >= LONG_GRADIENTS:
            return GRADIENTS
        threads, many = _power(-(-columns(problem) // (2 * pack))), n_rows(problem) >= MANY_ROWS
        if columns(problem) < SHORT_GRADIENTS or threads > 256 or not (many and light):
            return ()
        return (Choice(LONG_GRADIENTS, threads, 2, 768 // threads, 3),)
    passes = schedule(with_sums(problem.roots))
    kinds = {f.kind for one in passes for f in one.found}
    of_moments, several, of_pack = "moments" in kinds, len(held(problem)) > 1, 8 if pack > 4 else 4
    if len(passes) != 2:
        return ()
    if not weights(problem):
        return UNWEIGHTED.get(of_pack, ()) if columns(problem) > LONG_UNWEIGHTED and not several else ()
    if not light:
        return HEAVY[of_pack] if packs_a_row > LONG_HEAVY and of_moments and not several else ()
    if not kinds <= {"sum", "moments"}:
        return ()
    return (SEVERAL if several else MOMENTS if of_moments else SUMS)[of_pack]


def _carrying(problem: Problem, pack: int) -> tuple[Choice, ...]:
    """Gradients that carry: packs for few threads, as many as registers allow."""
    if columns(problem) >= LONG_GRADIENTS:
        return (Choice(512 * pack, 128, 4, 4, 2), Choice(1024 * pack, 128, 4, 3, 2),
                Choice(2048 * pack, 256, 8, 1, 2), Choice(math.inf, 512, 4, 1, 2))
    packs, together = (4, 384) if pack > 4 else (2, 768)
    threads = max(32, _power(-(-columns(problem) // (packs * pack))))
    if columns(problem) < LEAST_CARRYING or threads > 256 or n_rows(problem) < MANY_ROWS:
        return ()
    return (Choice(LONG_GRADIENTS, threads, packs, together // threads, 2),)


def _can_keep(problem: Problem, operands: Sequence[Operand]) -> bool:
    """Whether a block needs no more than its part of them, and the copy engine can bring it."""
    names = {o.name for o in operands}
    taken = any(n.op == "taken" and isinstance(n.args[0], Expr) and n.args[0].args[0] in names
                for n in toposort(problem.roots))
    return bool(operands) and not taken and _can_be_copied(problem, operands)


def _passing(problem: Problem, pack: int) -> Layout | None:
    """The fewest blocks a row of which several, working on other rows, fit on a multiprocessor: while one
    waits for its row or for its neighbours' values, others compute. Weights want room in the L1. The L2 is
    asked ahead where as much is written as read."""
    found, heavy = None, _is_heavy(problem)
    light = _word(problem) == 1 and not problem.streams and instructions(problem.roots) <= LIGHT
    of_channels = OF_CHANNELS * (1 if light else 3) * _repeat(problem)
    of_light = (48 if problem.streams else 40) + of_channels
    large = light and n_rows(problem) >= 2 * TURNS
    most = PART if large and len(held(problem)) == 1 and not weights(problem) else PART // 2
    ahead = len(held(problem)) <= sum(
        any(o.strides[:problem.row_dims]) and not repeats(o, problem) for o in problem.outputs)
    for cluster in CLUSTERS:
        packs_a_block = -(-columns(problem) // (pack * cluster))
        made = Layout("staged", pack, 1, 256, 1, cluster, 1, 1, False, ahead=ahead)
        part = stage_bytes(problem, made)
        fits_once = 2 * part > SHARED and len(held(problem)) == 1
        alone = light and part > PART // 2 and (cluster == 1 or fits_once)
        threads = (1024 if alone else 512 if part > PART // 2 else 256) // (2 if heavy else 1)
        working = 32 if alone else (80 if heavy else of_light) * _word(problem)
        reserved = (1 << 10) + segment_bytes(problem, threads)
        blocks = min(MOST_PASSING, SHARED // (part + reserved), _blocks(working, threads))
        packs = -(-packs_a_block // threads)
        if blocks and packs <= 2 * MOST_IN_REGISTERS:
            found = made._replace(packs=packs, threads=threads, blocks=blocks)
            if part <= most:
                break
    return found


def _at_full_width(problem: Problem, pack: int) -> Layout | None:
    """Blocks of 512 threads with two packs each, two of them on a multiprocessor: as many threads as have the
    registers for sums."""
    _, of_sums = _a_pack(problem, pack)
    packs_a_row = -(-columns(problem) // pack)
    cluster = _power(-(-packs_a_row // 1024))
    if of_sums > 8 or _word(problem) != 1 or problem.streams or cluster > CLUSTERS[-1]:
        return None
    made = Layout("staged", pack, 2, 512, 1, cluster, 3, 2, True)
    mostly_used = packs_a_row > 768 * cluster
    return made if mostly_used and stage_bytes(problem, made) * 6 <= SHARED else None


def _as_teams(problem: Problem, made: Layout) -> Layout:
    """One block of a multiprocessor instead of several, which leaves one row of partial sums: few rows, which
    cannot afford more, have as many threads then as many rows. (Many of 1024 columns were 5 % slower so.)
    Few rows gain by few stages too: the first one comes the later, the more are asked for with it."""
    rows, carrying = n_rows(problem), how_many(problem.roots) > 0
    many, stages = rows >= MANY_ROWS, min(made.stages, 2)
    if columns(problem) >= LONG_SUMS:
        return made._replace(rows=made.rows * made.blocks, blocks=1, stages=made.stages if many else stages)
    if many or _word(problem) > 1:
        return made
    if rows <= ONE_TURN:
        return made._replace(rows=4, blocks=1, stages=1)
    if rows > FEW_TURNS and carrying:
        return made._replace(stages=stages)
    threads = 768 if rows > FEW_TURNS and made.width <= 4 and not problem.streams else 512
    return made._replace(rows=threads // made.threads, blocks=1, stages=stages)


def _in_parts(problem: Problem, pack: int) -> Layout | None:
    """Rows of which the largest clusters hold one and parts of the next, beside the weights if they can.
    (Sums gained nothing by more than two.)"""
    carrying = how_many(problem.roots) > 0
    threads, most = (256, 192) if carrying else (512, 64)  # registers that stay taken
    packs, (_, staying) = -(-columns(problem) // (threads * pack * CLUSTERS[-1])), _a_pack(problem, pack)
    if len(schedule(with_sums(problem.roots))) != 2 or packs * staying > most or _word(problem) > 1:
        return None
    beside = (True, False) if _can_keep(problem, weights(problem)) else (False,)
    most_ahead = 2 if sums(problem) else packs
    wanted = [Layout("staged", pack, packs, threads, 1, CLUSTERS[-1], packs + ahead, 1, True, 1, weights)
              for weights in beside for ahead in range(most_ahead, 0, -1)]
    return next((made for made in wanted if shared_bytes(problem, made) <= SHARED), None)


def _staying(problem: Problem, pack: int) -> Layout | None:
    """Blocks that keep their sums over many rows: the fewest a row that leave two on a multiprocessor with
    three rows each; or else the fewest that leave one with two."""
    _, of_sums = _a_pack(problem, pack)
    found = None
    for cluster in CLUSTERS:
        packs_a_block = -(-columns(problem) // (pack * cluster))
        few = MOST_PACKS // 2 if packs_a_block <= 256 * MOST_PACKS // 2 else MOST_PACKS
        most = max(1, min(few, 64 // of_sums))
        threads = min(512 // _word(problem), max(32, _power(-(-packs_a_block // most))))
        packs = -(-packs_a_block // threads)
        if packs > most or (cluster > 1 and threads < 128):
            continue
        rows = max(1, 128 // threads)
        working = (64 if problem.streams else 48 if _word(problem) == 1 else 52) * _word(problem)
        fit = min(MOST_BLOCKS, _blocks(working + packs * of_sums, threads * rows))
        made = Layout("staged", pack, packs, threads, rows, cluster, 1, fit, True)
        row = stage_bytes(problem, made) * made.rows
        for blocks in range(fit, 1, -1):
            if row * blocks * 3 <= SHARED:
                return made._replace(stages=min(MOST_STAGES, SHARED // (row * blocks)), blocks=blocks)
        if found is None and row * 2 <= SHARED:
            found = made._replace(stages=min(MOST_STAGES, SHARED // row), blocks=1)
    return found


def looks(problem: Problem) -> int:
    """How many passes look at the columns at all."""
    n = problem.row_dims
    in_full = {k for k, o in enumerate(problem.outputs) if any(o.strides[:n]) or columns(problem) == 1}
    return sum(bool(one.found) or not in_full.isdisjoint(one.outputs)
               for one in schedule(with_sums(problem.roots)))


def _in_pieces(problem: Problem, pack: int) -> Layout | None:
    """As for a pointwise op, blocks come and go, with a few packs a thread, on their way together with what
    belongs to the row. (Blocks that go on to another piece have nothing on its way while they work.) What a
    thread does once is much for the few elements of narrow packs."""
    finds = segment_sums(problem) or any(one.found for one in schedule(with_sums(problem.roots)))
    if finds or pack * max([ITEMSIZE[o.dtype] for o in held(problem)], default=4) < 16:
        return None
    packs_a_row, (block, packs) = -(-columns(problem) // pack), PIECE
    threads = min(block, max(min(8, _power(packs_a_row)), _power(-(-packs_a_row // packs))))
    pieces = -(-packs_a_row // (threads * packs))
    filled = pieces == 1 and threads == block  # by a row; one alone took 7 % longer than two
    rows = 2 if filled else block // threads
    of_row, _ = _a_pack(problem, pack)
    working = 40 * _word(problem) + OF_CHANNELS * _repeat(problem) + packs * of_row
    return Layout("registers", pack, packs, threads, rows, 1, 0, _blocks(working, threads * rows), False,
                  pieces=pieces)


def _streamed(problem: Problem, pack: int, clusters: bool) -> Layout:
    """Threads take several turns, so that what they do once a row counts little. Few rows have all threads
    that they can use; a single long one (the losses of a batch) is shared by a cluster."""
    of_row, _ = _a_pack(problem, pack)
    packs_a_row = -(-columns(problem) // pack)
    most = 2 if instructions(problem.roots) > LIGHT and looks(problem) > 1 else 4
    alone = sums(problem) or _repeat(problem)
    packs = 1 if alone else 1 << (max(1, min(most, 16 // of_row)).bit_length() - 1)
    block, line = 256 if n_rows(problem) >= MANY_ROWS else 128, min(8, _power(packs_a_row))
    one_turn = _power(-(-packs_a_row // packs))
    sums_alone = _word(problem) == 1 and all(is_uniform(o, problem) for o in problem.outputs)
    if sums_alone and one_turn <= 8 and n_rows(problem) >= MANY_ROWS:
        fit = _blocks(max(40, 24 + packs * of_row), block)
        return Layout("registers", pack, -(-packs_a_row // line), line, block // line, 1, 0, fit, False)
    threads = min(512, _power(packs_a_row))
    if n_rows(problem) >= 1024:  # four turns, or eight where blocks would be large
        threads = max(line, min(256, one_turn // 4), min(512, one_turn // 8))
    rows = max(1, block // threads)
    working = 48 * _word(problem) + OF_CHANNELS * _repeat(problem)
    blocks = _blocks(working + packs * of_row, threads * rows)
    few = clusters and n_rows(problem) <= FEW_ROWS
    cluster = min(8, _power(packs_a_row // (threads * packs))) if few else 1
    return Layout("streamed", pack, packs, threads, rows, cluster, 0, blocks, False)
