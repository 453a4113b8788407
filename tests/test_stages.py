"""Which sums of a row one pass finds, and by which kernels."""

import pytest
import torch

import fusionrt as frt
from fusionrt import stages
from fusionrt.expr import argument
from fusionrt.rehearsal import collecting
from fusionrt.rowwise import log_softmax, softmax, standardize

X, GRAD, WEIGHT = argument("a0"), argument("a1"), argument("a2", uniform=True)


@pytest.mark.parametrize("online, count", [(True, 1), (False, 2)])
def test_a_gpu_finds_in_one_pass_what_a_cpu_finds_in_two(online, count):
    for root in (standardize(X, WEIGHT)[0], softmax(X)[0], log_softmax(X)[0]):
        found, (rest,) = stages.split([root], 3, {"a2"}, online)
        assert len(found) == count
        assert not stages.schedule([rest])[0].found


def test_factors_of_a_row_leave_its_sums():
    roots = stages.factored([stages.row_sum(GRAD * WEIGHT * X), stages.row_sum(-(X * GRAD))])
    assert len(stages.schedule(roots)[0].found) == 1


def test_kernels_of_a_reduction():
    """Over the last dimension one, over others two; a sum's gradient none."""
    from fusionrt.runtime import launch

    x = torch.empty(512, 1024, device="meta", requires_grad=True)
    for dim, expected in ((-1, ["rows"]), (0, ["pointwise_reduce", "join_partials"])):
        with collecting() as problems:
            frt.sum(x, dim).sum().backward()
        assert [s.entry for p in problems for s in launch.sources(p)] == expected
