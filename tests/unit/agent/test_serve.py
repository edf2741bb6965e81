"""The memory of a host over a socket: bytes for those who know the token, and nothing for anybody else."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import kept, marks_of
from tasks import on_ranks

import bcp
from bcp.agent.serve import MemoryServer
from bcp.errors import CorruptError, InputError, StorageError
from bcp.testing.storage_fakes import OPERATIONS
from bcp.tiers import wire as protocol
from bcp.tiers.folder import NodeFolder
from bcp.tiers.peer import PeerMemory

TOKEN = b"the token of this job"


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "step-1"
    states = {"model": {f"w{n}": torch.rand(700_000) for n in range(3)}, "extra_states": {"epoch": 3}}

    async def save(_: int, ranks: Any) -> None:
        await bcp.asave(path, states, options=bcp.SaveOptions(record=False), coordinator=ranks)

    assert on_ranks(2, save) == [None] * 2
    return path


@pytest.fixture
def folder(direct: Path, tmp_path: Path) -> NodeFolder:
    made = kept(direct, tmp_path / "node", [0, 1])
    made.put_token(TOKEN)
    return made


@pytest.fixture
def server(folder: NodeFolder) -> Iterator[MemoryServer]:
    with MemoryServer(folder, "127.0.0.1") as made:
        yield made


@pytest.fixture
def peer(server: MemoryServer) -> Iterator[PeerMemory]:
    made = PeerMemory(server.address, TOKEN, seconds=60.0)
    yield made
    asyncio.run(made.aclose())


def files(folder: NodeFolder) -> list[str]:
    return [path.relative_to(folder.root).as_posix() for paths in folder.data_files().values() for path in paths]


def read(peer: PeerMemory, key: str, start: int, nbytes: int) -> bytes:
    memory = bytearray(nbytes)
    asyncio.run(peer.read_into(key, start, memoryview(memory)))
    return bytes(memory)


def test_any_range_of_any_file(folder: NodeFolder, peer: PeerMemory) -> None:
    assert len(files(folder)) > 2
    for key in files(folder):
        data = (folder.root / key).read_bytes()
        for start, nbytes in ((0, 1), (0, len(data)), (len(data) - 1, 1), (len(data) // 3, len(data) // 2), (7, 0)):
            assert read(peer, key, start, nbytes) == data[start : start + nbytes]
        assert asyncio.run(peer.get(key)) == data


def test_one_range_into_many_buffers(folder: NodeFolder, peer: PeerMemory) -> None:
    key = max(files(folder), key=lambda each: (folder.root / each).stat().st_size)
    data, sizes = (folder.root / key).read_bytes(), (1, 0, 100, 33)
    outs = [memoryview(bytearray(size)) for size in sizes]
    asyncio.run(peer.read_scattered(key, 5, outs))
    assert b"".join(outs) == data[5 : 5 + sum(sizes)]
    asyncio.run(peer.read_scattered(key, 5, []))


def test_several_at_once(folder: NodeFolder, peer: PeerMemory) -> None:
    async def all_of_them() -> list[bytes]:
        async def one(key: str) -> bytes:
            return bytes(await peer.get(key))

        return await asyncio.gather(*map(one, files(folder) * 5))

    assert asyncio.run(all_of_them()) == [(folder.root / key).read_bytes() for key in files(folder) * 5]


def test_what_is_missing_or_short_is_told_as_by_any_storage(folder: NodeFolder, peer: PeerMemory) -> None:
    key = files(folder)[0]
    size = (folder.root / key).stat().st_size
    with pytest.raises(CorruptError, match=rf"has {size} bytes, and 2 from {size - 1} on"):
        read(peer, key, size - 1, 2)
    with pytest.raises(FileNotFoundError, match="is not marked on this host"):
        read(peer, key.replace("/0000", "/0007"), 0, 1)
    (folder.root / key).unlink()
    with pytest.raises(FileNotFoundError, match="is missing on this host"):
        read(peer, key, 0, 1)
    assert read(peer, files(folder)[0], 0, 1), "the connection goes on"


@pytest.mark.parametrize(
    "key",
    [
        "../node/model/00000-0123456789abcdef.safetensors",
        "../../etc/passwd",
        "/etc/passwd",
        "copies/00000-0123456789abcdef",
        "intents/../token",
        "lock",
        "token",
        "layouts/x",
        "model/a",
        "",
    ],
)
def test_nothing_but_files_of_snapshots_is_served(key: str, peer: PeerMemory) -> None:
    with pytest.raises(StorageError, match="is no file of a snapshot"):
        read(peer, key, 0, 1)


def test_a_file_that_has_gone_before_its_digest_is_told_as_damage(folder: NodeFolder, peer: PeerMemory) -> None:
    """An error of the connection would look like a host that does not answer."""
    [mark, _] = marks_of(folder)
    for path in folder.root.glob("receipts/*"):
        path.unlink()
    folder.data_files()[mark][0].unlink()
    with pytest.raises(CorruptError, match="has gone from"):
        asyncio.run(peer.get(f"receipts/{mark.name}.arrow"))


def test_a_link_in_the_place_of_a_file_is_not_followed(folder: NodeFolder, peer: PeerMemory, tmp_path: Path) -> None:
    key = files(folder)[0]
    (tmp_path / "secret").write_bytes(b"secret")
    (folder.root / key).unlink()
    (folder.root / key).symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError):
        read(peer, key, 0, 6)


def test_files_that_are_read_are_not_taken_away(folder: NodeFolder, peer: PeerMemory) -> None:
    mark = marks_of(folder)[0]
    key = next(path for path in files(folder) if f"{mark.rank:05d}-" in path)
    read(peer, key, 0, 1)
    assert not folder.take(mark)
    asyncio.run(peer.aclose())
    for _ in range(600):
        if folder.take(mark):
            break
        threading.Event().wait(0.1)
    assert mark not in folder.marks()


# -- strangers ---------------------------------------------------------------------------------------


def test_another_token_reads_nothing(folder: NodeFolder, server: MemoryServer) -> None:
    with pytest.raises(StorageError, match="does not serve this job"):
        read(PeerMemory(server.address, b"another token", seconds=60.0), files(folder)[0], 0, 1)


@pytest.mark.parametrize(
    "words",
    [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(48), bytes(range(48)), bytes(range(250)) * 20, b"\xff" * 100_000],
    ids=["nothing", "a browser", "zeros", "a guess", "more", "a flood"],
)
def test_strangers_get_a_greeting_and_no_byte_more(
    words: bytes, server: MemoryServer, folder: NodeFolder, peer: PeerMemory
) -> None:
    with socket.create_connection(server.address, timeout=60) as stranger:
        greeting = stranger.recv(4096)
        assert greeting.startswith(protocol.GREETING)
        assert len(greeting) == len(protocol.GREETING) + protocol.NONCE_BYTES
        with suppress(OSError):
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(4096) == b""
    assert read(peer, files(folder)[0], 0, 1)


def test_a_proof_is_good_for_one_connection(server: MemoryServer) -> None:
    """What somebody has overheard opens no second connection."""
    heard: list[bytes] = []

    class Listening(protocol.Wire):
        def push(self, data: memoryview) -> None:
            heard.append(bytes(data))
            super().push(data)

    with socket.create_connection(server.address, timeout=60) as honest:
        made = Listening(honest)
        honest.settimeout(60)
        protocol.dial(made, TOKEN)
    with socket.create_connection(server.address, timeout=60) as thief:
        thief.recv(4096)
        thief.sendall(heard[0])
        with suppress(OSError):
            assert thief.recv(4096) == b""


@pytest.mark.parametrize("request_", [struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"abc", struct.pack("<I", 0)])
def test_a_request_that_is_none_ends_the_connection(request_: bytes, server: MemoryServer) -> None:
    with socket.create_connection(server.address, timeout=60) as made:
        wire = protocol.Wire(made)
        made.settimeout(60)
        protocol.dial(wire, TOKEN)
        made.sendall(request_)
        with suppress(OSError):
            assert made.recv(4096) == b""


class Impostor:
    """Listens where an agent should be, and says what it is told to."""

    def __init__(self, *, knows: bool, answer: bytes = b"", closes: bool = True) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[:2]
        self._knows, self._answer, self._closes = knows, answer, closes
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            wire = protocol.Wire(connection)
            connection.settimeout(60)
            try:
                protocol.welcome(wire, TOKEN if self._knows else b"guess")
                protocol.pull_request(wire)
                connection.sendall(self._answer)
                if not self._closes:
                    connection.recv(1)
            except (OSError, protocol.StrangerError):
                return

    def close(self) -> None:
        self.thread.join(60)
        self.listener.close()


HEAD = protocol.ANSWER


@pytest.mark.parametrize(
    ("knows", "answer"),
    [
        (False, b""),
        (True, b""),
        (True, HEAD.pack(0, 10)),
        (True, HEAD.pack(0, 4) + b"ab"),
        (True, HEAD.pack(7, 4) + b"abcd"),
        (True, HEAD.pack(3, 1 << 40)),
        (True, HEAD.pack(3, 4) + b"a"),
    ],
)
def test_an_impostor_or_a_broken_agent_is_an_error(knows: bool, answer: bytes) -> None:  # noqa: FBT001 -- a case
    impostor = Impostor(knows=knows, answer=answer)
    try:
        peer = PeerMemory(impostor.address, TOKEN, seconds=60.0)
        with pytest.raises(StorageError):
            read(peer, "model/00000-0123456789abcdef.safetensors", 0, 4)
        asyncio.run(peer.aclose())
    finally:
        impostor.close()


def test_an_agent_that_falls_silent_is_an_error_after_a_while() -> None:
    impostor = Impostor(knows=True, answer=HEAD.pack(0, 4) + b"ab", closes=False)
    peer = PeerMemory(impostor.address, TOKEN, seconds=0.2)
    with pytest.raises(StorageError, match="timed out"):
        read(peer, "model/00000-0123456789abcdef.safetensors", 0, 4)
    impostor.close()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]
    with pytest.raises(StorageError, match="does not serve this job"):
        read(PeerMemory(address, TOKEN), "model/00000-0123456789abcdef.safetensors", 0, 4)


def test_an_address_that_is_taken_is_named(folder: NodeFolder, server: MemoryServer) -> None:
    with pytest.raises(StorageError, match=rf"cannot listen on 127\.0\.0\.1, port {server.address[1]}"):
        MemoryServer(folder, *server.address)


def test_it_is_for_reads_alone(peer: PeerMemory) -> None:
    calls = {
        "put": lambda: peer.put("model/a", b""),
        "put_if": lambda: peer.put_if("model/a", b"", None),
        "version": lambda: peer.version("model/a"),
        "list": peer.list,
        "delete": lambda: peer.delete(["model/a"]),
    }
    assert set(calls) < set(OPERATIONS)
    for call in calls.values():
        with pytest.raises(InputError, match="is for reads of files alone"):
            asyncio.run(call())
