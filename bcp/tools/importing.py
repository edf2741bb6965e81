"""Make a checkpoint of files of another library: a save whose bytes come from them, or metadata beside them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from bcp._api import asave
from bcp._messages.tools import Imported
from bcp._text import shown
from bcp.backends.place import Path, Place, place_of
from bcp.errors import InputError
from bcp.options import SaveOptions
from bcp.protocols import Coordinator, ObjectKey
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.tools.calls import Progress, called, ignore_progress
from bcp.tools.in_place import commit_in_place
from bcp.tools.parts import KnownShards, Origin, Origins, plain_meta, shards_of
from bcp.tools.sharing import sharing

__all__ = ["ImportResult", "aimport_files", "import_files"]


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The outcome of :func:`bcp.tools.import_files`.

    Attributes:
        path: of the new checkpoint, absolute. Without a copy it is the folder of the files.
        operation: id of the save, or of the import.
        tensors: number of tensors.
        values: number of values that are not tensors.
        nbytes: bytes of data that this rank has written; 0 without a copy.
        seconds: how long it took.
    """

    path: str
    operation: str
    tensors: int
    values: int
    nbytes: int
    seconds: float


def import_files(
    source: Path,
    target: Path | None = None,
    *,
    copy: bool = True,
    values: bool = True,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> ImportResult:
    """Make a checkpoint of files of another library: Hugging Face, DCP, DeepSpeed, Megatron-core, and others.

    ``bcp.load`` and :class:`bcp.Checkpoint` read such files as they are. Import them for checksums, for one atomic
    commit, or to move them to another storage. The bytes are streamed: no tensor has to fit into memory. Under torchrun
    every rank reads and writes an equal share.

    The new checkpoint has the names and the user metadata of the source, as :class:`bcp.Checkpoint` shows them.
    ``docs/other-formats.md`` lists the formats, and what each of them leaves out.

    With ``copy=False`` the folder of the files becomes the checkpoint: ``metadata.arrow`` is written beside them, and
    no tensor is read. From then on the folder is opened by this one object. Its files stay where they are, and have no
    checksums. A file of another size than at the import is an error of the next opening. bcp deletes no file of another
    library.

    Args:
        source: the files, as for :class:`bcp.Checkpoint`.
        target: path or URL of the new checkpoint; None with ``copy=False``.
        copy: copy the bytes. False writes only ``metadata.arrow``, into the folder of the files.
        values: take over the values that are not tensors, as learning rates. False leaves all of them out.
        overwrite: replace a committed checkpoint at the target, atomically. With ``copy=False``, replace the metadata
            of an older import; a save of bcp in the folder is not replaced.
        options: how to save: codecs, for instance. With ``copy=False`` only
            ``metadata``, ``timeout`` and ``retries`` count.
        storage_options: for the file system of the source's URL.
        target_options: for the file system of the target's URL.
        coordinator: of several ranks, as for :func:`bcp.save`.
        progress: called with the bytes that this rank has read, and with the bytes of all tensors.

    Returns:
        The figures of this rank.

    Raises:
        InputError: the source is a checkpoint of bcp: :func:`bcp.tools.copy` copies it. Or target and ``copy`` do not
            fit each other; or ``copy=False`` is to import one file, and no folder.
            Or another rank has other arguments, or other files.
        NotACheckpointError: there are no files that bcp reads.
        CheckpointError: a value cannot be read; ``values=False`` leaves all values out.
        CorruptError: a file is damaged. Nothing is committed.
        ExistsError: a committed checkpoint is at the target, and ``overwrite`` is not set; or somebody else has
            committed there meanwhile.
        PeerError: another rank failed. Nothing is committed.
        StorageError: storage failed, or the folder is read-only. Nothing is committed.

    Example:
        >>> _ = torch.save({"w": torch.ones(3)}, "weights.pt")
        >>> _ = bcp.tools.import_files("weights.pt", "ckpt/imported", overwrite=True)
        >>> bcp.Checkpoint("ckpt/imported").names()
        ['w']

    """
    into = "" if target is None else f" into {shown(str(target))}"
    return called(
        lambda: aimport_files(
            source,
            target,
            copy=copy,
            values=values,
            overwrite=overwrite,
            options=options,
            storage_options=storage_options,
            target_options=target_options,
            coordinator=coordinator,
            progress=progress,
        ),
        f"import {shown(str(source))}{into}",
    )


async def aimport_files(
    source: Path,
    target: Path | None = None,
    *,
    copy: bool = True,
    values: bool = True,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    target_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
    progress: Progress = ignore_progress,
) -> ImportResult:
    """Do the same as :func:`import_files` from a coroutine."""
    began, saving = time.monotonic(), options or SaveOptions()
    if not copy:
        return await _in_place(
            source,
            target,
            saving,
            storage_options,
            target_options,
            coordinator,
            values=values,
            overwrite=overwrite,
        )
    if target_options is not None:
        saving = replace(saving, storage_options=target_options)
    async with AsyncExitStack() as stack:
        async with sharing("import", coordinator, saving.timeout) as ranks:

            async def opened() -> tuple[Path, AsyncCheckpoint, dict[ObjectKey, Any]]:
                if target is None:
                    raise InputError("pass a target for the copy, or copy=False to make the folder itself a checkpoint")
                ckpt = await stack.enter_async_context(AsyncCheckpoint(source, storage_options=storage_options))
                if ckpt.metadata.foreign is None:
                    raise InputError(f"{ckpt.path} is a checkpoint of bcp: bcp.tools.copy (bcp cp) copies it")
                return target, ckpt, dict(await ckpt.values()) if values else {}

            goal, ckpt, objects = await ranks.agreed(
                opened(), lambda made: f"{made[1].path} of operation {made[1].operation}, {values=}"
            )
        tensors = ckpt.metadata.layout.tensors
        metas = [plain_meta(tensors[row]) for row in range(len(tensors))]
        saving = replace(saving, metadata={**ckpt.user_metadata, **saving.metadata})
        places = {(meta.kind, meta.fqn): Origin(ckpt.source, row) for row, meta in enumerate(metas)}
        result = await asave(
            goal,
            {"model": {}, "optimizer": {}},
            framework=KnownShards("import", shards_of(metas, objects)),  # ranks divide replicas among themselves
            overwrite=overwrite or None,
            options=Origins(places, progress, ckpt.nbytes).options(saving),
            coordinator=coordinator,
        )
    seconds = time.monotonic() - began
    return ImportResult(result.path, result.operation, len(ckpt.tensors), len(objects), result.nbytes, seconds)


async def _in_place(
    source: Path,
    target: Path | None,
    options: SaveOptions,
    storage_options: Mapping[str, Any] | None,
    target_options: Mapping[str, Any] | None,
    coordinator: Coordinator | None,
    *,
    values: bool,
    overwrite: bool,
) -> ImportResult:
    """Let rank 0 make a checkpoint of a folder; return the same figures on all ranks."""
    began, overwrite = time.monotonic(), overwrite or options.overwrite
    async with sharing("import without a copy", coordinator, options.timeout) as ranks, AsyncExitStack() as stack:

        async def opened() -> Place:
            _check_in_place(target, options, target_options)
            place = place_of(source, None, storage_options, options.retries)
            await stack.enter_async_context(place.opened)
            return place

        async def commit() -> bytes:
            made = await commit_in_place(place, values=values, overwrite=overwrite, user=options.metadata)
            return made.encode()

        place = await ranks.agreed(opened(), lambda place: f"{place.path}, {values=}, {overwrite=}")
        made = Imported.decode(await ranks.led("import", commit), 0)
    return ImportResult(place.path, made.operation, made.tensors, made.values, 0, time.monotonic() - began)


def _check_in_place(target: Path | None, options: SaveOptions, target_options: Mapping[str, Any] | None) -> None:
    """Raise InputError for arguments that need a copy."""
    if target is not None:
        raise InputError(
            f"target={shown(str(target))!r} is for a copy: with copy=False the source's folder is the checkpoint"
        )
    if options.codecs:
        raise InputError("options has codecs=, which change bytes: they need a copy; leave them out, or pass a target")
    if options.storage_options or target_options:
        raise InputError("target_options= are for a target, and copy=False has none: pass storage_options=")
