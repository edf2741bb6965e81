"""Units of sharded dataloader states: their readers and writers (paper sec. 3.2, 3.3, Fig. 9). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec

from bcp._messages.base import DECODE_ERRORS, plain, refused
from bcp._messages.planning import Claim, SharedDigests
from bcp.errors import StateError

__all__ = [
    "all_have_nothing",
    "check_readers",
    "check_shared",
    "claimed_paths",
    "decode_claims",
    "divide_units",
    "encode_claims",
    "encode_shared",
    "unit_path",
]

_SHOWN = 5


def claimed_paths(claim: Claim) -> list[str]:
    """Return the paths that :func:`divide_units` gives away: of the shared part, and of the units."""
    return [unit_path(claim.name), *(unit_path(claim.name, unit) for unit in claim.ids)]


def unit_path(name: str, unit: str = "") -> str:
    """Return the path of a unit, as in ``train/00003``; without a unit that of the state's shared part, ``train/``."""
    return f"{name}/{unit}"


def encode_claims(claims: Sequence[Claim]) -> str:
    """Return the claims of a rank as text, equal for equal claims. Raises StateError if a name is no Unicode."""
    try:
        return msgspec.json.encode(claims, enc_hook=plain).decode() if claims else ""
    except UnicodeEncodeError as error:
        raise StateError(f"the name of a dataloader state or unit is no Unicode: {error}; rename it") from error


def decode_claims(text: str, sender: int | None = None) -> list[Claim]:
    """Undo :func:`encode_claims`. Raises MessageError if the text has no claims."""
    try:
        return msgspec.json.decode(text, type=list[Claim]) if text else []
    except (*DECODE_ERRORS, UnicodeEncodeError) as error:
        raise refused("claims of units", text.encode(errors="replace"), error, sender) from error


def encode_shared(digests: Mapping[str, str], *, nothing: bool = False) -> bytes:
    """Return the digests of a rank's shared parts, by name of the state; empty for a rank with other states only.

    ``nothing`` says that the rank's states are empty.
    """
    return SharedDigests(dict(digests), nothing).encode() if digests or nothing else b""


def all_have_nothing(messages: Sequence[bytes]) -> bool:
    """Return whether the states of all ranks are empty; ``messages``: :func:`encode_shared` of every rank."""
    return b"" not in messages and all(
        SharedDigests.decode(message, rank).nothing for rank, message in enumerate(messages)
    )


def check_shared(messages: Sequence[bytes]) -> None:
    """Check that the ranks' shared parts are equal; ``messages``: :func:`encode_shared` of every rank.

    Raises StateError, which names two ranks, if these differ. Raises MessageError if a message cannot be decoded.
    """
    if len(set(messages) - {b""}) < 2:  # noqa: PLR2004 -- as a rule all are equal
        return
    first: dict[str, tuple[int, str]] = {}
    for rank, message in enumerate(messages):
        digests = SharedDigests.decode(message, rank).digests if message else {}
        for name, digest in digests.items():
            other, wanted = first.setdefault(name, (rank, digest))
            if digest != wanted:
                raise StateError(
                    f"dataloader {name!r}: ranks {other} and {rank} have different shared states; all readers have to "
                    "save at the same step, and to be made with the same arguments"
                )


def divide_units(claims: Mapping[int, Sequence[Claim]]) -> dict[str, int]:
    """Return the rank that writes each unit and each state's shared part, by path (:func:`unit_path`).

    Ranks of one reader, which differ in other coordinates of the mesh, hold the same units: they write them in turn.
    Raises StateError if a reader is missing, readers disagree about their number, or two readers have one unit.
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

    Raises StateError, which names ranks and numbers, if they are not.
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
    readers = {claim.reader for claim in held.values()}
    if len(readers) < first.readers:
        missing = islice((reader for reader in range(first.readers) if reader not in readers), _SHOWN)
        more = first.readers - len(readers) - _SHOWN
        raise StateError(
            f"{first} has {first.readers} readers, and no rank is reader {', '.join(map(str, missing))}"
            f"{f' and {more} more' if more > 0 else ''} (rank: reader = "
            f"{_some(f'{rank}: {claim.reader}' for rank, claim in held.items())}); {len(held)} ranks have it: pass the "
            "data-parallel rank as reader, and the number of data-parallel ranks as readers"
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
