"""The states of a job of Megatron-LM: its live objects, and what its loop needs beside tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import bcp
from bcp.integrations.common import HostState

__all__ = ["States"]

SAMPLES = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
ALIKE = ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding")


class States:
    """What a checkpoint of a job holds.

    Attributes:
        live: model, optimizer and extra states, as :func:`bcp.save` takes them; filled once the objects are there.
        values: the loop's own values: scheduler, operations, samples, and the layout of the random states.
        scheduler: Megatron's scheduler of the learning rate; None for a job without one.
        operations: floating point operations until now.
    """

    def __init__(self, get_args: Callable[[], Any]) -> None:
        """Remember where Megatron's arguments are."""
        self._get_args = get_args
        self.live: dict[str, Any] = {}
        self.values = HostState(self._read)
        self.scheduler: Any = None
        self.operations: Any = 0

    def targets(self, model: Any, random: Any, optimizer: Any) -> dict[str, Any]:
        """Return live objects, as :func:`bcp.save` takes them."""
        extra = {"megatron": self.values, "random": _NoRandomStates()}
        states = {"model": [*model, *random], "extra_states": extra}
        return states if optimizer is None else {**states, "optimizer": optimizer}

    def random_targets(self) -> list[Any]:
        """Return the target of the saved random states: Megatron's, or on another layout a place to drop them.

        Raises:
            InputError: the checkpoint is of a model with other sizes.

        """
        args, saved, live = self._get_args(), self.values.loaded, bcp.MegatronRng()
        if saved is None:
            return []
        if saved["alike"] != (alike := _alike(args)) and not args.finetune:
            raise bcp.InputError(f"the checkpoint is of a model with {saved['alike']}, and this job has {alike}")
        (own,), shape = live.sharded_state_dict().values(), tuple(saved["random"])
        if shape == own.global_shape and not (args.finetune or args.no_load_rng):
            return [live]
        places = itertools.product(*map(range, shape)) if torch.distributed.get_rank() == 0 else ()
        return [replace(own, data=0, global_shape=shape, global_offset=place, replica_id=0) for place in places]

    def apply(self, scheduler: Any) -> None:
        """Set the loaded samples in the arguments, and load the scheduler; None leaves it as it is."""
        loaded = self.values.loaded
        vars(self._get_args()).update({name: loaded[name] for name in SAMPLES})
        if scheduler is not None:
            scheduler.load_state_dict(loaded["scheduler"])

    def _read(self) -> dict[str, Any]:
        """Return the loop's own values as they are now."""
        args = self._get_args()
        (own,) = bcp.MegatronRng().sharded_state_dict().values()
        return {
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "operations": self.operations,
            "random": list(own.global_shape),
            "alike": _alike(args),
            **{name: getattr(args, name, 0) for name in SAMPLES},
        }


def _alike(args: Any) -> dict[str, Any]:
    """Return the arguments that a checkpoint and a job have to share."""
    return {name: getattr(args, name, None) for name in ALIKE}


class _NoRandomStates(bcp.RngState):
    """Stands for the random states that a run adds, which are those of ranks and not of a layout."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def load_derived(self, state: Mapping[str, Any], rank: int) -> None:
        pass
