"""A checkpoint with a dtype of a newer torch: its other tensors are read, and errors name the tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bcp
from bcp.format.metadata import METADATA_KEY, decode_metadata, encode_layout, encode_metadata


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Save two tensors, and give one a dtype that torch lacks."""
    bcp.save(tmp_path / "ckpt", {"model": {"new": torch.ones(4).bfloat16(), "old": torch.arange(3.0)}})
    file = tmp_path / "ckpt" / METADATA_KEY
    found = decode_metadata(file.read_bytes(), "it")
    tensors = found.layout.tensors
    dtypes = ["float3" if dtype == "bfloat16" else dtype for dtype in tensors.dtype]
    layout = replace(found.layout, tensors=replace(tensors, dtype=dtypes))
    file.write_bytes(encode_metadata(encode_layout(layout), found.commit))
    return tmp_path / "ckpt"


def test_a_read_names_the_dtype(path: Path) -> None:
    ckpt = bcp.Checkpoint(path)
    assert ckpt.verify()
    assert torch.equal(ckpt.read("old"), torch.arange(3.0))
    with pytest.raises(bcp.DtypeMismatchError, match="float3"):
        ckpt.read("new")


def test_an_export_names_the_tensor(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    with pytest.raises(bcp.InputError, match=r"model tensor 'new': .*float3.*glob="):
        bcp.tools.export_safetensors(path, target)
    assert bcp.tools.export_safetensors(path, target, glob="old").tensors == 1


def test_an_edit_names_the_tensor_and_keeps_it(path: Path) -> None:
    with pytest.raises(bcp.InputError, match=r"cast of 'new': .*float3"):
        bcp.tools.edit(path, cast={"*": torch.float64})
    bcp.tools.edit(path, cast={"old": torch.float64}, rename={"new": "newer"})
    ckpt = bcp.Checkpoint(path)
    assert (ckpt["newer"].dtype, ckpt["old"].dtype) == ("float3", "float64")
    assert ckpt.verify()
