"""An entry that is not what was stored: seen, reported once, rebuilt."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cache_faults import ENTRY, KEY, OTHER, never, posix, texts

from fusionrt.runtime import cache

pytestmark = [posix, pytest.mark.usefixtures("home")]


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


@pytest.mark.parametrize("free", [partial(cache.load, KEY), cache.clear, partial(cache.prune, 0)])
def test_a_full_directory_in_the_place_of_an_entry_is_moved_aside(
    home: Path, free: Callable[[], object]
) -> None:
    thesis = home / f"{KEY}.frt" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    assert cache.store(OTHER, ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # load() tells of it
        free()
    (aside,) = home.glob(f"{KEY}.frt.*.kept")
    assert (aside / thesis.name).read_text() == "years of work"
    assert cache.store(KEY, ENTRY) and cache.load(KEY) == ENTRY
    assert cache.verify() == [] and cache.clear() >= 1
    assert list(home.iterdir()) == [aside]


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
    monkeypatch.setattr(cache, "_random", lambda: "0" * 16)
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
