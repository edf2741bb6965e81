"""The base of a delta: tensors of the version before, from a local cache or from the publication.

A file of the cache has the digest of a tensor as its name, and the bytes of the tensor. The digest is computed whenever
a file is read, so a file that was written by half, or for a version that was never committed, is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from bcp.backends.local import absolute
from bcp.errors import StorageError
from bcp.publication.chain import Chain
from bcp.publication.encoding import Bytes, digest
from bcp.runtime.threads import in_thread

__all__ = ["Cache", "KeptTensors"]

DIGEST = re.compile(r"[0-9a-f]{32}")


class Cache:
    """A local folder of tensors. Processes of a host may share it.

    Args:
        path: of the folder.

    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.root = absolute(os.fsdecode(path))
        self._found: set[str] = set()

    def look(self) -> None:
        """Take note of the files that are there; blocks. The folder is made if need be.

        Call it while no process writes to the folder.

        Raises:
            StorageError: it cannot be made or read.

        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._found = {path.name for path in self.root.iterdir() if DIGEST.fullmatch(path.name)}
        except OSError as error:
            raise StorageError(f"{self.root} cannot be a publisher's cache: {error}; pass another cache=") from error

    def drop_others(self, digests: Collection[str]) -> None:
        """Delete the files that were there, but for these; blocks. Those that came later stay."""
        self._drop(self._found.difference(digests))

    def _drop(self, digests: Collection[str]) -> None:
        for each in digests:
            with suppress(OSError):
                (self.root / each).unlink()

    def read(self, name: str) -> Bytes | None:
        """Return the tensor of a digest; None if the folder lacks it, or has other bytes. Blocks."""
        try:
            data = np.fromfile(self.root / name, np.uint8)
        except OSError:
            return None
        if digest(data) == name:
            return data
        self._drop([name])
        return None

    def write(self, name: str, data: Bytes) -> None:
        """Keep a tensor; blocks. One that is there already is not written again.

        Raises:
            StorageError: it cannot be written.

        """
        path: Path = self.root / name
        try:
            if not path.exists() or path.stat().st_size != len(data):
                data.tofile(path)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error}; make room, or pass another cache=") from error


class KeptTensors:
    """The tensors of the version before, and a place for those of the new one.

    Args:
        chain: the publication.
        before: number of the version before; 0 for none.
        digests: of its tensors.
        cache: has tensors, or None.

    """

    def __init__(self, chain: Chain, before: int, digests: Mapping[str, str], cache: Cache | None) -> None:
        self._chain, self._before, self._digests, self._cache = chain, before, digests, cache

    async def old(self, name: str) -> Bytes:
        """Read a tensor of the version before.

        Raises:
            CorruptError: a file of the publication is damaged.
            StorageError: storage failed.

        """
        if self._cache is not None:
            found = await in_thread(self._cache.read, self._digests[name])
            if found is not None:
                return found
        return await self._chain.tensor(name, self._before)

    async def keep(self, digest: str, data: Bytes) -> None:
        """Take a new tensor.

        Raises:
            StorageError: the cache cannot be written.

        """
        if self._cache is not None:
            await in_thread(self._cache.write, digest, data)
