"""The meeting of the ranks in the job's store: they call the roll, and learn the leader of each host.

A launcher gives this process's place in the job in the environment. A store without a server, or one that is stopped or
out of reach, delays no rank. Each rank then publishes a few keys of the session, and others read them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, TypeVar

import anyio
from torch.distributed import HashStore, Store, TCPStore

from bcp._doctor.dial import connected, reason_of
from bcp._doctor.report import FoundError, Times, in_words, left, ranks_in_words
from bcp._messages.base import Message
from bcp._messages.coordination import Abort, Host
from bcp._messages.doctor import Finding, Leaders
from bcp.coordinators.roll_call import RollCall
from bcp.coordinators.store_client import STORE_ERRORS, StoreClient, set_bytes
from bcp.errors import InputError, MessageError, PeerError

__all__ = ["KeyBoard", "Meeting", "RankPlace", "ToldError", "met"]

_PORTS = range(1, 1 << 16)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank, and the address of the job's store.

    Attributes:
        rank: this rank.
        world_size: the number of ranks.
        server: host and port of the store; None for a process alone, which needs none.
        serves: whether this process serves the store, as rank 0 does without an agent of torchrun.
    """

    rank: int = 0
    world_size: int = 1
    server: tuple[str, int] | None = None
    serves: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> RankPlace:
        """Read the place from the variables of ``init_method="env://"``.

        Raises:
            InputError: some are missing or wrong.

        """
        if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
            return cls()
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if rank not in range(world_size):
            raise InputError(f"RANK={rank} has to be at least 0 and less than WORLD_SIZE={world_size}")
        if world_size == 1:
            return cls()
        host, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT")
        if not host or port not in _PORTS:
            raise InputError(f"MASTER_ADDR={host!r} and MASTER_PORT={port} do not say where the job's store is")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world_size, (host, port), serves=rank == 0 and not agent)

    @property
    def store(self) -> str:
        """The store's name, for people."""
        return "the store" if self.server is None else "{}:{}".format(*self.server)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{name}={text!r} is no number; start the doctor with a launcher as torchrun, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT on every rank"
        ) from None


_RETRY_SECONDS = 0.2  # between two attempts to reach a store that is not there yet
_NOT_OWN = "serves the store, and does not reach it at {}: that is another host, as it seems"
_SILENT = "has connected to {}, where no store answers"


async def opened_store(place: RankPlace, times: Times) -> Store:
    """Return a client of the job's store; serve it if that is this process's task.

    Raises:
        FoundError: the store cannot be reached or served.

    """
    if place.server is None:
        return HashStore()
    if not place.serves:
        await _reached(place, times)
    opening = StoreClient(HashStore())  # its thread is left alone when the connection hangs
    make = partial(TCPStore, *place.server, None, is_master=place.serves, wait_for_workers=False)
    try:
        with anyio.fail_after(left(times.met)):
            return await opening.call(make)
    except TimeoutError:
        raise _found(place, (_NOT_OWN if place.serves else _SILENT).format(place.store)) from None
    except PeerError as error:
        cause = error.__cause__ if isinstance(error.__cause__, STORE_ERRORS) else error
        verb = "serve" if place.serves else "use"
        raise _found(place, f"cannot {verb} the store at {place.store}: {str(cause).splitlines()[0]}") from error


async def _reached(place: RankPlace, times: Times) -> None:
    """Wait until a server listens at the store's address. A store usually comes later than the ranks."""
    assert place.server is not None  # noqa: S101 -- for mypy
    last = "no answer"
    with anyio.move_on_after(left(times.met)):
        while True:
            try:
                _, writer = await connected(*place.server)
            except OSError as error:
                last = reason_of(error)
            else:
                writer.close()
                return
            await anyio.sleep(_RETRY_SECONDS)
    raise _found(place, f"cannot reach the store at {place.store}: {last}")


def store_help(place: RankPlace) -> str:
    """Return the advice for a rank without a store."""
    if place.serves:
        return "let MASTER_ADDR be the host of rank 0, and MASTER_PORT a port that is free there"
    return (
        "see whether rank 0 or torchrun's agent runs there, and whether MASTER_ADDR, MASTER_PORT and firewalls let "
        "this host reach it"
    )


def _found(place: RankPlace, text: str) -> FoundError:
    return FoundError(Finding("store", text, store_help(place)))


T = TypeVar("T")
M = TypeVar("M", bound=Message)

_AT_ONCE = 256  # keys in one look
_LEAST_SECONDS = 0.3  # that a store has to answer, also at the end of a step
_PAUSE = 0.05  # seconds between two looks, for up to 1,000 ranks; more look less often


class KeyBoard:
    """The store's keys below one prefix that no other session has. Every call is bounded by a deadline.

    All methods raise :class:`~bcp.errors.PeerError` if the store fails or is silent.
    """

    def __init__(self, client: StoreClient, prefix: str, world_size: int) -> None:
        self._client = client
        self._prefix = prefix
        self._pause = _PAUSE * max(1.0, world_size / 1000)

    def __repr__(self) -> str:
        return f"<Board {self._prefix!r} in {self._client.name}>"

    async def post(self, until: float, number: int, message: Message) -> None:
        """Publish a message of a rank, which is found by its class and the rank."""
        data, key = message.encode(), self._key(type(message).__name__, number)
        await self.call(until, lambda: set_bytes(self._client.store, key, data))

    async def posted(self, until: float, kind: type[M], numbers: Iterable[int]) -> dict[int, M]:
        """Wait for the messages of these ranks; return those that are there at the end of the time.

        Raises:
            MessageError: one cannot be decoded.

        """
        messages, spoiled = await self.readable(until, kind, numbers)
        for error in spoiled.values():
            raise error
        return messages

    async def readable(
        self, until: float, kind: type[M], numbers: Iterable[int]
    ) -> tuple[dict[int, M], dict[int, MessageError]]:
        """Do the same, but return the errors of messages that cannot be decoded beside the others."""
        wanted, messages = list(numbers), dict[int, M | MessageError]()
        while True:
            late = not left(until)
            messages |= await self.call(until, partial(self._seen, kind, wanted, late))
            wanted = [number for number in wanted if number not in messages]
            if late or not wanted:
                spoiled = {number: error for number, error in messages.items() if isinstance(error, MessageError)}
                return {
                    number: message for number, message in messages.items() if not isinstance(message, MessageError)
                }, spoiled
            await anyio.sleep(min(self._pause, left(until)))

    async def count(self, until: float, name: str) -> None:
        """Add this rank to a counter."""
        await self.call(until, lambda: self._client.store.add(self._key(name), 1))

    async def counted(self, until: float, name: str, number: int) -> bool:
        """Wait until a counter is at ``number``; return False if the time is over first."""
        while await self.call(until, lambda: self._client.store.add(self._key(name), 0)) < number:
            if not left(until):
                return False
            await anyio.sleep(min(self._pause, left(until)))
        return True

    async def call(self, until: float, function: Callable[[], T]) -> T:
        """Call a function in the client's thread."""
        began = time.monotonic()
        with anyio.move_on_after(max(left(until), _LEAST_SECONDS)):
            return await self._client.call(function)
        raise PeerError(0, f"{self._client.name} has not answered for {time.monotonic() - began:.1f} s")

    def _seen(
        self,
        kind: type[M],
        numbers: Sequence[int],
        late: bool,  # noqa: FBT001 -- private
    ) -> dict[int, M | MessageError]:
        """Return the messages that are there; those of an incomplete group only at the end of the time. Blocks."""
        messages, name = dict[int, M | MessageError](), kind.__name__
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            if not self._client.store.check([self._key(name, number) for number in some]):
                some = [number for number in some if late and self._client.store.check([self._key(name, number)])]
            if some:
                values = self._client.store.multi_get([self._key(name, number) for number in some])
                pairs = zip(some, values, strict=True)
                messages |= {number: _decoded(kind, bytes(value), number) for number, value in pairs}
        return messages

    def _key(self, *names: object) -> str:
        return "/".join((self._prefix, *map(str, names)))


def _decoded(kind: type[M], data: bytes, rank: int) -> M | MessageError:
    try:
        return kind.decode(data, rank)
    except MessageError as error:
        return error


_PREFIX = "bcp-doctor"
_LAST_WORD_SECONDS = 0.5  # that rank 0 stays so that others hear why it ends, for up to 1,000 ranks
_CHECKS = 3  # calls of the store, of which the quickest counts


class ToldError(Exception):
    """Rank 0 has ended the meeting, and has told the reason to the ranks and to the user."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The job, once all ranks are there.

    Attributes:
        place: this rank's place.
        board: the keys that only this session has.
        roll: knows this host's address.
        session: a number that only this session has.
        leaders: the lowest rank of each host, in order; on a rank that leads none, that of its own host alone.
        names: of the leaders' hosts, all different.
        host_of: the index of every rank's host; known on rank 0 alone.
        seconds: the duration of the meeting.
        store_seconds: the duration of a call of the store.
    """

    place: RankPlace
    board: KeyBoard
    roll: RollCall = field(repr=False)
    session: str
    leaders: tuple[int, ...]
    names: tuple[str, ...]
    host_of: tuple[int, ...]
    seconds: float
    store_seconds: float

    @property
    def leads(self) -> bool:
        """Whether this rank leads its host."""
        return self.place.rank in self.leaders

    @property
    def own_index(self) -> int:
        """The index of this rank's host."""
        return self.leaders.index(self.place.rank) if self.leads else 0


async def met(place: RankPlace, times: Times) -> Meeting:
    """Meet all ranks.

    Raises:
        FoundError: the store cannot be reached, or ranks are missing.
        ToldError: rank 0 has told that ranks are missing.

    """
    began = time.monotonic()
    client = StoreClient(await opened_store(place, times))
    host_of: list[int] = []
    roll = RollCall(client, _PREFIX, place.rank, place.world_size, words=partial(_words_of, host_of))
    answer = None
    try:
        with anyio.move_on_after(left(times.met)):
            answer = await roll.answered(_told)
        if answer is None:
            await _miss(place, times, client, roll)
        leaders = Leaders.decode(answer.words, sender=0)
        seconds = time.monotonic() - began
        times.meet()
        board = KeyBoard(client, roll.key(), place.world_size)
        store_seconds = await board.call(times.shown, partial(_answers_within, client))
    except PeerError as error:
        raise FoundError(Finding("store", f"has lost the store: {error}", store_help(place))) from error
    except MessageError as error:
        finding = Finding("versions", f"cannot read a message: {error}", "install the same bcp on all hosts")
        tell = partial(_tell, place, client, roll, finding.text) if place.rank == 0 else None
        raise FoundError(finding, tell) from error
    ranks, names = leaders.ranks, leaders.names
    return Meeting(place, board, roll, answer.session, ranks, names, tuple(host_of), seconds, store_seconds)


def _told(_number: int, abort: Abort) -> NoReturn:
    raise ToldError(abort.message)


def _answers_within(client: StoreClient) -> float:
    """Return the shortest duration of a few calls of the store. Blocks."""
    store, seconds = client.store, list[float]()
    for _ in range(_CHECKS):
        began = time.monotonic()
        store.check([_PREFIX])
        seconds.append(time.monotonic() - began)
    return min(seconds)


async def _miss(place: RankPlace, times: Times, client: StoreClient, roll: RollCall) -> NoReturn:
    """Raise the finding that ranks are missing; rank 0 also tells the ranks that have come."""
    waited = f"within {times.meeting_seconds:.0f} s"
    do = (
        "give more --timeout if the ranks start further apart; else see what the missing ones print, and where they run"
    )
    if place.rank != 0:
        raise FoundError(
            Finding("store", f"is in the store at {place.store}, and rank 0 has not answered {waited}", do)
        )
    present = await client.call(roll.present, seconds=times.meeting_seconds / 4)
    missing = [rank for rank in range(place.world_size) if rank not in present]
    names = sorted({host.name for host in present.values()})
    came = f"{len(present)} of {place.world_size} ranks came {waited}, from {in_words('host', names)}"
    text = f"misses {ranks_in_words(missing)}: {came}" if missing else f"has heard of all ranks, but not {waited}"
    raise FoundError(Finding("store", text, do), partial(_tell, place, client, roll, text))


async def _tell(place: RankPlace, client: StoreClient, roll: RollCall, text: str) -> None:
    """Tell the ranks that have come why rank 0 ends."""
    with suppress(PeerError):
        await client.call(roll.tell, 0, Abort(0, text), seconds=_LAST_WORD_SECONDS)
        if place.serves:
            await anyio.sleep(_LAST_WORD_SECONDS * max(1.0, place.world_size / 1000))


def _words_of(host_of: list[int], hosts: Sequence[Host]) -> list[bytes]:
    """Return on rank 0 the message for each rank: the leaders of all hosts, or of its own host if it leads none."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host.identity, rank)
    leaders = list(first.values())
    index = {identity: number for number, identity in enumerate(first)}
    host_of[:] = [index[host.identity] for host in hosts]
    often = Counter(hosts[leader].name for leader in leaders)
    names = [
        hosts[leader].name if often[hosts[leader].name] == 1 else f"{hosts[leader].name}@{leader}" for leader in leaders
    ]
    of_leaders = Leaders(tuple(leaders), tuple(names)).encode()  # once: a list of all hosts for each host is long
    of_hosts = [Leaders((leader,), (name,)).encode() for leader, name in zip(leaders, names, strict=True)]
    return [
        of_leaders if leaders[host_index] == rank else of_hosts[host_index] for rank, host_index in enumerate(host_of)
    ]
