"""A checkpoint is compared with its checksums: every kind of damage is found, and no sound one is called damaged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from golden.cases import CASES
from golden.expected import DATA, read

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import CountingBackend


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Save a checkpoint with a large file and small ones."""
    states = {"model": {"w": torch.rand(3 << 18), "b": torch.rand(3)}, "extra_states": {"epoch": 3}}
    bcp.save(tmp_path / "ckpt", states)
    return tmp_path / "ckpt"


def only(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.tar])
def test_golden_checkpoints_are_sound(name: str) -> None:
    for part in read(DATA / name).parts:
        found = bcp.Checkpoint(DATA / name / "checkpoint" / part.folder / (part.role or "")).verify()
        assert found, str(found)
        assert found.unverified == (found.files if CASES[name].is_foreign else 0)
        assert found.blocks >= found.files - found.unverified


def test_all_bytes_are_read_and_counted(path: Path) -> None:
    backend = CountingBackend(LocalBackend(path))
    found = bcp.Checkpoint(backend).verify()
    assert found.files == 2
    files = [*(path / "model").iterdir(), *(path / "extra_states").iterdir()]
    assert found.nbytes == sum(file.stat().st_size for file in files)
    assert all(backend.read[str(file.relative_to(path))] == file.stat().st_size for file in files)


def test_a_fast_look_reads_no_data(path: Path) -> None:
    backend = CountingBackend(LocalBackend(path))
    found = bcp.Checkpoint(backend).verify(fast=True)
    assert (bool(found), found.files, found.blocks, found.nbytes) == (True, 2, 0, 0)
    assert not [key for key in backend.read if key.startswith(("model", "extra_states"))]


def test_any_flipped_bit_is_found_and_placed(path: Path) -> None:
    file = only(path / "model")
    sound = file.read_bytes()
    chance = random.Random(5)  # noqa: S311 -- no secret
    for at in [0, 8, len(sound) - 1, *(chance.randrange(len(sound)) for _ in range(20))]:
        data = bytearray(sound)
        data[at] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        found = bcp.Checkpoint(path).verify()
        assert not found
        (damage,) = found.damage
        assert damage.startswith(f"model/{file.name} is corrupt: bytes ")
        start, stop = (int(word) for word in damage.split("bytes ")[1].split(" have")[0].split(" to "))
        assert start <= at < stop
        assert bcp.Checkpoint(path).verify(fast=True), "no data was read"


def cut(path: Path) -> str:
    file = only(path / "model")
    file.write_bytes(file.read_bytes()[:-1])
    return f"model/{file.name} has {file.stat().st_size} bytes, and was saved with {file.stat().st_size + 1}"


def gone(path: Path) -> str:
    file = only(path / "extra_states")
    file.unlink()
    return f"extra_states/{file.name} is missing"


def no_receipt(path: Path) -> str:
    file = only(path / "receipts")
    file.unlink()
    return f"receipts/{file.name} is missing"


def other_receipt(path: Path) -> str:
    file = only(path / "receipts")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    return f"receipts/{file.name} is not the receipt that operation"


def stale(path: Path) -> str:
    """Put back the table of contents of an earlier save, as a backup that was restored in part would."""
    old = (path / "metadata.arrow").read_bytes()
    before = bcp.Checkpoint(path).operation
    after = bcp.save(path, {"model": {"w": torch.rand(4)}}, overwrite=True).operation
    (path / "metadata.arrow").write_bytes(old)
    return f"metadata.arrow is of operation {before}, and all files are of {after}"


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("damage", [cut, gone, no_receipt, other_receipt, stale])
def test_any_damage_is_found(path: Path, damage: Callable[[Path], str], *, fast: bool) -> None:
    says = damage(path)
    found = bcp.Checkpoint(path).verify(fast=fast)
    assert not found
    assert found.damage[0].startswith(says), found.damage
    assert str(found).startswith("DAMAGED: ")


def test_all_damaged_files_are_named(path: Path) -> None:
    said = [cut(path), gone(path)]
    found = bcp.Checkpoint(path).verify()
    assert len(found.damage) == 2
    assert all(any(each.startswith(says) for each in found.damage) for says in said)


def test_files_of_other_saves_are_counted_and_do_no_harm(path: Path) -> None:
    file = only(path / "model")
    shutil.copy(file, file.with_name("00000-0123456789abcdef.safetensors"))
    found = bcp.Checkpoint(path).verify()
    assert found
    assert found.others == ("model/00000-0123456789abcdef.safetensors",)
    assert "1 files of other saves" in str(found)


def test_the_table_of_contents_itself_is_checked_when_it_is_opened(path: Path) -> None:
    data = bytearray((path / "metadata.arrow").read_bytes())
    data[100] ^= 1
    (path / "metadata.arrow").write_bytes(data)
    with pytest.raises(bcp.CorruptError, match=r"metadata\.arrow"):
        bcp.Checkpoint(path).verify()
