"""The end of a run whose last save is still running: what is waited for, and what a Ctrl-C does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bcp.runs.calls import Body
from bcp.runs.saves import Saves

__all__ = ["CTRL_C", "CTRL_C_TWICE", "await_save"]

CTRL_C = "Ctrl-C again gives it up: its files are removed, and older checkpoints stay"
CTRL_C_TWICE = "Two more Ctrl-C give it up: its files are removed, and older checkpoints stay"
"""In a coroutine: ``asyncio.run`` turns the first one into a cancellation."""


def await_save(saves: Saves, drop_standby: Callable[[], Body[None]], again: str) -> Body[KeyboardInterrupt | None]:
    """Wait for the running save and its callback. A Ctrl-C is told what a further one does: it gives the save up.

    Args:
        saves: of the run.
        drop_standby: gives up the held snapshot, without which its save would not end. A Ctrl-C repeats it.
        again: for a run that was interrupted: what a further interrupt does; "" for any other end.

    Returns:
        The interrupt that came meanwhile, for the caller to raise.

    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            yield from drop_standby()
            yield partial(saves.ended_at_last, again)
        except KeyboardInterrupt as error:
            if again:
                yield saves.give_up
                return error
            again, interrupt = CTRL_C, error
        else:
            return interrupt
