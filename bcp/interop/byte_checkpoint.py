"""Folders of ByteCheckpoint by reference: DCP's metadata for each part, over ranges with elements alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from bcp.interop.catalogue import Catalogue, Piece
from bcp.interop.dcp_files import METADATA, dcp_parts
from bcp.interop.dcp_metadata import DcpMetadata
from bcp.interop.dcp_names import Name
from bcp.interop.facts import facts_of
from bcp.interop.found import Found
from bcp.interop.optimizer_part import Part, add_states, unwrapped
from bcp.interop.reading import Opened
from bcp.interop.torch_pickle import TORCH_NAMES, value_text
from bcp.interop.unpickle import Allowed

__all__ = ["byte_checkpoint_folder", "is_byte_checkpoint"]

NAME = "bytecheckpoint"
MARK = b"bytecheckpoint.checkpointer.meta_type"
"""The Python module of the classes in the metadata."""

MODEL_FOLDER, OPTIMIZER_FOLDER = "model/", "optimizer/"


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
    found, ranks, names = Found(most=opened.sizes[MODEL_FOLDER + METADATA]), model.ranks, unwrapped(model)
    found.pieces.extend(replace(piece, kind="model", name=names[piece.name]) for piece in model.pieces)
    for name, value in model.values.items():
        found.values["model", names[name]] = value_text(value, found.most, f"{opened.path}: {name!r}")
    if OPTIMIZER_FOLDER + METADATA in opened.sizes:
        states = await _part(opened, OPTIMIZER_FOLDER)
        ranks = max(ranks, states.ranks)
        shapes = model.shapes
        add_states(found, states, [(names[name], shapes[name]) for name in model.order], opened.path)
    left_out = sorted(key for key in opened.sizes if not key.startswith((MODEL_FOLDER, OPTIMIZER_FOLDER)))
    user = facts_of(NAME, {"version": model.version}, (), left_out)
    return Catalogue(NAME, found.pieces, opened.sizes, found.values, found.tied, ranks=ranks, user=user)


@dataclass(slots=True)
class _Collected(Part):
    """A part whose names and values are kept as the files have them."""

    version: str | None = None

    @property
    def allowed(self) -> Allowed:
        """All names in the pickles of values."""
        return TORCH_NAMES

    def boxes(self, piece: Piece) -> Iterable[Piece]:
        """Return a box as it is."""
        return [piece]

    def value(self, name: str, value: Any, _words: str, _most: int) -> Iterable[tuple[Name, str]]:
        """Keep a value."""
        self.values[name] = value
        return []


async def _part(opened: Opened, folder: str) -> _Collected:
    """Read the metadata of a part, and its values."""
    made: list[_Collected] = []

    def naming(meta: DcpMetadata) -> _Collected:
        known = set(meta.names)
        ordered = [name for name in (*meta.paths, *meta.names) if name in known]
        made.append(_Collected(list(dict.fromkeys(ordered)), version=meta.version))
        return made[0]

    parts = await dcp_parts(opened, naming, folder)
    (part,) = made
    part.pieces, part.ranks = parts.pieces, parts.ranks
    part.order = [name for name in part.order if name not in part.values]
    return part
