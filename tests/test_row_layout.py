"""How rows are laid out on a GPU; what is found without one."""

import pytest
import torch

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch, row_layout

BF16, F32 = torch.bfloat16, torch.float32


def problems(op, columns, dtype, rows, weights=0):
    """Of a call and its gradient."""
    shapes = [(rows, columns), *[(columns,)] * weights]
    args = [torch.empty(s, device="meta", dtype=dtype, requires_grad=True) for s in shapes]
    with collecting() as needed:
        y = op(*args)
        torch.autograd.grad(y, args, torch.empty_like(y))
    return [p for p in needed if p.row_dims]


def norm(x, weight, bias):
    return frt.layer_norm(x, x.shape[-1:], weight, bias)


def gelu_of_norm(x, weight, bias):
    return frt.layer_norm_gelu(x, x.shape[-1:], weight, bias)


def asks(problem):
    made = row_layout.layout(problem, 16, True)
    every = row_layout.asks_every(problem, made)
    assert f"ASKS_EVERY = {every};" in launch.sources(problem)[0].text
    return made.kind, every


@pytest.mark.parametrize(("op", "columns", "dtype", "expected"), [
    (frt.softmax, 1024, BF16, [("registers", 4), ("registers", 4)]),
    (frt.softmax, 1024, F32, [("registers", 4), ("registers", 2)]),
    (frt.softmax, 1000, F32, [("registers", 1), ("registers", 1)]),          # some threads have a pack less
    (frt.softmax, 16_384, F32, [("staged", 1), ("staged", 2)]),              # 32 registers a thread
    (frt.softmax, 262_144, F32, [("staged", 2), ("staged", 1)]),             # the latter in parts
    (frt.softmax, 1_000_003, F32, [("streamed", 1), ("streamed", 1)]),
])
def test_packs_that_ask_whether_they_are_there(op, columns, dtype, expected):
    rows = max(64, (1 << 26) // columns)
    assert [asks(p) for p in problems(op, columns, dtype, rows)] == expected


def test_gradients_of_long_rows_with_an_activation_have_no_room_for_pairs():
    of_norm, of_gelu = (asks(problems(op, 32_768, BF16, 1 << 13, 2)[-1]) for op in (norm, gelu_of_norm))
    assert (of_norm, of_gelu) == (("staged", 2), ("staged", 1))


def test_two_operands_of_which_a_multiprocessor_holds_one_row_come_in_parts():
    made = row_layout.layout(problems(frt.softmax, 262_144, F32, 512)[-1], 16, True)
    assert made.in_parts and made.persistent and (made.cluster, made.packs, made.stages) == (16, 8, 14)
    assert not row_layout.layout(problems(frt.softmax, 262_144, BF16, 512)[-1], 16, True).in_parts
