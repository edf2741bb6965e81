"""Find the whole snapshots in memory, and open one, by all ranks of a job, in any number and on any hosts.

Each rank tells what its host holds. Rank 0 lists the snapshots whose files all have holders. To open one, files that
nobody has digested yet are digested where they are, and the metadata are made as a commit would have made them. Every
rank takes part, that of an empty host, too.
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
from bcp._log import log
from bcp._messages.tiers import (
    Digested,
    HeldRanks,
    Holdings,
    Intent,
    MadeMetadata,
    Recovery,
    Sources,
    WholeSnapshots,
)
from bcp._sockets import new_token
from bcp.coordinators.hosts import identity
from bcp.errors import BcpError, CorruptError, InputError
from bcp.events import OWN_HOST, STORED
from bcp.format.metadata import encode_metadata
from bcp.format.receipt import receipt_digest
from bcp.plan.holders import Holding, Whole, divide, judged, newest_whole
from bcp.plan.parity import Stripe, groups_of
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

__all__ = ["Durable", "Found", "Hosts", "Memories", "Reach", "Snapshot", "find_whole", "newest_held"]

Reach = Callable[[str, str, bytes], Backend]
Durable = Callable[[str], Backend]
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot in memory that all ranks have opened.

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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot whose files all have holders, as hosts have told.

    Attributes:
        operation: id of the save.
        step: of the training.
    """

    operation: str
    step: int


class Memories:
    """The memories of all hosts of a job, as one rank sees them.

    Attributes:
        hosts: of the job.
        host_of: number of the host of each rank.
        snapshots: whole ones, the newest first. The files of some may turn out to be damaged.
    """

    def __init__(
        self, ranks: Coordinator, patience: float, folder: NodeFolder, node: str, told: WholeSnapshots, leader: _Leader
    ) -> None:
        self.hosts = Hosts(told.nodes, told.addresses, told.reasons)
        self.snapshots = tuple(map(Snapshot, told.operations, told.steps))
        self._ranks, self._patience, self._folder, self._node = ranks, patience, folder, node
        self._token, self._leader = told.token, leader
        self.host_of: Sequence[int] = unpacked(told.host_of).tolist()

    async def open(self, operation: str, durable: Durable, reach: Reach = peer_at) -> Found:
        """Open a whole snapshot. Collective.

        Args:
            operation: of the snapshot.
            durable: returns storage at the place of a checkpoint, whose files are the last copies.
            reach: returns the memory of another host, by its name, the address of its agent and the job's secret.

        Raises:
            CorruptError: no host has files of a rank that are intact.
            PeerError: another rank has failed.

        """
        [snapshot] = [each for each in self.snapshots if each.operation == operation]
        rank, name = self._ranks.rank, f"open the snapshot of step {snapshot.step} in memory"
        async with collective_operation(self._ranks.begin(name, self._patience)) as agreement:
            while True:
                answer = partial(self._leader.holders, snapshot)
                told = Recovery.decode(await gather_broadcast(agreement, "holders", rank, b"", answer), sender=0)
                if not told.world_size:
                    break
                whole = _whole(snapshot, told)
                share = (await _digests(self._folder, whole, self.host_of, rank)).encode()
                make = partial(self._leader.make, whole)
                answered = await gather_broadcast(agreement, "digests", rank, share, make)
                made = MadeMetadata.decode(answered, sender=0)
                if made.metadata:
                    last = Copy(STORED, durable(made.place), "storage")
                    storage = NearBackend(made.metadata, self._copies(whole, reach, last))
                    count = len({*whole.holder.tolist()})
                    return Found(operation, snapshot.step, made.place, count, storage.metrics, storage)
        raise CorruptError(f"the snapshot of step {snapshot.step} in memory is not whole any more: {told.reason}")

    def _copies(self, whole: Whole, reach: Reach, last: Copy) -> Mapping[int, Sequence[Copy]]:
        """Return the copies of the files of each rank that has saved: this host's first, and parity behind hosts."""
        node, copies = self._node, dict[int, list[Copy]]()
        others = zip(self.hosts.names, self.hosts.addresses, strict=True)
        places = {name: Copy(name, reach(name, address, self._token), "host") for name, address in others}
        places[node] = Copy(OWN_HOST, self._folder.files)
        for rank in np.flatnonzero(whole.is_held()).tolist():
            names = (self.hosts.names[host] for host in whole.of(rank).tolist())
            copies[rank] = [places[name] for name in sorted(names, key=lambda name: name != node)]
        rebuilt = rebuilt_copies(whole, [places[name] for name in self.hosts.names], copies)
        for rank in range(whole.world_size):
            copies.setdefault(rank, []).extend([*([rebuilt[rank]] if rank in rebuilt else []), last])
        return copies


async def find_whole(
    ranks: Coordinator,
    opened: Callable[[], NodeFolder],
    node: str,
    patience: float,
    branch: Callable[[], Awaitable[str | None]] | None = None,
) -> Memories:
    """Agree with all ranks on the whole snapshots in the memories of their hosts.

    Args:
        ranks: of the job, all of them.
        opened: returns the memory of this rank's host; called in a thread. Its error is told to all ranks.
        node: name of this host, another one for each host.
        patience: seconds that a rank may be silent.
        branch: returns that of the run, whose snapshots count alone, or None if none counts; asked on rank 0. Without
            it all count.

    Raises:
        PeerError: another rank has failed.

    """
    leader = _Leader(branch)  # rank 0 alone is asked
    async with collective_operation(ranks.begin("find the snapshots in memory", patience)) as agreement:
        folder = await capture_error(in_thread(opened))
        if isinstance(folder, BcpError):
            await gather_broadcast(agreement, "memory", ranks.rank, folder, leader.list)
            raise folder
        own = (await in_thread(_holdings, folder, node)).encode()
        answer = await gather_broadcast(agreement, "memory", ranks.rank, own, leader.list)
        told = WholeSnapshots.decode(answer, sender=0)
        await in_thread(folder.put_token, told.token)
    return Memories(ranks, patience, folder, node, told, leader)


async def newest_held(
    ranks: Coordinator, folder: NodeFolder, node: str, branch: str, patience: float
) -> tuple[int, str]:
    """Return step and operation of the newest snapshot that is whole on the hosts of these ranks; 0 and "" for none.

    Collective. ``branch`` is that of the run, whose snapshots count alone.
    """

    async def of_the_run() -> str:
        return branch

    async with collective_operation(ranks.begin("look for a snapshot in memory", patience)) as agreement:
        own = await capture_error(in_thread(_holdings, folder, node))
        message = own if isinstance(own, BcpError) else own.encode()
        answer = await gather_broadcast(agreement, "memory", ranks.rank, message, _Leader(of_the_run).list)
    told = WholeSnapshots.decode(answer, sender=0)
    return next(zip(told.steps, told.operations, strict=True), (0, ""))


@dataclass(slots=True)
class _Leader:
    """Rank 0's part.

    Attributes:
        branch: returns that of the run.
        damaged: hosts and operations whose files cannot be used, and why.
    """

    branch: Callable[[], Awaitable[str | None]] | None
    damaged: dict[tuple[int, str], str] = field(default_factory=dict)
    _there: Sequence[Sequence[Holding]] = ()
    _parity: Sequence[Sequence[Stripe]] = ()
    _host_of: Sequence[int] = ()

    async def list(self, messages: Sequence[bytes]) -> bytes:
        """List the whole snapshots, the newest first."""
        told = Holdings.decode_all(messages)
        first = {each.node: each for each in reversed(told)}
        names = list(dict.fromkeys(each.node for each in told))
        number = {name: host for host, name in enumerate(names)}
        if twins := sorted(name for name in names if len({each.host for each in told if each.node == name}) > 1):
            raise InputError(
                f"several hosts have the name {twins[0]!r} in the memory tier: give each host another one, as in "
                "bcp.Tiers(node=socket.gethostname())"
            )
        if apart := [each for each in told if each.inode != first[each.node].inode]:
            one, other = first[apart[0].node], apart[0]
            raise InputError(
                f"the ranks of host {one.node!r} have several folders in the memory tier: {one.root} and {other.root}. "
                "Pass one Tiers(folder=...) to all ranks of a host, or another Tiers(node=...) with each folder"
            )
        token = next((each.token for each in told if each.token), b"") or new_token().encode()
        held = [first[name].held for name in names]
        others = await self._of_other_branches(held)
        there = [[_holding(each) for each in one if each.operation not in others] for one in held]
        self._there, self._host_of = there, [number[each.node] for each in told]
        self._parity = await in_thread(stripes_in, [first[name].parity for name in names])
        snapshots, why = list[Whole](), list[str]()
        for _, whole in judged(there, parity=self._parity):
            if isinstance(whole, Whole):
                snapshots.append(whole)
            elif not snapshots:  # it is newer than all that can be loaded
                why.append(whole)
        return WholeSnapshots(
            token,
            tuple(names),
            tuple(first[name].address for name in names),
            packed(self._host_of),
            tuple(each.operation for each in snapshots),
            tuple(each.step for each in snapshots),
            (*why, *others.values()),
        ).encode()

    async def _of_other_branches(self, held: Sequence[Sequence[HeldRanks]]) -> Mapping[str, str]:
        """Return the snapshots that are not of the run as it is now, and why, by their operations."""
        if self.branch is None:
            return {}
        branch = await self.branch()
        return {
            each.operation: f"step {each.step} in memory is of another run, or the run has gone back since"
            for one in held
            for each in one
            if each.branch != branch
        }

    async def holders(self, snapshot: Snapshot, _: Sequence[bytes]) -> bytes:
        """Tell which hosts have the files of a snapshot, without those that are damaged."""
        operation = snapshot.operation
        of_it = [[each for each in one if each.operation == operation] for one in self._there]
        whole, why = newest_whole(of_it, self.damaged, self._parity)
        if whole is not None:
            return Recovery(
                whole.world_size,
                packed(whole.holder),
                packed(whole.begin),
                rebuilt=packed(whole.rebuilt),
                groups=tuple(map(held_group, whole.groups)),
            ).encode()
        damaged = [reason for (_host, other), reason in self.damaged.items() if other == operation]
        return Recovery(0, reason="; ".join((*damaged, *why.values()))).encode()

    async def make(self, whole: Whole, messages: Sequence[bytes]) -> bytes:
        """Make the metadata; or note whose files are damaged."""
        told = Digested.decode_all(messages)
        errors = {reader: each.error for reader, each in enumerate(told) if each.error}
        for reader, error in errors.items():
            log.warning("the files of a host are passed over", step=whole.step, reason=error)
            self.damaged[self._host_of[reader], whole.operation] = error
        if errors:
            return MadeMetadata(b"").encode()
        receipts: dict[int, bytes] = {}
        for each in told:
            for number, rank in enumerate(unpacked(each.ranks).tolist()):
                receipts[rank] = each.receipts[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        [teller] = [each for each in told if each.intent]
        intent = Intent.decode(teller.intent)
        commit = commit_of(intent, b"".join(receipts[rank] for rank in range(whole.world_size)))
        return MadeMetadata(encode_metadata(teller.layout, commit), intent.place).encode()


async def _digests(folder: NodeFolder, whole: Whole, host_of: Sequence[int], rank: int) -> Digested:
    """Digest the files of this reader's share, unless that was done before.

    An error is told, and is none of this rank. The reader with the files of rank 0 tells intent and layout, too.
    """
    receipts, intent, layout = [], b"", b""
    ranks = np.flatnonzero(divide(whole, host_of) == rank)
    try:
        for saved in ranks.tolist():
            receipt, known = await _known(folder, Mark(whole.operation, saved))
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
    there = folder.root.stat()
    return Holdings(
        node,
        tuple(found),
        folder.address(),
        folder.token(),
        identity(),
        held_parity(folder),
        str(folder.root),
        f"{there.st_dev}:{there.st_ino}",
    )


def _holding(held: HeldRanks) -> Holding:
    return Holding(held.operation, held.step, held.world_size, unpacked(held.ranks))


def _whole(snapshot: Snapshot, told: Recovery) -> Whole:
    return Whole(
        snapshot.operation,
        snapshot.step,
        told.world_size,
        unpacked(told.holder),
        unpacked(told.begin),
        unpacked(told.rebuilt),
        [group_of(each) for each in told.groups],
    )
