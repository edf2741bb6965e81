"""The protocols of a planner, a storage backend, a coordinator and a codec: the seams of bcp.

Third parties implement these; nothing here has to be inherited from. ``bcp.testing`` ships the
conformance suites that every implementation, ours included, has to pass.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from bcp.errors import InputError
from bcp.events import RetryEvent, ignore

if TYPE_CHECKING:
    import torch

    from bcp.plan.columns import Ints
    from bcp.plan.read.renamed import CheckpointNames
    from bcp.plan.shards import ShardTable

__all__ = [
    "REFUSED",
    "Agreement",
    "Backend",
    "BlockChecker",
    "Buffer",
    "Codec",
    "Concurrent",
    "Coordinator",
    "CpuAwareWriter",
    "FailureReporter",
    "FolderLister",
    "LoadTargets",
    "LocalShards",
    "ObjectInfo",
    "ObjectKey",
    "PartWriter",
    "Planner",
    "Refused",
    "RetryPolicy",
    "Retrying",
    "ScatterReader",
    "ShardedState",
    "Stateful",
    "States",
    "Sweeper",
    "Unfinished",
    "Version",
    "at_once_of",
    "checks_blocks",
    "flat_view",
    "folders_of",
    "retries_of",
]

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes; :func:`flat_view` looks at any as bytes."""


def flat_view(data: Buffer) -> memoryview:
    """Return a flat view of single bytes of any contiguous buffer, of whatever items and dimensions, without a copy.

    Raises:
        TypeError: it is no buffer, or not contiguous.

    """
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


Version = str
"""Names the contents of one object, as an ETag or a generation does. Equal versions have equal contents. Not empty."""

States = Mapping[str, Any]
"""``{"model": ..., "optimizer": ..., "dataloader": ..., "extra_states": ...}``; any subset."""

ObjectKey = tuple[str, str]
"""(kind, dotted path) of a leaf that is not a tensor, as in ``("optimizer", "param_groups.w.lr")``."""


@runtime_checkable
class Stateful(Protocol):
    """Anything that can give and take its state: schedulers, dataloaders, gradient scalers."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take the state back."""


@runtime_checkable
class ShardedState(Protocol):
    """The state of data-parallel readers that another number of readers can load: a shared part, and units.

    A unit moves between readers as a whole; its id is unique among all readers. Loading is two calls on each reader:
    :meth:`wanted_units` chooses, and :meth:`load_units` gets the chosen ones.

    Attributes:
        reader: this reader's number, the data-parallel rank. Ranks that differ in other coordinates only have the same.
        readers: how many readers there are.
    """

    reader: int
    readers: int

    def shared_state(self) -> Any:
        """Return the part that is equal on all readers; it is written once."""

    def unit_states(self) -> Mapping[str, Any]:
        """Return this reader's units by id: nested Python values and tensors, which nothing changes afterwards."""

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> Sequence[str]:
        """Return which of a checkpoint's units this reader loads, from the ids of all of them. Changes nothing."""

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        """Take the wanted units, which belong to the reader afterwards. Raises before it changes anything."""

    def prepare(self, step: int) -> None:
        """Begin to gather the state in the background. It may be called in the step before a save of ``step``."""


# -- planners ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards of one rank: a table without tensors, and the tensors beside it.

    Attributes:
        table: one row a shard (box of the global tensor, flat interval inside the box).
        tensors: ``tensors[i]`` is the live memory of row ``i``. It has the shape of the row's box, or is 1-D with
            ``stop - start`` elements if the row is a flat interval of its box. The tensors are never copies, are not
            tracked by autograd, and need not be contiguous. A load writes them in place.
        objects: leaves of model and optimizer that are not tensors; by contract equal on all ranks that have them.
        address: int64[n], for a planner that knows: where the first byte of each row is, which is one tensor of the
            CPU, row-major and neither lazily conjugated nor negated. Otherwise the tensors are asked.
        kept: objects that keep the memory at these addresses alive, should a tensor be given other memory meanwhile.
    """

    table: ShardTable
    tensors: Sequence[torch.Tensor]
    objects: Mapping[ObjectKey, Any] = field(default_factory=dict)
    address: Ints | None = None
    kept: Sequence[object] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Names of entries that a module does not take back from its own state dict, as in ``"model: head.weight"``.

    Attributes:
        missing: names that the module expects, and that its ``state_dict()`` lacks.
        unexpected: names that its ``state_dict()`` has, and that its ``load_state_dict()`` leaves unused.

    Example::

        from bcp.extend import Refused

        refused = Refused(unexpected=("model: layer.weight.absmax",))
        assert refused

    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected)


@dataclass(frozen=True, slots=True)
class LoadTargets:
    """The memory and the values that a load fills.

    Attributes:
        shards: live, writable memory, as in :class:`LocalShards`; ``objects`` holds the current values of
            the leaves that the target wants.
        check: called with the values of the objects that the checkpoint has, before any tensor is loaded. Raises
            :class:`~bcp.errors.MismatchError` where they cannot be put into the target, as hyper-parameters of one
            target group that differ between its parameters. Touches nothing.
        finish: called once, after all tensors are in place, with the same values; sets them in the target. It first
            compares hyper-parameters that are themselves tensors, which cannot be compared earlier.
            Keys may be more or fewer than ``shards.objects``.
        refused: returns the entries that modules are known to refuse so far. A load asks before it reads, and again
            after ``finish``: under ``strict`` it raises :class:`~bcp.errors.FqnMismatchError`, else it reports them.
        foreign: entries of the checkpoint that belong to a leaf of the target and do not fit it, as in
            ``"optimizer: state.w.exp_avg"`` for SGD, each with the class that cannot take it. They are not among
            ``shards``. A strict load is refused; otherwise the report lists them as unexpected.
    """

    shards: LocalShards
    check: Callable[[Mapping[ObjectKey, Any]], None]
    finish: Callable[[Mapping[ObjectKey, Any]], None]
    refused: Callable[[], Refused] = Refused
    foreign: Mapping[str, str] = field(default_factory=dict)


class Planner(Protocol):
    """Knows how one training framework lays out its tensors (paper sec. 3.1, 3.2).

    A planner reads, it never communicates: both methods see this rank's state only and call no collective.
    It handles the kinds ``model`` and ``optimizer``.
    """

    name: str

    def local_shards(self, states: States) -> LocalShards:
        """Return the shards of this rank. Raises :class:`~bcp.errors.StateError` if a leaf cannot be saved."""

    def load_targets(self, states: States, saved: CheckpointNames) -> LoadTargets:
        """Return the memory that this rank wants filled; optimizer states that do not exist yet may be made for that.

        ``saved`` has the names of the checkpoint, as ``LoadOptions(rename=...)`` makes them the target's.

        Nothing of the states changes here: new states become the optimizer's own in ``LoadTargets.finish``.
        """


# -- storage ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object.

    Attributes:
        key: relative to the backend's root.
        nbytes: size in bytes.
        modified: Unix seconds of the last write, by the clock of the storage; None where a listing does not tell it.
    """

    key: str
    nbytes: int
    modified: float | None = field(default=None, compare=False)


class PartWriter(Protocol):
    """Receives the parts of one object, concurrently and in any order."""

    async def write_part(self, index: int, offset: int, data: Buffer) -> None:
        """Take part ``index`` (0, 1, 2 ... in file order), whose first byte is byte ``offset`` of the object.

        The buffer may be reused as soon as this returns. Together the parts tile the object.
        """


@runtime_checkable
class CpuAwareWriter(Protocol):
    """Optional property of a :class:`PartWriter`: whether storing a part takes CPU time."""

    @property
    def uses_cpu(self) -> bool:
        """Whether it does. A writer that does not, stores parts while others are being copied and training waits."""


@runtime_checkable
class Backend(Protocol):
    """An object store under one root. Keys are relative and '/'-separated; ``..`` is refused.

    Every method may be called concurrently. Errors: a missing key is ``FileNotFoundError``; everything else
    that goes wrong in storage is :class:`~bcp.errors.StorageError` with the original error as its cause.
    """

    async def put(self, key: str, data: Buffer) -> None:
        """Store a small object durably: all of it or none; replaces an existing one atomically."""

    async def version(self, key: str) -> Version | None:
        """Return the version of an object, or None if there is none."""

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        """Store a small object as :meth:`put` does, if the object there still has the version ``expected``.

        Comparison and replacement are one step, between all processes and hosts that use the storage: of several calls
        with the same ``expected`` one at most succeeds. A process that dies within the call blocks no later call.
        Saves commit with this method.

        A backend whose objects lie in directories makes none here. A directory that was moved away took the files of
        the save along, so a commit in a new one would have no data.

        Args:
            key: the object.
            data: its new contents.
            expected: version of the object to be replaced; None if the object must not exist yet.

        Returns:
            The version of the new object. None if the object has another version than ``expected``, or if another call
            with the same ``expected`` has taken precedence. Then this call has changed nothing, and never will. A store
            whose refusal may hide an earlier success of the same request has to read the object first.

        Raises:
            StorageError: storage failed. The object is the old one or the new one, and may still become the new one.

        Example::

            version = await backend.version("metadata.arrow")
            if await backend.put_if("metadata.arrow", b"new", version) is None:
                print("another job was quicker")

        """

    def open_write(self, key: str, nbytes: int | None = None) -> AbstractAsyncContextManager[PartWriter]:
        """Write a large object in parts. ``nbytes``: its size where it is known beforehand.

        The object appears whole and durable when the context ends well, and not at all otherwise;
        a failed or cancelled context leaves nothing behind, and an existing object untouched.
        """

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill ``out`` with the object's bytes from ``start``. Fewer bytes than that: :class:`CorruptError`."""

    async def get(self, key: str) -> Buffer:
        """Read a small object whole."""

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """List the objects whose key starts with ``prefix``, in key order. No such object: an empty list."""

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is not an error."""

    async def aclose(self) -> None:
        """Let go of connections. Idempotent."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Something that an unfinished write has left, or still uses.

    Attributes:
        key: key of the object that was being written.
        name: the backend's own name of it: a temporary file, the id of a multipart upload.
    """

    key: str
    name: str


@runtime_checkable
class Sweeper(Protocol):
    """Optional methods of a backend whose unfinished writes can outlive their writer.

    Listing and removal are two steps. A save lists before it commits and removes after it. Then every listed writer is
    older than the commit and can no longer commit itself, and no younger one loses a file.
    """

    async def unfinished(self) -> Sequence[Unfinished]:
        """List the remains of unfinished writes, also those of live writers. Finished objects are not listed."""

    async def discard(self, unfinished: Sequence[Unfinished]) -> None:
        """Remove some of those that :meth:`unfinished` listed. An absent one is no error. A writer that lives fails."""


@runtime_checkable
class FolderLister(Protocol):
    """Optional method of a backend that can list folders without the objects in them.

    A folder is the part of keys up to a slash. A run with thousands of objects in each checkpoint lists its checkpoints
    with it.
    """

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """List the names of the folders directly below ``prefix`` in order, by one request for each page.

        A backend over directories may list empty ones, too. :meth:`Backend.delete` removes a directory that becomes
        empty, and one that is empty already if a key in it is deleted.

        Args:
            prefix: a folder with its slash, as in ``"runs/7/"``; "" for the root. An absent one has no folders.

        Returns:
            The names, relative to ``prefix`` and without slashes.

        Raises:
            StorageError: storage failed.

        """


async def folders_of(backend: Backend, prefix: str = "") -> list[str]:
    """Return the names of the folders directly below ``prefix``, in order.

    Args:
        backend: lists them by itself if it is a :class:`FolderLister`; else all objects are listed.
        prefix: a folder with its slash, or "".

    Raises:
        StorageError: storage failed.

    Example::

        from bcp.protocols import folders_of

        await backend.put("step-00001000/metadata.arrow", b"data")
        assert "step-00001000" in await folders_of(backend)

    """
    if isinstance(backend, FolderLister):
        return list(await backend.folders(prefix))
    below = [info.key[len(prefix) :].partition("/") for info in await backend.list(prefix)]
    return sorted({name for name, slash, _ in below if slash})


@runtime_checkable
class Retrying(Protocol):
    """A backend that makes failed requests again, and counts them."""

    @property
    def retry_count(self) -> int:
        """How many requests it has made again so far."""


def retries_of(backend: object) -> int:
    """Return how many requests a backend has made again so far; 0 for one that does not count them."""
    return backend.retry_count if isinstance(backend, Retrying) else 0


@runtime_checkable
class Concurrent(Protocol):
    """A backend that knows how many parts or reads it likes to have under way at once."""

    @property
    def at_once(self) -> int:
        """The number of parts or reads; large for an object store, whose requests mostly wait for answers."""


def at_once_of(backend: object) -> int:
    """Return how many parts or reads of a backend shall be under way at once; 4 for one that does not say."""
    return backend.at_once if isinstance(backend, Concurrent) else 4


@runtime_checkable
class BlockChecker(Protocol):
    """A backend that may know the checksums of a checkpoint's blocks, and compare every whole block that it reads."""

    @property
    def checks_blocks(self) -> bool:
        """Whether it does, so that its reader need not."""


def checks_blocks(backend: object) -> bool:
    """Return whether a backend compares blocks with their checksums; False for one that does not say."""
    return isinstance(backend, BlockChecker) and backend.checks_blocks


@runtime_checkable
class ScatterReader(Protocol):
    """A backend that can fill many buffers with one read: tensors, without a copy in between."""

    async def read_scattered(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with the object's bytes from ``start``.

        They are writable, flat, of any number and of any length. Errors are those of :meth:`Backend.read_into`; after
        one the buffers' contents are undefined.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, how long and how many requests are made.

    Attributes:
        deadline_seconds: time after which a request that has failed so far is not made again.
        attempt_seconds: time that one attempt may take, and a second more for each MiB that it moves.
        first_pause_seconds: time before the second attempt, at most; doubles with each further one. The pause itself is
            random, so that a thousand ranks do not come back together.
        longest_pause_seconds: the longest pause, unless the server asks for more.
        allowance: attempts beyond the first ones that all requests of a backend may make together; every ten
            successes add one. A store that fails more often than that is broken, and more requests would not mend it.
        requests: requests at a time. Half as many whenever the server says that it is busy, and one more again for
            each round of successes.
        hedge_seconds: time after which a read is also asked for a second time, and the first answer counts; None for
            never.
        on_retry: called with a :class:`~bcp.events.RetryEvent` before each pause, on the event loop.

    Example::

        policy = bcp.RetryPolicy(deadline_seconds=60.0, hedge_seconds=2.0, on_retry=print)
        options = bcp.SaveOptions(retries=policy)

    """

    deadline_seconds: float = 300.0
    attempt_seconds: float = 30.0
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 15.0
    allowance: int = 200
    requests: int = 32
    hedge_seconds: float | None = None
    on_retry: Callable[[RetryEvent], None] = ignore

    def __post_init__(self) -> None:
        for name in ("deadline_seconds", "attempt_seconds", "first_pause_seconds", "longest_pause_seconds", "requests"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0):
                raise InputError(f"RetryPolicy({name}={value!r}) must be positive: pass a number")
        hedge = 1 if self.hedge_seconds is None else self.hedge_seconds
        if not (_is_number(self.allowance) and self.allowance >= 0 and _is_number(hedge) and hedge > 0):
            raise InputError(
                f"RetryPolicy(allowance={self.allowance!r}, hedge_seconds={self.hedge_seconds!r}) must not be "
                "negative: pass numbers"
            )
        if not callable(self.on_retry):
            raise InputError(f"RetryPolicy(on_retry={self.on_retry!r}) cannot be called; pass a function of one event")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


# -- agreement between ranks ------------------------------------------------------------------

REFUSED = "a call whose arguments were refused"
"""The ``operation`` that a rank with refused arguments passes to :meth:`Coordinator.begin`."""


class Agreement(Protocol):
    """One operation that all ranks take part in (one save, one load).

    The verbs are collective and are called in the same order on every rank. If any rank leaves the operation with an
    error, dies, or falls silent for ``timeout`` seconds, every other rank gets :class:`~bcp.errors.PeerError`. A verb
    raises it; between verbs the body of the ``async with`` block is cancelled.
    """

    async def gather_scatter(
        self, step: str, payload: bytes, divide: Callable[[Sequence[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Gather ``payload`` of every rank, let rank 0 call ``divide`` (in a thread), give every rank its answer."""

    async def gather_broadcast(
        self, step: str, payload: bytes, decide: Callable[[Sequence[bytes]], Awaitable[bytes]]
    ) -> bytes:
        """Gather ``payload`` of every rank, let rank 0 await ``decide``, give all ranks its answer."""

    async def all_to_all(self, send: Sequence[Buffer], receive: Sequence[Buffer]) -> None:
        """Send ``send[r]`` to every rank r, and fill ``receive[r]`` with the bytes that rank r sends; for bulk data.

        Both sides of a pair give buffers of one length. They belong to the caller again when this returns or raises.
        """

    async def bandwidth(self) -> float:
        """Return how many bytes a second this rank sends to other hosts just now; inf if all ranks share a host.

        It takes a tenth of a second at most on a network that answers.
        """


@runtime_checkable
class FailureReporter(Protocol):
    """Optional method of an :class:`Agreement`: a rank names another one whose connection has failed.

    A load with ``exchange="gloo"`` calls it. Without it, the others are told that the calling rank has failed.
    """

    async def report_failure(self, rank: int, cause: str) -> Exception:
        """Tell all ranks, unless one of them has told a cause already; return the error that ends the operation."""


class Coordinator(Protocol):
    """Agreement between ranks over a private channel; never uses the training process group.

    Attributes:
        rank: this rank, 0 <= rank < world_size.
        world_size: how many ranks take part.
    """

    @property
    def rank(self) -> int: ...  # noqa: D102 -- described above
    @property
    def world_size(self) -> int: ...  # noqa: D102 -- described above

    def begin(self, operation: str, timeout: float) -> AbstractAsyncContextManager[Agreement]:
        """Take this rank's place in the next operation, at once: the n-th ``begin`` of every rank belong together.

        Entering the context starts the exchange of signs of life. Leaving it with an error tells all others (a
        :class:`PeerError` is not told again). ``operation`` is the name of the operation ("save /ckpt/1"). Ranks with
        different names get an error that shows both. :data:`REFUSED` agrees with everything: such a rank only comes to
        tell the others its error. ``timeout`` is in seconds of silence.
        """


# -- codecs -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Codec:
    """A pair of functions that change bytes on their way to storage and back.

    Makes a stage of the save graph and its twin of the load graph. The name is recorded with the bytes it
    touched; a load without it raises :class:`~bcp.errors.MissingCodecError` that says which one is missing.
    Both functions run in worker threads, several at once, one part at a time.

    Attributes:
        name: as recorded, for instance ``"zstd"``; lower-case letters, digits, ``-``, ``_`` and ``.``.
        encode: the bytes of one part to the bytes that are stored.
        decode: the exact inverse.
        workers: how many parts may be encoded or decoded at once.

    Example::

        import zlib

        codec = bcp.extend.Codec("zlib", encode=zlib.compress, decode=zlib.decompress)
        bcp.save("ckpt/step-200", states, options=bcp.SaveOptions(codecs=[codec]))
        bcp.load("ckpt/step-200", states, options=bcp.LoadOptions(codecs=[codec]))

    """

    name: str
    encode: Callable[[Buffer], Buffer]
    decode: Callable[[Buffer], Buffer]
    workers: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", self.name):
            raise InputError(f"codec name {self.name!r}: use lower-case letters, digits, '-', '_' and '.'")
