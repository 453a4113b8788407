"""attention on a GPU, against each kernel of torch's alone, torch's choice among them, and flex_attention.

sweep: 16 Ki tokens in sequences of `length`, 2048 columns in heads of `dim`, dense and causal: ours, which
takes the `way` that is named, and scaled_dot_product_attention where only cuDNN's, the flash or the
memory-efficient kernel is enabled, and as torch chooses (`default`). `vs_best` is the least time of those
kernels by ours.
variants: the same tokens with what these kernels lack, against torch.compile of flex_attention, and with
--all of the formula (`formula`, where all scores fit into memory): `window` of 1024 keys, causal; `alibi`,
causal; `softcap` of 30, causal; `mask`: three quarters of the keys of each sequence; `float32`, causal,
against torch's choice.
host: microseconds that a call of a small attention costs the host, by torch's function and by ours.

forward: device time in a CUDA graph, without gradients. backward: the gradients of q, k and v, issued one by
one. A warm L2 in both: operands were just written, as by the layer before. TFLOP/s: 4 B H S T D (half where
causal, 1024 keys for the window), 2.5 times that backward. Results are compared with float64 in the tests,
not here.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusionrt
from benchmarks import script
from fusionrt.bench import sampling, timing
from fusionrt.bench.results import Results, why
from fusionrt.ops.attention import options_of
from fusionrt.ops.attention_path import way_of

Function = Callable[..., Any]
Tensor = torch.Tensor
SDPA: Any = F.scaled_dot_product_attention
TOKENS, COLUMNS_OF_HEADS, WINDOW, SOFTCAP = 1 << 14, 2048, 1024, 30.0
LENGTHS, DIMS = (128, 512, 1024, 2048, 4096, 8192, 16384), (64, 128)
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
           "efficient": SDPBackend.EFFICIENT_ATTENTION}
COLUMNS = ("table", "variant", "dtype", "length", "dim", "causal", "direction", "way", "us", "TFLOP/s",
           "cudnn_us", "flash_us", "efficient_us", "default_us", "flex_us", "formula_us", "vs_best",
           "vs_default", "vs_flex", "vs_formula", "spread", "error")


class Cell(NamedTuple):
    variant: str      # "", window, alibi, softcap, mask, float32
    dtype: torch.dtype
    length: int
    dim: int
    causal: bool
    formula: bool = False

    @property
    def labels(self) -> dict[str, Any]:
        return {"table": "variants" if self.variant else "sweep", "variant": self.variant or None,
                "dtype": str(self.dtype).removeprefix("torch."), "length": self.length, "dim": self.dim,
                "causal": self.causal}

    @property
    def flops(self) -> float:
        keys = min(WINDOW, self.length) if self.variant == "window" else self.length
        half = self.causal and self.variant != "window"
        return 4.0 * TOKENS * COLUMNS_OF_HEADS * keys / (2 if half else 1)


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--all", action="store_true", help="also float16, variants at every length")
    parser.add_argument("--tables", default="sweep,variants,host", help="default: %(default)s")
    options = parser.parse_args()
    script.need_gpu()
    tables = script.names(options.tables)
    run = script.results("attention-gpu", __doc__, options, len(tables) < 3)
    cells = [cell for cell in _cells(options) if cell.labels["table"] in tables]
    with timing.stream():
        for cell in cells[::6] if options.quick else cells:
            for direction in ("forward", "backward"):
                try:
                    _measure(cell, direction, run)
                except Exception as error:  # one row less; it says why
                    run.add(**cell.labels, direction=direction, error=why(error))
                timing.release()
        if "host" in tables:
            _host(run)
    run.finish(COLUMNS)


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    dtypes = (torch.bfloat16, torch.float16) if options.all else (torch.bfloat16,)
    for dtype in dtypes:
        for dim in DIMS:
            for causal in (False, True):
                for length in LENGTHS:
                    yield Cell("", dtype, length, dim, causal)
    for variant in ("window", "alibi", "softcap", "mask", "float32"):
        for dim in DIMS if options.all else DIMS[1:]:
            for length in LENGTHS[2:] if options.all else (4096,):
                dtype = torch.float32 if variant == "float32" else torch.bfloat16
                yield Cell(variant, dtype, length, dim, variant != "mask", options.all)


# -- a row -----------------------------------------------------------------------------------------

def _measure(cell: Cell, direction: str, run: Results) -> None:
    operands = _operands(cell, direction == "backward")
    ours = _options(cell)
    functions: dict[str, Function] = {"fusionrt": functools.partial(fusionrt.attention, **ours)}
    functions |= _of_variant(cell, ours, run) if cell.variant else _of_torch(cell.causal)
    calls, failed = _calls(functions, operands, direction)
    n = max(1, 4096 // cell.length) if direction == "forward" else 1
    measure = timing.replayed if direction == "forward" else sampling.issued
    # A round begins with the device waiting for the host: it begins and ends with a call that does not count.
    calls = {"begin": calls["fusionrt"], **calls, "end": calls["fusionrt"]}
    times = measure({name: [call] * n for name, call in calls.items()})
    del times["begin"], times["end"]
    us = {name: time.us for name, time in times.items()}
    flops = cell.flops * (1 if direction == "forward" else 2.5)
    best = min((us[name] for name in KERNELS if name in us), default=None)
    q, k, v = operands
    asked = options_of("attention", q, k.shape[2], cell.causal, None, 0.0, True, ours.get("window"),
                       "alibi_slopes" in ours, ours.get("softcap"))
    way, _ = way_of(q, k, v, ours.get("mask"), ours.get("alibi_slopes"), asked)
    mine = us.pop("fusionrt")
    run.add(**cell.labels, direction=direction, way=way, us=mine, spread=times["fusionrt"].spread,
            **{"TFLOP/s": round(flops / mine / 1e6, 1)}, **{f"{name}_us": t for name, t in us.items()},
            vs_best=best and round(best / mine, 3),
            **{f"vs_{name}": round(t / mine, 3) for name, t in us.items() if name not in KERNELS},
            **({"absent": failed} if failed else {}))


def _operands(cell: Cell, graded: bool) -> list[Tensor]:
    shape = TOKENS // cell.length, cell.length, COLUMNS_OF_HEADS // cell.dim, cell.dim
    return [torch.randn(shape, device="cuda").to(cell.dtype).transpose(1, 2).requires_grad_(graded)
            for _ in range(3)]


def _calls(functions: Mapping[str, Function], operands: list[Tensor], direction: str
           ) -> tuple[dict[str, timing.Call], dict[str, str]]:
    """What to time, each run once, and why a function of torch's cannot run."""
    calls: dict[str, timing.Call] = {}
    failed: dict[str, str] = {}
    for name, function in functions.items():
        try:
            if direction == "forward":
                call = torch.no_grad()(functools.partial(function, *operands))
            else:
                out = function(*operands)
                call = functools.partial(torch.autograd.grad, out, operands, torch.randn_like(out),
                                         retain_graph=True)
            call()
        except Exception as error:
            if name == "fusionrt":
                raise
            failed[name] = why(error)
        else:
            calls[name] = call
    return calls, failed


def _of_torch(causal: bool) -> dict[str, Function]:
    def alone(kernel: SDPBackend) -> Function:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            with sdpa_kernel(kernel):
                return SDPA(q, k, v, is_causal=causal)

        return call

    default = functools.partial(SDPA, is_causal=causal)
    return {name: alone(kernel) for name, kernel in KERNELS.items()} | {"default": default}


# -- what torch's kernels lack ---------------------------------------------------------------------

def _slopes(dim: int) -> Tensor:
    heads = COLUMNS_OF_HEADS // dim
    return torch.exp2(-8 * torch.arange(1, heads + 1, device="cuda") / heads)


def _passed(length: int) -> Tensor:
    return (torch.arange(length, device="cuda") < 3 * length // 4).expand(TOKENS // length, 1, 1, length)


def _options(cell: Cell) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {
        "window": {"window": WINDOW}, "alibi": {"alibi_slopes": _slopes(cell.dim)},
        "softcap": {"softcap": SOFTCAP}, "mask": {"mask": _passed(cell.length)}}
    return {"causal": cell.causal, **more.get(cell.variant, {})}


def _of_variant(cell: Cell, options: Mapping[str, Any], run: Results) -> dict[str, Function]:
    if cell.variant == "float32":
        return {"default": functools.partial(SDPA, is_causal=cell.causal)}
    found: dict[str, Function] = {}
    if cell.variant == "mask":
        found["default"] = functools.partial(SDPA, attn_mask=options["mask"])
    if cell.formula and TOKENS * COLUMNS_OF_HEADS // cell.dim * cell.length * 4 < 16 << 30:
        torch.compiler.reset()
        formula = torch.compile(fusionrt.attention.reference, dynamic=False)
        found["formula"] = functools.partial(formula, **options)
    try:
        found["flex"] = _flex(cell)
    except Exception as error:
        run.absent("flex_attention", why(error))
    return found


def _flex(cell: Cell) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    slopes, passed = _slopes(cell.dim), 3 * cell.length // 4

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + slopes[h] * (j - i)

    def softcap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cell.variant == "mask":
            return j < passed
        return (j <= i) & (i - j < WINDOW) if cell.variant == "window" else j <= i

    block_mask = create_block_mask(seen, None, None, cell.length, cell.length, device="cuda")
    score_mod = {"alibi": alibi, "softcap": softcap}.get(cell.variant)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, score_mod=score_mod, block_mask=block_mask)


# -- the host --------------------------------------------------------------------------------------

def _host(run: Results) -> None:
    q, k, v = (torch.randn(1, 8, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = timing.bursts({
        "fusionrt": functools.partial(fusionrt.attention, q, k, v, causal=True),
        "default": functools.partial(SDPA, q, k, v, is_causal=True)})
    ours, theirs = (found[name].host for name in ("fusionrt", "default"))
    run.add(table="host", dtype="bfloat16", length=64, dim=64, causal=True, direction="forward", us=ours.us,
            default_us=theirs.us, spread=ours.spread, vs_default=round(theirs.us / ours.us, 3))


if __name__ == "__main__":
    main()
