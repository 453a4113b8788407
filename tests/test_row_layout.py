"""How rows are laid out on a GPU; what is found without one."""

import pytest
import torch

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch, row_choice, row_layout

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
    made = row_choice.layout(problem, 16, True)
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
    made = row_choice.layout(problems(frt.softmax, 262_144, F32, 512)[-1], 16, True)
    assert made.part and made.persistent and (made.cluster, made.packs, made.stages) == (16, 8, 14)
    assert not row_choice.layout(problems(frt.softmax, 262_144, BF16, 512)[-1], 16, True).part


def layouts(op, columns, dtype, weights=2):
    return row_choice.layout(problems(op, columns, dtype, (1 << 28) // columns, weights)[0], 16, True)


@pytest.mark.parametrize(("columns", "dtype", "expected"), [
    # kind, packs, threads, cluster, stages, part
    (32_768, F32, ("staged", 8, 256, 4, 4, 4)),
    (65_536, F32, ("staged", 8, 256, 8, 4, 4)),
    (131_072, F32, ("staged", 8, 256, 16, 2, 0)),
    (262_144, F32, ("staged", 8, 512, 16, 1, 0)),
    (131_072, BF16, ("staged", 4, 1024, 4, 1, 0)),
    (262_144, BF16, ("staged", 4, 1024, 8, 1, 0)),
])
def test_long_rows_are_moved_on_into_registers(columns, dtype, expected):
    made = layouts(norm, columns, dtype)
    assert made.moved and made.persistent and made.weights
    assert (made.kind, made.packs, made.threads, made.cluster, made.stages, made.part) == expected


def test_rows_a_little_shorter_than_their_layout_come_in_parts_of_one_pack():
    def summed(x, residual, weight, bias):
        return frt.add_norm(x, residual, weight, bias)[0]

    def made(columns):
        shapes = [(1 << 10, columns)] * 2 + [(columns,)] * 2
        with collecting() as needed:
            summed(*[torch.empty(s, device="meta") for s in shapes])
        return row_choice.layout(next(p for p in needed if p.row_dims), 16, True)

    whole, shorter = made(262_144), made(245_760)
    assert (whole.packs, whole.part, whole.stages) == (16, 4, 3)
    assert (shorter.packs, shorter.part, shorter.stages) == (15, 1, 12)


def test_few_rows_do_not_wait_for_blocks_that_stay():
    made = row_choice.layout(problems(norm, 262_144, F32, 4, 2)[0], 16, True)
    assert not made.moved


def small(op, rows, columns, dtype, weights=0):
    problem = problems(op, columns, dtype, rows, weights)[0]
    return problem, row_choice.layout(problem, 16, True)


@pytest.mark.parametrize(("rows", "columns"), [(512, 1024), (682, 768), (170, 768), (256, 2048)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_little_has_few_blocks(rows, columns, dtype):
    """Each begins some nanoseconds after another one."""
    _, made = small(frt.softmax, rows, columns, dtype)
    assert made.kind == "registers" and made.packs > 1
    assert -(-rows // made.rows) <= 2 * row_layout.MULTIPROCESSORS


def test_rows_of_two_operands_begin_at_once():
    """With fewer threads than their packs would have if blocks came one after the other."""
    problem, made = small(lambda x, w: frt.add_norm(x, x.clone(), w)[0], 2048, 2048, BF16, weights=1)
    assert (made.threads, made.packs) == (32, 8)
    assert -(-2048 // made.rows) <= made.blocks * row_layout.MULTIPROCESSORS
    assert row_layout.asks_every(problem, made) == 1  # registers are full


@pytest.mark.parametrize(("rows", "columns", "early"), [(512, 1024, False), (4096, 1024, True),
                                                        (1 << 17, 1024, False)])
def test_the_next_kernel_begins_early_where_there_are_many_blocks(rows, columns, early):
    problem, made = small(frt.softmax, rows, columns, BF16)
    assert row_layout.lets_next_begin(problem, made) == early
