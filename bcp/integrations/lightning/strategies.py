"""Strategies of Lightning that save and load with the run of a callback.

Lightning asks its strategy for the states of the module and the optimizers, adds loops, schedulers and callbacks, and
hands all that to ``save_checkpoint``: its dump. Here the states stay where they are. The run reads them in place, and
the dump is one more state of the same commit.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy

import bcp
from bcp.integrations.common import check_methods

if TYPE_CHECKING:
    from bcp.integrations.lightning.callback import BcpCheckpoint

__all__ = ["BcpStrategy", "strategy_of"]

REPLACED = {
    "setup": ("trainer",),
    "barrier": (),
    "lightning_module_state_dict": (),
    "optimizer_state": ("optimizer",),
    "load_model_state_dict": ("checkpoint",),
    "load_optimizer_state_dict": ("checkpoint",),
    "save_checkpoint": ("checkpoint", "filepath"),
    "load_checkpoint": ("checkpoint_path",),
    "remove_checkpoint": ("filepath",),
}
KNOWN = {"auto": SingleDeviceStrategy, "ddp": DDPStrategy, "fsdp2": ModelParallelStrategy}
REFUSED = ("FSDP", "DeepSpeed", "XLA")  # parts of names: their states are no plain tensors or DTensors of a module


def strategy_of(owner: BcpCheckpoint, base: str | type[Strategy], options: dict[str, Any]) -> Any:
    """Return a strategy that saves with the run of ``owner``; see :meth:`BcpCheckpoint.strategy`."""
    kind: Any = KNOWN.get(base) if isinstance(base, str) else base
    names = " ".join(parent.__name__ for parent in getattr(kind, "__mro__", ()))
    if "Strategy" not in names or any(name in names for name in REFUSED) or "start_method" in options:
        raise bcp.InputError(f"strategy({base!r}): FSDP1, DeepSpeed, XLA and forks do not work; use {[*KNOWN]}")
    check_methods(kind, REPLACED, "lightning", lightning.__version__, replaced_by=BcpStrategy)
    members: dict[str, Any] = {"owner": owner}
    if base == "fsdp2":
        ranks = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or torch.cuda.device_count() or 1
        options = {"data_parallel_size": int(ranks), "tensor_parallel_size": 1} | options
    elif base == "auto":  # the trainer fills in its devices
        members["parallel_devices"] = ()
        members["root_device"] = property(lambda made: (*made.parallel_devices, torch.device("cpu"))[0])
    return type(f"Bcp{kind.__name__}", (BcpStrategy, kind), members)(**options)


class BcpStrategy(Strategy):
    """The part in front of a strategy. It is an extra state of the run, too: Lightning's dump."""

    owner: BcpCheckpoint
    dump: dict[str, Any]
    restore_checkpoint_after_setup = True  # parameters are on their devices, and sharded, by then

    def state_dict(self) -> dict[str, Any]:
        """Return a new dump, for a save of the run."""
        self.lightning_module.trainer.save_checkpoint(self, weights_only=False)  # calls save_checkpoint() below
        return self.dump

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a loaded dump for Lightning."""
        self.dump = state

    def setup(self, trainer: Trainer) -> None:
        if self.owner not in trainer.callbacks:
            raise bcp.InputError("the strategy of a BcpCheckpoint saves nothing alone: pass callbacks=[save], too")
        trainer.callbacks.sort(key=lambda callback: callback is self.owner)  # a dump has the others' latest states
        super().setup(trainer)

    def barrier(self, name: str | None = None) -> None:
        if name != "Trainer.save_checkpoint":  # a rank that fails in its dump would leave the others waiting
            super().barrier(name)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Take a dump: of :meth:`state_dict`, or of a user who saves now."""
        self.dump = checkpoint
        if filepath is not self:
            whole = storage_options is None and "optimizer_states" in checkpoint
            self.owner.save_now(os.fspath(filepath), whole=whole)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: Any = None) -> dict[str, Any]:
        """Load module and optimizers in place, and return the dump without them."""
        self.owner.load(os.fspath(checkpoint_path))
        return {"state_dict": {}, **self.dump}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None: ...  # noqa: FBT001, FBT002 -- Lightning's

    def load_optimizer_state_dict(self, checkpoint: Any) -> None: ...

    def remove_checkpoint(self, filepath: Any) -> None: ...  # retention is the run's
