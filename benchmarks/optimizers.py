"""A step of an optimizer over the parameters of a model: 16 matrices of 4096 × 4096, BERT-base (199 tensors,
109 M elements), ResNet-50 (161 tensors, 26 M).

device_us: of a step in a CUDA graph, so without the host. wall_us: steps issued one after the other until the
device has finished them: what a training loop pays. latency_us: one step and a wait for it. The rival is
torch.optim with fused=True, after torch.nn.utils.clip_grad_norm_ where we clip; the variants of a row take
turns. Bytes: every parameter, gradient and state read once, and written once where it changes; the pass of
the norm reads the gradients once more. of_copy: those over device_us, against what a copy of as many bytes
reaches (of 4 GB where there are more). state: bytes of states against float32's.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import script
from fusionrt import optim
from fusionrt.bench import ceilings, timing
from fusionrt.bench.results import Results, why

LARGEST_COPY = 4 << 30
COLUMNS = ("model", "optimizer", "dtype", "options", "elements", "device_us", "of_copy", "wall_us",
           "latency_us", "torch_device_us", "torch_wall_us", "torch_latency_us", "vs_torch_device",
           "vs_torch_wall", "vs_torch_latency", "state", "error")


# -- the shapes of parameters ----------------------------------------------------------------------

def bert_base() -> list[tuple[int, ...]]:
    def linear(rows: int, columns: int) -> list[tuple[int, ...]]:
        return [(rows, columns), (rows,)]

    norm: list[tuple[int, ...]] = [(768,), (768,)]
    layer = [*linear(768, 768) * 4, *norm, *linear(3072, 768), *linear(768, 3072), *norm]
    return [(30522, 768), (512, 768), (2, 768), *norm, *layer * 12, *linear(768, 768)]


def resnet50() -> list[tuple[int, ...]]:
    def conv(to: int, of: int, size: int) -> list[tuple[int, ...]]:
        return [(to, of, size, size), (to,), (to,)]  # with its batch norm

    shapes, width = conv(64, 3, 7), 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            shapes += [*conv(inner, width, 1), *conv(inner, inner, 3), *conv(4 * inner, inner, 1)]
            shapes += conv(4 * inner, width, 1) if block == 0 else []
            width = 4 * inner
    return [*shapes, (1000, 2048), (1000,)]


MODELS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "16 x 4096^2": lambda: [(4096, 4096)] * 16, "BERT-base": bert_base, "ResNet-50": resnet50}


# -- what is measured ------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Variant:
    """`moved`: bytes an element. `rival`: torch.optim's class, if there is one."""

    optimizer: str
    dtype: torch.dtype
    options: dict[str, Any]
    moved: float
    rival: str | None = None
    clips: bool = False

    def ours(self, params: list[torch.nn.Parameter]) -> Any:
        return getattr(optim, self.optimizer)(params, lr=1e-4, **self.options)

    def torchs(self, params: list[torch.nn.Parameter]) -> tuple[Any, timing.Call]:
        kept = {k: v for k, v in self.options.items() if k in ("momentum", "nesterov")}
        kept |= {"capturable": True} if self.rival == "AdamW" else {}
        made = getattr(torch.optim, str(self.rival))(params, lr=1e-4, fused=True, **kept)
        if not self.clips:
            return made, made.step

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            made.step()

        return made, step


F32, BF16 = torch.float32, torch.bfloat16
VARIANTS = [
    Variant("AdamW", F32, {}, 28, "AdamW"),
    Variant("AdamW", F32, {"clip_grad_norm": 1.0}, 32, "AdamW", clips=True),
    Variant("AdamW", F32, {"state_dtype": BF16}, 20, "AdamW"),
    Variant("AdamW", F32, {"state_dtype": "8bit"}, 12 + 4 + 16 / 256, "AdamW"),
    Variant("AdamW", BF16, {}, 14, "AdamW"),
    Variant("AdamW", BF16, {"master_weights": True}, 28),
    Variant("SGD", F32, {"momentum": 0.9}, 20, "SGD"),
    Variant("Lion", F32, {}, 20),
]


def main() -> None:
    options = script.parser(__doc__).parse_args()
    script.need_gpu()
    run = script.results("optimizers-gpu", __doc__, options)
    torch.manual_seed(0)
    with timing.stream():
        for model, shapes in MODELS.items():
            for variant in VARIANTS[:2] if options.quick else VARIANTS:
                said = {"model": model, "optimizer": variant.optimizer,
                        "dtype": str(variant.dtype).removeprefix("torch."),
                        "options": " ".join(f"{k}={v}" for k, v in variant.options.items())}
                try:
                    run.add(**said, **measured(run, variant, shapes(), 5 if options.quick else 15))
                except Exception as error:
                    run.add(**said, error=why(error))
                timing.release()
    run.finish(COLUMNS)


def measured(run: Results, variant: Variant, shapes: list[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    params = made(shapes, variant.dtype)
    ours = variant.ours(params)
    calls: dict[str, timing.Call] = {"ours": ours.step}
    if variant.rival:
        calls["torch"] = variant.torchs(made(shapes, variant.dtype))[1]
    elements = sum(p.numel() for p in params)
    in_graph = max(2, min(20, 2_000_000_000 // elements))
    device = timing.replayed({name: [call] * in_graph for name, call in calls.items()}, rounds)
    wall = timing.bursts(calls, 20, rounds)
    latency = timing.latency(calls, 3 * rounds)
    moved = int(variant.moved * elements)
    ceiling = run.ceiling("copy", ceilings.copy(min(moved, LARGEST_COPY)))
    row: dict[str, Any] = {
        "elements": elements, "device_us": device["ours"].us, "spread": device["ours"].spread,
        "TB/s": moved / device["ours"].us / 1e6,
        "of_copy": round(moved / device["ours"].us / 1e6 / ceiling, 4),
        "wall_us": wall["ours"].wall.us, "host_us": wall["ours"].host.us, "latency_us": latency["ours"].us,
        "state": round(state_bytes(ours) / (4 * elements * (2 if variant.optimizer == "AdamW" else 1)), 4)}
    if variant.rival:
        row |= {"torch_device_us": device["torch"].us, "torch_wall_us": wall["torch"].wall.us,
                "torch_host_us": wall["torch"].host.us, "torch_latency_us": latency["torch"].us,
                "vs_torch_device": round(device["torch"].us / device["ours"].us, 3),
                "vs_torch_wall": round(wall["torch"].wall.us / wall["ours"].wall.us, 3),
                "vs_torch_latency": round(latency["torch"].us / latency["ours"].us, 3)}
    gc.collect()
    return row


def made(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def state_bytes(optimizer: Any) -> int:
    return sum(value.nbytes for state in optimizer.state.values() for name, value in state.items()
               if name not in ("step", "master_weight"))


if __name__ == "__main__":
    main()
