"""CUDA text for what a reduction over any dimensions finds: its values, how two are joined, what follows
from them.

A problem with reduced outputs finds one sum for each; one whose rows lie across memory finds what the one
pass of its row expressions asks for, in groups: a sum, a maximum, the first maximum (and its position), a
softmax's (maximum, sum), or the moments (count, what the mean lost to rounding, mean, sum of squares about
it).
"""

from collections.abc import Sequence
from typing import NamedTuple

from fusionrt.expr import Expr
from fusionrt.graph import emit
from fusionrt.problem import Operand, Problem
from fusionrt.rowwise import Found, schedule
from fusionrt.runtime.device import MULTIPROCESSORS
from fusionrt.runtime.source import U64, Field, Params, definitions, members, pointer, scalar_fields

COUNT = {"sum": 1, "max": 1, "first": 2, "softmax": 2, "moments": 4}
START = {"sum": ("0",), "max": ("-acc_t(inf)",), "first": ("-acc_t(inf)", "0"),
         "softmax": ("-acc_t(inf)", "0"), "moments": ("0",) * 4}
BLOCK, COLUMNS = 512, 16  # of a kernel that joins partial values: threads, columns at most
SUMS = 4                  # that one launch of sum_partials adds at most


class Group(NamedTuple):
    """Values that are found together: the first one's place, and the operand of which they are."""

    kind: str
    operand: Expr
    first: int

    @property
    def places(self) -> range:
        return range(self.first, self.first + COUNT[self.kind])


def sum_fields(acc: str, out: str) -> list[Field]:
    """Parameters of sum_partials; `out` are SUMS addresses."""
    return [pointer(acc, "partials"), Field(f"{out}* out[{SUMS}]", U64 * SUMS),
            *members("unsigned long long", "chunks", "kept"), *members("int", "side")]


def outs(*addresses: int) -> list[int]:
    return [*addresses, *(0,) * (SUMS - len(addresses))]


def groups(problem: Problem) -> list[Group]:
    if problem.across:
        found: Sequence[Found] = schedule(problem.roots)[0].found
        asked = [(f.kind, f.operand) for f in found]
    else:
        asked = [
            ("sum", root) for root, reduced in zip(problem.roots, problem.reduced, strict=True) if reduced
        ]
    made: list[Group] = []
    for kind, operand in asked:
        made.append(Group(kind, operand, made[-1].places.stop if made else 0))
    return made


def n_values(found: Sequence[Group]) -> int:
    return found[-1].places.stop


def declarations(found: Sequence[Group]) -> list[str]:
    """`VALUES`, `Group`, `start`, `join`: see pointwise_reduce.cu."""
    values = n_values(found)
    lines = [
        *definitions(VALUES=values, GROUPS=len(found), MOST=max(COUNT[g.kind] for g in found)),
        "template <int G> struct Group;",
    ]
    lines += [
        f"template <> struct Group<{k}> {{ static constexpr int FIRST = {g.first}, "
        f"COUNT = {COUNT[g.kind]}; }};"
        for k, g in enumerate(found)
    ]
    starts = [
        f"values[{k}][v] = {start};" for g in found for k, start in zip(g.places, START[g.kind], strict=True)
    ]
    lines += _start(starts)
    lines += [
        "template <int G> __device__ __forceinline__ void join(acc_t (&mine)[VALUES], "
        "const acc_t (&other)[VALUES]) {"
    ]
    for k, g in enumerate(found):
        operands = ", ".join(f"{array}[{place}]" for array in ("mine", "other") for place in g.places)
        lines.append(f"    if constexpr (G == {k}) combine_{g.kind}({operands});")
    return [*lines, "}"]


def _start(body: Sequence[str]) -> list[str]:
    """A function on every lane's values."""
    return ["template <int W> __device__ __forceinline__ void start(acc_t (&values)[VALUES][W]) {",
            "#pragma unroll", f"    for (int v = 0; v < W; ++v) {{ {' '.join(body)} }}", "}"]


def takes(found: Sequence[Group]) -> list[str]:
    """`take`: N elements of each of W columns. Columns that are reduced as well are neighbours in a row."""
    lines = [
        "template <int N, int W> __device__ __forceinline__ void take(acc_t (&values)[VALUES][W], "
        "const acc_t (&found)[N][GROUPS][W], const Order& order) {",
        "#pragma unroll",
        "    for (int v = 0; v < W; ++v) {",
        "        const Order mine = {order.before, order.at + (COLUMNS_KEPT ? 0 : v), order.apart};",
    ]
    for k, g in enumerate(found):
        lines += [
            f"        acc_t x{k}[N];",
            "#pragma unroll",
            f"        for (int n = 0; n < N; ++n) x{k}[n] = found[n][{k}][v];",
            f"        take_{g.kind}({', '.join(f'values[{i}][v]' for i in g.places)}, x{k}, mine);",
        ]
    return [*lines, "    }", "}"]


def side(kept: int, chunks: int, alone: bool = False) -> int:
    """Columns that a block joins, as a power of two: few, that there are blocks enough for a large GPU, fewer
    of one sum `alone`; but not so few that threads have no row, where there are few rows."""
    columns = min(COLUMNS // 2 if alone else COLUMNS, max(1, kept // MULTIPROCESSORS))
    return max(columns.bit_length() - 1, (BLOCK // chunks).bit_length() - 1 if chunks < BLOCK else 0)


def blocks(kept: int, chunks: int, alone: bool = False) -> int:
    return -(-kept >> side(kept, chunks, alone))


def joining(problem: Problem) -> tuple[Params, tuple[tuple[str | int, ...], ...], list[str]]:
    """Parameters, their values and functions of the kernel that joins partial values."""
    fields = [
        (pointer("acc_t", "partials"), ("partials",)),
        *((pointer(f"{o.dtype}_t", o.name, const=False), (o.name,)) for o in problem.outputs),
        (Field("unsigned long long chunks", U64), ("chunks",)),
        (Field("unsigned long long kept", U64), ("kept",)),
        *scalar_fields(problem),
        (Field("int side", "i"), ("side",)),
    ]
    params = Params([field for field, _ in fields])
    text = [
        *definitions(index_t="unsigned long long", BLOCK=BLOCK, INNER=problem.inner),
        params.declaration,
        *declarations(groups(problem)),
        *storing(problem),
    ]
    return params, tuple(values for _, values in fields), text


def _stored(output: Operand, problem: Problem, result: str) -> str:
    """One value; or as many as the row has columns, of an output that has those."""
    value = f"from_acc<{output.dtype}_t>({result})"
    if problem.inner == 1 or output.name in problem.once:
        return f"    p.{output.name}[n] = {value};"
    n = problem.inner
    return f"    for (int v = 0; v < {n}; ++v) p.{output.name}[n * {n} + v] = {value};"


def storing(problem: Problem) -> list[str]:
    """`store`: the outputs that follow from values; of sums those themselves."""
    if problem.across:
        found = groups(problem)
        names: dict[Expr, str] = {}
        for g, f in zip(found, schedule(problem.roots)[0].found, strict=True):
            names |= f.names(g.first)
        statements, results = emit(problem.roots, "const auto {} = {};", names)
        outputs = list(problem.outputs)
    else:
        outputs = problem.sums
        statements, results = [], [f"values[{k}]" for k in range(len(outputs))]
    return [
        "__device__ __forceinline__ void store(const Params& p, index_t n, const acc_t (&values)[VALUES]) {",
        *(f"    const acc_t {name} = p.{name};" for name in problem.scalars),
        *("    " + line for line in statements),
        *(
            _stored(o, problem, result) for o, result in zip(outputs, results, strict=True)
        ),
        "}",
    ]
