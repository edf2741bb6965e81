"""The checkpoint manager of torchtitan that owns a :class:`bcp.Run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer import LR_SCHEDULER, TRAIN_STATE, BaseCheckpointManager
from torchtitan.tools import filesystem

import bcp
from bcp.data.adapters import PerReader
from bcp.integrations.common import check_methods
from bcp.integrations.torchtitan.settings import REPLACED, check_fields
from bcp.integrations.torchtitan.weights import Weights

__all__ = ["BcpCheckpointManager"]

SAVE_OPTIONS, LOAD_OPTIONS = partial(bcp.SaveOptions), partial(bcp.LoadOptions)  # torchtitan logs a class by its fields


class BcpCheckpointManager(BaseCheckpointManager):
    """The checkpoint manager of bcp for a torchtitan trainer.

    Use it for a job that saves while it trains, stops in time, and resumes on any parallelism. A killed job resumes
    from its newest intact checkpoint with equal weights, optimizer states, random states and position in the data.
    After SIGTERM or SIGUSR1 all ranks save one step, and training ends. ``keep_latest_k`` counts commits. Every field
    of torchtitan's config is obeyed, or refused by name before training starts.

    Raises:
        InputError: a field cannot be obeyed, or the installed torchtitan has other hooks than the tested one.

    Example::

        config.checkpoint = BcpCheckpointManager.Config(enable=True, interval=100, keep_latest_k=3)

    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Torchtitan's settings of checkpoints, and those of bcp."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """``"disabled"`` waits for each save. The other two are alike: bcp stages in page-locked memory by itself."""
        snapshot: Literal["eager", "lazy"] = "eager"
        """``"lazy"`` copies the state while forward and backward run. The optimizer's next step waits for the copy."""
        tolerate: int = 0
        """Number of failed saves in a row that are logged, not raised."""
        standby_steps: int | None = None
        """Steps between snapshots in host memory, for a stop signal within a long step; see ``bcp.Run``."""
        save_options: Callable[..., bcp.SaveOptions] = SAVE_OPTIONS
        """Makes the options of saves, as in ``functools.partial(bcp.SaveOptions, nice=10)``; the next, of loads."""
        load_options: Callable[..., bcp.LoadOptions] = LOAD_OPTIONS
        run: Callable[..., bcp.Run] = bcp.Run
        """Makes the run, as in ``functools.partial(bcp.Run, on_commit=tell)``."""

    def __init__(
        self, config: Config, *, dataloader: Any, model_parts: list[torch.nn.Module], optimizers: Any,
        lr_schedulers: Any, states: dict[str, Any], sd_adapter: Any, base_folder: str = "",
    ) -> None:  # fmt: skip
        self.enable = config.enable
        self.save_future: Any = None
        if not self.enable:
            return
        check_methods(BaseCheckpointManager, REPLACED, "torchtitan", version("torchtitan"), replaced_by=type(self))
        self.config, self._trainer, self._loader = config, states[TRAIN_STATE], dataloader
        self._excluded = {*config.exclude_from_loading}
        self._states: dict[str, Any] = {
            "model": list(model_parts),
            "optimizer": list(optimizers.optimizers),
            "extra_states": {**states, LR_SCHEDULER: lr_schedulers},
        }
        if dataloader is not None:
            self._states["dataloader"] = _position_in(dataloader)
        check_fields(config, self._trainer, sd_adapter, {*self._states, *self._states["extra_states"]})
        self.folder = filesystem.join(base_folder, config.folder)
        self._weights = Weights(config, self.folder, model_parts, sd_adapter)
        keep = bcp.policies.Latest(config.keep_latest_k) if config.keep_latest_k else bcp.policies.Everything()
        self._run = config.run(
            self.folder,
            self._states,
            save=None,
            keep=keep,
            tolerate=config.tolerate,
            standby_steps=config.standby_steps,
            save_options=config.save_options(snapshot=config.snapshot),
            load_options=config.load_options(),
        )

    def _load(self, step: int = -1) -> bool:
        load = self._load_only if self.config.load_only else self._resume
        with self._without(self._excluded - {TRAIN_STATE}):  # a run counts on from the trainer's step
            loaded = load(step)
        if not loaded:
            return self._begin(needs_seed=step == 0)
        if not self.config.load_only:
            if not isinstance(self._loader, bcp.extend.ShardedState | None):
                self._loader.state_dict()  # a StatefulDataLoader makes its iterator here, and draws a seed
            self._run.reapply_random_states()
        return True

    def _resume(self, step: int) -> bool:
        return self._run.resume(step=step if step > 0 else None, fresh=step == 0) > 0

    def _load_only(self, step: int) -> bool:
        """Load past the run, which would take the folder from the job that trains in it."""
        options = self.config.load_options(record=False)
        path = filesystem.join(self.folder, f"step-{step:08d}") if step > 0 else None
        if step < 0:
            path = bcp.latest(self.folder, storage_options=options.storage_options)
        if path is not None:
            bcp.load(path, self._states, options=options)
        return path is not None

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 -- torchtitan's hook
        config = self.config
        if config.load_only:
            return False
        exports = last_step and config.last_save_model_only
        if exports or curr_step == 0:  # before the step is saved: a job that is killed meanwhile makes the step again
            self._weights.export(curr_step)
        if curr_step == 0:
            return True
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        self._run.maybe_save(curr_step)  # takes standby snapshots, and saves the step of a stop
        if due := is_first or curr_step % config.interval == 0 or (last_step and not exports):
            self.save_future = self._run.save(curr_step) or self.save_future
        if self._run.should_stop(curr_step):  # the checkpoint of the step is durable
            self._trainer.should_continue_training = lambda: False
        if last_step or config.async_mode == "disabled":
            self.maybe_wait_for_saving()
        return due or exports

    def _wait_for_saving(self) -> None:
        pending, self.save_future = self.save_future, None
        pending.wait()

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the optimizer's next step waits for a lazy snapshot by itself."""

    def _close(self) -> None:
        self._run.__exit__(*sys.exc_info())

    def _begin(self, *, needs_seed: bool) -> bool:
        """Begin a new run: from a seed, from the initial checkpoint, or from the trainer's own weights."""
        config, weights = self.config, self._weights
        try:
            weights.load(weights.seed)
        except bcp.NotACheckpointError:
            if needs_seed:
                raise
        else:
            return True
        if not (path := weights.initial):
            return False
        if config.initial_load_model_only:
            weights.load(path, in_hf=config.initial_load_in_hf)
            return True
        with self._without(self._excluded):
            bcp.load(path, self._states, options=config.load_options(cast=True))
        return True

    @contextmanager
    def _without(self, names: set[str]) -> Iterator[None]:
        """Leave states out of a load, and drop their values."""
        everything, extra = dict(self._states), self._states["extra_states"]
        for name in names & everything.keys():
            del self._states[name]
        self._states["extra_states"] = {name: state for name, state in extra.items() if name not in names}
        try:
            yield
        finally:
            self._states.update(everything)


def _position_in(dataloader: Any) -> Any:
    """Return the state of a dataloader. Torchtitan's own have one position for each data-parallel reader."""
    if isinstance(dataloader, bcp.extend.ShardedState) or not hasattr(dataloader, "dp_world_size"):
        return dataloader
    return PerReader(dataloader, reader=dataloader.dp_rank, readers=dataloader.dp_world_size)
