"""Export tensors to one safetensors file."""

from __future__ import annotations

import os
from typing import Unpack

from bcp.read.checkpoint import AsyncCheckpoint
from bcp.tools.exports.chosen import Choice, DType, Rename, choose
from bcp.tools.exports.exporting import ExportKeywords, Format, Plan, Source, arun, run
from bcp.tools.exports.result import ExportResult
from bcp.tools.exports.safetensors_file import check_storable, safetensors_file
from bcp.tools.exports.target import file_target, split_file

__all__ = ["aexport_safetensors", "export_safetensors"]


def export_safetensors(
    source: Source,
    target: str | os.PathLike[str],
    *,
    kind: str = "model",
    glob: str = "*",
    dtype: DType = None,
    rename: Rename = None,
    **keywords: Unpack[ExportKeywords],
) -> ExportResult:
    """Write tensors of a checkpoint to one safetensors file, in little memory.

    Use it for a tool that reads safetensors and no folders. Tensors have their global shapes, whatever the parallelism
    of the job that saved them. Every block of the checkpoint is compared with its checksum. The file appears whole or
    not at all.

    A tied tensor is written under each of its names: a safetensors file has no ties. Values that are not tensors are
    left out: a safetensors file has none.

    Args:
        source: a path, a URL, a backend, or a :class:`bcp.Checkpoint`.
        target: path or URL of the file.
        kind: ``"model"`` or ``"optimizer"``.
        glob: pattern of the shell for names in the checkpoint.
        dtype: dtype of floating tensors in the file, as in ``torch.bfloat16``; that of the checkpoint by default.
        rename: new names by old ones, or a function from old to new names.
        **keywords: those of all exports, :class:`ExportKeywords`: ``role``, ``overwrite``, ``budget_bytes``,
            ``progress``, ``options``, ``storage_options``, ``target_options`` and ``coordinator``.

    Raises:
        InputError: an argument cannot be used, or a dtype has no name in safetensors; nothing was written.
        FqnMismatchError: no tensor matches; nothing was written.
        ExistsError: the file is there, and ``overwrite`` is not set.
        MissingCodecError: the checkpoint needs codecs: pass ``options=bcp.LoadOptions(codecs=[...])``.
        CorruptError: a file of the checkpoint is missing or damaged.
        PeerError: another rank failed.
        StorageError: storage failed.

    Example:
        >>> _ = bcp.save("ckpt/single", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
        >>> result = bcp.tools.export_safetensors("ckpt/single", "ckpt/single.safetensors", overwrite=True)
        >>> result.files, result.tensors
        (('single.safetensors',), 2)

    """
    return run(source, _format(target, Choice(kind, glob, dtype, rename), keywords), keywords)


async def aexport_safetensors(
    source: Source,
    target: str | os.PathLike[str],
    *,
    kind: str = "model",
    glob: str = "*",
    dtype: DType = None,
    rename: Rename = None,
    **keywords: Unpack[ExportKeywords],
) -> ExportResult:
    """Do the same as :func:`export_safetensors` from a coroutine; ``source`` may be an AsyncCheckpoint, too."""
    return await arun(source, _format(target, Choice(kind, glob, dtype, rename), keywords), keywords)


def _format(target: str | os.PathLike[str], choice: Choice, keywords: ExportKeywords) -> Format:
    """Return the format for one file."""

    async def plan(ckpt: AsyncCheckpoint) -> Plan:
        tensors = choose(ckpt, choice)
        check_storable(tensors)
        return Plan([safetensors_file(split_file(target)[1], tensors)], len(tensors))

    return Format("safetensors", file_target(target, keywords.get("target_options")), plan)
