"""The catalogue's kernels, forward and backward, four dtypes, one architecture: those of its pointwise ops,
and of all ops and optimizers.

Each row is a fresh process, with an empty cache (cold) or the one that it left (warm). `seconds` is
the warm-up itself, `process_s` the process with its imports. The architecture is the GPU's own, and
sm_90 where there is none: compiling needs no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks import script
from benchmarks.script import ROOT
from fusionrt.bench.results import Row, kind
from fusionrt.op_names import OPS
from fusionrt.runtime.compiler import MAX_JOBS

CODE = """
import dataclasses, json, sys
import fusionrt
arch, ops, dtypes = sys.argv[1:]
done = fusionrt.warmup(arch, ops=ops or None, dtypes=dtypes)
print(json.dumps(dataclasses.asdict(done)))
"""
POINTWISE = ("activations", "pointwise", "dropout", "quantize")  # families
COLUMNS = ("arch", "ops", "cache", "seconds", "process_s", "compiled", "present", "failed", "MB", "jobs",
           "error")


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--arch", help="sm_90, cpu, ...")
    options = parser.parse_args()
    name = kind()
    arch = options.arch or ("native" if name == "gpu" else "sm_90")
    run = script.results(f"warmup_time-{name}", __doc__, options, bool(options.arch))
    pointwise = ",".join(op for family in POINTWISE for op in OPS[family])
    chosen = {"two": "add_relu,bias_gelu"} if options.quick else {"pointwise": pointwise, "all": ""}
    dtypes = "float32" if options.quick else "all"
    for what, ops in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                run.add(arch=arch, ops=what, cache=cache, dtypes=dtypes,
                        **_warm_up(folder, arch, ops, dtypes))
    run.finish(COLUMNS)


def _warm_up(folder: str, arch: str, ops: str, dtypes: str) -> Row:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FUSIONRT_CACHE_DIR": folder}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", CODE, arch, ops, dtypes], capture_output=True,
                          text=True, cwd=ROOT, env=environment)
    taken = time.perf_counter() - start
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it failed"])[-1][:200]}
    summary = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": summary["seconds"], "process_s": taken, "compiled": summary["compiled"],
            "present": summary["present"], "failed": len(summary["failed"]),
            "MB": summary["bytes"] / 1e6, "jobs": min(MAX_JOBS, os.cpu_count() or 1) + 1}


if __name__ == "__main__":
    main()
