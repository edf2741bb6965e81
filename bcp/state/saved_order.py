"""Checkpoints of an optimizer's ``state_dict()`` whose names follow from the order of the model's parameters alone.

Nobody knows the order in which the optimizer was built. So the number of each parameter is stored beside the name:
``state.<fqn>.:number=<group>:<n>``. A load into an optimizer of another order goes by number, as in torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bcp._log import log
from bcp.errors import StateError
from bcp.plan.read.renamed import MASTER, CheckpointNames
from bcp.state.inventory import Leaves
from bcp.state.optimizers import NUMBER, OPTIMIZER, Slot

__all__ = ["add_numbers", "by_saved_number", "in_saved_order", "is_numbered"]

Shape = tuple[int, ...]


def add_numbers(leaves: Leaves, slots: Iterable[Slot]) -> None:
    """Store that parameters were named by their order."""
    groups: dict[int, int] = {}
    for number, slot in enumerate(slots):
        group = groups.setdefault(id(slot.group), len(groups))
        leaves.add_object(OPTIMIZER, f"state.{slot.fqn}.{NUMBER}{group}:{number}", None)


def by_saved_number(
    tensors: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], saved: CheckpointNames
) -> dict[int, torch.Tensor]:
    """Return the parameter of each number in a state dict as the checkpoint has them; nothing if it has others."""
    if not is_numbered(saved):
        return {}
    places, sizes = _saved_numbers(saved)
    if sizes != [len(group["params"]) for group in groups if group["params"]]:
        return {}
    numbers = [number for group in groups for number in group["params"]]
    found = [next((tensors[fqn] for fqn in fqns if fqn in tensors), None) for fqns in places]
    known = {number: value for number, value in zip(numbers, found, strict=False) if isinstance(value, torch.Tensor)}
    return known if len(known) == len(numbers) == len(places) else {}


def in_saved_order(slots: Sequence[Slot], saved: CheckpointNames) -> Sequence[Slot]:
    """Give parameters the names that the checkpoint has at their numbers, if the optimizer has another order.

    Orders are compared among parameters of one shape: only these can be mistaken for each other. Raises StateError if
    they differ, and the optimizer does not have groups of the saved sizes with parameters of the saved shapes.
    """
    if not is_numbered(saved):
        return slots
    places, sizes = _saved_numbers(saved)
    names = {name: slot.fqn for slot in reversed(slots) for name in (*slot.tied, slot.fqn)}
    here = [slot.fqn for slot in slots]
    there = list(dict.fromkeys(next((names[fqn] for fqn in fqns if fqn in names), fqns[0]) for fqns in places))
    shapes = {slot.fqn: _shape(slot) for slot in slots}
    shapes |= {name: saved.meta(key).shape for name in there if (key := ("model", name)) in saved.rows}
    if _by_shape(here, shapes) == _by_shape(there, shapes):
        return slots
    if sizes == [*Counter(id(slot.group) for slot in slots).values()] and all(
        _takes(slot, fqns[0], shapes, saved) for slot, fqns in zip(slots, places, strict=True)
    ):
        return [replace(slot, fqn=fqn, tied=tied) for slot, (fqn, *tied) in zip(slots, places, strict=True)]
    common = set(here) & set(there)
    if _by_shape(filter(common.__contains__, here), shapes) == _by_shape(filter(common.__contains__, there), shapes):
        alike = Counter(saved.meta(key).shape for key in saved.rows if key[0] == "model")
        if any(alike[shapes.get(name, ())] != 1 for name in there):
            _warn(len(places), len(here))
        return slots
    raise StateError(_contradiction(here, there, shapes))


def _warn(saved: int, here: int) -> None:
    log.warning(
        "the checkpoint has an optimizer's state_dict() without names, and the target's optimizer has another "
        "number of parameters: states go by names that the order of model.parameters() gave. They are right only "
        "if the saved optimizer was built in that order",
        saved=saved,
        here=here,
    )


def is_numbered(saved: CheckpointNames) -> bool:
    """Whether the optimizer was named by an order.

    Looks for the first parameter, which is one of the model's: the values of an optimizer are ten times as many.
    """
    models = (name for kind, name in saved.rows if kind == "model")
    return any((OPTIMIZER, f"state.{name}.{NUMBER}0:0") in saved.objects for name in models)


def _saved_numbers(saved: CheckpointNames) -> tuple[list[list[str]], list[int]]:
    """Return the names of each parameter, several for a tied one, by number, and the sizes of the groups."""
    found: dict[tuple[int, int], list[str]] = {}
    for kind, name in saved.objects:
        if NUMBER in name and kind == OPTIMIZER:
            front, _, place = name.rpartition(f".{NUMBER}")
            group, _, number = place.partition(":")
            if group.isdecimal() and number.isdecimal():
                found.setdefault((int(number), int(group)), []).append(front.removeprefix("state."))
    order = sorted(found)
    return [sorted(found[place]) for place in order], [*Counter(group for _, group in order).values()]


def _takes(slot: Slot, fqn: str, shapes: Mapping[str, Shape], saved: CheckpointNames) -> bool:
    """Whether a parameter can have the states that were saved by another name."""
    has_master = slot.master is not None or MASTER in slot.values
    if has_master and (OPTIMIZER, f"state.{fqn}.{MASTER}") not in saved.rows:
        return False  # it would be read from the model's tensor of that name
    return slot.placement is None and _shape(slot) == shapes.get(fqn)


def _shape(slot: Slot) -> Shape:
    return tuple(slot.parameter.shape) if slot.placement is None else slot.placement.shape


def _by_shape(fqns: Iterable[str], shapes: Mapping[str, Shape]) -> dict[Shape | None, list[str]]:
    """Return the names of each shape in their order."""
    alike: dict[Shape | None, list[str]] = {}
    for fqn in fqns:
        alike.setdefault(shapes.get(fqn), []).append(fqn)
    return alike


def _contradiction(here: Sequence[str], there: Sequence[str], shapes: Mapping[str, Shape]) -> str:
    """Say where two orders part."""
    number = next((n for n, (mine, other) in enumerate(zip(here, there, strict=False)) if mine != other), 0)
    mine, other = here[number], there[number]
    return (
        f"the checkpoint has an optimizer's state_dict(), whose {len(there)} parameters have numbers: {number} was "
        f"taken for {other!r} {list(shapes.get(other, ()))}. The target's optimizer has {len(here)}: {number} is "
        f"{mine!r} {list(shapes.get(mine, ()))}. It cannot be told which states are whose; build the optimizer in the "
        "order and the groups of the saved one, or load into optimizer.state_dict()"
    )
