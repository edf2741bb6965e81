"""Bytes on the sockets of a job, and connections of ranks and of strangers to them."""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import gc
import itertools
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest
import torch
import trustme
from anyio import to_thread
from forked import Forked
from logs import captured_logs
from relays import LOOPBACK, Relay, relayed_job
from samples import sample

import bcp
from bcp._messages.coordination import Card
from bcp.coordinators import GrpcCoordinator, SoloCoordinator, Tls, strangers
from bcp.coordinators.exchange import Exchange
from bcp.coordinators.mesh import Mesh
from bcp.coordinators.tree.loop import current_loop
from bcp.coordinators.tree.rendezvous import MemoryRendezvous, Tree
from bcp.coordinators.tree.server import behind
from bcp.errors import CorruptError, InputError, PeerError
from bcp.protocols import Agreement
from bcp.stages.items import Loaded
from bcp.testing.coordinator_suite import run_ranks

pytestmark = pytest.mark.anyio
PATTERN = b"a weight that everybody knows: 0"
NAME = "ranks.bcp.test"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def tls_of(authority: trustme.CA, name: str = NAME, *, target: str | None = NAME, **how: Any) -> Tls:
    issued = authority.issue_cert(name, **how)
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    return Tls(authority.cert_pem.bytes(), chain, issued.private_key_pem.bytes(), target_name=target)


# -- what crosses the sockets ----------------------------------------------------------------


def weights() -> torch.Tensor:
    return torch.frombuffer(bytearray(PATTERN * (1 << 16)), dtype=torch.uint8)


def open_files() -> set[str]:
    """Return what this process has open; each socket has a number of its own."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder itself, which is closed by now
            found.add(str(descriptor.readlink()))
    return found


async def load_on_all(coordinators: Sequence[GrpcCoordinator], path: Path, **options: Any) -> list[Any]:
    """Load what all ranks want alike; return each rank's tensor, or its error."""
    outcomes: list[Any] = [None] * len(coordinators)

    async def load(rank: int) -> None:
        target = torch.zeros_like(weights())
        try:
            await bcp.aload(
                path,
                {"model": {"w": target}},
                coordinator=coordinators[rank],
                options=bcp.LoadOptions(timeout=60, **options),
            )
        except bcp.BcpError as error:
            outcomes[rank] = error
        else:
            outcomes[rank] = target

    async with anyio.create_task_group() as group:
        for rank in range(len(coordinators)):
            group.start_soon(load, rank)
    return outcomes


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    await bcp.asave(tmp_path / "ckpt", {"model": {"w": weights()}}, coordinator=SoloCoordinator())
    return tmp_path / "ckpt"


async def closed(coordinators: Sequence[GrpcCoordinator]) -> None:
    for each in coordinators:
        await each.aclose()


@pytest.mark.parametrize("secure", [False, True])
async def test_what_a_listener_on_the_network_sees(
    secure: bool,  # noqa: FBT001 -- a parameter of pytest
    authority: trustme.CA,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Relay() as tree, Relay() as mesh:
        coordinators, ranks = relayed_job(3, tree, mesh, monkeypatch, tls_of(authority) if secure else None)
        token = (await ranks[0].invitation(lambda *_: None)).token
        for loaded in await load_on_all(coordinators, saved):
            assert torch.equal(loaded, weights())
        await closed(coordinators)
        assert len(mesh.bytes) > weights().nbytes
        assert (PATTERN in mesh.bytes) is not secure
        assert (b"\xa4port" in tree.bytes) is not secure  # of a card
        for seen in (tree.bytes, mesh.bytes):
            assert token.encode() not in seen
            assert bytes.fromhex(token) not in seen


def flipping(least: int) -> Callable[[bytes], bytes]:
    """Return a change that flips one bit, once, in the first run of at least so many bytes."""
    once = threading.Lock()

    def flip(data: bytes) -> bytes:
        if len(data) < least or not once.acquire(blocking=False):
            return data
        return data[:500] + bytes([data[500] ^ 8]) + data[501:]

    return flip


async def test_a_bit_that_flips_on_its_way_is_noticed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Relay() as tree, Relay(flipping(1000)) as mesh:
        coordinators, _ = relayed_job(2, tree, mesh, monkeypatch)
        outcomes = await load_on_all(coordinators, saved)
        await closed(coordinators)
    [(receiver, error)] = [pair for pair in enumerate(outcomes) if isinstance(pair[1], CorruptError)]
    assert f"bytes that rank {receiver} received from rank {1 - receiver} have digest" in str(error)
    assert re.search(r"safetensors data bytes \d+ to \d+: the 1048576 bytes", str(error))
    other = outcomes[1 - receiver]
    assert isinstance(other, PeerError)
    assert (other.rank, "CorruptError" in other.cause) == (receiver, True)


async def test_without_verify_nothing_is_compared(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Relay() as tree, Relay(flipping(1000)) as mesh:
        coordinators, _ = relayed_job(2, tree, mesh, monkeypatch)
        outcomes = await load_on_all(coordinators, saved, verify=False)
        await closed(coordinators)
    wrong = [int((tensor != weights()).sum()) for tensor in outcomes]
    assert sorted(wrong) == [0, 1]


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_stage_may_change_bytes_that_other_ranks_get(
    in_place: bool,  # noqa: FBT001 -- a parameter of pytest
    saved: Path,
) -> None:
    async def invert(loaded: Loaded) -> Loaded:
        if in_place:
            loaded.data.bitwise_not_()
            return loaded
        return replace(loaded, data=~loaded.data)

    def edit(graph: Any) -> Any:
        return graph.before("h2d", bcp.extend.Stage("invert", invert))

    coordinators, _ = job(2)
    for found in await load_on_all(coordinators, saved, edit=edit):
        assert torch.equal(found, ~weights())
    await closed(coordinators)


async def test_ranks_need_not_agree_on_verify(saved: Path) -> None:
    coordinators, _ = job(2)
    found = [torch.zeros_like(weights()) for _ in range(2)]

    async def load(rank: int) -> None:
        options = bcp.LoadOptions(verify=rank == 0)
        await bcp.aload(saved, {"model": {"w": found[rank]}}, coordinator=coordinators[rank], options=options)

    async with anyio.create_task_group() as group:
        for rank in range(2):
            group.start_soon(load, rank)
    assert all(torch.equal(tensor, weights()) for tensor in found)
    await closed(coordinators)


async def test_a_bit_that_flips_under_tls_breaks_the_connection(
    authority: trustme.CA, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Relay() as tree, Relay(flipping(5000)) as mesh:
        coordinators, _ = relayed_job(2, tree, mesh, monkeypatch, tls_of(authority))
        outcomes = await load_on_all(coordinators, saved)
        await closed(coordinators)
    assert [type(error) for error in outcomes] == [PeerError, PeerError]


# -- certificates of bulk data ---------------------------------------------------------------


@contextmanager
def meshes(*settings: Tls | None, secrets: Sequence[bytes] = (b"", b"")) -> Iterator[list[Mesh]]:
    ranks = [
        Mesh(
            rank,
            LOOPBACK,
            len(settings),
            patience=60.0,
            secret=lambda rank=rank: secrets[rank],
            tls=each and each.contexts(),
        )
        for rank, each in enumerate(settings)
    ]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.disconnect()


async def sent(ranks: Sequence[Mesh], data: bytes, *, sender: int = 0) -> Any:
    """Let one of two ranks send bytes to the other; return what arrived, or the sender's error."""
    outcome: Any = None

    async def send(group: anyio.abc.TaskGroup) -> None:
        nonlocal outcome
        out = [nothing, nothing]
        out[1 - sender] = memoryview(data)
        try:
            await exchange(ranks[sender]).all_to_all(out, [nothing, nothing])
        except (PeerError, InputError) as error:
            outcome = error
            group.cancel_scope.cancel()

    async def receive() -> None:
        nonlocal outcome
        received, incoming = bytearray(len(data)), [nothing, nothing]
        incoming[sender] = memoryview(received)
        await exchange(ranks[1 - sender]).all_to_all([nothing, nothing], incoming)
        outcome = received

    nothing = memoryview(b"")

    def exchange(mesh: Mesh) -> Exchange:
        return Exchange(mesh, card_of, report_peer_failure)

    async def card_of(rank: int) -> Card:
        return Card.decode(ranks[rank].card)

    async def report_peer_failure(rank: int, cause: str, *, sure: bool) -> Exception:
        del sure
        return PeerError(rank, cause)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as serving:
            for each in ranks:
                serving.start_soon(each.serve)
            async with anyio.create_task_group() as group:
                group.start_soon(send, group)
                group.start_soon(receive)
            for each in ranks:
                each.close()
    return outcome


async def test_bulk_data_with_tls(authority: trustme.CA) -> None:
    data = bytes(range(256)) * 40_000
    with meshes(tls_of(authority), tls_of(authority)) as ranks:
        assert await sent(ranks, data) == data


@pytest.mark.parametrize("name", [LOOPBACK, "other.bcp.test"])
async def test_the_address_is_the_name_where_none_is_given(authority: trustme.CA, name: str) -> None:
    with meshes(tls_of(authority, name, target=None), tls_of(authority, name, target=None)) as ranks:
        outcome = await sent(ranks, b"data")
    if name == LOOPBACK:
        assert outcome == b"data"
    else:
        assert isinstance(outcome, PeerError)
        assert "rank 0 does not accept the certificate of rank 1" in str(outcome)


async def test_an_intermediate_authority_may_be_the_root_of_trust(authority: trustme.CA) -> None:
    child = authority.create_child_ca()
    with meshes(tls_of(child), tls_of(child)) as ranks:
        assert await sent(ranks, b"data") == b"data"


@pytest.mark.parametrize("secure", [0, 1])
async def test_tls_on_one_side_only(authority: trustme.CA, secure: int) -> None:
    settings: list[Tls | None] = [None, None]
    settings[secure] = tls_of(authority)
    with meshes(*settings) as ranks:
        outcome = await sent(ranks, b"data")
    assert isinstance(outcome, PeerError)
    assert outcome.rank == 1
    assert f"rank {secure} sends bulk data with TLS and rank {1 - secure} without" in str(outcome)


def yesterday() -> dt.datetime:
    return dt.datetime.now(dt.UTC) - dt.timedelta(days=1)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("kind", "reason"), [("expired", "(?i)expired"), ("foreign", "(?i)unable to get|unknown.ca")])
async def test_a_bad_certificate_names_its_rank(authority: trustme.CA, bad: int, kind: str, reason: str) -> None:
    settings = [tls_of(authority), tls_of(authority)]
    if kind == "expired":
        settings[bad] = tls_of(authority, not_after=yesterday())
    else:
        other = tls_of(trustme.CA())
        settings[bad] = Tls(settings[bad].ca, other.certificate, other.key, NAME)
    with meshes(*settings) as ranks, captured_logs() as logs:
        outcome = await sent(ranks, b"data")
    assert isinstance(outcome, InputError if bad == 0 else PeerError)
    assert f"rank {1 - bad} does not accept the certificate of rank {bad}" in str(outcome)
    assert re.search(reason, str(outcome))
    assert [entry["rank"] for entry in logs] == [1]


async def test_a_rank_without_the_secret_is_refused() -> None:
    with meshes(None, None, secrets=[b"guess", b"secret"]) as ranks, captured_logs() as logs:
        outcome: list[Any] = []

        async def send() -> None:
            outcome.append(await sent(ranks, b"data"))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(send)
                while not logs:  # noqa: ASYNC110 -- a log line sets no event
                    await anyio.sleep(0.01)
                await anyio.sleep(0.3)
                group.cancel_scope.cancel()
    assert outcome == []  # it tries again, until its time is up
    assert logs[0]["reason"] == "the other side does not know the job's secret"
    assert len(logs) <= 2


def test_certificates_that_cannot_be_used(authority: trustme.CA) -> None:
    good, other = tls_of(authority), tls_of(authority)
    for parts in [(b"", good.certificate, good.key), (good.ca, b"x", good.key), (good.ca, good.certificate, other.key)]:
        before = open_files()
        with pytest.raises(InputError, match="certificates of Tls"):
            Tls(*parts)
        assert open_files() <= before


async def test_a_rank_whose_own_certificate_has_expired_is_told_so(authority: trustme.CA) -> None:
    [coordinator] = job(1, tls_of(authority, not_after=yesterday()))[0]
    with pytest.raises(InputError, match="own certificate: certificate has expired"):
        coordinator.begin("save", 1.0)


@pytest.mark.parametrize("secure", sample([0, 1], 1))
async def test_a_tree_with_tls_on_one_side_only(authority: trustme.CA, secure: int) -> None:
    ranks = MemoryRendezvous.all_of(Tree.of(["host"] * 2, 16))
    settings: list[Tls | None] = [None, None]
    settings[secure] = tls_of(authority)
    coordinators = [
        GrpcCoordinator(rank, 2, each, tls) for rank, (each, tls) in enumerate(zip(ranks, settings, strict=True))
    ]
    with captured_logs():
        _, second = await run_ranks(coordinators, _barrier, timeout=0.5)
        with anyio.fail_after(60):
            while "check tls= of both ranks" not in str(second):  # it has not tried yet
                [second] = await run_ranks(coordinators[1:], _barrier, timeout=0.5)
        await closed(coordinators)
    assert isinstance(second, PeerError)


def test_a_key_with_a_password_is_not_asked_for(authority: trustme.CA) -> None:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 -- trustme needs it

    good = tls_of(authority)
    key = serialization.load_pem_private_key(good.key, None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    with pytest.raises(InputError, match="the private key is encrypted"):
        Tls(good.ca, good.certificate, encrypted)


# -- strangers -------------------------------------------------------------------------------

HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def client_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(into, out, server_hostname=NAME).do_handshake()
    return out.read()


def ended(stranger: socket.socket) -> bool:
    """Read until the other side closes; say whether it has."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def stranger_at(port: int, data: bytes = b"") -> socket.socket:
    stranger = socket.create_connection((LOOPBACK, port), timeout=60)
    stranger.sendall(data)
    return stranger


def job(size: int = 2, tls: Tls | None = None) -> tuple[list[GrpcCoordinator], list[MemoryRendezvous]]:
    ranks = MemoryRendezvous.all_of(Tree.of(["host"] * size, 16))
    return [GrpcCoordinator(rank, size, each, tls) for rank, each in enumerate(ranks)], ranks


async def works(coordinators: Sequence[GrpcCoordinator]) -> bool:
    async def joined(gathered: Sequence[bytes]) -> bytes:
        return b"".join(gathered)

    async def decide(rank: int, agreement: Agreement) -> bytes:
        return await agreement.gather_broadcast("commit", b"%d" % rank, joined)

    return await run_ranks(coordinators, decide) == [b"01"] * 2


async def port_of(rendezvous: MemoryRendezvous) -> int:
    """Return the port of rank 0, which has taken part in an operation."""
    return int((await rendezvous.address_of(0)).rpartition(":")[2])


async def test_children_on_this_host_do_not_go_through_the_gate() -> None:
    with Relay() as gate:

        class BesideTheDoor(MemoryRendezvous):
            async def publish(self, port: int, door: str) -> None:
                await super().publish(gate.before(port), door)

        ranks = BesideTheDoor.all_of(Tree.of(["host"] * 2, 16))
        coordinators = [GrpcCoordinator(rank, 2, each) for rank, each in enumerate(ranks)]
        assert await works(coordinators)
        assert gate.connections == 0
    door = await ranks[0].door_of(0)
    path, name, network = door.split()
    assert behind(door) == f"unix:{path}"
    for other in (
        "",
        f"{path} {name} net:[1]",
        f"{path} 0123456789abcdef {network}",
        f"/proc/1/fd/999 {name} {network}",
    ):
        assert behind(other) is None


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("said", ["nothing", "half a preface", "a preface", "a client hello", "garbage"])
async def test_strangers_of_the_tree_are_closed_in_time(
    secure: bool,  # noqa: FBT001 -- a parameter of pytest
    said: str,
    authority: trustme.CA,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = {
        "nothing": b"",
        "half a preface": HTTP2[:9],
        "a preface": HTTP2,
        "a client hello": client_hello()[: None if secure else 9],
        "garbage": b"\xff" * 100,
    }[said]
    coordinators, ranks = job(tls=tls_of(authority) if secure else None)
    with captured_logs() as logs:
        assert await works(coordinators)
        monkeypatch.setattr(strangers, "PROOF_SECONDS", 1.0)  # the ranks have proved themselves
        port = await port_of(ranks[1])
        opened = [stranger_at(port, data) for _ in range(3)]
        for each in opened:
            with each:
                assert await to_thread.run_sync(ended, each)
        assert await works(coordinators)
        await closed(coordinators)
    assert sum(entry["count"] for entry in logs) <= 3
    assert len(logs) <= 2


async def test_a_stranger_that_sends_much_is_closed() -> None:
    coordinators, ranks = job()
    assert await works(coordinators)
    headers = (1 << 14).to_bytes(3, "big") + bytes([0, 0, 0, 0, 0, 1])  # DATA of a stream that is not there
    with captured_logs() as logs, stranger_at(await port_of(ranks[1]), HTTP2) as stranger:
        with pytest.raises(ConnectionError):
            await to_thread.run_sync(stranger.sendall, (headers + bytes(1 << 14)) * 10_000)
        await closed(coordinators)
    assert len(logs) == 1


async def test_the_oldest_silent_strangers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "PROOF_SECONDS", 600.0)
    monkeypatch.setattr(strangers, "LOG_SECONDS", 600.0)
    coordinators, ranks = job()
    assert await works(coordinators)
    port = await port_of(ranks[1])
    with ExitStack() as stack, captured_logs() as logs:
        talker = stack.enter_context(stranger_at(port, HTTP2))
        assert talker.recv(1)  # gRPC has answered
        silent = [stack.enter_context(stranger_at(port)) for _ in range(100)]
        for each in silent[:69]:  # 31 may stay beside the one that talks
            assert await to_thread.run_sync(ended, each)
        assert await works(coordinators)
        for each in (talker, *silent[69:]):
            each.settimeout(0)
            try:
                while each.recv(4096):
                    pass
            except BlockingIOError:
                continue
            pytest.fail("it was closed, too")
        assert len(logs) == 1
        await closed(coordinators)
    assert sum(entry["count"] for entry in logs) == 69
    assert len(logs) == 2


async def test_a_rank_joins_while_strangers_keep_coming() -> None:
    coordinators, ranks = job()
    stop, many = threading.Event(), threading.Event()

    def flood(address: str) -> None:
        numbers = itertools.count()
        while not stop.is_set():
            with ExitStack() as stack:
                for number in itertools.islice(numbers, 400):
                    try:
                        stack.enter_context(stranger_at(int(address.rpartition(":")[2]), b"" if number % 10 else HTTP2))
                    except OSError:  # it was closed before it could say anything
                        continue
                    if number == 200:
                        many.set()

    with captured_logs():
        address = asyncio.wrap_future(current_loop().run(ranks[1].address_of(0)))
        async with anyio.create_task_group() as group:
            group.start_soon(run_ranks, coordinators[:1], _barrier)
            thread = threading.Thread(target=flood, args=(await address,))
            thread.start()
            await to_thread.run_sync(many.wait)
            assert await run_ranks(coordinators[1:], _barrier) == [b"done"]
        stop.set()
        await to_thread.run_sync(thread.join)
        await closed(coordinators)


async def _barrier(_rank: int, agreement: Agreement) -> bytes:
    async def done(_: Sequence[bytes]) -> bytes:
        return b"done"

    return await agreement.gather_broadcast("barrier", b"", done)


@pytest.mark.parametrize("secure", [False, True])
async def test_strangers_of_bulk_data_are_closed_with_the_operation(
    secure: bool,  # noqa: FBT001 -- a parameter of pytest
    authority: trustme.CA,
) -> None:
    settings = tls_of(authority) if secure else None
    gc.collect()
    gc.disable()
    try:
        before = open_files()
        with meshes(settings, settings) as ranks, captured_logs(), ExitStack() as stack:
            port = Card.decode(ranks[1].card).port
            said = [b"", b"x", bytes(20), client_hello()]
            opened = [stack.enter_context(stranger_at(port, said[number % 4])) for number in range(200)]
            assert await sent(ranks, PATTERN * 1000) == PATTERN * 1000
            for each in opened:
                assert await to_thread.run_sync(ended, each)
        with anyio.move_on_after(60):
            while open_files() - before:  # noqa: ASYNC110 -- a thread that ends its connection sets no event
                await anyio.sleep(0.01)
        assert open_files() - before == set()
    finally:
        gc.enable()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("data", [b"", b"x", bytes(20), bytes(60)])
async def test_strangers_of_bulk_data_are_closed_in_time(
    secure: bool,  # noqa: FBT001 -- a parameter of pytest
    data: bytes,
    authority: trustme.CA,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strangers, "PROOF_SECONDS", 0.2)
    settings = tls_of(authority) if secure else None
    with meshes(settings, settings) as ranks, captured_logs() as logs:
        async with anyio.create_task_group() as group:
            group.start_soon(ranks[1].serve)
            with stranger_at(Card.decode(ranks[1].card).port, data) as stranger:
                assert await to_thread.run_sync(ended, stranger)
            ranks[1].close()
    assert len(logs) == 1


async def test_a_stranger_makes_room_if_descriptors_are_short() -> None:
    class Short(socket.socket):
        errors: ClassVar = [errno.EMFILE, errno.ECONNABORTED]

        def accept(self) -> tuple[socket.socket, Any]:
            if self.errors:
                raise OSError(self.errors.pop(0), "short")
            return super().accept()

    hung_up: list[int] = []
    with captured_logs() as logs, Short() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        listener.settimeout(0)
        guests = strangers.Strangers("coordinator", 0, lambda: 8)
        for number in range(2):
            guests.enter("somebody", partial(hung_up.append, number))
        with stranger_at(listener.getsockname()[1]):
            accepted, peer = await guests.accept(listener)
            accepted.close()
        assert (hung_up, len(guests)) == ([0], 1)
        assert peer.startswith("ipv4:127.0.0.1:")
        guests.close()
    assert [entry["reason"] for entry in logs] == ["this process has no descriptor left for it"]


async def test_many_refusals_make_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "LOG_SECONDS", 0.05)
    guests = strangers.Strangers("coordinator", 3, lambda: 8)
    with captured_logs() as logs:
        for _ in range(2000):
            guests.refuse(guests.enter("somebody", lambda: None), "why")
        assert [(entry["count"], entry["rank"]) for entry in logs] == [(1, 3)]
        with anyio.fail_after(60):
            while len(logs) < 2:  # noqa: ASYNC110 -- a log line sets no event
                await anyio.sleep(0.01)
        guests.close()
    assert [entry["count"] for entry in logs] == [1, 1999]


LIMITED = """
import logging, os, resource, sys
import anyio, torch
import bcp
from bcp._messages.coordination import Card
from bcp.coordinators import GrpcCoordinator, mesh
from bcp.coordinators.tree.rendezvous import MemoryRendezvous, Tree

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
ranks = MemoryRendezvous.all_of(Tree.of(["host"] * 2, 16))
coordinators = [GrpcCoordinator(rank, 2, each) for rank, each in enumerate(ranks)]
weights = torch.arange(1 << 20)
say = lambda *words: print(*words, flush=True)
card = mesh.Mesh.card

def asked(self):
    if self.rank == 0:
        say("mesh", Card.decode(card.fget(self)).port)
        sys.stdin.readline()
    return card.fget(self)

async def on_all(function, values):
    async def one(rank):
        await function(sys.argv[1], {"model": {"w": values[rank]}}, coordinator=coordinators[rank],
                       options=(bcp.SaveOptions if function is bcp.asave else bcp.LoadOptions)(**options[function]))
    async with anyio.create_task_group() as group:
        for rank in range(2):
            group.start_soon(one, rank)

options = {bcp.asave: {"timeout": 60, "overwrite": True}, bcp.aload: {"timeout": 60}}
files = lambda: len(os.listdir("/proc/self/fd"))

async def main():
    await on_all(bcp.asave, [weights, weights])
    await on_all(bcp.aload, [torch.zeros_like(weights), torch.zeros_like(weights)])
    before = files()
    say("tree", (await ranks[1].address_of(0)).rpartition(":")[2])
    sys.stdin.readline()
    mesh.Mesh.card = property(asked)
    found = [torch.zeros_like(weights), torch.zeros_like(weights)]
    await on_all(bcp.asave, [weights, weights])
    await on_all(bcp.aload, found)
    say("loaded", all(torch.equal(each, weights) for each in found))
    sys.stdin.readline()
    with anyio.fail_after(60):
        while files() != before:
            await anyio.sleep(0.01)
    say("clean")
    for each in coordinators:
        await each.aclose()

class Counts(logging.Handler):
    counts = []

    def emit(self, record):
        self.counts.append(record.bcp["count"])

logging.getLogger("bcp").addHandler(Counts())
anyio.run(main)
say("logged", len(Counts.counts), sum(Counts.counts))
"""


def test_strangers_do_not_use_up_the_descriptors_of_a_job(tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(LIMITED)
    command = [sys.executable, str(program), str(tmp_path / "ckpt")]
    said, numbers = [], []
    with (
        Forked(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        ExitStack() as stack,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            word, *values = line.split()
            said.append(word)
            numbers = values
            if word in ("tree", "mesh"):
                for number in range(400):
                    data = HTTP2 if word == "tree" and number % 2 else b""
                    stack.enter_context(stranger_at(int(values[0]), data))
            if word == "loaded":
                assert values == ["True"]
                stack.close()
            if word in ("tree", "mesh", "loaded"):
                process.stdin.write("\n")
                process.stdin.flush()
    assert (said, process.returncode) == (["tree", "mesh", "loaded", "clean", "logged"], 0)
    lines, count = map(int, numbers)
    assert lines <= 4
    assert count > 400
