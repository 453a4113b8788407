"""fusionrt.bench.accuracy: errors, ulps, what is rounded, what is exact."""

import json
import math

import numpy as np
import pytest
import torch

from fusionrt import bench
from fusionrt.bench.accuracy import accuracy, exactly, of_results


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_is_half_a_ulp_at_most(dtype):
    exact = torch.randn(10_000, dtype=torch.float64)
    exact = exact.float().double() if dtype.itemsize == 2 else exact  # torch rounds by way of float32
    found = accuracy(exact.to(dtype), exact)
    assert 0.45 < found.ulp_max <= 0.5
    assert 0.2 < found.ulp_mean < 0.3
    assert (found.mismatches, found.nan, found.inf, found.outside) == (0, 0, 0, 0)
    assert found.ok
    error = (exact.to(dtype).double() - exact).abs()
    assert found.max_abs == error.max()
    assert found.max_rel == (error / exact.abs()).max()
    ordered = error.sort().values
    assert {q: found.absolute[q] for q in (50, 90, 99, 99.9)} == {
        q: ordered[int(q * 100) - 1] for q in (50, 90, 99, 99.9)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_neighbour_is_one_ulp_away(dtype):
    exact = torch.tensor([1.0, 1.5, -3.0, 1e-3]).to(dtype).double()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    neighbours = (exact.to(dtype).view(bits) + 1).view(dtype)
    found = accuracy(neighbours, exact)
    assert found.ulp_max == found.ulp_mean == 1.0
    assert found.mismatches == 4


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_the_exact_result_is_rounded_once(dtype, unit):
    exact = torch.tensor([1 + unit / 2 + 2**-40], dtype=torch.float64)  # to float32: half-way
    assert accuracy(torch.tensor([1 + unit], dtype=dtype), exact).mismatches == 0
    assert accuracy(torch.tensor([1.0], dtype=dtype), exact).mismatches == 1
    assert accuracy(torch.tensor([65520.0]).to(dtype), torch.tensor([65520.0])).mismatches == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_accuracy_of_eight_bits(dtype):
    exact = torch.randn(1000).float().double()
    found = accuracy(exact.to(dtype), exact, rtol=0.125, atol=0.01)
    assert (found.mismatches, found.ok, found.dtype) == (0, True, str(dtype).removeprefix("torch."))
    assert 0.4 < found.ulp_max <= 0.5


def test_nan_and_infinities_are_counted_apart_from_errors():
    inf, nan = math.inf, math.nan
    exact = torch.tensor([nan, inf, -inf, 1e39, 1.0, 0.0, nan, 2.0, inf], dtype=torch.float64)
    result = torch.tensor([nan, inf, inf, inf, nan, 0.5, 1.0, inf, nan])
    found = accuracy(result, exact)
    assert (found.nan, found.inf) == (3, 2)          # nan for 1, 1 for nan, nan for inf; inf for -inf and 2
    assert found.max_abs == 0.5                      # 1e39 is infinite in float32
    assert found.max_rel == 0.0                      # nothing is finite but an exact 0
    assert found.mismatches == 6
    assert found.outside == 6
    assert not found.ok
    assert "3 NaN, 2 infinities and 6 of 9 elements differ" in str(found)


def test_integers_are_exact_or_not():
    exact = torch.tensor([1.4, 2.5, -3.0, 100.0], dtype=torch.float64)
    found = accuracy(torch.tensor([1, 2, -3, 98], dtype=torch.int8), exact)
    assert found.dtype == "int8"
    assert (found.mismatches, found.max_abs, found.ulp_max, found.outside) == (1, 2, 2, 1)
    large = torch.tensor([2**60 + 1, 2**63 - 1])
    for other, error in ((large - 1, 1), (-large, 2.0**64)):
        found = accuracy(large, other)
        assert (found.mismatches, found.outside, found.max_abs) == (2, 2, error)
    unsigned = torch.tensor([2**64 - 1], dtype=torch.uint64)
    assert accuracy(unsigned, unsigned).ok and not accuracy(unsigned, torch.tensor([-1])).ok


def test_no_integer_is_nan_or_infinite():
    exact = torch.tensor([math.nan, math.inf, -math.inf, 1e30, 3.0], dtype=torch.float64)
    found = accuracy(torch.tensor([0, 127, -128, 127, 3], dtype=torch.int8), exact)
    assert (found.nan, found.inf, found.mismatches, found.outside) == (1, 2, 4, 4)
    assert found.max_abs == 1e30


def test_tolerances():
    exact = torch.tensor([1.0, 100.0], dtype=torch.float64)
    result = torch.tensor([1.01, 100.5])
    assert accuracy(result, exact).outside == 2
    assert accuracy(result, exact, rtol=0.006).outside == 1
    assert accuracy(result, exact, rtol=0, atol=0.6).ok


def test_accuracy_of_nothing_and_of_numpy():
    found = accuracy(torch.empty(0), torch.empty(0, dtype=torch.float64))
    assert (found.max_abs, found.ulp_max, found.mismatches) == (0, 0, 0)
    assert accuracy(np.float32([1, 2]), np.float64([1, 2.5])).max_abs == 0.5
    assert json.loads(json.dumps(found.as_dict()))["absolute"]["99.9"] == 0


def test_accuracy_refuses():
    with pytest.raises(ValueError, match=r"one shape, got \(2,\) and \(3,\)"):
        accuracy(torch.ones(2), torch.ones(3))
    with pytest.raises(TypeError, match="result must be a tensor or an array, got float"):
        accuracy(1.0, torch.ones(3))
    with pytest.raises(ValueError, match="as many results as exact ones are needed, got 1 and 2"):
        of_results(torch.ones(2), (torch.ones(2), torch.ones(2)))


@pytest.mark.parametrize(("tensor", "came"), [
    (torch.ones(2, device="meta"), "meta, torch.float32"),
    (torch.ones(2).to_sparse(), "torch.sparse_coo, torch.float32"),
    (torch.ones(2, device="meta", dtype=torch.complex64), "meta, torch.complex64")])
def test_accuracy_refuses_what_holds_no_numbers(tensor, came):
    for pair, name in (((tensor, torch.ones(2)), "result"), ((torch.ones(2), tensor), "exact")):
        with pytest.raises(TypeError, match=f"{name} must be a dense tensor that holds numbers, got {came}"):
            accuracy(*pair)


def test_exactly_computes_in_float64_and_leaves_integers():
    x, index = torch.randn(4, dtype=torch.bfloat16), torch.tensor([0, 2])
    exact = exactly(lambda x, *, at: x[at] / 3, (x,), {"at": index})
    assert exact.dtype == torch.float64
    assert torch.equal(exact, x.double()[[0, 2]] / 3)
    assert exactly(np.sqrt, (np.float32([2]),))[0] == np.sqrt(np.float64(np.float32(2)))
    assert torch.equal(exactly(torch.softmax, (x, 0), {"dtype": torch.float32}), x.double().softmax(0))


def test_accuracy_of_complex_numbers():
    exact = torch.tensor([1 + 1j, 2 - 3j], dtype=torch.complex128)
    assert accuracy(exact.to(torch.complex64), exact).ok
    wrong = accuracy(exact.conj().to(torch.complex64), exact)
    assert (wrong.ok, wrong.max_abs, wrong.elements) == (False, 6.0, 4)


def test_complex_numbers_are_compared_with_exact_ones():
    z = torch.randn(100, dtype=torch.complex64)
    (row,) = bench.compare_implementations({"f": torch.exp}, (z,), reference=torch.exp, repeat=1,
                                           details=False).rows
    assert 0 < row["max_abs"] < 1e-5
    assert exactly(np.exp, (z.numpy(),)).dtype == np.complex128


def test_of_several_results_the_worst_counts():
    one = torch.ones(4)
    assert of_results((one, [one + 1]), (one.double(), [one.double()])).max_abs == 1
    assert of_results(None, None) is None


@pytest.mark.parametrize(("result", "exact", "outside"), [
    (1.0, 1.0, 0), (1.0, 1.5, 1), (7, 8, 1), (True, False, 1), (2j, 2j, 0), (math.nan, 1.0, 1),
    (1e-9, 0.0, 0), ([1.0, 2.0, 9.0], [1.0, 3.0, 4.0], 2), ([1, 2], torch.tensor([1, 3]), 1),
    ((1.0, "mean"), (2.0, "mean"), 1), ({"loss": 0.5, "n": 3}, {"n": 3, "loss": 0.5}, 0),
    (np.float64(1), 2.0, 1), (torch.tensor(1.0), 1.0, 0), ([[1, 2], [3, 4]], [[1, 2], [3, 5]], 1)])
def test_numbers_of_python_are_compared(result, exact, outside):
    assert of_results(result, exact).outside == outside


def test_results_in_dicts_are_compared_by_their_keys():
    one, two = torch.ones(4), torch.ones(4) * 2
    exact = ({"a": one.double(), "b": two.double()},)
    assert of_results(({"b": two, "a": one},), exact).ok
    assert of_results(({"a": two, "b": one},), exact).outside == 4
