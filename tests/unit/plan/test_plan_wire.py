from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcp._messages.planning import LARGEST, CatalogueColumns, Claim, Share
from bcp.errors import MessageError
from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.units import encode_claims
from bcp.plan.write import RankTable
from bcp.plan.write.divide import SHARE, WriteDivision
from bcp.plan.write.replicas import REPLICAS, ComparedReplicas
from bcp.plan.write.survey import (
    decode_catalogue,
    decode_flat,
    decode_share,
    decode_slots,
    digest,
    encode_catalogue,
    encode_flat,
    encode_shares,
    encode_slots,
)
from bcp.plan.write.world import factor

W = TensorMeta("model", "w", "float32", 4, (4, 6), (6, 1), "cuda", requires_grad=True)
ROWS = [ShardRow(W, Box((0, 0), (2, 6))), ShardRow(W, Box((2, 0), (2, 6)), 1, 7)]
TIED = TensorMeta("model", "v", "float32", 4, (4, 6), tied_to="w")
OBJECTS = [("optimizer", "lr")]


def build(rows=ROWS, objects=OBJECTS, extras=("dataloader",), more=(TIED,)) -> ShardTable:
    return ShardTable.build(rows, objects, extras, more)


def same(a: object, b: object) -> bool:
    """Compare tables of columns, types of the columns included."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if hasattr(a, "__dataclass_fields__"):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return list(a) == list(b)


metas = st.builds(
    TensorMeta,
    kind=st.sampled_from(["model", "optimizer"]),
    fqn=st.text(max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    itemsize=st.sampled_from([2, 4]),
    shape=st.lists(st.integers(0, 1 << 40), max_size=4).map(tuple),
    device=st.sampled_from(["cpu", "cuda"]),
    requires_grad=st.booleans(),
    tied_to=st.text(max_size=3),
)
tables = st.builds(
    ShardTable.build,
    st.lists(
        metas.flatmap(
            lambda m: st.builds(ShardRow, st.just(m), st.just(Box.whole(m.shape)), st.integers(0, 9), st.just(9))
        )
    ),
    st.lists(st.tuples(st.sampled_from(["model", "optimizer"]), st.text())),
    st.lists(st.sampled_from(["dataloader", "extra_states"]), unique=True),
    st.lists(metas),
)


@given(tables)
def test_catalogues_and_boxes_survive(table):
    factored = factor(table)
    assert same(decode_catalogue(encode_catalogue(factored.catalogue)), factored.catalogue)
    assert same(decode_slots(encode_slots(factored.slots)), factored.slots)


def test_nothing_survives():
    factored = factor(ShardTable.build([]))
    assert same(decode_catalogue(encode_catalogue(factored.catalogue)), factored.catalogue)
    assert same(decode_slots(encode_slots(factored.slots)), factored.slots)
    assert [len(column) for column in decode_flat(encode_flat(factored.flat))] == [0, 0, 0]


intervals = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 1 << 60), st.integers(0, 1 << 60)))


@given(intervals, intervals)
def test_flat_intervals_survive_and_can_be_joined(first, second):
    data = b"".join(encode_flat(np.array(rows, dtype=np.int64).reshape(-1, 3)) for rows in (first, second))
    assert list(zip(*(column.tolist() for column in decode_flat(data)), strict=True)) == first + second
    assert len(data) == 20 * len(first + second)


def test_what_each_rank_writes_survives():
    rows = np.array([(0, -1, 0, 1 << 40), (1, 2, 3, 4), (0, 0, 5, 6)], dtype=SHARE)
    owned = {1: np.array([2, 5])}
    units = {0: np.array([0, 3]), 1: np.array([4])}
    runs = np.array([(0, 3, -1, -1), (1, 2, 0, 2)], dtype=REPLICAS)
    replicas = ComparedReplicas(runs, np.array([0, 1, 1, 2, 2]), np.zeros(3, np.int64), 128)
    division = WriteDivision(None, rows, np.array([0, 1, 1, 3]), owned, units, replicas)  # type: ignore[arg-type] -- no layout is sent
    shares = [decode_share(data) for data in encode_shares(division)]
    assert [share.rows.tolist() for share in shares] == [rows[:1].tolist(), [], rows[1:].tolist()]
    assert [share.owned.tolist() for share in shares] == [[], [2, 5], []]
    assert [share.units.tolist() for share in shares] == [[0, 3], [4], []]
    assert [share.replicas.tolist() for share in shares] == [runs[:1].tolist(), runs.tolist(), runs[:1].tolist()]
    assert {share.compared for share in shares} == {128}


def test_digest_is_16_bytes_that_never_change():
    assert digest(build()) == digest(build())
    assert digest(build()).hex() == "e6fb8d40af3bc6a02cfeadf8bb254f34"


@pytest.mark.parametrize(
    "other",
    [
        *(
            build([replace(row, tensor=replace(W, **change)) for row in ROWS])
            for change in (
                {"fqn": "x"},
                {"kind": "optimizer"},
                {"dtype": "int32"},
                {"itemsize": 8},
                {"shape": (5, 6)},
                {"stride": (1, 4)},
                {"device": "cpu"},
                {"requires_grad": False},
                {"tied_to": "v"},
            )
        ),
        build([replace(ROWS[0], box=Box((1, 0), (2, 6))), ROWS[1]]),
        build([replace(ROWS[0], box=Box((0, 0), (3, 6))), ROWS[1]]),
        build([ROWS[0], replace(ROWS[1], start=2)]),
        build([ROWS[0], replace(ROWS[1], stop=8)]),
        build(ROWS[::-1]),
        build(ROWS[:1]),
        build(objects=[("model", "lr")]),
        build(objects=[("optimizer", "eps")]),
        build(objects=[]),
        build(extras=()),
        build(extras=("extra_states",)),
        build(more=()),
        build(more=(replace(TIED, tied_to=""),)),
    ],
)
def test_digest_changes_with_anything(other):
    assert digest(other) != digest(build())


def test_digest_tells_names_apart_that_join_alike():
    a, b = (
        ShardTable.build([], more=[TensorMeta("model", fqn, "int8", 1, ()) for fqn in names])
        for names in (("ab", "c"), ("a", "bc"))
    )
    assert digest(a) != digest(b)


@pytest.mark.parametrize("damage", [lambda d: d[:0], lambda d: d[: len(d) // 2], lambda d: b"x" * len(d)])
@pytest.mark.parametrize("what", ["catalogue", "slots", "flat", "share"])
def test_damaged_bytes_are_refused(what, damage):
    factored = factor(build())
    good, decode = {
        "catalogue": (encode_catalogue(factored.catalogue), decode_catalogue),
        "slots": (encode_slots(factored.slots), decode_slots),
        "flat": (encode_flat(np.zeros((1, 3), dtype=np.int64)) + b"x", decode_flat),
        "share": (Share(bytes(8), b"", b"", 0, bytes(SHARE.itemsize)).encode(), decode_share),
    }[what]
    bad = damage(good)
    if what == "flat" and not bad:
        assert len(decode(bad)[0]) == 0  # a rank may have none
        return
    with pytest.raises(MessageError, match="run the same version of bcp on all ranks"):
        decode(bad)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("width", pa.array([1])),
        ("width", pa.array([[2.0]])),
        ("width", None),
        ("fqn", pa.array([["v", None]])),
        ("family", pa.array([[0, None]])),
        ("object_path", pa.array([[1.5]])),
        ("twice", pa.array([[1]])),
    ],
)
def test_a_catalogue_of_other_columns_is_refused(name, column):
    good = CatalogueColumns.decode(encode_catalogue(factor(build()).catalogue))
    with pa.ipc.open_stream(pa.decompress(good.columns, good.nbytes, codec="zstd")) as stream:
        batch = stream.read_next_batch()
    columns = {each: batch.column(each) for each in batch.schema.names if each != name}
    pairs = [*columns.items(), *([] if column is None else [(name, column)] * (1 + (name == "twice")))]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([(each, values.type) for each, values in pairs])) as stream:
        stream.write_batch(pa.record_batch([values for _, values in pairs], names=[each for each, _ in pairs]))
    data = sink.getvalue()
    message = CatalogueColumns(len(data), pa.compress(data, codec="zstd", asbytes=True)).encode()
    with pytest.raises(MessageError, match="CatalogueColumns of rank 3 cannot be decoded"):
        decode_catalogue(message, sender=3)


def test_an_absurd_size_is_refused_before_memory_is_taken():
    message = CatalogueColumns.decode(encode_catalogue(factor(build()).catalogue))
    for nbytes in (LARGEST + 1, 1 << 60):
        with pytest.raises(MessageError, match="of rank 3 cannot be decoded"):
            decode_catalogue(CatalogueColumns(nbytes, message.columns).encode(), sender=3)


def share_of(owned=(0,), units=(1,), row=(0, -1, 0, 12)) -> bytes:
    numbers = (np.array(each, dtype="<i8").tobytes() for each in (owned, units))
    return Share(*numbers, b"", 0, np.array([row], dtype=SHARE).tobytes()).encode()


@pytest.mark.parametrize(
    "share",
    [
        *(share_of(owned=[number]) for number in (-1, 1, 1 << 62)),
        *(share_of(units=[number]) for number in (-1, 3)),
        *(share_of(row=(slot, -1, 0, 1)) for slot in (-1, 2, (1 << 31) - 1)),
        *(share_of(row=(0, member, 0, 1)) for member in (-2, 1, (1 << 31) - 1)),
        *(share_of(row=(0, 0, *interval)) for interval in ((-1, 1), (0, 13), (3, 2), (12, 1 << 62))),
        *(share_of(row=(1, 0, *interval)) for interval in ((0, 2), (6, 8))),
    ],
)
def test_a_share_of_what_the_rank_does_not_have_is_refused(share):
    rank = RankTable.of(replace(build(), units=encode_claims([Claim("train", 0, 1, ("a", "b"))])))
    plan = rank.plan(share_of())
    assert (plan.objects, plan.units, plan.writes.stop.tolist()) == (OBJECTS, ["train/a"], [12])
    with pytest.raises(MessageError, match=f"Share of rank 0 cannot be decoded, {len(share)} bytes"):
        rank.plan(share)


def test_rows_that_are_cut_off_are_refused():
    with pytest.raises(MessageError, match="no rows of"):
        decode_share(Share(b"", b"", b"", 0, bytes(SHARE.itemsize + 1)).encode())
    with pytest.raises(MessageError, match="no rows of 8"):
        decode_share(Share(bytes(7), b"", b"", 0, b"").encode())
