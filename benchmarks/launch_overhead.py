"""What a call costs the host: small tensors (32 × 128, float32), where nothing else counts.

Bursts of 300 calls (100 with a backward pass), fewer than the launch queue holds: microseconds
until they are issued. Latency: one call and a wait for its result. The variants of a group take
turns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

import fusionrt as frt
from benchmarks import script
from fusionrt.bench import timing
from fusionrt.bench.results import Results, why

Calls = dict[str, timing.Call]
EMPTY = 'extern "C" __global__ void empty() {}'
COLUMNS = ("group", "call", "host_us", "spread", "wall_us", "latency_us", "vs_torch.add")


def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.need_gpu()
    script.compile_here()
    run = script.results("launch_overhead-gpu", __doc__, options)
    torch.manual_seed(0)
    a, b = (torch.randn(32, 128, device="cuda") for _ in range(2))
    bias = torch.randn(128, device="cuda")
    groups = {"forward": (_forward(run, a, b, bias), timing.BURST),
              "shapes in turn": (_in_turn(), timing.BURST),
              "recording": (dict(_recording(a, b, bias)), timing.BURST),
              "forward+backward": (dict(_both(a, b, bias)), timing.BURST // 3),
              "parts": (_parts(a), timing.BURST)}
    rounds = 5 if options.quick else 21
    for group, (calls, burst) in groups.items():
        calls = {"torch.add": lambda: torch.add(a, b)} | calls  # of each: a host's speed changes
        bursts = timing.bursts(calls, burst, rounds)
        waits = timing.latency(calls, 10 if options.quick else 70) if group != "parts" else {}
        unit = bursts["torch.add"].host.us
        for call, (host, wall) in bursts.items():
            run.add(group=group, call=call, host_us=host.us, spread=host.spread, wall_us=wall.us,
                    latency_us=waits[call].us if waits else None,
                    **{"vs_torch.add": round(host.us / unit, 3)})
    run.finish(COLUMNS)


def _forward(run: Results, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Calls:
    calls: Calls = {
        "relu(add) eager": lambda: torch.relu(torch.add(a, b)),
        "fusionrt.add_relu": lambda: frt.add_relu(a, b),
        "gelu(x + bias) eager": lambda: F.gelu(a + bias),
        "fusionrt.bias_gelu": lambda: frt.bias_gelu(a, bias),
        "dropout(gelu(x)) eager": lambda: F.dropout(F.gelu(a), 0.1),
        "fusionrt.gelu_dropout": lambda: frt.gelu_dropout(a, 0.1),
        "quantize_int8 eager": lambda: frt.quantize_int8.reference(a, 0.05, 3.0),
        "fusionrt.quantize_int8": lambda: frt.quantize_int8(a, 0.05, 3.0)}

    def add(name: str, make: Callable[[], timing.Call]) -> None:
        try:
            made = make()
            made()
            calls[name] = made
        except Exception as error:
            run.note(f"{name} is absent: {why(error)}")

    def compiled() -> timing.Call:
        function = torch.compile(lambda x, y: torch.relu(x + y), dynamic=False)
        return lambda: function(a, b)

    def triton() -> timing.Call:
        from benchmarks.triton_add_relu import add_relu
        return lambda: add_relu(a, b)

    add("relu(add) torch.compile", compiled)
    add("add_relu in Triton", triton)
    return calls


def _in_turn() -> Calls:
    """As a model calls an op: each time for another of four shapes than before."""
    shapes = itertools.product((16, 32), (64, 128))
    pairs = [torch.randn(2, *shape, device="cuda").unbind() for shape in shapes]
    functions = {"torch.add": torch.add,
                 "relu(add) eager": lambda x, y: torch.relu(torch.add(x, y)),
                 "fusionrt.add_relu": frt.add_relu,
                 "layer_norm eager": lambda x, _: F.layer_norm(x, x.shape[-1:]),
                 "fusionrt.layer_norm": lambda x, _: frt.layer_norm(x, x.shape[-1:])}

    def turning(function: Callable[..., torch.Tensor]) -> timing.Call:
        each = itertools.cycle(pairs)
        return lambda: function(*next(each))

    return {name: turning(function) for name, function in functions.items()}


def _pairs(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor
           ) -> Iterator[tuple[str, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]:
    x, y, z = (t.detach().requires_grad_() for t in (a, b, bias))
    yield "relu(add) eager", lambda x, y: torch.relu(torch.add(x, y)), (x, y)
    yield "fusionrt.add_relu", frt.add_relu, (x, y)
    yield "gelu(x + bias) eager", lambda x, z: F.gelu(x + z), (x, z)
    yield "fusionrt.bias_gelu", frt.bias_gelu, (x, z)
    yield "dropout(gelu(x)) eager", lambda x: F.dropout(F.gelu(x), 0.1), (x,)
    yield "fusionrt.gelu_dropout", lambda x: frt.gelu_dropout(x, 0.1), (x,)


def _recording(*tensors: torch.Tensor) -> Iterator[tuple[str, timing.Call]]:
    for name, function, args in _pairs(*tensors):
        yield name, lambda f=function, args=args: f(*args)


def _both(*tensors: torch.Tensor) -> Iterator[tuple[str, timing.Call]]:
    seed = torch.randn_like(tensors[0])
    for name, function, args in _pairs(*tensors):
        yield name, lambda f=function, args=args: torch.autograd.grad(f(*args), args, seed)


def _parts(a: torch.Tensor) -> Calls:
    """What a call of ours is made of."""
    from fusionrt.runtime import device
    index = torch.cuda.current_device()
    device.bind_context(index)
    empty, start = device.function(EMPTY, "empty", index, "empty"), device.driver().launchKernel
    return {"empty_like": lambda: torch.empty_like(a),
            "driver launch of an empty kernel": lambda: start(
                empty, 1, 1, 1, 32, 1, 1, 0, device.raw_stream(index), 0, 0),
            "current stream": lambda: device.raw_stream(index),
            "data_ptr": a.data_ptr,
            "nothing": lambda: None}


if __name__ == "__main__":
    main()
