"""bcp, as it comes; it gets the module and its optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import bcp
from bcp._save.snapshot import PARTS_IN_FLIGHT
from benchmarks.speed.libraries import BCP_ASYNC, BCP_LAZY, BCP_LOAD, BCP_SAVE, Facts, Library
from benchmarks.speed.state import State
from benchmarks.speed.train import Background

__all__ = ["open_library"]


def open_library(state: State) -> Library:
    """Open it."""

    def save(path: Path) -> Facts:
        report, options = bcp.save(path, state.states), bcp.SaveOptions()
        return {"budget": PARTS_IN_FLIGHT * options.part_bytes, "nbytes": report.nbytes}

    def load(path: Path) -> Facts:
        bcp.load(path, state.states)
        return {"budget": bcp.LoadOptions().budget_bytes}

    def background(path: Path, snapshot: Literal["eager", "lazy"]) -> Background:
        options = bcp.SaveOptions(budget_bytes=state.nbytes, snapshot=snapshot)
        return Background(bcp.save(path, state.states, async_checkpoint=True, options=options).wait)

    backgrounds = {BCP_ASYNC: partial(background, snapshot="eager"), BCP_LAZY: partial(background, snapshot="lazy")}
    return Library(saves={BCP_SAVE: save}, backgrounds=backgrounds, loads={BCP_LOAD: load})
