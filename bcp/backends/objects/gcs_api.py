"""The operations of Google Cloud Storage's JSON API that bcp uses, each one request, on objects by their full names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bcp.backends.objects.crc32c import encoded
from bcp.backends.objects.store import ConditionError, RequestError
from bcp.protocols import Version

if TYPE_CHECKING:  # it imports packages of the extra
    from bcp.backends.objects.gcs_http import GcsHttp

__all__ = ["ABSENT", "MAX_SOURCES", "GcsApi", "GcsObject"]

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
        """Take the HTTP client."""
        self.http = http

    def __repr__(self) -> str:
        """Show the bucket."""
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
            filled, found = await self.http.fill(self._path(name), query, start, out)
        except FileNotFoundError as error:
            if generation is None:
                raise
            raise ConditionError(f"generation {generation} of {name!r} is gone: {error}") from error
        if generation not in (None, found):
            raise ConditionError(f"{name!r} has generation {found} in place of {generation}")
        return filled, found

    async def remove(self, name: str, generation: Version | None = None) -> None:
        """Delete an object, if it has that generation; an absent one is no error."""
        try:
            await self.http.call("DELETE", self._path(name), _condition(generation))
        except (FileNotFoundError, ConditionError):
            return

    async def names(self, prefix: str, after: str | None) -> tuple[Sequence[tuple[str, int]], str | None]:
        """Return a page of names and sizes of objects whose name starts with a prefix, and the next page's token."""
        page = await self._list(after, prefix=prefix, fields="items(name,size),nextPageToken")
        found = [(item["name"], int(item["size"])) for item in page.get("items", ())]
        return found, page.get("nextPageToken") or None

    async def prefixes(self, above: str, after: str | None) -> tuple[Sequence[str], str | None]:
        """Return a page of what stands up to the next slash in names that start with ``above``, and a page token."""
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
