"""Which tensors are plain memory, and bytes that are written past torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcp.stages import memory
from bcp.stages.memory import HOLD_BYTES, addresses, bytes_at, move, written


def address(*tensors: torch.Tensor, dtypes: list[str] | None = None) -> list[bool]:
    """Say which tensors can be written to as bytes; those that can are found where they are."""
    names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors] if dtypes is None else dtypes
    found = addresses(tensors, names, np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)).tolist()
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
    three = torch.zeros(3)
    assert address(three, three.clone(), three.clone(), dtypes=["float32", "int32", ""]) == [True, False, False]


def test_another_size_than_the_shard_is_not_plain() -> None:
    assert addresses([torch.zeros(3)], ["float32"], np.array([16])).tolist() == [0]


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
