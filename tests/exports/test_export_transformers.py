"""``from_pretrained`` of an exported folder has the weights of the checkpoint, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import assert_same

import bcp

pytestmark = pytest.mark.sweep
transformers: Any = import_module("transformers") if find_spec("transformers") else None  # of the extra `sweep`

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}
ENCODER_DECODER = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def llama(*, tied: bool) -> Any:
    config = transformers.LlamaConfig(**SMALL, **HEADS, num_key_value_heads=2, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(tied=False),
    "llama, tied": lambda: llama(tied=True),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **HEADS)),
    "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL, **HEADS)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    ),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**SMALL, **HEADS, tie_word_embeddings=True)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**ENCODER_DECODER, max_position_embeddings=64)
    ),
    "distilbert": lambda: transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(vocab_size=96, dim=32, n_layers=2, n_heads=4, hidden_dim=48)
    ),
    "electra": lambda: transformers.ElectraForMaskedLM(transformers.ElectraConfig(**SMALL, **HEADS, embedding_size=32)),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **ENCODER_DECODER, num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1
        )
    ),
}


@pytest.mark.parametrize("shard_bytes", [20_000, 5 << 30])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_by_bit(name: str, shard_bytes: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.config.save_pretrained(tmp_path / "base")
    bcp.save(tmp_path / "ckpt", {"model": model})
    bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", like=tmp_path / "base", shard_bytes=shard_bytes)
    back, info = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert_same(back.state_dict(), model.state_dict())


def test_a_cast_model_comes_back_in_its_dtype(tmp_path: Path) -> None:
    model = llama(tied=True)
    model.save_pretrained(tmp_path / "base")
    bcp.save(tmp_path / "ckpt", {"model": model})
    bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", like=tmp_path / "base", dtype=torch.bfloat16)
    back = type(model).from_pretrained(tmp_path / "hf", dtype="auto")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "by-transformers")
    theirs = type(model).from_pretrained(tmp_path / "by-transformers", dtype="auto")
    assert_same(back.state_dict(), theirs.state_dict())
    tokens = torch.arange(8)[None]
    assert torch.equal(back(tokens).logits, theirs(tokens).logits)
