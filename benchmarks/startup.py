"""What a fresh process pays before its first result: imports, then compiling or loading a kernel.

Every figure is the median over fresh processes, in milliseconds. `cold`: the kernel caches are
empty; `warm`: an earlier process filled them. Either way an earlier process has read all files and compiled
all modules to bytecode, as they are where packages were installed.
The first call is split: importing torch and making the CUDA context are not counted; then `import
fusionrt`, the modules of the op and of what it is made of, third-party modules that the call needs
(cupy_backends on a GPU, llvmlite on a CPU; NVRTC or Numba too if it compiles), and the rest of the
first call. `ours`: all but the third-party modules.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import script
from benchmarks.script import ROOT
from fusionrt.bench.results import Results, kind

COLUMNS = ("what", "cache", "ms", "spread_ms", "import_fusionrt", "own_modules", "third_party",
           "first_call", "ours", "second_call", "absent")
# What follows the common beginning; `stage(name)` notes the milliseconds since the stage before.
BEGIN = """
import json, time
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
a, b = torch.randn(64, 1024, device=device), torch.randn(64, 1024, device=device)
wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
torch.relu(a + b); wait()
stages, before = {}, time.perf_counter()
def stage(name):
    global before
    wait()
    now = time.perf_counter()
    stages[name], before = (now - before) * 1e3, time.perf_counter()
"""
END = "\nprint(json.dumps(stages))\n"
OURS = """
import fusionrt as frt
stage("import_fusionrt")
frt.add_relu
stage("own_modules")
if device == "cuda":
    from fusionrt.runtime import binding
    binding.driver()
    if COLD:
        binding.nvrtc()
else:
    import llvmlite.binding
    if COLD:
        import numba
stage("third_party")
frt.add_relu(a, b)
stage("first_call")
frt.add_relu(a, b)
stage("second_call")
"""
COMPILE = """
add_relu = torch.compile(lambda a, b: torch.relu(a + b), dynamic=False)
add_relu(a, b)
stage("first_call")
add_relu(a, b)
stage("second_call")
"""
TRITON = """
from benchmarks.triton_add_relu import add_relu
stage("third_party")
add_relu(a, b)
stage("first_call")
add_relu(a, b)
stage("second_call")
"""


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--processes", type=int, default=3, help="a figure; default: %(default)s")
    options = parser.parse_args()
    n = 2 if options.quick else options.processes
    run = script.results(f"startup-{kind()}", __doc__, options)
    _imports(run, n)
    for what, code in (("fusionrt.add_relu", OURS), ("torch.compile of relu(a + b)", COMPILE),
                       ("add_relu in Triton", TRITON)):
        if what == "add_relu in Triton" and kind() != "gpu":
            run.add(what=what, cache=None, absent="no GPU")
            continue
        _first_calls(run, what, code, n)
    run.finish(COLUMNS)


def _imports(run: Results, n: int) -> None:
    """Wall time of whole processes: bare Python, and Python that imports something."""
    codes = {"python": "pass", "import fusionrt": "import fusionrt",
             "import torch": "import torch", "import torch, fusionrt": "import torch, fusionrt"}
    samples: dict[str, list[float]] = {name: [] for name in codes}
    for name in [*codes] * (n + 1):
        samples[name].append(process(codes[name], {})[0])
    bare = statistics.median(samples["python"][1:])
    for name, (_, *taken) in samples.items():  # without the first, which reads files from the disk
        middle = statistics.median(taken)
        run.add(what=name, cache=None, ms=middle, spread_ms=max(taken) - min(taken), processes=n,
                over_python_ms=middle - bare)


def _first_calls(run: Results, what: str, code: str, n: int) -> None:
    cold, warm = (f"COLD = {empty}\n{BEGIN}{code}{END}" for empty in (True, False))
    try:
        with tempfile.TemporaryDirectory() as shared:
            process(cold, caches(shared))
            found = {"cold": [stages_of(cold) for _ in range(n)],
                     "warm": [stages_of(warm, shared) for _ in range(n)]}
    except RuntimeError as error:
        run.add(what=what, absent=str(error))
        return
    for cache, taken in found.items():
        stages = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
        whole = [sum(one.values()) - one["second_call"] for one in taken]
        if "own_modules" in stages:
            stages["ours"] = statistics.median(
                ms - one["third_party"] for ms, one in zip(whole, taken, strict=True))
        run.add(what=what, cache=cache, ms=statistics.median(whole), spread_ms=max(whole) - min(whole),
                processes=n, **stages)


def stages_of(code: str, folder: str | None = None) -> dict[str, float]:
    """What a process prints last, whose caches are in the folder, or in an empty one."""
    with tempfile.TemporaryDirectory() as fresh:
        found: dict[str, float] = json.loads(process(code, caches(folder or fresh))[1].splitlines()[-1])
        return found


def caches(folder: str) -> dict[str, str]:
    return {name: str(Path(folder) / name) for name in (
        "FUSIONRT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUPY_CACHE_DIR",
        "CUDA_CACHE_PATH")}


@functools.cache
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    """Of all processes: not everybody may write beside the modules."""
    return tempfile.TemporaryDirectory()


def process(code: str, environment: dict[str, str]) -> tuple[float, str]:
    """Milliseconds and output of a fresh Python."""
    common = {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": _bytecode().name, "PYTHONDONTWRITEBYTECODE": ""}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, **common, **environment})
    taken = (time.perf_counter() - start) * 1e3
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it failed"])[-1][:200])
    return taken, done.stdout


if __name__ == "__main__":
    main()
