"""Locks that signals, finalizers and forked children meet."""

import importlib
import os
import pkgutil
import signal
import threading

import pytest
import torch

import fusionrt
from fusionrt import deferred, forks


def test_every_lock_of_a_module_is_one_of_these():
    plain = type(threading.Lock()), type(threading.RLock())
    for module in pkgutil.walk_packages(fusionrt.__path__, "fusionrt."):
        if module.name != "fusionrt.__main__":
            found = vars(importlib.import_module(module.name)).items()
            assert not [name for name, value in found if isinstance(value, plain)], module.name


def test_whoever_holds_it_may_take_it_again():
    lock = forks.Lock()
    with lock(), lock():
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_child_has_its_own():
    lock, is_held, may_end = forks.Lock(), threading.Event(), threading.Event()

    def hold():
        with lock():
            is_held.set()
            may_end.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    child = os.fork()
    if not child:
        os._exit(0 if lock().acquire(timeout=5) else 1)
    assert os.waitpid(child, 0)[1] == 0
    may_end.set()
    holder.join()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signals here")
def test_a_signal_examines_while_an_error_is_worded(monkeypatch):
    class Host:
        counts, free = {0: 1, 1: 1}, []

    def message(wrong):
        signal.raise_signal(signal.SIGUSR1)
        return "in the call"

    def examine(*_):
        with pytest.raises(IndexError, match="in the handler"):
            deferred.examine()

    monkeypatch.setattr(deferred, "_host", Host)
    monkeypatch.setattr(deferred, "_pending", deferred.deque([
        (0, message, torch.device("cpu")), (1, lambda _: "in the handler", torch.device("cpu"))]))
    before = signal.signal(signal.SIGUSR1, examine)
    try:
        with pytest.raises(IndexError, match="in the call"):
            deferred.examine()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not deferred._pending and sorted(Host.free) == [0, 1]
