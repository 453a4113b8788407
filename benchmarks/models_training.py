"""A training step of ResNet-50 (64 images of 224 × 224) and BERT-base (32 × 128 tokens).

Autocast in bfloat16, cross-entropy, gradients, and torch's own fused optimizer on every side. us: wall time
of a step among steps that follow each other. MB: memory at the peak of a step, with what stays between
steps: parameters, gradients, states of the optimizer, and all that CUDA graphs keep. Variants take turns on
models of their own, which begin with the same weights; loss is that of the last step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import script
from benchmarks.models import COMPILED, release, walls, warm
from fusionrt.bench import memory, profile, suite
from fusionrt.bench.results import Row, why
from fusionrt.convert import stats
from fusionrt.convert.model import auto_convert_model, record_of
from fusionrt.convert.registry import MODELS, build, missing

COLUMNS = ("model", "batch", "us", "vs_eager", "vs_compile", "spread", "eager_us", "MB", "of_eager_MB",
           "kernels", "eager_kernels", "loss", "eager_loss", "replaced", "undone", "error")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "resnet50": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "bert-base-uncased": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True)}
BATCHES = {"resnet50": 64, "bert-base-uncased": 32}


class Classifier(nn.Module):
    """BERT with a head on its first token."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(768, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(input_ids=x).last_hidden_state[:, 0])


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--only", default=",".join(BATCHES), help="default: %(default)s")
    parser.add_argument("--against", default="compile", help="besides eager; default: %(default)s")
    options = parser.parse_args()
    script.need_gpu()
    names = script.names(options.only)
    run = script.results("models_training-gpu", __doc__, options, len(names) < len(BATCHES))
    for name in names:
        if missing(MODELS[name].package):
            run.absent(name, f"{MODELS[name].package} is not installed")
            continue
        batch = 8 if options.quick else BATCHES[name]
        try:
            run.add(model=name, batch=batch, **measured(name, batch, script.names(options.against)))
        except Exception as error:
            run.add(model=name, batch=batch, error=why(error))
        release()
    run.finish(COLUMNS)


def measured(name: str, batch: int, against: list[str]) -> Row:
    torch.manual_seed(0)
    model, x = made(name, batch)
    target = torch.randint(10, (batch,), device="cuda")
    steps: dict[str, Step] = {}
    row: Row = {}
    device = torch.device("cuda")
    before = stats.held_by_graphs(device)
    fast = auto_convert_model(copy.deepcopy(model), example_inputs=(x,)).train()
    modules = {suite.OURS: fast, "eager": model,
               **{v: torch.compile(copy.deepcopy(model), mode=COMPILED[v], dynamic=False) for v in against}}
    for variant, module in modules.items():
        try:
            step = Step(module, OPTIMIZERS[name], x, target)
            warm(step)
            steps[variant] = step
        except Exception as error:
            row[f"{variant}_error"] = why(error)
    row |= suite.ratios(walls(steps, device))
    graphs = {suite.OURS: stats.held_by_graphs(device) - before}  # torch.compile has none unless told to
    peaks = {v: memory.measure(step, device).peak + max(0, graphs.get(v, 0)) + step.kept(not graphs.get(v))
             for v, step in steps.items()}
    row |= {"MB": round(peaks[suite.OURS] / 1e6, 1),
            "of_eager_MB": round(peaks[suite.OURS] / peaks["eager"], 4),
            **{f"{v}_MB": round(peak / 1e6, 1) for v, peak in peaks.items() if v != suite.OURS}}
    launches: Mapping[str, float | None] = {v: profile.launches(step, device) for v, step in steps.items()}
    record = record_of(fast)
    return row | {"kernels": launches[suite.OURS], "eager_kernels": launches["eager"],
                  "loss": steps[suite.OURS].loss.item(), "eager_loss": steps["eager"].loss.item(),
                  "replaced": sum(record.counts.values()), "counts": dict(record.counts),
                  "undone": len(record.rolled_back), "undone_what": record.rolled_back}


def made(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    model = build(name, random_init=True)
    if name == "resnet50":
        return model.cuda().train(), torch.randn(batch, 3, 224, 224, device="cuda")
    return Classifier(model).cuda().train(), torch.randint(30522, (batch, 128), device="cuda")


class Step:
    """Called, it trains the module by one step."""

    def __init__(self, module: nn.Module, make: Callable[[Any], torch.optim.Optimizer], x: torch.Tensor,
                 target: torch.Tensor) -> None:
        self.module, self.optimizer, self.x, self.target = module, make(module.parameters()), x, target
        self.loss = torch.zeros(())

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.module(self.x), self.target)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def kept(self, gradients: bool) -> int:
        """Bytes that stay between steps; without `gradients` that lie in the memory of CUDA graphs."""
        parameters = list(self.module.parameters())
        states = [v for state in self.optimizer.state.values() for v in state.values()
                  if isinstance(v, torch.Tensor)]
        grads = [p.grad for p in parameters if p.grad is not None and gradients]
        return sum(t.nbytes for t in [*parameters, *grads, *states])


if __name__ == "__main__":
    main()
