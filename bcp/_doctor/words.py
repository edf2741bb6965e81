"""Lists of ranks and hosts as people read them, however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["in_words", "ranks_in_words", "span", "while_short"]

_MOST = 6  # names in one list


def while_short(names: Sequence[str], most: int = _MOST) -> str:
    """Join names with commas; of many, the first and how many more."""
    more = len(names) - most
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:most])} and {more} more"


def in_words(what: str, names: Sequence[str]) -> str:
    """Name things of a kind, as in ``"hosts h1, h2"``."""
    return f"{what}{'s' * (len(names) != 1)} {while_short(names)}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Name ranks, as in ``"ranks 0-7, 9"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    pieces = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' * (not single)} {while_short(pieces)}"


def span(names: Sequence[str]) -> str:
    """Name the first and the last of many."""
    return ", ".join(names) if len(names) < 3 else f"{names[0]} .. {names[-1]}"  # noqa: PLR2004 -- both ends are all
