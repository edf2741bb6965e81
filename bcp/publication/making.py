"""The making of a version: one process begins and commits it, and one or all ranks of a job write its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio

from bcp._log import log
from bcp._messages.publishing import BegunVersion, PublishedVersion, WrittenFiles
from bcp.backends import child
from bcp.errors import BcpError, CorruptError, InputError, NotACheckpointError
from bcp.protocols import Backend
from bcp.publication.chain import Chain
from bcp.publication.claims import Claim, claimed
from bcp.publication.index import DELTA, VersionIndex, folder_of
from bcp.publication.kept import Cache, KeptTensors
from bcp.publication.retention import retain, sweep
from bcp.publication.sources import OwnWeights, S
from bcp.publication.writing import Written, anchor_groups, write_anchor, write_delta
from bcp.runtime.threads import in_thread
from bcp.tools.calls import say_what_is_left

__all__ = ["Layout", "Making", "Wish", "tag_of", "undo_files", "write_files"]

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a version."""


@dataclass(frozen=True, slots=True)
class Wish:
    """The wishes of a caller that all ranks of a job share.

    Attributes:
        version: the number.
        anchor_every: an anchor follows so many versions after the last one.
        keep: how many versions stay readable; None for all.
        encoding: of the delta.
        shard_bytes: bytes of tensors in a file of an anchor.
        claim_seconds: take over claims of this age.
    """

    version: int
    anchor_every: int
    keep: int | None
    encoding: str
    shard_bytes: int
    claim_seconds: float


@dataclass(slots=True)
class Making:
    """A version that this process makes, alone or for a job.

    Attributes:
        wish: the caller's.
        claim: this publisher's.
        chain: the versions before.
        before: the newest one of them that can be read; None for none.
        begun: says what will be written.
        nbytes: bytes of all tensors.
    """

    wish: Wish
    claim: Claim
    chain: Chain
    before: VersionIndex | None
    begun: BegunVersion
    nbytes: int

    @classmethod
    async def begin(
        cls,
        backend: Backend,
        path: str,
        wish: Wish,
        layout: Layout,
        nbytes: int,
        companions: Sequence[tuple[str, bytes]],
    ) -> Making:
        """Claim the version, and decide whether it is an anchor.

        Args:
            backend: the publication.
            path: its name, for messages.
            wish: the caller's.
            layout: of the version.
            nbytes: of all tensors.
            companions: names and contents of the files beside the weights of an anchor.

        Raises:
            ExistsError: the version is not newer than the newest one, or another publisher is at work.
            CorruptError: the version before is damaged.
            StorageError: storage failed.

        """
        claim = await claimed(backend, path, wish.version, wish.claim_seconds)
        chain = Chain(backend, path)
        begun = BegunVersion(claim.id, wish.version, 0, is_anchor=True, has_delta=False)
        making = cls(wish, claim, chain, None, begun, nbytes)
        try:
            await sweep(backend, chain, claim.newest, claim.version)
            await making._look_back(layout)
            if making.begun.is_anchor:
                folder = child(backend, folder_of(claim.version))
                for name, data in companions:
                    await folder.put(name, data)
        except BaseException as error:
            await making.undo(error)
            raise
        return making

    async def _look_back(self, layout: Layout) -> None:
        """Find the version before, and decide."""
        claim, wish = self.claim, self.wish
        self.before = before = await self._before()
        if before is None:
            return
        has_delta = await self._has_same_layout(before, layout)
        is_anchor = not has_delta or wish.version - before.anchor >= wish.anchor_every
        self.begun = BegunVersion(claim.id, wish.version, before.version, is_anchor=is_anchor, has_delta=has_delta)

    async def _before(self) -> VersionIndex | None:
        """Return the newest version; None if there is none, or if it is damaged and the caller asks for an anchor."""
        if not self.claim.newest:
            return None
        try:
            return (await self.chain.version(self.claim.newest)).index
        except (CorruptError, NotACheckpointError):
            if self.wish.anchor_every > 1:
                raise
            return None

    async def _has_same_layout(self, before: VersionIndex, layout: Layout) -> bool:
        """Whether a delta can lead from the version before to this one."""
        if self.wish.anchor_every == 1 or self.wish.version != before.version + 1:
            return False
        old = await self.chain.layout(before.version)
        return {name: (tensor.dtype, tensor.shape) for name, tensor in old.items()} == dict(layout)

    async def commit(self, written: Sequence[WrittenFiles]) -> PublishedVersion:
        """Commit the version, and delete old ones.

        Args:
            written: the files of all ranks.

        Raises:
            ExistsError: another publisher has taken the claim over.
            StorageError: storage failed.

        """
        index = self._index(written)
        await self.claim.seal(index.encode())
        tensors = len(index.digests)
        return PublishedVersion(
            path=f"{self.chain.path}/{folder_of(index.version)}",
            version=index.version,
            is_anchor=index.is_anchor,
            has_delta=bool(index.encoding),
            tensors=tensors,
            changed=len(index.deltas) if index.encoding else tensors,
            nbytes=self.nbytes,
            delta_nbytes=index.delta_nbytes,
            deleted=tuple(await self._retained()),
        )

    def _index(self, written: Sequence[WrittenFiles]) -> VersionIndex:
        begun, before = self.begun, self.before
        return VersionIndex(
            version=begun.version,
            publication=self.claim.id if before is None else before.publication,
            anchor=begun.version if before is None or begun.is_anchor else before.anchor,
            encoding=self.wish.encoding if begun.has_delta else "",
            files={name: key for each in written for name, key in each.files.items()},
            deltas={name: key for each in written for name, key in each.deltas.items()},
            digests={name: digest for each in written for name, digest in each.digests.items()},
            nbytes=sum(each.nbytes for each in written),
            delta_nbytes=sum(each.delta_nbytes for each in written),
        )

    async def _retained(self) -> Sequence[int]:
        """Delete old versions. The new one is committed, so a failure is a warning."""
        if self.wish.keep is None:
            return ()
        try:
            return await retain(self.claim.backend, self.chain, self.wish.keep)
        except BcpError as error:
            log.warning("old versions of weights stay", publication=self.chain.path, error=str(error))
            return ()

    async def undo(self, error: BaseException) -> None:
        """Delete the files of this version, and let the next publisher begin, unless the commit may have happened."""
        if self.claim.is_sealing:
            return
        with anyio.CancelScope(shield=True):
            await undo_files(self.claim.backend, self.chain.path, self.begun, error)
            with say_what_is_left(error, f"The claim of {self.chain.path} is left"):
                await self.claim.release()


async def undo_files(backend: Backend, path: str, begun: BegunVersion, error: BaseException, rank: int = 0) -> None:
    """Delete files of a version that is not committed.

    Args:
        backend: the publication.
        path: its name, for messages.
        begun: the version.
        error: gets a note of what is left.
        rank: whose files; 0 for those of all ranks.

    """
    name = folder_of(begun.version)
    with anyio.CancelScope(shield=True), say_what_is_left(error, f"Files may be left in {path}/{name}"):
        folder = child(backend, name)
        await folder.delete([info.key for info in await folder.list() if tag_of(begun, rank) in info.key])


async def write_files(
    chain: Chain, wish: Wish, begun: BegunVersion, weights: OwnWeights, cache: Cache | None, rank: int = 0
) -> WrittenFiles:
    """Write the tensors of this rank.

    Args:
        chain: the publication.
        wish: the caller's.
        begun: says what to write.
        weights: the tensors.
        cache: has tensors of the version before, or None.
        rank: this rank. Rank 0 writes a file even if no tensor has changed.

    Raises:
        InputError: the tensors have changed meanwhile.
        CorruptError: a file of the source or of the version before is damaged.
        StorageError: storage failed.

    """
    folder, own, tag = child(chain.backend, folder_of(begun.version)), weights.own, f"{tag_of(begun, rank)}.safetensors"
    digests = (await chain.version(begun.before)).index.digests if begun.has_delta else {}
    kept = KeptTensors(chain, begun.before, digests, cache)
    written, delta = Written(), Written()
    if begun.is_anchor:
        async with weights.reading(partial(_anchor_order, shard_bytes=wish.shard_bytes)):
            written = await write_anchor(folder, tag_of(begun, rank), own, wish.shard_bytes, kept)
    if begun.has_delta:
        name = f"{DELTA}/delta-#-{tag}" if begun.is_anchor else f"delta-#-{tag}"
        async with weights.reading(_as_they_are):
            delta = await write_delta(folder, name, own, digests, kept, wish.encoding, has_file=rank == 0)
    made = written.digests or delta.digests
    if delta.digests and delta.digests != made:
        raise InputError(
            f"{chain.path}/{folder_of(begun.version)}: the tensors have changed while they were published; wait for "
            "the call before the next step of training"
        )
    if cache is not None and begun.has_delta:
        await in_thread(cache.drop_others, {*digests.values(), *made.values()})
    return WrittenFiles(written.files, delta.files, made, written.nbytes, delta.nbytes)


def tag_of(begun: BegunVersion, rank: int) -> str:
    """Return the end of the names of a rank's files."""
    return f"{begun.claim}-{rank:05d}" if rank else begun.claim


def _anchor_order(tensors: Sequence[S], /, shard_bytes: int) -> Sequence[S]:
    return [each for group in anchor_groups(tensors, shard_bytes) for each in group]


def _as_they_are(tensors: Sequence[S], /) -> Sequence[S]:
    return tensors
