"""A connection to a NameNode in Hadoop's own protocol: IPC version 9, without SASL, protocol buffers coded by hand.

hdfs-native has no concat, and says no file ids. A request that is made again keeps its client id and call id: then the
NameNode answers from its retry cache, and nothing is done twice. Many requests are under way on one connection.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bcp.backends.hdfs.faults import from_java

__all__ = ["Address", "Call", "Connection", "Fields", "RpcRefusedError", "field", "parse"]

Address = tuple[str, int]
Fields = Mapping[int, list["int | bytes"]]

_PROTOCOL = "org.apache.hadoop.hdfs.protocol.ClientProtocol"
_MAGIC = b"hrpc" + bytes([9, 0, 0])  # version, service class, no authentication
_CONTEXT_ID = -3
_PROTOCOL_BUFFERS, _FINAL_PACKET = 2, 0
_SUCCESS, _FATAL = 0, 2
_LONGEST = 64 << 20
_MASK = (1 << 64) - 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


_readers: set[asyncio.Task[None]] = set()
"""Readers of open connections. asyncio refers to them weakly: a backend that is dropped would lose connection and
reader at once, in place of closing them in order."""


class RpcRefusedError(OSError):
    """The NameNode does not speak this protocol with us: it wants Kerberos, or is behind a proxy."""


# -- protocol buffers -------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    out, number = bytearray(), number & _MASK
    while number > 0x7F:  # noqa: PLR2004 -- seven bits a byte
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _zigzag(number: int) -> int:
    return (number << 1) ^ (number >> 63)


def field(number: int, value: int | bytes | str) -> bytes:
    """Return one field of a message: an integer as a varint, text and bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _delimited(data)


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return number, offset


def _read_delimited(data: bytes, offset: int) -> tuple[bytes, int]:
    length, offset = _read_varint(data, offset)
    if offset + length > len(data):
        raise ValueError("a message is cut")
    return data[offset : offset + length], offset + length


def parse(message: bytes) -> Fields:
    """Return the values of all fields of a message, by number. Raises ValueError or IndexError if it is none."""
    fields: dict[int, list[int | bytes]] = {}
    offset = 0
    while offset < len(message):
        key, offset = _read_varint(message, offset)
        kind = key & 7
        value: int | bytes
        if kind == _VARINT:
            value, offset = _read_varint(message, offset)
        elif kind == _BYTES:
            value, offset = _read_delimited(message, offset)
        elif kind in (_FIXED64, _FIXED32):
            width = 8 if kind == _FIXED64 else 4
            value, offset = message[offset : offset + width], offset + width
        else:
            raise ValueError(f"wire type {kind}")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _text(fields: Fields, number: int) -> str:
    value = fields.get(number, [b""])[0]
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _integer(fields: Fields, number: int) -> int:
    value = fields.get(number, [0])[0]
    return value if isinstance(value, int) else 0


# -- the connection ---------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """One request, however often it is sent.

    Attributes:
        id: its number, of those of one client id.
        sent: how often it was sent.
    """

    id: int
    sent: int = 0


class Connection:
    """One TCP connection to one NameNode, of one event loop.

    A task reads the answers. It closes the connection when it ends, also if the loop cancels it at its own end.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client_id: bytes) -> None:
        self._writer = writer
        self._client_id = client_id
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._task = asyncio.create_task(self._read(reader), name="answers of a NameNode")
        _readers.difference_update([task for task in _readers if task.get_loop().is_closed()])
        _readers.add(self._task)
        self._task.add_done_callback(_readers.discard)

    def __repr__(self) -> str:
        return f"<Connection to a NameNode: {len(self._waiting)} requests, {'closed' if self.closed else 'open'}>"

    @classmethod
    async def open(cls, address: Address, user: str, client_id: bytes) -> Connection:
        """Connect, and say who asks.

        Raises:
            OSError: there is nobody.

        """
        reader, writer = await asyncio.open_connection(*address)
        connection = cls(reader, writer, client_id)
        context = field(2, field(1, user)) + field(3, _PROTOCOL)
        writer.write(_MAGIC + connection._frame(_CONTEXT_ID, -1, context))
        return connection

    @property
    def closed(self) -> bool:
        """Whether no request can be made any more."""
        return self._task.done()

    async def call(self, method: str, request: bytes, call: Call) -> bytes:
        """Make a request; return the answer's message.

        Raises:
            ConnectionError: the connection broke. The request may have been carried out.
            RpcRefusedError: the NameNode refuses the connection.
            OSError: the NameNode refused the request.

        """
        if self.closed:
            raise ConnectionResetError("the connection to the NameNode is closed")
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[call.id] = answer
        header = field(1, method) + field(2, _PROTOCOL) + field(3, 1)
        self._writer.write(self._frame(call.id, call.sent, header, request))
        call.sent += 1
        try:
            return await answer
        finally:
            self._waiting.pop(call.id, None)

    def close(self) -> None:
        """Close the connection; requests under way fail."""
        self._task.cancel()
        self._writer.close()

    def _frame(self, call_id: int, retry: int, *messages: bytes) -> bytes:
        header = field(1, _PROTOCOL_BUFFERS) + field(2, _FINAL_PACKET) + field(3, _zigzag(call_id))
        header += field(4, self._client_id) + field(5, _zigzag(retry))
        body = b"".join(map(_delimited, (header, *messages)))
        return struct.pack(">I", len(body)) + body

    async def _read(self, reader: asyncio.StreamReader) -> None:
        error: OSError = ConnectionResetError("the NameNode has closed the connection")
        try:
            while True:
                (length,) = struct.unpack(">I", await reader.readexactly(4))
                if length > _LONGEST:
                    raise ValueError(f"an answer of {length} bytes")  # noqa: TRY301 -- handled as other nonsense
                self._take(await reader.readexactly(length))
        except RpcRefusedError as refusal:
            error = refusal
        except (ValueError, IndexError) as nonsense:
            error = RpcRefusedError(f"the NameNode's answer is not of Hadoop's protocol: {nonsense}")
        except (asyncio.IncompleteReadError, OSError) as lost:
            error = ConnectionResetError(f"the connection to the NameNode broke: {lost}")
        finally:
            self._writer.close()
            _fail(self._waiting.values(), error)

    def _take(self, answer: bytes) -> None:
        """Hand an answer to its request."""
        raw, offset = _read_delimited(answer, 0)
        header = parse(raw)
        status = _integer(header, 2)
        if status == _FATAL:
            raise RpcRefusedError(f"{_text(header, 4)}: {_text(header, 5)}".partition("\n")[0])
        call_id = _integer(header, 1)
        waiting = self._waiting.get(call_id)
        if waiting is None or waiting.done():
            return  # it was cancelled
        if status == _SUCCESS:
            waiting.set_result(_read_delimited(answer, offset)[0])
        else:
            waiting.set_exception(from_java(_text(header, 4), _text(header, 5)))


def _fail(waiting: Iterable[asyncio.Future[bytes]], error: OSError) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(error)
