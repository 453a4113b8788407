"""A transformer block, `fusionrt.nn.TransformerBlock`, against eager torch and torch.compile, in bfloat16.

`bert`: 768 columns, 12 heads, post-norm, gelu, dropout 0.1, 16 sequences of 512, and `gpt`: the same with
pre-norm and causal; torch is torch.nn.TransformerEncoderLayer, whose own fused path eager takes in inference
of `bert`. `llama`: 1024 columns, 16 heads over 4 of keys, rotary, RMS norm, SwiGLU of 2816 columns, causal, 4
sequences of 2048; torch is the same formulas written out, with tables of cosines, F.rms_norm and
scaled_dot_product_attention.

forward: inference, device time in a CUDA graph. training: forward and backward pass with gradients of the
input and every parameter, issued one by one, as a training loop does. Variants take turns, on one input, as
the layer before has just written it. launches: kernels, copies and fills on the device a call, by torch's
profiler. memory: peak of a call beyond parameters and input. deviation: of the result without dropout, the
worst against float64, over the largest value. TFLOP/s: matrix products and attention (half of it where
causal), twice that again for the backward pass; of_matmul: over what a product of 8192 x 8192 matrices
reaches in this run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import script
from fusionrt.bench import memory, profile, sampling, timing
from fusionrt.bench.results import Results, why
from fusionrt.nn import TransformerBlock

COLUMNS = ("model", "direction", "us", "eager_us", "compile_us", "vs_eager", "vs_compile", "launches",
           "eager_launches", "compile_launches", "memory_MB", "eager_memory_MB", "compile_memory_MB",
           "deviation", "eager_deviation", "TFLOP/s", "of_matmul", "spread", "failed")
DTYPE = torch.bfloat16


class Model(NamedTuple):
    name: str
    shape: tuple[int, int, int]         # sequences, length, columns
    make: Callable[[], tuple[nn.Module, nn.Module]]   # ours and torch's, of the same parameters
    flops: float                        # of a forward pass


# -- torch's side ----------------------------------------------------------------------------------

class Causal(nn.Module):
    """A torch.nn layer with the causal mask that it wants to see."""

    def __init__(self, layer: nn.TransformerEncoderLayer, length: int) -> None:
        super().__init__()
        self.layer = layer
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x, self.mask, is_causal=True)
        return out


class Llama(nn.Module):
    """The formulas of a TransformerBlock with rms_norm, rotary, gated, num_kv_heads, written out."""

    def __init__(self, block: TransformerBlock, length: int) -> None:
        super().__init__()
        self.block = block
        attention = block.self_attn
        self.sizes = [attention.embed_dim, *[attention.num_kv_heads * attention.head_dim] * 2]
        half = attention.head_dim // 2
        frequencies = 10000.0 ** -(torch.arange(half) / half)
        angles = torch.arange(length)[:, None] * frequencies.repeat(2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b = self.block
        x = x + self.attended(F.rms_norm(x, x.shape[-1:], b.norm1.weight, b.norm1.eps))  # type: ignore[union-attr]
        y = F.rms_norm(x, x.shape[-1:], b.norm2.weight, b.norm2.eps)  # type: ignore[union-attr]
        gate, up = b.linear1(y).chunk(2, -1)
        out: torch.Tensor = x + b.linear2(F.silu(gate) * up)
        return out

    def attended(self, y: torch.Tensor) -> torch.Tensor:
        attention = self.block.self_attn
        parts = F.linear(y, attention.in_proj_weight, attention.in_proj_bias).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for t in parts)
        q, k = (self.turned(t) for t in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        found: torch.Tensor = attention.out_proj(out.transpose(1, 2).flatten(2))
        return found

    def turned(self, t: torch.Tensor) -> torch.Tensor:
        first, second = t.chunk(2, -1)
        return t * self.cos.to(t.dtype) + torch.cat([-second, first], -1) * self.sin.to(t.dtype)


# -- models ----------------------------------------------------------------------------------------

def flops(shape: tuple[int, int, int], hidden: int, matrices: int, causal: bool, kv: float = 1.0) -> float:
    """`matrices` of columns x hidden; `kv`: heads of keys over those of queries."""
    n, length, columns = shape
    products = 2 * n * length * columns * (columns * (2 + 2 * kv) + matrices * hidden)
    return products + 4 * n * length * length * columns * (0.5 if causal else 1)


def torchs(causal: bool) -> tuple[nn.Module, nn.Module]:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.1, F.gelu, batch_first=True, norm_first=causal)
    ours = TransformerBlock.from_torch(layer)
    ours.self_attn.causal = causal
    return ours, Causal(layer, 512) if causal else layer


def llama() -> tuple[nn.Module, nn.Module]:
    block = TransformerBlock(1024, 16, 2816, 0.0, "silu", 1e-6, True, True, False, norm="rms_norm",
                             gated=True, causal=True, rotary=True, num_kv_heads=4)
    return block, Llama(block, 2048)


BERT, LLAMA = (16, 512, 768), (4, 2048, 1024)
MODELS = (
    Model("bert", BERT, lambda: torchs(False), flops(BERT, 3072, 2, False)),
    Model("gpt", BERT, lambda: torchs(True), flops(BERT, 3072, 2, True)),
    Model("llama", LLAMA, llama, flops(LLAMA, 2816, 3, True, 0.25)),
)


# -- measuring -------------------------------------------------------------------------------------

def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.need_gpu()
    run = script.results("transformer_block-gpu", __doc__, options)
    torch.manual_seed(0)
    with timing.stream():
        for model in MODELS[::2] if options.quick else MODELS:
            for direction in ("forward", "training"):
                try:
                    run.add(model=model.name, direction=direction, **measured(run, model, direction))
                except Exception as error:
                    run.add(model=model.name, direction=direction, failed=why(error))
                timing.release()
    run.finish(COLUMNS)


def measured(run: Results, model: Model, direction: str) -> dict[str, Any]:
    pair = [module.to("cuda", DTYPE).train(direction == "training") for module in model.make()]
    modules = dict(zip(("", "eager_"), pair, strict=True))
    modules["compile_"] = torch.compile(copy.deepcopy(pair[1]))
    x = torch.randn(model.shape, device="cuda").to(DTYPE).requires_grad_(direction == "training")
    calls = {name: call(module, x) for name, module in modules.items()}
    row: dict[str, Any] = {}
    for name in list(calls):
        try:
            calls[name]()
        except Exception as error:
            row["failed"] = f"{name}: {why(error)}"
            del calls[name]
    lists = {name: [one] * 10 for name, one in calls.items()}
    times = (timing.replayed if direction == "forward" else sampling.issued)(lists, 15)
    device = torch.device("cuda")
    for name, one in calls.items():
        row |= {f"{name}us": times[name].us, f"{name}spread": times[name].spread,
                f"{name}launches": profile.launches(one, device),
                f"{name}memory_MB": round(memory.measure(one, device).peak / 2**20, 1)}
    row |= {f"vs_{name}": round(times[f"{name}_"].us / times[""].us, 3) for name in ("eager", "compile")
            if f"{name}_" in times}
    rate = model.flops * (3 if direction == "training" else 1) / times[""].us / 1e6
    ceiling = run.ceiling("matmul", matmul_rate())
    return row | {"TFLOP/s": round(rate, 1), "of_matmul": round(rate / ceiling, 3), **errors(pair, x)}


def call(module: nn.Module, x: torch.Tensor) -> timing.Call:
    if not x.requires_grad:
        return lambda: torch.no_grad()(module)(x)
    leaves = [x, *module.parameters()]
    seed = torch.randn_like(x)
    return lambda: torch.autograd.grad(module(x), leaves, seed)


@torch.no_grad()
def errors(pair: list[nn.Module], x: torch.Tensor) -> dict[str, float]:
    """Of ours and of eager, on one sequence; the truth is torch's module in float64."""
    few = x[:1].detach()
    exact = copy.deepcopy(pair[1]).eval().double()(few.double())
    found = [(module.eval()(few).double() - exact).abs().max() / exact.abs().max() for module in pair]
    return {"deviation": round(found[0].item(), 6), "eager_deviation": round(found[1].item(), 6)}


def matmul_rate(n: int = 8192) -> dict[str, float]:
    a, b = (torch.randn(n, n, device="cuda").to(DTYPE) for _ in range(2))
    us = sampling.issued({"": [lambda: a @ b] * 4})[""].us
    return {"n": n, "us": us, "TFLOP/s": round(2 * n**3 / us / 1e6, 1)}


if __name__ == "__main__":
    main()
