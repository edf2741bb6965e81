"""Megatron's tensors become Hugging Face's and come back: names, shapes, and what a model computes with them.

The names and shapes are those of real models: megatron-core 0.16.1, transformers 4.57 and 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import bcp
from bcp.errors import CoverageError, FqnMismatchError, InputError
from bcp.interop.megatron_names import MegatronNames

HIDDEN, HEADS, GROUPS, SIZE, FFN, VOCABULARY, PADDED, EXPERTS = 32, 4, 2, 8, 24, 50, 64, 3
Shapes = dict[str, tuple[int, ...]]

LAYER, HF_LAYER = "decoder.layers.1.", "model.layers.1."


def megatron(**inside: tuple[int, ...]) -> Shapes:
    """Return a Llama-like model of one layer; ``inside`` has its MLP."""
    return {
        "embedding.word_embeddings.weight": (PADDED, HIDDEN),
        "decoder.final_layernorm.weight": (HIDDEN,),
        "output_layer.weight": (PADDED, HIDDEN),
        f"{LAYER}self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
        f"{LAYER}self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * SIZE, HIDDEN),
        f"{LAYER}self_attention.linear_qkv.bias": ((HEADS + 2 * GROUPS) * SIZE,),
        f"{LAYER}self_attention.linear_proj.weight": (HIDDEN, HEADS * SIZE),
        f"{LAYER}self_attention.q_layernorm.weight": (SIZE,),
        f"{LAYER}self_attention.k_layernorm.weight": (SIZE,),
        **{LAYER + name: shape for name, shape in inside.items()},
    }


def llama(**inside: tuple[int, ...]) -> Shapes:
    """Return the same of Hugging Face's."""
    heads = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    return {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        f"{HF_LAYER}input_layernorm.weight": (HIDDEN,),
        f"{HF_LAYER}post_attention_layernorm.weight": (HIDDEN,),
        **{f"{HF_LAYER}self_attn.{n}_proj.weight": (count * SIZE, HIDDEN) for n, count in heads.items()},
        **{f"{HF_LAYER}self_attn.{n}_proj.bias": (count * SIZE,) for n, count in heads.items()},
        f"{HF_LAYER}self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        f"{HF_LAYER}self_attn.q_norm.weight": (SIZE,),
        f"{HF_LAYER}self_attn.k_norm.weight": (SIZE,),
        **{HF_LAYER + name: shape for name, shape in inside.items()},
    }


def experts(*names: str) -> Shapes:
    """Return experts that have tensors of their own: gate, up and down."""
    shapes = ((FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    return {name.format(n): shape for n in range(EXPERTS) for name, shape in zip(names, shapes, strict=True)}


def gpt(layer: str, norms: tuple[str, str], linears: Mapping[str, tuple[int, int]]) -> Shapes:
    """Return one layer with biases everywhere; a linear's shape is (outputs, inputs)."""
    shapes: Shapes = {f"{layer}{norm}{leaf}": (HIDDEN,) for norm in norms for leaf in ("weight", "bias")}
    return shapes | {f"{layer}{name}.bias": (shape[0],) for name, shape in linears.items()}


def weights(layer: str, linears: Mapping[str, tuple[int, int]], *, transposed: bool = False) -> Shapes:
    return {f"{layer}{name}.weight": shape[::-1] if transposed else shape for name, shape in linears.items()}


GPT = {
    "self_attention.linear_qkv": (3 * HIDDEN, HIDDEN),
    "self_attention.linear_proj": (HIDDEN, HIDDEN),
    "mlp.linear_fc1": (4 * HIDDEN, HIDDEN),
    "mlp.linear_fc2": (HIDDEN, 4 * HIDDEN),
}
NEOX = dict(
    zip(
        ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        GPT.values(),
        strict=True,
    )
)
GPT2 = dict(zip(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), GPT.values(), strict=True))
GPT_MEGATRON = {
    "embedding.word_embeddings.weight": (PADDED, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "decoder.final_layernorm.bias": (HIDDEN,),
    **gpt(LAYER, ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_"), GPT),
    **weights(LAYER, GPT),
}
DENSE = {
    "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
    "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
    "mlp.linear_fc2.weight": (HIDDEN, FFN),
}
MOE = {
    "mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
    "mlp.router.weight": (EXPERTS, HIDDEN),
    **{f"mlp.experts.experts.{n}.linear_fc1.weight": (2 * FFN, HIDDEN) for n in range(EXPERTS)},
    **{f"mlp.experts.experts.{n}.linear_fc2.weight": (HIDDEN, FFN) for n in range(EXPERTS)},
}
SHARED = {
    "mlp.shared_experts.linear_fc1.weight": (2 * FFN, HIDDEN),
    "mlp.shared_experts.linear_fc2.weight": (HIDDEN, FFN),
    "mlp.shared_experts.gate_weight": (1, HIDDEN),
}
HF_SHARED = {
    "mlp.shared_expert.gate_proj.weight": (FFN, HIDDEN),
    "mlp.shared_expert.up_proj.weight": (FFN, HIDDEN),
    "mlp.shared_expert.down_proj.weight": (HIDDEN, FFN),
    "mlp.shared_expert_gate.weight": (1, HIDDEN),
}
HF_DENSE = {
    "mlp.gate_proj.weight": (FFN, HIDDEN),
    "mlp.up_proj.weight": (FFN, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FFN),
}
FUSED = {"mlp.experts.gate_up_proj": (EXPERTS, 2 * FFN, HIDDEN), "mlp.experts.down_proj": (EXPERTS, HIDDEN, FFN)}
MIXTRAL = experts(*(f"block_sparse_moe.experts.{{}}.{name}.weight" for name in ("w1", "w3", "w2")))
QWEN = experts(*(f"mlp.experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")))
ROUTER = {"mlp.gate.weight": (EXPERTS, HIDDEN)}
MODELS: dict[str, tuple[str, Shapes, Shapes]] = {
    "llama": ("llama", megatron(**DENSE), llama(**HF_DENSE)),
    "llama without fused norms": (
        "llama",
        {
            name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
                "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
            ): shape
            for name, shape in megatron(**DENSE).items()
        },
        llama(**HF_DENSE),
    ),
    "mixtral 4": ("llama", megatron(**MOE), llama(**MIXTRAL, **{"block_sparse_moe.gate.weight": (EXPERTS, HIDDEN)})),
    "mixtral 5": ("llama", megatron(**MOE), llama(**FUSED, **ROUTER)),
    "qwen2_moe 4": ("llama", megatron(**MOE, **SHARED), llama(**QWEN, **ROUTER, **HF_SHARED)),
    "qwen2_moe 5": ("llama", megatron(**MOE, **SHARED), llama(**FUSED, **ROUTER, **HF_SHARED)),
    **{
        f"gpt_neox {version}": (
            "gpt_neox",
            {**GPT_MEGATRON, "output_layer.weight": (PADDED, HIDDEN)},
            {
                "gpt_neox.embed_in.weight": (VOCABULARY, HIDDEN),
                "gpt_neox.final_layer_norm.weight": (HIDDEN,),
                "gpt_neox.final_layer_norm.bias": (HIDDEN,),
                output: (VOCABULARY, HIDDEN),
                **gpt("gpt_neox.layers.1.", ("input_layernorm.", "post_attention_layernorm."), NEOX),
                **weights("gpt_neox.layers.1.", NEOX),
            },
        )
        for version, output in ((4, "embed_out.weight"), (5, "lm_head.weight"))
    },
    "gpt2": (
        "gpt2",
        {**GPT_MEGATRON, "embedding.position_embeddings.weight": (16, HIDDEN)},
        {
            "transformer.wte.weight": (VOCABULARY, HIDDEN),
            "transformer.wpe.weight": (16, HIDDEN),
            "transformer.ln_f.weight": (HIDDEN,),
            "transformer.ln_f.bias": (HIDDEN,),
            **gpt("transformer.h.1.", ("ln_1.", "ln_2."), GPT2),
            **weights("transformer.h.1.", GPT2, transposed=True),
        },
    ),
}


def names_of(family: str, **more: Any) -> MegatronNames:
    groups = GROUPS if family == "llama" else None
    known = {"vocab_size": VOCABULARY, "padded_vocab_size": PADDED, "num_experts": EXPERTS}
    return MegatronNames(num_attention_heads=HEADS, num_query_groups=groups, family=family, **{**known, **more})  # type: ignore[arg-type]  # a test's own


def module_of(shapes: Shapes, seed: int) -> nn.Module:
    """Return a module that has parameters of these names and shapes."""
    torch.manual_seed(seed)
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(torch.randn(shape)))
    return root


def trained(shapes: Shapes, seed: int, *, steps: int) -> dict[str, Any]:
    model = module_of(shapes, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def tensors(states: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return parameters and optimizer states; of a padded vocabulary, what is none of padding."""
    out = {}
    for name, parameter in states["model"].named_parameters():
        for key, value in {"": parameter.detach(), **states["optimizer"].state[parameter]}.items():
            out[f"{name}/{key}"] = value[:VOCABULARY] if len(value.shape) and len(value) == PADDED else value
    return out


@pytest.mark.parametrize("model", MODELS)
def test_states_go_over_and_come_back(tmp_path: Path, model: str) -> None:
    family, ours, theirs = MODELS[model]
    names = names_of(family)
    source, twin, back = trained(ours, 0, steps=2), trained(theirs, 1, steps=0), trained(ours, 2, steps=1)
    bcp.save(tmp_path / "megatron", source)
    report = bcp.load(tmp_path / "megatron", twin, options=bcp.LoadOptions(rename=names.to_hf))
    assert (report.missing, report.unexpected) == ((), ())
    assert {fqn: tuple(p.shape) for fqn, p in twin["model"].named_parameters()} == theirs
    bcp.save(tmp_path / "hf", twin)
    report = bcp.load(tmp_path / "hf", back, options=bcp.LoadOptions(rename=names.from_hf))
    assert (report.missing, report.unexpected) == ((), ())
    expected, found = tensors(source), tensors(back)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert [each["optimizer"].param_groups[0]["lr"] for each in (source, twin, back)] == [0.1] * 3


def test_padding_of_the_target_stays(tmp_path: Path) -> None:
    embedding = torch.randn(VOCABULARY, HIDDEN)
    bcp.save(tmp_path, {"model": {"model.embed_tokens.weight": embedding}})
    target = {"embedding.word_embeddings.weight": torch.full((PADDED, HIDDEN), 7.0)}
    bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(rename=names_of("llama").from_hf))
    assert torch.equal(target["embedding.word_embeddings.weight"][:VOCABULARY], embedding)
    assert target["embedding.word_embeddings.weight"][VOCABULARY:].eq(7).all()


def test_tied_embeddings_need_only_one_of_the_two(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    tied = trained(shapes, 0, steps=0)
    tied["model"].lm_head.weight = tied["model"].model.embed_tokens.weight
    tied["optimizer"] = torch.optim.AdamW(tied["model"].parameters(), lr=0.1)
    tied["model"].lm_head.weight.grad = torch.ones(VOCABULARY, HIDDEN)
    tied["optimizer"].step()
    bcp.save(tmp_path / "hf", tied)
    names = names_of("llama")
    ours = trained({"embedding.word_embeddings.weight": (PADDED, HIDDEN)}, 1, steps=0)
    report = bcp.load(tmp_path / "hf", ours, options=bcp.LoadOptions(rename=names.from_hf))
    assert (report.missing, report.unexpected) == ((), ())
    expected = {key: value for name, value in tensors(tied).items() for key in [name.rpartition("/")[2]]}
    assert all(torch.equal(value, expected[name.rpartition("/")[2]]) for name, value in tensors(ours).items())
    bcp.save(tmp_path / "megatron", ours)
    for parameter in tied["model"].parameters():
        nn.init.zeros_(parameter)
    report = bcp.load(tmp_path / "megatron", tied, options=bcp.LoadOptions(rename=names.to_hf))
    assert (report.missing, report.unexpected) == ((), ())
    assert torch.equal(tied["model"].lm_head.weight.detach(), expected[""])


def test_extra_states_random_states_and_computed_buffers_are_left_out(tmp_path: Path) -> None:
    objects = {f"{LAYER}mlp.linear_fc1._extra_state/shard_0_1": b"fp8", "rng_state/shard_0.0_1.2": {"python": (1, 2)}}
    state = {"decoder.final_layernorm.weight": torch.ones(2), **objects}
    bcp.save(tmp_path / "megatron", {"model": state})
    target = {"model.norm.weight": torch.zeros(2)}
    names = names_of("llama")
    report = bcp.load(tmp_path / "megatron", {"model": target}, options=bcp.LoadOptions(rename=names.to_hf))
    assert (report.missing, report.unexpected, target["model.norm.weight"].tolist()) == ((), (), [1, 1])
    bcp.save(tmp_path / "hf", {"model": {**target, f"{HF_LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4)}})
    back = {"decoder.final_layernorm.weight": torch.zeros(2)}
    report = bcp.load(tmp_path / "hf", {"model": back}, options=bcp.LoadOptions(rename=names.from_hf))
    assert report.unexpected == ()


def test_what_is_unknown_keeps_its_name(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"decoder.layers.0.mixer.A_log": torch.ones(2), "vision.weight": torch.ones(2)}})
    report = bcp.load(tmp_path, {"model": {}}, strict=False, options=bcp.LoadOptions(rename=names_of("llama").to_hf))
    assert report.unexpected == ("model: decoder.layers.0.mixer.A_log", "model: vision.weight")


# -- what a model computes -------------------------------------------------------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend causally; (batch, tokens, heads, size), keys and values of fewer heads are shared by neighbours."""
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def megatron_layer(x: torch.Tensor, state: Mapping[str, torch.Tensor], groups: int, *, gated: bool) -> torch.Tensor:
    """Compute as Megatron does: a group has its queries, its key and its value behind each other."""
    bias = state.get(f"{LAYER}self_attention.linear_qkv.bias")
    mixed = functional.linear(x, state[f"{LAYER}self_attention.linear_qkv.weight"], bias)
    mixed = mixed.view(*x.shape[:2], groups, (HEADS // groups + 2) * SIZE)
    q, k, v = mixed.split([HEADS // groups * SIZE, SIZE, SIZE], dim=3)
    out = attend(q.reshape(*x.shape[:2], HEADS, SIZE), k, v)
    out = functional.linear(out, state[f"{LAYER}self_attention.linear_proj.weight"])
    hidden = functional.linear(out, state[f"{LAYER}mlp.linear_fc1.weight"])
    if gated:
        first, second = hidden.chunk(2, dim=-1)
        hidden = functional.silu(first) * second
    return functional.linear(hidden, state[f"{LAYER}mlp.linear_fc2.weight"])


def test_a_llama_layer_computes_the_same(tmp_path: Path) -> None:
    source = module_of(MODELS["llama"][1], 0).double()
    bcp.save(tmp_path, {"model": source})
    twin = module_of(MODELS["llama"][2], 1).double()
    bcp.load(tmp_path, {"model": twin}, options=bcp.LoadOptions(rename=names_of("llama").to_hf))
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    state = {name.removeprefix(HF_LAYER): tensor for name, tensor in twin.state_dict().items()}
    q, k, v = (
        functional.linear(x, state[f"self_attn.{n}_proj.weight"], state[f"self_attn.{n}_proj.bias"]).unflatten(
            2, (-1, SIZE)
        )
        for n in "qkv"
    )
    out = functional.linear(attend(q, k, v), state["self_attn.o_proj.weight"])
    gate, up = (functional.linear(out, state[f"mlp.{n}_proj.weight"]) for n in ("gate", "up"))
    found = functional.linear(functional.silu(gate) * up, state["mlp.down_proj.weight"])
    torch.testing.assert_close(found, megatron_layer(x, source.state_dict(), GROUPS, gated=True))


def test_a_gpt2_layer_computes_the_same(tmp_path: Path) -> None:
    source = module_of(MODELS["gpt2"][1], 0).double()
    bcp.save(tmp_path, {"model": source})
    twin = module_of(MODELS["gpt2"][2], 1).double()
    bcp.load(tmp_path, {"model": twin}, options=bcp.LoadOptions(rename=names_of("gpt2").to_hf))
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    state = {name.removeprefix("transformer.h.1."): tensor for name, tensor in twin.state_dict().items()}
    mixed = x @ state["attn.c_attn.weight"] + state["attn.c_attn.bias"]
    q, k, v = (each.unflatten(2, (HEADS, SIZE)) for each in mixed.split(HIDDEN, dim=2))
    hidden = attend(q, k, v) @ state["attn.c_proj.weight"] @ state["mlp.c_fc.weight"]
    torch.testing.assert_close(
        hidden @ state["mlp.c_proj.weight"], megatron_layer(x, source.state_dict(), HEADS, gated=False)
    )


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"family": "bert"}, "family='bert' is unknown; known are gpt2, gpt_neox, llama"),
        ({"num_query_groups": 3}, "num_attention_heads=4 is no multiple of num_query_groups=3"),
        ({"num_query_groups": 0}, "is no multiple"),
        ({"num_attention_heads": 0}, "is no multiple"),
    ],
)
def test_what_is_no_model_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        MegatronNames(**{"num_attention_heads": 4, **given})


def test_numbers_of_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {f"{LAYER}self_attention.linear_qkv.weight": torch.ones(20, 4)}})
    with pytest.raises(InputError, match=r"linear_qkv\.weight', \[20, 4\]: its 20 rows are not 8 heads; check"):
        bcp.load(tmp_path, {"model": {}}, options=bcp.LoadOptions(rename=names_of("llama").to_hf))


@pytest.mark.parametrize(
    ("known", "error", "match"),
    [
        (None, FqnMismatchError, "lacks: model: model.layers.1.mlp.experts.down_proj"),
        (1, InputError, r"down_proj', which is \[1, 2, 4\]: its block \[1:2, 0:2, 0:4\] sticks out"),
        (3, CoverageError, "down_proj', which is .*these give it 16 of its 24 elements"),
    ],
)
def test_stacked_experts_need_their_number(
    tmp_path: Path, known: int | None, error: type[Exception], match: str
) -> None:
    saved = {f"{LAYER}mlp.experts.experts.{n}.linear_fc2.weight": torch.ones(2, 4) for n in (0, 1)}
    bcp.save(tmp_path, {"model": saved})
    target = {f"{HF_LAYER}mlp.experts.down_proj": torch.zeros(2, 2, 4)}
    names = names_of("llama", num_experts=known)
    with pytest.raises(error, match=match):
        bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(rename=names.to_hf))


def test_rows_that_are_no_two_halves_are_refused(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {f"{LAYER}mlp.linear_fc1.weight": torch.ones(7, 4)}})
    target = {f"{HF_LAYER}mlp.{part}.weight": torch.zeros(3, 4) for part in ("gate_proj", "up_proj")}
    with pytest.raises(InputError, match=r"linear_fc1\.weight', \[7, 4\]: it cannot be cut into 2 equal parts"):
        bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(rename=names_of("llama").to_hf))
