"""How fast saving and loading is: bcp, its peers, and the machine itself, in turn in one run.

    python -m benchmarks.speed [--size 2GiB] [--runs 5] [--quick] [--json FILE] [--check]
                               [--picture FILE] [--markdown FILE] [--from FILE]

One realistic state: a GPT in bf16 with fp32 AdamW moments, some large matrices and hundreds of small tensors. Every
library saves and loads it in processes of its own, synchronously and in the background of a training loop, one process
and 2 and 4 ranks with FSDP2. Medians of all rounds are compared with each other and with raw writes, reads and
copies of the same bytes. docs/performance.md explains how, and shows a run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.figures import Figures, parser
from benchmarks.speed.cases import YARDSTICK
from benchmarks.speed.goals import judge
from benchmarks.speed.libraries import LIBRARIES
from benchmarks.speed.rounds import Run
from benchmarks.speed.samples import Samples
from benchmarks.speed.tables import plain, put_into, tables

PARTS = ("single", "ranks", "small")
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}


def main() -> int:
    """Measure, or read what was measured; then show it in every form that was asked for."""
    options = arguments()
    samples = Samples.read(options.source) if options.source else measure(options)
    for table in tables(samples):
        print(plain(table), flush=True)
    for library, why in samples.absent.items():
        print(f"{library}: {why}", flush=True)
    figures = Figures()
    judge(samples, figures)
    if options.json:
        samples.write(Path(options.json), figures.rows())
    if options.picture:
        from benchmarks.speed.picture import draw  # noqa: PLC0415 -- matplotlib is in an extra

        draw(samples, options.picture)
    if options.markdown:
        put_into(options.markdown, samples, figures.found)
    status = figures.verdict(check=options.check)
    if YARDSTICK in samples.absent:
        print(f"{YARDSTICK}: {samples.absent[YARDSTICK]}", flush=True)
        return 1
    return status


def arguments() -> argparse.Namespace:
    """Read the options."""
    options = parser(__doc__)
    options.add_argument("--size", type=nbytes, help="of the state: 2GiB, with --quick 256MiB")
    options.add_argument("--runs", type=int, help="rounds: 5, with --quick 2; libraries that no goal is about do fewer")
    options.add_argument("--folder", type=Path, default="bench-out", help="where to write: on the disk to measure")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    options.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES), help="what to compare")
    options.add_argument("--picture", type=Path, metavar="FILE", help="draw the result (needs matplotlib)")
    options.add_argument("--markdown", type=Path, metavar="FILE", help="put the tables into this page")
    options.add_argument("--from", dest="source", type=Path, metavar="FILE", help="show a JSON file of an earlier run")
    read = options.parse_args()
    read.size = read.size or nbytes("256MiB" if read.quick else "2GiB")
    read.runs = read.runs or (2 if read.quick else 5)
    return read


def nbytes(text: str) -> int:
    """Read a size with its unit."""
    found = re.fullmatch(rf"([0-9.]+) ?({'|'.join(UNITS)})", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 2GiB, with one of {', '.join(UNITS)}")
    return int(float(found[1]) * UNITS[found[2]])


def measure(options: argparse.Namespace) -> Samples:
    """Measure everything that was asked for."""
    run = Run(options.size, options.runs, options.folder / "checkpoints", options.libraries, options.quick)
    run.samples.about.update(
        measured=datetime.now(UTC).strftime("%Y-%m-%d"),
        state=f"{options.size / (1 << 30):.3g} GiB",
        rounds=options.runs,
        machine=f"{os.cpu_count()} cores, {memory_gib():.0f} GiB",
        kernel=platform.release(),
        Python=platform.python_version(),
        torch=torch.__version__,
        neighbours=f"load average {os.getloadavg()[0]:.1f} before the run",
    )
    try:
        for part in options.parts:
            run.part(part)
    finally:
        run.clean()
    return run.samples


def memory_gib() -> float:
    """Return the memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)


if __name__ == "__main__":
    sys.exit(main())
