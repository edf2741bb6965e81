"""Edit a checkpoint in place: rename, drop, cast and add tensors. The metadata change in one step."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from bcp import _save as saving
from bcp._deletion import Committed, delete_dropped, swept
from bcp._job import SaveJob
from bcp._log import log
from bcp._save.samples import ReplicaRows
from bcp._text import shown
from bcp._workflow import write_parts
from bcp.backends.place import Path, Place, place_of
from bcp.coordinators.local import SoloCoordinator
from bcp.errors import CorruptError, InputError, StorageError
from bcp.format.layout_file import encode_layout
from bcp.format.metadata import METADATA_KEY, Commit, Metadata, decode_metadata, encode_metadata, receipt_key
from bcp.format.receipt import Receipt, encode_receipt, receipt_digest
from bcp.options import LoadOptions, SaveOptions
from bcp.pipeline import unwrap_stage_errors
from bcp.plan.edited import dropped_files, edited
from bcp.plan.layout import Layout, resolve
from bcp.plan.read.renames import Rename
from bcp.plan.shards import KINDS
from bcp.plan.write import WorldPlan, plan_save
from bcp.plan.write.files import data_files
from bcp.protocols import LocalShards, ObjectKey, Version
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.opening import read_metadata
from bcp.read.replaced import say_if_replaced
from bcp.read.source import Source
from bcp.runtime.device import Caller
from bcp.runtime.threads import in_thread_gc_paused
from bcp.stages.load import require_codecs
from bcp.telemetry.watch import Watch
from bcp.tools.calls import Progress, called, ignore_progress
from bcp.tools.edits import Changes, Wishes, changes_of, check_name
from bcp.tools.parts import KnownShards, Origin, Origins, shards_of

__all__ = ["EditResult", "aedit", "edit"]


@dataclass(frozen=True, slots=True)
class EditResult:
    """The outcome of :func:`bcp.tools.edit`.

    Attributes:
        path: of the checkpoint, absolute.
        operation: id of the edit, which is the checkpoint's from now on; "" for a dry run.
        renamed: number of tensors of the model with another name.
        dropped: names of tensors that were left out, as in ``"model: head.weight"``.
        cast: number of tensors with another dtype.
        added: number of new tensors.
        others: number of values and opaque objects that were left out.
        nbytes: bytes of data that were written.
        freed_nbytes: bytes of data files that were deleted: those in which nothing was left.
        seconds: how long it took.
    """

    path: str
    operation: str
    renamed: int
    dropped: tuple[str, ...]
    cast: int
    added: int
    others: int
    nbytes: int
    freed_nbytes: int
    seconds: float


def edit(
    path: Path,
    *,
    rename: Rename = None,
    drop: Sequence[str] = (),
    cast: Mapping[str, torch.dtype] | None = None,
    add: Path | Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, Any] | None = None,
    role: str | None = None,
    dry_run: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = ignore_progress,
) -> EditResult:
    """Rename, drop, cast and add tensors of a checkpoint, in place.

    New names and dropped tensors need no byte of data: the metadata are written anew over the same files. Tensors that
    are cast or added go into one more file. The metadata are replaced in one step, so a reader sees the checkpoint
    before the edit or after it. An edit that fails or is killed changes nothing.

    Patterns and names are those before the edit. A pattern is one of the shell for names of the model, as ``"*.bias"``.
    ``"optimizer:*"`` is one for another kind.

    An edited checkpoint has version 2 of the format, which older versions of bcp refuse.

    Args:
        path: the checkpoint, as for :class:`bcp.Checkpoint`.
        rename: new names of tensors of the model, in any form of ``LoadOptions(rename=...)`` that moves them whole. The
            optimizer's states follow.
        drop: patterns of what to leave out. States of dropped parameters go with them. ``"dataloader:*"`` and
            ``"extra_states:*"`` drop the objects of all ranks. Files in which nothing is left are deleted.
        cast: dtypes by pattern. Only tensors of numbers with a point are cast, and no 0-d states of the optimizer.
        add: new tensors of the model, by name; or a checkpoint or file, as for :class:`bcp.Checkpoint`, of which all
            tensors of the model are added.
        metadata: facts to add to :attr:`bcp.Checkpoint.user_metadata`, or to replace there; a value None removes one.
        role: the role of the checkpoint below the path, if it was saved with one.
        dry_run: say what would change, and change nothing.
        options: codecs of the checkpoint, for instance.
        storage_options: for the file systems of URLs.
        progress: called with the bytes that are written so far, and with all bytes to write.

    Returns:
        What has changed.

    Raises:
        InputError: nothing would change; a name or pattern fits nothing; a name is taken; or the checkpoint was written
            by another library: :func:`bcp.tools.import_files` makes one of bcp. Nothing is written.
        NotACheckpointError: there is no checkpoint.
        MissingCodecError: the checkpoint has codecs that ``options`` lack.
        CorruptError: a tensor to cast, or a value to rename, is damaged. Nothing has changed.
        ExistsError: another save or edit has committed meanwhile. Its checkpoint is untouched.
        StorageError: storage failed. The message says whether the edit may be committed.

    Example:
        >>> import torch
        >>> _ = bcp.save("ckpt/edited", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
        >>> result = bcp.tools.edit("ckpt/edited", rename={"weight": "kernel"}, drop=["bias"])
        >>> bcp.Checkpoint("ckpt/edited").names()
        ['kernel']

    """
    return called(
        lambda: aedit(
            path,
            rename=rename,
            drop=drop,
            cast=cast,
            add=add,
            metadata=metadata,
            role=role,
            dry_run=dry_run,
            options=options,
            storage_options=storage_options,
            progress=progress,
        ),
        f"edit {shown(str(path))}",
    )


async def aedit(
    path: Path,
    *,
    rename: Rename = None,
    drop: Sequence[str] = (),
    cast: Mapping[str, torch.dtype] | None = None,
    add: Path | Mapping[str, torch.Tensor] | None = None,
    metadata: Mapping[str, Any] | None = None,
    role: str | None = None,
    dry_run: bool = False,
    options: SaveOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress = ignore_progress,
) -> EditResult:
    """Do the same as :func:`edit` from a coroutine."""
    began, place = time.monotonic(), place_of(path, role, storage_options, cold="run")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(place.opened)
        added = await _added(add, storage_options, stack)
        wishes = Wishes(rename, drop, {} if cast is None else cast, added)
        editing = await _opened(place, options or SaveOptions(), progress)
        changes = await in_thread_gc_paused(changes_of, editing.source, wishes)
        user = _user(editing.metadata.commit, metadata)
        if changes.is_none and user == editing.metadata.commit.user:
            raise InputError(
                f"{place.path}: nothing would change: no name fits, or names, dtypes and facts are those already; pass "
                "another rename, drop, cast, add or metadata"
            )
        async with say_if_replaced(editing.source):
            done = await editing.planned(changes) if dry_run else await editing.run(changes, user)
    return EditResult(
        place.path,
        done.operation,
        changes.renamed,
        tuple(changes.dropped),
        changes.cast,
        len(added),
        changes.others,
        done.nbytes,
        done.freed_nbytes,
        time.monotonic() - began,
    )


async def _added(
    add: Path | Mapping[str, torch.Tensor] | None, storage_options: Mapping[str, Any] | None, stack: AsyncExitStack
) -> dict[str, Origin]:
    """Return the tensors to add, by name. Raises InputError for one that is no plain tensor."""
    if add is None:
        return {}
    if not isinstance(add, Mapping):
        ckpt = await stack.enter_async_context(AsyncCheckpoint(add, storage_options=storage_options))
        tensors = ckpt.metadata.layout.tensors
        rows = [row for row, kind in enumerate(tensors.kind.tolist()) if KINDS[kind] == "model"]
        return {tensors.fqn[row]: Origin(ckpt.source, resolve(ckpt.metadata.layout, row)) for row in rows}
    for name, tensor in add.items():
        check_name("add", name)
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_meta:
            words = f"a {type(tensor).__name__}" if not is_plain else "quantized" if tensor.is_quantized else "on meta"
            raise InputError(f"add has {name!r}, {words}; pass dense tensors of torch with data by their names")
    return {name: Origin(tensor=tensor.detach().cpu().contiguous()) for name, tensor in add.items()}


def _user(commit: Commit, metadata: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the caller's facts after the edit; SaveOptions checks them."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InputError(f"metadata={metadata!r}: pass a dict of facts, as {{'git': '4f1c9e2'}}")
    whole = {**commit.user, **(metadata or {})}
    return SaveOptions(metadata={name: value for name, value in whole.items() if value is not None}).metadata


@dataclass(frozen=True, slots=True)
class _Done:
    """What an edit has written."""

    operation: str
    nbytes: int
    freed_nbytes: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """What an edit writes.

    Attributes:
        shards: the tensors that are written anew.
        division: their places in the files of the one writer.
        layout: of the checkpoint after the edit.
    """

    shards: LocalShards
    division: WorldPlan
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Editing:
    """An edit of an open checkpoint.

    Attributes:
        place: of the checkpoint.
        version: of the metadata that the edit replaces.
        data: these metadata as they are stored.
        source: the checkpoint before the edit.
        options: how to write.
        progress: told after each part.
    """

    place: Place
    version: Version
    data: bytes
    source: Source
    options: SaveOptions
    progress: Progress

    @property
    def metadata(self) -> Metadata:
        """The table of contents before the edit."""
        return self.source.metadata

    async def planned(self, changes: Changes) -> _Done:
        """Say what the edit would write and delete."""
        plan = await in_thread_gc_paused(self._plan, changes)
        return _Done("", int(plan.shards.table.nbytes.sum()), sum(self._freed(plan.layout).values()))

    async def run(self, changes: Changes, user: Mapping[str, Any]) -> _Done:
        """Write what is new, put the metadata, and delete the files in which nothing is left."""
        values = await self._values(changes)
        plan = await in_thread_gc_paused(self._plan, changes)
        layout_bytes = await in_thread_gc_paused(encode_layout, plan.layout)  # refuses what no reader would accept
        operation, commit = secrets.token_hex(8), self.metadata.commit
        nbytes = int(plan.shards.table.nbytes.sum())
        origins = Origins(changes.origins, self.progress, nbytes)
        job = self._job(plan.shards, origins.options(self.options))
        with saving.only_save_to(job) as refusal:
            if refusal is not None:
                raise refusal
            async with saving.undone_on_error(job) as undo:
                commit = replace(commit, operation=operation, user=user, **self._writers(commit))
                written: list[str] = []
                if plan.layout.world_size > self.metadata.layout.world_size:
                    digest, written = await self._write(job, plan, operation, values, undo)
                    commit = replace(commit, receipts=commit.receipts + digest, writers=[*commit.writers, operation])
                else:
                    undo.begin(operation, ())
                version = await self._put(encode_metadata(layout_bytes, commit), undo)
                await self._check_place(operation, written, version)
        freed = self._freed(plan.layout)
        gone: Sequence[str] = ()
        with swept(self.place.path, operation):
            gone = await delete_dropped(self.place.backend, list(freed), by=operation, policy=self.options.retries)
        return _Done(operation, nbytes, sum(freed[key] for key in gone))

    def _writers(self, commit: Commit) -> dict[str, Any]:
        """Return the writers of the checkpoint before the edit, as fields of its commit."""
        ranks = self.metadata.world_size
        return {"ranks": ranks, "writers": commit.writers or [commit.operation] * ranks}

    async def _values(self, changes: Changes) -> dict[ObjectKey, str]:
        """Return the texts of the values with other names, by these names."""
        layout = self.metadata.layout
        rows = {name: row for row, name in enumerate(layout.objects) if name in changes.values}
        with unwrap_stage_errors():
            await self.source.read_receipts({int(layout.object_rank[row]) for row in rows.values()})
        texts = {name: self.source.value(row) for name, row in rows.items()}
        if lacking := next((name for name, text in texts.items() if text is None), None):
            raise CorruptError(
                f"the receipt of rank {layout.object_rank[rows[lacking]]} lacks the value of {': '.join(lacking)}; "
                "restore the receipt"
            )
        return {changes.values[name]: text or "" for name, text in texts.items()}

    def _plan(self, changes: Changes) -> _Plan:
        """Divide the new tensors, and make the layout after the edit."""
        shards = shards_of(changes.metas, {})
        division = plan_save([shards.table], block_bytes=saving.BLOCK_BYTES)
        new = division.layout if changes.metas else None
        return _Plan(shards, division, edited(self.metadata.layout, changes.kept, new, changes.values.values()))

    def _freed(self, layout: Layout) -> dict[str, int]:
        """Return the data files in which nothing is left, with their bytes."""
        old = self.metadata.layout
        columns = (old.file_rank.tolist(), old.file_kind.tolist(), old.file_nbytes.tolist())
        sizes = {(rank, kind): nbytes for rank, kind, nbytes in zip(*columns, strict=True)}
        return {
            self.metadata.commit.data_key(kind, rank): sizes.get((rank, kind), 0)
            for rank, kind in sorted(dropped_files(old, layout))
        }

    async def _write(
        self, job: SaveJob, plan: _Plan, operation: str, values: Mapping[ObjectKey, str], undo: saving.CleanUp
    ) -> tuple[bytes, list[str]]:
        """Write the data files and the receipt of the edit; return the digest of the receipt, and all their keys."""
        writer, options = self.metadata.layout.world_size, job.options
        with saving.Snapshot(job) as snapshot:
            held = await in_thread_gc_paused(snapshot.take_stock)
            own = await in_thread_gc_paused(_share, plan, writer, options.part_bytes)
            items = await in_thread_gc_paused(saving.write_items, held, own, operation, writer, options)
            undo.begin(operation, items)
            async with saving.not_replaced(job.backend, job.path, operation, self.version):
                with unwrap_stage_errors():
                    stored = await write_parts(job, items, snapshot) if items else []
                receipt = saving.make_receipt(items, stored, values, operation, writer, options)
                digest = await self._put_receipt(receipt)
                written = [*dict.fromkeys(item.key for item in items), receipt_key(writer, operation)]
                if gone := await self._gone(written):
                    raise StorageError(f"{gone} Edit again")
        return digest, written

    async def _put_receipt(self, receipt: Receipt) -> bytes:
        data = await in_thread_gc_paused(encode_receipt, receipt)
        await self.place.backend.put(receipt_key(receipt.rank, receipt.operation), data)
        return receipt_digest(data)

    async def _gone(self, written: Sequence[str]) -> str:
        """Say which file of the edit is not in storage; "" if all are there."""
        for key in written:
            try:  # a list may be older than the file
                await self.place.backend.read_into(key, 0, memoryview(bytearray(1)))
            except FileNotFoundError:
                return (
                    f"{self.place.path}: {key} disappeared during the edit that has written it: `bcp gc --now`, or a "
                    "copy or removal of the checkpoint, has deleted it."
                )
        return ""

    async def _check_place(self, operation: str, written: Sequence[str], version: Version) -> None:
        """Take the commit back if files of the edit are gone: somebody may have deleted them just before it."""
        backend = self.place.backend
        try:
            gone = await self._gone(written)
        except StorageError as error:  # storage has carried the commit out before
            log.warning("an edit was not looked at again", path=self.place.path, operation=operation, error=repr(error))
            return
        if gone and not await saving.put_back(backend, Committed(self.data), version):
            raise StorageError(f"{gone} The checkpoint is as it was before: edit again")

    async def _put(self, data: bytes, undo: saving.CleanUp) -> Version:
        """Replace the metadata, if they are still those that were edited; return their version."""
        backend, version = self.place.backend, None
        undo.send(self.metadata.commit.operation)
        try:
            version = await backend.put_if(METADATA_KEY, data, self.version)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the request may have been carried out
            version = await undo.settle(backend, self.version, error)
        if version is None:
            version = await undo.settle(backend, self.version)
        return version

    def _job(self, shards: LocalShards, options: SaveOptions) -> SaveJob:
        """Describe the writing, as that of a save on one rank."""
        return SaveJob(
            path=self.place.path,
            place=self.place.path,
            backend=self.place.backend,
            opened=self.place.opened,
            states={},
            planner=lambda: KnownShards("edit", shards),
            rank=0,
            world_size=1,
            operation=SoloCoordinator().begin("", options.timeout),
            watch=Watch("prepare", self.place.path),  # "prepare" has no sinks: an edit is no save
            caller=Caller.here(),
            options=options,
        )


async def _opened(place: Place, options: SaveOptions, progress: Progress) -> _Editing:
    """Open the checkpoint that is to be edited."""
    version = await place.backend.version(METADATA_KEY)  # first: a commit after it makes the edit fail
    data = await read_metadata(place.backend, place.path)
    metadata = await in_thread_gc_paused(decode_metadata, data, f"{place.path}/{METADATA_KEY}")
    if metadata.foreign is not None or version is None:
        raise InputError(
            f"{place.path} has the files of another library, which an edit leaves alone: bcp.tools.import_files with "
            "a target (bcp import SOURCE TARGET) makes a checkpoint to edit"
        )
    commit = metadata.commit
    known = require_codecs(commit.codecs, options.codecs)
    if metadata.layout.block_bytes != saving.BLOCK_BYTES:
        raise InputError(
            f"{place.path} has blocks of {metadata.layout.block_bytes} bytes, and bcp writes {saving.BLOCK_BYTES}: "
            "load it, and save it again"
        )
    if commit.refers:
        raise InputError(
            f"{place.path} has blocks in other steps of its run ({', '.join(map(str, commit.refers))}), and is not "
            "edited in place: copy it with `bcp cp`, which copies these blocks, and edit the copy"
        )
    codecs = [known[name] for name in commit.codecs]
    options = replace(options, overwrite=True, part_bytes=commit.part_bytes, codecs=codecs)
    source = Source.of(place.backend, place.path, metadata, LoadOptions(codecs=codecs))
    return _Editing(place, version, bytes(data), source, options, progress)


def _share(plan: _Plan, writer: int, part_bytes: int) -> saving.SavePlan:
    """Plan the files of the one writer that has all of the tensors."""
    table, own = plan.shards.table, plan.division.ranks[0]
    files = data_files(table, own.writes, rank=writer, part_bytes=part_bytes)
    return saving.SavePlan(b"", files, (), (), ReplicaRows.of(table, own.compared))
