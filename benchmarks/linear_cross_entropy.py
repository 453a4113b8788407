"""linear_cross_entropy against cross-entropy of the logits of a linear layer: time and memory of a step.

bfloat16, forward and backward; device time of steps issued one after the other. Memory is the peak of a step
beside the operands. Vocabularies are those of GPT-2 and Llama 3.
"""

from __future__ import annotations

import gc

import torch
from torch.nn import functional as F

import fusionrt
from benchmarks import script
from fusionrt.bench import sampling, timing
from fusionrt.bench.results import Results, why

CASES = ((8192, 1024, 50257), (8192, 4096, 128256), (32768, 4096, 128256))  # tokens, width, vocabulary
COLUMNS = ("tokens", "width", "vocabulary", "us", "eager_us", "vs_eager", "peak_MB", "eager_peak_MB",
           "memory", "error")


def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.need_gpu()
    run = script.results("linear_cross_entropy-gpu", __doc__, options)
    for tokens, width, vocabulary in CASES[:1] if options.quick else CASES:
        try:
            _measure(tokens, width, vocabulary, run)
        except Exception as error:
            run.add(tokens=tokens, width=width, vocabulary=vocabulary, error=why(error))
        timing.release()
    run.finish(COLUMNS)


def _measure(tokens: int, width: int, vocabulary: int, run: Results) -> None:
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16)
    weight = (weight / width ** 0.5).requires_grad_()
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    steps = {
        "ours": lambda: fusionrt.linear_cross_entropy(hidden, weight, target).backward(),
        "eager": lambda: F.cross_entropy(F.linear(hidden, weight).float(), target).backward()}
    peaks, times = {}, {}
    for name, step in steps.items():
        step()
        peaks[name] = _peak(step) / (1 << 20)
        times[name] = sampling.issued({"": [step, step]}, rounds=3)[""].us
        timing.release()
    run.add(tokens=tokens, width=width, vocabulary=vocabulary, us=times["ours"], eager_us=times["eager"],
            vs_eager=round(times["eager"] / times["ours"], 3), peak_MB=peaks["ours"],
            eager_peak_MB=peaks["eager"], memory=round(peaks["ours"] / peaks["eager"], 3))


def _peak(step: timing.Call) -> int:
    """Bytes that a step has at most beside what was there before it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
