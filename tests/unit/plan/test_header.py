from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from bcp.plan.box import Box
from bcp.plan.shards import TensorMeta
from bcp.plan.write.files import DTYPE_CODES, HeaderEntry, entry, header


def parse(head: bytes) -> dict[str, dict[str, object]]:
    assert len(head) % 4096 == 0
    assert int.from_bytes(head[:8], "little") == len(head) - 8
    return json.loads(head[8:])


@pytest.mark.parametrize("name", sorted(DTYPE_CODES))
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_safetensors_reads_every_dtype(name, shape):
    tensor = torch.arange(64, dtype=torch.uint8).view(getattr(torch, name))[: max(1, torch.Size(shape).numel())]
    tensor = torch.zeros(shape, dtype=tensor.dtype) if 0 in shape else tensor.reshape(shape)
    data = bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    found = load(header([HeaderEntry("x", name, shape, len(data))], {"a": "b"}) + data)["x"]
    assert found.dtype == tensor.dtype
    assert found.shape == tensor.shape
    assert bytes(found.reshape(-1).view(torch.uint8).tolist()) == data


def test_entries_are_packed_in_order_and_padding_is_spaces():
    head = header([HeaderEntry("a", "float32", (2,), 8), HeaderEntry("b", "int8", (3,), 3)], {"k": "v"})
    table = parse(head)
    assert list(table) == ["__metadata__", "a", "b"]
    assert table["__metadata__"] == {"k": "v"}
    assert table["a"] == {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert table["b"] == {"dtype": "I8", "shape": [3], "data_offsets": [8, 11]}
    assert len(head) == 4096
    assert head.rstrip(b" ").endswith(b"}}")


@pytest.mark.parametrize(("dtype", "itemsize"), [("complex128", 16), ("float8_e4m3fnuz", 1)])
def test_unknown_dtypes_are_bytes_with_a_note(dtype, itemsize):
    head = header([HeaderEntry("w[0:2]", dtype, (2,), 2 * itemsize)], {})
    table = parse(head)
    assert table["__metadata__"] == {"bcp.dtype.w[0:2]": dtype}
    assert table["w[0:2]"] == {"dtype": "U8", "shape": [2 * itemsize], "data_offsets": [0, 2 * itemsize]}
    assert load(head + bytes(2 * itemsize))["w[0:2]"].tolist() == [0] * 2 * itemsize


def test_taken_names_are_numbered():
    names = ["a[0:1]", "a[0:1]", "a[0:1]#2", "a[0:1]", "__metadata__"]
    table = parse(header([HeaderEntry(name, "complex128", (1,), 16) for name in names], {}))
    renamed = ["a[0:1]", "a[0:1]#2", "a[0:1]#2#2", "a[0:1]#3", "__metadata__#2"]
    assert list(table)[1:] == renamed
    assert sorted(table["__metadata__"]) == sorted(f"bcp.dtype.{name}" for name in renamed)


def test_a_header_longer_than_a_page():
    entries = [HeaderEntry(f"layers.{i}.weight", "bfloat16", (4,), 8) for i in range(200)]
    head = header(entries, {})
    assert len(head) > 2 * 4096
    parse(head)
    assert len(load(head + bytes(1600))) == 200


@pytest.mark.parametrize(
    ("shape", "box", "flat", "name"),
    [
        ((4, 6), Box((0, 0), (4, 6)), (0, 24), "w"),
        ((), Box((), ()), (0, 1), "w"),
        ((4, 6), Box((2, 0), (2, 6)), (0, 12), "w[2:4,0:6]"),
        ((4, 6), Box((0, 0), (4, 6)), (6, 18), "w[1:3,0:6]"),
        ((4, 6), Box((2, 3), (2, 3)), (1, 3), "w[2:3,4:6]"),
        ((4, 6), Box((0, 0), (4, 6)), (5, 18), "w[0:4,0:6]{5:18}"),
        ((4, 6), Box((2, 3), (2, 3)), (1, 5), "w[2:4,3:6]{1:5}"),
    ],
)
def test_names(shape, box, flat, name):
    made = entry(TensorMeta("model", "w", "float32", 4, shape), box, *flat)
    assert made.name == name
    assert made.nbytes == 4 * (flat[1] - flat[0])
    assert torch.Size(made.shape).numel() == flat[1] - flat[0]


@given(st.dictionaries(st.text(max_size=20), st.sampled_from(["float32", "int64"]), max_size=8))
def test_any_name_survives(dtypes):
    head = header([HeaderEntry(name, dtype, (0,), 0) for name, dtype in dtypes.items()], {})
    found = load(head)
    assert set(found) == set(parse(head)) - {"__metadata__"}
    assert len(found) == len(dtypes)
    assert set(dtypes) - {"__metadata__"} <= set(found)
