"""The job of the soak: ``torchrun ... -m benchmarks.soak.job FOLDER LOG STEPS``.

Every rank appends lines to one log. The first one comes before torch is imported, so that a kill may hit a start, too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from pathlib import Path

__all__ = ["Log"]

HUNG_SECONDS = 90.0
"""A rank without a line for so long prints where its threads are."""


class Log:
    """Appends lines to a file that all ranks of all lives share. A line that was written outlives a kill."""

    def __init__(self, path: Path) -> None:
        """Open the file, and remember its folder, the rank and the restart."""
        self.folder = path.parent
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.rank = int(os.environ["RANK"])
        self.life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def tell(self, word: str, **more: object) -> None:
        """Append a line by one call."""
        line = {"at": time.monotonic(), "life": self.life, "rank": self.rank, "word": word, **more}
        os.write(self._fd, json.dumps(line).encode() + b"\n")
        faulthandler.dump_traceback_later(HUNG_SECONDS)


def main() -> None:
    """Say that this rank lives, then train."""
    folder, log, steps = sys.argv[1], Log(Path(sys.argv[2])), int(sys.argv[3])
    log.tell("start", pid=os.getpid())
    from benchmarks.soak.training import train  # noqa: PLC0415 -- imports torch, which takes seconds

    train(folder, log, steps)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
