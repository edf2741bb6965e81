"""Megatron-LM's names and layouts of GPT-like models, and those of Hugging Face: one loads into the other.

Megatron's names are those of its planner: the keys of ``sharded_state_dict`` with the numbers of layers and experts in
them. Differences besides names:

- qkv: Megatron has one matrix, and for each query group the rows of its query heads, then of its key, then of its
  value. Llama has three matrices; GPT-2 has one, transposed, of all queries, all keys, all values; GPT-NeoX has
  Megatron's own.
- SwiGLU: Megatron has one matrix, the gate's rows before the others; Llama has two.
- experts: transformers 5 stacks them; the planner and transformers 4 do not.
- the vocabulary: Megatron pads it.

The tables of names come first, the cuts and joins after them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bcp.errors import InputError
from bcp.plan.box import Box
from bcp.plan.read.renames import Moved

__all__ = ["EXPERTS", "MegatronNames"]

DECODER = "decoder.layers"
BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Buffers that old versions of transformers saved; they are computed."""
OBJECTS = ("._extra_state", "rng_state/")
"""Objects that Megatron and ``MegatronRng`` save beside the weights; Hugging Face's models lack them."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names of one sort of model."""

    layers: str  # the prefix of a layer's number
    outside: Sequence[tuple[str, str]]  # (Megatron's name, name) outside of the layers; a tensor may have several
    inside: Sequence[tuple[str, str]]  # the same within a layer; the name of a module, or the whole name of a tensor
    transposed: Sequence[str] = ()  # modules whose weights have inputs in front


WORDS, POSITIONS, OUTPUT = "embedding.word_embeddings", "embedding.position_embeddings", "output_layer"
QKV_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
QKV, FC1, EXPERTS = "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.experts.experts"


def _norms(attention: str, mlp: str) -> list[tuple[str, str]]:
    """Name a layer's two norms. Transformer Engine fuses them with the next layer, under the same names."""
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


Shape = tuple[int, ...]

_EXPERT = re.compile(rf"{re.escape(EXPERTS)}\.(\d+)\.(linear_fc[12])\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronNames:
    """How a GPT-like model of Megatron-LM and its Hugging Face twin correspond.

    ``LoadOptions(rename=names.to_hf)`` loads a checkpoint of Megatron into a Hugging Face model, and
    ``rename=names.from_hf`` the other way round; optimizer states, too. Any parallelism on either side.

    Attributes:
        num_attention_heads: query heads of a layer.
        num_query_groups: key/value heads of a layer; None: as many as query heads.
        family: ``"llama"`` is Llama, Mistral, Qwen2, Qwen3, and the mixtures of experts among them (Mixtral, Qwen2-MoE,
            Qwen3-MoE), by the names of transformers 4 and 5; ``"gpt_neox"`` and ``"gpt2"``.
        vocab_size: of the Hugging Face model; rows that Megatron has behind are padding, and left out.
            None: there is no padding.
        padded_vocab_size: of the Megatron model that is loaded into; its further rows stay as they are. None: as saved.
        num_experts: of a mixture of experts; needed where Hugging Face stacks them (transformers 5) and is loaded into.
    """

    num_attention_heads: int
    num_query_groups: int | None = None
    family: Literal["llama", "gpt_neox", "gpt2"] = "llama"
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    num_experts: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InputError(f"family={self.family!r} is unknown; known are {', '.join(sorted(FAMILIES))}")
        if self.num_attention_heads < 1 or self.groups < 1 or self.num_attention_heads % self.groups:
            raise InputError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of num_query_groups={self.groups}"
            )

    @property
    def groups(self) -> int:
        """How many key/value heads there are."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def to_hf(self) -> _Direction:
        """The rename from Megatron's tensors to a Hugging Face model."""
        return _Direction(self, _to_hf)

    @property
    def from_hf(self) -> _Direction:
        """The rename from a Hugging Face model's tensors to Megatron's."""
        return _Direction(self, _from_hf)


@dataclass(frozen=True, slots=True)
class _Direction:
    """A rename; see :class:`bcp.plan.read.renames.Moves`."""

    names: MegatronNames
    moved: Callable[[MegatronNames, str, Shape], list[Moved]]

    def blocks(self, fqn: str, shape: Shape) -> Sequence[Moved]:
        """Return the targets of a saved tensor. Computed tensors are left out, unknown ones keep their names."""
        if fqn.endswith(BUFFERS) or any(part in fqn for part in OBJECTS):
            return ()
        return self.moved(self.names, fqn, shape) or [Moved.whole(fqn, shape)]


# -- Megatron to Hugging Face ------------------------------------------------------------------------------------------


def _to_hf(names: MegatronNames, fqn: str, shape: Shape) -> list[Moved]:
    """Move a tensor of Megatron's."""
    family = FAMILIES[names.family]
    layer, rest = _layer(fqn, DECODER)
    if not rest:
        news = _renamed(fqn, family.outside)
        rows = names.vocab_size
        if rows is None or not fqn.startswith((WORDS, OUTPUT)) or rows >= shape[0]:
            return [Moved.whole(new, shape) for new in news]
        box = Box(_zeros(shape), (rows, *shape[1:]))
        return [Moved(box, new, box.lengths, box.offsets) for new in news]
    prefix = f"{family.layers}.{layer}."
    module, _, leaf = rest.rpartition(".")
    moved = [_turned(f"{prefix}{new}", shape, rest, family) for new in _renamed(rest, family.inside)]
    if module == QKV and not moved:
        return list(_qkv_to_hf(names, prefix, leaf, shape))
    if module in GATED and not moved:
        return _cut(shape, [f"{prefix}{new}.{leaf}" for new in GATED[module]])
    if match := _EXPERT.fullmatch(rest):
        return list(_expert_to_hf(names, prefix, int(match[1]), match[2], shape))
    return moved


def _qkv_to_hf(names: MegatronNames, prefix: str, leaf: str, shape: Shape) -> Iterator[Moved]:
    """Cut the matrix of all queries, keys and values."""
    heads, groups, rest = names.num_attention_heads, names.groups, shape[1:]
    size = _head(shape[0], heads + 2 * groups)
    for projection, row, own, count in _heads(heads, groups, size):
        box = Box((row, *_zeros(rest)), (count, *rest))
        if names.family == "gpt2":
            corner = (*_zeros(rest), projection * heads * size + own)
            target = f"{prefix}attn.c_attn.{leaf}"
            yield Moved(box, target, shape[::-1], corner, transposed=bool(rest))
        else:
            whole = ((groups if projection else heads) * size, *rest)
            yield Moved(box, f"{prefix}{QKV_PARTS[projection]}.{leaf}", whole, (own, *_zeros(rest)))


def _expert_to_hf(names: MegatronNames, prefix: str, expert: int, linear: str, shape: Shape) -> Iterator[Moved]:
    """Name one expert's tensor as Qwen and Mixtral do, and put the same blocks where they are among all experts."""
    for where, linears in EXPERT_PARTS.items():
        yield from _cut(shape, [f"{prefix}{where}.{expert}.{part}.weight" for part in linears[linear]])
    if names.num_experts is not None:
        stack, count = EXPERT_STACKS[linear]
        for block in _cut(shape, [f"{prefix}{stack}"] * count):
            yield Moved(block.saved, block.fqn, (names.num_experts, *shape), (expert, *block.saved.offsets))


# -- Hugging Face to Megatron ------------------------------------------------------------------------------------------


def _from_hf(names: MegatronNames, fqn: str, shape: Shape) -> list[Moved]:  # noqa: PLR0911 -- one a layout
    """Move a tensor of Hugging Face's."""
    family = FAMILIES[names.family]
    layer, rest = _layer(fqn, family.layers)
    if not rest:
        news = _renamed(fqn, [(new, old) for old, new in family.outside])
        rows = names.padded_vocab_size
        if rows is None or not any(new.startswith((WORDS, OUTPUT)) for new in news) or rows <= shape[0]:
            return [Moved.whole(new, shape) for new in news]
        return [Moved(Box.whole(shape), new, (rows, *shape[1:]), _zeros(shape), padded=True) for new in news]
    prefix = f"{DECODER}.{layer}."
    if inside_names := _renamed(rest, [(new, old) for old, new in family.inside]):
        return [_turned(f"{prefix}{new}", shape, new, family) for new in inside_names]
    module, _, leaf = rest.rpartition(".")
    if names.family == "gpt2" and module == "attn.c_attn":
        return list(_joint_qkv_from_hf(names, f"{prefix}{QKV}.{leaf}", shape))
    if names.family == "llama" and module in QKV_PARTS:
        return list(_qkv_from_hf(names, f"{prefix}{QKV}.{leaf}", QKV_PARTS.index(module), shape))
    for fused, halves in GATED.items():
        if names.family == "llama" and module in halves:
            return [_part(shape, f"{prefix}{fused}.{leaf}", halves.index(module), 2)]
    return _experts_from_hf(prefix, rest, shape)


def _qkv_from_hf(names: MegatronNames, target: str, own_projection: int, shape: Shape) -> Iterator[Moved]:
    """Put all queries, all keys or all values (0, 1, 2) where they are in the matrix of all of them."""
    heads, groups, rest = names.num_attention_heads, names.groups, shape[1:]
    size = _head(shape[0], groups if own_projection else heads)
    for projection, row, own, count in _heads(heads, groups, size):
        if projection == own_projection:
            box = Box((own, *_zeros(rest)), (count, *rest))
            yield Moved(box, target, ((heads + 2 * groups) * size, *rest), (row, *_zeros(rest)))


def _joint_qkv_from_hf(names: MegatronNames, target: str, shape: Shape) -> Iterator[Moved]:
    """Do the same with GPT-2's matrix, whose last dimension has all queries, then all keys, then all values."""
    heads, groups, rest = names.num_attention_heads, names.groups, shape[:-1]
    size = _head(shape[-1], heads + 2 * groups)
    for projection, row, own, count in _heads(heads, groups, size):
        box = Box((*_zeros(rest), projection * heads * size + own), (*rest, count))
        yield Moved(box, target, shape[::-1], (row, *_zeros(rest)), transposed=bool(rest))


def _experts_from_hf(prefix: str, rest: str, shape: Shape) -> list[Moved]:
    """Put an expert's tensor into Megatron's, or take all experts apart."""
    for linear, (stack, _) in EXPERT_STACKS.items():
        if rest == stack:
            count, first = shape[0], _zeros(shape[1:])
            boxes = [Box((expert, *first), (1, *shape[1:])) for expert in range(count)]
            fqns = [f"{prefix}{EXPERTS}.{expert}.{linear}.weight" for expert in range(count)]
            return [Moved(box, fqn, shape[1:], first) for box, fqn in zip(boxes, fqns, strict=True)]
    for where, linears in EXPERT_PARTS.items():
        for linear, parts in linears.items():
            if match := re.fullmatch(rf"{re.escape(where)}\.(\d+)\.({'|'.join(parts)})\.weight", rest):
                return [
                    _part(shape, f"{prefix}{EXPERTS}.{match[1]}.{linear}.weight", parts.index(match[2]), len(parts))
                ]
    return []


# -- both --------------------------------------------------------------------------------------------------------------


def _layer(fqn: str, layers: str) -> tuple[str, str]:
    """Take ``<layers>.<number>.<rest>`` apart; two empty strings where a name is no such."""
    number, _, rest = fqn.removeprefix(f"{layers}.").partition(".")
    return (number, rest) if fqn.startswith(f"{layers}.") and number.isdecimal() else ("", "")


def _renamed(name: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the new names of a tensor; the first of a pair is the tensor's own name, or its module's."""
    module, _, leaf = name.rpartition(".")
    own = [new for old, new in pairs if old == name]
    return own + [f"{new}.{leaf}" for old, new in pairs if old == module and leaf in ("weight", "bias")]


def _turned(fqn: str, shape: Shape, megatron: str, family: Family) -> Moved:
    """Move a tensor, which is ``megatron`` in one of Megatron's layers, as it is or transposed."""
    if megatron.removesuffix(".weight") in family.transposed:
        return Moved(Box.whole(shape), fqn, shape[::-1], _zeros(shape), transposed=True)
    return Moved.whole(fqn, shape)


def _cut(shape: Shape, fqns: Sequence[str]) -> list[Moved]:
    """Cut a tensor into as many equal parts, along its first dimension."""
    if not shape or shape[0] % len(fqns):
        raise InputError(f"it cannot be cut into {len(fqns)} equal parts along its rows; check MegatronNames' family")
    part, first = (shape[0] // len(fqns), *shape[1:]), _zeros(shape[1:])
    return [Moved(Box((number * part[0], *first), part), fqn, part, _zeros(part)) for number, fqn in enumerate(fqns)]


def _part(shape: Shape, fqn: str, number: int, count: int) -> Moved:
    """Make a tensor one of as many equal parts of another, along its first dimension."""
    whole, corner = (count * shape[0], *shape[1:]), (number * shape[0], *_zeros(shape[1:]))
    return Moved(Box.whole(shape), fqn, whole, corner)


def _heads(heads: int, groups: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of rows of Megatron's qkv matrix: (0, 1, 2 for q, k, v; first row; first row in q, k or v; how many).

    A query group has the rows of its query heads, then of its key head, then of its value head.
    """
    queries = heads // groups * size
    for group in range(groups):
        row = group * (queries + 2 * size)
        yield 0, row, group * queries, queries
        yield 1, row + queries, group * size, size
        yield 2, row + queries + size, group * size, size


def _head(rows: int, count: int) -> int:
    """Return the rows of one head."""
    if rows % count:
        raise InputError(f"its {rows} rows are not {count} heads; check MegatronNames' num_attention_heads and groups")
    return rows // count


def _zeros(shape: Shape) -> Shape:
    return (0,) * len(shape)
