"""What an agent fetches of another host's files before the files themselves, for copies as for parity."""

from __future__ import annotations

from bcp._messages.tiers import Intent
from bcp.errors import CorruptError
from bcp.format.container import digest
from bcp.format.metadata import receipt_key
from bcp.format.receipt import Receipt, decode_receipt
from bcp.protocols import Backend
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import is_of
from bcp.tiers.folder import NodeFolder
from bcp.tiers.intent import decode_intent
from bcp.tiers.notes import Mark

__all__ = ["fetched_receipt"]


async def fetched_receipt(files: Backend, mark: Mark, folder: NodeFolder) -> tuple[Intent, Receipt, bytes]:
    """Return intent, receipt and encoded receipt of a rank's files on another host; keep their layout.

    Args:
        files: of the other host.
        mark: of the files.
        folder: the memory of this host.

    Raises:
        CorruptError: they do not fit together.
        StorageError: the other host does not answer.

    """
    where = f"the intent of {mark.name} from {files!r}"
    intent, blank = decode_intent(bytes(await files.get(f"intents/{mark.name}")), where)
    if (intent.operation, intent.rank) != (mark.operation, mark.rank):
        raise CorruptError(f"{where} is of rank {intent.rank} in operation {intent.operation}")
    layout = bytes(await files.get(f"layouts/{intent.layout.hex()}"))
    if digest(layout) != intent.layout:
        raise CorruptError(f"the layout {intent.layout.hex()} from {files!r} is damaged")
    key = receipt_key(mark.rank, mark.operation)
    data = bytes(await files.get(key))
    receipt = decode_receipt(data, f"{key} from {files!r}")
    if not is_of(receipt, blank):
        raise CorruptError(f"{key} from {files!r} is not the receipt of its intent")
    await in_thread(folder.put_layout, layout)
    return intent, receipt, data
