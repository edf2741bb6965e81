"""Notes in the memory of one host, for its trainers, its agent and people: small files that are replaced whole."""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bcp._log import log
from bcp._messages.tiers import Drift, Sources, Traffic, Troubles, WrittenTwin
from bcp.errors import InputError, MessageError, StorageError
from bcp.format.metadata import OPERATION

__all__ = [
    "COMMITTED",
    "COPYING",
    "GONE",
    "LEFT",
    "NOTE_DIRECTORIES",
    "REFUSED",
    "STORING",
    "SUPERSEDED",
    "FullError",
    "Mark",
    "Noted",
    "Notes",
    "told",
    "write_small",
]

ENDED, WANTED, COPIES, COPIED, TWINS, DRIFTED = "ended", "wanted", "copies", "copied", "twins", "drifted"
NOTE_DIRECTORIES = ENDED, WANTED, COPIES, COPIED, TWINS, DRIFTED
TOKEN, ADDRESS, PORT, RUN, SOURCES, FINISHED = "token", "address", "port", "run", "sources", "finished"
WAY, LEAVING, TRAFFIC = "way", "leaving", "traffic"
NAME = re.compile(r"([0-9]{5,10})-([0-9a-f]{16})")

COPYING, STORING = "trouble-copying", "trouble-storing"
"""Names of the notes about an agent's troubles: with other hosts, and with storage."""

COMMITTED, REFUSED = "COMMITTED", "REFUSED"

SUPERSEDED = "SUPERSEDED"
"""End of a snapshot whose files of this host are in storage, and those of other hosts may have gone for a newer one.

Nothing is lost where they have not: the last host commits.
"""

GONE = "GONE"
"""Of a snapshot whose memory newer ones have, before it was durable."""

LEFT = "LEFT"
"""End of a snapshot that a later life of the job has not gone on from. No recovery takes it, and nobody drains it."""


class FullError(StorageError):
    """The file system of a memory has no room."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """The files of one rank in one save, which are whole."""

    operation: str
    rank: int

    @classmethod
    def of(cls, name: str) -> Mark | None:
        """Return the mark of that name; None if it is the name of none."""
        match = NAME.fullmatch(name)
        return None if match is None else cls(match[2], int(match[1]))

    @property
    def name(self) -> str:
        """Name of the intent."""
        return f"{self.rank:05d}-{self.operation}"


@dataclass(frozen=True, slots=True)
class Noted:
    """A note about files that are copies.

    Attributes:
        name: of the host whose files they are.
        age: when their fetch began, in seconds since the epoch.
    """

    name: str
    age: float


class Notes:
    """The notes of one host.

    Attributes:
        root: the directory of the job on this host.
    """

    root: Path

    # -- the agent's door --------------------------------------------------------------------------

    def token(self) -> bytes:
        """Return the job's secret; empty if this host has none yet."""
        return self._small(TOKEN)

    def put_token(self, token: bytes) -> None:
        """Keep the job's secret, for the agent and the trainers of this host."""
        with told(self.root / TOKEN):
            if self.token() != token:
                write_small(self.root / TOKEN, token, 0o600)

    def address(self) -> str:
        """Return where the agent of this host serves, as ``host:port``; empty if it does not."""
        return self._small(ADDRESS).decode()

    def put_address(self, address: str) -> None:
        """Say where the agent serves."""
        with told(self.root / ADDRESS):
            write_small(self.root / ADDRESS, address.encode())

    def port(self) -> int:
        """Return the port at which the last agent of this host has served; 0 if there was none."""
        text = self._small(PORT)
        return int(text) if text.isdigit() else 0

    def put_port(self, port: int) -> None:
        """Keep the port for the next agent: other hosts know it."""
        with told(self.root / PORT):
            write_small(self.root / PORT, str(port).encode())

    def way(self) -> str:
        """Return how the agent of this host was started, as a digest; empty if no trainer has started it."""
        return self._small(WAY).decode(errors="replace")

    def put_way(self, way: str) -> None:
        """Say how the agent was started. Nobody has asked this one to leave yet."""
        with told(self.root / WAY):
            (self.root / LEAVING).unlink(missing_ok=True)
            write_small(self.root / WAY, way.encode(), 0o600)

    def ask_to_leave(self, way: str) -> None:
        """Ask an agent that was started this way to end."""
        with told(self.root / LEAVING):
            write_small(self.root / LEAVING, way.encode(), 0o600)

    def is_to_leave(self) -> bool:
        """Whether the agent that was started last was asked to end."""
        return (self.root / LEAVING).exists() and self._small(LEAVING) == self._small(WAY)

    # -- whose memory it is ------------------------------------------------------------------------

    def run(self) -> str:
        """Return the path or URL of the run whose memory this is; empty if no run has used it yet."""
        return self._small(RUN).decode(errors="replace")

    def put_run(self, url: str) -> None:
        """Say whose memory this is."""
        with told(self.root / RUN):
            write_small(self.root / RUN, url.encode(errors="surrogateescape"))

    def check_run(self, url: str) -> None:
        """Raise InputError if this is the memory of another run."""
        if (other := self.run()) and other != url:
            raise InputError(f"{self.root} is the memory of the run at {other}: pass its agent that place, not {url}")

    def is_finished(self) -> bool:
        """Whether the run has ended well since a life of it began."""
        return (self.root / FINISHED).exists()

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
            write_small(self.root / SOURCES, sources.encode())

    def note_copies(self, marks: Iterable[Mark], name: str) -> None:
        """Note that these files are copies of a host's, before they are fetched."""
        for mark in marks:
            path = self.root / COPIES / mark.name
            with told(path):
                if not path.exists():
                    write_small(path, name.encode())

    def copies(self) -> dict[Mark, Noted]:
        """Return the files that are copies, whole or not, and whose."""
        found = {}
        with told(self.root):
            for path in (self.root / COPIES).iterdir():
                if mark := Mark.of(path.name):
                    with suppress(FileNotFoundError):
                        found[mark] = Noted(path.read_text(), path.stat().st_mtime)
        return found

    def forget_copy(self, mark: Mark) -> None:
        """Forget that files were copies: they are gone."""
        (self.root / COPIES / mark.name).unlink(missing_ok=True)
        self.forget_twin(mark)

    def note_twin(self, mark: Mark, written: WrittenTwin) -> None:
        """Note that a rank of this host writes the tensors of a rank of another host, before it does so."""
        path = self.root / TWINS / mark.name
        with told(path):
            write_small(path, written.encode())

    def twins(self) -> dict[Mark, WrittenTwin]:
        """Return the files that ranks of this host have written for others, and by whom; nobody has compared them."""
        found = {}
        with told(self.root):
            for path in (self.root / TWINS).iterdir():
                if mark := Mark.of(path.name):
                    with suppress(FileNotFoundError, MessageError):
                        found[mark] = WrittenTwin.decode(path.read_bytes())
        return found

    def forget_twin(self, mark: Mark) -> None:
        """Forget who has written files: they are copies like any other now, or they are gone."""
        (self.root / TWINS / mark.name).unlink(missing_ok=True)

    def put_traffic(self, traffic: Traffic) -> None:
        """Say how many bytes of copies the agent has made."""
        self._put_if_room(TRAFFIC, traffic.encode())

    def traffic(self) -> Traffic:
        """Return how many bytes of copies the last agent has made."""
        try:
            return Traffic.decode(self._small(TRAFFIC), sender=0)
        except MessageError:
            return Traffic(0, 0)

    def put_drift(self, drift: Drift, kind: int) -> None:
        """Note that a file was not what its owner has, for the trainers of this host; one note for each file."""
        self._put_if_room(f"{DRIFTED}/{drift.operation}-{drift.rank}-{kind}", drift.encode())

    def drifts(self) -> dict[str, Drift]:
        """Return the newest of these notes, by their names."""
        found = {}
        with told(self.root):
            for path in sorted((self.root / DRIFTED).iterdir()):
                with suppress(FileNotFoundError, MessageError):
                    found[path.name] = Drift.decode(path.read_bytes(), sender=0)
        return found

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
                write_small(path, outcome.encode())

    def ended(self) -> dict[str, str]:
        """Return what has become of each save that has ended, by its operation."""
        found = {}
        with told(self.root):
            for path in (self.root / ENDED).iterdir():
                if OPERATION.fullmatch(path.name):
                    found[path.name] = path.read_text()
        return found

    def newest_commit(self) -> float | None:
        """Return when the newest commit of a save was noted, in seconds since the epoch; None if there is none."""
        found = []
        for operation, outcome in self.ended().items():
            if outcome == COMMITTED:
                with suppress(FileNotFoundError), told(self.root / ENDED / operation):
                    found.append((self.root / ENDED / operation).stat().st_mtime)
        return max(found, default=None)

    # -- what the agent fails at -------------------------------------------------------------------

    def put_troubles(self, kind: str, troubles: Mapping[str, str]) -> None:
        """Say what the agent fails at, and why; empty once all goes well.

        A file system without room for the note does not end the agent.

        Args:
            kind: :data:`COPYING` or :data:`STORING`.
            troubles: the last error with each host, or with each snapshot.

        """
        data = Troubles(tuple(troubles), tuple(troubles.values())).encode()
        before = self._small(kind)
        if data != before and (troubles or before):
            self._put_if_room(kind, data)

    def troubles(self, kind: str) -> dict[str, str]:
        """Return what the agent fails at, and why."""
        try:
            troubles = Troubles.decode(self._small(kind), sender=0)
        except MessageError:
            return {}
        return dict(zip(troubles.places, troubles.reasons, strict=True))

    def want(self, operation: str) -> None:
        """Let a snapshot become durable that was to stay in memory: the job goes on from it."""
        path = self.root / WANTED / operation
        with told(path):
            path.touch(0o600)

    def wanted(self) -> set[str]:
        """Return the operations of snapshots that shall become durable, whatever their intents say."""
        with told(self.root):
            return {path.name for path in (self.root / WANTED).iterdir()}

    def awaited(self) -> set[str]:
        """Return the operations of those that have not ended: a job goes on from them, and storage has them not."""
        return self.wanted() - self.ended().keys()

    def _put_if_room(self, name: str, data: bytes) -> None:
        try:
            with told(self.root / name):
                write_small(self.root / name, data)
        except StorageError as error:
            log.info("an agent's note is not written", note=name, error=str(error))

    def _small(self, name: str) -> bytes:
        try:
            with told(self.root / name):
                return (self.root / name).read_bytes()
        except FileNotFoundError:
            return b""


def write_small(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a small file whole; several processes may do so at once."""
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        temp.touch(mode, exist_ok=False)
        temp.write_bytes(data)
        temp.rename(path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Raise StorageError, which names the file, for an error of the system; a missing file is the caller's business.

    It is a FullError if there is no room.
    """
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        kind = FullError if error.errno == errno.ENOSPC else StorageError
        raise kind(f"the memory tier failed at {path}: {error}") from error
