"""Hyper-parameters of groups without parameters, which no parameter's name leads to.

They are ``groups.<optimizer>.<part>.<group>.<key>``, by numbers. The parts are those of a wrapper, from the inside. A
value ``groups`` says that there are some: most checkpoints have none, and many thousand other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bcp._log import log
from bcp.plan.read.renamed import CheckpointNames
from bcp.protocols import ObjectKey
from bcp.state.inventory import Leaves
from bcp.state.modules import Finish, in_turn
from bcp.state.optimizer_entries import numbered
from bcp.state.optimizer_parts import parts_of
from bcp.state.optimizer_restore import set_hyper
from bcp.state.optimizers import OPTIMIZER, hyper_of

__all__ = ["add_empty_groups", "empty_group_targets"]

_MARK = "groups"
_FRONT = f"{_MARK}."


def add_empty_groups(leaves: Leaves, state: object) -> None:
    """Take the hyper-parameters of the groups without parameters."""
    groups = list(_empty_groups(state))
    if groups:
        leaves.add_object(OPTIMIZER, _MARK, None)
    for prefix, group in groups:
        for key, value in hyper_of(group).items():
            leaves.add_object(OPTIMIZER, prefix + key, value)


def empty_group_targets(leaves: Leaves, state: object, saved: CheckpointNames) -> Finish:
    """Want those that the checkpoint has; return the function that sets them.

    Other groups have parameters here, or do not exist: a warning tells it, as no parameter loses anything.
    """
    if (OPTIMIZER, _MARK) not in saved.objects:
        return in_turn([])
    names = [name for kind, name in saved.objects if kind == OPTIMIZER and name.startswith(_FRONT)]
    places: dict[ObjectKey, tuple[dict[str, Any], str]] = {}
    for prefix, group in _empty_groups(state):
        own = [name for name in names if name.startswith(prefix)]
        places |= {(OPTIMIZER, name): (group, name.removeprefix(prefix)) for name in own}
    for kind, name in places:
        leaves.add_object(kind, name, None)
    if lost := sorted({name for name in names if (OPTIMIZER, name) not in places}):
        log.warning(
            "the checkpoint has hyper-parameters of a group without parameters, and the target has no empty group "
            "there: they are left out",
            names=lost,
        )

    def finish(objects: Mapping[ObjectKey, Any]) -> None:
        for name, (group, key) in places.items():
            if name in objects:
                set_hyper(group, key, objects[name])

    return finish


def _empty_groups(state: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the groups without parameters, each with the beginning of its names; a shared one comes once."""
    seen: set[int] = set()
    for key, optimizer in numbered(state):
        parts = [optimizer] if isinstance(optimizer, Mapping) else parts_of(optimizer)
        for place, part in enumerate(parts):
            groups = part["param_groups"] if isinstance(part, Mapping) else getattr(part, "param_groups", None)
            for number, group in enumerate(groups if isinstance(groups, list) else ()):
                if not group["params"] and id(group) not in seen:
                    seen.add(id(group))
                    yield f"{_FRONT}{key}.{place}.{number}.", group
