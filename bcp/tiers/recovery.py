"""The newest snapshot in memory that is whole, found by all ranks of a job together, in any number and on any host.

Each rank tells what its host holds. Rank 0 chooses. Files that nobody has digested yet are digested where they are, and
the metadata are made as a commit would have made them. Every rank takes part, that of an empty host, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import attrgetter

import msgspec
import numpy as np

from bcp._agree import collective_operation, gather_broadcast, gather_scatter
from bcp._messages.tiers import Digested, HeldRanks, Holdings, Intent, MadeMetadata, Recovery
from bcp._sockets import new_token
from bcp.errors import BcpError, CorruptError
from bcp.format.metadata import encode_metadata
from bcp.format.receipt import receipt_digest
from bcp.plan.holders import Holding, Whole, divide, newest_whole
from bcp.protocols import Agreement, Backend, Coordinator
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import digested
from bcp.tiers.folder import Mark, NodeFolder
from bcp.tiers.intent import commit_of
from bcp.tiers.near import Copy, NearBackend
from bcp.tiers.peer import NoAgent, PeerMemory

__all__ = ["Found", "Reach", "find_whole"]

Reach = Callable[[str, str, bytes], Backend]
THIS_HOST = "this host"
DIGEST_BYTES = 16


def peer(name: str, address: str, token: bytes) -> Backend:
    """Return the memory of another host, read through its agent."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return NoAgent(name)
    return PeerMemory((host.strip("[]"), int(port)), token)


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot in memory that all ranks can load.

    Attributes:
        operation: id of the save.
        step: of the training.
        storage: reads it.
        reasons: why newer ones are not whole.
    """

    operation: str
    step: int
    storage: NearBackend
    reasons: Sequence[str]


async def find_whole(
    ranks: Coordinator, folder: NodeFolder, node: str, patience: float, reach: Reach = peer
) -> Found | None:
    """Agree with all ranks on the newest whole snapshot in the memories of their hosts; None if there is none.

    Args:
        ranks: of the job, all of them.
        folder: the memory of this rank's host.
        node: name of this host, another one for each host.
        patience: seconds that a rank may be silent.
        reach: returns the memory of another host, by its name, the address of its agent and the job's secret.

    Raises:
        PeerError: another rank has failed.

    """
    async with collective_operation(ranks.begin("find a snapshot in memory", patience)) as agreement:
        own = await in_thread(_holdings, folder, node)
        leader = _Leader() if ranks.rank == 0 else None
        while True:
            answer = await _chosen(agreement, ranks.rank, own, leader)
            await in_thread(folder.put_token, answer.token)
            if not answer.operation:
                return None
            made = await _metadata(agreement, ranks.rank, folder, answer, leader)
            if made.metadata:
                copies = _copies(answer, folder, node, reach)
                return Found(answer.operation, answer.step, NearBackend(made.metadata, copies), answer.reasons)


@dataclass(slots=True)
class _Leader:
    """What rank 0 knows.

    Attributes:
        damaged: hosts and operations whose files cannot be used, and why.
        host_of: the host of each rank.
        whole: the snapshot that was chosen last.
        reader_of: who digests the files of each rank that has saved.
    """

    damaged: dict[tuple[int, str], str] = field(default_factory=dict)
    host_of: Sequence[int] = ()
    whole: Whole | None = None
    reader_of: Sequence[int] = ()

    def choose(self, messages: Sequence[bytes]) -> Sequence[bytes]:
        """Choose the snapshot, and divide the digests."""
        told = Holdings.decode_all(messages)
        names = list(dict.fromkeys(each.node for each in told))
        number = {name: host for host, name in enumerate(names)}
        self.host_of = [number[each.node] for each in told]
        first = {each.node: each for each in reversed(told)}
        token = next((each.token for each in told if each.token), b"") or new_token().encode()
        held = [[_holding(each) for each in first[name].held] for name in names]
        self.whole, why = newest_whole(held, self.damaged)
        reasons = (*self.damaged.values(), *why.values())
        if self.whole is None:
            return [Recovery("", 0, reasons, token=token).encode()] * len(messages)
        self.reader_of = divide(self.whole, self.host_of).tolist()
        whole, readers = self.whole, np.array(self.reader_of)
        teller = self.reader_of[0]
        return [
            Recovery(
                whole.operation,
                whole.step,
                reasons,
                tuple(names),
                holder=whole.holder.astype("<i8").tobytes(),
                begin=whole.begin.astype("<i8").tobytes(),
                digests=np.flatnonzero(readers == reader).astype("<i8").tobytes(),
                addresses=tuple(first[name].address for name in names),
                token=token,
                tells=reader == teller,
            ).encode()
            for reader in range(len(messages))
        ]

    async def make(self, messages: Sequence[bytes]) -> bytes:
        """Make the metadata; or note whose files are damaged."""
        assert self.whole is not None  # noqa: S101 -- choose() came before
        told = Digested.decode_all(messages)
        errors = {reader: each.error for reader, each in enumerate(told) if each.error}
        for reader, error in errors.items():
            self.damaged[self.host_of[reader], self.whole.operation] = f"step {self.whole.step}: {error}"
        if errors:
            return MadeMetadata(b"", next(iter(errors.values()))).encode()
        receipts: dict[int, bytes] = {}
        for each in told:
            for number, rank in enumerate(_numbers(each.ranks)):
                receipts[rank] = each.receipts[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        teller = told[self.reader_of[0]]
        intent = Intent.decode(teller.intent)
        commit = commit_of(intent, b"".join(receipts[rank] for rank in range(intent.world_size)))
        return MadeMetadata(encode_metadata(teller.layout, commit)).encode()


async def _chosen(agreement: Agreement, rank: int, own: Holdings, leader: _Leader | None) -> Recovery:
    choose = leader.choose if leader else _nobody
    return Recovery.decode(await gather_scatter(agreement, "memory", rank, own.encode(), choose), sender=0)


def _nobody(_: Sequence[bytes]) -> Sequence[bytes]:
    raise BcpError("only rank 0 chooses a snapshot")


async def _metadata(
    agreement: Agreement, rank: int, folder: NodeFolder, answer: Recovery, leader: _Leader | None
) -> MadeMetadata:
    """Digest this reader's share; return the metadata that rank 0 makes of all shares."""

    async def make(messages: Sequence[bytes]) -> bytes:
        if leader is None:
            raise BcpError("only rank 0 makes metadata")
        return await leader.make(messages)

    own = await _digests(folder, answer)
    return MadeMetadata.decode(await gather_broadcast(agreement, "digests", rank, own.encode(), make), sender=0)


async def _digests(folder: NodeFolder, answer: Recovery) -> Digested:
    """Digest the files of some ranks, unless that was done before; an error is told, and is none of this rank."""
    receipts, intent, layout = [], b"", b""
    ranks = _numbers(answer.digests)
    try:
        for number, saved in enumerate(ranks):
            with folder.holding(Mark(answer.operation, saved)) as held:
                if held is None:
                    raise CorruptError(f"the files of rank {saved} have gone from {folder.root}")
                receipts.append(receipt_digest(await digested(folder.files, held.blank)))
                if answer.tells and not number:
                    intent = msgspec.structs.replace(held.intent, receipt=b"").encode()
                    layout = await in_thread(folder.layout, held.intent.layout)
    except BcpError as error:
        return Digested(b"", b"", error=str(error))
    return Digested(answer.digests, b"".join(receipts), intent, layout)


def _holdings(folder: NodeFolder, node: str) -> Holdings:
    """List the marked files of this host; damaged intents count for nothing. Blocks."""
    found = []
    for operation, group in groupby(folder.marks(), attrgetter("operation")):
        with ExitStack() as stack:
            entered = [stack.enter_context(folder.holding(mark)) for mark in group]
            held = [each.intent for each in entered if each is not None]
        if held:
            ranks = np.array(sorted(intent.rank for intent in held), "<i8").tobytes()
            found.append(HeldRanks(operation, held[0].step, held[0].world_size, ranks))
    return Holdings(node, tuple(found), folder.address(), folder.token())


def _holding(held: HeldRanks) -> Holding:
    return Holding(held.operation, held.step, held.world_size, np.frombuffer(held.ranks, "<i8").astype(np.int64))


def _copies(answer: Recovery, folder: NodeFolder, node: str, reach: Reach) -> Mapping[int, Sequence[Copy]]:
    """Return the copies of the files of each rank that has saved: this host's first."""
    others = zip(answer.nodes, answer.addresses, strict=True)
    places = {name: Copy(name, reach(name, address, answer.token)) for name, address in others if name != node}
    places[node] = Copy(THIS_HOST, folder.files)
    begin, holder = _numbers(answer.begin), _numbers(answer.holder)
    copies = {}
    for rank, (first, stop) in enumerate(pairwise(begin)):
        names = sorted((answer.nodes[host] for host in holder[first:stop]), key=lambda name: name != node)
        copies[rank] = [places[name] for name in names]
    return copies


def _numbers(data: bytes) -> list[int]:
    return list(np.frombuffer(data, "<i8").tolist())
