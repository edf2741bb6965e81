"""A live model is published by all ranks of its job: each writes the tensors that it owns, and rank 0 commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import xxhash

from bcp import _save as saving
from bcp._agree import collective_operation, gather_broadcast
from bcp._calls import SaveCall, snapshot_call
from bcp._job import SaveJob
from bcp._messages.publishing import BegunVersion, PublishedVersion, WrittenFiles
from bcp._workflow import plan_save
from bcp.backends.place import Path, place_of
from bcp.errors import InputError
from bcp.format.layout_file import decode_layout
from bcp.plan.layout import Layout
from bcp.planners import Framework
from bcp.protocols import Agreement, Backend, Coordinator
from bcp.publication.chain import Chain
from bcp.publication.exchange import SharedWeights
from bcp.publication.kept import Cache
from bcp.publication.making import Making, Wish, undo_files, write_files
from bcp.publication.shares import LiveShare, Share, copied_share
from bcp.publication.sources import check_live, live_tensors
from bcp.runtime.cache import LruCache
from bcp.runtime.threads import collect_failure_garbage, in_thread, in_thread_gc_paused
from bcp.stages.items import WriteItem
from bcp.tools.exports.chosen import Chosen, DType, Rename
from bcp.tools.exports.companions import checked_folder, companions_of, with_dtype

__all__ = ["Request", "publish_call"]

_layouts: LruCache[bytes, Layout] = LruCache(4)
"""Layouts of models, by the key of their plan; a job publishes one as a rule."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one rank was asked to publish, beside the model.

    Attributes:
        to: the publication.
        wish: all ranks have the same.
        rename: new names by old ones, or a function.
        dtype: of floating tensors; None for their own.
        like: a folder with the files beside the weights.
        cache: a local folder, or None.
        storage_options: for the file system of ``like``.
        target_options: for the file system of the publication.
    """

    to: Path
    wish: Wish
    rename: Rename
    dtype: DType
    like: str | os.PathLike[str] | None
    cache: str | os.PathLike[str] | None
    storage_options: Any
    target_options: Any


def publish_call(
    make_request: Callable[[], Request],
    model: Any,
    framework: Framework,
    given: Coordinator | None,
    *,
    background: bool,
    optimizer: object = None,
) -> SaveCall[PublishedVersion]:
    """Take this rank's place in a publication. Raises only if there is no way to tell the other ranks.

    Args:
        make_request: says what to publish; raises InputError for arguments that cannot be any.
        model: a module, or tensors by name.
        framework: as for :func:`bcp.save`.
        given: the coordinator, or None.
        background: whether the caller goes on once the model is in host memory.
        optimizer: holds back its next step until then, so that the caller goes on at once; None for no such optimizer.

    """
    requests: list[Request] = []

    def check() -> str:
        request = make_request()
        check_live(model)
        checked_folder(request.like)
        requests.append(request)
        path = place_of(request.to, None, request.target_options).path
        return f"publish version {request.wish.version} to {path} with {request.wish} dtype={request.dtype}"

    async def work(job: SaveJob) -> PublishedVersion:
        return await _publish(job, requests.pop())

    states = {"model": model}
    return snapshot_call("a publication", check, states, framework, given, work, background=background, steps=optimizer)


@collect_failure_garbage()
async def _publish(job: SaveJob, request: Request) -> PublishedVersion:
    """Plan with all ranks, copy, write, commit. The version exists when this returns, or not at all."""
    place = place_of(request.to, None, request.target_options)
    with saving.only_save_to(job) as refusal, saving.Snapshot(job) as snapshot:
        async with place.opened, AsyncExitStack() as stack, collective_operation(job.operation) as agreement:
            _, _, plan, planned, items, _ = await plan_save(agreement, job, snapshot, refusal)
            share = await _share(job, items, snapshot, stack)
            layout = await _layout(agreement, job.rank, plan.key, planned.layout if planned else b"")
            chosen = await in_thread(live_tensors, layout, request.rename, request.dtype)
            weights = SharedWeights(agreement, layout, chosen, share, job.rank, job.world_size)
            part = _Part(agreement, job.rank, request, place.backend, place.path)
            return await part.publish(chosen, weights)


async def _share(job: SaveJob, items: Sequence[WriteItem], snapshot: saving.Snapshot, stack: AsyncExitStack) -> Share:
    """Copy the part of this rank, unless the caller waits for the end anyway."""
    if job.returns_after_snapshot:
        return await copied_share(job, items, snapshot, stack)
    return LiveShare(items, snapshot.fence)


async def _layout(agreement: Agreement, rank: int, key: bytes, encoded: bytes) -> Layout:
    """Return the layout of the model, which rank 0 tells those who do not know it."""
    known = _layouts.get(key)

    async def answer(messages: Sequence[bytes]) -> bytes:
        return b"" if all(messages) else encoded

    told = await gather_broadcast(agreement, "layout", rank, b"" if known is None else b"\1", answer)
    if known is None:
        known = await in_thread_gc_paused(decode_layout, told)
        _layouts.put(key, known)
    return known


@dataclass(slots=True)
class _Part:
    """The part of one rank in a publication.

    Attributes:
        agreement: of all ranks.
        rank: this one.
        request: the caller's.
        backend: the publication.
        path: its name, for messages.
        making: the version, on rank 0.
        begun: the version, once it is claimed.
        is_written: whether rank 0 may commit this rank's files.
    """

    agreement: Agreement
    rank: int
    request: Request
    backend: Backend
    path: str
    making: Making | None = None
    begun: BegunVersion | None = None
    is_written: bool = False

    async def publish(self, chosen: Sequence[Chosen], weights: SharedWeights) -> PublishedVersion:
        """Claim, write and commit with all ranks. A failure leaves no file, unless the commit may have happened."""
        request = self.request
        cache = None if request.cache is None else Cache(request.cache)
        try:
            if cache is not None:
                await in_thread(cache.look)
            self.begun = await self._begin(chosen)
            chain = Chain(self.backend, self.path) if self.making is None else self.making.chain
            written = await write_files(chain, request.wish, self.begun, weights, cache, self.rank)
            return await self._commit(written)
        except BaseException as error:
            if self.making is not None:
                await self.making.undo(error)
            elif self.begun is not None and not self.is_written:
                await undo_files(self.backend, self.path, self.begun, error, self.rank)
            raise

    async def _begin(self, chosen: Sequence[Chosen]) -> BegunVersion:
        """Let rank 0 claim the version, if all ranks have the same names and dtypes."""

        async def answer(messages: Sequence[bytes]) -> bytes:
            for rank, message in enumerate(messages):
                if message != messages[0]:
                    raise InputError(
                        f"rank {rank} gives the tensors other names or dtypes than rank 0; pass the same rename= and "
                        "dtype= on all ranks"
                    )
            layout = {each.name: (each.dtype, each.shape) for each in chosen}
            nbytes, request = sum(each.nbytes for each in chosen), self.request
            companions = await companions_of(checked_folder(request.like), request.storage_options)
            files = with_dtype(companions, chosen)
            self.making = await Making.begin(self.backend, self.path, request.wish, layout, nbytes, files)
            return self.making.begun.encode()

        named = xxhash.xxh3_128_digest(repr([(each.row, each.name, each.dtype) for each in chosen]).encode())
        return BegunVersion.decode(await gather_broadcast(self.agreement, "claim", self.rank, named, answer), sender=0)

    async def _commit(self, written: WrittenFiles) -> PublishedVersion:
        """Let rank 0 commit the files of all ranks."""

        async def answer(messages: Sequence[bytes]) -> bytes:
            assert self.making is not None  # noqa: S101 -- rank 0 has claimed
            return (await self.making.commit(WrittenFiles.decode_all(messages))).encode()

        self.is_written = True
        outcome = await gather_broadcast(self.agreement, "commit", self.rank, written.encode(), answer)
        return PublishedVersion.decode(outcome, sender=0)
