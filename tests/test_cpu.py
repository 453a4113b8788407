"""The CPU runtime in real processes: threads, forks, workers, a cache; always the same numbers."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checking import assert_same_bits
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import reference, settling
from fusionrt.cpu import compiler, pages, team, threads
from fusionrt.cpu.kernel import Kernel
from fusionrt.runtime import cache

ROOT = Path(__file__).parents[1]
LARGE = (512, 1024)  # elements enough for several threads
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="posix")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered."""
    monkeypatch.setenv("FUSIONRT_CACHE_DIR", str(tmp_path / "kernels"))
    for module, name in ((cache, "_memory"), (cache, "_warned"), (compiler, "_loaded")):
        monkeypatch.setattr(module, name, {})
    return tmp_path / "kernels"


def scaled(factor):
    """An operator that nobody has called yet."""
    @frt.fuse
    def scaled(x, bias):
        return frt.sigmoid(x + bias) * factor

    return scaled


def inputs(*shape):
    return (torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True))


def everything(op, args):
    """Result and gradients."""
    out = op(*args)
    return out.detach(), *torch.autograd.grad(out.square().sum(), args)


def expected(factor, args):
    return everything(lambda x, bias: torch.sigmoid(x + bias) * factor, args)


def in_child(work):
    """Fork, and give the child's exit status; a child that hangs is killed."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# --- threads


def test_the_number_of_threads_does_not_change_a_bit():
    args = inputs(*LARGE)
    before, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3, 8):
            torch.set_num_threads(n)
            torch.manual_seed(0)
            found.append((*everything(frt.bias_gelu, args), *everything(frt.mish_scale, (
                args[0], torch.tensor(0.5, requires_grad=True))), frt.gelu_dropout(args[0], 0.5)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert_same_bits(a, b)
    for a, b in zip(found[0][:3], everything(reference.bias_gelu, args), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_eight_threads_with_different_ops(two_threads):
    args = inputs(*LARGE)
    names = ["bias_gelu", "bias_relu", "bias_silu", "add_sigmoid", "mul_tanh", "add_relu"]
    alone = {name: everything(getattr(frt, name), args) for name in names}
    jobs = names * 8
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: everything(getattr(frt, name), args), jobs))
    for name, one in zip(jobs, found, strict=True):
        for a, b in zip(one, alone[name], strict=True):
            assert_same_bits(a, b)


def test_threads_meet_at_a_cold_op(folder):
    """All call it at once for the first time; it is compiled once."""
    op, args, built = scaled(3), inputs(33, 65), []
    build = compiler.build

    def counted(text, acc, name):
        built.append(text)
        return build(text, acc, name)

    barrier = threading.Barrier(8)

    def work(_):
        barrier.wait()
        return everything(op, args)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(compiler, "build", counted)
        found = list(pool.map(work, range(8)))
    assert len(built) == len(set(built)) == 2  # forward, backward
    for one in found:
        assert_close(one, expected(3, args))


def test_a_kernel_is_compiled_under_numbas_lock(monkeypatch):
    """A warm-up compiles several at a time; Numba's contexts do not bear two threads."""
    from numba.core import compiler as of_numba
    from numba.core.compiler_lock import global_compiler_lock
    compile_extra, held = of_numba.compile_extra, []

    def noting(*args, **kwargs):
        held.append(global_compiler_lock.is_locked())
        return compile_extra(*args, **kwargs)

    monkeypatch.setattr(of_numba, "compile_extra", noting)
    compiler.build("def kernel(pointers, integers, scalars, start, stop): pass", "float32", "nothing")
    assert held == [True]


def test_a_kernel_of_its_own_text(two_threads):
    """Knows by names what it is given, in several parts as well."""
    body = "    for i in range(start, stop):\n        x[offset + i] = plus_one(x[offset + i] * factor)"
    made = Kernel("scale", body, pointers={"x": "float32"}, integers=("offset",), scalars=("factor",),
                  before="@inline\ndef plus_one(v):\n    return v + ONE")
    for size in (8, team.SERIAL_BELOW):
        x = torch.randn(size + 3)
        expected = torch.cat([x[:3], x[3:] * 0.5 + 1])
        made(x.device, size, made.given(factor=0.5, x=x.data_ptr(), offset=3))
        assert torch.equal(x, expected)
    with pytest.raises(TypeError, match="'factor'"):
        made.given(x=0, offset=0)
    with pytest.raises(TypeError, match="'size'"):
        made.given(x=0, offset=0, factor=1.0, size=0)


def test_the_pool_grows_and_serves_nested_callers(two_threads):
    x = torch.randn(LARGE)

    def work(n):
        torch.set_num_threads(n)
        return frt.relu(x)

    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, x.relu()) for y in pool.map(work, (2, 3, 2, 4, 2, 5)))


def test_small_calls_stay_in_their_thread(monkeypatch):
    monkeypatch.setattr(threads, "_executor", None)  # nobody may ask for others
    monkeypatch.setattr(team.Job, "__call__", None)
    x = torch.randn(team.SERIAL_BELOW - 1)
    assert torch.equal(frt.relu(x), x.relu())


@pytest.mark.parametrize("size", [threads.SERIAL_BELOW, threads.SERIAL_BELOW + 1,
                                  2 * threads.SERIAL_BELOW - 1, 3 * threads.GRAIN * 7 * 8 + 5])
def test_every_element_belongs_to_one_part(size):
    before = torch.get_num_threads()
    try:
        for n in (1, 2, 3, 7):
            torch.set_num_threads(n)
            parts = []
            threads.run(lambda a, b, parts=parts: parts.append((a, b)), size, True, threads.GRAIN)
            parts.sort()
            assert [a for a, _ in parts] == [0, *(b for _, b in parts[:-1])]
            assert parts[-1][1] == size
            assert all(a % threads.GRAIN == 0 for a, _ in parts)
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_part_reaches_the_caller(two_threads):
    def task(start, stop):
        if start:
            raise MemoryError("part")

    with pytest.raises(MemoryError, match="part"):
        threads.run(task, 4 * threads.GRAIN, True, threads.GRAIN)


# --- forks


@posix
@pytest.mark.parametrize("calls", [1, 4])
def test_a_forked_child_computes(two_threads, monkeypatch, calls):
    """Where torch's own parallel ops hang, as GNU OpenMP's threads did not survive the fork, and
    its autograd refuses to run once it has used a GPU: both kernels, without autograd; of several calls by
    machine code."""
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)
    args, grad_output = [t.detach() for t in inputs(*LARGE)], torch.randn(LARGE)
    gradient = frt.ops.pointwise._bias_gelu.operator.gradient((True, True), (True,))

    def both():
        return frt.bias_gelu(*args), *gradient(*args, grad_output)

    alone = [t.numpy() for t in [both() for _ in range(calls)][-1]]  # the parent has a pool

    def work():
        assert all((a.numpy() == b).all() for a, b in zip(both(), alone, strict=True))
        assert in_child(both) == 0  # a child of a child

    assert in_child(work) == 0


@posix
def test_a_child_forked_during_a_compilation_computes(folder):
    """The thread that holds the lock does not exist in the child."""
    op, args = scaled(5), inputs(33, 65)
    everything(op, args)
    held, done = threading.Event(), threading.Event()

    def holder():
        with compiler._lock():
            held.set()
            done.wait()

    thread = threading.Thread(target=holder)
    thread.start()
    held.wait()
    try:
        with torch.no_grad():
            assert in_child(lambda: assert_close(op(*(a[:8] for a in args[:1]), args[1]),
                                                 torch.sigmoid(args[0][:8] + args[1]) * 5)) == 0
    finally:
        done.set()
        thread.join()


COMPILING_BESIDE_FORKS = """
import os, signal, threading, time, torch, fusionrt as frt
x, over = torch.ones(1000), threading.Event()
frt.relu(x)

def compiles():
    k = 0
    while not over.is_set():
        frt.fuse(lambda a, k=k: a * (k + 0.5), name=f"times{k}")(x)
        k += 1

def first_calls(k):
    signal.alarm(60)
    loaded = frt.relu(x.double() - 2)                          # from the disk, as of the second child
    compiled = frt.fuse(lambda a: a - k - 0.25, name="less")(x)
    os._exit(0 if loaded.eq(0).all() and compiled.eq(0.75 - k).all() else 1)

thread = threading.Thread(target=compiles)
thread.start()
codes = []
for k in range(6):
    time.sleep(0.05)
    child = os.fork()
    if not child:
        first_calls(k)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
thread.join()
print(*codes)
"""


@posix
def test_children_forked_while_a_thread_compiles_compute(tmp_path):
    """It may have been in LLVM or in Numba, each of which has a lock of its own."""
    assert warm(COMPILING_BESIDE_FORKS, tmp_path) == "0 0 0 0 0 0"


FIRST_IMPORTED_IN_THE_CHILD = """
import os, signal, sys, torch
torch.set_num_threads(2)
x = torch.linspace(-3, 3, 1 << 20).view(4, -1).exp()  # torch's threads, which the child has not
{parent}
child = os.fork()
if not child:
    signal.alarm(60)
    import fusionrt.data
    found = fusionrt.data.sliding_window(x, 16, "max")
    os._exit(0 if found[0, 0] == x[0, 15] and torch.get_num_threads() == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@posix
@pytest.mark.parametrize("parent", ["", "import fusionrt", "import fusionrt.data.window"])
def test_a_child_that_is_the_first_to_compute(parent, tmp_path):
    """Who was not imported yet has seen no fork."""
    assert warm(FIRST_IMPORTED_IN_THE_CHILD.format(parent=parent), tmp_path) == "0"


@posix
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit", "clip_grad_norm": 1.0},
                                     {"master_weights": True}], ids=str)
def test_an_optimizer_in_a_forked_child(options, two_threads):
    """torch's own operators make the states and read checkpoints."""
    params = [torch.nn.Parameter(torch.linspace(-3, 3, 1 << 18).bfloat16()) for _ in range(2)]
    for param in params:
        param.grad = param.detach().cos()

    def train(param):
        optimizer = frt.optim.AdamW([param], 0.1, **options)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        return param.detach().view(torch.int16).numpy()

    alone = train(params[0])  # the parent has threads

    def work():
        assert (train(params[1]) == alone).all()
        assert torch.get_num_threads() == 2

    assert in_child(work) == 0


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.linspace(-3, 3, 1 << 18).view(-1, 64) + i
        return frt.bias_gelu(x, x[0]).sum(0)


@posix
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(context, two_threads):
    data = Rows()
    alone = torch.stack([data[i] for i in range(8)])
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, timeout=120,
                                         multiprocessing_context=context)
    assert torch.equal(torch.cat(list(loader)), alone)


# --- the cache


def warm(code, folder, **env):
    """Run code in a process of its own; it prints."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "FUSIONRT_CACHE_DIR": str(folder)} | env
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True,
                         timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


CALL = """
import sys, torch, fusionrt as frt
x, b = torch.linspace(-3, 3, 64).view(4, 16).requires_grad_(), torch.ones(16, requires_grad=True)
y = frt.bias_gelu(x, b)
y.sum().backward()
torch.testing.assert_close(y, torch.nn.functional.gelu(x + b))
print(*(name for name in ("numba", "cupy", "cupy_backends") if name in sys.modules))
"""


def test_a_warm_process_imports_no_compiler(folder):
    assert warm(CALL, folder) == "numba"
    assert warm(CALL, folder, FUSIONRT_DISABLE_JIT="1") == ""
    assert len(list(folder.glob("*.frt"))) == 2


def test_without_compilation_a_missing_kernel_is_named(folder, monkeypatch):
    monkeypatch.setenv("FUSIONRT_DISABLE_JIT", "1")
    with pytest.raises(frt.MissingKernelError, match=r"scaled \(cpu\): FUSIONRT_DISABLE_JIT is"):
        scaled(7)(*inputs(3, 5))


def test_a_cache_that_cannot_be_written_costs_a_warning(folder, monkeypatch):
    folder.write_text("a file, not a folder")
    op, args = scaled(11), inputs(3, 5)
    with pytest.warns(frt.CacheWarning, match="kernels live in memory only"):
        assert_close(op(*args), torch.sigmoid(args[0] + args[1]) * 11)
    assert_close(everything(op, args), expected(11, args))
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "build", None)  # what memory holds is not built again
    assert_close(scaled(11)(*args), torch.sigmoid(args[0] + args[1]) * 11)


def test_code_for_another_processor_is_not_used(folder, monkeypatch):
    args = inputs(3, 5)
    scaled(13)(*args)
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "target", lambda: "skylake-avx512 avx512f")
    monkeypatch.setattr(cache, "decode", None)  # no entry may be read
    assert_close(scaled(13)(*args), torch.sigmoid(args[0] + args[1]) * 13)
    assert len(list(folder.iterdir())) == 2


def test_code_of_another_toolchain_is_not_used(folder, monkeypatch):
    args = inputs(3, 5)
    scaled(13)(*args)
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "toolchain", lambda: "numba 0.1")
    scaled(13)(*args)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda blob: blob[:-1], lambda blob: b"",
                                    lambda blob: blob[:-9] + bytes([blob[-9] ^ 1]) + blob[-8:]])
def test_a_damaged_entry_is_built_again(folder, monkeypatch, damage):
    args = inputs(3, 5)
    scaled(17)(*args)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    monkeypatch.setattr(compiler, "_loaded", {})
    with pytest.warns(frt.CacheWarning, match="is damaged"):
        assert_close(scaled(17)(*args), torch.sigmoid(args[0] + args[1]) * 17)
    assert cache.verify() == []
    assert len(path.read_bytes()) == len(whole)


def test_processes_that_start_together_share_one_compilation(folder):
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lambda _: warm(CALL, folder), range(2)))) == 2
    assert len(list(folder.glob("*.frt"))) == 2


# --- memory


def test_empty_tensors_need_no_kernel(monkeypatch):
    monkeypatch.setattr(compiler, "function", None)
    op = scaled(19)
    for shape in ((0, 4), (3, 0), (0,)):
        args = inputs(*shape)
        out, *grads = everything(op, args)
        assert out.shape == shape
        assert all(torch.equal(g, torch.zeros_like(a)) for g, a in zip(grads, args, strict=True))


def test_nothing_is_written_beside_the_result():
    """Outputs that end anywhere in a page, with a neighbour behind them."""
    for n in (1, 7, 8, 9, 31, 33, 1023, 1025, threads.GRAIN * 3 + 1):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.randn(n + 2, dtype=dtype)
            before = x.clone()
            y = frt.gelu(x[1:-1])
            assert torch.equal(x, before)
            assert_close(y, torch.nn.functional.gelu(x[1:-1]))


def huge_pages():
    """Bytes of this process that lie in pages of 2 MiB."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"AnonHugePages:\s+(\d+) kB", text)[1])


TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not TRANSPARENT.exists() or "[never]" in TRANSPARENT.read_text(), reason="huge pages")
def test_large_results_lie_in_huge_pages():
    x = torch.randn(pages.LARGE // 4 + 5)
    before = huge_pages()
    y = frt.relu(x)
    assert huge_pages() - before >= pages.LARGE // 2  # those at the ends may be small
    assert torch.equal(y, x.relu())


@pytest.mark.covering(1)
@pytest.mark.parametrize("columns", [1, 7, 1023, 1025, 2600])
@pytest.mark.parametrize("rows", [1, 5, 8, 17, 130])
def test_sums_of_blocks_of_columns_and_groups_of_rows(rows, columns):
    """A gradient of a bias: blocks of 1024 columns, eight rows in float32 before they are in float64."""
    args = inputs(rows, columns)
    for dtype, rtol, atol in ((torch.float32, 1e-5, 2e-5), (torch.bfloat16, 8e-3, 2e-4),
                              (torch.float64, 1e-12, 1e-12)):
        x, bias = (a.detach().to(dtype).requires_grad_() for a in args)
        grad = torch.randn(rows, columns).to(dtype)
        found = torch.autograd.grad(frt.bias_gelu(x, bias), (x, bias), grad)
        wide = [a.detach().double().requires_grad_() for a in (x, bias)]
        truth = torch.autograd.grad(reference.bias_gelu(*wide), wide, grad.double())
        for one, exact in zip(found, truth, strict=True):
            assert_close(one, exact.to(dtype), rtol=rtol, atol=atol)


def test_sums_of_rows_with_dimensions_between_and_random_numbers():
    x = torch.randn(3, 5, 4, 1100, requires_grad=True)
    middle = torch.randn(3, 1, 4, 1100, requires_grad=True)  # its sums are others from row to row
    grad = torch.randn(3, 5, 4, 1100)
    found = torch.autograd.grad(frt.bias_gelu(x, middle), (x, middle), grad)
    truth = torch.autograd.grad(reference.bias_gelu(x, middle), (x, middle), grad)
    for one, exact in zip(found, truth, strict=True):
        assert_close(one, exact, rtol=1e-5, atol=2e-5)
    bias, residual = torch.randn(1100, requires_grad=True), torch.randn_like(x)
    torch.manual_seed(0)
    y = frt.bias_dropout_add(x, bias, residual, 0.5)
    (bias_grad,) = torch.autograd.grad(y, bias, grad)
    kept = (y - residual).detach() != 0
    assert_close(bias_grad, (2 * grad * kept).sum((0, 1, 2)), rtol=1e-5, atol=2e-5)


def test_calls_leave_no_memory_behind():
    import gc
    import resource
    args = inputs(512, 512)
    everything(frt.bias_gelu, args)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        everything(frt.bias_gelu, args)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000  # KB; a leak of one result a call would be 200 MB


def test_nothing_runs_on_when_a_part_has_failed():
    """The others write to memory that the caller is about to give back."""
    running, before = [], torch.get_num_threads()

    def task(start, stop):
        if start == 0:
            raise KeyboardInterrupt
        running.append(start)
        time.sleep(0.2)
        running.remove(start)

    torch.set_num_threads(4)
    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run(task, 400, True, 1)
        assert not running
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_of_numbas(tmp_path):
    code = "import torch, fusionrt as frt; frt.fuse(lambda a: a * 3 + 1.25)(torch.ones(3))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env={
        **os.environ, "NUMBA_DISABLE_JIT": "1", "FUSIONRT_CACHE_DIR": str(tmp_path)})
    assert run.returncode and "fused: NUMBA_DISABLE_JIT is set" in run.stderr


@pytest.mark.parametrize("variable", ["NUMBA_OPT", "NUMBA_CPU_NAME"])
def test_keys_know_numbas_options(variable, monkeypatch):
    before = compiler.toolchain()
    compiler.toolchain.cache_clear()
    monkeypatch.setenv(variable, "1")
    try:
        assert compiler.toolchain() == f"{before} {variable}=1"
    finally:
        compiler.toolchain.cache_clear()
