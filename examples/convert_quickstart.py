"""A model of your own, converted in one line: `python examples/convert_quickstart.py`."""

import tempfile
from pathlib import Path

import torch
from torch import nn

import fusionrt as frt


class Classifier(nn.Module):
    """Norms, activations and a residual around plain linear layers."""

    def __init__(self, features: int = 256, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.norm, self.inner = nn.LayerNorm(features), nn.Linear(features, 4 * features)
        self.outer, self.head = nn.Linear(4 * features, features), nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.embed(x))
        x = x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return self.head(torch.tanh(x) * torch.sigmoid(x))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if frt.CUDA_AVAILABLE else "cpu"
    model, x = Classifier().to(device).eval(), torch.randn(64, 256, device=device)

    fast = frt.auto_convert_model(model, example_inputs=x)  # same class, same parameters, validated
    print(frt.convert.conversion_report(fast))

    difference, speedup = frt.validate_optimization(model, fast, x)
    print(f"Largest difference {difference:.1e}, {speedup:.2f} times as fast.")

    with tempfile.TemporaryDirectory() as folder:
        weights, _ = frt.convert.save_converted(fast, Path(folder) / "classifier")
        again = frt.convert.load_converted(Classifier().to(device).eval(), weights)
        print("Loaded and converted again, it gives the same:", torch.equal(again(x), fast(x)))


if __name__ == "__main__":
    main()
