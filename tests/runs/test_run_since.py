"""Saves of a run that store only what has changed: their sizes, their bytes, and the checkpoints that have to stay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from anyio import to_thread
from logs import captured_logs
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp

import bcp
import bcp.dcp
from bcp._deletion import delete_dropped
from bcp._save import bases as rules
from bcp.backends import LocalBackend, MemoryBackend, child
from bcp.format.metadata import METADATA_KEY, decode_metadata, encode_metadata, stored_layout
from bcp.format.receipt import decode_receipt, encode_receipt, receipt_digest
from bcp.runs.bases import _Earlier
from bcp.runs.folder import Folder
from bcp.runs.keeper import Keeper

MIB = 1 << 20
FROZEN = 6


class Adapted(nn.Module):
    """A frozen layer with an adapter, as LoRA trains it."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(width, width).bfloat16(), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(width, 4)), nn.Parameter(torch.zeros(4, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.frozen.float() * 0.02 + x @ self.down @ self.up


def lora(seed: int = 0, layers: int = 6) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(Adapted() for _ in range(layers)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=1e-3)}


def trained(states: dict[str, Any]) -> None:
    states["model"](torch.randn(4, 1024)).square().mean().backward()
    states["optimizer"].step()
    states["optimizer"].zero_grad()


def blocks() -> dict[str, torch.Tensor]:
    """Return tensors of one block each, and a small one in front of them."""
    return {"small": torch.zeros(8), **{f"w{n}": torch.full((MIB,), n, dtype=torch.uint8) for n in range(FROZEN)}}


def copied(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.items()}


def name(step: int) -> str:
    return f"step-{step:08d}"


def nbytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def refers(path: Path) -> tuple[int, ...]:
    return decode_metadata((path / METADATA_KEY).read_bytes(), "").commit.refers


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


def loaded(path: Path | str) -> dict[str, torch.Tensor]:
    model = {key: torch.empty_like(tensor) for key, tensor in blocks().items()}
    bcp.load(path, {"model": model})
    return model


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(tensor, two[key]) for key, tensor in one.items())


def life(run: Path, *steps: int, truth: dict[int, dict[str, torch.Tensor]] | None = None, **arguments: Any) -> None:
    """Save steps, each with its number in the small tensor; ``change`` changes the model before each save."""
    change: Callable[[dict[str, torch.Tensor], int], None] = arguments.pop("change", lambda _model, _step: None)
    resume = arguments.pop("resume", {})
    model, settings = blocks(), {"save": 1, "keep": 100, "since": "auto", **arguments}
    with bcp.Run(run, {"model": model}, **settings) as training:
        training.resume(**resume)
        for step in steps:
            model["small"].fill_(step)
            change(model, step)
            training.maybe_save(step)
            if truth is not None:
                truth[step] = copied(model)


@pytest.fixture
def truth() -> dict[int, dict[str, torch.Tensor]]:
    return {}


@pytest.fixture
def run(tmp_path: Path, truth: dict[int, dict[str, torch.Tensor]]) -> Path:
    """Return a run whose steps 2 and 3 refer to step 1."""
    folder = tmp_path / "run"
    life(folder, 1, 2, 3, truth=truth)
    assert [refers(folder / name(step)) for step in (1, 2, 3)] == [(), (1,), (1,)]
    return folder


# -- what is written ----------------------------------------------------------------------------------


def test_adapters_over_a_frozen_base_write_a_tenth_of_the_bytes(tmp_path: Path) -> None:
    states, truth = lora(), dict[int, dict[str, torch.Tensor]]()
    with bcp.Run(tmp_path, states, save=1, keep=10, since="auto") as run:
        run.resume()
        for step in range(1, 5):
            trained(states)
            run.maybe_save(step)
            truth[step] = copied(states["model"].state_dict())
    whole = nbytes(tmp_path / name(1))
    for step in (2, 3, 4):
        assert nbytes(tmp_path / name(step)) <= 0.15 * whole
        other = lora(seed=7)
        bcp.load(tmp_path / name(step), other)
        assert equal(truth[step], dict(other["model"].state_dict()))
        assert bcp.Checkpoint(tmp_path / name(step)).verify()
    # the life after goes on from the receipts in storage
    again = lora(seed=8)
    with bcp.Run(tmp_path, again, save=1, keep=10, since="auto") as run:
        assert run.resume() == 4
        trained(again)
        run.maybe_save(5)
    assert nbytes(tmp_path / name(5)) <= 0.15 * whole
    assert refers(tmp_path / name(5)) == (1,)


def test_a_run_without_references_writes_version_1_and_plain_files(tmp_path: Path) -> None:
    life(tmp_path, 1, 2, since=None)
    for step in (1, 2):
        assert (tmp_path / name(step) / METADATA_KEY).read_bytes()[-1] == 1
        assert not list((tmp_path / name(step)).rglob("*.bcp"))


def test_references_lead_to_the_true_place_and_never_through_another(run: Path) -> None:
    def turn(model: dict[str, torch.Tensor], step: int) -> None:
        model["w1"].fill_(40 if step >= 4 else 1)

    truth: dict[int, dict[str, torch.Tensor]] = {}
    life(run, 4, 5, change=turn, truth=truth)
    assert refers(run / name(4)) == (1,)
    assert refers(run / name(5)) == (1, 4)  # what step 4 has stored, and what it has kept itself
    life(run, 6, change=turn, truth=truth, keep=1)
    assert folders(run) == [name(1), name(4), name(6)]
    assert equal(loaded(run / name(6)), truth[6])


def test_every_twentieth_save_in_a_row_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules.FULL_EVERY == 20
    monkeypatch.setattr(rules, "FULL_EVERY", 3)
    life(tmp_path, 1, 2, 3, 4)
    life(tmp_path, 5, 6, 7)  # the count goes on in the next life
    full = [step for step in range(1, 8) if not refers(tmp_path / name(step))]
    assert full == [1, 4, 7]


def test_a_save_after_one_with_few_equal_blocks_is_full(tmp_path: Path) -> None:
    def change(model: dict[str, torch.Tensor], step: int) -> None:
        if step in (2, 3):
            for n in range(FROZEN - 1):
                model[f"w{n}"].fill_(100 * (step - 1) + n)

    life(tmp_path, 1, 2, 3, 4, 5, change=change)
    # nothing is known before step 2. Step 3 and 4 come after a save with one equal block of six
    assert [refers(tmp_path / name(step)) for step in range(1, 6)] == [(), (1,), (), (), (4,)]


def test_files_whose_blocks_all_change_are_plain_ones(tmp_path: Path) -> None:
    states = lora(layers=2)
    states["model"].requires_grad_(True)  # noqa: FBT003 -- torch's own
    model = {"frozen": torch.zeros(8 * MIB, dtype=torch.uint8), "net": states["model"]}
    optimizer = torch.optim.AdamW(states["model"].parameters(), lr=0.1)
    with bcp.Run(tmp_path, {"model": nn.ModuleDict({"net": model["net"]}), "optimizer": optimizer}, save=1) as run:
        run.resume()
    with bcp.Run(tmp_path, {"model": states["model"], "optimizer": optimizer}, save=1, since="auto") as run:
        run.resume()
        for step in (1, 2, 3):
            states["model"](torch.randn(4, 1024)).square().mean().backward()
            optimizer.step()
            run.maybe_save(step)
    assert not list((tmp_path / name(3)).rglob("*.bcp"))
    assert refers(tmp_path / name(3)) == ()


@pytest.mark.parametrize("keep", [1, 100])
def test_states_whose_blocks_have_all_changed_load(tmp_path: Path, keep: int) -> None:
    """Files are packed before it is known that they lack nothing: step 2, and the first save of each later life."""
    truth = dict[int, dict[str, torch.Tensor]]()

    def change(model: dict[str, torch.Tensor], step: int) -> None:
        for n in range(FROZEN):
            model[f"w{n}"].fill_(10 * step + n)

    for steps in ((1, 2), (3,), (4, 5), (6,)):
        life(tmp_path, *steps, truth=truth, change=change, keep=keep)
    assert name(6) in folders(tmp_path)
    for step in folders(tmp_path):
        assert equal(loaded(tmp_path / step), truth[int(step[-8:])])
        with bcp.Checkpoint(tmp_path / step) as checkpoint:
            assert checkpoint.verify()
    bcp.tools.copy(tmp_path / name(6), tmp_path / "copy")
    assert equal(loaded(tmp_path / "copy"), truth[6])


def test_a_state_that_changes_whole_once_after_it_was_kept(tmp_path: Path) -> None:
    truth = dict[int, dict[str, torch.Tensor]]()

    def change(model: dict[str, torch.Tensor], step: int) -> None:
        if step == 4:
            for n in range(FROZEN):
                model[f"w{n}"].fill_(77)

    life(tmp_path, 1, 2, 3, 4, 5, 6, truth=truth, change=change)
    for step, model in truth.items():
        assert equal(loaded(tmp_path / name(step)), model)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_trained_model_comes_back_life_after_life(tmp_path: Path, *, frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 600))
    model[0].requires_grad_(not frozen)
    states = {"model": model, "optimizer": torch.optim.AdamW(model[1 if frozen else slice(None)].parameters())}
    for life_number in range(4):
        with bcp.Run(tmp_path, states, save=1, keep=1, since="auto") as run:
            assert run.resume() == 2 * life_number
            for step in (2 * life_number + 1, 2 * life_number + 2):
                model(torch.randn(4, 1024)).square().mean().backward()
                states["optimizer"].step()
                run.maybe_save(step)
        before = copied(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        bcp.load(tmp_path / name(2 * life_number + 2), states)
        assert equal(model.state_dict(), before)


def test_another_layout_is_saved_in_full(run: Path) -> None:
    model = blocks() | {"more": torch.zeros(5)}
    with bcp.Run(
        run, {"model": model}, save=1, keep=100, since="auto", load_options=bcp.LoadOptions(strict=False)
    ) as r:
        assert r.resume() == 3
        r.maybe_save(4)
        r.maybe_save(5)
    assert [refers(run / name(step)) for step in (4, 5)] == [(), (4,)]


def test_a_suspect_base_is_none(run: Path) -> None:
    bcp.Run(run, {}).mark(1, "suspect", "spikes")
    life(run, 4)
    assert refers(run / name(4)) == ()


@pytest.mark.parametrize("part", [METADATA_KEY, "model", "."])
def test_a_base_that_is_gone_is_none(run: Path, part: str, truth: dict[int, dict[str, torch.Tensor]]) -> None:
    model = blocks()
    with bcp.Run(run, {"model": model}, save=1, keep=100, since="auto") as training:
        assert training.resume() == 3
        target = run / name(1) / part
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        with captured_logs() as lines:
            model["small"].fill_(4)
            training.maybe_save(4)
            truth[4] = copied(model)
    assert refers(run / name(4)) == ()
    assert any("stores everything" in line["event"] for line in lines)
    assert equal(loaded(run / name(4)), truth[4])


def test_a_base_that_goes_while_the_save_runs_fails_the_save(run: Path) -> None:
    def deleting(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        async def delete(item: Any) -> Any:
            shutil.rmtree(run / name(1), ignore_errors=True)
            return item

        return graph.after("upload", bcp.extend.Stage("delete", delete))

    model = blocks()
    options = bcp.SaveOptions(edit=deleting)
    with bcp.Run(run, {"model": model}, save=1, keep=100, since="auto", save_options=options, tolerate=9) as training:
        assert training.resume() == 3
        with pytest.raises(bcp.StorageError, match=r"step 4 refers to step-00000001, which is not there"):
            training.maybe_save(4).wait()  # type: ignore[union-attr] -- it begins a save
        training.maybe_save(5)
    assert not (run / name(4) / METADATA_KEY).exists()
    assert refers(run / name(5)) == ()
    assert equal(loaded(run / name(5)), model)


@pytest.mark.parametrize("door", ["overwrite", "edit", "copy", "remove"])
def test_a_base_that_goes_just_before_the_commit_takes_it_back(tmp_path: Path, door: str) -> None:
    """Nobody else refers to it yet. The save looks before its commit and behind it."""
    run, other, truth = tmp_path / "run", tmp_path / "other", dict[int, dict[str, torch.Tensor]]()
    life(run, 1, truth=truth)
    bcp.save(other, {"model": {"x": torch.ones(3)}})
    base, calls = run / name(1), list[int]()
    doors = {
        "overwrite": lambda: bcp.save(base, {"model": {"x": torch.ones(3)}}, overwrite=True),
        "edit": lambda: bcp.tools.edit(base, drop=["w*"]),
        "copy": lambda: bcp.tools.copy(other, base, overwrite=True),
        "remove": lambda: bcp.tools.remove(base, force=True),
    }
    gone = _Earlier.gone

    async def then_through_the_door(self: _Earlier, steps: Any) -> str:
        words = await gone(self, steps)
        calls.append(1)
        if len(calls) == 2:  # behind the look just before the commit
            await to_thread.run_sync(doors[door])
        return words

    model = blocks()
    with (
        mock.patch.object(_Earlier, "gone", then_through_the_door),
        bcp.Run(run, {"model": model}, save=1, keep=100, since="auto", tolerate=9) as training,
    ):
        assert training.resume() == 1
        with pytest.raises(bcp.StorageError, match=r"step 2 refers to step-00000001, which .*taken back"):
            training.maybe_save(2).wait()  # type: ignore[union-attr] -- it begins a save
        training.maybe_save(3)
    assert not (run / name(2) / METADATA_KEY).exists()
    assert equal(loaded(run / name(3)), model)


# -- what must not be read wrongly ----------------------------------------------------------------------


def test_a_flipped_bit_in_the_base_is_found_in_every_keeper(run: Path) -> None:
    (file,) = (run / name(1) / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    for step in (2, 3):
        found = bcp.Checkpoint(run / name(step)).verify()
        assert not found
        assert f"{name(1)}/model/{file.name}" in found.damage[0]
        with pytest.raises(bcp.CorruptError):
            loaded(run / name(step))
    assert not bcp.tools.verify(run / name(2))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 9},
        {"step": 3},
        {"start": 1 << 40},
        {"start": 7},
        {"rank": 5},
        {"packed": True},
        {"count": 2},
        {"kind": 1},
    ],
)
def test_a_forged_reference_is_damage(run: Path, changes: dict[str, Any]) -> None:
    (path,) = (run / name(3) / "receipts").iterdir()
    receipt = decode_receipt(path.read_bytes(), "r")
    files = [
        replace(file, kept=tuple(replace(each, **changes) for each in file.kept)) if file.kept else file
        for file in receipt.files
    ]
    data = encode_receipt(replace(receipt, files=files))
    path.write_bytes(data)
    commit, layout = stored_layout((run / name(3) / METADATA_KEY).read_bytes(), "m")
    forged = encode_metadata(layout, replace(commit, receipts=receipt_digest(data)))
    (run / name(3) / METADATA_KEY).write_bytes(forged)
    with pytest.raises(bcp.CorruptError):
        loaded(run / name(3))
    assert not bcp.Checkpoint(run / name(3)).verify()


@pytest.mark.parametrize("fast", [True, False])
def test_a_missing_base_is_named(run: Path, fast: bool) -> None:  # noqa: FBT001 -- a parameter
    shutil.rmtree(run / name(1))
    for step in (2, 3):
        found = bcp.Checkpoint(run / name(step)).verify(fast=fast)
        assert f"keeps blocks in {name(1)}/model/" in found.damage[0]
        with pytest.raises(
            bcp.CorruptError, match=f"keeps blocks in {name(1)}/model/.* is missing: step 1 was deleted"
        ):
            loaded(run / name(step))


def test_a_resumption_falls_back_behind_a_missing_base(tmp_path: Path) -> None:
    life(tmp_path, 1, since=None)
    life(tmp_path, 2, since=None)
    life(tmp_path, 3)
    assert refers(tmp_path / name(3)) == (2,)
    shutil.rmtree(tmp_path / name(2))
    with bcp.Run(tmp_path, {"model": blocks()}, save=None) as training:
        assert training.resume() == 1
        assert "keeps blocks in" in training.resumed.passed_over[0].reason


def test_a_base_that_another_save_has_replaced_is_missing_and_never_wrong(run: Path) -> None:
    shutil.rmtree(run / name(1))
    bcp.save(run / name(1), {"model": {key: tensor + 1 for key, tensor in blocks().items()}})
    with pytest.raises(bcp.CorruptError, match="is missing"):
        loaded(run / name(2))


def test_a_backend_object_reads_beside_itself_or_says_that_it_cannot(
    run: Path, truth: dict[int, dict[str, torch.Tensor]]
) -> None:
    whole = LocalBackend(run)
    for backend in (LocalBackend(run / name(3)), child(whole, name(3))):
        model = blocks()
        bcp.load(backend, {"model": model})
        assert equal(model, truth[3])


@pytest.mark.anyio
async def test_a_backend_that_does_not_know_what_is_beside_it_says_so(run: Path) -> None:
    backend = MemoryBackend("references")
    for file in (path for path in (run / name(3)).rglob("*") if path.is_file()):
        await backend.put(str(file.relative_to(run / name(3))), file.read_bytes())
    with pytest.raises(bcp.InputError, match="step-00000001 beside it, and MemoryBackend does not say what is beside"):
        await bcp.aload(backend, {"model": blocks()})


def test_a_store_of_objects_has_runs_with_references() -> None:
    url, states = "memory://since/run", {"model": blocks()}
    with bcp.Run(url, states, save=1, keep=1, since="auto") as training:
        training.resume()
        for step in (1, 2, 3):
            states["model"]["small"].fill_(step)
            training.maybe_save(step)
    assert [info.step for info in bcp.tools.list_steps(url)] == [1, 3]
    with pytest.raises(bcp.InputError, match="refer to"):
        bcp.tools.remove(f"{url}/{name(1)}")
    bcp.save(f"{url}/{name(1)}", {"model": {"w": torch.zeros(3)}}, overwrite=True)
    assert equal(loaded(f"{url}/{name(3)}"), states["model"])
    bcp.tools.collect(url, min_age_seconds=0)
    assert equal(loaded(f"{url}/{name(3)}"), states["model"])
    bcp.load(f"{url}/{name(3)}", {"model": blocks()}, options=bcp.LoadOptions(cold=None))
    assert bcp.Checkpoint(f"{url}/{name(3)}", options=bcp.LoadOptions(cold=None)).verify()
    MemoryBackend.forget("since")


def test_an_older_bcp_refuses_the_ledger(run: Path) -> None:
    ledger = json.loads((run / "run.json").read_text())
    assert ledger["version"] == 2
    for step in (3, 2):
        bcp.tools.remove(run / name(step))
    life(run, 4, since=None)
    assert json.loads((run / "run.json").read_text())["version"] == 1


def test_a_link_to_a_checkpoint_reads_beside_its_target(
    run: Path, tmp_path: Path, truth: dict[int, dict[str, torch.Tensor]]
) -> None:
    (tmp_path / "latest").symlink_to(run / name(3))
    assert equal(loaded(tmp_path / "latest"), truth[3])


# -- what must stay ---------------------------------------------------------------------------------------


def test_the_base_stays_as_long_as_a_kept_step_refers_to_it(
    run: Path, truth: dict[int, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    life(run, 4, 5, keep=1, truth=truth)
    assert folders(run) == [name(1), name(5)]
    assert equal(loaded(run / name(5)), truth[5])
    monkeypatch.setattr(rules, "FULL_EVERY", 1)
    life(run, 6, keep=1)  # a full one: nothing refers to step 1 any more
    assert folders(run) == [name(6)]


@pytest.mark.anyio
async def test_no_step_goes_to_which_an_entry_or_a_save_refers(run: Path) -> None:
    folder = Folder(LocalBackend(run), str(run))
    await folder.take(None)
    await folder.change(lambda ledger: ledger.beginning(9, [3]))
    for step in (1, 3):
        await folder.remove(step)
    assert folders(run) == [name(1), name(2), name(3)]
    await folder.change(lambda ledger: ledger.without(1))
    (run / name(1) / METADATA_KEY).unlink()  # it looks like an interrupted save now
    assert await folder.leftovers(()) == []
    await folder.remove(1)
    assert name(1) in folders(run)
    await folder.change(lambda ledger: ledger.settled([9]))
    for step in (3, 2):
        await folder.remove(step)
    assert await folder.leftovers(()) == []  # nothing newer is committed
    await folder.remove(1)
    assert folders(run) == []
    await folder.aclose()


def test_a_pinned_keeper_keeps_its_base(run: Path, truth: dict[int, dict[str, torch.Tensor]]) -> None:
    bcp.tools.pin(run, 2)
    life(run, 4, keep=1, since=None)
    assert folders(run) == [name(1), name(2), name(4)]
    assert equal(loaded(run / name(2)), truth[2])
    bcp.tools.pin(run, 2, pinned=False)
    life(run, 5, keep=1, since=None)
    assert folders(run) == [name(5)]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"nothing")])
def test_a_lost_ledger_loses_no_base(
    run: Path, damage: Callable[[Path], Any], truth: dict[int, dict[str, torch.Tensor]]
) -> None:
    damage(run / "run.json")
    life(run, 4, keep=1, since=None)
    for step in (1, 2):
        bcp.tools.pin(run, step, pinned=False)
    life(run, 5, keep=1, since=None)  # step 3 is pinned, as a lost ledger pins all
    assert folders(run) == [name(1), name(3), name(5)]
    assert equal(loaded(run / name(3)), truth[3])


def test_an_older_ledger_that_was_put_back_loses_no_base(
    tmp_path: Path, truth: dict[int, dict[str, torch.Tensor]]
) -> None:
    """It knows of the steps, and not that they refer to others."""
    life(tmp_path, 1, 2, 3, 4, truth=truth, since=None)
    old = (tmp_path / "run.json").read_bytes()
    life(tmp_path, 2, 3, 4, truth=truth, resume={"step": 1})
    assert refers(tmp_path / name(4)) == (1,)
    (tmp_path / "run.json").write_bytes(old)
    bcp.tools.pin(tmp_path, 4)
    life(tmp_path, 5, 6, 7, truth=truth, keep=2, since=None)
    assert folders(tmp_path) == [name(1), name(4), name(6), name(7)]
    assert equal(loaded(tmp_path / name(4)), truth[4])


def test_a_commit_that_cannot_be_read_lets_everything_stay(run: Path) -> None:
    """It may refer to any step. A damaged one refers to nothing, for nobody can load it."""
    read = Folder.read_commit

    async def failing(self: Folder, folder: str) -> Any:
        if folder == name(2):
            raise bcp.StorageError("no answer")
        return await read(self, folder)

    bcp.tools.pin(run, 2)
    with mock.patch.object(Folder, "read_commit", failing):
        life(run, 4, 5, 6, keep=1, since=None)
    assert folders(run) == [name(step) for step in range(1, 7)]
    path = run / name(2) / METADATA_KEY
    path.write_bytes(path.read_bytes()[:-30])
    life(run, 7, keep=1, since=None)
    assert name(6) not in folders(run)


def test_a_job_that_dies_between_commit_and_ledger_loses_no_base(run: Path) -> None:
    async def nothing(*_: object) -> None:
        pass

    life(run, 4, since=None)
    with mock.patch.object(Keeper, "committed", nothing), mock.patch.object(Keeper, "close", nothing):
        life(run, 4, resume={"step": 3})  # takes the place of a full one, which the ledger has
    assert refers(run / name(4)) == (1,)
    bcp.tools.pin(run, 4)
    life(run, 5, 6, keep=1, since=None)
    assert folders(run) == [name(1), name(4), name(6)]
    assert loaded(run / name(4))["small"][0] == 4


def test_a_save_that_dies_before_its_commit_leaves_a_run_that_goes_on(run: Path, tmp_path: Path) -> None:
    def copying(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        async def copy(item: Any) -> Any:
            shutil.rmtree(tmp_path / "killed", ignore_errors=True)
            shutil.copytree(run, tmp_path / "killed")
            return item

        return graph.after("upload", bcp.extend.Stage("copy", copy))

    life(run, 4, save_options=bcp.SaveOptions(edit=copying))
    killed = tmp_path / "killed"  # as the disk would have been
    assert not (killed / name(4) / METADATA_KEY).exists()
    bcp.tools.remove(killed / name(2))
    with pytest.raises(bcp.InputError, match="a save of step 4 has begun that may refer to"):
        bcp.tools.remove(killed / name(3))
    truth: dict[int, dict[str, torch.Tensor]] = {}
    life(killed, 5, keep=1, truth=truth)
    assert folders(killed) in ([name(1), name(5)], [name(5)])
    assert equal(loaded(killed / name(5)), truth[5])


def test_going_back_replaces_no_base(run: Path) -> None:
    life(run, 4, since=None)
    life(run, 5, 6)
    assert refers(run / name(6)) == (4,)
    with captured_logs() as lines:
        life(run, 4, since=None, resume={"step": 3})
    assert {f"{name(4)}", "step-000000004"} <= set(folders(run))
    assert any("later steps refer to" in line["event"] for line in lines)
    assert loaded(run / name(6))["small"][0] == 6


def test_roles_keep_the_bases_of_their_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for launch, steps in (("1", (1, 2)), ("2", (3, 4))):
        for role in ("actor", "critic"):
            life(run, *steps, keep=1, role=bcp.Role(role, of=["actor", "critic"], launch=launch))
    for role in ("actor", "critic"):
        assert name(1) in folders(run / role)
        for folder in folders(run / role):
            assert loaded(run / role / folder)["small"][0] == int(folder[5:])
        with pytest.raises(bcp.InputError, match="refer to"):
            bcp.tools.remove(run / role / name(1))


# -- tools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_a_base_is_not_removed(run: Path, force: bool) -> None:  # noqa: FBT001 -- a parameter
    before = nbytes(run)
    with pytest.raises(bcp.InputError, match=f"has blocks that {name(2)}, {name(3)} refer to"):
        bcp.tools.remove(run / name(1), force=force)
    assert nbytes(run) == before
    for step in (3, 2, 1):
        bcp.tools.remove(run / name(step), force=force)
    assert folders(run) == []


def test_a_save_that_refers_to_a_step_while_it_is_removed_brings_it_back(run: Path) -> None:
    before, asked = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, list[bool]()

    async def referring(_: object) -> list[str]:
        asked.append((run / name(3) / METADATA_KEY).exists())
        return [name(4)] if len(asked) == 2 else []

    with mock.patch("bcp.tools.removal.referring", referring), pytest.raises(bcp.InputError, match=name(4)):
        bcp.tools.remove(run / name(3))
    assert asked == [True, False]  # the second look comes once no save can find the step any more
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("place", ["", name(1)])
def test_no_clean_up_takes_the_files_of_a_base(
    run: Path, place: str, truth: dict[int, dict[str, torch.Tensor]]
) -> None:
    bcp.save(run / name(1), {"model": {"w": torch.zeros(4)}}, overwrite=True)  # replaces the base
    assert equal(loaded(run / name(3)), truth[3])
    bcp.tools.collect(run / place, min_age_seconds=0)
    assert equal(loaded(run / name(2)), truth[2])
    (run / name(1) / METADATA_KEY).unlink()
    bcp.tools.collect(run / place, min_age_seconds=0)
    life(run, 4, since=None)  # what is left of step 1 looks like an interrupted save
    assert equal(loaded(run / name(3)), truth[3])
    for step in (2, 3):
        bcp.tools.remove(run / name(step))
    bcp.tools.collect(run, min_age_seconds=0)
    assert not list((run / name(1)).rglob("*.safetensors"))


def test_a_copy_is_whole_and_outlives_the_run(
    run: Path, tmp_path: Path, truth: dict[int, dict[str, torch.Tensor]]
) -> None:
    bcp.tools.copy(run / name(3), tmp_path / "copy")
    bcp.tools.copy(run / name(3), run / "best")
    life(tmp_path / "full", 1, since=None)
    shutil.rmtree(run)
    assert refers(tmp_path / "copy") == ()
    assert (tmp_path / "copy" / METADATA_KEY).read_bytes()[-1] == 1
    assert {path.suffix for path in (tmp_path / "copy").rglob("*") if path.is_file()} == {".arrow", ".safetensors"}
    assert equal(loaded(tmp_path / "copy"), truth[3])
    assert bcp.Checkpoint(tmp_path / "copy").verify()


def test_an_edit_changes_no_base_and_no_keeper(run: Path, truth: dict[int, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(bcp.InputError, match="has blocks in other steps of its run"):
        bcp.tools.edit(run / name(2), drop=["w1"])
    bcp.tools.edit(run / name(1), drop=["w*"])
    for step in (2, 3):
        assert equal(loaded(run / name(step)), truth[step])
    life(run, 4)  # an edited checkpoint is no base
    assert refers(run / name(4)) == (1,)
    assert equal(loaded(run / name(4)), {**truth[3], "small": torch.full((8,), 4.0)})


@pytest.mark.anyio
async def test_a_file_that_an_edit_has_emptied_stays_while_others_refer_to_its_step(run: Path) -> None:
    (file,) = (run / name(1) / "model").iterdir()
    backend, operation = LocalBackend(run / name(1)), decode_metadata((run / name(1) / METADATA_KEY).read_bytes(), "")
    assert await delete_dropped(backend, [f"model/{file.name}"], by=operation.commit.operation) == ()
    for step in (2, 3):
        shutil.rmtree(run / name(step))
    assert await delete_dropped(backend, [f"model/{file.name}"], by=operation.commit.operation) == [
        f"model/{file.name}"
    ]


def test_moves_to_a_cold_place_keep_both_readable(
    run: Path, tmp_path: Path, truth: dict[int, dict[str, torch.Tensor]]
) -> None:
    moved = bcp.cool(run, to=tmp_path / "cold", days=0)
    assert {result.step for result in moved} >= {1, 2}
    assert not list((run / name(1)).rglob("*.safetensors"))
    for step in (1, 2, 3):
        assert equal(loaded(run / name(step)), truth[step])
        assert bcp.Checkpoint(run / name(step)).verify()
    life(run, 4, truth=truth)
    assert refers(run / name(4)) == (1,)
    assert equal(loaded(run / name(4)), truth[4])
    bcp.promote(run, 1)
    assert equal(loaded(run / name(2)), truth[2])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_exports_and_the_bridge_to_dcp_see_whole_files(
    run: Path, tmp_path: Path, truth: dict[int, dict[str, torch.Tensor]]
) -> None:
    bcp.tools.export_safetensors(run / name(3), tmp_path / "model.safetensors")
    assert equal(load_file(tmp_path / "model.safetensors"), truth[3])
    model = blocks()
    dcp.load({"model": model}, storage_reader=bcp.dcp.StorageReader(run / name(2)), no_dist=True)
    assert equal(model, truth[2])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_of_dcp_over_a_base_leaves_its_files(run: Path, truth: dict[int, dict[str, torch.Tensor]]) -> None:
    writer = bcp.dcp.StorageWriter(run / name(1), overwrite=True)
    dcp.save({"model": {"w": torch.zeros(3)}}, storage_writer=writer, no_dist=True)
    assert equal(loaded(run / name(3)), truth[3])


def test_references_are_shown(run: Path) -> None:
    assert [info.refers for info in bcp.tools.list_steps(run)] == [(), (1,), (1,)]
    with bcp.Checkpoint(run / name(2)) as ckpt:
        assert ckpt.refers == (1,)
        assert "with blocks of steps 1" in repr(ckpt)
    difference = bcp.tools.diff(run / name(2), run / name(3))
    assert (difference.equal, len(difference.tensors), difference.read_nbytes) == (FROZEN, 1, MIB)


# -- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"since": "always"}, "since='always': pass 'auto'"),
        ({"tiers": bcp.Tiers()}, "does not go with tiers yet"),
        ({"save_options": bcp.SaveOptions(codecs=[bcp.extend.Codec("no", bytes, bytes)])}, "codecs=no do not go with"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(bcp.InputError, match=words):
        bcp.Run(tmp_path / "run", {"model": blocks()}, **{"since": "auto", **arguments})
    assert not (tmp_path / "run").exists()


def test_a_lazy_snapshot_and_a_standby_go_with_references(tmp_path: Path) -> None:
    states = lora(layers=4)
    options = bcp.SaveOptions(snapshot="lazy")
    with bcp.Run(tmp_path, states, save=2, standby_steps=1, keep=10, since="auto", save_options=options) as run:
        run.resume()
        for step in range(1, 7):
            trained(states)
            run.maybe_save(step)
    assert refers(tmp_path / name(6)) == (2,)
    other = lora(seed=3, layers=4)
    bcp.load(tmp_path / name(6), other)
    assert equal(dict(states["model"].state_dict()), dict(other["model"].state_dict()))
