"""A load of a checkpoint that another library wrote reads it, or says which one it is, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import bcp
from bcp.backends import MemoryBackend


def states() -> dict[str, Any]:
    return {"model": {"w": torch.ones(3)}}


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_folder_of_dcp_loads(tmp_path: Path) -> None:
    dcp.save({"w": torch.full((3,), 7.0)}, checkpoint_id=tmp_path)
    target = states()
    bcp.load(tmp_path, target)
    assert target["model"]["w"].tolist() == [7.0] * 3


@pytest.mark.filterwarnings("ignore")  # torch's own
def test_a_folder_above_one_of_dcp_says_what_to_pass(tmp_path: Path) -> None:
    dcp.save({"w": torch.full((3,), 7.0)}, checkpoint_id=tmp_path / "step-3")
    with pytest.raises(bcp.NotACheckpointError, match=rf"torch\.distributed\.checkpoint .*pass {tmp_path}/step-3"):
        bcp.load(tmp_path, states())


@pytest.mark.parametrize(
    ("name", "in_folder"),
    [("model.pt", False), ("model.safetensors", False), ("model.safetensors", True), ("w", False)],
)
def test_a_file_of_torch_or_safetensors_loads(tmp_path: Path, name: str, *, in_folder: bool) -> None:
    if name.endswith("safetensors"):
        save_file({"w": torch.full((3,), 7.0)}, tmp_path / name)
    else:
        torch.save({"w": torch.full((3,), 7.0)}, tmp_path / name)
    target = states()
    bcp.load(tmp_path if in_folder else tmp_path / name, target)
    assert target["model"]["w"].tolist() == [7.0] * 3


def test_a_folder_with_a_file_of_torch_says_what_to_pass(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(bcp.NotACheckpointError, match=r"has model\.pt, a file of torch\.save: pass that file"):
        bcp.load(tmp_path, states())


def test_any_other_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a user's own")
    with pytest.raises(bcp.NotACheckpointError, match="notes is not a checkpoint but a file that bcp does not know"):
        bcp.load(tmp_path / "notes", states())


@pytest.mark.parametrize("url", ["memory://foreign-file/model.pt", "memory://foreign-file/deep/down/model.safetensors"])
def test_a_file_in_a_store_loads(tmp_path: Path, url: str) -> None:
    key = url.removeprefix("memory://foreign-file/")
    tensors = {"w": torch.full((3,), 7.0)}
    (torch.save if url.endswith("pt") else save_file)(tensors, tmp_path / "file")
    store = MemoryBackend("foreign-file")
    store._objects |= {key: (tmp_path / "file").read_bytes(), f"{key}.index.json": b"not this", "other.pt": b"PK"}
    try:
        target = states()
        assert bcp.load(url, target).unverified
        assert target["model"]["w"].tolist() == [7.0] * 3
        assert bcp.Checkpoint(url).verify().unverified == 1
        with pytest.raises(bcp.NotACheckpointError, match=r"absent\.pt is not a checkpoint: there are no files"):
            bcp.load("memory://foreign-file/absent.pt", states())
    finally:
        MemoryBackend.forget("foreign-file")


def test_a_checkpoint_of_bcp_may_be_called_like_a_file() -> None:
    try:
        bcp.save("memory://foreign-name/run/model.pt", {"model": {"w": torch.full((3,), 7.0)}})
        target = states()
        assert not bcp.load("memory://foreign-name/run/model.pt", target).unverified
        assert target["model"]["w"].tolist() == [7.0] * 3
        assert bcp.Checkpoint("memory://foreign-name/run/model.pt").verify()
    finally:
        MemoryBackend.forget("foreign-name")


def test_a_table_of_contents_that_no_save_writes(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "metadata.arrow").write_bytes(b"x" * 30 + b"BCPFRGN\x01")
    with pytest.raises(bcp.NotACheckpointError, match=r"metadata\.arrow was not written by a save of bcp"):
        bcp.load(tmp_path, states())
