"""Export to a Hugging Face folder, as ``save_pretrained`` writes it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar, Unpack

from bcp.backends.place import Path
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.facts import check_nbytes
from bcp.tools.exports.chosen import Choice, Chosen, DType, Rename, choose
from bcp.tools.exports.companions import checked_folder, companions_of, with_dtype
from bcp.tools.exports.exporting import ExportKeywords, Format, Plan, Source, arun, run
from bcp.tools.exports.last_files import SmallFiles
from bcp.tools.exports.result import ExportResult
from bcp.tools.exports.safetensors_file import check_storable, safetensors_file
from bcp.tools.exports.streamed import TargetFile
from bcp.tools.exports.target import folder_target

__all__ = ["aexport_hf", "best_name", "export_hf", "untied"]

T = TypeVar("T")
SHARD_BYTES = 5 << 30
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def export_hf(
    source: Source,
    target: Path,
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: DType = None,
    shard_bytes: int = SHARD_BYTES,
    kind: str = "model",
    glob: str = "*",
    rename: Rename = None,
    **keywords: Unpack[ExportKeywords],
) -> ExportResult:
    """Write the model of a checkpoint to a Hugging Face folder, in little memory.

    Use it to evaluate, serve or publish a model: ``from_pretrained`` of the folder has the weights of the checkpoint,
    bit by bit. No model is built, no rank has to hold all of it, and the job that saved it may have had any
    parallelism. Every block of the checkpoint is compared with its checksum.

    The folder gets ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on with
    ``model.safetensors.index.json``. The files beside the weights come after all weights, and the index last. After a
    failure, files that were written are deleted.

    A tied tensor is written once, under the name of the input embedding: ``save_pretrained`` does the same, and
    transformers ties the other names again. The metadata of the file have the other names. If ``glob=`` leaves out the
    name of the embedding, the tensor has another name.

    Args:
        source: a path, a URL, a backend, or a :class:`bcp.Checkpoint`.
        target: the folder: a path, a URL, or a backend.
        like: a folder with ``config.json``: it is copied, and so are tokenizer, generation settings, templates and code
            of the model (``.json``, ``.jinja``, ``.txt``, ``.model``, ``.tiktoken``, ``.py``), never weights. The copy
            of ``config.json`` names the dtype of the weights. ``storage_options`` are for a URL here, too. Rank 0 alone
            reads the folder.
        dtype: dtype of floating tensors in the folder, as in ``torch.bfloat16``; that of the checkpoint by default.
        shard_bytes: bytes of tensors in a file, at most; a larger tensor has a file of its own.
        kind: ``"model"`` or ``"optimizer"``.
        glob: pattern of the shell for names in the checkpoint.
        rename: new names by old ones, or a function from old to new names, where transformers uses other names.
        **keywords: those of all exports, :class:`ExportKeywords`: ``role``, ``overwrite``, ``budget_bytes``,
            ``progress``, ``options``, ``storage_options``, ``target_options`` and ``coordinator``.

    Raises:
        InputError: an argument cannot be used, or a dtype has no name in safetensors; nothing was written.
        FqnMismatchError: no tensor matches; nothing was written.
        ExistsError: the folder has such files, and ``overwrite`` is not set; nothing was written.
        MissingCodecError: the checkpoint needs codecs: pass ``options=bcp.LoadOptions(codecs=[...])``.
        CorruptError: a file of the checkpoint is missing or damaged.
        PeerError: another rank failed.
        StorageError: storage failed.

    Example:
        >>> _ = bcp.save("ckpt/to-hf", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
        >>> result = bcp.tools.export_hf("ckpt/to-hf", "ckpt/hf", dtype=torch.bfloat16, overwrite=True)
        >>> result.files, result.nbytes
        (('model.safetensors',), 20)

    """
    form = _format(target, Choice(kind, glob, dtype, rename), like, shard_bytes, keywords)
    return run(source, form, keywords)


async def aexport_hf(
    source: Source,
    target: Path,
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: DType = None,
    shard_bytes: int = SHARD_BYTES,
    kind: str = "model",
    glob: str = "*",
    rename: Rename = None,
    **keywords: Unpack[ExportKeywords],
) -> ExportResult:
    """Do the same as :func:`export_hf` from a coroutine; ``source`` may be an AsyncCheckpoint, too."""
    form = _format(target, Choice(kind, glob, dtype, rename), like, shard_bytes, keywords)
    return await arun(source, form, keywords)


def _format(
    target: Path,
    choice: Choice,
    like: str | os.PathLike[str] | None,
    shard_bytes: int,
    keywords: ExportKeywords,
) -> Format:
    """Return the format for one folder."""

    async def plan(ckpt: AsyncCheckpoint) -> Plan:
        check_nbytes("shard_bytes", shard_bytes)
        folder = checked_folder(like)
        tensors, others = untied(choose(ckpt, choice))
        check_storable(tensors)
        groups = _groups(tensors, shard_bytes)
        files = [
            safetensors_file(key, group, _notes(group, others))
            for key, group in zip(_names(len(groups)), groups, strict=True)
        ]

        async def last() -> SmallFiles:
            companions = with_dtype(await companions_of(folder, keywords.get("storage_options")), tensors)
            return companions if len(files) == 1 else [*companions, (INDEX, _index(files, groups))]

        return Plan(files, len(tensors), last)

    opened = folder_target(target, keywords.get("target_options"), lambda key: bool(WEIGHTS.fullmatch(key)))
    return Format("the Hugging Face folder", opened, plan)


# -- shards --------------------------------------------------------------------------------------------


def _groups(tensors: Sequence[Chosen], shard_bytes: int) -> list[list[Chosen]]:
    """Divide tensors among files of so many bytes, in order."""
    groups: list[list[Chosen]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if groups[-1] and nbytes + tensor.nbytes > shard_bytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(tensor)
        nbytes += tensor.nbytes
    return groups


def _names(count: int) -> list[str]:
    if count == 1:
        return [ONE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(files: Sequence[TargetFile], groups: Sequence[Sequence[Chosen]]) -> bytes:
    """Return the index: the file of each tensor."""
    places = {tensor.name: file.key for file, group in zip(files, groups, strict=True) for tensor in group}
    total = sum(tensor.nbytes for group in groups for tensor in group)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


# -- tied tensors --------------------------------------------------------------------------------------

HEADS = frozenset({"lm_head", "proj_out", "embed_out", "vocab_projector", "generator_lm_head", "head", "output"})
"""Segments in names of output layers. transformers ties these to the embedding, and finds them by the embedding."""


def untied(tensors: Sequence[Chosen]) -> tuple[list[Chosen], dict[str, str]]:
    """Keep one name of each tied tensor; also return the name that is kept for each of the others."""
    names: dict[int, list[Chosen]] = {}
    for tensor in tensors:
        names.setdefault(tensor.stored, []).append(tensor)
    kept = {stored: best_name(tied, lambda each: each.name) for stored, tied in names.items()}
    others = {each.name: kept[each.stored].name for each in tensors if each is not kept[each.stored]}
    return [each for each in tensors if each is kept[each.stored]], others


def _notes(tensors: Sequence[Chosen], others: Mapping[str, str]) -> dict[str, str]:
    """Return those of the other names that a file notes, by the names of its tensors."""
    own = {tensor.name for tensor in tensors}
    return {name: kept for name, kept in others.items() if kept in own}


def best_name(tied: Iterable[T], key: Callable[[T], str]) -> T:
    """Choose the tensor whose name ``from_pretrained`` looks for; ``key`` returns the name."""
    return min(tied, key=lambda each: (_rank(key(each)), key(each).count("."), key(each)))


def _rank(name: str) -> int:
    """Return how unlikely it is that transformers keeps a name: shared weights, embeddings, others, output layers."""
    segments = name.split(".")
    if "shared" in segments:
        return 0
    if HEADS.intersection(segments) or segments[-2:-1] == ["decoder"]:
        return 3
    return 1 if any("embed" in segment or segment in ("wte", "tok_embeddings") for segment in segments) else 2
