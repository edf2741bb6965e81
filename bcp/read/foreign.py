"""Checkpoints of other libraries: recognized by their names and first bytes, never read."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from bcp.backends import LocalBackend
from bcp.backends.files import open_regular
from bcp.errors import CorruptError
from bcp.protocols import Backend
from bcp.runtime.threads import in_thread

__all__ = ["foreign_words"]

_TORCH = "a file of torch.save: read it with torch.load, and save what it has with bcp.save"
_SAFETENSORS = "a safetensors file: read it with safetensors.torch.load_file, and save the tensors with bcp.save"
_DCP = (
    "one of torch.distributed.checkpoint: load it with torch.distributed.checkpoint.load into the same model "
    "and optimizer, and save these with bcp.save"
)
_BY_SUFFIX = {".pt": _TORCH, ".pth": _TORCH, ".bin": _TORCH, ".ckpt": _TORCH, ".safetensors": _SAFETENSORS}
_HEAD_BYTES = 9


async def foreign_words(backend: Backend, path: str, keys: Collection[str]) -> str:
    """Return what is at a path without metadata, and what to do with it today; empty if it is nothing known.

    Args:
        backend: of the path.
        path: as errors show it.
        keys: all objects below the path.

    """
    names = {key.rpartition("/")[2] for key in keys}
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return f"{path} is not a checkpoint of bcp but {_DCP}"
    for name in sorted(names):
        if words := _BY_SUFFIX.get(Path(name).suffix):
            return f"{path} is not a checkpoint of bcp, and has {name}, {words}"
    if isinstance(backend, LocalBackend):
        words = await in_thread(_words_of_file, backend.root)
        return f"{path} is not a checkpoint of bcp but {words}" if words else ""
    words = "" if keys else _BY_SUFFIX.get(Path(path).suffix, "")
    return f"{path} is no folder, and by its name {words}" if words else ""


def _words_of_file(path: Path) -> str:
    """Return what a local file is; empty for directories, and for files of an unknown kind. Blocks."""
    try:
        fd = open_regular(path)
    except (CorruptError, OSError):
        return ""
    try:
        head, nbytes = os.read(fd, _HEAD_BYTES), os.fstat(fd).st_size
    finally:
        os.close(fd)
    if head.startswith(b"PK\x03\x04"):
        return _TORCH
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= nbytes:
        return _SAFETENSORS
    return _BY_SUFFIX.get(path.suffix, "a file, and a checkpoint is a folder: check the path")
