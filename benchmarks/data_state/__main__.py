"""How long the state of a token loader takes at a save, in an upload, and for another number of readers.

    python -m benchmarks.data_state [--quick] [--json FILE] [--check] [--dir FOLDER]

docs/data.md shows a run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.data_state.gather import gather
from benchmarks.data_state.units import reshard, upload
from benchmarks.figures import Figures, parser

MIB = 1 << 20


def main() -> int:
    """Measure every part."""
    flags = parser(__doc__)
    flags.add_argument(
        "--dir", type=Path, default=Path(), help="folder on the disk to be measured; this one by default"
    )
    options = flags.parse_args()
    multiprocessing.set_forkserver_preload(["benchmarks.data_state.pages", "bcp.data"])
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the run", flush=True)
    figures = Figures()
    nbytes = (256 if options.quick else 1024) * MIB
    gather(nbytes, 3 if options.quick else 5, 2.0 if options.quick else 6.0, figures)
    upload(nbytes, figures)
    with TemporaryDirectory(dir=options.dir) as folder:
        reshard(nbytes, Path(folder), figures)
    return figures.close(options)


if __name__ == "__main__":
    sys.exit(main())
