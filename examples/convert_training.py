"""Training a converted model beside the original: `python examples/convert_training.py`.

Both begin with the same weights and see the same batches. On a GPU under autocast in bfloat16.
"""

import copy
import time

import torch
from torch import nn
from torch.nn import functional as F

import fusionrt as frt

STEPS, WARM = 40, 10


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 4))


def batches(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Noise, of which one channel is brighter, or none: that is the class."""
    made = []
    for _ in range(STEPS):
        y = torch.randint(4, (16,))
        bright = F.one_hot(y, 4)[:, :3, None, None]
        made.append(((torch.randn(16, 3, 16, 16) + bright).to(device), y.to(device)))
    return made


def train(model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], device: str
          ) -> tuple[float, float]:
    """The last loss, and seconds a step without the first ones."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    began = 0.0
    for k, (x, y) in enumerate(data):
        if k == WARM:
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            current = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        current.backward()
        optimizer.step()
    loss = current.item()  # waits for the GPU
    return loss, (time.perf_counter() - began) / (STEPS - WARM)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if frt.CUDA_AVAILABLE else "cpu"
    model = network().to(device)
    fast = frt.auto_convert_model(copy.deepcopy(model), (16, 3, 16, 16)).train()
    data = batches(device)
    (loss, seconds), (fast_loss, fast_seconds) = train(model, data, device), train(fast, data, device)
    print(f"Loss of the last of {STEPS} steps: {loss:.4f}, converted {fast_loss:.4f} (other dropout masks).")
    print(f"A step took {1e3 * seconds:.2f} ms, converted {1e3 * fast_seconds:.2f} ms: "
          f"{seconds / fast_seconds:.2f} times as fast.")


if __name__ == "__main__":
    main()
