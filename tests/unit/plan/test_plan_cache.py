from __future__ import annotations

from dataclasses import replace

import pytest

from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.plan.write.survey import digest, plan_id
from bcp.runtime.cache import LruCache

W = TensorMeta("model", "w", "float32", 4, (8, 4))


def mesh(ranks: int, tensor: TensorMeta = W, more: tuple[TensorMeta, ...] = ()) -> list[ShardTable]:
    """Shard the rows over the ranks; ``more`` tensors are replicated."""
    rows = tensor.shape[0] // ranks
    return [
        ShardTable.build(
            [
                ShardRow(tensor, Box((rank * rows, 0), (rows, tensor.shape[1]))),
                *(ShardRow(one, Box.whole(one.shape)) for one in more),
            ]
        )
        for rank in range(ranks)
    ]


def key(tables: list[ShardTable], balance: str = "split", block_bytes: int = 4096) -> bytes:
    return plan_id(b"".join(digest(table) for table in tables), balance=balance, block_bytes=block_bytes)


def test_the_same_layout_hits():
    cache = LruCache[bytes, str]()
    assert cache.get(key(mesh(4))) is None
    cache.put(key(mesh(4)), "plan")
    assert cache.get(key(mesh(4))) == "plan"
    assert (cache.hits, cache.misses) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        key(mesh(2)),
        key(mesh(8)),
        key(mesh(4)[::-1]),
        key(mesh(4)[:3]),
        key(mesh(4, replace(W, dtype="int32"))),
        key(mesh(4, replace(W, shape=(8, 5)))),
        key(mesh(4, replace(W, fqn="v"))),
        key(mesh(4, replace(W, kind="optimizer"))),
        key(mesh(4, more=(replace(W, fqn="lora"),))),
        key(mesh(4), balance="worst-fit"),
        key(mesh(4), block_bytes=8192),
    ],
)
def test_another_layout_never_hits(other):
    cache = LruCache[bytes, str]()
    cache.put(key(mesh(4)), "plan")
    assert cache.get(other) is None
    assert cache.misses == 1


def test_the_one_used_longest_ago_makes_room():
    cache = LruCache[bytes, int](capacity=2)
    cache.put(b"a", 1)
    cache.put(b"b", 2)
    assert cache.get(b"a") == 1
    cache.put(b"c", 3)
    assert cache.get(b"b") is None
    assert (cache.get(b"a"), cache.get(b"c"), len(cache)) == (1, 3, 2)


def test_putting_again_replaces_and_evicts_nothing():
    cache = LruCache[bytes, int](capacity=2)
    cache.put(b"a", 1)
    cache.put(b"b", 2)
    cache.put(b"a", 3)
    assert (cache.get(b"a"), cache.get(b"b")) == (3, 2)


def test_repr_shows_its_state():
    cache = LruCache[bytes, int](capacity=2)
    cache.get(b"a")
    assert repr(cache) == "LruCache(0 of 2 values, 0 hits, 1 misses)"


def test_no_room_is_refused():
    with pytest.raises(ValueError, match="capacity=0"):
        LruCache[bytes, int](capacity=0)
