from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bcp.plan.write.divide import Writes
from bcp.plan.write.files import data_files
from bcp.planners.torch_native import PlainPlanner
from bcp.stages.gather import SMALL_BYTES, gather
from bcp.stages.items import WriteItem
from bcp.stages.memcpy import addresses

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.uint16,
]


def gathered(tensors: dict[str, torch.Tensor], part_bytes: int = 1 << 20) -> tuple[bytes, bytes]:
    """Return the data section as the parts have it, and as it has to be."""
    shards = PlainPlanner().local_shards({"model": tensors})
    table, address = shards.table, addresses(shards.tensors, shards.table)
    zero = np.zeros(len(shards.tensors), np.int64)
    whole = table.stop - table.start
    offset = np.cumsum(table.nbytes) - table.nbytes
    order = np.argsort([-t.element_size() for t in shards.tensors], kind="stable")  # so that all are aligned
    offset[order] = np.cumsum(table.nbytes[order]) - table.nbytes[order]
    rows = Writes(order, zero, whole[order], offset[order])
    found = b""
    for file in data_files(table, rows, rank=0, part_bytes=part_bytes):
        for part in file.parts:
            header = file.header if part.index == 0 else b""
            buffer = torch.full((part.nbytes,), 0xAB, dtype=torch.uint8)
            gather(WriteItem(part, "key", header, table, shards.tensors, address), buffer, {})
            found += bytes(buffer.numpy())[len(header) :]
    wanted = b"".join(
        bytes(shards.tensors[row].detach().contiguous().view(-1).resolve_neg().resolve_conj().view(torch.uint8).numpy())
        for row in order.tolist()
    )
    return found, wanted


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(1, 9), min_size=1, max_size=3),
            st.sampled_from(["plain", "transposed", "grad"]),
        ),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([4096, 1 << 20]),
)
def test_any_mixture_is_copied_bit_by_bit(tensors: list[tuple[torch.dtype, list[int], str]], part_bytes: int) -> None:
    made = {}
    for number, (dtype, shape, form) in enumerate(tensors):
        count = int(np.prod(shape)) * dtype.itemsize
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
        tensor = raw.view(dtype).view(shape)
        if form == "transposed":
            tensor = tensor.t() if tensor.ndim == 2 else tensor
        elif form == "grad" and dtype.is_floating_point and dtype.itemsize > 1:
            tensor = tensor.requires_grad_()
        made[f"t{number}"] = tensor
    found, wanted = gathered(made, part_bytes)
    assert found == wanted


def test_large_and_small_neighbours_do_not_mix_up() -> None:
    large = SMALL_BYTES // 4
    sizes = [3, large, large + 1, 5, 7, 2 * large, 1, 1, large - 1, 4]
    made = {f"t{n}": torch.randn(size) for n, size in enumerate(sizes)}
    for part_bytes in (4096, 1 << 20):
        found, wanted = gathered(made, part_bytes)
        assert found == wanted


def test_views_with_lazy_signs_are_copied_as_they_read() -> None:
    base = torch.randn(8, dtype=torch.complex64)
    found, wanted = gathered({"imag": base.conj().imag.contiguous(), "conj": base.conj()})
    assert found == wanted


@pytest.mark.parametrize("count", [2, 5000])
def test_thousands_of_small_tensors_go_together(count: int) -> None:
    found, wanted = gathered({f"t{n}": torch.randn(16, 16) for n in range(count)})
    assert found == wanted
