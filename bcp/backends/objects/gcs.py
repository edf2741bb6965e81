"""Google Cloud Storage: ``gs://bucket/prefix``, over gcsfs.

The operations of Google Cloud Storage's JSON API that bcp uses, each one request, on objects by their full names.

Large objects in Google Cloud Storage: parts are objects of their own, which the server concatenates.

Names of parts are those of the object with a suffix, so that a listing of the same prefix finds them after a crash.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from bcp._log import log
from bcp._text import shown
from bcp.backends.keys import check_key
from bcp.backends.objects.backend import ObjectBackend
from bcp.backends.objects.parts import checksum, combined, encoded
from bcp.backends.objects.retry import in_turns
from bcp.backends.objects.store import ConditionError, If, RequestError, Stat, Upload
from bcp.errors import CorruptError, InputError, MissingExtraError
from bcp.protocols import Backend, ObjectInfo, RetryPolicy, Unfinished, Version
from bcp.runtime.imports import importing

__all__ = ["GcsStore", "open_gcs"]

if TYPE_CHECKING:  # it imports packages of the extra
    from bcp.backends.objects.gcs_http import GcsHttp


ABSENT: Version = "0"
"""As a condition: there is no object of that name."""

MAX_SOURCES = 32
_PAGE = 1000
_FIELDS = "generation,size,crc32c,metadata"


@dataclass(frozen=True, slots=True)
class GcsObject:
    """One generation of an object, as the server describes it.

    Attributes:
        name: of the object in the bucket.
        generation: version of its contents.
        nbytes: size.
        crc32c: of the contents, in base64.
        metadata: the writer's.
    """

    name: str
    generation: Version
    nbytes: int
    crc32c: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    def has(self, crc: int, nbytes: int) -> bool:
        """Whether the contents have this CRC-32C and size."""
        return self.crc32c == encoded(crc) and self.nbytes == nbytes


class GcsApi:
    """Single requests to one bucket."""

    def __init__(self, http: GcsHttp) -> None:
        self.http = http

    def __repr__(self) -> str:
        return f"<GcsApi of {self.http.bucket}>"

    async def insert(self, name: str, data: memoryview, generation: Version | None) -> GcsObject:
        """Store an object by one media upload of the buffer.

        Args:
            name: of the object.
            data: contents.
            generation: which the object must still have; :data:`ABSENT`; None for no condition.

        """
        query = {"uploadType": "media", "name": name, "fields": _FIELDS, **_condition(generation)}
        try:
            answer = await self.http.call("POST", f"/upload{self.http.path}/o", query, data=data)
        except FileNotFoundError as error:
            raise self.http.no_bucket(error) from error
        return _object(name, answer.json())

    async def compose(
        self, name: str, sources: Sequence[GcsObject], generation: Version, metadata: Mapping[str, str]
    ) -> GcsObject:
        """Concatenate up to 32 objects, of the generations that are given, within the server.

        Raises:
            FileNotFoundError: a source is gone, or has another generation.
            ConditionError: the object has another generation.

        """
        fields = {
            "sourceObjects": [{"name": source.name, "generation": source.generation} for source in sources],
            "destination": {"contentType": "application/octet-stream", "metadata": dict(metadata)},
        }
        query = {"fields": _FIELDS, **_condition(generation)}
        answer = await self.http.call("POST", f"{self._path(name)}/compose", query, fields=fields)
        return _object(name, answer.json())

    async def look(self, name: str) -> GcsObject | None:
        """Return the server's record of an object; None if there is none."""
        try:
            answer = await self.http.call("GET", self._path(name), {"fields": _FIELDS})
        except FileNotFoundError:
            return None
        return _object(name, answer.json())

    async def get(self, name: str) -> tuple[bytes, Version]:
        """Read an object whole."""
        answer = await self.http.call("GET", self._path(name), {"alt": "media"})
        return answer.body, answer.generation()

    async def read(self, name: str, start: int, out: memoryview, generation: Version | None) -> tuple[int, Version]:
        """Fill a buffer from byte ``start`` on; return how many bytes there were, and the generation.

        Raises:
            ConditionError: the object has another generation, or is gone.

        """
        query = {"alt": "media", **_condition(generation)}
        try:
            filled, actual_generation = await self.http.fill(self._path(name), query, start, out)
        except FileNotFoundError as error:
            if generation is None:
                raise
            raise ConditionError(f"generation {generation} of {name!r} is gone: {error}") from error
        if generation not in (None, actual_generation):
            raise ConditionError(f"{name!r} has generation {actual_generation} in place of {generation}")
        return filled, actual_generation

    async def remove(self, name: str, generation: Version | None = None) -> None:
        """Delete an object, if it has that generation; an absent one is no error."""
        try:
            await self.http.call("DELETE", self._path(name), _condition(generation))
        except (FileNotFoundError, ConditionError):
            return

    async def names(self, prefix: str, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return a page of the objects whose name starts with a prefix, and the next page's token."""
        page = await self._list(after, prefix=prefix, fields="items(name,size,updated),nextPageToken")
        entries = [
            ObjectInfo(item["name"], int(item["size"]), _seconds(item.get("updated"))) for item in page.get("items", ())
        ]
        return entries, page.get("nextPageToken") or None

    async def prefixes(self, above: str, after: str | None) -> tuple[Sequence[str], str | None]:
        """Return a page of names that start with ``above``, cut at their next slash, and a page token."""
        page = await self._list(after, prefix=above, delimiter="/", fields="prefixes,nextPageToken")
        return page.get("prefixes", ()), page.get("nextPageToken") or None

    async def _list(self, after: str | None, **query: str) -> dict[str, Any]:
        """Return a page of a list of objects."""
        query["maxResults"] = str(_PAGE)
        if after is not None:
            query["pageToken"] = after
        try:
            page: dict[str, Any] = (await self.http.call("GET", f"{self.http.path}/o", query)).json()
        except FileNotFoundError as error:
            raise self.http.no_bucket(error) from error
        return page

    def _path(self, name: str) -> str:
        return f"{self.http.path}/o/{quote(name, safe='')}"


def _seconds(text: str | None) -> float | None:
    """Return Unix seconds for a time as the API writes it; None for no time."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


def _condition(generation: Version | None) -> dict[str, str]:
    """Return the parameter of a request that must find this generation. Only numbers are any."""
    if generation is None:
        return {}
    if not generation.isdecimal():
        raise ConditionError(f"{generation!r} is no generation of Google Cloud Storage")
    return {"ifGenerationMatch": generation}


def _object(name: str, fields: Mapping[str, Any]) -> GcsObject:
    try:
        size, metadata = int(fields["size"]), fields.get("metadata", {})
        return GcsObject(name, str(fields["generation"]), size, fields["crc32c"], metadata)
    except (KeyError, ValueError) as error:
        raise RequestError(f"an answer about {name!r} without {error}", transient=True) from error


T = TypeVar("T")
_PART = re.compile(r"(.+)\.bcp-part-([0-9a-f]{16})-(?:c\d+-)?\d+", re.DOTALL)
_UPLOAD = "bcp-upload"
_RACES = 10


def part_prefix(name: str, upload: str) -> str:
    """Return the prefix of the names of all temporary objects of an upload."""
    return f"{name}.bcp-part-{upload}-"


def upload_of(name: str) -> tuple[str, str] | None:
    """Return the final name and the upload's id that a temporary object belongs to; None of any other object."""
    match = _PART.fullmatch(name)
    return None if match is None else (match[1], match[2])


class GcsUpload:
    """One object on its way.

    Every temporary object is made under the condition that it is absent. So an attempt whose answer was lost is
    recognized by its size and CRC, and an attempt that arrives late changes nothing.
    """

    def __init__(self, api: GcsApi, name: str) -> None:
        """Begin; no request is made.

        Args:
            api: makes requests.
            name: of the object in the bucket.

        """
        self.id = secrets.token_hex(8)
        self._api = api
        self._name = name
        self._prefix = part_prefix(name, self.id)
        self._parts: dict[int, tuple[GcsObject, int]] = {}
        self._composed: dict[str, GcsObject] = {}
        self._temporary: set[str] = set()
        self._is_there = False

    def __repr__(self) -> str:
        return f"<GcsUpload {self.id} of {self._name}: {len(self._parts)} parts>"

    async def part(self, index: int, offset: int, data: memoryview) -> None:  # noqa: ARG002 -- the index orders parts
        """Store one part, and compare the server's CRC with that of the buffer."""
        if not data:
            return
        crc, name = await checksum(data), f"{self._prefix}{index:06d}"
        self._temporary.add(name)
        made = await self._once(name, partial(self._api.insert, name, data, ABSENT))
        if not made.has(crc, len(data)):
            await self._api.remove(name, made.generation)
            raise RequestError(f"the store has other bytes than were sent for part {index}", transient=True)
        self._parts[index] = made, crc

    async def _once(self, name: str, make: Callable[[], Awaitable[GcsObject]]) -> GcsObject:
        """Make a temporary object, or return the one that an earlier attempt has made."""
        try:
            return await make()
        except ConditionError as error:
            made = await self._api.look(name)
            if made is None:
                raise RequestError(f"{name!r} appeared and vanished", transient=True) from error
            return made

    async def finish(self) -> None:
        """Let the object appear, and remove the parts."""
        if not self._is_there:
            await self._compose([part for _, (part, _) in sorted(self._parts.items())])
            self._is_there = True
        try:
            await self.abort()
        except RequestError as error:
            if error.transient:
                raise
            log.warning("parts of a finished object were not removed", object=self._name, error=error.said)

    async def abort(self) -> None:
        """Remove all temporary objects."""
        await in_turns([partial(self._forget, name) for name in sorted(self._temporary)])

    async def _forget(self, name: str) -> None:
        await self._api.remove(name)
        self._temporary.discard(name)

    # -- composition --------------------------------------------------------------------------

    async def _compose(self, sources: Sequence[GcsObject]) -> None:
        """Concatenate level by level, 32 sources at a time; the last step makes the object."""
        level = 0
        while len(sources) > MAX_SOURCES:
            groups = [sources[first : first + MAX_SOURCES] for first in range(0, len(sources), MAX_SOURCES)]
            steps = [partial(self._join, f"c{level}-{number}", group) for number, group in enumerate(groups)]
            sources = await in_turns(steps)
            level += 1
        made = await self._appear(sources)
        nbytes = sum(part.nbytes for part, _ in self._parts.values())
        crc = combined((crc, part.nbytes) for _, (part, crc) in sorted(self._parts.items()))
        if not made.has(crc, nbytes):
            # no metadata can name this generation: a save commits only after all its uploads have ended well
            await self._api.remove(self._name, made.generation)
            raise CorruptError(
                f"{self._name!r}: the store made {made.nbytes} bytes with CRC-32C {made.crc32c} of parts that have "
                f"{nbytes} bytes and another CRC; the object was deleted: write it again"
            )

    async def _join(self, number: str, group: Sequence[GcsObject]) -> GcsObject:
        """Make one object of a group, unless an earlier attempt has made it."""
        if len(group) == 1:
            return group[0]
        name = f"{self._prefix}{number}"
        if name not in self._composed:
            self._temporary.add(name)
            make = partial(self._api.compose, name, group, ABSENT, {})
            self._composed[name] = await self._present(self._once(name, make))
        return self._composed[name]

    async def _appear(self, sources: Sequence[GcsObject]) -> GcsObject:
        """Compose the object itself.

        The request has the condition that the object is as it was found, at first that it is absent. If that fails,
        an earlier attempt of this upload has made the object, or another writer has: the metadata tell.
        """
        generation: Version = ABSENT
        for _ in range(_RACES):
            try:
                return await self._present(
                    self._api.compose(self._name, sources, generation, {_UPLOAD: self.id}),
                )
            except ConditionError:
                stored_object = await self._api.look(self._name)
                if stored_object is not None and stored_object.metadata.get(_UPLOAD) == self.id:
                    return stored_object
                generation = ABSENT if stored_object is None else stored_object.generation
        raise RequestError(f"{self._name!r} was replaced {_RACES} times by other writers meanwhile", transient=True)

    async def _present(self, made: Awaitable[GcsObject]) -> GcsObject:
        """Await a composition; a source that is absent was removed by someone who took this upload for a dead one."""
        try:
            return await made
        except FileNotFoundError as error:
            raise RequestError(
                f"a part of {self._name!r} was removed while it was being written; has another save to the same path "
                f"swept it? The store says: {error}"
            ) from error


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
        raise InputError(f"{shown(url)!r}: write gs://bucket/prefix")
    bucket, root = match[1], (match[2] or "").strip("/")
    if root:
        check_key(root)
    if ours := sorted(name for name in _OURS if name in options):
        raise InputError(f"storage_options has {ours}, which bcp sets by itself; leave them out")
    token = options.get("token")
    if isinstance(token, str) and token.startswith(("/", "~", ".")) and not Path(token).expanduser().exists():
        raise InputError(f"storage_options has the token {token!r}, and there is no such file; correct the path")
    try:
        with importing:
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
        return f"<GcsStore of {self.name}>"

    async def put(self, key: str, data: memoryview, condition: If | None = None) -> Version:
        """Store an object by one media upload, and compare the server's CRC with that of the buffer."""
        crc, name = await checksum(data), self._above + key
        generation = None if condition is None else condition.version or ABSENT
        made = await self._api.insert(name, data, generation)
        if made.has(crc, len(data)):
            return made.generation
        found = f"{made.nbytes} bytes with CRC-32C {made.crc32c}"
        if generation in (None, ABSENT):  # nothing was replaced that anybody needs
            await self._api.remove(name, made.generation)
            raise CorruptError(
                f"{self.name}: the store has other bytes than were sent for {key!r}: {found}; the object was deleted: "
                "write it again"
            )
        for _ in range(_RACES):
            stored, version = await self._api.get(name)  # the answer may be damaged in place of the object
            if version == made.generation and stored == data:
                return made.generation
            made = await self._api.insert(name, data, made.generation)
        raise CorruptError(
            f"{self.name}: the store has other bytes than were sent for {key!r}, {_RACES} times, at last {found}; "
            "something changes them on their way: find it, and write the object again"
        )

    async def stat(self, key: str) -> Stat | None:
        """Return size and generation."""
        stored_object = await self._api.look(self._above + key)
        return None if stored_object is None else Stat(stored_object.nbytes, stored_object.generation)

    async def get(self, key: str) -> tuple[bytes, Version]:
        """Read an object whole."""
        return await self._api.get(self._above + key)

    async def read(self, key: str, start: int, out: memoryview, version: Version | None) -> tuple[int, Version]:
        """Read a range of one generation straight into the buffer."""
        return await self._api.read(self._above + key, start, out, version)

    async def list(self, prefix: str, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:
        """List objects, without parts of uploads and without the markers that consoles make for folders."""
        page, after = await self._api.names(self._above + prefix, after)
        objects = [info for info in page if upload_of(info.key) is None and not info.key.endswith("/")]
        return [replace(info, key=info.key.removeprefix(self._above)) for info in objects], after

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
        """List uploads that have parts; the name is the upload's id."""
        page, after = await self._api.names(self._above, after)
        uploads = sorted(set(filter(None, (upload_of(info.key) for info in page))))
        return [Unfinished(name.removeprefix(self._above), upload) for name, upload in uploads], after

    async def discard(self, unfinished: Unfinished) -> None:
        """Remove all parts of an upload."""
        prefix = part_prefix(self._above + unfinished.key, unfinished.name)
        after: str | None = None
        while True:
            page, after = await self._api.names(prefix, after)
            await in_turns(partial(self._api.remove, info.key) for info in page if upload_of(info.key) is not None)
            if after is None:
                return

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._api.http.aclose()
