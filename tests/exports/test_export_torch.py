"""A file of torch.save that was streamed, read by torch.load and by zipfile."""

from __future__ import annotations

import asyncio
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import READABLE, assert_same, documented, folders, odd_states, trained_states
from golden.cases import codecs_of
from golden.expected import DATA, read
from torch.utils.serialization import config

import bcp
from bcp.errors import InputError
from bcp.plan.box import Box
from bcp.tools.exports.streamed import Elements, Fixed, Sealed, TargetFile
from bcp.tools.exports.torch_archive import Stored, write_archive


def loads(path: Path) -> list[Any]:
    """Load a file in every way that torch has."""
    found = [torch.load(path, weights_only=True, mmap=mmap) for mmap in (False, True)]
    with config.patch("load.calculate_storage_offsets", True):  # noqa: FBT003 -- torch's signature
        return [*found, torch.load(path, weights_only=True, mmap=True)]


@pytest.mark.parametrize("name", READABLE)
def test_every_golden_checkpoint_is_read_by_torch(name: str, tmp_path: Path) -> None:
    for number, path in enumerate(folders(name)):
        expected = documented(path)
        target = tmp_path / f"{number}.pt"
        bcp.tools.export_torch(path, target, values=False)
        for found in loads(target):
            assert set(found) == {kind for kind, _ in expected}
            for kind, tensors in found.items():
                assert_same(tensors, {fqn: tensor for (of, fqn), tensor in expected.items() if of == kind})


@pytest.mark.parametrize("budget", [1, 8 << 20])
def test_tensors_of_every_dtype_and_name_arrive_bit_by_bit(budget: int, tmp_path: Path) -> None:
    states = odd_states() | {"complex128": torch.randn(3, dtype=torch.complex128), "large": torch.arange(3_000_001)}
    bcp.save(tmp_path / "ckpt", {"model": states})
    result = bcp.tools.export_torch(tmp_path / "ckpt", tmp_path / "model.pt", kind="model", budget_bytes=budget)
    for found in loads(tmp_path / "model.pt"):
        assert_same(found, states)
        assert found["tied.a"].data_ptr() == found["tied.b"].data_ptr(), "they share a storage"
    assert result.tensors == len(states) - 1


def test_the_zip_file_is_sound_and_laid_out_as_torch_does(tmp_path: Path) -> None:
    states = odd_states()
    bcp.save(tmp_path / "ckpt", {"model": states})
    bcp.tools.export_torch(tmp_path / "ckpt", tmp_path / "model.pt", kind="model")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        assert archive.testzip() is None, "all checksums are right"
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    reader = torch._C.PyTorchFileReader(str(tmp_path / "model.pt"))
    for name in reader.get_all_records():
        assert reader.get_record_offset(name) % 64 == 0


def test_torch_reads_the_state_of_an_optimizer_back(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 -- imports much
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    states, flat = trained_states(), StateDictOptions(flatten_optimizer_state_dict=True)
    bcp.save(tmp_path / "ckpt", states)
    bcp.tools.export_torch(tmp_path / "ckpt", tmp_path / "both.pt")
    found = torch.load(tmp_path / "both.pt", weights_only=True)
    expected = get_optimizer_state_dict(states["model"], states["optimizer"], options=flat)
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert_same({name: found["optimizer"][name] for name in tensors}, tensors)
    assert {name: found["optimizer"][name] for name in expected if name not in tensors} == {
        name: value for name, value in expected.items() if name not in tensors
    }
    other = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(other.parameters())
    other.load_state_dict(found["model"])
    set_optimizer_state_dict(other, optimizer, found["optimizer"], options=flat)
    assert optimizer.param_groups[0]["lr"] == 0.125
    for mine, parameter in zip(other.parameters(), states["model"].parameters(), strict=True):
        assert_same(dict(optimizer.state[mine]), dict(states["optimizer"].state[parameter]))


def test_values_are_plain_or_refused(tmp_path: Path) -> None:
    values = {"number": 3, "huge": 1 << 80, "dtype": torch.float16, "bytes": b"\0\xff", "text": "\u2603", "none": None}
    values |= {"complex": 1 + 2j, "set": {1, 2}, "device": torch.device("cuda:0")}
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(2), **values}})
    bcp.tools.export_torch(tmp_path / "ckpt", tmp_path / "model.pt", kind="model", rename={"number": "renamed"})
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert found.pop("w").tolist() == [1, 1]
    assert {"number": found.pop("renamed"), **found} == values
    bcp.save(tmp_path / "empty", {"model": {"w": torch.ones(2), "nested": [{"bytes": b""}]}})
    with pytest.raises(InputError, match=r"the model value 'nested.*' has empty bytes"):
        bcp.tools.export_torch(tmp_path / "empty", tmp_path / "empty.pt")
    bcp.save(tmp_path / "odd", {"model": {"w": torch.ones(2), "range": range(3)}})
    with pytest.raises(InputError, match=r"the model value 'range' has an object of the class builtins.range"):
        bcp.tools.export_torch(tmp_path / "odd", tmp_path / "odd.pt")
    bcp.tools.export_torch(tmp_path / "odd", tmp_path / "odd.pt", values=False)
    assert list(torch.load(tmp_path / "odd.pt", weights_only=True)["model"]) == ["w"]


def test_hyper_parameters_that_are_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), capturable=False, foreach=False)
    bcp.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})
    bcp.tools.export_torch(tmp_path / "ckpt", tmp_path / "both.pt")
    for found in loads(tmp_path / "both.pt"):
        assert torch.equal(found["optimizer"]["param_groups.weight.lr"], torch.tensor(0.25))


def test_a_checkpoint_with_codecs(tmp_path: Path) -> None:
    record = read(DATA / "zstd")
    options = bcp.LoadOptions(codecs=codecs_of(record.codecs))
    bcp.tools.export_torch(DATA / "zstd" / "checkpoint", tmp_path / "both.pt", options=options)
    found = torch.load(tmp_path / "both.pt", weights_only=True)
    tensors = {
        f"{kind}/{name}": value
        for kind, entries in found.items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }
    assert_same(tensors, record.parts[0].tensors)


def test_coroutines_and_casts(tmp_path: Path) -> None:
    weight = torch.randn(64, 3)
    bcp.save(tmp_path / "ckpt", {"model": {"w": weight, "n": torch.arange(3)}})
    asyncio.run(_export(tmp_path))
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_same(found, {"w": weight.to(torch.bfloat16), "n": torch.arange(3)})


async def _export(folder: Path) -> None:
    await bcp.tools.aexport_torch(folder / "ckpt", folder / "model.pt", kind="model", dtype=torch.bfloat16)


@pytest.mark.parametrize("large", [1 << 29, 1 << 30, (1 << 30) + 16])
def test_a_file_beyond_four_gigabytes(large: int, tmp_path: Path) -> None:
    """The bytes are laid out in a sparse file: 2, 4 and a bit more than 4 GiB of zeros, and a tensor behind them."""
    file, path = TargetFile("model.pt"), tmp_path / "model.pt"
    known = Stored(0, Box.whole((large,)), "float32", 4), torch.arange(5), Stored(0, Box.whole((large,)), "float32", 4)
    write_archive(file, dict(zip("abc", known, strict=True)) | {"d": torch.arange(7.0)})
    with path.open("wb") as stream:
        for piece in file.pieces:
            assert piece.at + piece.nbytes <= file.nbytes
            if not isinstance(piece, Elements):
                data = piece.data if isinstance(piece, Fixed) else piece.make([0] * file.checksums)
                assert len(data) == piece.nbytes
                os.pwrite(stream.fileno(), data, piece.at)
        os.truncate(stream.fileno(), file.nbytes)
    assert any(isinstance(piece, Sealed) for piece in file.pieces)
    with config.patch("load.calculate_storage_offsets", True):  # noqa: FBT003 -- torch's signature
        quick = torch.load(path, weights_only=True, mmap=True)
    for found in (torch.load(path, weights_only=True, mmap=True), quick):
        assert found["a"].shape == found["c"].shape == (large,)
        assert found["a"][-1] == found["c"][-1] == 0
        assert torch.equal(found["b"], torch.arange(5))
        assert torch.equal(found["d"], torch.arange(7.0))
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        assert (sizes["archive/data/0"], sizes["archive/data/3"]) == (4 * large, 28)
        assert archive.read("archive/data/3") == torch.arange(7.0).numpy().tobytes()
