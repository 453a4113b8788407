"""Texts that are kept under their forms (fusionrt/texts.py) are those of each of their problems."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fusionrt as frt
from fusionrt.cpu import abreast
from fusionrt.cpu import pointwise as cpu_pointwise
from fusionrt.problem import Problem
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch, pointwise
from fusionrt.runtime.parts import split
from fusionrt.texts import Lines, Texts

LENGTHS, COLUMNS = (1, 2, 7, 64, 3000, 70_000, 1 << 30, 1 << 31), (1, 2, 3, 8, 12, 768, 1028, 20_000)
New = Callable[..., torch.Tensor]
CALLS: list[Callable[[New, int, int], Any]] = [
    lambda new, n, c: frt.gelu(new(n, c)),
    lambda new, n, c: frt.bias_gelu(new(n, c), new(c)),
    lambda new, n, c: frt.add_relu(new(n, c), new(n, 1)),
    lambda new, n, c: frt.add_relu(new(c, n).t(), new(n, c)),
    lambda new, n, c: frt.add_relu(new(n, 2 * c)[:, ::2], new(n, c)),
    lambda new, n, c: frt.add_relu(new(2, n, c), new(2, 1, c)),
    lambda new, n, c: frt.gelu_dropout(new(n, c), 0.5),
    lambda new, n, c: frt.layer_norm(new(n, c), c, new(c), new(c)),
    lambda new, n, c: frt.layer_norm(new(n, 2 * c)[:, :c], c, new(c), None, residual=new(n, c)),
    lambda new, n, c: frt.rms_norm(new(n, c), c, new(c), epilogue=frt.gelu),
    lambda new, n, c: frt.softmax(new(n, c), -1),
    lambda new, n, c: frt.log_softmax(new(2, c, n // 2 + 1).transpose(1, 2), -1),
    lambda new, n, c: frt.softmax(new(n, c), 0),
    lambda new, n, c: frt.sum(new(n, c), 0),
    lambda new, n, c: frt.bias_dropout_add(new(n, c), new(c), new(n, c), 0.5),
    lambda new, n, c: frt.batch_norm(new(min(n, 64), c, 14, 14), None, None, new(c), new(c), training=True,
                                     epilogue=frt.relu),
    lambda new, n, c: frt.batch_norm(new(min(n, 64), 14, 14, c).permute(0, 3, 1, 2), None, None, new(c),
                                     new(c), training=True),
    lambda new, n, c: frt.group_norm(new(min(n, 64), 4 * c, 9), 4, new(4 * c), new(4 * c)),
]


def problems(call: Callable[[New, int, int], Any], dtype: torch.dtype) -> Iterator[Problem]:
    """Forward and backward, of all sizes."""
    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta").requires_grad_()

    for n, c in itertools.product(LENGTHS, COLUMNS):
        with collecting() as found:
            out = call(new, n, c)
            out.backward(torch.empty_like(out))
        yield from (problem for problem in found if isinstance(problem, Problem))


@pytest.mark.covering(1)
@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_of_all_sizes(call: Callable[[New, int, int], Any], dtype: torch.dtype,
                      monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list(dict.fromkeys(problems(call, dtype)))

    def texts() -> list[Any]:
        made: list[Any] = []
        for problem in seen:
            made += [source[::3] for source in launch.sources(problem)]
            if problem.row_dims or problem.then is not None:
                continue
            made += [pointwise.generate(part, alignment, of_rows)[::3]
                     for part, _, of_rows in split(problem) for alignment in (4, 16)]
            if not problem.across:
                made.append(cpu_pointwise.generate(abreast.side_by_side(problem)))
        return made

    kept = texts()
    monkeypatch.setattr(Texts, "text", lambda self, form, write: write())
    monkeypatch.setattr(pointwise, "generate", pointwise._generated)
    for one, other in zip(kept, texts(), strict=True):
        assert one == other
    assert len(seen) > len(LENGTHS)


def test_forms_are_told_apart() -> None:
    texts = Texts()
    assert texts.text((1, "a"), lambda: "of a") == "of a" and texts.text((1, "b"), lambda: "of b") == "of b"
    assert texts.text((1, "a"), lambda: "never") == "of a"


def test_functions_of_one_text_have_their_own_numbers() -> None:
    made = []
    for number in (3, 1 << 40):
        lines = Lines(double=lambda x: 2 * x)
        lines.lines = [f"return double(x) + {lines.spelled(number)} + {lines.spelled('x + 7')}"]
        made.append(lines.function(["x"]))
    assert [run(1) for run in made] == [2 + 3 + 8, 2 + (1 << 40) + 8]
    assert made[0].__code__ is made[1].__code__
