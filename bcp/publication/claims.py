"""The claim of a publication: one publisher at a time, and a commit that a later publisher can end.

``claim.json`` names the publisher. It changes by compare and swap alone, and so do ``latest.json`` and the indexes.

1. A publisher writes its claim. From here on another one is refused, or takes the claim over.
2. It writes data files. Nobody sees them: the version has no index.
3. It seals the claim: the claim now has the index itself. A publisher whose claim was taken over fails here.
4. The index is written, if there is none, and ``latest.json`` moves.

A publisher that finds a sealed claim does step 4 for the other one. So a claim that is not sealed can be taken over at
any moment: its owner can no longer commit, and its files can go.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from bcp._text import printable
from bcp.backends.small import get_small
from bcp.errors import CorruptError, ExistsError
from bcp.interop.reading import JSON_BYTES, from_json
from bcp.protocols import Backend, Version
from bcp.publication.index import INDEX, MOST_VERSION, folder_of

__all__ = ["CLAIM", "LATEST", "Claim", "claimed", "latest_of"]

ABOUT, CLAIM, LATEST = "publication.json", "claim.json", "latest.json"
FORMAT = b'{"format": "bcp publication 1"}\n'
CLAIM_BYTES = 2 * JSON_BYTES
LATEST_BYTES = 4096


@dataclass(slots=True)
class Claim:
    """This publisher's claim.

    Attributes:
        backend: the publication.
        where: its name, for messages.
        version: the claimed version.
        id: 16 hexadecimal digits, in the names of the publisher's files.
        newest: the newest committed version; 0 if there is none.
        is_sealing: whether the version may be committed, whatever happens to this process.
    """

    backend: Backend
    where: str
    version: int
    id: str
    newest: int
    is_sealing: bool = False
    _token: Version = ""

    async def seal(self, index: bytes) -> None:
        """Commit the version: seal the claim, write the index, and move ``latest.json``.

        Raises:
            ExistsError: another publisher has taken the claim over. This publisher's files may go.
            StorageError: storage failed. The next publisher ends the commit, if it had begun.

        """
        self.is_sealing = True
        sealed = _content(self.id, self.version, "sealed", index)
        if await self.backend.put_if(CLAIM, sealed, self._token) is None:
            self.is_sealing = False
            raise ExistsError(
                f"{self.where}: another publisher has taken over the claim of version {self.version}, and nothing was "
                "committed; run one publisher at a time, or pass a larger claim_seconds="
            )
        await _end(self.backend, self.version, index)

    async def release(self) -> None:
        """Let the next publisher begin at once."""
        await self.backend.put_if(CLAIM, _content(self.id, self.version, "ended"), self._token)


async def claimed(backend: Backend, where: str, version: int, claim_seconds: float) -> Claim:
    """Claim a version. A commit that another publisher has begun is ended first.

    Args:
        backend: the publication.
        where: its name, for messages.
        version: to claim.
        claim_seconds: take over the claim of a publisher that began so long ago.

    Raises:
        ExistsError: the version is not newer than the newest one, or another publisher is at work.
        CorruptError: the claim is damaged.
        StorageError: storage failed.

    """
    token, found = await _read(backend, CLAIM, CLAIM_BYTES, where)
    has_ended = False
    if found.get("state") == "sealed":
        has_ended = await _end(backend, _number(found, f"{where}/{CLAIM}"), str(found.get("index")).encode())
    newest = await latest_of(backend, where)
    if has_ended and version == newest:
        raise ExistsError(
            f"{where}: the publisher of version {version} had begun its commit when it ended, and version {version} is "
            f"committed now; go on with version={newest + 1}"
        )
    if version <= newest:
        raise ExistsError(
            f"{where} has version {newest} already, and version {version} is not newer; pass version={newest + 1}, "
            "also after the trainer has gone back to an older step"
        )
    if found.get("state") == "writing":
        _check_age(found, where, claim_seconds)
    if token is None:
        await backend.put(ABOUT, FORMAT)  # makes the folder, where there are any
    name = secrets.token_hex(8)
    mine = await backend.put_if(CLAIM, _content(name, version, "writing"), token)
    if mine is None:
        raise ExistsError(f"{where}: another publisher was quicker to claim a version; run one publisher at a time")
    return Claim(backend, where, version, name, newest, _token=mine)


async def latest_of(backend: Backend, where: str) -> int:
    """Return the newest committed version; 0 if there is none.

    Raises:
        CorruptError: ``latest.json`` is damaged.
        StorageError: storage failed.

    """
    token, found = await _read(backend, LATEST, LATEST_BYTES, where)
    return 0 if token is None else _number(found, f"{where}/{LATEST}")


async def _end(backend: Backend, version: int, index: bytes) -> bool:
    """Write the index of a sealed claim, unless it is there, and move ``latest.json`` to its version, never back.

    Returns whether this call has moved it.
    """
    if await latest_of(backend, repr(backend)) < version:
        await backend.put_if(f"{folder_of(version)}/{INDEX}", index, None)
    while True:
        token, found = await _read(backend, LATEST, LATEST_BYTES, repr(backend))
        if token is not None and _number(found, LATEST) >= version:
            return False
        if await backend.put_if(LATEST, json.dumps({"version": version}).encode(), token) is not None:
            return True


async def _read(backend: Backend, key: str, most: int, where: str) -> tuple[Version | None, dict[str, Any]]:
    """Return version and contents of a small object; None and nothing if there is none."""
    while True:
        token = await backend.version(key)
        if token is None:
            return None, {}
        try:
            data = bytes(await get_small(backend, key, most))
        except FileNotFoundError:
            continue
        if await backend.version(key) == token:  # else it was replaced between the two
            break
    found = from_json(data, f"{where}/{key}")
    if not isinstance(found, dict):
        raise CorruptError(f"{where}/{key} is damaged: {data[:80]!r}; restore it")
    return token, found


def _number(found: dict[str, Any], where: str) -> int:
    version = found.get("version")
    if type(version) is not int or not 0 < version < MOST_VERSION:
        raise CorruptError(f"{where} names the version {str(version)[:40]!r}, which is none; restore the file")
    return version


def _content(name: str, version: int, state: str, index: bytes = b"") -> bytes:
    publisher = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()}
    content = {"id": name, "version": version, "state": state, **publisher, "index": index.decode()}
    return json.dumps(content).encode()


def _check_age(found: dict[str, Any], where: str, claim_seconds: float) -> None:
    """Refuse to take over a claim that is younger than ``claim_seconds``."""
    began = found.get("began")
    age = time.time() - began if isinstance(began, int | float) else claim_seconds
    if age < claim_seconds:
        owner = f"process {str(found.get('pid'))[:20]} on {printable(str(found.get('host'))[:80])}"
        raise ExistsError(
            f"{where}: {owner} has claimed version {str(found.get('version'))[:20]} {max(age, 0):.0f} s ago, and may "
            f"be writing it; wait until {claim_seconds:.0f} s have passed, or pass claim_seconds=0 if it is dead"
        )
