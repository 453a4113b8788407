"""The command `fusionrt new-op`: a fused function, its test and its benchmark, to begin from."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import keyword
import sys
from pathlib import Path

import click

OP = '''"""NAME, fused: one kernel forward, one backward, on GPUs and CPUs."""

import fusionrt as frt


@frt.fuse
def NAME(x, y):
    """sigmoid(x) * y + 0.5 * x, elementwise; x and y broadcast. `help(frt.fuse)` says what can stand here."""
    return frt.sigmoid(x) * y + 0.5 * x
'''
TEST = '''import pytest
import torch
from NAME import NAME

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_GPU)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def formula(x, y):
    return torch.sigmoid(x) * y + 0.5 * x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(64, 129), (1,), (0, 3)], ids=str)
def test_results_and_gradients_against_float64(device, dtype, shape):
    x, y = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(2))
    wide = [t.detach().double().requires_grad_() for t in (x, y)]
    out, exact = NAME(x, y), formula(*wide)
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, (x, y), grad)]
    expected = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.double(), b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_second_derivatives():
    x, y = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradgradcheck(NAME, (x, y))
'''
BENCHMARK = '''"""How long NAME takes beside torch's separate ops, and how exact both are."""

import torch
from NAME import NAME

from fusionrt.bench import compare_implementations

device = "cuda" if torch.cuda.is_available() else "cpu"


def formula(x, y):
    return torch.sigmoid(x) * y + 0.5 * x


def inputs(n):
    return torch.randn(n, device=device), torch.randn(n, device=device)


print(compare_implementations({"eager": formula, "fused": NAME}, inputs, sizes=(1 << 14, 1 << 18, 1 << 22),
                              reference=formula, title="NAME"))
'''
FILES = {"NAME.py": OP, "test_NAME.py": TEST, "bench_NAME.py": BENCHMARK}


def _taken() -> set[str]:
    """What the files, or a program beside them, would no longer find under its name."""
    nodes = [node for text in FILES.values() for node in ast.walk(ast.parse(text))]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    used |= {name for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))
             for alias in node.names for name in (alias.name, alias.asname or alias.name)}
    used |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return {*sys.stdlib_module_names, *dir(builtins), *used, *functions} - {"NAME"}


@click.command("new-op", short_help="Begin a fused function of your own, tested and measured.")
@click.argument("name")
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), default=Path(), metavar="FOLDER",
              show_default=True, help="Where to write the files.")
def new_op(name: str, into: Path) -> None:
    """Begin a fused function of your own: NAME.py, test_NAME.py (for pytest) and bench_NAME.py, which run as
    they are."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise click.BadParameter(f"must be a name in Python, got {name!r}", param_hint="'NAME'")
    if name in _taken() or name in sys.modules or importlib.util.find_spec(name) is not None:
        raise click.BadParameter(f"must be no name of Python's, of a package or in these files, got {name!r}",
                                 param_hint="'NAME'")
    if name.startswith("test"):
        raise click.BadParameter(f"must not begin with test, which pytest takes for a test, got {name!r}",
                                 param_hint="'NAME'")
    texts = {into / file.replace("NAME", name): text.replace("NAME", name) for file, text in FILES.items()}
    there = [str(path) for path in texts if path.exists()]
    if there:
        raise click.ClickException(f"{', '.join(there)}: there already; nothing was written")
    try:
        into.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            click.echo(path)
    except OSError as error:
        raise click.BadParameter(f"{error.filename} cannot be written: {error.strerror}",
                                 param_hint="--into") from None
