"""Folders of Hugging Face by reference, held against safetensors and torch's own reader of such folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.testing.storage_fakes import CountingBackend

INDEX = "model.safetensors.index.json"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "model.embed_tokens.weight": torch.rand(12, 6).bfloat16(),
        "model.layers.0.mlp.weight": torch.rand(7, 6),
        "model.layers.0.norm.weight": torch.rand(6),
        "lm_head.weight": torch.rand(12, 6).bfloat16(),
    }


def write_folder(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 2) -> Path:
    """Write shards and their index as ``save_pretrained`` names them."""
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        own = names[number::shards]
        save_file({name: tensors[name].contiguous() for name in own}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", weights())


def test_a_sharded_folder_loads_by_its_names(folder: Path) -> None:
    target = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    result = bcp.load(folder, {"model": target})
    for name, tensor in weights().items():
        assert torch.equal(target[name], tensor), name
    assert result.unverified
    assert result.read_nbytes == result.nbytes
    ckpt = bcp.Checkpoint(folder)
    assert ckpt.framework == "hugging-face"
    assert ckpt.nbytes == sum(tensor.nbytes for tensor in weights().values())


def test_a_folder_of_one_file_loads_by_its_names(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    ckpt = bcp.Checkpoint(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(ckpt.read(name), tensor)


def test_a_store_serves_a_folder(folder: Path) -> None:
    url, stored = "memory://foreign-hub/llama", MemoryBackend("foreign-hub")._objects
    for file in folder.iterdir():
        stored[f"llama/{file.name}"] = file.read_bytes()
    try:
        assert torch.equal(bcp.Checkpoint(url).read("lm_head.weight"), weights()["lm_head.weight"])
        target = {"lm_head.weight": torch.zeros(12, 6, dtype=torch.bfloat16)}
        bcp.load(url, {"model": target}, strict=False)
        assert torch.equal(target["lm_head.weight"], weights()["lm_head.weight"])
    finally:
        MemoryBackend.forget("foreign-hub")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_the_folder_of_torchs_own_writer_is_read(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter  # noqa: PLC0415 -- imports much

    names = sorted(weights())
    writer = HuggingFaceStorageWriter(
        str(tmp_path), fqn_to_index_mapping={name: 1 + n % 2 for n, name in enumerate(names)}
    )
    dcp.save(weights(), storage_writer=writer, no_dist=True)
    ckpt = bcp.Checkpoint(tmp_path)
    assert ckpt.names() == names
    for name, tensor in weights().items():
        assert torch.equal(ckpt.read(name), tensor)


def test_opening_reads_headers_alone(folder: Path) -> None:
    backend = CountingBackend(LocalBackend(folder))
    bcp.Checkpoint(backend).names()
    for file in folder.glob("*.safetensors"):
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert backend.read[file.name] == header


class Tied(torch.nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_model_takes_either_name(tmp_path: Path, name: str) -> None:
    save_file({name: torch.rand(5, 3, generator=torch.Generator().manual_seed(2))}, tmp_path / "model.safetensors")
    model = Tied()
    bcp.load(tmp_path, {"model": model})
    expected = load_file(tmp_path / "model.safetensors")[name]
    assert torch.equal(model.embed.weight, expected)
    assert model.head.weight is model.embed.weight


# -- bad input ------------------------------------------------------------------------------------


def refused(folder: Path, words: str) -> None:
    with pytest.raises(bcp.CheckpointError, match=words):
        bcp.Checkpoint(folder).names()
    target = {"lm_head.weight": torch.zeros(12, 6, dtype=torch.bfloat16)}
    with pytest.raises(bcp.CheckpointError, match=words):
        bcp.load(folder, {"model": target}, strict=False)
    assert not target["lm_head.weight"].any()


def test_a_missing_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "names model-00002-of-00002.safetensors, which is missing")


@pytest.mark.parametrize("key", ["/etc/passwd", "../model.safetensors", "a/../../b", "a\0b", "a\\b", ""])
def test_a_shard_outside_of_the_folder(folder: Path, key: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = key
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "which leaves the folder")


def test_a_shard_that_is_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    refused(folder, "which is missing or a link")


def test_a_folder_of_links_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for file in folder.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    with pytest.raises(bcp.NotACheckpointError, match=r"has links and no files.*cp -rL"):
        bcp.Checkpoint(tmp_path / "snapshot").names()


def test_an_index_of_another_model(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.1.mlp.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "index and shards are of different models")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": 3}}', '{"weight_map'])
def test_a_damaged_index(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    refused(folder, f"{INDEX}.*(is damaged|no weight_map)")


def test_a_tensor_in_two_files(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file({"lm_head.weight": torch.zeros(12, 6)}, folder / "other.safetensors")
    refused(folder, "'lm_head.weight' in .* and in")


def test_two_models_in_a_folder(folder: Path) -> None:
    (folder / f"other.{INDEX}").write_text((folder / INDEX).read_text())
    refused(folder, "indices of 2 models")


@pytest.mark.parametrize("method", ["mxfp4", "fp8", "bitsandbytes", "gptq", "awq"])
def test_a_quantized_model_is_refused_by_name(folder: Path, method: str) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    refused(folder, f"is quantized .*{method}")


def test_a_folder_above_is_told(folder: Path) -> None:
    with pytest.raises(bcp.NotACheckpointError, match=f"pass {folder.parent}/hf"):
        bcp.Checkpoint(folder.parent).names()


def test_renames_and_casts_work_as_for_a_save(folder: Path) -> None:
    target = {"embed.weight": torch.zeros(12, 6), "head.weight": torch.zeros(12, 6)}
    rename = [(r"^model\.embed_tokens\.", "embed."), (r"^lm_head\.", "head.")]
    bcp.load(folder, {"model": target}, strict=False, options=bcp.LoadOptions(rename=rename, cast=True))
    assert torch.equal(target["embed.weight"], weights()["model.embed_tokens.weight"].float())
    assert torch.equal(target["head.weight"], weights()["lm_head.weight"].float())


@pytest.mark.anyio
async def test_coroutines_read_it_as_well(folder: Path) -> None:
    async with bcp.AsyncCheckpoint(folder) as ckpt:
        assert torch.equal(await ckpt.read("lm_head.weight", (slice(2, 5),)), weights()["lm_head.weight"][2:5])
        assert (await ckpt.verify()).unverified == 2


# -- folders without safetensors ------------------------------------------------------------------


def write_bins(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Write shards of ``torch.save`` and their index, as older versions of transformers do."""
    folder.mkdir()
    names = sorted(tensors)
    weight_map = {name: f"pytorch_model-{1 + n % 2:05d}-of-00002.bin" for n, name in enumerate(names)}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_of_torch_files(tmp_path: Path) -> None:
    folder = write_bins(tmp_path / "bins", weights())
    target = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    result = bcp.load(folder, {"model": target})
    for name, tensor in weights().items():
        assert torch.equal(target[name], tensor), name
    assert result.nbytes <= result.read_nbytes < result.nbytes + 4 * len(target)
    assert bcp.Checkpoint(folder).framework == "hugging-face"


def test_one_torch_file(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    for name, tensor in weights().items():
        assert torch.equal(bcp.Checkpoint(tmp_path).read(name), tensor)


def test_a_tensor_in_two_torch_files(tmp_path: Path) -> None:
    folder = write_bins(tmp_path / "bins", weights())
    index = folder / "pytorch_model.bin.index.json"
    first, second = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    assert json.loads(index.read_text())["weight_map"]["model.embed_tokens.weight"] == second
    torch.save({**torch.load(folder / first), "model.embed_tokens.weight": torch.zeros(1)}, folder / first)
    refused(folder, f"'model.embed_tokens.weight' in {first} and in {second}")


def test_torch_files_of_another_index(tmp_path: Path) -> None:
    folder = write_bins(tmp_path / "bins", weights())
    torch.save({"lm_head.weight": torch.zeros(1)}, folder / "pytorch_model-00002-of-00002.bin")
    refused(folder, "index and shards are of different models")
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    refused(folder, "names pytorch_model-00002-of-00002.bin, which is missing")
