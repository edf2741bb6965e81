"""What an edit changes: the new name of everything that stays, and the tensors that are written anew."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate

import torch

from bcp.errors import DtypeMismatchError, InputError
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

__all__ = ["Changes", "Wishes", "changes_of", "check_name"]

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
        many = isinstance(self.drop, Collection) and not isinstance(self.drop, str)
        if not many or not all(isinstance(pattern, str) for pattern in self.drop):
            raise InputError(f"drop={self.drop!r}: pass a list of patterns, as ['*.bias', 'optimizer:*']")
        if not isinstance(self.cast, Mapping) or not all(isinstance(pattern, str) for pattern in self.cast):
            raise InputError(f"cast={self.cast!r}: pass a dict of patterns and dtypes, as {{'*': torch.bfloat16}}")
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


def check_name(argument: str, name: object) -> None:
    """Raise InputError for a new name that cannot be stored."""
    if not isinstance(name, str):
        raise InputError(f"{argument} has the name {name!r}, a {type(name).__name__}; names are strings")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{argument} has the name {name!r}, which UTF-8 cannot encode; change it") from error


def _pattern(text: str) -> tuple[str, str]:
    """Split ``kind:glob``; a pattern without a kind is one of the model."""
    kind, colon, glob = text.partition(":")
    return (kind, glob) if colon and kind in KINDS else (MODEL, text)


def _fitting(names: Collection[str], glob: str) -> list[str]:
    """Return the names that a pattern fits; a name fits itself, whatever is in it."""
    if not re.search(r"[*?[]", glob):
        return [glob] if glob in names else []
    fits = re.compile(translate(glob)).match
    return [name for name in names if name == glob or fits(name)]


def _dropped(layout: Layout, patterns: Sequence[str]) -> set[ObjectKey]:
    """Return (kind, name) of the tensors and values that the patterns fit."""
    kinds = [KINDS[code] for code in layout.tensors.kind.tolist()]
    names: dict[str, dict[str, None]] = {kind: {} for kind in KINDS}
    for kind, name in (*zip(kinds, layout.tensors.fqn, strict=True), *layout.objects):
        names[kind][name] = None
    dropped: set[ObjectKey] = set()
    for pattern in patterns:
        kind, glob = _pattern(pattern)
        if kind in OPAQUE_KINDS and glob != "*":
            raise InputError(f"drop={pattern!r}: {kind} can be dropped as a whole only, by '{kind}:*'")
        found = {(kind, name) for name in _fitting(names[kind], glob)}
        if not found and not (kind in OPAQUE_KINDS and KINDS.index(kind) in layout.extra_kind):
            raise InputError(f"drop={pattern!r} fits no name of the checkpoint's {kind}; `bcp show` lists the names")
        dropped |= found
    return dropped


class _Names:
    """A rename that also leaves out what is dropped, with the states of its optimizer."""

    def __init__(self, rename: Rename, dropped: Collection[ObjectKey]) -> None:
        self._blocks: Blocks = blocks_of(rename)
        self._dropped = dropped
        self.asked = set[str]()

    def blocks(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        self.asked.add(fqn)
        return () if (MODEL, fqn) in self._dropped else self._blocks(fqn, shape)


def _renamed(
    layout: Layout, rename: Rename, dropped: Collection[ObjectKey]
) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Return the new names of the tensors, and the new paths of the values, that stay; by row."""
    known = _Names(rename, dropped)
    result = renamed(layout, known, (MODEL, OPTIMIZER))
    if isinstance(rename, Mapping) and (unknown := [str(name) for name in rename if name not in known.asked]):
        raise InputError(
            f"rename has names that the checkpoint's model lacks: {', '.join(sorted(unknown)[:SHOWN])}; `bcp show` "
            "lists the names"
        )
    both = [name for name in rename if (MODEL, name) in dropped] if isinstance(rename, Mapping) else []
    if both:
        raise InputError(f"rename and drop have {both[0]!r}: pass it to one of them")
    if result.joined:
        name = result.joined[0][0].fqn
        raise InputError(
            f"rename cuts or joins tensors to make {name!r}, and an edit changes names only; pass it to bcp.load"
        )
    tensors, objects = dict[int, str](), dict[int, str]()
    for names, rows in ((result.saved.rows, tensors), (result.objects, objects)):
        for (_, name), row in names.items():
            rows.setdefault(row, name)  # states of a tied parameter have several
            check_name("rename", name)
    kinds = [KINDS[code] for code in layout.tensors.kind.tolist()]
    gone = {row for row, kind in enumerate(kinds) if (kind, layout.tensors.fqn[row]) in dropped}
    values = {row for row, name in enumerate(layout.objects) if name in dropped}
    return (
        {row: name for row, name in tensors.items() if row not in gone},
        {row: path for row, path in objects.items() if row not in values},
    )


def _check_entries(layout: Layout, tensors: Mapping[int, str], objects: Mapping[int, str]) -> None:
    """Refuse other names for parameters that own entries of an optimizer name."""
    own = [path for path in (*objects.values(), *tensors.values()) if path.startswith(OWN)]
    kinds = layout.tensors.kind.tolist()
    changed = {
        name
        for row, name in enumerate(layout.tensors.fqn)
        if own and KINDS[kinds[row]] == MODEL and tensors.get(row) != name
    }
    most = max((name.count(".") for name in changed), default=-1) + 1  # parts of the longest name
    for path in own:
        parts = path.split(".")
        spans = ((first, first + number) for first in range(1, len(parts) - 1) for number in range(1, most + 1))
        inner = (".".join(parts[first:stop]) for first, stop in spans if stop < len(parts))
        if name := next((name for name in inner if name in changed), None):
            raise InputError(
                f"the entry {path!r} of the optimizer names the parameter {name!r}, which cannot get another name; "
                "drop such entries in the same edit (optimizer:own.*)"
            )


def _cast(layout: Layout, wishes: Mapping[str, torch.dtype], tensors: Mapping[int, str]) -> dict[int, torch.dtype]:
    """Return the new dtypes of tensors, by row; tensors that are tied to each other change together."""
    kinds, ndim = layout.tensors.kind.tolist(), layout.tensors.ndim.tolist()
    cast: dict[int, torch.dtype] = {}
    rows_of_kind: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for row in tensors if wishes else ():
        if kinds[row] != KINDS.index(OPTIMIZER) or ndim[row]:  # counts of steps stay
            rows_of_kind[KINDS[kinds[row]]][layout.tensors.fqn[row]] = row
    for pattern, dtype in wishes.items():
        kind, glob = _pattern(pattern)
        fitting = [rows_of_kind[kind][name] for name in _fitting(rows_of_kind[kind], glob)]
        found = [row for row in fitting if _dtype(layout, row).is_floating_point]
        if not found:
            raise InputError(f"cast of {pattern!r} fits no tensor of numbers with a point in the checkpoint's {kind}")
        cast.update(dict.fromkeys(found, dtype))
    for rows in tied_rows(layout).values():
        dtypes = {cast[row] for row in rows if row in cast}
        if len(dtypes) > 1:
            names = ", ".join(repr(layout.tensors.fqn[row]) for row in rows)
            raise InputError(f"cast gives {names}, which share their elements, two dtypes: {dtypes}; give them one")
        cast.update(dict.fromkeys((row for row in rows if dtypes and row in tensors), *dtypes))
    cast = {row: dtype for row, dtype in cast.items() if _dtype(layout, row) != dtype}
    _check_casts(layout, cast)
    return cast


def _dtype(layout: Layout, row: int) -> torch.dtype:
    """Return torch's dtype of a tensor. Raises InputError if this torch does not know it."""
    try:
        return torch_dtype(layout.tensors.dtype[row])
    except DtypeMismatchError as error:
        raise InputError(f"cast of {layout.tensors.fqn[row]!r}: {error}; leave it out of the pattern") from error


def _check_casts(layout: Layout, cast: Mapping[int, torch.dtype]) -> None:
    """Raise InputError for a pair of dtypes that torch does not convert."""
    pairs = {(_dtype(layout, row), dtype): row for row, dtype in cast.items()}
    for (old, new), row in pairs.items():
        try:
            torch.empty(1, dtype=new).copy_(torch.empty(1, dtype=old))
        except (RuntimeError, TypeError) as error:  # of which NotImplementedError is one
            raise InputError(
                f"cast of {layout.tensors.fqn[row]!r} from {old} to {new}: torch {torch.__version__} does not convert "
                "them; leave it out of the pattern"
            ) from error


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
