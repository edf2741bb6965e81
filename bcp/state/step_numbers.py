"""Step counts that a checkpoint of another library has as numbers, and optimizers have as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bcp.plan.read.renamed import CheckpointNames
from bcp.protocols import ObjectKey
from bcp.state.inventory import Leaves
from bcp.state.optimizers import OPTIMIZER, STEP, Slot

__all__ = ["StepNumbers"]

_WITH_TENSORS = frozenset(
    ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
)
"""Classes of torch whose kernels demand a step count that is a tensor."""


class StepNumbers:
    """The step counts of a load that were saved as numbers.

    bcp itself saves a count as a tensor.
    """

    def __init__(self, leaves: Leaves, saved: CheckpointNames) -> None:
        self._leaves = leaves
        self._saved = saved
        self._wanted: dict[ObjectKey, Slot] = {}

    def wants(self, slot: Slot) -> bool:
        """Want the count of a parameter if it is a number; return whether it is one."""
        name: ObjectKey = (OPTIMIZER, f"state.{slot.fqn}.{STEP}")
        if name not in self._saved.objects:
            return False
        self._leaves.add_object(*name, None)
        self._wanted[name] = slot
        return True

    def fill(
        self, objects: Mapping[ObjectKey, Any], counts: Iterable[tuple[Slot, torch.Tensor]]
    ) -> dict[ObjectKey, Any]:
        """Fill counts with the numbers; return the objects without those of counts."""
        left = dict(objects)
        for slot, count in counts:
            number = left.pop((OPTIMIZER, f"state.{slot.fqn}.{STEP}"), None)
            if isinstance(number, int | float):
                count.fill_(number)
        return left

    def settle(self) -> None:
        """Make tensors of the numbers, where the optimizer's kernels want them."""
        for slot in self._wanted.values():
            number = slot.values.get(STEP)
            if isinstance(number, int | float) and has_tensor_steps(slot.optimizer):
                slot.values[STEP] = torch.tensor(float(number), dtype=torch.float32)


def has_tensor_steps(optimizer: type[Any] | None) -> bool:
    """Whether an optimizer is one of torch, or a subclass, whose step counts are tensors."""
    return optimizer is not None and any(
        base.__name__ in _WITH_TENSORS and base.__module__.startswith("torch.optim") for base in optimizer.__mro__
    )
