"""Any damage to a foreign file is an error of bcp's own, or makes other bytes of the file part of a tensor."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from samples import sample

import bcp

TIMES = 150


def of_safetensors(folder: Path) -> tuple[Path, Path]:
    save_file({"w": torch.ones(3, 4), "v": torch.zeros(2).bfloat16()}, folder / "w.safetensors")
    return folder, folder / "w.safetensors"


def of_torch(folder: Path) -> tuple[Path, Path]:
    model = {"w": torch.ones(3, 4), "v": torch.zeros(2).bfloat16(), "f": torch.ones(2).to(torch.float8_e5m2)}
    torch.save({"model": model, "epoch": 3, "names": ["a", ("b", 1.5)]}, folder / "w.pt")
    return folder / "w.pt", folder / "w.pt"


def of_dcp(folder: Path) -> tuple[Path, Path]:
    dcp.save({"model": {"w": torch.ones(3, 4), "v": torch.zeros(2)}, "epoch": 3}, checkpoint_id=folder, no_dist=True)
    return folder, folder / ".metadata"


def of_dcp_data(folder: Path) -> tuple[Path, Path]:
    path, _ = of_dcp(folder)
    return path, folder / "__0_0.distcp"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("make", sample([of_safetensors, of_torch, of_dcp, of_dcp_data], of_safetensors, of_dcp))
def test_changed_bytes(tmp_path: Path, make: Callable[[Path], tuple[Path, Path]]) -> None:
    path, file = make(tmp_path)
    data, chance = file.read_bytes(), random.Random(7)  # noqa: S311 -- no secret
    for _ in range(TIMES):
        changed = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 8])):
            changed[chance.randrange(len(changed))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        if chance.random() < 0.1:
            first, last = sorted(chance.randrange(len(changed)) for _ in range(2))
            del changed[first : min(last, first + 20)]
        file.write_bytes(changed)
        with suppress(bcp.CheckpointError):
            ckpt = bcp.Checkpoint(path)
            for name in ckpt.names():
                assert ckpt.read(name).nbytes <= len(data)
            _ = ckpt.values
