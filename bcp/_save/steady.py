"""Memory that does not change before the next step of the optimizers that are held back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch.optim import Optimizer

from bcp.stages.memory import stretch

__all__ = ["Steady"]


class Steady:
    """The memory of the parameters that change in a step of some optimizers only.

    These are their own, but for frozen ones, which no step changes and a forward pass may. Wrappers (Megatron-LM's,
    DeepSpeed's) may let them step copies, from which they write all parameters of the model that need gradients. That
    is assumed of those whose optimizers step anything but whole parameters of the model, or nothing (ZeRO-3 fills its
    groups in a step, and keeps in ``ds_tensor`` what is here).

    Stretches of addresses are compared, not storages: a storage may hold more, as those of FSDP1 do, of which another
    optimizer may step a part.
    """

    def __init__(self, model: object, optimizers: Sequence[Optimizer], *, wrapped: bool) -> None:
        """Take note of where they are. ``wrapped``: whether any of the optimizers was found in a wrapper."""
        stepped = (p for one in optimizers for group in one.param_groups for p in group["params"])
        own = [stretch(p) for p in stepped if p.requires_grad or wrapped]  # masters of wrappers need no gradients
        parameters = list(_parameters(model)) if wrapped else []
        if wrapped and (not own or set(own) - {stretch(parameter) for parameter in parameters}):
            own += [stretch(part) for p in parameters if p.requires_grad for part in (p, getattr(p, "ds_tensor", p))]
        self._exactly = set(own)

    def __repr__(self) -> str:
        """Show how much it is."""
        starts, stops = self._joined
        return f"<Steady: {sum(stops) - sum(starts)} bytes in {len(starts)} stretches>"

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor is in it; never where its memory is not known."""
        found = start, stop = stretch(tensor)
        if found in self._exactly:  # as a rule; looking it up in order takes as long again as all of the rest
            return start < stop
        starts, stops = self._joined
        at = bisect_right(starts, start) - 1
        return at >= 0 and start < stop <= stops[at]

    @cached_property
    def _joined(self) -> tuple[list[int], list[int]]:
        """Starts and stops in order, of stretches that do not touch."""
        starts: list[int] = []
        stops: list[int] = []
        for start, stop in sorted(self._exactly):
            if stops and start <= stops[-1]:
                stops[-1] = max(stop, stops[-1])
            else:
                starts.append(start)
                stops.append(stop)
        return starts, stops


def _parameters(model: object) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of the modules that were passed."""
    if isinstance(model, torch.nn.Module):
        yield from model.parameters()
    elif isinstance(model, (Mapping, list, tuple)):
        for part in model.values() if isinstance(model, Mapping) else model:
            yield from _parameters(part)
