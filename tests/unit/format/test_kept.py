"""The table of blocks that earlier checkpoints have: its bytes, what it refuses, and how a read is cut by it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcp
from bcp.format import metadata as of_metadata
from bcp.format.container import unseal, version_of
from bcp.format.kept import KeptRun, kept_blocks, runs_of, stretches
from bcp.format.metadata import (
    METADATA_KEY,
    Commit,
    decode_commit,
    decode_metadata,
    encode_metadata,
    stored_layout,
    whole_metadata,
)
from bcp.format.receipt import Blocks, FileReceipt, Receipt, decode_receipt, encode_receipt, receipt_digest

BASE = "0123456789abcdef"
RUN = KeptRun(1, 2, 500, BASE, 0, 3, packed=False, start=100)
SOURCES = [(500, BASE, 0, 3, False), (600, BASE, 1, 3, True)]


def receipt(*runs: KeptRun, blocks: int = 5) -> Receipt:
    lengths = np.full(blocks, 10)
    table = Blocks.build(lengths, lengths, [bytes([row]) * 16 for row in range(blocks)])
    file = FileReceipt(0, 4, 10 * blocks, 10 * blocks, (), table, runs)
    return Receipt(3, "a" * 16, [file], {("model", "x"): "1"})


@st.composite
def files(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return lengths of blocks, which of them are kept, in which source, and where there."""
    length = np.array(draw(st.lists(st.integers(1, 6), min_size=1, max_size=12)), np.int64)
    is_kept = np.array(draw(st.lists(st.booleans(), min_size=len(length), max_size=len(length))))
    is_kept[0] = False
    source = np.array(draw(st.lists(st.integers(0, 1), min_size=len(length), max_size=len(length))), np.int64)
    gaps = draw(st.lists(st.sampled_from([0, 0, 3]), min_size=len(length), max_size=len(length)))
    return length, is_kept, source, np.cumsum(length + gaps) - length


@given(files(), st.data())
def test_a_range_is_cut_into_the_bytes_of_each_file(
    file: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    length, is_kept, source, start = file
    runs = runs_of(is_kept, SOURCES, source, start, length)
    assert kept_blocks(runs, len(length)).tolist() == is_kept.tolist()
    begin = np.cumsum(length) - length
    # oracle: the place of every byte
    places, own = list[tuple[object, int]](), 0
    for row, nbytes in enumerate(length.tolist()):
        for byte in range(nbytes):
            where = (SOURCES[source[row]][0], int(start[row]) + byte) if is_kept[row] else (None, own + byte)
            places.append(where)
        own += 0 if is_kept[row] else nbytes
    low = data.draw(st.integers(0, len(places)))
    high = data.draw(st.integers(low, len(places)))
    found = stretches(runs, begin, length, low, high)
    spread = [
        (None if part.run is None else part.run.step, part.start + byte)
        for part in found
        for byte in range(part.nbytes)
    ]
    assert spread == places[low:high]
    for one, two in itertools.pairwise(found):  # what touches is joined
        same = (one.run and one.run.source) == (two.run and two.run.source)
        assert not (same and one.start + one.nbytes == two.start)


def test_a_receipt_survives_and_only_one_with_kept_blocks_has_version_2() -> None:
    plain, thin = receipt(), receipt(RUN, replace(RUN, first=4, count=1, packed=True, kind=1))
    assert version_of(encode_receipt(plain)) == 1
    assert version_of(encode_receipt(thin)) == 2
    found = decode_receipt(encode_receipt(thin), "r")
    assert found.files[0].kept == thin.files[0].kept
    assert found.refers == {500}
    assert found.files[0].own_nbytes == 20
    assert found.files[0].own().blocks.checksum == [bytes([0]) * 16, bytes([3]) * 16]
    assert found.key_of(found.files[0]) == "model/00003-aaaaaaaaaaaaaaaa.bcp"
    assert encode_receipt(found.whole()) == encode_receipt(plain)


def test_a_packed_file_without_kept_blocks_says_so() -> None:
    found = decode_receipt(encode_receipt(receipt(replace(RUN, count=0))), "r")
    assert found.key_of(found.files[0]).endswith(".bcp")
    assert found.refers == frozenset()
    assert found.files[0].own_nbytes == 50


@pytest.mark.parametrize(
    "runs",
    [
        [replace(RUN, first=0)],
        [replace(RUN, first=4)],
        [replace(RUN, count=9)],
        [RUN, replace(RUN, first=2)],
        [replace(RUN, first=3), RUN],
        [replace(RUN, start=-1)],
        [replace(RUN, start=1 << 62)],
        [replace(RUN, rank=1 << 31)],
        [replace(RUN, rank=-1)],
        [replace(RUN, step=-1)],
        [replace(RUN, kind=4)],
        [replace(RUN, operation="../../../../etc/")],
    ],
)
def test_rows_that_cannot_be_any_are_refused(runs: list[KeptRun]) -> None:
    with pytest.raises(bcp.CorruptError):
        decode_receipt(encode_receipt(receipt(*runs)), "r")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the metadata of a save."""
    path = tmp_path_factory.mktemp("saved") / "one"
    bcp.save(path, {"model": {"w": 1}})
    return (path / METADATA_KEY).read_bytes()


def referring(saved: bytes, **changes: object) -> bytes:
    commit, layout = stored_layout(saved, "m")
    return encode_metadata(layout, replace(commit, **{"refers": (5, 9), "since_full": 2, **changes}))  # type: ignore[arg-type] -- wrong on purpose


def test_metadata_with_references_have_version_3(saved: bytes) -> None:
    data = referring(saved)
    assert version_of(saved) == 1
    assert version_of(data) == 3
    found = decode_metadata(data, "m")
    assert found.commit.refers == (5, 9)
    assert found.commit.since_full == 2
    assert decode_commit(data, "m") == found.commit
    with pytest.raises(bcp.FormatVersionError, match="version 3 of the format, this bcp reads versions 1 to 2"):
        unseal(data, of_metadata.MAGIC, "m", newest=2)  # as an older bcp does
    assert whole_metadata(data, "m", found.commit.receipts) == saved


def test_metadata_of_several_operations_may_refer_too(saved: bytes) -> None:
    data = referring(saved, writers=[BASE], ranks=1)
    found: Commit = decode_metadata(data, "m").commit
    assert (found.writers, found.refers) == ([BASE], (5, 9))


@pytest.mark.parametrize(
    "changes",
    [
        {"refers": (9, 5)},
        {"refers": (5, 5)},
        {"refers": (-1,)},
        {"refers": (1 << 63,)},
        {"refers": ("5",)},
        {"refers": (True,)},
        {"since_full": 0},
        {"since_full": "2"},
        {"codecs": ("zstd",)},
    ],
)
def test_references_that_cannot_be_any_are_refused(saved: bytes, changes: dict[str, object]) -> None:
    with pytest.raises(bcp.CorruptError):
        decode_metadata(referring(saved, **changes), "m")


def test_every_damage_to_a_receipt_is_noticed() -> None:
    data = encode_receipt(receipt(RUN))
    assert receipt_digest(data)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(bcp.CheckpointError):
            decode_receipt(damaged, "r")
