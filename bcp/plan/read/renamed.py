"""A checkpoint by the names of the target.

A rename gives the model's tensors other names. Optimizer states (``state.<fqn>.<key>``), hyper-parameters
(``param_groups.<fqn>.<key>``) and ties follow. Names are only names: nothing is ever opened by them.
:class:`CheckpointNames` lists the leaves of a checkpoint for planners, before they build the targets of a load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np

from bcp.errors import InputError
from bcp.plan.box import Box
from bcp.plan.columns import Ints
from bcp.plan.layout import Layout, resolve
from bcp.plan.read.renames import AssembledTensor, Blocks, Moved, Rename, blocks_of
from bcp.plan.shards import KINDS, TensorMeta, TensorTable

__all__ = ["MASTER", "CheckpointNames", "RenamedLayout", "extended", "renamed", "tied_names"]


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Names in a checkpoint, as the target calls them.

    Attributes:
        rows: (kind, FQN) of the tensors, to their row in ``tensors``.
        objects: (kind, path) of the other leaves.
        tensors: shape, dtype and other facts of the tensors.
    """

    rows: Mapping[tuple[str, str], int]
    objects: Collection[tuple[str, str]]
    tensors: TensorTable

    @classmethod
    def of(cls, layout: Layout) -> CheckpointNames:
        """Index a layout, under the names that it has itself."""
        table = layout.tensors
        rows = dict(zip(_names(table), range(len(table)), strict=True))
        return cls(rows, frozenset(layout.objects), table)

    def meta(self, name: tuple[str, str]) -> TensorMeta:
        """Return the record of a tensor."""
        return self.tensors[self.rows[name]]

    def names(self, kind: str) -> Iterator[tuple[str, str]]:
        """Yield the names of all tensors and objects of one kind."""
        yield from (name for name in self.rows if name[0] == kind)
        yield from (name for name in self.objects if name[0] == kind)

    def find(self, wanted: TensorTable) -> Ints:
        """Return int64[n]: the row of every wanted tensor in ``tensors``, by kind and name; -1 for none."""
        return np.array(list(map(self.rows.get, _names(wanted), repeat(-1))), np.int64)


def _names(table: TensorTable) -> Iterator[tuple[str, str]]:
    return zip(map(KINDS.__getitem__, table.kind.tolist()), table.fqn, strict=True)


def extended(table: TensorTable, metas: Sequence[TensorMeta]) -> TensorTable:
    """Return a table with further tensors behind its own."""
    return TensorTable.joined([table, TensorTable.build(metas)])


MASTER = "master_param"
"""Key of the optimizer state that is the fp32 master of a parameter."""

MODEL, OPTIMIZER = "model", "optimizer"
SECTIONS = ("state", "param_groups")

Key = tuple[str, str]
"""(section, key) of a leaf that belongs to a parameter, as in ``("state", "exp_avg")``."""


@dataclass(frozen=True, slots=True, eq=False)
class RenamedLayout:
    """The leaves of a checkpoint, by the names of the target."""

    layout: Layout  # the checkpoint, by its own names
    # the names that planners see. Rows of ``saved.tensors`` below ``len(layout.tensors)`` are those of the layout;
    # behind these rows are the tensors that are made of blocks.
    saved: CheckpointNames
    # for each tensor that is made of blocks: its blocks, and the rows of its sources in the layout
    joined: Sequence[tuple[AssembledTensor, Sequence[int]]]
    objects: Mapping[tuple[str, str], int]  # (kind, path) in the target, to the row in ``layout.objects``
    # rows of the layout's tensors, and behind these of its objects, that no target is expected to want
    left_out: Sequence[int] = ()

    def sources(self, row: int) -> Sequence[int]:
        """Return the rows in the layout that a row of ``saved.tensors`` is read from."""
        count = len(self.layout.tensors)
        return (row,) if row < count else self.joined[row - count][1]

    def blocks(self, row: int) -> Iterator[tuple[int, Box]]:
        """Yield the blocks of an assembled tensor: (row in the layout, block of that tensor)."""
        cut, sources = self.joined[row - len(self.layout.tensors)]
        for source, moved in zip(cut.source.tolist(), cut.moved, strict=True):
            yield sources[source], moved.saved


def renamed(layout: Layout, rename: Rename, kinds: Collection[str]) -> RenamedLayout:
    """Apply a rename to a checkpoint, of which these kinds are loaded.

    Raises:
        InputError: two names become one, the checkpoint lacks a name of the rename, or the rename is no rename.
        CoverageError: blocks do not tile the tensor that they make.
    """
    if rename is None:
        objects = {(kind, path): row for row, (kind, path) in enumerate(layout.objects)}
        names = CheckpointNames.of(layout)
        if OPTIMIZER in kinds and any(layout.tensors.tied_to):
            names, objects = _with_tied_states(layout, names, objects)
        return RenamedLayout(layout, names, (), objects)
    work = _Work(layout, blocks_of(rename), kinds)
    work.run()
    if unknown := sorted(set(rename) - work.moved.keys()) if isinstance(rename, Mapping) else ():
        raise InputError(
            f"rename has {len(unknown)} names that the checkpoint's model lacks: {', '.join(unknown[:10])}; keys are "
            "names in the checkpoint, values those in the target"
        )
    return work.result()


def tied_names(layout: Layout) -> dict[tuple[str, str], list[str]]:
    """Return further names of the optimizer's entries of tied parameters: by kind and name, names in the same kind.

    The optimizer has them under one name of the parameter. Another library may look for another one.
    """
    if not any(layout.tensors.tied_to):
        return {}
    shared, own = renamed(layout, None, (MODEL, OPTIMIZER)), list(_names(layout.tensors))
    further: dict[tuple[str, str], list[str]] = {}
    for name, row in shared.saved.rows.items():
        if name != own[row]:
            further.setdefault(own[row], []).append(name[1])
    for name, row in shared.objects.items():
        if name != layout.objects[row]:
            further.setdefault(layout.objects[row], []).append(name[1])
    return further


def _with_tied_states(
    layout: Layout, names: CheckpointNames, objects: Mapping[tuple[str, str], int]
) -> tuple[CheckpointNames, dict[tuple[str, str], int]]:
    """Share the states of a tied parameter, saved by one of its names, with its other names, as a rename does."""
    work = _Work(layout, blocks_of(None), (MODEL, OPTIMIZER))
    work.take()
    count, rows, values = len(layout.tensors), dict(names.rows), dict(objects)
    for row in np.flatnonzero(layout.tensors.tied).tolist():
        for fqn in (layout.tensors.fqn[row], layout.tensors.fqn[resolve(layout, row)]):
            for (section, key), leaf in work.parameters.get(fqn, {}).items():
                name = (OPTIMIZER, f"{section}.{fqn}.{key}")
                if leaf < count:
                    rows.setdefault(name, leaf)
                else:
                    values.setdefault(name, leaf - count)
    return CheckpointNames(rows, values.keys(), names.tensors), values


@dataclass(slots=True)
class _Work:
    """A rename that is being applied."""

    layout: Layout
    blocks: Blocks  # the rename
    kinds: Collection[str]  # the kinds that are loaded
    # by name, the moves of the model's tensors and other leaves, and of parameters that the model lacks
    moved: dict[str, Sequence[Moved]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of these tensors and parameters
    model: dict[str, int] = field(default_factory=dict)  # rows of the model's tensors, by name
    others: dict[str, int] = field(default_factory=dict)  # rows of the model's other leaves in ``layout.objects``
    # by parameter, the optimizer's leaves with their rows, as in ``RenamedLayout.left_out``
    parameters: dict[str, dict[Key, int]] = field(default_factory=dict)
    # the fields of the result
    rows: dict[tuple[str, str], int] = field(default_factory=dict)
    objects: dict[tuple[str, str], int] = field(default_factory=dict)
    joined: list[tuple[AssembledTensor, Sequence[int]]] = field(default_factory=list)
    metas: list[TensorMeta] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)

    def take(self) -> None:
        """Collect the moves of the model and the optimizer."""
        self._take_model()
        self._take_optimizer()

    def run(self) -> None:
        """Collect the moves, then fill every name of the target."""
        self.take()
        parts: defaultdict[str, list[tuple[str, Moved]]] = defaultdict(list)
        for source, moved in self.moved.items():
            for move in moved:
                parts[move.fqn].append((source, move))
            if not moved:
                self._leave_out(source)
        for target, contributions in parts.items():
            self._put(target, contributions)

    def result(self) -> RenamedLayout:
        """Return the renamed checkpoint."""
        tensors, names = self.layout.tensors, self._first_names()
        table = replace(
            tensors,
            fqn=[names.get(row, fqn) for row, fqn in enumerate(tensors.fqn)],
            tied_to=[self._tied_to(row, names) for row in range(len(tensors))],
        )
        saved = CheckpointNames(self.rows, self.objects.keys(), extended(table, self.metas) if self.metas else table)
        return RenamedLayout(self.layout, saved, self.joined, self.objects, self.left_out)

    # -- what there is ---------------------------------------------------------------------------------------------

    def _take_model(self) -> None:
        """Collect the moves of every leaf of the model."""
        tensors = self.layout.tensors
        for row, (code, fqn) in enumerate(zip(tensors.kind.tolist(), tensors.fqn, strict=True)):
            if KINDS[code] == MODEL:
                self.model[fqn] = row
                self._ask(fqn, tensors[row].shape)
        for row, (kind, path) in enumerate(self.layout.objects):
            if kind == MODEL:
                self.others[path] = row
                self.moved[path] = self._moved(path, ())

    def _take_optimizer(self) -> None:
        """Sort the optimizer's leaves by parameter; names without such a structure stay."""
        tensors, count = self.layout.tensors, len(self.layout.tensors)
        known = zip((KINDS[code] for code in tensors.kind.tolist()), tensors.fqn, strict=True)
        for row, (kind, name) in enumerate([*known, *self.layout.objects]):
            if kind == MODEL or (OPTIMIZER not in self.kinds and not name.endswith(f".{MASTER}")):
                continue
            split_name = _split(name, self.model)
            if split_name is None:
                self._set(kind, name, row)
            else:
                self.parameters.setdefault(split_name[0], {})[split_name[1]] = row
        for fqn, leaves in self.parameters.items():
            if fqn not in self.model:
                shapes = [tensors[row].shape for row in leaves.values() if row < count]
                self._ask(fqn, max(shapes, key=len, default=()))
        self._share_ties()

    def _share_ties(self) -> None:
        """Share the states of a tied parameter, saved by one of its names, with its other names."""
        tied: defaultdict[int, list[str]] = defaultdict(list)
        for fqn, row in self.model.items():
            tied[resolve(self.layout, row)].append(fqn)
        for fqns in tied.values():
            if owner := next((fqn for fqn in fqns if fqn in self.parameters), None):
                for fqn in fqns:
                    self.parameters.setdefault(fqn, self.parameters[owner])

    def _ask(self, fqn: str, shape: tuple[int, ...]) -> None:
        """Call the rename for a tensor, and check its moves."""
        self.shapes[fqn] = shape
        self.moved[fqn] = self._moved(fqn, shape)

    def _moved(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        try:
            moved = list(self.blocks(fqn, shape))
        except InputError as error:
            raise InputError(f"rename of {fqn!r}, {list(shape)}: {error}") from error
        except Exception as error:
            raise InputError(f"rename raised {type(error).__name__} for {fqn!r}, {list(shape)}: {error}") from error
        for move in moved:
            if not isinstance(move, Moved) or not isinstance(move.fqn, str):
                raise InputError(f"rename returned {move!r} for {fqn!r}; return a name, or None to leave it out")
            if not move.is_whole(shape):
                move.check(fqn, shape)
        return moved

    # -- where it goes ---------------------------------------------------------------------------------------------

    def _put(self, target: str, parts: Sequence[tuple[str, Moved]]) -> None:
        """Fill one name of the target: with a tensor as it is, an object, or blocks."""
        whole = [source for source, move in parts if move.is_whole(self.shapes.get(source, ()))]
        if len(whole) == len(parts):
            first, *others = whole
            for other in others:
                self._require_same(first, other, target)
            self._put_whole(first, target)
            return
        if lone := next((source for source, _ in parts if source in self.others), None):
            raise InputError(f"rename cuts {lone!r}, which is no tensor; move it whole, or return no block for it")
        cut = AssembledTensor.of(self._untied(parts))
        if all(source in self.model for source in cut.sources):
            self._join(MODEL, target, cut, [self.model[source] for source in cut.sources])
        self._put_states(target, cut)

    def _put_whole(self, source: str, target: str) -> None:
        """Rename a leaf of the model, and the optimizer's leaves of it."""
        if source in self.model:
            self._set(MODEL, target, self.model[source])
        if source in self.others:
            self._set(MODEL, target, len(self.layout.tensors) + self.others[source])
        for (section, key), row in self.parameters.get(source, {}).items():
            self._set(OPTIMIZER, f"{section}.{target}.{key}", row)

    def _put_states(self, target: str, cut: AssembledTensor) -> None:
        """Assemble the optimizer's states of a parameter as the parameter is assembled."""
        count = len(self.layout.tensors)
        held = [self.parameters.get(source, {}) for source in cut.sources]
        for section, key in dict.fromkeys(leaf for leaves in held for leaf in leaves):
            name = f"{section}.{target}.{key}"
            rows = [leaves[section, key] for leaves in held if (section, key) in leaves]
            if any(row >= count or not self.layout.tensors.ndim[row] for row in rows):
                self._set(OPTIMIZER, name, rows[0])  # step counts and hyper-parameters: those of the first source
                self.left_out += rows[1:]
                continue
            if len(rows) == len(cut.sources):
                self._check_shapes(cut, rows)
                self._join(OPTIMIZER, name, cut, rows)
            elif OPTIMIZER in self.kinds:
                lacking = [fqn for fqn, leaves in zip(cut.sources, held, strict=True) if (section, key) not in leaves]
                raise InputError(
                    f"rename makes {name!r} of the optimizer states of {len(held)} parameters, and the checkpoint has "
                    f"no {key!r} of {', '.join(lacking[:4])}; load without the optimizer"
                )

    def _check_shapes(self, cut: AssembledTensor, rows: Sequence[int]) -> None:
        """Raise InputError for states that cannot be cut as their parameters are."""
        tensors = self.layout.tensors
        for source, row in zip(cut.sources, rows, strict=True):
            if tensors[row].shape != self.shapes[source]:
                raise InputError(
                    f"rename cuts {source!r}, which is {list(self.shapes[source])}, and its optimizer state "
                    f"{tensors.fqn[row]!r} is {list(tensors[row].shape)}: only states of the parameter's shape, and "
                    "0-d ones, can be cut; load without the optimizer"
                )

    def _join(self, kind: str, name: str, cut: AssembledTensor, rows: Sequence[int]) -> None:
        """Add a tensor that is put together of blocks."""
        self._set(kind, name, len(self.layout.tensors) + len(self.joined), joined=True)
        first = self.layout.tensors[rows[0]]
        self.metas.append(replace(first, fqn=name, shape=cut.shape, stride=(), tied_to=""))
        self.joined.append((cut, rows))

    def _set(self, kind: str, name: str, row: int, *, joined: bool = False) -> None:
        """Map a name to a row: of the layout's tensors, or behind these of its objects or of those that are joined."""
        count = len(self.layout.tensors)
        is_object = row >= count and not joined
        where, index = (self.objects, row - count) if is_object else (self.rows, row)
        if where.setdefault((kind, name), index) != index and (
            joined or is_object or not self._same(where[kind, name], index)
        ):
            raise InputError(f"rename makes two {kind} leaves of the checkpoint {name!r}; give one another name")

    def _leave_out(self, source: str) -> None:
        """Expect no target to request a leaf of the model, nor the optimizer's leaves of it."""
        count = len(self.layout.tensors)
        self.left_out += [self.model[source]] if source in self.model else []
        self.left_out += [count + self.others[source]] if source in self.others else []
        self.left_out += self.parameters.get(source, {}).values()

    # -- ties ------------------------------------------------------------------------------------------------------

    def _same(self, row: int, other: int) -> bool:
        """Whether two rows are tied to each other."""
        count = len(self.layout.tensors)
        return max(row, other) < count and resolve(self.layout, row) == resolve(self.layout, other)

    def _require_same(self, source: str, other: str, target: str) -> None:
        if not (source in self.model and other in self.model and self._same(self.model[source], self.model[other])):
            raise InputError(
                f"rename makes both {source!r} and {other!r} of the checkpoint {target!r}; keep them apart"
            )

    def _untied(self, parts: Sequence[tuple[str, Moved]]) -> list[tuple[str, Moved]]:
        """Leave out blocks that come a second time, by a name that is tied to the first."""
        seen: dict[tuple[str | int, Moved], str] = {}
        for source, move in parts:
            row = self.model.get(source)
            seen.setdefault((source if row is None else resolve(self.layout, row), move), source)
        return [(source, move) for (_, move), source in seen.items()]

    def _first_names(self) -> dict[int, str]:
        """Return the first new name of each row of the layout's tensors."""
        names: dict[int, str] = {}
        for (_, name), row in self.rows.items():
            names.setdefault(row, name)
        return names

    def _tied_to(self, row: int, names: Mapping[int, str]) -> str:
        tied_to = self.layout.tensors.tied_to[row]
        return names.get(resolve(self.layout, row), tied_to) if tied_to else ""


def _split(name: str, fqns: Collection[str]) -> tuple[str, Key] | None:
    """Split ``<section>.<fqn>.<key>``: the longest FQN that is known, else all up to the last dot."""
    section, _, rest = name.partition(".")
    last = cut = rest.rfind(".")
    if section not in SECTIONS or last <= 0:
        return None
    while cut > 0 and rest[:cut] not in fqns:
        cut = rest.rfind(".", 0, cut)
    cut = cut if cut > 0 else last
    return rest[:cut], (section, rest[cut + 1 :])
