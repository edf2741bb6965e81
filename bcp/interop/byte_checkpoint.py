"""Folders of ByteCheckpoint by reference: DCP's metadata for each part, over ranges with elements alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bcp.errors import CorruptError
from bcp.interop.catalogue import Catalogue, Piece
from bcp.interop.dcp_files import METADATA, dcp_parts
from bcp.interop.dcp_metadata import DcpMetadata
from bcp.interop.dcp_names import Name
from bcp.interop.facts import facts_of
from bcp.interop.found import OPTIMIZER, Found
from bcp.interop.optimizer_numbers import is_packed, packed_entries
from bcp.interop.reading import Opened
from bcp.interop.torch_pickle import TORCH_NAMES, Stored, value_text
from bcp.interop.unpickle import Allowed
from bcp.plan.strided import row_major

__all__ = ["byte_checkpoint_folder", "is_byte_checkpoint"]

NAME = "bytecheckpoint"
MARK = b"bytecheckpoint.checkpointer.meta_type"
"""The Python module of the classes in the metadata."""

MODEL_FOLDER, OPTIMIZER_FOLDER = "model/", "optimizer/"
WRAPPER = "module."
"""The prefix of names of a model in torch's DDP."""

GROUPS = "param_groups"


async def is_byte_checkpoint(opened: Opened) -> bool:
    """Whether a folder has parts that ByteCheckpoint has saved."""
    key = MODEL_FOLDER + METADATA
    if key not in opened.sizes or METADATA in opened.sizes:
        return False
    return MARK in await opened.read(key, 0, min(opened.sizes[key], 4096))


async def byte_checkpoint_folder(opened: Opened) -> Catalogue:
    """List the tensors and values of a folder.

    Raises:
        CheckpointError: a pickle has other classes, or the optimizer numbers parameters that may be several ones.
        CorruptError: a file is missing or damaged, or does not have what ``.metadata`` says.

    """
    model = await _part(opened, MODEL_FOLDER)
    is_wrapped = all(name.startswith(WRAPPER) for name in model.order)

    def clean(name: str) -> str:
        return name.removeprefix(WRAPPER) if is_wrapped else name

    found, ranks = Found(most=opened.sizes[MODEL_FOLDER + METADATA]), model.ranks
    found.pieces.extend(replace(piece, kind="model", name=clean(piece.name)) for piece in model.pieces)
    for name, value in model.values.items():
        found.values["model", clean(name)] = value_text(value, found.most, f"{opened.path}: {name!r}")
    if OPTIMIZER_FOLDER + METADATA in opened.sizes:
        states = await _part(opened, OPTIMIZER_FOLDER)
        ranks = max(ranks, states.ranks)
        _add_states(found, states, [(clean(name), model.shapes[name]) for name in model.order], opened.path)
    left_out = sorted(key for key in opened.sizes if not key.startswith((MODEL_FOLDER, OPTIMIZER_FOLDER)))
    user = facts_of(NAME, {"version": model.version}, (), left_out)
    return Catalogue(NAME, found.pieces, opened.sizes, found.values, found.tied, ranks=ranks, user=user)


@dataclass(slots=True)
class _Part:
    """The model, or the optimizer, by its names in the files.

    Attributes:
        order: names of the tensors, as the state had them.
        version: of ByteCheckpoint.
        pieces: the tensors.
        values: the values.
        ranks: how many ranks wrote it.
    """

    order: list[str]
    version: str | None
    pieces: list[Piece] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    @property
    def allowed(self) -> Allowed:
        """All names in the pickles of values."""
        return TORCH_NAMES

    @property
    def shapes(self) -> dict[str, Stored]:
        """The tensors as records with their shapes; the key of each is its name."""
        first = {piece.name: piece for piece in self.pieces}
        return {
            name: Stored(name, piece.dtype, 0, piece.shape, tuple(row_major(piece.shape)))
            for name, piece in first.items()
        }

    def boxes(self, piece: Piece) -> Iterable[Piece]:
        """Return a box as it is."""
        return [piece]

    def value(self, name: str, value: Any, _words: str, _most: int) -> Iterable[tuple[Name, str]]:
        """Keep a value."""
        self.values[name] = value
        return []


async def _part(opened: Opened, folder: str) -> _Part:
    """Read the metadata of a part, and its values."""
    made: list[_Part] = []

    def naming(meta: DcpMetadata) -> _Part:
        known = set(meta.names)
        ordered = [name for name in (*meta.paths, *meta.names) if name in known]
        made.append(_Part(list(dict.fromkeys(ordered)), meta.version))
        return made[0]

    parts = await dcp_parts(opened, naming, folder)
    (part,) = made
    part.pieces, part.ranks = parts.pieces, parts.ranks
    part.order = [name for name in part.order if name not in part.values]
    return part


def _add_states(found: Found, part: _Part, model: Sequence[tuple[str, Stored]], where: str) -> None:
    """Add the optimizer's states, whose parameters have names, or numbers as in DDP."""
    groups = part.values.get(GROUPS)
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CorruptError(f"{where}/{OPTIMIZER_FOLDER}{METADATA} has no {GROUPS}; get the files again")
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


def _by_parameter(part: _Part, where: str, *, numbers: bool) -> dict[Any, dict[str, Any]]:
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


def _renamed(part: _Part, names: Mapping[str, str]) -> Iterator[Piece]:
    return (replace(piece, kind=OPTIMIZER, name=names[piece.name]) for piece in part.pieces)
