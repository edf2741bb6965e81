"""The files of a lost host, as far as this host is the one that rebuilds them from parity.

Agents make a snapshot durable together, each the files of its host. So somebody has to have the files of a lost one.
The next host of its group rebuilds them, and then they are copies like any other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bcp._messages.tiers import ParityRecord
from bcp.errors import BcpError
from bcp.protocols import Backend
from bcp.runtime.threads import in_thread
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import Mark
from bcp.tiers.packing import unpacked
from bcp.tiers.parity import Rebuilt
from bcp.tiers.peer import peer_at

__all__ = ["Lost", "lost_before"]


@dataclass(frozen=True, slots=True)
class Lost:
    """A host whose files of a snapshot follow from parity.

    Attributes:
        name: of the host.
        marks: of its files.
        files: rebuilds them.
    """

    name: str
    marks: Sequence[Mark]
    files: Rebuilt


@asynccontextmanager
async def lost_before(folder: NodeFolder, operation: str) -> AsyncIterator[Lost | None]:
    """Return the host before this one in its group, if it does not serve its files of a snapshot any more.

    None if it does, if this host has its files already, or if there is no parity of them.

    Args:
        folder: the memory of this host.
        operation: id of the save.

    """
    record = await in_thread(_record, folder, operation)
    if record is None:
        yield None
        return
    members = [unpacked(each).tolist() for each in record.ranks]
    lost = (record.place - 1) % len(members)
    marks = [Mark(operation, rank) for rank in members[lost]]
    async with AsyncExitStack() as stack:
        files = dict[int, Backend]()
        for number in range(len(members)):
            there = [Mark(operation, rank) for rank in members[number]]
            files[number] = folder.files if number == record.place else await _reached(folder, record, number, there)
            stack.push_async_callback(files[number].aclose)
        is_here = all([await in_thread(folder.is_marked, mark) for mark in marks])
        if is_here or await _serves(files.pop(lost), marks):
            yield None
            return
        copies = {rank: [there] for number, there in files.items() for rank in members[number]}
        yield Lost(record.names[lost], marks, Rebuilt(operation, members, lost, files, copies))


def _record(folder: NodeFolder, operation: str) -> ParityRecord | None:
    with folder.parity.holding(operation) as record:
        return record


async def _reached(folder: NodeFolder, record: ParityRecord, number: int, marks: Sequence[Mark]) -> Backend:
    """Return the memory of a host of the group, which may have another address since the parity was made."""
    name, address, token = record.names[number], record.addresses[number], await in_thread(folder.token)
    files, sources = peer_at(name, address, token), await in_thread(folder.sources)
    now = dict(zip(sources.nodes, sources.addresses, strict=True)).get(name, address)
    if now == address or await _serves(files, marks):
        return files
    await files.aclose()
    return peer_at(name, now, token)


async def _serves(files: Backend, marks: Sequence[Mark]) -> bool:
    """Whether a host has all of these files, and an agent that says so."""
    try:
        for mark in marks:
            await files.get(f"intents/{mark.name}")
    except (FileNotFoundError, BcpError):
        return False
    return True
