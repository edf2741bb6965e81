"""What tests of exports share: states of every kind of tensor, and comparisons bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from golden.arithmetic import of_every_dtype
from golden.cases import CASES
from golden.expected import DATA, read
from stranger import read_checkpoint

__all__ = ["ODD", "READABLE", "assert_same", "documented", "folders", "odd_states", "same_bits", "trained_states"]

READABLE = [name for name, case in CASES.items() if not case.codecs and not case.tar and name != "values"]
"""Golden checkpoints without codecs that have tensors."""

ODD = "a b/c:d\u00e9\u2603\"\\'{}[0:4]#2"


def folders(name: str) -> Iterator[Path]:
    """Yield the checkpoints of a golden case."""
    for part in read(DATA / name).parts:
        yield DATA / name / "checkpoint" / part.folder / (part.role or "")


def documented(path: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors by (kind, name), as the reader made from the documentation finds them."""
    found = {}
    for key, (dtype, shape, data) in read_checkpoint(path).items():
        found[key] = torch.empty(shape, dtype=getattr(torch, dtype))
        if data.size:
            found[key].view(-1).view(torch.uint8)[:] = torch.from_numpy(data.reshape(-1).copy())
    return found


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if not found.numel():
        return True
    mine, other = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (found, expected))
    return torch.equal(mine, other)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare tensors by name: the same names, and the same bits."""
    assert set(found) == set(expected)
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


def odd_states() -> dict[str, torch.Tensor]:
    """Return tensors of every dtype, empty ones, scalars, a tied pair, and odd names."""
    tied = torch.arange(10.0).reshape(2, 5)
    tensors = {name: tensor for name, tensor in of_every_dtype().items() if "complex128" not in name}
    return tensors | {ODD: torch.arange(3.0), "tied.a": tied, "tied.b": tied}


def trained_states() -> dict[str, Any]:
    """Return a model and its AdamW after a step."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}
