"""Scenarios that need a CUDA device: `pytest -m gpu -s`. The emulation runs most of them at a small scale too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.scenarios import GPU, SCENARIOS, Scenario

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_on_a_device(tmp_path: Path, scenario: Scenario) -> None:
    if (found := torch.cuda.device_count()) < scenario.devices:
        pytest.skip(f"needs {scenario.devices} CUDA devices; this machine has {found}")
    scenario.run(tmp_path, GPU)
