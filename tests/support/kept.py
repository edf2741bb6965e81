"""Memories of hosts as trainers leave them, made from a checkpoint that was saved directly."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bcp._messages.tiers import Intent
from bcp.backends import LocalBackend
from bcp.format.metadata import METADATA_KEY, decode_metadata, encode_layout
from bcp.format.receipt import decode_receipt, encode_receipt
from bcp.read.opening import read_metadata
from bcp.tiers.digests import blank_of, key_of
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import Mark

__all__ = ["blank_of", "kept", "marks_of"]


def kept(direct: Path, root: Path, ranks: Sequence[int], **more: Any) -> NodeFolder:
    """Return the memory of a host that has the files of these ranks of a checkpoint, all marked.

    Args:
        direct: the checkpoint on disk.
        root: the directory to make.
        ranks: whose files.
        more: fields of the intents.

    """
    folder = NodeFolder(root)
    metadata = decode_metadata(asyncio.run(read_metadata(LocalBackend(direct), str(direct))), METADATA_KEY)
    commit = metadata.commit
    layout = folder.put_layout(encode_layout(metadata.layout))
    for rank in ranks:
        receipt = decode_receipt((direct / commit.receipt_key(rank)).read_bytes(), "receipt")
        for key in (key_of(receipt, file) for file in receipt.files):
            (root / key).parent.mkdir(exist_ok=True)
            shutil.copy(direct / key, root / key)
        facts = {"metrics": dict(commit.metrics), "place": "", "step": 7} | more
        intent = Intent(
            rank=rank,
            world_size=metadata.world_size,
            operation=commit.operation,
            framework=commit.framework,
            part_bytes=commit.part_bytes,
            layout=layout,
            receipt=encode_receipt(blank_of(receipt)),
            **facts,
        )
        folder.prepare(intent)
        folder.mark(Mark(commit.operation, rank))
    return folder


def marks_of(folder: NodeFolder) -> list[Mark]:
    """Return the marks of a host, and check that they are of one save."""
    marks = folder.marks()
    assert len({mark.operation for mark in marks}) == 1
    return marks
