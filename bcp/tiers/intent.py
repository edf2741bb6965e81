"""Intents as files: sealed like a receipt, so that a torn or damaged one counts for nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from bcp._messages.tiers import Intent
from bcp._version import __version__
from bcp.errors import CorruptError, MessageError
from bcp.format.container import seal, unseal
from bcp.format.metadata import Commit
from bcp.format.receipt import Receipt, decode_receipt

__all__ = ["branch_words", "commit_of", "decode_intent", "encode_intent"]

MAGIC = b"BCPINTN"


def encode_intent(intent: Intent) -> bytes:
    """Make the contents of the file of an intent."""
    return seal(intent.encode(), MAGIC)


def decode_intent(data: bytes, where: str) -> tuple[Intent, Receipt]:
    """Decode an intent and its blank receipt; ``where`` names the file in messages.

    Raises:
        NotACheckpointError: no bcp wrote this file.
        FormatVersionError: a bcp of another version of the format wrote it.
        CorruptError: it is truncated or damaged, or names another rank or save than its receipt.
    """
    payload = bytes(unseal(data, MAGIC, where, first=0))  # it has no tables
    try:
        intent = Intent.decode(payload)
    except MessageError as error:
        raise CorruptError(f"{where} is no intent of this version of bcp: {error}") from error
    receipt = decode_receipt(intent.receipt, where)
    if (receipt.rank, receipt.operation) != (intent.rank, intent.operation):
        raise CorruptError(
            f"{where} is corrupt: it is of rank {intent.rank} in operation {intent.operation}, and its receipt of rank "
            f"{receipt.rank} in {receipt.operation}"
        )
    return intent, receipt


def branch_words(run_id: str, branch: str) -> str:
    """Return the branch of a run as intents name it.

    Args:
        run_id: of the run's ledger.
        branch: of the ledger; empty until the run goes back for the first time.

    """
    return f"{run_id}/{branch}"


def commit_of(intent: Intent, receipts: bytes) -> Commit:
    """Return the commit that the intents of a save describe.

    Args:
        intent: of any rank.
        receipts: digests of the receipts of all ranks, 16 bytes each, by rank.

    """
    return Commit(
        operation=intent.operation,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        framework=intent.framework,
        codecs=(),
        part_bytes=intent.part_bytes,
        version=__version__,
        receipts=receipts,
        metrics=intent.metrics,
        user=json.loads(intent.user),
    )
