"""`import fusionrt` costs nothing: no heavy module, no file; and its public names are real."""

import os
import subprocess
import sys
from pathlib import Path

import fusionrt
from fusionrt import op_names
from fusionrt.catalogue import OPS

PACKAGE = Path(fusionrt.__file__).parent
HEAVY = ("torch", "cupy", "cupy_backends", "numba", "llvmlite")


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


def test_public_names_resolve() -> None:
    assert len(fusionrt.__all__) == len(set(fusionrt.__all__)) > 0
    assert [name for name in fusionrt.__all__ if not hasattr(fusionrt, name)] == []


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_the_list_of_ops_is_complete() -> None:
    listed = {(module, op) for module, ops in op_names.OPS.items() for op in ops}
    assert fusionrt.ops.__all__ == sorted(op for _, op in listed)
    assert listed == {(op.__module__.rpartition(".")[2], name) for name, op in OPS.items()}
