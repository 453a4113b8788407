"""Rows that the copy engine puts into shared memory, and the layouts that were measured for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusionrt.expr import Expr
from fusionrt.graph import toposort
from fusionrt.problem import Operand, Problem
from fusionrt.rowwise import schedule, with_sums
from fusionrt.runtime.carried import how_many
from fusionrt.runtime.instructions import instructions
from fusionrt.runtime.row_layout import (
    CLUSTERS,
    LIGHT,
    MANY_ROWS,
    MOST_IN_REGISTERS,
    MOST_PACKS,
    OF_CHANNELS,
    SHARED,
    Layout,
    a_pack,
    blocks_of,
    can_be_copied,
    is_heavy,
    left,
    power,
    repeat,
    segment_bytes,
    shared_bytes,
    stage_bytes,
    word,
)
from fusionrt.runtime.row_operands import columns, held, late, n_rows, repeats, sums, weights

MOST_STAGES, MOST_BLOCKS = 4, 4
PART = 64 << 10            # bytes of a row that a block takes which comes and goes
MOST_PASSING = 6           # such blocks on a multiprocessor
LONG_SUMS = 2048           # columns from which on blocks of a multiprocessor add up their sums
ONE_TURN, FEW_TURNS = 528, 4096   # rows of gradients: four for each multiprocessor of an H200, and more


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
CARRYING = {  # the same that carry, by packs
    4: (Choice(512, 128, 4, 4, 2), Choice(1024, 128, 4, 3, 2), Choice(2048, 256, 8, 1, 2),
        Choice(4096, 512, 4, 1, 2), Choice(8192, 256, 8, 1, 2), Choice(math.inf, 512, 4, 1, 2)),
    8: (Choice(512, 128, 4, 4, 2), Choice(1024, 256, 4, 2, 2, ahead=True), Choice(2048, 256, 8, 1, 2),
        Choice(4096, 512, 4, 1, 2), Choice(8192, 256, 4, 2, 2, ahead=True), Choice(math.inf, 512, 4, 1, 2))}
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
        Choice(32768, 1024, 2, 1, 4, part=1, ahead=True, **OVERLAPPED),
        Choice(math.inf, 256, 16, 1, 3, part=4, moved=True)),
    8: (Choice(2048, 512, 4, 3, 1, **PASSING), Choice(4096, 256, 4, 6, 1, **PASSING),
        Choice(8192, 512, 4, 3, 1, **PASSING), Choice(16384, 1024, 2, 1, 1, **MOVED),
        Choice(math.inf, 512, 4, 1, 2, ahead=True))}
HEAVY = {  # moments, and more instructions than LIGHT
    4: (Choice(8192, 512, 8, 1, 1, **MOVED), Choice(16384, 128, 16, 6, 1, **PASSING),
        Choice(math.inf, 512, 8, 1, 1, ahead=True, **OVERLAPPED)),
    8: (Choice(math.inf, 512, 8, 1, 1, ahead=True, **OVERLAPPED),)}
UNWEIGHTED = {4: (Choice(math.inf, 256, 16, 1, 2, weights=False, **MOVED),),  # shorter ones gain nothing
              8: (Choice(math.inf, 256, 16, 1, 3, weights=False, **MOVED),)}
LONG_HEAVY, LONG_UNWEIGHTED = 4096, 1 << 17  # packs, or columns, from which on these are taken
LONG_GRADIENTS = 4096      # columns from which on
SHORT_GRADIENTS = 1024     # the same of many rows, whose blocks are then as many teams as make 768 threads
LEAST_CARRYING = 512       # and of those that carry
WALKS = 512                # blocks of all rows, for each that works at a time, from which on it pays to stay
TURNS = 256                # and to leave a row to fewer and larger blocks


def staged(problem: Problem, pack: int) -> Layout | None:
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
    summed, (_, staying) = bool(sums(problem)), a_pack(problem, pack)
    of_columns = weights(problem)
    if word(problem) > 1 or problem.streams or (of_columns and not _can_keep(problem, of_columns)):
        return None
    packs_a_row = -(-columns(problem) // pack)
    for choice in _choices(problem, pack):
        cluster = power(-(-packs_a_row // (choice.threads * choice.packs)))
        length = columns(problem) if summed else packs_a_row
        if length > choice.most or cluster > CLUSTERS[-1] or (
                choice.packs * staying > left(choice.threads * choice.rows)):
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
    return Layout("staged" if stages else "registers", pack, packs, choice.threads, rows, blocks, cluster,
                  stages, persistent=stages > 1 or choice.moved, part=part if part < packs else 0,
                  weights=choice.weights, moved=choice.moved, overlaps=choice.overlaps, ahead=choice.ahead)


def _choices(problem: Problem, pack: int) -> tuple[Choice, ...]:
    light, packs_a_row = instructions(problem.roots) <= LIGHT, -(-columns(problem) // pack)
    if sums(problem):
        if not weights(problem):
            return ()
        if how_many(problem.roots):
            return _carrying(problem, pack)
        if columns(problem) >= LONG_GRADIENTS:
            return GRADIENTS
        threads, many = power(-(-columns(problem) // (2 * pack))), n_rows(problem) >= MANY_ROWS
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
        return tuple(c._replace(most=c.most * pack) for c in CARRYING[8 if pack > 4 else 4])
    packs, together = (4, 384) if pack > 4 else (2, 768)
    threads = max(32, power(-(-columns(problem) // (packs * pack))))
    if columns(problem) < LEAST_CARRYING or threads > 256 or n_rows(problem) < MANY_ROWS:
        return ()
    return (Choice(LONG_GRADIENTS, threads, packs, together // threads, 2),)


def _can_keep(problem: Problem, operands: Sequence[Operand]) -> bool:
    """Whether a block needs no more than its part of them, and the copy engine can bring it."""
    names = {o.name for o in operands}
    taken = any(n.op == "taken" and isinstance(n.args[0], Expr) and n.args[0].args[0] in names
                for n in toposort(problem.roots))
    return bool(operands) and not taken and can_be_copied(problem, operands)


def _passing(problem: Problem, pack: int) -> Layout | None:
    """The fewest blocks a row of which several, working on other rows, fit on a multiprocessor: while one
    waits for its row or for its neighbours' values, others compute. Weights want room in the L1. The L2 is
    asked ahead where as much is written as read."""
    found, heavy = None, is_heavy(problem)
    light = word(problem) == 1 and not problem.streams and instructions(problem.roots) <= LIGHT
    of_channels = OF_CHANNELS * (1 if light else 3) * repeat(problem)
    of_light = (48 if problem.streams else 40) + of_channels
    large = light and n_rows(problem) >= 2 * TURNS
    most = PART if large and len(held(problem)) == 1 and not weights(problem) else PART // 2
    ahead = len(held(problem)) <= sum(
        any(o.strides[:problem.row_dims]) and not repeats(o, problem) for o in problem.outputs)
    for cluster in CLUSTERS:
        packs_a_block = -(-columns(problem) // (pack * cluster))
        made = Layout("staged", pack, packs=1, threads=256, rows=1, blocks=1, cluster=cluster, stages=1,
                      ahead=ahead)
        part = stage_bytes(problem, made)
        fits_once = 2 * part > SHARED and len(held(problem)) == 1
        alone = light and part > PART // 2 and (cluster == 1 or fits_once)
        threads = (1024 if alone else 512 if part > PART // 2 else 256) // (2 if heavy else 1)
        working = 32 if alone else (80 if heavy else of_light) * word(problem)
        reserved = (1 << 10) + segment_bytes(problem, threads)
        blocks = min(MOST_PASSING, SHARED // (part + reserved), blocks_of(working, threads))
        packs = -(-packs_a_block // threads)
        if blocks and packs <= 2 * MOST_IN_REGISTERS:
            found = made._replace(packs=packs, threads=threads, blocks=blocks)
            if part <= most:
                break
    return found


def _at_full_width(problem: Problem, pack: int) -> Layout | None:
    """Blocks of 512 threads with two packs each, two of them on a multiprocessor: as many threads as have the
    registers for sums."""
    _, of_sums = a_pack(problem, pack)
    packs_a_row = -(-columns(problem) // pack)
    cluster = power(-(-packs_a_row // 1024))
    if of_sums > 8 or word(problem) != 1 or problem.streams or cluster > CLUSTERS[-1]:
        return None
    made = Layout("staged", pack, packs=2, threads=512, rows=1, blocks=2, cluster=cluster, stages=3,
                  persistent=True)
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
    if many or word(problem) > 1:
        return made
    if rows <= ONE_TURN:
        return made._replace(rows=4, blocks=1, stages=1)
    if rows > FEW_TURNS and carrying:
        return made._replace(stages=stages)
    threads = 768 if rows > FEW_TURNS and made.width <= 4 and not problem.streams else 512
    return made._replace(rows=threads // made.threads, blocks=1, stages=stages)


def _in_parts(problem: Problem, pack: int) -> Layout | None:
    """Rows of which the largest clusters hold one and parts of the next, beside the weights if they can.
    (Sums gained nothing by more than two; where something is late, or carried, more threads gain most, which
    have registers for sums alone, and one part more.)"""
    summed, carrying = len(sums(problem)), how_many(problem.roots) > 0
    apart = bool(summed and late(problem))
    wide, (_, staying) = summed and (carrying or apart), a_pack(problem, pack)
    threads, most = (1024, 32) if wide else (256, 192) if carrying else (512, 64)  # registers that stay taken
    packs = -(-columns(problem) // (threads * pack * CLUSTERS[-1]))
    taken = packs * (summed * pack if wide else staying)
    if len(schedule(with_sums(problem.roots))) != 2 or taken > most or word(problem) > 1:
        return None
    most_ahead = 1 if wide else 2 if summed else packs
    beside = (True, False) if _can_keep(problem, weights(problem)) else (False,)
    made = Layout("staged", pack, packs, threads, rows=1, blocks=1, cluster=CLUSTERS[-1], stages=1,
                  persistent=True, part=1, late=apart and packs > 1)
    wanted = [made._replace(stages=packs + ahead, weights=weights)
              for weights in beside for ahead in range(most_ahead, 0, -1)]
    return next((made for made in wanted if shared_bytes(problem, made) <= SHARED), None)


def _staying(problem: Problem, pack: int) -> Layout | None:
    """Blocks that keep their sums over many rows: the fewest a row that leave two on a multiprocessor with
    three rows each; or else the fewest that leave one with two."""
    _, of_sums = a_pack(problem, pack)
    found = None
    for cluster in CLUSTERS:
        packs_a_block = -(-columns(problem) // (pack * cluster))
        few = MOST_PACKS // 2 if packs_a_block <= 256 * MOST_PACKS // 2 else MOST_PACKS
        most = max(1, min(few, 64 // of_sums))
        threads = min(512 // word(problem), max(32, power(-(-packs_a_block // most))))
        packs = -(-packs_a_block // threads)
        if packs > most or (cluster > 1 and threads < 128):
            continue
        rows = max(1, 128 // threads)
        working = (64 if problem.streams else 48 if word(problem) == 1 else 52) * word(problem)
        fit = min(MOST_BLOCKS, blocks_of(working + packs * of_sums, threads * rows))
        made = Layout("staged", pack, packs, threads, rows, fit, cluster, stages=1, persistent=True)
        row = stage_bytes(problem, made) * made.rows
        for blocks in range(fit, 1, -1):
            if row * blocks * 3 <= SHARED:
                return made._replace(stages=min(MOST_STAGES, SHARED // (row * blocks)), blocks=blocks)
        if found is None and row * 2 <= SHARED:
            found = made._replace(stages=min(MOST_STAGES, SHARED // row), blocks=1)
    return found
