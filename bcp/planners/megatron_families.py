"""What Megatron-LM and Hugging Face call the tensors of GPT-like models; how they cut them is in megatron_names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "BUFFERS",
    "DECODER",
    "EXPERTS",
    "EXPERT_PARTS",
    "EXPERT_STACKS",
    "FAMILIES",
    "GATED",
    "OBJECTS",
    "OUTPUT",
    "QKV",
    "QKV_PARTS",
    "WORDS",
    "Family",
]

DECODER = "decoder.layers"
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""What old versions of transformers saved, and is computed."""
OBJECTS = ("._extra_state", "rng_state/")
"""What Megatron and ``MegatronRng`` save beside the weights, and Hugging Face's models have not."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names of one sort of model.

    Attributes:
        layers: what stands in front of a layer's number.
        outside: (Megatron's name, name) of what is outside of the layers; several have several names.
        inside: the same within a layer; the name of a module, or the whole name of a tensor.
        transposed: modules whose weights have inputs in front.
    """

    layers: str
    outside: Sequence[tuple[str, str]]
    inside: Sequence[tuple[str, str]]
    transposed: Sequence[str] = ()


WORDS, POSITIONS, OUTPUT = "embedding.word_embeddings", "embedding.position_embeddings", "output_layer"
QKV_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QKV, FC1, EXPERTS = "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.experts.experts"


def _norms(attention: str, mlp: str) -> list[tuple[str, str]]:
    """Name a layer's two norms: Transformer Engine fuses them with what follows, and the names are the same without."""
    fused = [
        (f"{module}.layer_norm_{leaf}", f"{norm}.{leaf}")
        for module, norm in ((QKV, attention), (FC1, mlp))
        for leaf in ("weight", "bias")
    ]
    return [*fused, ("input_layernorm", attention), ("pre_mlp_layernorm", mlp)]


FAMILIES = {
    "llama": Family(
        "model.layers",
        [(WORDS, "model.embed_tokens"), ("decoder.final_layernorm", "model.norm"), (OUTPUT, "lm_head")],
        [
            *_norms("input_layernorm", "post_attention_layernorm"),
            ("self_attention.linear_proj", "self_attn.o_proj"),
            ("self_attention.q_layernorm", "self_attn.q_norm"),
            ("self_attention.k_layernorm", "self_attn.k_norm"),
            ("mlp.linear_fc2", "mlp.down_proj"),
            ("mlp.router", "mlp.gate"),
            ("mlp.router", "block_sparse_moe.gate"),
            ("mlp.shared_experts.linear_fc2", "mlp.shared_expert.down_proj"),
            ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
        ],
    ),
    "gpt_neox": Family(
        "gpt_neox.layers",
        [
            (WORDS, "gpt_neox.embed_in"),
            ("decoder.final_layernorm", "gpt_neox.final_layer_norm"),
            (OUTPUT, "embed_out"),
            (OUTPUT, "lm_head"),
        ],
        [
            *_norms("input_layernorm", "post_attention_layernorm"),
            (QKV, "attention.query_key_value"),
            ("self_attention.linear_proj", "attention.dense"),
            (FC1, "mlp.dense_h_to_4h"),
            ("mlp.linear_fc2", "mlp.dense_4h_to_h"),
        ],
    ),
    "gpt2": Family(
        "transformer.h",
        [
            (WORDS, "transformer.wte"),
            (POSITIONS, "transformer.wpe"),
            ("decoder.final_layernorm", "transformer.ln_f"),
            (OUTPUT, "lm_head"),
        ],
        [
            *_norms("ln_1", "ln_2"),
            ("self_attention.linear_proj", "attn.c_proj"),
            (FC1, "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        ],
        transposed=("self_attention.linear_proj", FC1, "mlp.linear_fc2"),
    ),
}

# For linear_fc1 of SwiGLU: where the two halves are. The names of experts have a number between.
GATED = {
    FC1: ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
}
EXPERT_PARTS = {  # by what stands in front of an expert's number, and Megatron's linear: the names behind the number
    "mlp.experts": {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)},
    "block_sparse_moe.experts": {"linear_fc1": ("w1", "w3"), "linear_fc2": ("w2",)},
}
# By Megatron's linear: what transformers 5 calls all experts in one tensor, and how many parts of it an expert is.
EXPERT_STACKS = {"linear_fc1": ("mlp.experts.gate_up_proj", 2), "linear_fc2": ("mlp.experts.down_proj", 1)}
