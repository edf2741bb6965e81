"""Lines that bcp logs, and what processes write to stderr."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        self.lines.append({"event": record.getMessage(), "log_level": level, **record.__dict__["bcp"]})


@contextmanager
def captured_logs() -> Iterator[list[dict[str, Any]]]:
    """Collect the lines of all threads: the text as ``event``, ``log_level``, and the values beside them."""
    collector = _Collector()
    logger = logging.getLogger("bcp")
    logger.addHandler(collector)
    try:
        yield collector.lines
    finally:
        logger.removeHandler(collector)


def without_torchs_warnings(stderr: str) -> str:
    """Drop the lines in which torch warns of the network: a host name without an address, a store that has gone."""
    with_frames = r"(?:Exception raised from .*\n|frame #\d+: .*\n|<omitting python frames>\n|\n)*"
    return re.sub(rf"^\[W.*(?:socket|ProcessGroupGloo|TCPStore)\.cpp.*\n{with_frames}", "", stderr, flags=re.MULTILINE)
