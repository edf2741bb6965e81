"""Units of sharded states in this rank's dataloader file: one behind the other, before its opaque object."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch

from bcp._save.held import Held
from bcp._save.plan import SavePlan
from bcp.planners.values import encode_value
from bcp.protocols import ObjectKey

__all__ = ["places", "unit_ends", "unit_rows"]


def unit_ends(held: Held, plan: SavePlan) -> list[int]:
    """Return where each unit ends in the data section."""
    return list(accumulate(held.units[path].nbytes for path in plan.units))


def places(held: Held, plan: SavePlan) -> dict[ObjectKey, str]:
    """Say where this rank's units lie in the data section: first byte and one past the last (paper sec. 3.2)."""
    bounds = pairwise([0, *unit_ends(held, plan)])
    return {("dataloader", path): encode_value(list(each)) for path, each in zip(plan.units, bounds, strict=True)}


def unit_rows(held: Held, plan: SavePlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and memory of all that the units consist of, in the order of the file."""
    for path in plan.units:
        image = held.units[path]
        yield from ((f"{path}#{number}", tensor) for number, tensor in enumerate(image.tensors))
        yield path, torch.frombuffer(bytearray(image.tail), dtype=torch.uint8)
