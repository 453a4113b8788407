"""The cache as one file, to carry from the machine that compiles to the machines that run.

An archive is a zip whose members are cache entries under their own names. Importing proves that
each entry is whole and is what its name says; it cannot prove who made it. Import only archives
whose maker may run code as you.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

from fusionrt.files import whole
from fusionrt.runtime import cache

_FIRST_ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # a fixed one: the same entries give the same archive
_MEMBER_NAME = re.compile(r"([0-9a-f]+)\.frt")


class Exported(NamedTuple):
    written: int
    left_out: list[tuple[Path, str]]  # file, reason


class Imported(NamedTuple):
    imported: int
    present: int
    refused: list[tuple[str, str]]  # member name, reason


def export_to(file: str | os.PathLike[str]) -> Exported:
    """Write every sound entry that load() could find into one archive; say why others were not."""
    written: set[str] = set()
    with whole(file) as place, place.open("wb") as out, zipfile.ZipFile(_unseekable(out), "w") as archive:
        for info, entry in cache.contents():
            if info.key not in written:
                member = zipfile.ZipInfo(f"{info.key}.frt", _FIRST_ZIP_DATE)
                blob = cache.encode(info.key, entry)
                archive.writestr(member, blob, zipfile.ZIP_DEFLATED)
                written.add(info.key)
    return Exported(len(written), [(path, why) for path, why in cache.verify() if path.stem not in written])


def _unseekable(stream: IO[bytes]) -> Any:
    """zipfile then never goes back to fill in sizes: a pipe cannot, and /dev/null says that it could."""
    return SimpleNamespace(write=stream.write, flush=stream.flush)


def import_from(file: str | os.PathLike[str]) -> Imported:
    """Store the sound entries of an archive that are not yet there; say why others were not."""
    imported = present = total_bytes = 0
    refused = []
    with contextlib.ExitStack() as opened:
        try:
            archive = opened.enter_context(zipfile.ZipFile(opened.enter_context(_seekable(file))))
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            # also what zipfile makes of a future zip version and of names that are not UTF-8
            raise ValueError(f"{os.fspath(file)} is not an archive of the cache: {error}") from error
        for member in archive.infolist():
            try:
                key, blob = _unpacked(archive, member, cache.MAX_BYTES - total_bytes)
                total_bytes += len(blob)
                entry = cache.decode(blob, key)
            except cache.DamagedEntryError as damage:
                refused.append((member.filename, str(damage)))
                continue
            if cache.load(key) is not None:
                present += 1
            elif cache.store(key, entry) or cache.directory() is None:
                imported += 1
            else:
                refused.append((member.filename, f"cannot write to {cache.directory()}"))
    return Imported(imported, present, refused)


@contextlib.contextmanager
def _seekable(file: str | os.PathLike[str]) -> Iterator[Any]:
    """What comes through a pipe as a file of its own, as the contents of an archive stand at its end."""
    if Path(file).is_file() or not Path(file).exists():
        yield file
        return
    with Path(file).open("rb") as stream, tempfile.TemporaryFile() as held:
        while len(part := stream.read(1 << 20)) > 0:
            held.write(part)
            if held.tell() > cache.MAX_BYTES:
                raise ValueError(f"more than {cache.MAX_BYTES} bytes")
        held.seek(0)
        yield held


def _unpacked(archive: zipfile.ZipFile, member: zipfile.ZipInfo, room: int) -> tuple[str, bytes]:
    """Take nothing on trust: any doubt is a DamagedEntryError, before anything is written."""
    name = _MEMBER_NAME.fullmatch(member.filename)
    if name is None:
        raise cache.DamagedEntryError("not the name of an entry")
    if stat.S_ISLNK(member.external_attr >> 16):
        raise cache.DamagedEntryError("a symbolic link")
    if member.file_size > cache.MAX_ENTRY_BYTES:
        raise cache.DamagedEntryError(f"{member.file_size} bytes, more than an entry may have")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise cache.DamagedEntryError(f"compression method {member.compress_type}")
    if member.file_size > room:
        raise cache.DamagedEntryError("the archive is larger than the cache may grow")
    try:
        with archive.open(member) as stream:
            blob = stream.read(member.file_size)  # bounded: the stream may hold more than it says
    except Exception as error:
        # zipfile answers damage with BadZipFile, zlib.error, EOFError, OSError (a seek before the
        # start), RuntimeError (encrypted), NotImplementedError: whatever it is, no entry came out.
        raise cache.DamagedEntryError(f"cannot be unpacked: {error}") from error
    return name[1], blob
