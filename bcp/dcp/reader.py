"""The reader: any checkpoint of bcp for ``torch.distributed.checkpoint.load``, under any layout."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from bcp._plain import plain
from bcp.backends.place import Path, Place, place_of, words_of
from bcp.dcp.contents import Contents, opened, packed, read
from bcp.errors import BcpError, InputError
from bcp.options import LoadOptions, unchanged, with_overrides
from bcp.plan.box import Box
from bcp.runtime import bridge as _bridge
from bcp.runtime.device import Caller

__all__ = ["StorageReader"]

T = TypeVar("T")


class StorageReader(storage.StorageReader):
    """Give ``dcp.load`` what :class:`StorageWriter` or :func:`bcp.save` has saved, from any storage of bcp.

    Use it where a job loads by torch.distributed.checkpoint (DCP). The job may have any number of ranks and any
    layout: plain tensors, DTensors and ShardedTensors. Each rank reads the blocks of its own boxes, compares them with
    their checksums, and converts dtypes as DCP does.

    **Names** are those that ``dcp.save`` got. A checkpoint of :func:`bcp.save` has ``model.X`` for the tensor ``X`` of
    the model, ``optim.state.X.exp_avg`` for the optimizer's states, and ``optim.param_groups.X.lr`` for its
    hyper-parameters: the names of ``get_state_dict`` with ``StateDictOptions(flatten_optimizer_state_dict=True)``.
    Dataloader and extra states belong to single ranks and have no name in DCP; load these by :func:`bcp.load`.

    **Values** are read without unpickling. An object of another class needs ``LoadOptions(allow_pickle=True)``, which
    may run code: only for checkpoints that you wrote.

    Errors of one rank reach all ranks as DCP's ``CheckpointException``, which has bcp's errors in ``failures``.

    Args:
        path: a directory, a URL or a backend, as for :func:`bcp.load`. None: the ``checkpoint_id`` of the load, which
            takes the place of this path in any case.
        role: the role of the checkpoint below the path, if it was saved with one.
        options: ``verify``, ``codecs``, ``allow_pickle``, ``budget_bytes``, ``read_bytes``, ``io_workers``,
            ``copy_workers``, ``retries`` and ``storage_options`` count. ``rename`` and ``edit`` are refused.

    Raises:
        InputError: path, role or options cannot be any.
        NotACheckpointError: there is no checkpoint; the message says what is there.
        UncommittedError: there are files of a save that never committed.
        CorruptError: a file is missing or damaged.
        MissingCodecError: the checkpoint needs codecs: pass ``options=bcp.LoadOptions(codecs=[...])``.
        CheckpointError: a value can only be read with ``allow_pickle=True``.
        StorageError: storage failed.

    Example::

        import torch.distributed.checkpoint as dcp

        dcp.load(state_dict, storage_reader=bcp.dcp.StorageReader("s3://bucket/run/step-100"))

    """

    def __init__(
        self, path: Path | None = None, *, role: str | None = None, options: LoadOptions | None = None
    ) -> None:
        self._options = with_overrides(LoadOptions, options, {})
        if self._options.rename is not None or self._options.edit is not unchanged:
            raise InputError("options has rename= or edit=, which are for bcp.load; DCP loads names as they are")
        self._role = role
        self._path = path
        self._contents: Contents | None = None
        self._error: Exception | None = None
        self._rank = 0
        if path is not None:
            self._place()

    def __repr__(self) -> str:
        return f"StorageReader({'' if self._path is None else words_of(self._path)!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """The path, as DCP's log lines name it."""
        return None if self._path is None else words_of(self._path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the load before; ``checkpoint_id``, if given, is the new path."""
        self._path = self._path if checkpoint_id is None else checkpoint_id
        self._contents = self._error = None

    def read_metadata(self, *_: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint, and return the names, shapes and dtypes of its tensors, and the names of its values.

        ``dcp.load`` puts an AssertionError in the place of an error here, after it has asked for the metadata of one
        ``rank``. So the second call returns no names, and :meth:`set_up_storage_reader` raises the error.
        """
        if "rank" in kwargs and self._error is not None:
            return Metadata({})
        self._contents = self._error = None
        try:
            self._contents = self._run(partial(opened, self._place(), self._options))
            return self._contents.metadata()
        except Exception as error:
            self._error = error
            raise

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 -- DCP's
        *_: Any,
        **kwargs: Any,
    ) -> None:
        """Raise the error of the opening, if there was one; note this rank, for messages."""
        del metadata, is_coordinator
        error, self._error = self._error, None
        if error is not None:
            raise error
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are: each rank reads for itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, and hand its values to the planner."""
        contents = self._contents
        if contents is None:
            raise InputError("read_data() was called before read_metadata(); load by dcp.load(storage_reader=...)")
        tensors = [(item, _target(item, planner)) for item in plan.items if item.type is LoadItemType.TENSOR]
        values = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        filled = [(_box(item), target) for item, target in tensors if target.numel()]
        names = [item.storage_index.fqn for item in values]
        boxes, targets = [box for box, _ in filled], [target for _, target in filled]
        source = replace(contents.source, rank=self._rank)
        contents = replace(contents, source=source)
        found = self._run(partial(read, self._place(), contents, boxes, targets, names, Caller.here()))
        for item, target in tensors:
            planner.commit_tensor(item, target)
        for item in values:
            planner.load_bytes(item, packed(found[item.storage_index.fqn]))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether this is a path or URL; whether its storage is known is seen when it is opened."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _place(self) -> Place:
        """Return the place of the checkpoint. Raises InputError if path or role cannot be any."""
        if self._path is None:
            raise InputError("StorageReader has no path; pass StorageReader(path), or dcp.load(checkpoint_id=...)")
        options = self._options
        return place_of(self._path, self._role, options.storage_options, options.retries, cold=options.cold)

    def _run(self, function: Callable[[], Awaitable[T]]) -> T:
        try:
            return _bridge.run(function, name=f"load of {self.checkpoint_id}")
        except BcpError as error:
            raise plain(error) from error.__cause__


def _box(item: ReadItem) -> tuple[str, Box]:
    """Return name and block that an item reads: DCP sees one chunk a tensor, so its offsets are those of the tensor."""
    return item.storage_index.fqn, Box(tuple(item.storage_offsets), tuple(item.lengths))


def _target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """Return the memory that an item fills. Raises InputError if it has another shape than planned."""
    target = planner.resolve_tensor(item).detach()
    if target.shape != item.lengths:
        raise InputError(
            f"{item.dest_index.fqn!r}: the planner's resolve_tensor() gives a tensor of shape {list(target.shape)}, "
            f"and its plan has {list(item.lengths)}; state both alike"
        )
    return target
