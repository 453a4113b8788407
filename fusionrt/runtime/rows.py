"""CUDA text for a problem over rows: what kernels_src/rows.cu asks of its prologue."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusionrt.expr import Expr, argument
from fusionrt.graph import emit, substitute, toposort
from fusionrt.problem import Operand, Problem
from fusionrt.rowwise import Found, Pass, is_total, schedule, with_sums
from fusionrt.runtime import accumulators, pointwise
from fusionrt.runtime.carried import carried
from fusionrt.runtime.geometry import INDEX_LIMIT, Geometry
from fusionrt.runtime.row_choice import layout
from fusionrt.runtime.row_layout import (
    Layout,
    asks_every,
    has_weights_at_once,
    in_stages,
    operand_bytes,
    stage_bytes,
)
from fusionrt.runtime.row_operands import (
    access_mode,
    along_rows,
    columns,
    held,
    is_ragged,
    n_rows,
    segment_sums,
    sums,
    weights,
    width,
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
)
from fusionrt.texts import Texts

Values = tuple[str | int, ...]
_texts = Texts()
ARRAY = "acc_t (&{})[VALUES ? VALUES : 1]"
INLINE = "__device__ __forceinline__"


def generate(problem: Problem, alignment: int) -> Specialisation:
    """The whole translation unit; where an architecture has clusters, its layout may differ."""
    return RowsText(problem, alignment).source()


class RowsText:
    """A problem's operands and passes, and the text of each thing that the template asks for."""

    def __init__(self, problem: Problem, alignment: int) -> None:
        self.problem, self.alignment = problem, alignment
        self.pack, self.ragged = width(problem, alignment), is_ragged(problem, alignment)
        self.modes = {o: access_mode(o, problem, self.pack, self.ragged)
                      for o in (*problem.inputs, *problem.outputs)}
        self.sums = {k: i for i, k in enumerate(sums(problem))}
        self.segments = {k: i for i, k in enumerate(segment_sums(problem))}
        self.stored = problem.full
        self.totals = [k for k in self.stored if is_total(problem.roots[k])]
        self.roots = with_sums(problem.roots)
        self.passes = schedule(self.roots)
        self.carried = carried(self.passes, self.roots)
        self.first: dict[Found, int] = {}  # the place of its first value
        self.values = 0
        for found in (f for p in self.passes for f in p.found):
            self.first[found] = self.values
            self.values += len(found.values)
        made = layout(problem, alignment, True)
        self.ahead, self.row = made.ahead, in_stages(problem, made)
        self.late = [o for o in held(problem) if o not in self.row]
        at_once = all(has_weights_at_once(problem, layout(problem, alignment, c)) for c in (True, False))
        self.at_once = weights(problem) if at_once else []
        self._declare_geometry()

    def _declare_geometry(self) -> None:
        n, sizes = self.problem.row_dims, self.problem.sizes
        operands = [*self.problem.inputs, *(self.problem.outputs[k] for k in self.stored)]
        of_segments = [self.problem.outputs[k] for k in self.segments][:1]  # they lie alike
        self.inner = {o: o._replace(strides=o.strides[:n]) for o in (*operands, *of_segments)}
        self.outer = {o: o._replace(strides=o.strides[n:]) for o in operands}
        reach = max(sum((size - 1) * step for size, step in zip(sizes, o.strides, strict=False))
                    for o in self.inner.values())
        wide = max(reach, columns(self.problem)) >= INDEX_LIMIT
        self.of_columns = Geometry(sizes[:n], wide, "c")
        self.of_rows = Geometry(sizes[n:], n_rows(self.problem) >= INDEX_LIMIT, "r", wide_strides=True)
        self.of_columns.declare([inner for o, inner in self.inner.items() if self.modes[o] != "row"])
        self.of_rows.declare(list(self.outer.values()))
        self.of_columns.index("columns", columns(self.problem))
        self.of_columns.index("span", "span")

    # -- the whole -------------------------------------------------------------------------------

    def source(self) -> Specialisation:
        if n_rows(self.problem) >= 1 << 32:
            raise ValueError(f"{self.problem.name}: a GPU takes less than 2^32 rows, got "
                             f"{n_rows(self.problem)}; call it on parts")
        fields = self._fields()
        params = Params([field for field, _ in fields])
        constants = self._layouts()
        text = _texts.text(self._form(params, constants), lambda: self._written(params, constants))
        return Specialisation(text, "rows", params, tuple(values for _, values in fields))

    def _form(self, params: Params, constants: Sequence[str]) -> tuple[Any, ...]:
        """All that the text depends on. Of sizes and strides that is what these say, how many there are, and
        whether a stride is 0 or 1."""
        problem, chosen = self.problem, (self.row, self.late, self.at_once, weights(self.problem))
        operands = tuple((o.name, o.dtype, self.modes[o], tuple(min(s, 2) for s in o.strides))
                         for o in (*problem.inputs, *problem.outputs))
        return (problem.roots, problem.reduced, problem.acc, problem.streams, problem.scalars,
                problem.row_dims, operands, tuple(tuple(o.name for o in some) for some in chosen),
                *self.sums, "segments", *self.segments, self.pack, self.ragged, self.ahead, *constants,
                params.declaration, self._is_wide, self.of_rows.wide)

    @property
    def _is_wide(self) -> bool:
        return self.problem.domain.numel >= INDEX_LIMIT

    @property
    def _reads_first(self) -> bool:
        """Whether loads are plain ones, as where rows are in registers and have at most one weight: few rows
        take 2 to 5 % less. With weight and bias they take 2 to 7 % more in float32; ragged ones 2 %, at most
        a quarter."""
        layouts = [layout(self.problem, self.alignment, clusters) for clusters in (True, False)]
        return (all(made.kind == "registers" and not made.persistent for made in layouts)
                and len(weights(self.problem)) < 2 and not self.ragged)

    def _written(self, params: Params, constants: Sequence[str]) -> str:
        moments = any(f.kind == "moments" for f in self.first)
        of_prelude = arithmetic(self.problem.acc, self.problem.significant_bits, self._reads_first)
        return assemble("rows", of_prelude, [
            *definitions(column_t=self.of_columns.index_t,
                         index_t="unsigned long long" if self._is_wide else "unsigned"), params.declaration,
            *definitions(VEC=self.pack, PASSES=len(self.passes), VALUES=self.values, SUMS=len(self.sums),
                         SEGMENT_SUMS=len(self.segments), TOTALS=len(self._sums_of_all()),
                         CARRIED=len(self.carried), REGISTERS=0, STAGED=1, STREAMED=2,
                         FINDS_MOMENTS=moments, WEIGHTED=bool(weights(self.problem)), RAGGED=self.ragged),
            *constants,
            *pointwise.draws_text(self.problem), *self._row(), *self._tile(), *self._elements(),
            *self._reductions(), *self._store_row(), *self._of_totals(), *self._segment_of()])

    def _fields(self) -> list[tuple[Field, Values]]:
        problem = self.problem
        fields: list[tuple[Field, Values]] = [
            (pointer(f"{o.dtype}_t", o.name), (o.name,)) for o in problem.inputs]
        fields += [(pointer(f"{o.dtype}_t", o.name, const=False), (o.name,))
                   for o in (problem.outputs[k] for k in self.stored)]
        fields += [(pointer("acc_t", "partials", const=False), ("partials",)),
                   (Field("unsigned long long chunks", U64), ("chunks",))] if self.sums else []
        fields += [(pointer("acc_t", "partials", const=False), ("partials",)),
                   (Field("unsigned segments", "I"), ("segments",))] if self.segments else []
        fields += [(pointer("unsigned", "arrived", const=False), ("arrived",))] if self.totals else []
        fields += pointwise.random_fields(problem)
        fields += scalar_fields(problem)
        fields += [*self.of_columns.fields, *self.of_rows.fields,
                   (Field("unsigned rows", "I"), (n_rows(problem),)), (Field("int early", "i"), ("early",))]
        fields += [(Field("unsigned ahead", "I"), ("ahead",))] if self.ahead else []
        return sorted(fields, key=lambda f: -struct.calcsize("=" + f[0].format[0]))

    def _layouts(self) -> list[str]:
        """The constants that depend on the layout."""
        hopper, older = (layout(self.problem, self.alignment, clusters) for clusters in (True, False))
        if hopper == older:
            return self._constants(hopper)
        return ["#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200", *self._constants(hopper), "#else",
                *self._constants(older), "#endif"]

    def _constants(self, made: Layout) -> list[str]:
        lines = definitions(
            KIND=made.kind.upper(), THREADS=made.threads, ROWS=made.rows, BLOCK=made.block, PACKS=made.packs,
            CLUSTER=made.cluster, BLOCKS_A_ROW=made.blocks_a_row, TURNS=made.turns,
            STAGES=max(1, made.stages), MIN_BLOCKS=made.blocks, PART=made.part or made.packs,
            PERSISTENT=made.persistent, MOVED=made.moved, OVERLAPS=made.overlaps,
            WEIGHTS_STAGED=made.weights, CARRIES=made.carries, LATE=made.late,
            STAGE_BYTES=stage_bytes(self.problem, made), ASKS_EVERY=asks_every(self.problem, made),
            WEIGHTS_IN=self._weights_in())
        for together in (self.row, weights(self.problem)):
            at = 0
            for o in together:
                lines += definitions(**{f"{o.name}_AT": at})
                at += operand_bytes(o, self.problem, made)
        return lines

    def _weights_in(self) -> int:
        """The first pass that reads weights."""
        names = {o.name for o in weights(self.problem)}
        for k, one in enumerate(self.passes):
            roots = [f.operand for f in one.found] + [self.roots[j] for j in one.outputs]
            if names & {str(n.args[0]) for n in toposort(roots) if n.op == "arg"}:
                return k
        return 0

    # -- a row -----------------------------------------------------------------------------------

    def _row(self) -> list[str]:
        """`Row`: where it begins in each operand, its uniform operands; `load_row`, `taken_*`, and what the
        copy engine is asked for."""
        inputs = [o for o in self.problem.inputs if self.modes[o] != "row"]
        uniform = [o for o in self.problem.inputs if self.modes[o] == "row"]
        outputs = [self.problem.outputs[k] for k in self.stored]
        place = {o: f"p.{o.name} + ({self.of_rows.offset(self.outer[o])})" for o in self.outer}
        coordinates = ["    " + line for line in self.of_rows.coordinates("r")]
        of_pack = along_rows(self.problem)[0] if self.ragged else None
        lines = ["struct Row {", "    index_t begin;", *["    column_t head;"] * self.ragged,
                 *(f"    const {o.dtype}_t* {o.name};" for o in inputs),
                 *(f"    {o.dtype}_t* {o.name};" for o in outputs),
                 *(f"    acc_t {o.name};" for o in uniform), "};",
                 f"{INLINE} Row load_row(const Params& p, unsigned r) {{", "    Row row;",
                 "    row.begin = static_cast<index_t>(r) * p.columns;", *coordinates,
                 *(f"    row.{o.name} = {place[o]};" for o in (*inputs, *outputs)),
                 *([] if of_pack is None else [f"    row.head = until_pack<VEC>(row.{of_pack.name});"]),
                 *(f"    row.{o.name} = to_acc(load_pack<1>({place[o]}).data[0]);" for o in uniform),
                 "    return row;", "}",
                 *self._copies(place, coordinates)]
        taken = {str(t.args[0].args[0]) for t in toposort(self.roots)
                 if t.op == "taken" and isinstance(t.args[0], Expr)}
        return lines + [line for o in inputs if o.name in taken for line in self._taken(o)]

    def _copies(self, place: Mapping[Operand, str], coordinates: Sequence[str]) -> list[str]:
        """`fetch` of a row, `fetch_ahead`, `fetch_weights`, and `find_weights`, which has them read in shared
        memory."""

        def copies(operands: Sequence[Operand], to: str, begin: Mapping[Operand, str]) -> list[str]:
            return [f"    expect(full, count * {sum(ITEMSIZE[o.dtype] for o in operands)});",
                    "    if (!count) return;",
                    *(f"    copy_bulk({to} + {o.name}_AT, {begin[o]} + first, count * {ITEMSIZE[o.dtype]}, "
                      "full);" for o in operands), "}"]

        of_columns, count = weights(self.problem), "    const column_t count = first < end ? end - first : 0;"
        return [f"{INLINE} void fetch(const Params& p, unsigned r, column_t first, column_t end,",
                "        char* stage, Barrier* full) {", *coordinates, count,
                *(f"    if (count) prefetch_bulk({place[o]} + first, count * {ITEMSIZE[o.dtype]});"
                  for o in self.late),
                *copies(self.row, "stage", place),
                f"{INLINE} void fetch_ahead(const Params& p, unsigned r, column_t first, column_t end) {{",
                *(self._asked(place, coordinates) if self.ahead else []), "}",
                f"{INLINE} void fetch_weights(const Params& p, column_t first, column_t end, char* memory,",
                "        Barrier* full) {", count,
                *copies(of_columns, "memory", {o: f"p.{o.name}" for o in of_columns}),
                f"{INLINE} void find_weights(Row& row, column_t first, const char* memory) {{",
                *(f"    row.{o.name} = reinterpret_cast<const {o.dtype}_t*>(memory + {o.name}_AT) - first;"
                  for o in of_columns), "}"]

    def _asked(self, place: Mapping[Operand, str], coordinates: Sequence[str]) -> list[str]:
        return ["    if (p.rows - r <= p.ahead || first >= end) return;", "    r += p.ahead;", *coordinates,
                *(f"    prefetch_bulk({place[o]} + first, (end - first) * {ITEMSIZE[o.dtype]});"
                  for o in self.row)]

    def _taken(self, operand: Operand) -> list[str]:
        return [f"{INLINE} acc_t taken_{operand.name}(const Params& p, const Row& row, acc_t at) {{",
                "    if (!(at >= acc_t(0) && at < static_cast<acc_t>(p.columns))) return acc_t(0);",
                "    const column_t column = static_cast<column_t>(at);",
                *("    " + line for line in self.of_columns.coordinates("column")),
                f"    return to_acc(load_pack<1>(row.{operand.name} + "
                f"({self.of_columns.offset(self.inner[operand])})).data[0]);", "}"]

    def _store_row(self) -> list[str]:
        stored = [k for k in self.stored
                  if self.modes[self.problem.outputs[k]] == "row" and k not in self.totals]
        roots = [self.roots[k] for k in stored]
        statements, results = emit(roots, "const auto {} = {};", self._at_hand(roots))
        values = ARRAY.format("values")
        return [f"{INLINE} void store_row(const Params& p, const Row& row, const {values}) {{",
                *("    " + line for line in statements),
                *(f"    *row.{self.problem.outputs[k].name} = "
                  f"from_acc<{self.problem.outputs[k].dtype}_t>({result});"
                  for k, result in zip(stored, results, strict=True)), "}"]

    def _sums_of_all(self) -> list[Expr]:
        return [n for n in toposort([self.roots[k] for k in self.totals]) if n.op == "total"]

    def _of_totals(self) -> list[str]:
        """`add_row` and `store_totals`, see rows_totals.cuh. What has one value a row is read anew: outputs,
        which other blocks have stored, not through the read-only path."""
        if not self.totals:
            return []
        found, roots = self._sums_of_all(), [self.roots[k] for k in self.totals]
        one_a_row = [k for k in self.stored if self.modes[self.problem.outputs[k]] == "row"]
        stored = {self.roots[k]: argument(self.problem.outputs[k].name, True)
                  for k in one_a_row if k not in self.totals}
        operands = substitute([n.args[0] for n in found if isinstance(n.args[0], Expr)], stored)
        read = {str(n.args[0]) for n in toposort(operands) if n.op == "arg"}
        place = {o: f"p.{o.name} + ({self.of_rows.offset(self.outer[o])})" for o in self.outer}
        reads = [f"const acc_t {o.name} = to_acc({load}<1>({place[o]}).data[0]);"
                 for load, each in (("load_pack", self.problem.inputs), ("fresh_pack", self.problem.outputs))
                 for o in each if o.name in read]
        names = {n: name.removeprefix("row.") for n, name in self._at_hand(operands).items()}
        each_row, terms = emit(operands, "const auto {} = {};", names)
        known = self._at_hand(roots) | {n: f"sums[{i}]" for i, n in enumerate(found)}
        in_the_end, results = emit(roots, "const auto {} = {};", known)
        outputs, sums = [self.problem.outputs[k] for k in self.totals], f"acc_t (&sums)[{len(found)}]"
        return [f"{INLINE} void add_row(const Params& p, unsigned r, {sums}) {{",
                *("    " + line for line in (*self.of_rows.coordinates("r"), *reads, *each_row)),
                *(f"    sums[{i}] += {term};" for i, term in enumerate(terms)), "}",
                f"{INLINE} void store_totals(const Params& p, const {sums}) {{",
                *("    " + line for line in in_the_end),
                *(f"    *p.{o.name} = from_acc<{o.dtype}_t>({result});"
                  for o, result in zip(outputs, results, strict=True)), "}"]

    def _segment_of(self) -> list[str]:
        """That of a column, which is its place in the sums of a row's."""
        if not self.segments:
            return []
        operand = self.inner[self.problem.outputs[min(self.segments)]]
        return [f"{INLINE} unsigned segment_of(const Params& p, column_t column) {{",
                *("    " + line for line in self.of_columns.coordinates("column")),
                f"    return {self.of_columns.offset(operand)};", "}"]

    # -- columns ---------------------------------------------------------------------------------

    def _tile(self) -> list[str]:
        """`Tile`: what changes from row to row; how it is read, from either memory, some of it late, and
        `hide`, which makes the compiler forget it. Weights are read where they are used: they stay in the
        cache, or in shared memory; or, `at_once`, together with the row."""
        modes = {o: self.modes[o] for o in (*self.row, *self.late, *self.at_once)}
        head = "template <int W> " + INLINE
        staged = [f"    tile.{o.name} = shared_pack<W>(reinterpret_cast<const {o.dtype}_t*>"
                  f"(stage + {o.name}_AT) + within);" for o in self.row if modes[o] == "vector"]
        return ["template <int W> struct Tile {",
                *(f"    {_pack(o, mode)} {o.name};" for o, mode in modes.items()), "};",
                f"{head} Tile<W> load_tile(const Params& p, const Row& row, column_t column) {{",
                "    Tile<W> tile;", *self._reads(modes, "tile.{}"), "    return tile;", "}",
                f"{head} Tile<W> staged_tile(const char* stage, column_t within) {{", "    Tile<W> tile;",
                *staged, "    return tile;", "}",
                f"{head} void load_late(const Params& p, const Row& row, column_t column, Tile<W>& tile) {{",
                *self._reads({o: modes[o] for o in self.late}, "tile.{}"), "}",
                f"{head} void hide(Tile<W>& tile) {{",
                *(f"    hide_pack(tile.{o.name});" for o in modes), "}"]

    def _reads(self, modes: Mapping[Operand, str], form: str, load: str = "load_pack<{}>") -> list[str]:
        body: list[str] = []
        packed = {o: mode for o, mode in modes.items() if mode != "gather"}
        gathered = [o for o, mode in modes.items() if mode == "gather"]
        if packed:
            body += self.of_columns.coordinates("column")
        body += [f"{form.format(o.name)} = {load.format('1' if mode == 'splat' else 'W')}"
                 f"(row.{o.name} + ({self.of_columns.offset(self.inner[o])}));" for o, mode in packed.items()]
        if gathered:
            body += self._each_column([
                f"{form.format(o.name)}.data[v] = load_pack<1>(row.{o.name} + "
                f"({self.of_columns.offset(self.inner[o])})).data[0];" for o in gathered])
        return ["    " + line for line in body]

    def _writes(self, outputs: Iterable[Operand]) -> list[str]:
        packed = [o for o in outputs if self.modes[o] == "vector"]
        scattered = [o for o in outputs if self.modes[o] != "vector"]
        lines = ["{", *("    " + line for line in self.of_columns.coordinates("column")),
                 *(f"    store_pack(row.{o.name} + ({self.of_columns.offset(self.inner[o])}), {o.name});"
                   for o in packed), "}"] if packed else []
        return lines + (self._each_column([
            f"row.{o.name}[{self.of_columns.offset(self.inner[o])}] = from_acc<{o.dtype}_t>({o.name}[v]);"
            for o in scattered]) if scattered else [])

    def _each_column(self, body: Sequence[str]) -> list[str]:
        return ["#pragma unroll", "for (int v = 0; v < W; ++v) {",
                *("    " + line for line in (*self.of_columns.coordinates("(column + v)"), *body)), "}"]

    # -- passes ----------------------------------------------------------------------------------

    def _elements(self) -> list[str]:
        known = ["#define taken(operand, at) taken_##operand(p, row, at)",
                 "template <int PASS> struct Known;"]
        lines = ["#define is_column(at) (static_cast<int>(at) == static_cast<int>(column) + v)",
                 "#define up_to_column(at) (static_cast<int>(column) + v <= static_cast<int>(at))",
                 f"template <int PASS, int W> {INLINE} void element(const Params& p, const Row& row,",
                 "        const Known<PASS>& known, column_t column, const Tile<W>& tile,",
                 "        acc_t (&found)[VALUES ? VALUES : 1][W],",
                 "        acc_t (&carried)[CARRIED ? CARRIED : 1][W], acc_t (&sums)[SUMS ? SUMS : 1][W],",
                 "        acc_t (&of_segments)[SEGMENT_SUMS ? SEGMENT_SUMS : 1]) {"]
        for k, one in enumerate(self.passes):
            written = [j for j in one.outputs
                       if self.modes[self.problem.outputs[j]] != "row" or self.problem.reduced[j]]
            roots = [f.operand for f in one.found] + [self.roots[j] for j in written]
            leaves = {n: i for i, (n, left) in enumerate(self.carried.items()) if left == k}
            finds = {n: f"carried[{i}][v]" for i, (n, left) in enumerate(self.carried.items()) if left < k}
            names, uniform = self._known(roots, k)
            known += uniform
            body = self._pass(one, written, roots, names, leaves) if roots else []
            if body and finds:
                shorter = self._pass(one, written, roots, names | finds, leaves)
                body = ["if constexpr (CARRIES) {", *("    " + line for line in shorter), "} else {",
                        *("    " + line for line in body), "}"]
            lines += [f"    {'if' if k == 0 else 'else if'} constexpr (PASS == {k}) {{",
                      *("        " + line for line in body), "    }"]
        return [*known, *lines, "}"]

    def _at_hand(self, roots: Sequence[Expr]) -> dict[Expr, str]:
        """Names of what is there before a column is looked at: values found, uniform operands, numbers."""
        names = {node: name for f, first in self.first.items() for node, name in f.names(first).items()}
        uniform = {o.name: f"row.{o.name}" for o in self.problem.inputs if self.modes[o] == "row"}
        uniform |= {name: f"p.{name}" for name in self.problem.scalars}
        for n in toposort(roots, names):
            if n.op == "arg" and str(n.args[0]) in uniform:
                names[n] = uniform[str(n.args[0])]
            elif n.op == "row_size":
                names[n] = "acc_t(p.columns)"
        return names

    def _known(self, roots: Sequence[Expr], k: int) -> tuple[dict[Expr, str], list[str]]:
        """Names of the uniform expressions that elements of pass k use, and the text that computes them."""
        names = self._at_hand(roots)
        elements = [n for n in toposort(roots, names) if not n.uniform]
        border = dict.fromkeys(a for n in (*elements, *roots) for a in (*n.args, n)
                               if isinstance(a, Expr) and (a.uniform or a in names) and a.op != "const")
        statements, results = emit(list(border), "const auto {} = {};", names)
        members = (f"{'bool' if n.is_truth else 'acc_t'} u{i};" for i, n in enumerate(border))
        return {n: f"known.u{i}" for i, n in enumerate(border)}, [
            f"template <> struct Known<{k}> {{ {' '.join(members)} }};",
            f"{INLINE} void know(const Params& p, const Row& row, const {ARRAY.format('values')}, "
            f"Known<{k}>& known) {{", *("    " + line for line in statements),
            *(f"    known.u{i} = {result};" for i, result in enumerate(results)), "}"]

    def _pass(self, one: Pass, written: Sequence[int], roots: Sequence[Expr], names: Mapping[Expr, str],
              leaves: Mapping[Expr, int]) -> list[str]:
        """What one pass does with W columns; `leaves`: the values, and their places, for later passes."""
        needed = toposort(roots, names)
        used = {str(n.args[0]) for n in needed if n.op == "arg"}
        inputs = [o for o in self.problem.inputs if o.name in used and self.modes[o] != "row"]
        of_columns = {o: self.modes[o] for o in inputs
                      if o in weights(self.problem) and o not in self.at_once}
        full = [self.problem.outputs[k] for k in written if k in self.stored]
        lines = [*(f"{_pack(o, mode)} {o.name}_pack;" for o, mode in of_columns.items()),
                 *self._reads(of_columns, "{}_pack", "pack_in<WEIGHTS_STAGED, {}>"),
                 *(f"acc_t {o.name}[W];" for o in full)]
        streams = [str(n.args[0]) for n in needed if n.op == "random"]
        if streams:
            lines.append("const Draws<W> drawn = draws<W>(p, row.begin + column);")
        body = [f"const acc_t {o.name} = at({f'{o.name}_pack' if o in of_columns else f'tile.{o.name}'}, "
                f"{'0' if self.modes[o] == 'splat' else 'v'});" for o in inputs]
        body += [f"const Lane {s} = drawn.{s}[v];" for s in streams]
        statements, results = emit([*roots, *leaves], "const auto {} = {};", names)
        body += statements
        body += [f"found[{self.first[f]}][v] = {result};"
                 for f, result in zip(one.found, results, strict=False)]
        body += [f"sums[{self.sums[k]}][v] += {result};" if k in self.sums else
                 f"of_segments[{self.segments[k]}] += {result};" if k in self.segments else
                 f"{self.problem.outputs[k].name}[v] = {result};"
                 for k, result in zip(written, results[len(one.found):], strict=False)]
        body += [f"carried[{i}][v] = {result};"
                 for i, result in zip(leaves.values(), results[len(roots):], strict=True)]
        return [*lines, "#pragma unroll", "for (int v = 0; v < W; ++v) {",
                *("    " + line for line in body), "}", *self._writes(full)]

    def _reductions(self) -> list[str]:
        """What each pass does with its values."""
        bodies: dict[str, list[str]] = {"identity": [], "collect": [], "join_lanes": []}
        lines, first = ["template <int PASS> struct Values;"], 0
        for k, one in enumerate(self.passes):
            count = sum(len(f.values) for f in one.found)
            adds = str(not self.segments.keys().isdisjoint(one.outputs)).lower()
            lines.append(f"template <> struct Values<{k}> {{ static constexpr int FIRST = {first}, "
                         f"COUNT = {count}; static constexpr bool ADDS_TO_SEGMENTS = {adds}; }};")
            first += count
            made: dict[str, list[str]] = {name: [] for name in bodies}
            for f in one.found:
                at = range(self.first[f], self.first[f] + len(f.values))
                mine = ", ".join(f"values[{i}]" for i in at)
                made["identity"] += [f"values[{i}] = {start};"
                                     for i, start in zip(at, accumulators.START[f.kind], strict=True)]
                made["collect"].append(f"collect_first<VEC, THREADS * VEC>({mine}, found[{at[0]}], column);"
                                       if f.kind == "first" else f"collect_{f.kind}({mine}, found[{at[0]}]);")
                made["join_lanes"].append(f"join_lanes_{f.kind}<N>({mine});")
            for name, body in made.items():
                bodies[name].append(f"    if constexpr (PASS == {k}) {{ {' '.join(body)} }}")
        values = ARRAY.format("values")
        return [*lines, f"template <int PASS> {INLINE} void identity({values}) {{", *bodies["identity"], "}",
                f"template <int PASS, int W> {INLINE} void collect({values}, "
                "const acc_t (&found)[VALUES ? VALUES : 1][W], column_t column) {", *bodies["collect"], "}",
                f"template <int PASS, int N> {INLINE} void join_lanes({values}) {{",
                *bodies["join_lanes"], "}"]


def _pack(operand: Operand, mode: str) -> str:
    return f"Pack<{operand.dtype}_t, {'1' if mode == 'splat' else 'W'}>"
