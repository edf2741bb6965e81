"""What is refused, what a save that does not end leaves behind, and damage: as DCP's CheckpointException."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

import bcp
from bcp.errors import StageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE = {"model": {"w": torch.arange(600_000.0).reshape(600, 1000), "b": torch.ones(3)}, "step": 3}


def save(path: Path, state: dict[str, Any] | None = None, *, planner: Any = None, **options: Any) -> None:
    writer = bcp.dcp.StorageWriter(path, **options)
    dcp.save(STATE if state is None else state, storage_writer=writer, planner=planner, no_dist=True)


def load(path: Path, **options: Any) -> dict[str, Any]:
    found = {"model": {"w": torch.zeros(600, 1000), "b": torch.zeros(3)}, "step": None}
    dcp.load(found, storage_reader=bcp.dcp.StorageReader(path, **options), no_dist=True)
    return found


def failure(raised: pytest.ExceptionInfo[dcp.CheckpointException], rank: int = 0) -> BaseException:
    return raised.value.failures[rank][0]


def files(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


# -- saves -------------------------------------------------------------------------------------


def test_a_committed_checkpoint_is_kept_unless_overwrite_says_otherwise(tmp_path: Path) -> None:
    save(tmp_path)
    before = files(tmp_path)
    with pytest.raises(dcp.CheckpointException, match="overwrite=True") as raised:
        save(tmp_path, {"x": torch.ones(2)})
    assert isinstance(failure(raised), bcp.ExistsError)
    assert files(tmp_path) == before
    save(tmp_path, {"x": torch.ones(2)}, overwrite=True)
    assert bcp.Checkpoint(tmp_path).names() == ["x"]
    assert not set(files(tmp_path)) & (set(before) - {"metadata.arrow"})


def test_a_save_that_does_not_end_is_no_checkpoint_and_the_next_one_sweeps_it(tmp_path: Path) -> None:
    class Ended(bcp.dcp.StorageWriter):
        def finish(self, *_: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(dcp.CheckpointException):
        dcp.save(STATE, storage_writer=Ended(tmp_path), no_dist=True)
    left = files(tmp_path)
    assert left
    assert "metadata.arrow" not in left
    with pytest.raises(dcp.CheckpointException) as raised:
        load(tmp_path)
    assert isinstance(failure(raised), bcp.UncommittedError)
    save(tmp_path)
    assert not set(files(tmp_path)) & set(left)
    assert torch.equal(load(tmp_path)["model"]["w"], STATE["model"]["w"])


def test_a_rank_that_fails_removes_its_files(tmp_path: Path) -> None:
    def broken(graph: Any) -> Any:
        async def fail(_: Any) -> None:
            raise ZeroDivisionError("in a stage")

        return graph.after("serialize", bcp.extend.Stage("broken", fail))

    with pytest.raises(dcp.CheckpointException, match="ZeroDivisionError: in a stage") as raised:
        save(tmp_path, options=bcp.SaveOptions(edit=broken))
    assert isinstance(failure(raised), StageError)
    assert files(tmp_path) == []


def test_an_error_of_a_stage_reaches_another_process() -> None:
    error = StageError("upload", "part 3", OSError("full"))
    error.add_note("and more")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 -- DCP sends errors so
    assert (type(again), str(again), again.stage, again.item) == (StageError, str(error), "upload", "part 3")
    assert again.__notes__ == ["and more"]


class Planner(dcp.DefaultSavePlanner):
    """Gives something else than it has planned."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def transform_object(self, item: WriteItem, value: Any) -> Any:
        return self.data if item.index.fqn in ("model.b", "step") else super().transform_object(item, value)


@pytest.mark.parametrize(
    ("state", "data", "words"),
    [
        ({"model": {"b": torch.ones(3)}}, torch.ones(4), r"'model.b': the planner gives torch.float32\[4\], and its"),
        ({"model": {"b": torch.ones(3)}}, torch.ones(3).int(), r"gives torch.int32\[3\], and its plan has torch.float"),
        ({"model": {"b": torch.ones(3)}}, torch.ones(3, device="meta"), "'model.b' is on the meta device"),
        ({"model": {"b": torch.ones(3)}}, b"bytes", "'model.b': the planner gives a bytes; return a tensor"),
        ({"step": 3}, b"bytes", "'step': the planner gives a bytes; return io.BytesIO"),
        ({"step": 3}, io.BytesIO(b"no archive"), "'step': the planner gives bytes that torch.load cannot read"),
    ],
)
def test_a_planner_that_breaks_its_word_is_named(state: dict[str, Any], data: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match=words) as raised:
        save(tmp_path, state, planner=Planner(data))
    assert isinstance(failure(raised), bcp.StateError)
    assert files(tmp_path) == []


def test_items_that_only_one_rank_knows_are_refused(tmp_path: Path) -> None:
    class Longer(dcp.DefaultSavePlanner):
        def finish_plan(self, plan: SavePlan) -> SavePlan:
            return SavePlan(plan.items[:1], plan.storage_data)

    with pytest.raises(dcp.CheckpointException, match=r"finish_plan\(\) returned other items") as raised:
        save(tmp_path, planner=Longer())
    assert isinstance(failure(raised), bcp.InputError)


def test_a_gap_in_a_tensor_is_refused(tmp_path: Path) -> None:
    class Gap(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            for item in plan.items:
                if item.type is not WriteItemType.BYTE_IO and item.tensor_data is not None:
                    item.tensor_data.chunk.sizes = torch.Size([2])
            return plan

    with pytest.raises(dcp.CheckpointException, match="CoverageError") as raised:
        save(tmp_path, {"b": torch.ones(3)}, planner=Gap())
    assert isinstance(failure(raised), bcp.CoverageError)
    assert files(tmp_path) == []


def test_a_sparse_tensor_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match=r"the tensor 'a' has the layout torch.sparse_coo") as raised:
        save(tmp_path, {"a": torch.eye(3).to_sparse(), "b": torch.ones(3)})
    assert isinstance(failure(raised), bcp.StateError)
    assert files(tmp_path) == []


def test_what_a_checkpoint_of_bcp_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(bcp.InputError, match="use_collectives=False saves each rank by itself"):
        dcp.save(STATE, storage_writer=bcp.dcp.StorageWriter(tmp_path), no_dist=True, use_collectives=False)
    with pytest.raises(bcp.InputError, match="coordinator_rank=1"):
        bcp.dcp.StorageWriter(tmp_path).set_up_storage_writer(is_coordinator=True, rank=1)
    for cache in [name for name in vars(dcp.SavePlanner) if name.startswith("_cached")]:
        monkeypatch.setattr(dcp.SavePlanner, cache, {})
    save(tmp_path / "1", planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
    with pytest.raises(dcp.CheckpointException, match="enable_plan_caching=True"):
        save(tmp_path / "2", planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
    assert files(tmp_path / "1")
    assert not (tmp_path / "2").exists()


def test_wrong_arguments_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(bcp.InputError, match="role='a/b' cannot name"):
        bcp.dcp.StorageWriter(tmp_path, role="a/b")
    with pytest.raises(bcp.InputError, match="role='model' cannot name"):
        bcp.dcp.StorageReader(tmp_path, role="model")
    with pytest.raises(bcp.InputError, match="snapshot='lazy' is for"):
        bcp.dcp.StorageWriter(tmp_path, options=bcp.SaveOptions(snapshot="lazy"))
    with pytest.raises(bcp.InputError, match="rename= or edit="):
        bcp.dcp.StorageReader(tmp_path, options=bcp.LoadOptions(rename={"a": "b"}))
    with pytest.raises(bcp.InputError, match="options is a LoadOptions"):
        bcp.dcp.StorageWriter(tmp_path, options=bcp.LoadOptions())  # type: ignore[arg-type]  # on purpose
    with pytest.raises(dcp.CheckpointException, match="StorageWriter has no path"):
        dcp.save(STATE, storage_writer=bcp.dcp.StorageWriter(), no_dist=True)
    with pytest.raises(dcp.CheckpointException, match="StorageReader has no path"):
        dcp.load({"w": torch.ones(2)}, storage_reader=bcp.dcp.StorageReader(), no_dist=True)
    with pytest.raises(bcp.InputError, match=r"finish\(\) was called before"):
        bcp.dcp.StorageWriter(tmp_path).finish(None, [])
    with pytest.raises(bcp.InputError, match=r"read_data\(\) was called before"):
        bcp.dcp.StorageReader(tmp_path).read_data(None, None)


# -- loads -------------------------------------------------------------------------------------


def damaged(path: Path, folder: str) -> None:
    [name] = (path / folder).iterdir()
    data = bytearray(name.read_bytes())
    data[len(data) // 2] ^= 1
    name.write_bytes(data)


@pytest.mark.parametrize("folder", ["model", "receipts"])
def test_a_flipped_bit_is_found(folder: str, tmp_path: Path) -> None:
    save(tmp_path)
    damaged(tmp_path, folder)
    with pytest.raises(dcp.CheckpointException, match=folder) as raised:
        load(tmp_path)
    assert isinstance(failure(raised), bcp.CorruptError)


def test_a_damaged_or_missing_table_of_contents_is_told_as_it_is(tmp_path: Path) -> None:
    save(tmp_path)
    metadata = tmp_path / "metadata.arrow"
    data = bytearray(metadata.read_bytes())
    data[len(data) // 2] ^= 1
    metadata.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match=r"metadata.arrow") as raised:
        load(tmp_path)
    assert isinstance(failure(raised), bcp.CorruptError)
    shutil.rmtree(tmp_path / "model")
    shutil.rmtree(tmp_path / "receipts")
    metadata.unlink()
    with pytest.raises(dcp.CheckpointException, match=r"there are no files; check the path") as raised:
        load(tmp_path)
    assert isinstance(failure(raised), bcp.NotACheckpointError)
    with pytest.raises(bcp.NotACheckpointError):
        bcp.dcp.StorageReader(tmp_path).read_metadata()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    [name] = (tmp_path / "model").iterdir()
    name.unlink()
    with pytest.raises(dcp.CheckpointException, match=f"{name.name} is missing") as raised:
        load(tmp_path)
    assert isinstance(failure(raised), bcp.CorruptError)


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_objects_of_any_class_need_allow_pickle_on_both_sides(tmp_path: Path) -> None:
    state = {**STATE, "step": Odd(5)}
    with pytest.raises(dcp.CheckpointException, match="allow_pickle=True") as raised:
        save(tmp_path / "1", state)
    assert isinstance(failure(raised), bcp.StateError)
    save(tmp_path / "1", state, options=bcp.SaveOptions(allow_pickle=True))
    with pytest.raises(dcp.CheckpointException, match="allow_pickle=True reads objects of any class") as raised:
        load(tmp_path / "1")
    assert isinstance(failure(raised), bcp.CheckpointError)
    assert load(tmp_path / "1", options=bcp.LoadOptions(allow_pickle=True))["step"] == Odd(5)


class Odd:
    """A value of a class that only pickle stores."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]  # it is never a key


def test_a_pickle_in_storage_is_not_executed(tmp_path: Path) -> None:
    bcp.save(
        tmp_path / "trap",
        {"model": {**STATE["model"], "step": Trap(tmp_path / "sprung")}},
        options=bcp.SaveOptions(allow_pickle=True),
    )
    found = {"model": {"w": torch.zeros(600, 1000), "b": torch.zeros(3), "step": None}}
    with pytest.raises(dcp.CheckpointException, match="allow_pickle=True reads objects of any class"):
        dcp.load(found, storage_reader=bcp.dcp.StorageReader(tmp_path / "trap"), no_dist=True)
    assert not (tmp_path / "sprung").exists()
