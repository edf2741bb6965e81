"""Copies of other hosts' files: which ones have to stay, and those that trainers of this host have written as *twins*.

Such files have a note with their writer until the agent has compared them with the owner's digests. They count for
nothing before. The note goes when the files are marked, or when they go: nobody marks files that have gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path

from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import Mark, Noted, told

__all__ = ["TwinState", "drop_twins", "free_copies", "leave_twins", "needed_operations", "twin_state"]

GENERATIONS = 2
"""Newer snapshots of this host, behind which the copies of a host that is not there any more can go."""


class TwinState(Enum):
    """What the files of a rank of another host are, before the agent has looked at them."""

    NONE = "no rank of this host has written them"
    WRITING = "a rank of this host is writing them"
    WHOLE = "a rank of this host has written them"
    TORN = "their writer has died meanwhile"


def twin_state(folder: NodeFolder, mark: Mark) -> TwinState:
    """Return what the files of a rank of another host are; inside of ``folder.arranging()``. Blocks."""
    written = folder.twins().get(mark)
    if written is None:
        return TwinState.NONE
    if folder.is_marked(Mark(mark.operation, written.writer)):  # it marks its own files behind all copies
        return TwinState.WHOLE
    return TwinState.WRITING if folder.is_member(written.writer) else TwinState.TORN


def drop_twins(folder: NodeFolder, marks: Iterable[Mark]) -> None:
    """Remove files of twins that nobody has compared yet; inside of ``folder.arranging()``. Blocks."""
    there = folder.data_files()
    for mark in marks:
        folder.forget_twin(mark)
        if not folder.is_marked(mark):
            for path in there.get(mark, ()):
                path.unlink(missing_ok=True)
            folder.forget_copy(mark)


def leave_twins(folder: NodeFolder, operation: str) -> None:
    """Remove what an earlier life of the job has left, but for whole files of one save. Blocks."""
    with told(folder.root), folder.arranging():
        kept = {mark.rank for mark in folder.marks() if mark.operation == operation}
        twins = folder.twins().items()
        drop_twins(folder, [m for m, each in twins if m.operation != operation or each.writer not in kept])


def free_copies(folder: NodeFolder, rescued: str = "") -> list[Path]:
    """Return the files of copies that are not needed any more; they count no more. Blocks, inside of ``arranging()``.

    Args:
        folder: of the host.
        rescued: operation whose files are being rebuilt; empty for none.

    """
    copies, there = folder.copies(), folder.data_files()
    own = {mark.operation: age for mark, age in folder.own_ages().items()}
    is_marked = {mark for mark in copies if folder.is_marked(mark)}
    needed = needed_operations(copies, is_marked, folder.sources().nodes, own)
    needed |= {rescued, *folder.awaited()}
    needed |= {mark.operation for mark in folder.twins() if twin_state(folder, mark) is not TwinState.TORN}
    old = [mark for mark in copies if mark.operation not in needed and folder.take(mark)]
    return [path for mark in old for path in there.get(mark, ())]


def needed_operations(
    copies: Mapping[Mark, Noted], is_marked: Collection[Mark], sources: Collection[str], own: Mapping[str, float]
) -> set[str]:
    """Return the operations whose copies have to stay.

    Of a host that this one copies, these are the newest one and the newest whole one beside it: trainers choose the
    next one when all hosts have the one before. Those of other hosts, which may be lost, stay until this host has two
    newer snapshots of its own.

    Args:
        copies: all copies, whole or not.
        is_marked: those whose files are whole.
        sources: names of the hosts that this one copies.
        own: when this host's own snapshots were prepared, by operation.

    """
    needed: set[str] = set()
    for name in {noted.name for noted in copies.values()}:
        groups: dict[str, list[Mark]] = {}
        for mark, noted in sorted(copies.items(), key=lambda each: -each[1].age):
            if noted.name == name:
                groups.setdefault(mark.operation, []).append(mark)
        whole = [operation for operation, marks in groups.items() if {*marks} <= {*is_marked}]
        if name in sources:
            newest = next(iter(groups))
            needed |= {newest, *[each for each in whole if each != newest][:1]}
        elif whole:
            age = max(copies[mark].age for mark in groups[whole[0]])
            if sum(other > age for other in own.values()) < GENERATIONS:
                needed.add(whole[0])
    return needed
