from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcp.errors import DtypeMismatchError
from bcp.stages.memcpy import flat_to_bytes, torch_dtype, typed


@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=4).map(tuple), step=st.integers(1, 3))
def test_any_strides_come_out_in_row_major_order(data: st.DataObject, shape: tuple[int, ...], step: int) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    whole = torch.arange(float(torch.Size([n * step for n in shape]).numel())).view([n * step for n in shape])
    tensor = whole[tuple(slice(None, None, step) for _ in shape)].permute(order)
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    out = torch.zeros((stop - start) * 4, dtype=torch.uint8)
    flat_to_bytes(tensor, start, stop, out)
    assert torch.equal(out.view(torch.float32), tensor.reshape(-1)[start:stop])


@pytest.mark.parametrize("name", ["bool", "bfloat16", "float8_e5m2", "complex64", "complex128", "uint16", "int64"])
def test_every_dtype_travels_as_bytes(name: str) -> None:
    dtype = torch_dtype(name)
    raw = torch.randint(0, 2, (12 * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(3, 4)
    for view in (tensor, tensor.t(), tensor[:, 1:3]):
        out = torch.zeros(view.numel() * dtype.itemsize, dtype=torch.uint8)
        flat_to_bytes(view, 0, view.numel(), out)
        assert out.numpy().tobytes() == view.contiguous().view(-1).clone().view(torch.uint8).numpy().tobytes()


def test_unaligned_bytes_can_be_viewed_too() -> None:
    data = torch.arange(17, dtype=torch.uint8)
    assert typed(data, 1, (2, 2), torch.float32).view(torch.uint8).flatten().tolist() == list(range(1, 17))


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(DtypeMismatchError, match="float3"):
        torch_dtype("float3")
