"""Storage backends: from a path to the :class:`~bcp.protocols.Backend` that serves it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import cast
from urllib.parse import unquote

from bcp.backends.local import LocalBackend
from bcp.backends.memory import MemoryBackend
from bcp.backends.prefixed import child
from bcp.errors import InputError
from bcp.protocols import Backend

__all__ = ["LocalBackend", "MemoryBackend", "child", "register", "resolve"]

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*"
_URL = re.compile(rf"({_SCHEME})://.*", re.DOTALL)
_METHODS = ("put", "version", "put_if", "open_write", "read_into", "get", "list", "delete", "aclose")
_ABSENT = ("gs", "hdfs", "s3")  # object stores that users will ask for, and that this version cannot serve


def resolve(path: str | os.PathLike[str] | Backend) -> Backend:
    """Return the backend for a path.

    Args:
        path: a local path or ``file://`` URL, ``memory://name/prefix``, a URL of a registered scheme, or a
            backend, which is returned as it is.

    Raises:
        InputError: there is no backend for the URL's scheme, the URL is malformed, or the path is none of these.

    """
    if hasattr(path, "open_write") and hasattr(path, "read_into"):
        missing = sorted(name for name in _METHODS if not hasattr(path, name))
        if missing:
            raise InputError(
                f"{type(path).__name__} is no backend: it has no {', '.join(missing)}; docs/extending.md describes all "
                "methods of a backend"
            )
        return cast("Backend", path)
    if not isinstance(path, str | os.PathLike):
        raise InputError(
            f"path={path!r} is of type {type(path).__name__}; pass a directory, a URL, or an object with all "
            "methods of bcp.protocols.Backend"
        )
    text = os.fsdecode(path)
    match = _URL.fullmatch(text)
    if match is None:
        return LocalBackend(text)
    scheme = match[1].lower()
    factory = _factories.get(scheme)
    if factory is not None:
        return factory(text)
    how = "register one with bcp.backends.register(scheme, factory), or pass a Backend object as the path"
    if scheme in _ABSENT:
        raise InputError(f"{text!r}: this version of bcp has no backend for {scheme}:// yet; {how}")
    known = ", ".join(f"{name}://" for name in sorted(_factories))
    raise InputError(f"{text!r}: unknown scheme {scheme}://; known are plain local paths, {known}; {how}")


def register(scheme: str, factory: Callable[[str], Backend]) -> None:
    """Let :func:`resolve` call ``factory(url)`` for URLs that start with ``scheme://``.

    A later registration of the same scheme replaces the earlier one.
    """
    if not re.fullmatch(_SCHEME, scheme):
        raise InputError(f"{scheme!r} is not the scheme of a URL; use one such as 's3', without '://'")
    _factories[scheme.lower()] = factory


def _file(url: str) -> Backend:
    """Return the backend of a ``file://`` URL."""
    host, slash, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost") or not slash:
        raise InputError(f"{url!r}: write file:///absolute/path, with three slashes")
    return LocalBackend(unquote(f"/{path}"))


def _memory(url: str) -> Backend:
    """Return the backend of a ``memory://`` URL."""
    name, _, prefix = url[len("memory://") :].partition("/")
    backend = MemoryBackend(name)
    prefix = prefix.rstrip("/")
    return child(backend, prefix) if prefix else backend


_factories: dict[str, Callable[[str], Backend]] = {"file": _file, "memory": _memory}
