"""Hopper's kernel of a linear layer and what follows it: results, what it takes, its descriptors and text."""

import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch
from product_checks import applied, check, linear, operands

import fusionrt as frt
from fusionrt import expr
from fusionrt.ops import gemm
from fusionrt.ops.gemm import Form, Tile
from fusionrt.ops.product import PRODUCT, Layer
from fusionrt.runtime import compiler, tensor_map
from fusionrt.runtime import device as cuda
from fusionrt.runtime.tensor_map import Matrix

TILES = (Tile(128, 128), Tile(128, 128, 2), Tile(128, 96), Tile(128, 64), Tile(64, 64),
         *(Tile(*shape, together=True) for shape in ((128, 128, 2), (128, 96), (128, 64))))
HALF = (torch.bfloat16, torch.float16)
CASES = tuple(itertools.product((False, True), repeat=3))   # bias, residual, keep


@pytest.fixture
def hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")


# --- results ---------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("m, n, k", [(1, 8, 8), (33, 520, 200), (300, 200, 72), (1000, 3080, 776),
                                     (4099, 2056, 456)])
def test_results_are_as_accurate_as_torchs(hopper, m, n, k, tile):
    for dtype, (bias, residual, keep) in itertools.product(HALF, CASES):
        check(gemm, m, n, k, dtype, "gelu", bias, residual, keep, tile=tile)


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(1, 3072, 768), (128, 11008, 512), (512, 3072, 768),
                                     (8192, 3072, 768), (2048, 4096, 4096), (4096, 1000, 4096)])
@pytest.mark.parametrize("activation", [None, "silu", "mish"])
def test_chosen_tiles(hopper, m, n, k, activation):
    for dtype in HALF:
        check(gemm, m, n, k, dtype, activation)


@pytest.mark.gpu
def test_the_same_bits_every_time(hopper):
    x, weight, bias, _ = operands(3000, 3000, 768, torch.bfloat16)
    first, _ = linear(gemm, x, weight, bias, applied("gelu"))
    for _ in range(20):
        assert torch.equal(linear(gemm, x, weight, bias, applied("gelu"))[0], first)


@pytest.mark.gpu
def test_rows_may_lie_apart(hopper):
    x, weight, bias, residual = operands(200, 136, 264, torch.float16, residual=True)
    apart = [torch.cat([t, torch.full_like(t[:, :8], float("nan"))], 1)[:, :-8]
             for t in (x, weight, residual)]
    expected, _ = linear(gemm, x, weight, bias, applied("silu", True), residual)
    found, _ = linear(gemm, *apart[:2], bias, applied("silu", True), apart[2])
    assert torch.equal(found, expected)


@pytest.mark.gpu
def test_nan_and_infinity_stay_in_their_rows(hopper):
    x, weight, bias, _ = operands(256, 256, 128, torch.bfloat16)
    x[3], x[200] = float("nan"), float("inf")
    out, _ = linear(gemm, x, weight, bias)
    assert out[3].isnan().all()
    assert not out[200].isfinite().any()
    rest = [i for i in range(256) if i not in (3, 200)]
    assert out[rest].isfinite().all()


@pytest.mark.gpu
def test_in_a_graph_and_on_another_stream(hopper):
    x, weight, bias, _ = operands(512, 512, 512, torch.bfloat16)
    expected, _ = linear(gemm, x, weight, bias, applied("gelu"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = linear(gemm, x, weight, bias, applied("gelu"))
    poisoned = torch.full_like(out, float("nan"))
    out.copy_(poisoned)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


# --- what it takes ---------------------------------------------------------------------------------

def test_a_tile_is_one_that_leaves_few_multiprocessors_idle():
    for m, n, k, tile in [(16384, 4096, 1024, Tile(128, 128, 2)), (8192, 3072, 768, Tile(128, 128)),
                          (512, 3072, 768, Tile(128, 96, 1, True)), (256, 3072, 768, Tile(128, 64, 1, True)),
                          (128, 3072, 768, Tile(64, 64)), (1, 3072, 768, Tile(64, 64))]:
        assert gemm.choose_tile(m, n, k, 132) == tile


def test_nothing_is_chosen_where_it_cannot_run(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_90")
    monkeypatch.setattr(cuda, "multiprocessors", lambda index: 132)
    gemm.chosen.cache_clear()
    good = (8192, 3072, 768, torch.bfloat16, device)
    assert gemm.chosen(*good)
    assert gemm.chosen(*good, library_epilogue=True)
    for place, value in [(1, 3073), (2, 770), (2, 1 << 15), (3, torch.float32), (4, torch.device("cpu"))]:
        assert not gemm.chosen(*(value if i == place else a for i, a in enumerate(good)))
    assert not gemm.chosen(*good, epilogue=expr.pow_(PRODUCT, PRODUCT))
    assert not gemm.chosen(128, 768, 3072, torch.bfloat16, device)   # few tiles, each long
    monkeypatch.setattr(cuda, "architecture", lambda index: "sm_100")
    gemm.chosen.cache_clear()
    assert not gemm.chosen(*good)
    gemm.chosen.cache_clear()


def test_an_epilogue_is_a_short_expression_of_product_and_residual():
    for name in ("relu", "gelu", "gelu_tanh", "silu", "mish", "softplus", "elu"):
        assert gemm.takes(applied(name, True), 64), name
    assert gemm.takes(frt.gelu(PRODUCT) * frt.sigmoid(PRODUCT), 768)
    kept = expr.node("kept", expr.random_bits(0), 0.5)
    for refused in (expr.pow_(PRODUCT, PRODUCT), expr.argument("a2") + PRODUCT, expr.row_sum(PRODUCT),
                    PRODUCT < 0, expr.cast(PRODUCT, "float16"), expr.where(kept, PRODUCT, 0)):
        assert not gemm.takes(refused, 768), refused.op


def test_memory_that_the_copy_engine_cannot_read_is_not_supported():
    x, weight, bias = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((32, 64), (48, 64), (48,)))
    assert gemm.supports(x, weight, bias)
    assert gemm.supports(x[:1], weight, bias)
    assert not gemm.supports(x.t(), weight, bias)
    assert not gemm.supports(x[:, 1:], weight[:, 1:], bias)         # not at 16 bytes
    assert not gemm.supports(x, weight[:47], bias[:47])              # a row of results is not
    assert not gemm.supports(x.half(), weight, bias)
    assert not gemm.supports(x, weight, bias[::2])
    assert not gemm.supports(x.float(), weight.float(), bias.float())


# --- descriptors and text --------------------------------------------------------------------------

def test_what_the_driver_is_told_of_a_matrix(monkeypatch):
    told = []

    def encode(address, dtype, rank, pointer, sizes, strides, box, steps, interleave, swizzle, l2, fill):
        told.append((address.value % 64, dtype, rank, pointer.value, list(sizes), list(strides),
                     list(box), list(steps), interleave, swizzle, fill))
        ctypes.memset(address, 7, 128)
        return 0

    driver = SimpleNamespace(cuTensorMapEncodeTiled=encode)
    monkeypatch.setattr(tensor_map.binding, "libcuda", lambda: driver)
    tensor_map.encode.cache_clear()
    matrix = Matrix(4096, 300, 72, 80, "bfloat16")
    assert tensor_map.encode(matrix, 128, 64) == b"\7" * 128
    assert tensor_map.encode(matrix, 128, 64) is tensor_map.encode(matrix, 128, 64)
    tensor_map.encode(matrix._replace(dtype="float16"), 16, 32)
    assert told == [(0, 9, 2, 4096, [72, 300], [160], [64, 128], [1, 1], 0, 3, 0),
                    (0, 6, 2, 4096, [72, 300], [160], [32, 16], [1, 1], 0, 2, 0)]
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", lambda *_: 1)
    with pytest.raises(RuntimeError, match=r"CUresult 1 for Matrix\(.*boxes of 64 × 64"):
        tensor_map.encode(matrix, 64, 64)
    tensor_map.encode.cache_clear()


def test_a_matrix_that_the_copy_engine_cannot_take_is_refused():
    good = Matrix(4096, 300, 72, 80, "bfloat16")
    assert tensor_map.can_copy(good)
    for wrong in ({"pointer": 4104}, {"stride": 76}, {"dtype": "float32"}, {"rows": 0}, {"columns": 88}):
        with pytest.raises(ValueError, match="multiples of 16 bytes, got Matrix"):
            tensor_map.encode(good._replace(**wrong), 64, 64)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_shared_memory_suffices(tile):
    for dtype, case in itertools.product(("bfloat16", "float16"), CASES):
        kind = Form(Layer(dtype, PRODUCT, *case), tile)
        assert kind.stages >= 4
        assert kind.shared_bytes <= gemm.SHARED_BYTES
        params = gemm._kernel(kind).params
        assert params.packer.size % 64 == 0      # what C++ makes of a struct with tensor maps
        assert params.declaration.index("TensorMap residual") < params.declaration.index("bias")


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_registers_suffice(tile):
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    for dtype, activation, case in [("bfloat16", "gelu", (True, True, True)),
                                    ("float16", "softplus", (False, False, False))]:
        kernel = gemm._kernel(Form(Layer(dtype, applied(activation, case[1]), *case), tile))
        entry, _ = compiler.cubin(kernel.text, kernel.stem, compiler.target(kernel.stem, "sm_90"), "gemm")
        assert entry.metadata["arch"] == "sm_90a"
        assert not any(entry.metadata[key] for key in ("stack", "spills", "warnings")), (activation, case)
