"""Warm-up: what it compiles, what it leaves alone, what it says; every kernel of the catalogue."""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pointwise_ops
import pytest
import torch
from checking import needs_nvrtc
from machine_code import reads_too_early

import fusionrt as frt
from fusionrt import inventory, precompile
from fusionrt.catalogue import OPS
from fusionrt.precompile import Summary, native, warmup
from fusionrt.rehearsal import collecting
from fusionrt.runtime import cache, compiler, device, launch, source

ALL_DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.delenv("FUSIONRT_CACHE_READONLY_DIRS", raising=False)
    monkeypatch.delenv("FUSIONRT_DISABLE_JIT", raising=False)
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module with fused functions, and one that cannot be rehearsed."""
    (tmp_path / "their_ops.py").write_text(
        "import fusionrt as frt\n"
        "from fusionrt import add_relu, fuse\n"
        "@fuse\n"
        "def their_gate(x, y, *, bias, p: float, slope=0.5):\n"
        "    return frt.sigmoid(x) * y * p + slope * x + bias\n"
        "@fuse\n"
        "def their_row(x, w):\n"
        "    return x * w\n"
        "their_row.example = lambda make: (make(64, 128), make(128))\n"
        "@fuse\n"
        "def their_broken(x):\n"
        "    return x + 1\n"
        "their_broken.example = lambda make: (make(2, 3), make(5))\n"
        "alias = their_row\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "their_ops"
    sys.modules.pop("their_ops", None)


def kernels(field: str = "kernel") -> Counter[str]:
    return Counter(info.metadata[field] for info in compiled())


def compiled() -> list[cache.Info]:
    return [info for info in cache.entries() if info.metadata["kernel"] != inventory.KERNEL]


# --- what is compiled


@needs_nvrtc
def test_writes_cubins_and_the_second_run_compiles_nothing(home: Path) -> None:
    first = warmup("sm_90", ["add_relu", "bias_gelu"], "float32")

    found = list(cache.contents())
    assert (first.compiled, first.present, first.failed) == (len(found), 0, [])
    assert first.bytes == sum(len(entry.payload) for _, entry in found)
    assert {entry.payload[:4] for _, entry in found} == {b"\x7fELF"}
    assert {info.metadata["arch"] for info, _ in found} == {"sm_90"}
    assert {info.path.parent for info, _ in found} == {home}
    assert first.seconds > 0
    # add_relu with a mask and without; two forms of bias_gelu, which share the kernel that adds sums.
    assert kernels() == {"add_relu": 2, "add_relu_backward_101": 1, "add_relu_backward_10_by_mask": 1,
                         "bias_gelu": 1,
                         "bias_gelu_tanh": 1, "bias_gelu_backward_111": 2,
                         "bias_gelu_tanh_backward_111": 1}

    second = warmup("sm_90", ["add_relu", "bias_gelu"], "float32")
    assert (second.compiled, second.present, second.failed) == (0, len(found), [])
    assert second.bytes == first.bytes


@needs_nvrtc
def test_names_may_be_lists_or_text_and_repeat() -> None:
    text = warmup("sm_90, sm_80,sm_90", "tanh, tanh,silu", "float32,bfloat16")
    lists = warmup(["sm_80", "sm_90"], ["silu", "tanh"], [torch.bfloat16, "float32"])

    assert text.compiled == 2 * 2 * 2 * 2  # architectures, ops, dtypes, forward and backward
    assert (lists.compiled, lists.present) == (0, text.compiled)


@needs_nvrtc
def test_default_dtypes_leave_out_float64() -> None:
    assert warmup("sm_90", "relu", backward=False).compiled == 3
    assert warmup("sm_90", "relu", "all", backward=False).compiled == 1


@needs_nvrtc
def test_aliases_name_their_op() -> None:
    warmup("sm_90", "fused_add_relu", "float32", backward=False)
    assert kernels() == {"add_relu": 1}


@needs_nvrtc
def test_without_backward_there_are_no_gradients() -> None:
    summary = warmup("sm_90", "gelu_dropout", "bfloat16", backward=False)

    assert summary.compiled == 4
    assert kernels() == {"gelu_dropout": 1, "gelu_tanh_dropout": 1, "gelu": 1, "gelu_tanh": 1}


@needs_nvrtc
def test_all_architectures() -> None:
    summary = warmup("all", "tanh", "float32")

    assert summary.compiled == 2 * len(compiler.ARCHITECTURES)
    assert {info.metadata["arch"] for info in cache.entries()} == set(compiler.ARCHITECTURES)


@needs_nvrtc
def test_an_architecture_that_only_nvrtc_knows() -> None:
    other = next(a for a in compiler.supported() if a not in compiler.ARCHITECTURES)
    assert warmup(other, "relu", "float32", backward=False).compiled == 1


@needs_nvrtc
def test_a_warm_run_does_not_load_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    warmup("sm_90", "tanh", "float32")

    def never() -> None:
        raise AssertionError("NVRTC was asked for")

    monkeypatch.setattr(compiler, "_nvrtc", never)
    assert warmup("sm_90", "tanh", "float32").present == 2


@needs_nvrtc
def test_plans_of_earlier_calls_hide_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(4096, 4096, device="meta")
    with torch.no_grad():
        frt.relu(x)
    first = warmup("sm_90", "relu", "float32", backward=False)
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(home.with_name("another")))
    second = warmup("sm_90", "relu", "float32", backward=False)

    assert first.compiled == second.compiled == 1


def test_kernels_that_are_not_kept_have_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(cache.CacheWarning):
        summary = warmup("cpu", "add_relu", "float32", backward=False)
    assert [reason for _, _, reason in summary.failed] == [
        "compiled, but not kept: the cache on disk cannot be written"]


def test_no_op_at_all() -> None:
    with pytest.raises(ValueError, match="warmup: no op is given; there are "):
        warmup("cpu", "", "float32")


@needs_nvrtc
@pytest.mark.parametrize("jobs", [1, 3])
def test_progress_counts_every_kernel(jobs: int) -> None:
    seen: list[tuple[int, int, str]] = []
    summary = warmup("sm_90", "tanh,silu", "float32", jobs=jobs,
                     progress=lambda *step: seen.append(step))

    assert [(done, total) for done, total, _ in seen] == [(k, 4) for k in range(1, 5)]
    assert sorted(name for _, _, name in seen) == [
        "silu (sm_90)", "silu_backward_11 (sm_90)", "tanh (sm_90)", "tanh_backward_11 (sm_90)"]
    assert summary.compiled == 4


@pytest.mark.parametrize(("arch", "seen"), [("sm_75", "1 3 5"), ("sm_80", "1 3 4 5"), ("sm_90a", "1 2 4 5"),
                                            ("sm_120", "1 3 4 5")])
def test_a_kernel_is_what_its_architecture_sees(arch: str, seen: str) -> None:
    text = ("1\n#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200\n2\n#else  // neither Hopper nor B200\n3\n"
            "#endif\n#if __CUDA_ARCH__ >= 800\n4\n#endif  // Ampere\n5\n")
    assert compiler.seen_by(arch, text).split() == seen.split()


def test_conditions_of_templates_are_decided_before_they_are_compiled() -> None:
    def conditions(text: str) -> list[str]:
        others = re.sub(r"^#ifdef .*?^#endif", "", text, flags=re.M | re.S)  # of the specialisation
        return re.findall(r"^ *#(?:if|el|endif).*", others, re.M)

    left = {path.name: conditions(compiler.seen_by("sm_90", path.read_text()))
            for path in source.directory().iterdir()}
    assert left == {name: [] for name in left}


def test_headers_stand_once_after_what_they_include(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"nested.cu": '// kernel\n#include "all.cuh"\n#include "later.cuh"\n#include "first.cuh"\nbody\n',
             "all.cuh": '// all\n#include "second.cuh"\n',
             "first.cuh": "namespace fusionrt {\nfirst\n}\n",
             "second.cuh": '#include "first.cuh"\nnamespace fusionrt {\nsecond\n}\n',
             "later.cuh": '#include "second.cuh"\nlater\n'}
    monkeypatch.setattr(source, "template", files.__getitem__)
    lines = source.assemble("nested", ["constants"], ["functions"]).split("\n")
    assert [line for line in lines if line] == [
        "constants", "namespace fusionrt {", "first", "}", "namespace fusionrt {", "second", "}",
        "namespace fusionrt {", "functions", "// kernel", "// all", "later", "body",
        "}  // namespace fusionrt"]


def test_rows_that_differ_on_older_gpus_alone_are_one_kernel() -> None:
    texts = []
    for rows in (8192, 512):
        with collecting() as problems:
            x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
                    for shape in ((rows, 4096), (4096,)))
            frt.rms_norm(x, w).sum().backward()
        texts.append([s for p in problems for s in launch.sources(p) if s.entry == "rows"][-1].text)

    many, few = texts
    assert many != few
    assert compiler.key(many, "rows", "sm_80") != compiler.key(few, "rows", "sm_80")
    assert compiler.key(many, "rows", "sm_90") == compiler.key(few, "rows", "sm_90")


@pytest.mark.parametrize("op", ["group_norm", "layer_norm"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_rows_of_gpus_without_clusters_are_listed_as_they_are_called(op: str, arch: str, monkeypatch) -> None:
    """Where rows do not wait in shared memory, the gradients of weights are sums in kernels of their own."""
    def gradients() -> None:
        shape, norm = {"group_norm": ((64, 64, 112, 112), lambda *a: frt.group_norm(a[0], 32, *a[1:])),
                       "layer_norm": ((512, 65536), lambda *a: frt.layer_norm(a[0], (65536,), *a[1:]))}[op]
        tensors = [torch.empty(s, device="meta", requires_grad=True) for s in (shape, shape[1:2], shape[1:2])]
        torch.autograd.grad(norm(*tensors), tensors, torch.empty_like(tensors[0]))

    clusters = compiler.has_clusters(arch)
    monkeypatch.setattr(device, "has_clusters", lambda index: clusters)
    with collecting("cuda:0") as called:
        gradients()
    with collecting(*precompile._kind(arch)) as listed:
        gradients()
    assert listed == called
    assert [bool(p.row_dims) for p in listed] == [True] * 2 + [False] * (not clusters)


# --- the CPU, and that the kernels are those that calls ask for


CALLS = """
import torch, fusionrt.ops
from fusionrt.catalogue import OPS

torch.manual_seed(0)
for name in {ops}:
    for dtype in (torch.float32, torch.bfloat16):
        def make(*shape, dtype=dtype, **_):
            shape = [{{8192: {rows}, 4096: 256}}.get(n, n) for n in shape]
            if not dtype.is_floating_point:
                return torch.ones(shape, dtype=dtype, device={device!r})
            return torch.randn(shape, device={device!r}).to(dtype).requires_grad_()
        args = OPS[name].example(make)
        with torch.no_grad():
            OPS[name](*args)
        out = OPS[name](*args)
        outputs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
            leaves = [a for a in args if torch.is_tensor(a) and a.requires_grad and a.is_leaf]
            assert all(a.grad is not None for a in leaves), name
    print(name)
"""


def call_without_compiling(ops: list[str], device: str, rows: int = 512) -> list[str]:
    env = {**os.environ, "FUSIONRT_DISABLE_JIT": "1"}
    run = subprocess.run([sys.executable, "-c", CALLS.format(ops=ops, device=device, rows=rows)], env=env,
                         capture_output=True, text=True, cwd=Path(frt.__file__).parents[1])
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_cpu_kernels_serve_calls() -> None:
    ops = ["bias_gelu", "gelu_dropout", "quantize_int8", "dequantize_int8", "add_norm", "softmax"]
    summary = warmup("cpu", ops, "float32,bfloat16", columns=256)

    assert summary.failed == []
    assert summary.compiled == sum(kernels().values()) > 0
    assert {info.metadata["arch"] for info in cache.entries()} == {"cpu"}
    assert call_without_compiling(ops, "cpu") == ops


@pytest.mark.gpu
def test_gpu_kernels_serve_calls() -> None:
    ops = sorted(OPS.keys() - {"cpu_fused_attention", "optimized_cpu_attention"})
    summary = warmup("native", ops, "float32,bfloat16", columns=256)

    assert summary.compiled > 0 and summary.failed == []
    assert call_without_compiling(ops, "cuda") == ops


def test_kernels_of_few_rows_serve_calls(device: str) -> None:
    ops = ["softmax", "bias_gelu"]
    if device == "cuda":  # whose kernels differ by it
        ops += ["layer_norm", "sum", "cross_entropy", "embedding_position"]
    summary = warmup("cpu" if device == "cpu" else "native", ops, "float32,bfloat16", columns=256,
                     rows="1, 64")

    assert summary.compiled > 0 and summary.failed == []
    for rows in (1, 64):
        assert call_without_compiling(ops, device, rows) == ops


def test_native_is_the_cpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert native() == ["cpu"]

    summary = warmup(ops="relu", dtypes="float32", backward=False)
    assert [info.metadata["arch"] for info in cache.entries()] == ["cpu"]
    assert summary.compiled == 1


def test_native_names_each_visible_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "device_count", lambda: 3)
    monkeypatch.setattr(device, "architecture", lambda i: ("sm_80", "sm_90")[i // 2])
    assert native() == ["sm_80", "sm_80", "sm_90"]

    from fusionrt.precompile import _architectures
    assert _architectures(None) == ["sm_80", "sm_90"]


# --- a user's own functions


@needs_nvrtc
def test_functions_of_a_users_module(package: str) -> None:
    summary = warmup("sm_90", "their_gate,their_row", "float32", module=package)

    assert (summary.compiled, summary.failed) == (sum(kernels().values()), [])
    # bias is added: its gradient is the incoming one, and so is slope's default.
    assert kernels() == {"their_gate": 1, "their_gate_backward_110001": 1, "their_row": 1,
                         "their_row_backward_111": 2}


@needs_nvrtc
def test_a_function_that_fails_is_named_and_stops_nothing(package: str) -> None:
    summary = warmup("sm_90,sm_80", "their_broken,relu", "float32", module=package, backward=False)

    why = "TypeError: their_broken() takes 1 positional argument but 2 were given"
    assert summary.failed == [("their_broken of float32", "sm_90", why),
                              ("their_broken of float32", "sm_80", why)]
    assert summary.compiled == 2
    assert str(summary).splitlines()[1:] == [f"their_broken of float32 (sm_90) and 1 more: {why}"]


@needs_nvrtc
def test_a_module_alone_is_all_that_is_compiled(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "all" the catalogue and the optimizers come to it."""
    monkeypatch.setattr(precompile, "OPS", {name: OPS[name] for name in ("tanh", "add_relu")})
    asked = []
    monkeypatch.setattr(precompile, "_of_optimizers", lambda *_: asked.append("optimizers") or [])
    options = {"dtypes": "float32", "module": package, "backward": False}
    alone = warmup("sm_90", **options)
    assert kernels() == {"their_gate": 1, "their_row": 1}
    assert (alone.compiled, [name for name, *_ in alone.failed]) == (2, ["their_broken of float32"])
    assert asked == []
    assert (warmup("sm_90", "all", **options).compiled, kernels()["tanh"], asked) == (2, 1, ["optimizers"])
    with pytest.raises(ValueError, match=r"warmup: no op 'rleu'; there are .*, and all"):
        warmup("sm_90", "all,rleu")


# --- what it refuses


def test_a_module_that_ends_the_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_script.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="module 'their_script' cannot be imported: SystemExit: 0"):
        warmup("cpu", module="their_script")


@pytest.mark.parametrize(("arguments", "message"), [
    ({"arch": "sm_13"}, "warmup: no architecture 'sm_13'; there are native, all, "
                        + ", ".join(compiler.ARCHITECTURES) + ", cpu"),
    ({"arch": []}, "warmup: no architecture given; there are native, all, sm_75"),
    ({"arch": "cpu", "ops": "relu,rleu"}, "warmup: no op 'rleu'; there are add_mul_add, "),
    ({"arch": "cpu", "dtypes": "int8"},
     "warmup: no dtype 'int8'; there are float32, bfloat16, float16, float64, and all"),
    ({"arch": "cpu", "dtypes": ""}, "warmup: no dtype given; there are float32"),
    ({"arch": "cpu", "module": "no_such_package"},
     "warmup: module 'no_such_package' cannot be imported: ModuleNotFoundError: No module named"),
    ({"arch": "cpu", "module": "json"},
     "warmup: module 'json' has no function made by fusionrt.fuse"),
    ({"arch": "cpu", "columns": "4,x"}, "warmup: columns must be positive integers below 2^31, got '4,x'"),
    ({"arch": "cpu", "columns": 2.5}, "warmup: columns must be positive integers below 2^31, got 2.5"),
    ({"arch": "cpu", "columns": [64, 1.5]}, "warmup: columns must be positive integers below 2^31, got [64,"),
    ({"arch": "cpu", "columns": 0}, "warmup: columns must be positive integers below 2^31, got 0"),
    ({"arch": "cpu", "rows": 0}, "warmup: rows must be positive integers below 2^31, got 0"),
    ({"arch": "cpu", "rows": "0"}, "warmup: rows must be positive integers below 2^31, got '0'"),
    ({"arch": "cpu", "jobs": 0}, "warmup: jobs must be at least 1, got 0"),
])
def test_unknown_names_are_answered_with_what_there_is(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        warmup(**arguments)
    assert list(cache.entries()) == []


def test_unknown_op_lists_the_users_own(package: str) -> None:
    with pytest.raises(ValueError, match=r"no op 'gate'; there are .*their_gate, their_row"):
        warmup("cpu", "gate", module=package)


def test_disable_jit_reports_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONRT_DISABLE_JIT", "1")
    summary = warmup("sm_90", "tanh", "float32")

    assert (summary.compiled, summary.present, summary.bytes) == (0, 0, 0)
    assert sorted((name, arch) for name, arch, _ in summary.failed) == [
        ("tanh", "sm_90"), ("tanh_backward_11", "sm_90")]
    assert all("FUSIONRT_DISABLE_JIT is set and the kernel is not in the cache" in why
               for _, _, why in summary.failed)


def test_without_nvrtc_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    summary = warmup("sm_90", "relu", "float32", backward=False)

    ((name, arch, why),) = summary.failed
    assert (name, arch) == ("relu", "sm_90")
    assert why.startswith("compiling a CUDA kernel needs CuPy and NVRTC: pip install 'fusionrt[")


@needs_nvrtc
def test_an_nvrtc_too_old_for_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    version = compiler.version()
    monkeypatch.setattr(compiler, "supported", lambda: ("sm_75", "sm_80"))

    assert warmup("sm_120", "relu", "float32", backward=False).failed == [
        ("relu", "sm_120", f"relu: NVRTC {version} cannot compile for sm_120, only for sm_75, "
                           "sm_80; upgrade the package nvidia-cuda-nvrtc")]
    assert warmup("all", "relu", "float32", backward=False).compiled == 2


def test_a_long_list_of_failures_is_cut_in_text_only() -> None:
    summary = Summary(1, 2, [(f"op{k}", "sm_90", f"cause {k}") for k in range(9)], 3.0, 4_000_000)
    assert str(summary).splitlines() == [
        "1 kernels compiled, 2 already there, 9 failed; 4.0 MB, 3.0 s",
        *(f"op{k} (sm_90): cause {k}" for k in range(5)), "and 4 more"]


def test_a_cause_of_several_failures_is_said_once() -> None:
    summary = Summary(failed=[("a", "sm_90", "why"), ("b", "sm_90", "b: its own"), ("c", "sm_80", "why")])
    assert summary.failures == ["a (sm_90) and 1 more: why", "b: its own"]


# --- the whole catalogue


@needs_nvrtc
def test_what_the_whole_catalogue_needs_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "OPS", {name: OPS[name] for name in ("tanh", "silu")})
    monkeypatch.setattr(precompile, "_of_optimizers", lambda *_: {})
    searches = []
    search = precompile._jobs
    monkeypatch.setattr(precompile, "_jobs", lambda *given: searches.append(1) or search(*given))

    def warm(**options: object) -> tuple[int, int, int]:
        """Kernels compiled, and already there; how often they had to be found."""
        searches.clear()
        done = warmup("sm_90", **{"dtypes": "float32", "backward": False, **options})
        assert done.failed == [] and done.bytes > 0
        return done.compiled, done.present, len(searches)

    assert warm() == (2, 0, 1)
    assert warm() == (0, 2, 0)
    assert warm(dtypes="bfloat16") == (2, 0, 1)
    assert warm(backward=True) == (2, 2, 1)
    assert warm(ops="tanh") == (0, 1, 1)
    for info in compiled():
        info.path.unlink()
    assert warm() == (2, 0, 1)
    monkeypatch.setattr(inventory, "_package", lambda: "another version's")
    assert warm() == (0, 2, 1)


# --- every kernel


def compile_everything(architectures: list[str], dtype: str) -> None:
    summary = warmup(architectures, dtypes=dtype)
    assert summary.failed == []
    assert summary.compiled == sum(kernels().values())
    for op in OPS:
        # Attention is torch's as a rule, others are named after the parts that they share.
        shared = ("norm", "cross_entropy", "loss", "ffn", "swiglu", "separable")
        if "attention" not in op and not op.endswith(shared):
            assert any(name.startswith(op) for name in kernels()), op
    for op in pointwise_ops.DIFFERENTIABLE:
        assert any(name.startswith(f"{op}_backward") for name in kernels()), op
    assert faulty() == []
    assert early() == []


def early() -> list[str]:
    """Kernels that may begin before the one ahead has ended, and do not wait for what they read."""
    return [info.metadata["kernel"] for info, entry in cache.contents()
            if info.metadata.get("arch", "").startswith(("sm_9", "sm_1"))
            and entry.payload.startswith(b"\x7fELF") and reads_too_early(entry.payload)]


def faulty() -> list[dict]:
    return [info.metadata for info in compiled()
            if any(info.metadata[fault] for fault in ("spills", "stack", "warnings"))]


@needs_nvrtc
@pytest.mark.parametrize("dtype", [  # the most elements a pack, hence the most registers, and conversions
    d if d == "bfloat16" else pytest.param(d, marks=pytest.mark.slow) for d in ALL_DTYPES])
def test_every_kernel_compiles_without_spills(dtype: str) -> None:
    compile_everything(["sm_90"], dtype)


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_op_of_every_kind_compiles_for_wider_elements(dtype: str) -> None:
    kinds = ("argmax", "bias_gelu", "cross_entropy", "gelu_dropout", "layer_norm", "quantize_int8", "softmax",
             "var")
    assert warmup("sm_90", kinds, dtype).failed == []
    assert faulty() == []
    assert early() == []


@needs_nvrtc
@pytest.mark.slow  # three to ten minutes on two cores
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_kernel_compiles_for_every_architecture(dtype: str) -> None:
    compile_everything(["all"], dtype)
    count = kernels("arch")
    assert set(count) == set(compiler.ARCHITECTURES)
    with_clusters = {count.pop("sm_90"), count.pop("sm_100")}  # others sum over wide rows in further kernels
    assert len(with_clusters) == len(set(count.values())) == 1


@needs_nvrtc
def test_the_log_that_the_gate_reads_shows_spills() -> None:
    """A kernel that must spill: otherwise zero spills would prove nothing."""
    text = """
extern "C" __global__ void __launch_bounds__(1024, 2) spiller(float* x) {
    float r[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) r[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 64; ++i) for (int j = 0; j < 64; ++j) x[i] += r[i] * r[j];
}"""
    metadata = compiler.build(text, "spiller", "sm_90", "spiller").metadata
    assert metadata["spills"] > 0
    assert metadata["stack"] > 0


def test_sources_of_a_problem_have_entries_of_templates() -> None:
    with collecting() as problems:
        x = torch.empty(64, 128, device="meta", requires_grad=True)
        b = torch.empty(128, device="meta", requires_grad=True)
        frt.bias_relu(x, b).sum().backward()
    entries = [source.entry for p in problems for source in launch.sources(p)]
    assert entries == ["pointwise", "pointwise_reduce", "sum_partials"]
