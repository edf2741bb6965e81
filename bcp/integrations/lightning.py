"""Lightning: a callback that owns a :class:`bcp.Run`, and strategies that save and load with it.

Nothing is gathered, and ``CheckpointIO`` is not used. Lightning's own dump (loops, callbacks, schedulers,
hyper-parameters) is one extra state, so that it commits with the weights.
"""
# ruff: noqa: ARG002, D102 -- methods that Lightning names and calls

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


class _OneDevice(SingleDeviceStrategy):
    parallel_devices: tuple[torch.device, ...] = ()  # the trainer fills it in
    root_device = property(lambda self: self.parallel_devices[0] if self.parallel_devices else torch.device("cpu"))


class BcpCheckpoint(Callback):
    """Saves and resumes a training of Lightning, and ends it after a signal.

    Args:
        path: the run's folder: a directory or a URL.
        save: as for :class:`bcp.Run`, in optimizer steps. None: only ``trainer.save_checkpoint`` saves.
        after: ``"validation"`` puts off a save that is due until a validation has ended, and adds the callback metrics.
        options: ``keep`` and other arguments of :class:`bcp.Run`.

    Example::

        save = BcpCheckpoint("ckpt/run-7", save=100, keep=3)
        trainer = Trainer(strategy=save.strategy("fsdp2"), callbacks=[save], enable_checkpointing=False)
        trainer.fit(module, data, ckpt_path=save.newest())

    """

    run: bcp.Run | None = None  # of the last fit()

    def __init__(self, path: str, *, save: Any = 1000, after: str = "step", **options: Any) -> None:
        if after not in ("step", "validation"):
            raise bcp.InputError(f"after={after!r}: pass 'step' or 'validation'")
        _check_seam(BcpCheckpoint, Callback, {"run", "strategy", "newest", "load", "save_now"})
        self._path, self._waits, self._options = os.fspath(path), after == "validation", {"save": save, **options}
        bcp.Run(path, {}, **self._options)  # checks them

    def strategy(self, base: str | type[Strategy] | Strategy = "auto", **options: Any) -> Any:
        """Return a strategy that saves with this run: ``"auto"`` (one device), ``"ddp"``, ``"fsdp2"``, or yours.

        ``options`` are those of the class. ``"fsdp2"`` shards over all ranks, unless you pass ``data_parallel_size``.
        """
        known = {"auto": _OneDevice, "ddp": DDPStrategy, "fsdp2": ModelParallelStrategy}
        made = known.get(base, base) if isinstance(base, str) else base
        kind = made if isinstance(made, type) else type(made)
        if base == "fsdp2":
            ranks = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or torch.cuda.device_count() or 1
            options = {"data_parallel_size": int(ranks), "tensor_parallel_size": 1} | options
        others = any(parent.__name__.startswith(("FSDP", "DeepSpeed", "XLA")) for parent in kind.__mro__)
        if not issubclass(kind, Strategy) or others or options.get("start_method", "popen") != "popen":
            raise bcp.InputError(f"strategy({base!r}): FSDP1, DeepSpeed, XLA and forks do not work; use {[*known]}")
        _check_seam(_Strategy, kind, {"state_dict", "load_state_dict"})
        both = type(f"Bcp{kind.__name__}", (_Strategy, kind), {"owner": self})
        if made is kind:
            return both(**options)
        made.__class__ = both
        return made

    def newest(self) -> str | None:
        """Return the run's folder for ``fit(ckpt_path=...)``, which loads its newest checkpoint; None for a new run."""
        return self._path if self._latest() else None

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
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
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

    on_train_batch_start = on_train_epoch_start  # an epoch that goes on has no other start

    def on_train_batch_end(self, *_: Any) -> None:
        if self._trainer.global_step != self._step:  # else gradients are accumulated
            self._step = self._trainer.global_step
            self._ended(saves=not self._waits)

    def on_validation_end(self, *_: Any) -> None:
        if self._waits and self._trainer.state.fn == "fit" and not self._trainer.sanity_checking:
            self._ended(saves=self._trainer.global_step > self._asked)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self.run is not None:
            self.run.close()

    teardown = on_train_end  # of a run without a step

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if self.run is not None:
            self.run.__exit__(type(exception), exception, exception.__traceback__)

    def load(self, path: str) -> None:
        """Load the run in place; for an evaluation, load the weights of any checkpoint."""
        if self._trainer.state.fn == "fit":
            self._begin(self._step_of(path))
        else:
            place = (path == self._path and self._latest()) or path
            states = {kind: state for kind, state in self._states().items() if kind != "optimizer"}
            bcp.load(place, states, framework=self._options.get("framework"), options=self._options.get("load_options"))

    def save_now(self, path: str, *, whole: bool) -> None:
        """Save the step that has ended last, as ``trainer.save_checkpoint`` asks for it."""
        self._asked = step = self._trainer.global_step
        if not whole or self._step_of(path) not in (None, step) or self.run is None or self._trainer.state.fn != "fit":
            raise bcp.InputError(f"save_checkpoint({path!r}): pass the run's folder, while fit() trains, without "
                                 "weights_only and storage_options")  # fmt: skip
        self.run.save(step, self._trainer.callback_metrics if self._waits else None)

    def _states(self) -> dict[str, Any]:
        found = {str(number): optimizer for number, optimizer in enumerate(self._trainer.optimizers)}
        states = {"model": self._trainer.lightning_module, "extra_states": {"lightning": self._trainer.strategy}}
        return states | ({"optimizer": found if len(found) > 1 else found["0"]} if found else {})

    def _begin(self, step: int | None) -> None:
        self.run = bcp.Run(self._path, self._states(), **self._options)
        if step == 0 and (there := self.run.choose({})):
            raise bcp.InputError(f"{self._path} has step {there}: pass ckpt_path=save.newest(), or another folder")
        self._resumed = self.run.resume(step=step or None) > 0
        self._handlers = [signal.getsignal(number) for number in _SIGNALS]

    def _ended(self, *, saves: bool) -> None:
        run, step, trainer = self.run, self._trainer.global_step, self._trainer
        assert run is not None  # noqa: S101 -- on_train_start has made it
        if saves:
            self._asked = step
            run.maybe_save(step, trainer.callback_metrics if self._waits else None)
        if run.stopping(step):
            run.save(step)
            trainer.should_stop, trainer.limit_val_batches = True, 0  # no validation takes the rest of the notice
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None

    def _latest(self) -> str | None:
        return bcp.latest(
            self._path, storage_options=getattr(self._options.get("load_options"), "storage_options", None)
        )

    def _step_of(self, path: str) -> int | None:
        folder, _, step = path.rpartition("/step-")
        if path != self._path and (folder != self._path.rstrip("/") or not step.isdecimal()):
            raise bcp.InputError(f"{path!r} is no step of the run at {self._path!r}: pass save.newest()")
        return None if path == self._path else int(step)


def _check_seam(ours: type, host: type, own: set[str]) -> None:
    for name in [name for name in vars(ours) if not name.startswith("_") and name not in own]:
        there, mine = getattr(host, name, None), getattr(ours, name)
        passed = signature(there).parameters.values() if callable(there) else ()
        taken = signature(mine).parameters if callable(mine) else {}
        named = {p.name for p in passed if p.kind is p.POSITIONAL_OR_KEYWORD}
        if there is None or (named - {*taken} and not taken.keys() & {"_", "__"}):
            raise bcp.InputError(f"lightning {lightning.__version__} has another {host.__name__}.{name} than bcp knows")
