"""The ranks of a job share the work of a tool: they agree on it, take shares, and bring the findings together.

A failure of one rank ends the work of all at once, and every other rank raises :class:`~bcp.errors.PeerError`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from bcp._agree import capture_error, collective_operation, gather_broadcast
from bcp._messages.base import Message
from bcp.errors import BcpError, InputError
from bcp.protocols import Agreement, Coordinator
from bcp.read.shares import Share
from bcp.runtime.imports import imported

__all__ = ["Ranks", "sharing"]

T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share a work, as one of them sees them.

    Attributes:
        tool: name of the tool, for messages.
        rank: this rank.
        world_size: the number of ranks.
        agreement: the operation of all ranks; None for a process of its own.
    """

    tool: str
    rank: int = 0
    world_size: int = 1
    agreement: Agreement | None = None

    @property
    def share(self) -> Share:
        """The share of this rank."""
        return Share(self.rank, self.world_size)

    async def agreed(self, work: Awaitable[T], words: Callable[[T], str]) -> T:
        """Do the same on all ranks, before the work is shared; return this rank's result.

        Args:
            work: opens the subject of the tool.
            words: the facts that all ranks have to share, for people: paths, operations, arguments.

        Raises:
            InputError: two ranks have other facts.
            BcpError: this rank's own error in ``work``.
            PeerError: another rank's error in ``work``.

        """
        own = await capture_error(work)

        async def decide(messages: Sequence[bytes]) -> bytes:
            for rank, message in enumerate(messages):
                if message != messages[0]:
                    both = f"rank {rank} has {_text(message)}, and rank 0 {_text(messages[0])}"
                    raise InputError(
                        f"{self.tool}: {both}; pass the same arguments on all ranks, and a checkpoint that no save "
                        "replaces meanwhile"
                    )
            return b""

        message = own if isinstance(own, BcpError) else words(own).encode(errors="backslashreplace")
        await self._gather("plan", message, decide)
        if isinstance(own, BcpError):
            raise own  # with other ranks, the line above has raised it already
        return own

    async def merged(self, own: M, merge: Callable[[Sequence[M]], M]) -> M:
        """Bring the findings of all ranks together; return the same on all ranks. Rank 0 alone calls ``merge``."""

        async def decide(messages: Sequence[bytes]) -> bytes:
            return merge(type(own).decode_all(messages)).encode()

        return type(own).decode(await self._gather("done", own.encode(), decide), 0)

    async def led(self, step: str, action: Callable[[], Awaitable[bytes | None]]) -> bytes:
        """Let rank 0 alone act, once all ranks are here; all ranks wait, and return its answer or raise its error."""

        async def decide(_: Sequence[bytes]) -> bytes:
            return await action() or b""

        return await self._gather(step, b"", decide)

    async def _gather(
        self, step: str, own: bytes | BcpError, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        if self.agreement is not None:
            return await gather_broadcast(self.agreement, step, self.rank, own, decide)
        if isinstance(own, BcpError):
            raise own
        return await decide([own])


def _text(message: bytes) -> str:
    return message.decode(errors="backslashreplace")


def sharing(tool: str, given: Coordinator | None, timeout: float) -> AbstractAsyncContextManager[Ranks]:
    """Take this rank's place among the operations of all ranks, at once; the work is the body of the context.

    Args:
        tool: name of the tool, the same on all ranks.
        given: the coordinator of the caller; None for the ranks of this job.
        timeout: seconds that a rank may be silent.

    Raises:
        InputError: ``given`` is no coordinator; or a launcher has started several ranks without a process group.

    """
    if given is None and "torch.distributed" not in sys.modules and os.environ.get("WORLD_SIZE", "1") in ("", "1"):
        return nullcontext(Ranks(tool))  # there is no job, and torch need not be imported to learn it
    ranks: Coordinator = imported("bcp.coordinators").coordinator(given)
    operation = ranks.begin(f"{tool} with world_size={ranks.world_size}", timeout)
    return _shared(tool, ranks, operation)


@asynccontextmanager
async def _shared(
    tool: str, ranks: Coordinator, operation: AbstractAsyncContextManager[Agreement]
) -> AsyncIterator[Ranks]:
    async with collective_operation(operation) as agreement:
        yield Ranks(tool, ranks.rank, ranks.world_size, agreement)
