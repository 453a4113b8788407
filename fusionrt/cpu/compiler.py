"""Generated Python text to machine code, with Numba; from the cache back into memory, without it.

Numba's own cache keeps pickles in two files that can tear, and overlooks changed callees. Here the
object code goes into the same one-file, checksummed cache as the GPU's cubins, and llvmlite alone
loads it: a warm process never imports Numba (half a second).
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusionrt import collector, forks
from fusionrt.runtime import cache, llvm

# Numba's calling convention: status = f(result*, exception**, arguments...)
_PROTOTYPE = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int64)
# Of Numba's, by which machine code differs; its results do not.
_OPTIONS = tuple(f"NUMBA_{option}" for option in (
    "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "CPU_NAME", "CPU_FEATURES"))
_SCRATCH = ctypes.create_string_buffer(64)  # result and exception of a function that has neither


class Function(NamedTuple):
    """A loaded kernel."""

    address: int
    scratch: int
    call: Callable[..., int]

    def __call__(self, addresses: Sequence[int], start: int, stop: int) -> None:
        """`addresses`: where pointers, integers and scalars are."""
        self.call(self.scratch, self.scratch, *addresses, start, stop)


_loaded: dict[str, Function] = {}
_lock = forks.Lock()


@functools.cache
def target() -> str:
    """Processor and features: object code runs on no other."""
    binding = llvm.library()
    features = sorted(f for f, on in binding.get_host_cpu_features().items() if on)
    return f"{binding.get_host_cpu_name()} {','.join(features)} {_vector_library()}"


def _vector_library() -> str:
    """Whose functions LLVM calls, found as Numba finds them. Loaded: object code calls them by name."""
    binding = llvm.library()
    has_svml = getattr(binding.targets, "has_svml", lambda: False)
    if os.environ.get("NUMBA_DISABLE_INTEL_SVML", "0") not in ("", "0") or not has_svml():
        return ""
    for name in ("libsvml.so", "libsvml.dylib", "svml_dispmd"):
        with contextlib.suppress(Exception):  # whatever the system raises for what is not there
            binding.load_library_permanently(name)
            return "svml"
    return ""


# What machine code follows from beside a kernel's text: this file and all that memory.py imports of these.
SOURCES = ("compiler", "storage", "reductions", "math16", "math32", "math64", "memory")


@functools.cache
def toolchain() -> str:
    here = Path(__file__).parent
    ours = hashlib.blake2b(b"".join((here / f"{s}.py").read_bytes() for s in SOURCES), digest_size=8)
    options = [f"{name}={os.environ[name]}" for name in _OPTIONS if name in os.environ]
    return " ".join([f"numba {importlib.metadata.version('numba')}",
                     f"llvmlite {importlib.metadata.version('llvmlite')}", ours.hexdigest(), *options])


def key(text: str, accuracy: str) -> str:
    return cache.key(source=text, accuracy=accuracy, target=target(), toolchain=toolchain())


def function(text: str, accuracy: str, name: str) -> Function:
    """The kernel as a C function of (pointers, integers, scalars, start, stop)."""
    identity = key(text, accuracy)
    with _lock():
        if identity not in _loaded:
            cached, _ = cached_object(text, accuracy, name)
            _loaded[identity] = _load(cached)
        return _loaded[identity]


def cached_object(text: str, accuracy: str, name: str) -> tuple[cache.Entry, bool]:
    return cache.get_or_build(key(text, accuracy), lambda: build(text, accuracy, name), f"{name} (cpu)")


def build(text: str, accuracy: str, name: str) -> cache.Entry:
    from numba import config, njit, types
    if config.DISABLE_JIT:
        raise RuntimeError(f"{name}: NUMBA_DISABLE_JIT is set, so its kernel for the CPU cannot be compiled")

    from fusionrt.cpu import memory
    scope = memory.scope(accuracy)
    exec(compile(text, f"<fusionrt kernel {name}>", "exec"), scope)
    signature = types.void(types.CPointer(types.int64), types.CPointer(types.int64),
                           types.CPointer(types.float64), types.int64, types.int64)
    compiling = njit(error_model="numpy", nogil=True, fastmath=False, boundscheck=False,
                     no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)  # no objects, so no counting
    with collector.paused():
        result = _compiled(compiling(scope["kernel"]), signature)
    return cache.Entry({"kernel": name, "arch": "cpu", "target": target().split()[0],
                        "symbol": result.fndesc.llvm_func_name}, result.library._get_compiled_object())


def _compiled(dispatcher: Any, signature: Any) -> Any:
    """As `dispatcher.compile` does, by our own generator of code and the passes that our texts need.

    Trap: `compile_extra` takes Numba's lock for each pass, and not while it makes the context, of which two
    threads are in each other's way: "generator already executing".
    """
    from numba.core import compiler
    from numba.core.registry import cpu_target
    flags = compiler.Flags()
    cpu_target.options.parse_as_flags(flags, dispatcher.targetoptions)
    with _numbas_lock():
        return compiler.compile_extra(_typing(), _context(), dispatcher.py_func, signature.args,
                                      signature.return_type, flags, {}, pipeline_class=_pipeline())


@functools.cache
def _numbas_lock() -> Any:
    from numba.core.compiler_lock import global_compiler_lock
    llvm.library()  # whose lock a thread takes after Numba's
    forks.waits_for(global_compiler_lock)
    return global_compiler_lock


@functools.cache
def _typing() -> Any:
    """Numba's, all of whose state it shares, but that remembers which signature it found for which operands:
    the same machine code in an eighth less time."""
    from numba.core.registry import cpu_target
    numbas = cpu_target.typing_context
    known: dict[Any, Any] = {}

    class Typing(type(numbas)):  # type: ignore[misc]
        def resolve_function_type(self, func: Any, args: Any, kws: Any) -> Any:
            asked = func, args, tuple(dict(kws).items())
            if asked not in known:
                found = super().resolve_function_type(func, args, kws)
                if found is None:  # what is defined later may do
                    return None
                known[asked] = found
            return known[asked]

    made = object.__new__(Typing)
    made.__dict__ = vars(numbas)
    return made


@functools.cache
def _pipeline() -> Any:
    """Numba's passes without those for closures, overloads, rewrites of arrays and literals, which generated
    texts have none of: the same machine code in an eighth less time."""
    from numba.core import compiler, compiler_machinery, typed_passes, untyped_passes
    passes = (*(getattr(untyped_passes, name) for name in (
                  "TranslateByteCode", "FixupArgs", "IRProcessing", "ReconstructSSA")),
              *(getattr(typed_passes, name) for name in (
                  "NopythonTypeInference", "PreLowerStripPhis", "AnnotateTypes", "NativeLowering",
                  "NoPythonBackend")))

    class Pipeline(compiler.CompilerBase):
        def define_pipelines(self) -> list[Any]:
            manager = compiler_machinery.PassManager("fusionrt")
            for each in passes:
                manager.add_pass(each, each.__name__)
            manager.finalize()
            return [manager]

    return Pipeline


@functools.cache
def _context() -> Any:
    """Numba's, with vectors of 512 bits on processors that have them. LLVM keeps to 256 on Intel's, of which
    the first lowered their clock by more than that gained; those with VBMI2 no longer do.

    And with LLVM's passes over the whole module alone, as Clang has them. Numba's over each function before
    them and for counted references took a seventh of the time, and code was no faster for them."""
    from numba.core import codegen
    from numba.core.registry import cpu_target

    class Library(codegen.JITCodeLibrary):
        def _optimize_functions(self, ll_module: Any) -> None:
            ll_module.data_layout = self._codegen._data_layout

        def _optimize_final_module(self) -> None:
            made = self._codegen._module_pass_manager()
            passes, *options = made if isinstance(made, tuple) else (made,)  # Numba 0.61
            passes.run(self._final_module, *options)

    class Codegen(codegen.JITCPUCodegen):
        _library_class = Library

        def _customize_tm_features(self) -> str:
            features = str(super()._customize_tm_features())
            return f"{features},-prefer-256-bit" if "+avx512vbmi2" in features.split(",") else features

    return cpu_target.target_context.subtarget(_internal_codegen=Codegen("fusionrt"))


def _load(entry: cache.Entry) -> Function:
    address = llvm.loaded(entry.payload, entry.metadata["symbol"])
    return Function(address, ctypes.addressof(_SCRATCH), _PROTOTYPE(address))
