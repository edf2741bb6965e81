"""Modules of other packages: quantized layers, adapters, small language models, metrics."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from module_recipes import classes_of
from module_trial import Recipe
from torch import nn

Named = Iterator[tuple[str, Callable[[], Recipe]]]
"""Cases of one group: names, and functions that make the recipe."""


def rows(module: nn.Module) -> Any:
    """Call a module with rows of 64 numbers, of the dtype of its weight."""
    weight = next(module.parameters())
    return module(torch.randn(2, 64, dtype=weight.dtype if weight.is_floating_point() else torch.float32))


def ids(module: Any) -> Any:
    """Call a language model with token numbers, in training mode without dropout."""
    return module(input_ids=torch.randint(0, 32, (2, 6))).logits


# -- torch.ao --------------------------------------------------------------------------------------


class Small(nn.Module):
    """A model with stubs for static quantization."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        ao = importlib.import_module("torch.ao.quantization")
        self.quant, self.inner, self.dequant = ao.QuantStub(), inner, ao.DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequant(self.inner(self.quant(x)))


def _prepared(inner: Callable[[], nn.Module], size: tuple[int, ...], *, converted: bool, aware: bool) -> nn.Module:
    """Quantize a model statically: observers that have seen something, fake quantization, or the converted model."""
    ao = importlib.import_module("torch.ao.quantization")
    model = Small(inner()).train(aware)
    model.qconfig = ao.get_default_qat_qconfig("x86") if aware else ao.get_default_qconfig("x86")
    prepared = (ao.prepare_qat if aware else ao.prepare)(model)
    prepared(torch.randn(4, *size))
    return ao.convert(prepared.eval()) if converted else prepared


def _observed(kind: Any) -> nn.Module:
    observer = kind()
    observer(torch.randn(4, 4))
    return observer


def torch_ao() -> Named:
    """Dynamic and static quantization, quantization-aware training, every observer and fake quantizer."""
    ao = importlib.import_module("torch.ao.quantization")
    linear: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())  # noqa: E731 -- several use it
    conv: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))  # noqa: E731 -- as above
    for name, inner, size in (("Linear", linear, (4,)), ("Conv2d", conv, (4, 6, 6))):
        call = partial(_call_sized, size)
        for word, converted, aware in (
            ("prepared", False, False), ("static", True, False), ("aware, prepared", False, True), ("aware", True, True)
        ):  # fmt: skip
            make = partial(_prepared, inner, size, converted=converted, aware=aware)
            yield f"{name}, {word}", partial(Recipe, make, call)
    for kind in (nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        make = partial(_dynamic, ao, kind)
        size = (3, 2, 4) if issubclass(kind, nn.RNNBase) else (2, 4)
        yield f"{kind.__name__}, dynamic", partial(Recipe, make, partial(_call_whole, size))
    for name, kind in classes_of(ao, nn.Module):
        if issubclass(kind, (ao.ObserverBase, ao.FakeQuantizeBase)):
            yield name, partial(Recipe, partial(_observed, kind), partial(_call_whole, (4, 4)))


def _dynamic(ao: Any, kind: Any) -> nn.Module:
    return ao.quantize_dynamic(nn.ModuleList([kind(4, 4)]), {kind})[0]


def _call_sized(size: tuple[int, ...], module: nn.Module) -> Any:
    return module(torch.randn(2, *size))


def _call_whole(size: tuple[int, ...], module: nn.Module) -> Any:
    return module(torch.randn(*size))


# -- quantized layers of other packages ------------------------------------------------------------


def bitsandbytes() -> Named:
    """Layers, quantized on the CPU and not."""
    bnb = importlib.import_module("bitsandbytes").nn
    for quant_type in ("nf4", "fp4"):
        for nested in (True, False):
            make = partial(bnb.Linear4bit, 64, 64, compress_statistics=nested, quant_type=quant_type)
            name = f"Linear4bit, {quant_type}{', nested' if nested else ''}"
            yield name, partial(Recipe, lambda make=make: make().to("cpu"), rows)
    yield "Linear4bit, not quantized", partial(Recipe, lambda: bnb.Linear4bit(64, 64), _without_a_call)
    yield "Linear8bitLt", partial(Recipe, lambda: bnb.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu"), rows)
    yield "Linear8bitLt, 16 bits", partial(Recipe, lambda: bnb.Linear8bitLt(64, 64), rows)
    for name in ("Embedding4bit", "Embedding8bit", "StableEmbedding", "Embedding", "EmbeddingNF4", "EmbeddingFP4"):
        kind = getattr(bnb, name)
        call: Callable[[nn.Module], Any] = lambda module: module(torch.randint(0, 8, (2, 4)))  # noqa: E731 -- one use
        yield name, partial(Recipe, lambda kind=kind: kind(8, 64).to("cpu"), call)
    yield "Params4bit in a module", partial(Recipe, lambda: _holder(bnb), _without_a_call)


def _holder(bnb: Any) -> nn.Module:
    module = nn.Module()
    module.weight = bnb.Params4bit(torch.randn(64, 64), requires_grad=False).to("cpu")
    return module


def _without_a_call(_: nn.Module) -> Any:
    return ()


def torchao() -> Named:
    """Every configuration of ``quantize_`` that can be made without arguments."""
    quantization = importlib.import_module("torchao.quantization")
    core = importlib.import_module("torchao.core.config")
    for name, kind in classes_of(quantization, core.AOBaseConfig):
        yield name, partial(Recipe, partial(_torchao, quantization, kind), rows)


def _torchao(quantization: Any, kind: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64).to(torch.bfloat16 if "Int4" in kind.__name__ else torch.float32))
    quantization.quantize_(model, kind())
    return model


# -- language models and adapters ------------------------------------------------------------------

_SMALL = {
    "GPT2LMHeadModel": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "GemmaForCausalLM": {"head_dim": 4},
    "MixtralForCausalLM": {"num_local_experts": 2},
    "BertForMaskedLM": {},
    "MambaForCausalLM": {"state_size": 4},
    "OPTForCausalLM": {"ffn_dim": 16, "word_embed_proj_dim": 8},
    "T5ForConditionalGeneration": {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2},
}
"""Classes of transformers, and the arguments of their configurations beside the common ones."""

_COMMON = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


def _language_model(name: str) -> Any:
    """Make a small model of random weights."""
    kind = getattr(importlib.import_module("transformers"), name)
    common = {
        key: value for key, value in _COMMON.items() if name != "T5ForConditionalGeneration" or "hidden" not in key
    }
    return kind(kind.config_class(**{**common, **_SMALL[name]})).eval()


def _call_t5(module: Any) -> Any:
    tokens = torch.randint(0, 32, (2, 6))
    return module(input_ids=tokens, decoder_input_ids=tokens).logits


def transformers() -> Named:
    """Small language models, with tied heads and without."""
    for name in _SMALL:
        call = _call_t5 if name.startswith("T5") else ids
        yield name, partial(Recipe, partial(_language_model, name), call)


_PEFT: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 10, "r": 2},
    "IA3Config": {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "PrefixTuningConfig": {"num_virtual_tokens": 2},
    "PromptTuningConfig": {"num_virtual_tokens": 2},
    "PromptEncoderConfig": {"num_virtual_tokens": 2, "encoder_hidden_size": 8},
    "MultitaskPromptTuningConfig": {"num_virtual_tokens": 2, "num_tasks": 1},
    "AdaptionPromptConfig": {"adapter_len": 2, "adapter_layers": 1},
    "C3AConfig": {"block_size": 4},
    "FourierFTConfig": {"n_frequency": 8},
    "LoraConfig": {"r": 2},
    "MissConfig": {"r": 2},
    "PsoftConfig": {"r": 2},
    "RoadConfig": {"group_size": 4},
    "ShiraConfig": {"r": 1},
    "SupertuningConfig": {"sparsity": 0.5},
    "VBLoRAConfig": {"vector_length": 4, "num_vectors": 8},
    "WaveFTConfig": {"n_frequency": 8},
    "VeraConfig": {"r": 2},
    "OFTConfig": {"r": 2, "oft_block_size": 0},
    "TrainableTokensConfig": {"token_indices": [1, 2], "target_modules": ["embed_tokens"]},
}
"""Arguments of configurations of peft, beside the task and the modules."""


def _adapted(kind: Any, options: dict[str, Any]) -> Any:
    """Make a small model with an adapter."""
    library = importlib.import_module("peft")
    model = library.get_peft_model(_language_model("LlamaForCausalLM"), kind(task_type="CAUSAL_LM", **options))
    return model.eval()


def peft() -> Named:
    """Every kind of adapter; LoRA also with DoRA, a second adapter, and merged."""
    library = importlib.import_module("peft")
    for name, kind in classes_of(library, library.PeftConfig):
        options = _PEFT.get(name, {})
        if "target_modules" in kind.__dataclass_fields__ and name != "AdaptionPromptConfig":
            options = {"target_modules": ["q_proj", "v_proj"], **options}
        yield name, partial(Recipe, partial(_adapted, kind, options), ids)
    lora = {"r": 2, "target_modules": ["q_proj"]}
    yield "LoraConfig, DoRA", partial(Recipe, partial(_adapted, library.LoraConfig, {**lora, "use_dora": True}), ids)
    yield "LoraConfig, merged", partial(Recipe, lambda: _merged(_adapted(library.LoraConfig, lora)), ids)
    saved = {**lora, "modules_to_save": ["lm_head"]}
    yield "LoraConfig, modules_to_save", partial(Recipe, partial(_adapted, library.LoraConfig, saved), ids)


def _merged(model: Any) -> Any:
    model.merge_adapter()
    return model


# -- metrics ---------------------------------------------------------------------------------------


def torchmetrics() -> Named:
    """Metrics that can be made without arguments, with persistent state."""
    for path, two in (
        ("torchmetrics.aggregation", False),
        ("torchmetrics.regression", True),
        ("torchmetrics.text", None),
    ):
        module = importlib.import_module(path)
        for name, kind in classes_of(module, importlib.import_module("torchmetrics").Metric):
            if two is not None:
                yield name, partial(Recipe, partial(_metric, kind), partial(_updated, two=two))


def _metric(kind: Any) -> Any:
    metric = kind()
    metric.persistent(mode=True)
    return metric


def _updated(metric: Any, *, two: bool) -> Any:
    values = torch.rand(4)
    metric.update(*((values, torch.rand(4)) if two else (values,)))
    return metric.compute()
