"""The wheel, built by way of the sdist, is complete and works where no compiler is."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel and borrows only the dependencies."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, symlinks=True)
    python = root / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=root)
    # A directory named in a .pth file is searched, but its own .pth files are not read:
    # so the editable fusionrt of this environment stays out of sight.
    (site_packages,) = root.glob("lib/python*/site-packages")
    borrowed = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(borrowed))
    return root


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    templates = {n for n in names if n.startswith("fusionrt/kernels_src/")}
    modules = {n for n in names if n.endswith(".py")}

    assert wheel.name.endswith("-py3-none-any.whl")
    assert {"fusionrt/py.typed", "fusionrt/bench/report.html"} <= set(names)
    assert {n.split("/")[0].split("-")[0] for n in names} == {"fusionrt"}
    assert templates == {
        f"fusionrt/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "kernels_src").rglob("*.*")
        if path.suffix in (".cu", ".cuh", ".ll")
    }
    assert {Path(n).suffix for n in templates} == {".cu", ".cuh", ".ll"}
    assert modules == {p.relative_to(ROOT).as_posix() for p in (ROOT / "fusionrt").rglob("*.py")}


ADD_RELU = """
import importlib.metadata, pathlib, shutil, sys
import numpy as np
import fusionrt

assert pathlib.Path(fusionrt.__file__).is_relative_to(sys.prefix), fusionrt.__file__
assert fusionrt.__version__ == importlib.metadata.version("fusionrt")
assert not any(map(shutil.which, ["cc", "gcc", "g++", "c++", "clang", "nvcc", "ld"]))

x, y = np.random.default_rng(0).standard_normal((2, 1003), dtype=np.float32)
x[:3] = np.nan, np.inf, -np.inf
result = fusionrt.add_relu(x, y)
assert type(result) is np.ndarray and result.dtype == np.float32
np.testing.assert_array_equal(result, np.maximum(x + y, 0))
"""


def test_works_without_a_compiler(environment: Path, tmp_path: Path) -> None:
    env = {
        "PATH": str(environment / "bin"),
        "HOME": str(tmp_path),
        "FUSIONRT_CACHE_DIR": str(tmp_path / "cache"),
    }
    # -I keeps the checkout out: neither the working directory nor PYTHONPATH is searched.
    run(environment / "bin" / "python", "-I", "-c", ADD_RELU, cwd=tmp_path, env=env)
    assert "warmup" in run(environment / "bin" / "fusionrt", "--help", cwd=tmp_path, env=env)


COMPILED = """
import torch

x = torch.linspace(-2, 2, 64).reshape(8, 8)
found = torch.compile(lambda x: torch.relu(x * 2 + 1) * x, backend="fusionrt")(x)
torch.testing.assert_close(found, torch.relu(x * 2 + 1) * x)
"""


def test_torch_finds_the_backend(environment: Path, tmp_path: Path) -> None:
    env = {"PATH": "", "HOME": str(tmp_path), "FUSIONRT_CACHE_DIR": str(tmp_path / "cache")}
    run(environment / "bin" / "python", "-I", "-c", COMPILED, cwd=tmp_path, env=env)
