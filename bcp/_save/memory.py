"""How much staging memory the parts of a save may have at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from bcp.options import SaveOptions
from bcp.stages.items import WriteItem

__all__ = ["PARTS_IN_FLIGHT", "first_sizes", "staging_nbytes"]

PARTS_IN_FLIGHT = 8
"""Parts of staging memory for a save that nobody's training waits behind: enough for every stage to have work."""


def staging_nbytes(items: Sequence[WriteItem], options: SaveOptions, *, goes_on: bool) -> int:
    """Return the bytes of parts that may be in staging memory at once.

    Args:
        items: all parts.
        options: a budget with room for all the data has room for the files' headers too.
        goes_on: whether the caller goes on when everything is copied; then nothing shall wait for memory.

    """
    nbytes = sum(item.nbytes for item in items)
    if options.budget_bytes is None:
        return nbytes if goes_on else min(nbytes, PARTS_IN_FLIGHT * options.part_bytes)
    data = nbytes - sum(len(item.header) for item in items)
    return nbytes if options.budget_bytes >= data else options.budget_bytes


def first_sizes(items: Sequence[WriteItem], options: SaveOptions) -> list[int]:
    """Return the bytes of the parts that a save of these can have in staging memory at once, if training goes on."""
    sizes = [item.nbytes for item in items]
    budget = staging_nbytes(items, options, goes_on=True)
    return [nbytes for nbytes, until in zip(sizes, accumulate(sizes), strict=True) if until <= budget]
