"""Old checkpoints move to a cold place: paths stay, nothing is lost, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cooled_runs import COLD, HOT, OLD, STEPS, Stores, assert_loads, names, states, train
from logs import captured_logs

import bcp
from bcp.backends.files import temp_path
from bcp.cli import main
from bcp.format.metadata import METADATA_KEY


@pytest.fixture
def run(tmp_path: Path) -> Path:
    train(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def cooled(run: Path, cold: Path, days: float = 0) -> list[int]:
    return [each.step for each in bcp.cool(run, to=cold, days=days) if not each.reason]


# -- paths stay --------------------------------------------------------------------------------------


def test_the_old_checkpoints_move_and_load_by_their_paths(run: Path, cold: Path) -> None:
    before = {name: (run / name).read_bytes() for name in names(run)}
    results = bcp.cool(run, to=cold, days=0)
    assert [(each.step, each.files, each.reason) for each in results] == [(step, 2, "") for step in OLD]
    assert names(run) == [name for name in before if "step-00000003" in name]
    assert len(names(cold)) == len(OLD)
    moved = {path.name: path.read_bytes() for path in cold.rglob("*.safetensors")}
    assert {data for name, data in before.items() if "step-00000003" not in name} <= set(moved.values())
    for step in STEPS:
        assert_loads(run, step)
    assert bcp.cool(run, to=cold, days=0) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_reader_finds_the_files(run: Path, cold: Path, tmp_path: Path) -> None:
    bcp.tools.copy(run / "step-00000001", tmp_path / "before")
    cooled(run, cold)
    path = run / "step-00000001"
    assert bcp.tools.verify(path)
    assert bcp.Checkpoint(path).verify()
    assert torch.equal(bcp.Checkpoint(path).read("w"), states(1)["model"]["w"])
    assert not bcp.tools.diff(path, tmp_path / "before").tensors
    bcp.tools.copy(path, tmp_path / "copy")
    assert (tmp_path / "copy" / METADATA_KEY).read_bytes() == (path / METADATA_KEY).read_bytes()
    assert bcp.Checkpoint(tmp_path / "copy").verify()
    bcp.tools.export_torch(path, tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt")["model"]["w"], states(1)["model"]["w"])
    model = {"w": torch.zeros(257, 3), "b": torch.zeros(5)}
    dcp.load({"model": model}, storage_reader=bcp.dcp.StorageReader(path), no_dist=True)
    assert torch.equal(model["w"], states(1)["model"]["w"])
    assert bcp.latest(run) == str(run / "step-00000003")
    target = {"model": {"w": torch.zeros(257, 3), "b": torch.zeros(5)}}
    with bcp.Run(run, target, save=100) as resumed:
        assert resumed.resume(step=2) == 2
    assert torch.equal(target["model"]["w"], states(2)["model"]["w"])


def test_a_link_to_a_checkpoint_leads_to_its_cold_files(run: Path, cold: Path, tmp_path: Path) -> None:
    cooled(run, cold)
    (tmp_path / "best").symlink_to(run / "step-00000002")
    target = states(0)
    bcp.load(tmp_path / "best", target)
    assert torch.equal(target["model"]["w"], states(2)["model"]["w"])


def test_any_mixture_of_places_loads(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(50.0)}, "optimizer": {"m": torch.arange(9.0)}, "extra_states": {"epoch": 7}}
    with bcp.Run(tmp_path / "run", state, save=1) as run:
        run.resume()
        run.save(1)
        run.save(2)
    cooled(tmp_path / "run", tmp_path / "cold")
    files = sorted((tmp_path / "cold" / "step-00000001.cold").iterdir())
    assert len(files) == 3
    for chosen in range(1 << len(files)):
        shutil.rmtree(tmp_path / "mixed", ignore_errors=True)
        shutil.copytree(tmp_path / "run", tmp_path / "mixed")
        for bit, file in enumerate(files):
            if chosen >> bit & 1:
                kind, _, name = file.name.partition("-")
                (tmp_path / "mixed" / "step-00000001" / kind).mkdir(exist_ok=True)
                shutil.copy(file, tmp_path / "mixed" / "step-00000001" / kind / name)
        target = {"model": {"w": torch.zeros(50)}, "optimizer": {"m": torch.zeros(9)}, "extra_states": {"epoch": 0}}
        bcp.load(tmp_path / "mixed" / "step-00000001", target)
        assert torch.equal(target["model"]["w"], torch.arange(50.0))
        assert torch.equal(target["optimizer"]["m"], torch.arange(9.0))
        assert target["extra_states"]["epoch"] == 7
        assert bcp.Checkpoint(tmp_path / "mixed" / "step-00000001").verify()


def test_an_ordinary_load_asks_for_nothing_more() -> None:
    stores = Stores()
    train(HOT)
    bcp.cool(HOT, to=COLD, days=0)
    stores.requests.clear()
    assert_loads(HOT, 3, bcp.LoadOptions(record=False))
    assert not [request for request in stores.requests if "cold" in request], stores.requests
    stores.requests.clear()
    assert_loads(HOT, 1, bcp.LoadOptions(record=False))
    assert [request for request in stores.requests if request.startswith("cold read")], stores.requests


# -- choices -----------------------------------------------------------------------------------------


def test_age_newest_and_verified_decide(run: Path, cold: Path) -> None:
    assert bcp.cool(run, to=cold, days=7) == []
    assert not cold.exists()
    with bcp.Run(run, states(0), save=100) as marking:
        marking.resume()
        marking.mark(2, "verified")
    assert [each.step for each in bcp.cool(run, to=cold, days=0, dry_run=True)] == [1]
    assert not cold.exists()
    bcp.tools.pin(run, 1)
    assert cooled(run, cold) == [1]
    (first, second, third) = bcp.tools.list_steps(run)
    assert first.cold_nbytes > 0
    assert second.cold_nbytes == third.cold_nbytes == 0
    assert first.nbytes > first.cold_nbytes


def test_the_newest_checkpoint_of_a_run_that_went_back_stays(tmp_path: Path, cold: Path) -> None:
    train(tmp_path / "run", steps=(10, 20, 30))
    with bcp.Run(tmp_path / "run", states(0), save=5, keep=100) as back:
        back.resume(step=10)
        back.maybe_save(15)
    assert bcp.latest(tmp_path / "run") == str(tmp_path / "run" / "step-00000015")
    assert cooled(tmp_path / "run", cold) == [10, 20]


def test_a_promoted_checkpoint_stays_for_its_days(run: Path, cold: Path) -> None:
    cooled(run, cold)
    result = bcp.promote(run, 1)
    assert (result.step, result.files, result.path) == (1, 2, str(run / "step-00000001"))
    assert bcp.promote(run, 1).files == 0
    assert len(names(run)) == 2
    assert_loads(run, 1, bcp.LoadOptions(cold=None))
    record = json.loads((run / "cold.json").read_text())
    assert bcp.cool(run, to=cold, days=1) == []  # younger than a day
    ledger = json.loads((run / "run.json").read_text())
    for entry in ledger["checkpoints"]:
        entry["committed"] -= 3 * 86_400
    (run / "run.json").write_text(json.dumps(ledger))
    assert bcp.cool(run, to=cold, days=2) == []
    record["promoted"]["step-00000001"] = time.time() - 3 * 86_400
    (run / "cold.json").write_text(json.dumps(record))
    assert cooled(run, cold, days=2) == [1]
    assert_loads(run, 1)


# -- damage ------------------------------------------------------------------------------------------


def test_a_bit_that_flips_in_the_copy_is_found_before_the_file_goes() -> None:
    stores = Stores()
    train(HOT)

    def flip(what: str) -> None:
        if what.startswith("cold read_into"):
            key = what.rsplit(maxsplit=1)[-1]
            data = bytearray(stores.inner("cold")._objects[key])
            data[len(data) // 2] ^= 1
            stores.inner("cold")._objects[key] = bytes(data)

    stores.hit = flip
    with pytest.raises(bcp.StorageError, match="differs from the file, which stays"):
        bcp.cool(HOT, to=COLD, days=0)
    stores.hit = lambda _: None
    for step in STEPS:
        assert_loads(HOT, step, bcp.LoadOptions(cold=None))
    assert [each.reason for each in bcp.cool(HOT, to=COLD, days=0)] == ["", ""]
    for step in STEPS:
        assert_loads(HOT, step)


def test_nothing_goes_if_the_record_was_lost_meanwhile() -> None:
    stores = Stores()
    train(HOT)

    def lose(what: str) -> None:
        if what.startswith("cold commit"):
            stores.inner("hot")._objects.pop("run/cold.json", None)

    stores.hit = lose
    with pytest.raises(bcp.StorageError, match="changed by others meanwhile"):
        bcp.cool(HOT, to=COLD, days=0)
    stores.hit = lambda _: None
    for step in STEPS:
        assert_loads(HOT, step, bcp.LoadOptions(cold=None))


def test_an_old_damaged_copy_is_made_anew(run: Path, cold: Path) -> None:
    cooled(run, cold)
    bcp.promote(run, 1)
    copy = next((cold / "step-00000001.cold").glob("model*"))
    damaged = bytearray(copy.read_bytes())
    damaged[-1] ^= 1
    copy.write_bytes(damaged)
    record = json.loads((run / "cold.json").read_text())
    (run / "cold.json").write_text(json.dumps({**record, "promoted": {}}))
    assert cooled(run, cold) == [1]
    assert_loads(run, 1)


def test_a_damaged_checkpoint_stays_and_the_others_move(run: Path, cold: Path) -> None:
    file = next((run / "step-00000001" / "model").iterdir())
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    first, second = bcp.cool(run, to=cold, days=0)
    assert first.is_damaged
    assert "is corrupt" in first.reason
    assert file.exists()
    assert (second.files, second.reason) == (2, "")
    assert main(["cool", str(run), "--to", str(cold), "--days", "0"]) == 1


def test_damage_in_the_cold_place_is_found(run: Path, cold: Path) -> None:
    cooled(run, cold)
    copy = next((cold / "step-00000001.cold").glob("model*"))
    damaged = bytearray(copy.read_bytes())
    damaged[-1] ^= 1
    copy.write_bytes(damaged)
    with pytest.raises(bcp.CorruptError, match="model/00000"):
        assert_loads(run, 1)
    with pytest.raises(bcp.CorruptError, match="cannot be promoted"):
        bcp.promote(run, 1)
    copy.unlink()
    with pytest.raises(bcp.CorruptError, match="missing"):
        assert_loads(run, 1)
    assert not bcp.Checkpoint(run / "step-00000001").verify()


# -- deletion ----------------------------------------------------------------------------------------


def test_retention_deletes_cold_files_too(run: Path, cold: Path) -> None:
    cooled(run, cold)
    train(run, steps=(4, 5), keep=2)
    assert [step.step for step in bcp.tools.list_steps(run)] == [4, 5]
    assert names(cold) == []


def test_remove_deletes_cold_files_too(run: Path, cold: Path) -> None:
    cooled(run, cold)
    nbytes = bcp.tools.list_steps(run)[0].nbytes
    result = bcp.tools.remove(run / "step-00000001")
    assert (result.nbytes, result.kept) == (nbytes, ())
    assert [name for name in names(cold) if "step-00000001" in name] == []
    assert not (run / "step-00000001").exists()
    assert_loads(run, 2)


def test_a_cold_place_that_is_not_mounted_loses_nothing(run: Path, cold: Path, tmp_path: Path) -> None:
    cooled(run, cold)
    cold.rename(tmp_path / "unmounted")
    cold.mkdir()
    with pytest.raises(bcp.StorageError, match=r"has no cold-of\.json.*Mount"):
        assert_loads(run, 1)
    with pytest.raises(bcp.StorageError, match="Mount"):
        bcp.tools.remove(run / "step-00000001")
    assert "Mount" in bcp.tools.list_steps(run)[0].reason
    with pytest.raises(bcp.StorageError, match="Mount"):
        bcp.cool(run, to=cold, days=0)
    train(run, steps=(4, 5, 6), keep=2)  # steps that were never moved go as before
    assert [step.step for step in bcp.tools.list_steps(run)] == [1, 2, 5, 6]
    cold.rmdir()
    (tmp_path / "unmounted").rename(cold)
    assert_loads(run, 1)
    train(run, steps=(7,), keep=2)
    assert [step.step for step in bcp.tools.list_steps(run)] == [6, 7]
    assert names(cold) == []


def test_copies_without_a_checkpoint_go_with_the_next_call(run: Path, cold: Path) -> None:
    cooled(run, cold)
    shutil.copytree(cold / "step-00000001.cold", cold / "step-00000009.cold")
    shutil.rmtree(run / "step-00000001")
    with bcp.Run(run, states(0), save=100) as taking:
        taking.resume()
    assert cooled(run, cold) == []
    assert [path.name for path in cold.iterdir() if path.is_dir() and any(path.iterdir())] == ["step-00000002.cold"]
    assert_loads(run, 2)


def test_the_files_of_a_killed_write_go(run: Path, cold: Path) -> None:
    cooled(run, cold)
    copy = next((cold / "step-00000001.cold").glob("model*"))
    remains = Path(temp_path(copy))
    bcp.promote(run, 1)
    record = json.loads((run / "cold.json").read_text())
    (run / "cold.json").write_text(json.dumps({**record, "promoted": {}}))
    remains.write_bytes(b"half")
    file = next((run / "step-00000001" / "model").iterdir())
    assert cooled(run, cold) == [1]
    assert not remains.exists()
    file.parent.mkdir(exist_ok=True)
    half = Path(temp_path(file))
    half.write_bytes(b"half")
    bcp.promote(run, 1)
    assert not half.exists()
    assert_loads(run, 1)


def test_copies_of_a_save_that_was_replaced_go(run: Path, cold: Path) -> None:
    cooled(run, cold)
    before = names(cold)
    bcp.save(run / "step-00000001", states(8), overwrite=True)
    assert cooled(run, cold) == [1]
    after = [name for name in names(cold) if "step-00000001" in name]
    assert len(after) == 1
    assert after[0] not in before
    target = states(0)
    bcp.load(run / "step-00000001", target)
    assert torch.equal(target["model"]["w"], states(8)["model"]["w"])


def test_an_edit_works_on_cold_files(run: Path, cold: Path) -> None:
    cooled(run, cold)
    bcp.tools.edit(run / "step-00000001", rename={"w": "weight"})
    assert torch.equal(bcp.Checkpoint(run / "step-00000001").read("weight"), states(1)["model"]["w"])
    bcp.tools.edit(run / "step-00000001", drop=["*"], add={"new": torch.ones(3)})
    assert [name for name in names(cold) if "step-00000001" in name] == []
    assert torch.equal(bcp.Checkpoint(run / "step-00000001").read("new"), torch.ones(3))


def test_nothing_takes_a_cold_place_for_remains(run: Path, cold: Path) -> None:
    cooled(run, cold)
    assert bcp.tools.collect(cold, min_age_seconds=0) == []
    with pytest.raises(bcp.NotACheckpointError):
        bcp.tools.remove(cold / "step-00000001.cold")
    train(cold, steps=(8, 9, 10), keep=1)
    for step in STEPS:
        assert_loads(run, step)


# -- bad input ---------------------------------------------------------------------------------------


def untouched(run: Path, call: Callable[[], object], match: str, error: type[bcp.BcpError] = bcp.InputError) -> None:
    before = sorted(run.parent.rglob("*"))
    with pytest.raises(error, match=match):
        call()
    assert sorted(run.parent.rglob("*")) == before


def test_bad_places_are_refused_before_any_byte(run: Path, tmp_path: Path) -> None:
    untouched(run, lambda: bcp.cool(run, to=run, days=0), "is the folder of the run")
    untouched(run, lambda: bcp.cool(run, to=run / "deep" / "cold", days=0), "lies in the folder of the run")
    untouched(run, lambda: bcp.cool(run, to=f"file://{run}/cold", days=0), "lies in the folder of the run")
    untouched(run, lambda: bcp.cool(run, to=f"file://localhost{run}/cold", days=0), "lies in the folder of the run")
    quoted = f"file://{run.parent}/%72un"
    untouched(run, lambda: bcp.cool(run, to=f"{quoted}/cold", days=0), "lies in the folder of the run")
    untouched(run, lambda: bcp.cool(quoted, to=run, days=0), "is the folder of the run")
    (tmp_path / "link").symlink_to(run)
    untouched(run, lambda: bcp.cool(run, to=tmp_path / "link" / "cold", days=0), "lies in the folder of the run")
    untouched(run, lambda: bcp.cool(run, to="", days=0), "pass the path or URL")
    untouched(run, lambda: bcp.cool(run, to=None, days=0), "pass the path or URL")  # type: ignore[arg-type]  # the point
    untouched(run, lambda: bcp.cool(run, to="https://example.org/cold", days=0), "another kind of storage")
    untouched(run, lambda: bcp.cool(run, to="s3://key:secret@host/cold", days=0), "secret")
    (tmp_path / "file").write_text("no folder")
    untouched(run, lambda: bcp.cool(run, to=tmp_path / "file", days=0), "file", bcp.StorageError)


def test_bad_numbers_and_folders_are_refused(run: Path, cold: Path, tmp_path: Path) -> None:
    untouched(run, lambda: bcp.cool(run, to=cold, days=-1), "zero or more")
    untouched(run, lambda: bcp.cool(run, to=cold, days=float("nan")), "finite")
    untouched(run, lambda: bcp.cool(run, to=cold, days="7"), "no number")  # type: ignore[arg-type]  # the point
    untouched(run, lambda: bcp.cool(tmp_path / "none", to=cold, days=0), "no ledger")
    untouched(run, lambda: bcp.cool(run / "step-00000001", to=cold, days=0), "no ledger")
    untouched(run, lambda: bcp.promote(tmp_path / "none", 1), "no ledger")
    untouched(run, lambda: bcp.promote(run, 7), "no committed checkpoint of step 7")
    untouched(run, lambda: bcp.promote(run, -1), "is no step")
    ledger = (run / "run.json").read_bytes()
    (run / "run.json").write_bytes(b"{")
    untouched(run, lambda: bcp.cool(run, to=cold, days=0), "cannot be read")
    (run / "run.json").write_bytes(ledger)


def test_the_folder_of_a_run_or_of_a_checkpoint_is_no_cold_place(run: Path, tmp_path: Path) -> None:
    """Retention of the other run would delete the copies with the checkpoint."""
    train(tmp_path / "other")
    untouched(run, lambda: bcp.cool(run, to=tmp_path / "other", days=0), "is the folder of a run")
    inside = tmp_path / "other" / "step-00000001"
    untouched(run, lambda: bcp.cool(run, to=inside, days=0), "lies in a checkpoint of a run")
    untouched(run, lambda: bcp.cool(run, to=inside / "cold", days=0), "lies in a checkpoint of a run")
    untouched(run, lambda: bcp.cool(run, to=inside / "cold", days=0, dry_run=True), "lies in a checkpoint of a run")
    bcp.save(tmp_path / "alone", states(1))
    untouched(run, lambda: bcp.cool(run, to=tmp_path / "alone", days=0), "is a checkpoint")


def test_a_place_of_another_run_is_refused(run: Path, cold: Path, tmp_path: Path) -> None:
    cooled(run, cold)
    train(tmp_path / "other")
    untouched(tmp_path / "other", lambda: bcp.cool(tmp_path / "other", to=cold, days=0), "belongs to the run")


def test_a_place_of_a_run_at_the_same_path_on_another_host_is_refused(run: Path, cold: Path, tmp_path: Path) -> None:
    cooled(run, cold)
    run.rename(tmp_path / "on-another-host")
    train(run, steps=(11, 12, 13))
    untouched(
        run, lambda: bcp.cool(run, to=cold, days=0), "another run at .* with the id .* choose a place for this run"
    )
    ledger = json.loads((run / "run.json").read_text())
    shutil.rmtree(run)
    (tmp_path / "on-another-host").rename(run)
    for step in STEPS:
        assert_loads(run, step)
    mark = json.loads((cold / "cold-of.json").read_text())
    assert mark["id"] != ledger["run_id"]


def test_a_mark_without_the_id_of_a_run_counts_by_its_path(run: Path, cold: Path) -> None:
    cooled(run, cold)
    mark = json.loads((cold / "cold-of.json").read_text())
    del mark["id"]
    (cold / "cold-of.json").write_text(json.dumps(mark))
    (run / "cold.json").unlink()
    assert bcp.cool(run, to=cold, days=0) == []
    assert_loads(run, 1)


# -- trust -------------------------------------------------------------------------------------------


def test_the_caller_may_name_the_place_or_none(run: Path, cold: Path, tmp_path: Path) -> None:
    cooled(run, cold)
    with pytest.raises(bcp.CorruptError, match="missing"):
        assert_loads(run, 1, bcp.LoadOptions(cold=None))
    cold.rename(tmp_path / "elsewhere")
    assert_loads(run, 1, bcp.LoadOptions(cold=str(tmp_path / "elsewhere")))
    with pytest.raises(bcp.InputError, match="cold=7"):
        bcp.LoadOptions(cold=7)  # type: ignore[arg-type]  # the point


@pytest.mark.parametrize(
    "change",
    [
        {"places": [{"url": "https://example.org/x", "mark": "0" * 16}]},
        {"places": [{"url": "relative", "mark": "0" * 16}]},
        {"places": [{"url": "/cold", "mark": "../x"}]},
        {"places": [{"url": "/cold"}]},
        {"places": {}},
        {"cooled": ["../step-00000001"]},
        {"cooled": [7]},
        {"promoted": {"step-00000001": "now"}},
        {"promoted": {"step-00000001": 10**400}},
        {"version": "1"},
        {"version": None},
    ],
)
def test_a_forged_record_is_refused(run: Path, cold: Path, change: dict[str, object]) -> None:
    cooled(run, cold)
    record = json.loads((run / "cold.json").read_text())
    (run / "cold.json").write_text(json.dumps({**record, **change}))
    with pytest.raises(bcp.CorruptError, match=r"cold\.json is no record"):
        assert_loads(run, 1)
    with pytest.raises(bcp.CorruptError, match=r"cold\.json is no record"):
        bcp.tools.remove(run / "step-00000001")
    assert_loads(run, 3)
    listed = bcp.tools.list_steps(run)
    assert all(step.is_committed and "is no record" in step.reason for step in listed)
    train(run, steps=(4,), keep=1)
    assert [step.step for step in bcp.tools.list_steps(run)] == [1, 2, 3, 4]
    assert len(names(cold)) == 2


def test_a_newer_record_is_refused(run: Path, cold: Path) -> None:
    cooled(run, cold)
    record = json.loads((run / "cold.json").read_text())
    (run / "cold.json").write_text(json.dumps({**record, "version": 2}))
    with pytest.raises(bcp.FormatVersionError, match="version 2"):
        assert_loads(run, 1)


def test_a_lost_record_comes_back_from_the_mark_of_the_place(run: Path, cold: Path) -> None:
    cooled(run, cold)
    (run / "cold.json").unlink()
    with pytest.raises(bcp.CorruptError, match="missing"):
        assert_loads(run, 1)
    assert bcp.cool(run, to=cold, days=0) == []
    assert_loads(run, 1)


def test_a_copy_of_a_run_deletes_no_files_of_the_run(run: Path, cold: Path, tmp_path: Path) -> None:
    cooled(run, cold)
    shutil.copytree(run, tmp_path / "copy")
    assert_loads(tmp_path / "copy", 1)
    with captured_logs() as logs:
        train(tmp_path / "copy", steps=(4, 5), keep=2)
    assert [step.step for step in bcp.tools.list_steps(tmp_path / "copy")] == [4, 5]
    assert any("another run" in str(line) for line in logs)
    for step in STEPS:
        assert_loads(run, step)
    untouched(tmp_path / "copy", lambda: bcp.cool(tmp_path / "copy", to=cold, days=0), "belongs to the run")


def test_a_run_that_was_moved_says_so_in_the_mark(run: Path, cold: Path, tmp_path: Path) -> None:
    cooled(run, cold)
    run.rename(tmp_path / "moved")
    assert_loads(tmp_path / "moved", 1)
    mark = json.loads((cold / "cold-of.json").read_text())
    assert mark["run"] == str(run)
    (cold / "cold-of.json").write_text(json.dumps({**mark, "run": str(tmp_path / "moved")}))
    train(tmp_path / "moved", steps=(4, 5), keep=2)
    assert names(cold) == []


# -- the command -------------------------------------------------------------------------------------


def test_the_commands(run: Path, cold: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cool", str(run), "--to", str(cold), "--days", "0", "--dry-run"]) == 0
    assert "would be moved" in capsys.readouterr().out
    assert main(["cool", str(run), "--to", str(cold), "--days", "0", "--json"]) == 0
    assert [each["files"] for each in json.loads(capsys.readouterr().out)] == [2, 2]
    assert main(["cool", str(run), "--to", str(cold), "--days", "0"]) == 0
    assert "nothing to move" in capsys.readouterr().out
    assert main(["ls", str(run)]) == 0
    assert capsys.readouterr().out.count("cold") == 2
    assert main(["verify", str(run / "step-00000001")]) == 0
    assert main(["promote", str(run), "1"]) == 0
    assert "2 files came back" in capsys.readouterr().out
    assert main(["promote", str(run), "77"]) == 2
