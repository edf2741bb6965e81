"""The writes of one rank: rank 0's answer, in terms of the rank's own table again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bcp.plan.columns import Ints, runs
from bcp.plan.save.template import Factored, signature
from bcp.plan.shards import ShardTable

__all__ = ["SHARE", "Share", "Writes", "expand"]

SHARE = np.dtype([("slot", "<i4"), ("member", "<i4"), ("start", "<i8"), ("stop", "<i8")])
"""An interval of one of a rank's own slots, of one member of its family or (-1) of all of them."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rank 0's answer to one rank.

    Attributes:
        owned: int64[o], rows in its table's ``objects`` whose values it writes down.
        units: int64[u], which of the paths that its claims name it writes, counted through all claims.
        rows: its intervals, :data:`SHARE`, in the order of its files.
    """

    owned: Ints
    units: Ints
    rows: npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Writes:
    """The writes of one rank: w flat intervals of its own shards, file after file (one a kind), in file order.

    Attributes:
        row: int64[w], row in the rank's own :class:`~bcp.plan.shards.ShardTable`.
        start: int64[w], first flat element, counted in the row's box (not in the rank's interval of it).
        stop: int64[w], one past the last.
        offset: int64[w], byte in the data section of the rank's file of the row's kind. Intervals of a file are
            packed: each begins where the one before it ends.
    """

    row: Ints
    start: Ints
    stop: Ints
    offset: Ints

    def __len__(self) -> int:
        """Return the number of intervals."""
        return len(self.row)


def expand(table: ShardTable, factored: Factored, share: npt.NDArray[np.void]) -> Writes:
    """Say which rows of its table a rank writes, and where to.

    The order inside a file follows from the written tensors alone: planes of wide elements first, then by the family's
    signature and the member's number. In a plane the order is that of the share. :mod:`bcp.plan.save.divide` lays out
    files by the same rule.

    Args:
        table: of the rank.
        factored: the same, taken apart.
        share: :attr:`Share.rows`, from rank 0.

    """
    slot, member = share["slot"].astype(np.int64), share["member"].astype(np.int64)
    size = np.where(member < 0, factored.row_begin[slot + 1] - factored.row_begin[slot], 1)
    of = np.repeat(np.arange(len(share)), size)
    number = runs(np.zeros_like(size), size)
    row = factored.rows[factored.row_begin[slot[of]] + np.where(member[of] < 0, number, member[of])]
    itemsize = table.tensors.itemsize[table.tensor[row]]
    family = signature(itemsize, of, number, len(share))[of]
    kind = table.tensors.kind[table.tensor[row]]
    order = np.lexsort((of, number, family, -itemsize, kind))
    row, of = row[order], of[order]
    start, stop = share["start"].astype(np.int64)[of], share["stop"].astype(np.int64)[of]
    nbytes, kind = (stop - start) * itemsize[order], kind[order]
    end = np.cumsum(nbytes)
    first = np.searchsorted(kind, kind)
    return Writes(row, start, stop, end - nbytes - (end - nbytes)[first])
