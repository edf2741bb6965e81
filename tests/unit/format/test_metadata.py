from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from handmade import LAYOUT, OPERATION, TENSORS, commit, ints

from bcp.errors import CheckpointError, CorruptError, FormatVersionError, InputError, NotACheckpointError
from bcp.format import metadata
from bcp.format.container import digest, seal
from bcp.format.metadata import (
    data_key,
    decode_layout,
    decode_metadata,
    encode_layout,
    encode_metadata,
    operation_of,
    receipt_key,
)
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout
from bcp.plan.shards import Segments, TensorMeta, TensorTable
from bcp.runtime.cache import LruCache

RECEIPTS = b"a" * 16 + b"\x00" * 16
DATA = encode_metadata(encode_layout(LAYOUT), commit(RECEIPTS))
WHERE = "run/metadata.arrow"


def same(one: Layout, two: Layout) -> bool:
    def equal(a: object, b: object) -> bool:
        if isinstance(a, np.ndarray):
            return np.array_equal(a, b) and a.dtype.kind == b.dtype.kind
        if isinstance(a, TensorTable | Segments):
            return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
        return list(a) == list(b) if isinstance(a, Sequence) else a == b

    return all(equal(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))


# -- round trips --------------------------------------------------------------------------------


def test_round_trip() -> None:
    found = decode_metadata(DATA, WHERE)
    assert same(LAYOUT, found.layout)
    assert found.commit == commit(RECEIPTS)
    assert [found.layout.tensors[row] for row in range(len(TENSORS))] == TENSORS
    assert [found.commit.receipt(rank) for rank in (0, 1)] == [b"a" * 16, b"\x00" * 16]


def test_an_empty_layout_round_trips() -> None:
    nothing = {field.name: ints() for field in fields(Layout)}
    matrices = {name: np.empty((0, 0), dtype=np.int64) for name in ("offset", "length", "file_planes")}
    plain = {"world_size": 1, "block_bytes": 16, "tensors": TensorTable.build([]), "objects": []}
    empty = Layout(**nothing | matrices | plain | {"segments": Segments.of(ints(), ints(), ints(), ints())})
    assert same(empty, decode_layout(encode_layout(empty)))


def test_a_layout_of_scalars_round_trips() -> None:
    none = np.empty((1, 0), dtype=np.int64)
    scalar = replace(
        LAYOUT,
        tensors=TensorTable.build(TENSORS[:1]),
        leader=ints(0),
        plane=ints(0),
        box_tensor=ints(0),
        offset=none,
        length=none,
        segments=Segments.of(ints(1), ints(1), ints(0), ints(0)),
    )
    assert same(scalar, decode_layout(encode_layout(scalar)))


def test_a_layout_of_many_boxes_and_segments_round_trips() -> None:
    boxes, each = 3000, 20  # more than are decoded, or checked, at a time
    length = np.random.default_rng(0).integers(1, 1 << 40, boxes * each)
    file = np.arange(boxes * each) // each % 7
    room = np.bincount(file, length, minlength=7).astype(np.int64) * 2
    volume = length.reshape(boxes, each).sum(axis=1)
    tensors = [TensorMeta("model", f"{row:04d}", "int16", 2, (int(n),), (1,)) for row, n in enumerate(volume)]
    many = replace(
        LAYOUT,
        world_size=8,
        tensors=TensorTable.build(tensors),
        leader=np.arange(boxes),
        plane=np.zeros(boxes, dtype=np.int64),
        box_tensor=np.arange(boxes),
        offset=np.zeros((boxes, 1), dtype=np.int64),
        length=volume[:, None],
        segments=Segments.of(np.full(boxes, each), length, file, np.cumsum(length) % 1000),
        file_kind=np.zeros(7, dtype=np.int64),
        file_rank=np.arange(7),
        file_nbytes=room + 2000,
        file_planes=np.zeros((7, 1), dtype=np.int64),
    )
    assert same(many, decode_layout(encode_layout(many)))
    for row in (0, 1 << 14, boxes * each - 1):
        past = many.segments.at.copy()
        past[row] = 1 << 60
        with pytest.raises(InputError, match=rf"outside its file: row {row // each}$"):
            encode_layout(replace(many, segments=replace(many.segments, at=past)))


def test_encoding_is_deterministic_and_does_not_depend_on_the_save() -> None:
    again = decode_layout(encode_layout(LAYOUT))
    assert encode_layout(again) == encode_layout(LAYOUT)
    assert digest(encode_layout(again)) == digest(encode_layout(LAYOUT))
    other = encode_metadata(encode_layout(LAYOUT), replace(commit(RECEIPTS), operation="f" * 16))
    for data in (DATA, other):
        assert data[:-24].endswith(encode_layout(LAYOUT))


def test_memoryviews_at_odd_addresses_are_read() -> None:
    assert same(LAYOUT, decode_metadata(memoryview(b"x" + DATA)[1:], WHERE).layout)


# -- damage -------------------------------------------------------------------------------------


def test_every_truncation_is_noticed() -> None:
    for length in range(len(DATA)):
        with pytest.raises((CorruptError, NotACheckpointError), match=WHERE):
            decode_metadata(DATA[:length], WHERE)
    with pytest.raises(CorruptError, match=rf"truncated: after {len(DATA) - 1} bytes"):
        decode_metadata(DATA[:-1], WHERE)
    with pytest.raises(CorruptError, match="after 0 bytes"):
        decode_metadata(b"", WHERE)


def test_damage_to_any_byte_is_noticed() -> None:
    for position in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match=WHERE):
            decode_metadata(damaged, WHERE)


def test_messages_name_the_numbers() -> None:
    damaged = bytes([*DATA[:100], DATA[100] ^ 1, *DATA[101:]])
    with pytest.raises(CorruptError, match=digest(DATA[:-24]).hex()):
        decode_metadata(damaged, WHERE)
    with pytest.raises(FormatVersionError, match=r"version 7 of the format, this bcp reads versions 1 to 3"):
        decode_metadata(DATA[:-1] + b"\x07", WHERE)
    with pytest.raises(NotACheckpointError, match=r"metadata.arrow \(11 bytes\) was not written by bcp"):
        decode_metadata(b"hello world", WHERE)
    with pytest.raises(NotACheckpointError, match="BCPMETA"):
        decode_metadata(seal(b"", b"BCPRCPT"), WHERE)


def test_a_layout_that_no_reader_would_accept_is_not_written() -> None:
    def cut(**columns: Ints) -> Layout:
        return replace(LAYOUT, segments=replace(LAYOUT.segments, **columns))

    with pytest.raises(InputError, match="add up to it: row 1 and 1 more"):
        encode_layout(cut(line=ints(0, 1, 6, 12, 25, 36, 49)))
    with pytest.raises(InputError, match="without elements"):
        encode_layout(cut(line=ints(0, 1, 1, 13, 25, 36, 49)))
    with pytest.raises(InputError, match="begin at 0"):
        encode_layout(cut(line=ints(1, 2, 6, 13, 25, 36, 49)))
    with pytest.raises(InputError, match="different lengths"):
        encode_layout(cut(line=ints(0, 1, 6, 13, 25, 49)))
    with pytest.raises(InputError, match="pattern without segments"):
        encode_layout(cut(begin=ints(0, 1, 1, 4, 6)))
    with pytest.raises(InputError, match="segments without pattern"):
        encode_layout(cut(begin=ints(0, 1, 3, 4, 5)))
    with pytest.raises(InputError, match="not sorted"):
        encode_layout(replace(LAYOUT, box_tensor=ints(0, 1, 4, 1)))
    with pytest.raises(InputError, match="no tensor"):
        encode_layout(replace(LAYOUT, box_tensor=ints(0, 1, 1, 6)))
    with pytest.raises(InputError, match="add up"):
        encode_layout(replace(LAYOUT, box_tensor=ints(0, 1, 2, 4)))


def test_boxes_that_are_cut_alike_share_a_pattern() -> None:
    boxes = 6
    alike = Segments.of(
        number=np.full(boxes, 2),
        length=np.tile([3, 5], boxes),
        file=np.repeat(np.arange(boxes), 2) + np.tile([0, 1], boxes),
        at=np.tile([7, 0], boxes),
    )
    other = Segments.of(np.full(boxes, 2), np.tile([3, 5], boxes), np.tile([0, 1], boxes), np.arange(2 * boxes))
    assert (len(alike.folded()), len(other.folded())) == (2, 2 * boxes)
    for segments in (alike, other):
        folded, everything = segments.folded(), np.arange(boxes)
        for (box, mine), (same_box, row) in [(segments.of_boxes(everything), folded.of_boxes(everything))]:
            assert np.array_equal(box, same_box)
            assert np.array_equal(segments.file[box] + segments.step[mine], folded.file[box] + folded.step[row])
            assert np.array_equal(segments.at[mine], folded.at[row])
            assert np.array_equal(segments.length[mine], folded.length[row])
        again = folded.folded()
        assert np.array_equal(again.pattern, folded.pattern)
        assert np.array_equal(again.line, folded.line)


def test_families_in_one_plane_have_leaders_in_one_plane() -> None:
    step = TensorMeta("optimizer", "step", "float32", 4, ())
    one = np.ones((1, 2), dtype=np.int64)

    def layout(plane: int) -> Layout:
        return replace(
            LAYOUT,
            tensors=TensorTable.build([*TENSORS, step]),
            leader=np.append(LAYOUT.leader, 6),
            plane=np.append(LAYOUT.plane, plane),
            box_tensor=np.append(LAYOUT.box_tensor, 6),
            offset=np.concatenate((LAYOUT.offset, one * 0)),
            length=np.concatenate((LAYOUT.length, one)),
            segments=Segments.of(
                ints(1, 2, 1, 2, 1), ints(1, 5, 7, 12, 11, 13, 1), ints(0, 0, 1, 1, 2, 3, 2), ints(0, 0, 0, 7, 0, 0, 0)
            ).folded(),
        )

    assert same(layout(0), decode_layout(encode_layout(layout(0))))
    with pytest.raises(InputError, match="other leaders: row"):
        encode_layout(layout(1))


# -- layouts that were decoded before -----------------------------------------------------------


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> LruCache[bytes, Layout]:
    cache: LruCache[bytes, Layout] = LruCache(2)
    monkeypatch.setattr(metadata, "_layouts", cache)
    return cache


def test_a_layout_is_decoded_once_and_its_commit_every_time(cache: LruCache[bytes, Layout]) -> None:
    later = replace(commit(RECEIPTS[::-1]), operation="f" * 16)
    first, again = (
        decode_metadata(encode_metadata(encode_layout(LAYOUT), one), WHERE) for one in (commit(RECEIPTS), later)
    )
    assert again.layout is first.layout
    assert (first.commit, again.commit) == (commit(RECEIPTS), later)
    assert (cache.hits, cache.misses) == (1, 1)


def test_another_layout_is_never_served(cache: LruCache[bytes, Layout]) -> None:
    others = [
        LAYOUT,
        replace(LAYOUT, block_bytes=32),
        replace(LAYOUT, segments=replace(LAYOUT.segments, at=ints(0, 0, 0, 6, 0, 0))),
        replace(LAYOUT, segments=replace(LAYOUT.segments, file=ints(0, 0, 1, 3), step=ints(0, 0, 1, 0, 0, 0))),
        replace(LAYOUT, plane=ints(0, 1, 1, 0, 1, 0)),
        replace(LAYOUT, object_rank=ints(1, 0)),
    ]
    files = [encode_metadata(encode_layout(layout), commit(RECEIPTS)) for layout in others]
    assert len(set(files)) == len(others)
    for _ in range(3):
        for layout, data in zip(others, files, strict=True):
            assert same(layout, decode_metadata(data, WHERE).layout)
    assert len(cache) == cache.capacity


def test_a_layout_that_was_refused_is_refused_again(cache: LruCache[bytes, Layout]) -> None:
    data = seal(DATA[:-24].replace(encode_layout(LAYOUT), encode_layout(LAYOUT)[:-1]), b"BCPMETA")
    for _ in range(2):
        with pytest.raises(CorruptError, match=WHERE):
            decode_metadata(data, WHERE)
    assert (cache.hits, len(cache)) == (0, 0)


def test_receipts_are_checked_against_a_layout_from_the_cache(cache: LruCache[bytes, Layout]) -> None:
    decode_metadata(DATA, WHERE)
    with pytest.raises(CorruptError, match="1 receipts for a world of 2 ranks"):
        decode_metadata(encode_metadata(encode_layout(LAYOUT), commit(b"a" * 16)), WHERE)
    assert cache.hits == 1


def test_a_decoded_layout_cannot_be_changed() -> None:
    layout = decode_metadata(DATA, WHERE).layout
    columns = [getattr(owner, field.name) for owner in (layout, layout.tensors) for field in fields(owner)]
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    assert not any(column.flags.writeable for column in arrays)
    assert not any(isinstance(column, list) for column in columns)


# -- names of files -----------------------------------------------------------------------------


def test_names_of_files() -> None:
    assert data_key(0, 3, OPERATION, encoded=False) == f"model/00003-{OPERATION}.safetensors"
    assert data_key(3, 100_096, OPERATION, encoded=True) == f"extra_states/01-100096-{OPERATION}.bcp"
    assert receipt_key(3, OPERATION) == f"receipts/00003-{OPERATION}.arrow"
    assert receipt_key(999, OPERATION) == f"receipts/00999-{OPERATION}.arrow"
    assert receipt_key(1000, OPERATION) == f"receipts/06-01000-{OPERATION}.arrow"


def test_keys_of_many_ranks_are_spread_evenly() -> None:
    """A store divides load by the first characters of keys: no two of them may take more than a small share."""
    keys = [data_key(0, rank, OPERATION, encoded=False) for rank in range(9960)]
    assert len(set(keys)) == len(keys)
    shares = Counter(key.removeprefix("model/")[:2] for key in keys[1000:])
    assert len(shares) == 256
    assert max(shares.values()) <= 1.1 * min(shares.values())


@pytest.mark.parametrize(
    ("kind", "rank", "operation"), [(4, 0, OPERATION), (-1, 0, OPERATION), (0, -1, OPERATION), (0, 0, "../x")]
)
def test_what_names_no_file_is_refused(kind: int, rank: int, operation: str) -> None:
    with pytest.raises(InputError):
        data_key(kind, rank, operation, encoded=False)


@pytest.mark.parametrize(
    "key",
    [data_key(1, 7, OPERATION, encoded=True), receipt_key(100_000, OPERATION), f"actor/{receipt_key(0, OPERATION)}"],
)
def test_the_operation_of_a_key_is_found(key: str) -> None:
    assert operation_of(key) == OPERATION


@pytest.mark.parametrize(
    "key",
    [
        "metadata.arrow",
        f"model/3-{OPERATION}.safetensors",
        f"model/00003-{OPERATION}",
        f"notes/00003-{OPERATION}.bcp",
        f"model/00003-{OPERATION[:-1]}.bcp",
    ],
)
def test_other_keys_have_no_operation(key: str) -> None:
    assert operation_of(key) is None
