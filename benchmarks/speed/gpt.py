"""A GPT: large and never run, it is the state that is saved; small and trained, it is what a save disturbs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 -- everybody's name for it

__all__ = ["Block", "Gpt"]


class Block(nn.Module):
    """One pre-norm transformer block: four matrices, eight small tensors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attention(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]  # nn.Module's call is untyped


class Gpt(nn.Module):
    """Tokens in, logits of the next token out. The head is tied to the embedding."""

    def __init__(self, *, width: int, layers: int, vocab: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 (batch, time) to logits (batch, time, vocab)."""
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.matmul(self.norm(x), self.embedding.weight.T)
