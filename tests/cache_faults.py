"""A cache when something is wrong: what its tests share.

Every fault is a miss and one warning, never a failed call. The tests run with the fixture `home`.
"""

import os
import subprocess
import sys
import warnings

import pytest

from fusionrt.runtime import cache

KEY = cache.key(source="__global__ void f() {}", arch="sm_90a")
OTHER = cache.key(source="__global__ void g() {}", arch="sm_90a")
ENTRY = cache.Entry({"kernel": "f", "registers": 32}, bytes(range(256)) * 2)

posix = pytest.mark.skipif(os.name != "posix", reason="modes, owners, signals, fork")


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
