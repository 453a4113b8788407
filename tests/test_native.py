"""Plans in machine code (fusionrt/runtime/native.py), with a driver that only writes down what it is told."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from checking import needs_nvrtc
from torch.nn import functional as F

import fusionrt as frt
from fusionrt import settling, steps
from fusionrt.op import OPERATORS, Operator
from fusionrt.random import Taking
from fusionrt.rehearsal import collecting
from fusionrt.runtime import device, launch, native, plan_text, scratch, source
from fusionrt.runtime.plan import ARRIVED, Allocated, Launched, Plan
from fusionrt.runtime.source import Field, Params

LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(device._LaunchConfig), *[ctypes.c_void_p] * 3)
CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
FIELDS = [*(Field(f"float* {name}", "Q") for name in ("x", "y", "out", "sum")), Field("double d", "d"),
          Field("float f", "f"), Field("unsigned n", "I")]
PACKED = ("p_a0", "p_a1", "out.data_ptr()", "total.data_ptr()", "a2", "a3", 77)


@pytest.mark.parametrize(("stem", "structs"), [
    ("call", {"Input": native._Input, "Number": native._Number, "Output": native._Output,
              "Place": native._Place, "Launch": native._Launch, "Plan": native._Plan}),
    ("steps", {"Steps": steps._Table, "Step": steps._Native})], ids=["call", "steps"])
def test_structs_in_machine_code_are_pythons(stem: str, structs: dict[str, type[ctypes.Structure]]) -> None:
    text = re.sub(r";.*|\s", "", source.template(f"{stem}.ll"))
    spelled = {ctypes.py_object: "ptr", ctypes.c_void_p: "ptr", ctypes.c_uint32: "i32",
               ctypes.c_uint64: "i64", ctypes.c_int64: "i64",
               ctypes.c_uint32 * steps.GIVEN: f"[{steps.GIVEN}xi32]"}
    for name, struct_type in structs.items():
        types = ",".join(spelled[kind] for _, kind in struct_type._fields_)
        assert f"%{name}=type{{{types}}}" in text


class Driver:
    """Of launches: kernel, configuration (ending in how many attributes) and parameters."""

    def __init__(self, params: Params) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.status = self.captured = self.stream = 0
        self.refused = 1  # launch from which on `status` is given
        self.failing, self.memory = False, (ctypes.c_char * 4096)()

        def launch(config: Any, kernel: int, pointers: int, extra: None) -> int:
            parameters = ctypes.c_void_p.from_address(pointers).value
            assert parameters is not None and extra is None
            of = {name: getattr(config[0], name) for name, _ in config[0]._fields_}
            self.attributes = of.pop("attributes")
            self.launches.append((kernel, *of.values(), params.packer.unpack(
                ctypes.string_at(parameters, params.packer.size))))
            return self.status if len(self.launches) >= self.refused else 0

        def capturing(stream: int, status: Any) -> int:
            status[0] = self.captured
            return 0

        self.functions = LAUNCH(launch), CAPTURING(capturing)

    def addresses(self) -> list[int | None]:
        return [ctypes.cast(f, ctypes.c_void_p).value for f in self.functions]

    def empty(self, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        if self.failing:
            raise MemoryError
        return torch.empty_strided(shape, strides, dtype=dtype)

    def scratch(self, device: int, stream: int, thread: int) -> int:
        assert (device, thread) == (3, 7)
        return ctypes.addressof(self.memory) + 64 * stream

    def current(self, device: int) -> int:
        assert device == 3
        return self.stream


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(Params(FIELDS))
    monkeypatch.setattr(native, "_driver", made.addresses)
    yield made


def settled(driver: Driver, packed: tuple[str, ...] = PACKED, taking: Taking | None = None,
            returned: tuple[str, ...] = ("out", "total"), more: tuple[Launched, ...] = (),
            still: tuple[Callable[[], int], int] | None = None, also: tuple[str, ...] = ()
            ) -> Callable[..., Any]:
    outputs = [Allocated("out", (4, 2), (1, 4), torch.float32), Allocated("total", (), (), torch.float64)]
    launched = Launched(1234, 5, 2, 64, 1024, Params(FIELDS), packed, 2)
    functions = {"empty": driver.empty, "stream": driver.current, "scratch": driver.scratch}
    arguments = ["a0", "a1", "a2", "a3", *also]
    return native.machine_code(Plan(lambda *args: ("general", *args), arguments, outputs, returned,
                               [launched, *more], 3, 7, functions, taking, still))


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 2), torch.randn(2)


def test_launches_what_was_planned(driver: Driver) -> None:
    x, y = tensors()
    run = settled(driver)

    out, total = run(x, y, 0.1, 2)

    assert out.shape == (4, 2) and out.stride() == (1, 4) and out.dtype == torch.float32
    assert total.shape == () and total.dtype == torch.float64
    assert driver.launches == [(1234, 5, 2, 1, 64, 1, 1, 1024, None, 0, (
        x.data_ptr(), y.data_ptr(), out.data_ptr(), total.data_ptr(), 0.1, 2.0, 77))]
    run(x, y, True, 1e300)  # no float32: what C makes of it
    assert driver.launches[1][-1][4:6] == (1.0, float("inf"))
    run(x, y, -1.0, -1)     # which is also how C tells of an error
    assert driver.launches[2][-1][4:6] == (-1.0, -1.0)


def test_asks_whether_a_number_is_still_the_same(driver: Driver) -> None:
    """Which device is the current one, how many threads there are."""
    now = [3]
    args, run = (*tensors(), 1.0, 1.0), settled(driver, still=(lambda: now[0], 3))
    run(*args)
    assert len(driver.launches) == 1
    now[0] = 2
    assert run(*args)[0] == "general"
    now.clear()  # it raises
    assert run(*args)[0] == "general" and len(driver.launches) == 1


def test_one_output_comes_alone(driver: Driver) -> None:
    x, y = tensors()
    params = Params(FIELDS[:3])
    run = native.machine_code(Plan(
        lambda *args: "general", ["a0", "a1"], [Allocated("out", (2,), (1,), torch.int8)], ["out"],
        [Launched(1, 1, 1, 32, 0, params, PACKED[:3], 1)], 3, 7,
        {"empty": driver.empty, "stream": driver.current}))

    out = run(x, y)

    assert isinstance(out, torch.Tensor) and out.dtype == torch.int8


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", ["out", "total"])
def test_what_is_for_the_kernel_alone_is_not_given(driver: Driver, monkeypatch: pytest.MonkeyPatch, name: str,
                                                   kept: bool) -> None:
    """It is the same for all calls of a stream, unless it is large."""
    monkeypatch.setattr(scratch, "BYTES", 32 if kept else 7)
    args: tuple[Any, ...] = (*tensors(), 1.0, 1.0)
    run = settled(driver, returned=(name,))
    outs = [run(*args), run(*args)]
    assert [tuple(out.shape) for out in outs] == [(4, 2) if name == "out" else ()] * 2
    told = [launch[-1][2:4][name == "total"] for launch in driver.launches]
    alone = [launch[-1][2:4][name == "out"] for launch in driver.launches]
    assert told == [out.data_ptr() for out in outs]
    driver.stream = 4096
    if kept:
        assert alone[0] == alone[1] and run(*args)[0] == "general"
    else:
        assert run(*args).shape == outs[0].shape


def test_outputs_come_in_any_order(driver: Driver) -> None:
    total, out = settled(driver, returned=("total", "out"))(*tensors(), 1.0, 1.0)
    assert out.shape == (4, 2) and total.shape == ()


def test_several_launches(driver: Driver) -> None:
    """The second one may begin before the first has ended; it reads what that one leaves, from an address
    on."""
    x, y = tensors()
    begins_early = device._attribute(device._PROGRAMMATIC_STREAM_SERIALIZATION, 1)
    second = Launched(77, 3, 1, 32, 0, Params(FIELDS), (
        "p_total + 48", "out.data_ptr()", "p_a1", "total.data_ptr()", "a3", "a2", 78), 2, begins_early)
    run = settled(driver, returned=("out",), more=(second,))

    out = run(x, y, 0.5, 2.0)

    (_, *_, first), (kernel, *config, then) = driver.launches
    assert (kernel, *config) == (77, 3, 1, 1, 32, 1, 1, 0, None, 1)
    assert driver.attributes == ctypes.addressof(begins_early)
    assert first == (x.data_ptr(), y.data_ptr(), out.data_ptr(), first[3], 0.5, 2.0, 77)
    assert then == (first[3] + 48, out.data_ptr(), y.data_ptr(), first[3], 2.0, 0.5, 78)
    driver.status, driver.refused = 1, 4  # the second launch of the next call
    assert run(x, y, 0.5, 2.0)[0] == "general" and len(driver.launches) == 4


def test_where_values_stand() -> None:
    params = Params([Field("Map map", "128s"), Field("int* out[2]", "2Q"), Field("double d", "d"),
                     Field("float f", "f"), Field("unsigned n[2]", "2I")])
    values = b"m" * 128, 1, 2, 3.0, 1e300, 5, 6
    packed = params.packer.pack(*params.converted(*values))
    places = params.places()
    assert [code for code, _ in places] == [*"sQQdfII"]
    assert [struct.unpack_from("=" + code, packed, place)[0] for code, place in places[1:]] == [
        1, 2, 3.0, float("inf"), 5, 6]


def test_a_later_output_may_have_the_name_of_an_earlier_one(driver: Driver) -> None:
    params = Params(FIELDS[:2])
    parts = [Allocated("partials", (size,), (1,), torch.float32) for size in (8, 16)]
    launches = [Launched(k, 1, 1, 32, 0, params, ("p_a0", "p_partials"), k) for k in (1, 2)]
    run = native.machine_code(Plan(lambda *args: "general", ["a0"], parts, [], launches, 3, 7,
                              {"empty": driver.empty, "stream": driver.current, "scratch": driver.scratch}))

    assert run(torch.randn(4)) == ()
    assert len({parameters[1] for *_, parameters in driver.launches}) == 2


@pytest.mark.parametrize("what", ["misaligned", "more arguments", "no number", "captured", "no memory",
                                  "refused"])
def test_the_rest_is_left_to_python(driver: Driver, what: str) -> None:
    x, y = tensors()
    args: tuple[Any, ...] = (x, y, 1.0, 2.0)
    if what == "misaligned":
        args = (torch.randn(9)[1:].view(4, 2), *args[1:])
    elif what == "more arguments":
        args = (*args, None)
    elif what == "no number":
        args = (*args[:3], "two")
    driver.stream = driver.captured = int(what == "captured")
    driver.failing, driver.status = what == "no memory", int(what == "refused")

    result = settled(driver)(*args)

    assert result[0] == "general" and all(a is b for a, b in zip(result[1:], args, strict=True))
    assert len(driver.launches) == (what == "refused")


def test_another_stream(driver: Driver) -> None:
    driver.stream = 4096
    settled(driver)(*tensors(), 1.0, 1.0)
    assert driver.launches[0][8] == 4096


def test_blocks_count_themselves_in_memory_of_the_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch
                                                         ) -> None:
    """In that of the one on which the plan was settled; other streams are Python's."""
    monkeypatch.setattr(native.arrivals, "of_stream", lambda device, stream: 1000 * device + stream)
    args: tuple[Any, ...] = (*tensors(), 1.0, 1.0)
    driver.stream = 64
    run = settled(driver, (*PACKED[:6], ARRIVED.format(device=3)))

    run(*args)
    driver.stream = 0

    assert driver.launches[0][-1][6] == 3064
    assert run(*args)[0] == "general" and len(driver.launches) == 1


def test_what_cannot_be_stays_in_python(driver: Driver) -> None:
    assert settled(driver, (*PACKED[:6], "rng[0]"))()[0] == "general"
    assert settled(driver, (*PACKED[:6], "p_b0"))()[0] == "general"


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gradients(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
    y = function(*(a.requires_grad_() for a in args))
    torch.autograd.grad(y, args, torch.empty_like(y))


@needs_nvrtc
@pytest.mark.parametrize(("call", "is_machine_code"), [
    (lambda: frt.add_relu(empty(64, 64), empty(64, 64)), True),
    (lambda: frt.sum(empty(512, 512)), True),  # the parts of all blocks are memory for the kernel alone
    (lambda: frt.mse_loss(empty(64, 64), empty(64, 64)), True),
    (lambda: frt.cross_entropy(empty(64, 64), empty(64, dtype=torch.int64)), True),  # as is that of the host
    (lambda: frt.sum(empty(6, 256, 8).permute(2, 0, 1), 1), False),  # its result is put in order afterwards
    (lambda: frt.sum(empty(1 << 20, 64), 0), True),  # of two launches
    (lambda: gradients(frt.tanh, empty(64, 64)), True),
    (lambda: gradients(frt.bias_gelu, empty(64, 64), empty(64)), True),
    (lambda: gradients(lambda x, w, b: frt.layer_norm(x, 64, w, b), empty(512, 64), empty(64), empty(64)),
     True),
    (lambda: gradients(lambda x, w: frt.rms_norm(x, 4096, w), empty(8192, 4096), empty(4096)), True),
])
def test_which_plans_may_be_machine_code(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any],
                                         is_machine_code: bool) -> None:
    """Those with nothing after their launches: what would follow is Python's, and is not called then."""
    found, real = [], Operator.compile

    def compile(self: Operator, args: Any, shape: Any, problem: Any, outputs: Any, alignment: int) -> Any:
        found.append(launch.Call(problem, outputs, len(args), 0))
        return real(self, args, shape, problem, outputs, alignment)

    monkeypatch.setattr(Operator, "compile", compile)
    answers = {"function": 1, "allow": None, "has_dependent_launches": True, "multiprocessors": 132,
               "has_clusters": True, "clusters_at_a_time": 0, "device_count": 2}
    attribute = SimpleNamespace(attribute=(ctypes.c_uint * 18)())
    monkeypatch.setattr(device, "DependentLaunch", lambda *_: attribute)
    for name, answer in answers.items():
        monkeypatch.setattr(device, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(plan_text, "empty_strided", lambda *a: torch.empty_strided(*a[:2], dtype=a[2]))
    monkeypatch.setattr(native, "_driver", lambda: (1, 1))
    monkeypatch.setattr(native.arrivals, "of_stream", lambda *_: 1)
    monkeypatch.setattr(scratch, "piece", lambda *_: 4096)
    monkeypatch.setattr(device, "raw_stream", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    with collecting("cuda"):
        call()
    run = settling.settled_now(launch._write(found[-1], 16, lambda *args: None))
    assert isinstance(run, BuiltinFunctionType) == is_machine_code


@pytest.mark.gpu
@pytest.mark.parametrize("make", [
    lambda: (frt.sum, torch.randn(512, 512, device="cuda")),
    lambda: (functools.partial(frt.sum, dim=1), torch.randn(6, 256, 8, device="cuda").permute(2, 0, 1)),
    lambda: (functools.partial(frt.mean, dim=1, keepdim=True), torch.randn(8, 6, 256, device="cuda")),
    lambda: (lambda x: frt.mse_loss(x, x + 1), torch.randn(64, 64, device="cuda")),
])
def test_reductions_stay_as_they_were_when_they_settle(make: Callable[[], Any]) -> None:
    function, x = make()
    first = function(x)
    for _ in range(settling.SETTLED_AFTER + 20):
        last = function(x)
    assert torch.equal(last, first) and (last.shape, last.stride()) == (first.shape, first.stride())


class Generator:
    """That is used under its lock only."""

    def __init__(self) -> None:
        self.lock, self.offset, self.refuses = threading.Lock(), 40, ""

    def taking(self) -> Taking:
        return Taking(self.lock.acquire, self.lock.release, self.get_offset, self.set_offset, self.seed, 8)

    def check(self, asked: str) -> None:
        if asked == self.refuses:
            raise RuntimeError

    def seed(self) -> int:
        self.check("seed")
        return -1 % 2**64

    def get_offset(self) -> int:
        assert self.lock.locked()
        self.check("get_offset")
        return self.offset

    def set_offset(self, offset: int) -> None:
        assert self.lock.locked()
        self.check("set_offset")
        self.offset = offset


def test_draws(driver: Driver) -> None:
    x, y = tensors()
    generator = Generator()
    run = settled(driver, ("rng[0]", "rng[1]", "out.data_ptr()", "total.data_ptr()", "a2", "a3", 7),
                  generator.taking())
    for offset in (10, 12):
        run(x, y, 1.0, 1.0)
        assert driver.launches.pop()[-1][:2] == (2**64 - 1, offset)
    assert generator.offset == 56 and not generator.lock.locked()
    driver.stream = driver.captured = 1
    assert run(x, y, 1.0, 1.0)[0] == "general" and generator.offset == 56
    driver.captured = 0
    for generator.refuses in ("seed", "get_offset", "set_offset"):
        assert run(x, y, 1.0, 1.0)[0] == "general" and generator.offset == 56
        assert not generator.lock.locked() and not driver.launches
    generator.refuses = ""
    run(x, y, 1.0, 1.0)
    assert driver.launches.pop()[-1][:2] == (2**64 - 1, 14)


def test_given_random_numbers(driver: Driver) -> None:
    x, y = tensors()
    run = settled(driver, ("rng[0]", "rng[1]", "out.data_ptr()", "state", "a2", "a3", 7), also=("rng",))
    for seed, offset in ((3, 5), (2**64 - 1, 2**63), (-1, 2**64)):
        run(x, y, 1.0, 1.0, (seed, offset, None))
        launched = driver.launches.pop()[-1]
        assert launched[:2] == (seed % 2**64, offset % 2**64) and launched[3] == 0
    for rng in ((0, 0, y), None, (1, 2)):  # those of a captured graph, and what is none
        assert run(x, y, 1.0, 1.0, rng) == ("general", x, y, 1.0, 1.0, rng) and not driver.launches
    assert run(x, y, 1.0, 1.0) == ("general", x, y, 1.0, 1.0)


def test_nothing_leaks(driver: Driver, only_new_objects: None) -> None:
    x, y = tensors()
    run = settled(driver)
    number = 123456.5
    for status in (0, 1):  # given, undone
        driver.status = status
        gc.collect()
        before = counts(x, y, number)
        for _ in range(100):
            run(x, y, number, number)
        driver.launches.clear()
        gc.collect()
        assert all(after <= count for after, count in zip(counts(x, y, number), before, strict=True))


def counts(*objects: Any) -> list[int]:
    """Of references and of tensors; others may drop some meanwhile."""
    return [*(sys.getrefcount(o) for o in (*objects, torch.float32, (4, 2))),
            sum(type(o) is torch.Tensor for o in gc.get_objects())]


def test_owns_what_it_reads(driver: Driver) -> None:
    x, y = tensors()
    runs = [settled(driver) for _ in range(50)]
    gc.collect()
    junk = [struct.pack("64Q", *range(64)) for _ in range(1000)]
    for run in runs:
        run(x, y, 1.0, 1.0)
    assert len(junk) == 1000 and len({launch[-1][:2] for launch in driver.launches}) == 1


def test_settles_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sooner where something else has settled, and LLVM is there."""
    monkeypatch.setattr(settling, "_has_settled", [])
    for enough in (settling.SETTLED_AFTER, settling.SETTLED_LATER):
        def run() -> str:
            return "Python"

        assert settling.settle_when_due(run) is run  # which is all there is
        settling.prepare_settling(run, lambda: "settled")
        assert [settling.settle_when_due(run) for _ in range(enough)] == [None] * enough
        assert settling.settle_when_due(run) == settling.settled_now(run) == "settled"


def test_nothing_settles_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it allocates would be the graph's."""
    def run() -> str:
        return "Python"

    settling.prepare_settling(run, lambda: "settled")
    vars(run)["calls"] = settling.SETTLED_AFTER
    monkeypatch.setattr(settling, "is_capturing", lambda: True)
    assert settling.settle_when_due(run) is None
    monkeypatch.undo()
    assert settling.settle_when_due(run) == "settled"


# --- on a GPU -------------------------------------------------------------------------------------

@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "SETTLED_AFTER", 1)


@pytest.mark.gpu
def test_calls_that_are_made_again() -> None:
    x, y = torch.randn(64, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    expected = torch.relu(x + y)
    for _ in range(settling.SETTLED_AFTER + 3):
        torch.testing.assert_close(frt.add_relu(x, y), expected, rtol=0, atol=0)
    site = site_of(frt.add_relu)
    assert isinstance(site[-1], BuiltinFunctionType)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = frt.add_relu(x, y)
    stream.synchronize()
    torch.testing.assert_close(other, expected, rtol=0, atol=0)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = frt.add_relu(x, y)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(captured, torch.relu(x + y), rtol=0, atol=0)
    assert site_of(frt.add_relu) is site

    odd = torch.randn(64 * 256 + 1, device="cuda")[1:].view(64, 256)
    torch.testing.assert_close(frt.add_relu(odd, y), torch.relu(odd + y), rtol=0, atol=0)


@pytest.mark.gpu
def test_numbers_and_several_outputs(soon: None) -> None:
    x, w = torch.randn(32, 256, device="cuda"), torch.randn(256, device="cuda")
    for _ in range(4):
        torch.testing.assert_close(frt.quantize_int8(x, 0.05, 3.0), frt.quantize_int8.reference(x, 0.05, 3.0),
                                   rtol=0, atol=0)
        torch.testing.assert_close(frt.mish_scale(x, 0.5), frt.mish_scale.reference(x, 0.5))
    for op, in_the_place_of_a_tensor in ((frt.quantize_int8, False), (frt.mish_scale, True)):
        is_of_all, _, run = site_of(op)
        assert is_of_all == in_the_place_of_a_tensor and isinstance(run, BuiltinFunctionType)
    for slope in (0.1, 0.2, 1, 0.4):
        torch.testing.assert_close(frt.leaky_relu(x, slope), F.leaky_relu(x, slope))
    for eps in (1e-5, 1e-3, 1e-2, 1):
        out, mean, rstd = frt.layer_norm(x, 256, w, w, eps, return_stats=True)
        torch.testing.assert_close(out, F.layer_norm(x, (256,), w, w, eps))
        torch.testing.assert_close(mean.flatten(), x.mean(-1))
        torch.testing.assert_close(rstd.flatten(), (x.var(-1, correction=0) + eps).rsqrt())


@pytest.mark.gpu
def test_of_a_recorded_call(soon: None) -> None:
    x = torch.randn(32, 256, device="cuda", requires_grad=True)
    y = torch.randn(32, 256, device="cuda")
    for _ in range(4):
        grad, = torch.autograd.grad(frt.add_relu(x, y).sum(), x)
        torch.testing.assert_close(grad, (x + y > 0).float())
        with torch.no_grad():
            torch.testing.assert_close(frt.add_relu(x, y), torch.relu(x + y), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 4096])
def test_of_a_backward_pass(soon: None, rows: int) -> None:
    """Of which the first launch leaves parts of the weight's gradient, the second one adds them."""
    x = torch.randn(rows, 512, device="cuda", requires_grad=True)
    w, b = (torch.randn(512, device="cuda", requires_grad=True) for _ in range(2))
    g = torch.randn(rows, 512, device="cuda")

    def grads() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(frt.layer_norm(x, 512, w, b), (x, w, b), g)

    first = grads()
    for _ in range(6):
        last = grads()
    for one, other in zip(first, last, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    recorded = [r for o in OPERATORS.values() if o.name == "layer_norm"
                for r in o.local.recordings.values() if r.is_settled]
    plans = [plan for r in recorded for plan in (r.plan, *(
        called for known in r.passes for called in known.steps.called))]
    assert len(plans) >= 2 and all(isinstance(plan, BuiltinFunctionType) for plan in plans)


@pytest.mark.gpu
def test_masks_are_those_of_other_calls(soon: None) -> None:
    x = torch.randn(512, 1024, device="cuda")
    masks = []
    for _ in range(2):
        torch.manual_seed(5)
        masks.append([frt.gelu_dropout(x, 0.5) for _ in range(4)])  # the first ones by Python
    for first, second in zip(*masks, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert all(not torch.equal(masks[0][0], other) for other in masks[0][1:])
    assert isinstance(site_of(frt.gelu_dropout)[-1], BuiltinFunctionType)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = frt.gelu_dropout(x, 0.5)
    graph.replay()
    before = captured.clone()
    graph.replay()
    assert not torch.equal(before, captured)


def site_of(op: Any) -> Any:
    """What its entry function remembers of the last call."""
    return op.__globals__["_frt_local"].site
