"""Many processes at one cache: one build, whole entries, locks that end with their holders."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from cache_faults import ENTRY, KEY, output, posix, start

from fusionrt.runtime import cache, lock

pytestmark = [posix, pytest.mark.usefixtures("home")]


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
