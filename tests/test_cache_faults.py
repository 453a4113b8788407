"""The cache when something is wrong: every fault is a miss and one warning, never a failed call."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusionrt.runtime import archive, cache, lock

ROOT = Path(__file__).parents[1]
KEY = cache.key(source="__global__ void f() {}", arch="sm_90a")
OTHER = cache.key(source="__global__ void g() {}", arch="sm_90a")
ENTRY = cache.Entry({"kernel": "f", "registers": 32}, bytes(range(256)) * 2)
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes, owners, signals, fork")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that is empty, explicit, and forgets this test; an unexpected warning is an error."""
    for name in ("CACHE_READONLY_DIRS", "DISABLE_JIT"):
        monkeypatch.delenv(f"FUSIONRT_{name}", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)  # for the unprivileged tests; pytest makes it 0700
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "cache"


@pytest.fixture
def default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FUSIONRT_CACHE_DIR")
    folder = tmp_path / "user" / ".cache" / "fusionrt"
    folder.parent.mkdir(parents=True)
    return folder


def never() -> cache.Entry:
    raise AssertionError("built, although the entry is there")


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    assert all(one.category is cache.CacheWarning for one in caught)
    return [str(one.message) for one in caught]


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    run = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(run, stdout=subprocess.PIPE, text=True)


def output(code: str, *arguments: str) -> str:
    process = start(code, *arguments)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return text


# --- damaged entries


def damaged(blob: bytes) -> dict[str, tuple[bytes, str]]:
    other_schema = blob[:8] + (99).to_bytes(4, "little") + blob[12:]
    size, start = len(blob), cache._SEAL.size + cache._INDEX.size
    return {
        "empty": (b"", "empty"),
        "short": (blob[:30], "30 bytes, shorter than a header"),
        "cut": (blob[:-1], f"{size - 1} bytes, expected {size}"),
        "cut to the header": (blob[:start], f"{start} bytes, expected {size}"),
        "grown": (blob + b"\0", f"{size + 1} bytes, expected {size}"),
        "doubled": (blob + blob, f"{2 * size} bytes, expected {size}"),
        "flipped": (blob[:-1] + bytes([blob[-1] ^ 4]), "checksum differs"),
        "zeroed": (bytes(size), "not a file of this cache"),
        "a shell script": (b"#!/bin/sh\n" * 20, "not a file of this cache"),
        "other schema": (other_schema, f"schema 99, expected {cache.SCHEMA}"),
        "other key": (cache.encode(OTHER, ENTRY), f"holds the entry of another key, {OTHER}"),
    }


@pytest.mark.parametrize("kind", damaged(cache.encode(KEY, ENTRY)))
def test_a_damaged_entry_is_rebuilt_with_one_warning(home: Path, kind: str) -> None:
    blob, reason = damaged(cache.encode(KEY, ENTRY))[kind]
    cache.store(KEY, ENTRY)
    path = home / f"{KEY}.frt"
    path.write_bytes(blob)
    assert cache.verify() == [(path, reason)]
    assert list(cache.entries()) == []
    with pytest.warns(cache.CacheWarning) as caught:
        assert cache.load(KEY) is None
    assert texts(list(caught)) == [f"fusionrt cache: {path} is damaged: {reason}; taken as missing"]
    assert not path.exists()

    path.write_bytes(blob)  # again: no second warning
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)
    assert path.read_bytes() == cache.encode(KEY, ENTRY)


def test_no_single_flipped_bit_goes_unseen() -> None:
    blob = cache.encode(KEY, ENTRY)
    for bit in range(8 * len(blob)):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(cache.DamagedEntryError):
            cache.decode(bytes(flipped), KEY)


def test_no_truncation_goes_unseen() -> None:
    blob = cache.encode(KEY, ENTRY)
    for size in range(len(blob)):
        with pytest.raises(cache.DamagedEntryError):
            cache.decode(blob[:size], KEY)


def test_lengths_that_add_up_to_the_same_sum_are_seen() -> None:
    blob = bytearray(cache.encode(KEY, ENTRY))
    metadata, payload = cache._SEAL.size + 20, cache._SEAL.size + 28
    blob[metadata] += 1
    blob[payload : payload + 8] = (len(ENTRY.payload) - 1).to_bytes(8, "little")
    with pytest.raises(cache.DamagedEntryError, match="checksum differs"):
        cache.decode(bytes(blob), KEY)


def put_directory(path: Path) -> None:
    path.mkdir()


def put_pipe(path: Path) -> None:
    os.mkfifo(path)


def put_enormous_hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (put_directory, "not a regular file"),
        (put_pipe, "not a regular file"),
        (put_enormous_hole, f"{1 << 40} bytes, more than an entry may have"),
    ],
)
def test_something_else_in_the_place_of_an_entry(
    home: Path, put: Callable[[Path], None], reason: str
) -> None:
    path = home / f"{KEY}.frt"
    home.mkdir()
    put(path)
    with pytest.warns(cache.CacheWarning) as caught:
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert texts(list(caught)) == [f"fusionrt cache: {path} is damaged: {reason}; taken as missing"]
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)


def test_a_full_directory_in_the_place_of_an_entry_is_left_alone(home: Path) -> None:
    thesis = home / f"{KEY}.frt" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    with pytest.warns(cache.CacheWarning) as caught:
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
        assert cache.get_or_build(OTHER, lambda: ENTRY, "g") == (ENTRY, False)
    assert len(texts(list(caught))) == 2  # cannot be read, cannot be written
    assert cache.load(OTHER) == ENTRY
    with pytest.raises(OSError, match="not empty"):
        cache.clear()
    assert thesis.read_text() == "years of work"


def test_a_symbolic_link_in_the_place_of_an_entry_is_replaced(tmp_path: Path, home: Path) -> None:
    home.mkdir()
    target = tmp_path / "target"
    (home / f"{KEY}.frt").symlink_to(target)
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert not target.exists()
    assert cache.load(KEY) == ENTRY


def test_a_planted_temporary_file_is_not_written_through(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.secrets, "token_hex", lambda size: "0" * 16)
    home.mkdir()
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("years of work")
    (home / f"{KEY}.{'0' * 16}.tmp").symlink_to(thesis)
    with pytest.warns(cache.CacheWarning, match="File exists"):
        assert cache.store(KEY, ENTRY) is False
    assert thesis.read_text() == "years of work"


def test_a_damaged_entry_of_a_read_only_directory_stays(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baked = tmp_path / "baked"
    baked.mkdir()
    path = baked / f"{KEY}.frt"
    path.write_bytes(b"half")
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", str(baked))
    with pytest.warns(cache.CacheWarning, match="4 bytes, shorter than a header"):
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert path.read_bytes() == b"half"
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)


def test_one_warning_for_each_kind_of_fault(home: Path) -> None:
    keys = [cache.key(number=str(n)) for n in range(10)]
    home.mkdir()
    with pytest.warns(cache.CacheWarning) as caught:
        for key in keys:
            (home / f"{key}.frt").write_bytes(b"half")
            assert cache.load(key) is None
        home.rmdir()
        home.write_text("a file")
        for key in keys:
            assert cache.store(key, ENTRY) is False
            assert cache.load(key) == ENTRY  # from memory
    assert texts(list(caught)) == [
        f"fusionrt cache: {home / keys[0]}.frt is damaged: 4 bytes, shorter than a header; "
        "taken as missing",
        f"fusionrt cache: cannot write to {home}: File exists; kernels live in memory only",
    ]


# --- directories that others could write to


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


# --- many processes

COLD = """
import hashlib, os, sys, time
from pathlib import Path
from fusionrt.runtime import cache
key, log, go = sys.argv[1], sys.argv[2], Path(sys.argv[3])
def build():
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(0.5)
    return cache.Entry({"kernel": "f"}, hashlib.shake_256(key.encode()).digest(1_000_000))
print("ready", flush=True)
while not go.exists():
    time.sleep(0.005)
entry, was_hit = cache.get_or_build(key, build, "f")
print(was_hit, entry.metadata, hashlib.sha256(entry.payload).hexdigest())
"""


def test_sixteen_cold_processes_build_once(tmp_path: Path, home: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    processes = [start(COLD, KEY, str(log), str(go)) for _ in range(16)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.touch()
    lines = sorted(process.communicate(timeout=120)[0] for process in processes)
    right = hashlib.shake_256(KEY.encode()).digest(1_000_000)
    told = f"{{'kernel': 'f'}} {hashlib.sha256(right).hexdigest()}\n"
    assert lines == [f"False {told}"] + 15 * [f"True {told}"]
    assert len(log.read_text().split()) == 1
    assert [path.name for path in home.iterdir()] == [f"{KEY}.frt"]
    assert cache.load(KEY) == cache.Entry({"kernel": "f"}, right)


STORM = """
import hashlib, json, os, random, signal, sys, time, warnings
from pathlib import Path
from fusionrt.runtime import cache
warnings.simplefilter("error")
folder, kills = Path(sys.argv[1]), int(sys.argv[2])
keys = [cache.key(number=str(n)) for n in range(8)]
def payload(key, n):
    return hashlib.shake_256(f"{key} {n}".encode()).digest(50_000 + 40_000 * (n % 8))
def writer():
    pid = os.fork()
    if pid:
        return pid
    random.seed(os.getpid())
    while True:
        key, n = random.choice(keys), random.randrange(1 << 30)
        cache.store(key, cache.Entry({"n": n}, payload(key, n)))
def check():
    found = 0
    for key in keys:
        entry = cache.load(key)  # a torn entry is a warning, hence an error
        if entry is not None:
            assert entry.payload == payload(key, entry.metadata["n"])
            found += 1
    return found
random.seed(1)
writers = [writer(), writer()]
try:
    for kill in range(kills):
        time.sleep(random.uniform(0, 0.03))
        os.kill(writers[kill % 2], signal.SIGKILL)
        os.waitpid(writers[kill % 2], 0)
        writers[kill % 2] = writer()
        if kill % 5 == 0:
            check()
finally:
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
print(json.dumps([check(), len(cache.verify()), len(list(folder.glob("*.tmp")))]))
"""


def test_two_hundred_kills_in_the_middle_of_writes(home: Path) -> None:
    started = time.monotonic()
    found, wrong, half_written = json.loads(output(STORM, str(home), "200"))
    assert (found, wrong) == (8, 0)
    assert half_written > 20  # else the kills came too late to prove anything
    assert cache.verify() == []
    for path in home.glob("*.tmp"):
        os.utime(path, (time.time() - 3700,) * 2)
    cache.prune(cache.MAX_BYTES)
    assert list(home.glob("*.tmp")) == []
    assert time.monotonic() - started < 40


# --- locks

HOLD = """
import sys, time
from fusionrt.runtime import lock
with lock.hold(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_wait_for_another_process_is_bounded_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.3)
    holder = start(HOLD, KEY)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        started = time.monotonic()
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
        assert 0.3 <= time.monotonic() - started < 5
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    cache.clear()
    monkeypatch.setattr(lock, "WAIT_SECONDS", 60.0)
    started = time.monotonic()
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert time.monotonic() - started < 5


FORK_WHILE_A_THREAD_HOLDS = """
import os, sys, threading, time
from fusionrt.runtime import cache, lock
key, entry = sys.argv[1], cache.Entry({}, b"right")
inside, leave = threading.Event(), threading.Event()
def build():
    inside.set()
    leave.wait()
    return entry
thread = threading.Thread(target=cache.get_or_build, args=(key, build, "f"))
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    started = time.monotonic()
    print(cache.get_or_build(key, lambda: entry, "f")[0] == entry, flush=True)
    os._exit(time.monotonic() - started > 20)
time.sleep(0.2)
leave.set()
thread.join()
print(os.waitpid(pid, 0)[1])
"""


def test_a_child_forked_while_a_thread_holds_the_lock_does_not_hang() -> None:
    assert output(FORK_WHILE_A_THREAD_HOLDS, KEY) == "True\n0\n"


ORPHAN = """
import os, sys, threading, time
from fusionrt.runtime import lock
inside = threading.Event()
def hold():
    with lock.hold(sys.argv[1]):
        inside.set()
        time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
inside.wait()
pid = os.fork()
if pid == 0:
    os.close(1)
    time.sleep(60)
print(pid, flush=True)
time.sleep(0.3)  # for the child to come out of fork()
os._exit(0)
"""


def test_the_lock_does_not_live_on_in_a_child_of_the_dead() -> None:
    child = int(output(ORPHAN, KEY))
    try:
        started = time.monotonic()
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
        assert time.monotonic() - started < 20
    finally:
        os.kill(child, signal.SIGKILL)


FORK_INSIDE = """
import fcntl, os, sys
from pathlib import Path
from fusionrt.runtime import lock
with lock.hold(sys.argv[1]):
    pid = os.fork()
    if pid:
        print(os.waitpid(pid, 0)[1])
        with Path(sys.argv[2]).open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                print("the child has released it")
            except BlockingIOError:
                print("still held")
if not pid:
    os._exit(0)
"""


def test_a_child_that_leaves_the_block_does_not_free_the_lock_of_its_parent(
    tmp_path: Path,
) -> None:
    file = tmp_path / f"fusionrt-locks-{os.geteuid()}" / f"{KEY}.lock"
    assert output(FORK_INSIDE, KEY, str(file)) == "0\nstill held\n"
