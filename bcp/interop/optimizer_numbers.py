"""The ``state_dict()`` of an optimizer by reference: numbers of parameters become names of the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bcp.errors import CheckpointError
from bcp.interop.torch_pickle import Stored

__all__ = ["is_packed", "packed_entries"]

Shape = tuple[int, ...]
NUMBER = ":number="
"""Marks names by an order; see :mod:`bcp.state.saved_order`."""


def is_packed(state: object) -> bool:
    """Whether a state is what ``state_dict()`` of a torch optimizer returns: its parameters are numbers."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return False
    groups = state["param_groups"]
    if not isinstance(groups, list) or not isinstance(state["state"], Mapping):
        return False
    params = [group.get("params") if isinstance(group, dict) else None for group in groups]
    return all(isinstance(some, list) and all(type(number) is int for number in some) for some in params)


def packed_entries(
    state: Mapping[str, Any], model: Sequence[tuple[str, Stored]], where: str
) -> Iterator[tuple[str, Any]]:
    """Yield (name, leaf) of all states and hyper-parameters, by the names of the model's parameters.

    Args:
        state: as ``state_dict()`` returns it.
        model: the model's tensors in their order; tied ones once.
        where: the file in messages.

    Raises:
        CheckpointError: a number may be several parameters, or an entry belongs to no parameter.

    """
    groups, states = state["param_groups"], state["state"]
    numbers = [number for group in groups for number in group["params"]]
    names = _given(groups, numbers)
    is_ordered = not names
    if is_ordered:
        shapes = [_shape(states.get(number)) for number in numbers]
        names = dict(zip(numbers, _by_order(shapes, model, where), strict=True))
    strange = [number for number in states if number not in names]
    if strange or len(names) != len(numbers) or set(state) != {"state", "param_groups"}:
        raise CheckpointError(
            f"{where}: the optimizer's state has entries of no parameter: {(strange or sorted(map(str, state)))[:5]}; "
            "load it with torch.load, and save the optimizer with bcp.save"
        )
    for number, entry in states.items():
        yield from ((f"state.{names[number]}.{key}", leaf) for key, leaf in entry.items())
    for group in groups:
        for number in group["params"]:
            left = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            yield from ((f"param_groups.{names[number]}.{key}", value) for key, value in left.items())
    if is_ordered:
        order = {number: place for place, number in enumerate(numbers)}
        for index, group in enumerate(groups):
            for number in group["params"]:
                yield f"state.{names[number]}.{NUMBER}{index}:{order[number]}", None


def _given(groups: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> dict[int, str]:
    """Return the names in the groups themselves; empty if a group has none."""
    given = [name for group in groups for name in group.get("param_names") or []]
    sound = len(given) == len(numbers) and all(isinstance(name, str) for name in given)
    return dict(zip(numbers, given, strict=True)) if sound else {}


def _shape(entry: object) -> Shape | None:
    """Return the shape of a parameter by its largest state; None if no state tells it."""
    values = entry.values() if isinstance(entry, Mapping) else ()
    return max((leaf.shape for leaf in values if isinstance(leaf, Stored) and leaf.shape), key=len, default=None)


def _by_order(shapes: Sequence[Shape | None], model: Sequence[tuple[str, Stored]], where: str) -> list[str]:
    """Return the only choice of the model's tensors with this order and these shapes.

    Each module lists its parameters before its buffers, so a choice has the first tensors of each module.
    """
    ends: dict[int, _Choice] = {0: _Choice(1, None, ())}  # by the number of named parameters
    for _, tensors in groupby(model, key=lambda item: item[0].rpartition(".")[0]):
        own = list(tensors)
        reached: dict[int, _Choice] = {}
        for end, choice in ends.items():
            for count in range(len(own) + 1):
                if count and (
                    end + count > len(shapes) or shapes[end + count - 1] not in (None, own[count - 1][1].shape)
                ):
                    break
                ways = choice.ways + (reached[end + count].ways if end + count in reached else 0)
                reached[end + count] = _Choice(ways, choice, tuple(name for name, _ in own[:count]))
        ends = reached
    last = ends.get(len(shapes))
    if last is None or last.ways != 1:
        raise CheckpointError(
            f"{where}: the optimizer numbers {len(shapes)} parameters, and the {len(model)} tensors of the model do "
            "not tell which ones they are; load it with torch.load, and save model and optimizer with bcp.save"
        )
    return last.names()


@dataclass(frozen=True, slots=True)
class _Choice:
    """Possible parameters: tensors of the last module, and the choice before it.

    ``ways`` counts the choices of as many parameters. The tensors are those of one choice.
    """

    ways: int
    before: _Choice | None
    own: tuple[str, ...]

    def names(self) -> list[str]:
        """Return all names in order."""
        parts: list[tuple[str, ...]] = []
        choice: _Choice | None = self
        while choice is not None:
            parts.append(choice.own)
            choice = choice.before
        return [name for part in reversed(parts) for name in part]
