"""Pieces of tensors at any byte of any file are read as numpy reads them; contradictions are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.backends import MemoryBackend
from bcp.errors import CheckpointError, CorruptError
from bcp.format.metadata import decode_metadata
from bcp.interop.catalogue import Catalogue, Piece
from bcp.options import LoadOptions
from bcp.read.boxes import read_box
from bcp.read.source import Source

DTYPES = {
    "uint8": np.uint8,
    "int16": np.int16,
    "float32": np.float32,
    "float64": np.float64,
    "complex128": np.complex128,
}


@st.composite
def stored(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], list[Piece], dict[str, bytes]]:
    """Draw tensors that are cut into grids of boxes, which lie at any byte of three files."""
    files = {name: bytearray(draw(st.binary(max_size=9))) for name in ("a", "b", "deep/c")}
    tensors, pieces = {}, []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        array = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float64).reshape(shape).astype(DTYPES[dtype])
        tensors[f"t{number}"] = array
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
        for corner in itertools.product(*(list(itertools.pairwise(ends)) for ends in cuts)):
            key = draw(st.sampled_from(sorted(files)))
            files[key] += bytes(draw(st.integers(0, 5)))
            block = array[tuple(slice(first, last) for first, last in corner)]
            offset, length = tuple(first for first, _ in corner), tuple(block.shape)
            pieces.append(Piece("model", f"t{number}", dtype, shape, offset, length, key, len(files[key])))
            files[key] += block.tobytes()
    return tensors, pieces, {key: bytes(data) for key, data in files.items()}


@settings(max_examples=100)
@given(stored(), st.data())
def test_any_slice_is_that_of_numpy(made: Any, data: st.DataObject) -> None:
    tensors, pieces, files = made
    catalogue = Catalogue("test", pieces, {key: len(body) for key, body in files.items()}, ranks=3)
    metadata = decode_metadata(catalogue.encode("here"), "here")
    backend = MemoryBackend()
    backend._objects = files
    source = Source.of(backend, "here", metadata, LoadOptions())
    assert metadata.world_size == 3
    assert metadata.nbytes == sum(array.nbytes for array in tensors.values())
    for row, array in enumerate(tensors.values()):
        ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in array.shape]
        index = tuple(slice(*pair) for pair in ends)
        found = anyio.run(read_box, source, row, index, None, None)
        assert np.array_equal(found.numpy(), array[index])


def whole(**changes: Any) -> Piece:
    return replace(Piece.whole("model", "w", "float32", (4, 2), "f", 8), **changes)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([whole(start=9)], "bytes 9 to 41 of f, which has 40 bytes"),
        ([whole(start=-1)], "bytes -1"),
        ([whole(key="g")], "of g, which has 0 bytes"),
        ([whole(shape=(5, 2))], "overlap, or leave a part"),
        ([whole(offset=(1, 0))], "lies outside of the tensor"),
        ([whole(length=(4,))], "lies outside of the tensor"),
        ([whole(length=(-4, -2))], "lies outside of the tensor"),
        ([whole(), whole()], "the 2 pieces .* overlap"),
        ([whole(length=(2, 2)), whole(offset=(1, 0), length=(2, 2))], "the 2 pieces .* overlap"),
        ([whole(), whole(dtype="int32")], "float32.4, 2. in one place, and int32"),
        ([whole(shape=(1 << 40, 1 << 40))], "impossible shape"),
    ],
    ids=range(11),
)
def test_contradictions_are_refused(pieces: list[Piece], words: str) -> None:
    with pytest.raises(CorruptError, match=words):
        Catalogue("test", pieces, {"f": 40}).encode("here")


def sealed() -> bytes:
    return Catalogue("test", [whole()], {"f": 40}, {("model", "lr"): "3"}).encode("here")


def test_the_same_files_have_the_same_table_of_contents() -> None:
    assert sealed() == sealed()
    assert (
        decode_metadata(sealed(), "here").commit.operation
        != decode_metadata(Catalogue("test", [whole(key="g")], {"g": 40}).encode("here"), "here").commit.operation
    )


def test_damage_on_the_way_is_noticed() -> None:
    data = sealed()
    for position in range(len(data)):
        with pytest.raises(CheckpointError):
            decode_metadata(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :], "here")


@pytest.mark.parametrize("key", ["/f", "../f", "a/../f", "a//f", "a\\f", "a\0f", "."])
def test_a_key_that_leaves_the_folder_is_refused(key: str) -> None:
    data = Catalogue("test", [whole(key=key)], {key: 40}).encode("here")
    with pytest.raises(CorruptError, match="leaves the folder"):
        decode_metadata(data, "here")


def test_nothing_at_all_is_a_catalogue() -> None:
    metadata = decode_metadata(Catalogue("test", [], {}).encode("here"), "here")
    assert len(metadata.layout.tensors) == metadata.nbytes == 0


def test_tensors_without_elements_have_no_file() -> None:
    empty = Piece.whole("model", "e", "float32", (0, 3), "f", 0)
    metadata = decode_metadata(Catalogue("test", [empty], {"f": 0}).encode("here"), "here")
    source = Source.of(MemoryBackend(), "here", metadata, LoadOptions())
    found: torch.Tensor = anyio.run(read_box, source, 0, ..., None, None)
    assert found.shape == (0, 3)
