"""What every rank of ``ranks4`` does with a model that all ranks hold whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed as dist

import bcp
from bcp.backends import resolve
from bcp.testing.storage_fakes import CountingBackend


def model(seed: int, scale: int) -> dict[str, torch.Tensor]:
    """Return unequal tensors: one huge, some middling, many small."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8 * scale, 1000), (scale, 700), (scale, 300), (5, 77), *[(1 + n,) for n in range(40)]]
    return {f"w{n}": torch.rand(shape, generator=generator) for n, shape in enumerate(shapes)}


def write(path: Path, scale: int, balance: str) -> tuple[int, int, int]:
    """Save; return the bytes of this rank's data files, of its state, and of what others wrote in its stead."""
    backend = CountingBackend(resolve(path))
    report = bcp.save(backend, {"model": model(0, scale)}, options=bcp.SaveOptions(balance=balance))
    written = sum(nbytes for key, nbytes in backend.written.items() if key.startswith("model/"))
    assert written == report.nbytes
    return written, report.state_nbytes, report.dedup_saved_bytes


def read(path: Path, scale: int, *, overlap: bool = True) -> tuple[int, int, int, bool]:
    """Load; return bytes read from data files, bytes received, bytes placed, and whether all is right."""
    backend = CountingBackend(resolve(path))
    target = {name: torch.zeros_like(tensor) for name, tensor in model(0, scale).items()}
    report = bcp.load(backend, {"model": target}, overlap_loading=overlap)
    read_nbytes = sum(nbytes for key, nbytes in backend.read.items() if key.startswith("model/"))
    assert read_nbytes == report.read_nbytes
    right = all(torch.equal(target[name], tensor) for name, tensor in model(0, scale).items())
    return read_nbytes, report.received_nbytes, report.nbytes, right


def read_alone(path: Path, scale: int) -> tuple[int, int, int, bool]:
    """Load without sharing the reading."""
    return read(path, scale, overlap=False)


def disagree(path: Path) -> str:
    """Hold a tensor that differs in shape on rank 2; return what the save says."""
    try:
        bcp.save(path, {"model": {"w": torch.zeros(3 + (dist.get_rank() == 2))}})
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"
