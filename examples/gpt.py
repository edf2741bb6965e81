"""A small byte-level GPT, and how it is spread over ranks. Nothing in here knows about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812 -- everybody's name for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model."""

    vocab: int = 256
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4


class Attention(nn.Module):
    """Causal self-attention with separate projections, so that tensor parallelism can cut each by heads."""

    def __init__(self, config: Config) -> None:
        """Make the four projections."""
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape. Under tensor parallelism a rank sees its own heads only."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]  # nn.Module's call is untyped


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: Config) -> None:
        """Make attention and MLP, each behind its norm."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]  # nn.Module's call is untyped


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. The head is tied to the embedding."""

    def __init__(self, config: Config) -> None:
        """Make the layers, with GPT-2's initialisation."""
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 (batch, time) to logits (batch, time, vocab)."""
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # nn.Module's call is untyped


def parallelise(model: GPT, *, dp: int, tp: int) -> DeviceMesh:
    """Cut the model in place: linears over ``tp`` ranks by heads, then everything over ``dp`` ranks with FSDP2.

    Returns:
        The mesh, with dimensions ``dp`` and ``tp``.

    """
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        if tp > 1:
            plan = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
            parallelize_module(
                block,
                mesh["tp"],
                {**plan, "attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()},
            )
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return mesh
