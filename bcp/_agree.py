"""Collective operations whose errors are collective too: all ranks raise the error of one, with the same words.

A rank that raised alone would leave the others with a :class:`~bcp.errors.PeerError`. A training script that catches
:class:`~bcp.errors.UncommittedError`, say, would take different paths on different ranks. So every message is either
bytes or an error. An error in the reply is raised on all ranks once the operation has ended.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NoReturn, TypeVar

from bcp import errors
from bcp._messages.base import refused
from bcp._messages.coordination import Failure
from bcp.errors import BcpError, InputError, PeerError, StageError
from bcp.pipeline import let_go, unwrap_stage_errors
from bcp.plan.shards import KINDS
from bcp.protocols import Agreement

__all__ = [
    "any_rank",
    "capture_error",
    "collective_operation",
    "gather_broadcast",
    "gather_scatter",
    "no_answer",
    "nothing_in",
    "refuse_on_all_ranks",
]

T = TypeVar("T")
BYTES, ERROR = b"\0", b"\1"
OwnMessage = bytes | Exception


class _Agreed(Exception):  # noqa: N818 -- carries an error, is none
    """An error that every rank knows of already."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.carried: Exception | None = error


@asynccontextmanager
async def collective_operation(operation: AbstractAsyncContextManager[Agreement]) -> AsyncIterator[Agreement]:
    """Take part in an operation; errors that all ranks agreed on are raised once this rank has left it in peace."""
    agreed: Exception | None = None
    async with operation as agreement:
        try:
            yield agreement
        except _Agreed as error:
            if (agreed := error.carried) is not None:
                for note in getattr(error, "__notes__", ()):
                    agreed.add_note(note)
            error.carried = None
            let_go(error)
    if agreed is not None:
        try:
            raise agreed
        finally:
            del agreed


async def refuse_on_all_ranks(
    operation: AbstractAsyncContextManager[Agreement], step: str, rank: int, error: Exception
) -> NoReturn:
    """Tell all ranks in the first step of an operation that this rank's arguments were refused; raise the error.

    ``step`` names that step. If the others cannot be told, the error says so in a note.
    """
    try:
        async with collective_operation(operation) as agreement:
            await gather_broadcast(agreement, step, rank, error, no_answer)
    except Exception as outcome:  # noqa: BLE001 -- this rank's own error comes first
        if outcome is not error:
            error.add_note(f"meanwhile, the operation had ended: {outcome}")
    try:
        raise error
    finally:
        del error  # its traceback leads here


def nothing_in(world_size: int) -> InputError:
    """Return the error of an operation in which all ranks pass empty states."""
    where = "states has nothing" if world_size == 1 else f"states has nothing on all {world_size} ranks"
    return InputError(
        f"{where}; its keys are {', '.join(KINDS)}, as in {{'model': model}}; "
        "{'model': {}} stands for an empty model"
    )


async def no_answer(_: Sequence[bytes]) -> bytes:
    """Return an empty answer, which tells the ranks only that all of them have reached this step."""
    return b""


async def capture_error(work: Awaitable[T]) -> T | BcpError:
    """Do this rank's part; an error of bcp's own is returned, so that it can be told to the others."""
    try:
        with unwrap_stage_errors():
            return await work
    except BcpError as error:
        return error


async def gather_broadcast(
    agreement: Agreement,
    step: str,
    rank: int,
    own_message: OwnMessage,
    answer: Callable[[Sequence[bytes]], Awaitable[bytes]],
) -> bytes:
    """Gather the messages of all ranks; let rank 0 answer; return the one answer on every rank.

    If any rank says an error, or ``answer`` raises one, every rank raises: its own, else the answer's, else a
    :class:`PeerError` that names the first rank that has one.
    """

    async def decide(messages: Sequence[bytes]) -> bytes:
        try:
            failure = _first_failure(messages)
            if failure is not None:
                return ERROR + failure.encode()
            return BYTES + await answer([message[1:] for message in messages])
        except BcpError as error:
            return _failure(error)

    return _unpack(rank, own_message, await agreement.gather_broadcast(step, _message(own_message), decide))


async def gather_scatter(
    agreement: Agreement,
    step: str,
    rank: int,
    own_message: OwnMessage,
    divide: Callable[[Sequence[bytes]], Sequence[bytes]],
) -> bytes:
    """Do the same, with an answer of its own for every rank."""

    def shares(messages: Sequence[bytes]) -> Sequence[bytes]:
        try:
            failure = _first_failure(messages)
            if failure is not None:
                return [ERROR + failure.encode()] * len(messages)
            return [BYTES + share for share in divide([message[1:] for message in messages])]
        except BcpError as error:
            return [_failure(error)] * len(messages)

    return _unpack(rank, own_message, await agreement.gather_scatter(step, _message(own_message), shares))


async def any_rank(agreement: Agreement, step: str, rank: int, *, says: bool) -> bool:
    """Return on every rank whether one of them says so."""

    async def answer(messages: Sequence[bytes]) -> bytes:
        return b"".join(messages)[:1]

    return bool(await gather_broadcast(agreement, step, rank, b"\1" if says else b"", answer))


def _message(own_message: OwnMessage) -> bytes:
    return _failure(own_message) if isinstance(own_message, Exception) else BYTES + own_message


def _failure(error: Exception) -> bytes:
    return ERROR + Failure(None, type(error).__name__, str(error)).encode()


def _first_failure(messages: Sequence[bytes]) -> Failure | None:
    """Return the first rank's error among the messages, with the rank's number in it."""
    for rank, message in enumerate(messages):
        if message[:1] != BYTES:
            failure = _decoded_failure(message, rank)
            return Failure(rank, failure.name, failure.text)
    return None


def _decoded_failure(message: bytes, sender: int) -> Failure:
    """Decode a message that is an error. Raises MessageError if it is none, or cannot be decoded."""
    if message[:1] != ERROR:
        raise refused("of a step", message, "it is neither bytes nor an error", sender)
    return Failure.decode(message[1:], sender)


def _unpack(rank: int, own_message: OwnMessage, reply: bytes) -> bytes:
    """Return the reply's bytes, or raise its error."""
    if reply[:1] == BYTES:
        return reply[1:]
    if isinstance(own_message, Exception):
        raise _Agreed(own_message)
    failure = _decoded_failure(reply, sender=0)
    words = f"{failure.name}: {failure.text}"
    if failure.rank is not None and failure.rank != rank:
        raise _Agreed(PeerError(failure.rank, words))
    kind = getattr(errors, failure.name, None) if failure.name in errors.__all__ else None
    if kind is None or issubclass(kind, StageError | PeerError):
        raise _Agreed(_of_all_ranks(BcpError(words)))
    raise _Agreed(_of_all_ranks(kind(failure.text)))


def _of_all_ranks(error: BcpError) -> BcpError:
    """Mark an error that every rank raises."""
    error.of_all_ranks = True
    return error
