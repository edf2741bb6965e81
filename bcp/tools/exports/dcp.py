"""Export to a folder that ``torch.distributed.checkpoint`` reads."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bcp.backends.place import Path
from bcp.errors import InputError
from bcp.plan.box import Box, cut
from bcp.plan.read.renamed import tied_names
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.facts import check_nbytes
from bcp.stages.memcpy import torch_dtype
from bcp.tools.exports.chosen import Choice, Chosen, ChosenValue, DType, Rename, choose, values_of
from bcp.tools.exports.exporting import ExportKeywords, Format, Plan, Source, arun, run
from bcp.tools.exports.last_files import SmallFiles
from bcp.tools.exports.result import ExportResult
from bcp.tools.exports.streamed import TargetFile
from bcp.tools.exports.target import folder_target
from bcp.tools.exports.torch_archive import Stored, write_archive

__all__ = ["aexport_dcp", "export_dcp"]

KEYS = {"model": "model", "optimizer": "optim"}
FILE_BYTES = 5 << 30
CHUNK_BYTES = 64 << 20
"""Bytes of a chunk, at most. A reader of DCP takes a chunk whole into memory, even if it needs a part of it."""

MANY_CHUNKS = 20_000
"""Chunks are larger where there would be more of them: each takes some kilobytes of memory while files are laid out."""

METADATA, SUFFIX = ".metadata", ".distcp"


def export_dcp(
    source: Source,
    target: Path,
    *,
    kind: str | None = None,
    glob: str = "*",
    dtype: DType = None,
    rename: Rename = None,
    values: bool = True,
    keys: Mapping[str, str] = KEYS,
    file_bytes: int = FILE_BYTES,
    **keywords: Unpack[ExportKeywords],
) -> ExportResult:
    """Write a checkpoint to a folder that ``torch.distributed.checkpoint.load`` reads, in little memory.

    Use it for a job that resumes by DCP. It loads into any parallelism: plain tensors, FSDP2, tensor parallelism. Each
    tensor is cut along its dimensions into chunks of 64 MiB at most, so that ranks read little more than their parts.
    Chunks are larger from 1.3 TB of tensors on.
    Every block of the checkpoint is compared with its checksum. ``.metadata`` is written last. After a failure, files
    that were written are deleted.

    Names are those of ``{"model": ..., "optim": ...}``, with the state dicts of
    ``torch.distributed.checkpoint.state_dict`` under ``StateDictOptions(flatten_optimizer_state_dict=True)``:
    ``model.layers.0.weight``, ``optim.state.layers.0.weight.exp_avg``, ``optim.param_groups.layers.0.weight.lr``.

    Dataloaders and extra states are left out: :meth:`bcp.Checkpoint.object` reads them. bcp's own notes on how an
    optimizer keeps states are left out, too.

    Args:
        source: a path, a URL, a backend, or a :class:`bcp.Checkpoint`.
        target: the folder: a path, a URL, or a backend.
        kind: ``"model"`` or ``"optimizer"``; None for both.
        glob: pattern of the shell for names in the checkpoint.
        dtype: dtype of floating tensors in the folder, as in ``torch.bfloat16``; that of the checkpoint by default.
        rename: new names by old ones, or a function from old to new names; for tensors and values.
        values: whether the folder has values that are not tensors, such as learning rates.
        keys: the key of each kind in the state dict of DCP's caller; "" for a kind without one.
            ``{"model": "", "optimizer": "optimizer"}`` makes the names of torchtitan.
        file_bytes: bytes of tensors in a file, at most; a larger chunk has a file of its own.
        **keywords: those of all exports, :class:`ExportKeywords`: ``role``, ``overwrite``, ``budget_bytes``,
            ``progress``, ``options``, ``storage_options``, ``target_options`` and ``coordinator``.

    Raises:
        InputError: an argument cannot be used, or ``weights_only=True`` does not read a value; nothing was written.
        FqnMismatchError: no tensor matches; nothing was written.
        ExistsError: the folder has such files, and ``overwrite`` is not set; nothing was written.
        MissingCodecError: the checkpoint needs codecs: pass ``options=bcp.LoadOptions(codecs=[...])``.
        CorruptError: a file of the checkpoint is missing or damaged.
        PeerError: another rank failed.
        StorageError: storage failed.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> _ = bcp.save("ckpt/to-dcp", {"model": model}, overwrite=True)
        >>> bcp.tools.export_dcp("ckpt/to-dcp", "ckpt/dcp", overwrite=True).files
        ('__0_0.distcp', '.metadata')

    """
    form = _format(target, Choice(kind, glob, dtype, rename), keys, file_bytes, keywords, values=values)
    return run(source, form, keywords)


async def aexport_dcp(
    source: Source,
    target: Path,
    *,
    kind: str | None = None,
    glob: str = "*",
    dtype: DType = None,
    rename: Rename = None,
    values: bool = True,
    keys: Mapping[str, str] = KEYS,
    file_bytes: int = FILE_BYTES,
    **keywords: Unpack[ExportKeywords],
) -> ExportResult:
    """Do the same as :func:`export_dcp` from a coroutine; ``source`` may be an AsyncCheckpoint, too."""
    form = _format(target, Choice(kind, glob, dtype, rename), keys, file_bytes, keywords, values=values)
    return await arun(source, form, keywords)


def _format(
    target: Path,
    choice: Choice,
    keys: Mapping[str, str],
    file_bytes: int,
    keywords: ExportKeywords,
    *,
    values: bool,
) -> Format:
    """Return the format for one folder."""

    async def plan(ckpt: AsyncCheckpoint) -> Plan:
        _check(keys, file_bytes)
        tensors = choose(ckpt, choice)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        folder = _Folder(keys, file_bytes, max(CHUNK_BYTES, nbytes // MANY_CHUNKS))
        further = tied_names(ckpt.metadata.layout) if choice.rename is None else {}
        for value in await values_of(ckpt, choice) if values else []:
            for name in (value.name, *further.get((value.kind, value.name), ())):
                folder.value(replace(value, name=name))
        for tensor in tensors:
            for name in (tensor.name, *further.get((tensor.kind, tensor.saved), ())):
                folder.tensor(replace(tensor, name=name))

        async def last() -> SmallFiles:
            # readers of DCP take metadata as a pickle only; these bytes are made here, and bcp unpickles none
            return [(METADATA, pickle.dumps(folder.metadata(), protocol=4))]

        return Plan(folder.files, len(folder.places), last)

    opened = folder_target(target, keywords.get("target_options"), lambda key: key == METADATA or key.endswith(SUFFIX))
    return Format("the DCP folder", opened, plan)


def _check(keys: object, file_bytes: object) -> None:
    """Raise InputError for arguments that cannot be any."""
    if not isinstance(keys, Mapping) or not all(isinstance(key, str) for pair in keys.items() for key in pair):
        raise InputError(f"keys={keys!r}: pass a mapping such as {KEYS!r}")
    if unknown := sorted(set(keys) - set(KEYS)):
        raise InputError(f"keys has {unknown[0]!r}; its kinds are {' and '.join(map(repr, KEYS))}")
    check_nbytes("file_bytes", file_bytes)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A block of a tensor, and where its archive is."""

    box: Box
    place: _StorageInfo


@dataclass(slots=True)
class _Folder:
    """Data files that are laid out entry by entry, and what DCP has to know of them."""

    keys: Mapping[str, str]
    file_bytes: int
    chunk_bytes: int
    files: list[TargetFile] = field(default_factory=list)
    places: dict[int, list[_Chunk]] = field(default_factory=dict)  # by row of the tensor that has the data
    entries: dict[str, Any] = field(default_factory=dict)  # DCP's metadata of each entry
    storage: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of each entry, in the caller's state dict
    _filled: int = 0  # bytes of tensors in the last file

    def tensor(self, tensor: Chosen) -> None:
        """Add a tensor. A tied one gets the places of the other."""
        name, dtype = self._named(tensor.kind, tensor.name), torch_dtype(tensor.dtype)
        if tensor.stored not in self.places:
            blocks = [
                Stored(tensor.row, box, tensor.dtype, tensor.itemsize)
                for box in cut(tensor.box, max(self.chunk_bytes // tensor.itemsize, 1))
            ]
            self.places[tensor.stored] = [_Chunk(each.box, self._archived(each, each.nbytes)) for each in blocks]
        chunks = self.places[tensor.stored]
        sizes = [ChunkStorageMetadata(torch.Size(each.box.offsets), torch.Size(each.box.lengths)) for each in chunks]
        self.entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(tensor.shape), sizes)
        for number, chunk in enumerate(chunks):
            self.storage[MetadataIndex(name, chunk.box.offsets, number)] = chunk.place

    def value(self, value: ChosenValue) -> None:
        """Add a value."""
        name = self._named(value.kind, value.name)
        self.storage[MetadataIndex(name)] = self._archived(value.value, 0)
        self.entries[name] = BytesStorageMetadata()

    def metadata(self) -> Metadata:
        """Return what DCP calls its metadata."""
        return Metadata(dict(sorted(self.entries.items())), planner_data=self.paths, storage_data=self.storage)

    def _named(self, kind: str, name: str) -> str:
        """Take the name of an entry in the whole state dict. Raises InputError if another one has it."""
        key = self.keys.get(kind, KEYS[kind])
        path = (key, name) if key else (name,)
        full = ".".join(path)
        if full in self.paths:
            raise InputError(f"two entries get the name {full!r} in DCP; pass other keys=, or rename=")
        self.paths[full] = path
        return full

    def _archived(self, value: Any, nbytes: int) -> _StorageInfo:
        """Lay out the archive of a value, or of a block of so many bytes."""
        file = self._file(nbytes)
        start = write_archive(file, value)
        return _StorageInfo(file.key, start, file.nbytes - start)

    def _file(self, nbytes: int) -> TargetFile:
        """Return the file for an entry of so many bytes."""
        if not self.files or (self._filled and self._filled + nbytes > self.file_bytes):
            self.files.append(TargetFile(f"__{len(self.files)}_0{SUFFIX}"))
            self._filled = 0
        self._filled += nbytes
        return self.files[-1]
