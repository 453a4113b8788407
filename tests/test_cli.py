"""The command `fusionrt`: what it prints, what it leaves behind, its exit status."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from checking import needs_nvrtc
from click.testing import CliRunner, Result

import fusionrt
from fusionrt.cli import main
from fusionrt.runtime import cache, compiler
from fusionrt.terminal import for_users

ROOT = Path(fusionrt.__file__).parents[1]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    for name in ("FUSIONRT_CACHE_READONLY_DIRS", "FUSIONRT_DISABLE_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache"


def call(*words: object, answer: str | None = None) -> Result:
    """The command in this process; a traceback is never an answer."""
    result = CliRunner().invoke(main, [str(word) for word in words], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def fill(*names: str, size: int = 1000) -> list[Path]:
    """Store entries, each an hour older than the next."""
    paths = []
    for age, name in enumerate(reversed(names)):
        key = cache.key(source=name)
        entry = cache.Entry({"kernel": name, "arch": "sm_90", "registers": 32}, bytes(size))
        assert cache.store(key, entry)
        path = cache.directory() / f"{key}.frt"
        used = time.time() - 3600 * (age + 0.5)
        os.utime(path, (used, used))
        paths.append(path)
    return paths[::-1]


def damage(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)


# --- the command itself


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = ("import sys; from fusionrt.cli import main\n"
            "try: main(sys.argv[1:], prog_name='fusionrt')\n"
            "except SystemExit as stop: assert not stop.code, stop.code\n"
            "print([m for m in ('torch', 'cupy', 'cupy_backends', 'numba', 'llvmlite', 'numpy') "
            "if m in sys.modules])")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in (["--help"], ["--version"], ["warmup", "--help"], ["cache", "path"],
                  ["cache", "list"], ["cache", "verify"], ["doctor", "--help"]):
        run = subprocess.run([sys.executable, "-c", code, *words], env=env, cwd=tmp_path,
                             capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.splitlines()[-1] == "[]", words


def test_version() -> None:
    assert call("--version").output == f"fusionrt, version {fusionrt.__version__}\n"


def test_help_names_the_commands() -> None:
    text = call("--help").output
    assert [name for name in ("warmup", "cache", "doctor") if f"\n  {name} " in text] == [
        "warmup", "cache", "doctor"]


@pytest.mark.parametrize("words", [(), ("cache",)])
def test_summaries_of_commands_are_not_cut(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = call(*words, "--help").output.split("Commands:\n")[1]
    assert len(listed.splitlines()) == (7 if words else 6)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed.splitlines())


def test_help_says_what_the_exit_status_means_and_what_defaults_are() -> None:
    text = " ".join(call("--help").output.split())
    assert ("The exit status is 0 where all went well, 1 where something failed or was found wrong, and 2 "
            "where the command line is") in text
    text = " ".join(call("warmup", "--help").output.split())
    assert "Of these dtypes, or all, with float64. [default: float32,bfloat16,float16]" in text
    assert "Only these ops, or all. [default: all; with --module none]" in text
    assert "Where to write the files. [default: .]" in " ".join(call("new-op", "--help").output.split())


# --- warmup


def numbers(result: Result) -> list[str]:
    """The one row of the summary's table."""
    row = next(line for line in result.stdout.splitlines() if line.startswith("│"))
    return row.replace("│", " ").split()


@needs_nvrtc
def test_warmup_prints_what_it_did(home: Path) -> None:
    words = ("warmup", "--arch", "sm_90", "--ops", "tanh,add_sigmoid", "--dtypes", "bfloat16")
    first, second = call(*words), call(*words)

    sizes = sum(len(entry.payload) for _, entry in cache.contents())
    assert (first.exit_code, second.exit_code) == (0, 0)
    compiled, present, failed, seconds, size = numbers(first)
    assert (compiled, present, failed, size) == ("4", "0", "0", f"{sizes:,}")
    assert float(seconds) >= 0
    assert numbers(second)[:3] == ["0", "4", "0"]
    assert len(list(home.glob("*.frt"))) == 4
    for column in ("compiled", "already there", "failed", "seconds", "bytes"):
        assert column in first.stdout


@needs_nvrtc
def test_warmup_as_json() -> None:
    words = ("warmup", "--arch", "sm_90,sm_80", "--ops", "relu", "--dtypes", "float32",
             "--no-backward", "--jobs", "1", "--json")
    report = json.loads(call(*words).stdout)

    assert report["seconds"] > 0
    assert report == {"compiled": 2, "present": 0, "failed": [], "seconds": report["seconds"],
                      "bytes": sum(len(entry.payload) for _, entry in cache.contents())}


@needs_nvrtc
def test_warmup_finds_modules_in_the_working_directory(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ops.py").write_text(
        "import fusionrt\n@fusionrt.fuse\ndef their_gate(x, y):\n    return x * fusionrt.tanh(y)\n")
    monkeypatch.chdir(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", "from fusionrt.cli import main; main()", "warmup", "--module",
         "their_package.ops", "--dtypes", "float32", "--arch", "sm_90", "--json"], env=env, cwd=tmp_path,
        capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["compiled"] == 2
    assert sorted(info.metadata["kernel"] for info in cache.entries()) == [
        "their_gate", "their_gate_backward_111"]


@pytest.mark.parametrize(("words", "message"), [
    (("--arch", "sm_13"), "Error: warmup: no architecture 'sm_13'; there are native, all, sm_75, "),
    (("--arch", "cpu", "--ops", "rleu"), "Error: warmup: no op 'rleu'; there are add_mul_add, "),
    (("--arch", "cpu", "--dtypes", "int8"),
     "Error: warmup: no dtype 'int8'; there are float32, bfloat16, float16, float64, and all"),
    (("--arch", "cpu", "--columns", ""), "Error: warmup: columns must be positive integers below 2^31, got"),
    (("--arch", "cpu", "--rows", "1,4G"), "Error: warmup: rows must be positive integers below 2^31, got '"),
    (("--arch", "cpu", "--rows", f"1,{10**20}"), "Error: warmup: rows must be positive integers below 2^31"),
    (("--arch", "cpu", "--module", ""), "Error: warmup: no module is given"),
    (("--arch", "cpu", "--module", "no_such"),
     "Error: warmup: module 'no_such' cannot be imported: ModuleNotFoundError: "),
])
def test_warmup_refuses_unknown_names(words: tuple[str, ...], message: str) -> None:
    result = call("warmup", *words)
    assert result.exit_code == 2
    assert f"\n{message}" in result.stderr
    assert result.stdout == ""


def test_warmup_fails_where_kernels_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONRT_DISABLE_JIT", "1")
    result = call("warmup", "--arch", "sm_90", "--ops", "tanh,silu,mish")

    assert result.exit_code == 1
    assert numbers(result)[:3] == ["0", "0", "18"]
    lines = result.stderr.splitlines()
    assert len(lines) == 6
    assert all(re.match(r"failed: \w+ \(pointwise, sm_90\): FUSIONRT_DISABLE_JIT is set", line)
               for line in lines[:5])
    assert lines[5] == "failed: and 13 more"


def test_warmup_says_once_what_all_kernels_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    result = call("warmup", "--arch", "sm_90", "--ops", "tanh,silu,mish", "--dtypes", "float32")

    assert result.exit_code == 1
    assert numbers(result)[:3] == ["0", "0", "6"]
    (line,) = result.stderr.splitlines()
    assert re.match(r"failed: \w+ \(sm_90\) and 5 more: compiling a CUDA kernel needs CuPy and NVRTC: pip "
                    r"install 'fusionrt\[", line)


@needs_nvrtc
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_progress_bar_on_a_terminal() -> None:
    import pty
    words = ["warmup", "--arch", "sm_90", "--ops", "tanh", "--dtypes", "float32"]
    code = f"from fusionrt.cli import main; main({words})"
    parent, child = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=child, stderr=child)
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:  # Linux's way to say that the other end is closed
        pass
    finally:
        os.close(parent)

    assert process.wait() == 0, shown
    assert "2/2" in shown.decode()


# --- cache


def test_cache_path(home: Path) -> None:
    assert call("cache", "path").output == f"{home}\n"


def test_cache_path_without_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUSIONRT_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(cache.CacheWarning):
        result = call("cache", "path")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: there is no directory for the cache; fusionrt doctor says why\n")


def test_an_import_without_a_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "archive.zip").write_bytes(b"")
    for name in ("FUSIONRT_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(cache.CacheWarning):
        result = call("cache", "import", tmp_path / "archive.zip")
    assert (result.exit_code, "there is no directory for the cache" in result.stderr) == (1, True)


def test_cache_list(home: Path) -> None:
    assert call("cache", "list").output == f"no kernels in {home}\n"
    paths = fill("older", "newer", size=2048)

    lines = call("cache", "list").output.splitlines()
    rows = [line.replace("│", " ").split() for line in lines if line.startswith("│")]
    size = f"{paths[0].stat().st_size / 1024:.1f}"
    assert rows == [["newer", "sm_90", size, "K", "32", "30", "min"],
                    ["older", "sm_90", size, "K", "32", "2", "h"]]
    assert lines[-1] == f"2 kernels, {2 * paths[0].stat().st_size / 1024:.1f} K in {home}"


def test_cache_list_names_each_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, baked = fill("ours", "theirs"), tmp_path / "baked"
    baked.mkdir()
    paths[1].rename(baked / paths[1].name)
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", str(baked))
    ours, theirs = (f"1 kernels, {file.stat().st_size / 1024:.1f} K in {file.parent}"
                    for file in (paths[0], baked / paths[1].name))
    assert call("cache", "list").output.splitlines()[-2:] == [ours, f"{theirs} (read-only)"]
    assert call("cache", "verify").output == f"2 sound, 0 damaged in {home}, {baked} (read-only)\n"
    paths[0].unlink()
    assert call("cache", "list").output.splitlines()[-1] == f"{theirs} (read-only)"
    (baked / paths[1].name).unlink()
    assert call("cache", "list").output == f"no kernels in {home}, {baked} (read-only)\n"


def test_cache_list_of_names_that_a_terminal_obeys(home: Path) -> None:
    fill("x[/nope]\x1b[31m")
    result = call("cache", "list")
    assert (result.exit_code, "x[/nope]\N{REPLACEMENT CHARACTER}[31m" in result.output) == (0, True)


def test_cache_verify(home: Path) -> None:
    paths = fill("a", "b", "c")
    sound = call("cache", "verify")
    damage(paths[1])
    damaged = call("cache", "verify")

    assert (sound.exit_code, sound.output) == (0, f"3 sound, 0 damaged in {home}\n")
    assert damaged.exit_code == 1
    assert damaged.output == f"{paths[1]}: checksum differs\n2 sound, 1 damaged in {home}\n"
    assert paths[1].exists()  # it tells, it does not mend


def test_cache_prune(home: Path) -> None:
    paths = fill("a", "b", "c", size=3000)
    assert call("cache", "prune").output == f"dropped 0 kernels from {home}\n"

    result = call("cache", "prune", "--max-bytes", "7K")
    assert (result.exit_code, result.output) == (0, f"dropped 1 kernels from {home}\n")
    assert [path.exists() for path in paths] == [False, True, True]


@pytest.mark.parametrize(("text", "expected"), [
    ("1000000", 1_000_000), ("500M", 500 << 20), ("2g", 2 << 30), ("3KB", 3 << 10)])
def test_sizes(text: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cache, "prune", lambda size: asked.append(size) or 0)
    assert call("cache", "prune", "--max-bytes", text).exit_code == 0
    assert asked == [expected]


@pytest.mark.parametrize("text", ["", "much", "-1", "1.5G", "5T", "9" * 5000])
def test_what_is_no_size(text: str) -> None:
    fill("a")
    result = call("cache", "prune", f"--max-bytes={text}")
    assert result.exit_code == 2
    assert f"{text!r} is not a size such as 500M, 2G or 1000000" in result.stderr
    assert len(list(cache.entries())) == 1


def test_cache_clear(home: Path) -> None:
    fill("a", "b")
    declined = call("cache", "clear", answer="n\n")
    assert declined.exit_code == 1
    assert f"Remove all kernels from {home}? [y/N]" in declined.output
    assert len(list(cache.entries())) == 2

    result = call("cache", "clear", "--yes")
    assert (result.exit_code, result.output) == (0, f"removed 2 kernels from {home}\n")
    assert list(cache.entries()) == []


def test_export_and_import(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = fill("a", "b", "c")
    damage(paths[2])
    file = tmp_path / "kernels.frt.zip"
    partly = call("cache", "export", file)
    assert (partly.exit_code, partly.stdout) == (1, f"wrote 2 kernels to {file}, 1 left out\n")
    assert partly.stderr == f"left out: {paths[2]}: checksum differs\n"
    paths[2].unlink()
    whole = call("cache", "export", file)
    assert (whole.exit_code, whole.output) == (0, f"wrote 2 kernels to {file}\n")

    other = tmp_path / "other"
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(other))
    first, second = call("cache", "import", file), call("cache", "import", file)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.output == f"imported 2 kernels into {other}, 0 already there, 0 refused\n"
    assert second.output == f"imported 0 kernels into {other}, 2 already there, 0 refused\n"
    assert sorted(i.metadata["kernel"] for i in cache.entries()) == ["a", "b"]


@pytest.mark.skipif(os.name != "posix", reason="pipes, devices, links")
def test_export_to_what_is_no_file(tmp_path: Path) -> None:
    fill("a", "b")
    words = [sys.executable, "-c", "from fusionrt.cli import main; main()", "cache", "export"]
    call("cache", "export", tmp_path / "plain.zip")
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.zip", tmp_path / "target.zip"
    os.mkfifo(pipe)
    link.symlink_to(target)
    writer = subprocess.Popen([*words, str(pipe)])
    received = pipe.read_bytes()
    assert writer.wait() == 0 and pipe.is_fifo()
    through = subprocess.run([*words, "/dev/stdout"], capture_output=True, check=True)
    assert through.stderr == b"wrote 2 kernels to /dev/stdout\n"
    (tmp_path / "null").symlink_to("/dev/null")
    for file in (tmp_path / "null", link):
        assert call("cache", "export", file).exit_code == 0 and file.is_symlink()
    for blob in (received, through.stdout, target.read_bytes()):
        (tmp_path / "archive.zip").write_bytes(blob)
        assert "2 already there, 0 refused" in call("cache", "import", tmp_path / "archive.zip").stdout


def test_import_prints_no_control_characters_of_names(tmp_path: Path) -> None:
    import zipfile
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        archive.writestr("\x1b[2Jall is well\u202etxt", b"")
        archive.writestr("grüße.frt", b"")
    assert call("cache", "import", tmp_path / "evil.zip").stderr == (
        "refused: '\\x1b[2Jall is well\\u202etxt': not the name of an entry\n"
        "refused: grüße.frt: not the name of an entry\n")


def test_import_of_what_is_damaged(tmp_path: Path) -> None:
    import zipfile
    file, key = tmp_path / "kernels.zip", cache.key(source="a")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{key}.frt", b"not an entry")

    result = call("cache", "import", file)
    assert result.exit_code == 1
    assert result.stderr == f"refused: {key}.frt: 12 bytes, shorter than a header\n"
    assert "imported 0 kernels" in result.stdout and "1 refused" in result.stdout


@pytest.mark.parametrize(("words", "status", "message"), [
    (("import", "{tmp}/absent"), 2, "File '{tmp}/absent' does not exist."),
    (("import", "{tmp}/text"), 1, "Error: {tmp}/text is not an archive of the cache: "),
    (("export", "{tmp}/absent/kernels"), 2,
     "{tmp}/absent/kernels cannot be written: there is no folder {tmp}/absent"),
])
def test_files_that_cannot_be_used(words: tuple[str, ...], status: int, message: str,
                                   tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a zip")
    result = call("cache", *(word.format(tmp=tmp_path) for word in words))
    assert result.exit_code == status
    assert message.format(tmp=tmp_path) in result.stderr


@pytest.mark.parametrize("place", ["cache", "cache/below"])
def test_a_cache_that_is_no_directory(place: str, home: Path, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said to be empty, and sound."""
    home.write_text("not a directory")
    (tmp_path / "archive.zip").write_bytes(b"")
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / place))
    for words in (("list",), ("verify",), ("prune",), ("clear", "--yes"),
                  ("export", tmp_path / "written.zip"), ("import", tmp_path / "archive.zip")):
        result = call("cache", *words)
        assert result.exit_code == 1, words
        assert result.output == f"Error: {tmp_path / place}: Not a directory\n"
    assert not (tmp_path / "written.zip").exists()
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", str(home))
    assert call("cache", "list").stderr == f"Error: {home}: Not a directory\n"


# --- doctor


def test_doctor_prints_each_check() -> None:
    result = call("doctor")
    assert result.exit_code == 0, result.output
    assert "ok       torch: " in result.output
    assert result.output.splitlines()[-1] in ("all is well", "1 warning", "2 warnings")


def test_doctor_tells_of_problems(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir()
    (home / "file").touch()
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(home / "file" / "[red]cache"))
    plain, as_json = call("doctor"), call("doctor", "--json")

    assert (plain.exit_code, as_json.exit_code) == (1, 1)
    lines = plain.output.splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("problem  cache: "))
    assert lines[at] == (f"problem  cache: {home}/file/[red]cache is not writable: {home}/file: "
                         "Not a directory")
    assert lines[at + 1] == (
        "         Make it writable, or set FUSIONRT_CACHE_DIR to a directory that is.")
    report = json.loads(as_json.output)
    assert report["ok"] is False
    assert [c["name"] for c in report["checks"] if c["status"] == "problem"] == ["cache"]


@needs_nvrtc
def test_doctor_names_the_compiler() -> None:
    report = json.loads(call("doctor", "--json").output)
    (nvrtc,) = [check for check in report["checks"] if check["name"] == "nvrtc"]
    assert nvrtc["status"] == "ok"
    assert nvrtc["detail"].startswith(f"{compiler.version()} ({compiler.toolchain()})")


def test_a_reader_who_has_enough_is_no_error() -> None:
    with pytest.raises(BrokenPipeError), for_users(OSError):
        raise BrokenPipeError
