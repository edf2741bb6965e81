"""Compare and swap of one file of HDFS, between processes and hosts.

A new file takes its name by a rename without overwrite, which fails if the name is taken. To replace version V a writer
claims V: it renames a small file, which has the name of its temporary file as contents, to ``.NAME.V-0.bcp-tmp``. This
rename fails if V is claimed already. Only the writer of the claim renames its temporary file over the old one, and only
if the old one is still V. Versions have the file's id, which is never used again.

Whoever finds V claimed waits a moment, then removes the temporary file that the claim names, and makes the next claim,
``V-1``. The removal and the claimant's rename exclude each other: one of them finds the file gone. So neither a dead
claimant nor a slow one needs to be recognized, and no clock, lease or process id decides. A claim on V is removed only
after V has been replaced. :mod:`bcp.backends.swap` does the same with local files; the design note
2026-11-22-conditional-commit.md has the proof.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import count

import anyio

from bcp.backends.files import TEMP_SUFFIX, final_name
from bcp.backends.hdfs.client import Hdfs
from bcp.backends.hdfs.cluster import FileState
from bcp.backends.hdfs.subfiles import temp_name
from bcp.backends.objects.store import ConditionError, RequestError
from bcp.protocols import Version

__all__ = ["PATIENCE_SECONDS", "put_if"]

PATIENCE_SECONDS = 2.0
"""How long a claimant may take for its rename, which needs milliseconds. Safety does not depend on it."""

_POLL_SECONDS = 0.05


async def put_if(hdfs: Hdfs, final: str, data: memoryview, version: Version | None) -> Version:
    """Write a file if the one of that name still has ``version``; return its new version.

    Raises:
        ConditionError: it has another one, or another writer took precedence. The file is as it was.
        RequestError: the directory is gone.
        OSError: a request failed. The file is the old one or the new one.

    """
    if await _version(hdfs, final) != version:
        raise ConditionError
    temp = temp_name(final)
    try:
        state = await write_checked(hdfs, temp, data)
        if version is None:
            await _create(hdfs, temp, state, final)
        else:
            await _Swap(hdfs, final, version).replace(temp, state)
    except BaseException:
        await hdfs.remove_quietly([temp])
        raise
    return state.version


async def write_checked(hdfs: Hdfs, temp: str, data: memoryview, *, create_parent: bool = False) -> FileState:
    """Write a temporary file; return its state, of which the size was compared."""
    try:
        await hdfs.write(temp, data, create_parent=create_parent)
    except FileNotFoundError as error:
        raise RequestError(f"the directory is gone: {error.strerror}") from error
    state = await hdfs.state(temp)
    if state is None:
        raise RequestError(f"{temp} is gone: another process has removed it")
    if state.nbytes != len(data):
        raise RequestError(f"{temp} has {state.nbytes} bytes, and {len(data)} were written", transient=True)
    return state


async def _version(hdfs: Hdfs, path: str) -> Version | None:
    state = await hdfs.state(path)
    return None if state is None or state.is_directory else state.version


async def _create(hdfs: Hdfs, temp: str, state: FileState, final: str) -> None:
    """Give the temporary file its name if nobody has it."""
    try:
        await hdfs.place(temp, state, final, overwrite=False)
    except FileExistsError:
        raise ConditionError from None
    except FileNotFoundError as error:
        if await _version(hdfs, final) is not None:  # another writer has committed, and removed what it found
            raise ConditionError from None
        raise RequestError(f"{temp} or its directory is gone: {error.strerror}", transient=True) from error


class _Swap:
    """One writer's replacement of one version of a file."""

    def __init__(self, hdfs: Hdfs, final: str, version: Version) -> None:
        self._hdfs = hdfs
        self._final = final
        self._version = version
        self._folder = final.rpartition("/")[0]

    async def replace(self, temp: str, state: FileState) -> None:
        """Rename the temporary file over the version that was found. ConditionError: another writer did."""
        claims = []
        for turn in count():
            claims.append(self._claim_path(turn))
            if await self._claim(claims[-1], temp):
                break
            await self._end(claims[-1])
        now = await _version(self._hdfs, self._final)
        if now == self._version:
            with suppress(FileNotFoundError):  # another writer has removed the temporary file, and this claim with it
                await self._hdfs.place(temp, state, self._final, overwrite=True)
            now = await _version(self._hdfs, self._final)
        if now != self._version:  # replaced, by this writer or another
            await self._hdfs.remove_quietly(claims)
        if now != state.version:
            raise ConditionError

    def _claim_path(self, turn: int) -> str:
        name = self._final.rpartition("/")[2]
        return f"{self._folder}/.{name}.{self._version}-{turn}{TEMP_SUFFIX}"

    async def _claim(self, claim: str, temp: str) -> bool:
        """Make a claim; False if another writer has it."""
        if await self._hdfs.state(claim) is not None:
            return False
        claim_temp = temp_name(self._final, "-claim")
        try:
            state = await write_checked(self._hdfs, claim_temp, memoryview(temp.rpartition("/")[2].encode()))
            await self._hdfs.place(claim_temp, state, claim, overwrite=False)
        except FileExistsError:
            await self._hdfs.remove_quietly([claim_temp])
            return False
        except BaseException:
            await self._hdfs.remove_quietly([claim_temp])
            raise
        return True

    async def _end(self, claim: str) -> None:
        """Wait until another writer's claim has led to its commit, or end it: from here on it cannot commit."""
        temp = await self._claimant(claim)
        if temp is None:
            return
        for _ in range(round(PATIENCE_SECONDS / _POLL_SECONDS)):
            if await self._hdfs.state(temp) is None:
                return
            await anyio.sleep(_POLL_SECONDS)
        await self._hdfs.remove(temp)

    async def _claimant(self, claim: str) -> str | None:
        """Return the temporary file that a claim names; None if the claim is gone or is none."""
        try:
            opened = await self._hdfs.open(claim)
            text = bytearray(opened.state.nbytes)
            await self._hdfs.read_into(opened, 0, memoryview(text))
            name = text.decode()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        final = final_name(name) if name.endswith(TEMP_SUFFIX) else ""
        return f"{self._folder}/{name}" if "/" not in name and f"{self._folder}/{final}" == self._final else None
