"""A loopback server of HTTP that only counts: it discards data, and sends the payload to all who ask.

The kernel discards received bytes (``MSG_TRUNC``), and sends from the page cache (``sendfile``). To receive a GB
takes 0.04 s of a core here, so that every figure is the client's. In a checked round the server reads all bytes and
remembers the CRC-32C of each body; later bodies of the same place and size are answered with it.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

from benchmarks.storage.payload import MIB, pieces

__all__ = ["PAYLOAD", "Client", "CountingServer", "Request", "Stored"]

PAYLOAD = "payload"
"""Name of the object that can be read."""

_DISCARD = socket.MSG_TRUNC | socket.MSG_WAITALL
_WINDOW_BYTES = 64 * MIB
_HEAD_BYTES = 64 << 10
_NO_HEADERS: Mapping[str, str] = {}


class Stored(NamedTuple):
    """An object that a client has written: its size and CRC-32C."""

    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Request:
    """Method, path without quotes, parameters, headers by lower-case names, and the size of the body."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    nbytes: int

    @classmethod
    def of(cls, head: str) -> Request:
        """Take the lines of a head."""
        first, *lines = head.split("\r\n")
        method, target, _ = first.split(" ")
        path, _, query = target.partition("?")
        fields = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        if "chunked" in headers.get("transfer-encoding", ""):
            raise ValueError("the counting server takes bodies of known size only")
        parameters = dict(parse_qsl(query, keep_blank_values=True))
        return cls(method, unquote(path), parameters, headers, int(headers.get("content-length", "0")))

    def range(self, nbytes: int) -> tuple[int, int]:
        """Return begin and end of the range that is asked for, of an object of so many bytes."""
        first, _, last = self.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        return int(first), min(int(last or nbytes), nbytes - 1) + 1


class Client:
    """One connection of a client, on a thread of its own."""

    def __init__(self, connection: socket.socket, server: CountingServer) -> None:
        self._socket = connection
        self._server = server
        self._ahead = bytearray()

    def request(self) -> Request | None:
        """Read the next head; None at the end of the connection."""
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            received = self._socket.recv(_HEAD_BYTES)
            if not received:
                return None
            self._ahead += received
        request = Request.of(self._ahead[:end].decode("latin-1"))
        del self._ahead[: end + 4]
        if "100-continue" in request.headers.get("expect", ""):
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return request

    def read(self, nbytes: int) -> bytes:
        """Read a small body, or the beginning of one."""
        while len(self._ahead) < nbytes:
            received = self._socket.recv(nbytes - len(self._ahead))
            if not received:
                raise ConnectionResetError
            self._ahead += received
        data = bytes(self._ahead[:nbytes])
        del self._ahead[:nbytes]
        return data

    def unread(self, data: bytes) -> None:
        """Put back the beginning of a body."""
        self._ahead[:0] = data

    def receive(self, nbytes: int, place: str) -> int:
        """Take data, count it, and return its CRC-32C.

        Args:
            nbytes: how much of it.
            place: where the data belongs: bodies of one place have the same bytes in every round.

        """
        import google_crc32c  # noqa: PLC0415 -- a package of extras, which local disks do without

        server, known = self._server, self._server.crcs.get((place, nbytes))
        early = self.read(min(nbytes, len(self._ahead)))
        left = nbytes - len(early)
        if known is None or server.is_checking:
            known = google_crc32c.extend(0, early)
            while left:
                piece = self.read(min(left, MIB))
                known = google_crc32c.extend(known, piece)
                left -= len(piece)
            server.crcs[place, nbytes] = known
        while left:
            count = self._socket.recv_into(server.window, min(left, _WINDOW_BYTES), _DISCARD)
            if not count:
                raise ConnectionResetError
            left -= count
        server.count(nbytes)
        return known

    def answer(self, status: str, body: bytes = b"", headers: Mapping[str, str] = _NO_HEADERS) -> None:
        """Answer with a body."""
        time.sleep(self._server.latency)
        self._socket.sendall(_head(status, {"Content-Length": str(len(body)), **headers}) + body)

    def answer_head(self, nbytes: int, headers: Mapping[str, str]) -> None:
        """Answer a HEAD of an object of so many bytes."""
        self._socket.sendall(_head("200 OK", {"Content-Length": str(nbytes), **headers}))

    def send_payload(self, request: Request, headers: Mapping[str, str]) -> None:
        """Answer with a range of the payload."""
        time.sleep(self._server.latency)
        whole = self._server.nbytes
        begin, end = request.range(whole)
        fields = {"Content-Length": str(end - begin), "Content-Range": f"bytes {begin}-{end - 1}/{whole}", **headers}
        self._socket.sendall(_head("206 Partial Content", fields))
        while begin < end:
            begin += os.sendfile(self._socket.fileno(), self._server.payload, begin, end - begin)


def _head(status: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class CountingServer(ABC):
    """The part that all kinds of stores share.

    Attributes:
        url: of the server.
        nbytes: size of the payload.
        payload: descriptor of the file that has it.
        objects: written objects by name.
        crcs: CRC-32C by place and size.
        is_checking: whether the bytes of every body are read.
        latency: seconds that every answer waits.
        window: memory for calls that discard; no page of it is ever touched.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.payload = os.memfd_create("payload")
        for piece in pieces(nbytes):
            os.write(self.payload, piece)
        self.objects: dict[str, Stored] = {}
        self.crcs: dict[tuple[str, int], int] = {}
        self.is_checking = True
        self.latency = 0.0
        self.window = mmap.mmap(-1, _WINDOW_BYTES)
        self._counted = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="counting server", daemon=True).start()

    @abstractmethod
    def handle(self, client: Client, request: Request) -> None:
        """Take the body of a request, and answer."""

    def count(self, nbytes: int) -> None:
        """Count data that was received."""
        with self._lock:
            self._counted += nbytes

    def take_stock(self, *, is_checking: bool) -> tuple[int, dict[str, Stored]]:
        """Return bytes and objects that were received since the last call; say whether the next ones are checked."""
        with self._lock:
            counted, self._counted = self._counted, 0
        objects, self.objects = self.objects, {}
        self.is_checking = is_checking
        return counted, objects

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        client = Client(connection, self)
        with connection:
            try:
                while (request := client.request()) is not None:
                    self.handle(client, request)
            except ConnectionError:
                return


def serve(pipe: Pipe, kind: type[CountingServer], nbytes: int, latency: float) -> None:
    """Be the server's process: tell the URL, then answer calls of :meth:`CountingServer.take_stock` until the end."""
    server = kind(nbytes)
    server.latency = latency
    pipe.send(server.url)
    while True:
        try:
            is_checking = pipe.recv()
        except EOFError:
            return
        pipe.send(server.take_stock(is_checking=is_checking))
