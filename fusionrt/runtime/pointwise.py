"""CUDA text for a pointwise problem: constants, parameter struct, `load` and `finish`; how it is laid out."""

from collections.abc import Sequence
from typing import NamedTuple

from fusionrt.expr import Expr
from fusionrt.graph import emit, leaves
from fusionrt.layout import Reduction, reduction
from fusionrt.problem import MASK, Operand, Problem, of_problem
from fusionrt.runtime import accumulators
from fusionrt.runtime.access import (
    REDUCE_BLOCK,
    Again,
    Owned,
    access_mode,
    ahead_text,
    is_fixed,
    load_text,
    owned,
    writes,
)
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.geometry import INDEX_LIMIT, Geometry, is_flat
from fusionrt.runtime.source import (
    ITEMSIZE,
    U64,
    Field,
    Params,
    Specialisation,
    arithmetic,
    assemble,
    definitions,
    pointer,
    scalar_fields,
    template,
)
from fusionrt.texts import Texts

BLOCK = 128
REDUCE_UNROLL, NARROW_UNROLL = 2, 8
REDUCE_BLOCKS = MULTIPROCESSORS * 16
# Blocks that stay, where they leave many rows of partial sums, or read bits; up to so many side by side.
STAYING_BLOCKS, STAYING_TILES, STAYING_TILES_OF_MASKS = MULTIPROCESSORS * 3, 15, 64
MANY_WORDS = 40  # of operands, which a thread of a reduction has in registers at a time
MOST_READ_FIRST = 3  # operands: of more, batch norm's gradient spilled registers
COUNTED = 512    # elements that 64 Philox counters serve: see philox.cuh
MISALIGNED_WORDS = 16  # of operands, where vectors are narrow
ALONE, ALONE_THREADS = 64, 1 << 16  # rows that a thread has, at most; threads that are enough then
WALK, WALK_THREADS = 16, 1 << 18  # rows of a thread at most; threads of a grid, where there are as many
FEW = 3 << 17                     # elements that do not fill a GPU; of a thread then, and threads of a block
EACH_OF_FEW, BLOCK_OF_FEW = 2, 256


_texts = Texts()
Filled = tuple[Field, tuple[str | int, ...]]  # a field, and its values as those of a Specialisation


@of_problem
def vector_width(problem: Problem, alignment: int) -> int:
    """Elements a 16-byte vector of the widest flat operand holds, as far as pointers are aligned, to
    `alignment` bytes.

    A reduction over several rows needs rows of whole vectors as well.
    """
    width = pack_width(problem, alignment)
    if any(problem.reduced) and len(problem.sizes) > 1:
        while problem.sizes[0] * problem.abreast % width:
            width //= 2
    return width


def pack_width(problem: Problem, alignment: int) -> int:
    """The same whatever the rows."""
    operands = (*problem.inputs, *problem.outputs)
    # A vector of an operand that is wider still (a norm's weights) is several of 16 bytes.
    widest = _widest(problem) if alignment >= 16 else max(ITEMSIZE[o.dtype] for o in operands)
    return max(1, alignment // widest)


@of_problem
def _widest(problem: Problem) -> int:
    """Bytes of an element of the flat operands."""
    flat = [o for o in (*problem.inputs, *problem.outputs) if is_flat(o, problem.sizes)]
    return max([ITEMSIZE[o.dtype] for o in flat or problem.inputs], default=4)


@of_problem
def unroll(problem: Problem, width: int) -> int:
    """Vectors a thread: pairs where they share random numbers, two pairs (of one operand) if they
    share the keys as well; two vectors where one operand alone would keep too few bytes in flight and no
    other one has an offset for each element. Where that is a word (int8, float32 results), it is what is
    written that counts. Of misaligned operands as many as make 16 bytes, while registers last."""
    flat = [ITEMSIZE[o.dtype] for o in problem.inputs if o.dtype != MASK and is_flat(o, problem.sizes)]
    operands, words = len(flat), _words(problem, width)
    vector = width * _widest(problem)
    if vector < 16:
        fitting = 1 << (max(1, MISALIGNED_WORDS // max(1, words)).bit_length() - 1)
        return min(16 // vector, fitting)
    crowded = (operands > 1 or _gathers(problem, width) or len(problem.inputs) > 3 or words > 12
               or sum(flat) * width == 4)
    if width < 4 or (crowded and not problem.streams):
        return 1
    return 4 if problem.streams and operands == 1 else 2


def _gathers(problem: Problem, width: int) -> bool:
    return any(access_mode(o, problem.sizes, width) == "gather" for o in problem.inputs)


def _words(problem: Problem, width: int) -> int:
    """Registers that the operands of one vector take."""
    return sum(max(1, ITEMSIZE[o.dtype] * (width if o.strides[0] else 1) // 4) for o in problem.inputs)


@of_problem
def min_blocks(problem: Problem, width: int) -> int:
    """Blocks that must fit on an SM: 64 registers a thread for doubles, 48 for four vectors (64 if an operand
    has an offset for each element), else 40; more for many operands, and for the addresses of outputs that
    lie apart.

    With more registers the 16-bit special functions lose 3 %, with fewer some kernels spill.
    """
    apart = sum(not is_flat(o, problem.sizes) for o in problem.inputs)
    of_four = 10 - bool(apart) - _gathers(problem, width)
    blocks = 8 if problem.acc == "float64" else of_four if unroll(problem, width) == 4 else 12
    words = unroll(problem, width) * _words(problem, width)
    addresses = 0 if all(is_flat(o, problem.sizes) for o in problem.full_outputs) else 24
    addresses += 6 * apart if apart > 2 and width > 4 else 0
    return min(blocks, 65536 // (BLOCK * (24 + -(-words // 8) * 8 + addresses)))


def _min_blocks_text(problem: Problem, width: int) -> list[str]:
    """Compilers for Blackwell want 72 registers for four vectors of eight elements that have an offset each,
    and spill with fewer."""
    blocks = min_blocks(problem, width)
    usual = definitions(MIN_BLOCKS=blocks)
    if unroll(problem, width) < 4 or width < 8 or not _gathers(problem, width):
        return usual
    fewer = definitions(MIN_BLOCKS=min(blocks, 65536 // (BLOCK * 72)))
    return ["#if __CUDA_ARCH__ >= 1000", *fewer, "#else", *usual, "#endif"]


def each_of_few(problem: Problem, width: int) -> int:
    """Elements of a thread where there are few in all: what it does one after the other is their time. 0
    where that would be the same kernel, or a byte of a mask would have several threads."""
    each = 0 if any(o.dtype == MASK for o in problem.outputs) else min(width, EACH_OF_FEW)
    return each if each < width * unroll(problem, width) else 0


@of_problem
def walked(problem: Problem, width: int) -> Reduction | None:
    """Columns and rows, where operands that repeat from row to row are more bytes than those that do not:
    then threads walk down rows (pointwise_walk.cu)."""
    if any(problem.reduced) or len(problem.sizes) != 2 or problem.sizes[0] % width or width == 1:
        return None
    read = {o: access_mode(o, problem.sizes, width) for o in problem.inputs}
    if not set(read.values()) <= {"flat", "vector", "scalar"} or not all(
            is_flat(o, problem.sizes) for o in problem.outputs):
        return None
    flat, repeated = (sum(ITEMSIZE[o.dtype] for o, mode in read.items() if mode == wanted)
                      for wanted in ("flat", "vector"))
    return reduction(problem.domain, (True, False)) if repeated > 2 * flat > 0 else None


def walk_unroll(problem: Problem, width: int) -> int:
    """Rows that a thread reads at a time: four vectors in flight."""
    operands = sum(is_flat(o, problem.sizes) for o in problem.inputs)
    return 1 if problem.acc == "float64" else max(1, 4 // operands)


def walk_rows(problem: Problem, rows: Reduction, width: int) -> int:
    """Rows of a thread: whole turns, at most WALK, while threads enough for a large GPU remain."""
    at_once = walk_unroll(problem, width)
    threads = rows.columns // width * rows.n_rows
    return max(1, min(WALK, threads // WALK_THREADS) // at_once) * at_once


class Grid(NamedTuple):
    """Which kernel of a translation unit, in how many blocks of how many threads."""

    kernel: str
    blocks: int
    block: int


def grid(problem: Problem, width: int) -> Grid:
    """Of a problem that reduces nothing."""
    rows, elements = walked(problem, width), problem.domain.numel
    if rows is not None:
        teams = -(-rows.n_rows // walk_rows(problem, rows, width))
        return Grid("pointwise_walk", -(-rows.columns // width * teams // BLOCK), BLOCK)
    few = each_of_few(problem, width) if elements <= FEW else 0
    if few:
        return Grid("pointwise_of_few", -(-elements // (BLOCK_OF_FEW * few)), BLOCK_OF_FEW)
    return Grid("pointwise", -(-elements // (BLOCK * unroll(problem, width) * width)), BLOCK)


class Body(NamedTuple):
    """A specialisation before its template."""

    stem: str
    lines: list[str]
    params: Params
    values: tuple[tuple[str | int, ...], ...]


def generate(problem: Problem, alignment: int, rows: Reduction | None = None) -> Specialisation:
    """The whole translation unit. `alignment`: bytes, to which every pointer is aligned. `count`, where a
    parameter has that value, is the number of elements."""
    if rows is None and walked(problem, vector_width(problem, alignment)) is None and not _is_wide(problem):
        # The outermost dimension is no divisor and in no stride: all lengths have the same text and values.
        return _of_all_lengths(problem._replace(sizes=(*problem.sizes[:-1], min(2, problem.sizes[-1]))),
                               alignment)
    return _generated(problem, alignment, rows)


def _generated(problem: Problem, alignment: int, rows: Reduction | None = None) -> Specialisation:
    stem, lines, params, values = body(problem, alignment, rows)
    reads_first = stem == "pointwise" and len(problem.inputs) <= MOST_READ_FIRST
    text = assemble(stem, arithmetic(problem.acc, problem.significant_bits, reads_first), lines)
    return Specialisation(text, stem, params, values)


_of_all_lengths = of_problem(_generated)


def body(problem: Problem, alignment: int, rows: Reduction | None = None, again: Again | None = None,
         staying: int = 0) -> Body:
    """`again`: of a second pass, which walks down rows; `staying`: blocks of a multiprocessor, where outputs
    follow from partial values within the kernel."""
    width, wide = vector_width(problem, alignment), _is_wide(problem)
    walk = walked(problem, width) if again is None else reduction(problem.domain, (True, False))
    geometry = geometry_of(problem, width, wide)
    extra: list[str] = []
    if rows is not None:
        constants, extra = _reduction_text(problem, rows, geometry, width, staying)
    elif walk is not None:
        constants = _walk_text(problem, walk, geometry, width)
    else:
        geometry.index("count", "count")
        few = each_of_few(problem, width)
        constants = [*definitions(BLOCK=BLOCK, UNROLL=unroll(problem, width), VEC=width,
                                  DRAWS=bool(problem.streams)), *_min_blocks_text(problem, width)]
        if few:
            constants += [*definitions(BLOCK_OF_FEW=BLOCK_OF_FEW), f"#define EACH_OF_FEW {few}"]
    fields, walker = fields_of(problem, geometry, rows, width, staying > 0), rows or walk
    stem = "pointwise_reduce" if rows is not None else "pointwise" if walk is None else "pointwise_walk"
    made = assembled(stem, problem, geometry, width, fields, [*constants, *extra],
                     None if walker is None else owned(walker), again,
                     rows is not None and twins(problem, rows, width))
    if staying:
        made.lines.extend(accumulators.storing(problem))
    elif rows is not None:
        made.lines.extend(ahead_text(problem, access_modes(problem, width), rows, geometry, width))
    if rows is not None:
        made.lines.append(template("columns.cuh"))
    return made


def assembled(stem: str, problem: Problem, geometry: Geometry, width: int, fields: Sequence[Filled],
              constants: Sequence[str], own: Owned | None, again: Again | None = None, twins: bool = False
              ) -> Body:
    """`own`: the dimensions that a thread's walk has one place in."""
    params = Params([field for field, _ in fields])
    modes = access_modes(problem, width)
    written = {o: access_mode(o, problem.sizes, width) for o in problem.full_outputs}

    def functions() -> str:
        return "\n".join([*load_text(geometry, modes, own, again), *draws_text(problem, twins), *_finish_text(
            problem, writes(geometry, written, "store_passing" if again else "store_pack"))])

    # All that they depend on: sizes have a say in modes alone.
    operands = [(o.name, o.dtype, mode, *(min(s, 2) for s in o.strides))
                for o, mode in (*modes.items(), *written.items())]
    rest = problem._replace(sizes=(0,) * len(problem.sizes), inputs=(), row_size=0, then=None,
                            outputs=tuple(o._replace(strides=()) for o in problem.outputs))
    form = (*rest, *operands, geometry.wide, own, again, twins)
    lines = [*definitions(index_t=geometry.index_t), params.declaration, *constants,
             _texts.text(form, functions)]
    return Body(stem, lines, params, tuple(values for _, values in fields))


def access_modes(problem: Problem, width: int) -> dict[Operand, str]:
    return {o: access_mode(o, problem.sizes, width) for o in problem.inputs}


def geometry_of(problem: Problem, width: int, wide: bool = False) -> Geometry:
    made = Geometry(problem.sizes, wide)
    operands = (*problem.inputs, *problem.full_outputs)
    made.declare([o for o in operands if access_mode(o, problem.sizes, width) not in (
        "flat", "scalar", "mask")])
    return made


def _is_wide(problem: Problem) -> bool:
    """Whether 32 bits are too few for the number of elements, or an offset that one is read or written at."""
    reach = max((sum((n - 1) * abs(s) for n, s in zip(problem.sizes, o.strides, strict=True))
                 for o in (*problem.inputs, *problem.full_outputs)), default=0)
    return max(problem.domain.numel, reach) >= INDEX_LIMIT


def fields_of(problem: Problem, geometry: Geometry, rows: Reduction | None, width: int, stored: bool
            ) -> list[Filled]:
    fields: list[Filled] = [
        (pointer(f"{o.dtype}_t", o.name), (o.name,)) for o in problem.inputs]
    at_once = rows is not None and is_final(problem, rows, width)
    joined = rows is not None and is_joined(problem, rows, width)
    written = problem.outputs if at_once or joined or stored else problem.full_outputs
    fields += [(pointer(f"{o.dtype}_t", o.name, const=False), (o.name,)) for o in written]
    if rows is not None and not at_once:
        fields.append((pointer("acc_t", "partials", const=False), ("partials",)))
    if joined:
        fields.append((pointer("unsigned", "arrived", const=False), ("arrived",)))
    fields += random_fields(problem)
    scalars: list[Filled] = [*scalar_fields(problem)]
    return fields + geometry.fields + scalars if geometry.wide else fields + scalars + geometry.fields


def random_fields(problem: Problem) -> list[Filled]:
    if not problem.streams:
        return []
    return [(Field("unsigned long long seed", U64), ("seed",)),
            (Field("unsigned long long random_offset", U64), ("random_offset",)),
            (pointer("unsigned long long", "random_state"), ("random_state",))]


def twins(problem: Problem, rows: Reduction, width: int) -> bool:
    """Whether two lanes of a reduction share Philox counters: a vector is two of them, and the columns are
    whole blocks, of which lanes lie 16 apart in the two halves."""
    return (bool(problem.streams) and rows.keeps_columns and width == 8 and rows.columns % COUNTED == 0
            and not is_alone(problem, rows, width))


def draws_text(problem: Problem, twins: bool = False) -> list[str]:
    """Random bits: a member of `Draws` per stream; stream k takes the k-th counter from the offset."""
    state, single, both = ["    return {};"], [], []
    if problem.streams:
        state = ["    RandomState state = {p.seed, p.random_offset};",
                 "    if (p.random_state) state = {p.random_state[0], p.random_state[1] + state.offset};",
                 "    return state;"]
    for stream in problem.streams:
        at = f"RandomState{{random.seed, random.offset + {stream.removeprefix('random')}}}, i"
        single.append(f"    draws.{stream} = {'draw_with_twin' if twins else 'draw'}<W>({at});")
        both.append(f"    draw_pair<W>({at}, a.{stream}, b.{stream});")
    drawing, of_thread = "template <int W> __device__ __forceinline__", "const RandomState& random, index_t i"
    return ["__device__ __forceinline__ RandomState random_state(const Params& p) {", *state, "}",
            "template <int W> struct Draws {", *(f"    Lanes<W> {s};" for s in problem.streams), "};",
            f"{drawing} Draws<W> draws({of_thread}) {{",
            "    Draws<W> draws;", *single, "    return draws;", "}",
            f"{drawing} Draws<W> draws(const Params& p, index_t i) {{",
            "    return draws<W>(random_state(p), i);", "}",
            f"{drawing} void draw_both(const Params& p, index_t i, Draws<W>& a, Draws<W>& b) {{",
            "    const RandomState random = random_state(p);", *both, "}"]


def _finish_text(problem: Problem, writes: Sequence[str]) -> list[str]:
    values = accumulators.groups(problem) if any(problem.reduced) else []
    roots = [g.operand for g in values] if problem.across else [
        root if reduced else _stored(root, o.dtype)
        for root, o, reduced in zip(problem.roots, problem.outputs, problem.reduced, strict=True)]
    lines, results = emit(roots, "const auto {} = {};")
    used = {*leaves(roots, "arg"), *leaves(roots, "mask")}
    full = {o.name: result for o, reduced, result in
            zip(problem.outputs, problem.reduced, results, strict=not problem.across) if not reduced}
    head = [f"acc_t {name}[W];" for name in full]
    body = [f"const acc_t {o.name} = at(tile.{o.name}, W <= LANES_OF(tile.{o.name}) ? v : 0);"
            for o in problem.inputs if o.name in used]
    body += [f"const acc_t {name} = p.{name};" for name in problem.scalars]
    body += [f"const Lane {s} = draws.{s}[v];" for s in problem.streams]
    body += lines
    summed = results if problem.across else [
        result for result, reduced in zip(results, problem.reduced, strict=True) if reduced]
    body += [f"found[{g}][v] = {result};" for g, result in enumerate(summed)]
    body += [f"{name}[v] = {result};" for name, result in full.items()]
    running = ", acc_t (&found)[GROUPS][W]" if values else ""
    return ["#define LANES_OF(pack) static_cast<int>(sizeof(pack.data) / sizeof(pack.data[0]))",
            "template <int W> __device__ __forceinline__ void finish(const Params& p, index_t i, "
            f"const Tile<W>& tile, const Draws<W>& draws{running}) {{",
            *("    " + line for line in head), "#pragma unroll", "    for (int v = 0; v < W; ++v) {",
            *("        " + line for line in body), "    }",
            *("    " + line for line in writes), "}"]


def _stored(root: Expr, dtype: str) -> Expr:
    """What is to be stored as `dtype`, which rounds as a cast does: to an integer and back are two of the
    few instructions that only sixteen lanes have."""
    inner = root.args[0]
    return inner if root.op == f"cast_{dtype}" and isinstance(inner, Expr) else root


def _walk_text(problem: Problem, rows: Reduction, geometry: Geometry, width: int) -> list[str]:
    geometry.divisor("vectors", rows.columns // width)
    geometry.index("columns", rows.columns)
    geometry.index("rows", rows.n_rows)
    geometry.index("each", walk_rows(problem, rows, width))
    at_once = walk_unroll(problem, width)
    blocks = 65536 // (BLOCK * registers(problem, rows, width, at_once)) if problem.acc == "float32" else 3
    return definitions(BLOCK=BLOCK, UNROLL=at_once, VEC=width, MIN_BLOCKS=blocks)


def registers(problem: Problem, rows: Reduction, width: int, at_once: int, values: int = 0) -> int:
    """Estimate of what a thread takes that owns `values` a column and reads `at_once` rows at a time."""
    inputs = tuple(o for o in problem.inputs if is_fixed(o, owned(rows)))
    fixed = _words(problem._replace(inputs=inputs), width)
    kept = values * width * (2 if problem.acc == "float64" else 1)
    moving = at_once * (_words(problem, width) - fixed)
    return 40 + -(-(fixed + kept + moving + 2 * max(0, len(problem.inputs) - 4)) // 8) * 8


def _reduction_text(problem: Problem, rows: Reduction, geometry: Geometry, width: int, staying: int = 0
                    ) -> tuple[list[str], list[str]]:
    lanes, values = n_lanes(problem, rows, width), accumulators.groups(problem)
    double = problem.acc == "float64"
    # Packs of eight elements (16-bit operands): four blocks, which hide what they wait for, rather than two
    # packs at a time where both would spill. Two packs of doubles spill as well, and four blocks of what
    # draws, or reads six operands, for two sums.
    wide = width > 4
    narrow = registers(problem, rows, width, REDUCE_UNROLL, accumulators.n_values(values)) <= 64
    unroll = REDUCE_UNROLL if not double and (narrow or not wide) else 1
    apart = not all(is_flat(o, problem.sizes) for o in problem.full_outputs)
    crowded = apart or ((bool(problem.streams) or len(problem.inputs) > 5) and sum(problem.reduced) > 1)
    many = _words(problem, width) > MANY_WORDS
    min_blocks = 1 if double else 2 if many or not wide else 4 - crowded
    if _is_narrow(problem, width) and not double and not many:
        unroll, min_blocks = NARROW_UNROLL, 3
    if problem.across:
        unroll, min_blocks = across_unroll(problem, rows, width, staying)
    geometry.divisor("vectors", max(1, rows.columns // width))
    constants = [*definitions(
        BLOCK=REDUCE_BLOCK, UNROLL=unroll, VEC=width, MIN_BLOCKS=min_blocks, LANES=lanes,
        COLUMNS_KEPT=rows.keeps_columns, ACROSS=problem.across, ALONE=is_alone(problem, rows, width),
        ONE_ROW=not rows.rows, TWINS=twins(problem, rows, width), FINAL=is_final(problem, rows, width),
        JOINED=is_joined(problem, rows, width)),
        *accumulators.declarations(values), *accumulators.takes(values)]
    geometry.index("columns", rows.columns)
    geometry.index("rows", rows.n_rows)
    geometry.index("groups", rows.n_groups)
    geometry.index("chunks", "chunks" if staying else n_chunks(problem, rows, width))
    functions = [*_base_text("group", rows.groups, geometry), *_base_text("row", rows.rows, geometry)]
    stores = is_final(problem, rows, width) or is_joined(problem, rows, width)
    return constants, functions + (accumulators.storing(problem) if stores else [])


def across_unroll(problem: Problem, rows: Reduction, width: int, staying: int = 0) -> tuple[int, int]:
    """Packs that a thread of a reduction across memory reads at a time, and blocks of a multiprocessor: it
    writes nothing, so that what is on its way decides."""
    if problem.acc == "float64":
        return 1, across_blocks(problem, width)
    # Of moments, the count is one for all columns, and nothing is lost yet.
    kept = sum(min(2, len(g.places)) for g in accumulators.groups(problem))
    # More blocks where each has many sums of its own: what follows its last row is time without reading.
    blocks = staying or across_blocks(problem, width) + is_final(problem, rows, width)
    fits = (u for u in ((16, 8, 4) if _is_narrow(problem, width) else (8, 4)) if 65536 // (
        REDUCE_BLOCK * (registers(problem, rows, width, u, kept) - 8)) >= blocks)
    return next(fits, 2), blocks


def across_blocks(problem: Problem, width: int) -> int:
    """Blocks of a multiprocessor where several share a sum. Packs of doubles are read one at a time, and
    narrow ones are few bytes."""
    return 4 if problem.acc == "float64" or _is_narrow(problem, width) else 2


def _is_narrow(problem: Problem, width: int) -> bool:
    return width * max([ITEMSIZE[o.dtype] for o in problem.inputs], default=4) <= 4


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


def _base_text(kind: str, dims: Sequence[tuple[int, int]], geometry: Geometry) -> list[str]:
    """`group_base` and `row_base`: first element of the g-th group, of the r-th row."""
    body, rest, terms = [], "n", []
    for d, (size, stride) in enumerate(dims):
        step = geometry.index(f"{kind}_stride{d}", stride)
        if d < len(dims) - 1:
            by = geometry.divisor(f"{kind}_size{d}", size)
            body.append(f"    const index_t q{d} = {by}.divide({rest});")
            terms.append(f"({rest} - q{d} * {by}.value) * {step}")
            rest = f"q{d}"
        else:
            terms.append(f"{rest} * {step}")
    return [f"__device__ __forceinline__ index_t {kind}_base(const Params& p, index_t n) {{", *body,
            f"    return {' + '.join(terms) or '0'};", "}"]


def generate_sum(problem: Problem, out_dtype: str) -> Specialisation:
    """The kernel that adds the partial sums of reduced outputs of one dtype."""
    params = Params(accumulators.sum_fields(f"{problem.acc}_t", f"{out_dtype}_t"))
    text = assemble("sum_partials", arithmetic(problem.acc, problem.significant_bits, reads_first=True), [
        *definitions(index_t="unsigned long long", out_t=f"{out_dtype}_t", BLOCK=accumulators.BLOCK),
        params.declaration])
    outs = tuple(f"out{k}" for k in range(accumulators.SUMS))
    values = ("partials",), outs, ("chunks",), ("kept",), ("side",)
    return Specialisation(text, "sum_partials", params, values)


def generate_join(problem: Problem) -> Specialisation:
    """The kernel that joins partial values and computes all outputs of rows that lie across memory."""
    params, values, text = accumulators.joining(problem)
    constants = arithmetic(problem.acc, problem.significant_bits, reads_first=True)
    return Specialisation(assemble("join_partials", constants, text), "join_partials", params, values)
