"""Which combinations of parameters the default run takes on a CPU."""

import itertools

import pytest
from conftest import covering

PARAMETERS = {"op": "abcdef", "dtype": (16, 32, 64), "layout": ("rows", "columns", "images", "gaps")}


@pytest.mark.parametrize("together, least", [(1, 6), (2, 24)])
def test_values_that_meet_still_meet(together, least):
    combinations = [dict(zip(PARAMETERS, values, strict=True))
                    for values in itertools.product(*PARAMETERS.values())]
    kept = covering(combinations, together)
    assert kept == covering(combinations, together)  # as in every worker
    assert least <= len(kept) <= least + 3
    chosen = [tuple(combinations[k].items()) for k in kept]
    for names in itertools.combinations(PARAMETERS, together):
        for values in itertools.product(*(PARAMETERS[name] for name in names)):
            assert any(set(zip(names, values, strict=True)) <= set(one) for one in chosen)


def test_what_never_meets_need_not():
    combinations = [{"op": "a", "dtype": 16}, {"op": "b", "dtype": 32}, {"op": "b", "dtype": 16}]
    assert sorted(covering(combinations, 2)) == [0, 1, 2]
    assert sorted(covering(combinations, 1)) == [0, 1]
