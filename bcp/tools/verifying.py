"""Compare a checkpoint with its checksums, on all ranks of a job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from bcp._text import shown
from bcp.backends.place import Path
from bcp.options import LoadOptions, timeout_of
from bcp.protocols import Coordinator
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.verification import Verification, examine, joined, verification_of
from bcp.tools.calls import Progress, called, counting, ignore_progress
from bcp.tools.sharing import sharing

__all__ = ["averify", "verify"]


def verify(
    path: Path,
    *,
    fast: bool = False,
    role: str | None = None,
    options: LoadOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> Verification:
    """Compare all stored bytes of a checkpoint with their checksums; the ranks of a job share the bytes.

    Use it after a copy, or before a run goes on from an old checkpoint. :meth:`bcp.Checkpoint.verify` does the same by
    one process. Call this function on all ranks of a job: each reads an equal part.

    Args:
        path: the checkpoint, as for :class:`bcp.Checkpoint`.
        fast: look at receipts, sizes and the table of contents only; read no data.
        role: the role of the checkpoint below the path, if it was saved with one.
        options: how to read, as for :class:`bcp.Checkpoint`.
        storage_options: for the file system of a URL.
        coordinator: of several ranks that share the work, as for :func:`bcp.save`. None: the ranks of this job.
        progress: called with the bytes that this rank has compared, and with those of its part.

    Returns:
        Figures and damage of all ranks together, the same on every rank. True if nothing is damaged.

    Raises:
        NotACheckpointError: there is no checkpoint.
        CorruptError: the table of contents is damaged.
        InputError: another rank has other arguments, or another checkpoint.
        PeerError: another rank failed.
        StorageError: storage cannot be listed.

    Example:
        >>> import torch
        >>> _ = bcp.save("ckpt/to-verify", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
        >>> result = bcp.tools.verify("ckpt/to-verify")
        >>> bool(result), result.files
        (True, 1)

    """
    return called(
        lambda: averify(
            path,
            fast=fast,
            role=role,
            options=options,
            storage_options=storage_options,
            coordinator=coordinator,
            progress=progress,
        ),
        f"verify {shown(str(path))}",
    )


async def averify(
    path: Path,
    *,
    fast: bool = False,
    role: str | None = None,
    options: LoadOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> Verification:
    """Do the same as :func:`verify` from a coroutine."""
    began = time.monotonic()
    async with sharing("verify", coordinator, timeout_of(options)) as ranks, AsyncExitStack() as stack:

        async def opened() -> AsyncCheckpoint:
            ckpt = AsyncCheckpoint(path, role=role, options=options, storage_options=storage_options)
            return await stack.enter_async_context(ckpt)

        ckpt = await ranks.agreed(opened(), lambda ckpt: f"{ckpt.path} of operation {ckpt.operation}, {fast=}")
        source = ckpt.source
        total = -(-int(ckpt.metadata.layout.file_nbytes.sum()) // ranks.world_size)
        own = await examine(
            source.backend,
            ckpt.metadata,
            ranks.share,
            fast=fast,
            workers=source.io_workers,
            told=counting(progress, total),
        )
        return verification_of(await ranks.merged(own, joined), began)
