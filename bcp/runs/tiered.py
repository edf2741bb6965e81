"""The memory tier of a run on one rank: the way of its snapshots to storage, and back from the memories of the hosts.

Agents write to storage. A trainer copies and marks, and looks what has become of its marks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import anyio
import msgspec

from bcp._agree import capture_error, collective_operation, gather_broadcast
from bcp._calls import SaveCall, keep_call
from bcp._log import log
from bcp._messages.tiers import Attended, LeftBehind, Settled, Sources
from bcp._record import store_drained
from bcp._sockets import Tls
from bcp._text import hidden
from bcp.backends import resolve, shown
from bcp.backends.files import is_in_memory
from bcp.backends.place import place_of
from bcp.coordinators.hosts import here, identity, stated_address
from bcp.errors import BcpError, CorruptError, InputError, StorageError
from bcp.events import STORED, SaveResult, TierEvent, TierHappening
from bcp.options import SaveOptions
from bcp.planners import Framework
from bcp.policies.save import Moment, SavePolicy, as_save_policy, divided
from bcp.protocols import Backend, Coordinator, States
from bcp.runtime.threads import in_thread
from bcp.telemetry.watch import Watch
from bcp.tiers.copies import leave_twins
from bcp.tiers.folder import NodeFolder
from bcp.tiers.following import Followed
from bcp.tiers.meeting import Meeting, MeetingPlace, meet
from bcp.tiers.memory import TierMemory
from bcp.tiers.notes import COMMITTED, GONE, LEFT, REFUSED, SUPERSEDED, Mark
from bcp.tiers.options import Tiers
from bcp.tiers.recovery import Found, Hosts, Memories, Snapshot, find_whole, newest_held
from bcp.tiers.saving import Aim
from bcp.tiers.starting import await_agent, start_agent
from bcp.tiers.twins import Spread
from bcp.tiers.wire import split_address

__all__ = ["MEMORY", "GiveUp", "Tiered", "tiered"]

MEMORY = "memory/"
"""Before the operation of a snapshot: it is read from the memories of the hosts."""

LOOK_SECONDS = 0.1
ALONE_SECONDS = 30.0
"""How long a host may be without an agent before that is told."""

_LOOPBACK = "127.0.0.1"

HAPPENINGS: Mapping[str, TierHappening] = {
    GONE: "superseded",
    SUPERSEDED: "superseded",
    LEFT: "left",
    REFUSED: "refused",
}
"""Outcomes of snapshots that never become durable; any other one is damage."""

GiveUp = Callable[[Collection[tuple[str, str]]], Awaitable[Settled]]
"""Ends uploads in storage; takes place and operation of each."""


class Tiered:
    """The memory tier of a run on one rank.

    Attributes:
        found: the snapshot in memory that all ranks have opened last; None before :meth:`open`.
        policy: which saves become durable; None: all of them.
        branch: of the run.
        on_full: as in :class:`~bcp.Tiers`.
        survivors: whether ranks that are left may save alone.
    """

    def __init__(self, tiers: Tiers, url: str, options: SaveOptions, policy: SavePolicy | None) -> None:
        """Remember the arguments; nothing is opened yet."""
        self.on_full = tiers.on_full
        self._tiers, self._url, self._options, self.policy = tiers, url, options, policy
        self._root = tiers.root(url)  # the process may change its directory
        self._memory: TierMemory | None = None
        self._has_told, self._listen = False, ""
        self._memories: Memories | None = None
        self._served_at = time.monotonic()
        self._sources = Sources((), ())
        self._hosts, self._size = Hosts((), ()), 1
        self.survivors = tiers.survivors
        self.found: Found | None = None
        self.branch = ""
        self._watch = Watch("load", shown(url), observe=options.observe)

    # -- the way back ------------------------------------------------------------------------------

    async def find(self, ranks: Coordinator, branch: Callable[[], Awaitable[str | None]]) -> None:
        """Open the memory of this host, start its agent, and find the whole snapshots. Collective.

        Args:
            ranks: of the run.
            branch: returns that of the run; asked on rank 0.

        """
        await self.forget_found()
        shown_url, observe = shown(self._url), self._options.observe
        self._watch = Watch("load", shown_url, rank=ranks.rank, world_size=ranks.world_size, observe=observe)
        opened = partial(self._opened, ranks.rank, ranks.world_size)
        patience = 2 * self._options.timeout  # a rank may wait for its agent as long as that
        self._memories = await find_whole(ranks, opened, self._node, patience, branch)
        hosts = self._memories.hosts
        self._hosts, self._size = hosts, ranks.world_size
        self._sources = self._chosen(hosts)
        if self._tiers.copies == "auto":
            spread = Spread(hosts, self._memories.host_of, self._tiers.stride)
            self._joined.spread = spread if len(hosts.names) > 1 else None
        if ranks.rank == 0:
            self._tell(hosts, self._count(self._sources))

    @property
    def snapshots(self) -> Sequence[Snapshot]:
        """The whole snapshots that :meth:`find` has found, the newest first; the same on all ranks."""
        return () if self._memories is None else self._memories.snapshots

    async def open(self, operation: str) -> Found:
        """Open a whole snapshot, unless it is open already. Collective.

        Raises:
            CorruptError: no host has files of a rank that are intact.

        """
        assert self._memories is not None  # noqa: S101 -- find() was called before
        if self.found is None or self.found.operation != operation:
            await self.forget_found()
            try:
                self.found = await self._memories.open(operation, self._durable_at)
            except CorruptError as error:
                self.is_stale(operation, error)
                raise
        return self.found

    def _chosen(self, hosts: Hosts) -> Sources:
        """Return the hosts whose snapshots this one copies, or keeps the parity of; with twins the first save knows."""
        tiers = self._tiers
        if tiers.copies == "auto":
            return Sources((), ())
        if tiers.parity is not None:
            return hosts.in_parity_with(self._node, tiers.parity, tiers.stride)
        return hosts.copied_by(self._node, tiers.copies - 1, tiers.stride)

    def _count(self, sources: Sources) -> int:
        """Return how many other hosts copy this one: as many as it copies itself, and one with twins."""
        has_twins = self._memory is not None and self._memory.spread is not None
        return 1 if has_twins else len(sources.nodes)

    def _durable_at(self, place: str) -> Backend:
        """Return storage at the place of a checkpoint."""
        return resolve(f"{self._url}/{place}".rstrip("/"), self._options.storage_options, self._options.retries)

    async def meet(self, name: str, step: int, trouble: str, patience: float) -> Meeting:
        """Find the ranks that are left of this life of the job. Collective among them.

        Args:
            name: of the meeting, the same on these ranks and on no others.
            step: the last one that has ended on this rank.
            trouble: why the states are not those at its end; empty if they are.
            patience: seconds to wait for ranks that live and do not come.

        """
        folder = self._joined.folder
        place = MeetingPlace(name, self._hosts, await in_thread(folder.token), patience)
        return await meet(place, Attended(self._joined.rank, self._size, step, self._node, trouble))

    def coordinator(self, meeting: Meeting, tls: Tls | None) -> Coordinator:
        """Return a coordinator of the ranks that are left."""
        return meeting.coordinator(self._joined.rank, split_address(self._listen)[0], tls)

    async def newest(self, ranks: Coordinator) -> int:
        """Return the step of the newest snapshot that is whole on the hosts of these ranks; 0 for none. Collective."""
        folder, patience = self._joined.folder, self._options.timeout
        step, operation = await newest_held(ranks, folder, self._node, self.branch, patience)
        return step if operation else 0

    def _tell(self, hosts: Hosts, copies: int) -> None:
        """Tell of newer snapshots that are not whole, and of copies that the job has too few hosts for."""
        for reason in hosts.reasons:
            log.warning("a snapshot in memory is passed over: %s", reason)
            self._happened("stale", None, "", said=reason)
        if copies < (1 if self._tiers.copies == "auto" else self._tiers.copies - 1):
            log.warning(
                "the job has too few hosts for the copies that were asked for",
                copies=self._tiers.copies,
                hosts=len(hosts.names),
            )
        elif not copies and self._tiers.parity is not None:
            log.warning("the job has one host, so that there is no parity", parity=self._tiers.parity)

    def is_stale(self, operation: str, error: BcpError) -> None:
        """Tell that a snapshot cannot be loaded, and why."""
        [step] = [each.step for each in self.snapshots if each.operation == operation]
        self._happened("stale", step, operation, said=str(error))

    def loaded(self, found: Found) -> None:
        """Tell from where a resumption has read the bytes of this rank."""
        for name, nbytes in found.storage.read_nbytes.items():
            self._happened("read", found.step, found.operation, nbytes=nbytes, place=name)

    def became_durable(self, step: int, operation: str) -> None:
        """Tell that storage has the snapshot that the run has come back from."""
        self._happened("durable", step, operation)

    def _happened(
        self, what: TierHappening, step: int | None, operation: str, nbytes: int = 0, place: str = "", said: str = ""
    ) -> None:
        """Tell what happens to snapshots of earlier lives."""
        self._watch(TierEvent(what, step, operation, time.monotonic(), None, nbytes, place, hidden(said)))

    async def forget_found(self) -> None:
        """End the connections to other hosts and to storage."""
        found, self.found = self.found, None
        if found is not None:
            await found.storage.aclose()

    async def settle(self, ranks: Coordinator, *, keep: bool, give_up: GiveUp) -> Settled:
        """Give up all snapshots but the one that the run goes on from, which is to become durable. Collective.

        Args:
            ranks: of the run.
            keep: whether the run goes on from the snapshot that was found.
            give_up: ends uploads of the others in storage; called on rank 0.

        """
        found = self.found if keep else None
        own = await capture_error(in_thread(self._left, found))

        async def answer(messages: Sequence[bytes]) -> bytes:
            told = LeftBehind.decode_all(messages)
            left = {each for one in told for each in zip(one.places, one.operations, strict=True)}
            settled = await give_up(left)
            return msgspec.structs.replace(settled, from_storage=sum(one.from_storage for one in told)).encode()

        async with collective_operation(ranks.begin("settle what is in memory", self._options.timeout)) as agreement:
            message = own if isinstance(own, BcpError) else own.encode()
            told = await gather_broadcast(agreement, "left", ranks.rank, message, answer)
        settled = Settled.decode(told, sender=0)
        self.branch = settled.branch
        if found is not None:
            memory = self._joined
            memory.live = frozenset({found.operation})
            memory.promised = "" if settled.durable else found.operation
        await self.forget_found()
        self._memories = None
        return settled

    def _left(self, found: Found | None) -> LeftBehind:
        folder = self._joined.folder
        if found is not None:
            folder.want(found.operation)
        left = folder.leave_behind(found.operation if found is not None else "")
        leave_twins(folder, found.operation if found is not None else "")
        folder.put_sources(self._sources)  # not before: ranks were still loading the copies of a lost host
        self._joined.copies = self._count(self._sources)
        from_storage = 0 if found is None else found.storage.read_nbytes[STORED]
        return LeftBehind(tuple(each.place for each in left), tuple(each.operation for each in left), from_storage)

    def _opened(self, rank: int, world_size: int) -> NodeFolder:
        """Open the memory of this host, and see that an agent serves it. Blocks."""
        if self._memory is None:
            folder = NodeFolder(self._root)
            if not is_in_memory(self._root) and os.environ.get("LOCAL_RANK", "0") == "0":
                words = "%s is on a disk: saves wait for it. Pass Tiers() a folder on a tmpfs, as in /dev/shm"
                log.warning(words, self._root)
            self._memory = TierMemory(folder, rank, self._url)
            self._listen = self._tiers.listen or _address(world_size)
            try:
                if self._tiers.agent == "spawn":
                    self._start_agent()
                elif self._listen != _LOOPBACK and folder.marks():
                    await_agent(folder, self._options.timeout)  # other hosts may need what is here
            except BaseException:
                self._memory.close()
                self._memory = None
                raise
        return self._memory.folder

    def _start_agent(self) -> None:
        """Start the agent of this host, unless there is one. Blocks."""
        folder, options = self._joined.folder, self._options.storage_options
        start_agent(folder, self._url, self._node, self._listen, options, self._tiers.pace)

    @property
    def _node(self) -> str:
        return self._tiers.node or identity()

    @property
    def _joined(self) -> TierMemory:
        assert self._memory is not None  # noqa: S101 -- resume() opens it
        return self._memory

    # -- the way to storage ------------------------------------------------------------------------

    def call(
        self,
        aim: Aim,
        states: States,
        framework: Framework,
        given: Coordinator | None,
        metrics: Mapping[str, float] | None,
        names: Sequence[int] | None = None,
    ) -> SaveCall[SaveResult]:
        """Take this rank's place in a save into memory, in the caller's thread.

        ``names`` has the numbers of the ranks in the job, if only these save; nothing changes their states meanwhile.
        """
        options = replace(self._options, step=aim.step)
        options = options if names is None else replace(options, snapshot="eager")
        path = self._shown(aim.place)
        return keep_call(self._joined, aim, states, framework, options, given, metrics=metrics, path=path, names=names)

    def _shown(self, place: str) -> str:
        """Return the path of a checkpoint, for people."""
        return f"{shown(self._url)}/{place}".rstrip("/")

    def is_due(self, step: int, last: int) -> bool:
        """Whether a save is to be durable, given the step of the last one that was."""
        return self.policy is None or self.policy.due(Moment(step=step, seconds=0.0, last_step=last, last_seconds=None))

    def want(self, operation: str) -> None:
        """Let a snapshot become durable that was to stay in memory. Blocks."""
        self._joined.promised = operation
        self._joined.folder.want(operation)

    async def durable(self, aim: Aim, began: float, kept: SaveResult) -> SaveResult:
        """Wait until a snapshot is durable.

        Args:
            aim: of the save.
            began: when it began, in monotonic seconds.
            kept: the save until all ranks had marked.

        Raises:
            StorageError: it will never be, and why.

        """
        followed = self._joined.followers.of(kept.operation)
        tell = _nobody if followed is None else followed.tell
        handed = tell("draining")
        try:
            outcome = await self._outcome(aim, kept)
        except BaseException:
            tell("unwatched")
            raise
        if outcome != COMMITTED:
            error = StorageError(_never(aim.step, outcome))
            tell(HAPPENINGS.get(outcome, "damaged"), str(error))
            raise error
        seconds = time.monotonic() - began
        if followed is not None:
            seconds = followed.tell("durable")
            await self._record(aim, followed, handed, seconds)
        return replace(kept, path=f"{self._url}/{aim.place}", seconds=seconds)

    async def _record(self, aim: Aim, followed: Followed, handed: float, durable: float) -> None:
        """Leave the recording of a save beside the checkpoint, on rank 0."""
        where, watch = f"{self._url}/{aim.place}".rstrip("/"), followed.watch
        if not any(followed.records):
            return
        try:
            place = place_of(where, None, self._options.storage_options, self._options.retries)
            async with place.opened:
                await store_drained(place.backend, watch, followed.records, handed=handed, durable=durable)
        except Exception as error:  # noqa: BLE001 -- the checkpoint is durable
            log.info("no recording was stored", path=watch.path, error=repr(error))

    async def _outcome(self, aim: Aim, kept: SaveResult) -> str:
        """Wait until agents have ended a snapshot; return what has become of it."""
        mark, folder = Mark(kept.operation, kept.rank), self._joined.folder
        while not (outcome := await in_thread(folder.outcome_of, mark)):
            await anyio.sleep(LOOK_SECONDS)
            await self.look(aim.step)
        return outcome

    async def look(self, step: int) -> None:
        """See that an agent serves this host. If none has done so for a while, start one, or say that somebody has to.

        Each snapshot calls it, for the next one may make way for it before any wait is long enough.

        Args:
            step: of the snapshot, for messages.

        """
        memory = self._memory
        if memory is None or await in_thread(memory.folder.is_served):  # the run is over, or all is well
            self._served_at = time.monotonic()
        elif time.monotonic() - self._served_at > ALONE_SECONDS:
            self._served_at = time.monotonic()
            await self._revive(step)

    async def _revive(self, step: int) -> None:
        """Start an agent where there is none any more; or say that somebody has to."""
        if self._tiers.agent == "spawn":
            log.warning("the agent of this host has gone; another one is started", step=step)
            try:
                await in_thread(self._start_agent)
            except StorageError as error:
                log.warning("the agent of this host does not start, and is tried again", step=step, error=str(error))
        elif not self._has_told:
            self._has_told = True
            log.warning(self.no_agent(), step=step)

    def no_agent(self) -> str:
        """Say that nobody makes the snapshots of this host durable."""
        return (
            "no agent serves this host, so that snapshots stay in its memory: start one, as in "
            f"python -m bcp.agent {self._root} {shown(self._url)}"
        )

    def is_served(self) -> bool:
        """Whether an agent serves this host. Blocks."""
        return self._joined.folder.is_served()

    async def close(self, *, clear: bool) -> None:
        """Let go of the memory. Snapshots stay there for the job's next life, unless they are durable.

        Args:
            clear: the run has ended well, and all of its snapshots have ended.

        """
        await self.forget_found()
        memory, self._memory = self._memory, None
        if memory is not None:
            await in_thread(partial(memory.close, clear=clear))


def tiered(
    tiers: Tiers | None,
    durable: SavePolicy | int | None,
    url: str,
    options: SaveOptions,
    *,
    standby_steps: int | None,
    role: object,
) -> Tiered | None:
    """Return the memory tier of a run; None if it has none.

    Raises:
        InputError: an argument of the run cannot be used, or does not go with the others.

    """
    if tiers is None:
        if durable is not None:
            raise InputError(f"durable={durable!r} is for runs with tiers: pass tiers=bcp.Tiers(), or save={durable!r}")
        return None
    if not isinstance(tiers, Tiers):
        raise InputError(f"tiers={tiers!r}: pass bcp.Tiers(), or None")
    if url.startswith("memory://"):
        raise InputError(f"{url} is in the memory of this process, where no agent writes: tiers need other storage")
    policy = None if durable is None else as_save_policy(durable)
    if policy is not None and divided(policy)[1] is not None:
        raise InputError(f"durable={durable!r} reads a clock: pass steps, as 1000 or bcp.policies.AtSteps([...])")
    if standby_steps is not None:
        raise InputError(
            f"standby_steps={standby_steps} with tiers: each save is a snapshot in memory already; save more often, "
            "and pass durable=... for those that go to storage"
        )
    if role is not None:
        raise InputError("tiers do not go with roles yet: leave one of them out")
    if options.codecs:
        names = ", ".join(codec.name for codec in options.codecs)
        raise InputError(f"codecs={names} do not go with tiers, whose agents have no code of yours")
    return Tiered(tiers, url, options, policy)


def _nobody(_what: TierHappening, _said: str = "") -> float:
    """Tell nobody: the snapshot is not known any more."""
    return 0.0


def _never(step: int, outcome: str) -> str:
    """Say why a snapshot does not become durable."""
    if outcome in (GONE, SUPERSEDED):
        return (
            f"the snapshot of step {step} has not become durable: newer ones came before storage had it. Let fewer "
            "saves be durable, or make storage faster"
        )
    if outcome == LEFT:
        return f"the snapshot of step {step} does not become durable: a later life of the job has not gone on from it"
    return f"the snapshot of step {step} does not become durable: {outcome}. The log of the agent has more"


def _address(world_size: int) -> str:
    """Return the address at which other hosts reach this one; the loopback if the job has no other host."""
    stated = stated_address(None)
    if not stated and int(os.environ.get("LOCAL_WORLD_SIZE") or world_size) == world_size:
        return _LOOPBACK
    server = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT") or 0)
    host = here(server if server[0] else None, stated)
    return host.address or next((each.partition("/")[0] for each in host.networks), _LOOPBACK)
