"""How long the state of a token loader takes at a save.

    python -m benchmarks.data_state [--quick] [--json FILE] [--check]

docs/data.md shows a run.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from benchmarks.data_state.gather import gather
from benchmarks.figures import Figures, arguments

MIB = 1 << 20


def main() -> int:
    """Measure every part."""
    options = arguments(__doc__)
    multiprocessing.set_forkserver_preload(["benchmarks.data_state.pages", "bcp.data"])
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before the run", flush=True)
    figures = Figures()
    if options.quick:
        gather(256 * MIB, 3, 2.0, figures)
    else:
        gather(1024 * MIB, 5, 6.0, figures)
    return figures.close(options)


if __name__ == "__main__":
    sys.exit(main())
