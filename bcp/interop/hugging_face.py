"""Folders of Hugging Face by reference: one safetensors file, or shards and an index; older ones have torch's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import Catalogue
from bcp.interop.reading import Opened
from bcp.interop.safetensors_files import SUFFIX, pieces_of_files
from bcp.interop.torch_file import torch_file

__all__ = ["hugging_face_folder", "is_hugging_face"]

CONFIG = "config.json"
INDEX_SUFFIX = ".safetensors.index.json"
BIN = "pytorch_model.bin"
BIN_INDEX_SUFFIX = ".bin.index.json"
NAME = "hugging-face"
SHOWN = 5


async def hugging_face_folder(opened: Opened) -> Catalogue:
    """List the tensors of a folder: of the shards of its index, or of all safetensors files directly in the folder.

    A folder without safetensors has the same in files of ``torch.save``.

    Raises:
        CorruptError: a shard is missing or damaged, index and shards differ, or a tensor is in two files.
        CheckpointError: the model is quantized, or a dtype is unknown.

    """
    here = [key for key in opened.sizes if "/" not in key]
    await _check_config(opened)
    if not any(key.endswith((SUFFIX, INDEX_SUFFIX)) for key in here):
        return await _of_torch_files(opened, here)
    index = _only([key for key in here if key.endswith(INDEX_SUFFIX)], opened.path)
    if index is None:
        pieces = await pieces_of_files(opened, [key for key in here if key.endswith(SUFFIX)])
        return Catalogue("safetensors", pieces, opened.sizes)
    weights = await _weight_map(opened, index)
    pieces = await pieces_of_files(opened, sorted(set(weights.values())))
    _compare(weights, {piece.name: piece.key for piece in pieces}, f"{opened.path}/{index}")
    return Catalogue(NAME, pieces, opened.sizes)


async def _of_torch_files(opened: Opened, here: Sequence[str]) -> Catalogue:
    """List the tensors of ``pytorch_model.bin``, or of the shards of its index."""
    index = _only([key for key in here if key.endswith(BIN_INDEX_SUFFIX)], opened.path)
    weights = {} if index is None else await _weight_map(opened, index)
    parts = {key: await torch_file(opened, key) for key in sorted(set(weights.values())) or [BIN]}
    found = {name: key for key, part in parts.items() for _, name in part.names}
    if index is not None:
        _compare(weights, found, f"{opened.path}/{index}")
    for key, part in parts.items():
        for _, name in part.names:
            if found[name] != key:
                raise CorruptError(
                    f"{opened.path} has the tensor {name!r} in {key} and in {found[name]}; get the shards again"
                )
    return Catalogue(
        NAME,
        [piece for part in parts.values() for piece in part.pieces],
        opened.sizes,
        {name: text for part in parts.values() for name, text in part.values.items()},
        {name: other for part in parts.values() for name, other in part.tied.items()},
    )


def is_hugging_face(names: Iterable[str]) -> bool:
    """Whether a folder with these names directly in it is read here."""
    return any(name == BIN or name.endswith((SUFFIX, INDEX_SUFFIX, BIN_INDEX_SUFFIX)) for name in names)


def _only(indices: Sequence[str], path: str) -> str | None:
    """Return the index, if there is one. Raises CheckpointError if there are several."""
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} has the indices of {len(indices)} models: {', '.join(indices)}; pass a folder with one of them, "
            "or a file"
        )
    return indices[0] if indices else None


async def _check_config(opened: Opened) -> None:
    """Refuse a quantized model: its tensors are codes and scales, and no weights."""
    if CONFIG not in opened.sizes:
        return
    config = await opened.read_json(CONFIG)
    quantized = config.get("quantization_config") if isinstance(config, dict) else None
    if quantized:
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else "unknown"
        raise CheckpointError(
            f"{opened.path} is quantized ({CONFIG} says {str(method)[:40]!r}): its tensors are codes and scales, which "
            "bcp does not turn into weights; load it with transformers, dequantize it, and save it anew"
        )


async def _weight_map(opened: Opened, index: str) -> dict[str, str]:
    """Return the file of each tensor; all files are there."""
    content: Any = await opened.read_json(index)
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise CorruptError(f"{opened.path}/{index} has no weight_map from tensors to files; get it again")
    for file in set(weights.values()):
        opened.size(file, index)
    return weights


def _compare(weights: Mapping[str, str], found: Mapping[str, str], where: str) -> None:
    """Compare the index with the tensors of the shards."""
    wrong = sorted(name for name in weights.keys() | found.keys() if weights.get(name) != found.get(name))
    if wrong:
        told = [
            f"{name!r} in {weights.get(name, 'no file')}, and it is in {found.get(name, 'none')}"
            for name in wrong[:SHOWN]
        ]
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CorruptError(f"{where} has {'; '.join(told)}{more}; index and shards are of different models")
