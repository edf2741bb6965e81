"""Forged checkpoints: structured, random, with valid checksums. Run as a program, it tries as many as it is told to.

python tests/unit/format/forging.py COUNT [SEED]
"""

from __future__ import annotations

import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import xxhash
from torch import nn

import bcp
from bcp.format.container import encode_table, read_tables, seal
from bcp.format.layout_file import LAYOUT_TABLES
from bcp.format.metadata import COMMIT
from bcp.format.receipt import BLOCKS, FILES, OBJECTS, RECEIPT

Table = dict[str, list[Any]]
TRAILER = 24
WARM, SLOW, LARGE, MANY = 50, 10.0, 40 << 20, 100
ZLIB = bcp.extend.Codec("zlib", zlib.compress, zlib.decompress)
NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 8, 16, 24, 255, 4096, 2**20, 2**31, 2**32, 2**40, 2**62, 2**63 - 1]
STRINGS = ["", "a", "0", "w", "../../etc/passwd", "/etc", "a\0b", "\n", "é", "é", "\U0010ffff", "x" * 100_000]
STRINGS += ["model", "optimizer", "extra_states", "float32", "float64", "complex128", "zlib", "{", "module.w", "cuda"]
TEXTS = ["", "null", "nan", "NaN", "-Infinity", "1e999", "[" * 100_000, '{"tuple":' * 5_000, "1" * 5_000, "9" * 4_000]
TEXTS += ['{"int": "0x' + "f" * 200_000 + '"}', '{"int": "0x' + "f" * 60_000 + '"}', '{"int": 5}', '{"float": []}']
TEXTS += ['{"a": 1, "a": 2}', "{}", '{"torch": "AAAA"}', '{"torch": 1}', '{"dtype": "load"}', '{"dtype": "float32"}']
TEXTS += ['{"device": "cuda:99999999999999999999"}', '{"device": 2}', '{"size": [1e3]}', f'{{"size": [{2**70}]}}']
TEXTS += ['{"size": "abc"}', '{"bytes": "!"}', '{"dict": [[[], 1]]}', '{"dict": [[1, 2, 3]]}', '{"dict": [["a", 1]]}']
TEXTS += ['{"tuple": "abc"}', '{"tuple": 7}', '"\\ud800"', "[1, 2]", "[true]", "0.5", '"text"', '{"int": "-0x1"}']
TEXTS += ['{"float": "nan"}', '{"float": "infinity"}', '{"device": "meta"}', '{"nothing": 1}', '{"int": "5"}']


@dataclass
class Checkpoint:
    """One checkpoint of one rank, taken apart."""

    files: dict[str, bytes]
    tables: dict[str, Table]
    facts: dict[str, Any]
    receipt: dict[str, Table]
    receipt_key: str
    units: bool = False
    text: str | None = None
    bodies: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Checkpoint:
        """Take a checkpoint apart."""
        files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        schemas = (COMMIT, *LAYOUT_TABLES)
        found = read_tables(files["metadata.arrow"][:-TRAILER], schemas)
        (key,) = (key for key in files if key.startswith("receipts/"))
        of_receipt = read_tables(files[key][:-TRAILER], (RECEIPT, FILES, BLOCKS, OBJECTS))
        facts = json.loads(found[0].schema.metadata[b"bcp.commit"])
        return cls(files, _columns(found), facts, _columns(of_receipt), key)

    def copy(self) -> Checkpoint:
        """Copy what is changed."""
        tables, receipt = (
            {name: {key: list(column) for key, column in table.items()} for name, table in part.items()}
            for part in (self.tables, self.receipt)
        )
        return Checkpoint(self.files, tables, dict(self.facts), receipt, self.receipt_key, self.units)

    def write(self, path: Path) -> None:
        """Put it together again, with checksums that are right."""
        files = dict(self.files) | self.bodies
        schemas = (RECEIPT, FILES, BLOCKS, OBJECTS)
        receipt = b"".join(encode_table(of, list(self.receipt[_name(of)].values())) for of in schemas)
        files[self.receipt_key] = seal(receipt, b"BCPRCPT")
        if self.tables["commit"]["digest"][:1] == [self.files["digest"]]:
            self.tables["commit"]["digest"][0] = xxhash.xxh3_128_digest(files[self.receipt_key])
        text = json.dumps(self.facts) if self.text is None else self.text
        parts = [encode_table(COMMIT, list(self.tables["commit"].values()), commit=text)]
        parts += [encode_table(of, list(self.tables[_name(of)].values())) for of in LAYOUT_TABLES]
        files["metadata.arrow"] = seal(b"".join(parts), b"BCPMETA")
        for key, data in files.items():
            if key != "digest":
                target = path / key
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)


def _name(of: pa.Schema) -> str:
    return str(of.metadata[b"bcp.table"].decode())


def _columns(tables: list[pa.RecordBatch]) -> dict[str, Table]:
    return {
        table.schema.metadata[b"bcp.table"].decode(): {
            name: table.column(name).to_pylist() for name in table.schema.names
        }
        for table in tables
    }


class Units:
    """A sharded state of five units, three of which span some blocks."""

    reader, readers = 0, 1

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def shared_state(self) -> Any:
        return {"count": 5}

    def unit_states(self) -> dict[str, Any]:
        sizes = (3, 700, 0, 150_000, 9_000)
        return {
            f"{number}": {"at": number, "ids": torch.arange(size) + self._seed} for number, size in enumerate(sizes)
        }

    def wanted_units(self, shared: Any, ids: Sequence[str]) -> Sequence[str]:
        if shared != {"count": 5}:
            raise bcp.MismatchError("another count")
        return ids

    def load_units(self, shared: Any, units: Any) -> None:
        """Take anything."""

    def prepare(self, step: int) -> None:
        """Do nothing."""


def states(seed: int = 0, *, units: bool = False) -> dict[str, Any]:
    """Return a state of all four kinds."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    extra = {"step": 7, "rng": torch.arange(9), "list": [1, (2.5, "a")]}
    data: dict[str, Any] = {"position": 3}
    if units:
        data["units"] = Units(seed)
    return {"model": net, "optimizer": optimizer, "extra_states": extra, "dataloader": data}


# -- changes ---------------------------------------------------------------------------------------------


def _hostile(dice: random.Random, old: Any) -> Any:
    """Return another value of the type of an old one."""
    if isinstance(old, int) and not isinstance(old, bool):
        number = dice.choice(NUMBERS) + (old if dice.random() < 0.5 else 0)
        return max(-(2**63), min(2**63 - 1, number))
    if isinstance(old, str):
        return dice.choice(TEXTS) if old[:1] in '[{0123456789tfn"' and dice.random() < 0.8 else dice.choice(STRINGS)
    if isinstance(old, bytes):
        return dice.randbytes(len(old))
    if isinstance(old, list) and old:
        at = dice.randrange(len(old))
        return [*old[:at], _hostile(dice, old[at]), *old[at + 1 :]]
    return [dice.choice(STRINGS)] if isinstance(old, list) else old


def change_cell(dice: random.Random, tables: dict[str, Table]) -> None:
    """Change one or a few cells of a column."""
    table = tables[dice.choice(list(tables))]
    column = table[dice.choice(list(table))]
    for _ in range(dice.choice((1, 1, 1, 2, len(column))) if column else 0):
        at = dice.randrange(len(column))
        column[at] = _hostile(dice, column[at])


def change_rows(dice: random.Random, tables: dict[str, Table]) -> None:
    """Drop, double, swap or repeat rows of a table."""
    table = tables[dice.choice(list(tables))]
    count = len(next(iter(table.values())))
    rows = list(range(count))
    how = dice.randrange(5)
    at = dice.randrange(count) if count else 0
    if how == 0:
        rows = rows[:at] + rows[at + 1 :]
    elif how == 1:
        rows = [*rows[: at + 1], *rows[at:]]
    elif how == 2:
        dice.shuffle(rows)
    elif how == 3:
        rows = rows * dice.choice((0, 2, 10))
    elif rows:
        short = all(len(str(column[at])) < MANY for column in table.values())
        rows = rows + [at] * dice.choice((100, 10_000, 100_000) if short else (100,))
    for name, column in table.items():
        table[name] = [column[row] for row in rows]


def change_facts(dice: random.Random, forged: Checkpoint) -> None:
    """Change the JSON object of the commit record."""
    if dice.random() < 0.3:
        forged.text = dice.choice(TEXTS)
        return
    key = dice.choice(list(forged.facts))
    values = [None, True, 1.5, 10**4000, [], ["zlib"], ["x", "zlib"], [1], {}, "x" * 100_000, *NUMBERS, *STRINGS[:8]]
    forged.facts[key] = dice.choice(values)


def change_body(dice: random.Random, forged: Checkpoint) -> None:
    """Replace bytes of a data file, and say so in the receipt; all blocks of the small files are whole files."""
    keys = sorted(key for key in forged.files if key.split("/")[0] in bcp_kinds)
    key = dice.choice(keys)
    data = bytearray(forged.files[key])
    if forged.units and key.startswith("dataloader/") and not key.endswith(".bcp"):
        change_block(dice, forged, key, data)
        return
    encoded = key.endswith(".bcp")
    raw = bytearray(zlib.decompress(data)) if encoded else data
    start = 8 + int.from_bytes(raw[:8], "little")
    kind = key.split("/")[0]
    if kind in ("extra_states", "dataloader") and dice.random() < 0.7:
        raw = raw[:start] + hostile_archive(dice)
    else:
        low = 0 if dice.random() < 0.3 else start
        for _ in range(dice.choice((1, 8, 64))):
            raw[dice.randrange(low, len(raw))] = dice.randrange(256)
    stored = zlib.compress(bytes(raw)) if encoded else bytes(raw)
    forged.bodies[key] = stored
    files, blocks = forged.receipt["files"], forged.receipt["blocks"]
    row = files["kind"].index(bcp_kinds.index(kind)) if bcp_kinds.index(kind) in files["kind"] else None
    if row is not None and row < len(blocks["checksum"]):
        files["nbytes"][row], files["stored_nbytes"][row] = len(raw), len(stored)
        blocks["raw_length"][row], blocks["stored_length"][row] = len(raw), len(stored)
        blocks["checksum"][row] = xxhash.xxh3_128_digest(stored)


def change_block(dice: random.Random, forged: Checkpoint, key: str, data: bytearray) -> None:
    """Change bytes in one block of a data file with several, and make its checksum right again."""
    files, blocks = forged.receipt["files"], forged.receipt["blocks"]
    row = files["kind"].index(bcp_kinds.index("dataloader"))
    first = sum(files["blocks"][:row])
    at = dice.randrange(files["blocks"][row])
    start = sum(blocks["stored_length"][first : first + at])
    stop = start + blocks["stored_length"][first + at]
    for _ in range(dice.choice((1, 8, 64))):
        place = stop - 1 - dice.randrange(64) if dice.random() < 0.5 else dice.randrange(start, stop)
        data[place] = dice.randrange(256)
    forged.bodies[key] = bytes(data)
    blocks["checksum"][first + at] = xxhash.xxh3_128_digest(bytes(data[start:stop]))


bcp_kinds = ["model", "optimizer", "dataloader", "extra_states"]


def hostile_archive(dice: random.Random) -> bytes:
    """Return what ``torch.save`` might have made."""
    deep: Any = []
    for _ in range(dice.choice((10, 200))):
        deep = [deep]
    values: list[Any] = [
        {"value": {}},
        {"value": {"step": deep}},
        {"value": ("bcp", "ndarray", ("<f4", (3,), "C", torch.ones(3)))},
        {"value": ("bcp", "ndarray", ("<f8", (2**40, 2**40), "F", torch.ones(3, dtype=torch.uint8)))},
        {"value": ("bcp", "scalar", ("|O", (), "C", torch.ones(8, dtype=torch.uint8)))},
        {"value": ("bcp", "dtype", [["a"], ["<i4"], [-8], [None], 4, False])},
        {"value": ("bcp", "RandomState", {"bit_generator": "PCG64", "state": {}})},
        {"value": ("bcp", "Generator", ("MT19937", {}, {"entropy": 2**70, "pool_size": 2**40}))},
        {"value": ("bcp", "deque", ([1, 2], -1))},
        {"value": ("bcp", "int", "f" * 100_000)},
        {"value": ("bcp", "defaultdict", ([[[], 1]], "system"))},
        {"value": ("bcp", "OrderedDict", ([["a", 1]], {"__class__": dict.__name__}))},
        {"value": ("bcp",)},
        {"value": {"step": 2**4000, 7: None, ("a",): "é", "": float("nan")}},
        {},
        [1],
        7,
    ]
    out = io.BytesIO()
    torch.save(dice.choice(values), out)
    data = bytearray(out.getvalue())
    how = dice.randrange(4)
    if how == 0:
        for _ in range(dice.choice((1, 20))):
            data[dice.randrange(len(data))] = dice.randrange(256)
    elif how == 1:
        data = data[: dice.randrange(len(data))]
    return bytes(data)


CHANGES: list[Callable[[random.Random, Checkpoint], None]] = [
    lambda dice, forged: change_cell(dice, forged.tables),
    lambda dice, forged: change_cell(dice, forged.receipt),
    lambda dice, forged: change_cell(dice, {"objects": {"value": forged.receipt["objects"]["value"]}}),
    lambda dice, forged: change_rows(dice, forged.tables),
    lambda dice, forged: change_rows(dice, forged.receipt),
    change_facts,
    change_body,
]


def bases(folder: Path) -> list[Checkpoint]:
    """Save what is forged: plain files, files that went through a codec, and both with units of a dataloader."""
    found = []
    for name, codecs, units in (("plain", [], False), ("zlib", [ZLIB], False), ("u", [], True), ("uz", [ZLIB], True)):
        bcp.save(folder / name, states(units=units), options=bcp.SaveOptions(codecs=codecs))
        checkpoint = Checkpoint.of(folder / name)
        checkpoint.units = units
        checkpoint.files["digest"] = checkpoint.tables["commit"]["digest"][0]
        found.append(checkpoint)
    return found


def forged(dice: random.Random, base: Checkpoint) -> Checkpoint:
    """Return a checkpoint with one to three changes."""
    made = base.copy()
    for _ in range(dice.choice((1, 1, 2, 3))):
        dice.choice(CHANGES)(dice, made)
    return made


def outcome(path: Path, dice: random.Random, *, units: bool) -> str:
    """Load a forgery; say how that ended."""
    target = states(seed=1, units=units)
    if dice.random() < 0.5:
        target["optimizer"].state.clear()
    kinds = [kind for kind in bcp_kinds if dice.random() < 0.8] or ["model", "optimizer"]
    if "optimizer" in kinds and "model" not in kinds:
        kinds.append("model")
    options = bcp.LoadOptions(codecs=[ZLIB], strict=dice.random() < 0.5, cast=dice.random() < 0.3)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", bcp.NothingLoadedWarning)
            bcp.load(path, {kind: target[kind] for kind in kinds}, options=options)
    except bcp.StageError as error:
        return f"FOREIGN {error!r} from {error.__cause__!r}"[:600]
    except bcp.BcpError as error:
        str(error)
        return type(error).__name__
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"FOREIGN {error!r} {getattr(error, '__notes__', '')}"[:600]
    return "loaded"


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def attempt(made: list[Checkpoint], path: Path, case: int) -> tuple[str, int]:
    """Write and load the forgery of that number; say how that ended, and how many bytes more than ever it took."""
    dice = random.Random(case)  # noqa: S311 -- a sample, no secret
    shutil.rmtree(path, ignore_errors=True)
    base = dice.choice(made)
    try:
        forged(dice, base).write(path)
    except (OverflowError, ValueError, pa.ArrowException, TypeError, KeyError, IndexError):
        return "impossible", 0  # Arrow has no such column
    before = peak()
    return outcome(path, dice, units=base.units), peak() - before


def main(count: int, seed: int) -> None:
    """Try forgeries, tell of those that end badly or take memory, and sum up."""
    dice, counts, most = random.Random(seed), Counter[str](), 0  # noqa: S311 -- same
    with tempfile.TemporaryDirectory() as name:
        made = bases(Path(name))
        for number in range(count):
            case, started = dice.randrange(2**63), time.monotonic()
            said, grown = attempt(made, Path(name) / "case", case)
            seconds = time.monotonic() - started
            most = max(most, grown if number > WARM else 0)
            if said.startswith("FOREIGN") or seconds > SLOW or (grown > LARGE and number > WARM):
                sys.stdout.write(f"{case} {said} {seconds:.1f} s, +{grown >> 20} MB\n")
            counts[said.split()[0]] += 1
    sys.stdout.write(f"{counts}, one load took at most {most >> 20} MB more than those before\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
