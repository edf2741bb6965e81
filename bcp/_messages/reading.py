"""Messages between a dataloader's reader and its worker processes, without the arrays that go with them."""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from bcp._messages.base import Count, Message, decode_any, expect, prepare
from bcp.errors import MessageError

__all__ = [
    "ArrayPlace",
    "Batch",
    "Consumed",
    "Enclosure",
    "Places",
    "ReaderJob",
    "Start",
    "States",
    "StatesRequest",
    "WorkerFailure",
    "WorkerMessage",
    "decode_worker_message",
    "unexpected",
]


_DIMENSIONS, _ELEMENTS = 8, 1 << 48


class ArrayPlace(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place of an array in the file of a message."""

    offset: Count  # first byte of the array
    shape: tuple[Count, ...]
    dtype: Annotated[str, msgspec.Meta(pattern=r"^(<[iuf][248]|[|][biu]1)\Z")]  # a numeric type of numpy

    def __post_init__(self) -> None:
        size = math.prod(max(size, 1) for size in self.shape)  # numpy limits that of empty arrays, too
        expect(len(self.shape) <= _DIMENSIONS, size < _ELEMENTS, reason=f"an array of shape {self.shape}")

    @property
    def nbytes(self) -> int:
        """The bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Places: TypeAlias = dict[str, ArrayPlace]
"""Places of arrays, by name."""


class Enclosure(Message, frozen=True):
    """The packet that goes with the descriptor of a file."""

    end: Count  # bytes of the arrays, at the beginning of the file
    nbytes: Count  # bytes of the message behind them


# -- to a worker process ----------------------------------------------------------------------


class ReaderJob(Message, frozen=True):
    """The work that all workers of a reader have in common, pickled, as the array ``job``."""

    arrays: Places

    def __post_init__(self) -> None:
        expect(self.arrays.keys() == {"job"}, reason=f"arrays {sorted(self.arrays)}")


class Start(Message, frozen=True):
    """The states of a worker's units."""

    arrays: Places


class Consumed(Message, frozen=True):
    """The oldest batch has been consumed."""


class StatesRequest(Message, frozen=True):
    """The reader wants the states of a worker's units."""

    number: Count  # number of the request
    taken: Count  # the number of batches that the worker has to have taken before it answers


# -- from a worker process --------------------------------------------------------------------


class Batch(Message, frozen=True):
    """The windows of one batch."""

    arrays: Places  # ``numbers``, ``tokens``, ``documents`` and ``samples``
    live: bool  # whether the worker's units have more

    def __post_init__(self) -> None:
        names = {"numbers", "tokens", "documents", "samples"}
        expect(self.arrays.keys() == names, reason=f"arrays {sorted(self.arrays)}")


class States(Message, frozen=True):
    """The states of a worker's units."""

    arrays: Places
    number: Count  # number of the request that this message answers
    consumed: Count  # number of batches after which the states were read


class WorkerFailure(Message, frozen=True):
    """The error of a worker."""

    item: str  # the sample or batch that could not be read
    cause: str
    traceback: str


WorkerMessage: TypeAlias = ReaderJob | Start | Consumed | StatesRequest | Batch | States | WorkerFailure
"""A message in either direction."""


def decode_worker_message(data: bytes) -> WorkerMessage:
    """Decode a message in either direction. Raises MessageError if it is none of WorkerMessage."""
    message: WorkerMessage = decode_any(WorkerMessage, "of a reader worker", data)
    return message


def unexpected(message: WorkerMessage) -> MessageError:
    """Return the error for a message that goes in the other direction."""
    return MessageError(
        f"a message {type(message).__name__} came from the wrong side; run the same version of bcp in all processes"
    )


prepare(__name__, WorkerMessage)
