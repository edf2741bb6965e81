"""Storage backends: from a path to the :class:`~bcp.protocols.Backend` that serves it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import unquote

from bcp._text import shown
from bcp.backends.local import LocalBackend
from bcp.backends.memory import MemoryBackend
from bcp.backends.prefixed import child
from bcp.errors import InputError
from bcp.protocols import Backend, RetryPolicy
from bcp.runtime.imports import imported, importing

__all__ = ["LocalBackend", "MemoryBackend", "child", "has_backend", "register", "resolve", "shown"]

Factory = Callable[[str, Mapping[str, Any], RetryPolicy | None], Backend]

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*"
_URL = re.compile(rf"({_SCHEME})://.*", re.DOTALL)
_METHODS = ("put", "version", "put_if", "open_write", "read_into", "get", "list", "delete", "aclose")
_OWN = {
    "gcs": "bcp.backends.objects.gcs:open_gcs",
    "gs": "bcp.backends.objects.gcs:open_gcs",
    "hdfs": "bcp.backends.hdfs:open_hdfs",
    "s3": "bcp.backends.objects.s3:open_s3",
    "s3a": "bcp.backends.objects.s3:open_s3",
}
"""Modules that are imported when a URL asks for them: their packages are extras."""


def resolve(
    path: str | os.PathLike[str] | Backend,
    storage_options: Mapping[str, Any] | None = None,
    retries: RetryPolicy | None = None,
) -> Backend:
    """Return the backend for a path.

    Raises InputError if the path is none of these, the URL is malformed, or its scheme has no backend. It is also
    raised for options of a path that takes none. Raises MissingExtraError, which names the extra, if a package is not
    installed.

    Args:
        path: a local path or ``file://`` URL; ``gs://``, ``s3://`` or ``hdfs://``; ``memory://name/prefix``; or a URL
            of a registered scheme, or of any other that fsspec knows. A backend is returned as it is.
        storage_options: for the file system of a URL, by the names that fsspec and its packages give them.
        retries: how a backend of a URL makes failed requests again; None for the defaults.

    Example::

        backend = bcp.backends.resolve("s3://bucket/run", {"endpoint_url": "http://127.0.0.1:9000"})

    """
    options = {} if storage_options is None else storage_options
    if not isinstance(options, Mapping):
        raise InputError(f"storage_options is a {type(options).__name__}; pass a dict")
    if hasattr(path, "open_write") and hasattr(path, "read_into"):
        _check_methods(path)
        _check_none(options, type(path).__name__)
        return cast("Backend", path)
    if not isinstance(path, str | os.PathLike):
        raise InputError(
            f"path={path!r} is of type {type(path).__name__}; pass a directory, a URL, or an object with all "
            "methods of bcp.protocols.Backend"
        )
    text = os.fsdecode(path)
    match = _URL.fullmatch(text)
    if match is None:
        scheme, is_url, _ = text.partition("://")
        if is_url and ("::" in scheme or scheme != scheme.strip()):  # nothing behind it is shown: secrets may be there
            raise InputError(f"a URL that begins with {scheme!r} is taken by no backend; pass a path, or a plain URL")
        _check_none(options, text)
        return LocalBackend(text)
    scheme = match[1].lower()
    return _factory(scheme, text)(scheme + text[len(scheme) :], options, retries)


def _check_methods(backend: object) -> None:
    missing = sorted(name for name in _METHODS if not hasattr(backend, name))
    if missing:
        raise InputError(
            f"{type(backend).__name__} is no backend: it has no {', '.join(missing)}; docs/extending.md describes all "
            "methods of a backend"
        )


def _check_none(options: Mapping[str, Any], where: str) -> None:
    if options:
        raise InputError(f"storage_options has {sorted(options)}, and {shown(where)} takes none; they are for URLs")


def _factory(scheme: str, url: str) -> Factory:
    """Return the function that opens URLs of a scheme."""
    if scheme in _factories:
        return _factories[scheme]
    if scheme in _OWN:
        module, _, name = _OWN[scheme].partition(":")
        opened: Factory = getattr(imported(module), name)
        return opened
    with importing:
        import fsspec  # noqa: PLC0415 -- here it takes 0.1 s that local paths need not pay

        if scheme in {*fsspec.available_protocols(), *fsspec.registry}:
            from bcp.backends.objects.generic import open_generic  # noqa: PLC0415 -- as above

            return open_generic
    known = ", ".join(f"{name}://" for name in sorted({*_factories, *_OWN}))
    raise InputError(
        f"{shown(url)!r}: unknown scheme {scheme}://; known are plain local paths, {known}, and what fsspec knows; "
        "register one with bcp.backends.register(scheme, factory), or pass a Backend object as the path"
    )


def has_backend(scheme: str) -> bool:
    """Whether URLs of a scheme have a backend of bcp's own, or a registered one."""
    return scheme.lower() in {*_factories, *_OWN}


def register(scheme: str, factory: Callable[..., Backend]) -> None:
    """Let :func:`resolve` call ``factory(url, **storage_options)`` for URLs that start with ``scheme://``.

    A later registration of the same scheme replaces the earlier one, and one of bcp's own.
    """
    if not re.fullmatch(_SCHEME, scheme):
        raise InputError(f"{scheme!r} is not the scheme of a URL; use one such as 's3', without '://'")
    _factories[scheme.lower()] = lambda url, options, _: factory(url, **options)


def _file(url: str, options: Mapping[str, Any], _: RetryPolicy | None) -> Backend:
    """Return the backend of a ``file://`` URL."""
    _check_none(options, url)
    host, slash, path = url[len("file://") :].partition("/")
    if host not in ("", "localhost") or not slash:
        raise InputError(f"{shown(url)!r}: write file:///absolute/path, with three slashes")
    return LocalBackend(unquote(f"/{path}"))


def _memory(url: str, options: Mapping[str, Any], _retries: RetryPolicy | None) -> Backend:
    """Return the backend of a ``memory://`` URL."""
    _check_none(options, url)
    name, _, prefix = url[len("memory://") :].partition("/")
    backend = MemoryBackend(name)
    prefix = prefix.rstrip("/")
    return child(backend, prefix) if prefix else backend


_factories: dict[str, Factory] = {"file": _file, "memory": _memory}
