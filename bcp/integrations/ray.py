"""Ray Train: a :class:`bcp.Run` in the training function that reports its commits to Ray.

Ray gets a pointer for each commit: a small folder in its experiment, which stays when bcp deletes the checkpoint.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray.train
import torch.distributed as dist

import bcp
from bcp.integrations.common import check_settings

__all__ = ["path_of", "run"]

_KEY = "bcp-checkpoint"  # in the metadata of a pointer
_UNKNOWN_SECONDS = 120.0  # until Ray ends the workers on a drained node without a deadline

_Saving = bcp.Pending[bcp.SaveResult] | None
_Metrics = Mapping[str, float] | None


def run(states: Any, path: str | os.PathLike[str] | None = None, **options: Any) -> bcp.Run:
    """Return a run that reports each committed checkpoint to Ray, on all workers at one step.

    Call it in ``train_loop_per_worker``, and use it as any :class:`bcp.Run`. ``Result.checkpoint`` and
    ``ray.train.get_checkpoint()`` are then pointers for :func:`path_of`. After a failure Ray calls the function again,
    and ``resume()`` loads the newest intact checkpoint, on any number of workers. When Ray drains a node, the run saves
    and stops. Leaving its block then waits until Ray restarts the workers.

    Args:
        states: as for :class:`bcp.Run`.
        path: the run's folder: an absolute path or a URL. None: the folder ``bcp`` in Ray's experiment.
        options: of :class:`bcp.Run`.

    Raises:
        InputError: this is no worker of Ray Train, a setting of ``RunConfig`` does not go with bcp, the folder cannot
            be used, torch.distributed has other ranks, or this version of Ray lacks what bcp needs.

    Example::

        with bcp.integrations.ray.run({"model": model, "optimizer": optimizer}, save=100, keep=3) as run:
            for step in range(run.resume() + 1, steps + 1):
                run.maybe_save(step, {"loss": train(step)})
                if run.should_stop(step):
                    break

    """
    config, _ = _internals()
    workers, ranks = ray.train.get_context().get_world_size(), dist.get_world_size() if dist.is_initialized() else 1
    is_alone, storage = workers != ranks and options.get("coordinator") is None, str(config.storage_path).rstrip("/")
    folder = f"{storage}/{config.name}/bcp" if path is None else os.fspath(path)
    is_relative = "://" not in folder and not Path(folder).is_absolute()
    refused = {
        "CheckpointConfig(num_to_keep=...)": (config.checkpoint_config.num_to_keep, "pass keep=... to run()"),
        "RunConfig(storage_filesystem=...)": (path is None and config.storage_filesystem, "pass path=... to run()"),
        "RunConfig(storage_path='...?...')": (path is None and "?" in storage, "pass path=... to run()"),
        f"path={folder!r}": (is_relative, "workers run in folders of their own; pass an absolute path or a URL"),
        f"torch.distributed with {ranks} of {workers} workers": (is_alone, "use TorchTrainer, or pass coordinator=..."),
    }
    check_settings(refused)
    preemption = bcp.Preemption(signals=(), grace_seconds=_UNKNOWN_SECONDS, notice=_notice)  # a thread hears no signals
    return _Run(folder, states, **{"preemption": preemption} | options)


def path_of(checkpoint: ray.train.Checkpoint) -> str:
    """Return the path of the checkpoint behind a pointer, as for :func:`bcp.load`.

    Args:
        checkpoint: ``Result.checkpoint``, or the result of ``ray.train.get_checkpoint()``.

    Raises:
        InputError: it is no pointer of :func:`run`.

    Example::

        result = trainer.fit()
        bcp.load(bcp.integrations.ray.path_of(result.checkpoint), {"model": model})

    """
    path = checkpoint.get_metadata().get(_KEY)
    if not isinstance(path, str):
        raise bcp.InputError(f"{checkpoint} points to no checkpoint of bcp: bcp.integrations.ray.run reports those")
    return path


class _Run(bcp.Run):
    """A run that reports its commits in the training thread. All workers make the same calls at the same steps."""

    def __init__(self, path: str, states: Any, **options: Any) -> None:
        super().__init__(path, states, **options)
        self._reports = _Reports(self, path)

    def resume(self, **arguments: Any) -> int:
        step = super().resume(**arguments)
        latest = ray.train.get_checkpoint()  # the same on all workers
        if step and (latest is None or not latest.path.rpartition("/")[2].startswith(f"bcp-{step:08d}-")):
            self._reports.report(step)  # the job has died behind this commit, or goes back
        return step

    def maybe_save(self, step: int, metrics: _Metrics = None) -> _Saving:
        return self._reports.begun(super().maybe_save(step, metrics), step, metrics)

    def save(self, step: int, metrics: _Metrics = None) -> _Saving:
        return self._reports.begun(super().save(step, metrics), step, metrics)

    def committed(self) -> Sequence[int]:
        for step in (steps := super().committed()):
            self._reports.report(step)
        return steps

    def stopping(self, step: int) -> bool:
        self._reports.ends = super().stopping(step)
        return self._reports.ends

    def should_stop(self, step: int) -> bool:
        self._reports.ends = super().should_stop(step)
        self.committed()
        return self._reports.ends

    def close(self) -> None:
        super().close()
        self._reports.end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        if error is None:  # else the other workers may not come here
            self._reports.end()

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise bcp.InputError("Ray is told of commits in the training thread: call the method without 'a', no coroutine")

    aresume = amaybe_save = asave = acommitted = astopping = ashould_stop = aclose = __aenter__ = _refused


class _Reports:
    """The side of Ray."""

    def __init__(self, run: bcp.Run, path: str) -> None:
        self._run, self._path, self.ends = run, path, False  # whether the ranks have agreed on a last step
        self._saves: dict[int, tuple[bcp.Pending[bcp.SaveResult], dict[str, float]]] = {}

    def begun(self, saving: _Saving, step: int, metrics: _Metrics) -> _Saving:
        """Remember a save until its commit, and report those before it. Ray takes plain numbers only."""
        if saving is not None:
            self._saves[step] = saving, {name: float(value) for name, value in (metrics or {}).items()}
        self._run.committed()
        return saving

    def report(self, step: int) -> None:
        """Report a checkpoint; rank 0 writes the pointer first."""
        context = ray.train.get_context()
        storage, (saving, metrics) = context.get_storage(), self._saves.pop(step, (None, {}))
        folder = f"{storage.experiment_fs_path}/bcp-{step:08d}-{self._run.resumed.life}"  # never one of an earlier life
        pointer = ray.train.Checkpoint(folder, storage.storage_filesystem)
        if context.get_world_rank() == 0:
            path, metrics = self._found(step) if saving is None else (saving.wait().path, metrics)
            storage.storage_filesystem.create_dir(folder)
            pointer.set_metadata({_KEY: path})
        mode = ray.train.CheckpointUploadMode.NO_UPLOAD
        ray.train.report({**metrics, "step": step}, checkpoint=pointer, checkpoint_upload_mode=mode)

    def _found(self, step: int) -> tuple[str, dict[str, float]]:
        """Look for a checkpoint of an earlier life, or a standby snapshot; the loaded one comes first."""
        infos = [info for info in self._run.list() if info.step == step and info.is_committed]  # the best comes last
        infos.sort(key=lambda info: info.path.endswith(f"/{self._run.resumed.name}"))
        return (infos[-1].path, dict(infos[-1].metrics)) if infos else (f"{self._path}/step-{step:08d}", {})  # deleted

    def end(self) -> None:
        """Report the last commits. If Ray drains a node, wait for it: a function that returns is not called again."""
        self._run.committed()
        if self.ends and _notice() is not None:
            threading.Event().wait()


def _internals() -> tuple[Any, Any]:
    """Return the RunConfig, and the place where Ray notes a drained node."""
    try:
        context = importlib.import_module("ray.train.v2._internal.execution.context").get_train_context()
        internals = context.train_run_context.run_config, context.preemption_context
        _ = ray.train.CheckpointUploadMode.NO_UPLOAD
    except (RuntimeError, ImportError, AttributeError) as error:
        raise bcp.InputError(f"ray {ray.__version__}: {error} (docs/integrations/ray.md: calls, versions)") from error
    return internals


def _notice() -> float | None:
    """Return the seconds until Ray ends the workers because it drains a node; None if it does not."""
    info = _internals()[1].preemption_info
    seconds = _UNKNOWN_SECONDS if info is None or info.deadline_ms is None else info.deadline_ms / 1000 - time.time()
    return None if info is None else max(0.0, seconds)
