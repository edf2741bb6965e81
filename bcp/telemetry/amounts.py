"""Amounts as people read them: bytes and seconds."""

from __future__ import annotations

__all__ = ["bytes_words", "duration_words"]


def bytes_words(nbytes: float) -> str:
    """Return a number of bytes for people, in decimal units.

    Example:
        >>> bytes_words(1_234_567)
        '1.2 MB'

    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:  # noqa: PLR2004 -- of the next unit
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def duration_words(seconds: float) -> str:
    """Return seconds for people.

    Example:
        >>> duration_words(83.0)
        '1 min 23 s'

    """
    if seconds < 60:  # noqa: PLR2004 -- a minute
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {round(seconds) % 60} s"  # noqa: PLR2004
