"""Publish weights as a version that inference engines pull."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

from bcp._calls import SaveCall, require_asyncio
from bcp._job import OnSnapshot
from bcp._messages.publishing import PublishedVersion
from bcp._pending import Pending
from bcp._plain import plain
from bcp._text import shown
from bcp.backends.place import Path, place_of
from bcp.errors import BcpError, InputError
from bcp.planners import Framework
from bcp.policies.checks import amount
from bcp.protocols import Coordinator
from bcp.publication.encoding import ENCODINGS, check_zstandard
from bcp.publication.index import whole
from bcp.publication.kept import Cache
from bcp.publication.making import Making, Wish, write_files
from bcp.publication.sources import WeightsSource, is_live, opened_weights
from bcp.publication.together import Request, publish_call
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.read.facts import check_nbytes
from bcp.runtime import bridge as _bridge
from bcp.runtime.threads import in_thread
from bcp.tools.calls import called
from bcp.tools.exports.chosen import DType, Rename
from bcp.tools.exports.companions import checked_folder, companions_of, with_dtype

__all__ = ["PublishKeywords", "PublishResult", "apublish", "publish", "publish_async"]

SHARD_BYTES = 5 << 30
CLAIM_SECONDS = 600.0


class PublishKeywords(TypedDict, total=False):
    """Keywords of :func:`bcp.publish` beside those in its signature.

    Attributes:
        dtype: dtype of floating tensors in the publication, as in ``torch.bfloat16``; their own by default.
        like: a folder with ``config.json``, as for :func:`bcp.tools.export_hf`. Each anchor gets the files beside
            the weights, and so does the folder of a subscriber.
        cache: a local folder of publishers of this publication alone. It keeps the tensors of the newest version that
            this rank has written, so the base of a delta is read there. Without it, the base is read from the
            publication. Each base is compared with its digest. Ranks of a host may share the folder.
        claim_seconds: take over the claim of another publisher that began so long ago; 600 by default. Pass 0 if
            you know that the other one is dead. A claim that is taken over cannot commit any more.
        shard_bytes: bytes of tensors in a file of an anchor, at most; 5 GiB by default.
        storage_options: for the file system of the URL of a checkpoint, and of ``like``.
        target_options: for the file system of the publication's URL.
        framework: of a live model, as for :func:`bcp.save`.
        coordinator: agreement between the ranks that publish a live model, as for :func:`bcp.save`. Pass
            ``bcp.coordinators.SoloCoordinator()`` if one rank of a job publishes alone, and has all tensors whole.
    """

    dtype: DType
    like: str | os.PathLike[str] | None
    cache: str | os.PathLike[str] | None
    claim_seconds: float
    shard_bytes: int
    storage_options: Mapping[str, Any] | None
    target_options: Mapping[str, Any] | None
    framework: Framework
    coordinator: Coordinator | None


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

    Call it on all ranks for a live model, sharded or not, as :func:`bcp.save`. Each rank writes a part of the tensors.
    No rank gathers the model, and rank 0 commits. Call it on one rank for a checkpoint.

    A version appears whole or not at all. One publisher at a time writes: another one is refused. The base of a delta
    is the version that was committed before, whatever has become of this process meanwhile.

    Tied tensors are published once, under the name of the input embedding.

    Args:
        source: path, URL or backend of a checkpoint, a :class:`bcp.Checkpoint`, a module, or a state dict. Live
            tensors may be on any device, and may be sharded in all ways that a save understands.
        to: folder of the publication: a path, a URL, or a backend. All ranks have to see it.
        version: number of the version, from 1 on, and larger than any before. A delta needs the version just before.
            After a gap the version is an anchor.
        anchor_every: an anchor follows so many versions after the last one; 1 publishes anchors only. A new set of
            names, shapes or dtypes makes an anchor, too.
        keep: how many of the newest versions stay readable. None keeps all. Anchors and deltas that a kept version
            needs stay.
        rename: new names by old ones, or a function, where engines use other names.
        encoding: ``"xor"``, or ``"overwrite"`` for readers that apply a delta twice. The latter is twice as large.
        **keywords: :class:`~bcp.publication.publishing.PublishKeywords`: ``dtype``, ``like``, ``cache``,
            ``claim_seconds``, ``shard_bytes``, ``storage_options``, ``target_options``, ``framework`` and
            ``coordinator``.

    Raises:
        InputError: an argument cannot be used; nothing was written. The other ranks raise :class:`PeerError`.
        CoverageError: the ranks' shards of a tensor leave a gap or overlap; nothing was written.
        ExistsError: the version is not newer than the newest one, or another publisher is at work.
        MissingExtraError: ``zstandard`` is not installed.
        NotACheckpointError: the path of the source is no checkpoint.
        CorruptError: the source, or the version before, is damaged. ``anchor_every=1`` goes on without the latter.
        StorageError: storage failed. The version appears later, if its commit had begun.
        PeerError: another rank failed, died or fell silent.

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
    wish = partial(_wish, version, anchor_every, keep, encoding, keywords)
    if not is_live(source):
        if isinstance(source, AsyncCheckpoint):
            raise InputError("an AsyncCheckpoint belongs to its event loop; pass a bcp.Checkpoint or use bcp.apublish")
        name = f"publish version {version} to {shown(str(to))}"
        return called(partial(_publish_saved, source, to, wish(), rename, keywords), name)
    try:
        call = _live_call(source, to, wish, rename, keywords, background=False)
        return _bridge.run(partial(call, None))
    except BcpError as error:
        raise plain(error) from error.__cause__


def publish_async(
    source: WeightsSource,
    to: Path,
    version: int,
    *,
    anchor_every: int = 50,
    keep: int | None = None,
    rename: Rename = None,
    encoding: str = "xor",
    optimizer: Any = None,
    **keywords: Unpack[PublishKeywords],
) -> Pending[PublishResult]:
    """Publish weights in the background, so that training goes on meanwhile.

    The call blocks until each rank has its part of a live model in host memory, as an asynchronous save does. Training
    may then change the model. A checkpoint does not block.

    With ``optimizer=`` the call returns at once, and the copy is made while forward and backward run, as that of a lazy
    save. The next step of the optimizer waits for the copy.

    The other arguments and errors are those of :func:`publish`. The :class:`~bcp.Pending` raises errors of the
    background. Wait for it before the next version.

    Args:
        source: see there, like all others.
        to: see there.
        version: see there.
        anchor_every: see there.
        keep: see there.
        rename: see there.
        encoding: see there.
        optimizer: one or several, as in ``states`` of a save, that change the model; None for none.
        **keywords: see there.

    Raises:
        StateChangedError: the model was written to before its copy was made.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> pending = bcp.publish_async(model, "weights/run-11", 1)
        >>> with torch.no_grad():
        ...     _ = model.bias.add_(1)  # version 1 has the bias from before
        >>> pending.wait().version
        1

    """
    wish = partial(_wish, version, anchor_every, keep, encoding, keywords)
    name = f"publish version {version} to {shown(str(to))}"
    try:
        if is_live(source):
            call = _live_call(source, to, wish, rename, keywords, background=True, optimizer=optimizer)
            background = _bridge.start(call, name=name)
        elif isinstance(source, AsyncCheckpoint):
            raise InputError("an AsyncCheckpoint belongs to its event loop; pass a bcp.Checkpoint or use bcp.apublish")
        elif optimizer is not None:
            raise InputError("optimizer= holds back the steps of a live model, and the source is a checkpoint")
        else:
            work = partial(_publish_saved, source, to, wish(), rename, keywords)
            background = _bridge.start(partial(_at_once, work), name=name)
        background.wait_started()
    except BcpError as error:
        raise plain(error) from error.__cause__
    return Pending(background)


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
    wish = partial(_wish, version, anchor_every, keep, encoding, keywords)
    if not is_live(source):
        return await _publish_saved(source, to, wish(), rename, keywords)
    require_asyncio()
    return await _live_call(source, to, wish, rename, keywords, background=False)(None)


def _wish(version: int, anchor_every: int, keep: int | None, encoding: str, keywords: PublishKeywords) -> Wish:
    """Check arguments. Raises InputError or TypeError for those that cannot be any."""
    whole("version", version)
    whole("anchor_every", anchor_every)
    whole("keep", 1 if keep is None else keep)
    if encoding not in ENCODINGS:
        raise InputError(f"encoding={encoding!r} is unknown; pass one of {', '.join(map(repr, ENCODINGS))}")
    known = list(PublishKeywords.__annotations__)
    if unknown := sorted(set(keywords) - set(known)):
        raise TypeError(f"publish() has no keyword {unknown[0]!r}; it takes {', '.join(known)}")
    shard_bytes, claim_seconds = keywords.get("shard_bytes", SHARD_BYTES), keywords.get("claim_seconds", CLAIM_SECONDS)
    check_nbytes("shard_bytes", shard_bytes)
    amount("publish", "claim_seconds", claim_seconds, zero=True)
    check_zstandard()
    return Wish(version, anchor_every, keep, encoding, shard_bytes, claim_seconds)


def _live_call(
    source: object,
    to: Path,
    wish: Callable[[], Wish],
    rename: Rename,
    keywords: PublishKeywords,
    *,
    background: bool,
    optimizer: object = None,
) -> Callable[[OnSnapshot | None], Awaitable[PublishResult]]:
    """Take this rank's place in the publication of a live model."""

    def request() -> Request:
        return Request(
            to=to,
            wish=wish(),
            rename=rename,
            dtype=keywords.get("dtype"),
            like=keywords.get("like"),
            cache=keywords.get("cache"),
            storage_options=keywords.get("storage_options"),
            target_options=keywords.get("target_options"),
        )

    framework, given = keywords.get("framework"), keywords.get("coordinator")
    call: SaveCall[PublishedVersion] = publish_call(
        request, source, framework, given, background=background, optimizer=optimizer
    )

    async def run(on_snapshot: OnSnapshot | None) -> PublishResult:
        return _result(await call.run(on_snapshot))

    return run


async def _at_once(work: Callable[[], Awaitable[PublishResult]], started: OnSnapshot) -> PublishResult:
    """Let the caller go on, and do the work."""
    started()
    return await work()


async def _publish_saved(source: Any, to: Path, wish: Wish, rename: Rename, keywords: PublishKeywords) -> PublishResult:
    """Publish a checkpoint. A failure leaves no file, unless the commit may have happened."""
    options, folder = keywords.get("storage_options"), keywords.get("cache")
    cache = None if folder is None else Cache(folder)
    async with AsyncExitStack() as stack:
        weights = await opened_weights(source, rename, keywords.get("dtype"), options, stack)
        companions = await companions_of(checked_folder(keywords.get("like")), options)
        files = with_dtype(companions, weights.own)
        if cache is not None:
            await in_thread(cache.look)
        place = place_of(to, None, keywords.get("target_options"))
        await stack.enter_async_context(place.opened)
        layout = {entry.name: (entry.dtype, entry.shape) for entry in weights.own}
        nbytes = sum(entry.nbytes for entry in weights.own)
        making = await Making.begin(place.backend, place.path, wish, layout, nbytes, files)
        try:
            written = await write_files(making.chain, wish, making.begun, weights, cache)
            return _result(await making.commit([written]))
        except BaseException as error:
            await making.undo(error)
            raise


def _result(told: PublishedVersion) -> PublishResult:
    return PublishResult(**{name: getattr(told, name) for name in PublishResult.__dataclass_fields__})
