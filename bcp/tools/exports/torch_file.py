"""Export to a file that ``torch.load`` reads."""

from __future__ import annotations

import os
from typing import Any, Unpack

from bcp.errors import InputError
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.tools.exports.chosen import Choice, Chosen, DType, Rename, choose, values_of
from bcp.tools.exports.exporting import ExportKeywords, Format, Plan, Source, arun, run
from bcp.tools.exports.result import ExportResult
from bcp.tools.exports.streamed import TargetFile
from bcp.tools.exports.target import file_target, split_file
from bcp.tools.exports.torch_archive import Stored, write_archive

__all__ = ["aexport_torch", "export_torch"]


def export_torch(
    source: Source,
    target: str | os.PathLike[str],
    *,
    kind: str | None = None,
    glob: str = "*",
    dtype: DType = None,
    rename: Rename = None,
    values: bool = True,
    **keywords: Unpack[ExportKeywords],
) -> ExportResult:
    """Write a checkpoint to one file that ``torch.load(weights_only=True)`` reads, in little memory.

    Use it for a script that expects a file of ``torch.save``. The bytes are streamed: no tensor has to fit into memory,
    and a file may be larger than 4 GiB. ``torch.load(mmap=True)`` maps it. Every block of the checkpoint is compared
    with its checksum. The file appears whole or not at all.

    The file has a dict for each kind, ``{"model": {...}, "optimizer": {...}}``. With ``kind=``, it has that dict alone.
    Names are flat and as in the checkpoint: ``layers.0.weight`` for a model, ``state.layers.0.weight.exp_avg`` and
    ``param_groups.layers.0.weight.lr`` for an optimizer. ``torch.distributed.checkpoint.state_dict`` takes these with
    ``StateDictOptions(flatten_optimizer_state_dict=True)``. Tied tensors share a storage, as in a model.

    Dataloaders and extra states are left out: :meth:`bcp.Checkpoint.object` reads them. bcp's own notes on how an
    optimizer keeps states are left out, too.

    Args:
        source: a path, a URL, a backend, or a :class:`bcp.Checkpoint`.
        target: path or URL of the file.
        kind: ``"model"`` or ``"optimizer"``; None for both.
        glob: pattern of the shell for names in the checkpoint.
        dtype: dtype of floating tensors in the file, as in ``torch.bfloat16``; that of the checkpoint by default.
        rename: new names by old ones, or a function from old to new names; for tensors and values.
        values: whether the file has values that are not tensors, such as learning rates.
        **keywords: those of all exports, :class:`ExportKeywords`: ``role``, ``overwrite``, ``budget_bytes``,
            ``progress``, ``options``, ``storage_options``, ``target_options`` and ``coordinator``.

    Raises:
        InputError: an argument cannot be used, or ``weights_only=True`` does not read a value; nothing was written.
        FqnMismatchError: no tensor matches; nothing was written.
        ExistsError: the file is there, and ``overwrite`` is not set.
        MissingCodecError: the checkpoint needs codecs: pass ``options=bcp.LoadOptions(codecs=[...])``.
        CorruptError: a file of the checkpoint is missing or damaged.
        PeerError: another rank failed.
        StorageError: storage failed.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> _ = bcp.save("ckpt/torch-file", {"model": model}, overwrite=True)
        >>> _ = bcp.tools.export_torch("ckpt/torch-file", "ckpt/model.pt", kind="model", overwrite=True)
        >>> model.load_state_dict(torch.load("ckpt/model.pt", mmap=True))
        <All keys matched successfully>

    """
    form = _format(target, Choice(kind, glob, dtype, rename), keywords, values=values)
    return run(source, form, keywords)


async def aexport_torch(
    source: Source,
    target: str | os.PathLike[str],
    *,
    kind: str | None = None,
    glob: str = "*",
    dtype: DType = None,
    rename: Rename = None,
    values: bool = True,
    **keywords: Unpack[ExportKeywords],
) -> ExportResult:
    """Do the same as :func:`export_torch` from a coroutine; ``source`` may be an AsyncCheckpoint, too."""
    form = _format(target, Choice(kind, glob, dtype, rename), keywords, values=values)
    return await arun(source, form, keywords)


def _format(target: str | os.PathLike[str], choice: Choice, keywords: ExportKeywords, *, values: bool) -> Format:
    """Return the format for one file."""

    async def plan(ckpt: AsyncCheckpoint) -> Plan:
        tensors = choose(ckpt, choice)
        content = _state_dicts(tensors)
        for each in await values_of(ckpt, choice) if values else []:
            entries = content.setdefault(each.kind, {})
            if each.name in entries:
                raise InputError(
                    f"{each.kind} has a tensor and a value under the name {each.name!r}; pass another rename="
                )
            entries[each.name] = each.value
        file = TargetFile(split_file(target)[1])
        write_archive(file, content if choice.kind is None else content[choice.kind])
        return Plan([file], len({tensor.stored for tensor in tensors}))

    return Format("a file of torch.save", file_target(target, keywords.get("target_options")), plan)


def _state_dicts(tensors: list[Chosen]) -> dict[str, dict[str, Any]]:
    """Return state dicts by kind with stand-ins for tensors; tied ones share theirs."""
    content: dict[str, dict[str, Any]] = {kind: {} for kind in sorted({tensor.kind for tensor in tensors})}
    known: dict[int, Stored] = {}
    for tensor in tensors:
        stored = Stored(tensor.row, tensor.box, tensor.dtype, tensor.itemsize)
        content[tensor.kind][tensor.name] = known.setdefault(tensor.stored, stored)
    return content
