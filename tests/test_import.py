"""`import fusionrt` costs nothing: no heavy module, no file. An op costs its own module. Names are real."""

import ast
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checking import needs_nvrtc

import fusionrt
from fusionrt import kernels, op_names, ops
from fusionrt.catalogue import OPS
from fusionrt.cpu import compiler

PACKAGE = Path(fusionrt.__file__).parent
HEAVY = ("torch", "cupy", "cupy_backends", "numba", "llvmlite")


def run(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light_and_writes_nothing(tmp_path: Path) -> None:
    # Everything a library could think of writing to leads to the one empty directory.
    places = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    env = dict.fromkeys(places, str(tmp_path))
    env |= {"PATH": os.defpath, "PYTHONPATH": str(PACKAGE.parent)}
    code = f"import sys, fusionrt; print([name for name in {HEAVY} if name in sys.modules])"

    run = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


FIRST_USE = """
import sys, threading
import fusionrt
import fusionrt.ops, fusionrt.kernels, fusionrt.catalogue, fusionrt.activation

loaded = lambda: sorted(m for m in sys.modules if m.startswith("fusionrt.ops."))
print(loaded())
found, start = [], threading.Barrier(8)
def first_use():
    start.wait()
    found.append(fusionrt.add_relu)
threads = [threading.Thread(target=first_use) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert len(found) == 8 and set(map(id, found)) == {id(fusionrt.ops.add_relu)}
fusionrt.kernels.fusion.fused_bias_gelu, fusionrt.ops.bias_gelu_pytorch, len(fusionrt.catalogue.OPS)
print(loaded())
print([m for m in ("nn", "optim", "convert", "bench", "data", "precompile", "reference")
       if f"fusionrt.{m}" in sys.modules])
"""


def test_an_op_costs_its_own_module() -> None:
    before, after, others = run(FIRST_USE).splitlines()
    assert before == "[]"
    assert after == str(["fusionrt.ops.activations", "fusionrt.ops.pointwise"])
    assert others == "[]"


SHARED = sorted(op_names.MODULE.keys() & op_names.OPS.keys())
NAMES_OF_OPS = f"""
import importlib, types
for name in {SHARED}:  # the modules first, as others import them
    importlib.import_module("fusionrt.ops." + name)
import fusionrt
for name in {SHARED}:
    assert not isinstance(getattr(fusionrt.ops, name), types.ModuleType), name
    assert getattr(fusionrt.ops, name) is getattr(fusionrt, name)
from fusionrt.ops import pointwise, reduction
print(pointwise.__name__, reduction.__name__, fusionrt.ops.activations.__name__)
"""


def test_a_name_that_an_op_and_a_module_share_is_the_ops() -> None:
    assert {"attention", "norm", "softmax"} <= set(SHARED)
    assert run(NAMES_OF_OPS) == "fusionrt.ops.pointwise fusionrt.ops.reduction fusionrt.ops.activations"


@needs_nvrtc
def test_compiling_needs_no_more_of_cupy_than_the_binding() -> None:
    code = ("import sys; from concurrent.futures import ThreadPoolExecutor\n"
            "from fusionrt.runtime import compiler\n"
            "text = 'extern \"C\" __global__ void f() {}'\n"
            "build = lambda name: compiler.build(text, 'f', 'sm_90', name)\n"
            "with ThreadPoolExecutor(4) as pool:  # all at once, before it is loaded\n"
            "    print({made.payload[:4] for made in pool.map(build, 'abcd')}, 'cupy' in sys.modules)")
    assert run(code) == r"{b'\x7fELF'} False"


@pytest.mark.gpu
def test_calls_on_a_gpu_need_no_more_of_cupy_than_the_binding() -> None:
    code = ("import sys, torch, fusionrt\nx = torch.randn(33, device='cuda', requires_grad=True)\n"
            "fusionrt.softmax(fusionrt.silu(x)).sum().backward()\n"
            "print('cupy_backends.cuda.api.driver' in sys.modules, 'cupy' in sys.modules)\n"
            "import cupy; print(cupy.cuda.runtime.getDeviceCount() > 0)  # which comes as a whole later")
    assert run(code) == "True False\nTrue"


def test_public_names_resolve() -> None:
    assert len(fusionrt.__all__) == len(set(fusionrt.__all__)) > 0
    assert [name for name in fusionrt.__all__ if not hasattr(fusionrt, name)] == []
    assert set(ops.__all__) <= set(dir(ops)) and set(fusionrt.__all__) <= set(dir(fusionrt))


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def shown_to_type_checkers(package: Path) -> set[str]:
    """The names that are imported there under TYPE_CHECKING, or declared."""
    blocks = [node for node in ast.parse(package.read_text()).body
              if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    return {name for block in blocks for node in block.body for name in (
        [alias.asname for alias in node.names] if isinstance(node, ast.ImportFrom) else [node.target.id])}


def test_type_checkers_see_what_there_is() -> None:
    assert sorted(shown_to_type_checkers(PACKAGE / "ops" / "__init__.py")) == ops.__all__
    shown = shown_to_type_checkers(PACKAGE / "__init__.py") - {None}  # None: `import *` of the ops
    assert shown == set(fusionrt.__all__) - set(ops.__all__) - {"__version__"}


def test_the_list_of_ops_is_complete() -> None:
    listed = {(module, op) for module, ops in op_names.OPS.items() for op in ops}
    assert fusionrt.ops.__all__ == sorted(op for _, op in listed)
    assert listed == {(op.__module__.rpartition(".")[2], name) for name, op in OPS.items()}
    assert len(OPS) == len(listed) == len(list(OPS))


def test_other_names_and_ways() -> None:
    assert [alias for alias, op in op_names.ALIASES.items() if getattr(ops, alias) is not OPS[op]] == []
    assert ops.swiglu_cpu is OPS["swish_multiply"].cpu
    assert ops.softmax_pytorch is OPS["softmax"].reference
    assert kernels.normalization.fused_batch_norm is kernels.batch_norm is ops.batch_norm_cuda
    assert {"fused_add_norm", "group_norm"} <= set(dir(kernels.normalization))
    for package, name in ((ops, "no_such_op"), (ops, "no_such_op_cuda"), (kernels, "no_such_op"),
                          (kernels.loss, "add_relu")):
        with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no op '{name}'"):
            getattr(package, name)


@pytest.mark.parametrize("name", ["add_relu", "attention", "norm"])
def test_ops_are_pickled_by_name(name: str) -> None:
    assert pickle.loads(pickle.dumps(OPS[name])) is OPS[name]


def test_a_first_use_in_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in (fusionrt, ops):
        for name in ("bias_gelu", "mul_tanh"):
            monkeypatch.delitem(vars(package), name, raising=False)
    torch._dynamo.reset()
    x, b = torch.randn(4, 8), torch.randn(8)

    def function(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return fusionrt.bias_gelu(x, b) + ops.multiply_tanh(x, b)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, b), function(x, b))
    torch._dynamo.reset()


def test_isinstance_has_tuples() -> None:
    """Dynamo of torch 2.6 traces no `isinstance(x, A | B)`, and most functions of ours may be traced."""
    for path in PACKAGE.rglob("*.py"):
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "isinstance":
                assert not isinstance(n.args[1], ast.BinOp), f"{path.name}:{n.lineno}"


def test_systems_without_forks() -> None:
    """As Windows. (torch asks by the system's name.)"""
    assert run("""
import os, torch
del os.register_at_fork
import fusionrt as frt
x = torch.ones(3)
frt.cross_entropy(torch.randn(2, 5, 3), torch.zeros(2, 3, dtype=torch.int64))
print((frt.add_relu(x, x) + 0 * frt.relu_dropout(x, 0.5)).tolist())
""") == "[2.0, 2.0, 2.0]"


def test_a_cpus_machine_code_is_known_by_all_that_it_follows_from() -> None:
    """Importing what kernels use would load Numba, so the cache's key has a list of files."""
    folder, found, left = PACKAGE / "cpu", {"compiler"}, ["memory"]
    while left:
        found.add(name := left.pop())
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusionrt.cpu"):
                of_package = node.module == "fusionrt.cpu"
                names = [a.name for a in node.names] if of_package else [str(node.module).split(".")[-1]]
                left += [name for name in names if name not in found]
    assert found == set(compiler.SOURCES)


@pytest.mark.parametrize("package", ["bench", "convert", "cpu", "data", "nn", "optim", "runtime"])
def test_a_package_names_its_files(package: str) -> None:
    """Where its docstring says which idea each has."""
    folder = PACKAGE / package
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {name for name in files if f"`{name}`" not in said} == set()
