"""Every error that bcp raises on purpose, as one tree.

::

    BcpError
    ├── InputError (ValueError)        an argument cannot be saved or loaded
    │   ├── StateError                 a leaf of ``states`` (duplicate FQN, meta tensor, partial placement ...)
    │   ├── StateChangedError          the state was written to while its snapshot was being taken
    │   ├── RunTakenError              the folder of a run belongs to another run, or another job has taken it
    │   └── MissingExtraError          an optional dependency is not installed; names the extra
    ├── CheckpointError                the stored checkpoint is unusable
    │   ├── NotACheckpointError        nothing at that path that bcp wrote (also a FileNotFoundError)
    │   ├── UncommittedError           a save began there and never committed
    │   ├── ExistsError                a committed checkpoint is already there (also a FileExistsError)
    │   ├── FormatVersionError         written by a version of the format that this bcp cannot read
    │   ├── CorruptError               truncated, bit-flipped or missing bytes
    │   └── MissingCodecError          the bytes were encoded by a codec that was not passed to the load
    ├── MismatchError                  the checkpoint and the target state disagree
    │   ├── FqnMismatchError           missing or unexpected names under ``strict`` (also a KeyError)
    │   ├── ShapeMismatchError         global shapes differ
    │   └── DtypeMismatchError         dtypes differ and ``cast=True`` was not given
    ├── CoverageError                  the ranks' shards leave a gap in a tensor, or overlap
    ├── StageError                     a stage of the pipeline failed; names stage and item
    ├── PeerError                      another rank failed, died or fell silent; names rank, host and cause
    ├── MessageError                   a message of another rank or process cannot be decoded
    └── StorageError (OSError)         a storage backend failed; the original error is its cause

:class:`NothingLoadedWarning` (UserWarning) is the one warning.

Messages name tensor, rank, file and numbers where they apply, and end with the remedy. They show no password and no
query of a URL, and no character that commands a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from bcp._text import hidden, printable

__all__ = [
    "BcpError",
    "CheckpointError",
    "CorruptError",
    "CoverageError",
    "DtypeMismatchError",
    "ExistsError",
    "FormatVersionError",
    "FqnMismatchError",
    "InputError",
    "MessageError",
    "MismatchError",
    "MissingCodecError",
    "MissingExtraError",
    "NotACheckpointError",
    "PeerError",
    "RunTakenError",
    "ShapeMismatchError",
    "StageError",
    "StateChangedError",
    "StateError",
    "StorageError",
    "UncommittedError",
]


class BcpError(Exception):
    """The root of all errors: ``except bcp.BcpError`` catches everything that bcp raises on purpose.

    Attributes:
        of_all_ranks: whether all ranks have agreed on it, so that none of them is to blame.

    Example::

        try:
            bcp.load("ckpt/step-0", states)
        except bcp.BcpError as error:
            print(error)

    """

    of_all_ranks = False

    def __init__(self, *words: object) -> None:
        super().__init__(*(printable(hidden(word), "\n\t") if isinstance(word, str) else word for word in words))


class InputError(BcpError, ValueError):
    """An argument cannot be saved or loaded. Raised before any byte is written."""


class StateError(InputError):
    """A leaf of ``states`` cannot be checkpointed; the message names its FQN, kind and rank."""


class StateChangedError(InputError):
    """A tensor was written to while its snapshot was being taken: the checkpoint would be torn, so it is not made."""


class RunTakenError(InputError):
    """The folder of a run belongs to another run, or another job has taken it; the message names both."""


class MissingExtraError(InputError, ImportError):
    """An optional dependency is missing; the message names the extra, as in ``pip install 'bcp-checkpoint[cli]'``."""


class CheckpointError(BcpError):
    """The checkpoint in storage is missing, unfinished, damaged or in the way."""


class NotACheckpointError(CheckpointError, FileNotFoundError):
    """There is nothing at the path that bcp has written."""

    __str__ = Exception.__str__


class UncommittedError(CheckpointError):
    """A save began at the path and never committed; for readers there is no checkpoint."""


class ExistsError(CheckpointError, FileExistsError):
    """A committed checkpoint is already at the path and ``overwrite=True`` was not given."""

    __str__ = Exception.__str__


class FormatVersionError(CheckpointError):
    """The checkpoint was written in a version of the format that this bcp cannot read."""


class CorruptError(CheckpointError):
    """Stored bytes are not the bytes that were saved: truncated, bit-flipped or missing; or they changed in a load."""


class MissingCodecError(CheckpointError):
    """The bytes were encoded by a codec that was not passed in ``LoadOptions(codecs=...)``."""


class MismatchError(BcpError):
    """The checkpoint and the target state disagree. Raised before the target is touched, or with a note if not."""


class FqnMismatchError(MismatchError, KeyError):
    """Under ``strict``: names that the target wants and the checkpoint lacks, or the other way round."""

    __str__ = Exception.__str__  # KeyError shows the repr of its argument, which hides the line breaks


class ShapeMismatchError(MismatchError):
    """A tensor has another global shape in the checkpoint than in the target."""


class DtypeMismatchError(MismatchError):
    """A tensor has another dtype in the checkpoint than in the target, and ``cast=True`` was not given."""


class CoverageError(BcpError):
    """The ranks' shards of a tensor do not tile it exactly: there is a gap or an overlap."""


class StageError(BcpError):
    """A stage failed on an item. The original error is ``__cause__``; later ones of other stages are notes.

    Attributes:
        stage: name of the stage that failed first.
        item: name of the item it was working on.
    """

    def __init__(self, stage: str, item: str, cause: BaseException) -> None:
        super().__init__(f"stage {stage!r} failed on {item}: {type(cause).__name__}: {cause}")
        self.stage = stage
        self.item = item

    def __reduce__(self) -> tuple[Callable[..., StageError], tuple[object, ...], dict[str, object]]:
        return type(self).__new__, (type(self), *self.args), self.__dict__


class PeerError(BcpError):
    """Another rank failed, died, or fell silent.

    Attributes:
        rank: the rank that is to blame.
        cause: the report of that rank, or how its silence was noticed.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(cause if re.search(rf"\brank {rank}\b", cause) else f"rank {rank} failed: {cause}")
        self.rank = rank
        self.cause = cause

    def __reduce__(self) -> tuple[type[PeerError], tuple[int, str], dict[str, object]]:
        return type(self), (self.rank, self.cause), self.__dict__


class MessageError(BcpError):
    """A message of another rank or process of the job cannot be decoded: as a rule, that one runs another bcp.

    The text says what is wrong with the message; as a rule also its kind, the rank that sent it, and the number of its
    bytes. No checkpoint is to blame, so that a run that resumes passes over none because of it.
    """


class StorageError(BcpError, OSError):
    """A storage backend failed; the message names backend, key and operation, ``__cause__`` is the original error."""

    __str__ = Exception.__str__


class NothingLoadedWarning(UserWarning):
    """A load with ``strict=False`` found none of the names that a kind of the target wants, and left it as it was.

    Example::

        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error", bcp.NothingLoadedWarning)  # let such a load raise
            bcp.load("ckpt/step-100", states, strict=False)

    """
