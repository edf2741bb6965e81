"""What cannot be loaded is refused with words that help, and the target is as it was."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MIB, equal, files, flip, metadata, model, tensors, training
from torch import nn

import bcp
from bcp.backends import LocalBackend
from bcp.format.metadata import decode_metadata, encode_layout, encode_metadata
from bcp.format.receipt import decode_receipt, encode_receipt, receipt_digest
from bcp.testing.storage_fakes import FaultyBackend


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with files of all kinds."""
    path = tmp_path_factory.mktemp("pristine")
    bcp.save(path, {**training(), "dataloader": {"position": 3}, "extra_states": {"step": 1}})
    return path


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """Return a copy of it to do harm to."""
    return shutil.copytree(pristine, tmp_path / "c")


def refused(path: Any, kind: type[Exception], match: str | None = None, **how: Any) -> Exception:
    """Load everything; check that this raises, and that no tensor, value or object of the target has changed."""
    target: dict[str, Any] = {**training(seed=1), "dataloader": {}, "extra_states": {}}
    target["optimizer"].param_groups[0]["lr"] = 0.5
    before = tensors(target)
    with pytest.raises(kind, match=match) as caught:
        bcp.load(path, target, **how)
    half_loaded = any("half loaded" in note for note in getattr(caught.value, "__notes__", ()))
    assert half_loaded or equal(tensors(target), before)
    assert target["optimizer"].param_groups[0]["lr"] == 0.5
    assert (target["dataloader"], target["extra_states"]) == ({}, {})
    return caught.value


# -- nothing there, or not yet -----------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    error = refused(tmp_path / "c", bcp.NotACheckpointError, "c is not a checkpoint: there are no files; check")
    assert isinstance(error, FileNotFoundError)
    assert files(tmp_path) == {}


def test_something_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"PK")
    refused(tmp_path, bcp.NotACheckpointError, "is not a checkpoint")
    refused(tmp_path / "model.pt", bcp.NotACheckpointError, r"model\.pt is not a checkpoint")
    (tmp_path / "metadata.arrow").write_bytes(b"a file of somebody else" * 10)
    refused(tmp_path, bcp.NotACheckpointError, r"metadata\.arrow")


def test_only_roles_are_there(tmp_path: Path) -> None:
    bcp.save(tmp_path, model(), role="actor")
    bcp.save(tmp_path, model(), role="critic")
    refused(
        tmp_path, bcp.NotACheckpointError, r"no checkpoint of its own, but roles below it: actor, critic; pass role="
    )
    refused(tmp_path, bcp.NotACheckpointError, "reward is not a checkpoint", role="reward")


def test_a_save_that_never_committed(checkpoint: Path) -> None:
    count = len(files(checkpoint))
    (checkpoint / "metadata.arrow").unlink()
    refused(checkpoint, bcp.UncommittedError, rf"a save that never committed \({count - 1} files, no metadata\.arrow\)")


@pytest.mark.parametrize("version", [0, 4, 255])
def test_an_unknown_version_of_the_format(checkpoint: Path, version: int) -> None:
    file = checkpoint / "metadata.arrow"
    file.write_bytes(file.read_bytes()[:-1] + bytes([version]))
    refused(checkpoint, bcp.FormatVersionError, rf"metadata\.arrow.*version {version}")


# -- damage ------------------------------------------------------------------------------------------


def places(pristine: Path) -> Iterator[tuple[str, int]]:
    """Yield bytes to damage: ends of every file, ends of its header, and a sample of the rest."""
    dice = random.Random(0)  # noqa: S311 -- a sample, no secret
    for name, data in files(pristine).items():
        sample = {dice.randrange(len(data)) for _ in range(6)}
        yield from (
            (name, at) for at in sorted({0, 7, 8, 4095, len(data) - 8, len(data) - 1} | sample) if at < len(data)
        )


def test_one_flipped_bit_anywhere_is_noticed(pristine: Path, checkpoint: Path) -> None:
    dice = random.Random(1)  # noqa: S311 -- same
    for name, at in places(pristine):
        whole = (checkpoint / name).read_bytes()
        flip(checkpoint / name, at, dice.randrange(8))
        error = refused(checkpoint, bcp.CheckpointError)
        assert name in str(error), f"byte {at} of {name}: {error}"
        (checkpoint / name).write_bytes(whole)
    bcp.load(checkpoint, training(seed=1))


@pytest.mark.parametrize("left", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_noticed(pristine: Path, checkpoint: Path, left: float) -> None:
    for name, data in files(pristine).items():
        (checkpoint / name).write_bytes(data[: int(len(data) * left)])
        assert name in str(refused(checkpoint, bcp.CheckpointError)), name
        (checkpoint / name).write_bytes(data)


def test_a_deleted_file_is_noticed(pristine: Path, checkpoint: Path) -> None:
    for name, data in files(pristine).items():
        (checkpoint / name).unlink()
        kind = bcp.UncommittedError if name == "metadata.arrow" else bcp.CorruptError
        assert name in str(refused(checkpoint, kind))
        (checkpoint / name).write_bytes(data)


@pytest.mark.parametrize("kind", ["model", "extra_states"])
def test_a_data_file_that_is_gone_is_corruption(tmp_path: Path, kind: str) -> None:
    states = model() | {"extra_states": {"step": 1}}
    bcp.save(tmp_path, states)
    (file,) = (tmp_path / kind).iterdir()
    file.unlink()
    with pytest.raises(bcp.CorruptError, match=f"{kind}/{file.name}"):
        bcp.load(tmp_path, states)


def test_a_file_of_another_save_is_no_replacement(checkpoint: Path, tmp_path: Path) -> None:
    bcp.save(tmp_path / "other", {**training(seed=2), "dataloader": {"position": 4}, "extra_states": {"step": 2}})
    for folder in ("receipts", "model", "optimizer", "extra_states"):
        (ours,) = (checkpoint / folder).iterdir()
        (theirs,) = (tmp_path / "other" / folder).iterdir()
        data = ours.read_bytes()
        shutil.copyfile(theirs, ours)
        assert ours.name in str(refused(checkpoint, bcp.CorruptError))
        ours.write_bytes(data)


def test_without_verify_damage_goes_through(tmp_path: Path) -> None:
    bcp.save(tmp_path, model(1))
    (data,) = (tmp_path / "model").iterdir()
    flip(data, -1, 7)
    target = model(0)
    bcp.load(tmp_path, target, options=bcp.LoadOptions(verify=False))
    assert target["model"]["w"][-1] == -1


def test_damage_that_is_found_late_says_that_the_target_is_half_loaded(tmp_path: Path) -> None:
    names = [f"w{n}" for n in range(8)]
    bcp.save(tmp_path, {"model": {name: torch.ones(MIB // 4) for name in names}})
    (data,) = (tmp_path / "model").iterdir()
    flip(data, -1)
    target = {name: torch.zeros(MIB // 4) for name in names}
    options = bcp.LoadOptions(read_bytes=MIB, budget_bytes=MIB)
    with pytest.raises(bcp.CorruptError, match="w7") as caught:
        bcp.load(tmp_path, {"model": target}, options=options)
    assert any("The target of rank 0 is half loaded" in note for note in caught.value.__notes__)


def test_storage_that_fails_is_not_called_corruption(pristine: Path) -> None:
    backend = FaultyBackend(LocalBackend(pristine), "read_scattered", OSError(5, "Input/output error"), key="optimizer")
    error = refused(backend, bcp.StageError, "stage 'read' failed on optimizer/.*Input/output error")
    assert isinstance(error.__cause__, OSError)


# -- checkpoint and target disagree ------------------------------------------------------------------


def test_shapes_that_differ_are_all_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"a": torch.ones(2, 3), "b": torch.ones(4), "same": torch.ones(2)}})
    target = {"a": torch.zeros(3, 2), "b": torch.zeros(4, 1), "same": torch.zeros(2)}
    with pytest.raises(bcp.ShapeMismatchError, match=r"2 global shapes.*a is \[2, 3\].*\[3, 2\].*b is \[4\].*\[4, 1\]"):
        bcp.load(tmp_path, {"model": target})
    assert not any(tensor.any() for tensor in target.values())


def test_dtypes_that_differ_are_named_unless_cast(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"a": torch.tensor([1.5, 2.5]), "b": torch.arange(3)}})
    target = {"a": torch.zeros(2, dtype=torch.float16), "b": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(bcp.DtypeMismatchError, match=r"2 dtypes differ.*a is float32.*float16 in.*cast=True"):
        bcp.load(tmp_path, {"model": target})
    assert not any(tensor.any() for tensor in target.values())
    bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(cast=True))
    assert (target["a"].tolist(), target["b"].tolist()) == ([1.5, 2.5], [0, 1, 2])


def test_missing_and_unexpected_names_are_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {f"saved.{n}": torch.ones(2) for n in range(12)}})
    target = {"model": {f"wanted.{n}": torch.zeros(2) for n in range(12)}}
    with pytest.raises(
        bcp.FqnMismatchError, match=r"rank 0 wants 12 names.*wanted\.0; .*and 2 more; pass strict"
    ) as got:
        bcp.load(tmp_path, target)
    assert isinstance(got.value, KeyError)
    with pytest.raises(bcp.FqnMismatchError, match=r"12 names that no rank wants: model: saved\.0"):
        bcp.load(tmp_path, {"model": {}})
    with pytest.warns(bcp.NothingLoadedWarning, match="nothing of 'model' was loaded .*12 missing, 12 unexpected"):
        report = bcp.load(tmp_path, target, strict=False)
    assert (len(report.missing), len(report.unexpected), report.nbytes) == (12, 12, 0)
    assert report.unmatched == ("model",)


@pytest.mark.parametrize("kind", ["extra_states", "dataloader"])
def test_kinds_that_were_not_saved_are_missing(tmp_path: Path, kind: str) -> None:
    bcp.save(tmp_path, model())
    states = {**model(0), kind: {"mine": 1}}
    with pytest.raises(bcp.FqnMismatchError, match=f"{kind} of any rank"):
        bcp.load(tmp_path, states)
    with pytest.warns(bcp.NothingLoadedWarning, match=f"nothing of '{kind}' was loaded"):
        report = bcp.load(tmp_path, states, strict=False)
    assert (report.missing, report.unmatched) == ((f"{kind} of any rank",), (kind,))
    assert states[kind] == {"mine": 1}


@pytest.mark.parametrize("saved", [True, False])
def test_strict_looks_at_leaves_that_are_not_tensors(tmp_path: Path, *, saved: bool) -> None:
    with_epoch = {"model": {"w": torch.ones(2), "epoch": 5}}
    without = {"model": {"w": torch.ones(2)}}
    bcp.save(tmp_path, with_epoch if saved else without)
    target = without if saved else with_epoch
    with pytest.raises(bcp.FqnMismatchError, match="model: epoch"):
        bcp.load(tmp_path, target)
    report = bcp.load(tmp_path, target, strict=False)
    assert (report.unexpected if saved else report.missing) == ("model: epoch",)


def two_groups(*, apart: bool) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups: Any = [{"params": net[0].parameters(), "lr": 1e-3}, {"params": net[1].parameters(), "lr": 1e-2}]
    return {"model": net, "optimizer": torch.optim.SGD(groups if apart else net.parameters(), lr=1e-3)}


def test_hyper_parameters_that_do_not_fit_into_one_group_touch_nothing(tmp_path: Path) -> None:
    bcp.save(tmp_path, two_groups(apart=True))
    target = two_groups(apart=False)
    before = [parameter.detach().clone() for parameter in target["model"].parameters()]
    with pytest.raises(bcp.MismatchError, match=r"lr=0\.001, and .*, saved with lr=0\.01"):
        bcp.load(tmp_path, target)
    assert all(torch.equal(*pair) for pair in zip(before, target["model"].parameters(), strict=True))


def test_targets_that_cannot_be_written_to_are_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"a": torch.ones(3), "b": torch.ones(3)}})
    target = {"a": torch.zeros(3), "b": torch.zeros(1).expand(3)}
    with pytest.raises(bcp.StateError, match=r"model tensor 'b' on rank 0 is an expanded tensor"):
        bcp.load(tmp_path, {"model": target})
    assert not target["a"].any()
    assert metadata(tmp_path).layout.world_size == 1


def test_elements_that_do_not_fit_their_dtype_write_nothing(tmp_path: Path) -> None:
    path, file = tmp_path / "c", tmp_path / "c" / "metadata.arrow"
    bcp.save(path, {"model": {"w": torch.ones(4096, dtype=torch.complex128)}})
    found = decode_metadata(file.read_bytes(), "here")
    layout = replace(found.layout, tensors=replace(found.layout.tensors, dtype=["uint8"]))
    file.write_bytes(encode_metadata(encode_layout(layout), found.commit))
    memory = torch.zeros(64 << 10, dtype=torch.uint8)
    with pytest.raises(bcp.CorruptError, match=r"model: w is uint8, of 1 bytes an element, and is said to have 16"):
        bcp.load(path, {"model": {"w": memory[:4096]}})
    assert not memory.any()


def test_a_receipt_of_another_rank(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", model())
    file = tmp_path / "c" / "metadata.arrow"
    (receipt,) = (tmp_path / "c" / "receipts").iterdir()
    receipt.write_bytes(encode_receipt(replace(decode_receipt(receipt.read_bytes(), "here"), rank=7)))
    found = decode_metadata(file.read_bytes(), "here")
    commit = replace(found.commit, receipts=receipt_digest(receipt.read_bytes()))
    file.write_bytes(encode_metadata(encode_layout(found.layout), commit))
    with pytest.raises(bcp.CorruptError, match="is the receipt of rank 7, not of rank 0"):
        bcp.load(tmp_path / "c", model(0.0))
