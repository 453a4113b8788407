"""The GPU kernels' numbers where there is no GPU: compiled as C++, see `emulator`.

The runtime chooses kernels for 132 multiprocessors; where it would take millions of elements to see one of
them at work, tests have it choose for a few.
"""

import ctypes
import os
import random

import pytest
import torch
from checking import (
    BF16,
    DTYPES,
    F16,
    F32,
    F64,
    accumulated,
    assert_as_accurate,
    check,
    evaluate,
    lost,
    make,
    wide,
)
from emulator import KernelFault, Machine, emulation, missing
from emulator.translation import Untranslated, instructions, known, translated
from pointwise_ops import check_op, example
from torch.nn import functional as F

import fusionrt as frt
from fusionrt import mask, reference, settling
from fusionrt.data import sliding_window, token_preprocess
from fusionrt.optim import SGD, AdamW
from fusionrt.runtime import abreast, accumulators, parts, reduction_cut, source

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no emulated GPU: {missing()}")


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """Processes of pytest-xdist share what they compile."""
    base = tmp_path_factory.getbasetemp()
    return Machine((base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "emulated_kernels")


@pytest.fixture
def gpu(machine):
    with pytest.MonkeyPatch.context() as patch, emulation(machine, patch) as gpu:
        yield gpu


@pytest.fixture
def few_multiprocessors(monkeypatch):
    """As if work were cut for four of them: blocks that share sums, rows side by side, threads that have
    columns alone, and masks, of a hundredth of the elements."""
    for module in (abreast, accumulators, reduction_cut):
        monkeypatch.setattr(module, "MULTIPROCESSORS", 4)
    monkeypatch.setattr(reduction_cut, "REDUCE_BLOCKS", 4 * 16)
    monkeypatch.setattr(reduction_cut, "STAYING_BLOCKS", 4 * 3)
    monkeypatch.setattr(reduction_cut, "ALONE_THREADS", 1 << 10)
    monkeypatch.setattr(abreast, "MANY_ACROSS", 1 << 12)
    monkeypatch.setattr(mask, "FROM", 1 << 12)


@pytest.fixture
def texts(machine, monkeypatch):
    """Of the kernels that calls are built with."""
    found, real = [], machine.function

    def function(text, *args, **more):
        found.append(text)
        return real(text, *args, **more)

    monkeypatch.setattr(machine, "function", function)
    return found


@pytest.fixture
def rows_side_by_side(monkeypatch):
    """How many, of each reduction."""
    found, real = [], parts.side_by_side

    def side_by_side(problem, rows):
        seen = real(problem, rows)
        found.append(seen[0].abreast)
        return seen

    monkeypatch.setattr(parts, "side_by_side", side_by_side)
    return found


def operand(gpu, shape, dtype, offset=0):
    return gpu.guarded(make(shape, dtype, "cpu"), offset)


# --- the emulator itself

PROBE = """
namespace fusionrt {
struct Params { float* x; int what; };
extern "C" __global__ void __launch_bounds__(64) probe(const __grid_constant__ Params p) {
    __shared__ __align__(16) float staged[64];
    extern __shared__ __align__(16) float sized[];
    const unsigned t = threadIdx.x;
    float* x = p.x + 64 * blockIdx.x;
    if (p.what == 0) {  // what is right: the value of the next lane, by way of the other threads' memory
        sized[t] = x[t];
        __syncthreads();
        x[t] = sized[63 - t] + __shfl_sync(0xffffffffu, x[t], t + 1);
    } else if (p.what == 1) {
        unsigned words[4];
        asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(x + 1));
    } else if (p.what == 2) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(x + 64), "r"(t), "r"(t) : "memory");
    } else if (p.what == 3) {
        x[64] = 0;
    } else if (p.what == 4) {
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(x - 2), "r"(t), "r"(t) : "memory");
    } else if (p.what == 5) {
        if (t % 2) x[t] = __shfl_sync(0xffffffffu, x[t], 0);
    } else if (p.what == 6) {
        if (t < 32) __syncthreads();
    } else if (p.what == 7) {
        asm volatile("fence.proxy.async;" ::: "memory");
    } else if (p.what == 8) {
        x[t] = *reinterpret_cast<float*>(reinterpret_cast<char*>(x + t / 2) + 2);
    } else if (p.what == 9) {
        x[t] = sized[8192];
    } else if (p.what == 10) {  // copies that nobody has waited for
        const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(staged + t));
        staged[t] = -1;
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to), "l"(x + t), "n"(4) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
        const float early = staged[t];
        asm volatile("cp.async.wait_group %0;" :: "n"(0) : "memory");
        x[t] = 2 * early + staged[t];
    }
}
}
"""


def probe(machine, address, what):
    params = source.Params([source.pointer("float", "x", const=False), source.Field("int what", "i")])
    packed = params.packer.pack(address, what)
    pointers = (ctypes.c_char_p * 1)(packed)
    function = machine.function(PROBE, "probe", 0, "probe")
    machine.launchKernel(function, 1, 1, 1, 64, 1, 1, 256, 0, ctypes.addressof(pointers), 0)


def test_threads_of_a_block_meet(machine):
    numbers = torch.randn(64)
    x = machine.memory.guarded(numbers)
    probe(machine, x.data_ptr(), 0)
    neighbours = numbers.view(2, 32).roll(-1, 1).flatten()
    torch.testing.assert_close(x, numbers.flip(0) + neighbours, rtol=0, atol=0)


def test_copies_come_when_they_are_waited_for(machine):
    numbers = torch.randn(64)
    x = machine.memory.guarded(numbers)
    probe(machine, x.data_ptr(), 10)
    torch.testing.assert_close(x, numbers - 2, rtol=0, atol=0)


@pytest.mark.parametrize("what, message", [
    (1, "misaligned load of 16 bytes"), (2, "store of 8 bytes 256 bytes from the start of a tensor of 256"),
    (3, "access outside of every tensor"), (4, "store of 8 bytes -8 bytes from the start"),
    (5, "lanes of a warp wait for others"), (6, "some threads wait at a barrier, others have ended"),
    (7, "no function for fence.proxy.async"), (8, "misaligned access"), (9, "behind the shared memory")])
def test_what_no_kernel_may_do(machine, what, message):
    x = machine.memory.guarded(torch.randn(64))
    with pytest.raises(KernelFault, match=f"probe: probe: .*{message}"):
        probe(machine, x.data_ptr(), what)
    probe(machine, x.data_ptr(), 0)  # the next one is none the worse for it


def test_stores_beside_a_tensor_are_seen(machine):
    x = machine.memory.guarded(torch.randn(62))  # ends 8 bytes before a page does
    with pytest.raises(KernelFault, match="store beside a tensor"):
        probe(machine, x.data_ptr() - 4, 3)


def test_every_instruction_of_cuda_h_is_one_of_some_kernel():
    """Those of kernels that have no function there fail where they are executed."""
    folder = source.directory()
    used = set().union(*(instructions(f.read_text(encoding="utf-8")) for f in folder.glob("*.cu*")))
    assert used == known()


def test_what_cannot_be_translated():
    shared = "extern __shared__ alignas(16) float sized[];"
    with pytest.raises(Untranslated, match="probe: shared memory that is sized at the launch"):
        translated(PROBE.replace("extern __shared__ __align__(16) float sized[];", shared), "probe", 890)
    with pytest.raises(Untranslated, match="other: no kernel of this name"):
        translated(PROBE, "other", 890)


def test_nothing_stays_patched(machine):
    x = torch.randn(5, 3)
    expected = frt.relu(x)
    with pytest.MonkeyPatch.context() as patch, emulation(machine, patch) as gpu:
        assert not x.is_cuda
        found, is_cuda = gpu.run(lambda: (frt.relu(x), x.is_cuda))
        assert is_cuda and len(gpu.launched) == 1
        assert torch.equal(frt.relu(x), expected)  # of this thread, on the CPU
        assert len(gpu.launched) == 1
    assert torch.equal(found, expected)
    assert torch.equal(frt.relu(x), expected) and len(machine.launched) == 1
    assert "is_cuda" not in vars(torch.Tensor)


# --- calls in machine code

@pytest.mark.parametrize("op, shapes", [
    (frt.add_relu, [(5, 33), (5, 33)]), (lambda x: frt.leaky_relu(x, 0.125), [(7, 40)]),
    (frt.bias_gelu, [(130, 24), (24,)]), (frt.softmax, [(6, 100)]),
    (lambda x, w, b: frt.layer_norm(x, (48,), w, b), [(70, 48), (48,), (48,)]),
    (lambda x: frt.sum(x, -1), [(9, 70)]), (frt.mean_abs, [(64, 70)]),
    (lambda x, y: frt.mse_loss(x, y), [(33, 20), (33, 20)])])
def test_calls_that_are_made_again(op, shapes, gpu, machine, monkeypatch):
    """The plans of a GPU, with their parameters, as machine code has them: the bits of calls by Python."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    args = [operand(gpu, shape, F32, 0) for shape in shapes]

    def calls():
        found, needing = [], [a.detach().requires_grad_() for a in args]
        for _ in range(5):
            out = op(*needing)
            found.append((out.detach(), op(*args), *torch.autograd.grad(out, needing, torch.ones_like(out))))
            launches.append(machine.by_machine_code)
        return found

    launches = [machine.by_machine_code]
    first, *others = gpu.run(calls)
    for other in others:
        for a, b in zip(other, first, strict=True):
            assert torch.equal(a, b)
    assert launches[1] == launches[0] and launches[-1] - launches[-2] == len(gpu.launched) // 5 > 0


# --- random numbers

def test_drawing_calls_that_are_made_again(gpu, machine, monkeypatch):
    """Recorded ones and their gradients are given random numbers: machine code draws the bits of Python's."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 3)
    x, residual = (operand(gpu, (33, 40), F32, 0) for _ in range(2))
    x.requires_grad_()

    def call():
        launches = machine.by_machine_code
        out = frt.dropout_add(x, residual, 0.3)
        grad, = torch.autograd.grad(out, x, torch.ones_like(x))
        assert torch.equal(grad != 0, out != residual)
        return (out.detach(), grad), machine.by_machine_code - launches

    def calls():
        torch.manual_seed(7)
        first = call()
        others = [call() for _ in range(6)]
        torch.manual_seed(7)
        return first, call(), others[-1]

    first, again, other = gpu.run(calls)
    assert (first[1], again[1]) == (0, 2) and not torch.equal(again[0][1], other[0][1])
    assert all(torch.equal(a, b) for a, b in zip(first[0], again[0], strict=True))


@pytest.mark.parametrize("shape, offset", [((7, 1024), 0), ((9, 1023), 1)], ids=str)
def test_random_bits_are_those_of_a_cpu(shape, offset, gpu):
    x, residual = (operand(gpu, shape, F32, offset) for _ in range(2))
    torch.manual_seed(5)
    expected = frt.dropout_add(x, residual, 0.3)
    torch.manual_seed(5)
    assert torch.equal(gpu.run(lambda: frt.dropout_add(x, residual, 0.3)) != residual, expected != residual)


@pytest.mark.parametrize("n, dtype", [(4096, BF16), (4104, F16)], ids=str)
def test_norms_across_memory_see_the_mask_that_they_apply(n, dtype, gpu, few_multiprocessors, texts):
    """Threads that have columns alone, whose lanes share no draws."""
    of_norms(gpu, (2, 8, n), dtype)
    alone = [text for text in texts if "ALONE = true;" in text]
    assert len(alone) == 2 and not any("TWINS = true;" in text for text in alone)


@pytest.mark.slow
@pytest.mark.parametrize("n, dtype", [(4096, BF16), (4104, F16), (4096, F32)], ids=str)
def test_large_norms_across_memory(n, dtype, gpu):
    of_norms(gpu, (128, 8, n), dtype)


def of_norms(gpu, shape, dtype):
    x = operand(gpu, shape, F32).abs_().add_(0.5)
    x = gpu.guarded(x.to(dtype)).transpose(1, 2).requires_grad_()
    residual = gpu.guarded(torch.zeros_like(x.transpose(1, 2), requires_grad=False)).transpose(1, 2)
    weight, bias = (operand(gpu, shape[1:2], F32) for _ in range(2))
    grad = operand(gpu, shape, dtype).transpose(1, 2)

    def step():
        y, s = frt.dropout_add_layer_norm(x, residual, weight, bias, 0.5, return_sum=True)
        return y.detach(), s.detach(), *torch.autograd.grad(y, x, grad)

    y, s, found = gpu.run(step)
    exact = x.detach().double().requires_grad_()
    expected = F.layer_norm(torch.where(s != 0, 2 * exact, 0), shape[1:2], weight.double(), bias.double())
    assert 0.45 < (s != 0).double().mean() < 0.55
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.double(), torch.autograd.grad(expected, exact, grad.double())[0],
                               rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("shape, dtype, offset", [
    ((300, 512), BF16, 0), ((1000, 24), BF16, 0), ((640, 33), F16, 1), ((33, 1025), F64, 0)], ids=str)
def test_gradient_of_a_dropped_bias(shape, dtype, offset, gpu, few_multiprocessors, texts):
    """Whole blocks of columns, in which lanes share what they draw, and others."""
    x = operand(gpu, shape, dtype, offset).requires_grad_()
    bias = gpu.guarded(torch.zeros(shape[1:], dtype=dtype), offset).requires_grad_()
    residual = gpu.guarded(torch.zeros(shape, dtype=dtype), offset)
    grad = operand(gpu, shape, dtype, offset)

    def step():
        y = frt.bias_dropout_add(x, bias, residual, 0.25)
        return y.detach(), *torch.autograd.grad(y, (x, bias), grad)

    y, of_x, of_bias = gpu.run(step)
    assert any("TWINS = true;" in text for text in texts) == (dtype.itemsize == 2 and shape[1] % 512 == 0)
    assert 0.7 < (y != 0).double().mean() < 0.8
    exact = torch.where(y != 0, grad.double() / 0.75, 0)
    assert_as_accurate(of_x, exact.to(dtype), exact, extra=lost(exact.abs(), dtype))
    assert_as_accurate(of_bias, exact.sum(0).to(dtype), exact.sum(0), extra=lost(exact.abs().sum(0), dtype))


# --- gradients of broadcast operands

@pytest.mark.parametrize("name, shape, dtype, offset, side_by_side", [
    ("bias_gelu", (5000, 1), F32, 1, 1), ("scale_bias_sigmoid", (4672, 7), F64, 0, 2),
    ("bias_gelu", (3968, 33), F16, 0, 32), ("scale_bias_sigmoid", (500, 65), F32, 1, 4),
    ("bias_gelu", (250, 129), BF16, 3, 1), ("scale_bias_sigmoid", (64, 1000), F16, 0, 1),
    ("bias_gelu", (256, 1025), F32, 0, 4)], ids=str)
def test_gradients_of_broadcast_operands(name, shape, dtype, offset, side_by_side, gpu, few_multiprocessors,
                                         rows_side_by_side):
    shapes = [shape, *[shape[1:]] * (2 if name == "scale_bias_sigmoid" else 1)]
    gpu.run(lambda: check_op(name, [operand(gpu, shape, dtype, offset) for shape in shapes]))
    assert max(rows_side_by_side) == side_by_side


@pytest.mark.parametrize("columns, dtype", [(32, F16), (33, BF16)], ids=str)
def test_gradients_that_read_masks(columns, dtype, gpu, few_multiprocessors, texts):
    x, bias = operand(gpu, (4096, columns), dtype), operand(gpu, (columns,), dtype)
    gpu.run(lambda: check_op("bias_relu", (x, bias)))
    assert any("Pack<bool_t, W> " in text for text in texts)


# --- reductions

@pytest.mark.parametrize("name, dim, dtype, offset", [
    ("sum", 0, BF16, 0), ("sum", 2, F32, 1), ("mean", (0, 2), F64, 0), ("amax", 0, F32, 0),
    ("amax", 2, F16, 0), ("var", 1, F32, 0), ("var", 0, BF16, 0), ("logsumexp", 0, F16, 1),
    ("logsumexp", (0, 1, 2), F32, 0)], ids=str)
def test_reductions(name, dim, dtype, offset, gpu, few_multiprocessors):
    gpu.run(lambda: reduced(name, operand(gpu, (80, 17, 130), dtype, offset), dim))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("dtype", [F16, F64], ids=str)
def test_reductions_of_another_dtype(dtype, dim, gpu, few_multiprocessors):
    x, eps = operand(gpu, (8, 17, 130), F32), torch.finfo(dtype).eps
    for op, args in ((frt.norm, (3, dim)), (frt.log_softmax, (dim,))):
        out, grads = gpu.run(lambda op=op, args=args: evaluate(op, (x, *args), {"dtype": dtype}))
        exact, expected = evaluate(op.reference, (x.to(dtype).double(), *args))
        assert (out.dtype, grads[0].dtype) == (dtype, F32)
        torch.testing.assert_close(out.double(), exact, rtol=4 * eps, atol=4 * eps)
        rtol = 4 * eps + 1e-5
        torch.testing.assert_close(grads[0].double(), expected[0], rtol=rtol, atol=4 * rtol)


def reduced(name, x, dim):
    added = getattr(torch, name)(x.double().abs(), dim) if name in ("sum", "mean", "var") else 0.0
    check(getattr(frt, name), (x, dim), magnitudes=lambda args, *_: [args[0].abs()],
          extra=lost(added, x.dtype))


# --- rows

rows = pytest.mark.parametrize("n, columns, dtype, offset", [
    (33, 7, BF16, 1), (17, 1000, F16, 0), (6, 1023, F64, 0), (3, 2049, F32, 1)], ids=str)


@rows
def test_softmax(n, columns, dtype, offset, gpu):
    softmax(gpu, n, columns, dtype, offset)


def softmax(gpu, n, columns, dtype, offset):
    x = operand(gpu, (n, columns), dtype, offset)
    gpu.run(lambda: check(frt.softmax, (x,), magnitudes=lambda *_: [1.0]))


@rows
def test_layer_norm(n, columns, dtype, offset, gpu):
    layer_norm(gpu, n, columns, dtype, offset)


def layer_norm(gpu, n, columns, dtype, offset):
    x, weight, bias = (operand(gpu, shape, dtype, offset) for shape in ((n, columns), (columns,), (columns,)))

    def exact(x, weight, bias):
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias

    size = exact(wide(x), wide(weight).abs(), 0).abs() + wide(bias).abs()
    gpu.run(lambda: check(
        lambda x, weight, bias: frt.layer_norm(x, (columns,), weight, bias), (x, weight, bias),
        reference=lambda x, weight, bias: F.layer_norm(x, (columns,), weight, bias), exact=exact,
        magnitudes=lambda args, kwargs, grad_output: accumulated(exact, args, kwargs, grad_output),
        extra=lost(size, dtype)))


@rows
def test_cross_entropy(n, columns, dtype, offset, gpu):
    cross_entropy(gpu, n, columns, dtype, offset)


def cross_entropy(gpu, n, columns, dtype, offset):
    x = operand(gpu, (n, columns), dtype, offset)
    target = torch.randint(columns, (n,))
    target[-1] = -100
    guarded = gpu.guarded(target)
    size = reference.cross_entropy(wide(x), target, reduction="none").abs()
    gpu.run(lambda: check(frt.cross_entropy, (x, guarded), {"reduction": "none"}, extra=lost(size, dtype)))


# --- layouts

LAYOUTS = {
    "every other": lambda x: x[:, :, ::2], "transposed": lambda x: x.transpose(1, 2),
    "rows apart": lambda x: x[:, ::3], "from the second": lambda x: x[:, :, 1:],
    "permuted": lambda x: x.permute(2, 0, 1), "a row for all": lambda x: x[:, :1].expand(6, 9, 14),
    "a column for all": lambda x: x[..., :1].expand(6, 10, 8)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype, offset", [(BF16, 0), (F16, 1), (F32, 0), (F64, 1)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_operands_of_any_layout(name, dtype, offset, gpu):
    x = LAYOUTS[name](operand(gpu, (6, 10, 14), dtype, offset))
    gate = operand(gpu, x.shape, dtype)
    gpu.run(lambda: check_op("swish_multiply", (x, gate)))


# --- more of the same

@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_gradients_of_broadcast_operands(seed, gpu, few_multiprocessors):
    draw = random.Random(seed)
    for _ in range(8):
        columns = draw.choice([1, 2, 3, 5, 7, 9, 24, 33, 40, 65, 100, 129, 264, 513, 1000, 1025])
        rows = min(1 << 14, draw.choice([1, 33, 96, 640, 4096]) * (1 + 1000 // columns))
        name = draw.choice(["bias_gelu", "bias_relu", "scale_bias_sigmoid", "prelu_bias"])
        args, kwargs = example(name, (rows, columns), draw.choice(DTYPES), "cpu")
        guarded = [gpu.guarded(a, draw.choice([0, 0, 1, 2, 4])) for a in args]
        gpu.run(lambda name=name, args=guarded, kwargs=kwargs: check_op(name, args, kwargs))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_reductions(seed, gpu, few_multiprocessors):
    draw = random.Random(seed)
    for _ in range(8):
        shape = [draw.choice([2, 5, 33, 64, 128, 257]) for _ in range(3)]
        order, dtype = draw.sample(range(3), 3), draw.choice(DTYPES)
        x = operand(gpu, shape, dtype, draw.choice([0, 0, 1, 4])).permute(order)
        name = draw.choice(["sum", "mean", "amax", "var", "logsumexp"])
        dim = draw.choice([0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)])
        gpu.run(lambda name=name, x=x, dim=dim: reduced(name, x, dim))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_rows(seed, gpu):
    draw = random.Random(seed)
    for _ in range(8):
        columns = draw.choice([1, 2, 3, 8, 15, 64, 100, 257, 1000, 1536, 3001, 4096, 9001])
        n = draw.choice([1, 2, 7, 64, 300, 1500]) if columns < 1000 else draw.choice([1, 5, 40])
        of_rows = draw.choice([softmax, layer_norm, cross_entropy])
        of_rows(gpu, n, columns, draw.choice(DTYPES), draw.choice([0, 0, 1, 4]))


# --- templates of their own

@pytest.mark.parametrize("dtype, interleaved", [(BF16, False), (F32, True)], ids=str)
def test_heads_of_attention(dtype, interleaved, gpu):
    """Both ways: bias, rotation by computed angles and by rows of tables."""
    qkv, bias = (operand(gpu, shape, dtype) for shape in ((2, 11, 9 * 16), (9 * 16,)))
    if interleaved:
        options = {"base": 1e4, "offset": 3, "interleaved": True}
    else:
        angles = torch.rand(30, 8, dtype=F64) * 6
        options = {"cos": gpu.guarded(angles.cos().float()), "sin": gpu.guarded(angles.sin().float()),
                   "position_ids": gpu.guarded(torch.randint(30, (2, 11)))}

    def joined(function):
        return lambda qkv, bias: torch.cat([t.flatten() for t in function(qkv, 5, 2, bias=bias, **options)])

    largest = 4 * max(qkv.abs().max().double(), bias.abs().max().double())
    gpu.run(lambda: check(joined(frt.qkv_heads), (qkv, bias), reference=joined(reference.qkv_heads),
                          extra=lost(largest, dtype),
                          magnitudes=lambda args, kwargs, grad: [2 * grad.abs().max(), 2 * grad.abs().sum()]))
    assert set(gpu.launched) == {"qkv_heads", "sum_partials"}


@pytest.mark.parametrize("rule, options", [
    (AdamW, {"betas": (0.9, 0.999), "weight_decay": 0.1}), (AdamW, {"betas": (0.0, 0.9)}),
    (SGD, {"momentum": 0.9})], ids=str)
def test_steps_of_optimizers(rule, options, gpu):
    shapes = (300, 40), (7,), (4097,)
    ours = [torch.nn.Parameter(operand(gpu, shape, F32)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    grads = [[operand(gpu, shape, F32) * size for shape in shapes] for size in (10.0, 1.0, 1e-3)]

    def steps(rule, params):
        optimizer = rule(params, lr=0.01, **options)
        for given in grads:
            for param, grad in zip(params, given, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        return optimizer.state

    kept = 5e-7 * options.get("betas", (0.9,))[0]  # digits of what came before: with a beta of 0, none
    state = gpu.run(lambda: steps(rule, ours))
    expected = steps(getattr(torch.optim, rule.__name__), theirs)
    assert {"optimizer_step"} <= set(gpu.launched)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach(), its.detach(), rtol=2e-6, atol=2e-6)
        for name in set(state[mine]) - {"step"}:
            torch.testing.assert_close(state[mine][name], expected[its][name], rtol=2e-6, atol=kept)


def test_rotary_embedding(gpu):
    q = operand(gpu, (2, 11, 3, 48), F16)
    gpu.run(lambda: check(frt.rotary_embedding, (q,), {"base": 1e4, "rotary_dim": 32}))


def test_embedding(gpu):
    tokens = gpu.guarded(torch.randint(50, (4, 11)))
    tables = [operand(gpu, (rows, 96), F32) for rows in (50, 13)]
    gpu.run(lambda: check(
        lambda *tables: frt.embedding_position(tokens, *tables), tables,
        reference=lambda *tables: reference.embedding_position(tokens, *tables),
        magnitudes=lambda args, kwargs, grad: [8 * grad.abs().sum() / 96] * 2))


@pytest.mark.parametrize("op, dtype, dim", [("mean", BF16, -1), ("max", F32, 0), ("std", F16, 0)], ids=str)
def test_sliding_window(op, dtype, dim, gpu):
    x = operand(gpu, (300, 70), dtype, 1)
    expected = x.double().unfold(dim, 9, 1)
    expected = expected.amax(-1) if op == "max" else getattr(expected, op)(-1)
    found = gpu.run(lambda: sliding_window(x, 9, op, dim=dim))
    assert_as_accurate(found, expected.to(dtype), expected)


def test_tokens(gpu):
    ids = gpu.guarded(torch.randint(0, 4, (5, 700)))
    out = gpu.run(lambda: token_preprocess(ids, pad_id=0, pad_to_multiple_of=64))
    full = F.pad(ids, (0, 4))
    mask = full != 0
    assert torch.equal(out.input_ids, full) and torch.equal(out.attention_mask, mask.long())
    assert torch.equal(out.position_ids, (mask.cumsum(-1) - 1).masked_fill(~mask, 1))
    assert torch.equal(out.labels, full.masked_fill(~mask, -100))
