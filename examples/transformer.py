"""Trains a small language model of characters on its own source, and lets it write some.

    python examples/transformer.py --steps 200

Every layer is one of `fusionrt.nn`, the step one of `fusionrt.optim`; on a GPU under autocast to bfloat16.
The first steps compile kernels; later runs take them from the cache.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import fusionrt as frt

WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 64, 4, 2, 64, 16


class LanguageModel(nn.Module):

    def __init__(self, characters: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = frt.nn.EmbeddingPosition(characters, WIDTH, dropout=dropout)
        self.blocks = nn.ModuleList(frt.nn.TransformerBlock(
            WIDTH, HEADS, 2 * WIDTH, dropout, "silu", batch_first=True, norm_first=True, bias=False,
            norm="rms_norm", gated=True, causal=True, rotary=True, num_kv_heads=2) for _ in range(BLOCKS))
        self.norm = frt.nn.FusedRMSNorm(WIDTH)
        self.loss = frt.nn.FusedLinearCrossEntropyLoss()
        nn.init.normal_(self.head, std=0.02)

    @property
    def head(self) -> nn.Parameter:
        """The words' embedding, once more."""
        return self.embed.word_embeddings.weight

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of each token but the first, given those before it."""
        return self.loss(self.head, self.hidden(tokens[:, :-1]), tokens[:, 1:])

    @torch.no_grad()
    def continued(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """LENGTH tokens, and `count` more that are drawn."""
        for _ in range(count):
            logits = nn.functional.linear(self.hidden(tokens[None, -LENGTH:])[0, -1], self.head)
            tokens = torch.cat([tokens, torch.multinomial(logits.float().softmax(-1), 1)])
        return tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--characters", type=int, default=80, help="to write at the end")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = Path(__file__).read_text()
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(c) for c in text], device=device)
    model = LanguageModel(len(alphabet)).to(device)
    optimizer = frt.optim.AdamW(model.parameters(), lr=3e-3, clip_grad_norm=1.0)
    start = time.perf_counter()
    for step in range(options.steps):
        starts = torch.randint(len(codes) - LENGTH, (BATCH, 1), device=device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(codes[starts + torch.arange(LENGTH, device=device)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}  {time.perf_counter() - start:5.1f} s", flush=True)
    written = model.eval().continued(codes[:LENGTH], options.characters)[LENGTH:]
    print("".join(alphabet[code] for code in written.tolist()))


if __name__ == "__main__":
    main()
