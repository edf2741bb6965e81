"""Other jobs, and people, that change a path while a save runs there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from checkpoints import files, loads, metadata, model

import bcp
from bcp.backends import LocalBackend
from bcp.protocols import ObjectInfo
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend


def during(path: Path, operation: str, key: str, change: Callable[[], Any], *, nth: int = 1) -> FaultyBackend:
    """Return a backend that lets something happen, in a thread, before an operation."""

    async def hook(_: str) -> None:
        await to_thread.run_sync(change)

    return FaultyBackend(LocalBackend(path), operation, hook, key=key, nth=nth)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(
    ("operation", "key"),
    [
        ("open_write", "model"),
        ("write_part", "model"),
        ("commit", "model"),
        ("put", "receipts"),
        ("list", ""),
        ("put_if", "metadata"),
    ],
)
def test_another_job_commits_first(tmp_path: Path, operation: str, key: str, *, overwrite: bool) -> None:
    if overwrite:
        bcp.save(tmp_path, model(1))
    backend = during(tmp_path, operation, key, lambda: bcp.save(str(tmp_path), model(2), overwrite=overwrite))
    with pytest.raises(bcp.ExistsError) as caught:
        bcp.save(backend, model(3), overwrite=overwrite)
    winner = metadata(tmp_path).commit.operation
    assert winner in str(caught.value)
    assert "path of its own" in str(caught.value)
    assert loads(tmp_path, 2)
    assert len(files(tmp_path)) == 3, "the save that lost left something"


def test_a_save_that_begins_while_another_one_sweeps_loses_nothing(tmp_path: Path) -> None:
    bcp.save(tmp_path, model(1))
    later: list[Any] = []

    def begin_another() -> None:
        later.append(bcp.save(LocalBackend(tmp_path), model(3), overwrite=True))

    bcp.save(during(tmp_path, "delete", "", begin_another), model(2), overwrite=True)
    assert metadata(tmp_path).commit.operation == later[0].operation
    assert loads(tmp_path, 3)
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize(("operation", "key"), [("get", "receipts"), ("read_scattered", "model")])
def test_a_load_that_a_save_overtakes_begins_again(tmp_path: Path, operation: str, key: str) -> None:
    bcp.save(tmp_path, model(1))
    backend = during(tmp_path, operation, key, lambda: bcp.save(str(tmp_path), model(2), overwrite=True))
    target = model(0)
    report = bcp.load(backend, target)
    assert report.operation == metadata(tmp_path).commit.operation
    assert target["model"]["w"].eq(2).all()


def test_a_load_that_saves_overtake_for_ever_ends_and_says_so(tmp_path: Path) -> None:
    class Overtaken(CountingBackend):
        async def before(self, operation: str, key: str) -> None:
            await super().before(operation, key)
            if operation == "get" and "receipts" in key:
                await bcp.asave(LocalBackend(tmp_path), model(2), overwrite=True)

    bcp.save(tmp_path, model(1))
    backend, target = Overtaken(LocalBackend(tmp_path)), model(0)
    with pytest.raises(bcp.CorruptError) as caught:
        bcp.load(backend, target)
    assert metadata(tmp_path).commit.operation in "".join(caught.value.__notes__)
    assert "Nothing has to be restored" in "".join(caught.value.__notes__)
    assert target["model"]["w"].eq(0).all()
    assert loads(tmp_path, 2)


@pytest.mark.parametrize(("operation", "key"), [("list", ""), ("put_if", "metadata"), ("get", "receipts")])
@pytest.mark.parametrize("again", [False, True], ids=["gone", "another one in its place"])
@pytest.mark.parametrize("overwrite", [True, False])
def test_the_directory_is_moved_away_during_the_commit(
    tmp_path: Path, operation: str, key: str, *, again: bool, overwrite: bool
) -> None:
    path, moved = tmp_path / "ckpt", tmp_path / "moved"
    if overwrite:
        bcp.save(path, model(1))

    def move() -> None:
        path.rename(moved)
        if again:
            shutil.copytree(moved, path)
            for file in path.rglob("*"):
                if file.is_file() and file.name != "metadata.arrow":
                    file.unlink()

    options = bcp.SaveOptions(overwrite=overwrite, retries=bcp.RetryPolicy(first_pause_seconds=0.001))
    with pytest.raises(bcp.StorageError, match="moved"):
        bcp.save(during(path, operation, key, move), model(2), options=options)
    if not again:
        assert not path.exists()
    with pytest.raises(bcp.CheckpointError):
        loads(path, 2)
    if overwrite:
        assert loads(moved, 2 if operation == "get" else 1)


@pytest.mark.parametrize("harm", ["deleted", "cut"])
@pytest.mark.parametrize("folder", ["model", "receipts"])
def test_a_file_that_is_harmed_before_the_commit_is_named(tmp_path: Path, folder: str, harm: str) -> None:
    bcp.save(tmp_path, model(1))
    old = files(tmp_path)

    def do_harm() -> None:
        (file,) = (file for file in (tmp_path / folder).iterdir() if f"{folder}/{file.name}" not in old)
        harmed.append(file.name)
        if harm == "deleted":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1])

    harmed: list[str] = []
    with pytest.raises(bcp.StorageError) as caught:
        bcp.save(during(tmp_path, "list", "", do_harm), model(2), overwrite=True)
    assert harmed[0] in str(caught.value)
    assert files(tmp_path) == old
    assert loads(tmp_path, 1)


class OldList(CountingBackend):
    """Lists what was there before, as clients of a file server may."""

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        return [info for info in await super().list(prefix) if "receipts/" not in info.key]


def test_a_list_that_is_behind_does_not_fail_a_save(tmp_path: Path) -> None:
    bcp.save(OldList(LocalBackend(tmp_path)), model(1))
    assert loads(tmp_path, 1)


def test_a_commit_costs_one_list_and_looks_at_the_metadata_before_and_after(tmp_path: Path) -> None:
    bcp.save(tmp_path, model(1))
    backend = CountingBackend(LocalBackend(tmp_path))
    bcp.save(backend, model(2), overwrite=True)
    assert {name: backend.calls[name] for name in ("list", "unfinished", "get", "version", "put_if")} == {
        "list": 1,
        "unfinished": 1,
        "get": 3,
        "version": 1,
        "put_if": 1,
    }


def test_a_backend_without_a_conditional_put_is_refused_by_name(tmp_path: Path) -> None:
    class Old:
        def __init__(self) -> None:
            for name in ("put", "open_write", "read_into", "get", "list", "delete", "aclose"):
                setattr(self, name, getattr(LocalBackend(tmp_path), name))

    with pytest.raises(bcp.InputError, match="Old is no backend: it has no put_if, version"):
        bcp.save(Old(), model(1))  # type: ignore[arg-type]  # on purpose
