"""A load of a checkpoint that another library wrote says which one it is, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import bcp


def states() -> dict[str, Any]:
    return {"model": {"w": torch.ones(3)}}


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("below", ["", "step-3"])
def test_a_folder_of_dcp_is_recognized_and_its_way_works(tmp_path: Path, below: str) -> None:
    dcp.save({"w": torch.full((3,), 7.0)}, checkpoint_id=tmp_path / "dcp" / below)
    with pytest.raises(
        bcp.NotACheckpointError, match=r"dcp is not .* but one of torch\.distributed\.checkpoint: load it"
    ):
        bcp.load(tmp_path / "dcp", states())
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=tmp_path / "dcp" / below)
    bcp.save(tmp_path / "bcp", {"model": state})
    target = states()
    bcp.load(tmp_path / "bcp", target)
    assert target["model"]["w"].tolist() == [7.0] * 3


@pytest.mark.parametrize(
    ("name", "in_folder"),
    [("model.pt", False), ("model.pt", True), ("model.safetensors", False), ("model.safetensors", True), ("w", False)],
)
def test_a_file_of_torch_or_safetensors_is_recognized(tmp_path: Path, name: str, *, in_folder: bool) -> None:
    kind = "safetensors" if name.endswith("safetensors") else "torch.save"
    if kind == "safetensors":
        save_file({"w": torch.ones(3)}, tmp_path / name)
    else:
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    with pytest.raises(bcp.NotACheckpointError, match=rf"{name}.* a .*{kind}.*: read it with .* with bcp\.save"):
        bcp.load(tmp_path if in_folder else tmp_path / name, states())


def test_any_other_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a user's own")
    with pytest.raises(
        bcp.NotACheckpointError, match="notes is not a checkpoint of bcp but a file, and a checkpoint is a folder"
    ):
        bcp.load(tmp_path / "notes", states())


def test_a_file_in_a_store_is_known_by_its_name() -> None:
    with pytest.raises(bcp.NotACheckpointError, match=r"by its name a file of torch\.save"):
        bcp.load("memory://foreign/model.pt", states())
