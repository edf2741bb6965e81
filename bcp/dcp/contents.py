"""A checkpoint of bcp, as torch.distributed.checkpoint (DCP) wants to see it: metadata, boxes and values."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from bcp.backends.place import Place
from bcp.dcp.names import Names
from bcp.dcp.saving import NAMES
from bcp.dcp.shards import FRAMEWORK
from bcp.errors import DtypeMismatchError
from bcp.format.metadata import METADATA_KEY, decode_metadata
from bcp.options import LoadOptions
from bcp.pipeline import unwrap_stage_errors
from bcp.plan.box import Box
from bcp.plan.read.renamed import tied_names
from bcp.plan.shards import KINDS, OPAQUE_KINDS, TensorTable
from bcp.protocols import ObjectKey
from bcp.read.boxes import fill_boxes
from bcp.read.objects import values_of
from bcp.read.opening import read_metadata
from bcp.read.replaced import say_if_replaced
from bcp.read.source import Source
from bcp.runtime.device import Caller
from bcp.runtime.threads import in_thread, in_thread_gc_paused, with_thread_setup
from bcp.stages.load import require_codecs

__all__ = ["Contents", "opened", "packed", "read"]


@dataclass(frozen=True, slots=True)
class Contents:
    """An open checkpoint, by the names of DCP.

    Attributes:
        source: the checkpoint.
        names: the way from its names to those of DCP.
        tensors: rows of the layout's tensors.
        values: rows of the layout's objects.
        keys: kinds and names of all of these.
    """

    source: Source
    names: Names
    tensors: Mapping[str, int]
    values: Mapping[str, int]
    keys: Mapping[str, ObjectKey]

    def metadata(self) -> Metadata:
        """Describe every tensor as one chunk: any box of it can be read, whoever has saved which part.

        Raises DtypeMismatchError for a tensor of a dtype that this torch does not know.
        """
        table = self.source.metadata.layout.tensors
        described: dict[str, STORAGE_TYPES] = {fqn: _described(table, row) for fqn, row in self.tensors.items()}
        described |= {fqn: BytesStorageMetadata() for fqn in self.values}
        if self.names.paths is None:
            return Metadata(described)
        return Metadata(described, planner_data={fqn: self.names.path(key) for fqn, key in self.keys.items()})


def _described(table: TensorTable, row: int) -> TensorStorageMetadata:
    meta = table[row]
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise DtypeMismatchError(
            f"{meta.kind}: {meta.fqn} is {meta.dtype!r} in the checkpoint, which torch {torch.__version__} does not "
            "know; load it with the torch that saved it"
        )
    size = torch.Size(meta.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])


async def opened(place: Place, options: LoadOptions) -> Contents:
    """Read the table of contents, and the record of names if DCP has written the checkpoint.

    Raises:
        NotACheckpointError: there is no checkpoint; the message says what is there.
        UncommittedError: there are files of a save that never committed.
        CorruptError: the table of contents, or the receipt with the names, is damaged.
        MissingCodecError: the options lack a codec that the checkpoint needs.
        StorageError: storage failed.

    """
    async with place.opened:
        data = await read_metadata(place.backend, place.path)
        metadata = await in_thread_gc_paused(decode_metadata, data, f"{place.path}/{METADATA_KEY}")
        source = Source.of(place.backend, place.path, metadata, options)
        async with say_if_replaced(source):
            require_codecs(metadata.commit.codecs, options.codecs)
            with unwrap_stage_errors():
                names = await _names(source)
    return await in_thread_gc_paused(_contents, source, names)


async def _names(source: Source) -> Names:
    """Return the way from names of the checkpoint to those of DCP: the record of a writer, or the usual way."""
    commit = source.metadata.commit
    if commit.framework != FRAMEWORK or source.metadata.foreign is not None:
        return Names()
    record = (await source.read_receipts([0]))[0].objects.get(NAMES)
    return Names() if record is None else Names.decode(record, commit.receipt_key(0))


def _contents(source: Source, names: Names) -> Contents:
    """Give every tensor and value its name in DCP; entries of a tied parameter get one for each of its names."""
    layout = source.metadata.layout
    kinds = [KINDS[code] for code in layout.tensors.kind.tolist()]
    tensors = {key: row for row, key in enumerate(zip(kinds, layout.tensors.fqn, strict=True))}
    values = {key: row for row, key in enumerate(layout.objects) if key[0] not in OPAQUE_KINDS}
    for (kind, name), others in tied_names(layout).items():
        for rows in (tensors, values):
            if (kind, name) in rows:
                rows.update({(kind, other): rows[kind, name] for other in others if (kind, other) not in rows})
    keys = {fqn: key for key in (*tensors, *values) if (fqn := names.in_dcp(key)) is not None}
    in_tensors = {fqn: tensors[key] for fqn, key in keys.items() if key in tensors}
    in_values = {fqn: values[key] for fqn, key in keys.items() if key in values}
    return Contents(source, names, in_tensors, in_values, keys)


async def read(
    place: Place,
    contents: Contents,
    boxes: Sequence[tuple[str, Box]],
    targets: Sequence[torch.Tensor],
    values: Sequence[str],
    caller: Caller,
) -> dict[str, Any]:
    """Fill tensors with boxes of the checkpoint; return values by name.

    Args:
        place: of the checkpoint, opened anew.
        contents: of the checkpoint.
        boxes: names of tensors in DCP, and blocks of these.
        targets: a tensor for each box, of its shape; dtypes are converted.
        values: names of values in DCP.
        caller: whose queued device work may still use the targets.

    Raises:
        CorruptError: a file or receipt is missing or damaged.
        CheckpointError: a value can only be read with ``allow_pickle=True``.
        StorageError: storage failed.

    """
    source = contents.source.through(place.backend)
    layout = source.metadata.layout
    with with_thread_setup(caller.enter):
        async with place.opened, say_if_replaced(source):
            await in_thread(caller.wait)
            if boxes:
                await fill_boxes(source, [(contents.tensors[fqn], box) for fqn, box in boxes], targets)
            rows = {layout.objects[contents.values[fqn]]: contents.values[fqn] for fqn in values}
            with unwrap_stage_errors():
                await source.read_receipts({int(layout.object_rank[row]) for row in rows.values()})
            found = await in_thread_gc_paused(values_of, source, rows)
    return {fqn: found[layout.objects[contents.values[fqn]]] for fqn in values}


def packed(value: object) -> io.BytesIO:
    """Return a value as the bytes that DCP's planners take: made here, so that no byte of storage is unpickled."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
