"""Compiled kernels on disk: a fault here is a miss and one warning, never a failed call.

One file an entry, published in one step:

    magic  schema  checksum | key  length of metadata  length of payload | metadata  payload
                            `------------- covered by the checksum ---------------------'

The checksum finds damage, not malice: whoever can write to the directory can run code as its
reader. So the default directory must be private, and `FUSIONRT_CACHE_DIR` is taken as it is.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import re
import stat
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fusionrt.errors import CacheWarning, MissingKernelError
from fusionrt.runtime import lock

SCHEMA = 1
MAX_BYTES = 2 << 30
MAX_ENTRY_BYTES = 256 << 20

_MAGIC = b"FRTCACHE"
_KEY_BYTES = 20
_SEAL = struct.Struct("<8sI32s")
_INDEX = struct.Struct(f"<{_KEY_BYTES}sQQ")
_FILE_NAME = rf"([0-9a-f]{{{2 * _KEY_BYTES}}})(\.frt|\.[0-9a-f]{{16}}\.tmp)"
_HOUR = 3600.0
_STORES_A_PRUNE = 32


class DamagedEntryError(ValueError):
    """The bytes are not the entry that they should be."""


class Entry(NamedTuple):
    metadata: dict[str, Any]
    payload: bytes


class Info(NamedTuple):
    key: str
    path: Path | None  # None: it lives in the memory of this process
    size: int
    metadata: dict[str, Any]
    last_used: float  # seconds since the epoch, exact to an hour


class _Home(NamedTuple):
    path: Path
    is_private: bool


_memory: dict[str, tuple[Entry, float]] = {}
_warned: dict[str, object] = {}
_stores = itertools.count()


def key(**fields: str | bytes | Sequence[str]) -> str:
    """Hash labelled fields. Their order does not matter, the order inside a sequence does."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)

    def feed(kind: bytes, data: bytes) -> None:
        digest.update(kind + len(data).to_bytes(8, "little") + data)

    feed(b"#", str(SCHEMA).encode())
    for label, value in sorted(fields.items()):
        feed(b"=", label.encode())
        if isinstance(value, str):
            feed(b"s", value.encode())
        elif isinstance(value, bytes):
            feed(b"b", value)
        elif isinstance(value, (list, tuple)):
            feed(b"n", str(len(value)).encode())
            for item in value:
                feed(b"s", item.encode())
        else:  # a set has no order and would give another key in every process
            raise TypeError(
                f"cache key: field {label!r} must be str, bytes, or a list or tuple of str, "
                f"got {type(value).__name__}"
            )
    return digest.hexdigest()


def get_or_build(key: str, build: Callable[[], Entry], name: str) -> tuple[Entry, bool]:
    """Return the entry and whether it was there; build it once for all threads and processes.

    What was built is returned as it is: what this process wrote may be hidden from it for a
    minute by the negative lookups of an NFS client (DeepEP #683).
    """
    entry = load(key)
    if entry is not None:
        return entry, True
    if forbids_compiling():
        raise MissingKernelError(_missing_text(key, name))
    with lock.hold(key):
        entry = load(key)
        if entry is not None:
            return entry, True
        entry = build()
        store(key, entry)
        return entry, False


def load(key: str) -> Entry | None:
    own = directory()
    for folder in _searched():
        path = folder / f"{key}.frt"
        try:
            entry = _read(path, key)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            _warn_once("unreadable", f"cannot read {path}: {error.strerror}; taken as missing")
        except DamagedEntryError as damage:
            _warn_once("damaged", f"{path} is damaged: {damage}; taken as missing")
            if folder == own:
                _discard(path)
        else:
            if folder == own:
                _touch(path)
            return entry
    remembered = _memory.get(key)
    return None if remembered is None else remembered[0]


def store(key: str, entry: Entry) -> bool:
    """Publish an entry: True when it is on disk, False when only this process remembers it."""
    blob = encode(key, entry)
    home = _home()
    if home is not None:
        try:
            _publish(home, key, blob)
        except OSError as error:
            text = f"cannot write to {home.path}: {error.strerror}; kernels live in memory only"
            _warn_once("unwritable", text)
        else:
            if next(_stores) % _STORES_A_PRUNE == 0:
                with suppress(OSError):  # the entry is there; nobody asked for this
                    prune(MAX_BYTES)
            return True
    _memory[key] = entry, time.time()
    return False


def only_remembered(key: str) -> bool:
    """Whether an entry is lost with this process."""
    return key in _memory and not any((folder / f"{key}.frt").exists() for folder in _searched())


def directory() -> Path | None:
    """The directory that new entries go to; None when the cache lives in memory only."""
    home = _home()
    return None if home is None else home.path


def look() -> None:
    """Raise the OSError of a directory that cannot be listed: everybody else takes it as empty."""
    for folder in _searched():
        with suppress(FileNotFoundError):  # not there yet
            next(folder.iterdir(), None)


def entries() -> Iterator[Info]:
    """Every sound entry that load() could find, without touching its last use."""
    return (info for info, _ in contents())


def contents() -> Iterator[tuple[Info, Entry]]:
    for folder in _searched():
        for path, status in _files(folder):
            with suppress(OSError, DamagedEntryError):  # verify() tells of these
                entry = _read(path, path.stem)
                size, last_used = status.st_size, status.st_mtime
                yield Info(path.stem, path, size, entry.metadata, last_used), entry
    for key, (entry, last_used) in list(_memory.items()):
        yield Info(key, None, len(entry.payload), entry.metadata, last_used), entry


def verify() -> list[tuple[Path, str]]:
    """Read every entry of every directory; return those that load() would not take, and why."""
    found = []
    for path, _ in itertools.chain.from_iterable(map(_files, _searched())):
        try:
            _read(path, path.stem)
        except FileNotFoundError:
            pass  # another process pruned it meanwhile
        except OSError as error:
            found.append((path, f"cannot be read: {error.strerror}"))
        except DamagedEntryError as damage:
            found.append((path, str(damage)))
    return found


def prune(max_bytes: int) -> int:
    """Drop the least recently used entries until the rest fits; return how many were dropped.

    Raises OSError, when all others are done, for those that cannot be removed.
    """
    _sweep(older_than=_HOUR)  # a younger one may be in the making
    stored = _stored()
    return _drop(stored, sum(one.size for one in stored) - max_bytes)


def clear() -> int:
    """Remove every entry but those of the read-only directories; return how many there were.

    Raises OSError, when all others are done, for those that cannot be removed.
    """
    _sweep(older_than=-math.inf)
    return _drop(_stored(), math.inf)


class _Stored(NamedTuple):
    last_used: float
    size: int
    remove: Callable[[], object]


def _stored() -> list[_Stored]:
    """What this process may remove, the least recently used first."""
    found = [_Stored(last_used, len(entry.payload), partial(_memory.pop, key, None))
             for key, (entry, last_used) in list(_memory.items())]
    folder = directory()
    if folder is not None:
        found += [_Stored(status.st_mtime, status.st_size, partial(_remove, path))
                  for path, status in _files(folder)]
    return sorted(found, key=lambda one: one.last_used)


def _sweep(older_than: float) -> None:
    """Of what killed writers left."""
    folder = directory()
    for path, status in _files(folder, ".tmp") if folder is not None else ():
        if time.time() - status.st_mtime > older_than:
            _discard(path)


def _drop(stored: Iterable[_Stored], excess: float) -> int:
    """Until the excess is gone; how many that took."""
    dropped, faults = 0, []
    for one in stored:
        if excess <= 0:
            break
        try:
            one.remove()
        except OSError as error:
            faults.append(f"{error.filename}: {error.strerror}")
        else:
            dropped += 1
        excess -= one.size  # of what stays too: newer ones do not go in its place
    if faults:
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise OSError(f"{dropped} kernels were removed, {len(faults)} could not be: "
                      f"{'; '.join(faults[:3])}{more}")
    return dropped


def encode(key: str, entry: Entry) -> bytes:
    metadata = json.dumps(entry.metadata, sort_keys=True).encode()
    index = _INDEX.pack(bytes.fromhex(key), len(metadata), len(entry.payload))
    body = b"".join((index, metadata, entry.payload))
    return _SEAL.pack(_MAGIC, SCHEMA, _checksum(body)) + body


def decode(blob: bytes, key: str) -> Entry:
    """The entry in `blob`, or DamagedEntryError with the reason."""
    start = _SEAL.size + _INDEX.size
    if len(blob) < start:
        raise DamagedEntryError(f"{len(blob)} bytes, shorter than a header" if blob else "empty")
    magic, schema, checksum = _SEAL.unpack_from(blob)
    stored_key, metadata_bytes, payload_bytes = _INDEX.unpack_from(blob, _SEAL.size)
    if magic != _MAGIC:
        raise DamagedEntryError("not a file of this cache")
    if schema != SCHEMA:
        raise DamagedEntryError(f"schema {schema}, expected {SCHEMA}")
    expected = start + metadata_bytes + payload_bytes
    if len(blob) != expected:
        raise DamagedEntryError(f"{len(blob)} bytes, expected {expected}")
    if checksum != _checksum(memoryview(blob)[_SEAL.size :]):
        raise DamagedEntryError("checksum differs")
    if stored_key.hex() != key:
        raise DamagedEntryError(f"holds the entry of another key, {stored_key.hex()}")
    end = start + metadata_bytes
    try:
        metadata = json.loads(blob[start:end])
    except (ValueError, RecursionError) as error:  # a hostile archive may nest without end
        raise DamagedEntryError("metadata is not JSON") from error
    if not isinstance(metadata, dict):
        raise DamagedEntryError("metadata is not a JSON object")
    return Entry(metadata, blob[end:])


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=32).digest()


def _home() -> _Home | None:
    explicit = os.environ.get("FUSIONRT_CACHE_DIR")
    if explicit:
        return _Home(_of_user(explicit), is_private=False)
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # the XDG specification: a relative path is to be ignored
        # Not Path.home(): without HOME it asks the password file, and service accounts and
        # containers without a home are given "/" or somebody else's directory there.
        home = os.environ.get("HOME") or os.environ.get("USERPROFILE", "")
        caches = Path(home) / ".cache"
    if not caches.is_absolute():
        _warn_once("homeless", "no HOME; kernels live in memory only, set FUSIONRT_CACHE_DIR")
        return None
    path = caches / "fusionrt"
    fault = lock.why_not_private(path)
    if fault is not None:
        text = f"{path} {fault}; kernels live in memory only, set FUSIONRT_CACHE_DIR"
        _warn_once("refused", text)
        return None
    return _Home(path, is_private=True)


def _searched() -> list[Path]:
    own = directory()
    return ([] if own is None else [own]) + read_only_directories()


def read_only_directories() -> list[Path]:
    given = os.environ.get("FUSIONRT_CACHE_READONLY_DIRS", "").split(os.pathsep)
    return [_of_user(folder) for folder in given if folder]


def _of_user(folder: str) -> Path:
    """`~` being the user's home, if that has one."""
    with suppress(RuntimeError):
        return Path(folder).expanduser()
    return Path(folder)


def forbids_compiling() -> bool:
    return os.environ.get("FUSIONRT_DISABLE_JIT", "0") not in ("", "0")


def _missing_text(key: str, name: str) -> str:
    searched = ", ".join(map(str, _searched())) or "memory only"
    return (
        f"{name}: FUSIONRT_DISABLE_JIT is set and the kernel is not in the cache "
        f"(key {key}, searched: {searched}). Fill the cache with `fusionrt warmup`, "
        "or unset FUSIONRT_DISABLE_JIT"
    )


def _read(path: Path, key: str) -> Entry:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for ever
        raise DamagedEntryError("not a regular file")
    if status.st_size > MAX_ENTRY_BYTES:
        raise DamagedEntryError(f"{status.st_size} bytes, more than an entry may have")
    return decode(path.read_bytes(), key)


def _publish(home: _Home, key: str, blob: bytes) -> None:
    """Write beside the target and rename: a reader sees the whole entry or none."""
    if len(blob) > MAX_ENTRY_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    home.path.mkdir(mode=0o700 if home.is_private else 0o777, parents=True, exist_ok=True)
    # Not tempfile.mkstemp: always 0600, so what root bakes into an image nobody else can read.
    temporary = home.path / f"{key}.{_random()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(temporary, flags, 0o600 if home.is_private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(descriptor)  # else a power cut may leave the new name on an empty file
        temporary.replace(home.path / f"{key}.frt")
    except BaseException:  # whatever it was, KeyboardInterrupt too, it must not leave litter
        _discard(temporary)
        raise


def _touch(path: Path) -> None:
    """Note the use, at most once an hour: atime is off or coarse on most mounts."""
    with suppress(OSError):  # a shared directory of another user; only the order of age suffers
        if time.time() - path.stat().st_mtime > _HOUR:
            os.utime(path)


def _discard(path: Path) -> None:
    with suppress(OSError):  # best effort: the caller no longer counts on this file
        _remove(path)


def _random() -> str:
    """Of a name that nobody has. (`secrets` takes a millisecond to import.)"""
    return os.urandom(8).hex()


def _remove(path: Path) -> None:
    """Frees the name. A directory that holds something is nothing of ours: it stays, beside it."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
    elif any(path.iterdir()):
        path.rename(path.with_name(f"{path.name}.{_random()}.kept"))
    else:
        path.rmdir()


def _files(folder: Path, suffix: str = ".frt") -> Iterator[tuple[Path, os.stat_result]]:
    """Only what this module named: FUSIONRT_CACHE_DIR may be somebody's home directory."""
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return  # not there yet, or not ours to read: load() warns of what matters
    for path in paths:
        if path.suffix == suffix and re.fullmatch(_FILE_NAME, path.name):
            with suppress(OSError):  # removed meanwhile by another process
                yield path, path.lstat()


def _warn_once(kind: str, text: str) -> None:
    token = object()
    if _warned.setdefault(kind, token) is token:  # one step, so two threads do not both warn
        warnings.warn(f"fusionrt cache: {text}", CacheWarning, stacklevel=2)
