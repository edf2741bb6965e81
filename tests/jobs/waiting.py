from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once something is so that no event tells of."""
    while not condition():
        time.sleep(0.001)
