"""The codec of zstd over grouped bytes: all bytes come back, and damage is one error."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import bcp
from bcp.stages import zstd as stage
from bcp.stages.zstd import WIDTHS, zstd

DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def weights(dtype: torch.dtype, count: int) -> bytes:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 100
    return bytes(values.to(dtype).view(torch.uint8).numpy().data)


@given(st.binary(max_size=70), st.sampled_from([1, 3, 19]))
def test_bytes_come_back(data: bytes, level: int) -> None:
    codec = zstd(level)
    assert bytes(codec.decode(codec.encode(data))) == data


@pytest.mark.parametrize("count", [1, 17, 40_003])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back(dtype: torch.dtype, count: int) -> None:
    codec, data = zstd(), weights(dtype, count)
    assert bytes(codec.decode(codec.encode(memoryview(data)))) == data


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("nbytes", range(20))
def test_bytes_are_grouped_as_the_format_says(width: int, nbytes: int) -> None:
    """A stream for byte 0 of all elements, one for byte 1, and so on; before them their lengths."""
    data = bytes(range(nbytes))
    streams = [zstandard.compress(data[place::width]) for place in range(width)]
    lengths = b"".join(len(each).to_bytes(8, "little") for each in streams)
    assert bytes(zstd().decode(bytes([width]) + lengths + b"".join(streams))) == data


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.75), (torch.float32, 0.9)], ids=str)
def test_weights_shrink(dtype: torch.dtype, most: float) -> None:
    data = weights(dtype, 100_000)
    assert len(zstd().encode(data)) < most * len(data)
    assert len(zstd().encode(data)) < len(zstandard.compress(data))


def test_noise_hardly_grows() -> None:
    data = np.random.default_rng(7).bytes(100_000)
    assert len(zstd().encode(data)) < len(data) + 64


def test_threads_do_not_disturb_each_other() -> None:
    codec, parts = zstd(), [weights(torch.float32, 50_000 + number) for number in range(8)]
    with ThreadPoolExecutor(4) as threads:
        assert [bytes(codec.decode(each)) for each in threads.map(codec.encode, parts * 4)] == parts * 4


def test_every_flipped_byte_is_one_error_or_other_bytes() -> None:
    """Checksums of the blocks see the others."""
    stored = bytearray(zstd().encode(weights(torch.float32, 60)))
    for place in range(len(stored)):
        for bit in range(8):
            stored[place] ^= 1 << bit
            with suppress(bcp.CorruptError):
                assert len(zstd().decode(bytes(stored))) < 1 << 20
            stored[place] ^= 1 << bit


@pytest.mark.parametrize("cut", [0, 1, 5, -1])
def test_a_part_that_was_cut(cut: int) -> None:
    with pytest.raises(bcp.CorruptError, match=r"^bcp.zstd: .* damaged$"):
        zstd().decode(zstd().encode(weights(torch.float32, 60))[:cut])


def test_no_memory_is_taken_for_a_lying_size() -> None:
    frame = bytearray(zstandard.compress(b"abc" * 1000))
    header = b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + (1 << 40).to_bytes(8, "little")
    stream = header + bytes(frame[6:])
    with pytest.raises(bcp.CorruptError, match=f"claims to have {1 << 40} bytes"):
        zstd().decode(b"\1" + len(stream).to_bytes(8, "little") + stream)


@pytest.mark.parametrize("lengths", [(4, 2), (2, 4), (3, 1), (0, 2)])
def test_planes_that_do_not_belong_together(lengths: tuple[int, int]) -> None:
    streams = [zstandard.compress(bytes(length)) for length in lengths]
    header = b"\2" + b"".join(len(each).to_bytes(8, "little") for each in streams)
    with pytest.raises(bcp.CorruptError, match="has streams of"):
        zstd().decode(header + b"".join(streams))


@pytest.mark.parametrize("length", [0, 1, 1 << 63, (1 << 64) - 1])
def test_lengths_that_lie(length: int) -> None:
    stream = zstandard.compress(b"abc")
    with pytest.raises(bcp.CorruptError, match=r"damaged$"):
        zstd().decode(b"\1" + length.to_bytes(8, "little") + stream)


@pytest.mark.parametrize("level", [0, 20, -1, 1.5, "1", True, None])
def test_levels(level: object) -> None:
    with pytest.raises(bcp.InputError, match="level="):
        zstd(level)  # type: ignore[arg-type]  # on purpose


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stage._zstandard.cache_clear()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(bcp.MissingExtraError, match=r"pip install 'bcp-checkpoint\[zstd\]'"):
        zstd()
