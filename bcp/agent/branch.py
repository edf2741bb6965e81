"""Whether a run has gone back since a snapshot was taken, as the run's ledger in storage says.

An agent of a host that was left out of a later life of the job does not know that life. Its snapshots are of a branch
that the run has left, and must not become the run's newest checkpoint.
"""

from __future__ import annotations

import json
from contextlib import suppress

from bcp._messages.tiers import Intent
from bcp.backends.small import get_small
from bcp.errors import CorruptError
from bcp.format.metadata import LEDGER_KEY
from bcp.protocols import Backend
from bcp.tiers.intent import branch_words

__all__ = ["has_gone_back"]


async def has_gone_back(run: Backend, intent: Intent) -> bool:
    """Return whether the ledger of a run names another branch than a snapshot. What is no ledger says nothing.

    Args:
        run: the durable root.
        intent: of the snapshot.

    Raises:
        StorageError: storage failed.

    """
    with suppress(FileNotFoundError, CorruptError, ValueError, TypeError, KeyError, RecursionError):
        ledger = json.loads(bytes(await get_small(run, LEDGER_KEY)))
        return bool(intent.branch) and branch_words(ledger["run_id"], ledger.get("branch", "")) != intent.branch
    return False
