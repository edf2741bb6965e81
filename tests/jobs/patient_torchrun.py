"""torchrun that leaves its ranks more than 30 s between a signal and their kill: a busy machine needs them.

It is a :class:`~forked.Forked` program, and its ranks are its forked children.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence

from forked import Child, adopt
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

SECONDS = 120


def close(context: PContext, death_sig: signal.Signals | None = None, timeout: int = SECONDS) -> None:
    """End the ranks."""
    _close(context, death_sig, max(timeout, SECONDS))


def start(handler: SubprocessHandler, args: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a rank."""
    return Child(args, env=env, stdout=handler._stdout, stderr=handler._stderr, start_new_session=True)


if __name__ == "__main__" and adopt():
    _close, PContext.close = PContext.close, close  # type: ignore[method-assign]  # no option says so
    SubprocessHandler._popen = start  # type: ignore[assignment]  # no option says so
    run.main()
