"""How a load gets into torch optimizers. No step is ever taken: states that do not exist yet are made of zeros."""

from __future__ import annotations

import cmath
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bcp.errors import CorruptError, MismatchError, StateError
from bcp.plan.read.renamed import CheckpointNames
from bcp.protocols import ObjectKey
from bcp.state.dtensor import torchs
from bcp.state.hooks import is_sharded_tensor
from bcp.state.inventory import Leaves
from bcp.state.modules import Check, Finish, put
from bcp.state.names import Path, dotted, split, walk
from bcp.state.native_values import is_generator, same_generator, set_generator
from bcp.state.nested import STORAGES, TREE
from bcp.state.optimizer_kinds import fitting_hypers, fitting_states
from bcp.state.optimizer_states import Trees, fresh, in_tree, owner_of, saved_dtype, scalar_device, zeros
from bcp.state.optimizers import COUNTS, EMPTY, MASTER, OPTIMIZER, STEP, Slot, is_mark
from bcp.state.placement import ShardedLeaf
from bcp.state.step_numbers import StepNumbers
from bcp.state.values import same_value, shown

__all__ = ["scalar_device", "set_hyper", "slot_targets"]

Change = tuple[dict[str, Any], str, Any]
"""(group, key, value) to set."""


def slot_targets(  # noqa: C901 -- one line a kind of entry
    leaves: Leaves, optimizer_slots: Iterable[Slot], saved: CheckpointNames
) -> tuple[Check, Finish]:
    """Add the targets of the optimizers, and make the states that the checkpoint has and they lack altogether.

    New states become the optimizer's own when everything is in place: a load that fails leaves it without.

    Hyper-parameters are wanted as the checkpoint has them: keys that only one side has (they differ between versions of
    torch) are no mismatch. A parameter may have several names. States that were saved by its other names are known to
    be wanted, but not read.

    Return two functions. The first raises :class:`~bcp.errors.MismatchError` where parameters of one group were saved
    with different hyper-parameters. The second sets hyper-parameters and those states that are no tensors, and hands
    over the new states. Hyper-parameters that were saved as tensors are loaded before they can be compared: for these
    the second one raises the error, before it sets anything. Raises StateError if a parameter is not in the model or in
    two optimizers, or a nested state of an older checkpoint would have to be made.
    """
    slots: dict[str, Slot] = {}
    for slot in optimizer_slots:
        if slots.setdefault(slot.fqn, slot) is not slot:
            raise StateError(f"the parameter {slot.fqn!r} is in two optimizers or groups; leave it in one")
    entries = _SavedStates.of(saved, slots)
    leaves.foreign.update(entries.left_out(slots))
    aside, trees, numbers_saved = _Aside(slots, entries, saved), Trees(), StepNumbers(leaves, saved)
    paths: dict[str, tuple[Slot, Path]] = {}
    together = Counter(owner_of(slot) for slot in slots.values())
    made = {
        owner_of(slot) for slot in slots.values() if slot.fqn in aside and _materialise(leaves, slot, entries, saved)
    }
    counts = []
    for slot in slots.values():
        counted = slot.count is not None or slot.step_in_group or together[owner_of(slot)] > 1
        is_number = numbers_saved.wants(slot)
        counts += _want_count(leaves, slot, entries.states[slot.fqn], saved) if counted else []
        never_stepped = owner_of(slot) in made and set(entries.states[slot.fqn]) <= {MASTER}  # others of its unit were
        trees.want(leaves, slot, entries.trees[slot.fqn], entries.rooted[slot.fqn], saved)
        leaves.add_all(OPTIMIZER, ((f"state.{slot.fqn}.{mark}", None) for mark in entries.marks(slot)))
        for path, value in () if never_stepped else _live_leaves(slot, entries.trees[slot.fqn], leaves.rank):
            if (counted or is_number) and path == (STEP,):
                continue
            name = f"state.{slot.fqn}.{dotted(path)}"
            leaves.add(OPTIMIZER, name, value)
            paths[name] = (slot, path)
        if slot.master is not None:
            leaves.add(OPTIMIZER, f"state.{slot.fqn}.{MASTER}", slot.master)
    tensors = _want_hypers(leaves, slots.values(), entries, saved)
    _want_tied(leaves, slots.values(), saved)

    def check(objects: Mapping[ObjectKey, Any]) -> None:
        _agreed(objects, slots, entries)

    def finish(objects: Mapping[ObjectKey, Any]) -> None:
        objects = numbers_saved.fill(objects, counts)
        changes, numbers = _agreed({**objects, **tensors}, slots, entries), _counted(counts, entries.counts)
        _set_states(objects, slots, entries, paths)
        numbers_saved.settle()
        trees.set_in(objects)
        for group, key, value in numbers:
            set_hyper(group, key, value)
        aside.hand_over(entries.empty)
        _part(changes)
        for group, key, value in changes:
            set_hyper(group, key, value)
        _settle_steps(slots.values())

    return check, finish


class _Aside:
    """States of parameters to which a load adds some, until they are the optimizer's own."""

    def __init__(self, slots: dict[str, Slot], entries: _SavedStates, saved: CheckpointNames) -> None:
        """Put slots in place of those that lack states."""
        self._made: dict[tuple[int, int], tuple[Slot, dict[torch.Tensor, dict[str, Any]]]] = {}
        owners = {owner_of(slot) for slot in slots.values() if entries.adds_to(slot, saved)}
        self._fqns = dict.fromkeys(fqn for fqn, slot in slots.items() if owner_of(slot) in owners)
        for fqn in self._fqns:
            slots[fqn] = self._instead(slots[fqn], saved)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._fqns

    def _instead(self, slot: Slot, saved: CheckpointNames) -> Slot:
        """Return the slot, with a place of its own for the states; one of another kind than the saved one is left."""
        kept = {key: value for key, value in slot.values.items() if not _other_kind(slot, key, value, saved)}
        _, states = self._made.setdefault(owner_of(slot), (slot, {slot.parameter: kept}))
        return replace(slot, state=states)

    def hand_over(self, empty: Collection[str]) -> None:
        """Give the new states to the optimizers; parameters of ``empty`` get a dict without any."""
        for slot, states in self._made.values():
            if slot.state is not None and (states[slot.parameter] or slot.fqn in empty):
                slot.state.setdefault(slot.parameter, {}).update(states[slot.parameter])


@dataclass(frozen=True, slots=True)
class _SavedStates:
    """The entries of a checkpoint for the target's parameters."""

    slots: Mapping[str, Slot]
    states: defaultdict[str, list[str]]  # by FQN, keys of the states
    hypers: defaultdict[str, list[str]]  # by FQN, keys of the hyper-parameters that were saved as objects
    tensors: defaultdict[str, list[str]]  # by FQN, keys of the hyper-parameters that were saved as tensors
    places: dict[str, tuple[str, str, str] | None]  # by name in the checkpoint: section, FQN and key; None: unwanted
    counts: dict[str, str]  # by FQN, the one of COUNTS that says of which kind the step count is
    trees: defaultdict[str, list[str]]  # by FQN, keys of the states that have a tree
    empty: set[str]  # FQNs of the parameters whose states were an empty dict
    rooted: defaultdict[str, list[str]]  # by FQN, keys of the tensors in these trees

    @classmethod
    def of(cls, saved: CheckpointNames, slots: Mapping[str, Slot]) -> _SavedStates:
        """Sort the names of a checkpoint."""
        entries = cls(
            slots,
            defaultdict(list),
            defaultdict(list),
            defaultdict(list),
            {},
            {},
            defaultdict(list),
            set(),
            defaultdict(list),
        )
        for kind, name in saved.rows:
            if kind == OPTIMIZER and (place := entries.place(name)):
                section, fqn, key = place
                (entries.states if section == "state" else entries.tensors)[fqn].append(key)
        for kind, name in saved.objects:
            if kind == OPTIMIZER and (place := entries.place(name)) and not entries._is_mark(*place):
                section, fqn, key = place
                (entries.states if section == "state" else entries.hypers)[fqn].append(key)
        return entries._without_trees()

    def _is_mark(self, section: str, fqn: str, key: str) -> bool:
        """Note an object that says how states are kept; return whether it is one."""
        if not is_mark(section, key):
            return False
        if key in COUNTS:
            self.counts[fqn] = key
        elif key == EMPTY:
            self.empty.add(fqn)
        elif key.endswith(TREE) and (key != MASTER + TREE or self.slots[fqn].master is None):
            self.trees[fqn].append(key.removesuffix(TREE))
        return True

    def _without_trees(self) -> _SavedStates:
        """Leave out the tensors of trees, which :class:`_Trees` makes."""
        for fqn, trees in self.trees.items():
            self.rooted[fqn] = [key for key in self.states[fqn] if in_tree(key, trees)]
            self.states[fqn] = [key for key in self.states[fqn] if not in_tree(key, trees)]
        return self

    def marks(self, slot: Slot) -> list[str]:
        """Return the names beside the states of a parameter that only say how it keeps them."""
        if slot.state is None:
            return []
        return [*filter(None, [self.counts.get(slot.fqn)]), *([EMPTY] if slot.fqn in self.empty else [])]

    def adds_to(self, slot: Slot, saved: CheckpointNames) -> bool:
        """Whether a load makes states of a parameter: it has none, or some of those that were saved."""
        if slot.state is None:
            return False
        live, known = {key for key, value in slot.values.items() if value is not None}, {*self.states[slot.fqn], STEP}
        if not live or self.trees[slot.fqn]:
            return True
        if any(_other_kind(slot, key, value, saved) for key, value in slot.values.items()):
            return True
        return live <= known and not known - {MASTER, STEP} <= live

    def left_out(self, slots: dict[str, Slot]) -> Iterator[tuple[str, str]]:
        """Forget the entries of optimizers of another kind, and take their parameters from ``slots``.

        Yield the names of the entries, and the class that cannot take each.
        """
        others = {fqn: slot for fqn, slot in slots.items() if not self._fit(slot)}
        if not others:
            return
        for fqn in others:
            del slots[fqn]
        for name, place in self.places.items():
            if place is not None and place[1] in others:
                self.places[name] = None
                kind = others[place[1]].optimizer
                if not is_mark(place[0], place[2]) or place[2].endswith(TREE):
                    yield f"{OPTIMIZER}: {name}", "the target's optimizer" if kind is None else kind.__name__

    def _fit(self, slot: Slot) -> bool:
        """Whether an optimizer can have all that was saved of a parameter: a part would train it neither way."""
        hypers = [*self.hypers[slot.fqn], *self.tensors[slot.fqn]]
        states = self.states[slot.fqn]
        return fitting_hypers(slot.hyper, hypers) == hypers and fitting_states(slot.optimizer, states) == states

    def place(self, name: str) -> tuple[str, str, str] | None:
        """Return the section, FQN and key that a name is made of; None for one of another kind."""
        if name not in self.places:
            self.places[name] = split(name, self.slots)
        return self.places[name]


def _other_kind(slot: Slot, key: str, value: Any, saved: CheckpointNames) -> bool:
    """Whether a state is saved as a tensor here, and was saved as another value, or the other way round."""
    if value is None or isinstance(value, (Mapping, list, tuple, *STORAGES)):
        return False
    is_tensor = isinstance(value, torch.Tensor) or (key == STEP and slot.count is not None)
    name = (OPTIMIZER, f"state.{slot.fqn}.{key}")
    return name in (saved.objects if is_tensor else saved.rows)


def _materialise(leaves: Leaves, slot: Slot, entries: _SavedStates, saved: CheckpointNames) -> bool:
    """Make the states that a parameter lacks, all zeros; return whether it has any now.

    A state that is no tensor is not made: the checkpoint is only asked for it.
    """
    if slot.state is None:
        return False
    for key in entries.states[slot.fqn]:
        if key == MASTER or (key == STEP and slot.step_in_group) or slot.values.get(key) is not None:
            continue
        name = (OPTIMIZER, f"state.{slot.fqn}.{key}")
        if "." in key:
            raise StateError(
                f"the optimizer has no state yet, and {name[1]!r} of the checkpoint is nested, so that it cannot be "
                "made up; take one step with learning rate 0 before loading"
            )
        if is_sharded_tensor(slot.parameter):
            raise StateError(
                f"the optimizer has no state yet, and its parameter {slot.fqn!r} is a ShardedTensor, for which no "
                "states are made; take one step with learning rate 0 before loading"
            )
        if key == STEP and slot.fqn in entries.counts:
            slot.state.setdefault(slot.parameter, {})[STEP] = COUNTS[entries.counts[slot.fqn]]
        elif name in saved.rows:
            slot.state.setdefault(slot.parameter, {})[key] = zeros(slot, key, saved.meta(name))
        elif key not in slot.values and key != STEP:  # StepNumbers wants it
            leaves.add_object(*name, None)
    return bool(slot.values)


def _live_leaves(slot: Slot, trees: Collection[str], rank: int) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) of the states that exist, without those of which the checkpoint has a tree.

    A state without a tree there is an older version's: each leaf in it has a name.
    """
    for path, value in slot.leaves(rank):
        key = str(path[0])
        is_tree = key.endswith(TREE) and not isinstance(value, (torch.Tensor, ShardedLeaf))
        if in_tree(key.removesuffix(TREE) if is_tree else key, trees):
            continue
        if not is_tree:
            yield path, value
            continue
        nested = walk(slot.values[value[0]], f"the state of {slot.fqn!r}", (value[0],))
        yield from ((inner, leaf) for inner, leaf in nested if not isinstance(leaf, torch.Tensor))


def _want_hypers(
    leaves: Leaves, slots: Iterable[Slot], entries: _SavedStates, saved: CheckpointNames
) -> dict[ObjectKey, torch.Tensor]:
    """Want the hyper-parameters of all parameters: those of a group that were saved alike together.

    Those that were saved as tensors go into new ones, until all are compared.
    """
    alike: dict[tuple[int, tuple[str, ...]], tuple[Slot, list[str]]] = {}
    tensors: dict[ObjectKey, torch.Tensor] = {}
    for slot in slots:
        for key in entries.tensors[slot.fqn]:
            name = (OPTIMIZER, f"param_groups.{slot.fqn}.{key}")
            meta = saved.meta(name)
            tensors[name] = fresh(meta, torch.device("cpu"))
        known = entries.hypers[slot.fqn] or entries.tensors[slot.fqn]
        place = {key: number for number, key in enumerate(slot.hyper)}  # in the order in which a save has them
        keys = sorted(entries.hypers[slot.fqn], key=lambda key: place.get(key, len(place))) if known else list(place)
        _, prefixes = alike.setdefault((id(slot.group), tuple(keys)), (slot, []))
        prefixes.append(f"param_groups.{slot.fqn}")
    leaves.add_all(OPTIMIZER, ((name, value) for (_, name), value in tensors.items()))
    for (_, wanted), (slot, prefixes) in alike.items():
        leaves.add_group(OPTIMIZER, prefixes, {key: slot.group.get(key) for key in wanted})
    return tensors


def _want_count(
    leaves: Leaves, slot: Slot, keys: Collection[str], saved: CheckpointNames
) -> list[tuple[Slot, torch.Tensor]]:
    """Want the step count of a parameter whose optimizer has a number, or one count for several parameters.

    It is loaded into a new tensor, and set when all are known to agree.
    """
    if slot.state is None or (STEP not in keys and slot.count is None):
        return []
    name = (OPTIMIZER, f"state.{slot.fqn}.{STEP}")
    count = torch.zeros((), dtype=saved_dtype(saved.meta(name)) if name in saved.rows else torch.float32)
    if name not in saved.objects:
        leaves.add(*name, count)
    return [(slot, count)]


def _counted(counts: Iterable[tuple[Slot, torch.Tensor]], kinds: Mapping[str, str]) -> list[Change]:
    """Find the one step count of every group or state that counts by itself, or raise MismatchError.

    A count has the kind that was saved with it, by FQN in ``kinds``; without one, the kind that the target has.
    """
    first_counts: dict[int, tuple[Slot, float]] = {}
    for slot, count in counts:
        number = count.item()
        if not cmath.isfinite(number):
            raise CorruptError(f"{slot.fqn!r} was saved after {number} steps; load another checkpoint")
        first, steps = first_counts.setdefault(id(slot.counter), (slot, number))
        if steps != number:
            raise MismatchError(
                f"the target counts the steps of {first.fqn!r}, saved after {steps:.0f}, and of {slot.fqn!r}, saved "
                f"after {number:.0f}, as one; put them into different groups before loading, or, with FSDP1, "
                "wrap with use_orig_params=True"
            )
    changes: list[Change] = []
    for slot, steps in first_counts.values():
        kind = COUNTS[kinds[slot.fqn]] if slot.keeps_kind and slot.fqn in kinds else slot.counter.get(STEP)
        changes.append((slot.counter, STEP, steps if isinstance(kind, float) or steps % 1 else int(steps)))
    return changes


def _want_tied(leaves: Leaves, slots: Iterable[Slot], saved: CheckpointNames) -> None:
    """Request the states that were saved by further names of parameters, for their first names."""
    fqns = {tied: slot.fqn for slot in slots for tied in slot.tied}
    wanted = leaves.tensors.get(OPTIMIZER, {})
    for kind, name in saved.rows if fqns else ():
        if kind == OPTIMIZER and (place := split(name, fqns)):
            section, tied, key = place
            first = f"{section}.{fqns[tied]}.{key}"
            if first in wanted and saved.rows[kind, name] != saved.rows.get((kind, first)):
                leaves.add_alias(OPTIMIZER, name, first)


def _agreed(values: Mapping[ObjectKey, Any], slots: Mapping[str, Slot], entries: _SavedStates) -> list[Change]:
    """Find the one value of every hyper-parameter of every group, or raise MismatchError.

    Keys that the target's group does not have (another framework's) are left out where parameters disagree.
    """
    first: dict[tuple[int, str], tuple[str, Change]] = {}
    foreign: set[tuple[int, str]] = set()
    for (kind, name), value in values.items():
        section, fqn, key = (entries.place(name) if kind == OPTIMIZER else None) or ("", "", "")
        if section != "param_groups":
            continue
        group = slots[fqn].group
        other, (_, _, agreed) = first.setdefault((id(group), key), (fqn, (group, key, value)))
        if value is agreed or same_value(value, agreed):
            continue
        if key not in group:
            foreign.add((id(group), key))
        else:
            raise MismatchError(
                f"one param group has {other!r}, saved with {key}={shown(agreed)}, and {fqn!r}, saved with "
                f"{key}={shown(value)}; put them into different groups before loading"
            )
    return [change for place, (_, change) in first.items() if place not in foreign]


def _set_states(
    objects: Mapping[ObjectKey, Any],
    slots: Mapping[str, Slot],
    entries: _SavedStates,
    paths: Mapping[str, tuple[Slot, Path]],
) -> None:
    """Set the states that are no tensors."""
    for (kind, name), value in objects.items():
        section, fqn, key = (entries.place(name) if kind == OPTIMIZER else None) or ("", "", "")
        if section != "state" or is_mark(section, key):
            continue
        slot, path = paths.get(name, (slots[fqn], (key,)))
        if slot.state is not None and path == (key,) and key not in slot.values:
            slot.state.setdefault(slot.parameter, {})[key] = value  # also None
        elif slot.state is not None:
            put(slot.state[slot.parameter], path, value, f"the state of {slot.fqn!r}")


def _part(changes: Iterable[Change]) -> None:
    """Give each group a tensor or generator of its own, where one object would have to take different values.

    torch puts a default that is a tensor into all groups as it is.
    """
    first: dict[int, Any] = {}
    for group, key, value in changes:
        current = group.get(key)
        if not isinstance(current, torch.Tensor) and not is_generator(current):
            continue
        if not same_value(first.setdefault(id(current), value), value):
            group[key] = current.detach().clone() if isinstance(current, torch.Tensor) else value


def set_hyper(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one hyper-parameter; one that is a tensor stays that tensor, one that is a number stays a number."""
    current = group.get(key)
    if isinstance(current, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
        with torch.no_grad():
            current.copy_(torch.as_tensor(value))
    elif isinstance(value, torch.Tensor):
        group[key] = value.item() if isinstance(current, (int, float)) else value
    elif same_generator(current, value):
        set_generator(current, value)
    else:
        group[key] = value


def _settle_steps(slots: Iterable[Slot]) -> None:
    """Move step counts to the device where the loaded group's kernels read them (``fused``, ``capturable``)."""
    for slot in slots:
        step = slot.values.get(STEP)
        if isinstance(step, torch.Tensor) and not isinstance(step, torchs("DTensor")) and step.dim() == 0:
            wanted = scalar_device(slot, STEP)
            if wanted.type != "cpu" and step.device != wanted:
                slot.values[STEP] = step.to(wanted)
