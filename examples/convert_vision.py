"""An image classifier of torchvision, with statistics: `python examples/convert_vision.py`.

Random weights and small images; for real ones `resnet18(weights="DEFAULT")` and 224 × 224. Needs torchvision.
"""

import torch
from torchvision.models import resnet18

import fusionrt as frt
from fusionrt.convert import ModelConverter, registry


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if frt.CUDA_AVAILABLE else "cpu"
    model = resnet18(num_classes=10).to(device).eval()
    registry.randomise(model)  # batch norms as of a trained model, so that validation sees them

    converter = ModelConverter()
    fast = converter.convert_model(model, (4, 3, 64, 64))
    print(converter.report())
    for name, value in converter.conversion_stats.items():
        print(f"  {name}: {value}")

    with torch.no_grad():
        print("Classes:", fast(torch.randn(4, 3, 64, 64, device=device)).argmax(1).tolist())


if __name__ == "__main__":
    main()
