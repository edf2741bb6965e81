"""The coordinator over gRPC, many ranks in this process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import anyio
import grpc
import pytest
import trustme
from anyio import to_thread
from logs import captured_logs
from relays import LOOPBACK, Wires
from servers.ports import held_ports
from torch.distributed import PrefixStore, TCPStore

from bcp.coordinators import GrpcCoordinator, Tls, grpc_coordinators
from bcp.coordinators.hosts import private_connection
from bcp.coordinators.peers import PeerInfo
from bcp.coordinators.tree import channel
from bcp.coordinators.tree.frames import Frame, Kind, pack_number
from bcp.coordinators.tree.loop import current_loop
from bcp.coordinators.tree.operation_state import OperationState
from bcp.coordinators.tree.rendezvous import Addresses, Invitation, MemoryRendezvous, StoreRendezvous, Tree
from bcp.coordinators.tree.server import credentials_of
from bcp.coordinators.tree.transport import METHOD, SERVICE, metadata_of, proof_of
from bcp.errors import InputError, PeerError
from bcp.protocols import Agreement, Coordinator
from bcp.testing.coordinator_failures import QUIET_SECONDS
from bcp.testing.coordinator_suite import CoordinatorSuite, run_ranks

pytestmark = pytest.mark.anyio
T = TypeVar("T")


class TestWide(CoordinatorSuite):
    def coordinators(self, world_size: int) -> Sequence[Coordinator]:
        return grpc_coordinators(world_size)


class TestNarrow(CoordinatorSuite):
    def coordinators(self, world_size: int) -> Sequence[Coordinator]:
        return grpc_coordinators(world_size, fanout=2)


class TestChain(CoordinatorSuite):
    """Every rank but the first and the last is an inner node."""

    def coordinators(self, world_size: int) -> Sequence[Coordinator]:
        return grpc_coordinators(world_size, fanout=1)


@pytest.fixture(scope="module")
def server() -> TCPStore:
    """Return a server; shared, since every tenth start of one takes 5 s in torch."""
    return TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)


class TestOverAStore(CoordinatorSuite):
    """As in a job: ranks meet in a store when they begin the first operation."""

    @pytest.fixture(autouse=True)
    def _job(self, server: TCPStore, request: pytest.FixtureRequest) -> None:
        self.store = private_connection(PrefixStore(request.node.name, server))

    def coordinators(self, world_size: int) -> Sequence[Coordinator]:
        return [
            GrpcCoordinator(
                rank,
                world_size,
                StoreRendezvous(self.store, "tree", rank, world_size, 2, LOOPBACK),
            )
            for rank in range(world_size)
        ]


# -- what the tests have in common -----------------------------------------------------------


async def ranks_of(gathered: Sequence[bytes]) -> bytes:
    return b" ".join(gathered)


async def decide(rank: int, agreement: Agreement) -> bytes:
    return await agreement.gather_broadcast("commit", b"%d" % rank, ranks_of)


async def works(coordinators: Sequence[Coordinator]) -> bool:
    expected = b" ".join(b"%d" % rank for rank in range(len(coordinators)))
    return await run_ranks(coordinators, decide) == [expected] * len(coordinators)


async def decided(coordinators: Sequence[Coordinator], *timeouts: float) -> list[object]:
    """Decide on all ranks, each with a timeout of its own; return the result or error of each."""
    outcomes: list[object] = [None] * len(coordinators)

    async def one(rank: int) -> None:
        [outcomes[rank]] = await run_ranks([coordinators[rank]], decide, timeout=timeouts[rank])

    async with anyio.create_task_group() as group:
        for rank in range(len(outcomes)):
            group.start_soon(one, rank)
    return outcomes


async def on_the_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run the client of a stranger where gRPC runs, on the coordinators' loop."""
    with anyio.fail_after(60):
        return await asyncio.wrap_future(current_loop().run(work))


# -- what it costs ---------------------------------------------------------------------------


async def save_in_the_steady_state(_rank: int, agreement: Agreement) -> None:
    digest = b"\0" + hashlib.md5(b"layout", usedforsecurity=False).digest()
    await agreement.gather_broadcast("plan", digest, lambda _: constant(bytes(27)))
    await agreement.gather_broadcast("commit", digest, lambda _: constant(b"+"))


async def constant(answer: bytes) -> bytes:
    return answer


@pytest.mark.parametrize("fanout", [16, 2])
async def test_a_save_costs_less_than_170_bytes_an_edge(fanout: int) -> None:
    coordinators = grpc_coordinators(40, fanout)
    await run_ranks(coordinators, save_in_the_steady_state, "save /ckpt/100")
    before = [each.traffic for each in coordinators]
    await run_ranks(coordinators, save_in_the_steady_state, "save /ckpt/200")
    edges = 0
    for coordinator, old in zip(coordinators, before, strict=True):
        for neighbour, now in coordinator.traffic.items():
            then = old[neighbour]
            spent = now.bytes_sent + now.bytes_received - then.bytes_sent - then.bytes_received
            assert 60 < spent < 170
            assert now.messages_sent - then.messages_sent == 4
            edges += 1
    assert edges == 2 * 39


async def test_nothing_is_sent_before_the_first_operation() -> None:
    coordinators = grpc_coordinators(2)
    assert coordinators[0].traffic == {}
    assert "not connected" in repr(coordinators[0])
    assert await works(coordinators)
    assert coordinators[0].traffic[1].messages_received > 0  # the last frame may still be on its way
    assert coordinators[1].traffic[0].messages_sent > 0


async def test_hosts_shape_the_tree() -> None:
    coordinators = grpc_coordinators(6, hosts=["a", "b", "a", "b", "b", "a"])
    assert await works(coordinators)
    assert [sorted(each.traffic) for each in coordinators] == [[1, 2, 5], [0, 3, 4], [0], [1], [1], [0]]


async def test_answers_of_a_divide_find_their_ranks_in_a_deep_tree() -> None:
    coordinators = grpc_coordinators(23, fanout=2, hosts=[str(rank % 5) for rank in range(23)])

    async def body(rank: int, agreement: Agreement) -> bytes:
        return await agreement.gather_scatter(
            "plan", b"%d" % (rank % 3), lambda said: [b"%d:" % r + said[r] for r in range(23)]
        )

    assert await run_ranks(coordinators, body) == [b"%d:%d" % (rank, rank % 3) for rank in range(23)]


# -- who is let in ---------------------------------------------------------------------------


class Stranger:
    """Talks to a rank's server without a coordinator."""

    def __init__(self, invitation: Invitation, address: str, **changes: str | None) -> None:
        said = dict([*metadata_of(PeerInfo.of(1, "")), *credentials_of(invitation, "another process")])
        said.update({f"bcp-{name.replace('_', '-')}": value for name, value in changes.items() if value is not None})
        gone = {f"bcp-{name.replace('_', '-')}" for name, value in changes.items() if value is None}
        self._token = said.pop("bcp-token", invitation.token)
        self._said = {key: value for key, value in said.items() if key not in gone}
        self._address = address

    async def join(self, frames: Sequence[bytes], answers: int) -> tuple[grpc.StatusCode | None, str, list[Frame]]:
        """Send frames, and wait for so many; return the stream's status, its details and the frames that came."""
        async with grpc.aio.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=list(self._said.items()))
            heard = []
            try:
                challenge = str(dict(iter(await call.initial_metadata() or ())).get("bcp-challenge"))
                if challenge == "None":
                    await call.read()
                await call.write(proof_of(self._token, "child", self._said, 0, challenge))
                proof = await call.read()
                assert proof[:32] == proof_of(self._token, "parent", self._said, 0, challenge)
                for frame in frames:
                    await call.write(frame)
                while len(heard) < answers and (data := await call.read()) is not grpc.aio.EOF:
                    heard.append(Frame.unpack(data))
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or "", heard
            return None, "", heard


async def stranger_of(rendezvous: MemoryRendezvous, **changes: str | None) -> Stranger:
    """Return a stranger at the door of rank 0, who has a rank's invitation but for the changes."""
    return Stranger(await rendezvous.invitation(lambda *_: None), await rendezvous.address_of(0), **changes)


async def job_with_a_door(
    stranger: dict[str, str | None], *frames: Frame, answers: int = 1, leave: bool = False
) -> Any:
    """Run a job of two ranks, close rank 1 if it is to leave, and let a stranger knock at the door of rank 0."""
    ranks = MemoryRendezvous.all_of(Tree.of(["host"] * 2, 16))
    coordinators = [GrpcCoordinator(rank, 2, each) for rank, each in enumerate(ranks)]
    assert await works(coordinators)
    assert await works(coordinators)
    if leave:
        await coordinators[1].aclose()
    with captured_logs() as logs:
        knocker = await on_the_loop(stranger_of(ranks[1], **stranger))
        outcome = await on_the_loop(knocker.join([frame.pack() for frame in frames], answers))
    if not leave:
        assert await works(coordinators)
    return *outcome, logs, coordinators


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"token": "wrong"}, grpc.StatusCode.UNAUTHENTICATED, "the job's token is wrong"),
        ({"nonce": None}, grpc.StatusCode.UNAUTHENTICATED, "a proof of the job's token is missing"),
        ({"rank": None}, grpc.StatusCode.INVALID_ARGUMENT, "does not say which rank"),
        ({"rank": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "does not say which rank"),
        ({"rank": "7"}, grpc.StatusCode.PERMISSION_DENIED, r"rank 7 \(host .*, pid .*\) is no child of rank 0"),
        ({"session": "other"}, grpc.StatusCode.FAILED_PRECONDITION, "is of session other of 2 ranks"),
        ({"world_size": "3"}, grpc.StatusCode.FAILED_PRECONDITION, "of 3 ranks, this is session .* of 2 ranks"),
        ({}, grpc.StatusCode.ALREADY_EXISTS, r"rank 1 .* has joined already, as rank 1 \(host"),
    ],
)
async def test_who_does_not_belong_here_is_refused(
    changes: dict[str, str | None], code: grpc.StatusCode, reason: str
) -> None:
    got, details, heard, logs, _ = await job_with_a_door(changes)
    assert (got, heard) == (code, [])
    [entry] = logs
    assert (entry["log_level"], entry["rank"]) == ("warning", 0)
    assert entry["peer"].startswith("ipv4:127.0.0.1")
    assert entry["reason"] == details
    assert re.search(reason, details)
    assert not any(value == "wrong" for value in entry.values())


async def test_an_old_operation_id_is_refused() -> None:
    join = Frame(Kind.JOIN, operation=0, body=b"what")
    got, details, heard, logs, _ = await job_with_a_door({}, join, leave=True)
    assert (got, details, logs) == (None, "", [])
    assert heard == [Frame(Kind.OLD, operation=0, body=pack_number(2))]


@pytest.mark.parametrize("data", [b"", b"nonsense", Frame(Kind.UP, 2, 1, b"head" + b"\5").pack()])
async def test_a_damaged_frame_ends_its_connection_only(data: bytes) -> None:
    ranks = MemoryRendezvous.all_of(Tree.of(["host"] * 3, 16))
    coordinators = [GrpcCoordinator(rank, 3, each) for rank, each in enumerate(ranks)]
    outcomes: list[object] = []

    async def damaged() -> None:
        sender = await on_the_loop(stranger_of(ranks[1]))
        outcomes.append(await on_the_loop(sender.join([data], answers=3)))
        outcomes.extend(await run_ranks([coordinators[1]], decide))

    async with anyio.create_task_group() as group:
        group.start_soon(damaged)
        outcomes += await run_ranks([coordinators[0], coordinators[2]], decide)
    [ended] = [each for each in outcomes if isinstance(each, tuple)]
    assert ended[0] is None  # not refused: the stream was closed
    for outcome in outcomes:
        if outcome is not ended:
            assert isinstance(outcome, PeerError)
            assert "what came over it makes no sense" in outcome.cause
    assert await works(coordinators)


# -- what breaks -----------------------------------------------------------------------------


async def test_an_abort_reaches_the_leaves_of_a_deep_tree() -> None:
    coordinators = grpc_coordinators(30, fanout=1)

    async def body(rank: int, agreement: Agreement) -> None:
        await decide(rank, agreement)
        if rank == 29:
            raise KeyError("the reason")
        await anyio.sleep_forever()

    *others, failed = await run_ranks(coordinators, body)
    assert type(failed) is KeyError
    for outcome in others:
        assert isinstance(outcome, PeerError)
        assert (outcome.rank, outcome.cause.partition(": ")[2]) == (29, "KeyError: 'the reason'")
    assert await works(coordinators)


async def test_an_inner_node_dies() -> None:
    victim = 1
    here: set[int] = set()
    all_here = anyio.Event()
    async with Wires(7, fanout=2) as wires:

        async def body(rank: int, agreement: Agreement) -> None:
            await decide(rank, agreement)
            here.add(rank)
            if len(here) == 7:
                all_here.set()
            await all_here.wait()
            if rank == victim:
                wires.isolate(victim)
                await anyio.sleep_forever()
            await decide(rank, agreement)

        others = [each for each in wires.coordinators if each.rank != victim]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(run_ranks, [wires.coordinators[victim]], body)
                outcomes = await run_ranks(others, body)
                group.cancel_scope.cancel()
    for outcome in outcomes:
        assert isinstance(outcome, PeerError)
        assert outcome.rank == victim
        assert f"the connection to rank {victim} (host {socket.gethostname()}, pid " in outcome.cause
        assert "in 'test'" in outcome.cause


async def test_a_broken_connection_is_made_anew_for_the_next_operation() -> None:
    async with Wires(7, fanout=2) as wires:
        assert await works(wires.coordinators)
        for rank in (1, 5):
            await wires.renew(rank)
        assert await works(wires.coordinators)


async def test_a_break_in_the_middle_ends_that_operation_only() -> None:
    async with Wires(5, fanout=1) as wires:

        async def body(rank: int, agreement: Agreement) -> None:
            await decide(rank, agreement)
            if rank == 3:
                wires.cut(3)
            await anyio.sleep_forever()

        for outcome in await run_ranks(wires.coordinators, body):
            assert isinstance(outcome, PeerError)
            assert outcome.rank in (2, 3)  # either end sees the other one go
        assert await works(wires.coordinators)


async def test_who_leaves_for_good_is_named() -> None:
    coordinators = grpc_coordinators(3, fanout=1)
    assert await works(coordinators)
    await coordinators[1].aclose()
    with pytest.raises(InputError, match="was closed"):
        coordinators[1].begin("save", 1.0)
    for outcome in await run_ranks([coordinators[0], coordinators[2]], decide, timeout=0.3):
        assert isinstance(outcome, PeerError)
        assert outcome.rank == 1
        # the clock of the operation goes on by 0.06 s at most, twice the pause between two looks
        assert re.search(r" has not begun it 0\.[34] s after rank", outcome.cause)
    assert "closed" in repr(coordinators[1])


async def test_closing_in_the_middle_ends_the_operation() -> None:
    coordinators = grpc_coordinators(3)

    async def body(rank: int, agreement: Agreement) -> None:
        await decide(rank, agreement)
        if rank == 2:
            await coordinators[2].aclose()
        await anyio.sleep_forever()

    for outcome in await run_ranks(coordinators, body):
        assert isinstance(outcome, PeerError)
        assert outcome.rank == 2
        assert "closed" in outcome.cause


async def test_a_sleeping_rank_blames_nobody_when_it_wakes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinators = grpc_coordinators(2)
    slept, woken = 0.0, [threading.Event() for _ in coordinators]
    beat = OperationState.beat

    def beat_on_another_clock(state: OperationState, now: float) -> None:
        seconds = slept
        beat(state, now + seconds)
        if seconds:
            woken[state._node.rank].set()

    monkeypatch.setattr(OperationState, "beat", beat_on_another_clock)
    monkeypatch.setattr(channel, "_BEAT_SECONDS", 0.05)

    async def body(rank: int, agreement: Agreement) -> bytes:
        nonlocal slept
        await decide(rank, agreement)
        slept = 2 * QUIET_SECONDS
        assert await to_thread.run_sync(woken[rank].wait, 60)
        return await decide(rank, agreement)

    assert await run_ranks(coordinators, body) == [b"0 1"] * 2


async def test_operations_that_a_rank_has_not_begun_take_bounded_memory() -> None:
    numbers = range(2, 3000)
    refused = [*numbers][1024:]
    joins = [Frame(Kind.JOIN, number, body=b"what") for number in numbers]
    got, _, heard, _, coordinators = await job_with_a_door({}, *joins, answers=len(refused), leave=True)
    assert got is None
    assert [(frame.kind, frame.operation) for frame in heard] == [(Kind.ABORT, number) for number in refused]
    assert b"1024 operations behind rank 1" in heard[0].body
    assert " 1024 operations" in repr(coordinators[0])


async def test_an_operation_that_nobody_else_begins_ends_for_all_who_come_later() -> None:
    coordinators = grpc_coordinators(4, fanout=1)
    [early] = await run_ranks([coordinators[3]], decide, timeout=0.2)
    assert isinstance(early, PeerError)
    assert early.rank == 2
    for outcome in await run_ranks(coordinators[:3], decide):
        assert isinstance(outcome, PeerError)
        assert (outcome.rank, "0.2 s after rank 3" in outcome.cause) == (2, True)
    assert await works(coordinators)


# -- addresses that are known ----------------------------------------------------------------


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    """Five addresses at which this process alone can listen."""
    with held_ports(5) as ports:
        yield [f"{LOOPBACK}:{port}" for port in ports]


async def test_addresses_that_are_known(addresses: list[str]) -> None:
    token = secrets.token_hex()
    coordinators = [GrpcCoordinator.at(rank, addresses, token, fanout=2) for rank in range(5)]
    assert await works(coordinators)
    assert [sorted(each.traffic) for each in coordinators] == [[1, 2], [0, 3, 4], [0], [1], [1]]
    for each in coordinators:
        await each.aclose()


async def test_a_rank_with_the_wrong_token_is_told_so(addresses: list[str]) -> None:
    coordinators = [GrpcCoordinator.at(rank, addresses[:2], token) for rank, token in enumerate(["right", "wrong"])]
    with captured_logs() as logs:
        first, second = await decided(coordinators, 0.5, QUIET_SECONDS)
    assert isinstance(first, PeerError)
    assert (first.rank, "has not begun" in first.cause) == (1, True)
    assert isinstance(second, InputError)
    assert "refused rank 1" in str(second)
    assert "the job's token is wrong" in str(second)
    assert {entry["reason"] for entry in logs} == {"the job's token is wrong"}


async def test_ranks_with_different_lists_are_told_so(addresses: list[str]) -> None:
    lists = [addresses[:2], [addresses[0], addresses[2]]]
    coordinators = [GrpcCoordinator.at(rank, its, "token") for rank, its in enumerate(lists)]
    with captured_logs():
        _, second = await decided(coordinators, 0.5, QUIET_SECONDS)
    assert isinstance(second, InputError)
    assert "is of session" in str(second)


async def test_a_restarted_rank_learns_that_the_others_are_further_on(addresses: list[str]) -> None:
    coordinators = [GrpcCoordinator.at(rank, addresses[:2], "token") for rank in range(2)]
    assert await works(coordinators)
    assert await works(coordinators)
    await coordinators[1].aclose()
    again = GrpcCoordinator.at(1, addresses[:2], "token")
    [outcome] = await run_ranks([again], decide)
    assert isinstance(outcome, PeerError)
    assert "operation 0 is over already on rank 0" in outcome.cause
    assert "which is at operation 2: an old operation id" in outcome.cause


async def test_a_port_that_is_taken() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        addresses = [f"{LOOPBACK}:{taken.getsockname()[1]}", f"{LOOPBACK}:1"]
        [outcome] = await run_ranks([GrpcCoordinator.at(0, addresses, "token")], decide)
    assert isinstance(outcome, InputError)
    assert f"rank 0 (host {socket.gethostname()}, pid {os.getpid()}) cannot listen on {addresses[0]}" in str(outcome)


@pytest.mark.parametrize(("rank", "hosts", "token"), [(2, None, "t"), (-1, None, "t"), (0, ["a"], "t"), (0, None, "")])
def test_addresses_that_cannot_be(rank: int, hosts: list[str] | None, token: str) -> None:
    with pytest.raises(InputError, match=r"do not fit together|empty token"):
        Addresses(rank, ["a:1", "b:1"], token, 16, hosts)


def test_a_rank_has_to_be_in_the_world() -> None:
    [rendezvous] = MemoryRendezvous.all_of(Tree.of(["host"], 16))
    with pytest.raises(InputError, match="rank 1 is not one of"):
        GrpcCoordinator(1, 1, rendezvous)


# -- TLS -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def tls_of(authority: trustme.CA, name: str = "bcp.test") -> Tls:
    issued = authority.issue_cert(name)
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    return Tls(authority.cert_pem.bytes(), chain, issued.private_key_pem.bytes(), target_name=name)


async def test_mutual_tls(authority: trustme.CA, addresses: list[str]) -> None:
    tls = tls_of(authority)
    coordinators = [GrpcCoordinator.at(rank, addresses[:3], "token", fanout=1, tls=tls) for rank in range(3)]
    assert await works(coordinators)
    for each in coordinators:
        await each.aclose()


async def test_a_rank_of_another_authority_is_refused(authority: trustme.CA, addresses: list[str]) -> None:
    both = [tls_of(authority), tls_of(trustme.CA())]
    coordinators = [GrpcCoordinator.at(rank, addresses[:2], "token", tls=each) for rank, each in enumerate(both)]
    first, second = await decided(coordinators, 0.5, 0.5)
    assert isinstance(first, PeerError)
    assert (first.rank, "has not begun" in first.cause) == (1, True)
    with anyio.fail_after(60):
        while f") cannot connect to it at {addresses[0]}" not in str(second):  # it has not tried yet
            [second] = await run_ranks(coordinators[1:], decide, timeout=0.5)
    assert isinstance(second, PeerError)
    for each in coordinators:
        await each.aclose()  # else the second goes on trying, as long as the tests run


async def test_a_client_without_certificate_is_refused(authority: trustme.CA, addresses: list[str]) -> None:
    coordinators = [GrpcCoordinator.at(rank, addresses[:2], "token", tls=tls_of(authority)) for rank in range(2)]
    assert await works(coordinators)

    async def knock() -> grpc.StatusCode:
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        options = [("grpc.ssl_target_name_override", "bcp.test"), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.secure_channel(addresses[0], credentials, options) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=[("bcp-token", "token")])
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            return error.value.code()

    assert await on_the_loop(knock()) is grpc.StatusCode.UNAVAILABLE
    assert await works(coordinators)


def test_a_private_key_is_not_shown(authority: trustme.CA) -> None:
    assert b"PRIVATE KEY" not in repr(tls_of(authority)).encode()
