"""One process's files in its host's memory. A snapshot is copied straight into them, so that it outlives the process.

Memory that is touched for the first time takes three to four times a copy. So files are kept: a new snapshot gives new
names to files of an older one, which stay mapped.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bcp._messages.tiers import Drift, WrittenTwin
from bcp.errors import StorageError
from bcp.runtime.staging import map_file
from bcp.stages.items import WriteItem
from bcp.tiers.copies import drop_twins, free_copies
from bcp.tiers.folder import NodeFolder
from bcp.tiers.following import Followers
from bcp.tiers.notes import COPYING, Mark, told
from bcp.tiers.twins import Spread, TwinFiles

__all__ = ["TierMemory"]

Inode = tuple[int, int]

MOST_LIVE = 3
"""Snapshots that a recovery may need at once, with copies on other hosts."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A file that this process has mapped."""

    memory: torch.Tensor  # uint8, as long as the file
    nbytes: int


class TierMemory:
    """The files of one rank. It is the memory of the parts of one save at a time.

    Attributes:
        folder: of the host.
        rank: whose files these are.
        copies: how many other hosts copy the files of this one.
        live: operations whose snapshots a recovery may need. They are the newest one that all ranks have marked, the
            one that is being copied to other hosts, and the newest one that all hosts have copied.
        promised: operation of the newest snapshot that shall go to durable storage; empty for none.
        layout: digest of the layout of the last save; empty before the first.
        spread: the hosts that are to hold each other's files by twins; None for copies over the network alone.
        twins: what this rank writes for other hosts; None before the first save.
        followers: of the snapshots that are live.
    """

    def __init__(self, folder: NodeFolder, rank: int, url: str = "") -> None:
        """Become this rank in the folder, until :meth:`close`.

        Args:
            folder: of the host.
            rank: this rank.
            url: of the run; empty if the folder is asked nothing.

        Raises:
            InputError: another process of this host is the same rank there, or the folder is another run's.

        """
        self.folder, self.rank = folder, rank
        with folder.arranging():
            if url:
                folder.belong(url)
            self._member = folder.join(rank)
            folder.begin(rank)
        self.copies = 0
        self.live: frozenset[str] = frozenset()
        self.promised = ""
        self._copying = self._copied = ""
        self._told = {*folder.drifts()}
        self.followers = Followers()
        self.layout = b""
        self.spread: Spread | None = None
        self.twins: TwinFiles | None = None
        self._mapped: dict[Inode, Kept] = {}
        self._open: dict[str, Kept] = {}

    def __repr__(self) -> str:
        return f"<TierMemory of rank {self.rank}: {sum(each.nbytes for each in self._mapped.values())} bytes mapped>"

    def close(self, *, clear: bool = False) -> None:
        """Let go of the folder; what is marked there stays.

        Args:
            clear: give the memory of this rank back, and that of ranks that are not on this host any more.

        """
        if clear:
            with self.folder.arranging():
                self.folder.finish()
                gone = {mark.rank for mark in self.folder.data_files() if not self.folder.is_member(mark.rank)}
                self.folder.clear({self.rank, *gone})
        self._member.close()
        self._open, self._mapped = {}, {}

    def is_copied(self) -> bool:
        """Whether other hosts have all files of this one that were to be copied last. Blocks."""
        return not self._copying or self.folder.is_copied(self._copying, self.copies)

    def troubles(self) -> dict[str, str]:
        """Return the hosts that this one cannot copy, and why; only one rank of the host does so. Blocks."""
        troubles = self.folder.troubles(COPYING) if self.copies else {}
        return troubles if troubles and self.rank == min(self.folder.members(), default=0) else {}

    def new_drifts(self) -> list[Drift]:
        """Return the files of other hosts that twins here have not had bit by bit, each once; one rank does so. Blocks.

        Files that an earlier life of the job was told of are left out.
        """
        if self.spread is None or self.rank != min(self.folder.members(), default=0):
            return []
        drifts = self.folder.drifts()
        new = [drift for name, drift in drifts.items() if name not in self._told]
        self._told |= drifts.keys()
        return new

    def all_marked(self, operation: str, *, is_copied: bool) -> None:
        """Note that all ranks have marked a snapshot.

        Args:
            operation: of the snapshot.
            is_copied: whether all hosts had copies of the one before that was to be copied. Then it is this one's turn.

        """
        if self.copies and is_copied:
            self.followers.copied(self._copying)
            self._copied, self._copying = self._copying, operation
        self.live = frozenset({operation, self._copying, self._copied} - {""})

    # -- parts -------------------------------------------------------------------------------------

    def take(self, item: WriteItem) -> torch.Tensor:
        """Return the part's bytes in its file."""
        part = item.part
        return self._open[item.key].memory[part.start : part.stop]

    def give(self, buffer: torch.Tensor) -> None:
        """Do nothing: the files stay."""

    # -- files -------------------------------------------------------------------------------------

    def begin(self, sizes: Mapping[str, int], operation: str, twins: Mapping[str, int] | None = None) -> None:
        """Get a file for each key, of so many bytes. Blocks.

        Files come from snapshots that are not live and that nobody reads, of this rank and of ranks that are not on
        this host any more, and only then from free memory. What dead processes have left unmarked goes the same way.

        Args:
            sizes: bytes of each data file of the save.
            operation: id of the save.
            twins: the same of files that this rank writes for ranks of another host.

        Raises:
            FullError: there is no room.
            StorageError: a file was deleted meanwhile, or the system failed.

        """
        try:
            with told(self.folder.root), self.folder.arranging():
                self._arrange(sizes, operation)
                self._forget_twins({operation, *self.live})
                if twins:
                    self._arrange_twins(twins, operation)
        except FileNotFoundError as error:
            raise StorageError(
                f"a file of rank {self.rank} in {self.folder.root} was deleted meanwhile: {error}"
            ) from error

    def _arrange(self, sizes: Mapping[str, int], operation: str) -> None:
        """Give files of older snapshots new names, and make those that are missing."""
        free = self._freed(operation, sizes.values())
        self._open = {}
        missing = {}
        for key, nbytes in sizes.items():
            path = self.folder.root / key
            path.parent.mkdir(0o700, exist_ok=True)
            old = self._chosen(free, nbytes)
            if old is None:
                missing[path] = nbytes
                continue
            free.remove(old)
            old.rename(path)
            self._open[key] = self._of(path, nbytes)
        spare = self._spare(free, sizes.values())
        for path in free:
            if path not in spare:
                self._mapped.pop(_inode(path), None)  # the next file may get its number
                path.unlink()
        for path, nbytes in missing.items():
            self.folder.make(path, nbytes, f"the snapshot of rank {self.rank}")
            self._mapped.pop(_inode(path), None)  # that of a file that somebody has deleted
            self._open[path.relative_to(self.folder.root).as_posix()] = self._of(path, nbytes)
        alive = {_inode(path) for paths in self.folder.data_files().values() for path in paths}
        self._mapped = {inode: each for inode, each in self._mapped.items() if inode in alive}

    def _arrange_twins(self, sizes: Mapping[str, int], operation: str) -> None:
        """Get files for ranks of another host: those of copies that are not needed any more, and then new ones."""
        assert self.twins is not None  # noqa: S101 -- the sizes are those of its files
        marks = [Mark(operation, rank) for rank in self.twins.files]
        for mark in marks:
            self.folder.note_twin(mark, WrittenTwin(self.rank, self.twins.differing))
        self.folder.note_copies(marks, self.twins.sources.nodes[0])
        free = free_copies(self.folder)
        for key, nbytes in sizes.items():
            path = self.folder.root / key
            path.parent.mkdir(0o700, exist_ok=True)
            old = self._chosen(free, nbytes)
            if old is None:
                self.folder.make(path, nbytes, f"the twin of another host's file, by rank {self.rank},")
            else:
                free.remove(old)
                old.rename(path)
            self._open[key] = self._of(path, nbytes)

    def _forget_twins(self, live: Collection[str]) -> None:
        """Forget what this rank has written for others in saves that have failed elsewhere; agents free the files."""
        for mark in self._written():
            if mark.operation not in live:
                self.folder.forget_twin(mark)

    def give_up(self, mark: Mark) -> None:
        """Forget files that are not marked, and remove what this rank has written for other hosts with them. Blocks."""
        self.folder.forget(mark)
        with told(self.folder.root), self.folder.arranging():
            drop_twins(self.folder, [each for each in self._written() if each.operation == mark.operation])

    def _written(self) -> list[Mark]:
        """Return the files that this rank has written for others, and that no agent has compared."""
        return [mark for mark, written in self.folder.twins().items() if written.writer == self.rank]

    def _freed(self, operation: str, sizes: Collection[int]) -> list[Path]:
        """Take the files of snapshots that nobody needs; return them.

        Before the first snapshot of this job that all ranks have marked, older ones may still be needed. So of these
        go only as many as this one takes, the oldest first. The newest one that was promised to storage, and is not
        there, stays, too.
        """
        there, ages, ended = self.folder.data_files(), self.folder.ages(), self.folder.ended()
        copies = self.folder.copies() if self.folder.is_served() else {}  # else nobody uses their memory again
        needed = {operation, *self.live, *({self.promised} - ended.keys())}
        free: list[Path] = []
        for mark, paths in sorted(there.items(), key=lambda each: ages.get(each[0], -1.0)):
            if mark.operation in needed:
                continue
            if mark in copies or (mark.rank != self.rank and self.folder.is_member(mark.rank)):
                continue
            if mark in ages and not self.live and not _missing(sizes, free):
                continue
            if mark not in ages or self.folder.take(mark):
                free += paths
        return free

    def _spare(self, free: Collection[Path], sizes: Collection[int]) -> list[Path]:
        """Choose free files that stay, for a save that may need one snapshot more: without copies there is none.

        Copies make two or three snapshots live, in turns if the network is slow. Files that were removed and made again
        each time would make every second save three to four times as long.
        """
        if not self.copies or len(self.live) >= MOST_LIVE:
            return []
        spare, rest = list[Path](), list(free)
        for nbytes in sizes:
            if (path := self._chosen(rest, nbytes)) is not None:
                rest.remove(path)
                spare.append(path)
        return spare

    def _chosen(self, free: list[Path], nbytes: int) -> Path | None:
        """Return a free file of this size, a mapped one by preference."""
        fits = [path for path in free if path.stat().st_size == nbytes]
        return min(fits, key=lambda path: _inode(path) not in self._mapped, default=None)

    def _of(self, path: Path, nbytes: int) -> Kept:
        """Map a file, unless this process has it mapped."""
        inode = _inode(path)
        if inode not in self._mapped:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._mapped[inode] = Kept(map_file(fd, nbytes), nbytes)
            finally:
                os.close(fd)
        return self._mapped[inode]


def _missing(sizes: Collection[int], free: Collection[Path]) -> bool:
    """Whether there is no file for some of these sizes."""
    return bool(Counter(sizes) - Counter(path.stat().st_size for path in free))


def _inode(path: Path) -> Inode:
    status = path.stat()
    return status.st_dev, status.st_ino
