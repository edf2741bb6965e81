"""Which tensors are plain memory, and bytes that are written past torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcp.plan.box import Box
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.stages import memcpy as memory
from bcp.stages.memcpy import ALIKE, CACHED_BYTES, HOLD_BYTES, addresses, bytes_at, move, writable, written


def table_of(*tensors: torch.Tensor) -> ShardTable:
    """Say that every tensor is whole, by itself."""
    metas = [
        TensorMeta("model", str(at), str(each.dtype).removeprefix("torch."), each.itemsize, tuple(each.shape))
        for at, each in enumerate(tensors)
    ]
    return ShardTable.build([ShardRow(meta, Box.whole(meta.shape)) for meta in metas])


def address(*tensors: torch.Tensor, same: bool = True) -> list[bool]:
    """Say which tensors can be written to as bytes; those that can are found where they are."""
    table = table_of(*tensors)
    found = writable(tensors, addresses(tensors, table), table.nbytes, np.full(len(tensors), same)).tolist()
    assert all(at in (0, tensor.data_ptr()) for at, tensor in zip(found, tensors, strict=True))
    return [at > 0 for at in found]


class Wrapper(torch.Tensor):
    """A tensor whose memory is somewhere else."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Named(torch.Tensor):
    """A subclass that changes nothing."""


PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: torch.zeros(3, 4),
    "0-d": lambda: torch.tensor(1.0),
    "bfloat16": lambda: torch.zeros(3, dtype=torch.bfloat16),
    "float8": lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
    "bool": lambda: torch.zeros(3, dtype=torch.bool),
    "complex": lambda: torch.zeros(3, dtype=torch.complex64),
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3)),
    "rows of another": lambda: torch.zeros(9, 4)[2:5],
    "a subclass that is one": lambda: torch.zeros(3).as_subclass(Named),
    "made in inference": torch.inference_mode()(lambda: torch.zeros(3)),
}
NOT_PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "columns of another": lambda: torch.zeros(9, 4)[:, 2:],
    "transposed": lambda: torch.zeros(3, 4).t(),
    "on no device": lambda: torch.zeros(3, device="meta"),
    "a conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "a negative": lambda: torch._neg_view(torch.zeros(3)),
    "a wrapper": lambda: Wrapper(torch.zeros(3)),
    "empty": lambda: torch.zeros(0, 3),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_plain_memory(make: Callable[[], torch.Tensor]) -> None:
    assert address(make()) == [True]


@pytest.mark.parametrize("make", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_what_is_no_plain_memory(make: Callable[[], torch.Tensor]) -> None:
    assert address(make()) == [False]


def test_another_dtype_than_was_saved_is_not_plain() -> None:
    assert address(torch.zeros(3), same=False) == [False]


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(3, dtype=torch.int32)])
def test_another_size_or_dtype_than_the_shard_is_not_plain(other: torch.Tensor) -> None:
    assert addresses([other], table_of(torch.zeros(3))).tolist() == [0]
    assert addresses([other], table_of(other)).tolist() == [other.data_ptr()]


def test_memory_that_another_one_fills_in_its_own_way_is_not_plain() -> None:
    base = torch.zeros(4, 4)
    assert address(base, base.t()) == [False, False]
    assert address(base.t()[1:], base[:1], base[3]) == [False, False, False]
    assert address(base[:2], base[2:].t()) == [True, False]
    table = table_of(base, base)
    found = writable([base, base], addresses([base, base], table), table.nbytes, np.array([True, False]))
    assert not found.any()  # the other one is converted


def test_tensors_that_share_memory_are_not_plain_and_neighbours_are() -> None:
    whole = torch.zeros(12)
    assert address(whole[:4], whole[3:6], whole[6:9], whole[9:]) == [False, False, True, True]
    assert address(whole, whole[2:3], whole[5:6]) == [False, False, False]


@given(st.binary(max_size=99), st.integers(0, 9))
def test_bytes_go_where_they_are_sent(data: bytes, at: int) -> None:
    target = torch.zeros(len(data) + at + 1, dtype=torch.uint8)
    bytes_at(target.data_ptr() + at, len(data))[:] = data
    assert bytes(target.numpy()) == bytes(at) + data + bytes(1)


@pytest.mark.parametrize("length", [1, HOLD_BYTES, HOLD_BYTES + 1, 3 * HOLD_BYTES])
def test_moves_of_any_length(length: int) -> None:
    source, target = torch.randint(0, 256, (2 * length,), dtype=torch.uint8), torch.zeros(2 * length, dtype=torch.uint8)
    ends = np.array([0, length], dtype=np.int64)
    move(target.data_ptr() + ends, source.data_ptr() + ends[::-1], np.array([length, length]))
    assert torch.equal(target, torch.cat((source[length:], source[:length])))


def pieces(sizes: list[int], gap: int) -> tuple[list[torch.Tensor], np.ndarray]:
    """Return pieces of one tensor, in another order than they have in memory, and where they begin."""
    whole = torch.randint(0, 256, (sum(sizes) + gap * len(sizes),), dtype=torch.uint8)
    ends = np.cumsum([size + gap for size in sizes]).tolist()
    found = [whole[end - size - gap : end - gap] for end, size in zip(ends, sizes, strict=True)]
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(len(sizes))).tolist()
    found = [found[at] for at in order]
    return found, np.array([piece.data_ptr() for piece in found], dtype=np.int64)


@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize(
    "sizes",
    [[5] * ALIKE, [4096] * (2 * CACHED_BYTES // 4096 + 1), [HOLD_BYTES] * ALIKE, [1] * 99 + [7] * 3, [0] * ALIKE],
    ids=lambda sizes: f"{len(sizes)} of {sizes[0]}",
)
def test_many_pieces_of_one_size_go_where_they_are_sent(sizes: list[int], gap: int) -> None:
    (sources, out_of), (targets, into) = pieces(sizes, gap), pieces(sizes, gap + 2)
    by_size = {size: [at for at, each in enumerate(sources) if len(each) == size] for size in sizes}
    pairs = [(at, to) for rows in by_size.values() for at, to in zip(rows, reversed(rows), strict=True)]
    source, target = (np.array(column) for column in zip(*pairs, strict=True))
    around = torch.tensor(targets[0].untyped_storage(), dtype=torch.uint8)
    fits = np.array([len(targets[to]) == len(sources[at]) for at, to in pairs])
    move(into[target[fits]], out_of[source[fits]], np.array([len(sources[at]) for at in source[fits].tolist()]))
    for at, to in np.array(pairs)[fits].tolist():
        assert torch.equal(targets[to], sources[at])
    written_to = torch.zeros(len(around), dtype=torch.bool)
    for to in target[fits].tolist():
        first = targets[to].storage_offset()
        written_to[first : first + len(targets[to])] = True
    after = torch.tensor(targets[0].untyped_storage(), dtype=torch.uint8)
    assert torch.equal(after[~written_to], around[~written_to]), "what lies between them was touched"


ONE_CALL = pytest.mark.parametrize("many", sorted({False, memory._TAKES_MANY}))  # older versions of torch cannot


@ONE_CALL
def test_autograd_learns_that_a_tensor_was_written_to(monkeypatch: pytest.MonkeyPatch, *, many: bool) -> None:
    monkeypatch.setattr(memory, "_TAKES_MANY", many)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    written([torch.ones(2), weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@ONE_CALL
def test_a_tensor_that_has_no_version_is_left_alone(monkeypatch: pytest.MonkeyPatch, *, many: bool) -> None:
    monkeypatch.setattr(memory, "_TAKES_MANY", many)
    with torch.inference_mode():
        made = torch.zeros(3)
    written([made])
    assert made.is_inference()
