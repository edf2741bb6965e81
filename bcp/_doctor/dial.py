"""Connections between hosts: the door of a host, at which its doctor answers, and the knock at another host's door."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio

from bcp._messages.doctor import Way

__all__ = ["Door", "UnreachedError", "answering", "connected", "knock", "reason_of"]

_WORD = "bcp-doctor"
_LINE_BYTES = 256
_BACKLOG = 1024


class UnreachedError(Exception):
    """The host cannot be reached, or another host answers."""


@dataclass(frozen=True, slots=True)
class Door:
    """The address at which a host's leader answers.

    Attributes:
        rank: the leader.
        host: the host's name.
        address: the host's.
        port: of the system's choice.
    """

    rank: int
    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"host {self.host} at {self.address} port {self.port}"


@asynccontextmanager
async def answering(session: str, rank: int, address: str) -> AsyncIterator[int]:
    """Answer on a port of the system's choice, and yield the port. Every connection gets one line, and is closed.

    Raises:
        OSError: the address is none of this host's, or no port is free.

    """

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(f"{_WORD} {session} {rank} {time.time()!r}\n".encode())
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_server(answer, address, 0, backlog=_BACKLOG)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def knock(session: str, door: Door, seconds: float) -> Way:
    """Connect to a door, and check the answer.

    Raises:
        UnreachedError: no answer comes within ``seconds``, or that of another host.

    """
    began, wall = time.monotonic(), time.time()
    writer, line = None, b""
    try:
        with anyio.fail_after(seconds):
            reader, writer = await connected(door.address, door.port)
            line = await reader.readline()
    except TimeoutError:
        silent = "nothing comes back" if writer is None else "it takes the connection and says nothing"
        raise UnreachedError(f"cannot reach {door}: {silent} within {seconds:.1f} s") from None
    except OSError as error:
        raise UnreachedError(f"cannot reach {door}: {reason_of(error)}") from error
    except ValueError:  # a long line
        line = b"more than a line"
    finally:
        if writer is not None:
            writer.close()
    took = time.monotonic() - began
    return Way(took, _time_in(line, session, door) - wall - took / 2)


def _time_in(line: bytes, session: str, door: Door) -> float:
    """Return the time in the answer of the right host."""
    words = line.decode("ascii", "backslashreplace").split()
    if len(words) != 4 or words[:2] != [_WORD, session]:  # noqa: PLR2004 -- as `answering` writes them
        raise UnreachedError(f"cannot reach {door}: something else answers there, and says {line[:40]!r}")
    if words[2] != str(door.rank):
        raise UnreachedError(
            f"cannot reach {door}: rank {words[2]} of this job answers there; two hosts have this address"
        )
    return float(words[3])


async def connected(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address of a host that answers; raise the last one's error."""
    loop = asyncio.get_running_loop()
    last = OSError(f"{host} has no address")
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return await asyncio.open_connection(str(address[0]), port, family=family, limit=_LINE_BYTES)
        except OSError as error:
            last = error
    raise last


def reason_of(error: OSError) -> str:
    """Return the system's text of an error, without Python's."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)
