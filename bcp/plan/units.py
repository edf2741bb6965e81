"""Units of sharded dataloader states: their readers and writers (paper sec. 3.2, 3.3, Fig. 9). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bcp.errors import CorruptError, StateError

__all__ = [
    "Claim",
    "check_readers",
    "check_shared",
    "decode_claims",
    "divide_units",
    "encode_claims",
    "encode_shared",
    "unit_path",
]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Claim:
    """The units of one sharded state that one rank holds.

    Attributes:
        name: where the state stands below ``states["dataloader"]``: keys joined by ``/``; empty for itself.
        reader: number of the rank's reader.
        readers: how many readers there are.
        ids: ids of the reader's units.
    """

    name: str
    reader: int
    readers: int
    ids: tuple[str, ...]

    def __str__(self) -> str:
        return f"dataloader {self.name!r}" if self.name else "the dataloader"

    def paths(self) -> list[str]:
        """Return the paths that :func:`divide_units` gives away: of the shared part, and of the units."""
        return [unit_path(self.name), *(unit_path(self.name, unit) for unit in self.ids)]


def unit_path(name: str, unit: str = "") -> str:
    """Return the path of a unit, as in ``train/00003``; without a unit that of the state's shared part, ``train/``."""
    return f"{name}/{unit}"


def encode_claims(claims: Sequence[Claim]) -> str:
    """Return the claims of a rank as text; empty for nothing. Equal claims give equal texts."""
    rows = [[claim.name, claim.reader, claim.readers, *claim.ids] for claim in claims]
    return json.dumps(rows, separators=(",", ":")) if rows else ""


def decode_claims(text: str) -> list[Claim]:
    """Undo :func:`encode_claims`.

    Raises:
        CorruptError: these are no claims.

    """
    try:
        rows = json.loads(text) if text else []
        claims = [Claim(name, reader, readers, tuple(ids)) for name, reader, readers, *ids in rows]
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{len(text)} characters from another rank are no claims of units: {error}") from error
    texts = [text for claim in claims for text in (claim.name, *claim.ids)]
    numbers = [number for claim in claims for number in (claim.reader, claim.readers)]
    if {*map(type, texts)} - {str} or {*map(type, numbers)} - {int}:
        raise CorruptError("another rank claims units with names that are no texts; run the same bcp on every rank")
    return claims


def encode_shared(digests: Mapping[str, str]) -> bytes:
    """Return the digests of a rank's shared parts, by name of the state; empty for none."""
    return json.dumps(digests).encode() if digests else b""


def check_shared(messages: Sequence[bytes]) -> None:
    """Check that the ranks' shared parts are equal.

    Args:
        messages: :func:`encode_shared` of every rank, by rank.

    Raises:
        StateError: two ranks have different ones; the message names them.

    """
    if len(set(messages) - {b""}) < 2:  # noqa: PLR2004 -- as a rule all are equal
        return
    first: dict[str, tuple[int, str]] = {}
    for rank, message in enumerate(messages):
        try:
            digests = dict(json.loads(message)) if message else {}
        except (TypeError, ValueError) as error:
            raise CorruptError(f"{len(message)} bytes from rank {rank} are no digests: {error}") from error
        for name, digest in digests.items():
            other, wanted = first.setdefault(name, (rank, digest))
            if digest != wanted:
                raise StateError(
                    f"dataloader {name!r}: ranks {other} and {rank} have different shared states; all readers have to "
                    "save at the same step, and to be made with the same arguments"
                )


def divide_units(claims: Mapping[int, Sequence[Claim]]) -> dict[str, int]:
    """Choose the rank that writes each unit, and each state's shared part.

    Ranks of one reader, which differ in other coordinates of the mesh, hold the same units: they write one in turn.

    Args:
        claims: of every rank that has any.

    Returns:
        Path (:func:`unit_path`) to rank.

    Raises:
        StateError: a reader is missing, readers disagree about their number, or two of them have one unit.

    """
    by_name: dict[str, dict[int, Claim]] = {}
    for rank in sorted(claims):
        for claim in claims[rank]:
            if by_name.setdefault(claim.name, {}).setdefault(rank, claim) is not claim:
                raise StateError(f"rank {rank} has two dataloader states at {claim.name!r}; rename one of the keys")
    owners: dict[str, int] = {}
    for held in by_name.values():
        check_readers(held)
        owners[unit_path(next(iter(held.values())).name)] = min(held)
        owners.update(_owners(held))
    return owners


def check_readers(held: Mapping[int, Claim]) -> None:
    """Check that the ranks of one state are readers 0, 1, 2 ..., and that none is left out.

    Raises:
        StateError: they are not; the message names ranks and numbers.

    """
    first_rank, first = next(iter(held.items()))
    for rank, claim in held.items():
        if claim.readers != first.readers:
            raise StateError(
                f"{claim}: rank {rank} is one of {claim.readers} readers, rank {first_rank} one of {first.readers}; "
                "pass the same number on all ranks"
            )
        if not 0 <= claim.reader < claim.readers:
            raise StateError(f"{claim}: rank {rank} is reader {claim.reader} of {claim.readers}; readers count from 0")
    missing = sorted(set(range(first.readers)) - {claim.reader for claim in held.values()})
    if missing:
        readers = {rank: claim.reader for rank, claim in held.items()}
        raise StateError(
            f"{first} has {first.readers} readers, and no rank is reader {_some(missing)} (rank: reader = "
            f"{_some(f'{rank}: {reader}' for rank, reader in readers.items())}); pass the data-parallel rank as reader"
        )


def _owners(held: Mapping[int, Claim]) -> dict[str, int]:
    """Deal the units of each reader to its ranks in turn."""
    ranks: dict[int, list[int]] = {}
    for rank, claim in held.items():
        ranks.setdefault(claim.reader, []).append(rank)
    owners: dict[str, int] = {}
    reader_of: dict[str, int] = {}
    for reader, holders in sorted(ranks.items()):
        claim = held[holders[0]]
        for rank in holders[1:]:
            if held[rank].ids != claim.ids:
                other = sorted(set(held[rank].ids) ^ set(claim.ids)) or ["their order"]
                raise StateError(
                    f"{claim}: ranks {holders[0]} and {rank} are both reader {reader} and differ in units: "
                    f"{_some(other)}; give every data-parallel rank a number of its own"
                )
        for number, unit in enumerate(claim.ids):
            if (rival := reader_of.setdefault(unit, reader)) != reader:
                raise StateError(
                    f"{claim}: unit {unit!r} is claimed by rank {ranks[rival][0]} (reader {rival}) and by rank "
                    f"{holders[0]} (reader {reader}); ids have to be unique among all readers"
                )
            owners[unit_path(claim.name, unit)] = holders[number % len(holders)]
    return owners


def _some(names: Iterable[object]) -> str:
    listed = [str(name) for name in names]
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
