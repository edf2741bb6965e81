"""Plan a load: the blocks that each rank reads, sends and receives (paper sec. 3.3, 4.1).

No rank knows the requests of the others, so planning takes three steps with a message before each of the last two:

1. Each rank intersects its target shards with the layout (:func:`bcp.plan.read.reads.wants`), and sends rank 0 the
   blocks that it needs.
2. Rank 0 divides the blocks that several ranks need among them: :func:`divide_load`.
3. Each rank lists its own reads, and the chunks that it sends and receives: :func:`bcp.plan.read.copies.assign`.

:func:`plan_load` takes all three steps in one process, and sends the same bytes. A load takes them one by one, with a
collective operation in between (:mod:`bcp._load.reads`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bcp.plan.columns import Ints
from bcp.plan.read.copies import Assignment, assign
from bcp.plan.read.share import BlockIndex, Floats, SharedReads, share_reads

__all__ = ["divide_load", "plan_load"]


def divide_load(
    blocks: BlockIndex, messages: Sequence[bytes], *, read_bytes: int, exchange_bytes: int, speed: Floats | None = None
) -> SharedReads:
    """Divide the blocks that several ranks need among these ranks; runs on rank 0.

    ``messages`` are :meth:`~bcp.plan.read.share.BlockIndex.encode` of every rank's blocks; the options are as
    in :func:`plan_load`.

    Raises MessageError if a message names blocks that do not exist.
    """
    runs = [blocks.decode(message, rank) for rank, message in enumerate(messages)]
    blocks.check(np.concatenate(runs))
    return share_reads(blocks, runs, read_bytes=read_bytes, exchange_bytes=exchange_bytes, speed=speed)


def plan_load(
    blocks: BlockIndex,
    ranges: Sequence[Ints],
    *,
    read_bytes: int,
    exchange_bytes: int,
    shared: bool = True,
    speed: Floats | None = None,
) -> list[Assignment]:
    """Plan a load of all ranks in one process (paper sec. 4.1). Pure: equal inputs give equal plans.

    A block that several ranks need is read once in the whole job: one of them reads it and sends it to the others.

    Args:
        blocks: the blocks of all data files: :meth:`BlockIndex.of(layout) <bcp.plan.read.share.BlockIndex.of>`.
        ranges: int64[k, 3], rows (file, start, stop) in bytes, of every rank: the bytes that it needs, as
            :meth:`~bcp.plan.read.reads.ReadRequest.ranges` returns them.
        read_bytes: the largest read, but never less than one block.
        exchange_bytes: the most bytes that a rank receives in one round, but never less than one block from each rank
            that sends to it.
        shared: False: every rank reads all that it needs by itself.
        speed: float64[world size], relative speed of each rank in (0, 1]; None: all are equally fast.

    Example:
        Two ranks load the same 1,024 x 1,024 matrix: each reads half of it, and receives the other half.

        >>> from bcp.plan.box import Box
        >>> from bcp.plan.read.reads import wants
        >>> from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
        >>> from bcp.plan.write import plan_save
        >>> weight = TensorMeta("model", "weight", "float32", 4, (1024, 1024))
        >>> table = ShardTable.build([ShardRow(weight, Box.whole(weight.shape))])
        >>> layout = plan_save([table]).layout
        >>> ranges = [wants(layout, table).ranges()] * 2
        >>> plans = plan_load(BlockIndex.of(layout), ranges, read_bytes=1 << 24, exchange_bytes=1 << 24)
        >>> [sum(chunk.nbytes for chunk in plan.items()) for plan in plans]
        [2097152, 2097152]
    """
    runs = [blocks.runs(rows) for rows in ranges]
    division = SharedReads.nothing()
    if shared:
        messages = [blocks.encode(rows) for rows in runs]
        division = divide_load(blocks, messages, read_bytes=read_bytes, exchange_bytes=exchange_bytes, speed=speed)
    received = SharedReads.decode(division.encode(blocks), blocks, len(runs))
    return [assign(blocks, rank, rows, received, read_bytes=read_bytes) for rank, rows in enumerate(runs)]
