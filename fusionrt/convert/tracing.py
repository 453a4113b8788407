"""Tracing without collecting garbage, which takes a quarter of a model's first call: Python's collector walks
torch's million objects again and again, and Dynamo asks for it once more when it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fusionrt.collector import paused


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """For a call in here that is traced."""
    from torch._dynamo import config
    options = {"run_gc_after_compile": False} if hasattr(config, "run_gc_after_compile") else {}
    with paused(), config.patch(options):
        yield
