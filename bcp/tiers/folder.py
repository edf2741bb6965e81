"""The kept memory of one host: a directory on tmpfs with data files, intents and layouts, for one job.

The names of files have rank and operation. So all generations lie side by side, as do copies from other hosts. The
files of a rank count once they are *marked*: their intent has its final name. A mark is a rename, so that a process
that is killed leaves files that count whole, or not at all.

Whoever reads marked files holds a shared lock on the mark. Whoever takes their memory for the next snapshot needs an
exclusive one, and removes the mark first. The kernel gives up the locks of a process that dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bcp._log import log
from bcp._messages.tiers import Intent, Sources
from bcp.backends import LocalBackend
from bcp.backends.files import fallocate
from bcp.errors import CheckpointError, CorruptError, InputError, StorageError
from bcp.format.container import digest
from bcp.format.metadata import OPERATION, owner_of, receipt_key
from bcp.format.receipt import Receipt
from bcp.plan.shards import KINDS
from bcp.runtime.huge_pages import fill_in_huge_pages
from bcp.tiers.intent import decode_intent, encode_intent
from bcp.tiers.locks import MEMBERS, HostLocks, held_contents, locked, opened
from bcp.tiers.notes import (
    COPIED,
    DRIFTED,
    ENDED,
    FINISHED,
    GONE,
    LEFT,
    NOTE_DIRECTORIES,
    WANTED,
    FullError,
    Mark,
    Notes,
    told,
    write_small,
)
from bcp.tiers.parity_files import PARITY, ParityFiles

__all__ = ["INTENTS", "LAYOUTS", "Held", "NodeFolder"]

INTENTS, LAYOUTS = "intents", "layouts"
PRIVATE = 0o700

PAUSE_SECONDS, LEAVE_SECONDS = 0.1, 20.0
"""How long a new life of the job waits for an agent that is just sending what the job gives up."""

MOST_NOTES = 256
"""Notes of ended saves that stay after their files: trainers have to see them."""


@dataclass(frozen=True, slots=True)
class Held:
    """Marked files that nobody takes away meanwhile.

    Attributes:
        intent: what they are.
        blank: the receipt of these files, with zeros for digests.
    """

    intent: Intent
    blank: Receipt


class NodeFolder(Notes, HostLocks):
    """The directory of one job on one host. All processes of the host share it: trainers, and the agent.

    Attributes:
        root: the directory.
        files: the same as storage, whose keys are those of a checkpoint.
        parity: of other hosts' files.
    """

    def __init__(self, root: Path) -> None:
        """Take a directory, and make it if it is not there.

        Raises:
            InputError: it belongs to somebody else, or others may read or write it, or it is no directory.
            StorageError: it cannot be made.

        """
        self.root, self.files, self.parity = root, LocalBackend(root), ParityFiles(root / PARITY)
        if not root.parent.is_dir():
            raise InputError(f"{root.parent} is no directory, so that no memory tier can be in it: pass another folder")
        with told(root):
            with suppress(FileExistsError):
                root.mkdir(PRIVATE)
            _check_private(root)
            for name in (INTENTS, LAYOUTS, MEMBERS, PARITY, *NOTE_DIRECTORIES):
                (root / name).mkdir(PRIVATE, exist_ok=True)

    def __repr__(self) -> str:
        return f"NodeFolder({str(self.root)!r})"

    def belong(self, url: str) -> None:
        """Be the memory of one run, with this path or URL; inside of :meth:`arranging`.

        What another run has left goes if all of it has ended.

        Raises:
            InputError: the directory is another run's, which lives or has snapshots that are not durable.

        """
        other = self.run()
        if other and other != url:
            held = sorted({mark.operation for mark in self.marks()} - self.ended().keys())
            if held or self._members():
                what = "has ranks here" if self._members() else f"has {len(held)} snapshots here that are not durable"
                raise InputError(
                    f"{self.root} is the memory of the run at {other}, which {what}, and this is the run at {url}: "
                    "pass another folder. If that run is given up, remove the directory"
                )
            self.clear()
            for path in (self.root / ENDED).iterdir():
                path.unlink(missing_ok=True)
        self.put_run(url)

    def begin(self, rank: int) -> None:
        """Note that a rank has begun a life; forget the intent of a save in which it was killed."""
        with told(self.root):
            (self.root / FINISHED).unlink(missing_ok=True)
            for path in (self.root / INTENTS).glob(f".{rank:05d}-*.new"):
                path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Note that the run has ended well and that its newest snapshot is durable: the agent gives back what is left.

        No other host is copied any more.
        """
        self.put_sources(Sources((), ()))
        for operation in {mark.operation for mark in self.marks()} - self.ended().keys():
            self.end(operation, LEFT)
        with told(self.root):
            (self.root / FINISHED).touch(0o600)

    def clear(self, ranks: Container[int] | None = None) -> None:
        """Give back the memory of some ranks, or of all, but for files that somebody reads."""
        with told(self.root):
            copies = self.copies()
            for mark, paths in self.data_files().items():
                if (ranks is None or mark.rank in ranks) and self.take(mark):
                    for path in paths:
                        path.unlink(missing_ok=True)
                    if mark in copies:
                        self.forget_copy(mark)
            if ranks is None:
                for operation in self.parity.operations():
                    self.parity.give_back(operation)

    def put_layout(self, layout: bytes) -> bytes:
        """Keep an encoded layout, once; return its digest."""
        name = digest(layout)
        path = self.root / LAYOUTS / name.hex()
        with told(path):
            if not path.exists():
                write_small(path, layout)
        return name

    def layout(self, name: bytes) -> bytes:
        """Return a kept layout by its digest.

        Raises:
            CorruptError: it is not there, or damaged.

        """
        path = self.root / LAYOUTS / name.hex()
        try:
            with told(path):
                data = path.read_bytes()
        except FileNotFoundError:
            raise CorruptError(f"{path} is missing; the files of this layout cannot be committed from here") from None
        if digest(data) != name:
            raise CorruptError(f"{path} is damaged; the files of this layout cannot be committed from here")
        return data

    def prepare(self, intent: Intent) -> None:
        """Write an intent under a name that does not count yet."""
        path = self._new(_mark_of(intent))
        with self._must_be_there(), told(path):
            path.write_bytes(encode_intent(intent))

    def mark(self, mark: Mark) -> None:
        """Let the prepared intent, and the files that it names, count from now on."""
        with self._must_be_there(), told(self._path(mark)):
            self._new(mark).rename(self._path(mark))

    def forget(self, mark: Mark) -> None:
        """Remove an intent that was prepared and not marked."""
        with suppress(FileNotFoundError):
            self._new(mark).unlink()

    def take(self, mark: Mark) -> bool:
        """Let files count no more, so that their memory can be used again; return False while somebody reads them."""
        with opened(self._path(mark)) as fd:
            if fd is None:
                return True
            if not locked(fd, fcntl.LOCK_EX):
                return False
            with told(self._path(mark)):
                self._path(mark).unlink(missing_ok=True)
                (self.root / receipt_key(mark.rank, mark.operation)).unlink(missing_ok=True)
            return True

    def make(self, path: Path, nbytes: int, what: str) -> None:
        """Make a file with all of its memory: a write to memory that is not there would kill the process (SIGBUS).

        Args:
            path: of the file, which is not there.
            nbytes: its size.
            what: needs it, for the message.

        Raises:
            FullError: there is no room.

        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if nbytes:
                fill_in_huge_pages(fd, nbytes)
                fallocate(fd, nbytes)
        except OSError as error:
            path.unlink()
            if error.errno != errno.ENOSPC:
                raise
            room = os.statvfs(self.root)
            left, all_of_it = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
            raise FullError(
                f"{self.root} has {left} of {all_of_it} bytes left, and {what} needs {nbytes} more for {path.name}: "
                "give the file system more room (mount -o remount,size=...)"
            ) from error
        finally:
            os.close(fd)

    def data_files(self) -> dict[Mark, list[Path]]:
        """List all data files, marked or not, by the save and the rank in their names."""
        found: dict[Mark, list[Path]] = {}
        with told(self.root):
            for kind in KINDS:
                for path in sorted((self.root / kind).glob("*.safetensors")):
                    if owner := owner_of(f"{kind}/{path.name}"):
                        found.setdefault(Mark(owner[1], owner[0]), []).append(path)
        return found

    def marks(self) -> list[Mark]:
        """List all marks, by operation and rank."""
        with told(self.root):
            marks = [Mark.of(path.name) for path in (self.root / INTENTS).iterdir()]
        return sorted(mark for mark in marks if mark)

    def ages(self) -> dict[Mark, float]:
        """Return when each mark was prepared, in seconds since the epoch."""
        found = {}
        for mark in self.marks():
            with suppress(FileNotFoundError), told(self._path(mark)):
                found[mark] = self._path(mark).stat().st_mtime
        return found

    def own_ages(self) -> dict[Mark, float]:
        """Return the same of this host's own files, without copies of other hosts' files."""
        ages = self.ages()
        copies = self.copies()  # behind the marks: a copy is noted before it is marked
        return {mark: age for mark, age in ages.items() if mark not in copies}

    def is_marked(self, mark: Mark) -> bool:
        """Whether files count."""
        return self._path(mark).exists()

    @contextmanager
    def holding(self, mark: Mark) -> Iterator[Held | None]:
        """Keep marked files as they are for the time of the context; None if they do not count any more.

        An intent that is damaged counts for nothing, and is logged.
        """
        with opened(self._path(mark)) as fd:
            data = held_contents(fd, self._path(mark))
            if data is None:
                yield None
                return
            try:
                intent, blank = decode_intent(data, str(self._path(mark)))
                if _mark_of(intent) != mark:
                    raise CorruptError(f"{self._path(mark)} has the intent of {_mark_of(intent).name}")
            except CheckpointError as error:
                log.warning("an intent in memory cannot be read, so its files count for nothing", error=str(error))
                yield None
                return
            yield Held(intent, blank)

    def forget_ended(self) -> None:
        """Remove the notes of saves that have no marks any more, but for the newest ones."""
        marked = {mark.operation for mark in self.marks()} | self.parity.operations()
        with told(self.root):
            for name in (ENDED, WANTED, COPIED, DRIFTED):
                notes = [path for path in (self.root / name).iterdir() if OPERATION.match(path.name)]
                notes = [path for path in notes if path.name.partition("-")[0] not in marked]
                for path in sorted(notes, key=lambda each: each.stat().st_mtime)[: max(len(notes) - MOST_NOTES, 0)]:
                    path.unlink(missing_ok=True)

    def outcome_of(self, mark: Mark) -> str:
        """Return what has become of the save of a mark; empty while that is open, and GONE if the mark has gone."""
        path = self.root / ENDED / mark.operation
        is_marked = self._path(mark).exists()
        with suppress(FileNotFoundError), told(path):
            return path.read_text()
        return "" if is_marked else GONE

    def leave_behind(self, operation: str) -> list[Intent]:
        """Give up all snapshots but one: the job goes on from that one, or from storage.

        Their memory may be used again at once, unless somebody reads it. What is in storage stays there.

        Args:
            operation: of the one to keep; empty for none.

        Returns:
            An intent of each snapshot that was not known to be durable.

        """
        ended, left = self.ended(), {}
        for mark in self.marks():
            if mark.operation == operation or ended.get(mark.operation) == LEFT:
                continue
            if mark.operation not in ended and mark.operation not in left:
                with self.holding(mark) as held:
                    if held is not None:
                        left[mark.operation] = held.intent
            self.end(mark.operation, LEFT)
        for each in self.parity.operations() - {operation}:
            self.end(each, LEFT)
            self.parity.give_back(each)
        until = time.monotonic() + LEAVE_SECONDS
        going = [mark for mark in self.marks() if self.ended().get(mark.operation) == LEFT]
        while going := [mark for mark in going if not self.take(mark)]:
            if time.monotonic() > until:
                log.warning("an agent still reads snapshots that are given up", folder=str(self.root), count=len(going))
                break
            time.sleep(PAUSE_SECONDS)
        return [*left.values()]

    @contextmanager
    def _must_be_there(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StorageError(f"{self.root}, the memory of this job, has lost files: {error}") from error

    def _path(self, mark: Mark) -> Path:
        return self.root / INTENTS / mark.name

    def _new(self, mark: Mark) -> Path:
        return self.root / INTENTS / f".{mark.name}.new"


def _mark_of(intent: Intent) -> Mark:
    return Mark(intent.operation, intent.rank)


def _check_private(root: Path) -> None:
    """Raise InputError unless a directory is this user's alone. Everybody may make one in /dev/shm."""
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode):
        raise InputError(f"{root} is no directory (a link is none): pass another folder for the memory tier")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InputError(
            f"{root} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, and this is user "
            f"{os.geteuid()}: snapshots go only where no other user reads or writes. Pass another folder, or chmod 700"
        )
