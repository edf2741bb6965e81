"""Which foreign format lies at a path, and its table of contents."""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

from bcp.backends import LocalBackend, child
from bcp.backends.cooled import hot_of
from bcp.backends.files import open_regular
from bcp.backends.prefixed import PrefixedBackend
from bcp.errors import BcpError, CorruptError, NotACheckpointError
from bcp.interop.byte_checkpoint import byte_checkpoint_folder, is_byte_checkpoint
from bcp.interop.catalogue import Catalogue
from bcp.interop.dcp_files import METADATA, dcp_folder
from bcp.interop.deepspeed_files import deepspeed_folder
from bcp.interop.deepspeed_names import deepspeed_roots, is_deepspeed
from bcp.interop.hugging_face import hugging_face_folder, is_hugging_face
from bcp.interop.megatron_files import is_megatron, megatron_folder
from bcp.interop.reading import Opened
from bcp.interop.safetensors_files import SUFFIX, safetensors_file
from bcp.interop.torch_file import torch_file
from bcp.interop.torchsnapshot_files import MANIFEST, torchsnapshot_folder
from bcp.protocols import Backend, ObjectInfo
from bcp.runtime.threads import in_thread, in_thread_gc_paused

__all__ = ["folder_of", "foreign_metadata", "is_foreign_folder"]

ZIP = b"PK\x03\x04"
HEAD_BYTES = 9
_FAULTS = (ArithmeticError, FileNotFoundError, LookupError, RecursionError, TypeError, ValueError, struct.error)


async def foreign_metadata(backend: Backend, path: str, infos: Sequence[ObjectInfo]) -> bytes | None:
    """Return the table of contents of a foreign checkpoint; None for an unknown format.

    Args:
        backend: of the path of a folder or a file.
        path: its name in messages.
        infos: all objects below the path.

    Raises:
        CorruptError: it is damaged, or names files outside of its folder.
        CheckpointError: it has what bcp does not read.
        StorageError: storage failed.

    """
    try:
        catalogue = await _of_folder(Opened(backend, path, {info.key: info.nbytes for info in infos}))
        if catalogue is None and not infos:
            catalogue = await _of_file(backend, path)
        return None if catalogue is None else await in_thread_gc_paused(catalogue.encode, path)
    except BcpError:
        raise
    except _FAULTS as error:  # names with half characters, numbers of thousands of digits
        words = f"{type(error).__name__}: {str(error)[:200]}"
        raise CorruptError(f"the files at {path} are damaged, or were moved meanwhile: {words}") from error


async def _of_folder(opened: Opened) -> Catalogue | None:
    """Return the catalogue of a folder; None if its names tell no format."""
    if METADATA in opened.sizes:
        return await (megatron_folder(opened) if is_megatron(opened.sizes) else dcp_folder(opened))
    if is_deepspeed(opened.sizes):
        return await deepspeed_folder(opened)
    if MANIFEST in opened.sizes:
        return await torchsnapshot_folder(opened)
    if await is_byte_checkpoint(opened):
        return await byte_checkpoint_folder(opened)
    return await hugging_face_folder(opened) if _is_hugging_face(opened.sizes) else None


def is_foreign_folder(keys: Collection[str]) -> bool:
    """Whether a folder with these files has a format of another library, by their names."""
    return (
        any(key.rpartition("/")[2] == METADATA for key in keys) or bool(deepspeed_roots(keys)) or _is_hugging_face(keys)
    )


def _is_hugging_face(keys: Collection[str]) -> bool:
    return is_hugging_face(key for key in keys if "/" not in key)


async def _of_file(backend: Backend, path: str) -> Catalogue | None:
    """Return the catalogue of a file; None if its first bytes tell no format."""
    backend = hot_of(backend)
    if not isinstance(backend, LocalBackend | PrefixedBackend):
        return None
    folder, key = await in_thread(_parts, backend)
    nbytes = await _size(folder, key)
    opened = Opened(folder, path.rpartition("/")[0], {key: nbytes}, is_file=True)
    head = await opened.read(key, 0, min(nbytes, HEAD_BYTES))
    if head.startswith(ZIP):
        return await torch_file(opened, key)
    if head[8:9] == b"{" or (nbytes and key.endswith(SUFFIX)):
        return await safetensors_file(opened, key)
    return None


async def _size(folder: Backend, key: str) -> int:
    """Return the size of a file; 0 if there is none."""
    if isinstance(folder, LocalBackend):  # a listing of the folder may be long
        return await in_thread(_local_size, folder.root / key)
    return next((info.nbytes for info in await folder.list(key) if info.key == key), 0)


def _local_size(path: Path) -> int:
    """Return the size of a regular file; 0 for what is none. Blocks."""
    try:
        fd = open_regular(path)
    except (CorruptError, OSError):
        return 0
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _parts(backend: LocalBackend | PrefixedBackend) -> tuple[Backend, str]:
    """Return the backend of a file's folder, and the file's key there. The caller's own link is followed. Blocks."""
    if isinstance(backend, LocalBackend):
        path = Path(os.path.realpath(backend.root))
        return LocalBackend(path.parent), path.name
    above, _, name = backend.prefix.rpartition("/")
    return child(backend.whole, above) if above else backend.whole, name


def folder_of(backend: Backend) -> Backend:
    """Return the backend of the folder of a file.

    Raises:
        NotACheckpointError: the backend was passed as an object, and has no folder above.

    """
    backend = hot_of(backend)
    if not isinstance(backend, LocalBackend | PrefixedBackend):
        raise NotACheckpointError(f"{backend!r} has no folder above: pass the folder that the file lies in")
    return _parts(backend)[0]
