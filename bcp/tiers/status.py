"""What a host has in memory, for people and programs that look: nothing is changed, and nobody is kept waiting."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bcp.errors import InputError
from bcp.tiers.folder import INTENTS, NodeFolder
from bcp.tiers.notes import COMMITTED, COPYING, LEFT, REFUSED, STORING, SUPERSEDED, Mark
from bcp.tiers.packing import unpacked

__all__ = ["HostMemory", "HostSnapshot", "look"]

SHOWN = 5
"""Files whose replicas have differed."""

IN_MEMORY, ON_ITS_WAY = "in memory", "on its way to storage"
WORDS = {COMMITTED: "durable", LEFT: "given up", REFUSED: "refused", SUPERSEDED: "superseded"}


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """The files of one snapshot on one host: its own, copies of those of another one, or parity of those of others.

    Attributes:
        step: of the training.
        operation: id of the save.
        ranks: whose files they are, of ``world_size``.
        world_size: how many ranks have saved.
        copied_from: name of the host whose files these are copies of; empty for this host's own, and for parity.
        parity_of: names of the hosts whose files this is the parity of; empty for files.
        nbytes: bytes of the data files, or of the parity.
        marked: when the last of these ranks has begun its copy.
        state: what has become of it.
    """

    step: int
    operation: str
    ranks: tuple[int, ...]
    world_size: int
    copied_from: str
    parity_of: tuple[str, ...]
    nbytes: int
    marked: datetime
    state: str

    @property
    def is_on_its_way(self) -> bool:
        """Whether it is on its way to storage."""
        return self.state == ON_ITS_WAY


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory of one host.

    Attributes:
        run: path or URL of the run; empty if no run has used it yet.
        ranks: those that live on this host.
        is_served: whether an agent serves it.
        address: where the agent lets other hosts read; empty if it does not.
        copies: names of the hosts that this one copies, or keeps the parity of.
        has_parity: whether it keeps parity in the place of copies.
        snapshots: whole ones, the newest first.
        kept: when the newest snapshot of this host was marked that a recovery can use; None if there is none.
        copied: the same of the newest one that other hosts have copied.
        committed: when this host has learnt of the newest commit; None if it knows of none.
        troubles: what the agent fails at, and tries again.
        by_twins: bytes of copies that ranks of this host have written themselves, in the life of its agent.
        fetched: bytes of copies that came over the network.
        drifts: files whose replicas have differed, in words, those of the newest saves.
    """

    run: str
    ranks: tuple[int, ...]
    is_served: bool
    address: str
    copies: tuple[str, ...]
    has_parity: bool
    snapshots: tuple[HostSnapshot, ...]
    kept: datetime | None = None
    copied: datetime | None = None
    committed: datetime | None = None
    troubles: tuple[str, ...] = ()
    by_twins: int = 0
    fetched: int = 0
    drifts: tuple[str, ...] = ()

    @property
    def needs_agent(self) -> bool:
        """Whether an agent has work here: a rank lives, or the newest snapshot is not durable."""
        return bool(self.ranks) or bool(self.snapshots and self.snapshots[0].state in (IN_MEMORY, ON_ITS_WAY))

    @property
    def queue(self) -> tuple[HostSnapshot, ...]:
        """The snapshots of this host that are on their way to storage."""
        return tuple(each for each in self.snapshots if each.is_on_its_way and not each.copied_from)


def look(root: Path) -> HostMemory:
    """Look at the memory of this host. Blocks.

    Raises:
        InputError: the directory is no memory of a job, or another user's.
        StorageError: it cannot be read.

    """
    if not (root / INTENTS).is_dir():
        raise InputError(f"{root} is no memory of a job: pass the folder of its tiers, as /dev/shm/bcp-0-1a2b3c4d5e6f")
    folder = NodeFolder(root)
    copies, ages, files = folder.copies(), folder.ages(), folder.data_files()
    groups: dict[tuple[str, str], list[Mark]] = {}
    for mark in ages:
        groups.setdefault((mark.operation, copies[mark].name if mark in copies else ""), []).append(mark)
    found = []
    for (operation, name), marks in groups.items():
        with folder.holding(marks[0]) as held:
            if held is None:
                continue
            intent = held.intent
        found.append(
            HostSnapshot(
                step=intent.step,
                operation=operation,
                ranks=tuple(sorted(mark.rank for mark in marks)),
                world_size=intent.world_size,
                copied_from=name,
                parity_of=(),
                nbytes=sum(path.stat().st_size for mark in marks for path in files.get(mark, ())),
                marked=datetime.fromtimestamp(max(ages[mark] for mark in marks), UTC),
                state=_state(folder, operation, durable=intent.durable),
            )
        )
    own = [each for each in found if not each.copied_from and each.state != WORDS[LEFT]]
    sources = folder.sources()
    hosts = len(sources.nodes)
    copied = [each.marked for each in own if hosts and folder.is_copied(each.operation, hosts)]
    committed = folder.newest_commit()
    found += _stripes(folder)
    traffic = folder.traffic()
    return HostMemory(
        run=folder.run(),
        ranks=tuple(folder.members()),
        is_served=folder.is_served(),
        address=folder.address(),
        copies=sources.nodes,
        has_parity=sources.place >= 0,
        snapshots=tuple(sorted(found, key=lambda each: (-each.marked.timestamp(), each.copied_from))),
        kept=max((each.marked for each in own), default=None),
        copied=max(copied, default=None),
        committed=None if committed is None else datetime.fromtimestamp(committed, UTC),
        troubles=(
            *(f"copies of {host}: {reason}" for host, reason in folder.troubles(COPYING).items()),
            *folder.troubles(STORING).values(),
        ),
        by_twins=traffic.by_twins,
        fetched=traffic.fetched,
        drifts=tuple(drift.said for drift in sorted(folder.drifts().values(), key=lambda each: each.step)[-SHOWN:]),
    )


def _stripes(folder: NodeFolder) -> list[HostSnapshot]:
    """Return the parity of other hosts' snapshots."""
    found = []
    for operation, age in folder.parity.ages().items():
        with folder.parity.holding(operation) as record:
            if record is None:
                continue
            others = [ranks for place, ranks in enumerate(record.ranks) if place != record.place]
            found.append(
                HostSnapshot(
                    step=record.step,
                    operation=operation,
                    ranks=tuple(sorted(rank for ranks in others for rank in unpacked(ranks).tolist())),
                    world_size=record.world_size,
                    copied_from="",
                    parity_of=tuple(filter(None, record.names)),
                    nbytes=_nbytes(folder.parity.stripe(operation)),
                    marked=datetime.fromtimestamp(age, UTC),
                    state=_state(folder, operation, durable=False),
                )
            )
    return found


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # given back meanwhile
        return 0


def _state(folder: NodeFolder, operation: str, *, durable: bool) -> str:
    """Say what has become of a snapshot, or what is to become of it."""
    ended = folder.ended().get(operation)
    if ended is not None:
        return WORDS.get(ended, ended.lower())
    return ON_ITS_WAY if durable or operation in folder.wanted() else IN_MEMORY
