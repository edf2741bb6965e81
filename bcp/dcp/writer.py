"""The writer: a checkpoint of ``torch.distributed.checkpoint.save``, in bcp's format and in any of bcp's storages."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from bcp._job import SaveJob
from bcp._plain import plain
from bcp.backends.place import Path, Place, place_of, words_of
from bcp.coordinators.local import SoloCoordinator
from bcp.dcp.saving import Begun, Task, commit, open_on_all, write
from bcp.errors import BcpError, InputError
from bcp.format.receipt import Receipt
from bcp.options import SaveOptions, with_overrides
from bcp.planners import planner as planner_for
from bcp.runtime import bridge as _bridge
from bcp.runtime.device import Caller
from bcp.telemetry.watch import Watch

__all__ = ["StorageWriter"]

T = TypeVar("T")


class StorageWriter(storage.StorageWriter):
    """Write what ``dcp.save`` and ``dcp.async_save`` save as a checkpoint of bcp, into any storage of bcp.

    Use it where a job calls torch.distributed.checkpoint (DCP), and its checkpoints shall go to an object store, have
    checksums, and appear whole or not at all. DCP's ranks, process group and planner stay as they are.

    The checkpoint is an ordinary one. :class:`bcp.Checkpoint` opens and verifies it. :func:`bcp.load` loads it into
    models under any parallelism, and ``dcp.load`` reads it by a :class:`StorageReader`. Each rank writes the chunks
    that DCP gives it. A save that fails or is killed leaves no checkpoint, and leaves an older one as it was.

    **Names.** ``model.X`` becomes the tensor ``X`` of the kind ``model``. ``optim.state.X.exp_avg`` and
    ``optim.param_groups.X.lr`` become ``state.X.exp_avg`` and ``param_groups.X.lr`` of the kind ``optimizer``, whether
    the key is ``optim`` or ``optimizer``, also below one key around both, as in ``app.model.X``. These are the names of
    ``get_state_dict``, so ``bcp.load(path, {"model": model, "optimizer": optimizer})`` finds them. A state dict that is
    not flattened has groups with numbers; their hyper-parameters are stored for each parameter besides. Any other name
    stays as it is, in the kind ``model``. A record in the checkpoint keeps the way back, so ``dcp.load`` finds every
    name as it was.

    **Values** that are no tensors are stored as bcp stores values: readable, and read without unpickling. An object of
    another class needs ``SaveOptions(allow_pickle=True)``.

    Errors of one rank reach all ranks as DCP's ``CheckpointException``, which has bcp's errors in ``failures``.

    Args:
        path: a directory, a URL or a backend, as for :func:`bcp.save`. None: the ``checkpoint_id`` of the save, which
            takes the place of this path in any case.
        role: name of one of several models under one path, as for :func:`bcp.save`.
        overwrite: replace a committed checkpoint atomically. Overrides ``options.overwrite``.
        options: ``overwrite``, ``edit``, ``codecs``, ``budget_bytes``, ``pinned_bytes``, ``part_bytes``,
            ``io_workers``, ``copy_workers``, ``nice``, ``ionice``, ``guard``, ``allow_pickle``, ``storage_options``,
            ``retries``, ``step``, ``metadata`` and ``observe`` count. No record of events is left.

    Raises:
        InputError: path, role or options cannot be any; or DCP is asked for what a checkpoint of bcp cannot be:
            ``use_collectives=False``, or a planner with ``enable_plan_caching=True``.
        StateError: a tensor or value cannot be saved; names it.
        ExistsError: a committed checkpoint is there, and ``overwrite`` is not set. No byte has been written.
        StorageError: storage failed.

    Example::

        import torch.distributed.checkpoint as dcp

        dcp.save(state_dict, storage_writer=bcp.dcp.StorageWriter("s3://bucket/run/step-100"))

    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        role: str | None = None,
        overwrite: bool | None = None,
        options: SaveOptions | None = None,
    ) -> None:
        self._options = with_overrides(SaveOptions, options, {"overwrite": overwrite})
        if self._options.snapshot == "lazy":
            raise InputError("snapshot='lazy' is for bcp.save_async; dcp.async_save makes copies of its own")
        self._role = role
        self._path = path
        self._begun: Begun | None = None
        self._receipt: Receipt | None = None
        if path is not None:
            self._place()

    def __repr__(self) -> str:
        return f"StorageWriter({'' if self._path is None else words_of(self._path)!r})"

    @property
    def checkpoint_id(self) -> str | None:
        """The path, as DCP's log lines name it."""
        return None if self._path is None else words_of(self._path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget the save before; ``checkpoint_id``, if given, is the new path."""
        self._path = self._path if checkpoint_id is None else checkpoint_id
        self._begun = self._receipt = None

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # noqa: FBT001 -- DCP's
        """Check the arguments of the save on this rank."""
        if not kwargs.get("use_collectives", True):
            raise InputError(
                "use_collectives=False saves each rank by itself, and a checkpoint of bcp is one of all ranks; leave "
                "it out"
            )
        if is_coordinator and kwargs.get("rank", 0):
            raise InputError(f"coordinator_rank={kwargs['rank']}: rank 0 commits a checkpoint of bcp; leave it out")
        self._place()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is. Raises InputError for a plan that DCP has cached."""
        if not getattr(plan, "usable", True):  # a field of torch 2.7 and later
            raise InputError(
                "the planner has enable_plan_caching=True, which keeps the places of an earlier save; leave it out"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the save on rank 0, and add each rank's part to its plan."""
        self._begun, tasks = self._run(partial(open_on_all, self._job(0, len(plans)), plans))
        return [replace(plan, storage_data=task) for plan, task in zip(plans, tasks, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this rank; they are durable when this returns."""
        task = plan.storage_data
        if not isinstance(task, Task):
            raise InputError(
                "the planner's finish_plan() returned a plan without the storage_data of this save; keep it, as "
                "DCP's DefaultSavePlanner does without enable_plan_caching"
            )
        written, self._receipt = self._run(partial(write, self._job(task.rank, task.world_size), task, plan, planner))
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(f"rank {task.rank}"), written.nbytes, written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint on rank 0. DCP's metadata are not stored: bcp's have all of them."""
        del metadata
        begun, receipt = self._begun, self._receipt
        if begun is None or receipt is None:
            raise InputError("finish() was called before prepare_global_plan() and write_data() on this rank")
        written = [each.storage_data for result in results for each in result]
        self._begun = self._receipt = None
        self._run(partial(commit, self._job(0, len(written)), begun, receipt, written))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Say whether this is a path or URL; whether its storage is known is seen when it is opened."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _place(self) -> Place:
        """Return the place of the checkpoint. Raises InputError if path or role cannot be any."""
        if self._path is None:
            raise InputError("StorageWriter has no path; pass StorageWriter(path), or dcp.save(checkpoint_id=...)")
        return place_of(self._path, self._role, self._options.storage_options, self._options.retries)

    def _job(self, rank: int, world_size: int) -> SaveJob:
        """Describe this rank's part of the save."""
        options, place = self._options, self._place()
        # "prepare" has no sinks: only rank 0 knows whether the save was committed
        watch = Watch(
            "prepare", place.path, rank=rank, world_size=world_size, step=options.step, observe=options.observe
        )
        return SaveJob(
            path=place.path,
            place=place.path,
            backend=place.backend,
            opened=place.opened,
            beside=place.beside,
            states={},
            planner=partial(planner_for, None, {}),
            rank=rank,
            world_size=world_size,
            operation=SoloCoordinator().begin("", options.timeout),
            watch=watch,
            caller=Caller.here(),
            options=options,
        )

    def _run(self, function: Callable[[], Awaitable[T]]) -> T:
        try:
            return _bridge.run(function, name=f"save to {self.checkpoint_id}")
        except BcpError as error:
            raise plain(error) from error.__cause__
