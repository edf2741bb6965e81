"""Words of messages about a run: who has the folder and when, and lost metadata."""

from __future__ import annotations

from datetime import UTC, datetime

from bcp.format.metadata import METADATA_KEY
from bcp.runs.ledger import Ledger

__all__ = ["lost_metadata", "moment", "owner_words"]


def lost_metadata(checkpoint: str) -> str:
    """Say that a checkpoint of the ledger has no metadata, and what to do.

    Example:
        >>> lost_metadata("ckpt/run-7/step-00000010")[:43]
        'ckpt/run-7/step-00000010 was committed, as '

    """
    return (
        f"{checkpoint} was committed, as the run's ledger says, and {METADATA_KEY} is gone: restore the file, or "
        "delete the folder, so that the run goes on without it"
    )


def owner_words(ledger: Ledger) -> str:
    """Say who began the last life of a ledger; nothing if there was none.

    Example:
        >>> owner_words(Ledger(run_id="pretrain", owner="a1"))
        ''

    """
    if not ledger.lives:
        return ""
    life = ledger.lives[-1]
    return f" at {moment(life.started, '%Y-%m-%d %H:%M:%S UTC')}, host {life.host!r}, pid {life.pid}"


def moment(seconds: float, form: str) -> str:
    """Return Unix seconds as text; the number itself if no calendar has it.

    Example:
        >>> moment(0.0, "%Y-%m-%d")
        '1970-01-01'

    """
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"
