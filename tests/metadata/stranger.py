"""Reads bcp checkpoints from docs/format.md alone, with pyarrow, safetensors and numpy; no codecs, no checksums."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors

KINDS = ("model", "optimizer", "dataloader", "extra_states")


@dataclass(frozen=True)
class Tensor:
    """Elements as bytes: ``data`` is uint8 of shape (*shape, itemsize), little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: np.typing.NDArray[np.uint8]


def read_tables(path: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Return the rows of every table by its name, and the commit's facts if there are any."""
    data = path.read_bytes()
    if data[-8:] not in (b"BCPMETA\x01", b"BCPRCPT\x01"):
        raise ValueError(f"{path} is in another format")
    source, tables, facts = io.BytesIO(data[:-24]), {}, {}
    while source.tell() < len(data) - 24:
        table = pa.ipc.open_stream(source).read_all()
        tables[table.schema.metadata[b"bcp.table"].decode()] = table.to_pylist()
        facts |= json.loads(table.schema.metadata.get(b"bcp.commit", b"{}"))
    return tables, facts


def read_section(path: Path, kind: int, rank: int, operation: str) -> bytes:
    """Return the data section of one data file."""
    image = (path / KINDS[kind] / f"{rank:05d}-{operation}.safetensors").read_bytes()
    safetensors.deserialize(image)  # it is a valid safetensors file
    return image[8 + int.from_bytes(image[:8], "little") :]


def read_checkpoint(path: str | Path) -> dict[tuple[str, str], Tensor]:
    """Return all tensors by (kind, fqn)."""
    tables, commit = read_tables(Path(path) / "metadata.arrow")
    if commit["codecs"]:
        raise ValueError(f"the data files went through {commit['codecs']}")
    files = [read_section(Path(path), f["kind"], f["rank"], commit["operation"]) for f in tables["files"]]
    pieces, segments, found = iter(tables["pieces"]), iter(tables["segments"]), {}
    for row in tables["tensors"]:
        data = np.zeros((*row["shape"], row["itemsize"]), dtype=np.uint8)
        for piece in itertools.islice(pieces, row["pieces"]):
            runs = itertools.islice(segments, piece["segments"])
            flat = b"".join(files[s["file"]][s["offset"] :][: s["length"] * row["itemsize"]] for s in runs)
            block = tuple(slice(a, a + n) for a, n in zip(piece["offset"], piece["length"], strict=True))
            data[block] = np.frombuffer(flat, np.uint8).reshape(*piece["length"], row["itemsize"])
        found[KINDS[row["kind"]], row["fqn"]] = Tensor(row["dtype"], tuple(row["shape"]), data)
    for row in tables["tensors"]:
        if row["tied_to"]:
            found[KINDS[row["kind"]], row["fqn"]] = found[KINDS[row["kind"]], row["tied_to"]]
    return found


def read_others(path: str | Path) -> tuple[dict[tuple[str, str], Any], dict[tuple[str, int], bytes]]:
    """Return the values that are not tensors by (kind, path), and the opaque objects by (kind, rank)."""
    tables, commit = read_tables(Path(path) / "metadata.arrow")
    receipts = sorted(Path(path).glob(f"receipts/*-{commit['operation']}.arrow"))
    rows = [row for receipt in receipts for row in read_tables(receipt)[0]["objects"]]
    extras = [(row["kind"], row["rank"]) for row in tables["extras"]]
    return {(row["kind"], row["path"]): json.loads(row["value"]) for row in rows}, {
        (KINDS[kind], rank): read_section(Path(path), kind, rank, commit["operation"]) for kind, rank in extras
    }
