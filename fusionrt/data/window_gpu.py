"""Rolling windows on a GPU: kernels_src/window.cu, specialised, and launched in its stages."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fusionrt.data.window_rows import Request, Rows
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.source import Field, pointer

BLOCK = 256
RADIX = 16    # the template's
LEVELS = 8    # 16^8 tiles are more than a dimension has
TOTAL, EXTREME, MOMENTS = range(3)
FAMILIES = {"sum": TOTAL, "mean": TOTAL, "min": EXTREME, "max": EXTREME, "var": MOMENTS, "std": MOMENTS}
STATES = (1, 2, 3)    # numbers that a family keeps of a range
WINDOWS, CHUNKS, FOLDS, MIDDLES = range(4)
_MEMBERS = ("chunks", "heads", "folded", "middles")
_SIZES = ("outer", "n", "inner", "outer_step", "step", "results", "tiles", "groups", "chunk_tiles", "span",
          "left", "window", "min_periods")


def accumulated(op: str, dtype: torch.dtype) -> torch.dtype:
    """What the arithmetic is done in: sums of float32 in double, which costs memory-bound kernels nothing."""
    if dtype == torch.float64 or (dtype == torch.float32 and op not in ("min", "max")):
        return torch.float64
    return torch.float32


def items(op: str, dtype: torch.dtype, indexed: bool, lanes: int) -> int:
    """Elements of a thread, as many as registers allow."""
    if FAMILIES[op] == MOMENTS:
        return 4 if lanes == 1 and dtype.itemsize >= 4 else 8
    return 16 if lanes == 32 and dtype != torch.float64 and not indexed else 8


def resident(op: str, dtype: torch.dtype, indexed: bool, lanes: int) -> int:
    """Blocks that share a multiprocessor, at least: one loads while another computes."""
    if indexed and dtype == torch.float64:
        return 1
    if FAMILIES[op] == MOMENTS and dtype.itemsize >= 4 and lanes > 1:
        return 1
    return 3 if lanes == 1 and FAMILIES[op] == TOTAL else 2


def lanes_of(inner: int) -> int:
    """Columns that a block has, a power of two."""
    return min(32, 1 << (inner - 1).bit_length()) if inner > 1 else 1


@functools.cache
def kernel(op: str, dtype: torch.dtype, indexed: bool, lanes: int, stage: int) -> Kernel:
    name = str(dtype).removeprefix("torch.")
    acc = str(accumulated(op, dtype)).removeprefix("torch.")
    flags = {"MEAN": op == "mean", "LARGEST": op == "max", "INDEXED": indexed, "ROOT": op == "std"}
    constants = [
        f"using scalar_t = {name}_t;", "struct State;", f"constexpr int STAGE = {stage};",
        f"constexpr int LANES = {lanes}, ITEMS = {items(op, dtype, indexed, lanes)};",
        f"constexpr int RESIDENT = {resident(op, dtype, indexed, lanes)};",
        *(f"constexpr bool {flag} = {str(on).lower()};" for flag, on in flags.items()),
        f"constexpr int FAMILY = {FAMILIES[op]};"]
    fields = [pointer("scalar_t", "x"), pointer("scalar_t", "out", const=False),
              pointer("int", "index", const=False), *(Field(f"State* {name}", "Q") for name in _MEMBERS),
              Field(f"const State* folds[{LEVELS}]", "Q" * LEVELS),
              *(Field(f"long long {name}", "q") for name in _SIZES), Field("double inverse", "d"),
              Field("double correction", "d"), Field("int segment", "i"), Field("int levels", "i"),
              Field("unsigned stride", "I")]
    return Kernel(f"sliding_window {op}", "window", fields, constants, acc=acc,
                  significant_bits={"bfloat16": 8, "float16": 11, "float32": 24}.get(name, 53), block=BLOCK)


class _Launch:
    """The stages of one call."""

    def __init__(self, request: Request, x: torch.Tensor, rows: Rows, out: torch.Tensor,
                 index: torch.Tensor | None) -> None:
        self.request, self.x, self.rows, self.op = request, x, rows, request.op
        self.lanes = lanes_of(rows.inner)
        self.kernel = functools.partial(kernel, self.op, x.dtype, index is not None, self.lanes)
        self.tile = BLOCK // self.lanes * items(self.op, x.dtype, index is not None, self.lanes)
        # Tiles of a row that is one window begin up to 16 bytes before it.
        shift = 16 // x.element_size() - 1 if self.lanes == 1 and request.stride == 1 else 0
        self.tiles = -(-(request.dense(rows.n) + shift) // self.tile)
        self.values: dict[str, Any] = {
            **dict.fromkeys(_MEMBERS, 0), **rows._asdict(), "x": _address(x), "out": _address(out),
            "index": 0 if index is None else _address(index), "folds": [0] * LEVELS,
            "results": request.results(rows.n), "tiles": self.tiles, "groups": -(-rows.inner // self.lanes),
            "chunk_tiles": 0, "span": 0, "left": request.left, "window": request.window,
            "min_periods": request.min_periods, "inverse": 1 / request.window,
            "correction": request.correction, "segment": min(request.window - 1, self.tile), "levels": 0,
            "stride": request.stride}

    def run(self) -> None:
        kept = self.middles() if self.request.window - 1 > self.tile else None
        self.launch(WINDOWS, self.rows.outer * self.tiles * self.values["groups"])
        del kept  # memory goes back to torch, in the order of the stream

    def launch(self, stage: int, blocks: int, **values: Any) -> None:
        v = {**self.values, **values}
        self.kernel(stage)(self.x.device, blocks, v["x"], v["out"], v["index"], *(v[m] for m in _MEMBERS),
                           *v["folds"], *(v[s] for s in _SIZES), v["inverse"], v["correction"], v["segment"],
                           v["levels"], v["stride"])

    def middles(self) -> list[torch.Tensor]:
        """What all windows of a tile have beyond it, before their ends."""
        rows, outer_inner = self.rows, self.rows.outer * self.rows.inner
        span, head = divmod(self.request.window - 1 - self.tile, self.tile)
        chunk_tiles = self.tiles + span + 1
        kept = [self.states(outer_inner * chunk_tiles) for _ in range(2)]
        self.values |= {"chunk_tiles": chunk_tiles, "chunks": _address(kept[0]), "heads": _address(kept[1])}
        self.launch(CHUNKS, rows.outer * chunk_tiles * self.values["groups"], tiles=chunk_tiles, segment=head)
        levels = [kept[0]]
        while RADIX ** len(levels) <= span:
            levels.append(self.states(outer_inner * chunk_tiles))
            self.launch(FOLDS, _blocks(outer_inner * chunk_tiles), chunks=_address(levels[-2]),
                        folded=_address(levels[-1]), span=RADIX ** (len(levels) - 2))
        kept += [*levels[1:], self.states(outer_inner * self.tiles)]
        addresses = [_address(level) for level in levels]
        self.values["middles"] = _address(kept[-1])
        self.launch(MIDDLES, _blocks(outer_inner * self.tiles), span=span, levels=len(levels),
                    folds=addresses + [0] * (LEVELS - len(levels)))
        return kept

    def states(self, count: int) -> torch.Tensor:
        bytes_of_one = accumulated(self.op, self.x.dtype).itemsize * STATES[FAMILIES[self.op]]
        return torch.empty(count * bytes_of_one, dtype=torch.uint8, device=self.x.device)


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.data_ptr()


def _blocks(threads: int) -> int:
    return -(-threads // BLOCK)


def roll(request: Request, x: torch.Tensor, rows: Rows, out: torch.Tensor, index: torch.Tensor | None
         ) -> None:
    """Into `out`, and the places of extremes into `index`."""
    _Launch(request, x, rows, out, index).run()
