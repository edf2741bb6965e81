"""Values of golden checkpoints, made by integer arithmetic: no random number of any library is in them."""

from __future__ import annotations

import io
import math
import random
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from exact import Exact

__all__ = ["GoldenExact", "numbers", "of_every_dtype", "of_every_type"]

_FACTOR, _PRIME = 40503, 65521

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("complex128", "complex64"),
]


def numbers(name: str, shape: Sequence[int]) -> torch.Tensor:
    """Return fp32 numbers between -0.25 and 0.25 that follow from a name, all different in a row of 65,521."""
    whole = (torch.arange(math.prod(shape)) * _FACTOR + zlib.crc32(name.encode())) % _PRIME
    return ((whole - _PRIME // 2).to(torch.float32) / 2**17).reshape(tuple(shape))


class GoldenExact(Exact):
    """The model of the other tests, with one block, and with weights of arithmetic."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, blocks=1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(numbers(f"{seed} {name}", parameter.shape))


def of_every_dtype() -> dict[str, torch.Tensor]:
    """Return a tensor of every dtype, tensors of odd shapes, and floats with unusual bits, by dotted names."""
    found = {f"dtypes.{name}": _bytes_as(name) for name in DTYPES}
    found |= {f"empty.{name}": torch.empty(0, 3, dtype=getattr(torch, name)) for name in ("float32", "bool", "int64")}
    found |= {
        f"scalar.{name}": _bytes_as(name).reshape(-1)[7].clone()
        for name in ("float32", "bfloat16", "int64", "bool", "complex64")
    }
    found["bits.float32"] = _from_bits([0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 1, 0x7F800000], torch.float32)
    found["bits.float64"] = _from_bits([-(1 << 63), 0x7FF8000000000ABC, -0x7FFFFFFFFFFFF, 1], torch.float64)
    found["bits.bfloat16"] = _from_bits([-0x8000, 0x7FC1, -0x3F, 1], torch.bfloat16)
    found["bits.float16"] = _from_bits([-0x8000, 0x7E01, -0x1FF, 1], torch.float16)
    found["seven.dimensions"] = torch.arange(64.0).reshape(2, 1, 2, 4, 1, 2, 2)
    found["turned"] = torch.arange(35, dtype=torch.int32).reshape(5, 7).t()
    return found


def _bytes_as(name: str) -> torch.Tensor:
    """Return 5 x 4 elements of a dtype whose bytes are all sorts of numbers."""
    if name == "bool":
        return (torch.arange(20) % 3 == 0).reshape(5, 4)
    dtype = getattr(torch, name)
    raw = ((torch.arange(20 * dtype.itemsize) * 37 + len(name)) % 251).to(torch.uint8)
    return raw.view(dtype).reshape(5, 4)


def _from_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return floats of the given bits."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    top, span = 1 << (8 * dtype.itemsize - 1), 1 << (8 * dtype.itemsize)
    return torch.tensor([each - span if each >= top else each for each in bits], dtype=integers).view(dtype)


def of_every_type() -> dict[Any, Any]:
    """Return a value of every type that an archive knows."""
    buffer = io.BytesIO(b"0123456789")
    buffer.seek(4)
    counts: defaultdict[str, int] = defaultdict(int, {"b": 2, "a": 1})
    return {
        "none": None,
        "booleans": [True, False],
        "integers": [0, -1, 1 << 62, -(1 << 70), 10**700],
        "floats": [0.0, -0.0, 1 / 3, math.inf, -math.inf, math.nan, 5e-324],
        "complex": complex(-0.0, 1 / 7),
        "texts": ["", "ünit ✓ 漢字 \0", "a.b"],
        "bytes": [b"", b"\0\xff", bytearray(b"abc")],
        "tuples": [(), (1,), ("bcp", 2.5, None), (1, (2, (3,)))],
        "keys": {1: "int", "1": "text", (2, "a"): "tuple", None: "none", 2.5: "float"},
        "sets": [{3, 1, 2}, frozenset({"a", (1, 2)}), set()],
        "ordered": OrderedDict([("z", 1), ("a", 2)]),
        "counter": Counter({"x": 3, "y": -1}),
        "counts": counts,
        "deques": [deque([1, 2, 3], maxlen=3), deque(["a"])],
        "ranges": [range(3, 20, 4), slice(None, 5, None)],
        "buffer": buffer,
        "torch": [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 3])],
        "tensors": [*of_every_dtype().values()][:-2],
        "arrays": _arrays(),
        "scalars": [np.float32(0.1), np.int8(-3), np.bool_(True), np.complex64(1j), np.datetime64("2026-01-31", "D")],  # noqa: FBT003
        "numpy texts": [np.str_("numpy"), np.bytes_(b"\0raw")],
        "numpy dtypes": [np.dtype("<f4"), np.dtype(">i8"), np.dtype([("a", "<i2"), ("b", ">f8")])],
        "generators": [np.random.Generator(np.random.Philox(key=5)), np.random.PCG64(7)],
        "legacy": np.random.RandomState(11),
        "of torch": torch.Generator().manual_seed(13),
        "of Python": random.Random(17),  # noqa: S311 -- a value
        "nested": {"list": [{"deep": [(np.arange(3), {"deeper": torch.arange(2)})]}]},
    }


def _arrays() -> list[Any]:
    """Return numpy's arrays: of both byte orders, Fortran's order, no element, fields, texts and times."""
    fields = np.zeros(2, dtype=[("a", "<i2"), ("b", ">f8")])
    fields["a"], fields["b"] = [1, 2], [0.5, -0.0]
    return [
        np.arange(6, dtype="<i4").reshape(2, 3),
        np.arange(3, dtype=">f8"),
        np.asfortranarray(np.arange(6, dtype="<f4").reshape(2, 3)),
        np.empty((0, 2), dtype="<f8"),
        np.array(5, dtype="<u2"),
        np.array([True, False]),
        np.array([1 + 2j], dtype="<c16"),
        np.array(["ab", "c"]),
        np.array(["2026-01-31"], dtype="M8[D]"),
        fields,
    ]
