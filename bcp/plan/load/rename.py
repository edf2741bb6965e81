"""What a load can be told to do with names: ``LoadOptions(rename=...)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from bcp.errors import InputError
from bcp.plan.load.moved import Moved

__all__ = ["Blocks", "Moves", "Rename", "blocks_of"]


@runtime_checkable
class Moves(Protocol):
    """A rename that can also cut, join and transpose tensors."""

    def blocks(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        """Say what becomes of a tensor of the saved model.

        Blocks that are not mentioned are left out, and so is the whole tensor if there are none. A leaf of the model
        that is no tensor has the shape ``()``.
        """


Rename = (
    Moves | Mapping[str, str | None] | Sequence[tuple[str | re.Pattern[str], str]] | Callable[[str], str | None] | None
)
"""What a load does to names; ``None`` in place of a name leaves the tensor out."""

Blocks = Callable[[str, tuple[int, ...]], Sequence[Moved]]
"""Function form of every rename: name and shape of a saved tensor, to where its blocks go."""


def blocks_of(rename: Rename) -> Blocks:
    """Return what a rename does, as one function; one that only changes names moves each tensor whole.

    Raises:
        InputError: it is nothing that a rename can be.

    """
    if isinstance(rename, Moves):
        return rename.blocks
    if isinstance(rename, Mapping):
        names: Mapping[str, str | None] = rename
        return _named(lambda fqn: names.get(fqn, fqn))
    if callable(rename):
        return _named(rename)
    try:
        pairs = [(re.compile(pattern), replacement) for pattern, replacement in rename or ()]
        for pattern, replacement in pairs:
            pattern.sub(replacement, "")  # raises where the replacement asks for groups that the pattern lacks
    except (TypeError, ValueError, re.error) as error:
        raise InputError(
            f"rename={rename!r} is no dict of names, sequence of (pattern, replacement) pairs, function of a name, or "
            f"object with a method blocks(): {error}"
        ) from error

    def substitute(fqn: str) -> str:
        for pattern, replacement in pairs:
            fqn = pattern.sub(replacement, fqn)
        return fqn

    return _named(substitute)


def _named(rename: Callable[[str], str | None]) -> Blocks:
    """Move every tensor whole."""

    def blocks(fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        new = rename(fqn)
        return () if new is None else (Moved.whole(new, shape),)

    return blocks
