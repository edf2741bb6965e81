from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcp.errors import CorruptError
from bcp.plan.box import Box
from bcp.plan.divide import Writes
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.wire import decode_table, decode_writes, digest, encode_table, encode_writes

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
def test_tables_survive(table):
    again = decode_table(encode_table(table))
    assert same(again, table)
    assert digest(again) == digest(table)


def test_an_empty_table_survives():
    assert same(decode_table(encode_table(ShardTable.build([]))), ShardTable.build([]))


@given(st.lists(st.tuples(*[st.integers(0, 1 << 60)] * 4)))
def test_writes_survive(rows):
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    assert same(decode_writes(encode_writes(Writes(*columns))), Writes(*columns))


def test_digest_is_16_bytes_that_never_change():
    assert digest(build()) == digest(build())
    assert digest(build()).hex() == "2a2b9f23b46655ae8888bb6921f82999"


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
def test_damaged_bytes_are_refused(damage):
    with pytest.raises(CorruptError, match="from another rank are damaged"):
        decode_table(damage(encode_table(build())))


def test_another_message_is_refused():
    with pytest.raises(CorruptError, match="same version of bcp"):
        decode_table(encode_writes(Writes(*np.zeros((4, 1), dtype=np.int64))))
