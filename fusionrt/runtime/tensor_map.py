"""What Hopper's copy engine must know of a matrix: where it lies, its rows, the box that one copy moves.

The driver encodes it into 128 bytes, on the host alone. They go to the kernel by value, as a member of a
`__grid_constant__` parameter.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

from fusionrt.runtime import binding

# Of cuda.h: CUtensorMapDataType, CUtensorMapSwizzle (by the bytes of a box's row), CUtensorMapL2promotion.
_TYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_L2_PROMOTION_256B = 3
_ITEM = 2            # bytes an element of either type
_BYTES, _ALIGNMENT = 128, 64


class Matrix(NamedTuple):
    """Rows of 16-bit elements, from `pointer` on, `stride` elements apart."""

    pointer: int
    rows: int
    columns: int
    stride: int
    dtype: str


class Heads(NamedTuple):
    """Rows of heads of batches, (batch, heads, rows, columns), of 16-bit elements; a row's are neighbours."""

    pointer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]    # of a batch, a head, a row
    dtype: str


def can_copy(matrix: Matrix) -> bool:
    """Whether the copy engine takes it: address and rows at multiples of 16 bytes."""
    return (matrix.dtype in _TYPES and not (matrix.pointer | matrix.stride * _ITEM) & 15
            and 0 < matrix.rows < 2**31 and 0 < matrix.columns < 2**31 and matrix.columns <= matrix.stride)


def can_copy_heads(heads: Heads) -> bool:
    """Whether the copy engine takes them. What has one element only may have any stride: give a row's."""
    bits = functools.reduce(int.__or__, heads.strides) * _ITEM | heads.pointer
    return (heads.dtype in _TYPES and not bits & 15 and min(heads.strides) > 0
            and 0 < min(heads.sizes) and max(heads.sizes) < 2**31)


@functools.lru_cache(maxsize=8192)
def encode(matrix: Matrix, box_rows: int, box_columns: int) -> bytes:
    """The map whose copies move boxes of so many rows and columns, swizzled by the width of their rows.

    What lies outside of the matrix is read as 0 and not written. Kept, since a driver call for each of three
    operands would cost as much as the launch.
    """
    if not can_copy(matrix):
        raise ValueError(f"tensor map: the copy engine takes matrices of {' and '.join(_TYPES)} whose "
                         f"address and rows are multiples of 16 bytes, got {matrix}")
    return _encode(matrix, (matrix.columns, matrix.rows), (matrix.stride,), box_rows, box_columns)


@functools.lru_cache(maxsize=8192)
def encode_heads(heads: Heads, box_rows: int, box_columns: int) -> bytes:
    """The same of rows of one head."""
    if not can_copy_heads(heads):
        raise ValueError(f"tensor map: the copy engine takes heads of {' and '.join(_TYPES)} whose address "
                         f"and strides are multiples of 16 bytes, got {heads}")
    return _encode(heads, heads.sizes[::-1], heads.strides[::-1], box_rows, box_columns)


def _encode(of: Matrix | Heads, sizes: Sequence[int], strides: Sequence[int], box_rows: int, box_columns: int
            ) -> bytes:
    """`sizes` and `strides` from the inside out, these without that of columns."""
    memory, rank = ctypes.create_string_buffer(_BYTES + _ALIGNMENT), len(sizes)
    address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    box = box_columns, box_rows, *(1,) * (rank - 2)
    of_box = ctypes.c_uint32 * rank
    status = binding.libcuda().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), _TYPES[of.dtype], rank, ctypes.c_void_p(of.pointer),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*(s * _ITEM for s in strides)),
        of_box(*box), of_box(*(1,) * rank), 0, _SWIZZLES[box_columns * _ITEM], _L2_PROMOTION_256B, 0)
    if status:
        raise RuntimeError(f"tensor map: cuTensorMapEncodeTiled failed with CUresult {status} for {of} "
                           f"and boxes of {box_rows} × {box_columns}")
    return ctypes.string_at(address, _BYTES)


