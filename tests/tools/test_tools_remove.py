"""Deletion takes one checkpoint, and nothing that another save may need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import bcp
from bcp.backends import LocalBackend
from bcp.backends.files import temp_path
from bcp.format.metadata import METADATA_KEY
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

DAY = 86_400


def saved(path: Path, fill: float = 1.0) -> Path:
    bcp.save(path, {"model": {"w": torch.full((300,), fill)}, "extra_states": {"epoch": 3}})
    return path


def torn(path: Path, fill: float = 2.0) -> set[Path]:
    """Leave the files of a save that never committed; return them."""
    there = set(path.rglob("*"))
    metadata = (path / METADATA_KEY).read_bytes() if (path / METADATA_KEY).exists() else None
    other = path.parent / f"{path.name}-other"
    saved(other, fill)
    for file in [each for each in other.rglob("*") if each.is_file() and each.parent != other]:
        (path / file.relative_to(other)).parent.mkdir(parents=True, exist_ok=True)
        file.rename(path / file.relative_to(other))
    if metadata is not None:
        (path / METADATA_KEY).write_bytes(metadata)
    return {each for each in set(path.rglob("*")) - there if each.is_file() and "telemetry" not in each.parts}


def test_all_of_a_checkpoint_goes_and_its_neighbours_stay(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    names = [path for path in one.rglob("*") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in names)
    result = bcp.tools.remove(one)
    assert (result.files, result.nbytes, result.kept) == (len(names), nbytes, ())
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    assert bcp.Checkpoint(two).verify()


def test_the_metadata_go_first(tmp_path: Path) -> None:
    class Watching(CountingBackend):
        deleted: list[str]

        async def delete(self, keys: list[str]) -> None:  # type: ignore[override]  # the tests' own
            self.deleted = [*getattr(self, "deleted", []), *keys]
            await super().delete(keys)

    backend = Watching(LocalBackend(saved(tmp_path / "one")))
    bcp.tools.remove(backend)
    assert backend.deleted[0] == METADATA_KEY


def test_files_of_another_save_stay(tmp_path: Path) -> None:
    path = saved(tmp_path / "one")
    others = torn(path)
    assert others
    with pytest.raises(bcp.InputError, match="files of other saves"):
        bcp.tools.remove(path)
    assert bcp.Checkpoint(path).verify()
    result = bcp.tools.remove(path, force=True)
    assert {path / key for key in result.kept} == others
    assert all(each.exists() for each in others)
    assert not (path / METADATA_KEY).exists()


def test_a_pinned_checkpoint_stays(tmp_path: Path) -> None:
    with bcp.Run(tmp_path / "run", {"model": torch.nn.Linear(2, 2)}, save=1) as run:
        run.resume()
        for step in (1, 2):
            run.maybe_save(step)
        run.pin(1)
        path = tmp_path / "run" / "step-00000001"
        with pytest.raises(bcp.InputError, match=r"run\.pin\(1, pinned=False\)"):
            bcp.tools.remove(path)
        assert bcp.Checkpoint(path).verify()
        run.pin(1, pinned=False)
        bcp.tools.remove(path)
        assert not path.exists()
        run.maybe_save(3)
    assert [info.step for info in bcp.tools.list_steps(tmp_path / "run")] == [2, 3]


@pytest.mark.parametrize(
    "spelling", ["{}/{}/.", "{}//{}//", "{}/{}/model/..", "file://{}/{}/.", "file://{}//{}/", "file://{}/{}/model/.."]
)
def test_a_pin_holds_for_every_spelling_of_a_path(tmp_path: Path, spelling: str) -> None:
    with bcp.Run(tmp_path / "run", {"model": torch.nn.Linear(2, 2)}, save=1) as run:
        run.resume()
        for step in (1, 2):
            run.maybe_save(step)
        run.pin(1)
    path = tmp_path / "run" / "step-00000001"
    with pytest.raises(bcp.InputError, match="is pinned in its run"):
        bcp.tools.remove(spelling.format(path.parent, path.name))
    assert bcp.Checkpoint(path).verify()


def test_the_current_directory_can_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved(tmp_path / "one") / "model")
    assert bcp.tools.remove("..").kept == ()
    assert not (tmp_path / "one").exists()
    monkeypatch.chdir(tmp_path)


def test_a_copy_of_the_same_save_meanwhile_leaves_no_torn_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path / "one")
    bcp.tools.copy(path, tmp_path / "two")

    async def copy_back(_: str) -> None:
        await bcp.tools.acopy(tmp_path / "two", path)

    bcp.tools.remove(FaultyBackend(LocalBackend(path), "delete", copy_back, nth=2))
    assert not (path / METADATA_KEY).exists()
    bcp.tools.copy(tmp_path / "two", path)
    assert bcp.Checkpoint(path).verify()


def test_paths_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "step-1")
    with pytest.raises(bcp.NotACheckpointError, match="holds checkpoints step-1"):
        bcp.tools.remove(tmp_path / "run")
    torn(tmp_path / "torn")
    with pytest.raises(bcp.UncommittedError):
        bcp.tools.remove(tmp_path / "torn")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "step-1")
    with pytest.raises(bcp.InputError, match="is a symbolic link"):
        bcp.tools.remove(tmp_path / "link")
    assert bcp.Checkpoint(tmp_path / "run" / "step-1").verify()


def test_one_role_goes_alone(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        bcp.save(tmp_path / "ckpt", {"model": {"w": torch.rand(3)}}, role=role)
    bcp.tools.remove(tmp_path / "ckpt", role="actor")
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["critic"]
    assert bcp.Checkpoint(tmp_path / "ckpt", role="critic").verify()


def test_damaged_metadata_need_force(tmp_path: Path) -> None:
    path = saved(tmp_path / "one")
    (path / METADATA_KEY).write_bytes(b"nonsense")
    with pytest.raises(bcp.InputError, match="is damaged"):
        bcp.tools.remove(path)
    bcp.tools.remove(path, force=True)
    assert not path.exists()


# -- remains of saves that never committed -------------------------------------------------------------


def test_only_old_remains_go(tmp_path: Path) -> None:
    path = saved(tmp_path / "run" / "step-1")
    remains = torn(path) | torn(tmp_path / "run" / "step-2", 3.0)
    kept = {each for each in (tmp_path / "run").rglob("*") if each.is_file()} - remains
    found = bcp.tools.collect(tmp_path / "run")
    assert [(each.place, each.deleted) for each in found] == [("step-1", False), ("step-2", False)]
    assert all(each.exists() for each in remains)
    for each in remains:
        os.utime(each, (each.stat().st_atime, each.stat().st_mtime - 2 * DAY))
    newest = next(iter(sorted(each for each in remains if "step-2" in each.parts)))
    os.utime(newest)  # this save writes still
    assert [each.deleted for each in bcp.tools.collect(tmp_path / "run", dry_run=True)] == [False, False]
    found = bcp.tools.collect(tmp_path / "run")
    assert [(each.place, each.deleted) for each in found] == [("step-1", True), ("step-2", False)]
    assert found[0].age_seconds is not None
    assert found[0].age_seconds >= 2 * DAY
    assert {each for each in remains if each.exists()} == {each for each in remains if "step-2" in each.parts}
    (found,) = [bcp.tools.collect(tmp_path / "run", min_age_seconds=0)]
    assert [(each.place, each.deleted) for each in found] == [("step-2", True)]
    assert {each for each in (tmp_path / "run").rglob("*") if each.is_file()} == kept
    assert bcp.Checkpoint(path).verify()


def test_unfinished_files_go_with_their_save(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    operation = bcp.Checkpoint(path).operation[::-1]
    left = temp_path(path / "model" / f"00000-{operation}.safetensors")
    left.write_bytes(b"half")
    (found,) = bcp.tools.collect(path)
    assert (found.operation, found.files, found.age_seconds, found.deleted) == (operation, 1, None, False)
    bcp.tools.collect(path, min_age_seconds=0)
    assert not left.exists()
    assert bcp.Checkpoint(path).verify()


def test_checkpoints_of_roles_stay(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        bcp.save(tmp_path / "ckpt", {"model": {"w": torch.rand(3)}}, role=role)
    assert bcp.tools.collect(tmp_path, min_age_seconds=0) == []
    assert bcp.tools.collect(tmp_path / "ckpt", min_age_seconds=0) == []


def test_files_beside_damaged_metadata_stay(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    (path / METADATA_KEY).write_bytes(b"nonsense")
    assert bcp.tools.collect(path, min_age_seconds=0) == []


@pytest.mark.parametrize("age", [-1, float("nan"), True, "day"])
def test_an_age_that_is_none_is_refused(tmp_path: Path, age: object) -> None:
    with pytest.raises(bcp.InputError, match="min_age_seconds"):
        bcp.tools.collect(tmp_path, min_age_seconds=age)  # type: ignore[arg-type]  # on purpose
