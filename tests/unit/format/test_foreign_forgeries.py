"""Random forgeries of metadata over files of another library: every one ends in an error of bcp, or loads."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from forging import NUMBERS, STRINGS, TEXTS, Table, change_cell, change_rows
from samples import sample

import bcp
from bcp.format.container import encode_table, read_tables, seal
from bcp.format.foreign_files import ABOUT, FILES, VALUES
from bcp.format.layout_file import LAYOUT_TABLES

TABLES = {of.metadata[b"bcp.table"].decode(): of for of in (ABOUT, FILES, VALUES, *LAYOUT_TABLES)}
Tables = dict[str, Table]


def states() -> dict[str, Any]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return {"model": net, "optimizer": optimizer}


def imported(folder: Path) -> tuple[Tables, dict[str, Any]]:
    """Import a folder with values, and take its metadata apart."""
    torch.save({kind: state.state_dict() for kind, state in states().items()}, folder / "pytorch_model.bin")
    bcp.tools.import_files(folder, copy=False)
    found = read_tables((folder / "metadata.arrow").read_bytes()[:-24], tuple(TABLES.values()))
    tables = {
        name: {key: table.column(key).to_pylist() for key in table.schema.names}
        for name, table in zip(TABLES, found, strict=True)
    }
    return tables, json.loads(found[0].schema.metadata[b"bcp.commit"])


def change_facts(dice: random.Random, facts: dict[str, Any]) -> None:
    facts[dice.choice([*facts, "user", "metrics", "ranks"])] = dice.choice([None, True, [], {}, *NUMBERS, *STRINGS[:8]])


def written(folder: Path, tables: Tables, facts: dict[str, Any], text: str | None) -> None:
    """Put the metadata together again; the checksum is right."""
    parts = [
        encode_table(of, list(tables[name].values()), **({"commit": text or json.dumps(facts)} if of is ABOUT else {}))
        for name, of in TABLES.items()
    ]
    (folder / "metadata.arrow").write_bytes(seal(b"".join(parts), b"BCPMETA", 2))


def outcome(folder: Path, dice: random.Random) -> str:
    """Look at a forgery in every way; return the name of the error of bcp."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bcp.NothingLoadedWarning)
            ckpt = bcp.Checkpoint(folder)
            _ = repr(ckpt), ckpt.verify(), ckpt.world_size, ckpt.kinds
            for kind, name in list(ckpt.tensors)[:4]:
                assert ckpt.read(name, kind=kind).nbytes <= 1 << 20
                ckpt.places(name, kind)
            _ = ckpt.values
            bcp.load(folder, states(), options=bcp.LoadOptions(strict=dice.random() < 0.5, cast=dice.random() < 0.3))
    except bcp.StageError as error:
        raise AssertionError(f"{error!r} from {error.__cause__!r}") from error
    except bcp.BcpError as error:
        return type(error).__name__
    return "loaded"


@pytest.mark.parametrize("times", sample([30, 1500], 30))
def test_a_forgery_is_refused_or_loads(tmp_path: Path, times: int) -> None:
    tables, facts = imported(tmp_path)
    files = {file.name for file in tmp_path.iterdir()}
    outcomes = set()
    for case in range(times):
        dice = random.Random(case)  # noqa: S311 -- a sample, no secret
        made = {name: {key: list(column) for key, column in table.items()} for name, table in tables.items()}
        own, text = dict(facts), None
        for _ in range(dice.choice((1, 1, 2, 3))):
            what = dice.random()
            if what < 0.5:
                foreign = {name: made[name] for name in dice.choice([list(TABLES)[:3], list(TABLES)])}
                change_cell(dice, foreign)
            elif what < 0.8:
                change_rows(dice, made)
            elif what < 0.95:
                change_facts(dice, own)
            else:
                text = dice.choice(TEXTS)
        try:
            written(tmp_path, made, own, text)
        except (OverflowError, ValueError, pa.ArrowException, TypeError, KeyError, IndexError):
            continue  # Arrow has no such column
        outcomes.add(outcome(tmp_path, dice))
        assert {file.name for file in tmp_path.iterdir()} == files
    assert {"CorruptError", "loaded"} <= outcomes
