"""Weights that change by steps, and a reader of publications that was written from SGLang's description alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard

import bcp
from bcp.backends import LocalBackend
from bcp.publication import folder
from bcp.publication.kept import Cache

__all__ = ["assert_folder", "die_at", "followed", "stepped", "weights"]

SHAPES = {
    "embed.weight": (32, 8),
    "layers.0.norm": (8,),
    "layers.0.proj": (8, 24),
    "layers.1.proj": (8, 24),
    "scale": (),
}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a small model in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def stepped(old: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return the model after a step that changes some elements of some tensors."""
    generator = torch.Generator().manual_seed(1000 + seed)
    new = {name: value.clone() for name, value in old.items()}
    for name in ("embed.weight", "layers.0.proj", "scale"):
        moved = torch.rand(new[name].shape, generator=generator) < 0.2
        moved.view(-1)[seed % moved.numel()] = True
        new[name][moved] += 1
    return new


def assert_folder(path: Path | str, want: dict[str, torch.Tensor]) -> None:
    """Compare a Hugging Face folder with tensors, bit by bit."""
    ckpt = bcp.Checkpoint(path)
    assert ckpt.names() == sorted(want)
    for name, value in want.items():
        found = ckpt.read(name)
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        assert torch.equal(found, value), name


# -- a reader by SGLang's description ----------------------------------------------------------------


def followed(root: Path, target: int) -> dict[str, bytes]:
    """Return the bytes of all tensors of a version: the newest full version, and each delta after it."""
    start = target
    while "delta_encoding" in _metadata(root, start):
        start -= 1
    state: dict[str, bytearray] = {}
    for data, header, _ in _files(root, start):
        state |= {name: bytearray(data[first:last]) for name, (first, last) in header.items()}
    for version in range(start + 1, target + 1):
        about = _metadata(root, version)
        assert int(about["version"]) == version
        assert int(about["base_version"]) == version - 1
        assert (about["compression_format"], about["checksum_format"]) == ("zstd", "xxh3-128")
        for data, header, digests in _files(root, version):
            for name, (first, last) in header.items():
                _patch(state[name], zstandard.ZstdDecompressor().decompress(data[first:last]), about["delta_encoding"])
                assert xxhash.xxh3_128_hexdigest(state[name]) == digests[name]
    return {name: bytes(data) for name, data in state.items()}


def _metadata(root: Path, version: int) -> dict[str, Any]:
    index = root / f"weight_v{version:06d}" / "model.safetensors.index.json"
    found: dict[str, Any] = json.loads(index.read_text())["metadata"]
    return found


def _files(root: Path, version: int) -> list[tuple[bytes, dict[str, tuple[int, int]], dict[str, str]]]:
    """Return bytes, places of tensors and notes of every safetensors file directly in the folder."""
    found = []
    for path in sorted((root / f"weight_v{version:06d}").glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        notes = header.pop("__metadata__", {})
        places = {name: tuple(begin + at for at in entry["data_offsets"]) for name, entry in header.items()}
        found.append((data, places, notes))
    return found


def _patch(tensor: bytearray, delta: bytes, encoding: str) -> None:
    if encoding == "xor":
        tensor[:] = bytes(a ^ b for a, b in zip(tensor, delta, strict=True))
        return
    count = int.from_bytes(delta[:4], "little")
    places = np.frombuffer(delta[4 : 4 + 4 * count], "<u4")
    for place, value in zip(places.tolist(), delta[4 + 4 * count :], strict=True):
        tensor[place] = value


# -- kills -------------------------------------------------------------------------------------------


def die_at(number: int) -> Callable[[], int]:
    """Kill this process within its n-th write to a disk; return a function that counts the writes so far.

    A write of weights in place and one of a cache are torn. The other writes are killed before they begin.
    """
    count = 0

    def counted(torn: Callable[[], object] = lambda: None) -> None:
        nonlocal count
        count += 1
        if count == number:
            torn()
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(name: str) -> None:
        inner: Any = getattr(LocalBackend, name)

        async def call(*args: Any) -> Any:
            counted()
            result = await inner(*args)
            if name != "delete":
                counted()
            return result

        setattr(LocalBackend, name, call)

    for name in ("put", "put_if", "delete"):
        wrapped(name)
    open_write, pwrite, keep = LocalBackend.open_write, os.pwrite, Cache.write

    def kept(cache: Cache, name: str, data: Any) -> None:
        counted(lambda: keep(cache, name, data[: len(data) // 2]))
        keep(cache, name, data)

    def opened(*args: Any) -> Any:
        counted()
        return open_write(*args)

    def write(fd: int, data: memoryview, start: int) -> int:
        counted(lambda: pwrite(fd, data[: max(len(data) // 2, 1)], start))
        return pwrite(fd, data, start)

    Cache.write = kept  # type: ignore[method-assign]
    LocalBackend.open_write = opened  # type: ignore[method-assign,assignment]
    folder.os = type("Os", (), {**vars(os), "pwrite": staticmethod(write)})  # type: ignore[attr-defined]
    return lambda: count
