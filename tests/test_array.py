"""Arrays that are not torch's: they go in without a copy and come out as what they were."""

import sys
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import array


class Held:
    """An array of an unknown library: memory, and DLPack."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class Converted(Held):
    """One that also knows the way back."""

    @classmethod
    def from_dlpack(cls, other):
        return cls(torch.from_dlpack(other))


class Standard(Held):
    """One of the array API standard: its namespace knows the way back."""

    def __array_namespace__(self):
        return Standard

    @staticmethod
    def from_dlpack(other):
        return Standard(torch.from_dlpack(other))


@pytest.fixture
def seen(monkeypatch):
    """The tensors that arrays became."""
    tensors = []

    def spy(*args, to_torch=array.to_torch):
        tensor, restore = to_torch(*args)
        tensors.append(tensor)
        return tensor, restore

    monkeypatch.setattr(array, "to_torch", spy)
    return tensors


def gelu(x):
    """In float64."""
    return F.gelu(torch.from_numpy(np.ascontiguousarray(x).astype(np.float64))).numpy()


# --- NumPy


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_in_and_out(dtype, seen):
    x = np.random.default_rng(0).standard_normal((5, 7)).astype(dtype)
    y = frt.gelu(x)
    assert type(y) is np.ndarray
    assert y.dtype == dtype
    assert y.flags.writeable
    assert np.allclose(y, gelu(x), rtol=4 * np.finfo(dtype).eps, atol=np.finfo(dtype).eps)
    assert [t.data_ptr() for t in seen] == [x.ctypes.data]


def test_numpy_views_are_not_copied(seen):
    base = np.random.default_rng(0).standard_normal((6, 8, 4)).astype(np.float32)
    views = [base[1:, 2:], base.T, base[:, ::2], base.transpose(1, 0, 2)[3], base[2, 3, 1:2]]
    for view in views:
        y = frt.relu(view)
        assert np.array_equal(y, np.maximum(view, 0))
        assert seen[-1].data_ptr() == view.ctypes.data
    unaligned = np.frombuffer(bytearray(4 * 9), np.float32)[1:]
    assert np.array_equal(frt.relu(unaligned), unaligned)
    assert seen[-1].data_ptr() == unaligned.ctypes.data


def test_numpy_read_only_memory_is_not_copied_nor_warned_about(seen):
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    x.flags.writeable = False
    mapped = np.broadcast_to(x[0], (3, 4))  # read-only as well, with a stride of 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for view in (x, x[1:], mapped):
            y = frt.relu(view)
            assert np.array_equal(y, np.maximum(view, 0))
            assert y.flags.writeable
            assert seen[-1].data_ptr() == view.ctypes.data
    assert not x.flags.writeable


def test_numpy_read_only_memory_is_not_written_to():
    q = np.frombuffer(bytes(64), np.float32).reshape(1, 4, 1, 4)
    with pytest.raises(ValueError, match="rotary_embedding: q would be written to, but is a read-only array"):
        frt.rotary_embedding(q, inplace=True)
    x, rows = np.random.randn(6, 5).astype(np.float32), np.zeros((2, 5), np.float32)
    mean, var = rows[0], rows[1] + 1
    rows.flags.writeable = False
    mean = rows[0]
    images, weight = x[..., None].repeat(3, 2), np.ones((5, 5, 1), np.float32)
    for call in (lambda: frt.batch_norm(x, mean, var, training=True),
                 lambda: frt.instance_norm(images, mean, var),
                 lambda: frt.conv_bn_act(images, weight, None, mean, var, training=True)):
        with pytest.raises(ValueError, match="running_mean would be written to, but is a read-only array"):
            call()
    assert not mean.any()
    frt.batch_norm(x, mean, var)  # which only reads them


def test_numpy_masked_arrays_are_refused():
    with pytest.raises(TypeError, match="it has a mask, which would be lost"):
        frt.relu(np.ma.array([1.0, 2.0, 100.0], mask=[0, 0, 1]))


def test_numpy_without_dimensions_and_without_elements():
    y = frt.gelu(np.array(1.5, np.float32))
    assert (type(y), y.shape) == (np.ndarray, ())
    assert np.allclose(y, gelu(np.array(1.5)))
    assert frt.gelu(np.empty((3, 0, 2), np.float32)).shape == (3, 0, 2)
    scalar = np.float32(1.5)  # no array, but it behaves as one without dimensions
    assert np.allclose(frt.gelu(scalar), gelu(scalar))


def test_numpy_numbers_are_numbers():
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    for slope in (np.float64(0.5), np.float32(0.5), np.int64(2), 0.5):
        y = frt.leaky_relu(x, slope)
        assert (type(y), y.dtype) == (np.ndarray, np.float32), slope
        assert np.allclose(y, np.where(x > 0, x, x * slope))
    t = torch.linspace(-1, 1, 8)
    for slope in (np.float64(0.5), np.float32(0.5)):
        y = frt.leaky_relu(t, slope)
        assert type(y) is torch.Tensor
        assert_close(y, F.leaky_relu(t, 0.5))


@pytest.mark.parametrize("dtype", [">f4", ">f8"])
def test_numpy_of_the_other_byte_order_is_refused(dtype):
    with pytest.raises(TypeError, match=r"gelu: x \(numpy\.ndarray\) cannot be viewed as a tensor: "
                                        ".*byte order"):
        frt.gelu(np.ones(3, dtype))


@pytest.mark.parametrize("x", [np.array(["a"]), np.array([object()]), np.ones(3, np.longdouble),
                               np.zeros(2, [("a", np.float32)]), np.array(["2020"], "M8[D]")])
def test_numpy_without_counterpart_is_refused(x):
    with pytest.raises(TypeError, match=r"gelu: x \(numpy\.ndarray\) cannot be viewed as a tensor"):
        frt.gelu(x)


def test_numpy_of_negative_strides_is_read_and_not_written():
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    np.testing.assert_array_equal(frt.multiply_relu(x, x[::-1]), np.maximum(x * x[::-1], 0))
    q = np.ones((2, 4, 2, 8), np.float32)[:, ::-1]
    with pytest.raises(ValueError, match="q would be written to, but is an array with negative strides"):
        frt.rotary_embedding(q, inplace=True)


class Picture:
    """As Pillow's: it shows its memory in NumPy's way alone."""

    def __init__(self, pixels):
        self.__array_interface__ = pixels.__array_interface__
        self.pixels = pixels


def test_what_shows_its_memory_as_numpy_does():
    pixels = np.random.default_rng(0).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    found = frt.data.image_preprocess(Picture(pixels), size=(4, 4))
    np.testing.assert_array_equal(found, frt.data.image_preprocess(pixels, size=(4, 4)))


def test_numpy_integers_need_a_float_beside_them():
    x = np.arange(-3, 3)
    with pytest.raises(TypeError, match="relu: needs a floating-point tensor"):
        frt.relu(x)
    y = frt.multiply_relu(x, np.full(6, 0.5, np.float32))
    assert (y.dtype, y.tolist()) == (np.float32, [0, 0, 0, 0, 0.5, 1])


def test_several_results_and_truth_values():
    @frt.fuse
    def both(x, y):
        return x + y, x > y

    a, b = np.arange(4.0), np.arange(4.0)[::2].repeat(2)
    total, greater = both(a, b)
    assert (total.dtype, greater.dtype) == (np.float64, np.bool_)
    assert np.array_equal(total, a + b)
    assert np.array_equal(greater, a > b)


def test_quantized_numpy():
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    q = frt.quantize_int8(x, 0.05)
    assert (type(q), q.dtype) == (np.ndarray, np.int8)
    back = frt.dequantize_int8(q, 0.05)
    assert (type(back), back.dtype) == (np.ndarray, np.float32)
    assert np.abs(back - x).max() <= 0.025 + 1e-6


def test_bfloat16_of_ml_dtypes(seen):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x = np.linspace(-3, 3, 24).reshape(4, 6).astype(bfloat16)
    for view in (x, x.T, x[:, ::2], x[1:, 1:]):
        y = frt.gelu(view)
        assert (type(y), y.dtype, y.shape) == (np.ndarray, bfloat16, view.shape)
        assert np.allclose(y.astype(np.float64), gelu(view), rtol=2**-8, atol=2**-12)
        assert seen[-1].data_ptr() == view.ctypes.data
    x.flags.writeable = False
    assert np.allclose(frt.gelu(x).astype(np.float64), gelu(x), rtol=2**-8, atol=2**-12)


def test_a_bfloat16_result_without_ml_dtypes_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        frt.dequantize_int8(np.ones(3, np.int8), 0.5, dtype="bfloat16")


# --- mixtures


def test_torch_decides_among_others():
    t = torch.linspace(-1, 1, 8, requires_grad=True)
    n = np.linspace(0, 2, 8, dtype=np.float32)
    for args in ((t, n), (n, t)):
        y = frt.add_relu(*args)
        assert type(y) is torch.Tensor
        (g,) = torch.autograd.grad(y.sum(), t)
        assert_close(y, torch.relu(t + torch.from_numpy(n)))
        assert_close(g, (t + torch.from_numpy(n) > 0).float())


def test_results_are_of_the_first_arrays_kind():
    n, h = np.linspace(-1, 1, 8, dtype=np.float32), Converted(torch.ones(8))
    assert type(frt.add_relu(n, h)) is np.ndarray
    assert type(frt.add_relu(h, n)) is Converted
    assert type(frt.add_relu(2.0, h)) is Converted


def test_lists_are_not_arrays():
    with pytest.raises(TypeError, match="gelu: x must be a tensor, an array or a number, got list"):
        frt.gelu([1.0, 2.0])
    with pytest.raises(TypeError, match="at least one argument must be a tensor or an array, got "
                                        "x=float"):
        frt.gelu(1.0)


# --- DLPack


@pytest.mark.parametrize("kind", [Converted, Standard])
def test_dlpack_arrays_come_back_as_their_own_kind(kind, device, seen):
    held = kind(torch.linspace(-3, 3, 24, device=device).view(4, 6)[1:, 1:])  # with a byte offset
    y = frt.gelu(held)
    assert type(y) is kind
    assert_close(y.tensor, F.gelu(held.tensor))
    assert seen[-1].data_ptr() == held.tensor.data_ptr()


def test_dlpack_alone_gives_torch_tensors(device):
    """Without `from_dlpack` nobody knows how to make another of these."""
    y = frt.gelu(Held(torch.linspace(-3, 3, 24, device=device)))
    assert type(y) is torch.Tensor
    assert_close(y, F.gelu(torch.linspace(-3, 3, 24, device=device)))


def test_dlpack_that_cannot_be_read_is_refused():
    class Broken(Held):
        def __dlpack__(self, **kwargs):
            raise BufferError("the memory is elsewhere")

    with pytest.raises(TypeError, match=r"gelu: x \(.*Broken\) cannot be .* tensor: the memory is"):
        frt.gelu(Broken(torch.ones(3)))
    with pytest.raises(TypeError, match="cannot be viewed as a tensor"):
        frt.gelu(Held(torch.ones(3, requires_grad=True)))


def test_the_memory_lives_as_long_as_the_result():
    y = frt.relu(np.linspace(-1, 1, 1 << 16, dtype=np.float32))
    filler = [np.full(1 << 16, 7.0, np.float32) for _ in range(8)]
    assert np.array_equal(y, np.maximum(np.linspace(-1, 1, 1 << 16, dtype=np.float32), 0))
    assert len(filler) == 8


def test_is_foreign():
    for value in (np.ones(1), np.float32(1), Held(torch.ones(1))):
        assert array.is_foreign(value)
    for value in (torch.ones(1), torch.nn.Parameter(torch.ones(1)), 1, 2.0, True, np.float64(1),
                  None, "x", [1.0]):
        assert not array.is_foreign(value)


# --- CuPy


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_cupy_in_and_out(dtype, seen):
    cupy = pytest.importorskip("cupy")
    x = cupy.random.default_rng(0).standard_normal((5, 7)).astype(dtype)
    for view in (x, x.T, x[1:, 2:], x[:, ::2], x[0, 0]):
        y = frt.gelu(view)
        assert (type(y), y.dtype, y.shape) == (cupy.ndarray, dtype, view.shape)
        eps = np.finfo(dtype).eps
        assert np.allclose(y.get(), gelu(view.get()), rtol=4 * eps, atol=eps)
        assert seen[-1].data_ptr() == view.data.ptr


@pytest.mark.gpu
def test_cupys_current_stream_is_honoured():
    """The op comes after what CuPy's stream still has to do, and before what follows there."""
    cupy = pytest.importorskip("cupy")
    n = 1 << 22
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(5):
        with stream:
            x = cupy.zeros(n, dtype=cupy.float32)
            a = cupy.ones((2048, 2048), dtype=cupy.float32)
            for _ in range(20):
                a = a @ a * 1e-3  # keeps the stream busy
            x += 3
            y = frt.relu(x)
            z = y + 1
        stream.synchronize()
        assert float(y.min()) == float(y.max()) == 3
        assert float(z.min()) == float(z.max()) == 4


@pytest.mark.gpu
def test_cupy_and_numpy_do_not_mix():
    cupy = pytest.importorskip("cupy")
    with pytest.raises(ValueError, match="add_relu: all tensors must be on one device, got "
                                         "a on cuda:0, b on cpu"):
        frt.add_relu(cupy.ones(3, dtype=cupy.float32), np.ones(3, np.float32))
