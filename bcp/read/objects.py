"""Values, units and opaque objects: what a checkpoint has besides tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bcp.errors import CorruptError
from bcp.format.receipt import Receipt
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS
from bcp.protocols import ObjectKey
from bcp.read.ranges import range_item, read_ranges
from bcp.read.source import Source
from bcp.stages.items import ReadItem
from bcp.stages.load import require_codecs
from bcp.stages.memcpy import bytes_of
from bcp.state.packed import unpack
from bcp.state.values import decode_values

__all__ = ["read_extras", "saved_units", "unit_places", "values_of"]

_PLACE = re.compile(r"\[([0-9]{1,18}),([0-9]{1,18})\]")
"""First byte and one past the last, as JSON."""


def values_of(source: Source, rows: Mapping[ObjectKey, int]) -> dict[ObjectKey, Any]:
    """Return values by new names; ``rows`` has their rows in the layout. The receipts of their ranks have been read.

    Raises:
        CorruptError: a receipt lacks a value.
        CheckpointError: a value cannot be read, or only with ``allow_pickle=True``.

    """
    return decode_values(_texts(source, rows), allow_pickle=source.options.allow_pickle)


def _texts(source: Source, rows: Mapping[ObjectKey, int]) -> Iterator[tuple[ObjectKey, str, str]]:
    """Find the texts of these values, by their names in the checkpoint."""
    layout = source.metadata.layout
    for name, row in rows.items():
        kind, path = layout.objects[row]
        text = source.value(row)
        if text is None:
            raise CorruptError(
                f"the receipt of rank {layout.object_rank[row]} lacks the value of {kind}: {path}; restore the receipt"
            )
        yield name, text, f"{kind}: {path}"


def saved_units(layout: Layout) -> dict[str, dict[str, int]]:
    """Return the units of a checkpoint: name of the sharded state to ids to the rank that has it; "": shared part."""
    units: dict[str, dict[str, int]] = {}
    for (kind, path), rank in zip(layout.objects, layout.object_rank.tolist(), strict=True):
        if kind == "dataloader":
            name, _, unit = path.rpartition("/")
            units.setdefault(name, {})[unit] = rank
    return units


def unit_places(receipt: Receipt) -> dict[str, tuple[int, int]]:
    """Return where units lie in the data section of a rank's dataloader file, by path.

    Raises CorruptError if the receipt gives a unit no place, or a place that ends before it begins.
    """
    places = {}
    for (kind, path), text in receipt.objects.items():
        if kind == "dataloader":
            match = _PLACE.fullmatch(text)
            if match is None or int(match[1]) >= int(match[2]):
                raise CorruptError(
                    f"the receipt of rank {receipt.rank} says that {path} lies at {text[:40]}; restore the receipt"
                )
            places[path] = int(match[1]), int(match[2])
    return places


async def read_extras(source: Source, ranks: Mapping[str, int]) -> tuple[dict[str, Any], int]:
    """Read and unpack opaque objects; return them by kind, and the number of bytes read.

    ``ranks`` has the saved rank of each kind, whose receipt has been read.
    """
    require_codecs(source.metadata.commit.codecs, source.options.codecs)
    items = [_extra_item(source, kind, rank) for kind, rank in ranks.items()]

    def unpacked(item: ReadItem, image: torch.Tensor) -> Any:
        return unpack(bytes_of(image), allow_pickle=source.options.allow_pickle, where=item.key)

    values = await read_ranges(source, items, unpacked)
    return dict(zip(ranks, values, strict=True)), sum(item.stored_nbytes for item in items)


def _extra_item(source: Source, kind: str, rank: int) -> ReadItem:
    """Return the bytes of a rank's opaque object of that kind; units lie before it."""
    key, file = source.file_of(rank, KINDS.index(kind))
    units = unit_places(source.receipts[rank]).values() if kind == "dataloader" else ()
    start, stop = max((stop for _, stop in units), default=0), file.nbytes - file.data_start
    return range_item(source, f"{key} ({kind} of rank {rank})", key, file, start, stop)
