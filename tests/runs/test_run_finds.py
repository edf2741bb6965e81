"""A run finds what is there: whoever wrote it, wherever a link leads, and whatever else cannot be read."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from logs import captured_logs

import bcp
from bcp import policies
from bcp.backends import LocalBackend
from bcp.format.metadata import METADATA_KEY
from bcp.runtime.threads import in_thread


def states(value: float = 0.0, **extra: Any) -> dict[str, Any]:
    return {"model": {"w": torch.full((8,), value)}, "extra_states": {"v": value, **extra}}


def train(folder: Path, *steps: int, resumed_from: int | None = None, resume: Any = None, **options: Any) -> None:
    """Save some steps in a life of a run; each holds its number."""
    held = states()
    with bcp.Run(str(folder), held, **{"save": 1, "keep": 100, **options}) as run:
        step_before = run.resume(**(resume or {}))
        assert resumed_from in (None, step_before)
        for step in steps:
            held["model"]["w"].fill_(step)
            held["extra_states"]["v"] = float(step)
            pending = run.maybe_save(step)
            assert pending is not None
            pending.wait()


def resumed(folder: Path, **options: Any) -> tuple[int, float, bcp.Run]:
    """Resume a run and end it; return the step, the value that was loaded, and the run."""
    held = states()
    with bcp.Run(str(folder), held, save=1) as run:
        step = run.resume(**options)
    assert torch.equal(held["model"]["w"], torch.full((8,), held["extra_states"]["v"]))
    return step, held["extra_states"]["v"], run


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def data_file(checkpoint: Path) -> Path:
    return next((checkpoint / "model").iterdir())


def damage(checkpoint: Path) -> None:
    data = data_file(checkpoint)
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")


def name(step: int) -> str:
    return f"step-{step:08d}"


# -- deletions that have begun


@pytest.fixture
def half_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run of steps 1 and 2, whose job was killed between the ledger and the deletion of step 1."""
    delete = LocalBackend.delete
    dead: list[int] = []

    async def killed(backend: LocalBackend, keys: Sequence[str]) -> None:
        if any(name(1) in key for key in keys):
            dead.append(1)
        if dead:
            raise bcp.StorageError("the job was killed here")
        await delete(backend, keys)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "delete", killed)
        train(tmp_path, 1, 2, keep=1)
    assert dead
    assert [removal["step"] for removal in json.loads((tmp_path / "run.json").read_text())["removing"]] == [1]
    return tmp_path


@pytest.mark.parametrize("loss", ["gone", "damaged"])
def test_a_whole_checkpoint_whose_deletion_has_begun_is_tried_last(half_removed: Path, loss: str) -> None:
    assert resumed(half_removed)[:2] == (2, 2.0)
    if loss == "gone":
        shutil.rmtree(half_removed / name(2))
        assert bcp.latest(half_removed) == f"{half_removed}/{name(1)}"
    else:
        damage(half_removed / name(2))
    assert resumed(half_removed)[:2] == (1, 1.0)
    # the run goes on from it, so it is a checkpoint again
    bcp.Run(str(half_removed), states()).pin(1)
    train(half_removed, 5, resumed_from=1, keep=1)
    assert name(1) in folders(half_removed)


def test_its_marks_hold_until_it_is_gone(half_removed: Path) -> None:
    ledger = json.loads((half_removed / "run.json").read_text())
    (removal,) = ledger["removing"]
    removal["checkpoint"] = {**ledger["checkpoints"][0], "step": 1, "trust": "suspect", "reason": "loss spike"}
    (half_removed / "run.json").write_text(json.dumps(ledger))
    shutil.rmtree(half_removed / name(2))
    assert bcp.latest(half_removed) is None
    step, _, run = resumed(half_removed)
    assert step == 0
    assert "loss spike" in str(run.resumed)


# -- other writers and other names


@pytest.mark.parametrize("names", [["step-1", "step-2"], ["step-0001", "step-00000002"], ["step-1", "step-000000002"]])
def test_checkpoints_of_bcp_save_are_found_by_any_name_of_a_step(tmp_path: Path, names: list[str]) -> None:
    for step, folder in enumerate(names, 1):
        bcp.save(tmp_path / folder, states(float(step)))
    assert bcp.latest(tmp_path) == f"{tmp_path}/{names[-1]}"
    with captured_logs() as lines:
        assert resumed(tmp_path)[:2] == (2, 2.0)
    assert any("no random states" in line["event"] for line in lines)
    train(tmp_path, 3, resumed_from=2)
    assert bcp.latest(tmp_path) == f"{tmp_path}/{name(3)}"


def test_a_checkpoint_of_a_model_alone_is_found(tmp_path: Path) -> None:
    bcp.save(tmp_path / "step-1000", {"model": {"w": torch.ones(8)}})
    model = {"w": torch.zeros(8)}
    with bcp.Run(str(tmp_path), {"model": model}, save=1) as run:
        assert run.resume() == 1000
    assert model["w"].tolist() == [1.0] * 8
    with bcp.Run(str(tmp_path), states()) as run, pytest.raises(bcp.FqnMismatchError, match="extra_states"):
        run.resume()


def test_retention_deletes_folders_of_any_name(tmp_path: Path) -> None:
    train(tmp_path, 1)
    bcp.save(tmp_path / "step-2", states(2.0))
    bcp.save(tmp_path / "step-3", states(3.0))
    with bcp.Run(str(tmp_path), states()) as run:
        assert run.resume() == 3
        run.mark(3, "verified")
    train(tmp_path, 4, resumed_from=3, keep=1)
    assert folders(tmp_path) == [name(4), "step-3"]
    train(tmp_path, 5, resumed_from=4, keep=2)
    assert folders(tmp_path) == [name(4), name(5), "step-3"]


@pytest.mark.parametrize("damaged", [False, True])
def test_of_two_folders_of_one_step_the_runs_own_is_tried_first(tmp_path: Path, *, damaged: bool) -> None:
    train(tmp_path, 1, 2)
    bcp.save(tmp_path / "step-2", states(22.0))
    if damaged:
        damage(tmp_path / name(2))
    assert bcp.latest(tmp_path) == f"{tmp_path}/{name(2)}"
    with captured_logs() as lines:
        step, value, run = resumed(tmp_path)
    assert (step, value) == ((2, 22.0) if damaged else (2, 2.0))
    assert run.resumed.name == ("step-2" if damaged else name(2))
    assert len(run.resumed.passed_over) == damaged
    assert any("several folders" in line["event"] for line in lines)
    train(tmp_path, 3, resumed_from=2, keep=1)
    assert folders(tmp_path) == [name(3)]


def test_a_checkpoint_that_comes_while_the_run_goes_on_is_replaced_and_told(tmp_path: Path) -> None:
    held = states(7.0)
    with captured_logs() as lines, bcp.Run(str(tmp_path), held, save=1) as run:
        run.resume()
        bcp.save(tmp_path / name(1), states(1.0))
        run.maybe_save(1)
    assert any("somebody else has saved step 1" in line["event"] for line in lines)
    assert resumed(tmp_path)[:2] == (1, 7.0)


# -- links


@pytest.fixture
def archived(tmp_path: Path) -> tuple[Path, Path]:
    """Return a run of steps 1 to 3 in which 2 and 3 are links to an archive, and the archive."""
    run, archive = tmp_path / "run", tmp_path / "archive"
    train(run, 1, 2, 3)
    archive.mkdir()
    for step in (2, 3):
        (run / name(step)).rename(archive / str(step))
        (run / name(step)).symlink_to(archive / str(step))
    return run, archive


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_links_to_checkpoints_are_followed(archived: tuple[Path, Path]) -> None:
    run, _ = archived
    assert bcp.latest(run) == f"{run}/{name(3)}"
    assert resumed(run)[:2] == (3, 3.0)
    (run / "run.json").unlink()
    assert resumed(run)[:2] == (3, 3.0)


def test_retention_removes_links_alone(archived: tuple[Path, Path]) -> None:
    run, archive = archived
    train(run, resumed_from=3)  # a load leaves a recording
    before = contents(archive)
    train(run, 4, resumed_from=3, keep=1, load_options=bcp.LoadOptions(record=False))
    assert folders(run) == [name(4)]
    assert contents(archive) == before


def test_a_save_does_not_write_through_a_link(archived: tuple[Path, Path]) -> None:
    run, archive = archived
    damage(archive / "3")
    (run / name(4)).symlink_to(run / "nowhere")
    before = contents(archive)
    with captured_logs() as lines:
        train(run, 3, 4, resumed_from=2, load_options=bcp.LoadOptions(record=False))
    assert contents(archive / "3") == {key[2:]: data for key, data in before.items() if key.startswith("3/")}
    assert not (run / name(3)).is_symlink()
    assert not (run / name(4)).is_symlink()
    assert sum("link" in line["event"] and "removed" in line["event"] for line in lines) == 2
    assert resumed(run)[:2] == (4, 4.0)


def test_a_link_within_the_run_takes_no_checkpoint_with_it(tmp_path: Path) -> None:
    train(tmp_path, 1, 4)
    (tmp_path / name(2)).symlink_to(tmp_path / name(4))
    assert resumed(tmp_path)[0] == 4
    train(tmp_path, 5, resumed_from=4, keep=policies.EveryKSteps(4))
    assert folders(tmp_path) == [name(4), name(5)]
    assert bcp.load(tmp_path / name(4), states()).seconds >= 0


@pytest.mark.parametrize("way", ["to the folder", "over a link", "over a link elsewhere"])
def test_a_folder_stays_while_a_link_that_is_kept_leads_to_it(tmp_path: Path, way: str) -> None:
    run = tmp_path / "run"
    train(run, 1, 2, 3)
    target, links = Path(name(1)), {name(70)}
    if way == "over a link":
        shutil.rmtree(run / name(2))
        target, links = Path("step-2"), {"step-2", name(70)}
        (run / target).symlink_to(name(1))
    elif way == "over a link elsewhere":
        target = tmp_path / "other"
        target.symlink_to(run / name(1))
    (run / name(70)).symlink_to(target)
    train(run, 71, resumed_from=70, keep=2)
    assert set(folders(run)) == {name(1), name(71)} | links
    shutil.rmtree(run / name(71))
    assert resumed(run)[:2] == (70, 1.0)
    train(run, 72, resumed_from=70, keep=1)
    assert folders(run) == [name(72)], "the links and the folder go together"


def test_no_folder_is_deleted_while_links_cannot_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 1, 2, 3)
    (tmp_path / name(70)).symlink_to(name(1))

    async def fail(backend: LocalBackend, link: str) -> Sequence[str]:
        raise bcp.StorageError(f"no answer about {link} from {backend}")

    with monkeypatch.context() as patch, captured_logs() as lines:
        patch.setattr(LocalBackend, "behind", fail)
        train(tmp_path, 71, resumed_from=70, keep=2)
    assert len(folders(tmp_path)) == 5
    assert any("no checkpoint was deleted" in line["event"] and name(70) in line["event"] for line in lines)
    train(tmp_path, 72, resumed_from=71, keep=3)
    assert folders(tmp_path) == [name(step) for step in (1, 70, 71, 72)]


# -- checkpoints that cannot be read


def _loop_of_links(checkpoint: Path) -> None:
    path = data_file(checkpoint)
    path.unlink()
    path.symlink_to(path.name)


def _out_of_the_root(checkpoint: Path) -> None:
    path = data_file(checkpoint)
    moved = checkpoint.parent / f"moved-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


def _loop_of_commits(checkpoint: Path) -> None:
    (checkpoint / METADATA_KEY).unlink()
    (checkpoint / METADATA_KEY).symlink_to(METADATA_KEY)


def _loop_of_folders(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.symlink_to(checkpoint.name)


UNREADABLE = [_loop_of_links, _out_of_the_root, _loop_of_commits, _loop_of_folders]


@pytest.mark.parametrize("harm", UNREADABLE)
def test_a_checkpoint_that_cannot_be_read_is_passed_over_with_its_reason(tmp_path: Path, harm: Any) -> None:
    train(tmp_path, 1, 2, 3)
    harm(tmp_path / name(3))
    with captured_logs() as lines:
        step, _, run = resumed(tmp_path)
    assert step == 2
    (choice,) = run.resumed.passed_over
    assert choice.step == 3
    assert any(choice.reason in line["event"] for line in lines if line["log_level"] == "warning")
    (tmp_path / "run.json").unlink()
    assert resumed(tmp_path)[0] == 2
    train(tmp_path, 4, 5, resumed_from=2, keep=1)
    assert {name(4), name(5)} & set(folders(tmp_path)) == {name(5)}, "retention goes on"
    latest = bcp.latest(tmp_path)
    assert latest == f"{tmp_path}/{name(5)}"


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("file", [METADATA_KEY, "receipts/", "model/"])
def test_a_checkpoint_on_bad_blocks_or_of_another_user_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, file: str
) -> None:
    train(tmp_path, 1, 2)
    real = os.open

    def fails(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if f"{name(2)}/{file}" in os.fspath(path) and not flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(code, os.strerror(code), path)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", fails)
    step, _, run = resumed(tmp_path)
    (choice,) = run.resumed.passed_over
    assert (step, choice.step) == (1, 2)
    assert os.strerror(code) in choice.reason
    assert file in choice.reason


@pytest.mark.parametrize("harm", UNREADABLE)
def test_a_run_does_not_begin_anew_while_a_checkpoint_cannot_be_read(tmp_path: Path, harm: Any) -> None:
    train(tmp_path, 1)
    harm(tmp_path / name(1))
    for _ in range(2):
        run = bcp.Run(str(tmp_path), states(), save=1)
        with pytest.raises((bcp.StorageError, bcp.InputError)) as caught:
            run.resume()
        run.close()
        assert any("does not begin anew" in note for note in caught.value.__notes__)
        (tmp_path / "run.json").unlink()


@pytest.mark.parametrize("harm", [_loop_of_commits, _loop_of_folders])
def test_latest_passes_over_what_cannot_be_read_and_never_says_that_nothing_is_there(tmp_path: Path, harm: Any) -> None:
    train(tmp_path, 1, 2)
    harm(tmp_path / name(2))
    with captured_logs() as lines:
        assert bcp.latest(tmp_path) == f"{tmp_path}/{name(1)}"
    assert any(name(2) in line["event"] for line in lines)
    shutil.rmtree(tmp_path / name(1))
    with pytest.raises(bcp.StorageError):
        bcp.latest(tmp_path)


@pytest.mark.parametrize("trust", ["any", "verified"])
def test_latest_and_a_resumption_agree_about_a_checkpoint_without_metadata(tmp_path: Path, trust: Any) -> None:
    """The ledger has it, so it was committed: the run does not begin anew over its data."""
    train(tmp_path, 1, 2)
    for step in (1, 2):
        bcp.Run(str(tmp_path), {}).mark(step, "verified")
    (tmp_path / name(2) / METADATA_KEY).unlink()
    with captured_logs() as lines:
        assert bcp.latest(tmp_path, trust=trust) == f"{tmp_path}/{name(1)}"
    assert any(name(2) in line["event"] and "is gone" in line["event"] for line in lines)
    assert resumed(tmp_path, trust=trust)[0] == 1
    (tmp_path / name(1) / METADATA_KEY).unlink()
    with pytest.raises(bcp.CorruptError, match=rf"{name(2)} was committed.*{METADATA_KEY} is gone"):
        bcp.latest(tmp_path, trust=trust)
    for options in ({"trust": trust}, {"step": 2}):
        kind = bcp.UncommittedError if "step" in options else bcp.CorruptError
        with (
            bcp.Run(str(tmp_path), states()) as run,
            pytest.raises(kind, match=rf"{name(2)} .* {METADATA_KEY} is gone"),
        ):
            run.resume(**options)
    for step in (1, 2):
        shutil.rmtree(tmp_path / name(step))
    assert bcp.latest(tmp_path, trust=trust) is None
    assert resumed(tmp_path, trust=trust)[0] == 0


def test_latest_looks_again_where_the_job_has_gone_on_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 1)
    version, steps = LocalBackend.version, [2]

    async def go_on_first(backend: LocalBackend, key: str) -> Any:
        if key == METADATA_KEY and steps:
            await in_thread(partial(train, tmp_path, steps.pop(), keep=1))
        return await version(backend, key)

    monkeypatch.setattr(LocalBackend, "version", go_on_first)
    assert bcp.latest(tmp_path) == f"{tmp_path}/{name(2)}"
    assert folders(tmp_path) == [name(2)]


def test_a_store_that_is_down_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 1, 2, 3)
    tried: list[str] = []

    async def fail(backend: LocalBackend, *_: Any) -> Any:
        tried.append(str(backend.root))
        raise bcp.StorageError("the file server is gone")

    async def failing_get(backend: LocalBackend, key: str) -> Any:
        return await get(backend, key) if key == "run.json" else await fail(backend)

    get, real_folders = LocalBackend.get, LocalBackend.folders

    async def folders_once(backend: LocalBackend, prefix: str = "") -> Any:
        return await fail(backend) if tried else await real_folders(backend, prefix)

    monkeypatch.setattr(LocalBackend, "get", failing_get)
    monkeypatch.setattr(LocalBackend, "folders", folders_once)
    with bcp.Run(str(tmp_path), states(), save=1) as run, pytest.raises(bcp.StorageError, match="is gone"):
        run.resume()
    assert len([root for root in tried if "step-" in root]) == 1


def test_one_checkpoint_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 1, 2, 3)
    delete = LocalBackend.delete

    async def refuse(backend: LocalBackend, keys: Sequence[str]) -> None:
        if any(key.startswith(name(1)) for key in keys):
            raise bcp.StorageError("permission denied")
        await delete(backend, keys)

    monkeypatch.setattr(LocalBackend, "delete", refuse)
    with captured_logs() as lines:
        train(tmp_path, 4, resumed_from=3, keep=1)
    assert folders(tmp_path) == [name(1), name(4)]
    assert any("step 1 was not deleted" in line["event"] for line in lines)


# -- marks without a resumption


def test_a_run_marks_and_pins_without_a_resumption_and_displaces_nobody(tmp_path: Path) -> None:
    held = states()
    with bcp.Run(str(tmp_path), held, save=1, keep=1) as training:
        training.resume()
        for step in (1, 2):
            pending = training.maybe_save(step)
            assert pending is not None
            pending.wait()
            if step == 1:
                bcp.Run(str(tmp_path), {}).pin(1)
        bcp.Run(str(tmp_path), {}).mark(2, "suspect", "loss spike")
        training.maybe_save(3)
    assert folders(tmp_path) == [name(1), name(3)]
    assert bcp.latest(tmp_path, trust="verified") is None
    bcp.Run(str(tmp_path), {}).mark(1, "verified")
    assert bcp.latest(tmp_path, trust="verified") == f"{tmp_path}/{name(1)}"
    with pytest.raises(bcp.InputError, match=r"no checkpoint of step 9; it has 1, 3"):
        bcp.Run(str(tmp_path), {}).mark(9, "verified")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_mark_that_comes_before_the_entry_of_the_job_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_replaced: bool
) -> None:
    """It does not stay where the job replaces a checkpoint: the mark may be about the earlier one."""
    train(tmp_path, *([1, 2] if is_replaced else [1]))
    put_if, marks = LocalBackend.put_if, [2]

    async def mark_first(backend: LocalBackend, key: str, data: Any, version: Any) -> Any:
        if key == "run.json" and marks and (tmp_path / name(2) / METADATA_KEY).exists():
            await in_thread(bcp.Run(str(tmp_path), {}).mark, marks.pop(), "suspect", "loss spike")
        return await put_if(backend, key, data, version)

    with bcp.Run(str(tmp_path), states(7.0), save=1) as run:
        assert run.resume(step=1) == 1
        monkeypatch.setattr(LocalBackend, "put_if", mark_first)
        run.maybe_save(2)
    assert not marks
    assert bcp.latest(tmp_path) == f"{tmp_path}/{name(2 if is_replaced else 1)}"


def test_a_checkpoint_that_no_run_has_seen_can_be_marked(tmp_path: Path) -> None:
    bcp.save(tmp_path / "step-5", states(5.0))
    bcp.save(tmp_path / "step-6", states(6.0))
    bcp.Run(str(tmp_path), {}).mark(6, "suspect")
    assert bcp.latest(tmp_path) == f"{tmp_path}/step-5"
    assert resumed(tmp_path)[0] == 5


def test_a_mark_where_nothing_is_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(bcp.InputError, match="no checkpoint of step 1; it has none yet"):
        bcp.Run(str(tmp_path / "run"), {}).mark(1, "verified")
    assert not (tmp_path / "run").exists()


# -- an exact step


def test_a_run_goes_back_to_a_step(tmp_path: Path) -> None:
    train(tmp_path, 1, 2, 3, 4)
    bcp.Run(str(tmp_path), {}).mark(4, "verified")
    step, value, run = resumed(tmp_path, step=2)
    assert (step, value) == (2, 2.0)
    assert [choice.step for choice in run.resumed.passed_over] == [4, 3]
    assert "step=2" in str(run.resumed)
    assert resumed(tmp_path)[0] == 4, "nothing has changed before the next commit"
    train(tmp_path, 3, resumed_from=2, resume={"step": 2}, keep=1)
    assert resumed(tmp_path)[:2] == (3, 3.0), "a restart goes on from the new one"
    assert bcp.latest(tmp_path) == f"{tmp_path}/{name(3)}"
    assert name(4) in folders(tmp_path)
    train(tmp_path, 5, 6, resumed_from=3, keep=1)
    assert folders(tmp_path) == [name(4), name(6)], "it was verified, so it is pinned"


def test_a_step_that_is_not_there_is_refused_and_the_folder_stays_anothers(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    before = (tmp_path / "run.json").read_bytes()
    with bcp.Run(str(tmp_path), states()) as run:
        with pytest.raises(bcp.NotACheckpointError, match=r"no checkpoint of step 7; it has 2, 1"):
            run.resume(step=7)
        assert (tmp_path / "run.json").read_bytes() == before
        with pytest.raises(bcp.InputError, match="is no step"):
            run.resume(step=-1)
        with pytest.raises(bcp.InputError, match="not verified"):
            run.resume(step=1, trust="verified")
        assert run.resume(step=1) == 1


def test_a_step_that_does_not_load_is_an_error_with_its_reason(tmp_path: Path) -> None:
    train(tmp_path, 1, 2, 3)
    damage(tmp_path / name(2))
    with bcp.Run(str(tmp_path), states()) as run, pytest.raises(bcp.CorruptError, match=r"checksum|digest|corrupt"):
        run.resume(step=2)
    (tmp_path / name(2) / METADATA_KEY).unlink()
    with bcp.Run(str(tmp_path), states()) as run, pytest.raises((bcp.UncommittedError, bcp.NotACheckpointError)):
        run.resume(step=2)


def test_a_suspect_step_is_loaded_for_who_asks_for_it(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    bcp.Run(str(tmp_path), {}).mark(2, "suspect", "loss spike")
    with captured_logs() as lines:
        assert resumed(tmp_path, step=2)[0] == 2
    assert any("loss spike" in line["event"] for line in lines)


# -- trust


def test_nothing_from_before_is_deleted_until_a_new_checkpoint_is_verified(tmp_path: Path) -> None:
    train(tmp_path, 11, 12, 13)
    held = states()
    with bcp.Run(str(tmp_path), held, save=1, keep=1) as run:
        assert run.resume(trust="verified") == 0
        for step in (1, 2, 14, 15):
            run.maybe_save(step)
        run.close()
    assert folders(tmp_path) == [name(11), name(12), name(13), name(15)]
    with bcp.Run(str(tmp_path), held, save=1, keep=1) as run:
        assert run.resume(trust="verified") == 0
        for step in (16, 17, 18):
            pending = run.maybe_save(step)
            assert pending is not None
            pending.wait()
            if step == 17:
                assert folders(tmp_path)[:4] == [name(11), name(12), name(13), name(15)]
                run.mark(17, "verified")
    assert folders(tmp_path) == [name(17), name(18)]


# -- extra states


def test_keys_that_only_the_checkpoint_has_are_added_as_bcp_load_adds_them(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"epoch": 3, "tokens": 7, "nested": {"a": 1}}
    with bcp.Run(str(tmp_path), {"model": {"w": torch.ones(2)}, "extra_states": extra}, save=1) as run:
        run.resume()
        run.maybe_save(1)
    loaded: dict[str, Any] = {"epoch": 0}
    bcp.load(tmp_path / name(1), {"extra_states": loaded})
    ours: dict[str, Any] = {"epoch": 0}
    with bcp.Run(str(tmp_path), {"model": {"w": torch.ones(2)}, "extra_states": ours}) as run:
        run.resume()
    loaded.pop("bcp_random_states")
    assert ours == loaded == extra


# -- metrics


def test_metrics_come_back_with_the_commit(tmp_path: Path) -> None:
    """A job that dies between commit and ledger has stored the checkpoint, but no entry."""
    held = states()
    keep = policies.AnyKept(1, policies.Best("loss"))
    with bcp.Run(str(tmp_path), held, save=1, keep=keep) as run:
        run.resume()
        run.maybe_save(1, {"loss": 3.0, "odd": float("nan")})
    before = (tmp_path / "run.json").read_bytes()
    with bcp.Run(str(tmp_path), held, save=1, keep=keep) as run:
        run.resume()
        run.maybe_save(2, {"loss": 1.0})
    (tmp_path / "run.json").write_bytes(before)  # as it was when the job died
    with bcp.Run(str(tmp_path), held, save=1, keep=keep) as run:
        assert run.resume() == 2
        run.maybe_save(3, {"loss": 2.0})
    assert folders(tmp_path) == [name(2), name(3)]
    entries = json.loads((tmp_path / "run.json").read_text())["checkpoints"]
    assert [entry["metrics"] for entry in entries] == [{"loss": 1.0}, {"loss": 2.0}]


# -- two jobs


def test_a_displaced_job_stops_before_its_bytes(tmp_path: Path) -> None:
    first, second = (bcp.Run(str(tmp_path), states(), save=1) for _ in range(2))
    first.resume()
    pending = first.maybe_save(1)
    assert pending is not None
    pending.wait()
    assert second.resume() == 1
    with pytest.raises(bcp.RunTakenError, match=f"pid {os.getpid()}"):
        first.maybe_save(2)
    assert not (tmp_path / name(2)).exists()
    second.maybe_save(2)
    second.close()
    with pytest.raises(bcp.RunTakenError):
        first.close()


def test_a_job_that_is_displaced_during_its_save_does_not_commit(tmp_path: Path) -> None:
    runs: list[bcp.Run] = []

    async def displace(part: Any) -> Any:
        if len(runs) == 1:
            runs.append(bcp.Run(str(tmp_path), states(), save=1))
            await runs[1].aresume()
        return part

    options = bcp.SaveOptions(edit=lambda graph: graph.before("upload", bcp.extend.Stage("displace", displace)))
    runs.append(bcp.Run(str(tmp_path), states(), save=1, save_options=options))
    runs[0].resume()
    pending = runs[0].maybe_save(1)
    assert pending is not None
    with pytest.raises(bcp.RunTakenError):
        pending.wait()
    assert bcp.latest(tmp_path) is None
    assert not list(tmp_path.rglob("*.safetensors"))
    runs[1].maybe_save(1)
    runs[1].close()
    assert bcp.latest(tmp_path) == f"{tmp_path}/{name(1)}"
    with pytest.raises(bcp.RunTakenError):
        runs[0].close()


@pytest.mark.parametrize("has_ledger", [True, False])
def test_a_named_pipe_in_the_place_of_the_newest_metadata(tmp_path: Path, has_ledger: bool) -> None:  # noqa: FBT001
    def states() -> dict[str, Any]:
        return {"model": {"w": torch.zeros(3)}}

    with bcp.Run(tmp_path, states(), save=10) as run:
        run.resume()
        run.maybe_save(10)
        run.maybe_save(20)
    metadata = tmp_path / "step-00000020" / "metadata.arrow"
    metadata.unlink()
    os.mkfifo(metadata)
    if not has_ledger:
        (tmp_path / "run.json").unlink()
    assert str(bcp.latest(tmp_path)).endswith("step-00000010")
    with bcp.Run(tmp_path, states(), save=10) as run:
        assert run.resume() == 10
