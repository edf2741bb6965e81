"""The protocol between a reading host and the agent of another host.

Both sides prove that they know the job's token, and neither shows it. A request is one message; its answer is a status,
a length, and so many bytes of a file or of words.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import struct
from enum import IntEnum

from bcp._messages.base import decode_either
from bcp._messages.tiers import Post, Want
from bcp._sockets import Wire, proof
from bcp.errors import InputError, MessageError, StorageError

__all__ = [
    "LIVING",
    "OFFER",
    "Status",
    "StrangerError",
    "check_address",
    "dial",
    "greets",
    "pull_head",
    "pull_request",
    "push_answer",
    "push_request",
    "split_address",
    "welcome",
]

NONCE_BYTES, PROOF_BYTES = 16, 32
LAST_PORT = 65535
REQUEST = struct.Struct("<I")
ANSWER = struct.Struct("<BQ")
MOST_REQUEST_BYTES = 4096
GREETING = b"bcp-memory-1\n"

OFFER = "offer/"
"""Before the number of a host that copies, and the operation that it has last: a request for the next one."""

LIVING = "living"
"""Instead of a key: a request for the ranks of the host whose processes live."""


class Status(IntEnum):
    """How a request fared."""

    OK = 0
    MISSING = 1
    DAMAGED = 2
    FAILED = 3


class StrangerError(Exception):
    """The other side does not know the job's token, or speaks another protocol."""


def _proved(token: bytes, side: str, *nonces: bytes) -> bytes:
    return proof(token, side, *(nonce.hex() for nonce in nonces))


def dial(wire: Wire, token: bytes) -> None:
    """Prove to an agent that this side knows the token, and let it prove the same. Blocks."""
    theirs = bytearray(len(GREETING) + NONCE_BYTES)
    wire.pull(memoryview(theirs))
    if not theirs.startswith(GREETING):
        raise StrangerError("it is no agent of this version of bcp")
    challenge, nonce = bytes(theirs[len(GREETING) :]), secrets.token_bytes(NONCE_BYTES)
    wire.push(memoryview(nonce + _proved(token, "reads", challenge, nonce)))
    answer = bytearray(PROOF_BYTES)
    wire.pull(memoryview(answer))
    if not hmac.compare_digest(answer, _proved(token, "serves", challenge, nonce)):
        raise StrangerError("it does not know this job's token")


def welcome(wire: Wire, token: bytes) -> None:
    """Do the agent's part. Blocks. Without a token nobody is let in."""
    if not token:
        raise StrangerError("this host has no token yet")
    challenge = secrets.token_bytes(NONCE_BYTES)
    wire.push(memoryview(GREETING + challenge))
    theirs = bytearray(NONCE_BYTES + PROOF_BYTES)
    wire.pull(memoryview(theirs))
    nonce = bytes(theirs[:NONCE_BYTES])
    if not hmac.compare_digest(theirs[NONCE_BYTES:], _proved(token, "reads", challenge, nonce)):
        raise StrangerError("it does not know this job's token")
    wire.push(memoryview(_proved(token, "serves", challenge, nonce)))


def push_request(wire: Wire, want: Want | Post) -> None:
    """Ask for bytes of a file, or for notes of a meeting. Blocks."""
    data = want.encode()
    wire.push(memoryview(REQUEST.pack(len(data)) + data))


def pull_request(wire: Wire) -> Want | Post:
    """Read a request. Blocks. Raises ConnectionResetError at the end, and StrangerError for what is no request."""
    head = bytearray(REQUEST.size)
    wire.pull(memoryview(head))
    (nbytes,) = REQUEST.unpack(head)
    if nbytes > MOST_REQUEST_BYTES:
        raise StrangerError(f"a request of {nbytes} bytes")
    data = bytearray(nbytes)
    wire.pull(memoryview(data))
    try:
        return decode_either(Want, Post, bytes(data))
    except MessageError as error:
        raise StrangerError(str(error)) from error


def push_answer(wire: Wire, status: Status, words: str = "", nbytes: int = 0) -> None:
    """Send the head of an answer, and words if it is a failure; after an OK the caller sends so many bytes. Blocks."""
    data = words.encode(errors="backslashreplace")[:MOST_REQUEST_BYTES]
    wire.push(memoryview(ANSWER.pack(status, nbytes if status is Status.OK else len(data)) + data))


def pull_head(wire: Wire) -> tuple[Status, int, str]:
    """Return status, number of bytes to come, and the words of a failure. Blocks."""
    head = bytearray(ANSWER.size)
    wire.pull(memoryview(head))
    code, nbytes = ANSWER.unpack(head)
    if code not in Status.__members__.values() or (code != Status.OK and nbytes > MOST_REQUEST_BYTES):
        raise StorageError(f"an agent answered with status {code} and {nbytes} bytes, which no agent does")
    if code == Status.OK:
        return Status.OK, nbytes, ""
    words = bytearray(nbytes)
    wire.pull(memoryview(words))
    return Status(code), 0, words.decode(errors="replace")


def connected(address: tuple[str, int], seconds: float) -> socket.socket:
    """Connect to an agent. Raises OSError."""
    made = socket.create_connection(address, timeout=seconds)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def greets(address: str, seconds: float) -> bool:
    """Whether an agent at ``host:port`` greets a reader within so many seconds. Blocks."""
    try:
        with connected(split_address(address), seconds) as connection:
            wire, greeting = Wire(connection), bytearray(len(GREETING))
            wire.block(seconds)
            wire.pull(memoryview(greeting))
            return greeting == GREETING
    except OSError:
        return False


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, ``[host]:port``, or a host alone, whose port is 0."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or (":" in host and not host.endswith("]")):  # an address of IPv6 alone has no port
        host, port = text, "0"
    return host.strip("[]"), int(port)


def check_address(text: str) -> None:
    """Raise InputError unless a text is an address to listen at, as :func:`split_address` takes it apart."""
    host, port = split_address(text)
    is_closed = text.count("[") == text.count("]")
    if not (host and is_closed) or port > LAST_PORT or (":" in host and not _is_ipv6(host)):
        raise InputError(f"{text!r} is no address: write HOST or HOST:PORT, as 10.0.0.7:7000 or [fe80::1]:7000")


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
