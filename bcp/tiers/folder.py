"""The kept memory of one host: a directory on tmpfs with data files, intents and layouts, for one job.

The names of files have rank and operation. So all generations lie side by side, as do copies from other hosts. The
files of a rank count once they are *marked*: their intent has its final name. A mark is a rename, so that a process
that is killed leaves files that count whole, or not at all.

Whoever reads marked files holds a shared lock on the mark. Whoever takes their memory for the next snapshot needs an
exclusive one, and removes the mark first. The kernel gives up the locks of a process that dies.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bcp._log import log
from bcp._messages.tiers import Intent, Sources
from bcp.backends import LocalBackend
from bcp.errors import CheckpointError, CorruptError, InputError, MessageError, StorageError
from bcp.format.container import digest
from bcp.format.metadata import OPERATION, owner_of, receipt_key
from bcp.format.receipt import Receipt
from bcp.plan.shards import KINDS
from bcp.runtime.process import in_forked_child
from bcp.tiers.intent import decode_intent, encode_intent

__all__ = ["GONE", "LEFT", "Held", "Mark", "Member", "NodeFolder", "Noted", "told"]

INTENTS, LAYOUTS, MEMBERS, ENDED, WANTED, LOCK = "intents", "layouts", "members", "ended", "wanted", "lock"
NAME = re.compile(r"([0-9]{5,10})-([0-9a-f]{16})")
SERVED, STARTING, TOKEN, ADDRESS = "served", "starting", "token", "address"
PRIVATE = 0o700

COPIES, COPIED, SOURCES, PORT, RUN = "copies", "copied", "sources", "port", "run"
FINISHED = "finished"

GONE = "GONE"
"""Of a snapshot whose memory newer ones have, before it was durable."""

LEFT = "LEFT"
"""End of a snapshot that a later life of the job has not gone on from. No recovery takes it, and nobody drains it."""

TRIES, PAUSE_SECONDS = 10, 0.1

LEAVE_SECONDS = 20.0
"""How long a new life of the job waits for an agent that is just sending what the job gives up."""

MOST_NOTES = 256
"""Notes of ended saves that stay after their files: trainers have to see them."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """The files of one rank in one save, which are whole."""

    operation: str
    rank: int

    @property
    def name(self) -> str:
        """Name of the intent."""
        return f"{self.rank:05d}-{self.operation}"


@dataclass(frozen=True, slots=True)
class Held:
    """Marked files that nobody takes away meanwhile.

    Attributes:
        intent: what they are.
        blank: the receipt of these files, with zeros for digests.
    """

    intent: Intent
    blank: Receipt


@dataclass(frozen=True, slots=True)
class Noted:
    """A note about files that are copies.

    Attributes:
        name: of the host whose files they are.
        age: when their fetch began, in seconds since the epoch.
    """

    name: str
    age: float


class Member:
    """A place among the ranks of a host. It is this process's own: a forked child has no part in it."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        _members.add(self)

    def close(self) -> None:
        """Leave the place to another process."""
        if self._fd is not None:
            _let_go(self._fd)
            self._fd = None

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Leave the place of an object that is dropped. A forked child has left it to its parent."""
        if self._fd is not None:
            close(self._fd)
            self._fd = None

    def leave_to_parent(self) -> None:
        """Close the file in a forked child; the lock stays the parent's."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_members: weakref.WeakSet[Member] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    for member in [*_members]:
        member.leave_to_parent()


in_forked_child(_leave_to_the_parent)


class NodeFolder:
    """The directory of one job on one host. All processes of the host share it: trainers, and the agent.

    Attributes:
        root: the directory.
        files: the same as storage, whose keys are those of a checkpoint.
    """

    def __init__(self, root: Path) -> None:
        """Take a directory, and make it if it is not there.

        Raises:
            InputError: it belongs to somebody else, or others may read or write it, or it is no directory.
            StorageError: it cannot be made.

        """
        self.root, self.files = root, LocalBackend(root)
        if not root.parent.is_dir():
            raise InputError(f"{root.parent} is no directory, so that no memory tier can be in it: pass another folder")
        with told(root):
            with suppress(FileExistsError):
                root.mkdir(PRIVATE)
            _check_private(root)
            for name in (INTENTS, LAYOUTS, MEMBERS, ENDED, WANTED, COPIES, COPIED):
                (root / name).mkdir(PRIVATE, exist_ok=True)

    def __repr__(self) -> str:
        return f"NodeFolder({str(self.root)!r})"

    def belong(self, url: str) -> None:
        """Be the memory of one run, with this path or URL; inside of :meth:`arranging`.

        What another run has left goes if all of it has ended.

        Raises:
            InputError: the directory is another run's, which lives or has snapshots that are not durable.

        """
        other = self._small(RUN).decode(errors="replace")
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
        with told(self.root / RUN):
            _write(self.root / RUN, url.encode(errors="surrogateescape"))

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

    def is_finished(self) -> bool:
        """Whether the run has ended well since a life of it began."""
        return (self.root / FINISHED).exists()

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

    def check_run(self, url: str) -> None:
        """Raise InputError if this is the memory of another run."""
        other = self._small(RUN).decode(errors="replace")
        if other and other != url:
            raise InputError(f"{self.root} is the memory of the run at {other}: pass its agent that place, not {url}")

    # -- the writer --------------------------------------------------------------------------------

    def put_layout(self, layout: bytes) -> bytes:
        """Keep an encoded layout, once; return its digest."""
        name = digest(layout)
        path = self.root / LAYOUTS / name.hex()
        with told(path):
            if not path.exists():
                _write(path, layout)
        return name

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
        with self._open(mark) as fd:
            if fd is None:
                return True
            if not _locked(fd, fcntl.LOCK_EX):
                return False
            with told(self._path(mark)):
                self._path(mark).unlink(missing_ok=True)
                (self.root / receipt_key(mark.rank, mark.operation)).unlink(missing_ok=True)
            return True

    def leave_serving(self, fd: int) -> bool:
        """Stop being the agent, unless a rank lives here; return whether it has stopped.

        A rank that joins behind this finds no agent, and starts one.
        """
        with self.arranging():
            if self._members():
                return False
            fcntl.flock(fd, fcntl.LOCK_UN)
            return True

    @contextmanager
    def serving(self) -> Iterator[int | None]:
        """Be the one agent of this host; None if there is one already. The number is for :meth:`leave_serving`.

        Those who ask whether there is one hold the lock for a moment, so it is tried several times.
        """
        with self._opened_lock(SERVED) as fd:
            is_first = _locked(fd, fcntl.LOCK_EX)
            for _ in range(TRIES):
                if is_first:
                    break
                time.sleep(PAUSE_SECONDS)
                is_first = _locked(fd, fcntl.LOCK_EX)
            yield fd if is_first else None

    def is_served(self) -> bool:
        """Whether an agent serves this host."""
        with self._opened_lock(SERVED) as fd:
            return not _locked(fd, fcntl.LOCK_SH)

    @contextmanager
    def starting(self) -> Iterator[bool]:
        """Be the one process of this host that starts an agent; False if another one does so."""
        with self._opened_lock(STARTING) as fd:
            yield _locked(fd, fcntl.LOCK_EX)

    @contextmanager
    def arranging(self) -> Iterator[None]:
        """Let no other process of the host take files and give them new names meanwhile."""
        with self._opened_lock(LOCK) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    def join(self, rank: int) -> Member:
        """Be a rank of this host until the member is closed, or this process ends; inside of :meth:`arranging`.

        Raises:
            InputError: another process is this rank.

        """
        path = self.root / MEMBERS / f"{rank:05d}"
        with told(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if _locked(fd, fcntl.LOCK_EX):
            return Member(fd)
        os.close(fd)
        raise InputError(
            f"another process is rank {rank} in {self.root}: each job needs a folder of its own, and an older process "
            "of this job has to end first"
        )

    def members(self) -> list[int]:
        """Return the ranks of this host whose processes live, in order."""
        with self.arranging():
            return self._members()

    def _members(self) -> list[int]:
        names = sorted(path.name for path in (self.root / MEMBERS).iterdir())
        return [int(name) for name in names if name.isdecimal() and self.is_member(int(name))]

    def is_member(self, rank: int) -> bool:
        """Whether a living process of this host is that rank; inside of :meth:`arranging`."""
        try:
            fd = os.open(self.root / MEMBERS / f"{rank:05d}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            return not _locked(fd, fcntl.LOCK_EX)
        finally:
            _let_go(fd)

    def data_files(self) -> dict[Mark, list[Path]]:
        """List all data files, marked or not, by the save and the rank in their names."""
        found: dict[Mark, list[Path]] = {}
        with told(self.root):
            for kind in KINDS:
                for path in sorted((self.root / kind).glob("*.safetensors")):
                    if owner := owner_of(f"{kind}/{path.name}"):
                        found.setdefault(Mark(owner[1], owner[0]), []).append(path)
        return found

    # -- the agent's door --------------------------------------------------------------------------

    def token(self) -> bytes:
        """Return the job's secret; empty if this host has none yet."""
        return self._small(TOKEN)

    def put_token(self, token: bytes) -> None:
        """Keep the job's secret, for the agent and the trainers of this host."""
        with told(self.root / TOKEN):
            if self.token() != token:
                _write(self.root / TOKEN, token, 0o600)

    def address(self) -> str:
        """Return where the agent of this host serves, as ``host:port``; empty if it does not."""
        return self._small(ADDRESS).decode()

    def put_address(self, address: str) -> None:
        """Say where the agent serves."""
        with told(self.root / ADDRESS):
            _write(self.root / ADDRESS, address.encode())

    def _small(self, name: str) -> bytes:
        try:
            with told(self.root / name):
                return (self.root / name).read_bytes()
        except FileNotFoundError:
            return b""

    def port(self) -> int:
        """Return the port at which the last agent of this host has served; 0 if there was none."""
        text = self._small(PORT)
        return int(text) if text.isdigit() else 0

    def put_port(self, port: int) -> None:
        """Keep the port for the next agent: other hosts know it."""
        with told(self.root / PORT):
            _write(self.root / PORT, str(port).encode())

    # -- copies of other hosts' files --------------------------------------------------------------

    def sources(self) -> Sources:
        """Return the hosts whose snapshots this one copies."""
        try:
            return Sources.decode(self._small(SOURCES), sender=0)
        except MessageError:
            return Sources((), ())

    def put_sources(self, sources: Sources) -> None:
        """Say whose snapshots this host is to copy."""
        with told(self.root / SOURCES):
            _write(self.root / SOURCES, sources.encode())

    def note_copies(self, marks: Iterable[Mark], name: str) -> None:
        """Note that these files are copies of a host's, before they are fetched."""
        for mark in marks:
            path = self.root / COPIES / mark.name
            with told(path):
                if not path.exists():
                    _write(path, name.encode())

    def copies(self) -> dict[Mark, Noted]:
        """Return the files that are copies, whole or not, and whose."""
        found = {}
        with told(self.root):
            for path in (self.root / COPIES).iterdir():
                if name := NAME.fullmatch(path.name):
                    with suppress(FileNotFoundError):
                        found[Mark(name[2], int(name[1]))] = Noted(path.read_text(), path.stat().st_mtime)
        return found

    def forget_copy(self, mark: Mark) -> None:
        """Forget that files were copies: they are gone."""
        (self.root / COPIES / mark.name).unlink(missing_ok=True)

    def note_copied(self, operation: str, number: int) -> None:
        """Note that another host has copies of all files of a snapshot; hosts are told apart by a number."""
        path = self.root / COPIED / f"{operation}-{number}"
        with told(path):
            path.touch(0o600)

    def is_copied(self, operation: str, count: int) -> bool:
        """Whether so many other hosts have copies of all files that this host has of a snapshot."""
        return all((self.root / COPIED / f"{operation}-{number}").exists() for number in range(1, count + 1))

    # -- what has become of saves ------------------------------------------------------------------

    def end(self, operation: str, outcome: str) -> None:
        """Note what has become of a save; nobody makes it durable again. One that was left behind stays so."""
        path = self.root / ENDED / operation
        with told(path):
            if outcome == LEFT or self._small(f"{ENDED}/{operation}") != LEFT.encode():
                _write(path, outcome.encode())

    def ended(self) -> dict[str, str]:
        """Return what has become of each save that has ended, by its operation."""
        found = {}
        with told(self.root):
            for path in (self.root / ENDED).iterdir():
                if OPERATION.fullmatch(path.name):
                    found[path.name] = path.read_text()
        return found

    def forget_ended(self) -> None:
        """Remove the notes of saves that have no marks any more, but for the newest ones."""
        marked = {mark.operation for mark in self.marks()}
        with told(self.root):
            for name in (ENDED, WANTED, COPIED):
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

    def want(self, operation: str) -> None:
        """Let a snapshot become durable that was to stay in memory: the job goes on from it."""
        path = self.root / WANTED / operation
        with told(path):
            path.touch(0o600)

    def wanted(self) -> set[str]:
        """Return the operations of snapshots that shall become durable, whatever their intents say."""
        with told(self.root):
            return {path.name for path in (self.root / WANTED).iterdir()}

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
        until = time.monotonic() + LEAVE_SECONDS
        going = [mark for mark in self.marks() if self.ended().get(mark.operation) == LEFT]
        while going := [mark for mark in going if not self.take(mark)]:
            if time.monotonic() > until:
                log.warning("an agent still reads snapshots that are given up", folder=str(self.root), count=len(going))
                break
            time.sleep(PAUSE_SECONDS)
        return [*left.values()]

    # -- readers -----------------------------------------------------------------------------------

    def marks(self) -> list[Mark]:
        """List all marks, by operation and rank."""
        with told(self.root):
            names = [NAME.fullmatch(path.name) for path in (self.root / INTENTS).iterdir()]
        return sorted(Mark(name[2], int(name[1])) for name in names if name)

    def ages(self) -> dict[Mark, float]:
        """Return when each mark was prepared, in seconds since the epoch."""
        found = {}
        for mark in self.marks():
            with suppress(FileNotFoundError), told(self._path(mark)):
                found[mark] = self._path(mark).stat().st_mtime
        return found

    def is_marked(self, mark: Mark) -> bool:
        """Whether files count."""
        return self._path(mark).exists()

    @contextmanager
    def holding(self, mark: Mark) -> Iterator[Held | None]:
        """Keep marked files as they are for the time of the context; None if they do not count any more.

        An intent that is damaged counts for nothing, and is logged.
        """
        with self._open(mark) as fd:
            if fd is None or not _locked(fd, fcntl.LOCK_SH) or not _is_named(fd, self._path(mark)):
                yield None
                return
            try:
                intent, blank = decode_intent(_contents(fd), str(self._path(mark)))
                if _mark_of(intent) != mark:
                    raise CorruptError(f"{self._path(mark)} has the intent of {_mark_of(intent).name}")
            except CheckpointError as error:
                log.warning("an intent in memory cannot be read, so its files count for nothing", error=str(error))
                yield None
                return
            yield Held(intent, blank)

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

    # -- details -----------------------------------------------------------------------------------

    @contextmanager
    def _opened_lock(self, name: str) -> Iterator[int]:
        try:
            with told(self.root / name):
                fd = os.open(self.root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError as error:
            raise StorageError(f"{self.root}, the memory of this job, has gone: {error}") from error
        try:
            yield fd
        finally:
            _let_go(fd)

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

    @contextmanager
    def _open(self, mark: Mark) -> Iterator[int | None]:
        """Open the file of a mark; None if it is not there."""
        try:
            fd = os.open(self._path(mark), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            _let_go(fd)


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


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _let_go(fd: int) -> None:
    """Give a lock up, and close its file. A child that was forked meanwhile has the file, too, and would keep it."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _is_named(fd: int, path: Path) -> bool:
    """Whether a descriptor is still the file of that name: it may have been removed before the lock."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _contents(fd: int) -> bytes:
    nbytes = os.fstat(fd).st_size
    return os.pread(fd, nbytes, 0)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a small file whole; several processes may do so at once."""
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    temp.touch(mode, exist_ok=False)
    temp.write_bytes(data)
    temp.rename(path)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Raise StorageError, which names the file, for an error of the system; a missing file is the caller's business."""
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        raise StorageError(f"the memory tier failed at {path}: {error}") from error
