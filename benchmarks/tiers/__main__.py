"""What the memory tier costs a save, how soon it brings a job back, and which losses of hosts it survives.

    python -m benchmarks.tiers [--quick] [--json FILE] [--check] [--folder FOLDER] [--memory FOLDER] [--parts PART ...]

All hosts are directories of this machine. Figures are ratios of one run: both sides take turns, and medians count.
docs/tiers.md shows a run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bcp.tiers.options import SHARED_MEMORY
from benchmarks.figures import Figures, parser
from benchmarks.tiers.losses import losses, planning
from benchmarks.tiers.recovery import from_here, from_peer
from benchmarks.tiers.snapshot import beside_copies, staging

MIB = 1 << 20
PARTS = {"staging": staging, "here": from_here, "peer": from_peer, "copies": beside_copies}
MIB_OF = {"staging": 1024, "here": 2048, "peer": 2048, "copies": 512}
"""Size of the state of each part; with ``--quick`` an eighth."""


def main() -> int:
    """Measure every part."""
    flags = parser(__doc__)
    flags.add_argument("--folder", type=Path, default=Path(), help="a directory on the disk to be measured; this one")
    flags.add_argument("--memory", type=Path, default=SHARED_MEMORY, help="a directory on a tmpfs with room for 6 GiB")
    flags.add_argument("--parts", nargs="+", choices=[*PARTS, "losses"], default=[*PARTS, "losses"], help="of these")
    options = flags.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the run", flush=True)
    figures = Figures()
    for part, measure in PARTS.items():
        if part in options.parts:
            nbytes = MIB_OF[part] * MIB // (8 if options.quick else 1)
            with TemporaryDirectory(dir=options.memory) as memory, TemporaryDirectory(dir=options.folder) as disk:
                measure(nbytes, 3 if options.quick else 9, Path(memory), Path(disk).absolute(), figures)
    if "losses" in options.parts:
        planning(figures)
        losses(50 if options.quick else 200, figures)
    return figures.close(options)


if __name__ == "__main__":
    sys.exit(main())
