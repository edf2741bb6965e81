"""Who lives on a host: ranks and the agent, each with a lock that the kernel gives up when its process dies."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bcp.errors import InputError, StorageError
from bcp.runtime.process import in_forked_child
from bcp.tiers.notes import told

__all__ = ["MEMBERS", "HostLocks", "Member", "held_contents", "let_go", "locked", "opened"]

MEMBERS, LOCK, SERVED, STARTING = "members", "lock", "served", "starting"
PAUSE_SECONDS = 0.02


class Member:
    """A place among the ranks of a host. It is this process's own: a forked child has no part in it."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        _members.add(self)

    def close(self) -> None:
        """Leave the place to another process."""
        if self._fd is not None:
            let_go(self._fd)
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


class HostLocks:
    """The locks of one host.

    Attributes:
        root: the directory of the job on this host.
    """

    root: Path

    @contextmanager
    def arranging(self) -> Iterator[None]:
        """Let no other process of the host take files and give them new names meanwhile."""
        with self._opened_lock(LOCK) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    @contextmanager
    def serving(self) -> Iterator[int | None]:
        """Be the one agent of this host; None if there is one already. The number is for :meth:`leave_serving`.

        Those who ask whether there is one share the lock for a moment. So it is tried again until it is had, or until
        it cannot be shared either.
        """
        with self._opened_lock(SERVED) as fd:
            while not (is_first := locked(fd, fcntl.LOCK_EX)) and locked(fd, fcntl.LOCK_SH):
                fcntl.flock(fd, fcntl.LOCK_UN)
                time.sleep(PAUSE_SECONDS)
            yield fd if is_first else None

    def leave_serving(self, fd: int) -> bool:
        """Stop being the agent, unless a rank lives here; return whether it has stopped.

        A rank that joins behind this finds no agent, and starts one.
        """
        with self.arranging():
            if self._members():
                return False
            fcntl.flock(fd, fcntl.LOCK_UN)
            return True

    def is_served(self) -> bool:
        """Whether an agent serves this host."""
        with self._opened_lock(SERVED) as fd:
            return not locked(fd, fcntl.LOCK_SH)

    @contextmanager
    def starting(self) -> Iterator[bool]:
        """Be the one process of this host that starts an agent; False if another one does so."""
        with self._opened_lock(STARTING) as fd:
            yield locked(fd, fcntl.LOCK_EX)

    def join(self, rank: int) -> Member:
        """Be a rank of this host until the member is closed, or this process ends; inside of :meth:`arranging`.

        Raises:
            InputError: another process is this rank.

        """
        path = self.root / MEMBERS / f"{rank:05d}"
        with told(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if locked(fd, fcntl.LOCK_EX):
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
            return not locked(fd, fcntl.LOCK_EX)
        finally:
            let_go(fd)

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
            let_go(fd)


def locked(fd: int, kind: int) -> bool:
    """Take a lock on an open file if nobody else has it; return whether it is taken."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def let_go(fd: int) -> None:
    """Give a lock up, and close its file. A child that was forked meanwhile has the file, too, and would keep it."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


@contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """Open a file, for a lock on it; None if it is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        let_go(fd)


def held_contents(fd: int | None, path: Path) -> bytes | None:
    """Share the lock on an open file, and return its contents; None if it was removed, or somebody removes it."""
    if fd is None or not locked(fd, fcntl.LOCK_SH):
        return None
    try:
        is_named = os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return None
    return os.pread(fd, os.fstat(fd).st_size, 0) if is_named else None
