"""The tensors and values that an export takes: which, under which names, in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from bcp.errors import DtypeMismatchError, FqnMismatchError, InputError
from bcp.interop.catalogue import DTYPES
from bcp.plan.box import Box
from bcp.plan.layout import Layout, resolve
from bcp.plan.shards import KINDS, OPAQUE_KINDS
from bcp.read.checkpoint import AsyncCheckpoint
from bcp.stages.memcpy import torch_dtype

__all__ = ["Choice", "Chosen", "ChosenValue", "DType", "Rename", "choose", "choose_rows", "float_dtype", "values_of"]

DType = torch.dtype | str | None
"""A dtype, torch's name of one as in ``"bfloat16"``, or None for the dtypes of the checkpoint."""

Rename = Mapping[str, str] | Callable[[str], str] | None
"""New names by old ones, a function from old to new names, or None. Names that a mapping lacks stay."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The arguments of an export that choose tensors and values, as the caller passed them.

    Attributes:
        kind: ``"model"`` or ``"optimizer"``; None for both.
        glob: pattern of the shell for names in the checkpoint.
        dtype: of floating tensors in the target.
        rename: names in the target.
    """

    kind: str | None
    glob: str
    dtype: DType
    rename: Rename


@dataclass(frozen=True, slots=True)
class Chosen:
    """A tensor to export.

    Attributes:
        row: the tensor, as a row of the layout.
        stored: the row of the tensor that has the data: another one for a tied tensor.
        kind: ``"model"`` or ``"optimizer"``.
        saved: its name in the checkpoint.
        name: its name in the target.
        dtype: its dtype in the target, by torch's name.
        itemsize: bytes of an element in the target.
        shape: global shape.
    """

    row: int
    stored: int
    kind: str
    saved: str
    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """All of the tensor."""
        return Box.whole(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the target."""
        return self.box.numel * self.itemsize

    def __str__(self) -> str:
        renamed = "" if self.name == self.saved else f" (saved as {self.saved!r})"
        return f"{self.kind} tensor {self.name!r}{renamed}"


SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def choose(ckpt: AsyncCheckpoint, choice: Choice) -> list[Chosen]:
    """Choose tensors of an open checkpoint, in the order of its files.

    Raises:
        InputError: an argument cannot be used, or two tensors of a kind get one name.
        FqnMismatchError: no tensor matches.

    """
    kind, glob = choice.kind, choice.glob
    _check_kind(kind)
    if not isinstance(glob, str):
        raise InputError(f"glob={glob!r} is a {type(glob).__name__}; pass a pattern such as 'layers.*'")
    rows = ckpt.tensors.rows(kind, glob)
    if not rows:
        near = ckpt.names(kind or "model")[:3]
        hint = f"it has {', '.join(map(repr, near))}" if near else f"it has {', '.join(ckpt.kinds) or 'nothing'}"
        raise FqnMismatchError(
            f"{ckpt.path} has no {'' if kind is None else kind + ' '}tensor that matches glob={glob!r}; {hint}"
        )
    layout = ckpt.metadata.layout
    chosen = choose_rows(layout, rows, choice.dtype, choice.rename)
    return sorted(chosen, key=lambda each: _first_place(layout, each))


def choose_rows(layout: Layout, rows: Sequence[int], dtype: DType, rename: Rename) -> list[Chosen]:
    """Describe tensors of a layout as the target has them, in the order of the rows.

    Raises:
        InputError: an argument cannot be used, or two tensors of a kind get one name.

    """
    cast, new_name = float_dtype(dtype), _renaming(rename)
    chosen = [_chosen(layout, row, cast) for row in rows]
    named = [replace(each, name=_checked(new_name(each.saved), each.saved)) for each in chosen]
    names: dict[tuple[str, str], str] = {}
    for each in named:
        _take_name(names, each.kind, each.name, each.saved)
    return named


def _chosen(layout: Layout, row: int, cast: str | None) -> Chosen:
    """Describe the tensor in a row of the layout, under its own name."""
    meta = layout.tensors[row]
    try:
        saved = torch_dtype(meta.dtype)
    except DtypeMismatchError as error:
        raise InputError(f"{meta.kind} tensor {meta.fqn!r}: {error}; leave the tensor out by glob=") from error
    dtype = cast if cast is not None and saved.is_floating_point else meta.dtype
    stored, itemsize = resolve(layout, row), torch_dtype(dtype).itemsize
    return Chosen(row, stored, meta.kind, meta.fqn, meta.fqn, dtype, itemsize, meta.shape)


def _check_kind(kind: str | None) -> None:
    """Raise InputError for a kind that has no tensors by its nature, or is none."""
    known = [each for each in KINDS if each not in OPAQUE_KINDS]
    if kind is not None and kind not in known:
        raise InputError(f"kind={kind!r}: tensors are of the kinds {' and '.join(map(repr, known))}; pass one of them")


def float_dtype(dtype: DType) -> str | None:
    """Return torch's full name of a floating dtype. Raises InputError for anything else."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    name = SHORT_NAMES.get(name, name)
    found = getattr(torch, name, None)
    full = str(found).removeprefix("torch.")  # of the alias "half", too
    if not isinstance(found, torch.dtype) or not found.is_floating_point or full not in DTYPES:
        raise InputError(
            f"dtype={dtype!r} is no floating dtype of whole bytes; pass one such as torch.bfloat16 or 'bfloat16'"
        )
    return full


def _renaming(rename: Rename) -> Callable[[str], Any]:
    """Return a function from old to new names."""
    if rename is None:
        return str
    if isinstance(rename, Mapping):
        names: Mapping[str, Any] = rename
        return lambda name: names.get(name, name)
    if not callable(rename):
        raise InputError(f"rename={rename!r} is a {type(rename).__name__}; pass a mapping or a function of names")
    return rename


def _checked(name: object, saved: str) -> str:
    """Return a new name. Raises InputError for one that is none."""
    if not isinstance(name, str) or not name:
        raise InputError(f"rename answers {name!r} for {saved!r}; answer a name, or leave the tensor out by glob=")
    return name


def _take_name(known: dict[tuple[str, str], str], kind: str, name: str, saved: str) -> None:
    """Note the new name of an entry. Raises InputError if another entry of the kind has it."""
    other = known.setdefault((kind, name), saved)
    if other != saved:
        raise InputError(
            f"rename gives the name {name!r} to both {other!r} and {saved!r} of {kind}; give each a name of its own"
        )


def _first_place(layout: Layout, chosen: Chosen) -> tuple[int, int, int]:
    """Return file and byte at which the data of a tensor begins, and its row. An empty tensor comes first."""
    leader = int(layout.leader[chosen.stored])
    box = int(np.searchsorted(layout.box_tensor, leader))
    if box == len(layout.box_tensor) or layout.box_tensor[box] != leader:
        return -1, 0, chosen.row
    segments = layout.segments
    segment = int(segments.begin[segments.pattern[box]])
    file = int(segments.file[box] + segments.step[segment])
    itemsize = int(layout.tensors.itemsize[chosen.stored])
    start = int(layout.file_planes[file, layout.plane[chosen.stored]] + segments.at[segment] * itemsize)
    return file, start, chosen.row


# -- values ----------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class ChosenValue:
    """A value to export that is not a tensor of its own."""

    kind: str  # "model" or "optimizer"
    name: str  # in the target
    value: Any


async def values_of(ckpt: AsyncCheckpoint, choice: Choice) -> list[ChosenValue]:
    """Read the chosen values of model and optimizer, in the order of kinds and names. ``dtype`` does not matter.

    Notes of bcp on how an optimizer keeps states are left out: ``state.*`` with a colon in the key, ``groups`` and
    ``own``. ``docs/format.md`` describes them.

    Raises:
        InputError: ``torch.load(weights_only=True)`` does not read a value, or two of them get one name.
        CheckpointError: a value cannot be read.

    """
    new_name = _renaming(choice.rename)
    names: dict[tuple[str, str], str] = {}
    chosen = []
    for (of, path), value in sorted((await ckpt.values(choice.kind)).items(), key=lambda item: item[0]):
        if not fnmatchcase(path, choice.glob) or _is_note(of, path):
            continue
        if problem := _problem(value):
            raise InputError(
                f"the {of} value {path!r} has {problem}, which torch.load(weights_only=True) does not read; "
                "pass values=False to export tensors only"
            )
        chosen.append(ChosenValue(of, _checked(new_name(path), path), value))
        _take_name(names, of, chosen[-1].name, path)
    return chosen


def _is_note(kind: str, path: str) -> bool:
    """Whether a value says how an optimizer keeps its states."""
    section, _, rest = path.partition(".")
    if kind != "optimizer":
        return False
    return section in ("groups", "own") or (section == "state" and ":" in rest.rpartition(".")[2])


def _problem(value: Any) -> str:
    """Name the first part of a value that ``torch.load(weights_only=True)`` refuses; empty for none."""
    if type(value) is bytes and not value:  # protocol 2 pickles them as a call of bytes
        return "empty bytes"
    if value is None or type(value) in _PLAIN or type(value) is torch.Tensor:
        return ""
    if type(value) in (list, tuple, set):
        return next(filter(None, map(_problem, value)), "")
    if type(value) is dict:
        parts: Sequence[Any] = [*value.keys(), *value.values()]
        return next(filter(None, map(_problem, parts)), "")
    return f"an object of the class {type(value).__module__}.{type(value).__qualname__}"
