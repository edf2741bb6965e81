"""Apply deltas to the folder of a subscriber, in place.

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
from bcp.publication.folder import Note, PulledFolder
from bcp.runtime.threads import in_thread

__all__ = ["apply_deltas"]

HELD_BYTES = 256 << 20
"""Bytes of new tensors that stay in memory between their check and their write. Others are computed again."""


async def apply_deltas(chain: Chain, folder: PulledFolder, versions: Sequence[CommittedVersion]) -> Sequence[str]:
    """Apply deltas. Each tensor is written once, and all are checked before the first one is written.

    Args:
        chain: the publication.
        folder: has the version before, or was left by a call that was killed on the way to one of these versions.
        versions: one or more deltas, each of the version after the one before.

    Returns:
        The names of tensors that had to be repaired.

    Raises:
        CorruptError: a tensor of a version differs from its digest; nothing was written.
        StorageError: storage failed.

    """
    note, last = await folder.note(), versions[-1].index
    work = _Work(chain, folder, versions, await _digests(chain, versions[0].index.version - 1))
    changed = {name for version in versions for name in version.index.deltas}
    sizes, behind = await folder.sizes(), list[str]()
    for names in batches(sorted(changed), lambda name: sizes.get(name, 0)):
        is_old = await on_all_cores(folder.backend, names, work.check)
        behind += [name for name, old in zip(names, is_old, strict=True) if old]
    if behind:
        await folder.take_note(Note(note.version, last.publication, last.version))
        await work.write(behind)
    await folder.take_note(Note(last.version, last.publication, last.version))
    return sorted(work.repaired)


async def _digests(chain: Chain, version: int) -> Mapping[str, str]:
    """Return the digests of a version; none if retention has deleted it."""
    try:
        return (await chain.version(version)).index.digests
    except NotACheckpointError:
        return {}


@dataclass(slots=True)
class _Work:
    """The tensors of some deltas.

    Attributes:
        chain: the publication.
        folder: to be changed.
        versions: the deltas, in order.
        old: digests of the version before; none if retention has deleted it.
        held: new tensors that were checked, up to :data:`HELD_BYTES`.
        held_nbytes: bytes of these.
        repaired: names of tensors that came from the anchor.
    """

    chain: Chain
    folder: PulledFolder
    versions: Sequence[CommittedVersion]
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
        """Return the newest bytes of a tensor; None if the folder has them."""
        last, data = self.versions[-1].index, await self.folder.read(name)
        found = await in_thread(digest, data)
        if found == last.digests[name]:
            return None
        for version in self._after(name, found):
            index = version.index
            content = await self.chain.stream(index.version, name, len(data))
            data = await in_thread(apply, data, content, index.encoding)
            made, want = await in_thread(digest, data), index.digests[name]
            if made != want and self.old:
                raise CorruptError(
                    f"version {index.version} at {version.path}: the delta of tensor {name!r} makes the digest {made}, "
                    f"and {want} was published: the delta is damaged, and nothing was written; publish an anchor as a "
                    "newer version"
                )
            found = made
        if found == last.digests[name]:
            return data
        self.repaired.add(name)
        return await self.chain.tensor(name, last.version)

    def _after(self, name: str, found: str) -> Sequence[CommittedVersion]:
        """Return the deltas that a tensor of this digest lacks; none if the tensor is of no version."""
        steps = [version for version in self.versions if name in version.index.deltas]
        if self.old.get(name, found) == found:
            return steps
        places = [place for place, version in enumerate(steps, 1) if version.index.digests[name] == found]
        return steps[places[0] :] if places else []
