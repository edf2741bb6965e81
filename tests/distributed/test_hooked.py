"""Hooks of ``load_state_dict`` under FSDP1 and FSDP2."""

from __future__ import annotations

from pathlib import Path

import hooked_jobs
import pytest
from ranks import Ranks

pytestmark = pytest.mark.dist


def test_fsdp2_runs_the_hooks_on_sharded_parameters(ranks4: Ranks, tmp_path: Path) -> None:
    for done in ranks4.run(hooked_jobs.fsdp2, tmp_path):
        assert done == {
            "Counted": True,
            "Counted report": (),
            "calls": 1,
            "norm": True,
            "Halved": True,
            "Halved report": (),
        }


def test_fsdp1_runs_the_hooks_of_modules_that_it_ignores_and_refuses_others(ranks4: Ranks, tmp_path: Path) -> None:
    for done in ranks4.run(hooked_jobs.fsdp1, tmp_path):
        said = done.pop("said")
        assert all(done.values()), done
        assert "the post-hook of load_state_dict of Counted" in said["load"]
        assert "the hook of state_dict of Halved" in said["save"]
