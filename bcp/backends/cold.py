"""The cold places of a run: the record ``cold.json`` in the run's folder, and the storage that it names.

``bcp.cool`` moves data files of old checkpoints there. The record is written before the first file leaves the run's
folder, and no checkpoint can name a cold place.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

import anyio

from bcp.backends import has_backend, resolve, shown
from bcp.backends.objects.retry import JITTER
from bcp.backends.prefixed import child
from bcp.backends.small import get_small
from bcp.errors import CorruptError, FormatVersionError, StorageError
from bcp.protocols import Backend, RetryPolicy, Version
from bcp.runtime.threads import in_thread

__all__ = [
    "FOLDER_SUFFIX",
    "MARK_KEY",
    "MOST_PLACES",
    "RECORD_KEY",
    "STEP_FOLDER",
    "ColdPlace",
    "ColdPlaces",
    "ColdRecord",
    "OpenPlace",
    "change_record",
    "cold_name",
    "hot_name",
    "is_cold_url",
    "mark_of",
    "run_words",
    "scheme_of",
    "stored_record",
    "url_parts",
]

RECORD_KEY = "cold.json"
"""The record of a run, beside ``run.json``."""

MARK_KEY = "cold-of.json"
"""The mark of a cold place, which says whose it is."""

STEP_FOLDER = re.compile(r"step-[0-9]{1,64}")
"""Names of folders whose files may have been moved."""

FOLDER_SUFFIX = ".cold"
"""The end of a folder's name in a cold place. No run takes such a folder for one of its steps."""

VERSION = 1
MOST_BYTES = 16 << 20
MOST_PLACES, _MOST_STEPS = 16, 1_000_000
_MOST_TEXT = 4096
_TRIES, _PAUSE_SECONDS = 30, 0.05
_ALIASES = {"gcs": "gs", "s3a": "s3", "file": ""}
_MARK = re.compile(r"[0-9a-f]{16}")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.+", re.DOTALL)


def cold_name(key: str) -> str:
    """Return the name of a data file in a cold place. No sweep of any run takes it for a file of a save.

    Example:
        >>> cold_name("model/00003-0123456789abcdef.safetensors")
        'model-00003-0123456789abcdef.safetensors'

    """
    return key.replace("/", "-", 1)


def hot_name(name: str) -> str:
    """Return the key of the data file that a file of a cold place is a copy of.

    Example:
        >>> hot_name("model-00003-0123456789abcdef.safetensors")
        'model/00003-0123456789abcdef.safetensors'

    """
    return name.replace("-", "/", 1)


def is_cold_url(url: str, run: str) -> bool:
    """Whether the run at the URL or path ``run`` may have a cold place at ``url``.

    A place is an absolute path, or a URL with a backend of bcp's own or a registered one. A URL of any other scheme
    that fsspec knows needs a run of the same scheme: else a foreign record could make a reader call any server.
    """
    match = _URL.fullmatch(url)
    if len(url) > _MOST_TEXT or "\0" in url:
        return False
    if match is None:
        return url.startswith("/")
    same = _URL.fullmatch(run)
    return has_backend(match[1]) or (same is not None and same[1].lower() == match[1].lower())


@dataclass(frozen=True, slots=True)
class ColdPlace:
    """A place that has data files of a run.

    Attributes:
        url: URL or absolute path of the place, without secrets.
        mark: token that the place has in ``cold-of.json``.
    """

    url: str
    mark: str


@dataclass(frozen=True, slots=True)
class ColdRecord:
    """The contents of ``cold.json``.

    Attributes:
        places: where data files of the run may lie, the newest last.
        cooled: names of the folders whose data files may lie there.
        promoted: Unix seconds of the last promotion, by names of folders.

    Example:
        >>> record = ColdRecord((ColdPlace("/cold/run-7", "00112233445566aa"),), frozenset({"step-00000100"}))
        >>> ColdRecord.from_bytes(record.to_bytes(), "cold.json", "/hot/run-7") == record
        True

    """

    places: tuple[ColdPlace, ...] = ()
    cooled: frozenset[str] = frozenset()
    promoted: Mapping[str, float] = field(default_factory=dict)

    def place(self, url: str) -> ColdPlace | None:
        """Return the place of a URL; None if the record does not have it."""
        return next((place for place in self.places if place.url == url), None)

    def to_bytes(self) -> bytes:
        """Return the contents of the file."""
        fields = {
            "version": VERSION,
            "places": [{"url": place.url, "mark": place.mark} for place in self.places],
            "cooled": sorted(self.cooled),
            "promoted": dict(self.promoted),
        }
        return json.dumps(fields, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str, run: str) -> ColdRecord:
        """Read the contents of the file, which anybody who may write to the run's folder may have written.

        Args:
            data: the contents.
            where: name of the file, for messages.
            run: URL or path of the run.

        Raises:
            CorruptError: it is no record, or names a place that no run may have.
            FormatVersionError: a newer bcp wrote it.

        """
        try:
            fields = json.loads(data)
            if (version := _version(fields["version"])) > VERSION:
                raise FormatVersionError(f"{where} has version {version}, and this bcp knows {VERSION}; update bcp")
            places = tuple(_place(each, run) for each in _listed(fields["places"], MOST_PLACES))
            names = frozenset(map(_step, _listed(fields["cooled"], _MOST_STEPS)))
            promoted = {_step(name): _time(time) for name, time in fields["promoted"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptError(
                f"{where} is no record of cold places: {error!r}; put it back from a copy, or call bcp.cool with the "
                "same cold place after the file was moved away"
            ) from error
        return cls(places, names, promoted)


def _version(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{str(value)[:100]!r} is no version")
    return value


def _listed(value: object, most: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{str(value)[:100]!r} is no list with {most} items at most")
    return value


def _place(value: Mapping[str, Any], run: str) -> ColdPlace:
    url = value["url"]
    if not isinstance(url, str) or not is_cold_url(url, run):
        raise ValueError(f"{str(url)[:100]!r} is no place that a run may have")
    return ColdPlace(url, _token(value["mark"]))


def _token(value: object) -> str:
    if not isinstance(value, str) or not _MARK.fullmatch(value):
        raise ValueError(f"{str(value)[:100]!r} is no mark of a place")
    return value


def _step(name: str) -> str:
    if not isinstance(name, str) or not STEP_FOLDER.fullmatch(name):
        raise ValueError(f"{name[:100]!r} is no folder of a step")
    return name


def _time(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(float(value)):  # type: ignore[arg-type]  # both are numbers
        raise ValueError(f"{str(value)[:100]!r} is no time")
    return float(value)  # type: ignore[arg-type]  # as above


async def stored_record(run: Backend, where: str) -> tuple[ColdRecord, Version | None]:
    """Read the record of a run, and a version that is not newer. An empty record and None if the run has none.

    Args:
        run: over the run's folder.
        where: URL or path of the run.

    Raises:
        CorruptError: the record is damaged.
        FormatVersionError: a newer bcp wrote it.
        StorageError: storage failed.

    """
    version = await run.version(RECORD_KEY)
    if version is None:
        return ColdRecord(), None
    try:
        data = bytes(await get_small(run, RECORD_KEY, MOST_BYTES))
    except FileNotFoundError:  # deleted by hand since
        return ColdRecord(), None
    return ColdRecord.from_bytes(data, f"{shown(where)}/{RECORD_KEY}", where), version


async def change_record(run: Backend, where: str, change: Callable[[ColdRecord], ColdRecord]) -> ColdRecord:
    """Change the record of a run, whoever else changes it meanwhile; return the new one.

    Args:
        run: over the run's folder.
        where: URL or path of the run.
        change: makes the new record from the stored one. If it returns an equal one, nothing is written.

    Raises:
        CorruptError: the record is damaged.
        FormatVersionError: a newer bcp wrote it.
        StorageError: storage failed, or others have changed the record in each of many attempts.

    """
    for _ in range(_TRIES):
        record, version = await stored_record(run, where)
        changed = change(record)
        if changed == record or await run.put_if(RECORD_KEY, changed.to_bytes(), version) is not None:
            return changed
        if (await stored_record(run, where))[0] == changed:  # an attempt whose answer was lost
            return changed
        await anyio.sleep(JITTER.uniform(0, _PAUSE_SECONDS))
    raise StorageError(f"{shown(where)}: {RECORD_KEY} was changed by others in each of {_TRIES} attempts; call again")


@dataclass(slots=True)
class OpenPlace:
    """An open cold place.

    Attributes:
        url: of the place.
        mark: as the record has it; "" for a place that the caller has named.
        backend: storage over the place.
        owner: the run that the place is noted for; "" as long as that is not known.
    """

    url: str
    mark: str
    backend: Backend
    owner: str = ""

    def folder(self, name: str) -> Backend:
        """Return the storage of the copies of one checkpoint."""
        return child(self.backend, f"{name}{FOLDER_SUFFIX}")

    async def check(self) -> None:
        """Look whether the place is there, and has the mark of the record.

        Raises:
            CorruptError: the mark cannot be read.
            StorageError: it has not, or storage failed.

        """
        if self.owner or not self.mark:
            return
        found = await mark_of(self.backend, self.url)
        if found.get("mark") != self.mark:
            words = "belongs to another run" if found else f"has no {MARK_KEY}"
            raise StorageError(
                f"the cold place {shown(self.url)} {words}: data files of old checkpoints were moved there. Mount it "
                "on this host, or give this job access to it"
            )
        self.owner = found["run"]


async def mark_of(place: Backend, url: str) -> Mapping[str, str]:
    """Return the mark of a cold place: token, path and id of the run. An empty one if it has none.

    Raises:
        CorruptError: it is no mark.
        StorageError: storage failed.

    """
    try:
        data = bytes(await get_small(place, MARK_KEY, MOST_BYTES))
    except FileNotFoundError:
        return {}
    try:
        fields = json.loads(data)
        return {"mark": _token(fields["mark"]), "run": str(fields["run"]), "id": str(fields.get("id", ""))}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(
            f"{shown(url)}/{MARK_KEY} is no mark of a cold place: {error!r}; choose another place"
        ) from error


class ColdPlaces:
    """The cold places of one run, which are opened when they are needed.

    Example::

        places = ColdPlaces(backend, "s3://bucket/run-7")
        for place in await places.of("step-00000100"):
            infos = await place.folder("step-00000100").list()

    """

    def __init__(
        self,
        run: Backend | Callable[[], Backend],
        where: str,
        storage_options: Mapping[str, Any] | None = None,
        retries: RetryPolicy | None = None,
        *,
        given: str | None = None,
        cold_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the run; nothing is read yet.

        Args:
            run: storage over the run's folder, or a function that opens it.
            where: URL or path of the run.
            storage_options: for the file system of the run's URL, and for places of the same scheme.
            retries: of failed requests.
            given: the cold place that the caller has named, in the place of the record.
            cold_options: for the file systems of the places; None for ``storage_options`` where both schemes are one.

        """
        self._run, self._where, self._given = run, where, given
        self._options, self._retries, self._cold_options = storage_options, retries, cold_options
        self._open: dict[ColdPlace, OpenPlace] = {}
        self._record: ColdRecord | None = None
        self._was_opened = False
        self._lock = anyio.Lock()

    async def of(self, name: str, *, again: bool = True) -> Sequence[OpenPlace]:
        """Return the places where data files of a folder may lie, the newest first.

        Args:
            name: of the folder.
            again: read a record that was read before anew.

        Raises:
            CorruptError: the record is damaged.
            FormatVersionError: a newer bcp wrote it.
            InputError: a place cannot be opened.
            StorageError: storage failed.

        """
        async with self._lock:
            if self._record is None or again or self._given is not None:
                self._record = await self._recorded(name)
            known = self._record.places[::-1] if name in self._record.cooled else ()
            return [await self.opened(place) for place in known]

    async def run(self) -> Backend:
        """Return the storage over the run's folder, which is opened if it was not. :meth:`aclose` closes it.

        Raises InputError if it cannot be opened.
        """
        async with self._lock:
            return await self._opened_run()

    async def owns(self, place: OpenPlace) -> bool:
        """Whether a place is noted for this run, and not for another one whose folder this one is a copy of.

        Raises:
            CorruptError: the mark of the place cannot be read.
            StorageError: the place is not there, or storage failed.

        """
        await place.check()
        return place.owner == await in_thread(run_words, self._where)

    async def aclose(self) -> None:
        """Let go of the places, and of the run's folder if it was opened for them."""
        for place in self._open.values():
            await place.backend.aclose()
        if isinstance(self._run, Backend) and self._was_opened:
            await self._run.aclose()

    async def _recorded(self, name: str) -> ColdRecord:
        if self._given is not None:
            return ColdRecord((ColdPlace(self._given, ""),), frozenset({name}))
        record, _ = await stored_record(await self._opened_run(), self._where)
        return record

    async def _opened_run(self) -> Backend:
        if not isinstance(self._run, Backend):
            self._run, self._was_opened = await in_thread(self._run), True
        return self._run

    async def opened(self, place: ColdPlace) -> OpenPlace:
        """Return the storage of a place. Raises InputError if it cannot be opened."""
        if place not in self._open:
            options = self._cold_options
            if options is None and scheme_of(place.url) == scheme_of(self._where):
                options = self._options
            opened = await in_thread(partial(resolve, place.url, options, self._retries))
            self._open[place] = OpenPlace(place.url, place.mark, opened)
        return self._open[place]


def run_words(where: str) -> str:
    """Return a run's URL or path as the mark of a cold place has it: one spelling, without links and secrets. Blocks.

    Example:
        >>> run_words("GCS://bucket//run-7/")
        'gs://bucket/run-7'
        >>> run_words("file://localhost/run%2D7")
        '/run-7'

    """
    scheme, *parts = url_parts(where)
    return shown(f"{scheme}://{'/'.join(parts)}") if scheme else f"/{'/'.join(parts)}"


def url_parts(url: str) -> list[str]:
    """Return scheme and names of a URL or path, for comparison; "" as the scheme of a path. Blocks.

    Links of paths are followed.
    """
    scheme = scheme_of(url)
    rest = url.partition("://")[2] if scheme else url
    if scheme == "file":
        rest = unquote(rest.removeprefix("localhost"))
    scheme = _ALIASES.get(scheme, scheme)
    if not scheme:
        rest = os.path.realpath(rest)
    return [scheme, *(part for part in rest.split("/") if part)]


def scheme_of(url: str) -> str:
    """Return the scheme of a URL; "" for a path."""
    match = _URL.fullmatch(url)
    return "" if match is None else match[1].lower()
