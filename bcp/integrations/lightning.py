"""Lightning: a callback that owns a :class:`bcp.Run`, and strategies that save and load with it."""

from __future__ import annotations

import logging
import os
import signal
from inspect import signature
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch.utils._pytree import tree_leaves

import bcp
from bcp.integrations.common import step_of

__all__ = ["BcpCheckpoint"]

_SIGNALS = signal.SIGTERM, signal.SIGUSR1  # Lightning's handlers raise in an epoch, or save inside of the handler


class _Strategy(Strategy):
    """The part in front of a strategy. It is an extra state of the run, too: Lightning's dump."""

    owner: BcpCheckpoint
    dump: dict[str, Any]
    restore_checkpoint_after_setup = True  # parameters are on their devices, and sharded, by then

    def state_dict(self) -> dict[str, Any]:
        self.lightning_module.trainer.save_checkpoint(self, weights_only=False)
        return self.dump

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dump = state

    def setup(self, trainer: Trainer) -> None:
        if self.owner not in trainer.callbacks:
            raise bcp.InputError("the strategy of a BcpCheckpoint saves nothing alone: pass callbacks=[save], too")
        trainer.callbacks.sort(key=lambda callback: callback is self.owner)  # a dump has the others' latest states
        super().setup(trainer)

    def barrier(self, name: str | None = None) -> None:
        if name != "Trainer.save_checkpoint":  # a rank that fails in its dump would leave the others waiting
            super().barrier(name)

    def lightning_module_state_dict(self, *_: Any) -> dict[str, Any]:
        return {}  # the run reads the module and the optimizers, and loads them in place

    def load_model_state_dict(self, *_: Any, **__: Any) -> None: ...

    optimizer_state = lightning_module_state_dict
    load_optimizer_state_dict = remove_checkpoint = load_model_state_dict

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.dump = checkpoint
        if filepath is not self:
            self.owner.save_now(os.fspath(filepath), whole=storage_options is None and "optimizer_states" in checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        self.owner.load(os.fspath(checkpoint_path))
        return {"state_dict": {}, **self.dump}


class BcpCheckpoint(Callback):
    """Saves and resumes a training of Lightning, and ends it after a signal. Lightning's dump commits with the weights.

    Args:
        path: the run's folder: a directory or a URL.
        save: as for :class:`bcp.Run`, in optimizer steps. None: only ``trainer.save_checkpoint`` saves.
        wait_for_validation: a save that is due waits for the end of a validation, and has its metrics.
        options: ``keep`` and other arguments of :class:`bcp.Run`.

    Raises:
        InputError: an argument of the run cannot be used, or this version of Lightning has other methods.

    Example::

        save = BcpCheckpoint("ckpt/run-7", save=100, keep=3)
        trainer = Trainer(strategy=save.strategy("fsdp2"), callbacks=[save], enable_checkpointing=False)
        trainer.fit(module, data, ckpt_path=save.newest())

    """

    run: bcp.Run | None = None  # of the last fit()

    def __init__(self, path: str, *, save: Any = 1000, wait_for_validation: bool = False, **options: Any) -> None:
        _check_seam(BcpCheckpoint, Callback, {"run", "strategy", "newest", "load", "save_now"})
        self._path, self._waits = os.fspath(path).rstrip("/"), wait_for_validation
        self._options: dict[str, Any] = options | {"save": save}
        self._load: bcp.LoadOptions = options.get("load_options") or bcp.LoadOptions()
        bcp.Run(path, {}, **self._options)  # checks them

    def strategy(self, base: str | type[Strategy] = "auto", **options: Any) -> Any:
        """Return a strategy that saves with this run: "auto" (one device), "ddp", "fsdp2" (all ranks) or your class."""
        known = {"auto": SingleDeviceStrategy, "ddp": DDPStrategy, "fsdp2": ModelParallelStrategy}
        kind: Any = known.get(base) if isinstance(base, str) else base
        names = " ".join(parent.__name__ for parent in getattr(kind, "__mro__", ()))
        if "Strategy" not in names or any(map(names.count, ("FSDP", "DeepSpeed", "XLA"))) or "start_method" in options:
            raise bcp.InputError(f"strategy({base!r}): FSDP1, DeepSpeed, XLA and forks do not work; use {[*known]}")
        _check_seam(_Strategy, kind, {"state_dict", "load_state_dict"})
        members: dict[str, Any] = {"owner": self}
        if base == "fsdp2":
            ranks = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or torch.cuda.device_count() or 1
            options = {"data_parallel_size": int(ranks), "tensor_parallel_size": 1} | options
        elif base == "auto":  # the trainer fills in its devices
            members["parallel_devices"] = ()
            members["root_device"] = property(lambda made: (*made.parallel_devices, torch.device("cpu"))[0])
        return type(f"Bcp{kind.__name__}", (_Strategy, kind), members)(**options)

    def newest(self) -> str | None:
        """Return the run's folder for ``fit(ckpt_path=...)``, which loads its newest checkpoint; None for a new run."""
        return self._path if bcp.latest(self._path, storage_options=self._load.storage_options) else None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if getattr(trainer.strategy, "owner", None) is not self:
            raise bcp.InputError("a BcpCheckpoint saves nothing alone: pass Trainer(strategy=save.strategy(...)), too")
        if others := trainer.checkpoint_callbacks:
            raise bcp.InputError(f"pass enable_checkpointing=False, and no {type(others[0]).__name__}: the run saves")
        if len(getattr(trainer.strategy, "parallel_devices", None) or ()) > trainer.world_size:
            raise bcp.InputError("strategy('auto') is for one device: pass 'ddp' or 'fsdp2', or devices=1")
        self._trainer, self._resumed, self.run = trainer, False, None if stage == "fit" else self.run
        self._handlers = [signal.getsignal(number) for number in _SIGNALS]

    def on_train_start(self, *_: Any) -> None:
        list(map(signal.signal, _SIGNALS, self._handlers))
        if self.run is None:
            self._begin(step=0)
        self._step = self._asked = self._trainer.global_step
        if not all(hasattr(loader, "load_state_dict") for loader in tree_leaves(self._trainer.train_dataloader)):
            logging.getLogger("bcp").warning("a dataloader without state_dict() repeats samples after a resumption")

    def on_train_epoch_start(self, *_: Any) -> None:
        if self._resumed and self.run is not None:  # Lightning has drawn random numbers since the load
            self._resumed = False
            self.run.reapply_random_states()

    on_train_batch_start = on_train_epoch_start  # an epoch that goes on has no other start

    def on_train_batch_end(self, *_: Any) -> None:
        before, self._step = self._step, self._trainer.global_step
        if self._step != before:  # else gradients are accumulated
            self._ended(saves=not self._waits)

    def on_validation_end(self, *_: Any) -> None:
        if self._waits and self._trainer.state.fn == "fit" and not self._trainer.sanity_checking:
            self._ended(saves=True)

    def on_train_end(self, _trainer: Any, _module: Any, error: BaseException | None = None, **_: Any) -> None:
        if self.run is not None:
            self.run.__exit__(None if error is None else type(error), error, None)

    teardown = on_exception = on_train_end

    def load(self, path: str) -> None:
        if self._trainer.state.fn == "fit":
            self._begin(self._step_of(path))
        else:
            place = bcp.latest(path, storage_options=self._load.storage_options) if path == self._path else path
            states = {"model": self._trainer.lightning_module, "extra_states": {"lightning": self._trainer.strategy}}
            bcp.load(place or path, states, framework=self._options.get("framework"), options=self._load)

    def save_now(self, path: str, *, whole: bool) -> None:
        self._asked = step = self._trainer.global_step
        is_own = path in (self._path, f"{self._path}/step-{step:08d}")
        if not (whole and is_own) or self.run is None or self._trainer.state.fn != "fit":
            raise bcp.InputError(f"save_checkpoint({path!r}): pass {self._path!r} alone, in a hook of the training")
        self.run.save(step, self._trainer.callback_metrics if self._waits else None)

    def _begin(self, step: int | None) -> None:
        states = {"model": self._trainer.lightning_module, "extra_states": {"lightning": self._trainer.strategy}}
        if optimizers := {str(number): optimizer for number, optimizer in enumerate(self._trainer.optimizers)}:
            states["optimizer"] = optimizers if len(optimizers) > 1 else optimizers["0"]
        self.run = bcp.Run(self._path, states, **self._options)
        if step == 0 and (there := self.run.choose({})):
            raise bcp.InputError(f"{self._path} has step {there}: pass ckpt_path=save.newest(), or another folder")
        self._resumed = self.run.resume(step=step or None) > 0
        self._handlers = [signal.getsignal(number) for number in _SIGNALS]

    def _ended(self, *, saves: bool) -> None:
        run, step, trainer = self.run, self._trainer.global_step, self._trainer
        if saves and run is not None and step > self._asked:  # else a user has saved it
            self._asked = step
            run.maybe_save(step, trainer.callback_metrics if self._waits else None)
        if run is not None and run.stopping(step):
            run.save(step)
            trainer.should_stop, trainer.limit_val_batches = True, 0  # no validation takes the rest of the notice
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def _step_of(self, path: str) -> int | None:
        return None if path == self._path else step_of(path, self._path, "ckpt_path")


def _check_seam(ours: type, host: type, own: set[str]) -> None:
    for name in [name for name in vars(ours) if not name.startswith("_") and name not in own]:
        there, mine = getattr(host, name, None), getattr(ours, name)
        passed = signature(there).parameters if callable(there) else {}
        taken = {*signature(mine).parameters, "args", "kwargs"} if callable(mine) else {"_"}
        if there is None or not (passed.keys() <= taken or "_" in taken):
            raise bcp.InputError(f"lightning {lightning.__version__} has another {host.__name__}.{name} than bcp knows")
