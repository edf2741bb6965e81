"""Jobs of real processes that save to one path at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from samples import sample
from torch import distributed as dist

import bcp
from bcp.coordinators import SoloCoordinator

pytestmark = pytest.mark.dist
ROUNDS = 15


def state(value: float) -> dict[str, Any]:
    return {"model": {f"w{n}": torch.full((200 + n,), value) for n in range(3)}, "extra_states": {"value": value}}


def race(folder: Path, kind: str) -> list[tuple[str, str]]:
    """Save in every round as a job of one rank, to the same path as three others; return what came of it."""
    rank, outcomes = dist.get_rank(), []
    for number in range(ROUNDS):
        path = folder / str(number)
        name = folder / "link" / str(number) if kind == "two names" and rank % 2 else path
        role = f"role{rank % 2}" if kind == "two roles" else None
        coordinator = SoloCoordinator()
        dist.barrier()
        try:
            report = bcp.save(
                name, state(10.0 + rank), overwrite=kind == "overwrite", role=role, coordinator=coordinator
            )
            outcomes.append(("saved", report.operation))
        except bcp.BcpError as error:
            outcomes.append((type(error).__name__, str(error)))
    return outcomes


@pytest.mark.parametrize("kind", sample(["fresh", "overwrite", "two names", "two roles"], "overwrite"))
def test_every_job_that_says_it_has_saved_has(ranks4: Ranks, tmp_path: Path, kind: str) -> None:
    (tmp_path / "link").symlink_to(".")
    if kind == "overwrite":
        for number in range(ROUNDS):
            bcp.save(tmp_path / str(number), state(1.0))
    outcomes = ranks4.run(race, tmp_path, kind)
    for number in range(ROUNDS):
        path = tmp_path / str(number)
        found = [outcome[number] for outcome in outcomes]
        assert {name for name, _ in found} <= {"saved", "ExistsError"}, found
        if kind == "two roles":
            check_place(path / "role0", found[0::2], only_one=True)
            check_place(path / "role1", found[1::2], only_one=True)
        else:
            check_place(path, found, only_one=kind != "overwrite")


def check_place(path: Path, found: list[tuple[str, str]], *, only_one: bool) -> None:
    """Check that the checkpoint of one of the winners is there whole, and nothing of the others."""
    winners = [operation for name, operation in found if name == "saved"]
    assert len(winners) == 1 if only_one else winners
    target = state(0.0)
    bcp.load(path, target)
    assert len({*target["model"]["w0"].tolist(), *target["model"]["w2"].tolist(), target["extra_states"]["value"]}) == 1
    files = (file for file in path.rglob("*") if file.parent.name != "telemetry")
    names = [file.name for file in files if file.is_file() or file.is_symlink()]
    (operation,) = {name.split("-")[1].split(".")[0] for name in names if name != "metadata.arrow"}
    assert operation in winners
    assert len(names) == 4
