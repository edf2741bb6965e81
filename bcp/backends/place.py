"""The place of a checkpoint: a path or URL, and a role below it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from bcp.backends import child, resolve, shown
from bcp.backends.cooled import cooled
from bcp.backends.local import absolute, fixed
from bcp.errors import InputError
from bcp.plan.shards import KINDS
from bcp.protocols import Backend, RetryPolicy

__all__ = ["FILE_SUFFIXES", "RESERVED", "ROLE", "Path", "Place", "place_of", "words_of"]

Path = str | os.PathLike[str] | Backend
"""A local path, a URL, or a storage backend."""

ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
RESERVED = (*KINDS, "receipts")
FILE_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""Endings of names of files that other libraries write."""

_FOLDER = r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*://(?:[^/]+(?:/[^/]+)*|(?:/[^/]+)+)"
_FILE = re.compile(rf"({_FOLDER})/([^/]+(?:{'|'.join(map(re.escape, FILE_SUFFIXES))}))", re.IGNORECASE)
"""URLs that may be those of such a file: the folder is opened, and what is below the name is seen through a prefix."""


@dataclass(frozen=True, slots=True)
class Place:
    """An open place.

    Attributes:
        path: its name, for messages: absolute, without secrets.
        backend: storage under the path and role.
        opened: closes the storage at the end, if it was opened for this place.
        beside: a view of the backend that knows what is beside the path; None: the backend itself.
    """

    path: str
    backend: Backend
    opened: AbstractAsyncContextManager[object]
    beside: Backend | None = None


def place_of(
    path: Path,
    role: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    retries: RetryPolicy | None = None,
    *,
    cold: str | None = None,
) -> Place:
    """Open the place of a checkpoint; nothing is read.

    Args:
        path: of the checkpoint.
        role: below the path.
        storage_options: for the file system of a URL.
        retries: of failed requests.
        cold: where data files may lie that were moved, as in :class:`bcp.LoadOptions`. A backend that is passed as an
            object has no other place, and neither has a role below a path.

    Raises:
        InputError: a role or path cannot be any.

    """
    if role is not None and (not isinstance(role, str) or role in RESERVED or not ROLE.fullmatch(role)):
        raise InputError(
            f"role={role!r} cannot name a directory of a checkpoint: use letters, digits, '-' and '_', and none of "
            f"{', '.join(RESERVED)}"
        )
    match = _FILE.fullmatch(os.fsdecode(path)) if isinstance(path, str | os.PathLike) else None
    whole, where = resolve(path if match is None else match[1], storage_options, retries), words_of(path)
    backend = whole if match is None else child(whole, match[2])
    beside: Backend | None = None
    if role is None and match is None and not isinstance(path, Backend):
        given = None if cold in (None, "run") else fixed(cold)
        beside = whole = cooled(whole, path, storage_options, retries, given=given)
        backend = backend if cold is None else beside
    opened = nullcontext() if isinstance(path, Backend) else aclosing(whole)
    return (
        Place(where, backend, opened, beside)
        if role is None
        else Place(f"{where}/{role}", child(backend, role), opened)
    )


def words_of(path: Path) -> str:
    """Return a name of the location that is equal on all ranks: a path, a URL, or the class of a backend."""
    if isinstance(path, Backend):
        return type(path).__name__
    text = os.fsdecode(path)
    return shown(text) if "://" in text else str(absolute(text))
