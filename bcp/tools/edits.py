"""What an edit changes: the new name of everything that stays, and the tensors that are written anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from bcp.errors import InputError
from bcp.plan.edited import Kept, tied_rows
from bcp.plan.layout import Layout
from bcp.plan.read.renamed import renamed
from bcp.plan.read.renames import Blocks, Moved, Rename, blocks_of
from bcp.plan.shards import KINDS, OPAQUE_KINDS, TensorMeta
from bcp.protocols import ObjectKey
from bcp.read.source import Source
from bcp.stages.memcpy import torch_dtype
from bcp.state.optimizer_entries import OWN
from bcp.tools.parts import Origin, plain_meta

__all__ = ["Changes", "Wishes", "changes_of"]

MODEL, OPTIMIZER = "model", "optimizer"
SHOWN = 10


@dataclass(frozen=True, slots=True)
class Wishes:
    """The arguments of an edit, checked as far as that is possible without the checkpoint.

    Attributes:
        rename: as ``LoadOptions(rename=)``.
        drop: patterns of names.
        cast: dtypes by pattern.
        add: new tensors of the model.
    """

    rename: Rename = None
    drop: Sequence[str] = ()
    cast: Mapping[str, torch.dtype] = field(default_factory=dict)
    add: Mapping[str, Origin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.drop, str) or not all(isinstance(pattern, str) for pattern in self.drop):
            raise InputError(f"drop={self.drop!r}: pass a list of patterns, as ['*.bias', 'optimizer:*']")
        for pattern, dtype in self.cast.items():
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise InputError(f"cast to {dtype!r} for {pattern!r}: pass a dtype with a point, as torch.bfloat16")


@dataclass(frozen=True, slots=True)
class Changes:
    """An edit of one checkpoint.

    Attributes:
        kept: what stays, by its new name.
        metas: tensors that are written anew.
        origins: where their elements come from, by (kind, name).
        values: (kind, path) before and after of values with a new name.
        renamed: number of tensors of the model with another name.
        dropped: names of tensors that are left out, as ``"model: head.weight"``.
        cast: number of tensors with another dtype.
        others: number of values and opaque objects that are left out.
    """

    kept: Kept
    metas: Sequence[TensorMeta]
    origins: Mapping[ObjectKey, Origin]
    values: Mapping[ObjectKey, ObjectKey]
    renamed: int
    dropped: Sequence[str]
    cast: int
    others: int

    @property
    def is_none(self) -> bool:
        """Whether nothing changes."""
        return not (self.metas or self.values or self.renamed or self.dropped or self.others)


def changes_of(source: Source, wishes: Wishes) -> Changes:
    """Apply the wishes to a checkpoint. Nothing is read but its table of contents.

    Raises:
        InputError: a name or pattern fits nothing, two names become one, a name is taken, or one opaque object would
            be kept and another one dropped.

    """
    layout = source.metadata.layout
    dropped = _dropped(layout, wishes.drop)
    tensors, objects = _renamed(layout, wishes.rename, dropped)
    _check_entries(layout, tensors, objects)
    cast = _cast(layout, wishes.cast, tensors)
    metas, origins = list[TensorMeta](), dict[ObjectKey, Origin]()
    for stored, rows in _groups(layout, tensors, cast).items():
        new = _as_dtype(layout.tensors[stored], cast[rows[0]])
        first, *others = (tensors[row] for row in rows)
        metas += [replace(new, fqn=first), *(replace(new, fqn=other, tied_to=first) for other in others)]
        origins[new.kind, first] = Origin(source, stored)
    taken = _model_names(layout, tensors, objects)
    for name, origin in wishes.add.items():
        if name in taken:
            raise InputError(f"the checkpoint has {MODEL} {name!r} already; drop or rename it in the same edit")
        metas.append(_added(name, origin))
        origins[MODEL, name] = origin
    extras = [kind for kind in OPAQUE_KINDS if f"{kind}:*" not in wishes.drop]
    old = layout.objects
    stays = {row: path for row, path in objects.items() if path == old[row][1]}
    names, kinds = layout.tensors.fqn, [KINDS[code] for code in layout.tensors.kind.tolist()]
    return Changes(
        kept=Kept({row: name for row, name in tensors.items() if row not in cast}, stays, extras),
        metas=metas,
        origins=origins,
        values={old[row]: (old[row][0], path) for row, path in objects.items() if row not in stays},
        renamed=sum(kinds[row] == MODEL and name != names[row] for row, name in tensors.items()),
        dropped=[f"{kinds[row]}: {names[row]}" for row in range(len(kinds)) if row not in tensors],
        cast=len(cast),
        others=len(old) - len(objects) + sum(KINDS[code] not in extras for code in layout.extra_kind.tolist()),
    )


def _pattern(text: str) -> tuple[str, str]:
    """Split ``kind:glob``; a pattern without a kind is one of the model."""
    kind, colon, glob = text.partition(":")
    return (kind, glob) if colon and kind in KINDS else (MODEL, text)


def _dropped(layout: Layout, patterns: Sequence[str]) -> set[ObjectKey]:
    """Return (kind, name) of the tensors and values that the patterns fit."""
    kinds = [KINDS[code] for code in layout.tensors.kind.tolist()]
    names = [*zip(kinds, layout.tensors.fqn, strict=True), *layout.objects]
    dropped: set[ObjectKey] = set()
    for pattern in patterns:
        kind, glob = _pattern(pattern)
        if kind in OPAQUE_KINDS and glob != "*":
            raise InputError(f"drop={pattern!r}: {kind} can be dropped as a whole only, by '{kind}:*'")
        found = {name for name in names if name[0] == kind and fnmatchcase(name[1], glob)}
        if not found and not (kind in OPAQUE_KINDS and KINDS.index(kind) in layout.extra_kind):
            raise InputError(f"drop={pattern!r} fits no name of the checkpoint's {kind}; `bcp show` lists the names")
        dropped |= found
    return dropped


class _Names:
    """A rename that also leaves out what is dropped, with the states of its optimizer."""

    def __init__(self, rename: Rename, dropped: Collection[ObjectKey]) -> None:
        self._blocks: Blocks = blocks_of(rename)
        self._dropped = dropped

    def blocks(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        return () if (MODEL, fqn) in self._dropped else self._blocks(fqn, shape)


def _renamed(
    layout: Layout, rename: Rename, dropped: Collection[ObjectKey]
) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return the new names of the tensors, and the new paths of the values, that stay; by row."""
    if isinstance(rename, Mapping) and (unknown := sorted(set(rename) - set(layout.tensors.fqn))):
        raise InputError(f"rename has names that the checkpoint lacks: {', '.join(unknown[:SHOWN])}; check them")
    result = renamed(layout, _Names(rename, dropped), (MODEL, OPTIMIZER))
    if result.joined:
        name = result.joined[0][0].fqn
        raise InputError(
            f"rename cuts or joins tensors to make {name!r}, and an edit changes names only; pass it to bcp.load"
        )
    tensors, objects = dict[int, str](), dict[int, str]()
    for names, rows in ((result.saved.rows, tensors), (result.objects, objects)):
        for (_, name), row in names.items():
            rows.setdefault(row, name)  # states of a tied parameter have several
    kinds = [KINDS[code] for code in layout.tensors.kind.tolist()]
    gone = {row for row, kind in enumerate(kinds) if (kind, layout.tensors.fqn[row]) in dropped}
    values = {row for row, name in enumerate(layout.objects) if name in dropped}
    return (
        {row: name for row, name in tensors.items() if row not in gone},
        {row: path for row, path in objects.items() if row not in values},
    )


def _check_entries(layout: Layout, tensors: Mapping[int, str], objects: Mapping[int, str]) -> None:
    """Refuse other names for parameters that own entries of an optimizer name."""
    own = [path for path in objects.values() if path.startswith(OWN)]
    if not own:
        return
    for row, name in enumerate(layout.tensors.fqn):
        changes = KINDS[int(layout.tensors.kind[row])] == MODEL and tensors.get(row) != name
        if changes and (path := next((path for path in own if f".{name}." in path), "")):
            raise InputError(
                f"the entry {path!r} of the optimizer names the parameter {name!r}, which cannot get another name; "
                "drop such entries in the same edit (optimizer:own.*)"
            )


def _cast(layout: Layout, wishes: Mapping[str, torch.dtype], tensors: Mapping[int, str]) -> dict[int, torch.dtype]:
    """Return the new dtypes of tensors, by row; tensors that are tied to each other change together."""
    kinds, numel = layout.tensors.kind.tolist(), layout.tensors.ndim
    cast: dict[int, torch.dtype] = {}
    for pattern, dtype in wishes.items():
        kind, glob = _pattern(pattern)
        found = [
            row
            for row in tensors
            if KINDS[kinds[row]] == kind
            and fnmatchcase(layout.tensors.fqn[row], glob)
            and torch_dtype(layout.tensors.dtype[row]).is_floating_point
            and (kind == MODEL or numel[row] > 0)  # counts of steps stay
        ]
        if not found:
            raise InputError(f"cast of {pattern!r} fits no tensor of numbers with a point in the checkpoint's {kind}")
        cast.update(dict.fromkeys(found, dtype))
    for rows in tied_rows(layout).values():
        dtypes = {cast[row] for row in rows if row in cast}
        if len(dtypes) > 1:
            names = ", ".join(repr(layout.tensors.fqn[row]) for row in rows)
            raise InputError(f"cast gives {names}, which share their elements, two dtypes: {dtypes}; give them one")
        cast.update(dict.fromkeys((row for row in rows if dtypes and row in tensors), *dtypes))
    return {row: dtype for row, dtype in cast.items() if torch_dtype(layout.tensors.dtype[row]) != dtype}


def _groups(layout: Layout, tensors: Mapping[int, str], cast: Collection[int]) -> dict[int, list[int]]:
    """Return the rows of tensors that are cast and share elements, by the row of the stored one."""
    groups: dict[int, list[int]] = {}
    ties = {row: stored for stored, rows in tied_rows(layout).items() for row in rows}
    for row in sorted(cast, key=lambda row: (bool(layout.tensors.tied_to[row]), row)):
        if row in tensors:
            groups.setdefault(ties.get(row, row), []).append(row)
    return groups


def _as_dtype(meta: TensorMeta, dtype: torch.dtype) -> TensorMeta:
    return replace(meta, dtype=str(dtype).removeprefix("torch."), itemsize=dtype.itemsize, tied_to="")


def _model_names(layout: Layout, tensors: Mapping[int, str], objects: Mapping[int, str]) -> set[str]:
    """Return the names of all leaves of the model after the edit."""
    names = {name for row, name in tensors.items() if KINDS[int(layout.tensors.kind[row])] == MODEL}
    return names | {path for row, path in objects.items() if layout.objects[row][0] == MODEL}


def _added(name: str, origin: Origin) -> TensorMeta:
    """Describe a new tensor."""
    if origin.source is not None:
        return replace(plain_meta(origin.source.metadata.layout.tensors[origin.row]), fqn=name, tied_to="")
    tensor = origin.tensor
    assert tensor is not None  # noqa: S101 -- an origin has one of both
    meta = TensorMeta(MODEL, name, str(tensor.dtype).removeprefix("torch."), tensor.itemsize, tuple(tensor.shape))
    return plain_meta(meta)
