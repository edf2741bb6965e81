"""Google Cloud Storage: ``gs://bucket/prefix``, over gcsfs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bcp.backends.keys import check_key
from bcp.backends.objects.backend import ObjectBackend
from bcp.backends.objects.crc32c import checksum
from bcp.backends.objects.gcs_api import ABSENT, GcsApi
from bcp.backends.objects.gcs_upload import GcsUpload, part_prefix, upload_of
from bcp.backends.objects.store import If, Stat, Upload
from bcp.backends.objects.turns import in_turns
from bcp.errors import CorruptError, InputError, MissingExtraError
from bcp.protocols import Backend, ObjectInfo, RetryPolicy, Unfinished, Version

__all__ = ["GcsStore", "open_gcs"]

_URL = re.compile(r"(?:gs|gcs)://([^/]+)(?:/(.*))?", re.DOTALL | re.IGNORECASE)
_OURS = ("asynchronous", "loop", "skip_instance_cache")


def open_gcs(url: str, options: Mapping[str, Any], policy: RetryPolicy | None) -> Backend:
    """Return the backend of a ``gs://`` or ``gcs://`` URL. No request is made yet.

    Args:
        url: bucket and prefix.
        options: of ``gcsfs.GCSFileSystem``: ``token``, ``project``, ``endpoint_url``, ``requester_pays`` and so on.
            fsspec's configuration files, GOOGLE_APPLICATION_CREDENTIALS and STORAGE_EMULATOR_HOST count as ever.
        policy: how requests are made again.

    Raises:
        MissingExtraError: gcsfs or google-crc32c is not installed.
        InputError: the URL has no bucket, an option is not the caller's, or the token's file is absent.

    Example::

        backend = open_gcs("gs://bucket/run/step-100", {"token": "google_default"}, None)

    """
    match = _URL.fullmatch(url)
    if match is None:
        raise InputError(f"{url!r}: write gs://bucket/prefix")
    bucket, root = match[1], (match[2] or "").strip("/")
    if root:
        check_key(root)
    if ours := sorted(name for name in _OURS if name in options):
        raise InputError(f"storage_options has {ours}, which bcp sets by itself; leave them out")
    token = options.get("token")
    if isinstance(token, str) and token.startswith(("/", "~", ".")) and not Path(token).expanduser().exists():
        raise InputError(f"storage_options has the token {token!r}, and there is no such file; correct the path")
    try:
        import google_crc32c  # noqa: F401, PLC0415 -- packages of the extra

        from bcp.backends.objects.gcs_http import GcsHttp  # noqa: PLC0415 -- as above
    except ImportError as error:
        raise MissingExtraError(f"gs:// needs gcsfs: pip install 'bcp-checkpoint[gcs]' ({error})") from error
    return ObjectBackend(GcsStore(GcsApi(GcsHttp(bucket, options)), root), policy)


class GcsStore:
    """A :class:`~bcp.backends.objects.store.Store`. Versions are generations."""

    least_part = 0
    most_part = 5 << 40
    most_parts = 1 << 20
    most_keys = 1
    at_once = 8

    def __init__(self, api: GcsApi, root: str) -> None:
        """Take the API and the root.

        Args:
            api: makes them.
            root: prefix of all names, without a slash at its end; may be empty.

        """
        self._api = api
        self._above = f"{root}/" if root else ""
        self.name = f"gs://{api.http.bucket}/{root}".rstrip("/")

    def __repr__(self) -> str:
        """Show the URL."""
        return f"<GcsStore of {self.name}>"

    async def put(self, key: str, data: memoryview, condition: If | None = None) -> Version:
        """Store an object by one media upload, and compare the server's CRC with that of the buffer."""
        crc, name = await checksum(data), self._above + key
        found = None if condition is None else condition.version or ABSENT
        made = await self._api.insert(name, data, found)
        if not made.has(crc, len(data)):
            await self._api.remove(name, made.generation)
            raise CorruptError(
                f"{self.name}: the store has other bytes than were sent for {key!r}: {made.nbytes} bytes with CRC-32C "
                f"{made.crc32c}; the object was deleted: write it again"
            )
        return made.generation

    async def stat(self, key: str) -> Stat | None:
        """Return size and generation."""
        found = await self._api.look(self._above + key)
        return None if found is None else Stat(found.nbytes, found.generation)

    async def get(self, key: str) -> tuple[bytes, Version]:
        """Read an object whole."""
        return await self._api.get(self._above + key)

    async def read(self, key: str, start: int, out: memoryview, version: Version | None) -> tuple[int, Version]:
        """Read a range of one generation straight into the buffer."""
        return await self._api.read(self._above + key, start, out, version)

    async def list(self, prefix: str, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:
        """List objects, without parts of uploads and without the markers that consoles make for folders."""
        page, after = await self._api.names(self._above + prefix, after)
        objects = [(name, nbytes) for name, nbytes in page if upload_of(name) is None and not name.endswith("/")]
        return [ObjectInfo(name.removeprefix(self._above), nbytes) for name, nbytes in objects], after

    async def folders(self, prefix: str, after: str | None) -> tuple[Sequence[str], str | None]:
        """List folders."""
        above = self._above + prefix
        page, after = await self._api.prefixes(above, after)
        names = [name[len(above) : -1] for name in page]
        return [name for name in names if name], after

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete an object."""
        for key in keys:
            await self._api.remove(self._above + key)

    async def begin(self, key: str, nbytes: int | None) -> Upload:  # noqa: ARG002 -- parts need no plan
        """Begin an upload; its first request is that of a part."""
        return GcsUpload(self._api, self._above + key)

    async def unfinished(self, after: str | None) -> tuple[Sequence[Unfinished], str | None]:
        """List uploads of which there are parts; the name is the upload's id."""
        page, after = await self._api.names(self._above, after)
        found = sorted(set(filter(None, (upload_of(name) for name, _ in page))))
        return [Unfinished(name.removeprefix(self._above), upload) for name, upload in found], after

    async def discard(self, unfinished: Unfinished) -> None:
        """Remove all parts of an upload."""
        prefix = part_prefix(self._above + unfinished.key, unfinished.name)
        after: str | None = None
        while True:
            page, after = await self._api.names(prefix, after)
            await in_turns(partial(self._api.remove, name) for name, _ in page if upload_of(name) is not None)
            if after is None:
                return

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._api.http.aclose()
