"""Ports of this machine for servers that take a number and cannot be asked for one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

LOOPBACK = "127.0.0.1"


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Hold ports until the end of the block: the kernel gives them to nobody who asks for any port.

    Nobody listens at them. A server that sets ``SO_REUSEADDR``, as servers do, can listen there by their number.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((LOOPBACK, 0))
        yield [int(one.getsockname()[1]) for one in sockets]
