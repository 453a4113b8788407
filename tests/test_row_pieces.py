"""Rows in which nothing is found lie in pieces, of which each block has one."""

import pytest
import torch

import fusionrt as frt
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch, row_choice, row_layout


def gradient_of_logits(columns, dtype, **options):
    """The problem of a cross-entropy's gradient."""
    x = torch.empty(64, columns, device="meta", dtype=dtype, requires_grad=True)
    with collecting() as needed:
        frt.cross_entropy(x, torch.empty(64, device="meta", dtype=torch.int64), **options).backward()
    return needed[-1]


@pytest.mark.parametrize("columns", [8, 1000, 1024, 4096, 4104, 32_768, 1_000_008])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_pieces_make_up_the_row(columns, dtype):
    problem = gradient_of_logits(columns, dtype)
    made = row_choice.layout(problem, 16, True)
    span = row_layout.span(problem, made)
    assert (made.pieces - 1) * span < columns <= made.pieces * span == made.blocks_a_row * span
    assert made.cluster == 1 and not made.persistent
    whole = made.pieces == 1 and made.threads == 256  # two of them a block
    assert made.block == 256 * (1 + whole) and made.threads * made.packs * made.width == span
    assert row_layout.grid(problem, made, 1) == -(-64 // made.rows)
    assert made == row_choice.layout(problem, 16, False)  # with clusters or without
    assert not row_choice.takes_sums(problem, 16, True)
    assert f"BLOCKS_A_ROW = {made.pieces};" in launch.sources(problem)[0].text


@pytest.mark.parametrize(("columns", "alignment"), [(50_257, 2), (32_768, 2)])
def test_narrow_packs_take_turns(columns, alignment):
    """What a thread does once would count, for the few elements that it has."""
    made = row_choice.layout(gradient_of_logits(columns, torch.bfloat16), alignment, True)
    assert made.kind == "streamed" and made.width == 1 and made.blocks_a_row == 1


def test_pieces_of_a_vocabulary_of_odd_length():
    made = row_choice.layout(gradient_of_logits(50_257, torch.bfloat16), 16, True)
    assert made.ragged and made.width == 8 and made.pieces > 1


def test_what_finds_something_has_its_row_together():
    x = torch.empty(64, 32_768, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with collecting() as needed:
        y = frt.softmax(x)
        torch.autograd.grad(y, x, torch.empty_like(y))
        frt.cross_entropy(x.detach(), torch.empty(64, device="meta", dtype=torch.int64), reduction="none")
    assert len(needed) >= 3 and not any(row_choice.layout(problem, 16, True).pieces for problem in needed)
