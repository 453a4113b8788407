"""What attributes hold is found, however deep, and put back as it was."""

import dataclasses
import gc
from collections import OrderedDict, defaultdict, deque

import pytest
import torch
from torch import nn

import fusionrt as frt
from fusionrt.convert.contents import _that_hold, contents, restore


class Evicting(OrderedDict):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        while len(self) > self.size:
            self.popitem(last=False)


class Ring(deque):
    def __init__(self, size):
        super().__init__(maxlen=size)


class Groups(defaultdict):
    def __init__(self):
        super().__init__(list)


@dataclasses.dataclass(slots=True)
class Slotted:
    steps: int = 0
    last: object = dataclasses.field(init=False)


class Noted(dict):
    steps = 0


def evicting():
    found = Evicting(8)
    found.update(a=1, b=2, c=3)
    return found


def ring():
    found = Ring(2)
    found.extend("ab")
    return found


def groups():
    found = Groups()
    found["a"].append(1)
    return found


def shrink(cache):
    cache.size = 1
    cache["d"] = 4


def step(state):
    state.steps, state.last = 1, "x"


CASES = {
    "keys in another order": (lambda: {"a": 1, "b": 2}, lambda d: d.update(a=d.pop("a"))),
    "moved to the end": (lambda: OrderedDict(a=1, b=2), lambda d: d.move_to_end("a")),
    "evicting": (evicting, shrink), "ring": (ring, lambda d: d.append("c")),
    "groups": (groups, lambda d: d["a"].append(2) or d["b"].append(3)),
    "set": (lambda: {1, 2}, lambda s: s.add(3)), "slots": (Slotted, step),
    "attributes of a dictionary": (Noted, lambda d: setattr(d, "steps", 1)),
    "atoms in a tuple": (lambda: ({"a": 1},), lambda t: t[0].update(a=2)),
    "a module in a list": (lambda: [nn.BatchNorm1d(8)], lambda found: found[0](torch.rand(4, 8)))}


def seen(value):
    """With the order of keys, and with attributes."""
    if isinstance(value, list | tuple | deque):
        return [seen(v) for v in value]
    if isinstance(value, nn.Module):
        return [(name, b.tolist()) for name, b in value.named_buffers()]
    items = list(value.items()) if isinstance(value, dict) else [] if isinstance(value, Slotted) else [*value]
    return [repr(items), [(k, getattr(value, k)) for k in ("size", "steps", "last") if hasattr(value, k)]]


@pytest.mark.parametrize(("make", "change"), CASES.values(), ids=CASES)
def test_contents_are_put_back(make, change):
    """As a call of a model changes them: validation leaves no trace, whatever its class's methods do."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.held = nn.Linear(8, 8), make()

        @torch._dynamo.disable
        def touch(self):
            change(self.held)

        def forward(self, x):
            self.touch()
            return self.layer(x)

    model, before = Model().eval(), seen(make())
    fast = frt.auto_convert_model(model, (4, 8))
    assert seen(model.held) == seen(fast.held) == before


def test_what_did_not_change_is_not_written_to():
    """A class that is watched, or that others read meanwhile."""
    class Sealed(dict):
        def clear(self):
            raise AssertionError
        __setitem__ = update = clear

    for container, before in contents([{"sealed": Sealed(a=1)}]).held:
        restore(container, before)


def test_rows_of_tables_are_not_walked():
    rows = [(k, str(k)) for k in range(1000)]
    gc.collect()  # which finds that they lead nowhere
    assert _that_hold([*rows, {"a": 1}, [rows]]) == [{"a": 1}, [rows]]
