"""What a checkpoint holds, as whole logical tensors, read back without bcp; and how two such states differ.

Values are the bits on storage: bf16 and every other dtype come back as torch's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from stranger import read_checkpoint, read_others

__all__ = ["State", "differences", "hyper", "logical", "same"]

State = dict[tuple[str, str], torch.Tensor]
"""By (kind, name), as in ``("optimizer", "state.layer.weight.exp_avg")``; tied tensors stand under every name."""


def logical(path: str | Path) -> State:
    """Return all tensors of a checkpoint."""
    return {
        name: torch.from_numpy(found.data).view(getattr(torch, found.dtype)).reshape(found.shape)
        for name, found in read_checkpoint(path).items()
    }


def hyper(path: str | Path) -> dict[tuple[str, str], Any]:
    """Return the values of a checkpoint that are no tensors, as their JSON data, by (kind, name)."""
    return read_others(path)[0]


def differences(one: State, other: State) -> list[str]:
    """Say in what two states differ: names, dtypes, shapes, bits; an empty list where they are the same."""
    lone = [f"only in the first: {name}" for name in sorted(one.keys() - other.keys())]
    lone += [f"only in the second: {name}" for name in sorted(other.keys() - one.keys())]
    found = (_differs(name, one[name], other[name]) for name in sorted(one.keys() & other.keys()))
    return lone + [text for text in found if text]


def same(one: State, other: State) -> bool:
    """Whether names, dtypes, shapes and bits are equal; ``assert not differences(...)`` says more."""
    return not differences(one, other)


def _differs(name: tuple[str, str], one: torch.Tensor, other: torch.Tensor) -> str:
    """Say how two tensors of one name differ; "" where they do not."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{name}: {one.dtype} {list(one.shape)}, {other.dtype} {list(other.shape)}"
    wrong = (_bits(one) != _bits(other)).any(dim=-1).nonzero().flatten().tolist()
    if not wrong:
        return ""
    values = ", ".join(f"{at}: {one.flatten()[at].item()}, {other.flatten()[at].item()}" for at in wrong[:3])
    return f"{name}: {len(wrong)} of {one.numel()} elements differ; {values}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements: uint8[numel, itemsize]."""
    flat = tensor.detach().cpu().contiguous().reshape(-1, 1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_zeros((0, 1), dtype=torch.uint8)
