"""A folder of torch.distributed.checkpoint, read by torch's own load."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from exported import READABLE, assert_same, documented, folders, odd_states, trained_states
from golden.cases import codecs_of
from golden.expected import DATA, read
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import bcp
from bcp.errors import ExistsError, InputError
from bcp.tools.exports import dcp as module

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def load(folder: Path, states: dict[str, Any]) -> dict[str, Any]:
    """Load a folder by torch."""
    dcp.load(states, checkpoint_id=folder, no_dist=True)
    return states


@pytest.mark.parametrize("name", READABLE)
def test_every_golden_checkpoint_is_read_by_dcp(name: str, tmp_path: Path) -> None:
    keys = {"model": "model", "optimizer": "optim"}
    for number, path in enumerate(folders(name)):
        expected = documented(path)
        folder = tmp_path / str(number)
        bcp.tools.export_dcp(path, folder, values=False, file_bytes=4096)
        found = load(
            folder,
            {
                key: {fqn: torch.zeros_like(t) for (k, fqn), t in expected.items() if k == kind}
                for kind, key in keys.items()
            },
        )
        for kind, key in keys.items():
            assert_same(found[key], {fqn: tensor for (of, fqn), tensor in expected.items() if of == kind})


@pytest.mark.parametrize("chunk_bytes", [16, 100, 64 << 20])
def test_tensors_of_every_dtype_and_name_arrive_in_chunks_of_any_size(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    states = odd_states() | {"complex128": torch.randn(3, 7, dtype=torch.complex128)}
    bcp.save(tmp_path / "ckpt", {"model": states})
    result = bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp", file_bytes=10_000)
    assert_same(load(tmp_path / "dcp", {"model": {k: torch.zeros_like(t) for k, t in states.items()}})["model"], states)
    metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    for entry in metadata.state_dict_metadata.values():
        itemsize = entry.properties.dtype.itemsize  # type: ignore[union-attr]  # all are tensors
        sizes = [each.sizes.numel() * itemsize for each in entry.chunks]  # type: ignore[union-attr]  # as above
        assert max(sizes) <= max(chunk_bytes, itemsize)
    assert result.files[-1] == ".metadata"
    assert result.tensors == len(states) - 1, "a tied tensor is stored once"


def test_a_job_resumes_by_dcp(tmp_path: Path) -> None:
    states = trained_states()
    bcp.save(tmp_path / "ckpt", states | {"extra_states": {"step": 3}})
    bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    other = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(other.parameters())
    model_state, optimizer_state = get_state_dict(other, optimizer, options=FLAT)
    found = load(tmp_path / "dcp", {"model": model_state, "optim": optimizer_state})
    set_state_dict(other, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"], options=FLAT)
    assert_same(other.state_dict(), states["model"].state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.125
    for mine, parameter in zip(other.parameters(), states["model"].parameters(), strict=True):
        assert_same(dict(optimizer.state[mine]), dict(states["optimizer"].state[parameter]))


def test_the_names_of_torchtitan(tmp_path: Path) -> None:
    states = trained_states()
    bcp.save(tmp_path / "ckpt", states)
    bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp", keys={"model": "", "optimizer": "optimizer"})
    names = set(dcp.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata)
    assert {"0.weight", "optimizer.state.0.weight.exp_avg", "optimizer.param_groups.0.weight.lr"} <= names
    weight = load(tmp_path / "dcp", {"0.weight": torch.zeros(4, 8)})["0.weight"]
    assert_same({"w": weight}, {"w": states["model"][0].weight})


def test_torch_converts_the_folder(tmp_path: Path) -> None:
    states = trained_states()
    bcp.save(tmp_path / "ckpt", states)
    bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert_same(found["model"], states["model"].state_dict())
    assert found["optim"]["param_groups.0.weight.betas"] == (0.9, 0.999)


def test_the_metadata_names_classes_of_torch_only(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", trained_states())
    bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    named = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add(module.partition(".")[0])
            return super().find_class(module, name)

    with (tmp_path / "dcp" / ".metadata").open("rb") as file:
        Reader(file).load()  # the lines above have written the file
    assert named <= {"torch", "collections"}


def test_a_checkpoint_with_codecs(tmp_path: Path) -> None:
    record = read(DATA / "zstd")
    options = bcp.LoadOptions(codecs=codecs_of(record.codecs))
    bcp.tools.export_dcp(DATA / "zstd" / "checkpoint", tmp_path / "dcp", options=options, dtype=None)
    wanted = {key[6:]: tensor for key, tensor in record.parts[0].tensors.items() if key.startswith("model/")}
    assert_same(load(tmp_path / "dcp", {"model": {k: torch.zeros_like(t) for k, t in wanted.items()}})["model"], wanted)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keys": {"model": "", "optimizer": ""}, "rename": {"w": "state.w.exp_avg"}}, "two entries get the name"),
        ({"keys": {"models": ""}}, "keys has 'models'"),
        ({"keys": "model"}, "keys='model'"),
        ({"keys": {"model": None}}, "keys="),
        ({"file_bytes": 0}, "file_bytes=0"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([("w", weight)])
    weight.sum().backward()
    optimizer.step()
    bcp.save(tmp_path / "ckpt", {"model": {"w": weight}, "optimizer": optimizer})
    with pytest.raises(InputError, match=words):
        bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp", **arguments)
    assert not (tmp_path / "dcp").exists()


def test_the_folder_of_the_source_is_no_target(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(InputError, match=r"would delete __0_0\.distcp before it reads the file"):
        bcp.tools.export_dcp(tmp_path / "dcp", tmp_path / "dcp", overwrite=True)
    bcp.tools.export_dcp(tmp_path / "dcp", tmp_path / "other")
    assert_same(load(tmp_path / "other", {"model": {"w": torch.zeros(2)}})["model"], {"w": torch.ones(2)})


def test_an_older_folder_is_refused_or_replaced(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(2), "v": torch.ones(9)}})
    bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp", file_bytes=1)
    assert len(list((tmp_path / "dcp").iterdir())) == 3
    with pytest.raises(ExistsError, match=r"\.metadata, __0_0\.distcp, __1_0\.distcp already"):
        bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp")
    bcp.tools.export_dcp(tmp_path / "ckpt", tmp_path / "dcp", overwrite=True)
    assert len(list((tmp_path / "dcp").iterdir())) == 2
