"""Apply a delta to the folder of a subscriber, in place.

No tensor is trusted. Its digest says whether it is old, new, or torn by a call that was killed: xor must not be applied
twice. A torn or damaged tensor comes from the anchor and the deltas after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bcp.errors import CorruptError, NotACheckpointError
from bcp.publication.batches import batches, on_all_cores
from bcp.publication.chain import Chain, CommittedVersion
from bcp.publication.encoding import Bytes, apply, digest
from bcp.publication.folder import Folder, Note
from bcp.runtime.threads import in_thread

__all__ = ["apply_delta"]

HELD_BYTES = 256 << 20
"""Bytes of new tensors that stay in memory between their check and their write. Others are computed again."""


async def apply_delta(chain: Chain, folder: Folder, version: CommittedVersion) -> Sequence[str]:
    """Apply a delta. All of its tensors are checked before the first one is written.

    Args:
        chain: the publication.
        folder: has the version before, or was left by a call that was killed on the way to this version.
        version: the delta.

    Returns:
        The names of tensors that had to be repaired.

    Raises:
        CorruptError: a new tensor differs from its digest; nothing of the version was written.
        StorageError: storage failed.

    """
    note, index = await folder.note(), version.index
    work = _Work(chain, folder, version, await _digests(chain, index.version - 1))
    sizes, todo = await folder.sizes(), list[str]()
    for names in batches(sorted(index.deltas), lambda name: sizes.get(name, 0)):
        is_old = await on_all_cores(folder.backend, names, work.check)
        todo += [name for name, old in zip(names, is_old, strict=True) if old]
    if todo:
        await folder.take_note(Note(note.version, index.publication, index.version))
        await work.write(todo)
    await folder.take_note(Note(index.version, index.publication, index.version))
    return sorted(work.repaired)


async def _digests(chain: Chain, version: int) -> Mapping[str, str]:
    """Return the digests of a version; none if retention has deleted it."""
    try:
        return (await chain.version(version)).index.digests
    except NotACheckpointError:
        return {}


@dataclass(slots=True)
class _Work:
    """The tensors of a delta.

    Attributes:
        chain: the publication.
        folder: to be changed.
        version: the delta.
        old: digests of the version before, if they are known.
        held: new tensors that were checked, up to :data:`HELD_BYTES`.
        held_nbytes: bytes of these.
        repaired: names of tensors that came from the anchor.
    """

    chain: Chain
    folder: Folder
    version: CommittedVersion
    old: Mapping[str, str]
    held: dict[str, Bytes] = field(default_factory=dict)
    held_nbytes: int = 0
    repaired: set[str] = field(default_factory=set)

    async def check(self, name: str) -> bool:
        """Check the new bytes of a tensor; return False if the folder has them already."""
        data = await self._new(name)
        if data is not None and self.held_nbytes + len(data) <= HELD_BYTES:
            self.held[name] = data
            self.held_nbytes += len(data)
        return data is not None

    async def write(self, names: Sequence[str]) -> None:
        """Write tensors that were checked."""
        sizes = await self.folder.sizes()
        for batch in batches(names, lambda name: sizes[name]):
            made = {name: self.held.pop(name) if name in self.held else await self._new(name) for name in batch}
            await self.folder.write({name: data for name, data in made.items() if data is not None})

    async def _new(self, name: str) -> Bytes | None:
        """Return the new bytes of a tensor; None if the folder has them."""
        index = self.version.index
        data, want = await self.folder.read(name), index.digests[name]
        found, old = await in_thread(digest, data), self.old.get(name)
        if found == want:
            return None
        if old in (None, found):
            content = await self.chain.stream(index.version, name, len(data))
            new = await in_thread(apply, data, content, index.encoding)
            made = await in_thread(digest, new)
            if made == want:
                return new
            if old is not None:
                raise CorruptError(
                    f"version {index.version} at {self.version.path}: the delta of tensor {name!r} makes the digest "
                    f"{made}, and {want} was published: the delta is damaged, and nothing was written; publish an "
                    "anchor as a newer version"
                )
        self.repaired.add(name)
        return await self.chain.tensor(name, index.version)
