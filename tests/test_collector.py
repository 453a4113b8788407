"""Python's collector of cycles is put aside for a while, and finds afterwards what there is."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from fusionrt import collector
from fusionrt.collector import paused


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a program; conftest.py freezes what the suite has imported."""
    monkeypatch.setattr(collector, "_program_freezes", False)
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


def test_nothing_is_collected_meanwhile_and_all_of_it_later() -> None:
    with paused():
        assert not gc.isenabled()
        gone, kept = weakref.ref(Cycle()), [[one] for one in range(100_000)]
    assert gc.isenabled() and gone() is not None and gc.get_freeze_count() == 0
    assert gc.get_count()[0] < len(kept)  # they are old
    gc.collect()
    assert gone() is None


def test_who_comes_often_has_garbage_collected() -> None:
    gone = []
    for _ in range(4 * gc.get_threshold()[0]):
        gone.append(weakref.ref(Cycle()))
        with paused():
            pass
    assert sum(one() is not None for one in gone) < len(gone) // 2


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with paused():
        pass
    assert not gc.isenabled()


def test_what_a_program_froze_stays_frozen() -> None:
    kept = Cycle()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused():
        gone = weakref.ref(Cycle())
    assert 0 < gc.get_freeze_count() <= frozen and gc.isenabled() and kept.itself is kept
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("frozen", [375, 100_000])
def test_what_python_itself_has_frozen_does_not_matter(monkeypatch: pytest.MonkeyPatch, frozen: int) -> None:
    """Python 3.12 starts with some hundreds of such objects."""
    made_old: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    monkeypatch.setattr(gc, "freeze", lambda: made_old.append(gc.get_count()[0]))
    with paused():
        kept = [[one] for one in range(100_000)]
    assert [count >= len(kept) for count in made_old] == [True] * (frozen == 375)


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time would take longer than most of what pauses the collector."""
    counted: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or collector.FEW)
    for _ in range(3):
        with paused():
            kept = [[one] for one in range(2 * collector.MANY)]
    assert len(counted) == 1 and kept
