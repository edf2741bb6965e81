"""The parity that one host keeps of other hosts' files: a stripe of each snapshot, and what is known of these files.

Intents and receipts are small, so they are kept as they are. A stripe counts once its record is there. Whoever reads a
stripe holds a shared lock on the record; whoever takes it away needs an exclusive one.
"""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bcp._log import log
from bcp._messages.tiers import Intent, ParityRecord
from bcp.errors import CheckpointError, CorruptError, MessageError
from bcp.format.container import seal, unseal
from bcp.tiers.intent import encode_intent
from bcp.tiers.locks import held_contents, locked, opened
from bcp.tiers.notes import Mark, told, write_small

__all__ = ["PARITY", "ParityFiles", "known_key", "operation_in", "stripe_key"]

PARITY = "parity"
MAGIC = b"BCPPRTY"
NAME = re.compile(r"(?:[0-9]{5,10}-)?([0-9a-f]{16})(\.xor|\.record)?")


def stripe_key(operation: str) -> str:
    """Return the key of the stripe of a snapshot."""
    return f"{PARITY}/{operation}.xor"


def known_key(mark: Mark) -> str:
    """Return the key of an intent whose receipt has digests: what is known of the files of another host."""
    return f"{PARITY}/{mark.name}"


def operation_in(key: str) -> str:
    """Return the save in the key of a stripe, or of what is known of other hosts' files; empty for other keys."""
    directory, _, name = key.partition("/")
    match = NAME.fullmatch(name) if directory == PARITY else None
    return "" if match is None or match[2] == ".record" else match[1]


class ParityFiles:
    """The stripes in the memory of one host.

    Attributes:
        root: the directory of the stripes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"ParityFiles({str(self.root)!r})"

    def operations(self) -> set[str]:
        """Return the saves that files are here of, whether they count or not."""
        with told(self.root):
            return {match[1] for path in self.root.iterdir() if (match := NAME.fullmatch(path.name))}

    def ages(self) -> dict[str, float]:
        """Return when each stripe that counts was whole, in seconds since the epoch, by its save."""
        found = {}
        with told(self.root):
            for path in self.root.glob("*.record"):
                with suppress(FileNotFoundError):
                    found[path.stem] = path.stat().st_mtime
        return found

    def stripe(self, operation: str) -> Path:
        """Return the path of a stripe."""
        return self.root / f"{operation}.xor"

    def put_known(self, mark: Mark, intent: Intent) -> None:
        """Keep what is known of a rank's files on another host: its intent, with the receipt that has digests."""
        path = self.root / mark.name
        with told(path):
            write_small(path, encode_intent(intent))

    def mark(self, record: ParityRecord) -> None:
        """Let a stripe, and what is known of the files in it, count from now on."""
        path = self._record(record.operation)
        with told(path):
            write_small(path, seal(record.encode(), MAGIC))

    @contextmanager
    def holding(self, operation: str) -> Iterator[ParityRecord | None]:
        """Keep a stripe as it is for the time of the context; None if it does not count.

        A record that is damaged counts for nothing, and is logged.
        """
        path = self._record(operation)
        with opened(path) as fd:
            data = held_contents(fd, path)
            if data is None:
                yield None
                return
            try:
                record = _decoded(data, str(path))
                if record.operation != operation:
                    raise CorruptError(f"{path} has the record of operation {record.operation}")
            except CheckpointError as error:
                log.warning("a record of parity cannot be read, so its stripe counts for nothing", error=str(error))
                yield None
                return
            yield record

    def give_back(self, operation: str, *, but_stripe: bool = False) -> bool:
        """Let a stripe count no more, and give its memory back; return False while somebody reads it.

        Args:
            operation: id of the save.
            but_stripe: leave the file of the stripe, for another one.

        """
        path = self._record(operation)
        with told(path), opened(path) as fd:
            if fd is not None and not locked(fd, fcntl.LOCK_EX):
                return False
            path.unlink(missing_ok=True)
            for other in (*self.root.glob(f"*-{operation}"), *([] if but_stripe else [self.stripe(operation)])):
                other.unlink(missing_ok=True)
        return True

    def _record(self, operation: str) -> Path:
        return self.root / f"{operation}.record"


def _decoded(data: bytes, where: str) -> ParityRecord:
    """Decode a record. Raises CheckpointError if it is damaged, or of another version of bcp."""
    payload = bytes(unseal(data, MAGIC, where, first=0))  # it has no tables
    try:
        return ParityRecord.decode(payload)
    except MessageError as error:
        raise CorruptError(f"{where} is no record of this version of bcp: {error}") from error
