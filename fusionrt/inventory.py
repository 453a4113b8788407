"""What a warm-up of the whole catalogue found to be needed, kept in the cache beside it.

Finding that out means tracing each op in each dtype, seconds; a later one of the same package and tools
reads the list. It is right as long as nothing changed that a kernel's text or key depends on.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from fusionrt.runtime import cache, compiler, source

KERNEL = "list of a warm-up"


def identity(architectures: Sequence[str], dtypes: Sequence[str], widths: Sequence[int],
             heights: Sequence[int], backward: bool) -> str:
    """The key of such a list."""
    tools = [torch.__version__, compiler.toolchain()]
    if "cpu" in architectures:
        from fusionrt.cpu import compiler as cpu
        tools += [cpu.target(), cpu.toolchain()]
    sizes = {"widths": [str(n) for n in widths], "heights": [str(n) for n in heights]}
    return cache.key(package=_package(), tools=tools, architectures=architectures, dtypes=dtypes, **sizes,
                     backward=str(backward), kind=KERNEL)


@functools.cache
def _package() -> str:
    files = [*Path(__file__).parent.rglob("*.py"), *source.directory().iterdir()]
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        digest.update(file.name.encode() + hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest()


def entries(identity: str) -> list[cache.Entry] | None:
    """All kernels of a list, if there is one and the cache has them all, whole."""
    known = cache.load(identity)
    found = [cache.load(key) for key in json.loads(known.payload)] if known is not None else [None]
    return None if None in found else [entry for entry in found if entry is not None]


def keep(identity: str, keys: Iterable[str], architectures: Sequence[str]) -> None:
    text = json.dumps(sorted(keys)).encode()
    cache.store(identity, cache.Entry({"kernel": KERNEL, "arch": ",".join(architectures)}, text))
