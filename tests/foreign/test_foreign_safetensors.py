"""Safetensors files by reference, held against safetensors' own reader."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import CountingBackend

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []


def mixed() -> dict[str, torch.Tensor]:
    """Return tensors of all dtypes and odd shapes, so that elements lie at odd bytes."""
    shapes = [(3,), (5, 7), (), (1, 3, 5), (0, 4)]
    found = {}
    for number, dtype in enumerate(DTYPES):
        shape = shapes[number % len(shapes)]
        data = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
        found[f"layers.{number}.{str(dtype).removeprefix('torch.')}"] = data.view(dtype).reshape(shape)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of many dtypes."""
    torch.manual_seed(5)
    save_file(mixed(), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.mark.parametrize("folder", [False, True])
def test_every_tensor_is_that_of_safetensors(file: Path, *, folder: bool) -> None:
    expected = load_file(file)
    ckpt = bcp.Checkpoint(file.parent if folder else file)
    assert ckpt.names() == sorted(expected)
    for name, tensor in expected.items():
        info, found = ckpt[name], ckpt.read(name)
        assert (info.shape, info.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert bits(found) == bits(tensor)


def test_a_stream_has_every_element_once(file: Path) -> None:
    expected = load_file(file)
    found = {piece.info.name: bits(piece.data) for piece in bcp.Checkpoint(file).stream(budget_bytes=64)}
    whole = {name: bits(tensor) for name, tensor in expected.items() if tensor.numel()}
    assert set(found) == set(whole)
    assert {name: found[name] for name in whole if bcp.Checkpoint(file)[name].nbytes < 16} == {
        name: data for name, data in whole.items() if len(data) < 16
    }


def test_a_load_is_that_of_safetensors(file: Path) -> None:
    expected = load_file(file)
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    result = bcp.load(file, {"model": target})
    assert all(bits(target[name]) == bits(tensor) for name, tensor in expected.items())
    assert result.unverified
    assert result.saved_world_size == 1
    assert result.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert result.nbytes <= result.read_nbytes < result.nbytes + 8 * len(expected)  # a run has whole largest elements
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name]  # nothing is written beside it


def test_a_slice_reads_its_bytes(tmp_path: Path) -> None:
    weight = torch.arange(64 * 48, dtype=torch.float32).reshape(64, 48)
    save_file({"w": weight, "b": torch.ones(3)}, tmp_path / "w.safetensors")
    backend = CountingBackend(LocalBackend(tmp_path))
    ckpt = bcp.Checkpoint(backend)
    assert ckpt["w"].shape == (64, 48)
    backend.read.clear()
    assert torch.equal(ckpt.read("w", (slice(3, 9),)), weight[3:9])
    assert backend.read == {"w.safetensors": 6 * 48 * 4}


def test_places_are_bytes_of_the_file(file: Path) -> None:
    for name, tensor in load_file(file).items():
        data = b"".join(file.read_bytes()[place.start : place.stop] for place in bcp.Checkpoint(file).places(name))
        assert list(data) == bits(tensor)


def test_it_says_that_nothing_is_verified(file: Path) -> None:
    ckpt = bcp.Checkpoint(file)
    found = ckpt.verify()
    assert found
    assert found.unverified == 1
    assert "unverified: 1 files without checksums; only their ends were read" in str(found)
    assert "without checksums" in repr(ckpt)
    assert ckpt.framework == "safetensors"
    assert ckpt.nbytes == sum(tensor.nbytes for tensor in load_file(file).values())
    nbytes = file.stat().st_size
    with file.open("ab") as longer:
        longer.write(b"more")
    assert ckpt.verify()  # the same bytes are there
    with file.open("r+b") as cut:
        cut.truncate(nbytes - 1)
    assert "cannot be read to its end" in str(ckpt.verify())
    assert not ckpt.verify()


def test_a_link_that_the_caller_passes_is_followed(file: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    link = tmp_path / "here" / "link.safetensors"
    link.symlink_to(file)
    assert bcp.Checkpoint(link).names() == sorted(load_file(file))


def test_opening_and_listing_import_no_torch(file: Path) -> None:
    program = (
        "import sys, bcp; ckpt = bcp.Checkpoint(sys.argv[1]); ckpt.names(); ckpt.verify(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(file)], check=True)  # noqa: S603 -- our own program


# -- bad input ------------------------------------------------------------------------------------


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


EIGHT = bytes(8)
BAD: list[tuple[str, Callable[[Path], Path], str]] = [
    ("empty", lambda path: (path.write_bytes(b"") and path) or path, "truncated|does not know"),
    ("short", lambda path: (path.write_bytes(b"\x08\0\0") and path) or path, "truncated"),
    ("gigabytes", lambda path: write(path, b"{}", EIGHT, 1 << 40), "said to have 1099511627776"),
    ("cut header", lambda path: write(path, b'{"w":', b"", 60), "truncated"),
    ("no JSON", lambda path: write(path, b'{"w": }', EIGHT), "is damaged"),
    ("a list", lambda path: write(path, b"[]       ", EIGHT), "no object|is damaged"),
    ("deep", lambda path: write(path, b'{"w":' + b"[" * 200_000, EIGHT), "is damaged"),
    ("twice", lambda path: write(path, b'{"w": 1, "w": 2}', EIGHT), "'w' twice"),
    ("no entry", lambda path: write(path, {"w": 7}, EIGHT), "no dtype, shape"),
    ("unknown dtype", lambda path: write(path, {"w": entry(dtype="F4")}, EIGHT), "dtype 'F4', which bcp does not read"),
    ("negative", lambda path: write(path, {"w": entry(shape=[-2])}, EIGHT), "which no tensor has"),
    ("float", lambda path: write(path, {"w": entry(shape=[2.0])}, EIGHT), "which no tensor has"),
    ("bool", lambda path: write(path, {"w": entry(shape=[True])}, EIGHT), "which no tensor has"),
    ("huge", lambda path: write(path, {"w": entry(shape=[1 << 61, 1 << 61])}, EIGHT), "has 8 bytes, and float32"),
    ("lying size", lambda path: write(path, {"w": entry(shape=[3])}, EIGHT), "has 8 bytes, and float32.3. has 12"),
    ("outside", lambda path: write(path, {"w": entry(shape=[4], data_offsets=[0, 16])}, EIGHT), "do not follow"),
    ("backwards", lambda path: write(path, {"w": entry(data_offsets=[8, 0])}, EIGHT), "data_offsets"),
    ("strings", lambda path: write(path, {"w": entry(data_offsets=["0", "8"])}, EIGHT), "data_offsets"),
    ("overlap", lambda path: write(path, {"w": entry(), "v": entry()}, EIGHT), "do not follow"),
    ("gap", lambda path: write(path, {"w": entry(data_offsets=[8, 16])}, bytes(16)), "do not follow"),
    ("more bytes", lambda path: write(path, {"w": entry()}, bytes(9)), "do not follow"),
]


@pytest.mark.parametrize(("make", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, make: Callable[[Path], Path], words: str) -> None:
    path = make(tmp_path / "bad.safetensors")
    with pytest.raises(bcp.CheckpointError, match=words) as caught:
        bcp.Checkpoint(path).names()
    assert "bad.safetensors" in str(caught.value)
    target = {"w": torch.full((2,), 7.0)}
    with pytest.raises(bcp.CheckpointError, match=words):
        bcp.load(path, {"model": target})
    assert target["w"].tolist() == [7.0, 7.0]


def test_a_file_that_shrinks_after_it_was_opened_is_corrupt(file: Path) -> None:
    ckpt = bcp.Checkpoint(file)
    names = ckpt.names()
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 200)
    with pytest.raises(bcp.CorruptError, match="too short"):
        _ = [ckpt.read(name) for name in names]


def test_a_load_refuses_the_shape_of_boxes_without_their_last_file(tmp_path: Path) -> None:
    for rank in range(3):  # as HuggingFaceStorageWriter(save_distributed=True) does
        metadata = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [2 * rank, 0]}})}
        save_file({"w": torch.full((2, 3), float(rank))}, tmp_path / f"shard-{rank}.safetensors", metadata=metadata)
    bcp.load(tmp_path, {"model": (target := {"w": torch.zeros(6, 3)})})
    assert target["w"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    (tmp_path / "shard-2.safetensors").unlink()
    with pytest.raises(bcp.ShapeMismatchError, match=r"w is \[4, 3\] in the checkpoint, \[6, 3\] in the target"):
        bcp.load(tmp_path, {"model": {"w": torch.zeros(6, 3)}})
