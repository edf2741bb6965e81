"""An optimizer in files of its own: its parameters have names, or numbers as in the ``state_dict()`` of torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bcp.errors import CorruptError
from bcp.interop.catalogue import Piece
from bcp.interop.found import OPTIMIZER, Found
from bcp.interop.optimizer_numbers import is_packed, packed_entries
from bcp.interop.torch_pickle import Stored
from bcp.plan.strided import row_major

__all__ = ["WRAPPER", "Part", "add_states", "unwrapped"]

WRAPPER = "module."
"""The prefix of names of a model in torch's DDP."""

GROUPS = "param_groups"


@dataclass(slots=True)
class Part:
    """The model, or the optimizer, by its names in the files.

    Attributes:
        order: names of the tensors, as the state had them.
        pieces: the tensors.
        values: the values.
        ranks: how many ranks wrote it.
    """

    order: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    @property
    def shapes(self) -> dict[str, Stored]:
        """The tensors as records with their shapes; the key of each is its name."""
        return {
            piece.name: Stored(piece.name, piece.dtype, 0, piece.shape, tuple(row_major(piece.shape)))
            for piece in self.pieces
        }


def unwrapped(part: Part) -> dict[str, str]:
    """Return the names of the model's tensors and values, without the prefix that DDP puts before all of them."""
    names = [*part.order, *part.values]
    is_wrapped = all(name.startswith(WRAPPER) for name in names)
    return {name: name.removeprefix(WRAPPER) if is_wrapped else name for name in names}


def add_states(found: Found, part: Part, model: Sequence[tuple[str, Stored]], where: str) -> None:
    """Add the optimizer's states, whose parameters have names, or numbers as in DDP."""
    groups = part.values.get(GROUPS)
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CorruptError(f"{where} has no {GROUPS} of the optimizer; get the files again")
    packed = {"state": _by_parameter(part, where, numbers=is_packed({"state": {}, GROUPS: groups})), GROUPS: groups}
    if is_packed(packed):
        entries = list(packed_entries(packed, model, where))
        found.pieces.extend(_renamed(part, {leaf.key: name for name, leaf in entries if isinstance(leaf, Stored)}))
        others = {name: leaf for name, leaf in entries if not isinstance(leaf, Stored)}
    else:
        found.pieces.extend(_renamed(part, {name: name for name in part.order}))
        others = {name: leaf for name, leaf in part.values.items() if name != GROUPS}
        for group in groups:
            found.add_hyper(map(str, group.get("params", ())), group, where)
    for name, leaf in others.items():
        found.add_value(name, leaf, where)


def _by_parameter(part: Part, where: str, *, numbers: bool) -> dict[Any, dict[str, Any]]:
    """Return all states by parameter and key."""
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    for name, leaf in (*part.shapes.items(), *part.values.items()):
        section, _, inside = name.partition(".")
        parameter, _, key = inside.rpartition(".")
        if section == "state" and parameter:
            state[int(parameter) if numbers and parameter.isdecimal() else parameter][key] = leaf
        elif name != GROUPS:
            raise CorruptError(
                f"{where}: {name!r:.80} of the optimizer is no state of a parameter; get the files again"
            )
    return state


def _renamed(part: Part, names: Mapping[str, str]) -> Iterator[Piece]:
    return (replace(piece, kind=OPTIMIZER, name=names[piece.name]) for piece in part.pieces)
