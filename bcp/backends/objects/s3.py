"""``s3://``: AWS, Ceph RGW, MinIO and others, if their packages are installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bcp.backends.keys import check_key
from bcp.backends.objects.backend import ObjectBackend
from bcp.errors import InputError, MissingExtraError
from bcp.protocols import Backend, RetryPolicy
from bcp.runtime.imports import imported, importing

__all__ = ["open_s3"]


def open_s3(url: str, options: Mapping[str, Any] | None = None, policy: RetryPolicy | None = None) -> Backend:
    """Return the backend of ``s3://bucket/prefix``; nothing is asked of the server yet.

    Args:
        url: bucket and prefix. All keys lie below the prefix, which may be empty.
        options: as s3fs takes them: ``key``, ``secret``, ``token``, ``profile``, ``anon``, ``endpoint_url``,
            ``client_kwargs``, ``config_kwargs``, ``s3_additional_kwargs`` and ``region``. They come before those of
            fsspec's configuration files, and these before AWS's variables and files.
        policy: how requests are made again.

    Raises:
        InputError: the URL names no bucket, or an option is unknown.
        MissingExtraError: aiobotocore, fsspec or google-crc32c is not installed.

    Example::

        backend = open_s3("s3://bucket/run", {"endpoint_url": "http://127.0.0.1:9000"})

    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if not scheme or not bucket or "@" in bucket or "?" in bucket:
        raise InputError(
            f"a URL of scheme {scheme} has to be {scheme}://bucket/prefix, without credentials; pass those by "
            "storage_options or AWS's variables"
        )
    prefix = prefix.strip("/")
    if prefix:
        check_key(prefix)
    for package in ("aiobotocore", "fsspec", "google_crc32c"):
        try:
            imported(package)
        except ImportError as error:
            raise MissingExtraError(
                f"{scheme}:// needs {package}, which is not installed: pip install 'bcp-checkpoint[s3]'"
            ) from error
    with importing:
        from fsspec.config import conf  # noqa: PLC0415 -- optional: bcp-checkpoint[s3]

        from bcp.backends.objects.s3_client import Options  # noqa: PLC0415 -- the same
        from bcp.backends.objects.s3_store import S3Store  # noqa: PLC0415 -- the same

    policy = policy or RetryPolicy()
    given = {**conf.get("s3a", {}), **conf.get("s3", {}), **(options or {})}
    requests = policy.requests * (1 if policy.hedge_seconds is None else 2)
    return ObjectBackend(S3Store(bucket, prefix, Options.of(given), requests), policy)
