"""torchrun that leaves its ranks more than 30 s between a signal and their kill: a busy machine needs them."""

from __future__ import annotations

import signal

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext

SECONDS = 120


def close(context: PContext, death_sig: signal.Signals | None = None, timeout: int = SECONDS) -> None:
    """End the ranks."""
    _close(context, death_sig, max(timeout, SECONDS))


if __name__ == "__main__":
    _close, PContext.close = PContext.close, close  # type: ignore[method-assign]  # no option says so
    run.main()
