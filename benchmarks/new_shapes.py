"""What a call costs that has sizes as no call before, as where each batch has a length of its own.

One after the other, sequences of so many tokens as none before (64 to 1024, in no order), of 768 columns:
microseconds until a call's result is there, the median over lengths. `first_us`: the first call of a length;
`second_us`: the second one, after those of all others; `known_us`: the sixth. Kernels were compiled for other
lengths; the few lengths for which one is yet to be compiled do not count in a median. Both: forward, and
gradients of the input and all parameters. torch.compile has `dynamic=True`. `block`: a TransformerBlock as
BERT's, of one sequence; torch is nn.TransformerEncoderLayer. `decode`: attention of one more token, 32 heads
of 128, to the keys and values of so many before it, 8 heads, in a cache.

On a GPU bfloat16, on a CPU float32 and without torch.compile.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import fusionrt as frt
from benchmarks import script
from benchmarks.transformer_block import torchs
from fusionrt.bench.results import Results, kind, why

COLUMNS = ("op", "direction", "first_us", "second_us", "known_us", "vs_eager", "vs_compile", "known_vs_eager",
           "eager_first_us", "compile_first_us", "failed")
WIDTH, SHORTEST, LONGEST = 768, 64, 1024
ROUNDS = 6

Function = Callable[[torch.Tensor], torch.Tensor]


class Op(NamedTuple):
    name: str
    ours: Function
    torchs: Function
    parameters: Sequence[torch.Tensor] = ()
    cache: torch.Tensor | None = None  # of which a call takes the first tokens: it is not differentiated


def ops(device: torch.device, dtype: torch.dtype) -> Iterator[Op]:
    def parameter(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).div_(shape[-1] ** 0.5).requires_grad_()

    weight, bias = parameter(WIDTH), parameter(WIDTH)
    up, of_up, down = parameter(4 * WIDTH, WIDTH), parameter(4 * WIDTH), parameter(WIDTH, 4 * WIDTH)
    yield Op("gelu", frt.gelu, F.gelu)
    yield Op("bias_gelu", lambda x: frt.bias_gelu(x, bias), lambda x: F.gelu(x + bias), [bias])
    yield Op("softmax", lambda x: frt.softmax(x, -1), lambda x: F.softmax(x, -1))
    yield Op("layer_norm", lambda x: frt.layer_norm(x, WIDTH, weight, bias),
             lambda x: F.layer_norm(x, (WIDTH,), weight, bias), [weight, bias])
    yield Op("linear_gelu", lambda x: frt.linear_gelu(x, up, of_up),
             lambda x: F.gelu(F.linear(x, up, of_up)), [up, of_up])
    yield Op("ffn", lambda x: frt.ffn(x, up, of_up, down, bias),
             lambda x: F.linear(F.gelu(F.linear(x, up, of_up)), down, bias), [up, of_up, down, bias])
    blocks: list[nn.Module] = [m.to(device, dtype) for m in torchs(False)]
    ours, theirs = (lambda x, block=block: block(x[None])[0] for block in blocks)
    yield Op("block", ours, theirs, [*blocks[0].parameters(), *blocks[1].parameters()])
    token = torch.randn(1, 32, 1, 128, device=device, dtype=dtype)
    yield Op("decode", lambda kv: frt.attention(token, *kv, enable_gqa=True),
             lambda kv: F.scaled_dot_product_attention(token, *kv, enable_gqa=True),
             cache=torch.randn(2, 1, 8, LONGEST, 128, device=device, dtype=dtype))


def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.compile_here()
    on_gpu = kind() == "gpu"
    run = script.results(f"new_shapes-{kind()}", __doc__, options)
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    lengths = random.Random(0).sample(range(SHORTEST, LONGEST), 20 if options.quick else 120)
    for op, direction in itertools.product(ops(device, dtype), ("forward", "both")):
        if direction == "both" and op.cache is not None:
            continue
        try:
            run.add(op=op.name, direction=direction, **measured(op, direction, lengths, run, device, dtype))
        except Exception as error:
            run.add(op=op.name, direction=direction, failed=why(error))
    run.finish(COLUMNS)


def measured(op: Op, direction: str, lengths: Sequence[int], run: Results, device: torch.device,
             dtype: torch.dtype) -> dict[str, float]:
    inputs = [torch.randn(n, WIDTH, device=device, dtype=dtype) if op.cache is None else
              op.cache[..., :n, :] for n in lengths]
    n_warm = len(inputs) // 6
    variants = {"": op.ours, "eager_": op.torchs}
    if device.type == "cuda":
        torch._dynamo.reset()
        variants["compile_"] = torch.compile(op.torchs, dynamic=True)
    calls = {name: step(function, op.parameters, direction) for name, function in variants.items()}
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    for name, call in calls.items():  # each by itself, as it goes through a batch
        for x in inputs[:n_warm]:
            call(x)
        samples[name] = [[timed(call, x, device) for x in inputs[n_warm:]] for _ in range(ROUNDS)]
    found = {}
    for name, rounds in samples.items():
        for when, k in (("first", 0), ("second", 1), ("known", ROUNDS - 1)):
            found[f"{name}{when}_us"] = round(statistics.median(rounds[k]), 1)
    for name in list(samples)[1:]:
        found[f"vs_{name[:-1]}"] = round(found[f"{name}first_us"] / found["first_us"], 3)
        found[f"known_vs_{name[:-1]}"] = round(found[f"{name}known_us"] / found["known_us"], 3)
    return found


def step(function: Function, parameters: Sequence[torch.Tensor], direction: str
         ) -> Callable[[torch.Tensor], object]:
    if direction == "forward":
        return torch.no_grad()(function)

    def both(x: torch.Tensor) -> object:
        x = x.detach().requires_grad_()
        out = function(x)
        return torch.autograd.grad(out, (x, *parameters), out.detach(), allow_unused=True)

    return both


def timed(call: Callable[[torch.Tensor], object], x: torch.Tensor, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call(x)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    main()
