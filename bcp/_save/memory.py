"""How much staging memory the parts of a save may have at once, and how much of it may be page-locked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch

from bcp.options import SaveOptions
from bcp.stages.items import WriteItem

__all__ = ["PARTS_IN_FLIGHT", "first_sizes", "pinned_nbytes", "staging_nbytes"]

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
        steady = sum(item.nbytes for item in items if item.is_steady)
        few = PARTS_IN_FLIGHT * options.part_bytes
        return nbytes - steady + min(steady, few) if goes_on else min(nbytes, few)
    data = nbytes - sum(len(item.header) for item in items)
    return nbytes if options.budget_bytes >= data else options.budget_bytes


def first_sizes(items: Sequence[WriteItem], options: SaveOptions) -> list[int]:
    """Return the bytes of the parts that a save of these can have in staging memory at once, if training goes on."""
    sizes = [item.nbytes for item in items]
    budget = staging_nbytes(items, options, goes_on=True)
    return [nbytes for nbytes, until in zip(sizes, accumulate(sizes), strict=True) if until <= budget]


_MOST_PINNED = 16 << 30
_HOST_PART = 4
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def pinned_nbytes(options: SaveOptions) -> int:
    """Return how many bytes of page-locked memory this process may have for saves.

    The default is 16 GiB, and at most a quarter of the host's memory for all ranks of the host together. Locked memory
    can be neither swapped nor given to the page cache, and eight ranks of 60 GB would lock 480 GB.
    """
    if options.pinned_bytes is not None:
        return options.pinned_bytes
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or torch.accelerator.device_count() or 1
    return min(_MOST_PINNED, _host_nbytes() // _HOST_PART // ranks)


@cache
def _host_nbytes() -> int:
    """Return how much memory this host has, or the container that this process is in."""
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such file, or "max"
        nbytes = min(nbytes, int(_CGROUP_LIMIT.read_text()))
    return nbytes
