"""Channels of contiguous images, each read once: statistics, and the elements that follow from them, in one
kernel, pointwise_planes.cu.

A channel is a plane of each image. A cluster of blocks has it in shared memory, a part each; or it has as
many neighbours as make whole packs, where a plane alone does not (7 x 7).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fusionrt.problem import Operand, Problem
from fusionrt.runtime import accumulators, pointwise, vectors
from fusionrt.runtime import device as cuda
from fusionrt.runtime.access import Again
from fusionrt.runtime.geometry import INDEX_LIMIT, is_flat
from fusionrt.runtime.resident import Joined, kept, places, recalling
from fusionrt.runtime.source import (
    ITEMSIZE,
    Specialisation,
    arithmetic,
    assemble,
    definitions,
    members,
    template,
)

OWNED = (False, True, False)     # of pixels, channels, images: a thread stays in a channel
RESERVED = 1 << 10               # bytes of shared memory that a block takes beside what it asks for
SHARED, REGISTERS = 228 << 10, 1 << 16   # of a multiprocessor
MOST = SHARED - RESERVED         # bytes of a block
# What a thread does once is done for as many packs as can be; threads of planes that share packs have more
# of that. A block alone on a multiprocessor needs more threads where packs have eight elements.
THREADS, THREADS_ALONE, THREADS_OF_SHARED, MOST_LANES = 192, 384, 128, 512
CLUSTERS = 1, 2, 4, 8            # blocks: the fewer, the faster; with 16 as slow as reading twice
FEW, LEAST = 32 << 10, 64        # bytes of a block that may be one of few; blocks otherwise
AHEAD = 12                       # packs of a thread on their way
AT_ONCE = 8                      # in the second pass, where that reads more than what was kept
WORKING = 32                     # registers of a thread beside operands and values


class Layout(NamedTuple):
    width: int      # elements of a pack
    together: int   # channels of a cluster
    lanes: int      # packs of their planes in an image
    threads: int    # of a block
    cluster: int
    packs: int = 0  # of a thread
    part: int = 0   # bytes of a block


def fits(problem: Problem, device: torch.device) -> bool:
    """Whether one kernel can compute the elements of `problem.then` as well; it needs clusters."""
    return cuda.clusters_on(device) and layout(problem) is not None


def layout(problem: Problem) -> Layout | None:
    if not _is_of_planes(problem):
        return None
    plane, channels, _ = problem.sizes
    width = vectors.pack_width(problem, 16)
    together = width // math.gcd(plane, width)
    lanes = together * plane // width
    if channels % together or (together > 1 and (plane < width or lanes > MOST_LANES)):
        return None
    # A thread has one place in planes that share packs, and so its columns' channels.
    threads = THREADS if together == 1 else lanes * max(1, THREADS_OF_SHARED // lanes)
    several = len(kept(problem)) > 1
    # Of several operands two blocks of eight on a multiprocessor are faster than one of four.
    for most, cluster in [*((MOST // 2 if several and c > 2 else MOST, c) for c in CLUSTERS),
                          *((MOST, c) for c in CLUSTERS)]:
        made = _of_threads(problem, Layout(width, together, lanes, threads, cluster))
        if together == 1 and width == 8 and len(kept(problem)) < 3 and made.part > MOST // 2:
            made = _of_threads(problem, made._replace(threads=THREADS_ALONE))
        enough = made.part <= FEW or grid(problem, made) >= LEAST
        if enough and made.part + _static_bytes(problem, made) <= most:
            return made
    return None


def _of_threads(problem: Problem, made: Layout) -> Layout:
    """With packs for as many threads."""
    packs = -(-problem.sizes[2] * made.lanes // (made.threads * made.cluster))
    a_pack = made.width * sum(ITEMSIZE[o.dtype] for o in kept(problem))
    return made._replace(packs=packs, part=packs * made.threads * a_pack)


def _is_of_planes(problem: Problem) -> bool:
    then = problem.then
    if then is None or then.sizes != problem.sizes or len(problem.sizes) != 3 or problem.acc != "float32":
        return False
    if problem.inner > 1 or problem.streams or then.streams or problem.domain.numel >= INDEX_LIMIT:
        return False
    width, sizes = vectors.pack_width(problem, 16), problem.sizes
    operands = (*problem.inputs, *then.inputs)
    placed = all(is_flat(o, sizes) or _is_of_channels(o) for o in operands)
    both = {o.name for o in kept(problem)} == {o.name for o in problem.inputs if is_flat(o, sizes)}
    summed = {g.kind for g in accumulators.groups(problem)} <= {"sum", "moments"}
    found, written = all(map(_is_of_channels, problem.outputs)), all(is_flat(o, sizes) for o in then.outputs)
    return placed and both and summed and found and written and 1 < width == vectors.pack_width(then, 16)


def _is_of_channels(operand: Operand) -> bool:
    return operand.strides[0] == operand.strides[2] == 0


def blocks(problem: Problem, made: Layout) -> int:
    """Of a multiprocessor, by shared memory and by registers."""
    groups = accumulators.groups(problem)
    values = sum(min(2, len(g.places)) for g in groups) * made.width
    pack = made.width * sum(ITEMSIZE[o.dtype] for o in kept(problem)) // 4
    needed = -(-(WORKING + values + pack) // 8) * 8
    of_block = made.part + _static_bytes(problem, made) + RESERVED
    return max(1, min(SHARED // of_block, REGISTERS // (needed * made.threads)))


def _static_bytes(problem: Problem, made: Layout) -> int:
    """What threads leave, each for two channels where those share packs, and what blocks tell each other."""
    values = accumulators.n_values(accumulators.groups(problem))
    threads = 2 * made.threads if made.together > 1 else made.threads // 32
    return 4 * values * (threads + made.together * made.cluster) + 16


def _at_once(problem: Problem, made: Layout) -> int:
    """Packs of a thread in the second pass, whose own operands are on their way together."""
    then, both = problem.then, kept(problem)
    assert then is not None
    names = {o.name for o in both}
    own = [o for o in then.inputs if is_flat(o, problem.sizes) and o.name not in names]
    a_pack = made.width * sum(ITEMSIZE[o.dtype] for o in (*both, *own)) // 4
    free = REGISTERS // (blocks(problem, made) * made.threads) - WORKING
    return max(1, min(made.packs, AT_ONCE if own else 2, free // a_pack))


def generate(problem: Problem) -> Specialisation:
    then, made = problem.then, layout(problem)
    assert then is not None and made is not None
    again = Again(frozenset(name for name, _ in problem.found), frozenset(o.name for o in kept(problem)))
    values = accumulators.groups(problem)
    geometry = pointwise.geometry_of(problem, made.width)
    first = pointwise.assembled("pointwise_planes", problem, geometry, made.width, pointwise.fields_of(
        problem, geometry, None, made.width, True), [
            *definitions(BLOCK=made.threads, LANES=made.threads, VEC=made.width, COLUMNS_KEPT=True),
            *accumulators.declarations(values), *accumulators.takes(values)], OWNED)
    geometry = pointwise.geometry_of(then, made.width)
    second = pointwise.assembled("pointwise_planes", then, geometry, made.width, pointwise.fields_of(
        then, geometry, None, made.width, False), definitions(VEC=made.width), OWNED, again)
    fields = members("unsigned", "images", "image")
    params = Joined(fields, first.params, second.params)
    constants = definitions(
        TOGETHER=made.together, PLANE=problem.sizes[0], LANES=made.lanes, CLUSTER=made.cluster,
        MIN_BLOCKS=blocks(problem, made), AHEAD=min(AHEAD, made.packs), AT_ONCE=_at_once(problem, made),
        KEPT_BYTES=made.part // (made.packs * made.threads))
    text = assemble("pointwise_planes", arithmetic(problem.acc, then.significant_bits), [
        "namespace finding {", *first.lines, *accumulators.storing(problem), template("columns.cuh"), "}",
        "namespace elements {", *second.lines, "}", params.declaration, *constants,
        *_bringing(problem, made.width), *recalling(problem, made.width)])
    plane, channels, images = problem.sizes
    given = (*first.values, *second.values, (images,), (plane * channels,))
    return Specialisation(text, "pointwise_planes", params, given)


def _bringing(problem: Problem, width: int) -> list[str]:
    """`bring`, which copies past the registers, and `brought`."""
    tile = "finding::Tile<finding::VEC>"
    return ["__device__ __forceinline__ void bring(unsigned char* to, const finding::Params& p, "
            "finding::index_t i) {",
            *(f"    copy_pack({place.format('to')}, p.{o.name} + i);" for o, place in places(problem, width)),
            "}", f"__device__ __forceinline__ {tile} brought(unsigned char* from, const {tile}& fixed) {{",
            f"    {tile} tile = fixed;",
            *(f"    tile.{o.name} = {place.format('from')};" for o, place in places(problem, width)),
            "    return tile;", "}"]


def grid(problem: Problem, made: Layout) -> int:
    return problem.sizes[1] // made.together * made.cluster
