"""``python -m bcp COMMAND``, and the console script ``bcp``."""

from __future__ import annotations

from typing import NoReturn

from bcp.cli import main
from bcp.runtime.process import leave

__all__ = ["main", "script"]


def script() -> NoReturn:
    """Run a command, and end the process with its status."""
    leave(main())


if __name__ == "__main__":
    script()
