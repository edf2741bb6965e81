"""Large objects in Google Cloud Storage: parts are objects of their own, which the server concatenates.

Names of parts are those of the object with a suffix, so that a listing of the same prefix finds them after a crash.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from bcp._log import log
from bcp.backends.objects.crc32c import checksum, combined
from bcp.backends.objects.gcs_api import ABSENT, MAX_SOURCES, GcsApi, GcsObject
from bcp.backends.objects.store import ConditionError, RequestError
from bcp.backends.objects.turns import in_turns
from bcp.errors import CorruptError
from bcp.protocols import Version

__all__ = ["GcsUpload", "part_prefix", "upload_of"]

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
        """Show the object and the upload's id."""
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
        found: Version = ABSENT
        for _ in range(_RACES):
            try:
                return await self._present(
                    self._api.compose(self._name, sources, found, {_UPLOAD: self.id}),
                )
            except ConditionError:
                there = await self._api.look(self._name)
                if there is not None and there.metadata.get(_UPLOAD) == self.id:
                    return there
                found = ABSENT if there is None else there.generation
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
