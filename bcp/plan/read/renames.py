"""Renames of a load, ``LoadOptions(rename=...)``, and the blocks that they move.

A rename gives tensors other names. It may also cut a saved tensor into blocks, join blocks of several tensors, and
transpose them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, runtime_checkable

import numpy as np

from bcp.errors import CoverageError, InputError
from bcp.plan.box import Box
from bcp.plan.columns import Ints, matrix, weigh

__all__ = ["AssembledTensor", "Blocks", "Moved", "Moves", "Rename", "blocks_of"]

SHOWN = 4  # names in an error message


@dataclass(frozen=True, slots=True)
class Moved:
    """A block of a saved tensor is this block of a tensor of the target.

    Both blocks have the same lengths, but for dimensions of length 1 in front: an expert's ``(1, f, h)`` may become
    ``(f, h)``, and the other way round.

    Attributes:
        saved: the block of the saved tensor.
        fqn: name of the target's tensor.
        shape: shape of the target's tensor, all of it.
        at: first corner of the block in the target's tensor.
        transposed: the last two dimensions change places.
        padded: the target's tensor may have elements that no block covers; they stay as they are.
    """

    saved: Box
    fqn: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    transposed: bool = False
    padded: bool = False

    @classmethod
    def whole(cls, fqn: str, shape: tuple[int, ...]) -> Moved:
        """Rename a tensor of that shape, and change nothing else."""
        return cls(Box.whole(shape), fqn, shape, (0,) * len(shape))

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Whether a saved tensor of that shape only gets another name, as by :meth:`whole`."""
        whole = Box.whole(shape)
        return self.shape == shape and self.at == whole.offsets and self.saved == whole and not self.transposed

    @property
    def target(self) -> Box:
        """The block of the target's tensor."""
        lengths = _swapped(self.saved.lengths, transposed=self.transposed)
        return Box(self.at, _fitted(lengths, len(self.shape), 1))

    def back(self, block: Box) -> Box:
        """Return the block of the saved tensor that is ``block`` of the target's; it lies inside ``target``."""
        inner, ndim = block.within(self.target), len(self.saved.lengths)
        offsets = _swapped(_fitted(inner.offsets, ndim, 0), transposed=self.transposed)
        lengths = _swapped(_fitted(inner.lengths, ndim, 1), transposed=self.transposed)
        return Box(tuple(a + b for a, b in zip(self.saved.offsets, offsets, strict=True)), lengths)

    def check(self, source: str, shape: tuple[int, ...]) -> None:
        """Raise InputError unless this is a block of ``source``, a tensor of that shape, and fits its target."""
        if not self._has_numbers():
            raise InputError(
                f"rename answers {self!r} for {source!r}, which is {list(shape)}: saved has to be a Box, and offsets, "
                "lengths, shape and at tuples of ints below 2**62; repair the mapping"
            )
        ndims = {len(self.saved.offsets), len(self.saved.lengths), len(shape)}
        if len(ndims) > 1 or len(self.at) != len(self.shape) or (self.transposed and len(shape) < 2):  # noqa: PLR2004
            self._refuse(source, shape, "numbers of dimensions differ")
        front = max(len(shape) - len(self.shape), 0)
        if any(length != 1 for length in _swapped(self.saved.lengths, transposed=self.transposed)[:front]):
            self._refuse(source, shape, "only dimensions of length 1 can be left out, in front")
        if not _inside(self.saved, shape):
            self._refuse(source, shape, "the saved block is empty or sticks out of the saved tensor")
        if not _inside(self.target, self.shape):
            self._refuse(source, shape, f"its block {_text(self.target)} sticks out of the target")

    def _has_numbers(self) -> bool:
        """Whether everything is of its type: this comes from the user's code, which nothing else checks."""
        corners = (self.saved.offsets, self.saved.lengths) if isinstance(self.saved, Box) else (None,)
        return all(
            isinstance(numbers, tuple) and all(isinstance(n, Integral) and abs(n) < 1 << 62 for n in numbers)
            for numbers in (*corners, self.shape, self.at)
        )

    def _refuse(self, source: str, shape: tuple[int, ...], reason: str) -> None:
        raise InputError(
            f"rename moves {_text(self.saved)} of {source!r}, which is {list(shape)}, to {list(self.at)} of "
            f"{self.fqn!r}, which is {list(self.shape)}: {reason}; repair the mapping"
        )


@dataclass(frozen=True, slots=True, eq=False)
class AssembledTensor:
    """A tensor of the target that is assembled from k blocks, as are its optimizer states."""

    fqn: str  # its name
    shape: tuple[int, ...]  # its shape
    sources: Sequence[str]  # names of the saved tensors, each once, in the order in which the checkpoint has them
    moved: Sequence[Moved]  # the k blocks
    source: Ints  # int64[k], index in ``sources`` of each block's tensor
    low: Ints  # int64[k, D], first corners in the target's tensor
    high: Ints  # int64[k, D], one past the last

    @classmethod
    def of(cls, parts: Sequence[tuple[str, Moved]]) -> AssembledTensor:
        """Assemble the (saved name, block) pairs of one target.

        Raises:
            InputError: they do not agree on the target's shape.
            CoverageError: they overlap, or leave a gap that is no padding.
        """
        sources = list(dict.fromkeys(source for source, _ in parts))
        places = {source: place for place, source in enumerate(sources)}
        moved = [move for _, move in parts]
        first = moved[0]
        if other := next((move for move in moved if move.shape != first.shape), None):
            raise InputError(
                f"rename makes {first.fqn!r} of {_some(sources)}, and says both {list(first.shape)} and "
                f"{list(other.shape)} of its shape; repair the mapping"
            )
        boxes, width = [move.target for move in moved], max(len(first.shape), 1)
        low, length = matrix([box.offsets for box in boxes], width, 0), matrix([box.lengths for box in boxes], width, 1)
        source = np.array([places[name] for name, _ in parts], np.int64)
        cut = cls(first.fqn, first.shape, sources, moved, source, low, low + length)
        cut._check_cover()
        return cut

    def meetings(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (number of a block, its intersection with ``box``); boxes are in the target's tensor."""
        width = self.low.shape[1]
        start = np.array((*box.offsets, *(0,) * (width - len(box.offsets))), np.int64)
        stop = start + np.array((*box.lengths, *(1,) * (width - len(box.lengths))), np.int64)
        low, high = np.maximum(self.low, start), np.minimum(self.high, stop)
        hits = np.flatnonzero((low < high).all(axis=1))
        ndim = len(self.shape)
        for hit, corner, length in zip(
            hits.tolist(), low[hits, :ndim].tolist(), (high - low)[hits, :ndim].tolist(), strict=True
        ):
            yield hit, Box(tuple(corner), tuple(length))

    def _check_cover(self) -> None:
        """Raise unless the blocks tile the tensor, or, if it is padded, do not overlap."""
        shape = matrix([self.shape], self.low.shape[1], 1)
        weight = weigh(self.low, self.high).sum(dtype=np.uint64)  # 1,536 blocks of a qkv matrix take 0.1 ms
        if weight == weigh(0 * shape, shape)[0]:
            return
        pair = self._overlap()
        if pair is not None:
            first, other = (
                f"{_text(self.moved[index].target)}, from {self.sources[self.source[index]]!r}" for index in pair
            )
            raise CoverageError(
                f"rename makes {self.fqn!r}, which is {list(self.shape)}, of blocks that overlap: {first}; and {other}"
                "; repair the mapping"
            )
        if not any(move.padded for move in self.moved):
            volume, whole = (self.high - self.low).prod(axis=1).sum(), math.prod(self.shape)
            raise CoverageError(
                f"rename makes {self.fqn!r}, which is {list(self.shape)}, of {_some(self.sources)}, and these give it "
                f"{volume} of its {whole} elements; repair the mapping, or check that the checkpoint has all of them"
            )

    def _overlap(self) -> tuple[int, int] | None:
        """Return two blocks that share elements."""
        for index, move in enumerate(self.moved):
            for other, _ in self.meetings(move.target):
                if other != index:
                    return index, other
        return None


def _fitted(numbers: tuple[int, ...], ndim: int, fill: int) -> tuple[int, ...]:
    return (fill,) * (ndim - len(numbers)) + numbers[max(len(numbers) - ndim, 0) :]


def _swapped(numbers: tuple[int, ...], *, transposed: bool) -> tuple[int, ...]:
    return (*numbers[:-2], numbers[-1], numbers[-2]) if transposed else numbers


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box holds elements, and all of them are of a tensor of that shape."""
    return all(
        length > 0 <= offset <= size - length
        for offset, length, size in zip(box.offsets, box.lengths, shape, strict=True)
    )


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(box.offsets, box.lengths, strict=True)) + "]"


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:SHOWN])) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


@runtime_checkable
class Moves(Protocol):
    """A rename that can also cut, join and transpose tensors."""

    def blocks(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        """Return the moves of a tensor of the saved model.

        Blocks that are not mentioned are left out, and so is the whole tensor if there are none. A leaf of the model
        that is no tensor has the shape ``()``.
        """


Rename = (
    Moves | Mapping[str, str | None] | Sequence[tuple[str | re.Pattern[str], str]] | Callable[[str], str | None] | None
)
"""Rename of a load; ``None`` in place of a name leaves the tensor out."""

Blocks = Callable[[str, tuple[int, ...]], Sequence[Moved]]
"""Function form of every rename: name and shape of a saved tensor, to where its blocks go."""


def blocks_of(rename: Rename) -> Blocks:
    """Return any rename as one function; a rename that only changes names moves each tensor whole.

    Raises InputError if it has none of the forms of a rename.
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
