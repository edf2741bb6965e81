"""An agent lets other hosts of its job read the marked files of its own, and lets survivors meet.

Bytes go from the page cache to the socket (``sendfile``), in a thread for each connection. Marks whose files are read
are held until the connection ends: nobody takes their memory away.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

import anyio

from bcp._log import log
from bcp._messages.tiers import Living, Offered, ParityRecord, Post, Want
from bcp._sockets import Wire
from bcp.agent.board import Board
from bcp.agent.offers import offered
from bcp.errors import BcpError, CorruptError, StorageError
from bcp.format.metadata import OPERATION, owner_of, receipt_key
from bcp.runtime.process import process_lock
from bcp.tiers.digests import digested
from bcp.tiers.folder import Held, NodeFolder
from bcp.tiers.notes import Mark
from bcp.tiers.parity_files import operation_in
from bcp.tiers.wire import (
    LIVING,
    OFFER,
    Status,
    StrangerError,
    check_address,
    pull_request,
    push_answer,
    split_address,
    welcome,
)

__all__ = ["MemoryServer", "serving"]

MOST_CONNECTIONS = 256
GREETING_SECONDS = 10.0
IDLE_SECONDS = 600.0
PAUSE_SECONDS = 0.1

INTENT = re.compile(r"intents/([0-9]{5,10})-([0-9a-f]{16})")
LAYOUT = re.compile(r"layouts/([0-9a-f]{32})")

InUse = Held | ParityRecord | None
"""What a connection holds for its reader, by the mark of files, or by the save of a stripe; None if it is not there."""


@contextmanager
def serving(folder: NodeFolder, listen: str) -> Iterator[None]:
    """Serve at ``host`` or ``host:port``, and let the folder say where; or serve nobody, for an empty text."""
    if not listen:
        yield
        return
    check_address(listen)
    with _server(folder, *split_address(listen)) as server:
        shown = f"[{server.address[0]}]" if ":" in server.address[0] else server.address[0]
        folder.put_port(server.address[1])
        folder.put_address(f"{shown}:{server.address[1]}")
        try:
            yield
        finally:
            folder.put_address("")


def _server(folder: NodeFolder, host: str, port: int) -> MemoryServer:
    """Listen, at the port of the agent before if none is asked for: other hosts know that one."""
    if not port and (before := folder.port()):
        with suppress(StorageError):
            return MemoryServer(folder, host, before)
    return MemoryServer(folder, host, port)


class MemoryServer:
    """Serves the memory of one host, from when its context is entered until it is left.

    Attributes:
        address: host and port that it listens on.
    """

    def __init__(self, folder: NodeFolder, host: str, port: int = 0) -> None:
        """Listen.

        Args:
            folder: the memory, and the job's secret, which each reader has to know.
            host: the address of one interface; nothing else is listened on.
            port: 0 for any.

        Raises:
            StorageError: the address cannot be used.

        """
        self._folder, self._board = folder, Board()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise StorageError(f"the agent cannot listen on {host}, port {port}: {error}") from error
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: set[socket.socket] = set()
        self._is_closed = False
        self._lock = process_lock()

    def __repr__(self) -> str:
        return f"<MemoryServer on {self.address[0]}, port {self.address[1]}: {len(self._open)} connections>"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="bcp-agent-accept", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close all connections."""
        self._is_closed = True
        with self._lock:
            connections = [self._listener, *self._open]
        for each in connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("a reader was not let in", address=self.address, reason=str(error))
                time.sleep(PAUSE_SECONDS)  # no descriptors are left, as a rule
                continue
            with self._lock:
                if len(self._open) >= MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection, str(peer)), name="bcp-agent", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """Answer one reader until it goes."""
        try:
            with connection, ExitStack() as stack:
                wire = Wire(connection)
                wire.block(GREETING_SECONDS)
                welcome(wire, self._folder.token())
                wire.block(IDLE_SECONDS)
                held: dict[Mark | str, InUse] = {}
                while True:
                    try:
                        self._answer(wire, stack, held)
                    except CorruptError as error:
                        push_answer(wire, Status.DAMAGED, str(error))
        except StrangerError as error:
            log.warning("a stranger was turned away", peer=peer, reason=str(error))
        except (OSError, BcpError) as error:
            log.info("a reader has gone", peer=peer, reason=str(error))
        finally:
            with self._lock:
                self._open.discard(connection)

    def _answer(self, wire: Wire, stack: ExitStack, held: dict[Mark | str, InUse]) -> None:
        """Answer one request. Raises CorruptError before the answer for a file that is damaged."""
        want = pull_request(wire)
        told = self._board.post(want).encode() if isinstance(want, Post) else self._told(want.key)
        if told is not None:
            push_answer(wire, Status.OK, nbytes=len(told))
            wire.push(memoryview(told))
        elif isinstance(want, Want):
            self._send_file(wire, want, stack, held)

    def _told(self, key: str) -> bytes | None:
        """Return the answer to a request for something other than a file; None for one for a file."""
        if key == LIVING:
            return Living(tuple(self._folder.members())).encode()
        if key.startswith(OFFER):
            return self._offered(key.removeprefix(OFFER)).encode()
        if layout := LAYOUT.fullmatch(key):
            return self._folder.layout(bytes.fromhex(layout[1]))
        return None

    def _send_file(self, wire: Wire, want: Want, stack: ExitStack, held: dict[Mark | str, InUse]) -> None:
        """Send bytes of a marked file, or of a stripe that counts."""
        reason = self._missing(want.key, stack, held)
        if reason:
            push_answer(wire, *reason)
            return
        try:
            fd = os.open(self._folder.root / want.key, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            push_answer(wire, Status.MISSING, f"{want.key} is missing on this host")
            return
        try:
            size = os.fstat(fd).st_size
            nbytes = want.nbytes or size
            if want.start + nbytes > size:
                raise CorruptError(f"{want.key} has {size} bytes, and {nbytes} from {want.start} on were asked for")
            push_answer(wire, Status.OK, nbytes=nbytes)
            wire.push_file(fd, want.start, nbytes)
        finally:
            os.close(fd)

    def _missing(self, key: str, stack: ExitStack, held: dict[Mark | str, InUse]) -> tuple[Status, str] | None:
        """Hold the file of a key, and make its receipt if it is one; or return why nobody may read it."""
        operation = operation_in(key)
        owner = operation or _owner(key)
        if owner is None:
            return Status.FAILED, f"{key!r} is no file of a snapshot"
        if owner not in held:
            kept = self._folder.parity.holding(owner) if isinstance(owner, str) else self._folder.holding(owner)
            held[owner] = stack.enter_context(kept)
        holding = held[owner]
        if holding is None:
            return Status.MISSING, f"{key} is not marked on this host"
        if isinstance(holding, Held) and key == receipt_key(holding.intent.rank, holding.intent.operation):
            anyio.run(digested, self._folder.files, holding.blank)
        return None

    def _offered(self, words: str) -> Offered:
        """Return the newest snapshot that is to be copied, and note what a host has copied already."""
        folder, (number, _, operation) = self._folder, words.partition("-")
        if not number.isdecimal() or (operation and not OPERATION.fullmatch(operation)):
            raise StrangerError(f"the request {OFFER}{words}")
        if operation:
            folder.note_copied(operation, int(number))
        return offered(folder)


def _owner(key: str) -> Mark | None:
    """Return whose file a key is; None for keys that nobody may read."""
    if intent := INTENT.fullmatch(key):
        return Mark(intent[2], int(intent[1]))
    owner = owner_of(key)
    return None if owner is None else Mark(owner[1], owner[0])
