"""The vocabulary of the CPU kernels: accuracy, special values, storage formats, vectorisation."""
import itertools
import math
import platform
import re
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
numba = pytest.importorskip("numba")

from llvmlite import binding  # noqa: E402  (it comes with numba)

from fusionrt.cpu import math32, math64, storage  # noqa: E402  (they import numba)

SPECIALS = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 1e-45, -1e-45,
    1e-39, -1e-39, 1.1754944e-38, -1.1754944e-38, 3.4028235e38, -3.4028235e38, 88.0, 89.0, -87.0,
    -88.0, -103.5, -104.5, 127.5, 128.0, -126.5, -149.0, -151.0, 20.0, -14.0, -15.0,
]


def loop(function, arguments=1):
    """The kernel `out[i] = function(x[i], ...)`, compiled as the generated kernels are."""
    if arguments == 1:
        def kernel(x, out):
            for i in range(x.size):
                out[i] = function(x[i])
    else:
        def kernel(x, y, out):
            for i in range(x.size):
                out[i] = function(x[i], y[i])
    return numba.njit(error_model="numpy", nogil=True, boundscheck=False)(kernel)


def apply(function, *arrays, dtype=None):
    out = np.empty(arrays[0].shape, dtype or arrays[0].dtype)
    loop(function, len(arrays))(*arrays, out)
    return out


def named(module, name):
    """The function that generated kernels with this module's accumulation type call by this name."""
    return getattr(module, name) if hasattr(module, name) else getattr(storage, name)


def softplus(x):
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))  # torch's own cuts off at 20


def normcdf(x):
    return 0.5 * torch.erfc(x * -math.sqrt(0.5))  # ndtr of float32 has no relative accuracy


def normpdf(x):
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


# name: (truth in float64, largest error in ulp over all of float32)
UNARY = {
    "exp": (torch.exp, 1.0), "exp2": (torch.exp2, 1.0), "expm1": (torch.expm1, 1.6),
    "log": (torch.log, 1.0), "log1p": (torch.log1p, 1.7), "log2": (torch.log2, 1.5),
    "sqrt": (torch.sqrt, 0.5), "rsqrt": (torch.rsqrt, 1.6), "tanh": (torch.tanh, 1.4),
    "erf": (torch.erf, 1.2), "sigmoid": (torch.sigmoid, 2.5), "softplus": (softplus, 2.1),
    "normcdf": (normcdf, 100.0), "normpdf": (normpdf, 100.0), "sin": (torch.sin, 0.7),
    "cos": (torch.cos, 0.7),
}
EXACT = {"abs_": torch.abs, "floor": torch.floor, "rint": torch.round, "trunc": torch.trunc}
# torch's own float32 error, where it has one to compare with over the whole range
TORCH = {name: truth for name, (truth, _) in UNARY.items()
         if name not in ("softplus", "normcdf", "normpdf")}
# The largest error in ulp of x between the edges: x^2 is rounded before the exponential. With torch's gelu
# in float32 it would be inf, 2e3, 37 and 6 (of x * normcdf(x)).
EDGES = (-math.inf, -5.0, -3.0, -2.0, 0.0, math.inf)
NORMAL = {"normcdf": (100.0, 42.0, 18.0, 7.5, 3.0), "normpdf": (100.0, 19.0, 8.0, 5.0, 100.0)}


def ulp_error(result, truth):
    """|result - truth| in units of the float32 spacing at truth; infinity stands for 2^128."""
    truth = np.clip(truth, -(2.0**128), 2.0**128)
    result = np.clip(result.astype(np.float64), -(2.0**128), 2.0**128)
    exponent = np.clip(np.frexp(truth)[1] - 1, -126, 127)
    error = np.abs(result - truth) * np.ldexp(1.0, 23 - exponent)
    error[np.isnan(truth)] = 0.0
    error[np.isnan(truth) != np.isnan(result)] = np.inf
    return error


# NumPy warns about signalling NaN in conversions: they are part of the cases.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def floats():
    """float32 of every exponent and sign, denormals too, and as many again of ordinary size."""
    generator = np.random.default_rng(0)
    stride = 4093
    patterns = np.arange(0, 2**32 - stride, stride, dtype=np.uint64)
    patterns += generator.integers(0, stride, patterns.shape, np.uint64)
    patterns = patterns.astype(np.uint32)
    ordinary = generator.standard_normal(1_000_000, np.float32) * np.float32(4)
    return np.concatenate([patterns.view(np.float32), ordinary, np.array(SPECIALS, np.float32)])


@pytest.mark.parametrize("name", UNARY)
def test_float32_error(name, floats):
    truth_function, bound = UNARY[name]
    result = apply(named(math32, name), floats)
    truth = truth_function(torch.from_numpy(floats).double()).numpy()
    error = ulp_error(result, truth)
    worst = error.argmax()
    assert error[worst] <= bound, (floats[worst], result[worst], truth[worst], error[worst])
    if name in TORCH:
        torch_error = ulp_error(TORCH[name](torch.from_numpy(floats)).numpy(), truth).max()
        assert error[worst] <= 2 * torch_error + 1


@pytest.mark.parametrize("name", NORMAL)
def test_the_normal_distribution_is_less_exact_in_its_tails(name, floats):
    x = np.concatenate([floats, np.linspace(-14.5, 6, 1_000_000, dtype=np.float32)])
    double = torch.from_numpy(x).double()
    error = ulp_error(apply(named(math32, name), x), UNARY[name][0](double).numpy())
    for low, high, bound in zip(EDGES, EDGES[1:], NORMAL[name], strict=False):
        assert error[(x >= low) & (x < high)].max() <= bound, (low, high)


def test_gelu_is_more_exact_than_torchs_where_that_cancels(floats):
    """Below -1: torch's 1 + erf loses digits there, ours multiplies."""
    x = floats[(floats < -1) & (floats > -12)]
    t = torch.from_numpy(x)
    truth = (t.double() * normcdf(t.double())).numpy()
    ours = ulp_error(x * apply(math32.normcdf, x), truth)
    theirs = ulp_error(torch.nn.functional.gelu(t).numpy(), truth)
    for low, high in itertools.pairwise((-12, -8, -5, -3, -2, -1)):
        among = (x >= low) & (x < high)
        assert ours[among].max() < theirs[among].max() / 2


@pytest.mark.covering(1)
@pytest.mark.parametrize("module", [math32, math64])
@pytest.mark.parametrize("name", [*UNARY, *EXACT])
def test_special_values(module, name):
    x = np.array(SPECIALS, np.float32).astype(module.acc_t)
    truth_function = EXACT.get(name) or UNARY[name][0]
    truth = truth_function(torch.from_numpy(x).double()).numpy()
    truth = truth.astype(module.acc_t)
    result = apply(named(module, name), x)
    ordinary = np.isfinite(truth) & (truth != 0)
    np.testing.assert_array_equal(result[~ordinary], truth[~ordinary])
    zero = truth == 0
    np.testing.assert_array_equal(np.signbit(result[zero]), np.signbit(truth[zero]))
    # erfc in the truth turns the rounding of x / sqrt 2 into x^2 times as much.
    rtol = 4e-13 if name == "normcdf" and module is math64 else 4 * np.finfo(module.acc_t).eps
    tiny = 2 * np.finfo(module.acc_t).smallest_subnormal
    np.testing.assert_allclose(result[ordinary], truth[ordinary], rtol=rtol, atol=tiny)


@pytest.mark.parametrize("name", UNARY)
def test_float64_error(name):
    generator = np.random.default_rng(1)
    x = generator.standard_normal(100_000) * np.exp2(generator.uniform(-30, 8, 100_000))
    truth = UNARY[name][0](torch.from_numpy(x)).numpy()
    ordinary = np.isfinite(truth) & (np.abs(truth) > 1e-300)
    rtol = 4e-13 if name == "normcdf" else 2e-15  # as above
    np.testing.assert_allclose(
        apply(named(math64, name), x)[ordinary], truth[ordinary], rtol=rtol)


def test_normcdf_tail_float64():
    # mpmath.ncdf at 40 digits
    x = np.array([-5.0, -10.0, -20.3, -37.1])
    truth = [2.866515718791939e-07, 7.619853024160525e-24, 6.429244467698346e-92,
             1.4047119663106221e-301]
    np.testing.assert_allclose(apply(math64.normcdf, x), truth, rtol=2e-15)


@pytest.mark.parametrize("module", [math32, math64])
def test_binary(module):
    x = np.array(SPECIALS, np.float32).astype(module.acc_t)
    a, b = (v.ravel() for v in np.meshgrid(x, x))
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)
    for name, truth in (("minimum", torch.minimum), ("maximum", torch.maximum),
                        ("div", torch.div), ("mul_rn", torch.mul)):
        np.testing.assert_array_equal(apply(named(module, name), a, b), truth(ta, tb).numpy())
    power = torch.pow(ta.double(), tb.double()).to(ta.dtype).numpy()
    np.testing.assert_allclose(apply(module.pow_, a, b), power, rtol=4 * np.finfo(a.dtype).eps)
    np.testing.assert_array_equal(apply(storage.isnan_, a, dtype=np.bool_), np.isnan(a))
    np.testing.assert_array_equal(apply(storage.logical_not, a, dtype=np.bool_), a == 0)
    np.testing.assert_array_equal(apply(storage.cast_bool, a, dtype=np.bool_), a != 0)


def test_pow_error():
    generator = np.random.default_rng(2)
    a = np.exp2(generator.uniform(-20, 20, 500_000)).astype(np.float32)
    b = generator.uniform(-8, 8, a.shape).astype(np.float32)
    truth = torch.pow(torch.from_numpy(a).double(), torch.from_numpy(b).double()).numpy()
    assert ulp_error(apply(math32.pow_, a, b), truth).max() <= 1.0


def test_fma_has_one_rounding():
    @numba.njit(error_model="numpy")
    def contraction(a, b, c):
        return storage.mul_rn(a, b) + c, storage.fma(a, b, c)

    a = np.float32(1 + 2**-12)
    separate, fused = contraction(a, a, np.float32(-1))
    assert separate == np.float32(2.0**-11)
    assert fused == np.float32(2.0**-11 + 2.0**-24)


# --- storage formats ------------------------------------------------------------------------------

def storage_cases(dtype):
    """Every 16-bit value of dtype, the halfway point to the next, and the neighbours of those."""
    exact = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype).double().numpy()
    finite = np.sort(exact[np.isfinite(exact)])
    step = finite[-1] - finite[-2]
    middle = np.concatenate([(finite[1:] + finite[:-1]) / 2, [finite[-1] + step / 2]])
    values = np.concatenate([finite, middle, -middle]).astype(np.float32)
    near = [np.nextafter(values, np.float32(s)) for s in (np.inf, -np.inf)]
    return np.concatenate([values, *near, np.array(SPECIALS, np.float32)])


@pytest.mark.parametrize("module", [math32, math64])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_floats(module, name, floats):
    dtype = getattr(torch, name)
    patterns = np.arange(2**16, dtype=np.uint16)
    loaded = apply(named(module, f"load_{name}"), patterns, dtype=module.acc_t)
    truth = torch.from_numpy(patterns.view(np.int16)).view(dtype).double().numpy()
    np.testing.assert_array_equal(loaded, truth.astype(module.acc_t))

    x = np.concatenate([storage_cases(dtype), floats]).astype(module.acc_t)
    if module is math64:  # between two float32: rounded twice, as torch does
        x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf)])
    rounded = torch.from_numpy(x).to(dtype)
    stored = apply(named(module, f"store_{name}"), x, dtype=np.uint16)
    isnan = np.isnan(x)
    truth = rounded.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(stored[~isnan], truth[~isnan])
    assert torch.from_numpy(stored[isnan].view(np.int16)).view(dtype).isnan().all()
    cast = apply(named(module, f"cast_{name}"), x)
    np.testing.assert_array_equal(cast, rounded.to(torch.from_numpy(x).dtype).numpy())


def test_half_by_integers(floats):
    """The conversions that a processor without F16C gets."""
    patterns = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(
        apply(storage._half_to_float_bits, patterns, dtype=np.float32),
        patterns.view(np.float16).astype(np.float32))
    x = np.concatenate([storage_cases(torch.float16), floats])
    x = x[~np.isnan(x)]
    np.testing.assert_array_equal(
        apply(storage._float_to_half_bits, x, dtype=np.uint16),
        torch.from_numpy(x).half().view(torch.int16).numpy().view(np.uint16))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86")
def test_half_on_a_processor_without_f16c(monkeypatch):
    """LLVM's own conversion would abort the process: symbol __extendhfsf2 not found."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    program = (
        "import numba, numpy as np\n"
        "from fusionrt.cpu.math32 import load_float16\n"
        "from fusionrt.cpu.storage import store_float16\n"
        "f = numba.njit(lambda h: store_float16(load_float16(h)))\n"
        "print(hex(f(np.uint16(0x3C01))))\n")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0x3c01", done.stderr


@pytest.mark.covering(1)
@pytest.mark.parametrize("module", [math32, math64])
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32", "int64"])
def test_saturating_casts(module, name, floats):
    info = np.iinfo(name)
    edges = np.array([info.min, info.max, float(info.max) + 1], np.float64)
    x = np.concatenate([edges, edges - 1, edges + 1, edges - 0.5, edges + 0.5, SPECIALS])
    x = np.concatenate([x.astype(np.float32), floats]).astype(module.acc_t)
    x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf)])
    result = apply(named(module, f"cast_{name}"), x, dtype=name)
    y = np.trunc(np.nan_to_num(x.astype(np.float64), posinf=1e300, neginf=-1e300))
    inside = (y >= info.min) & (y < float(info.max) + 1)
    truth = np.where(y < 0, info.min, info.max).astype(name)
    truth[inside] = y[inside].astype(name)
    np.testing.assert_array_equal(result, truth)


@pytest.mark.parametrize("module", [math32, math64])
def test_loads(module):
    for dtype in ("int8", "uint8", "int16", "int32", "int64", "bool", "float32", "float64"):
        x = np.array([0, 1, 100, 3]).astype(dtype)
        loaded = apply(named(module, f"load_{dtype}"), x, dtype=module.acc_t)
        np.testing.assert_array_equal(loaded, x.astype(module.acc_t))
        assert numba.njit(named(module, f"load_{dtype}").py_func)(x[1]) == 1
    for dtype in ("float32", "float64"):
        x = np.array([1 / 3, math.inf, -0.0]).astype(module.acc_t)
        stored = apply(named(module, f"store_{dtype}"), x, dtype=dtype)
        np.testing.assert_array_equal(stored, x.astype(dtype))


def test_both_modules_define_the_same_names():
    public = [{name for name in {**vars(storage), **vars(module)} if name[0].islower()}
              for module in (math32, math64)]
    assert public[0] == public[1]


# --- random numbers -------------------------------------------------------------------------------

def philox_reference(counter, key, rounds=7):
    c, k = list(counter), list(key)
    for _ in range(rounds):
        product0, product1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(product1 >> 32) ^ c[1] ^ k[0], product1 & 0xFFFFFFFF,
             (product0 >> 32) ^ c[3] ^ k[1], product0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_philox():
    call = numba.njit(lambda c, k: storage.philox7(c[0], c[1], c[2], c[3], k[0], k[1]))
    # Random123's kat_vectors, philox4x32 with 7 rounds
    known = [
        ([0] * 4, [0] * 2, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    ]
    generator = np.random.default_rng(3)
    cases = [(generator.integers(0, 2**32, 4), generator.integers(0, 2**32, 2)) for _ in range(100)]
    known += [(c.tolist(), k.tolist(), philox_reference(c.tolist(), k.tolist())) for c, k in cases]
    for counter, key, expected in known:
        assert philox_reference(counter, key) == expected
        assert list(call(np.array(counter, np.uint32), np.array(key, np.uint32))) == expected


_of_kernels = storage.fill_random


@numba.njit
def fill_random(words, first_block, n_blocks, seed, offset):
    _of_kernels(words, first_block, n_blocks, seed, offset)


def test_fill_random():
    seed, offset, first, blocks = 0x123456789ABCDEF0, 0xFEDCBA9876543210, 2**26 - 1, 2
    words = np.full(128 * blocks + 4, 7, np.uint64)
    fill_random(words, np.int64(first), blocks, np.uint64(seed), np.uint64(offset))
    expected = np.zeros((blocks, 2, 256), np.uint16)
    for block in range(blocks):  # passes the carry into the counter's high word
        for g in range(64):
            n = (first + block) * 64 + g
            counter = [offset & 0xFFFFFFFF, offset >> 32, n & 0xFFFFFFFF, n >> 32]
            lanes = [half for word in philox_reference(counter, [seed & 0xFFFFFFFF, seed >> 32])
                     for half in (word & 0xFFFF, word >> 16)]
            expected[block, 0, 4 * g:4 * g + 4] = lanes[:4]
            expected[block, 1, 4 * g:4 * g + 4] = lanes[4:]
    assert (words[:-4].view(np.uint16) == expected.reshape(-1)).all()
    assert (words[-4:] == 7).all()


def test_random16_looks_uniform():
    out = np.empty(2**20, np.uint16)
    fill_random(out.view(np.uint64), 0, out.size // 512, np.uint64(42), np.uint64(0))
    counts = np.bincount(out >> 8, minlength=256)
    chi_square = ((counts - out.size / 256) ** 2 / (out.size / 256)).sum()
    assert 150 < chi_square < 375  # 255 degrees of freedom: five standard deviations
    assert abs(out.mean() / 65535 - 0.5) < 5 * math.sqrt(1 / 12 / out.size)
    bits = np.unpackbits(out.view(np.uint8)).reshape(-1, 16).mean(0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / math.sqrt(out.size)
    centred = out.astype(np.float64) / 65535 - 0.5
    for lag in (1, 2, 7, 8, 16):
        correlation = (centred[lag:] * centred[:-lag]).mean() * 12
        assert abs(correlation) < 5 / math.sqrt(out.size)
    other = np.empty_like(out)
    fill_random(other.view(np.uint64), 0, out.size // 512, np.uint64(42), np.uint64(4))
    assert (other == out).mean() < 1e-3


# --- vectorisation --------------------------------------------------------------------------------

def vector_instructions_and_calls(kernel):
    asm = next(iter(kernel.inspect_asm().values()))
    called = {name for name in re.findall(r"movabsq\s+\$([A-Za-z_]\w*)", asm)
              if not name.startswith(("Py", "_Py", "_ZN", "NRT_", "numba_"))}
    return len(re.findall(r"%[yz]mm", asm)), called


VECTORISED = {
    **dict.fromkeys([*UNARY, *EXACT, "cast_float16", "cast_bfloat16"], ("float32", "float32")),
    "load_float16": ("uint16", "float32"), "load_bfloat16": ("uint16", "float32"),
    "store_float16": ("float32", "uint16"), "store_bfloat16": ("float32", "uint16"),
    "cast_bool": ("float32", "bool"),
    **{f"cast_{name}": ("float32", name) for name in ("int8", "uint8", "int16", "int32")},
}
del VECTORISED["sin"], VECTORISED["cos"]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86")
@pytest.mark.parametrize("name", VECTORISED)
def test_loop_vectorises(name):
    if not binding.get_host_cpu_features().get("avx2"):
        pytest.skip("no AVX2")
    source, target = VECTORISED[name]
    kernel = loop(named(math32, name))
    kernel(np.ones(4, source), np.ones(4, target))
    vectors, called = vector_instructions_and_calls(kernel)
    assert called == set()
    assert vectors > 0


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86")
def test_the_vectorisation_check_sees_calls():
    kernel = loop(math32.sin)
    kernel(np.ones(4, np.float32), np.ones(4, np.float32))
    assert vector_instructions_and_calls(kernel)[1] == {"sinf"}
