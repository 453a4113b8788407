"""CUDA text that reads and writes the operands of a pointwise problem.

How an operand is read depends on how it lies in the domain:
  flat     as the domain is walked: a vector at the linear index
  vector   a vector at an offset computed once per vector (a bias over the last dimension)
  splat    one value for the whole vector (a per-row scale)
  scalar   one value for the whole tensor
  gather   an offset per element (anything else: permuted, strided, odd inner sizes)
  mask     truth values, four to a byte, at the linear index
"""

from collections.abc import Sequence
from typing import NamedTuple

from fusionrt.layout import Reduction
from fusionrt.problem import MASK, Operand, Problem
from fusionrt.runtime.geometry import Geometry, is_flat
from fusionrt.runtime.source import ITEMSIZE, definitions

REDUCE_BLOCK = 256                # threads
AHEAD = 2                         # packs of an operand on their way, more where there is one operand
AHEAD_BYTES, RING_BYTES = 16 << 10, 32 << 10   # of a block's shared memory: on their way, at most


def access_mode(operand: Operand, sizes: Sequence[int], width: int) -> str:
    if operand.dtype == MASK:
        return "mask"
    if is_flat(operand, sizes):
        return "flat"
    if not any(operand.strides):
        return "scalar"
    if width > 1 and sizes[0] % width == 0:
        inner, outer = operand.strides[0], operand.strides[1:]
        if inner == 0:
            return "splat"
        if inner == 1 and all(s % width == 0 for s in outer):
            return "vector"
    return "gather"


Owned = tuple[bool, ...]  # dimensions, innermost first, that a thread's walk has one place in


class Again(NamedTuple):
    """Of the second one of two passes within a kernel: operands that the first one has computed, and those
    that it has kept."""

    fresh: frozenset[str]
    kept: frozenset[str]


def load_text(geometry: Geometry, modes: dict[Operand, str], owned: Owned | None, again: Again | None
              ) -> list[str]:
    """`Tile` and `load`; where a thread walks, `load_fixed` as well, for what it reads only once; in a second
    pass `load_rest`, of what was not kept."""
    members = [f"    Pack<{'bool' if mode == 'mask' else o.dtype}_t, {_lanes(mode)}> {o.name};"
               for o, mode in modes.items()]
    fixed = {o: mode for o, mode in modes.items() if owned is not None and is_fixed(o, owned)}
    varying = {o: mode for o, mode in modes.items() if o not in fixed}
    signature = "template <int W> __device__ __forceinline__ Tile<W> {}(const Params& p, index_t i{}) {{"
    load = [signature.format("load", "" if owned is None else ", const Tile<W>& fixed"),
            "    Tile<W> tile;" if owned is None else "    Tile<W> tile = fixed;",
            *_reads(geometry, varying), "    return tile;", "}"]
    if owned is not None:
        load += [signature.format("load_fixed", ""), "    Tile<W> tile;",
                 *_reads(geometry, fixed, again.fresh if again else frozenset()), "    return tile;", "}"]
    if again is not None:
        rest = {o: mode for o, mode in varying.items() if o.name not in again.kept}
        load += [signature.format("load_rest", ", const Tile<W>& fixed"), "    Tile<W> tile = fixed;",
                 *_reads(geometry, rest), "    return tile;", "}"]
    return ["template <int W> struct Tile {", *members, "};", *load]


def owned(rows: Reduction) -> Owned:
    """Of a thread of a reduction: its columns, unless it walks over several groups of them."""
    owns_columns = rows.keeps_columns and rows.n_groups == 1
    return tuple(owns_columns and kept for kept in rows.pattern)


def is_fixed(operand: Operand, owned: Owned) -> bool:
    """The same for all that one thread sees."""
    return not any(stride for stride, own in zip(operand.strides, owned, strict=True) if not own)


def _lanes(mode: str) -> str:
    return "1" if mode in ("splat", "scalar") else "W"


def _address(geometry: Geometry, operand: Operand, mode: str) -> str:
    """Of the element, or the vector, at `i`."""
    return f"p.{operand.name} + {'i' if mode == 'flat' else f'({geometry.offset(operand)})'}"


def _reads(geometry: Geometry, modes: dict[Operand, str], fresh: frozenset[str] = frozenset()) -> list[str]:
    """Statements that read; with `fresh_pack` what the same kernel has written."""
    def read(o: Operand) -> str:
        return "fresh_pack" if o.name in fresh else "load_pack"

    body: list[str] = []
    if set(modes.values()) & {"vector", "splat"}:
        body += geometry.coordinates("i")
    for o, mode in modes.items():
        if mode == "mask":
            body.append(f"tile.{o.name} = load_mask<W>(p.{o.name}, i);")
        elif mode != "gather":
            body.append(f"tile.{o.name} = {read(o)}<{_lanes(mode)}>({_address(geometry, o, mode)});")
    gathered = [o for o, mode in modes.items() if mode == "gather"]
    if gathered:
        body += ["#pragma unroll", "for (int v = 0; v < W; ++v) {",
                 *("    " + line for line in geometry.coordinates("(i + v)")),
                 *(f"    tile.{o.name}.data[v] = {read(o)}<1>"
                   f"(p.{o.name} + ({geometry.offset(o)})).data[0];" for o in gathered), "}"]
    return ["    " + line for line in body]


def ahead(problem: Problem, modes: dict[Operand, str], width: int) -> int:
    """Packs of an operand that are on their way into shared memory while a thread takes in another one: of
    eight elements (16-bit operands), beside whose sums and special functions registers hold no second one."""
    whole = set(modes.values()) <= {"flat", "vector"}
    if width <= 4 or problem.across or problem.acc == "float64" or not whole:
        return 0
    of_one = REDUCE_BLOCK * width * sum(ITEMSIZE[o.dtype] for o in modes)
    return max(AHEAD, AHEAD_BYTES // of_one) if 0 < AHEAD * of_one <= RING_BYTES else 0


def ahead_text(problem: Problem, modes: dict[Operand, str], rows: Reduction, geometry: Geometry, width: int
               ) -> list[str]:
    """`Ring`, `fetch` and `fetched`: what changes along a thread's walk, by way of shared memory."""
    moving = {o: mode for o, mode in modes.items() if not is_fixed(o, owned(rows))}
    stages = ahead(problem, moving, width)
    moving = moving if stages else {}
    copies = geometry.coordinates("i") if "vector" in moving.values() else []
    copies += [f"copy_pack(ring.{o.name}[stage][threadIdx.x], {_address(geometry, o, mode)});"
               for o, mode in moving.items()]
    return [*definitions(AHEAD=stages),
            "struct Ring {", *(f"    Pack<{o.dtype}_t, VEC> {o.name}[AHEAD][BLOCK];" for o in moving), "};",
            "__device__ __forceinline__ void fetch(const Params& p, index_t i, Ring& ring, int stage) {",
            *("    " + line for line in copies), "}",
            "__device__ __forceinline__",
            "Tile<VEC> fetched(const Ring& ring, int stage, const Tile<VEC>& fixed) {",
            "    Tile<VEC> tile = fixed;",
            *(f"    tile.{o.name} = ring.{o.name}[stage][threadIdx.x];" for o in moving),
            "    return tile;", "}"]


def writes(geometry: Geometry, modes: dict[Operand, str], store: str) -> list[str]:
    """Statements that store what `finish` has computed, one output after the other."""
    body = geometry.coordinates("i") if "vector" in modes.values() else []
    body += [f"store_mask(p.{o.name}, i, {o.name});" if mode == "mask" else
             f"{store}({_address(geometry, o, mode)}, {o.name});"
             for o, mode in modes.items() if mode != "gather"]
    scattered = [o for o, mode in modes.items() if mode == "gather"]
    if scattered:
        body += ["#pragma unroll", "for (int v = 0; v < W; ++v) {",
                 *("    " + line for line in geometry.coordinates("(i + v)"))]
        body += [f"    {{ const acc_t one[1] = {{{o.name}[v]}}; "
                 f"store_pack(p.{o.name} + ({geometry.offset(o)}), one); }}" for o in scattered]
        body.append("}")
    return body
