"""Reads bcp checkpoints from docs/format.md alone, with pyarrow, safetensors and numpy; no codecs, no checksums."""

from __future__ import annotations

import io
import json
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import safetensors

KINDS = ("model", "optimizer", "dataloader", "extra_states")
STEPS = (("tensors", "leader"), ("pieces", "file"), ("files", "rank"), ("extras", "rank"))


class Tensor(NamedTuple):
    """Elements as bytes: ``data`` is uint8 of shape (*shape, itemsize), little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: np.typing.NDArray[np.uint8]


def read_tables(path: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Return the rows of every table by its name, and the commit's facts if there are any."""
    data = path.read_bytes()
    assert data[-8:] in (*(b"BCPMETA%c" % n for n in (1, 2, 3)), b"BCPRCPT\x01", b"BCPRCPT\x02"), (
        f"{path} is in another format"
    )
    source, tables, facts = io.BytesIO(data[:-24]), {}, {}
    while source.tell() < len(data) - 24:
        table = pa.ipc.open_stream(source).read_all()
        tables[table.schema.metadata[b"bcp.table"].decode()] = table.to_pylist()
        facts |= json.loads(table.schema.metadata.get(b"bcp.commit", b"{}"))
    for name, column in STEPS if facts else ():
        for row, total in zip(tables[name], accumulate([row[column] for row in tables[name]]), strict=True):
            row[column] = total
    if facts:  # the operation in the names of each rank's files
        rows = tables.get("writers") or tables.get("commit", [])
        facts["writers"] = [row.get("operation", facts["operation"]) for row in rows]
    return tables, facts


def read_image(path: Path, kind: int, rank: int, operation: str) -> bytes:
    """Return a data file as if it were whole; earlier checkpoints may have some of its blocks."""
    receipt = read_tables(next(path.glob(f"receipts/*{rank:05d}-{operation}.arrow")))[0]
    (row,) = (row for row, file in enumerate(receipt["files"]) if file["kind"] == kind)
    kept = {run["first"]: run for run in receipt.get("kept", []) if run["file"] == row}
    own = (path / KINDS[kind] / f"{rank:05d}-{operation}.{'bcp' if kept else 'safetensors'}").read_bytes()
    first = sum(file["blocks"] for file in receipt["files"][:row])
    lengths = [block["stored_length"] for block in receipt["blocks"][first : first + receipt["files"][row]["blocks"]]]
    image, at, block = b"", 0, 0
    while block < len(lengths):
        run = kept.get(block, {"count": 0})
        nbytes = sum(lengths[block : block + max(run["count"], 1)])
        if run["count"]:
            name = f"{run['rank']:05d}-{run['operation']}.{'bcp' if run['packed'] else 'safetensors'}"
            there = (path.parent / f"step-{run['step']:08d}" / KINDS[run["kind"]] / name).read_bytes()
            image += there[run["start"] : run["start"] + nbytes]
        else:
            image, at = image + own[at : at + nbytes], at + nbytes
        block += max(run["count"], 1)
    return image


def read_section(path: Path, row: dict[str, Any], writers: list[str]) -> bytes:
    """Return the data section of one data file, given by its kind and rank."""
    image = read_image(path, row["kind"], row["rank"], writers[row["rank"]])
    safetensors.deserialize(image)  # it is a valid safetensors file
    return image[8 + int.from_bytes(image[:8], "little") :]


def read_sections(path: Path, tables: dict[str, list[dict[str, Any]]], writers: list[str]) -> list[bytes]:
    """Return the data sections of all rows of ``files``; another library may have written them."""
    if "foreign" in tables:
        return [(path / row["key"]).read_bytes()[row["base"] :] for row in tables["foreign files"]]
    return [read_section(path, row, writers) for row in tables["files"]]


def read_checkpoint(path: str | Path) -> dict[tuple[str, str], Tensor]:
    """Return all tensors by (kind, fqn)."""
    tables, facts = read_tables(Path(path) / "metadata.arrow")
    tensors, pieces, segments, files = (tables[name] for name in ("tensors", "pieces", "segments", "files"))
    sections = read_sections(Path(path), tables, facts["writers"])
    stored, found = {(row["kind"], row["fqn"]): row for row in tensors}, {}
    first_piece = [0, *accumulate(row["pieces"] for row in tensors)]
    begin = [0, *accumulate(pattern["segments"] for pattern in tables["patterns"])]
    for name in stored:
        row = stored[name[0], stored[name]["tied_to"] or name[1]]
        n, size, leader = row["ndim"], row["itemsize"], row["leader"]
        data = np.zeros((*row["shape"][:n], size), dtype=np.uint8)
        for k in range(first_piece[leader], first_piece[leader + 1]):
            piece, flat = pieces[k], b""
            for run in segments[begin[piece["pattern"]] : begin[piece["pattern"] + 1]]:
                file = piece["file"] + run["file"]
                at = files[file]["planes"][row["plane"]] + run["at"] * size
                flat += sections[file][at : at + run["length"] * size]
            block = tuple(slice(a, a + b) for a, b in zip(piece["offset"][:n], piece["length"][:n], strict=True))
            data[block] = np.frombuffer(flat, np.uint8).reshape(*piece["length"][:n], size)
        found[KINDS[name[0]], name[1]] = Tensor(row["dtype"], data.shape[:-1], data)
    return found


def read_others(path: str | Path) -> tuple[dict[tuple[str, str], Any], dict[tuple[str, int], bytes]]:
    """Return the values that are not tensors by (kind, path), and the opaque objects by (kind, rank)."""
    tables, facts = read_tables(Path(path) / "metadata.arrow")
    values = {(row["kind"], row["path"], 0): json.loads(row["value"]) for row in tables.get("foreign values", [])}
    for rank, operation in enumerate(facts["writers"]):
        for row in read_tables(next(Path(path).glob(f"receipts/*{rank:05d}-{operation}.arrow")))[0]["objects"]:
            values[row["kind"], row["path"], rank] = json.loads(row["value"])
    named = {(row["kind"], row["path"]): values[row["kind"], row["path"], row["rank"]] for row in tables["objects"]}
    extras = {(KINDS[e["kind"]], e["rank"]): read_section(Path(path), e, facts["writers"]) for e in tables["extras"]}
    return named, extras
