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
    load_text,
    owned,
    writes,
)
from fusionrt.runtime.geometry import INDEX_LIMIT, Geometry, is_flat
from fusionrt.runtime.reduction_cut import (
    is_alone,
    is_final,
    is_joined,
    n_chunks,
    n_lanes,
    reduction_unroll,
    registers,
    twins,
)
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
from fusionrt.runtime.vectors import gathers, unroll, vector_width, words_of
from fusionrt.texts import Texts

BLOCK = 128
MOST_READ_FIRST = 3  # operands: of more, batch norm's gradient spilled registers
WALK, WALK_THREADS = 16, 1 << 18  # rows of a thread at most; threads of a grid, where there are as many
FEW = 3 << 17                     # elements that do not fill a GPU; of a thread then, and threads of a block
EACH_OF_FEW, BLOCK_OF_FEW = 2, 256

_texts = Texts()
Filled = tuple[Field, tuple[str | int, ...]]  # a field, and its values as those of a Specialisation


@of_problem
def min_blocks(problem: Problem, width: int) -> int:
    """Blocks that must fit on an SM: 64 registers a thread for doubles, 48 for four vectors (64 if an operand
    has an offset for each element), else 40; more for many operands, and for the addresses of outputs that
    lie apart.

    With more registers the 16-bit special functions lose 3 %, with fewer some kernels spill.
    """
    apart = sum(not is_flat(o, problem.sizes) for o in problem.inputs)
    of_four = 10 - bool(apart) - gathers(problem, width)
    blocks = 8 if problem.acc == "float64" else of_four if unroll(problem, width) == 4 else 12
    words = unroll(problem, width) * words_of(problem, width)
    addresses = 0 if all(is_flat(o, problem.sizes) for o in problem.full_outputs) else 24
    addresses += 6 * apart if apart > 2 and width > 4 else 0
    return min(blocks, 65536 // (BLOCK * (24 + -(-words // 8) * 8 + addresses)))


def _min_blocks_text(problem: Problem, width: int) -> list[str]:
    """Compilers for Blackwell want 72 registers for four vectors of eight elements that have an offset each,
    and spill with fewer."""
    blocks = min_blocks(problem, width)
    usual = definitions(MIN_BLOCKS=blocks)
    if unroll(problem, width) < 4 or width < 8 or not gathers(problem, width):
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


def _reduction_text(problem: Problem, rows: Reduction, geometry: Geometry, width: int, staying: int = 0
                    ) -> tuple[list[str], list[str]]:
    lanes, values = n_lanes(problem, rows, width), accumulators.groups(problem)
    unroll, min_blocks = reduction_unroll(problem, rows, width, staying)
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
