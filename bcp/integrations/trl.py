"""States of TRL's trainers beside the Trainer's own: completions for several steps, and the order of prompts."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["Generation", "pass_epochs"]

_NUMBERS = ("_step", "entropy_coef", "_last_world_entropy")


class Generation:
    """The completions of a trainer as an extra state, with the count of steps and the coefficient of the entropy bonus.

    GRPO, RLOO and distillation generate for several steps at once. A job that resumes between two generations takes
    the other completions from the checkpoint. Completions belong to one rank: with other batches or ranks, the trainer
    generates anew, and a warning says so.

    Example:
        >>> Generation.is_in(object())
        False

    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @staticmethod
    def is_in(trainer: Any) -> bool:
        """Return whether a trainer keeps completions for later steps."""
        return hasattr(trainer, "_buffered_inputs") and hasattr(trainer, "_step")

    def state_dict(self) -> dict[str, Any]:
        """Return the completions that later steps need, and the numbers."""
        trainer, layout = self._trainer, self._layout()
        numbers = {name: getattr(trainer, name) for name in _NUMBERS if hasattr(trainer, name)}
        is_used_up = numbers["_step"] % layout[-1] == 0
        return {"numbers": numbers, "layout": layout, "completions": None if is_used_up else trainer._buffered_inputs}  # noqa: SLF001

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give numbers and completions to the trainer; no completions of other batches or ranks."""
        trainer, completions = self._trainer, state["completions"]
        for name, value in state["numbers"].items():
            setattr(trainer, name, value)
        if completions is not None and list(state["layout"]) != self._layout():
            words = "the checkpoint has completions of other batches or ranks: %s generates anew"
            logging.getLogger("bcp").warning(words, type(trainer).__name__)
            completions = None
        trainer._buffered_inputs = _moved(completions, trainer.accelerator.device)  # noqa: SLF001

    def _layout(self) -> list[int]:
        """Return samples of a step, ranks, and steps between two generations."""
        args = self._trainer.args
        steps = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        return [args.per_device_train_batch_size, args.world_size, steps * getattr(self._trainer, "num_iterations", 1)]


def _moved(state: Any, device: Any) -> Any:
    if isinstance(state, dict):
        return {name: _moved(each, device) for name, each in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_moved(each, device) for each in state)
    return state.to(device) if hasattr(state, "to") else state


def pass_epochs(loader: Any, epochs: int) -> None:
    """Let a sampler of TRL draw the orders of past epochs.

    Its generator begins anew in each job, and the Trainer sets the epoch of other samplers only.

    Args:
        loader: the prepared dataloader of the job.
        epochs: to pass.

    Example:
        >>> pass_epochs(None, 0)

    """
    batches = getattr(loader, "batch_sampler", None)
    batches = getattr(batches, "batch_sampler", batches)  # accelerate wraps that of a rank
    sampler: Any = getattr(batches, "sampler", None)
    if type(sampler).__module__.startswith("trl."):
        for _ in range(epochs):
            next(iter(sampler), None)
