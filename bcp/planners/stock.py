"""Tables of states seen before: what a rank holds is worked out once, not at every save (paper sec. 4.1).

At every save all leaves are found anew, by calling every ``state_dict()`` with its hooks, and every tensor is asked
where it is and what it looks like. A table follows from the answers, and from nothing else: one that was made of equal
answers is right, whatever has happened since. What is remembered holds no tensor, no module and no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from threading import Lock

import numpy as np

from bcp.plan.shards import ShardTable
from bcp.protocols import ObjectKey

__all__ = ["Seen", "Stock", "recall", "remember"]

MOST = 8
"""So many states are remembered: those of the roles of an RL job; others save one or two in turn."""

Seen = tuple[object, ...]
"""Everything that a table follows from: names, forms, ties."""


@dataclass(frozen=True, slots=True, eq=False)
class Stock:
    """What follows from names, forms and ties.

    Attributes:
        seen: these.
        table: what the rank holds.
        stored: numbers of the leaves whose memory is the table's shards, in the order of its rows.
        keys: of the objects, in the order in which their values are found.
        plain: whether each of these leaves is one shard, and bytes of the CPU's memory in row-major order.
        tracked: whether autograd tracks the memory of any of them.
    """

    seen: Seen
    table: ShardTable
    stored: Sequence[int]
    keys: Sequence[ObjectKey]
    plain: bool
    tracked: bool


_stocks: list[Stock] = []
_lock = Lock()


def recall(seen: Seen) -> Stock | None:
    """Return what followed from the same before, or None."""
    with _lock:
        stocks = list(_stocks)
    found = next((stock for stock in stocks if stock.seen == seen), None)
    if found is not None:
        _put_first(found)
    return found


def remember(stock: Stock) -> None:
    """Remember what was worked out. Others will get the same table, so that its numbers cannot be changed any more."""
    for part in (stock.table, stock.table.tensors):
        for column in (getattr(part, each.name) for each in fields(part)):
            if isinstance(column, np.ndarray):
                column.setflags(write=False)
    _put_first(stock)


def _put_first(stock: Stock) -> None:
    """Note that a stock was just needed; the one that was needed longest ago makes room."""
    with _lock:
        _stocks[:] = [stock, *(each for each in _stocks if each is not stock)][:MOST]
