"""`fuse` on numbers of every kind: Python's beside tensors, integers, truth values, float64's range."""

import fractions
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import fusionrt as frt


def test_numbers_and_tensors_in_each_others_places(device):
    """Whatever the call before was, each is served as it is."""
    @frt.fuse
    def difference(x, y, scale: float):
        return (x - y * 3) * scale

    a, b = torch.randn(4, 5, device=device), torch.randn(5, device=device)
    wide, watched = a.double(), torch.randn(4, 5, device=device, requires_grad=True)
    half = torch.tensor(0.5, device=device)
    calls = [(a, b, 2.0), (a, 0.5, 2.0), (0.5, a, 2.0), (a, 2, 3), (4, a, True), (b, 0.5, 2.0),
             (wide, 0.5, 2.0), (watched, 0.5, 2.0), (a, b, half), (a, 0.5, half), (0.5, 0.2, half), (a, b, 2)]
    for x, y, scale in [*calls, *reversed(calls), *(call for call in calls for _ in range(3))]:
        found, expected = difference(x, y, scale), (x - y * 3) * scale
        assert (found.dtype, found.shape, found.requires_grad) == (
            expected.dtype, expected.shape, expected.requires_grad)
        assert_close(found, expected)
    for nobody in (None, "x", [1.0]):
        with pytest.raises(TypeError, match="difference: y must be a tensor, an array or a number"):
            difference(a, nobody, 2.0)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_float64_keeps_its_range_on_the_way_to_16_bits(name, device):
    x = torch.tensor([90.0, 400.0, -400.0, 1.0], dtype=torch.float64, device=device)
    softplus = frt.fuse(lambda x: frt.cast(frt.log(1 + frt.exp(x)), name))
    assert torch.equal(softplus(x), x.exp().add(1).log().to(getattr(torch, name)))
    difference = frt.fuse(lambda x: frt.cast(frt.exp(x + 1e-9) - frt.exp(x), name))
    expected = ((x + 1e-9).exp() - x.exp()).to(getattr(torch, name))
    assert_close(difference(x), expected, rtol=2**-7, atol=0)


def test_signs_that_join_conditions_refuse_arguments_that_are_none(device):
    """In torch they join the bits of integers."""
    joined = frt.fuse(lambda x, y, z: frt.where(x & ~y, z, 0), name="joined")
    a, b = (torch.rand(5, device=device) > 0.5 for _ in range(2))
    z = torch.randn(5, device=device)
    assert_close(joined(a, b, z), torch.where(a & ~b, z, 0))
    for _ in range(3):
        assert_close(joined(a, True, z), torch.zeros_like(z))
    for x, y, name, kind in ((a.int(), b, "x", "torch.int32"), (a, b.float(), "y", "torch.float32"),
                             (a, 2, "y", "<class 'int'>")):
        with pytest.raises(TypeError, match=f"joined: {name} is joined by &, | or ~, .* bool, got {kind}"):
            joined(x, y, z)
    choice = frt.fuse(lambda x, y: frt.where(x, y > 0, x > 0) & (y | False))
    assert torch.equal(choice(a, b), a & b)


def test_small_integers_are_exact_too(device):
    def of(dtype, *values):
        return [torch.tensor([value], dtype=dtype, device=device) for value in values]

    packed = frt.fuse(lambda r, g, b, a: frt.cast(((r * 256 + g) * 256 + b) * 256 + a, "int64"))
    assert packed(*of(torch.uint8, 255, 1, 2, 3)).item() == 0xFF010203
    assert frt.fuse(lambda x, y: frt.cast(x * y, "int32"))(*of(torch.int16, 32767, 32767)).item() == 32767**2
    one, large = of(torch.bool, True)[0], torch.tensor(2**24 + 1, device=device)
    assert frt.fuse(lambda x, y: frt.cast(x * y, "int64"))(one, large).item() == 2**24 + 1


def test_exponents_of_0_and_1_have_derivatives(device):
    x = torch.tensor([0.0, 2.0, math.nan], device=device, requires_grad=True)
    y = frt.fuse(lambda x: x**0 + x**1)(x)
    first, = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert_close(y, 1 + x, equal_nan=True)
    assert_close(first, torch.ones_like(x))


def test_an_exponent_of_0_alone_has_a_derivative(device):
    x = torch.tensor([0.0, -2.0, math.nan, math.inf], device=device, requires_grad=True)
    y = frt.fuse(lambda x: x**0)(x)
    assert_close(y, torch.ones_like(x))
    assert_close(torch.autograd.grad(y.sum(), x)[0], torch.zeros_like(x))


def test_powers_of_0_have_second_derivatives(device):
    """Also by the incoming gradient, as torch; of x^y at y = 0 both mixed ones are 1 / x."""
    x = torch.tensor([0.0, 0.0, 0.0, 2.0, 2.0], dtype=torch.float64, device=device, requires_grad=True)
    y = torch.tensor([3.0, 2.5, 0.0, 0.0, 1.5], dtype=torch.float64, device=device, requires_grad=True)
    g = torch.ones_like(x).requires_grad_()
    power = frt.fuse(lambda x, y: x**y)
    both = [torch.autograd.grad(f(x, y), (x, y), g, create_graph=True) for f in (power, torch.pow)]
    assert_close(*both)
    by_x, by_y = both[0]
    assert_close(torch.autograd.grad((by_x + 2 * by_y).sum(), g, retain_graph=True)[0],
                 (by_x + 2 * by_y).detach())
    mixed = [torch.autograd.grad(found.sum(), other, retain_graph=True)[0]
             for found, other in ((by_x, y), (by_y, x))]
    assert_close(*(m[3:] for m in mixed))
    assert mixed[0][3] == 1 / x[3]
    assert all(m[:2].eq(0).all() for m in mixed)


def test_powers_of_what_has_no_finite_reciprocal(device):
    x = torch.tensor([1e-39, -1e-39, 0.0, math.nan, math.inf, 1e-38, 2.0], device=device, requires_grad=True)
    y, power = torch.zeros(7, device=device), frt.fuse(lambda x, y: x**y)
    found, expected = (torch.autograd.grad(f(x, y).sum(), x)[0] for f in (power, torch.pow))
    assert torch.equal(found, expected)


def test_integers_are_exact(device):
    """As far as float64 is: float32 ends at 2^24."""
    large = torch.tensor([2**24, 2**31 + 1, 2**53 - 1], device=device)
    assert not frt.fuse(lambda x, y: x == y)(large, large + 1).any()
    total = frt.fuse(lambda x, y: frt.cast(x + y, "int64"))
    assert torch.equal(total(large - 1, torch.ones_like(large)), large)
    small = torch.tensor([2**30, 2**30 + 1], dtype=torch.int32, device=device)
    assert frt.fuse(lambda x, y: x < y)(small[:1], small[1:]).all()


@pytest.mark.parametrize("number", [1e39, -1e300, 3.4028235e38])
def test_numbers_beyond_float32(number, device):
    """torch takes them for infinities."""
    x = torch.tensor([1.0, -2.0, 0.0, 0.25], device=device)
    scaled = frt.fuse(lambda x, s: x * s)
    for _ in range(2):  # a remembered call as well
        torch.testing.assert_close(scaled(x, number), x * number, equal_nan=True)
    assert frt.quantize_int8(x, 1e-39).tolist() == [127, -128, 0, 127]
    torch.testing.assert_close(frt.softmax(x, scale=number), torch.softmax(x * number, -1), equal_nan=True)


def test_numbers_of_other_kinds():
    x = torch.randn(4, 5)
    three = np.float32(3)
    halved = frt.fuse(lambda x, y=fractions.Fraction(1, 2), z=three: x * y + z)
    assert_close(halved(x), x / 2 + 3)
    # Beside tensors NumPy's scalars are numbers: no operands, on whatever device the tensors are.
    assert halved(x.to("meta"), np.float64(2), np.int64(1)).dtype == torch.float32
    assert isinstance(halved(x.numpy(), np.float32(2)), np.ndarray)
    if np.longdouble is not np.float64:  # whose item is one again
        with pytest.raises(TypeError, match="y"):
            halved(x, np.longdouble(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_follows_from_a_result_is_of_the_value_that_is_returned(dtype, device):
    """Or the gradient, which reads that, is another function's."""
    both = frt.fuse(lambda x: (x + 256, ((x + 256) - 256) ** 2))
    x = torch.tensor([0.3, -0.7, 1.4], dtype=dtype, device=device, requires_grad=True)
    total, squares = both(x)
    assert_close(total, x + 256, rtol=0, atol=0)
    assert_close(squares, (total.double() - 256).square().to(dtype))
    found, = torch.autograd.grad(squares.sum(), x)
    assert_close(found, (2 * (total.double() - 256)).to(dtype))


def test_names_of_other_alphabets():
    @frt.fuse
    def größe(a, b):
        return a * b

    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.func.vmap(größe)(x, x), x * x)
    torch.testing.assert_close(torch.func.grad(lambda v: größe(v, v).sum())(x), 2 * x)


def test_a_number_in_the_place_of_a_truth_value_is_refused_each_time(device):
    @frt.fuse
    def gated(x, flag=True):
        return frt.where(flag & (x > 0), x, 0)

    x = torch.randn(5, device=device)
    for _ in range(3):
        assert_close(gated(x, True), x.relu())
        assert not gated(x, False).any()
        for wrong in (2, 0.5):
            with pytest.raises(TypeError, match=r"gated: flag is joined by &.*: it must be bool"):
                gated(x, wrong)
