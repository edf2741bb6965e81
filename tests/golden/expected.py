"""The contents of a golden checkpoint, stored beside it without bcp, and the comparison of a load with them.

The tensors lie in safetensors files, and everything else in ``expected.json``. A dtype that safetensors may not have is
stored as bytes, and the JSON names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from golden.described import described, text_of
from safetensors.torch import load_file, save_file

import bcp

__all__ = ["DATA", "Expected", "Record", "check_plain", "flat_bytes", "nested", "read", "store"]

DATA = Path(__file__).parents[1] / "data" / "golden"

_SAFE = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}


@dataclass
class Expected:
    """The contents of one checkpoint.

    Attributes:
        tensors: whole logical tensors by "KIND/NAME".
        values: descriptions of the other leaves of model and optimizer, by "KIND/PATH".
        extras: description of the opaque object of a kind, as one process loads it.
        units: descriptions of the shared part and the units of each sharded dataloader state, by its name.
        folder: place of the checkpoint below that of the case.
        role: role under which it was saved.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    units: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    role: str | None = None

    @property
    def file(self) -> str:
        """Return the name of the safetensors file."""
        label = self.role or self.folder
        return f"expected-{label}.safetensors" if label else "expected.safetensors"


@dataclass
class Record:
    """Everything that is known of a golden checkpoint.

    Attributes:
        description: of the checkpoint, in words.
        ranks: number of processes that saved it.
        parts: the checkpoints of the case.
        codecs: names of the codecs.
        facts: JSON data of the case's own test.
        written_with: versions of the libraries that took part.
    """

    description: str
    ranks: int
    parts: list[Expected]
    codecs: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    written_with: dict[str, str] = field(default_factory=dict)


def store(folder: Path, record: Record) -> None:
    """Write a record beside its checkpoint."""
    parts = []
    for part in record.parts:
        as_bytes = {}
        stored = {}
        for name, tensor in sorted(part.tensors.items()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype not in _SAFE:
                as_bytes[name] = dtype
            stored[name] = tensor.detach().contiguous() if dtype in _SAFE else _as_bytes(tensor)
        save_file(stored, folder / part.file)
        fields = {name: value for name, value in vars(part).items() if name != "tensors"}
        parts.append({**fields, "values": _grouped(part.values), "as_bytes": as_bytes})
    facts = {**vars(record), "parts": parts}
    (folder / "expected.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n", encoding="ascii")


def read(folder: Path) -> Record:
    """Read a record back."""
    found = json.loads((folder / "expected.json").read_text(encoding="ascii"))
    parts = []
    for fields in found.pop("parts"):
        as_bytes, groups = fields.pop("as_bytes"), fields.pop("values")
        part = Expected(**fields)
        for paths, values in groups:
            part.values |= {f"{path}{key}": value for path in paths for key, value in values.items()}
        for name, tensor in load_file(folder / part.file).items():
            part.tensors[name] = _of_bytes(tensor, as_bytes[name]) if name in as_bytes else tensor
        parts.append(part)
    return Record(parts=parts, **found)


def _grouped(values: Mapping[str, Any]) -> list[Any]:
    """Return values as [paths, values by last key]: most parameters have the same settings."""
    by_path: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        path, dot, key = name.rpartition(".")
        by_path.setdefault(path + dot, {})[key] = value
    groups: dict[str, list[str]] = {}
    for path, inner in by_path.items():
        groups.setdefault(text_of(inner), []).append(path)
    return [[paths, json.loads(text)] for text, paths in groups.items()]


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element in one more dimension."""
    return flat_bytes(tensor).reshape(*tensor.shape, tensor.itemsize)


def _of_bytes(stored: torch.Tensor, dtype: str) -> torch.Tensor:
    return stored.reshape(-1).view(getattr(torch, dtype)).reshape(stored.shape[:-1])


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements in row-major order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


# -- a load into one process -----------------------------------------------------------------------


class Taker:
    """A sharded dataloader state that takes every unit, and does nothing with it."""

    reader, readers = 0, 1

    def __init__(self) -> None:
        self.found: Any = None

    def shared_state(self) -> Any:
        raise NotImplementedError

    def unit_states(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> Sequence[str]:
        del shared
        return ids

    def load_units(self, shared: Any, units: Mapping[str, Any]) -> None:
        self.found = [described(shared), {name: described(unit) for name, unit in sorted(units.items())}]

    def prepare(self, step: int) -> None:
        del step


def nested(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return leaves with dotted names as dicts in dicts."""
    root: dict[str, Any] = {}
    for name, leaf in leaves:
        *path, last = name.split(".")
        inner = root
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = leaf
    return root


def _leaf(root: Any, name: str) -> Any:
    for key in name.split("."):
        root = root[key]
    return root


def check_plain(path: Path | str, part: Expected, codecs: Sequence[bcp.extend.Codec] = ()) -> None:
    """Load a checkpoint into nested dicts of zeros in this process, and compare every byte with the expectation.

    The names have to be the same on both sides, as the load is strict.
    """
    states: dict[str, Any] = {}
    for kind in ("model", "optimizer"):
        leaves: list[tuple[str, Any]] = [
            (name.removeprefix(f"{kind}/"), torch.zeros_like(tensor, memory_format=torch.contiguous_format))
            for name, tensor in part.tensors.items()
            if name.startswith(f"{kind}/")
        ]
        leaves += [(name.removeprefix(f"{kind}/"), None) for name in part.values if name.startswith(f"{kind}/")]
        if leaves:
            states[kind] = nested(leaves)
    takers = {name: Taker() for name in part.units}
    for kind in part.extras:
        states[kind] = {}
    if takers:
        states["dataloader"] = takers
    options = bcp.LoadOptions(record=False, codecs=codecs)
    bcp.load(path, states, role=part.role, options=options)
    for name, tensor in part.tensors.items():
        kind, _, fqn = name.partition("/")
        found = _leaf(states[kind], fqn)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(flat_bytes(found), flat_bytes(tensor)), name
    for name, value in part.values.items():
        kind, _, dotted = name.partition("/")
        found_text = text_of(described(_leaf(states[kind], dotted)))
        assert found_text == text_of(value), f"{name}: {found_text}, {text_of(value)}"
    for kind, value in part.extras.items():
        assert text_of(described(states[kind])) == text_of(value), f"{kind}: {states[kind]}"
    assert {name: text_of(taker.found) for name, taker in takers.items()} == {
        name: text_of(units) for name, units in part.units.items()
    }
