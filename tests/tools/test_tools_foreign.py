"""Tools and files of other libraries: what can be read is compared, and nothing is copied or deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bcp


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a safetensors file, and a checkpoint of the same tensors."""
    tensors = {"a": torch.rand(3, 4), "b": torch.arange(5)}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    bcp.save(tmp_path / "ckpt", {"model": tensors})
    return tmp_path


def test_they_are_compared_with_a_checkpoint(folder: Path) -> None:
    difference = bcp.tools.diff(folder / "ckpt", folder / "hf")
    assert not difference
    assert difference.equal == 2
    model = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.int64)}
    bcp.load(folder / "hf", {"model": model})
    model["a"][1, 2] += 1.0
    bcp.save(folder / "other", {"model": model})
    (found,) = bcp.tools.diff(folder / "hf", folder / "other").tensors
    assert (found.name, found.elements) == ("a", 1)


def test_they_are_neither_copied_nor_deleted(folder: Path) -> None:
    with pytest.raises(bcp.InputError, match="another library"):
        bcp.tools.copy(folder / "hf", folder / "copy")
    assert not (folder / "copy").exists()
    for force in (False, True):
        with pytest.raises(bcp.NotACheckpointError, match="another library"):
            bcp.tools.remove(folder / "hf", force=force)
    assert bcp.tools.collect(folder / "hf", min_age_seconds=0) == []
    assert [path.name for path in (folder / "hf").iterdir()] == ["model.safetensors"]


def test_they_are_exported(folder: Path) -> None:
    expected = load_file(folder / "hf" / "model.safetensors")
    bcp.tools.export_safetensors(folder / "hf", folder / "again.safetensors")
    bcp.tools.export_torch(folder / "hf", folder / "again.pt", kind="model")
    for found in (load_file(folder / "again.safetensors"), torch.load(folder / "again.pt", weights_only=True)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
