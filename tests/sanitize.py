"""The GPU tests under one of NVIDIA's sanitizers, in several processes at a time.

    python tests/sanitize.py racecheck tests/test_norm.py --jobs 14 --minutes 9 --verdicts racecheck.json

Each process imports torch and collects the tests once, then is given one after another, of one file while
there are any: a library's kernels are prepared once a process. The first ones are those in which a value of a
parameter is met first, and those of files whose tests have taken little time: a run that is cut off has seen
a little of everything. The next one with the same verdicts goes on with the tests that have none, one with
the same record with those that were not clean yet. Verdicts, each with the seconds it took:
`clean`; `reported` and of which kernels, where the sanitizer wrote something, which lies beside the verdicts;
`failed`, for which other reason; `died`, with the process.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

# A tensor's memory is its own, so that what lies behind it is nobody's.
ENVIRONMENT = {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
# Torch's own kernels, of which many are waited for while they are made ready, are torch's to look after. What
# they write has to be seen by initcheck, though.
_BUT_TORCHS = ["--kernel-name-exclude", "kns=at6native", "--kernel-name-exclude", "kns=at_cuda_detail"]
OPTIONS = {
    # What torch's allocator asks for and does without if it is refused is no error.
    "memcheck": ["--report-api-errors", "no", *_BUT_TORCHS],
    # Its threads would take the other processes' cores.
    "racecheck": ["--racecheck-num-workers", "1", *_BUT_TORCHS]}
TEST = re.compile(r"\S+\.py::")
ASKED = ("-m", "gpu", "-q", "--no-header", "-p", "no:xdist")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--jobs", type=int, default=4, help="processes, of some 8 GB of memory each")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--verdicts", type=Path, default=Path("sanitized.json"))
    parser.add_argument("--again", action="append", default=[], metavar="WORD",
                        help="also the tests whose verdict begins so")
    parser.add_argument("--cached", action="store_true",
                        help="with torch's cache of memory: nothing else can be allocated in a capture")
    parser.add_argument("--record", type=Path, help="which is told what was clean; that is left out")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--exclude", action="append", default=[], metavar="TEXT",
                        help="kernels with this in their names, for instance a library's")
    parser.add_argument("--ours", action="store_true", help="no kernels but those of kernels_src")
    parser.add_argument("tests", nargs="*", default=["tests"])
    run = Run(parser.parse_intermixed_args())
    run.go()
    return run.summary()


class Queue:
    """The tests, by file. `known`: the seconds that others took."""

    def __init__(self, tests: list[str], known: dict[str, tuple[str, float]]) -> None:
        self.files: dict[str, collections.deque[str]] = {}
        for test in in_turns(tests):
            self.files.setdefault(file_of(test), collections.deque()).append(test)
        self.begun: collections.Counter[str] = collections.Counter()
        taken: dict[str, list[float]] = {}
        for test, (_, seconds) in known.items():
            taken.setdefault(file_of(test), []).append(seconds)
        self.seconds = {file: statistics.mean(each) for file, each in taken.items()}
        self.lock = threading.Lock()

    def urgency(self, file: str) -> float:
        return len(self.files[file]) / (1 + self.begun[file]) / max(1.0, self.seconds.get(file, 1.0))

    def __len__(self) -> int:
        return sum(map(len, self.files.values()))

    def take(self, last: str) -> str:
        """The next one for a process that has run `last`; an IndexError where there is none."""
        file = file_of(last)
        with self.lock:
            if not self.files.get(file):
                file = max(self.files, key=self.urgency)
                self.begun[file] += 1
            return self.files[file].popleft()

    def give_back(self, test: str) -> None:
        """To its place, as of a process that had just ended."""
        with self.lock:
            self.files[file_of(test)].appendleft(test)


def file_of(test: str) -> str:
    return test.partition("::")[0]


class Run:
    """The queue, and what is known of each test."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.end = asked, time.monotonic() + 60 * asked.minutes
        known = json.loads(asked.verdicts.read_text()) if asked.verdicts.exists() else {}
        self.verdicts: dict[str, tuple[str, float]] = {
            test: verdict for test, verdict in known.items() if not verdict[0].startswith(tuple(asked.again))}
        listed = subprocess.run([sys.executable, "-m", "pytest", *ASKED, "--collect-only", *asked.tests],
                                capture_output=True, text=True).stdout.splitlines()
        self.tests = [line for line in listed if TEST.match(line)]  # beside warnings
        self.record = json.loads(asked.record.read_text()) if asked.record and asked.record.exists() else {}
        self.before = Clean.of_record(self.record.get(asked.tool, {}))
        self.queue = Queue([test for test in self.tests
                            if test not in self.verdicts and test not in self.before], known)
        self.gpus = gpus()
        self.lock = threading.Lock()

    def go(self) -> None:
        threads = [threading.Thread(target=self._serve, args=(k,)) for k in range(self.asked.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, number: int) -> None:
        while self.queue and time.monotonic() < self.end:
            if not self._served(number) and self.queue and time.monotonic() < self.end:
                print("a process ended before its first test", file=sys.stderr)
                return

    def _served(self, number: int) -> int:
        """How many tests one process has run."""
        served, test = 0, ""
        # Of an empty queue; of what is left to write to a process that has ended.
        with contextlib.suppress(IndexError, BrokenPipeError), self._process(number) as process:
            timer = threading.Timer(self.end - time.monotonic(), os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            try:
                while process.poll() is None:
                    test, began = self.queue.take(test), time.monotonic()
                    verdict = ask(process, test)
                    if verdict is None or (verdict == "died" and time.monotonic() >= self.end):
                        self.queue.give_back(test)
                        break
                    self._note(test, verdict, time.monotonic() - began)
                    served += 1
            finally:
                timer.cancel()
        return served

    def _process(self, number: int) -> subprocess.Popen[str]:
        log = self.asked.verdicts.with_suffix(f".{number}.log")
        command = [self.asked.sanitizer, "--tool", self.asked.tool, "--show-backtrace", "no",
                   "--print-limit", "0", *OPTIONS.get(self.asked.tool, ()), *self._filters(),
                   "--log-file", str(log), sys.executable, __file__, SERVE, str(log), *self.asked.tests]
        environment = os.environ | ({} if self.asked.cached else ENVIRONMENT.get(self.asked.tool, {}))
        paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]  # the first one as `-m pytest` has it
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[number % len(self.gpus)]
        return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, start_new_session=True)

    def _filters(self) -> list[str]:
        left_out = [("--kernel-name-exclude", f"kns={text}") for text in self.asked.exclude]
        taken = [("--kernel-name", f"kne={name}") for name in our_kernels()] if self.asked.ours else []
        return [word for words in [*left_out, *taken] for word in words]

    def _note(self, test: str, verdict: str, seconds: float) -> None:
        with self.lock:
            self.verdicts[test] = verdict, round(seconds, 1)
            self.asked.verdicts.write_text(json.dumps(self.verdicts, indent=0))
        if verdict != "clean":
            print(f"{test} {verdict}", flush=True)

    def summary(self) -> int:
        counts = collections.Counter(verdict.split()[0] for verdict, _ in self.verdicts.values())
        said = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
        print(said, f"({len(self.queue)} left)")
        if self.asked.record:
            record = self.record | {self.asked.tool: self._recorded()}
            self.asked.record.write_text(json.dumps(record, indent=1) + "\n")
        return int(any(verdict != "clean" for verdict in counts) or bool(self.queue))

    def _recorded(self) -> dict[str, object]:
        before = self.record.get(self.asked.tool, {})
        said = {test: verdict for test, (verdict, _) in self.verdicts.items()}
        clean = Clean({test for test in self.tests if said.get(test) == "clean" or test in self.before})
        faults = before.get("not clean", {}) | said
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        return {"date": f"{datetime.date.today()}",
                "commits": list(dict.fromkeys([*before.get("commits", []), commit.stdout.strip()])),
                "files": dict(sorted((before.get("files", {}) | clean.files(self.tests)).items())),
                "not clean": {test: fault for test, fault in sorted(faults.items()) if fault != "clean"}}


class Clean:
    """The tests that were clean, by short names."""

    def __init__(self, tests: Iterable[str] = (), short: Iterable[str] = ()) -> None:
        self.short = {*short, *map(self._short, tests)}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Clean:
        return cls(short=itertools.chain.from_iterable(
            file["clean"].split() for file in record.get("files", {}).values()))

    def __contains__(self, test: str) -> bool:
        return self._short(test) in self.short

    @staticmethod
    def _short(test: str) -> str:
        return f"{zlib.crc32(test.encode()):08x}"

    def files(self, tests: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Of each file of these tests how many there are, how many clean, and which."""
        found = {}
        for file, group in itertools.groupby(sorted(tests, key=file_of), file_of):
            each = [*group]
            names = sorted(self._short(test) for test in each if test in self)
            found[file] = {"tests": len(each), "clean tests": len(names), "clean": " ".join(names)}
        return found


def our_kernels() -> list[str]:
    kernel = re.compile(r"(\w+)\(const __grid_constant__")
    templates = Path(__file__).parent.parent.joinpath("kernels_src").glob("*.cu")
    return sorted(name for template in templates for name in kernel.findall(template.read_text()))


def gpus() -> list[str]:
    """Numbers of those that may be used, among which the processes are shared out."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible.split(",")
    counted = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
                             capture_output=True, text=True).stdout
    return [str(k) for k in range(int(counted))]


def in_turns(tests: list[str]) -> list[str]:
    """First the tests in which a value of a parameter is met first."""
    seen: set[tuple[str, int, str]] = set()
    first, later = [], []
    for test in tests:
        function, _, values = test.partition("[")
        met = {(function, k, value) for k, value in enumerate(values.rstrip("]").split("-"))}
        (later if met <= seen else first).append(test)
        seen |= met
    return first + later


def ask(process: subprocess.Popen[str], test: str) -> str | None:
    """The verdict; None if the process had ended before."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(test + "\n")
        process.stdin.flush()
    said = [line.removeprefix(MARK).strip() for line in itertools.islice(
        (line for line in process.stdout if line.startswith(MARK)), 2)]
    return said[1] if len(said) == 2 else "died" if said else None


# -- the process under the sanitizer -----------------------------------------------------------------

MARK, SERVE = "sanitize: ", "--serve"
KERNEL = re.compile(r"^=+ .*\bat (?:void )?([\w:]+)")


class Serving:
    """A plugin of pytest's that runs the tests that it is told of, and says how each went."""

    def __init__(self, log: Path) -> None:
        self.log, self.failed = log, ""
        self.told, self.says = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")  # which pytest captures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            said = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or report.longreprtext
            self.failed = self.failed or f"failed {said.partition(chr(10))[0][:150]}"

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        import torch
        items = {item.nodeid: item for item in session.items}
        if torch.cuda.is_available():
            torch.cuda.init()  # after which the log has its first line
        for line in self.told:
            item, before, self.failed = items[line.strip()], self._size(), ""
            self._say("begins")
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            broken, reported = self._is_broken(), self._size() > before
            failed = self.failed or ("failed" if broken else "")
            self._say(failed or (self._reported(before) if reported else "clean"))
            if broken:  # nothing more can be computed in this process
                os._exit(1)
        os._exit(0)

    def _say(self, word: str) -> None:
        print(f"\n{MARK}{word}", file=self.says, flush=True)  # on a line of its own: pytest writes dots

    def _is_broken(self) -> bool:
        import torch
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.rand(1, device="cuda")  # never again by a generator whose capture has failed
        except RuntimeError:
            return True
        return False

    def _size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _reported(self, before: int) -> str:
        with self.log.open(errors="replace") as log:
            log.seek(before)
            kernels = {name for line in log for name in KERNEL.findall(line)}
        return " ".join(["reported", *sorted(kernels)])


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        sys.exit(pytest.main([*ASKED, *sys.argv[3:]], plugins=[Serving(Path(sys.argv[2]))]))
    sys.exit(main())
