"""Coordinators of ranks that live in one process, for tests and measurements, and of a rank that is alone."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from bcp.coordinators.tree.rendezvous import Tree
from bcp.errors import InputError
from bcp.protocols import Agreement, Buffer, Coordinator, flat_view
from bcp.runtime.imports import importing
from bcp.runtime.threads import in_thread

__all__ = ["SoloCoordinator", "grpc_coordinators", "memory_coordinators"]


class SoloCoordinator:
    """Rank 0 of 1: a :class:`~bcp.protocols.Coordinator` without a channel, whose operations never time out."""

    rank = 0
    world_size = 1

    def __repr__(self) -> str:
        return "SoloCoordinator()"

    @asynccontextmanager
    async def begin(self, operation: str, timeout: float) -> AsyncIterator[Agreement]:  # noqa: ASYNC109 -- the protocol's
        """Begin an operation of this rank alone."""
        del operation, timeout
        yield _Alone()


class _Alone:
    """An operation of one rank."""

    async def gather_scatter(
        self, step: str, payload: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Call ``divide`` in a thread."""
        del step
        [answer] = await in_thread(divide, [payload])
        return answer

    async def gather_broadcast(
        self, step: str, payload: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        """Await ``decide``."""
        del step
        return await decide([payload])

    async def all_to_all(self, send: Sequence[Buffer], receive: Sequence[Buffer]) -> None:
        """Copy the bytes that are sent."""
        [outgoing], [incoming] = map(flat_view, send), map(flat_view, receive)
        if len(outgoing) != len(incoming):
            raise InputError(f"one rank expects {len(incoming)} bytes of itself, and sends itself {len(outgoing)}")
        incoming[:] = outgoing

    async def bandwidth(self) -> float:
        """Return inf: there is no other host."""
        return math.inf


if TYPE_CHECKING:
    from bcp.coordinators.tree.coordinator import GrpcCoordinator


def memory_coordinators(world_size: int) -> list[Coordinator]:
    """Return a coordinator for each of ``world_size`` ranks, which may be tasks, threads or loops of this process.

    They connect over the loopback, and behave as in a job.
    """
    return list(grpc_coordinators(world_size))


def grpc_coordinators(world_size: int, fanout: int = 16, hosts: Sequence[str] | None = None) -> list[GrpcCoordinator]:
    """Return a coordinator over gRPC for each of ``world_size`` ranks of this process.

    They connect over the loopback, and behave as in a job. ``hosts`` names each rank's host, to shape the tree; None
    puts all ranks on one host.
    """
    with importing:
        from bcp.coordinators.tree.coordinator import GrpcCoordinator  # noqa: PLC0415 -- imports gRPC

    return GrpcCoordinator.in_memory(Tree.of(["host"] * world_size if hosts is None else hosts, fanout))
