"""What the machine can do with the same bytes: copy them from a tmpfs in threads, and send them over the loopback.

The bytes go from the files of a snapshot into the tensors that a recovery fills.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import numpy as np

__all__ = ["copied", "sender", "sent"]

PIECE_BYTES = 32 << 20
REQUEST = struct.Struct("<QQ")

Piece = tuple[int, memoryview]


def copied(path: Path, outs: Sequence[memoryview], threads: int) -> float:
    """Copy a file's first bytes into buffers; return the seconds. The file is mapped and touched before."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    source = np.frombuffer(memory, np.uint8)
    source[:: mmap.PAGESIZE].max()
    pieces, lock = iter(_pieces(outs)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                start, out = next(pieces, (0, None))
            if out is None:
                return
            np.copyto(np.frombuffer(out, np.uint8), source[start : start + len(out)])

    return _in_threads([run] * threads)


@contextmanager
def sender(path: Path) -> Iterator[tuple[str, int]]:
    """Start a process that sends ranges of a file by ``sendfile``; yields its address."""
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_send_ranges, args=(path, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def sent(address: tuple[str, int], outs: Sequence[memoryview], streams: int) -> float:
    """Receive a file's first bytes in buffers, in so many connections and threads; return the seconds."""
    pieces = _pieces(outs)
    shares = [pieces[len(pieces) * n // streams : len(pieces) * (n + 1) // streams] for n in range(streams)]

    def run(share: Sequence[Piece]) -> None:
        if not share:
            return
        with socket.create_connection(address) as connection:
            start, stop = share[0][0], share[-1][0] + len(share[-1][1])
            connection.sendall(REQUEST.pack(start, stop - start))
            for _, out in share:
                _pull(connection, out)

    return _in_threads([partial(run, share) for share in shares])


def _pieces(outs: Sequence[memoryview]) -> list[Piece]:
    """Cut buffers, which lie one behind the other in a file, into pieces with their first byte there."""
    found, start = list[Piece](), 0
    for out in outs:
        found += [(start + at, out[at : at + PIECE_BYTES]) for at in range(0, len(out), PIECE_BYTES)]
        start += len(out)
    return found


def _in_threads(calls: Sequence[Callable[[], None]]) -> float:
    """Make calls, each in a thread of its own; return the seconds, or raise the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 -- raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    begin = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return perf_counter() - begin


def _pull(connection: socket.socket, out: memoryview) -> None:
    while out:
        count = connection.recv_into(out, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError(f"{len(out)} bytes are missing")
        out = out[count:]


def _send_ranges(path: Path, pipe: Connection) -> None:
    """Send the range of a file that each connection asks for."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    pipe.send(listener.getsockname())
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_send_range, args=(path, connection), daemon=True).start()


def _send_range(path: Path, connection: socket.socket) -> None:
    request = bytearray(REQUEST.size)
    with connection, path.open("rb") as file:
        _pull(connection, memoryview(request))
        start, nbytes = REQUEST.unpack(request)
        while nbytes:
            count = os.sendfile(connection.fileno(), file.fileno(), start, nbytes)
            start, nbytes = start + count, nbytes - count
