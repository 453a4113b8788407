"""A linear layer and all that follows it in one kernel, on Hopper: out = f(x W^T + bias, residual).

cuBLAS has few epilogues; any other is a pass over the output, which at short K costs a third of the product.
`chosen` says where this kernel is faster than cuBLAS and such a pass.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fusionrt.dtypes import HALVES, SIGNIFICANT_BITS, STORAGE
from fusionrt.expr import Expr
from fusionrt.laid import address, is_lazy
from fusionrt.ops.product import PRODUCT, Layer, Results, is_of_elements, layer
from fusionrt.rehearsal import stands_for
from fusionrt.runtime import device as cuda
from fusionrt.runtime import tensor_map
from fusionrt.runtime.instructions import instructions
from fusionrt.runtime.kernel import Kernel
from fusionrt.runtime.matrix_units import multiply
from fusionrt.runtime.source import TENSOR_MAP, Field, definitions, members, pointer
from fusionrt.runtime.tensor_map import Matrix

ARCHITECTURE = "sm_90"
STAGE_COLUMNS = 64                     # of x and w that a stage of the ring holds
PART_ROWS, PART_COLUMNS = 16, 32       # that a warp finishes at a time
SHARED_BYTES = 232448
PACKED = 64                            # parameters that are kept, by addresses


class Tile(NamedTuple):
    """Rows and columns of the result that a block computes at a time; blocks below each other that share the
    columns, and with them what they load of W; whether two warpgroups share 128 rows or three take turns."""

    rows: int
    columns: int
    cluster: int = 1
    together: bool = False

    @property
    def groups(self) -> int:
        return 2 if self.together else 3


class Form(NamedTuple):
    """What a kernel is compiled for."""

    layer: Layer
    tile: Tile

    @property
    def depth(self) -> int:
        """Parts of a tile that a warp has memory for, while residuals or results are on their way."""
        return 4 if self.layer.residual else 2

    @property
    def stages(self) -> int:
        """As many as there is memory for, and six are enough."""
        stage = (self.tile.rows + self.tile.columns) * STAGE_COLUMNS * 2 + 16
        return min(8 if self.tile.rows == 64 else 6, (SHARED_BYTES - self._parts) // stage)

    @property
    def _parts(self) -> int:
        return 4 * self.tile.groups * self.depth * ((1 + self.layer.keep) * PART_ROWS * PART_COLUMNS * 2 + 8)

    @property
    def shared_bytes(self) -> int:
        return self.stages * ((self.tile.rows + self.tile.columns) * STAGE_COLUMNS * 2 + 16) + self._parts


class _Plan(NamedTuple):
    """A launch but for its pointers."""

    kernel: Kernel
    blocks: int
    shared: int
    x_rows: int              # of the boxes that are copied
    weight_rows: int
    values: tuple[int, ...]


# -- where it is of use ----------------------------------------------------------------------------

@functools.lru_cache(4096)
def chosen(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, epilogue: Expr = PRODUCT,
           library_epilogue: bool = False) -> bool:
    """Whether this kernel is the fastest way to f(x W^T + bias) of an m x n product over k.

    The rival is cuBLAS and a pass over its result, or with `library_epilogue` cuBLAS alone, which can do the
    activation as well. Never in a warm-up, whose GPU has no index: there are too many shapes. Measured:
    benchmarks/gemm.py.
    """
    if device.type != "cuda" or dtype not in HALVES or n % 8 or k % 8 or min(m, n, k) < 1:
        return False
    if device.index is None or cuda.architecture(device.index) != ARCHITECTURE or not takes(epilogue, k):
        return False
    multiprocessors = cuda.multiprocessors(device.index)
    tile = choose_tile(m, n, k, multiprocessors)
    rounds, fill = _rounds(m, n, tile, multiprocessors)
    if library_epilogue:  # no pass to gain: where its epilogue takes time, or all have several large tiles
        large = tile.columns == 128 and rounds > 1 and fill > 0.9
        return 64 < k <= 8192 and (large or (m >= 128 and k <= 1024))
    return k <= 1024 or (k <= (8192 if m >= 128 else 4096) and fill > 0.9)


def takes(epilogue: Expr, k: int) -> bool:
    """Whether it is one of elements, and short enough for the shadow of a product over k: while one tile is
    multiplied, others are finished."""
    return is_of_elements(epilogue) and instructions([epilogue]) <= 24 + k // 48


def supports(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
             residual: torch.Tensor | None = None) -> bool:
    """Whether the copy engine takes the memory of x [M, K], weight [N, K], bias [N], residual [M, N], all of
    one dtype."""
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous() or is_lazy(bias)
                             or bias.data_ptr() & 3):
        return False
    matrices = [t for t in (x, weight, residual) if t is not None]
    return weight.shape[0] % 8 == 0 and all(
        t.dtype == x.dtype and t.stride(1) == 1 and not is_lazy(t) and tensor_map.can_copy(_matrix(t))
        for t in matrices)


@functools.lru_cache(4096)
def choose_tile(m: int, n: int, k: int, multiprocessors: int) -> Tile:
    """The time of a round of tiles, one on every multiprocessor, goes by their circumference: that is what is
    loaded for them, and it is short of what the caches give."""
    large = Tile(128, 128, 2 if k >= 1024 and m > 128 else 1)
    tiles = [t for t in (large, Tile(128, 96), Tile(128, 64), Tile(64, 64)) if t.rows <= max(m, 64)]
    tile = min(tiles, key=lambda t: _rounds(m, n, t, multiprocessors)[0] * (t.rows + t.columns))
    return tile._replace(together=tile.rows == 128 and _rounds(m, n, tile, multiprocessors)[0] == 1)


def _rounds(m: int, n: int, tile: Tile, multiprocessors: int) -> tuple[int, float]:
    """How many tiles the busiest multiprocessor has, and what part of all is not idle."""
    tiles = -(-m // (tile.rows * tile.cluster)) * tile.cluster * -(-n // tile.columns)
    rounds = -(-tiles // multiprocessors)
    return rounds, tiles / (rounds * multiprocessors)


# -- a call ----------------------------------------------------------------------------------------

class Planned:
    """epilogue(x W^T + bias, residual), and x W^T + bias where it is to be kept, of operands like these.

    x [M, K], weight [N, K], bias [N], residual [M, N], as `supports` says, which is asked of the first ones.
    The products are added up in float32, to which the epilogue is applied.
    """

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
                 epilogue: Expr = PRODUCT, residual: torch.Tensor | None = None, keep: bool = False,
                 tile: Tile | None = None) -> None:
        (m, k), n = x.shape, weight.shape[0]
        device = stands_for(x.device)
        tile = tile or choose_tile(m, n, k, cuda.multiprocessors(device.index))
        self.form, self.shape = Form(layer(x, bias, epilogue, residual, keep), tile), (m, n)
        self.like = [None if t is None else _matrix(t) for t in (x, weight, residual)]
        self.device, self.plan = -1, None
        if not x.is_meta:
            self.device, self.plan = cuda.index_of(device), _plan(self.form, m, n, k, device)
        self.packed = functools.lru_cache(PACKED)(self._packed)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
                 residual: torch.Tensor | None = None) -> Results | None:
        """None: at these addresses it cannot."""
        out = x.new_empty(self.shape)
        kept = torch.empty_like(out) if self.form.layer.keep else None
        if self.plan is None:
            _kernel(self.form)(x.device, 0)
            return out, kept
        at = [address(t) for t in (x, weight, residual, bias)]
        if (at[0] | at[1] | at[2]) & 15 or at[3] & 3:
            return None
        packed = self.packed(*at, out.data_ptr(), address(kept))
        self.plan.kernel.launch(self.device, self.plan.blocks, packed, self.plan.shared)
        return out, kept

    def _packed(self, x: int, weight: int, residual: int, bias: int, out: int, kept: int) -> bytes:
        """The parameters: addresses come again, and to encode them for the copy engine takes as long as to
        launch."""
        plan, (m, n) = self.plan, self.shape
        assert plan is not None
        of_x, of_weight, of_residual = (
            like and like._replace(pointer=at)
            for like, at in zip(self.like, (x, weight, residual), strict=True))
        assert of_x and of_weight
        result = Matrix(out, m, n, n, of_x.dtype)
        parts = [part or result for part in (result, kept and result._replace(pointer=kept), of_residual)]
        return plan.kernel.packed(
            tensor_map.encode(of_x, plan.x_rows, STAGE_COLUMNS),
            tensor_map.encode(of_weight, plan.weight_rows, STAGE_COLUMNS),
            *(tensor_map.encode(part, PART_ROWS, PART_COLUMNS) for part in parts), bias, *plan.values)


@functools.lru_cache(4096)
def _plan(form: Form, m: int, n: int, k: int, device: torch.device) -> _Plan:
    tile, kernel, shared = form.tile, _kernel(form), form.shared_bytes
    tiles_m, tiles_n = -(-m // (tile.rows * tile.cluster)), -(-n // tile.columns)
    clusters = min(tiles_m * tiles_n, _clusters(kernel, tile.cluster, shared, device))
    # A box that reaches far beyond the last row is slower than one that ends there.
    x_rows = min(tile.rows, -(-m // 8) * 8)
    return _Plan(kernel, clusters * tile.cluster, shared, x_rows, tile.columns // tile.cluster,
                 kernel.planned(n=n, steps=-(-k // STAGE_COLUMNS), tiles_m=tiles_m, tiles_n=tiles_n,
                                x_bytes=x_rows * STAGE_COLUMNS * 2))


@functools.cache
def _clusters(kernel: Kernel, cluster: int, shared: int, device: torch.device) -> int:
    """That the device holds at a time."""
    index = cuda.index_of(device)
    most = cuda.multiprocessors(index) // cluster
    if cluster == 1:
        return most
    with torch.cuda.device(index):
        cuda.bind_context(index)
        function = cuda.function(kernel.text, kernel.stem, index, kernel.name)
        cuda.allow(function, shared, cluster)
        return min(most, cuda.clusters_at_a_time(function, kernel.block, shared, cluster) or most)


def _matrix(t: torch.Tensor) -> Matrix:
    rows, columns = t.shape
    stride = t.stride(0) if rows > 1 else -(-columns // 8) * 8  # of a single row it says nothing
    return Matrix(t.data_ptr(), rows, columns, stride, STORAGE.get(t.dtype, ""))


# -- its text --------------------------------------------------------------------------------------

@functools.cache
def _kernel(form: Form) -> Kernel:
    tile = form.tile
    fields = [*(Field(f"TensorMap {name}", TENSOR_MAP) for name in ("x", "w", "out", "kept", "residual")),
              pointer("value_t", "bias"), *members("int", "n"),
              *members("unsigned", "steps", "tiles_m", "tiles_n", "x_bytes")]
    constants = [
        *definitions(HALVES=tile.rows // 64, BN=tile.columns, CLUSTER=tile.cluster, GROUPS=tile.groups,
                     CHUNK=PART_COLUMNS, STAGES=form.stages, DEPTH=form.depth, TOGETHER=tile.together),
        *form.layer.constants(), *multiply(form.layer.dtype, tile.columns)]
    return Kernel("linear_activation", "gemm_sm90", fields, constants,
                  significant_bits=SIGNIFICANT_BITS[form.layer.dtype], block=128 * (tile.groups + 1),
                  reads_first=True)
