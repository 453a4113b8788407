"""embedding_position and rotary_embedding on a GPU, against the unfused formulas of torch.

Device time a call, on input sets in rotation: forward from CUDA graphs, backward from calls issued one by
one, as some gradients of torch's cannot be captured. The fraction is of what a copy of as many bytes reaches
in the same run, counting the least bytes, i = itemsize:

    rotary_embedding             2 i B S (H + H_k) D, and 2 i S D / 2 for both tables where they are given
    embedding_position           N (8 + i C) + i C (u + S + T)
      its gradient               N (8 + i C) + i C (V + S + T); with a norm 8 N + i C (u + S + T) more

N tokens, u of them different, in sequences of length S; V rows of the table, T of token types (2, or none).
`tokens`: `different`, each once; `zipf`, as in a text, the k-th with probability ~ 1 / k; `one`, N times.
`variant`: tables of cosines are in the operands' dtype, eager's too where ours are `computed`; `norm`: token
types, layer norm and dropout of 0.1 as well. Columns of `half of the columns` that stay are copied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

import fusionrt
from benchmarks import script
from benchmarks.work import Made, Work, measure
from fusionrt import reference

DTYPES = ("bfloat16", "float32")
BATCH, LENGTH, HEADS, KEY_HEADS, DIM = 4, 8192, 32, 8, 128
ROTARY = ("tables", "computed", "interleaved", "half of the columns", "in place")
WORDS = 1 << 16
COLUMNS = ("op", "variant", "dtype", "layout", "tokens", "columns", "direction", "MB", "us", "TB/s",
           "of_copy", "vs_eager", "spread", "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--ops", default="rotary_embedding,embedding_position", help="default: %(default)s")
    options = parser.parse_args()
    script.need_gpu()
    ops = script.names(options.ops)
    run = script.results("embedding-gpu", __doc__, options, len(ops) < 2)
    works = {"rotary_embedding": _rotary, "embedding_position": _embedding}
    cells = [work for op in ops for work in works[op]()]
    measure(cells[::5] if options.quick else cells, run)
    run.finish(COLUMNS)


# -- rotary_embedding ------------------------------------------------------------------------------

def _rotary() -> Iterator[Work]:
    for dtype in DTYPES:
        for layout in ("bshd", "bhsd"):
            for variant in ROTARY:
                itemsize = getattr(torch, dtype).itemsize
                nbytes = 2 * itemsize * BATCH * LENGTH * (HEADS + KEY_HEADS) * DIM
                nbytes += 0 if variant == "computed" else itemsize * LENGTH * DIM
                directions = ("forward",) if variant == "in place" else ("forward", "backward")
                labels = {"op": "rotary_embedding", "variant": variant, "dtype": dtype, "layout": layout}
                yield Work(labels, dict.fromkeys(directions, nbytes),
                           functools.partial(_make_rotary, dtype, layout, variant))


def _make_rotary(dtype: str, layout: str, variant: str) -> Made:
    q, k = (torch.randn(BATCH, LENGTH, n, DIM, device="cuda").to(getattr(torch, dtype))
            for n in (HEADS, KEY_HEADS))
    if layout == "bhsd":
        q, k = (t.transpose(1, 2).contiguous() for t in (q, k))
    leaves = [t if variant == "in place" else t.requires_grad_() for t in (q, k)]
    columns = DIM // 2 if variant == "half of the columns" else DIM
    frequencies = 10000.0 ** -(torch.arange(0, columns, 2, device="cuda") / columns)
    angles = torch.arange(LENGTH, device="cuda")[:, None] * frequencies
    options = {"layout": layout, "rotary_dim": columns, "interleaved": variant == "interleaved"}
    tables = (angles.cos().to(q.dtype), angles.sin().to(q.dtype))
    eager = functools.partial(reference.rotary_embedding, q, k, *tables, **options)
    ours = functools.partial(fusionrt.rotary_embedding, q, k, *(() if variant == "computed" else tables),
                             **options, inplace=variant == "in place")
    return Made(ours, eager, leaves)


# -- embedding_position ----------------------------------------------------------------------------

def _embedding() -> Iterator[Work]:
    for dtype in DTYPES:
        for columns in (768, 1024, 4096):
            for variant in ("sum", "norm"):
                for kind in ("different", "zipf", "one"):
                    labels = {"op": "embedding_position", "variant": variant, "dtype": dtype, "tokens": kind,
                              "columns": columns}
                    tokens = _tokens(kind)
                    row = getattr(torch, dtype).itemsize * columns
                    yield Work(labels, _embedding_bytes(tokens, row, variant), functools.partial(
                        _make_embedding, dtype, columns, variant, kind))


def _tokens(kind: str) -> torch.Tensor:
    """Of as many as there are words, in sequences of 512."""
    if kind == "different":
        found = torch.randperm(WORDS, device="cuda")
    elif kind == "one":
        found = torch.full((WORDS,), 5, device="cuda")
    else:
        found = torch.multinomial(1 / torch.arange(1, WORDS + 1, device="cuda"), WORDS, replacement=True)
    return found.view(-1, 512)


def _embedding_bytes(tokens: torch.Tensor, row: int, variant: str) -> dict[str, int]:
    n, small = tokens.numel(), tokens.shape[1] + (2 if variant == "norm" else 0)
    gathered = row * (len(tokens.unique()) + small)
    return {"forward": n * (8 + row) + gathered,
            "backward": n * (8 + row) + row * (WORDS + small) + (8 * n + gathered) * (variant == "norm")}


def _make_embedding(dtype: str, columns: int, variant: str, kind: str) -> Made:
    def parameter(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(getattr(torch, dtype)).requires_grad_()

    tokens, weight = _tokens(kind), parameter(WORDS, columns)
    positions, types, gamma, beta = (parameter(*shape) for shape in (
        (tokens.shape[1], columns), (2, columns), (columns,), (columns,)))
    options = {"token_type_weight": types, "token_type": torch.randint(2, tokens.shape, device="cuda"),
               "layer_norm": (gamma, beta), "dropout_p": 0.1} if variant == "norm" else {}
    leaves = [weight, positions, *((types, gamma, beta) if variant == "norm" else ())]
    ours, eager = (functools.partial(f, tokens, weight, positions, **options)
                   for f in (fusionrt.embedding_position, reference.embedding_position))
    return Made(ours, eager, leaves)


if __name__ == "__main__":
    main()
