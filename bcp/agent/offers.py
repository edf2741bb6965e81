"""What a host offers to those that copy it: the newest of its own snapshots that trainers have chosen for that."""

from __future__ import annotations

from bcp._messages.tiers import Offered
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import LEFT

__all__ = ["offered"]


def offered(folder: NodeFolder) -> Offered:
    """Return the newest own snapshot of a host that is to be copied, once all of its ranks have marked it. Blocks.

    Trainers choose it, or have gone on from it: then all ranks have marked it, in whatever layout.
    """
    ended, living, awaited, own = folder.ended(), {*folder.members()}, folder.awaited(), folder.own_ages()
    begun: dict[str, float] = {}
    for mark, age in own.items():
        begun[mark.operation] = max(age, begun.get(mark.operation, 0.0))
    for each in sorted(begun, key=lambda each: -begun[each]):
        marks = sorted(mark for mark in own if mark.operation == each)
        is_whole = each in awaited or living <= {mark.rank for mark in marks}
        if ended.get(each) == LEFT or not is_whole:
            continue  # others of this host are about to mark it
        with folder.holding(marks[0]) as held:
            if held is not None and (held.intent.copied or each in awaited):
                return Offered(each, tuple(mark.rank for mark in marks))
    return Offered("")
