"""Checkpoints of bcp in torchtitan, by its extension point for checkpoint managers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

import torch
from torchtitan.components.checkpointer import LR_SCHEDULER, TRAIN_STATE, BaseCheckpointManager, ModelWrapper
from torchtitan.tools import filesystem

import bcp
from bcp.data.adapters import PerReader

__all__ = ["BcpCheckpointManager"]

FIELDS = """enable folder interval initial_load_path initial_load_model_only initial_load_in_hf last_save_model_only
    initial_load_in_hf_quantized last_save_in_hf export_dtype keep_latest_k load_step exclude_from_loading
    enable_first_step_checkpoint create_seed_checkpoint load_only"""  # of torchtitan 0.3
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
        self.config, self._trainer, self._loader, self._adapter = config, states[TRAIN_STATE], dataloader, sd_adapter
        self._models, self._excluded = list(model_parts), {*config.exclude_from_loading}
        self._states: dict[str, Any] = {"model": self._models, "optimizer": list(optimizers.optimizers)}
        self._states["extra_states"] = {**states, LR_SCHEDULER: lr_schedulers}
        if dataloader is not None:
            own = hasattr(dataloader, "dp_world_size") and not isinstance(dataloader, bcp.extend.ShardedState)
            reader = {"reader": dataloader.dp_rank, "readers": dataloader.dp_world_size} if own else {}
            self._states["dataloader"] = PerReader(dataloader, **reader) if own else dataloader
        self._check()
        self.folder = filesystem.join(base_folder, config.folder)
        keep = bcp.policies.Latest(config.keep_latest_k) if config.keep_latest_k else bcp.policies.Everything()
        options = {"save_options": config.save_options(snapshot=config.snapshot), "load_options": config.load_options()}
        options |= {"keep": keep, "tolerate": config.tolerate, "standby_steps": config.standby_steps}
        self._run = config.run(self.folder, self._states, save=None, **options)

    def _load(self, step: int = -1) -> bool:
        with self._without(self._excluded - {TRAIN_STATE}):  # a run counts on from the trainer's step
            if self.config.load_only:  # a run would take the folder from the job that trains in it
                options = self.config.load_options(record=False)
                newest = bcp.latest(self.folder, storage_options=options.storage_options) if step < 0 else None
                if path := filesystem.join(self.folder, f"step-{step:08d}") if step > 0 else newest:
                    bcp.load(path, self._states, options=options)
                return path is not None or self._begin(needs_seed=step == 0)
            resumed = self._run.resume(step=step if step > 0 else None, fresh=step == 0)
        if not resumed:
            return self._begin(needs_seed=step == 0)
        if not isinstance(self._loader, bcp.extend.ShardedState | None):
            self._loader.state_dict()  # a StatefulDataLoader makes its iterator here, and draws a seed
        self._run.reapply_random_states()
        return True

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 -- torchtitan's hook
        config, exports = self.config, last_step and self.config.last_save_model_only
        if config.load_only:
            return False
        if exports or curr_step == 0:  # before the step is saved: a job that is killed meanwhile makes the step again
            self._export(curr_step)
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
        config, in_hf = self.config, self.config.initial_load_in_hf
        with suppress(*[] if needs_seed else [bcp.NotACheckpointError]):
            return self._load_model(filesystem.join(self.folder, "seed"))
        path = config.initial_load_path or (in_hf and self._adapter.hf_assets_path)
        if not path or config.initial_load_model_only:
            return bool(path) and self._load_model(path, in_hf=in_hf)
        with self._without(self._excluded):
            bcp.load(path, self._states, options=config.load_options(cast=True))
        return True

    def _load_model(self, path: str, *, in_hf: bool = False) -> bool:
        """Load the model alone, and leave out other names: a folder of torchtitan's own manager has some."""
        model, options = ModelWrapper(self._models), self.config.load_options(cast=True, strict=False)
        tensors = self._adapter.to_hf(model.state_dict()) if in_hf else self._models
        if missing := bcp.load(path, {"model": tensors}, options=options).missing:
            raise bcp.InputError(f"{path} lacks {missing}; pass a checkpoint of this model")
        if in_hf:
            model.load_state_dict(self._adapter.from_hf(tensors))
        return True

    def _export(self, step: int) -> None:
        """Save the model alone, in the dtype of exports; a seed at step 0."""
        path = filesystem.join(self.folder, f"model-{step:08d}" if step else "seed")
        dtype, in_hf = getattr(torch, self.config.export_dtype), step and self.config.last_save_in_hf
        state = ModelWrapper(self._models).state_dict()
        tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        model = self._adapter.to_hf(tensors) if in_hf else tensors
        bcp.save(path, {"model": model}, options=self.config.save_options(overwrite=True))
        if in_hf:
            bcp.tools.export_hf(path, f"{path}-hf", overwrite=True)

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

    def _check(self) -> None:
        plain = BaseCheckpointManager.Config(initial_load_model_only=False)  # without a warning
        config, host = self.config, f"torchtitan {version('torchtitan')}"
        for hook in ("_load", "_save", "_wait_for_saving", "_maybe_wait_for_staging", "_close"):
            kinds = (getattr(kind, hook, lambda: 0) for kind in (BaseCheckpointManager, type(self)))
            theirs, ours = ([*inspect.signature(method).parameters] for method in kinds)
            if theirs != ours:
                raise bcp.InputError(f"{host} calls {hook}{theirs} of a manager, and bcp has {hook}{ours}; update bcp")
        needed = ["model", *([] if config.initial_load_path else [TRAIN_STATE])]  # a run needs the trainer's step
        states = {*self._states, *self._states["extra_states"]} - {"extra_states", *needed}
        folder = self._adapter and (config.initial_load_path or self._adapter.hf_assets_path)
        new = {field.name for field in fields(plain)} - {*FIELDS.split()}
        remedies = {
            **{name: getattr(config, name) != getattr(plain, name) and f"new in {host}; update bcp" for name in new},
            "enable": not hasattr(self._trainer, "should_continue_training") and f"{host} has no trainer that can stop",
            "initial_load_in_hf": config.initial_load_in_hf and not folder and "it needs a path and an adapter to HF",
            "last_save_in_hf": config.last_save_in_hf and not self._adapter and "this model has no adapter to HF",
            "initial_load_in_hf_quantized": config.initial_load_in_hf_quantized and "convert the folder to bfloat16",
            "load_step": config.load_step < -1 and "pass a step, or -1 for the newest checkpoint",
            "create_seed_checkpoint": config.create_seed_checkpoint and config.load_only and "load_only saves nothing",
            "tolerate": config.async_mode == "disabled" and config.tolerate > 0 and "set async_mode='async'",
            "exclude_from_loading": not self._excluded <= states and f"pass some of {sorted(states)}",
        }
        for name in filter(remedies.get, remedies):
            raise bcp.InputError(f"checkpoint.{name}={getattr(config, name)!r}: {remedies[name]}")
