"""A checkpoint as an object: what is in it, any part of it, whether it is sound. No model, no job, no other ranks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from bcp._plain import plain
from bcp.backends import child
from bcp.backends.objects.retry import in_turns
from bcp.backends.place import RESERVED, ROLE, Path, place_of
from bcp.errors import BcpError, FqnMismatchError, InputError
from bcp.format.metadata import METADATA_KEY, Metadata, decode_metadata
from bcp.options import LoadOptions, unchanged
from bcp.plan.shards import KINDS, OPAQUE_KINDS
from bcp.protocols import ObjectKey, folders_of
from bcp.read.facts import Facts, check_kind, check_nbytes
from bcp.read.opening import read_metadata
from bcp.read.replaced import say_if_replaced
from bcp.read.source import Source
from bcp.read.verification import Verification, verify
from bcp.runtime import bridge as _bridge
from bcp.runtime.imports import imported
from bcp.runtime.threads import in_thread_gc_paused
from bcp.telemetry.watch import step_of

if TYPE_CHECKING:
    import torch

    from bcp.read.boxes import Index, Piece

__all__ = ["AsyncCheckpoint", "Checkpoint"]

T = TypeVar("T")
MIB = 1 << 20
BUDGET_BYTES = 64 * MIB
"""Host memory for bytes between storage and tensors, unless the options say another number."""


class AsyncCheckpoint(Facts):
    """A checkpoint that a coroutine looks into: what is in it, any part of it, whether it is sound.

    See :class:`Checkpoint`; methods that read are coroutines here. ``async with`` opens and closes it, and so do
    :meth:`open` and :meth:`aclose`. Facts need an open checkpoint.

    Example::

        async with bcp.AsyncCheckpoint("ckpt/step-100") as ckpt:
            weight = await ckpt.read("weight")

    """

    def __init__(
        self,
        path: Path,
        *,
        role: str | None = None,
        options: LoadOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if options is not None and not isinstance(options, LoadOptions):
            raise InputError(f"options is a {type(options).__name__}; pass bcp.LoadOptions(...)")
        chosen = LoadOptions(budget_bytes=BUDGET_BYTES) if options is None else options
        if chosen.rename is not None or chosen.edit is not unchanged:
            raise InputError(
                "options has rename= or edit=, which are for loads: names here are those of the checkpoint"
            )
        chosen = chosen if storage_options is None else replace(chosen, storage_options=storage_options)
        self._options = chosen
        self._place = place_of(path, role, chosen.storage_options, chosen.retries, cold=chosen.cold)
        self.path = self._place.path
        self._opening = anyio.Lock()
        self._source: Source | None = None

    async def open(self) -> Self:
        """Read the table of contents, unless that was done; return the checkpoint.

        Raises:
            NotACheckpointError: there is no checkpoint; the message says what is there.
            UncommittedError: there are files of a save that never committed.
            CorruptError: the table of contents is damaged.
            StorageError: storage failed.

        """
        async with self._opening:
            if self._source is None:
                data = await read_metadata(self._place.backend, self.path)
                metadata = await in_thread_gc_paused(decode_metadata, data, f"{self.path}/{METADATA_KEY}")
                place = self._place
                self._source = Source.of(place.backend, self.path, metadata, self._options, beside=place.beside)
        return self

    async def aclose(self) -> None:
        """Let go of storage. Idempotent."""
        await self._place.opened.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.aclose()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.open().__await__()

    @property
    def metadata(self) -> Metadata:
        """The table of contents, decoded: layout and commit record (``docs/format.md``)."""
        return self._opened().metadata

    @property
    def source(self) -> Source:
        """The open checkpoint, for the functions below :mod:`bcp.read`."""
        return self._opened()

    def _opened(self) -> Source:
        if self._source is None:
            raise InputError(f"{self.path} is not open: use `async with`, or `await ckpt.open()` first")
        return self._source

    async def read(
        self,
        name: str,
        index: Index = ...,
        *,
        kind: str = "model",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        mesh: Any = None,
        placements: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """Read a tensor, or a part of it; see :meth:`Checkpoint.read`."""
        await self.open()
        source, row, info, boxes = self._opened(), self._row(kind, name), self[kind, name], imported("bcp.read.boxes")
        if (mesh is None) != (placements is None):
            raise InputError(f"{info!r}: pass mesh= and placements=, or neither of them")
        if mesh is not None and (index is not ... or device is not None):
            raise InputError(f"{info!r}: mesh= says which part is read, and where it goes; leave index and device out")
        tensor: torch.Tensor
        async with say_if_replaced(source):
            if mesh is None:
                tensor = await boxes.read_box(source, row, index, dtype, device)
            else:
                tensor = await boxes.read_sharded(source, row, mesh, placements, dtype)
        return tensor

    async def stream(
        self, kind: str | None = "model", *, glob: str = "*", budget_bytes: int = 256 * MIB
    ) -> AsyncGenerator[Piece, None]:
        """Read many tensors in little memory; see :meth:`Checkpoint.stream`."""
        await self.open()
        if kind is not None:
            check_kind(kind)
        check_nbytes("budget_bytes", budget_bytes)
        rows = self.tensors.rows(kind, glob)
        async with say_if_replaced(self._opened()):
            async for piece in imported("bcp.read.boxes").stream(self._opened(), rows, budget_bytes):
                yield piece

    async def values(self, kind: str | None = None) -> dict[ObjectKey, Any]:
        """Read the values that are no tensors, by (kind, path); see :attr:`Checkpoint.values`."""
        if kind is not None:
            check_kind(kind)
        await self.open()
        source, layout = self._opened(), self.metadata.layout
        rows = {
            (of, path): row
            for row, (of, path) in enumerate(layout.objects)
            if of not in OPAQUE_KINDS and kind in (None, of)
        }
        async with say_if_replaced(source):
            await source.read_receipts({int(layout.object_rank[row]) for row in rows.values()})
            return await in_thread_gc_paused(imported("bcp.read.objects").values_of, source, rows)

    async def object(self, kind: str, rank: int = 0) -> Any:
        """Read the opaque object of a rank; see :meth:`Checkpoint.object`."""
        await self.open()
        source, layout = self._opened(), self.metadata.layout
        if kind not in OPAQUE_KINDS:
            raise InputError(f"kind={kind!r}: opaque objects are of the kinds {' and '.join(OPAQUE_KINDS)}")
        ranks = sorted(layout.extra_rank[layout.extra_kind == KINDS.index(kind)].tolist())
        if rank not in ranks:
            few = f"ranks {ranks[0]} to {ranks[-1]}" if ranks else "no rank"
            raise FqnMismatchError(f"{self.path} has no {kind} of rank {rank}; {few} saved one")
        async with say_if_replaced(source):
            await source.read_receipts([rank])
            objects, _ = await imported("bcp.read.objects").read_extras(source, {kind: rank})
        return objects[kind]

    async def roles(self) -> list[str]:
        """List the roles below the path; see :attr:`Checkpoint.roles`."""
        backend = self._place.backend
        names = [name for name in await folders_of(backend) if ROLE.fullmatch(name) and name not in RESERVED]
        versions = await in_turns(partial(child(backend, name).version, METADATA_KEY) for name in names)
        return [name for name, version in zip(names, versions, strict=True) if version and step_of(name) is None]

    async def verify(self, *, fast: bool = False) -> Verification:
        """Compare everything with its checksums; see :meth:`Checkpoint.verify`."""
        await self.open()
        source = self._opened()
        return await verify(source.backend, self.metadata, fast=fast, workers=source.io_workers)


class Checkpoint(Facts):
    """A checkpoint that you look into: what is in it, any part of it, whether it is sound.

    Use it where there is no model: in a notebook, an evaluation, an export, a script that compares two runs. It needs
    no process group, and no rank has to agree with another one. Nothing is written, and nothing is unpickled. The table
    of contents is read at first use, and kept.

    Tensors have their global shapes, whatever the parallelism of the job that saved them. Every block that is read is
    compared with its checksum.

    Files of other libraries open, too: folders of Hugging Face, ``torch.distributed.checkpoint``, DeepSpeed,
    Megatron-core, ByteCheckpoint and torchsnapshot, safetensors files, and files of ``torch.save``. They stay as they
    are, and have no checksums.

    Args:
        path: a directory, a URL, or a backend, as for :func:`bcp.load`; or a local file of another library.
        role: the role of the checkpoint below the path, if it was saved with one.
        options: how to read; ``verify``, ``codecs``, ``allow_pickle``, ``budget_bytes``, ``read_bytes``,
            ``io_workers``, ``copy_workers``, ``retries`` and ``storage_options`` count. ``rename`` and ``edit`` are
            refused. None: a budget of 64 MiB.
        storage_options: for the file system of a URL, as in :class:`~bcp.LoadOptions`.

    Raises:
        InputError: path, role or options cannot be any.
        NotACheckpointError: there is no checkpoint; raised at first use, as the next two.
        UncommittedError: there are files of a save that never committed.
        CorruptError: the table of contents is damaged.

    Example:
        >>> import torch
        >>> _ = bcp.save("ckpt/look", {"model": torch.nn.Linear(4, 2)}, overwrite=True)
        >>> with bcp.Checkpoint("ckpt/look") as ckpt:
        ...     print(ckpt["weight"], tuple(ckpt.read("weight", (0,)).shape))
        model: weight float32[2, 4] (4,)

    """

    def __init__(
        self,
        path: Path,
        *,
        role: str | None = None,
        options: LoadOptions | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._inner = AsyncCheckpoint(path, role=role, options=options, storage_options=storage_options)
        self.path = self._inner.path
        self._values: dict[ObjectKey, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of storage. Idempotent. Facts stay."""
        self._run(self._inner.aclose)

    @property
    def metadata(self) -> Metadata:
        """The table of contents, decoded: layout and commit record (``docs/format.md``)."""
        if self._inner._source is None:  # noqa: SLF001 -- the two are one
            self._run(self._inner.open)
        return self._inner.metadata

    def read(
        self,
        name: str,
        index: Index = ...,
        *,
        kind: str = "model",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        mesh: Any = None,
        placements: Sequence[Any] | None = None,
    ) -> torch.Tensor:
        """Read a tensor, or a part of it, into new memory. Only the blocks with wanted bytes are read, of 1 MiB each.

        Args:
            name: of the tensor.
            index: the part, as in the brackets of an array: integers, slices of step 1, one ellipsis. All by default.
            kind: ``"model"`` or ``"optimizer"``.
            dtype: of the result; that of the checkpoint by default.
            device: of the result; host memory by default.
            mesh: a device mesh: read only this rank's part, and return a DTensor. No rank talks to another one.
            placements: of the DTensor on the mesh.

        Raises:
            FqnMismatchError: the checkpoint has no such tensor; names similar ones.
            InputError: the index does not fit the tensor, or arguments contradict each other.
            CorruptError: a file is missing or damaged.
            MissingCodecError: the checkpoint needs codecs: pass ``options=bcp.LoadOptions(codecs=[...])``.
            StorageError: storage failed.

        Example:
            >>> _ = bcp.save("ckpt/read", {"model": {"w": torch.arange(12.0).reshape(3, 4)}}, overwrite=True)
            >>> bcp.Checkpoint("ckpt/read").read("w", (slice(1, 3), -1))
            tensor([ 7., 11.])

        """
        return self._run(
            lambda: self._inner.read(
                name, index, kind=kind, dtype=dtype, device=device, mesh=mesh, placements=placements
            )
        )

    def stream(self, kind: str | None = "model", *, glob: str = "*", budget_bytes: int = 256 * MIB) -> Iterator[Piece]:
        """Read many tensors in little memory, block by block, in the order of the files.

        Use it to export or compare a checkpoint that is larger than memory. A tensor that several ranks have saved
        comes in several pieces, and so does one that is larger than half of the budget. A tensor that is tied to
        another one has no piece. The next pieces are read meanwhile.

        Args:
            kind: ``"model"`` or ``"optimizer"``; None for both.
            glob: pattern of the shell for the names.
            budget_bytes: memory for tensors, those that wait for the caller and those that are read meanwhile.

        Yields:
            The tensor's record, the block of the global tensor, and its elements.

        Raises:
            InputError: the kind or the budget cannot be any.
            CorruptError: a file is missing or damaged.
            MissingCodecError: the checkpoint needs codecs, as for :meth:`read`.
            StorageError: storage failed.

        Example:
            >>> _ = bcp.save("ckpt/stream", {"model": torch.nn.Linear(2, 2)}, overwrite=True)
            >>> sum(piece.data.numel() for piece in bcp.Checkpoint("ckpt/stream").stream())
            6

        """
        pieces = self._inner.stream(kind, glob=glob, budget_bytes=budget_bytes)
        try:
            while True:
                try:
                    piece = self._run(pieces.__anext__)
                except StopAsyncIteration:
                    return
                yield piece
        except GeneratorExit:  # garbage collection may call this on bcp's own thread, which must not wait for itself
            _bridge.start(lambda _: pieces.aclose(), name=f"end reading {self.path}", daemon=True)
            raise

    @property
    def values(self) -> Mapping[ObjectKey, Any]:
        """The values that are no tensors, by (kind, path): learning rates, steps, configurations. Read once.

        Raises CheckpointError if one of them can only be read with ``options=bcp.LoadOptions(allow_pickle=True)``.
        """
        if self._values is None:
            self._values = self._run(self._inner.values)
        return self._values

    @property
    def roles(self) -> list[str]:
        """The roles with a committed checkpoint below the path, sorted: pass one as ``role=``. They are asked for anew.

        The path itself need not be a checkpoint.

        Example:
            >>> for role in ("actor", "critic"):
            ...     _ = bcp.save("ckpt/two-roles", {"model": torch.nn.Linear(4, 2)}, role=role, overwrite=True)
            >>> bcp.Checkpoint("ckpt/two-roles").roles
            ['actor', 'critic']

        """
        return self._run(self._inner.roles)

    def object(self, kind: str, rank: int = 0) -> Any:
        """Read the opaque object that a rank has saved: its extra states, or the state of its dataloader.

        Raises:
            FqnMismatchError: the rank has saved none.
            InputError: the kind has no opaque objects.
            CheckpointError: the object can only be read with ``options=bcp.LoadOptions(allow_pickle=True)``.
            CorruptError: a file is missing or damaged.

        """
        return self._run(partial(self._inner.object, kind, rank))

    def verify(self, *, fast: bool = False) -> Verification:
        """Compare all stored bytes with their checksums, and the table of contents with the files.

        Files of other libraries have no checksums: only their ends are read, and the result says so.

        Args:
            fast: look at receipts, sizes and the table of contents only; read no data.

        Returns:
            Figures, and a sentence for everything that is damaged; True if nothing is.

        Raises:
            StorageError: storage cannot be listed.

        """
        return self._run(partial(self._inner.verify, fast=fast))

    def _run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Do on bcp's own loop what the asynchronous twin does."""
        try:
            return _bridge.run(function, name=f"look into {self.path}")
        except BcpError as error:
            raise plain(error) from error.__cause__
