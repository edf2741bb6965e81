"""Publish weights as a version that inference engines pull."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict, Unpack

import anyio

from bcp._log import log
from bcp._text import shown
from bcp.backends import child
from bcp.backends.place import Path, place_of
from bcp.errors import BcpError, CorruptError, InputError, NotACheckpointError
from bcp.policies.checks import amount
from bcp.publication.chain import Chain
from bcp.publication.claims import Claim, claimed
from bcp.publication.encoding import ENCODINGS, Bytes, check_zstandard
from bcp.publication.index import DELTA, VersionIndex, folder_of, whole
from bcp.publication.retention import retain, sweep
from bcp.publication.sources import Weights, WeightsSource, opened_weights
from bcp.publication.subscriber import Subscriber
from bcp.publication.writing import Written, write_anchor, write_delta
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.facts import check_nbytes
from bcp.tools.calls import called, say_what_is_left
from bcp.tools.exports.chosen import DType, Rename
from bcp.tools.exports.companions import checked_folder, companions_of, with_dtype

__all__ = ["PublishKeywords", "PublishResult", "apublish", "publish"]

SHARD_BYTES = 5 << 30
CLAIM_SECONDS = 600.0


class PublishKeywords(TypedDict, total=False):
    """Keywords of :func:`bcp.publish` beside those in its signature.

    Attributes:
        dtype: dtype of floating tensors in the publication, as in ``torch.bfloat16``; their own by default.
        like: a folder with ``config.json``, as for :func:`bcp.tools.export_hf`. Each anchor gets the files beside
            the weights, and so does the folder of a subscriber.
        cache: a local folder of this publisher alone. It keeps the newest version, so the base of a delta is read
            there. Without it, the base is read from the publication. Each base is compared with its digest.
        claim_seconds: take over the claim of another publisher that began so long ago; 600 by default. Pass 0 if
            you know that the other one is dead. A claim that is taken over cannot commit any more.
        shard_bytes: bytes of tensors in a file of an anchor, at most; 5 GiB by default.
        storage_options: for the file system of the URL of a checkpoint, and of ``like``.
        target_options: for the file system of the publication's URL.
    """

    dtype: DType
    like: str | os.PathLike[str] | None
    cache: str | os.PathLike[str] | None
    claim_seconds: float
    shard_bytes: int
    storage_options: Mapping[str, Any] | None
    target_options: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class PublishResult:
    """The outcome of :func:`bcp.publish`.

    Attributes:
        path: of the version's folder.
        version: its number.
        is_anchor: whether the version has all tensors.
        has_delta: whether a subscriber of the version before needs a delta only. An anchor may have one, too.
        tensors: how many tensors the version has.
        changed: how many of them differ from the version before; all of them, if there is no delta.
        nbytes: bytes of all tensors of the version.
        delta_nbytes: bytes that a subscriber of the version before downloads; 0 if there is no delta.
        deleted: older versions that retention has deleted.
    """

    path: str
    version: int
    is_anchor: bool
    has_delta: bool
    tensors: int
    changed: int
    nbytes: int
    delta_nbytes: int
    deleted: tuple[int, ...] = ()


def publish(
    source: WeightsSource,
    to: Path,
    version: int,
    *,
    anchor_every: int = 50,
    keep: int | None = None,
    rename: Rename = None,
    encoding: str = "xor",
    **keywords: Unpack[PublishKeywords],
) -> PublishResult:
    """Publish weights as a new version, so that inference engines of an RL job can follow the trainer.

    Use it after each step that engines shall see. Most versions are deltas of the version before, of a few per cent of
    the bytes. Every so often one is an anchor, which has all tensors. A :class:`bcp.Subscriber` brings a local folder
    to the newest version, and so does ``/pull_weights`` of SGLang.

    A version appears whole or not at all. One publisher at a time writes: another one is refused. The base of a delta
    is the version that was committed before, whatever has become of this process meanwhile.

    Tied tensors are published once, under the name of the input embedding.

    Args:
        source: path, URL or backend of a checkpoint, a :class:`bcp.Checkpoint`, a module, or a state dict. Live
            tensors have to be whole in this process. They may be on any device. Call on one rank.
        to: folder of the publication: a path, a URL, or a backend.
        version: number of the version, from 1 on, and larger than any before. A delta needs the version just before.
            After a gap the version is an anchor.
        anchor_every: an anchor follows so many versions after the last one; 1 publishes anchors only. A new set of
            names, shapes or dtypes makes an anchor, too.
        keep: how many of the newest versions stay readable. None keeps all. Anchors and deltas that a kept version
            needs stay.
        rename: new names by old ones, or a function, where engines use other names.
        encoding: ``"xor"``, or ``"overwrite"`` for readers that apply a delta twice. The latter is twice as large.
        **keywords: :class:`~bcp.publication.publishing.PublishKeywords`: ``dtype``, ``like``, ``cache``,
            ``claim_seconds``, ``shard_bytes``, ``storage_options`` and ``target_options``.

    Raises:
        InputError: an argument cannot be used, or a live tensor is sharded; nothing was written.
        ExistsError: the version is not newer than the newest one, or another publisher is at work.
        MissingExtraError: ``zstandard`` is not installed.
        NotACheckpointError: the path of the source is no checkpoint.
        CorruptError: the source, or the version before, is damaged. ``anchor_every=1`` goes on without the latter.
        StorageError: storage failed. The version appears later, if its commit had begun.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> bcp.publish(model, "weights/run-7", 1, dtype=torch.bfloat16).is_anchor
        True
        >>> with torch.no_grad():
        ...     _ = model.bias.add_(1)
        >>> result = bcp.publish(model, "weights/run-7", 2, dtype=torch.bfloat16)
        >>> result.is_anchor, result.changed
        (False, 1)

    """
    if isinstance(source, AsyncCheckpoint):
        raise InputError("an AsyncCheckpoint belongs to its event loop; pass a bcp.Checkpoint, or await bcp.apublish")
    call = partial(apublish, source, to, version, anchor_every=anchor_every, keep=keep, rename=rename)
    return called(partial(call, encoding=encoding, **keywords), f"publish version {version} to {shown(str(to))}")


async def apublish(
    source: WeightsSource,
    to: Path,
    version: int,
    *,
    anchor_every: int = 50,
    keep: int | None = None,
    rename: Rename = None,
    encoding: str = "xor",
    **keywords: Unpack[PublishKeywords],
) -> PublishResult:
    """Do the same as :func:`publish` from a coroutine. Live tensors may not change until it returns."""
    whole("version", version)
    whole("anchor_every", anchor_every)
    whole("keep", 1 if keep is None else keep)
    _check(encoding, keywords)
    options, claim_seconds = keywords.get("storage_options"), keywords.get("claim_seconds", CLAIM_SECONDS)
    async with AsyncExitStack() as stack:
        weights = await opened_weights(source, rename, keywords.get("dtype"), options, stack)
        companions = await companions_of(checked_folder(keywords.get("like")), options)
        files = with_dtype(companions, weights)
        place = place_of(to, None, keywords.get("target_options"))
        await stack.enter_async_context(place.opened)
        claim = await claimed(place.backend, place.path, version, claim_seconds)
        job = _Publication(claim, Chain(place.backend, place.path), weights, files, encoding, anchor_every, keywords)
        result = await job.publish()
        return result if keep is None else await job.retained(result, keep)


def _check(encoding: str, keywords: PublishKeywords) -> None:
    """Raise InputError or TypeError for arguments that cannot be any."""
    if encoding not in ENCODINGS:
        raise InputError(f"encoding={encoding!r} is unknown; pass one of {', '.join(map(repr, ENCODINGS))}")
    known = list(PublishKeywords.__annotations__)
    if unknown := sorted(set(keywords) - set(known)):
        raise TypeError(f"publish() has no keyword {unknown[0]!r}; it takes {', '.join(known)}")
    check_nbytes("shard_bytes", keywords.get("shard_bytes", SHARD_BYTES))
    amount("publish", "claim_seconds", keywords.get("claim_seconds", CLAIM_SECONDS), zero=True)
    check_zstandard()


@dataclass(slots=True)
class _Publication:
    """A version that is being published.

    Attributes:
        claim: this publisher's.
        chain: the versions before.
        weights: the tensors.
        companions: names and contents of the files beside the weights of an anchor.
        encoding: of a delta.
        anchor_every: as in :func:`publish`.
        keywords: as in :func:`publish`.
    """

    claim: Claim
    chain: Chain
    weights: Weights
    companions: list[tuple[str, bytes]]
    encoding: str
    anchor_every: int
    keywords: PublishKeywords

    async def publish(self) -> PublishResult:
        """Write the version, and commit it. A failure leaves no file, unless the commit may have happened."""
        claim = self.claim
        try:
            await sweep(claim.backend, self.chain, claim.newest, claim.version)
            index = await self._written()
            await claim.seal(index.encode())
        except BaseException as error:
            if not claim.is_sealing:
                with anyio.CancelScope(shield=True), say_what_is_left(error, f"Files may be left in {self._path}"):
                    await self._undo()
            raise
        return PublishResult(
            path=self._path,
            version=claim.version,
            is_anchor=index.is_anchor,
            has_delta=bool(index.encoding),
            tensors=len(self.weights),
            changed=len(index.deltas) if index.encoding else len(self.weights),
            nbytes=sum(entry.nbytes for entry in self.weights),
            delta_nbytes=index.delta_nbytes,
        )

    async def retained(self, result: PublishResult, keep: int) -> PublishResult:
        """Delete old versions. The new one is committed, so a failure is a warning."""
        try:
            deleted = await retain(self.claim.backend, self.chain, keep)
        except BcpError as error:
            log.warning("old versions of weights stay", publication=self.chain.path, error=str(error))
            return result
        return replace(result, deleted=tuple(deleted))

    @property
    def _path(self) -> str:
        return f"{self.chain.path}/{folder_of(self.claim.version)}"

    async def _undo(self) -> None:
        """Delete this publisher's files, and let the next one begin."""
        folder = child(self.claim.backend, folder_of(self.claim.version))
        mine = [info.key for info in await folder.list() if self.claim.id in info.key]
        await folder.delete(mine)
        await self.claim.release()

    async def _written(self) -> VersionIndex:
        """Write the files of the version; return its index."""
        claim, tag = self.claim, f"{self.claim.id}.safetensors"
        folder = child(claim.backend, folder_of(claim.version))
        before = await self._before()
        has_delta = before is not None and await self._has_same_layout(before)
        is_anchor = not has_delta or before is None or claim.version - before.anchor >= self.anchor_every
        written, delta = Written(), Written()
        if is_anchor:
            shard_bytes = self.keywords.get("shard_bytes", SHARD_BYTES)
            written = await write_anchor(folder, claim.id, self.weights, shard_bytes)
            for name, data in self.companions:
                await folder.put(name, data)
        if has_delta and before is not None:
            names = f"{DELTA}/delta-#-{tag}" if is_anchor else f"delta-#-{tag}"
            base = await self._base(before)
            delta = await write_delta(folder, names, self.weights, before.digests, base, self.encoding)
        digests = written.digests or delta.digests
        if delta.digests and delta.digests != digests:
            raise InputError(
                f"{self._path}: the tensors have changed while they were published; wait for the call before the next "
                "step of training"
            )
        return VersionIndex(
            version=claim.version,
            publication=claim.id if before is None else before.publication,
            anchor=claim.version if before is None or is_anchor else before.anchor,
            encoding=self.encoding if has_delta else "",
            files=written.files,
            deltas=delta.files,
            digests=digests,
            nbytes=written.nbytes,
            delta_nbytes=delta.nbytes,
        )

    async def _before(self) -> VersionIndex | None:
        """Return the newest version; None if there is none, or if it is damaged and the caller asks for an anchor."""
        if not self.claim.newest:
            return None
        try:
            return (await self.chain.version(self.claim.newest)).index
        except (CorruptError, NotACheckpointError):
            if self.anchor_every > 1:
                raise
            return None

    async def _has_same_layout(self, before: VersionIndex) -> bool:
        """Whether a delta can lead from the version before to this one."""
        if self.anchor_every == 1 or self.claim.version != before.version + 1:
            return False
        layout = await self.chain.layout(before.version)
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in layout.items()}
        return found == {entry.name: (entry.dtype, entry.shape) for entry in self.weights}

    async def _base(self, before: VersionIndex) -> Callable[[str], Awaitable[Bytes]]:
        """Return a function that reads tensors of the version before, from the cache where that is sound."""
        cache = self.keywords.get("cache")
        if cache is None:
            return lambda name: self.chain.tensor(name, before.version)
        subscriber = Subscriber(self.claim.backend, cache)
        await subscriber.apull(version=before.version)
        return await subscriber.reader(self.chain, before.version)
