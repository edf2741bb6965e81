"""Folders of torch.distributed.checkpoint by reference, held against its own reader."""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile import Evil
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import CountingBackend

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning"
)  # of a save without a process group


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 2))
    optimizer = torch.optim.AdamW(
        [{"params": net[0].parameters(), "lr": 0.25}, {"params": net[1].parameters(), "lr": 0.125}], betas=(0.5, 0.75)
    )
    for _ in range(3):
        net(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def save(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_flat_state_is_that_of_dcp(tmp_path: Path) -> None:
    state = {
        "w": torch.rand(5, 7),
        "half": torch.rand(3).bfloat16(),
        "step": torch.tensor(12),
        "empty": torch.zeros(0, 4),
        "flag": torch.tensor([True, False]),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "model.deep.name": torch.rand(2, 2),
        "epoch": 7,
        "betas": (0.9, 0.99),
    }
    save(tmp_path, state)
    ckpt = bcp.Checkpoint(tmp_path)
    target = {name: torch.empty_like(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert ckpt.names() == sorted(target)
    for name, tensor in target.items():
        found = ckpt.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found.float(), tensor.float()), name
    assert ckpt.values == {("model", "epoch"): 7, ("model", "betas"): (0.9, 0.99)}
    assert ckpt.framework == "torch.distributed.checkpoint"
    assert ckpt.world_size == 1


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("key", ["optim", "optimizer", "app"])
def test_model_and_optimizer_have_the_kinds_of_bcp(tmp_path: Path, key: str, *, flat: bool) -> None:
    net, optimizer = trained(0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(net, optimizer, options=options)
    state: dict[str, Any] = {"model": model_state, "optim" if key == "app" else key: optimizer_state}
    save(tmp_path, {"app": state} if key == "app" else state)
    other, other_optimizer = trained(1)
    for group in other_optimizer.param_groups:
        group["lr"] = 9.0
    result = bcp.load(tmp_path, {"model": other, "optimizer": other_optimizer})
    assert all(torch.equal(one, two) for one, two in zip(net.parameters(), other.parameters(), strict=True))
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        mine, found = optimizer.state[one], other_optimizer.state[two]
        assert mine.keys() == found.keys()
        assert all(torch.equal(mine[name], found[name]) for name in mine)
    assert [group["lr"] for group in other_optimizer.param_groups] == [0.25, 0.125]
    assert [group["betas"] for group in other_optimizer.param_groups] == [(0.5, 0.75)] * 2
    assert result.unverified
    assert result.read_nbytes == result.nbytes


def test_opening_reads_heads_and_ends_together(tmp_path: Path) -> None:
    save(tmp_path, {f"w{number}": torch.rand(3, 5) for number in range(40)})
    backend = CountingBackend(LocalBackend(tmp_path))
    bcp.Checkpoint(backend).names()
    assert backend.calls["read_into"] <= 3  # of small tensors: the metadata, and one or two reads


def test_a_large_tensor_is_not_read_to_be_listed(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.rand(1 << 18), "v": torch.rand(1 << 18)})
    backend = CountingBackend(LocalBackend(tmp_path))
    ckpt = bcp.Checkpoint(backend)
    ckpt.names()
    (data,) = (path.name for path in tmp_path.glob("*.distcp"))
    assert backend.read[data] < 40_000
    backend.read.clear()
    ckpt.read("w", (slice(5, 25),))
    assert backend.read[data] == 80


def test_a_value_of_another_class_is_told_when_it_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2), "odd": pathlib.PurePosixPath("x"), "good": 3})
    ckpt = bcp.Checkpoint(tmp_path)
    assert ckpt.names() == ["w"]
    with pytest.raises(bcp.CheckpointError, match=r"model: odd cannot be read.*pathlib"):
        _ = ckpt.values
    target = {"w": torch.zeros(2)}
    assert bcp.load(tmp_path, {"model": target}, strict=False).unexpected == ("model: good", "model: odd")
    assert target["w"].tolist() == [1.0, 1.0]


def test_a_value_with_other_keys_leaves_the_rest_readable(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2), "odd": ({(1, 2): 3},)})
    ckpt = bcp.Checkpoint(tmp_path)
    assert ckpt.read("w").tolist() == [1.0, 1.0]
    with pytest.raises(bcp.CheckpointError, match=r"model: odd cannot be read.*a key of type tuple"):
        _ = ckpt.values


def test_a_tensor_without_elements_needs_no_range(tmp_path: Path) -> None:
    save(tmp_path, {"model": {"w": torch.ones(2), "empty": torch.zeros(0, 4)}})
    changed(
        tmp_path,
        lambda meta: [meta.storage_data.pop(index) for index in [*meta.storage_data] if index.fqn == "model.empty"],
    )
    dcp.load({"model": {"w": torch.zeros(2), "empty": torch.zeros(0, 4)}}, checkpoint_id=tmp_path, no_dist=True)
    assert bcp.Checkpoint(tmp_path)["empty"].shape == (0, 4)
    bcp.load(tmp_path, {"model": {"w": torch.zeros(2), "empty": torch.zeros(0, 4)}})


# -- hostile folders ------------------------------------------------------------------------------


def refused(folder: Path, words: str) -> None:
    with pytest.raises(bcp.CheckpointError, match=words):
        bcp.Checkpoint(folder).names()
    target = {"w": torch.zeros(5, 7)}
    with pytest.raises(bcp.CheckpointError, match=words):
        bcp.load(folder, {"model": target})
    assert not target["w"].any()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "dcp", {"w": torch.rand(5, 7)})


def changed(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the metadata."""
    file = folder / ".metadata"
    meta = pickle.loads(file.read_bytes())  # noqa: S301 -- dcp.save of this test wrote it
    change(meta)
    file.write_bytes(pickle.dumps(meta))


def placed(**changes: Any) -> Callable[[Any], None]:
    """Return what changes the places of all ranges."""

    def change(meta: Any) -> None:
        meta.storage_data = {index: replace(info, **changes) for index, info in meta.storage_data.items()}

    return change


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_of_hostile_metadata_is_called(folder: Path, tmp_path: Path, protocol: int) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"x": Evil(tmp_path / "made")}, protocol))
    refused(folder, "which bcp does not read; nothing of it was run")
    assert not (tmp_path / "made").exists()


def test_nothing_of_a_hostile_tensor_is_called(folder: Path, tmp_path: Path) -> None:
    (data,) = folder.glob("*.distcp")
    blob = io.BytesIO()
    torch.save(Evil(tmp_path / "made"), blob)
    data.write_bytes(blob.getvalue())
    changed(folder, placed(offset=0, length=len(blob.getvalue())))
    refused(folder, "which bcp does not read; nothing of it was run")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("key", ["/etc/passwd", "../x.distcp", "a\0b", "a/./b", ""])
def test_a_file_outside_of_the_folder(folder: Path, key: str) -> None:
    changed(folder, placed(relative_path=key))
    refused(folder, "which leaves the folder")


def test_a_missing_file(folder: Path) -> None:
    changed(folder, placed(relative_path="__1_0.distcp"))
    refused(folder, "names __1_0.distcp, which is missing")


def test_a_file_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    (data,) = folder.glob("*.distcp")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    refused(folder, "missing or a link")


@pytest.mark.parametrize(
    "place", [{"offset": 1 << 40}, {"length": 1 << 40}, {"offset": 7}, {"length": 100}, {"length": 0}]
)
def test_lying_places(folder: Path, place: dict[str, int]) -> None:
    changed(folder, placed(**place))
    refused(folder, "is said to lie in bytes|is truncated or damaged")


@pytest.mark.parametrize("place", [{"offset": -1}, {"length": -1}, {"offset": "0"}])
def test_impossible_places(folder: Path, place: dict[str, Any]) -> None:
    changed(folder, placed(**place))
    refused(folder, "is said to lie at")


def test_transformed_ranges(folder: Path) -> None:
    changed(folder, placed(transform_descriptors=["zstd"]))
    refused(folder, "went through .*zstd")


def boxes(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda meta: change(meta.state_dict_metadata["w"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda meta: setattr(meta, "storage_data", {}), "has no file of 'w'"),
        (lambda meta: setattr(meta, "storage_data", None), "no tables"),
        (lambda meta: meta.state_dict_metadata.clear(), "which is none of its tensors"),
        (boxes(lambda entry: setattr(entry, "size", torch.Size([6, 7]))), "overlap, or leave a part"),
        (boxes(lambda entry: setattr(entry, "size", torch.Size([4, 7]))), "lies outside of the tensor"),
        (boxes(lambda entry: setattr(entry, "size", torch.Size([5]))), "outside of the tensor|which is not listed"),
        (boxes(lambda entry: setattr(entry.chunks[0], "sizes", torch.Size([5, 6]))), "the files are of two saves"),
        (boxes(lambda entry: setattr(entry.chunks[0], "offsets", torch.Size([1, 0]))), "which is not listed"),
        (boxes(lambda entry: setattr(entry, "chunks", 3)), "has no boxes"),
        (boxes(lambda entry: setattr(entry.properties, "dtype", torch.float64)), "the files are of two saves"),
        (boxes(lambda entry: setattr(entry.properties, "dtype", torch.qint8)), "torch.qint8"),
        (boxes(lambda entry: setattr(entry.properties, "dtype", None)), "which bcp does not read"),
    ],
    ids=range(12),
)
def test_contradictions(folder: Path, change: Callable[[Any], Any], words: str) -> None:
    changed(folder, change)
    refused(folder, words)


def test_every_cut_of_the_metadata_is_refused(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    for nbytes in range(0, len(data), 13):
        (folder / ".metadata").write_bytes(data[:nbytes])
        with pytest.raises(bcp.CheckpointError, match=r"\.metadata"):
            bcp.Checkpoint(folder).names()


def test_a_save_that_has_not_ended(folder: Path) -> None:
    (folder / ".metadata").unlink()
    refused(folder, r"and no \.metadata: its save has not ended")


def test_a_folder_above_is_told(folder: Path) -> None:
    refused(folder.parent, f"pass {folder.parent}/dcp")
