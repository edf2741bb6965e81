"""One save, from the marks in a host's memory to the commit in storage."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from bcp.agent.commit import Outcome, checkpoint_in, commit
from bcp.agent.drain import drain
from bcp.protocols import Backend
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import LEFT, Mark

__all__ = ["advance"]


async def advance(folder: NodeFolder, marks: Sequence[Mark], run: Backend, path: str, node: str) -> Outcome:
    """Do what one host can do now to make a save durable. It may be interrupted anywhere, and is called again.

    Args:
        folder: the host's memory.
        marks: of one save.
        run: the durable root.
        path: of the checkpoint, for messages.
        node: name of the host, as part of a key.

    Raises:
        CorruptError: a file in memory is missing or damaged.
        StorageError: storage failed.

    """
    with ExitStack() as stack:
        entered = [stack.enter_context(folder.holding(mark)) for mark in marks]
        held = [each for each in entered if each is not None]
        if not held:
            return Outcome.GONE
        intent = held[0].intent
        layout = folder.layout(intent.layout)

        def is_left() -> bool:
            return folder.ended().get(intent.operation) == LEFT  # by a new life of the job

        outcome = await commit(run, path, intent, layout, is_left)
        if outcome is Outcome.WAITING:
            await drain(folder.files, held, checkpoint_in(run, intent), node, is_left)
            outcome = Outcome.GONE if is_left() else await commit(run, path, intent, layout, is_left)
        return outcome
