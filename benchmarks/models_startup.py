"""From the call to the first result of a converted model, in fresh processes: what a user waits for.

The model is built, moved and run once eagerly before, which is not counted; what follows is: importing
Dynamo, converting (or torch.compile), validating where named, the first call, and a wait for its result.
`cold`: the kernel caches are empty; `warm`: an earlier process filled them. Either way an earlier process
has compiled all modules to bytecode, as they are where packages were installed. Milliseconds, medians of
processes; second_ms: of the next call, in which CUDA graphs may be recorded.
"""

from __future__ import annotations

import statistics
import tempfile

from benchmarks import script
from benchmarks.startup import caches, process, stages_of
from fusionrt.bench.results import Results, kind
from fusionrt.convert.registry import MODELS, missing

NAMES = ("resnet50", "bert-base-uncased")
BEGIN = """
import json, time
import torch
from fusionrt.convert import registry
device = "cuda" if torch.cuda.is_available() else "cpu"
model = registry.build(NAME, random_init=True).to(device)
inputs = registry.example_inputs(NAME, model, 1, device)
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
torch.set_grad_enabled(False)
model(*inputs.args, **inputs.kwargs); wait()
before = time.perf_counter()
"""
END = """
fast(*inputs.args, **inputs.kwargs); wait()
first = time.perf_counter()
fast(*inputs.args, **inputs.kwargs); wait()
print(json.dumps({"ms": (first - before) * 1e3, "second_ms": (time.perf_counter() - first) * 1e3}))
"""
OURS = ("import fusionrt\nfast = fusionrt.auto_convert_model(model, example_inputs=inputs.kwargs or "
        "inputs.args, validate_accuracy={})")
VARIANTS = {"compile": "fast = torch.compile(model, dynamic=False)",
            "reduce": 'fast = torch.compile(model, mode="reduce-overhead", dynamic=False)',
            "fusionrt": OURS.format(False), "fusionrt-validated": OURS.format(True)}
COLUMNS = ("model", "variant", "cache", "ms", "spread_ms", "second_ms", "of_compile", "absent")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--only", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=3, help="a figure; default: %(default)s")
    options = parser.parse_args()
    names = script.names(options.only)
    run = script.results(f"models_startup-{kind()}", __doc__, options, len(names) < len(NAMES))
    for name in names:
        if missing(MODELS[name].package):
            run.absent(name, f"{MODELS[name].package} is not installed")
            continue
        taken: dict[str, float] = {}
        for variant in sorted(script.names(options.variants), key=list(VARIANTS).index):
            measure(run, name, variant, 1 if options.quick else options.processes, taken)
    run.finish(COLUMNS)


def measure(run: Results, name: str, variant: str, n: int, taken: dict[str, float]) -> None:
    """`taken`: torch.compile's milliseconds by cache, noted here and compared with."""
    text = f"NAME = {name!r}\n{BEGIN}{VARIANTS[variant]}{END}"
    try:
        with tempfile.TemporaryDirectory() as shared:
            process(text, caches(shared))
            found = {"cold": [stages_of(text) for _ in range(n)],
                     "warm": [stages_of(text, shared) for _ in range(n)]}
    except RuntimeError as error:
        run.add(model=name, variant=variant, absent=str(error))
        return
    for cache, samples in found.items():
        times = [one["ms"] for one in samples]
        middle = statistics.median(times)
        if variant == "compile":
            taken[cache] = middle
        run.add(model=name, variant=variant, cache=cache, ms=middle, spread_ms=max(times) - min(times),
                processes=n, second_ms=statistics.median(one["second_ms"] for one in samples),
                of_compile=round(middle / taken[cache], 4) if cache in taken else None)


if __name__ == "__main__":
    main()
