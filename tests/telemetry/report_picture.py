"""Draws ``docs/report.png`` and measures the page of 1,024 ranks: ``python tests/telemetry/report_picture.py``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from servers.chromium import Tab, browser, tab
from telemetry.synthetic import Case, made

from bcp.telemetry.page import page

PICTURE = Path(__file__).parents[2] / "docs" / "report.png"
FINDINGS = [
    "Rank 17 on node-002 took 2.2 times as long as the median rank. Its stage upload was slow.",
    "The bottleneck is the stage upload: parts waited longest in its queue.",
]


def draw(shown: Tab, folder: Path, picture: Path) -> None:
    """Draw the page of 64 ranks with a slow one, down to its timeline."""
    path = folder / "report.html"
    case = Case(axes={"pp": 2, "dp": 4, "tp": 8}, slow_ranks={17: 2.6}, flaky=0.02, probed=11e9)
    path.write_text(page([made(case)], findings=[FINDINGS]), encoding="utf-8")
    shown.open(path)
    shown.picture(picture, "#timeline-chart")


def measure(shown: Tab, folder: Path) -> None:
    """Print the size of a page of 1,024 ranks, and the time to draw it."""
    case = Case(ranks=1024, axes={"pp": 8, "dp": 16, "tp": 8}, slow_ranks={517: 3.0}, slow_hosts={40: 1.9})
    recording = made(case)
    started = time.perf_counter()
    path = folder / "many.html"
    path.write_text(page([recording]), encoding="utf-8")
    seconds = time.perf_counter() - started
    print(f"{recording.events.num_rows:,} events, {path.stat().st_size / 1e6:.2f} MB, written in {seconds:.2f} s")  # noqa: T201
    for _ in range(5):
        started = time.perf_counter()
        shown.open(path)
        seconds = time.perf_counter() - started
        print(f"drawn {shown.run('bcpReport.ready'):.0f} ms after navigation, seen after {seconds * 1e3:.0f} ms")  # noqa: T201


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    with tempfile.TemporaryDirectory() as name, browser() as address, tab(address) as opened:
        draw(opened, Path(name), options.parse_args().picture)
        measure(opened, Path(name))
