"""Whole models at inference: eager, torch.compile, torch.compile with reduce-overhead, and ours, in turns.

Random weights, images of 224 × 224 or 128 tokens, everything in the precision named; TF32 is set as torch
sets it, for all. us: wall time of a call among calls that follow each other, until the device has finished
them: what a user waits for. device_us: the kernels alone, by the profiler. floor_us: of these the matrix
products and convolutions of cuBLAS and cuDNN, where they take the least time (of the variants that call
them about as often as eager does); of_floor: us over that; attention_us: of our call, the kernels of
attention. deviation, own_deviation: ours and eager's against a float64 run, over the largest number of the
output. MB: memory at the peak of a call, what CUDA graphs keep included. convert_s: converting and
validating.

--all: every model. --resume, --seconds: in pieces of a few minutes; so do --only, --precisions, --batches.
--prepare: compiling is most of the time; what torch.compile keeps on disk is made for many rows at a time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import multiprocessing
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import NamedTuple

import torch
from torch import nn

from benchmarks import script
from benchmarks.resume import add_options, is_complete, remaining
from fusionrt.bench import memory, profile, rivals, suite, timing
from fusionrt.bench.results import Results, Row, kind, why
from fusionrt.convert import cuda_graphs, stats
from fusionrt.convert.inputs import Inputs
from fusionrt.convert.model import ModelConverter, record_of
from fusionrt.convert.registry import MODELS, ModelUnavailable, build, example_inputs, missing, randomise
from fusionrt.convert.speed import call

NAMES = ("resnet18", "resnet50", "densenet121", "efficientnet_b0", "vgg16", "mobilenet_v2",
         "mobilenet_v3_large", "vit_b_16", "deit_small_patch16_224", "swin_t", "convnext_tiny",
         "bert-base-uncased", "roberta-base", "gpt2", "t5-small", "llama-small", "custom")
FEW = ("resnet50", "efficientnet_b0", "vit_b_16", "swin_t", "bert-base-uncased", "gpt2", "llama-small",
       "custom")
PRECISIONS = ("float32", "float16", "bfloat16")
COMPILED: dict[str, str | None] = {"compile": None, "reduce": "reduce-overhead"}
ROUNDS, TURN = 9, 60e3  # us of calls that follow each other
LIBRARY = re.compile(
    r"gemm|gemv|splitk|nvjet|cutlass|xmma|fprop|winograd|convolve|conv2d_grouped|cudnn.*conv", re.I)
ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.I)
OTHER = re.compile(r"fusionrt|nchwto|nhwcto|batchnorm|bn_fw|bn_fwd|pooling", re.I)
COLUMNS = ("model", "precision", "batch", "us", "vs_eager", "vs_compile", "vs_reduce", "floor_us", "of_floor",
           "device_us", "eager_us", "spread", "kernels", "eager_kernels", "MB", "eager_MB", "deviation",
           "own_deviation", "replaced", "undone", "convert_s", "error")


def main() -> None:
    parser = script.parser(__doc__)
    add_options(parser)
    on_gpu = kind() == "gpu"
    parser.add_argument("--only", help="these models")
    parser.add_argument("--precisions", default=",".join(PRECISIONS if on_gpu else PRECISIONS[:1]),
                        help="default: %(default)s")
    parser.add_argument("--batches", default="1,32" if on_gpu else "1", help="default: %(default)s")
    parser.add_argument("--against", default="compile,reduce" if on_gpu else "",
                        help="besides eager; default: %(default)s")
    parser.add_argument("--prepare", type=int, metavar="N", help="by so many processes")
    options = parser.parse_args()
    table = cells(NAMES if options.all else FEW, parser.get_default("precisions"),
                  parser.get_default("batches"))
    chosen = cells(script.names(options.only) or (NAMES if options.all else FEW), options.precisions,
                   options.batches)
    run = script.results(f"models-{kind()}", __doc__, options, chosen != table and not options.resume)
    against = script.names(options.against)
    prepare = functools.partial(compile_all, against=against, processes=options.prepare)
    for cell in remaining(run, present(run, chosen[:2] if options.quick else chosen), options,
                          prepare if options.prepare else None):
        try:
            run.add(**cell, **measured(**cell, against=against))
        except Exception as error:
            run.add(**cell, error=why(error))
        release()
    if is_complete(run, present(run, table)):
        run.finish(COLUMNS)


def cells(names: Sequence[str], precisions: str, batches: str) -> list[Row]:
    return [{"model": name, "precision": precision, "batch": int(batch)} for name in names
            for precision in script.names(precisions) for batch in script.names(batches)]


def present(run: Results, cells: Sequence[Row]) -> list[Row]:
    """Those whose package is installed."""
    packages = {name: entry.package for name, entry in MODELS.items()}
    for package in dict.fromkeys(packages[c["model"]] for c in cells if c["model"] in packages):
        if missing(package):
            run.absent(package, "not installed")
    return [c for c in cells if c["model"] not in packages or not missing(packages[c["model"]])]


class Custom(nn.Module):
    """A model of nobody's: convolutions, a transformer over their patches, activations by name."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 4, 3, bias=False)
        self.norm, self.patches = nn.BatchNorm2d(64), nn.Conv2d(64, width, 4, 4)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, "gelu", batch_first=True,
                                           norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.gate, self.head = nn.Linear(width, width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(nn.functional.hardswish(self.norm(self.stem(x))))
        x = self.encoder(x.flatten(2).transpose(1, 2)).mean(1)
        return self.head(torch.tanh(x) * torch.sigmoid(self.gate(x)))


def made(name: str, precision: str, batch: int, device: str) -> tuple[nn.Module, Inputs]:
    torch.manual_seed(0)
    dtype = getattr(torch, precision)
    if name == "custom":
        model = Custom().eval()
        randomise(model)
        return model.to(device, dtype), Inputs((torch.randn(batch, 3, 224, 224).to(device, dtype),))
    model = build(name, random_init=True).to(device, dtype)
    return model, example_inputs(name, model, batch, device)


def compile_all(cells: Sequence[Row], against: Sequence[str], processes: int) -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # of each
    with (contextlib.suppress(BrokenExecutor),  # a process died: its rows are compiled when they are measured
          ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool):
        list(pool.map(functools.partial(compile_row, against=against), cells))


@torch.no_grad()
def compile_row(cell: Row, against: Sequence[str]) -> None:
    try:
        original, inputs = made(**cell, device="cuda" if kind() == "gpu" else "cpu")
        for variant in against:
            compiled(original, inputs, COMPILED[variant])()
    except Exception:  # whatever it is, the row will say it
        pass
    release()


# -- one row ---------------------------------------------------------------------------------------

@torch.no_grad()
def measured(model: str, precision: str, batch: int, against: Sequence[str]) -> Row:
    device = torch.device("cuda" if kind() == "gpu" else "cpu")
    original, inputs = made(model, precision, batch, device.type)
    held = stats.held_by_graphs(device)
    converter = ModelConverter(measure=False)
    fast = converter.convert_model(original, example_inputs=inputs.kwargs or inputs.args)
    record = record_of(fast)
    calls = {suite.OURS: call(fast, inputs), "eager": call(original, inputs)}
    warm(calls[suite.OURS])
    held = max(0, stats.held_by_graphs(device) - held)
    row: Row = {}
    for variant in against:
        try:
            calls[variant] = compiled(original, inputs, COMPILED[variant])
        except Exception as error:
            row[f"{variant}_error"] = why(error)
    for one in calls.values():
        warm(one)
    row |= suite.ratios(walls(calls, device))
    facts = {variant: facts_of(one, device) for variant, one in calls.items()}
    if device.type == "cuda":
        row |= device_facts(facts)
        row["of_floor"] = round(row["us"] / row["floor_us"], 3) if row["floor_us"] else None
    verdict = record.verdict
    row |= {"MB": round((facts[suite.OURS].peak + held) / 1e6, 2),
            "eager_MB": round(facts["eager"].peak / 1e6, 2), "replaced": sum(record.counts.values()),
            "counts": dict(record.counts), "undone": len(record.rolled_back),
            "undone_what": record.rolled_back, "convert_s": round(record.seconds, 3)}
    if verdict is not None:
        row |= {"accepted": verdict.accepted, "error_of": verdict.exact, "deviation": verdict.error,
                "own_deviation": verdict.own_error}
    return row


def compiled(model: nn.Module, inputs: Inputs, mode: str | None) -> timing.Call:
    if reason := rivals.RIVALS["compile"].missing(kind().replace("gpu", "cuda")):
        raise ModelUnavailable(reason)
    return call(torch.compile(model, mode=mode, dynamic=False), inputs)


def warm(one: timing.Call) -> None:
    for _ in range(4):  # compiles, warms up, records a CUDA graph, replays it
        one()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def walls(calls: Mapping[str, timing.Call], device: torch.device) -> dict[str, timing.Time]:
    if device.type == "cpu":
        longest = max(t.us for t in timing.cpu(calls, rounds=1, uncounted=0).values())
        rounds = max(5, min(15, int(3e6 / longest)))
        return timing.cpu(calls, rounds, uncounted=min(0.02, longest / 1e6))
    longest = max(t.us for t in timing.latency(calls, rounds=3).values())
    n = max(2, min(timing.BURST, int(TURN / longest)))
    return {name: burst.wall for name, burst in timing.bursts(calls, n, ROUNDS).items()}


# -- what a call is made of ------------------------------------------------------------------------

class Facts(NamedTuple):
    """us of kernels, by whose they are; how often the libraries' are called; peak in bytes."""

    device: float
    library: float
    attention: float
    library_launches: float
    launches: float
    peak: int


def facts_of(one: timing.Call, device: torch.device) -> Facts:
    peak = memory.measure(one, device).peak
    if device.type == "cpu":
        return Facts(math.nan, math.nan, math.nan, math.nan, math.nan, peak)
    kernels = profile.kernels(one, device, calls=5)
    theirs = [k for k in kernels if not OTHER.search(k.name)]
    attention = [k for k in theirs if ATTENTION.search(k.name)]
    library = [k for k in theirs if LIBRARY.search(k.name) and k not in attention]
    return Facts(sum(k.us for k in kernels), sum(k.us for k in library), sum(k.us for k in attention),
                 sum(k.launches for k in library), sum(k.launches for k in kernels), peak)


def device_facts(facts: Mapping[str, Facts]) -> Row:
    ours, eager = facts[suite.OURS], facts["eager"]
    # Who computes some of the products itself has less of the libraries' time, but not less to do.
    comparable = [f.library for f in facts.values() if f.library_launches >= 0.9 * eager.library_launches]
    floor = min(comparable)
    return {"device_us": round(ours.device, 2), "eager_device_us": round(eager.device, 2),
            "floor_us": round(floor, 2), "eager_library_us": round(eager.library, 2),
            "attention_us": round(ours.attention, 2),
            "kernels": ours.launches, "eager_kernels": eager.launches,
            "library_kernels": ours.library_launches, "eager_library_kernels": eager.library_launches,
            **{f"{v}_device_us": round(f.device, 2) for v, f in facts.items() if v in COMPILED}}


def release() -> None:
    rivals.fresh_compilers()
    gc.collect()
    cuda_graphs.release()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
