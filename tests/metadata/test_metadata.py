from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pytest
from handmade import LAYOUT, OPERATION, TENSORS, commit, ints
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.container import digest, encode_table, read_tables, seal
from bcp.errors import CheckpointError, CorruptError, FormatVersionError, InputError, NotACheckpointError
from bcp.layout_file import LAYOUT_TABLES
from bcp.metadata import (
    COMMIT,
    MAGIC,
    data_key,
    decode_layout,
    decode_metadata,
    encode_layout,
    encode_metadata,
    layout_digest,
    operation_of,
    receipt_key,
)
from bcp.plan.layout import Layout
from bcp.plan.shards import TensorTable

RECEIPTS = {0: b"a" * 16, 1: b"\x00" * 16}
DATA = encode_metadata(encode_layout(LAYOUT), commit(RECEIPTS))
WHERE = "run/metadata.arrow"


def same(one: Layout, two: Layout) -> bool:
    def equal(a: object, b: object) -> bool:
        if isinstance(a, np.ndarray):
            return np.array_equal(a, b) and a.dtype == b.dtype
        if isinstance(a, TensorTable):
            return all(equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
        return list(a) == list(b) if isinstance(a, Sequence) else a == b

    return all(equal(getattr(one, f.name), getattr(two, f.name)) for f in fields(one))


# -- round trips --------------------------------------------------------------------------------


def test_round_trip() -> None:
    found = decode_metadata(DATA, WHERE)
    assert same(LAYOUT, found.layout)
    assert found.commit == commit(RECEIPTS)
    assert [found.layout.tensors[row] for row in range(len(TENSORS))] == TENSORS


def test_an_empty_layout_round_trips() -> None:
    nothing = {field.name: ints() for field in fields(Layout)}
    matrices = {"offset": np.empty((0, 0), dtype=np.int64), "length": np.empty((0, 0), dtype=np.int64)}
    empty = Layout(
        **nothing | matrices | {"world_size": 1, "block_bytes": 16, "tensors": TensorTable.build([]), "objects": []}
    )
    assert same(empty, decode_layout(encode_layout(empty)))


def test_encoding_is_deterministic_and_does_not_depend_on_the_save() -> None:
    again = decode_layout(encode_layout(LAYOUT))
    assert encode_layout(again) == encode_layout(LAYOUT)
    assert layout_digest(encode_layout(again)) == layout_digest(encode_layout(LAYOUT))
    assert DATA.startswith(encode_layout(LAYOUT))
    other = encode_metadata(encode_layout(LAYOUT), replace(commit(RECEIPTS), operation="f" * 16))
    assert other.startswith(encode_layout(LAYOUT))
    assert encode_metadata(encode_layout(LAYOUT), commit(dict(reversed(RECEIPTS.items())))) == DATA


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
    with pytest.raises(FormatVersionError, match=r"version 7 of the format, this bcp reads version 1"):
        decode_metadata(DATA[:-1] + b"\x07", WHERE)
    with pytest.raises(NotACheckpointError, match=r"metadata.arrow \(11 bytes\) was not written by bcp"):
        decode_metadata(b"hello world", WHERE)
    with pytest.raises(NotACheckpointError, match="BCPMETA"):
        decode_metadata(seal(b"", b"BCPRCPT"), WHERE)


# -- hostile contents: the checksum is right, the numbers are not --------------------------------


def forged(table: str, **columns: object) -> bytes:
    """Return the metadata file with some columns replaced, sealed again."""
    tables = read_tables(DATA[:-24], (*LAYOUT_TABLES, COMMIT))
    parts = []
    for of, found in zip((*LAYOUT_TABLES, COMMIT), tables, strict=True):
        mine = of.metadata[b"bcp.table"].decode() == table
        rows = [columns[name] if mine and name in columns else found.column(name).to_pylist() for name in of.names]
        facts = (
            {"commit": found.schema.metadata[b"bcp.commit"].decode()} if b"bcp.commit" in found.schema.metadata else {}
        )
        parts.append(encode_table(of, rows, **facts))
    return seal(b"".join(parts), MAGIC)


HUGE = 2**62

FORGERIES = [
    ("layout", {"world_size": [0]}, "world_size"),
    ("layout", {"world_size": [2, 2], "block_bytes": [16, 16]}, "2 rows"),
    ("layout", {"world_size": [], "block_bytes": []}, "0 rows"),
    ("layout", {"world_size": [2**62]}, "world_size"),
    ("layout", {"block_bytes": [24]}, "block_bytes"),
    ("layout", {"block_bytes": [2**62]}, "block_bytes"),
    ("tensors", {"kind": [0, 0, 0, 0, 4]}, "unknown kind"),
    ("tensors", {"kind": [0, 0, 0, 0, -1]}, "unknown kind"),
    ("tensors", {"fqn": ["bias", "embed", "embed", "nothing", "x"]}, "sorted"),
    ("tensors", {"itemsize": [0, 2, 2, 4, 4]}, "item size"),
    ("tensors", {"itemsize": [HUGE, 2, 2, 4, 4]}, "item size"),
    ("tensors", {"shape": [[], [4, 6], [4, 6], [0, -3], [4, 6]]}, "negative"),
    ("tensors", {"shape": [[], [4, 6], [4, 6], [0, 3], [HUGE, HUGE]]}, "impossible shape"),
    ("tensors", {"shape": [[], [4, 6], [4, 6], [0, 3], [4, 6, 1]]}, "dimensions"),
    ("tensors", {"shape": [[1] * 65, [4, 6], [4, 6], [0, 3], [4, 6]]}, "65 dimensions"),
    ("tensors", {"stride": [[1], [6, 1], [6, 1], [3, 1], [6, 1]]}, "dimensions"),
    ("tensors", {"tied_to": ["", "", "missing", "", ""]}, "missing"),
    ("tensors", {"tied_to": ["", "", "head", "", ""]}, "not stored"),
    ("tensors", {"tied_to": ["", "", "bias", "", ""]}, "another shape"),
    ("tensors", {"tied_to": ["embed", "", "embed", "", ""]}, "another shape"),
    ("tensors", {"pieces": [1, 2, 0, 0, 2]}, "pieces do not add up"),
    ("tensors", {"pieces": [1, 2, 0, -1, 2]}, "pieces do not add up"),
    ("tensors", {"pieces": [HUGE, HUGE, HUGE, HUGE, 4]}, "pieces do not add up"),
    ("tensors", {"pieces": [1, 1, 1, 0, 1]}, "pieces do not add up|do not add up to it"),
    ("pieces", {"offset": [[], [0, 0], [0, 4], [0, 0]]}, "outside its tensor"),
    ("pieces", {"offset": [[], [0, 0], [0, -1], [0, 0]]}, "outside its tensor"),
    ("pieces", {"length": [[], [4, 3], [4, 2], [4, 6]]}, "add up"),
    ("pieces", {"length": [[], [4, 3], [4, HUGE], [4, 6]]}, "outside its tensor"),
    ("pieces", {"segments": [1, 2, 1, 3]}, "segments do not add up"),
    ("pieces", {"segments": [0, 3, 1, 2]}, "add up|outside"),
    ("segments", {"length": [1, 5, 7, 12, 11, 12]}, "add up"),
    ("segments", {"length": [1, 5, 7, 12, 24, 0]}, "outside"),
    ("segments", {"length": [1, 5, 7, 12, -11, 35]}, "outside"),
    ("segments", {"length": [1, 5, 7, 12, HUGE, HUGE]}, "outside"),
    ("segments", {"file": [0, 0, 1, 1, 2, 4]}, "in no file"),
    ("segments", {"file": [0, 0, 1, 1, 2, -1]}, "in no file"),
    ("segments", {"offset": [0, 4, 0, 16, 0, 0]}, "outside its file"),
    ("segments", {"offset": [0, 4, 0, 13, 0, 0]}, "misplaced"),
    ("segments", {"offset": [0, 4, 0, -2, 0, 0]}, "misplaced"),
    ("segments", {"offset": [0, 4, 0, 14, 0, HUGE]}, "misplaced"),
    ("files", {"kind": [0, 0, 1, 9]}, "unknown kind"),
    ("files", {"rank": [0, 1, 0, 2]}, "outside the world"),
    ("files", {"rank": [0, 0, 0, 1]}, "two files"),
    ("files", {"nbytes": [14, 38, 44, -1]}, "impossible size"),
    ("files", {"nbytes": [14, HUGE - 1, 44, HUGE - 1]}, "impossible total"),
    ("objects", {"kind": ["optimizer", "../../etc"]}, "unknown kind"),
    ("objects", {"path": ["step", "step"]}, "two objects"),
    ("objects", {"rank": [0, -1]}, "outside the world"),
    ("extras", {"kind": [4]}, "unknown kind"),
    ("extras", {"rank": [7]}, "outside the world"),
    ("commit", {"rank": [0, 0]}, "receipts"),
    ("commit", {"rank": [0, 2]}, "receipts"),
    ("commit", {"rank": [0], "digest": [b"a" * 16]}, r"receipts of ranks \[1\]"),
]


@pytest.mark.parametrize(("table", "columns", "message"), FORGERIES)
def test_forged_numbers_are_refused(table: str, columns: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptError, match=rf"{WHERE} is corrupt.*(?:{message})"):
        decode_metadata(forged(table, **columns), WHERE)


def test_a_forgery_without_changes_is_the_original() -> None:
    assert forged("none") == DATA


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_forged_number_is_either_sound_or_refused(data: st.DataObject) -> None:
    of = data.draw(st.sampled_from([*LAYOUT_TABLES]))
    column = data.draw(
        st.sampled_from([field.name for field in of if field.type in (pa.int64(), pa.list_(pa.int64()))])
    )
    tables = dict(zip(LAYOUT_TABLES, read_tables(DATA[:-24], (*LAYOUT_TABLES, COMMIT))[:-1], strict=True))
    numbers = tables[of].column(column).to_pylist()
    row = data.draw(st.integers(0, len(numbers) - 1))
    number = st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 4, 6, 2**31, 2**62, 2**63 - 1])
    value = data.draw(number if isinstance(numbers[row], int) else st.lists(number, max_size=3))
    try:
        found = decode_metadata(
            forged(of.metadata[b"bcp.table"].decode(), **{column: [*numbers[:row], value, *numbers[row + 1 :]]}), WHERE
        )
    except CorruptError:
        return
    encode_layout(found.layout)  # checks it


def test_missing_values_are_refused() -> None:
    for table, column in (("files", "nbytes"), ("tensors", "fqn"), ("tensors", "requires_grad"), ("commit", "digest")):
        tables = {of.metadata[b"bcp.table"].decode(): of for of in (*LAYOUT_TABLES, COMMIT)}
        rows = (
            dict(zip(tables, read_tables(DATA[:-24], tuple(tables.values())), strict=True))[table]
            .column(column)
            .to_pylist()
        )
        with pytest.raises(CorruptError, match="missing values"):
            decode_metadata(forged(table, **{column: [None, *rows[1:]]}), WHERE)
    with pytest.raises(CorruptError, match="dimensions"):
        decode_metadata(forged("tensors", shape=[[], [4, None], [4, 6], [0, 3], [4, 6]]), WHERE)


def test_other_tables_are_refused() -> None:
    layout, rest = encode_layout(LAYOUT), DATA[:-24][len(encode_layout(LAYOUT)) :]
    other = encode_table(pa.schema([pa.field("x", pa.int64(), nullable=False)], metadata=COMMIT.metadata), [[1]])
    for payload, message in (
        (rest + layout, "not where it should be"),
        (layout, "corrupt"),
        (layout + other, "other columns"),
        (layout + rest + rest, "follow the last table"),
        (b"", "corrupt"),
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
    about = {
        name: getattr(commit(RECEIPTS), name)
        for name in ("operation", "created", "framework", "codecs", "part_bytes", "version")
    }
    text = facts if isinstance(facts, str) else json.dumps(about | facts)
    payload = encode_layout(LAYOUT) + encode_table(COMMIT, ([0, 1], [b"a" * 16] * 2), commit=text)
    with pytest.raises(CorruptError, match=WHERE):
        decode_metadata(seal(payload, MAGIC), WHERE)


def test_a_layout_that_no_reader_would_accept_is_not_written() -> None:
    with pytest.raises(InputError, match="gap or overlap"):
        encode_layout(replace(LAYOUT, segment_start=ints(0, 0, 4, 0, 0, 11)))
    with pytest.raises(InputError, match="add up"):
        encode_layout(replace(LAYOUT, file_nbytes=ints(14, 38, 44, 52), piece_tensor=ints(0, 1, 2, 4)))


# -- names of files -----------------------------------------------------------------------------


def test_names_of_files() -> None:
    assert data_key(0, 3, OPERATION, encoded=False) == f"model/00003-{OPERATION}.safetensors"
    assert data_key(3, 100_096, OPERATION, encoded=True) == f"extra_states/100096-{OPERATION}.bcp"
    assert receipt_key(3, OPERATION) == f"receipts/00003-{OPERATION}.arrow"


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
