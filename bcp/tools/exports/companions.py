"""Files beside the weights of a Hugging Face folder: configuration, tokenizer, generation; never weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from bcp.backends.local import absolute
from bcp.backends.place import place_of
from bcp.backends.small import check_small
from bcp.errors import InputError
from bcp.runtime.threads import in_thread

__all__ = ["checked_folder", "companions_of", "is_companion", "with_dtype"]

CONFIG = "config.json"
SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
NO_COMPANIONS = (".index.json", "trainer_state.json")
"""Endings of names of the kinds above that belong to weights or to a training job."""


class Sized(Protocol):
    """A tensor of a known dtype."""

    @property
    def dtype(self) -> str:
        """Name of the dtype, as torch has it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""


def checked_folder(like: object) -> str | None:
    """Return path or URL of the folder to copy from; None for none. Raises InputError for anything else."""
    if like is None:
        return None
    if not isinstance(like, str | os.PathLike):
        raise InputError(f"like={like!r} is a {type(like).__name__}; pass a folder that has a {CONFIG}")
    return os.fsdecode(like)


async def companions_of(like: str | None, storage_options: Mapping[str, Any] | None) -> list[tuple[str, bytes]]:
    """Read the files beside the weights of a folder; none if ``like`` is None.

    Links are followed: the folders of Hugging Face's cache are made of them.

    Args:
        like: a local folder or a URL.
        storage_options: for the file system of a URL.

    Raises:
        InputError: ``like`` is no folder, or the folder has no ``config.json``.
        CorruptError: a file has more than 1 GiB.
        StorageError: storage failed.

    """
    if like is None:
        return []
    found = await (_stored(like, storage_options) if "://" in like else in_thread(_local, like))
    if CONFIG not in dict(found):
        raise InputError(f"like={like!r} has no {CONFIG}; pass a folder that save_pretrained has written")
    return found


def is_companion(name: str) -> bool:
    """Whether a file belongs beside weights, by its name.

    Example:
        >>> from bcp.tools.exports.companions import is_companion
        >>> is_companion("tokenizer.json"), is_companion("model.safetensors.index.json")
        (True, False)

    """
    return name.endswith(SUFFIXES) and not name.endswith(NO_COMPANIONS) and not name.startswith(".")


def _local(folder: str) -> list[tuple[str, bytes]]:
    """Read the companions of a local folder. Blocks."""
    try:
        paths = sorted(path for path in absolute(folder).iterdir() if is_companion(path.name) and path.is_file())
        found = []
        for path in paths:
            check_small(str(path), path.stat().st_size)
            found.append((path.name, path.read_bytes()))
    except OSError as error:
        raise InputError(f"like={folder!r} cannot be read: {error}; pass a folder that has a {CONFIG}") from error
    return found


async def _stored(url: str, storage_options: Mapping[str, Any] | None) -> list[tuple[str, bytes]]:
    """Read the companions of a folder in a store."""
    place = place_of(url, None, storage_options)
    async with place.opened:
        infos = [info for info in await place.backend.list() if "/" not in info.key and is_companion(info.key)]
        for info in infos:
            check_small(f"{place.path}/{info.key}", info.nbytes)
        return [(info.key, bytes(await place.backend.get(info.key))) for info in infos]


def with_dtype(companions: Sequence[tuple[str, bytes]], tensors: Sequence[Sized]) -> list[tuple[str, bytes]]:
    """Let the configuration name the dtype of the weights, as ``save_pretrained`` does.

    ``from_pretrained`` loads into the dtype of the configuration, and would cast weights of another one. The dtype is
    that of most bytes of floating tensors of 16 bits or more. A configuration without tensors of that kind stays.

    Raises:
        InputError: the configuration is no JSON object.

    """
    amounts: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in ("float64", "float32", "float16", "bfloat16"):
            amounts[tensor.dtype] = amounts.get(tensor.dtype, 0) + tensor.nbytes
    if not amounts:
        return list(companions)
    dtype = max(sorted(amounts), key=lambda name: amounts[name])
    return [(name, _config(data, dtype) if name == CONFIG else data) for name, data in companions]


def _config(data: bytes, dtype: str) -> bytes:
    """Return a configuration with another dtype; byte for byte the same if it has that dtype already."""
    try:
        config = json.loads(data)
    except ValueError as error:
        raise InputError(f"{CONFIG} of like= is no JSON: {error}; repair it, or pass another folder") from error
    if not isinstance(config, dict):
        raise InputError(f"{CONFIG} of like= is no JSON object; repair it, or pass another folder")
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    if all(config.get(name) == dtype for name in names):
        return data
    config |= dict.fromkeys(names, dtype)
    return json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
