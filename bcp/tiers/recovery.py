"""Find the newest whole snapshot in memory, by all ranks of a job, in any number and on any hosts.

Each rank tells what its host holds. Rank 0 chooses. Files that nobody has digested yet are digested where they are, and
the metadata are made as a commit would have made them. Every rank takes part, that of an empty host, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter

import numpy as np

from bcp._agree import capture_error, collective_operation, gather_broadcast
from bcp._messages.tiers import Digested, HeldRanks, Holdings, Intent, MadeMetadata, Recovery, Sources
from bcp._sockets import new_token
from bcp.coordinators.hosts import identity
from bcp.errors import BcpError, CorruptError, InputError
from bcp.format.metadata import encode_metadata
from bcp.format.receipt import receipt_digest
from bcp.plan.holders import Holding, Whole, divide, newest_whole
from bcp.plan.parity import groups_of
from bcp.protocols import Backend, Coordinator
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import digested
from bcp.tiers.folder import NodeFolder
from bcp.tiers.intent import commit_of
from bcp.tiers.near import Copy, NearBackend
from bcp.tiers.notes import LEFT, Mark
from bcp.tiers.packing import packed, unpacked
from bcp.tiers.parity import group_of, held_group, held_parity, known_intent, rebuilt_copies, stripes_in
from bcp.tiers.peer import peer_at

__all__ = ["Found", "Hosts", "Reach", "find_whole"]

Reach = Callable[[str, str, bytes], Backend]
THIS_HOST = "this host"
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot in memory that all ranks can load.

    Attributes:
        operation: id of the save.
        step: of the training.
        place: of its checkpoint below the durable root, whether it is there or not.
        hosts: how many of them have files of it.
        metrics: of the step.
        storage: reads it.
    """

    operation: str
    step: int
    place: str
    hosts: int
    metrics: Mapping[str, float]
    storage: NearBackend


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts of a job.

    Attributes:
        names: in the order of their first ranks.
        addresses: where their agents serve; empty for one that serves nobody.
        reasons: why snapshots that are newer than the chosen one, or all of them, are passed over.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    reasons: tuple[str, ...] = ()

    def copied_by(self, name: str, copies: int, stride: int) -> Sources:
        """Return the hosts whose snapshots one host copies: those ``stride`` hosts before it, twice as many, and so on.

        Example:
            >>> Hosts(("a", "b", "c", "d"), ("a:1", "b:1", "c:1", "d:1")).copied_by("b", copies=2, stride=1).nodes
            ('a', 'd')

        """
        place, count = self.names.index(name), len(self.names)
        before = dict.fromkeys((place - stride * number) % count for number in range(1, copies + 1))
        chosen = [each for each in before if each != place]
        return Sources(tuple(self.names[each] for each in chosen), tuple(self.addresses[each] for each in chosen))

    def in_parity_with(self, name: str, most: int, stride: int) -> Sources:
        """Return the other hosts of a host's group with parity: the one before it first, and around.

        Example:
            >>> Hosts(("a", "b", "c", "d"), ("a:1", "b:1", "c:1", "d:1")).in_parity_with("c", most=4, stride=1).nodes
            ('b', 'a', 'd')

        """
        host = self.names.index(name)
        [group] = [each for each in groups_of(len(self.names), most, stride) if host in each]
        place, size = group.index(host), len(group)
        others = [group[(place - number) % size] for number in range(1, size)]
        addresses = tuple(self.addresses[each] for each in others)
        return Sources(tuple(self.names[each] for each in others), addresses, place if others else -1)


async def find_whole(
    ranks: Coordinator,
    opened: Callable[[], NodeFolder],
    node: str,
    patience: float,
    reach: Reach = peer_at,
    branch: Callable[[], Awaitable[str | None]] | None = None,
) -> tuple[Found | None, Hosts]:
    """Agree with all ranks on the newest whole snapshot in the memories of their hosts; None if there is none.

    All hosts of the job are returned, too, in the order of their first ranks.

    Args:
        ranks: of the job, all of them.
        opened: returns the memory of this rank's host; called in a thread. Its error is told to all ranks.
        node: name of this host, another one for each host.
        patience: seconds that a rank may be silent.
        reach: returns the memory of another host, by its name, the address of its agent and the job's secret.
        branch: returns that of the run, whose snapshots count alone, or None if none counts; asked on rank 0. Without
            it all count.

    Raises:
        PeerError: another rank has failed.

    """
    leader = _Leader(branch)  # rank 0 alone is asked
    async with collective_operation(ranks.begin("find a snapshot in memory", patience)) as agreement:
        folder = await capture_error(in_thread(opened))
        if isinstance(folder, BcpError):
            await gather_broadcast(agreement, "memory", ranks.rank, folder, leader.choose)
            raise folder
        own = (await in_thread(_holdings, folder, node)).encode()
        while True:
            told = await gather_broadcast(agreement, "memory", ranks.rank, own, leader.choose)
            answer = Recovery.decode(told, sender=0)
            await in_thread(folder.put_token, answer.token)
            hosts = Hosts(answer.nodes, answer.addresses, answer.reasons)
            if not answer.operation:
                return None, hosts
            share = (await _digests(folder, answer, ranks.rank)).encode()
            make = partial(leader.make, answer)
            made = MadeMetadata.decode(await gather_broadcast(agreement, "digests", ranks.rank, share, make), sender=0)
            if made.metadata:
                copies = _copies(answer, folder, node, reach)
                storage, count = NearBackend(made.metadata, copies), len({*unpacked(answer.holder).tolist()})
                return Found(answer.operation, answer.step, made.place, count, storage.metrics, storage), hosts


@dataclass(slots=True)
class _Leader:
    """Rank 0's part.

    Attributes:
        branch: returns that of the run.
        damaged: hosts and operations whose files cannot be used, and why.
    """

    branch: Callable[[], Awaitable[str | None]] | None
    damaged: dict[tuple[int, str], str] = field(default_factory=dict)

    async def choose(self, messages: Sequence[bytes]) -> bytes:
        """Choose the newest whole snapshot."""
        told = Holdings.decode_all(messages)
        first = {each.node: each for each in reversed(told)}
        names = list(dict.fromkeys(each.node for each in told))
        number = {name: host for host, name in enumerate(names)}
        if twins := sorted(name for name in names if len({each.host for each in told if each.node == name}) > 1):
            raise InputError(
                f"several hosts have the name {twins[0]!r} in the memory tier: give each host another one, as in "
                "bcp.Tiers(node=socket.gethostname())"
            )
        token = next((each.token for each in told if each.token), b"") or new_token().encode()
        held = [first[name].held for name in names]
        others: dict[str, str] = {}
        if self.branch is not None:
            branch = await self.branch()
            others = {
                each.operation: f"step {each.step} in memory is of another run, or the run has gone back since"
                for one in held
                for each in one
                if each.branch != branch
            }
        there = [[_holding(each) for each in one if each.operation not in others] for one in held]
        parity = await in_thread(stripes_in, [first[name].parity for name in names])
        whole, why = newest_whole(there, self.damaged, parity)
        reasons = (*self.damaged.values(), *why.values(), *others.values())
        addresses = tuple(first[name].address for name in names)
        if whole is None:
            return Recovery("", 0, 0, reasons, token, tuple(names), addresses).encode()
        return Recovery(
            whole.operation,
            whole.step,
            whole.world_size,
            reasons,
            token,
            tuple(names),
            addresses,
            packed([number[each.node] for each in told]),
            packed(whole.holder),
            packed(whole.begin),
            packed(whole.rebuilt),
            tuple(map(held_group, whole.groups)),
        ).encode()

    async def make(self, answer: Recovery, messages: Sequence[bytes]) -> bytes:
        """Make the metadata; or note whose files are damaged."""
        told, host_of = Digested.decode_all(messages), unpacked(answer.host_of).tolist()
        errors = {reader: each.error for reader, each in enumerate(told) if each.error}
        for reader, error in errors.items():
            self.damaged[host_of[reader], answer.operation] = f"step {answer.step}: {error}"
        if errors:
            return MadeMetadata(b"").encode()
        receipts: dict[int, bytes] = {}
        for each in told:
            for number, rank in enumerate(unpacked(each.ranks).tolist()):
                receipts[rank] = each.receipts[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        [teller] = [each for each in told if each.intent]
        intent = Intent.decode(teller.intent)
        commit = commit_of(intent, b"".join(receipts[rank] for rank in range(answer.world_size)))
        return MadeMetadata(encode_metadata(teller.layout, commit), intent.place).encode()


async def _digests(folder: NodeFolder, answer: Recovery, rank: int) -> Digested:
    """Digest the files of this reader's share, unless that was done before.

    An error is told, and is none of this rank. The reader with the files of rank 0 tells intent and layout, too.
    """
    receipts, intent, layout = [], b"", b""
    ranks = np.flatnonzero(divide(_whole(answer), unpacked(answer.host_of).tolist()) == rank)
    try:
        for saved in ranks.tolist():
            receipt, known = await _known(folder, Mark(answer.operation, saved))
            receipts.append(receipt)
            if saved == 0:
                intent, layout = known.with_receipt(b"").encode(), await in_thread(folder.layout, known.layout)
    except BcpError as error:
        return Digested(b"", b"", error=str(error))
    return Digested(packed(ranks), b"".join(receipts), intent, layout)


async def _known(folder: NodeFolder, mark: Mark) -> tuple[bytes, Intent]:
    """Return the digest of a rank's receipt, and its intent, from its files or from what is kept with parity."""
    with folder.holding(mark) as held:
        if held is not None:
            return receipt_digest(await digested(folder.files, held.blank)), held.intent
    known = await in_thread(known_intent, folder, mark)
    if known is None:
        raise CorruptError(f"the files of rank {mark.rank} have gone from {folder.root}")
    return receipt_digest(known.receipt), known


def _holdings(folder: NodeFolder, node: str) -> Holdings:
    """List the marked files of this host; damaged intents count for nothing. Blocks."""
    found, ended = [], folder.ended()
    for operation, group in groupby(folder.marks(), attrgetter("operation")):
        if ended.get(operation) == LEFT:
            continue
        with ExitStack() as stack:
            entered = [stack.enter_context(folder.holding(mark)) for mark in group]
            held = [each.intent for each in entered if each is not None]
        if held:
            ranks = sorted(intent.rank for intent in held)
            found.append(HeldRanks(operation, held[0].step, held[0].world_size, packed(ranks), held[0].branch))
    return Holdings(node, tuple(found), folder.address(), folder.token(), identity(), held_parity(folder))


def _holding(held: HeldRanks) -> Holding:
    return Holding(held.operation, held.step, held.world_size, unpacked(held.ranks))


def _whole(answer: Recovery) -> Whole:
    return Whole(
        answer.operation,
        answer.step,
        answer.world_size,
        unpacked(answer.holder),
        unpacked(answer.begin),
        unpacked(answer.rebuilt),
        [group_of(each) for each in answer.groups],
    )


def _copies(answer: Recovery, folder: NodeFolder, node: str, reach: Reach) -> Mapping[int, Sequence[Copy]]:
    """Return the copies of the files of each rank that has saved: this host's first, and last those from parity."""
    others = zip(answer.nodes, answer.addresses, strict=True)
    places = {name: Copy(name, reach(name, address, answer.token)) for name, address in others if name != node}
    places[node] = Copy(THIS_HOST, folder.files)
    whole, copies = _whole(answer), dict[int, list[Copy]]()
    for rank in np.flatnonzero(whole.is_held()).tolist():
        names = sorted((answer.nodes[host] for host in whole.of(rank).tolist()), key=lambda name: name != node)
        copies[rank] = [places[name] for name in names]
    rebuilt = rebuilt_copies(whole, [places[name] for name in answer.nodes], copies)
    for rank, copy in rebuilt.items():
        copies.setdefault(rank, []).append(copy)
    return copies
