"""Mathematics of 16-bit results on a GPU: when it is taken, how exact it is; what is found without one."""

import math
import re

import numpy as np
import pytest
import torch

import fusionrt as frt
from fusionrt.primitives import PRIMITIVES
from fusionrt.rehearsal import collecting
from fusionrt.runtime import launch, source

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MATHEMATICS = source.template("mathematics.cuh")


def bits(problem):
    assert f"SIGNIFICANT_BITS = {problem.significant_bits};" in launch.sources(problem)[0].text
    return problem.significant_bits


@pytest.mark.parametrize(("dtype", "expected"), [(BF16, 8), (F16, 11), (F32, 24), (F64, 53)])
@pytest.mark.parametrize("grad", [False, True])
def test_statistics_beside_an_activation_do_not_make_it_more_exact(dtype, expected, grad):
    """Of a norm whose gradient is recorded, which keeps float32 moments; they are exact either way."""
    x, w, b = (torch.empty(s, device="meta", dtype=dtype, requires_grad=grad) for s in ((64, 768), 768, 768))
    with collecting() as needed:
        frt.layer_norm_gelu(x, 768, w, b)
    assert [bits(p) for p in needed] == [expected]
    assert (len(needed[0].outputs) > 1) == grad


def test_what_is_kept_of_exponentials_is_exact():
    x = torch.empty(64, 1000, device="meta", dtype=BF16, requires_grad=True)
    with collecting() as needed:
        target = torch.empty(64, device="meta", dtype=torch.int64)
        frt.cross_entropy(x, target, reduction="none").sum().backward()
    forward, backward = (p for p in needed if p.row_dims)
    assert any(o.dtype == "float32" for o in forward.outputs)  # maximum and sum of the row
    assert (bits(forward), bits(backward)) == (24, 8)


def test_all_operations_with_shorter_mathematics_are_known():
    bodies = re.split(r"\n__device__ __forceinline__ (?:acc_t|float) (\w+)\(", MATHEMATICS)
    shorter = {name for name, body in zip(bodies[1::2], bodies[2::2], strict=True)
               if re.search(r"\bHALF(_OF_BF16)?\b", body.split("\n}\n")[0])}
    by_parts = {"gaussian": "normpdf", "normal_tail": "normcdf"}
    assert {by_parts.get(name, name) for name in shorter} == {
        name for name, primitive in PRIMITIVES.items() if primitive.is_shortened}


def powers_of_normal_tail():
    """The polynomials p, lowest power first, of bfloat16 and float16."""
    body = MATHEMATICS.split("normal_tail(float a) {")[1].split("} else {")[0]
    of_types = [re.findall(r"-?\d\.\d+(?:e-\d+)?(?=f)", part) for part in body.split("else if")]
    return [[float(number) for number in numbers[::-1]] for numbers in of_types]


@pytest.mark.parametrize(("which", "at", "error"), [
    (0, 6.0, 3.8e-4), (0, 7.0, 2e-2), (0, 8.0, 0.1),    # where erf in float has ended, as README says
    (1, 6.5, 8e-6)])
def test_tail_of_the_normal_distribution(which, at, error):
    powers = np.float32(powers_of_normal_tail()[which])
    assert len(powers) == (6, 8)[which]
    t = np.linspace(0, at, 2001, dtype=np.float32)
    p = np.full_like(t, powers[-1])
    for c in powers[-2::-1]:
        p = np.float32(p.astype(np.float64) * t + c)  # one rounding, as fmaf
    exact = np.array([math.erfc(x / math.sqrt(2)) / 2 for x in t.astype(np.float64)])
    assert np.abs(np.exp2(p.astype(np.float64)) / exact - 1).max() <= error
    assert powers[-1] < 0  # so that it falls to 0
