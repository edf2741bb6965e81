"""The callback of Lightning that owns a run: when it saves, resumes and stops."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch.utils._pytree import tree_leaves

import bcp
from bcp.integrations.common import check_methods, check_version, step_of
from bcp.integrations.lightning.strategies import strategy_of

__all__ = ["BcpCheckpoint"]

EVENTS = {
    "setup": ("trainer", "pl_module", "stage"),
    "on_train_start": (),
    "on_train_epoch_start": (),
    "on_train_batch_start": (),
    "on_train_batch_end": (),
    "on_validation_end": (),
    "on_train_end": (),
    "on_exception": ("trainer", "pl_module", "exception"),
    "teardown": (),
}
OLDEST = "2.5", "older ones resume at another sample, where a step accumulates gradients"
SIGNALS = signal.SIGTERM, signal.SIGUSR1  # Lightning's handlers raise in an epoch, or save inside of the handler


class BcpCheckpoint(Callback):
    """Saves and resumes a training of Lightning, and ends it after a signal. Lightning's dump commits with the weights.

    Args:
        path: the run's folder: a directory or a URL.
        save: as for :class:`bcp.Run`, in optimizer steps. None: only ``trainer.save_checkpoint`` saves.
        wait_for_validation: a save that is due waits for the end of a validation, and has its metrics.
        options: ``keep`` and other arguments of :class:`bcp.Run`.

    Attributes:
        run: that of the last ``fit()``; None before the first.

    Raises:
        InputError: an argument of the run cannot be used, or this version of Lightning is older than 2.5 or has other
            methods.

    Example::

        save = BcpCheckpoint("ckpt/run-7", save=100, keep=3)
        trainer = Trainer(strategy=save.strategy("fsdp2"), callbacks=[save], enable_checkpointing=False)
        trainer.fit(module, data, ckpt_path=save.newest())

    """

    def __init__(self, path: str, *, save: Any = 1000, wait_for_validation: bool = False, **options: Any) -> None:
        check_version("lightning", lightning.__version__, *OLDEST)
        check_methods(Callback, EVENTS, "lightning", lightning.__version__, replaced_by=BcpCheckpoint)
        self.run: bcp.Run | None = None
        self._path, self._waits = os.fspath(path).rstrip("/"), wait_for_validation
        self._options: dict[str, Any] = options | {"save": save}
        self._load_options: bcp.LoadOptions = options.get("load_options") or bcp.LoadOptions()
        bcp.Run(path, {}, **self._options)  # checks them

    def strategy(self, base: str | type[Strategy] = "auto", **options: Any) -> Any:
        """Return a strategy that saves with this run.

        Args:
            base: "auto" (one device), "ddp", "fsdp2" (all ranks), or your own class.
            options: of the strategy.

        Raises:
            InputError: bcp does not work with this strategy, or this version of it has other methods.

        Example::

            trainer = Trainer(strategy=save.strategy("ddp"), callbacks=[save], enable_checkpointing=False)

        """
        return strategy_of(self, base, options)

    def newest(self) -> str | None:
        """Return the run's folder for ``fit(ckpt_path=...)``, which loads its newest checkpoint; None for a new run."""
        return self._path if bcp.latest(self._path, storage_options=self._load_options.storage_options) else None

    # -- what the strategy asks for ---------------------------------------------------------------

    def load(self, path: str) -> None:
        """Load the checkpoint that Lightning asks for: to resume training, or the weights of a test."""
        if self._trainer.state.fn == "fit":
            self._begin(None if path == self._path else step_of(path, self._path, "ckpt_path"))
            return
        options = self._load_options
        newest = bcp.latest(path, storage_options=options.storage_options) if path == self._path else None
        bcp.load(newest or path, self._states(), framework=self._options.get("framework"), options=options)

    def save_now(self, path: str, *, whole: bool) -> None:
        """Save the step that has ended, for ``trainer.save_checkpoint``."""
        self._asked = step = self._trainer.global_step
        is_own = path in (self._path, f"{self._path}/step-{step:08d}")
        if not (whole and is_own) or self.run is None or self._trainer.state.fn != "fit":
            raise bcp.InputError(f"save_checkpoint({path!r}): pass {self._path!r} alone, in a hook of the training")
        self.run.save(step, self._metrics())

    # -- events of Lightning ----------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        strategy, others = trainer.strategy, trainer.checkpoint_callbacks
        if getattr(strategy, "owner", None) is not self:
            raise bcp.InputError("a BcpCheckpoint saves nothing alone: pass Trainer(strategy=save.strategy(...)), too")
        if others:
            raise bcp.InputError(f"pass enable_checkpointing=False, and no {type(others[0]).__name__}: the run saves")
        if len(getattr(strategy, "parallel_devices", None) or ()) > trainer.world_size:
            raise bcp.InputError("strategy('auto') is for one device: pass 'ddp' or 'fsdp2', or devices=1")
        self._trainer, self._resumed = trainer, False
        if stage == "fit":
            self.run = None
        self._keep_handlers()

    def on_train_start(self, *_: Any) -> None:
        for number, handler in zip(SIGNALS, self._handlers, strict=True):
            signal.signal(number, handler)
        if self.run is None:
            self._begin(step=0)
        self._step = self._asked = self._trainer.global_step
        if not all(hasattr(loader, "load_state_dict") for loader in tree_leaves(self._trainer.train_dataloader)):
            logging.getLogger("bcp").warning("a dataloader without state_dict() repeats samples after a resumption")

    def on_train_epoch_start(self, *_: Any) -> None:
        if self._resumed and self.run is not None:  # Lightning has drawn random numbers since the load
            self._resumed = False
            self.run.reapply_random_states()

    def on_train_batch_start(self, *_: Any) -> None:
        self.on_train_epoch_start()  # an epoch that goes on has no other start

    def on_train_batch_end(self, *_: Any) -> None:
        before, self._step = self._step, self._trainer.global_step
        if self._step != before:  # else gradients are accumulated
            self._step_ended(saves=not self._waits)

    def on_validation_end(self, *_: Any) -> None:
        if self._waits and self._trainer.state.fn == "fit" and not self._trainer.sanity_checking:
            self._step_ended(saves=True)

    def on_train_end(self, *_: Any) -> None:
        self._close(None)

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def teardown(self, *_: Any, **__: Any) -> None:
        self._close(None)

    # -- the run ----------------------------------------------------------------------------------

    def _states(self) -> dict[str, Any]:
        return {"model": self._trainer.lightning_module, "extra_states": {"lightning": self._trainer.strategy}}

    def _metrics(self) -> Any:
        """Return the metrics of a validation that has just ended."""
        return self._trainer.callback_metrics if self._waits else None

    def _begin(self, step: int | None) -> None:
        """Make the run, and resume from a step; None for the newest one, 0 for a new run."""
        states = self._states()
        if optimizers := {str(number): optimizer for number, optimizer in enumerate(self._trainer.optimizers)}:
            states["optimizer"] = optimizers if len(optimizers) > 1 else optimizers["0"]
        self.run = bcp.Run(self._path, states, **self._options)
        if step == 0 and (there := self.run.choose({})):
            raise bcp.InputError(f"{self._path} has step {there}: pass ckpt_path=save.newest(), or another folder")
        self._resumed = self.run.resume(step=step or None) > 0
        self._keep_handlers()

    def _keep_handlers(self) -> None:
        """Remember the handlers of signals, which Lightning replaces before training starts."""
        self._handlers = [signal.getsignal(number) for number in SIGNALS]

    def _step_ended(self, *, saves: bool) -> None:
        run, step, trainer = self.run, self._trainer.global_step, self._trainer
        if run is None:
            return
        if saves and step > self._asked:  # else a user has saved it
            self._asked = step
            run.maybe_save(step, self._metrics())
        if run.stopping(step):
            run.save(step)
            trainer.should_stop, trainer.limit_val_batches = True, 0  # no validation takes the rest of the notice
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def _close(self, error: BaseException | None) -> None:
        if self.run is not None:
            self.run.__exit__(None if error is None else type(error), error, None)
