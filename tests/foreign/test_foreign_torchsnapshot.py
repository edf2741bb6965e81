"""Folders that torchsnapshot 0.1.0 has saved on two ranks: a model under DDP in chunks, and sharded tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import Evil
from others import fully_sharded
from ranks import Ranks
from safetensors.torch import load_file

import bcp

DATA = Path(__file__).parent.parent / "data" / "foreign"
MANIFEST = ".snapshot_metadata"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(DATA / f"torchsnapshot-{kind}", tmp_path / "copy"))


def expected() -> dict[str, torch.Tensor]:
    return load_file(DATA / "expected.safetensors")


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the entries of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest["manifest"])
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_model_and_its_optimizer() -> None:
    ckpt, wanted = bcp.Checkpoint(DATA / "torchsnapshot-ddp"), expected()
    found = {f"{part}: {name}": ckpt.read(name, kind=part) for part, name in ckpt.tensors}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert ckpt.values["optimizer", "param_groups.0.bias.lr"] == 0.25
    assert ckpt.values["optimizer", "param_groups.1.weight.betas"] == (0.5, 0.75)
    facts = {"progress.epoch": 3, "progress.rate": 0.1, "progress.name": "run", "progress.done": False}
    assert ckpt.user_metadata["torchsnapshot"] == {**facts, "left_out": ["progress.blob"]}


def test_sharded_tensors_and_one_of_another_dtype() -> None:
    ckpt, wanted = bcp.Checkpoint(DATA / "torchsnapshot-sharded"), expected()
    assert ckpt.read("flag").tolist() == [1 + 2j]
    names = [name for name in ckpt.names() if name != "flag"]
    assert {f"model: {name}" for name in names} == {name for name in wanted if name.startswith("model")}
    assert all(torch.equal(ckpt.read(name), wanted[f"model: {name}"]) for name in names)


@pytest.mark.dist
def test_four_ranks_of_fsdp2_go_on(ranks4: Ranks) -> None:
    wanted = expected()
    for found in ranks4.run(fully_sharded, DATA / "torchsnapshot-ddp"):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_import_with_a_copy_and_without(tmp_path: Path, copied: Callable[[str], Path]) -> None:
    folder = copied("ddp")
    bcp.tools.import_files(folder, tmp_path / "imported")
    bcp.tools.import_files(folder, copy=False)
    assert not bcp.tools.diff(folder, tmp_path / "imported")


def test_a_malicious_object_is_refused_by_name(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("ddp")
    torch.save(Evil(tmp_path / "made"), folder / "replicated" / "optimizer" / "param_groups" / "0" / "betas")
    with pytest.raises(bcp.CheckpointError, match=r"0/betas names posix\.mkdir, which bcp does not read; nothing"):
        bcp.Checkpoint(folder).names()
    assert not (tmp_path / "made").exists()


NAME = "0/model/module.1.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"location": "../secret"}, "leaves the folder"),
        ({"location": "/etc/passwd"}, "leaves the folder"),
        ({"location": "batched/none"}, "missing or a link"),
        ({"byte_range": [0, 1 << 60]}, "is said to lie in bytes 0 to"),
        ({"byte_range": [8, 12]}, "is said to have 12 bytes, and 4 of"),
        ({"shape": [1 << 61]}, "is said to have"),
        ({"shape": [-1]}, "which no tensor has"),
    ],
)
def test_a_lying_manifest(copied: Callable[[str], Path], change: dict[str, Any], words: str) -> None:
    folder = copied("ddp")
    changed(folder, lambda entries: entries[NAME].update(change))
    with pytest.raises(bcp.CorruptError, match=words):
        bcp.Checkpoint(folder).names()


def test_what_is_not_read_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("ddp")
    other = f"1{NAME[1:]}"
    changed(folder, lambda entries: entries.update({other: {**entries[NAME], "replicated": False}}))
    with pytest.raises(bcp.CheckpointError, match="a tensor of its own on each of 2 ranks"):
        bcp.Checkpoint(folder).names()
    changed(folder, lambda entries: (entries.pop(other), entries[NAME].update(serializer="per_tensor_qtensor")))
    with pytest.raises(bcp.CheckpointError, match="was written as 'per_tensor_qtensor'"):
        bcp.Checkpoint(folder).names()
    (folder / MANIFEST).write_text("version: 0.0.1\n")
    with pytest.raises(bcp.CheckpointError, match="is no JSON, as torchsnapshot"):
        bcp.Checkpoint(folder).names()


def test_pieces_that_leave_a_part_out(copied: Callable[[str], Path]) -> None:
    folder = copied("sharded")
    changed(folder, lambda entries: entries["0/model/0.weight"]["shards"].pop())
    with pytest.raises(bcp.CorruptError, match=r"pieces of model tensor '0\.weight' of shape"):
        bcp.Checkpoint(folder).names()
