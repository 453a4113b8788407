"""A language model of transformers, with keyword inputs: `python examples/convert_language.py`.

A small BERT with random weights; for real ones `AutoModel.from_pretrained(name)`, or in a shell
`fusionrt convert --models bert-base-uncased`. Needs transformers.
"""

import torch
from transformers import BertConfig, BertModel

import fusionrt as frt


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if frt.CUDA_AVAILABLE else "cpu"
    config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
    model = BertModel(config).to(device).eval()
    batch = {"input_ids": torch.randint(1000, config.vocab_size, (2, 64), device=device),
             "attention_mask": torch.ones(2, 64, dtype=torch.int64, device=device)}

    fast = frt.auto_convert_model(model, example_inputs=batch)
    print(frt.convert.conversion_report(fast))

    with torch.no_grad():
        found = fast(**batch)
    print(type(found).__name__, tuple(found.last_hidden_state.shape))
    difference, speedup = frt.validate_optimization(model, fast, batch)
    print(f"Largest difference {difference:.1e}, {speedup:.2f} times as fast.")


if __name__ == "__main__":
    main()
