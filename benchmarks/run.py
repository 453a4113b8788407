"""`python -m benchmarks.run`: all benchmarks that fit this machine, one after the other.

    python -m benchmarks.run --quick                     # a few rows of each, nothing is written
    python -m benchmarks.run startup pointwise_cpu       # these
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.script import ROOT
from fusionrt.bench.results import kind

# Name -> the kinds of machine that it runs on.
BENCHMARKS = {"pointwise_large": "gpu", "pointwise_sweep": "gpu", "launch_overhead": "gpu",
              "new_shapes": "gpu, cpu",
              "startup": "gpu, cpu", "warmup_time": "gpu, cpu", "pointwise_cpu": "cpu",
              "catalogue": "gpu, cpu", "rows": "gpu", "rows_cpu": "cpu", "rivals": "gpu",
              "optimizers": "gpu",
              "embedding": "gpu", "attention": "gpu", "qkv": "gpu",
              "image": "gpu, cpu", "window": "gpu, cpu", "transformer_block": "gpu", "reductions": "gpu",
              "layouts": "gpu, cpu",
              "channel_norms": "gpu", "convolution": "gpu", "linear_cross_entropy": "gpu",
              "linear": "gpu", "ffn": "gpu", "gemm": "gpu",
              "models": "gpu, cpu", "models_startup": "gpu, cpu",
              "models_training": "gpu"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="a few rows of each")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    chosen = options.names or [n for n, kinds in BENCHMARKS.items() if kind() in kinds]
    failed = []
    for name in chosen:
        print(f"\n== {name}", flush=True)
        start = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += ["--quick"] if options.quick else []
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
