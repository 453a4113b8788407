"""Fill the cache before the first call: at the build of an image, on a machine without a GPU.

Every op has an example of its arguments. Run on meta tensors it computes nothing and lists the
kernels that it would need, forward and backward; those are compiled on several threads, which
NVRTC serves in parallel, from the first one that is listed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fusionrt import inventory
from fusionrt.arguments import as_int
from fusionrt.catalogue import COLUMNS, OPS, ROWS
from fusionrt.collector import paused
from fusionrt.dispatch import is_number
from fusionrt.dtypes import name_of
from fusionrt.op import Operator
from fusionrt.op_names import ALIASES
from fusionrt.problem import MASK, Problem, unpack
from fusionrt.rehearsal import Source, collecting
from fusionrt.runtime import cache, compiler, device, launch

DTYPES = ("float32", "bfloat16", "float16")  # float64 on request
SHOWN = 5     # failures, as text
LARGE_BLOCK = 31 << 20  # bytes; the limit follows none above 32 MiB
FEW_ROWS = 512  # of which kernels over rows give each to more threads
# Keyword of an op -> its values. Each combination may be another kernel.
VARIANTS = {"approximate": ("none", "tanh"), "training": (True, False), "bias_first": (True, False)}

Names = str | Iterable[Any] | None
Sizes = int | str | Sequence[int]
Progress = Callable[[int, int, str], object]  # kernels done, kernels in all, name of the last one
Failure = tuple[str, str, str]  # kernel or op, architecture, reason
T = TypeVar("T")


@dataclass
class Summary:
    """What a warm-up did. `bytes` counts the code of compiled and present kernels."""

    compiled: int = 0
    present: int = 0
    failed: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    bytes: int = 0

    def __str__(self) -> str:
        text = (f"{self.compiled} kernels compiled, {self.present} already there, "
                f"{len(self.failed)} failed; {self.bytes / 1e6:.1f} MB, {self.seconds:.1f} s")
        return "\n".join([text, *self.failures])

    @property
    def failures(self) -> list[str]:
        """The first few of `failed`, each as a sentence; what has the same cause is one."""
        causes: dict[str, list[Failure]] = {}
        for failure in self.failed:
            causes.setdefault(failure[-1], []).append(failure)
        shown = list(causes.items())[:SHOWN]
        more = len(self.failed) - sum(len(alike) for _, alike in shown)
        sentences = [_sentence(*alike[0], len(alike) - 1) for _, alike in shown]
        return [*sentences, f"and {more} more"] if more else sentences


def _sentence(name: str, arch: str, why: str, more: int) -> str:
    if why.startswith(name) and not more:
        return why
    return f"{name} ({arch}){f' and {more} more' if more else ''}: {why}"


class Job(NamedTuple):
    """One kernel to compile. `entry` is the name in a GPU's text, the accuracy for the CPU."""

    arch: str
    text: str
    entry: str

    @property
    def key(self) -> str:
        if self.arch != "cpu":
            return compiler.key(self.text, self.entry, self.arch)
        from fusionrt.cpu import compiler as cpu
        return cpu.key(self.text, self.entry)

    def run(self, name: str) -> tuple[cache.Entry, bool]:
        if self.arch != "cpu":
            return compiler.cubin(self.text, self.entry, self.arch, name)
        from fusionrt.cpu import compiler as cpu
        return cpu.cached_object(self.text, self.entry, name)


class Calls(NamedTuple):
    """What kernels are compiled for: arguments of these dtypes, of so many columns (and rows)."""

    dtypes: Sequence[torch.dtype]
    widths: Sequence[int]
    heights: Sequence[int]
    backward: bool


def warmup(arch: Names = None, ops: Names = None, dtypes: Names = None, jobs: int | None = None,
           module: Names = None, backward: bool = True, progress: Progress | None = None,
           columns: Sizes = COLUMNS, rows: Sizes | None = None) -> Summary:
    """Compile the kernels of the catalogue and of the optimizers, or of what is named, into the cache; those
    that are there cost nothing.

    Lists may be lists or comma strings. `arch`: "native" (the visible GPUs, or the CPU where there
    is none; the default), "all" GPU architectures, "cpu" (this very processor), or names as sm_90;
    no GPU is needed. `ops`: names, or "all" with the optimizers, which is the default without `module`.
    `dtypes`: float32, bfloat16 and float16 by default, or "all", which adds float64. `module`: modules whose
    fused functions to compile: these alone, or with `ops` those that it names, "all" being these and the
    catalogue. A function may have an attribute `example`, as the ops of the catalogue have.
    `backward`: gradients too. `jobs`: threads; by default one more than processors, as one waits for the
    disk, and at most 9. `columns`: lengths of the last dimension, as 768 or "768,3072". `rows`: how many of
    them calls will have, as 1 or "1,64", beside thousands.

    Kernels depend on the kind of layout, not on sizes, but those over rows on the rows' length, and where
    there are few on their number (one row is a layout of its own): what is compiled serves contiguous
    arguments of an op's usual shapes with so many columns, of thousands of rows and of those given. Any
    other call compiles its kernel at its first use.

    Raises ValueError for an unknown architecture, op, dtype or module, and says what there is.

        fusionrt.warmup("sm_80,sm_90", ops=["bias_gelu"], dtypes="bfloat16")
    """
    start = time.perf_counter()
    architectures = _architectures(arch)
    calls = Calls(_dtypes(dtypes), _sizes("columns", columns), [] if rows is None else _sizes("rows", rows),
                  backward)
    if jobs is None:
        jobs = min(compiler.MAX_JOBS, os.cpu_count() or 1) + 1  # one waits for the disk
    if jobs < 1:
        raise ValueError(f"warmup: jobs must be at least 1, got {jobs}")
    summary, whole = Summary(), None
    everything = module is None if ops is None else "all" in _split(ops)
    if everything and module is None and len(_split(ops)) < 2:  # others may be no names
        whole = inventory.identity(architectures, [name_of(d) for d in calls.dtypes], calls.widths,
                                   calls.heights, calls.backward)
        entries = inventory.entries(whole)
        if entries is not None:
            summary.present, summary.bytes = len(entries), sum(len(e.payload) for e in entries)
            summary.seconds = time.perf_counter() - start
            return summary
    todo = _todo(_functions(ops, module, everything), calls, architectures, everything, summary)
    done = _compile(_elsewhere(todo), jobs, summary, progress)
    if whole is not None and not summary.failed:
        inventory.keep(whole, {job.key for job in done}, architectures)
    summary.seconds = time.perf_counter() - start
    return summary


def _todo(functions: Sequence[Any], calls: Calls, architectures: Sequence[str], optimizers: bool,
          summary: Summary) -> Iterator[tuple[Job, str]]:
    """Kernels and their names, some of them twice; `summary` hears of the examples that fail."""
    for kind in dict.fromkeys(map(_kind, architectures)):
        group = [a for a in architectures if _kind(a) == kind]
        yield from _jobs(functions, calls, kind, group, summary)
        if optimizers:
            yield from _of_optimizers(calls.dtypes, kind.device, group)


class Kind(NamedTuple):
    """Of architectures for which the same kernels are listed."""

    device: str
    clusters: bool  # without them other kernels sum over wide rows


def _kind(arch: str) -> Kind:
    return Kind("cpu", False) if arch == "cpu" else Kind("cuda", compiler.has_clusters(arch))


def _elsewhere(made: Iterator[T]) -> Iterator[T]:
    """The same, made by a thread of its own: others have plans of earlier calls, which list nothing."""
    with ThreadPoolExecutor(1) as pool:
        while (one := pool.submit(next, made, None).result()) is not None:
            yield one


def _compile(todo: Iterable[tuple[Job, str]], jobs: int, summary: Summary, progress: Progress | None
             ) -> Collection[Job]:
    """Compile, beginning with the first kernel that is known; return all that there were."""
    # glibc keeps what is freed, up to a limit that follows the largest block ever freed. Without one NVRTC's
    # memory goes back to the system after each kernel: 2600 page faults to have it again, 7 % of the time.
    bytearray(LARGE_BLOCK)
    names: dict[Job, str] = {}
    futures: dict[Future[tuple[cache.Entry, bool]], Job] = {}
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="fusionrt-warmup")
    try:
        with paused():
            for job, name in todo:
                if job not in names:
                    names[job] = name
                    futures[pool.submit(job.run, name)] = job
        for done, future in enumerate(as_completed(futures), 1):
            job = futures[future]
            try:
                entry, was_there = future.result()
            except Exception as error:
                summary.failed.append((names[job], job.arch, _reason(error)))
            else:
                summary.present += was_there
                summary.compiled += not was_there
                if cache.only_remembered(job.key):
                    summary.failed.append((names[job], job.arch, "compiled, but not kept: the cache on disk "
                                           "cannot be written"))
                summary.bytes += len(entry.payload)
            if progress is not None:
                progress(done, len(futures), f"{names[job]} ({job.arch})")
    finally:
        pool.shutdown(cancel_futures=True)
    return names.keys()


def _reason(error: Exception) -> str:
    ours = isinstance(error, RuntimeError) and str(error)
    return str(error) if ours else f"{type(error).__name__}: {error}"


# -- what there is to compile ----------------------------------------------------------------------

def _jobs(functions: Sequence[Any], calls: Calls, kind: Kind, group: Sequence[str], summary: Summary
          ) -> Iterator[tuple[Job, str]]:
    """The kernels that the functions' examples need."""
    seen: set[Problem | Source] = set()
    for function, dtype, columns in itertools.product(functions, calls.dtypes, calls.widths):
        try:
            with collecting(*kind) as needed:
                _rehearse(function, dtype, ROWS, columns, calls.backward)
                few = any(isinstance(p, Problem) and (p.row_dims or _masks(p)) for p in needed)
                for rows in (*[FEW_ROWS] * few, *calls.heights):
                    _rehearse(function, dtype, rows, columns, calls.backward)
            new = [p for p in dict.fromkeys(needed) if p not in seen]
            seen.update(new)
            texts = [(*text, p.name) for p in new for text in _texts(p, kind.device)]
        except Exception as error:
            name = f"{function.__name__} of {name_of(dtype)}"
            summary.failed += [(name, arch, _reason(error)) for arch in group]
            continue
        for arch, (text, entry, name) in itertools.product(group, texts):
            yield Job(arch, text if arch == "cpu" else compiler.seen_by(arch, text), entry), name


def _of_optimizers(dtypes: Sequence[torch.dtype], kind: str, group: Sequence[str]
                   ) -> Iterator[tuple[Job, str]]:
    from fusionrt.optim import precompile
    for source, arch in itertools.product(precompile.sources(kind, map(name_of, dtypes)), group):
        yield Job(arch, source.text, source.entry), source.name


def _masks(problem: Problem) -> bool:
    """Whether it has one, as of many elements."""
    return any(o.dtype == MASK for o in (*problem.inputs, *problem.outputs))


def _texts(problem: Problem | Source, kind: str) -> list[tuple[str, str]]:
    if isinstance(problem, Source):
        return [(problem.text, problem.entry)]
    if kind == "cuda":
        return [(source.text, source.entry) for source in launch.sources(problem)]
    from fusionrt import cpu
    return cpu.texts(problem)


def _rehearse(function: Any, dtype: torch.dtype, rows: int, columns: int, backward: bool) -> None:
    """Call it on meta tensors, as for inference and as for training."""
    for keywords in _variants(function, dtype):
        args, more = _example(function, dtype, rows, columns, requires_grad=False)
        with torch.no_grad():
            function(*args, **more, **keywords)
        if not backward:
            continue
        args, more = _example(function, dtype, rows, columns, requires_grad=True)
        out = function(*args, **more, **keywords)
        outputs = [o for o in unpack(out) if o.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(o) for o in outputs])


def _variants(function: Any, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    parameters = inspect.signature(function).parameters
    values: dict[str, Sequence[Any]] = {k: v for k, v in VARIANTS.items() if k in parameters}
    if "dtype" in parameters and dtype != torch.float64:
        values["dtype"] = (dtype,)
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _example(function: Any, dtype: torch.dtype, rows: int, columns: int, requires_grad: bool
             ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments: the function's own example, or a matrix for whatever has no default."""

    def make(*shape: int, dtype: torch.dtype = dtype, high: int | None = None) -> torch.Tensor:
        shape = tuple({ROWS: rows, COLUMNS: columns}.get(n, n) for n in shape)
        return torch.empty(shape, dtype=dtype, device="meta",
                           requires_grad=requires_grad and dtype.is_floating_point)

    if hasattr(function, "example"):
        return tuple(function.example(make)), {}
    args, keywords = [], {}
    for p in inspect.signature(function).parameters.values():
        if p.default is not p.empty:
            continue
        value = 1.0 if is_number(p) else make(ROWS, COLUMNS)
        if p.kind is p.KEYWORD_ONLY:
            keywords[p.name] = value
        else:
            args.append(value)
    return tuple(args), keywords


# -- what the user named ---------------------------------------------------------------------------

def _split(names: Names) -> list[Any]:
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    if names is not None and not isinstance(names, Iterable):
        raise TypeError(f"warmup: names must be text or a list, got {names!r}")
    return list(names or ())


def _dtypes(dtypes: Names) -> list[torch.dtype]:
    known = (*DTYPES, "float64")
    chosen: list[str] = []
    for name in DTYPES if dtypes is None else map(name_of, _split(dtypes)):
        if name not in (*known, "all"):
            raise ValueError(f"warmup: no dtype {name!r}; there are {', '.join(known)}, and all")
        chosen += known if name == "all" else [name]
    if not chosen:
        raise ValueError(f"warmup: no dtype given; there are {', '.join(known)}, and all")
    return [getattr(torch, name) for name in dict.fromkeys(chosen)]


def _sizes(option: str, given: Sizes) -> list[int]:
    try:
        sizes = [int(n) if isinstance(n, str) else as_int("warmup", option, n)
                 for n in (_split(given) if isinstance(given, Iterable) else [given])]
    except (TypeError, ValueError):
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) >= 1 << 31:  # torch counts a tensor's bytes in 63 bits
        raise ValueError(f"warmup: {option} must be positive integers below 2^31, got {given!r}")
    return sizes


def _architectures(arch: Names) -> list[str]:
    known = (*compiler.ARCHITECTURES, "cpu")
    chosen: list[str] = []
    for name in _split("native" if arch is None else arch):
        if name == "native":
            chosen += native()
        elif name == "all":
            chosen += [a for a in compiler.ARCHITECTURES if a in _supported()]
        elif name in known or name in _supported():
            chosen.append(name)
        else:
            more = [a for a in _supported() if a not in known]
            raise ValueError(f"warmup: no architecture {name!r}; there are native, all, "
                             f"{', '.join((*known, *more))}")
    if not chosen:
        raise ValueError("warmup: no architecture given; there are native, all, "
                         f"{', '.join(known)}")
    return list(dict.fromkeys(chosen))


def _supported() -> Sequence[str]:
    """What NVRTC can compile for. Without NVRTC the cache may still hold what we know of."""
    try:
        return compiler.supported()
    except RuntimeError:
        return compiler.ARCHITECTURES


def native() -> list[str]:
    """The architectures of the visible GPUs; the CPU where there is none."""
    if not torch.cuda.is_available():
        return ["cpu"]
    return [device.architecture(index) for index in range(device.device_count())]


def _functions(ops: Names, module: Names, everything: bool) -> list[Any]:
    """The chosen ones of the catalogue and of the user's modules."""
    modules = _split(module)
    if module is not None and not modules:
        raise ValueError("warmup: no module is given")
    users = [f for name in modules for f in _fused_in(name)]
    chosen = [ALIASES.get(name, name) for name in _split(ops)]
    if ops is not None and not chosen:
        raise ValueError(f"warmup: no op is given; there are {', '.join(sorted(OPS))}, and all")
    known = [*OPS, *(f.__name__ for f in users)]
    for name in chosen:
        if name not in (*known, "all"):
            raise ValueError(f"warmup: no op {name!r}; there are {', '.join(sorted(known))}, and all")
    if everything:
        return [*OPS.values(), *users]
    return [*(OPS[name] for name in OPS if name in chosen),
            *(f for f in users if ops is None or f.__name__ in chosen)]


def _fused_in(name: str) -> list[Any]:
    """A module's own fused functions; those of the catalogue that it imports are known already."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints is no part of what we do
            members = vars(importlib.import_module(name)).values()
    except (Exception, SystemExit) as error:  # a script without a guard ends where it likes
        hint = f" (of a file, write {Path(name).stem})" if name.endswith(".py") else ""
        raise ValueError(f"warmup: module {name!r} cannot be imported: "
                         f"{type(error).__name__}: {error}{hint}") from error
    found = {id(m): m for m in members if isinstance(getattr(m, "operator", None), Operator)}
    own = [m for m in found.values() if OPS.get(m.__name__) is not m]
    if not own:
        raise ValueError(f"warmup: module {name!r} has no function made by fusionrt.fuse")
    return own
