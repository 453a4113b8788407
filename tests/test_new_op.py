"""What `fusionrt new-op` writes runs as it is."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from fusionrt.cli import main


def begin(*words):
    return CliRunner().invoke(main, ["new-op", *map(str, words)])


def test_its_files_run(tmp_path):
    began = begin("soft_gate", "--into", tmp_path / "ops")
    assert began.exit_code == 0, began.output
    assert sorted(p.name for p in (tmp_path / "ops").iterdir()) == [
        "bench_soft_gate.py", "soft_gate.py", "test_soft_gate.py"]
    run = {"cwd": tmp_path / "ops", "capture_output": True, "text": True}
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."], **run)
    assert tested.returncode == 0, tested.stdout
    assert "13 passed, 12 skipped" in tested.stdout or "25 passed" in tested.stdout
    measured = subprocess.run([sys.executable, "bench_soft_gate.py"], **run)
    assert measured.returncode == 0, measured.stderr
    assert "soft_gate" in measured.stdout and "fused" in measured.stdout


def test_it_overwrites_nothing(tmp_path):
    (tmp_path / "test_gate.py").write_text("mine")
    began = begin("gate", "--into", tmp_path)
    assert began.exit_code == 1
    assert began.output == f"Error: {tmp_path / 'test_gate.py'}: there already; nothing was written\n"
    assert [p.name for p in tmp_path.iterdir()] == ["test_gate.py"]


def test_it_wants_a_name():
    for name in ("a-gate", "class", "1st"):
        began = begin(name)
        assert began.exit_code == 2
        assert f"Invalid value for 'NAME': must be a name in Python, got '{name}'" in began.output


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    began = begin("gate", "--into", tmp_path / "file" / "inside")
    assert began.exit_code == 2
    assert f"{tmp_path / 'file' / 'inside'} cannot be written: Not a directory" in began.output


@pytest.mark.parametrize("name", ["x", "device", "formula", "torch", "frt", "print", "json", "numpy",
                                  "__main__"])
def test_names_that_its_files_or_python_need(name, tmp_path):
    began = begin(name, "--into", tmp_path)
    assert began.exit_code == 2
    assert f"must be no name of Python's, of a package or in these files, got '{name}'" in began.output
    assert not any(tmp_path.iterdir())


def test_a_name_that_pytest_would_take_for_a_test(tmp_path):
    began = begin("test_gate", "--into", tmp_path)
    assert began.exit_code == 2 and "must not begin with test" in began.output
    assert not any(tmp_path.iterdir())
