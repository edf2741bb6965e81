"""Hostile files: the checksum is right, the numbers are not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from handmade import LAYOUT, commit
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.errors import CorruptError
from bcp.format.container import GRID, INT, encode_table, read_tables, seal, translated
from bcp.format.layout_file import LAYOUT_TABLES
from bcp.format.metadata import COMMIT, MAGIC, decode_metadata, encode_layout, encode_metadata
from bcp.plan.box import Box
from bcp.plan.layout import Layout, check_segments
from bcp.plan.read.reads import wants
from bcp.plan.shards import ShardRow, ShardTable

TABLES = {of.metadata[b"bcp.table"].decode(): of for of in (COMMIT, *LAYOUT_TABLES)}
RECEIPTS = b"a" * 16 + b"\x00" * 16
DATA = encode_metadata(encode_layout(LAYOUT), commit(RECEIPTS))
FOUND = dict(zip(TABLES, read_tables(DATA[:-24], tuple(TABLES.values())), strict=True))
STORED = {name: {key: table.column(key).to_pylist() for key in table.schema.names} for name, table in FOUND.items()}
FACTS = FOUND["commit"].schema.metadata[b"bcp.commit"].decode()
WHERE = "run/metadata.arrow"


def encoded(table: str, columns: Mapping[str, Any], facts: str = FACTS) -> bytes:
    return encode_table(TABLES[table], list(columns.values()), **({"commit": facts} if table == "commit" else {}))


def raw(table: str, arrays: Sequence[pa.Array], batches: int = 1) -> bytes:
    """Encode a table with columns of any type."""
    names, about = TABLES[table].names, {b"bcp.table": table.encode(), b"bcp.commit": FACTS.encode()}
    of = pa.schema([pa.field(n, a.type, nullable=False) for n, a in zip(names, arrays, strict=True)], metadata=about)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, of) as stream:
        for _ in range(batches):
            stream.write_batch(pa.record_batch(list(arrays), schema=of))
    return bytes(sink.getvalue().to_pybytes())


def assembled(**tables: bytes) -> bytes:
    """Return the metadata file with some tables replaced, sealed again."""
    return seal(b"".join(tables.get(name) or encoded(name, STORED[name]) for name in TABLES), MAGIC)


def forged(table: str, **columns: object) -> bytes:
    """Return the metadata file with some columns of a table replaced, sealed again."""
    return assembled(**{table: encoded(table, STORED[table] | columns)})


HUGE = 2**62
MOST = 2**63 - 1

FORGERIES = [
    ("layout", {"world_size": [0]}, "world_size"),
    ("layout", {"world_size": [2, 2], "block_bytes": [16, 16]}, "2 rows"),
    ("layout", {"world_size": [], "block_bytes": []}, "0 rows"),
    ("layout", {"world_size": [2**62]}, "world_size"),
    ("layout", {"block_bytes": [24]}, "block_bytes"),
    ("layout", {"block_bytes": [2**62]}, "block_bytes"),
    ("tensors", {"kind": [0, 0, 0, 0, 1, 4]}, "unknown kind: row 5"),
    ("tensors", {"kind": [0, 0, 0, 0, 1, -1]}, "unknown kind: row 5"),
    ("tensors", {"kind": [0, 0, 1, 0, 1, 1]}, "not sorted by kind: row 3"),
    ("tensors", {"fqn": ["bias", "embed", "embed", "nothing", "x", "y"]}, "sorted by name: row 2"),
    ("tensors", {"fqn": ["bias", "embed", "head", "nothing", "y", "x"]}, "sorted by name: row 5"),
    ("tensors", {"itemsize": [0, 2, 2, 4, 4, 4]}, "item size: row 0"),
    ("tensors", {"itemsize": [4, 3, 3, 4, 4, 4]}, "item size: row 1 and 1 more"),
    ("tensors", {"itemsize": [HUGE, 2, 2, 4, 4, 4]}, "item size"),
    ("tensors", {"ndim": [0, 2, 2, 2, 2, 3]}, "number of dimensions: row 5"),
    ("tensors", {"ndim": [-1, 2, 2, 2, 2, 2]}, "number of dimensions: row 0"),
    ("tensors", {"ndim": [0, 2, 2, 2, 2, 1]}, "more dimensions: row 5"),
    ("tensors", {"shape": [[1, 1], [4, 6], [4, 6], [0, -3], [4, 6], [4, 6]]}, "negative.* row 3"),
    ("tensors", {"shape": [[1, 1], [4, 6], [4, 6], [0, 3], [HUGE, HUGE], [4, 6]]}, "impossible shape"),
    (
        "tensors",
        {"shape": [[1, 1], [HUGE // 8, 1], [HUGE // 8, 1], [0, 3], [4, 6], [4, 6]]},
        "outside its tensor: row 1",
    ),
    ("tensors", {"shape": [[1, 1], *[[HUGE // 2, 1]] * 5], "itemsize": [1] * 6}, "impossible total"),
    ("tensors", {"shape": [[4], [4], [4], [0], [4], [4]]}, "1 dimensions and strides 2"),
    ("tensors", {"shape": [[1] * 65] * 6, "stride": [[0] * 65] * 6}, "65 dimensions"),
    ("tensors", {"stride": [[1, 0], [6, 1], [6, 1], [3, 1], [6, 1], [6, 1]]}, "more dimensions: row 0"),
    ("tensors", {"stride": [[0, 0], [6, 1], [6, -1], [3, 1], [6, 1], [6, 1]]}, "negative.* row 2"),
    ("tensors", {"requires_grad": [1, 1, 1, 2, 0, 0]}, "gradient.* row 3"),
    ("tensors", {"tied_to": ["", "", "missing", "", "", ""]}, "missing"),
    ("tensors", {"tied_to": ["", "", "head", "", "", ""]}, "not stored"),
    ("tensors", {"tied_to": ["", "", "bias", "", "", ""]}, "another shape"),
    ("tensors", {"tied_to": ["embed", "", "embed", "", "", ""]}, "another shape"),
    ("tensors", {"tied_to": ["", "", "embed", "", "", "exp_avg.embed"]}, "led and tied: row 5"),
    ("tensors", {"leader": [0, 1, 1, 1, 1, 2]}, "led by none: row 5"),
    ("tensors", {"leader": [-1, 2, 1, 1, 1, 0]}, "led by none: row 0"),
    ("tensors", {"leader": [HUGE, HUGE, HUGE, HUGE, 1, 0]}, "led by none"),
    ("tensors", {"leader": [0, 1, 1, 1, 2, -1]}, "follows another: row 4"),
    ("tensors", {"leader": [0, 1, 0, 2, 1, 0]}, "led and tied: row 2"),
    ("tensors", {"leader": [0, 1, 1, 0, 2, 0]}, "led and tied: row 3"),
    ("tensors", {"leader": [0, 1, 1, 1, 1, -1]}, "not like it: row 5"),
    ("tensors", {"leader": [0, 0, 2, 1, 1, 0]}, "not like it: row 1"),
    (
        "tensors",
        {"leader": [0, 1, 1, 1, 1, 0], "shape": [[1, 1], *[[4, 6]] * 2, [0, 3], [4, 6], [6, 4]]},
        "another shape: row 5",
    ),
    ("tensors", {"leader": [0, 1, 1, 1, 1, -3]}, "not like it: row 5"),
    ("tensors", {"leader": [0, 1, 1, 1, 1, 1]}, "pieces do not add up|do not add up to it: row 5"),
    ("tensors", {"plane": [0, 1, 1, 0, 0, 2]}, "in no plane: row 5"),
    ("tensors", {"plane": [-1, 1, 1, 0, 0, 1]}, "in no plane: row 0"),
    ("tensors", {"plane": [HUGE, 1, 1, 0, 0, 1]}, "in no plane: row 0"),
    ("tensors", {"plane": [0, 1, 1, 0, 0, 0]}, "plane of another.*: row 5"),
    ("tensors", {"plane": [0, 0, 1, 0, 0, 1]}, "another item size: row 0"),
    ("tensors", {"pieces": [1, 2, 0, 0, 2, 0]}, "pieces do not add up"),
    ("tensors", {"pieces": [1, 2, 0, -1, 2, 0]}, "pieces do not add up"),
    ("tensors", {"pieces": [HUGE, HUGE, HUGE, HUGE, 4, 0]}, "pieces do not add up"),
    ("tensors", {"pieces": [1, 1, 1, 0, 1, 0]}, "add up to it: row 1 and 1 more"),
    ("tensors", {"pieces": [1, 2, 0, 0, 0, 1]}, "add up to it: row 4 and 1 more"),
    ("pieces", {"offset": [[0, 0], [0, 0], [0, 4], [0, 0]]}, "outside its tensor: row 2"),
    ("pieces", {"offset": [[0, 0], [0, 0], [0, -1], [0, 0]]}, "outside its tensor: row 2"),
    ("pieces", {"offset": [[0, 0], [0, 0], [0, MOST], [0, 0]]}, "outside its tensor: row 2"),
    ("pieces", {"offset": [[0], [0], [0], [0]]}, "numbers of dimensions"),
    ("pieces", {"length": [[1, 1], [4, 3], [4, 2], [4, 6]]}, "add up"),
    ("pieces", {"length": [[1, 1], [4, 3], [4, HUGE], [4, 6]]}, "outside its tensor"),
    ("pieces", {"length": [[1, 1], [4, 3], [4, 0], [4, 6]]}, "outside its tensor"),
    ("pieces", {"file": [0, 0, 1, -2]}, "in no file: row 3"),
    ("pieces", {"file": [0, 0, 1, 2]}, "in no file: row 3"),
    ("pieces", {"file": [0, 0, 1, 0]}, "outside its file: row 3"),
    ("pieces", {"file": [2, -2, 1, 1]}, "outside its file: row 0"),
    ("pieces", {"file": [MOST, MOST, MOST, MOST]}, "impossible files"),
    ("patterns", {"segments": [1, 2, 1, 3]}, "segments do not add up"),
    ("patterns", {"segments": [0, 3, 1, 2]}, "without segments: row 0"),
    ("patterns", {"segments": [1, 1, 2, 2]}, "add up to it: row 1 and 1 more"),
    ("pieces", {"pattern": [0, 1, 2, 4]}, "no pattern: row 3"),
    ("pieces", {"pattern": [0, 1, 2, -1]}, "no pattern: row 3"),
    ("pieces", {"pattern": [0, 1, 2, 2]}, "add up to it: row 3"),
    ("pieces", {"pattern": [0, 1, 2, HUGE]}, "no pattern: row 3"),
    (
        "pieces",
        {"offset": [[0, 0], [0, 0], [0, 2], [0, 0]], "length": [[1, 1], [4, 2], [4, 4], [4, 6]]},
        "add up to it: row 1 and 1 more",
    ),
    ("segments", {"length": [1, 5, 7, 12, 11, 12]}, "add up to it: row 3"),
    ("segments", {"length": [1, 5, 7, 12, 24, 0]}, "without elements.*: row 5|outside its file: row 4"),
    ("segments", {"length": [1, 5, 7, 12, -11, 35]}, "without elements.*: row 4"),
    ("segments", {"length": [1, 5, 7, 12, HUGE, HUGE]}, "impossible total length"),
    ("segments", {"length": [1, 5, 7, 12, MOST, MOST]}, "impossible total length"),
    ("segments", {"length": [1, 5, 7, 12, 12, 12]}, "outside its file: row 3"),
    ("segments", {"file": [0, 0, 1, 0, 0, 2]}, "in no file: row 3"),
    ("segments", {"file": [0, 0, 1, 0, 0, -3]}, "in no file: row 3"),
    ("segments", {"file": [0, 0, 1, 0, 0, MOST]}, "impossible files"),
    ("segments", {"file": [0, 0, 1, 2, 0, 1]}, "outside its file: row 2"),
    ("segments", {"at": [0, 0, 0, 8, 0, 0]}, "outside its file: row 2"),
    ("segments", {"at": [0, 0, 0, 7, 0, 1]}, "outside its file: row 3"),
    ("segments", {"at": [0, 0, 0, -1, 0, 0]}, "outside its file: row 3"),
    ("segments", {"at": [0, 0, 0, 7, 0, MOST]}, "outside its file: row 5"),
    ("files", {"kind": [0, 0, 1, 9]}, "unknown kind: row 3"),
    ("files", {"kind": [0, 0, 1, 2]}, "outside its file: row 3"),
    ("files", {"rank": [0, 1, -1, 2]}, "outside the world: row 3"),
    ("files", {"rank": [0, 0, 0, 1]}, "two files.*: row 1"),
    ("files", {"nbytes": [14, 38, 88, -1]}, "impossible size: row 3"),
    ("files", {"nbytes": [14, HUGE - 1, 88, HUGE - 1]}, "impossible total"),
    ("files", {"nbytes": [14, 38, 88, 103]}, "outside its file: row 3"),
    ("files", {"planes": [[0, 4], [0, 0], [0, 44], [0, -52]]}, "plane outside it: row 3"),
    ("files", {"planes": [[0, 4], [0, 0], [0, 44], [0, 108]]}, "plane outside it: row 3"),
    ("files", {"planes": [[0, 4], [0, 0], [0, 44], [0, 54]]}, "misaligned plane: row 3"),
    ("files", {"planes": [[0, 5], [0, 0], [0, 44], [0, 52]]}, "misaligned plane: row 0"),
    ("files", {"planes": [[0, 4], [0, 0], [0, 48], [0, 52]]}, "outside its file: row 3"),
    ("files", {"planes": [[0], [0], [0], [0]]}, "in no plane"),
    ("objects", {"kind": ["optimizer", "../../etc"]}, "unknown kind"),
    ("objects", {"path": ["step", "step"]}, "two objects"),
    ("objects", {"rank": [0, -1]}, "outside the world"),
    ("extras", {"kind": [4]}, "unknown kind"),
    ("extras", {"rank": [7]}, "outside the world"),
    ("commit", {"digest": [b"a" * 16]}, "1 receipts for a world of 2"),
    ("commit", {"digest": [b"a" * 16] * 3}, "3 receipts for a world of 2"),
    ("commit", {"digest": []}, "0 receipts for a world of 2"),
]


def read_all(data: bytes) -> Layout:
    """Open a checkpoint, and look at every segment."""
    layout = decode_metadata(data, WHERE).layout
    with translated(WHERE):
        check_segments(layout)
    return layout


@pytest.mark.parametrize(("table", "columns", "message"), FORGERIES)
def test_forged_numbers_are_refused(table: str, columns: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptError, match=rf"{WHERE} is corrupt.*(?:{message})"):
        read_all(forged(table, **columns))


def test_lengths_whose_sum_wraps_around_are_refused() -> None:
    room = HUGE // 2 - 2048  # elements of two bytes
    lengths = [1, 5, 7, *[room] * 8, 2**64 + 12 - 8 * room, 11, 13]  # those of the third box: 12, modulo 2^64
    changes = {
        "patterns": {"segments": [1, 2, 9, 2]},
        "segments": {"length": lengths, "file": [0, 0, 1, *[0] * 10, 1], "at": [0] * 14},
        "files": {"nbytes": [14, 2 * room, 88, 104]},
    }
    tables = {name: encoded(name, STORED[name] | columns) for name, columns in changes.items()}
    with pytest.raises(CorruptError, match="impossible total length"):
        decode_metadata(assembled(**tables), WHERE)


def test_a_forgery_without_changes_is_the_original() -> None:
    assert assembled() == DATA


def test_columns_are_stored_in_the_narrowest_integers_and_read_in_any() -> None:
    assert {str(field.type) for field in FOUND["segments"].schema} == {"int8"}
    assert [
        str(field.type)
        for field in read_tables(forged("files", nbytes=[14, 40_000, 88, 104])[:-24], [*TABLES.values()])[6].schema
    ][2] == "int32"
    arrays = [pa.array(column, type=pa.int64()) for column in STORED["segments"].values()]
    found = decode_metadata(assembled(segments=raw("segments", arrays)), WHERE).layout
    for name in ("file", "pattern", "begin", "line", "step", "at"):
        np.testing.assert_array_equal(getattr(found.segments, name), getattr(LAYOUT.segments, name))


@pytest.mark.parametrize("kind", [pa.uint8(), pa.float64(), pa.string(), pa.list_(pa.int8(), 1)])
def test_columns_of_other_types_are_refused(kind: pa.DataType) -> None:
    column: list[Any] = [[0]] * 6 if pa.types.is_fixed_size_list(kind) else ["0" if kind == pa.string() else 0] * 6
    arrays = [pa.array(column, type=kind), *(pa.array(one) for one in [*STORED["segments"].values()][1:])]
    with pytest.raises(
        CorruptError, match=f"'segments' has other columns: length {kind}".replace("[", ".").replace("]", ".")
    ):
        decode_metadata(assembled(segments=raw("segments", arrays)), WHERE)


def out_of_bounds(layout: Layout) -> bool:
    """Find out the slow way whether any byte of any element lies outside its file, or across an element."""
    for tensor, leader in enumerate(layout.leader.tolist()):
        itemsize, seen = int(layout.tensors.itemsize[tensor]), 0
        segments = layout.segments
        everything = segments.of_boxes(np.arange(len(layout.offset)))
        for box, segment in zip(*(column.tolist() for column in everything), strict=True):
            if layout.box_tensor[box] == leader:
                file, length = int(segments.file[box] + segments.step[segment]), int(segments.length[segment])
                begin = int(layout.file_planes[file, layout.plane[tensor]]) + int(segments.at[segment]) * itemsize
                fits = 0 <= begin <= begin + length * itemsize <= layout.file_nbytes[file] and length > 0
                seen += length
                if not fits or begin % itemsize or layout.file_kind[file] != layout.tensors.kind[tensor]:
                    return True
        if seen != (0 if layout.tensors.tied_to[tensor] else int(layout.tensors.numel[tensor])):
            return True
    return False


NUMBERS = st.sampled_from([-(2**63), -4, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12, 2**31, 2**62, 2**63 - 1])
PLACES = [
    (name, field.name, row)
    for name, of in TABLES.items()
    for field in of
    if field.type in (INT, GRID)
    for row in range(len(STORED[name][field.name]))
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), st.integers(0, 1), NUMBERS, st.booleans()), min_size=1, max_size=3))
def test_any_forged_numbers_are_either_sound_or_refused(
    changes: list[tuple[tuple[str, str, int], int, int, bool]],
) -> None:
    tables = {name: {key: list(column) for key, column in columns.items()} for name, columns in STORED.items()}
    for (name, key, row), inside, number, relative in changes:
        old = tables[name][key][row]
        value = max(-(2**63), min(2**63 - 1, number + (old[inside] if isinstance(old, list) else old) * relative))
        tables[name][key][row] = [*old[:inside], value, *old[inside + 1 :]] if isinstance(old, list) else value
    data = assembled(**{name: encoded(name, columns) for name, columns in tables.items()})
    try:
        layout = decode_metadata(data, WHERE).layout
    except CorruptError:
        return
    forged_bounds = out_of_bounds(layout)
    try:  # whoever looks at all segments, or wants them all, finds out
        check_segments(layout)
    except ValueError:
        pass
    else:
        assert not forged_bounds
        encode_layout(layout)  # no reader would refuse it
    rows = [ShardRow(layout.tensors[row], Box.whole(layout.tensors[row].shape)) for row in range(len(layout.tensors))]
    if forged_bounds:
        with pytest.raises(CorruptError, match="the metadata is corrupt"):
            wants(layout, ShardTable.build(rows))
    else:
        wants(layout, ShardTable.build(rows))


def test_missing_values_are_refused() -> None:
    for table, column, of in (
        ("files", "nbytes", pa.int8()),
        ("tensors", "fqn", pa.string()),
        ("tensors", "shape", pa.list_(pa.int8(), 2)),
        ("commit", "digest", pa.binary(16)),
    ):
        rows = [
            pa.array(STORED[table][key], type=field.type)
            for key, field in zip(STORED[table], FOUND[table].schema, strict=True)
        ]
        at = TABLES[table].names.index(column)
        rows[at] = pa.array([None, *STORED[table][column][1:]], type=of)
        with pytest.raises(CorruptError, match="missing values"):
            decode_metadata(assembled(**{table: raw(table, rows)}), WHERE)


def test_missing_values_inside_are_refused() -> None:
    planes = pa.array([[0, 4], [0, None], [0, 44], [0, 52]], type=pa.list_(pa.int8(), 2))
    columns = [pa.array(column) for column in STORED["files"].values()][:3]
    with pytest.raises(CorruptError, match="missing values"):
        decode_metadata(assembled(files=raw("files", [*columns, planes])), WHERE)
    kinds = pa.DictionaryArray.from_arrays(pa.array([0, 0], type=pa.int32()), pa.array([None], type=pa.string()))
    others = [pa.array(STORED["objects"][key]) for key in ("path", "rank")]
    with pytest.raises(CorruptError, match="missing values"):
        decode_metadata(assembled(objects=raw("objects", [kinds, *others])), WHERE)


def test_words_outside_their_dictionary_are_refused() -> None:
    for index in (-1, 1, 2**31 - 1):
        indices = pa.array([0, index], type=pa.int32())
        kinds = pa.DictionaryArray.from_arrays(indices, pa.array(["model"]), safe=False)
        others = [pa.array(STORED["objects"][key]) for key in ("path", "rank")]
        with pytest.raises(CorruptError, match=WHERE):
            decode_metadata(assembled(objects=raw("objects", [kinds, *others])), WHERE)


@pytest.mark.parametrize("batches", [0, 2])
def test_tables_of_other_than_one_batch_are_refused(batches: int) -> None:
    arrays = [pa.array(column) for column in STORED["segments"].values()]
    assert decode_metadata(assembled(segments=raw("segments", arrays)), WHERE)
    with pytest.raises(CorruptError, match=f"{batches} record batches"):
        decode_metadata(assembled(segments=raw("segments", arrays, batches)), WHERE)


def test_other_tables_are_refused() -> None:
    layout = encode_layout(LAYOUT)
    first = DATA[:-24].removesuffix(layout)
    other = encode_table(pa.schema([pa.field("x", INT, nullable=False)], metadata=COMMIT.metadata), [[1]])
    for payload, message in (
        (layout + first, "not where it should be"),
        (first, "corrupt"),
        (other + layout, "other columns"),
        (first + layout + first, "follow the last table"),
        (b"", "corrupt"),
        (first, "corrupt"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f" + layout, "corrupt"),
    ):
        with pytest.raises(CorruptError, match=message):
            decode_metadata(seal(payload, MAGIC), WHERE)


@pytest.mark.parametrize(
    "facts",
    [
        "not json",
        "[]",
        "{}",
        {"operation": "../../../../etc/"},
        {"operation": "0123456789ABCDEF"},
        {"codecs": [1]},
        {"codecs": "zstd"},
        {"part_bytes": 0},
        {"part_bytes": 2**62},
        {"part_bytes": 100_001},
        {"part_bytes": True},
        {"created": None},
    ],
)
def test_a_forged_commit_is_refused(facts: str | dict[str, object]) -> None:
    text = facts if isinstance(facts, str) else json.dumps(json.loads(FACTS) | facts)
    with pytest.raises(CorruptError, match=WHERE):
        decode_metadata(assembled(commit=encoded("commit", STORED["commit"], text)), WHERE)
