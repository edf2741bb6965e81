"""Look-ups in a layout: a tensor by its name, and what lies below it. Binary searches; nothing is built."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from bcp.errors import CorruptError
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, TensorTable

__all__ = ["find", "find_all", "names", "resolve", "resolve_all", "rows_of"]


def rows_of(owners: Ints, owner: int) -> tuple[int, int]:
    """Return the rows [first, stop) of a non-decreasing owner column that belong to ``owner``.

    As in ``rows_of(layout.piece_tensor, tensor)``.
    """
    return int(np.searchsorted(owners, owner)), int(np.searchsorted(owners, owner, side="right"))


def find(layout: Layout, kind: str, fqn: str) -> int | None:
    """Return the row of a tensor in ``layout.tensors``, or None where the checkpoint has no such name."""
    first, stop = rows_of(layout.tensors.kind, KINDS.index(kind))
    row = bisect_left(layout.tensors.fqn, fqn, first, stop)
    return row if row < stop and layout.tensors.fqn[row] == fqn else None


def find_all(layout: Layout, wanted: TensorTable) -> Ints:
    """int64[n]: the row of every wanted tensor in ``layout.tensors``, by kind and name; -1 where there is none."""
    fqns, codes = layout.tensors.fqn, np.arange(len(KINDS) + 1)
    bounds = np.searchsorted(layout.tensors.kind, codes).tolist()  # once, and not for every name as ``find`` does
    rows = []
    for code, fqn in zip(wanted.kind.tolist(), wanted.fqn, strict=True):
        row = bisect_left(fqns, fqn, bounds[code], bounds[code + 1])
        rows.append(row if row < bounds[code + 1] and fqns[row] == fqn else -1)
    return np.array(rows, dtype=np.int64)


def resolve(layout: Layout, row: int) -> int:
    """Return the row of the tensor that is stored for this one: its own, or that of the one it is tied to.

    Raises:
        CorruptError: it is tied to a name that the checkpoint does not have.

    """
    tied_to = layout.tensors.tied_to[row]
    if not tied_to:
        return row
    kind = KINDS[int(layout.tensors.kind[row])]
    stored = find(layout, kind, tied_to)
    if stored is None:
        raise CorruptError(
            f"{kind} tensor {layout.tensors.fqn[row]!r} is tied to {tied_to!r}, which the checkpoint does not have; "
            "load another checkpoint"
        )
    return stored


def resolve_all(layout: Layout, rows: Ints) -> Ints:
    """int64[n]: :func:`resolve` of every row; -1 stays -1."""
    tied_to = layout.tensors.tied_to
    return np.array(
        [resolve(layout, row) if row >= 0 and tied_to[row] else row for row in rows.tolist()], dtype=np.int64
    )


def names(layout: Layout, kind: str) -> Sequence[str]:
    """Return the names of all tensors of one kind, sorted; tied ones included."""
    first, stop = rows_of(layout.tensors.kind, KINDS.index(kind))
    return layout.tensors.fqn[first:stop]
