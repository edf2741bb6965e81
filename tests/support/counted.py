"""Counts lines of bcp instead of seconds: tests of growth that no machine is too slow for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import bcp

__all__ = ["growth", "lines_of"]

_BCP = str(Path(bcp.__file__).parent)


def lines_of(function: Callable[..., object], *args: Any) -> int:
    """Return how many lines of bcp's own files this thread runs in ``function(*args)``; a turn of a loop counts anew.

    Loops in numpy and other compiled code are not seen.
    """
    lines = 0

    def count(_: FrameType, event: str, __: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        return count if frame.f_code.co_filename.startswith(_BCP) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return lines


def growth(prepare: Callable[[int], Callable[[], object]], size: int) -> float:
    """Return how many times as many lines the double size takes: 1 if size does not matter, 2 if work is linear.

    ``prepare(size)`` returns the function whose lines count. A first call, which fills caches, does not count.
    """
    prepare(size)()
    few, many = lines_of(prepare(size)), lines_of(prepare(2 * size))
    assert few > 0, "no line of bcp ran in this thread"
    return many / few
