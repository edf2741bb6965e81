"""Files of other libraries become checkpoints of the same bits, in little memory, by one rank or by several."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import bcp
from bcp.backends import LocalBackend
from bcp.errors import StorageError
from bcp.extend import Codec
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

ZLIB = Codec("zlib", zlib.compress, zlib.decompress)


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "large": torch.rand(1300, 1001, generator=generator),
        "cube": torch.rand(3, 5, 7, generator=generator).bfloat16(),
        "ints": torch.arange(11),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
    }


def as_safetensors(folder: Path) -> Path:
    save_file(tensors(), folder / "model.safetensors")
    return folder / "model.safetensors"


def as_hugging_face(folder: Path) -> Path:
    save_file(tensors(), folder / "model.safetensors")
    return folder


def as_torch(folder: Path) -> Path:
    torch.save(tensors(), folder / "weights.pt")
    return folder / "weights.pt"


def as_dcp(folder: Path) -> Path:
    dcp.save(tensors(), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


WAYS = [as_safetensors, as_hugging_face, as_torch, as_dcp]


def check(path: Path, options: bcp.LoadOptions | None = None) -> None:
    """Compare a checkpoint with the tensors, bit by bit, as torch reads them."""
    ckpt = bcp.Checkpoint(path, options=options)
    assert ckpt.verify()
    expected = tensors()
    assert ckpt.names() == sorted(expected)
    for name, tensor in expected.items():
        found = ckpt.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    model = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    bcp.load(path, {"model": model}, options=options)
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # DCP's, in a single process
@pytest.mark.parametrize("way", WAYS)
def test_every_format_arrives_to_the_bit(tmp_path: Path, way: Any) -> None:
    told: list[tuple[int, int]] = []
    result = bcp.tools.import_files(way(tmp_path), tmp_path / "ckpt", progress=lambda *pair: told.append(pair))
    nbytes = sum(tensor.nbytes for tensor in tensors().values())
    assert told[-1] == (nbytes, nbytes)
    assert (result.tensors, result.values) == (6, 0)
    check(tmp_path / "ckpt")


def test_a_codec_and_small_parts(tmp_path: Path) -> None:
    """Tensors are cut between parts, so parts begin and end inside of rows."""
    options = bcp.SaveOptions(codecs=[ZLIB], part_bytes=1 << 20)
    bcp.tools.import_files(as_torch(tmp_path), tmp_path / "ckpt", options=options)
    check(tmp_path / "ckpt", bcp.LoadOptions(codecs=[ZLIB]))


def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    bcp.tools.import_files(tmp_path / "both.pt", tmp_path / "ckpt")
    assert not bcp.tools.diff(tmp_path / "both.pt", tmp_path / "ckpt")
    model_only = bcp.tools.import_files(tmp_path / "both.pt", tmp_path / "bare", values=False)
    assert model_only.values == 0
    assert bcp.Checkpoint(tmp_path / "bare").values == {}


def test_a_checkpoint_of_bcp_and_an_older_one_at_the_target(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(3)}})
    with pytest.raises(bcp.InputError, match=r"bcp\.tools\.copy"):
        bcp.tools.import_files(tmp_path / "ckpt", tmp_path / "other")
    with pytest.raises(bcp.ExistsError, match="overwrite=True"):
        bcp.tools.import_files(as_torch(tmp_path), tmp_path / "ckpt")
    assert bcp.Checkpoint(tmp_path / "ckpt").names() == ["w"]
    bcp.tools.import_files(tmp_path / "weights.pt", tmp_path / "ckpt", overwrite=True)
    check(tmp_path / "ckpt")


def test_a_read_that_fails_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(3)}})
    (tmp_path / "hf").mkdir()
    folder = as_hugging_face(tmp_path / "hf")
    size = (folder / "model.safetensors").stat().st_size
    backend = FaultyBackend(LocalBackend(folder), "read_scattered", StorageError("the disk is gone"), nth=2)
    assert size > 1 << 20
    with pytest.raises(bcp.BcpError, match="the disk is gone"):
        bcp.tools.import_files(backend, tmp_path / "ckpt", overwrite=True, options=bcp.SaveOptions(part_bytes=1 << 20))
    assert bcp.Checkpoint(tmp_path / "ckpt").names() == ["w"]
    assert bcp.tools.collect(tmp_path / "ckpt", min_age_seconds=0, dry_run=True) == []


def _imported(source: Path, target: Path) -> int:
    backend = CountingBackend(LocalBackend(source))
    bcp.tools.import_files(backend, target)
    return backend.read["model.safetensors"]


@pytest.mark.dist
def test_ranks_read_and_write_equal_shares(ranks4: Ranks, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    as_hugging_face(tmp_path / "hf")
    read = ranks4.run(_imported, tmp_path / "hf", tmp_path / "ckpt")
    nbytes = sum(tensor.nbytes for tensor in tensors().values())
    assert nbytes <= sum(read) <= nbytes + 4 * (64 << 10)
    assert max(read) <= nbytes // 4 + (64 << 10)
    check(tmp_path / "ckpt")
