"""Tensors that are worked on at once: bounded in bytes, and on all cores."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from bcp.interop.reading import at_once
from bcp.protocols import Backend, at_once_of

__all__ = ["BATCH_BYTES", "batches", "on_all_cores"]

T = TypeVar("T")
BATCH_BYTES = 128 << 20
"""Bytes of tensors in a batch; a larger tensor is alone."""


def batches(items: Iterable[T], nbytes: Callable[[T], int], most: int = BATCH_BYTES) -> Iterator[list[T]]:
    """Divide items among batches of so many bytes, in order. A larger item is alone.

    Example:
        >>> from bcp.publication.batches import batches
        >>> list(batches([3, 1, 9, 2], int, most=4))
        [[3, 1], [9], [2]]

    """
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and total + nbytes(item) > most:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes(item)
    if batch:
        yield batch


async def on_all_cores(backend: Backend, names: Iterable[str], look: Callable[[str], Awaitable[T]]) -> list[T]:
    """Call a function for each name, as many at once as there are cores, or as the backend likes if that is more."""
    return await at_once(backend, names, look, workers=max(at_once_of(backend), os.cpu_count() or 1))
