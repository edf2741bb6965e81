"""The earlier checkpoint of a run to which a save may refer, as rank 0 chooses it."""

from __future__ import annotations

from collections.abc import Sequence

from bcp._job import Earlier
from bcp._log import log
from bcp._messages.planning import Base, EqualBlocks
from bcp.backends.small import get_small
from bcp.errors import BcpError, RunTakenError
from bcp.format.metadata import METADATA_KEY, stored_layout
from bcp.runtime.threads import in_thread_gc_paused

__all__ = ["FULL_EVERY", "LEAST_EQUAL", "find_base"]

FULL_EVERY = 20
"""Every so many saves of a run in a row stores everything, so that no checkpoint is needed for ever."""

LEAST_EQUAL = 0.25
"""Share of blocks that have to be equal in the last two saves."""


async def find_base(earlier: Earlier, layout: bytes, compared: Sequence[EqualBlocks]) -> Base | None:
    """Return the checkpoint to which a save may refer; None for a full save. On rank 0.

    It is the newest one of the run, with the same layout and without codecs, which no edit has changed. It is not
    removed or suspect, and neither are the checkpoints to which it refers.

    Args:
        earlier: the checkpoints of the run.
        layout: of the save, encoded.
        compared: what the ranks have found in the last two saves.

    Raises:
        RunTakenError: another job has taken the folder of the run.

    """
    equal, blocks = sum(each.equal for each in compared), sum(each.blocks for each in compared)
    if equal < LEAST_EQUAL * blocks:
        return None
    try:
        return await _found(earlier, layout)
    except RunTakenError:
        raise
    except (BcpError, FileNotFoundError) as error:
        log.warning("a save stores everything, for the checkpoint before cannot be read", error=repr(error))
        return None


async def _found(earlier: Earlier, layout: bytes) -> Base | None:
    name = await earlier.base()
    if not name:
        return None
    data = bytes(await get_small(await earlier.folder(name), METADATA_KEY))
    commit, stored = await in_thread_gc_paused(stored_layout, data, f"{name}/{METADATA_KEY}")
    if stored != layout or commit.codecs or commit.writers or commit.since_full + 1 >= FULL_EVERY:
        return None
    step = int(name.rpartition("-")[2])
    refers = (*commit.refers, step)
    if not await earlier.protects(refers):
        return None
    if gone := await earlier.gone(refers):  # they are protected from here on, and were they before?
        log.warning("a save stores everything, for the checkpoint before has gone", error=gone)
        return None
    return Base(step, commit.operation, commit.since_full + 1, refers)
