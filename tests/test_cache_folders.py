"""A folder that is unsafe, closed, full or failing: the kernels live in memory only."""

import errno
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cache_faults import ENTRY, KEY, OTHER, never, output, posix, texts
from click.testing import CliRunner

import fusionrt
from fusionrt.cli import main
from fusionrt.runtime import archive, cache

pytestmark = [posix, pytest.mark.usefixtures("home")]
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
NOBODY = 65534


# --- directories that others could write to


@pytest.fixture
def default_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FUSIONRT_CACHE_DIR")
    folder = tmp_path / "user" / ".cache" / "fusionrt"
    folder.parent.mkdir(parents=True)
    return folder


def make_symlink(folder: Path) -> str:
    real = folder.with_name("real")
    real.mkdir(mode=0o700)
    folder.symlink_to(real)
    return "is a symbolic link"


def make_foreign(folder: Path) -> str:
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    return f"belongs to user {NOBODY}"


def make_writable_to(bits: int) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        folder.mkdir()
        folder.chmod(0o700 | bits)
        return f"is writable by others (mode {0o700 | bits:04o})"

    return make


def make_file(folder: Path) -> str:
    folder.touch(mode=0o600)
    return "is not a directory"


UNSAFE = [
    make_symlink,
    pytest.param(make_foreign, marks=as_root),
    pytest.param(make_writable_to(0o020), id="group"),
    pytest.param(make_writable_to(0o002), id="world"),
    pytest.param(make_writable_to(0o1077), id="sticky"),
]


@pytest.mark.parametrize("make", [*UNSAFE, make_file])
def test_an_unsafe_default_directory_is_refused(
    default_folder: Path, make: Callable[[Path], str]
) -> None:
    reason = make(default_folder)
    with pytest.warns(cache.CacheWarning) as caught:
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
        assert cache.directory() is None
    assert texts(list(caught)) == [
        f"fusionrt cache: {default_folder} {reason}; kernels live in memory only, "
        "set FUSIONRT_CACHE_DIR"
    ]
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)
    assert not default_folder.is_dir() or list(default_folder.iterdir()) == []


@pytest.mark.parametrize("make", UNSAFE)
def test_nothing_planted_in_an_unsafe_default_directory_is_loaded(
    default_folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str]
) -> None:
    make(default_folder)
    (default_folder / f"{KEY}.frt").write_bytes(cache.encode(KEY, ENTRY))
    with pytest.warns(cache.CacheWarning):
        assert cache.load(KEY) is None


@pytest.mark.parametrize("make", UNSAFE)
def test_an_explicit_directory_is_taken_as_it_is(
    default_folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str]
) -> None:
    make(default_folder)
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(default_folder))
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)
    assert [path.name for path in default_folder.iterdir()] == [f"{KEY}.frt"]


@pytest.mark.parametrize("make", UNSAFE)
def test_an_unsafe_lock_directory_only_costs_the_lock(
    tmp_path: Path, make: Callable[[Path], str]
) -> None:
    locks = tmp_path / f"fusionrt-locks-{os.geteuid()}"
    make(locks)
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)
    assert list(locks.iterdir()) == []


def test_no_place_for_temporary_files_only_costs_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)


# --- permissions, as a user who has none

UNPRIVILEGED = """
import hashlib, json, os, sys, tempfile, warnings
from fusionrt.runtime import archive, cache
KEY, OTHER, ENTRY = sys.argv[2], sys.argv[3], cache.Entry({"n": 1}, b"cubin" * 100)
os.chdir(sys.argv[1])  # before setuid: nobody cannot walk into pytest's directories
os.environ["FUSIONRT_CACHE_DIR"] = "cache"
tempfile.tempdir = "."
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
def never(): raise AssertionError("built, although the entry is there")
caught = warnings.catch_warnings(record=True)
seen = caught.__enter__()
warnings.simplefilter("always")
def report(**results):
    print(json.dumps(results | {"warnings": [str(one.message) for one in seen]}))
"""
FIRST = cache.Entry({"n": 1}, b"cubin" * 100)


def unprivileged(code: str, tmp_path: Path) -> dict[str, object]:
    result = json.loads(output(UNPRIVILEGED + code, str(tmp_path), KEY, OTHER))
    assert isinstance(result, dict)
    return result


def test_an_image_baked_by_root_works_for_everybody(tmp_path: Path, home: Path) -> None:
    cache.store(KEY, FIRST)
    home.chmod(0o555)
    code = """
loaded = cache.get_or_build(KEY, never, "f") == (ENTRY, True)
built = cache.get_or_build(OTHER, lambda: ENTRY, "g") == (ENTRY, False)
third = cache.get_or_build(cache.key(third="3"), lambda: ENTRY, "h") == (ENTRY, False)
report(loaded=loaded, built=built, third=third, again=cache.load(OTHER) == ENTRY)
"""
    text = "fusionrt cache: cannot write to cache: Permission denied; kernels live in memory only"
    assert unprivileged(code, tmp_path) == {
        "loaded": True,
        "built": True,
        "third": True,
        "again": True,
        "warnings": [text],
    }
    assert [path.name for path in home.iterdir()] == [f"{KEY}.frt"]


def test_an_entry_that_may_not_be_read(tmp_path: Path, home: Path) -> None:
    cache.store(KEY, FIRST)
    cache.store(OTHER, FIRST)
    for key in (KEY, OTHER):
        (home / f"{key}.frt").chmod(0o000)
    home.chmod(0o777)
    code = """
reasons = sorted({reason for _, reason in cache.verify()})
missed = cache.load(KEY) is None and cache.load(OTHER) is None
built = cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
report(missed=missed, built=built, again=cache.load(KEY) == ENTRY, reasons=reasons)
"""
    text = f"fusionrt cache: cannot read cache/{KEY}.frt: Permission denied; taken as missing"
    assert unprivileged(code, tmp_path) == {
        "missed": True,
        "built": True,
        "again": True,
        "reasons": ["cannot be read: Permission denied"],
        "warnings": [text],
    }


def test_a_directory_that_may_not_be_entered(tmp_path: Path, home: Path) -> None:
    cache.store(KEY, FIRST)
    home.chmod(0o000)
    code = """
built = cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
again = cache.get_or_build(KEY, never, "f") == (ENTRY, True)
report(built=built, again=again, pruned=cache.prune(1000))
"""
    text = "fusionrt cache: cannot {}: Permission denied; {}"
    assert unprivileged(code, tmp_path) == {
        "built": True,
        "again": True,
        "pruned": 0,
        "warnings": [
            text.format(f"read cache/{KEY}.frt", "taken as missing"),
            text.format("write to cache", "kernels live in memory only"),
        ],
    }
    home.chmod(0o755)
    assert cache.load(KEY) == FIRST


def test_a_directory_that_may_not_be_made(tmp_path: Path, home: Path) -> None:
    tmp_path.chmod(0o555)
    code = """
built = cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
report(built=built, again=cache.get_or_build(KEY, never, "f") == (ENTRY, True))
"""
    text = "fusionrt cache: cannot write to cache: Permission denied; kernels live in memory only"
    assert unprivileged(code, tmp_path) == {"built": True, "again": True, "warnings": [text]}
    assert not home.exists()


def test_a_home_that_may_not_be_entered(tmp_path: Path) -> None:
    (tmp_path / "user" / ".cache").mkdir(parents=True)
    (tmp_path / "user").chmod(0o000)
    code = f"""
del os.environ["FUSIONRT_CACHE_DIR"]
os.environ["HOME"] = {str(tmp_path / "user")!r}
built = cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
report(built=built, again=cache.get_or_build(KEY, never, "f") == (ENTRY, True))
"""
    folder = tmp_path / "user" / ".cache" / "fusionrt"
    text = (
        f"fusionrt cache: {folder} cannot be examined: Permission denied; "
        "kernels live in memory only, set FUSIONRT_CACHE_DIR"
    )
    assert unprivileged(code, tmp_path) == {"built": True, "again": True, "warnings": [text]}


def test_another_users_entry_is_read_without_a_word_though_its_use_cannot_be_noted(
    tmp_path: Path, home: Path
) -> None:
    cache.store(KEY, FIRST)
    os.utime(home / f"{KEY}.frt", (1, 1))
    home.chmod(0o777)
    result = unprivileged("report(same=cache.load(KEY) == ENTRY)", tmp_path)
    assert result == {"same": True, "warnings": []}


# --- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_disk / "cache"
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(folder))
    big = cache.Entry({}, os.urandom(100_000))
    assert cache.store(KEY, ENTRY)
    with pytest.warns(cache.CacheWarning) as caught:
        assert cache.get_or_build(OTHER, lambda: big, "g") == (big, False)
        assert cache.store(cache.key(third="3"), big) is False
    assert texts(list(caught)) == [
        f"fusionrt cache: cannot write to {folder}: No space left on device; "
        "kernels live in memory only"
    ]
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.frt"]  # no half file is left
    assert cache.get_or_build(OTHER, never, "g") == (big, True)
    assert cache.load(KEY) == ENTRY


def test_the_doctor_sees_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(small_disk))
    (small_disk / "film").write_bytes(bytes(32 << 10))
    (check,) = (c for c in fusionrt.doctor().checks if c.name == "cache")
    assert check.status == "problem"
    assert check.detail == f"{small_disk} is not writable: {small_disk}: No space left on device"


def test_import_to_a_full_disk(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(KEY, cache.Entry({}, os.urandom(100_000)))
    archive.export_to(tmp_path / "kernels.zip")
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(small_disk))
    with pytest.warns(cache.CacheWarning, match="No space left on device"):
        result = archive.import_from(tmp_path / "kernels.zip")
    assert result == (0, 0, [(f"{KEY}.frt", f"cannot write to {small_disk}")])


def test_a_read_only_file_system(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(small_disk))
    cache.store(KEY, ENTRY)
    os.utime(small_disk / f"{KEY}.frt", (1, 1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)
    with pytest.warns(cache.CacheWarning) as caught:
        assert cache.get_or_build(OTHER, lambda: ENTRY, "g") == (ENTRY, False)
    assert texts(list(caught)) == [
        f"fusionrt cache: cannot write to {small_disk}: Read-only file system; "
        "kernels live in memory only"
    ]


def test_what_cannot_be_removed_is_named_and_not_counted(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = sorted(cache.key(number=str(n)) for n in range(3))
    for age, key in enumerate(keys):
        assert cache.store(key, ENTRY)
        os.utime(home / f"{key}.frt", (1000 + age, 1000 + age))
    unlink = Path.unlink

    def sticky(path: Path, missing_ok: bool = False) -> None:
        if path.stem == keys[0]:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", sticky)
    stays = f"1 could not be: {home / keys[0]}.frt: Read-only file system"
    size = (home / f"{keys[0]}.frt").stat().st_size
    with pytest.raises(OSError, match=f"^1 kernels were removed, {stays}$"):
        cache.prune(size)
    assert [path.stem for path in sorted(home.glob("*.frt"))] == [keys[0], keys[2]]
    monkeypatch.setattr(cache, "MAX_BYTES", 0)
    monkeypatch.setattr(cache, "_stores", itertools.count())
    assert cache.store(keys[1], ENTRY)  # which prunes, and nobody asked it to
    assert cache.store(keys[1], ENTRY) and cache.store(keys[2], ENTRY)
    with pytest.raises(OSError, match=f"^2 kernels were removed, {stays}$"):
        cache.clear()
    result = CliRunner().invoke(main, ["cache", "prune", "--max-bytes", "0"])
    assert (result.exit_code, result.stderr) == (1, f"Error: 0 kernels were removed, {stays}\n")


def test_a_file_size_limit(home: Path) -> None:
    code = f"""
import resource, warnings
from fusionrt.runtime import cache
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
big = cache.Entry({{}}, bytes(100_000))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(cache.get_or_build({KEY!r}, lambda: big, "f") == (big, False))
print(*[one.message for one in caught])
"""
    assert output(code) == (
        "True\n"
        f"fusionrt cache: cannot write to {home}: File too large; kernels live in memory only\n"
    )
    assert list(home.iterdir()) == []


def test_an_entry_that_is_too_large(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", 500)
    with pytest.warns(cache.CacheWarning, match="File too large"):
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert cache.load(KEY) == ENTRY
    assert not home.exists()


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_faults_of_the_file_system_below(
    home: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    cache.store(KEY, ENTRY)
    monkeypatch.setattr(Path, "read_bytes", fail)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.warns(cache.CacheWarning) as caught:
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert [os.strerror(error) in text for text in texts(list(caught))] == [True, True]
    assert [path.name for path in home.iterdir()] == [f"{KEY}.frt"]
