"""A checkpoint is copied byte for byte, or not at all."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

import pytest
import torch
from anyio import to_thread
from golden.cases import CASES
from golden.expected import DATA, read

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.errors import StorageError
from bcp.format.metadata import METADATA_KEY
from bcp.protocols import Buffer, Version
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

OPERATIONS = ("put", "put_if", "open_write", "write_part", "list", "version")


def saved(path: Path, fill: float = 1.0) -> Path:
    """Save a checkpoint of several files and several parts."""
    states = {"model": {"w": torch.full((3 << 18,), fill), "b": torch.rand(3)}, "extra_states": {"epoch": 3}}
    bcp.save(path, states, options=bcp.SaveOptions(record=False))
    return path


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def same(one: Path, two: Path) -> bool:
    """Whether two folders have the same files with the same bytes, by Python's own comparison."""
    names = files(one)
    return names == files(two) and filecmp.cmpfiles(one, two, names, shallow=False) == (names, [], [])


COPIED = [name for name, case in CASES.items() if not case.tar and not case.is_foreign and name != "since"]
"""Copies of checkpoints with references are other files: they are whole."""


@pytest.mark.parametrize("name", COPIED)
def test_golden_checkpoints_are_copied_byte_for_byte(tmp_path: Path, name: str) -> None:
    for number, part in enumerate(read(DATA / name).parts):
        source, target = DATA / name / "checkpoint" / part.folder, tmp_path / str(number)
        result = bcp.tools.copy(source, target, role=part.role)
        own, copied = source / (part.role or ""), target / (part.role or "")
        names = [each for each in files(own) if not each.startswith("telemetry/") and each.count("/") < 2]
        if part.role is None:
            assert files(copied) == [each for each in names if each.count("/") < 2]
        assert filecmp.cmpfiles(own, copied, files(copied), shallow=False)[1:] == ([], [])
        assert result.files == len(files(copied))
        assert bcp.Checkpoint(target, role=part.role).verify()


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    result = bcp.tools.copy(saved(tmp_path / "a"), tmp_path / "b", progress=lambda *pair: told.append(pair))
    assert told[-1] == (result.nbytes, result.nbytes)
    assert same(tmp_path / "a", tmp_path / "b")
    assert result.operation == bcp.Checkpoint(tmp_path / "a").operation


def test_a_committed_checkpoint_is_replaced_only_if_asked(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two", 2.0)
    before = files(two)
    with pytest.raises(bcp.ExistsError, match="pass overwrite=True"):
        bcp.tools.copy(one, two)
    assert files(two) == before
    bcp.tools.copy(one, two, overwrite=True)
    assert same(one, two)
    with pytest.raises(bcp.ExistsError, match="holds a copy of operation"):
        bcp.tools.copy(one, two, overwrite=True)
    with pytest.raises(bcp.InputError, match="to itself"):
        bcp.tools.copy(one, one, overwrite=True)


def test_two_backends_of_one_class_are_two_places(tmp_path: Path) -> None:
    one, two = MemoryBackend("copies/one"), MemoryBackend("copies/two")
    try:
        bcp.tools.copy(saved(tmp_path / "a"), one)
        assert bcp.tools.copy(one, two).nbytes
        assert bcp.Checkpoint(two).verify()
        with pytest.raises(bcp.InputError, match="to itself"):
            bcp.tools.copy(two, two)
    finally:
        MemoryBackend.forget("copies/one")
        MemoryBackend.forget("copies/two")


@pytest.mark.parametrize("kind", ["flip", "cut", "missing", "receipt"])
def test_damage_is_not_copied(tmp_path: Path, kind: str) -> None:
    source = saved(tmp_path / "a")
    (data,), (receipt,) = (source / "model").iterdir(), (source / "receipts").iterdir()
    sound = data.read_bytes()
    if kind == "flip":
        data.write_bytes(sound[:-5] + bytes([sound[-5] ^ 1]) + sound[-4:])
    elif kind == "cut":
        data.write_bytes(sound[:-1])
    elif kind == "missing":
        data.unlink()
    else:
        receipt.write_bytes(receipt.read_bytes()[:-1] + b"\0")
    with pytest.raises(bcp.CorruptError, match=data.name if kind != "receipt" else receipt.name):
        bcp.tools.copy(source, tmp_path / "b")
    assert files(tmp_path / "b") == []


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_copy_that_fails_leaves_the_older_checkpoint(tmp_path: Path, operation: str) -> None:
    source, target = saved(tmp_path / "a"), saved(tmp_path / "b", 2.0)
    older = shutil.copytree(target, tmp_path / "older")
    backend = FaultyBackend(LocalBackend(target), operation, StorageError("the disk is full"))
    with pytest.raises(bcp.BcpError):
        bcp.tools.copy(source, backend, overwrite=True)
    assert (target / METADATA_KEY).read_bytes() == (older / METADATA_KEY).read_bytes()
    assert bcp.Checkpoint(target).verify()
    bcp.tools.copy(source, target, overwrite=True)
    assert same(source, target)


def test_a_copy_whose_older_files_stay_is_committed(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "a"), saved(tmp_path / "b", 2.0)
    backend = FaultyBackend(LocalBackend(target), "delete", StorageError("the disk is gone"))
    bcp.tools.copy(source, backend, overwrite=True)
    assert bcp.Checkpoint(target).operation == bcp.Checkpoint(source).operation
    found = bcp.Checkpoint(target).verify()
    assert found
    assert found.others


@pytest.mark.anyio
async def test_a_commit_without_an_answer_may_come_late(tmp_path: Path) -> None:
    class Silent(CountingBackend):
        async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
            late.append((key, bytes(data), expected))
            raise StorageError("no answer")

    late: list[tuple[str, bytes, Version | None]] = []
    source, target = await to_thread.run_sync(lambda: (saved(tmp_path / "a"), saved(tmp_path / "b", 2.0)))
    with pytest.raises(StorageError, match="no answer"):
        await bcp.tools.acopy(source, Silent(LocalBackend(target)), overwrite=True)
    assert await LocalBackend(target).put_if(*late[0]) is not None
    async with bcp.AsyncCheckpoint(target) as ckpt:
        assert await ckpt.verify()


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_go_while_a_copy_commits_leave_no_torn_checkpoint(tmp_path: Path, overwrite: bool) -> None:  # noqa: FBT001 -- a case
    async def lose(_: str) -> None:
        next((target / "model").glob(f"*{operation}*")).unlink()

    source, target = saved(tmp_path / "a"), tmp_path / "b"
    operation = bcp.Checkpoint(source).operation
    if overwrite:
        saved(target, 2.0)
    with pytest.raises(StorageError, match="has gone since it was copied; copy again"):
        bcp.tools.copy(source, FaultyBackend(LocalBackend(target), "put_if", lose), overwrite=overwrite)
    with pytest.raises(bcp.UncommittedError):
        _ = bcp.Checkpoint(target).metadata


def test_a_source_that_is_replaced_meanwhile_is_said(tmp_path: Path) -> None:
    async def replace(_: str) -> None:
        await bcp.asave(source, {"model": {"w": torch.zeros(3)}}, overwrite=True)

    source = saved(tmp_path / "a")
    with pytest.raises(bcp.CorruptError) as caught:
        bcp.tools.copy(FaultyBackend(LocalBackend(source), "read_into", replace), tmp_path / "b")
    assert any("has replaced the checkpoint at" in note for note in caught.value.__notes__)
    assert files(tmp_path / "b") == []


def test_a_clean_up_that_fails_is_told(tmp_path: Path) -> None:
    target = FaultyBackend(LocalBackend(tmp_path / "b"), "delete", StorageError("not allowed"))
    with pytest.raises(StorageError, match="full") as caught:
        bcp.tools.copy(saved(tmp_path / "a"), FaultyBackend(target, "put", StorageError("full")))
    assert caught.value.__notes__ == ["Files of the copy may be left in FaultyBackend: not allowed"]


def test_a_copy_is_made_if_older_files_cannot_be_deleted(tmp_path: Path) -> None:
    source, target = saved(tmp_path / "a"), saved(tmp_path / "b", 2.0)
    bcp.tools.copy(source, FaultyBackend(LocalBackend(target), "delete", StorageError("not allowed")), overwrite=True)
    assert bcp.Checkpoint(target).operation == bcp.Checkpoint(source).operation
    assert bcp.Checkpoint(target).verify()


def test_any_backend_will_do(tmp_path: Path) -> None:
    source = saved(tmp_path / "a")
    try:
        bcp.tools.copy(source, "memory://copies/a")
        bcp.tools.copy("memory://copies/a", tmp_path / "b")
        assert same(source, tmp_path / "b")
    finally:
        MemoryBackend.forget("copies")


async def _twin(source: Path, target: Path) -> bool:
    await bcp.tools.acopy(source, target)
    return same(source, target)


@pytest.mark.anyio
async def test_a_coroutine_copies_too(tmp_path: Path) -> None:
    assert await _twin(saved(tmp_path / "a"), tmp_path / "b")
