"""The last word to the caller: errors without the way that they took through bcp, and a warning for an empty load."""

from __future__ import annotations

import warnings

from bcp.errors import (
    BcpError,
    CheckpointError,
    CoverageError,
    InputError,
    MismatchError,
    NothingLoadedWarning,
    PeerError,
)
from bcp.events import LoadResult

__all__ = ["plain", "warn_if_nothing"]

SAYS_ALL = (InputError, CheckpointError, MismatchError, CoverageError, PeerError)
"""Errors whose message names all there is to know. The frames between would be those of event loops and threads."""


def plain(error: BcpError) -> BcpError:
    """Return the error, without its traceback if the message says all; its cause keeps its own.

    Example:
        >>> try:
        ...     raise InputError("no such thing; pass another")
        ... except BcpError as error:
        ...     assert plain(error).__traceback__ is None

    """
    return error.with_traceback(None) if isinstance(error, SAYS_ALL) else error


def warn_if_nothing(result: LoadResult, stacklevel: int) -> None:
    """Warn of each kind without a loaded tensor.

    Args:
        result: of the load.
        stacklevel: as ``warnings.warn`` takes it, seen from the caller of this function.

    """
    for kind in result.unmatched:
        warnings.warn(
            f"nothing of {kind!r} was loaded from {result.path} on rank {result.rank}: the checkpoint has none of the "
            f"names that the target wants ({len(result.missing)} missing, {len(result.unexpected)} unexpected); see "
            "result.missing and result.unexpected, or pass strict=True to make this an error",
            NothingLoadedWarning,
            stacklevel=stacklevel + 1,
        )
