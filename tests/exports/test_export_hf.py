"""A Hugging Face folder of a checkpoint: files, index, tied names, companions; read by safetensors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import READABLE, assert_same, documented, folders
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from samples import sample

import bcp
from bcp.backends import MemoryBackend
from bcp.errors import ExistsError, InputError

CONFIG = {"architectures": ["LlamaForCausalLM"], "dtype": "float32", "model_type": "llama", "name": "\u2603"}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Read a folder as its readers do: one file, or all files of the index."""
    if (folder / "model.safetensors").exists():
        assert not (folder / "model.safetensors.index.json").exists()
        return dict(load_file(folder / "model.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors = load_file(folder / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == set(tensors)
        found |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def base_model(folder: Path) -> Path:
    """Make a folder with all sorts of files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "generation_config.json", "merges.txt", "tokenizer.model", "chat_template.jinja"):
        (folder / name).write_bytes(f"this is {name}".encode())
    (folder / "modeling_odd.py").write_text("raise SystemExit('it was run')")
    for name in (
        "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "trainer_state.json", ".hidden.json",
    ):  # fmt: skip
        (folder / name).write_bytes(b"no companion")
    (folder / "sub").mkdir()
    (folder / "sub" / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", sample(READABLE, *READABLE[::2]))
def test_every_golden_checkpoint_comes_in_files_of_any_size(name: str, tmp_path: Path) -> None:
    for number, path in enumerate(folders(name)):
        expected = {fqn: tensor for (kind, fqn), tensor in documented(path).items() if kind == "model"}
        ckpt = bcp.Checkpoint(path)
        if name == "dtypes":
            with pytest.raises(InputError, match="safetensors has no dtype complex128"):
                bcp.tools.export_hf(ckpt, tmp_path / "dtypes")
            continue
        groups = {frozenset({fqn, ckpt[fqn].tied_to or fqn}) for fqn in expected}
        once = {group for group in groups if len(group) > 1 or not any(group < other for other in groups)}
        for shard_bytes in (1, 1000, 5 << 30):
            folder = tmp_path / f"{number}-{shard_bytes}"
            result = bcp.tools.export_hf(ckpt, folder, shard_bytes=shard_bytes)
            found = loaded(folder)
            assert len(found) == len(once) == result.tensors
            assert all(len(group & set(found)) == 1 for group in once), "one name of each tied pair"
            assert_same(found, {fqn: expected[fqn] for fqn in found})
            assert sorted(result.files) == names_in(folder)


def test_files_are_no_larger_than_asked_for_unless_one_tensor_is(tmp_path: Path) -> None:
    states = {f"layer.{n}": torch.full((n * 10,), n) for n in range(1, 30)}
    bcp.save(tmp_path / "ckpt", {"model": states})
    result = bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", shard_bytes=2000)
    assert_same(loaded(tmp_path / "hf"), states)
    count = len(result.files) - 1
    assert result.files[:count] == tuple(f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1))
    assert result.files[count] == "model.safetensors.index.json", "the index is the last one"
    for file in result.files[:count]:
        tensors = load_file(tmp_path / "hf" / file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 2000


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["lm_head.weight", "model.embed_tokens.weight"], "model.embed_tokens.weight"),
        (["transformer.wte.weight", "lm_head.weight"], "transformer.wte.weight"),
        (["gpt_neox.embed_in.weight", "embed_out.weight"], "gpt_neox.embed_in.weight"),
        (
            ["bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"],
            "bert.embeddings.word_embeddings.weight",
        ),
        (["cls.predictions.bias", "cls.predictions.decoder.bias"], "cls.predictions.bias"),
        (["lm_head.bias", "lm_head.decoder.bias"], "lm_head.bias"),
        (
            ["decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "lm_head.weight", "shared.weight"],
            "shared.weight",
        ),
        (["model.decoder.embed_tokens.weight", "proj_out.weight"], "model.decoder.embed_tokens.weight"),
        (["tok_embeddings.weight", "output.weight"], "tok_embeddings.weight"),
        (["b.weight", "a.weight"], "a.weight"),
    ],
)
def test_a_tied_tensor_has_the_name_of_the_input(names: list[str], kept: str, tmp_path: Path) -> None:
    tied = torch.randn(6, 4)
    bcp.save(tmp_path / "ckpt", {"model": dict.fromkeys(names, tied) | {"norm.weight": torch.ones(4)}})
    result = bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf")
    assert_same(loaded(tmp_path / "hf"), {kept: tied, "norm.weight": torch.ones(4)})
    assert result.tensors == 2
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} | {name: kept for name in names if name != kept}


def test_a_tied_tensor_whose_other_name_is_left_out(tmp_path: Path) -> None:
    tied = torch.randn(6, 4)
    bcp.save(tmp_path / "ckpt", {"model": {"embed.weight": tied, "lm_head.weight": tied}})
    for name in ("embed.weight", "lm_head.weight"):
        bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / name, glob=name)
        assert_same(loaded(tmp_path / name), {name: tied})


def test_companions_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    like = base_model(tmp_path / "base")
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(8)}})
    result = bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", like=like)
    assert names_in(tmp_path / "hf") == sorted(result.files) == [
        "chat_template.jinja", "config.json", "generation_config.json", "merges.txt", "model.safetensors",
        "modeling_odd.py", "tokenizer.json", "tokenizer.model",
    ]  # fmt: skip
    for name in result.files:
        if name != "model.safetensors":
            assert (tmp_path / "hf" / name).read_bytes() == (like / name).read_bytes()


def test_the_configuration_names_the_dtype_of_the_weights(tmp_path: Path) -> None:
    like = base_model(tmp_path / "base")
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(8), "scale": torch.ones(1).double(), "n": torch.arange(99)}})
    bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", like=like, dtype="bfloat16")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == CONFIG | {"dtype": "bfloat16"}
    (like / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", like=like, overwrite=True)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"torch_dtype": "float32"}
    (like / "config.json").write_text('{"model_type": "x"}')
    bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", like=like, overwrite=True)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "x", "torch_dtype": "float32"}


def test_a_folder_of_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    base, snapshot = base_model(tmp_path / "blobs"), tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).symlink_to(base / name)
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(8)}})
    bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", like=snapshot)
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == b"this is tokenizer.json"
    assert not (tmp_path / "hf" / "tokenizer.json").is_symlink()


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ("missing", "cannot be read"),
        ("", "the path is empty"),
        (3, "like=3"),
        ("empty", "has no config.json"),
        ("broken", "is no JSON"),
        ("list", "is no JSON object"),
    ],
)
def test_a_folder_to_copy_from_that_cannot_be_any(like: Any, words: str, tmp_path: Path) -> None:
    for name, content in {"broken": "{", "list": "[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    (tmp_path / "empty").mkdir()
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(8)}})
    with pytest.raises(InputError, match=words):
        bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", like=tmp_path / like if like and like != 3 else like)
    assert not (tmp_path / "hf").exists()


def test_older_weights_are_refused_or_replaced_and_other_files_stay(tmp_path: Path) -> None:
    states = {f"layer.{n}": torch.full((10,), n) for n in range(5)}
    bcp.save(tmp_path / "ckpt", {"model": states})
    folder = base_model(tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").unlink()
    bcp.tools.export_hf(tmp_path / "ckpt", folder, shard_bytes=100)
    assert_same(loaded(folder), states)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(ExistsError, match=r"model-00001-of-00005\.safetensors.* and 3 more already"):
        bcp.tools.export_hf(tmp_path / "ckpt", folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    bcp.tools.export_hf(tmp_path / "ckpt", folder, overwrite=True)
    assert_same(loaded(folder), states)
    assert [name for name in names_in(folder) if name.startswith("model")] == ["model.safetensors", "modeling_odd.py"]
    with pytest.raises(ExistsError, match=r"config\.json"):
        bcp.tools.export_hf(tmp_path / "ckpt", base_model(tmp_path / "other"), like=folder)


def test_a_checkpoint_is_no_target(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(8)}})
    with pytest.raises(InputError, match="is a checkpoint of bcp"):
        bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "ckpt", overwrite=True)
    assert bcp.Checkpoint(tmp_path / "ckpt").verify()


@pytest.mark.parametrize("source", ["hf", "hf/model.safetensors", "file://{}/hf", "link"])
def test_the_folder_of_the_source_is_no_target(source: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    save_file({"w": torch.ones(8)}, tmp_path / "hf" / "model.safetensors")
    source = source.format(tmp_path) if "{}" in source else f"{tmp_path}/{source}"
    with pytest.raises(InputError, match=r"would delete model\.safetensors before it reads the file"):
        bcp.tools.export_hf(source, tmp_path / "hf", dtype=torch.bfloat16, overwrite=True)
    assert_same(loaded(tmp_path / "hf"), {"w": torch.ones(8)})
    bcp.tools.export_hf(source, tmp_path / "other", dtype=torch.bfloat16)
    assert_same(loaded(tmp_path / "other"), {"w": torch.ones(8, dtype=torch.bfloat16)})


def test_the_folder_of_the_source_in_a_store_is_no_target(tmp_path: Path) -> None:
    save_file({"w": torch.ones(8)}, tmp_path / "model.safetensors")
    store = MemoryBackend(str(tmp_path))
    asyncio.run(store.put("model.safetensors", (tmp_path / "model.safetensors").read_bytes()))
    with pytest.raises(InputError, match="the folder of the source, too"):
        bcp.tools.export_hf(store, MemoryBackend(str(tmp_path)), overwrite=True)
    bcp.tools.export_hf(store, MemoryBackend(f"{tmp_path} other"), overwrite=True)


@pytest.mark.parametrize("shard_bytes", [0, -1, 2.5, True, "5GB"])
def test_sizes_of_files_that_cannot_be_any(shard_bytes: Any, tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(8)}})
    with pytest.raises(InputError, match="shard_bytes="):
        bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf", shard_bytes=shard_bytes)


def test_a_backend_and_a_url_are_targets_too(tmp_path: Path) -> None:
    like = base_model(tmp_path / "base")
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(8), "v": torch.ones(2)}})
    bcp.tools.export_hf(tmp_path / "ckpt", backend := MemoryBackend(str(tmp_path)), like=like, shard_bytes=8)
    bcp.tools.export_hf(tmp_path / "ckpt", f"file://{tmp_path}/hf", like=like, shard_bytes=8)
    bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "again", like=f"file://{like}", shard_bytes=8)
    assert_same(loaded(tmp_path / "hf"), {"w": torch.ones(8), "v": torch.ones(2)})
    for path in (tmp_path / "hf").iterdir():
        assert bytes(backend._objects[path.name]) == path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
