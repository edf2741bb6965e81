"""Which way of writing is the quickest here: measured once per file system and process, with real writes."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bcp._log import log
from bcp.backends.file_io import TempFile, WriteWay, bounce
from bcp.backends.files import is_shared
from bcp.runtime.process import process_lock

__all__ = ["quickest"]


_SIMPLE_BYTES = 1 << 20
# Smaller files go through the page cache and stay there: they are soon read again. Durable, in ms, direct and buffered:
# 64 KiB 4.2 and 2.9, 256 KiB 3.9 and 5.4, 1 MiB 4.0 and 6.5, 16 MiB 16 and 32, 64 MiB 50 and 121.
_PROBED_BYTES = 256 << 20  # so that a probe of one round, 2 x 32 MiB, adds a quarter to one file at most
_PROBE_BYTES = 32 << 20
# Early over direct in 12 probes of one busy disk: 16 MiB 0.61 to 1.05, 32 MiB 0.65 to 0.96, 64 MiB 0.67 to 0.92. Now
# and then more than 1.25, which would hold as long as the process lives; with three rounds 48 of 48 were right.
_ROUNDS = 3
_THREADS = 4  # as many as a save writes with
_CLEARLY = 1.25  # direct I/O takes a tenth of the CPU and leaves the page cache alone; that is worth some speed


class _Probes:
    """The ways that were found, by st_dev, and the lock under which they are looked for."""

    def __init__(self) -> None:
        self.lock = process_lock()
        self.ways: dict[int, WriteWay] = {}


_probes = _Probes()


def quickest(final: Path, nbytes: int | None) -> WriteWay:
    """Say how to write a file of that name and so many bytes, or of None where that is not known.

    Before the first large file of a file system it writes a temporary one both ways: 0.1 s on a disk of 1.5 GB/s.
    Shared file systems are not measured: some of them refuse direct I/O, others do it one write after the other.
    """
    if nbytes is not None and nbytes < _SIMPLE_BYTES:
        return "buffered"
    if is_shared(final.parent):
        return "early"
    device = final.parent.stat().st_dev
    if (nbytes or 0) < _PROBED_BYTES:
        return _probes.ways.get(device, "direct")
    with _probes.lock:
        if device not in _probes.ways:
            _probes.ways[device] = _compare(final)
        return _probes.ways[device]


def _compare(final: Path) -> WriteWay:
    """Write both ways, again as long as it looks as if ``early`` were the better one: one round is soon disturbed.

    An error is left to the file itself to run into.
    """
    chosen: WriteWay = "early"
    rates: dict[str, float] = {}
    try:
        for _ in range(_ROUNDS):
            direct, early = _rate(final, "direct"), _rate(final, "early")
            rates = {"direct_gbps": round(direct, 2), "early_gbps": round(early, 2)}
            if early <= _CLEARLY * direct:
                chosen = "direct"
                break
    except OSError as error:
        chosen = "direct"
        log.debug("the probe of local writes failed", folder=str(final.parent), error=str(error))
    log.debug("local writes were probed", folder=str(final.parent), way=chosen, **rates)
    return chosen


def _rate(final: Path, way: WriteWay) -> float:
    """Return how many GB/s become durable; 0 where the file system refuses that way."""
    file = TempFile(final, lambda _final, _nbytes: way)
    try:
        file.create(_PROBE_BYTES)
        with bounce() as memory, ThreadPoolExecutor(_THREADS) as threads:
            # zeros may not reach the disk
            memory.reshape(-1, 1 << 16)[:] = np.frombuffer(os.urandom(1 << 16), np.uint8)
            started = time.perf_counter()
            for _ in threads.map(lambda offset: file.write(offset, memory.data), range(0, _PROBE_BYTES, len(memory))):
                pass
            file.sync()
            seconds = time.perf_counter() - started
        return _PROBE_BYTES / seconds / 1e9 if file.way == way else 0.0
    finally:
        file.discard()
