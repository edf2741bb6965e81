"""A small Llama, or Mixtral, in plain torch, with the names, the layouts and the arithmetic of transformers'."""

from __future__ import annotations

import torch
from megatron_gpt import Net
from torch import nn
from torch.nn import functional

__all__ = ["Llama"]

HIDDEN, HEADS, GROUPS, SIZE, FFN = 32, 8, 4, 4, 48
"""As in ``megatron_gpt.config_of``."""

EPS, BASE = 1e-5, 10000.0
"""Of the norms and of the rotary embedding: what Megatron takes where it is told nothing."""


class Llama(nn.Module):
    """Gives logits of token ids; (batch, tokens) to (batch, tokens, vocabulary)."""

    def __init__(self, net: Net, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Model(net)
        self.lm_head = linear(HIDDEN, net.vocab)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.model(ids))
        return logits

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all tokens; labels are those of ``megatron_gpt.run``."""
        return functional.cross_entropy(self(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


class Model(nn.Module):
    """Everything but the output layer."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(net.vocab, HIDDEN)
        self.layers = nn.ModuleList(Layer(net.experts) for _ in range(net.layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        normed: torch.Tensor = self.norm(x)
        return normed


class Layer(nn.Module):
    """One layer."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        if experts:
            self.block_sparse_moe = Experts(experts)
        else:
            self.mlp = Mlp(("gate_proj", "up_proj", "down_proj"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        mlp = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        out: torch.Tensor = x + mlp(self.post_attention_layernorm(x))
        return out


class Attention(nn.Module):
    """Causal attention, in which neighbouring heads share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(HIDDEN, HEADS * SIZE)
        self.k_proj = linear(HIDDEN, GROUPS * SIZE)
        self.v_proj = linear(HIDDEN, GROUPS * SIZE)
        self.o_proj = linear(HEADS * SIZE, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        heads = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        out: torch.Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """SwiGLU; gate, up and down have the names that they are given."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        for name, (inputs, outputs) in zip(names, ((HIDDEN, FFN), (HIDDEN, FFN), (FFN, HIDDEN)), strict=True):
            self.add_module(name, linear(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        out: torch.Tensor = down(functional.silu(gate(x)) * up(x))
        return out


class Experts(nn.Module):
    """Mixtral's two of several experts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = linear(HIDDEN, count)
        self.experts = nn.ModuleList(Mlp(("w1", "w3", "w2")) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = self.gate(x).topk(2)
        weights = torch.zeros(*x.shape[:2], len(self.experts)).scatter(-1, chosen, best.softmax(-1))
        return torch.einsum("bte,betd->btd", weights, torch.stack([expert(x) for expert in self.experts], dim=1))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate by position: (batch, heads, tokens, size); elements i and i + size/2 are a pair."""
    frequencies = BASE ** (-torch.arange(0, SIZE, 2) / SIZE)
    angles = torch.outer(torch.arange(x.shape[2]), frequencies).repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)
