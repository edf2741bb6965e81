"""Files of other libraries that bcp does not open as they were passed: known by their names and first bytes."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from bcp.backends import LocalBackend
from bcp.backends.cooled import hot_of
from bcp.backends.files import open_regular
from bcp.backends.place import FILE_SUFFIXES
from bcp.errors import CorruptError
from bcp.interop.deepspeed_names import MODEL
from bcp.interop.safetensors_files import SUFFIX
from bcp.protocols import Backend
from bcp.runtime.threads import in_thread

__all__ = ["foreign_words"]

_OLD = "in its format of before torch 1.6: load it with torch.load, and save it anew with torch.save or bcp.save"
_OLD_HEADS = (b"\x80\x02\x8a\x0al\xfc\x9c", b"sys_info", b"storages", b"tensors", b"./")
"""First bytes of files that torch.save wrote before it wrote zips: its magic number, or the name of a tar's member."""

_HEAD_BYTES = 9


async def foreign_words(backend: Backend, path: str, keys: Collection[str]) -> str:
    """Return what is at a path without metadata, and what to pass instead; empty if it is nothing known.

    Args:
        backend: of the path.
        path: as errors show it.
        keys: all objects below the path.

    """
    for key in sorted(keys):
        folder, _, name = key.rpartition("/")
        if name == ".metadata" or (folder and name.endswith(SUFFIX)):
            what = "torch.distributed.checkpoint" if name == ".metadata" else "safetensors files"
            return f"{path} is not a checkpoint, and has one of {what} in {folder}: pass {path}/{folder}"
        if folder and MODEL.fullmatch(name):
            return f"{path} is not a checkpoint, and has one of DeepSpeed in {folder}: pass {path}/{folder}"
        if name.endswith(".distcp"):
            return f"{path} has {key} of torch.distributed.checkpoint, and no .metadata: its save has not ended"
        if Path(name).suffix in FILE_SUFFIXES:
            return f"{path} is not a checkpoint, and has {key}, a file of torch.save: pass that file"
    backend = hot_of(backend)
    if isinstance(backend, LocalBackend):
        return await _local_words(backend, path)
    return ""


async def _local_words(backend: LocalBackend, path: str) -> str:
    """Return what a local file is, or a folder of links."""
    words = await in_thread(_words_of_file, backend.root)
    if words:
        return f"{path} is not a checkpoint but {words}"
    links = [name for name in await backend.links() if name.endswith((SUFFIX, ".json", ".distcp", ".metadata"))]
    if links:
        return (
            f"{path} has links and no files: {', '.join(links[:3])}. bcp follows no link out of a folder: pass a copy "
            "with the files, as `cp -rL` makes it"
        )
    return ""


def _words_of_file(path: Path) -> str:
    """Return what a local file is; empty for directories. Blocks."""
    try:
        fd = open_regular(path)
    except (CorruptError, OSError):
        return ""
    try:
        head = os.read(fd, _HEAD_BYTES)
    finally:
        os.close(fd)
    if head.startswith(_OLD_HEADS):
        return f"a file of torch.save {_OLD}"
    return "a file that bcp does not know, neither of torch.save nor of safetensors: check the path"
