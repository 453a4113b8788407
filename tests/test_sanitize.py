"""`sanitize.py` with a sanitizer that only runs its program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sanitize import in_turns, our_kernels

SANITIZER = f"""#!{sys.executable}
import os, sys
at = sys.argv.index("--log-file")
open(sys.argv[at + 1], "a").write("begins")
os.execv(sys.argv[at + 2], sys.argv[at + 2:])
"""
TORCH = """
class cuda:  # each process would import the real one
    is_available, device_count = (lambda: False), (lambda: 0)
"""
TESTS = """
import os, pathlib, pytest
pytestmark = pytest.mark.gpu
def test_clean(): os.write(1, b"sanitize: failed")
def test_failed(): assert False
def test_reported():
    with open("verdicts.0.log", "a") as log: log.write("=== Error\\n===  at void f::g<(int)1>+0x10\\n")
def test_died(): os._exit(1)
def test_broken():
    import torch
    def synchronize(): raise RuntimeError("as after each failed launch")
    torch.cuda.is_available, torch.cuda.synchronize = lambda: True, synchronize
def test_clean_again(): pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half the time that a process takes to begin
    (tmp_path / "sanitizer").write_text(SANITIZER)
    (tmp_path / "sanitizer").chmod(0o755)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")


def test_verdicts_are_kept(tmp_path):
    (tmp_path / "test_them.py").write_text(TESTS)
    command = [sys.executable, Path(__file__).with_name("sanitize.py"), "racecheck", "test_them.py",
               "--jobs", "1", "--verdicts", "verdicts.json", "--record", "record.json",
               "--sanitizer", tmp_path / "sanitizer"]
    begun = tmp_path / "verdicts.0.log"
    for more, processes in (((), 3), ((), 0), (("--again", "died"), 1)):  # the second time nothing is left
        before = begun.read_text().count("begins") if begun.exists() else 0
        ran = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (1, "")
        assert ran.stdout.endswith("2 clean, 1 died, 2 failed, 1 reported (0 left)\n")
        assert begun.read_text().count("begins") - before == processes
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert {name.partition("::test_")[2]: verdict for name, (verdict, _) in verdicts.items()} == {
        "clean": "clean", "failed": "failed assert False", "reported": "reported f::g", "died": "died",
        "broken": "failed", "clean_again": "clean"}
    record = json.loads((tmp_path / "record.json").read_text())["racecheck"]
    file = record["files"]["test_them.py"]
    assert len(record["not clean"]) == 4 and (file["tests"], file["clean tests"]) == (6, 2)
    assert record["not clean"]["test_them.py::test_reported"] == "reported f::g"


def test_what_was_clean_is_left_out(tmp_path):
    begin, one = "import pytest\n", "@pytest.mark.gpu\ndef test_{}(): assert {}\n"
    for clean, said, begun in ((False, "2 clean, 1 failed", {"a", "b", "c"}), (True, "1 clean", {"b"})):
        (tmp_path / "test_a.py").write_text(begin + one.format("a", True) + one.format("b", clean))
        (tmp_path / "test_c.py").write_text(begin + one.format("c", True))
        verdicts = tmp_path / f"{clean}.json"  # those of another session
        command = [sys.executable, Path(__file__).with_name("sanitize.py"), "racecheck", ".", "--jobs", "1",
                   "--verdicts", verdicts, "--record", "record.json", "--sanitizer", tmp_path / "sanitizer"]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (int(not clean), "")
        assert ran.stdout.endswith(f"{said} (0 left)\n")
        assert {test[-1] for test in json.loads(verdicts.read_text())} == begun
    record = json.loads((tmp_path / "record.json").read_text())["racecheck"]
    assert [(file["tests"], file["clean tests"]) for file in record["files"].values()] == [(2, 2), (1, 1)]
    assert not record["not clean"]


def test_a_sanitizer_that_cannot_run(tmp_path):
    (tmp_path / "test_them.py").write_text(TESTS)
    ran = subprocess.run([sys.executable, Path(__file__).with_name("sanitize.py"), "memcheck", "test_them.py",
                          "--sanitizer", "true"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and "a process ended before its first test" in ran.stderr


def test_new_values_of_parameters_come_first():
    assert in_turns(["f[a-1]", "f[a-2]", "f[b-1]", "f[b-2]", "g", "h[1]"]) == [
        "f[a-1]", "f[a-2]", "f[b-1]", "g", "h[1]", "f[b-2]"]


def test_every_kernel_of_ours_has_a_name():
    texts = [file.read_text() for file in Path(__file__).parents[1].joinpath("kernels_src").glob("*.cu")]
    assert len(set(our_kernels())) == sum(text.count("__global__") for text in texts) > 40
