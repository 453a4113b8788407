"""The cache when nothing is wrong: keys, round trips, places, age, archives."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusionrt.runtime import archive, cache, lock

ROOT = Path(__file__).parents[1]
KEY = cache.key(source="__global__ void f() {}", arch="sm_90a")
OTHER = cache.key(source="__global__ void g() {}", arch="sm_90a")
ENTRY = cache.Entry({"kernel": "f", "registers": 32}, bytes(range(256)) * 16)

posix = pytest.mark.skipif(os.name != "posix", reason="POSIX modes and owners")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that is empty, explicit, and forgets this test; any warning is an error."""
    for name in ("READONLY_DIRS", "DIR"):
        monkeypatch.delenv(f"FUSIONRT_CACHE_{name}", raising=False)
    monkeypatch.delenv("FUSIONRT_DISABLE_JIT", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody-home"))
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "cache"


def never() -> cache.Entry:
    raise AssertionError("built, although the entry is there")


# --- keys


def test_key_is_the_same_in_every_process_and_version() -> None:
    assert cache.key(source="s", options=["-a", "-b"], blob=b"\0") == (
        "2061a32eb0125e7f7bef0d8d9b5b6409eabccec5"
    )


def test_key_ignores_the_order_of_fields_and_keeps_that_of_options() -> None:
    assert cache.key(a="1", b="2") == cache.key(b="2", a="1")
    assert cache.key(options=["-a", "-b"]) != cache.key(options=["-b", "-a"])
    assert cache.key(options=["-a", "-b"]) == cache.key(options=("-a", "-b"))


def test_no_two_different_requests_share_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        cache.key(),
        cache.key(a=""),
        cache.key(a="1"),
        cache.key(a="1", b=""),
        cache.key(a="", b="1"),
        cache.key(b="1"),
        cache.key(a="1b"),
        cache.key(ab="1"),
        cache.key(a=b"1"),
        cache.key(a=["1"]),
        cache.key(a=["1", ""]),
        cache.key(a=["", "1"]),
        cache.key(a=[]),
        cache.key(a=[], b="1"),
        cache.key(a=["=b", "s1"]),
        cache.key(arch="sm_90"),
        cache.key(arch="sm_90a"),
    ]
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    keys += [cache.key(), cache.key(a="1")]
    assert len(set(keys)) == len(keys)
    assert all(len(key) >= 32 and set(key) <= set("0123456789abcdef") for key in keys)


@pytest.mark.parametrize("value", [{"-a", "-b"}, 4, None])
def test_key_refuses_what_has_no_order(value: object) -> None:
    with pytest.raises(TypeError) as error:
        cache.key(options=value)  # type: ignore[arg-type]
    assert str(error.value) == (
        "cache key: field 'options' must be str, bytes, or a list or tuple of str, "
        f"got {type(value).__name__}"
    )


# --- round trip


@pytest.mark.parametrize(
    "entry",
    [
        ENTRY,
        cache.Entry({}, b""),
        cache.Entry({"µ": "ü", "nested": {"list": [1, 2.5, None, True]}}, os.urandom(100_000)),
    ],
)
def test_round_trip(entry: cache.Entry, home: Path) -> None:
    assert cache.load(KEY) is None
    assert cache.store(KEY, entry) is True
    assert cache.load(KEY) == entry
    assert cache.load(OTHER) is None
    assert [path.name for path in home.iterdir()] == [f"{KEY}.frt"]


def test_get_or_build_returns_what_was_built_and_then_what_was_stored() -> None:
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)


def test_what_was_built_is_never_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "load", lambda key: None)
    entry, was_hit = cache.get_or_build(KEY, lambda: ENTRY, "f")
    assert entry is ENTRY
    assert not was_hit


def test_an_error_of_the_compiler_passes_through_and_frees_the_lock(home: Path) -> None:
    def fail() -> cache.Entry:
        raise ValueError("no such arch")

    with pytest.raises(ValueError, match="no such arch"):
        cache.get_or_build(KEY, fail, "f")
    started = time.monotonic()
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("temporary", ["", "missing"], ids=["with flock", "without flock"])
def test_eight_threads_build_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / temporary))
    built: list[int] = []
    results: list[tuple[cache.Entry, bool]] = []
    barrier = threading.Barrier(8)

    def build() -> cache.Entry:
        built.append(1)
        time.sleep(0.2)
        return ENTRY

    def use() -> None:
        barrier.wait()
        results.append(cache.get_or_build(KEY, build, "f"))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert sorted(was_hit for _, was_hit in results) == [False] + 7 * [True]
    assert all(entry == ENTRY for entry, _ in results)


def test_different_keys_are_built_side_by_side() -> None:
    inside = threading.Barrier(2, timeout=10)

    def build() -> cache.Entry:
        inside.wait()  # breaks unless both are here at once
        return ENTRY

    thread = threading.Thread(target=cache.get_or_build, args=(OTHER, build, "g"))
    thread.start()
    assert cache.get_or_build(KEY, build, "f") == (ENTRY, False)
    thread.join()
    assert cache.load(OTHER) == ENTRY


# --- places


def test_nothing_appears_on_disk_before_the_first_store(tmp_path: Path, home: Path) -> None:
    code = (
        "from fusionrt.runtime import archive, cache, lock\n"
        f"assert cache.load({KEY!r}) is None and list(cache.entries()) == []\n"
        "assert cache.verify() == [] and cache.prune(0) == 0 and cache.clear() == 0\n"
        "import sys; print(sorted({'torch', 'cupy', 'numba', 'numpy'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    run = [sys.executable, "-W", "error", "-c", code]
    assert subprocess.check_output(run, env=environment, text=True) == "[]\n"
    assert list(tmp_path.iterdir()) == []


def test_resolution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explicit, xdg, user = tmp_path / "explicit", tmp_path / "xdg", tmp_path / "user"
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(explicit))
    monkeypatch.setenv("XDG_CACHE_HOME", str(xdg))
    monkeypatch.setenv("HOME", str(user))
    assert cache.directory() == explicit
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", "~/kernels")
    assert cache.directory() == user / "kernels"
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", "")
    assert cache.directory() == xdg / "fusionrt"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.directory() == user / ".cache" / "fusionrt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.directory() == user / ".cache" / "fusionrt"
    assert list(tmp_path.iterdir()) == []


@posix
def test_the_default_directory_and_its_files_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSIONRT_CACHE_DIR")
    old = os.umask(0)
    try:
        assert cache.store(KEY, ENTRY)
    finally:
        os.umask(old)
    folder = tmp_path / "nobody-home" / ".cache" / "fusionrt"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / f"{KEY}.frt").stat().st_mode) == 0o600
    assert cache.load(KEY) == ENTRY


@posix
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_of_an_explicit_directory_follow_the_umask(home: Path, umask: int, mode: int) -> None:
    old = os.umask(umask)
    try:
        assert cache.store(KEY, ENTRY)
    finally:
        os.umask(old)
    assert stat.S_IMODE((home / f"{KEY}.frt").stat().st_mode) == mode


def test_read_only_directories_are_looked_in_and_left_alone(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baked = tmp_path / "baked"
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(baked))
    cache.store(KEY, ENTRY)
    os.utime(baked / f"{KEY}.frt", (1, 1))
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(home))
    assert cache.load(KEY) is None
    dirs = os.pathsep.join([str(tmp_path / "missing"), "", str(baked)])
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", dirs)

    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)
    assert cache.get_or_build(OTHER, lambda: ENTRY, "g") == (ENTRY, False)
    assert cache.directory() == home
    assert [path.name for path in home.iterdir()] == [f"{OTHER}.frt"]
    assert {info.path for info in cache.entries()} == {
        baked / f"{KEY}.frt",
        home / f"{OTHER}.frt",
    }
    assert cache.clear() == 1
    assert cache.prune(0) == 0
    assert (baked / f"{KEY}.frt").stat().st_mtime == 1
    assert cache.load(KEY) == ENTRY


def test_the_writable_directory_comes_first(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = cache.Entry({}, b"newer")
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "baked"))
    cache.store(KEY, ENTRY)
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(home))
    cache.store(KEY, newer)
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", str(tmp_path / "baked"))
    assert cache.load(KEY) == newer


def test_read_only_directories_may_be_below_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", os.pathsep.join(["~/baked", "", "/other"]))
    assert cache.read_only_directories() == [tmp_path / "baked", Path("/other")]


def test_disable_jit_names_what_is_missing(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baked = tmp_path / "baked"
    monkeypatch.setenv("FUSIONRT_DISABLE_JIT", "1")
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", str(baked))
    with pytest.raises(cache.MissingKernelError) as error:
        cache.get_or_build(KEY, never, "bias_gelu")
    assert str(error.value) == (
        "bias_gelu: FUSIONRT_DISABLE_JIT is set and the kernel is not in the cache "
        f"(key {KEY}, searched: {home}, {baked}). Fill the cache with `fusionrt warmup`, "
        "or unset FUSIONRT_DISABLE_JIT"
    )
    cache.store(KEY, ENTRY)
    assert cache.get_or_build(KEY, never, "bias_gelu") == (ENTRY, True)
    monkeypatch.setenv("FUSIONRT_DISABLE_JIT", "0")
    assert cache.get_or_build(OTHER, lambda: ENTRY, "g") == (ENTRY, False)


# --- age and size


def keys(number: int) -> list[str]:
    return [cache.key(number=str(n)) for n in range(number)]


def test_prune_drops_the_least_recently_used_first(home: Path) -> None:
    now = time.time()
    for age, key in enumerate(keys(6)):
        cache.store(key, ENTRY)
        os.utime(home / f"{key}.frt", (now - 7200 * (age + 1),) * 2)
    assert cache.load(keys(6)[5]) == ENTRY  # the oldest, used again
    each = next(cache.entries()).size
    assert cache.prune(6 * each) == 0
    assert cache.prune(3 * each + each // 2) == 3
    assert {info.key for info in cache.entries()} == {keys(6)[n] for n in (0, 1, 5)}
    assert cache.prune(0) == 3
    assert list(home.iterdir()) == []


def test_the_last_use_is_noted_at_most_once_an_hour(home: Path) -> None:
    cache.store(KEY, ENTRY)
    path = home / f"{KEY}.frt"
    recent = time.time() - 3000
    os.utime(path, (recent, recent))
    cache.load(KEY)
    assert path.stat().st_mtime == pytest.approx(recent, abs=1)
    old = time.time() - 4000
    os.utime(path, (old, old))
    assert [info.last_used for info in cache.entries()] == [pytest.approx(old, abs=1)]
    cache.load(KEY)
    assert path.stat().st_mtime == pytest.approx(time.time(), abs=60)


def test_storing_keeps_the_cache_below_its_limit(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_BYTES", 20_000)
    for key in keys(2 * cache._STORES_A_PRUNE):
        cache.store(key, ENTRY)
    most = 20_000 + cache._STORES_A_PRUNE * 5000
    assert sum(path.stat().st_size for path in home.iterdir()) <= most
    assert cache.load(keys(2 * cache._STORES_A_PRUNE)[-1]) == ENTRY


def test_prune_sweeps_stale_temporaries_and_nothing_else(home: Path) -> None:
    cache.store(KEY, ENTRY)
    stale, young = (home / f"{KEY}.{digit * 16}.tmp" for digit in "0f")
    foreign = [home / "notes.tmp", home / "notes.frt", home / "thesis.tex"]
    for path in (stale, young, *foreign):
        path.write_bytes(b"half")
    for path in (stale, *foreign):
        os.utime(path, (time.time() - 3700,) * 2)
    cache.prune(cache.MAX_BYTES)
    assert set(home.iterdir()) == {home / f"{KEY}.frt", young, *foreign}
    assert cache.clear() == 1
    assert set(home.iterdir()) == set(foreign)


def test_entries_tell_what_is_there(home: Path) -> None:
    cache.store(KEY, ENTRY)
    (info,) = cache.entries()
    path = home / f"{KEY}.frt"
    assert info[:4] == (KEY, path, path.stat().st_size, ENTRY.metadata)
    assert info.last_used == pytest.approx(time.time(), abs=60)
    assert cache.verify() == []


# --- archives


def filled(number: int) -> dict[str, cache.Entry]:
    stored = {key: cache.Entry({"key": key}, os.urandom(500)) for key in keys(number)}
    for key, entry in stored.items():
        cache.store(key, entry)
    return stored


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, blob in members.items():
            file.writestr(zipfile.ZipInfo(name), blob)
    return path


def test_export_and_import(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = filled(4)
    monkeypatch.setenv("FUSIONRT_CACHE_READONLY_DIRS", str(home))  # the same entries twice
    assert archive.export_to(tmp_path / "kernels.zip").written == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "kernels.zip"]
    monkeypatch.delenv("FUSIONRT_CACHE_READONLY_DIRS")
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "elsewhere"))
    cache.store(keys(4)[0], stored[keys(4)[0]])
    assert archive.import_from(tmp_path / "kernels.zip") == (3, 1, [])
    assert {key: cache.load(key) for key in stored} == stored
    assert archive.import_from(tmp_path / "kernels.zip") == (0, 4, [])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_import_from_a_pipe(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no end to begin at, where an archive says what it holds."""
    filled(2)
    archive.export_to(tmp_path / "kernels.zip")
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "elsewhere"))
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(
        (tmp_path / "kernels.zip").read_bytes()))
    writer.start()
    assert archive.import_from(tmp_path / "pipe") == (2, 0, [])
    writer.join()


def test_the_same_entries_give_the_same_archive(tmp_path: Path) -> None:
    filled(3)
    archive.export_to(tmp_path / "one.zip")
    archive.export_to(tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()


def test_import_refuses_every_lie(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRY_BYTES", 10_000)
    good = cache.encode(KEY, ENTRY)
    flipped = good[:-1] + bytes([good[-1] ^ 1])
    deep = cache.encode(KEY, cache.Entry({}, b"")).replace(b"{}", b"[]")
    outside = str(tmp_path / f"{KEY}.frt")
    path = zipped(
        tmp_path / "evil.zip",
        {
            f"../{KEY}.frt": good,
            outside: good,
            f"sub/{KEY}.frt": good,
            f"{KEY.upper()}.frt": good,
            f"{KEY}.frt.exe": good,
            f"{KEY}.frt": flipped,
            f"{OTHER}.frt": good,
            f"{keys(1)[0]}.frt": bytes(10_001),
            f"{keys(2)[1]}.frt": b"",
            f"{keys(3)[2]}.frt": deep,
        },
    )
    with zipfile.ZipFile(path, "a") as file:
        link = zipfile.ZipInfo(f"{keys(4)[3]}.frt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(link, "/etc/passwd")
        squeezed = zipfile.ZipInfo(f"{keys(5)[4]}.frt")
        file.writestr(squeezed, good, zipfile.ZIP_LZMA)
    assert archive.import_from(path) == (
        0,
        0,
        [
            (f"../{KEY}.frt", "not the name of an entry"),
            (outside, "not the name of an entry"),
            (f"sub/{KEY}.frt", "not the name of an entry"),
            (f"{KEY.upper()}.frt", "not the name of an entry"),
            (f"{KEY}.frt.exe", "not the name of an entry"),
            (f"{KEY}.frt", "checksum differs"),
            (f"{OTHER}.frt", f"holds the entry of another key, {KEY}"),
            (f"{keys(1)[0]}.frt", "10001 bytes, more than an entry may have"),
            (f"{keys(2)[1]}.frt", "empty"),
            (f"{keys(3)[2]}.frt", "checksum differs"),
            (f"{keys(4)[3]}.frt", "a symbolic link"),
            (f"{keys(5)[4]}.frt", "compression method 14"),
        ],
    )
    assert list(tmp_path.iterdir()) == [path]


def test_import_bounds_the_whole_archive(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = filled(3)
    archive.export_to(tmp_path / "kernels.zip")
    cache.clear()
    monkeypatch.setattr(cache, "MAX_BYTES", 2 * len(cache.encode(*next(iter(stored.items())))))
    result = archive.import_from(tmp_path / "kernels.zip")
    refused = [(f"{max(stored)}.frt", "the archive is larger than the cache may grow")]
    assert result == (2, 0, refused)


def test_a_member_that_lies_about_its_size_costs_no_other(tmp_path: Path, home: Path) -> None:
    stored, file = filled(3), tmp_path / "kernels.zip"
    archive.export_to(file)
    cache.clear()
    with zipfile.ZipFile(file) as written:
        first = written.infolist()[0].filename
    blob = bytearray(file.read_bytes())
    at = blob.index(b"PK\1\2") + 24  # of the first member: its size, once unpacked
    blob[at : at + 4] = (0xFFFFFFF0).to_bytes(4, "little")
    file.write_bytes(blob)
    refused = [(first, "4294967280 bytes, more than an entry may have")]
    assert archive.import_from(file) == (2, 0, refused)
    assert len(stored) == 3


def hostile_metadata(metadata: bytes) -> bytes:
    """An entry with a right checksum over metadata that encode() would not write."""
    index = cache._INDEX.pack(bytes.fromhex(KEY), len(metadata), 0)
    seal = cache._SEAL.pack(cache._MAGIC, cache.SCHEMA, cache._checksum(index + metadata))
    return seal + index + metadata


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (b"[]", "metadata is not a JSON object"),
        (b"{", "metadata is not JSON"),
        (b'{"\xff": 1}', "metadata is not JSON"),
        (b"[" * 100_000, "metadata is not JSON"),
    ],
)
def test_import_refuses_hostile_metadata(tmp_path: Path, metadata: bytes, reason: str) -> None:
    path = zipped(tmp_path / "evil.zip", {f"{KEY}.frt": hostile_metadata(metadata)})
    assert archive.import_from(path) == (0, 0, [(f"{KEY}.frt", reason)])


def test_import_of_a_damaged_archive_never_stores_a_wrong_entry(tmp_path: Path) -> None:
    cache.store(KEY, ENTRY)
    archive.export_to(tmp_path / "kernels.zip")
    whole = (tmp_path / "kernels.zip").read_bytes()
    broken = tmp_path / "broken.zip"
    outcomes = set()
    for bit in range(0, 8 * len(whole), 3):
        cache.clear()
        blob = bytearray(whole)
        blob[bit // 8] ^= 1 << bit % 8
        broken.write_bytes(blob)
        try:
            outcomes.add(archive.import_from(broken)[:2])
        except ValueError as error:
            assert str(error).startswith(f"{broken} is not an archive of the cache: ")
            outcomes.add(("not an archive",))
        assert cache.load(KEY) in (None, ENTRY)
        assert [info.key for info in cache.entries()] in ([], [KEY])
    assert outcomes >= {(0, 0), ("not an archive",)}


def test_import_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a zip")
    with pytest.raises(ValueError, match="is not an archive of the cache: File is not a zip file"):
        archive.import_from(tmp_path / "notes.txt")
    with pytest.raises(FileNotFoundError):
        archive.import_from(tmp_path / "missing.zip")


# --- memory only


def test_without_a_home_the_cache_lives_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FUSIONRT_CACHE_DIR")
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("USERPROFILE", raising=False)
    with pytest.warns(cache.CacheWarning) as caught:
        assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert [str(one.message) for one in caught] == [
        "fusionrt cache: no HOME; kernels live in memory only, set FUSIONRT_CACHE_DIR"
    ]
    assert cache.directory() is None
    assert cache.get_or_build(KEY, never, "f") == (ENTRY, True)
    assert cache.store(OTHER, ENTRY) is False
    assert {(info.key, info.path) for info in cache.entries()} == {(KEY, None), (OTHER, None)}
    assert archive.export_to(tmp_path / "kernels.zip").written == 2
    assert cache.prune(len(ENTRY.payload)) == 1
    assert [info.key for info in cache.entries()] == [OTHER]
    assert cache.clear() == 1
    assert archive.import_from(tmp_path / "kernels.zip") == (2, 0, [])
    assert cache.load(KEY) == ENTRY
    monkeypatch.setenv("FUSIONRT_DISABLE_JIT", "1")
    with pytest.raises(cache.MissingKernelError, match="searched: memory only"):
        cache.get_or_build(keys(1)[0], never, "f")


def test_the_lock_waits_a_bounded_time_for_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "WAIT_SECONDS", 0.2)
    inside, leave = threading.Event(), threading.Event()

    def stuck() -> cache.Entry:
        inside.set()
        leave.wait(20)
        return ENTRY

    thread = threading.Thread(target=cache.get_or_build, args=(KEY, stuck, "f"))
    thread.start()
    inside.wait(20)
    started = time.monotonic()
    assert cache.get_or_build(KEY, lambda: ENTRY, "f") == (ENTRY, False)
    assert 0.2 <= time.monotonic() - started < 5
    leave.set()
    thread.join()
