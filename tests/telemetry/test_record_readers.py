"""Recordings of loads: jobs leave them, readers do not, and a sealed checkpoint stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bcp


def training() -> dict[str, Any]:
    net = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9, lr=0.1)
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": net, "optimizer": optimizer}


def kinds(path: Path) -> list[str]:
    return sorted(file.name.partition("-")[0] for file in (path / "telemetry").glob("*"))


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.fixture(autouse=True)
def _no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BCP_RECORD", raising=False)


def test_a_load_of_a_job_leaves_a_recording_and_one_of_a_reader_none(tmp_path: Path) -> None:
    bcp.save(tmp_path, training())
    before = contents(tmp_path)
    bcp.load(tmp_path, {"model": torch.nn.Linear(3, 3)})
    with pytest.raises(bcp.ShapeMismatchError):
        bcp.load(tmp_path, {"model": torch.nn.Linear(4, 3)})
    assert contents(tmp_path) == before
    bcp.load(tmp_path, training())
    assert kinds(tmp_path) == ["load", "save"]


def test_the_option_and_the_variable_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bcp.save(tmp_path, training())
    bcp.load(tmp_path, {"model": torch.nn.Linear(3, 3)}, options=bcp.LoadOptions(record=True))
    assert kinds(tmp_path) == ["load", "save"]
    bcp.load(tmp_path, training(), options=bcp.LoadOptions(record=False))
    assert kinds(tmp_path) == ["load", "save"]
    monkeypatch.setenv("BCP_RECORD", "1")
    bcp.load(tmp_path, {"model": torch.nn.Linear(3, 3)})
    assert kinds(tmp_path) == ["load", "load", "save"]


def test_a_checkpoint_without_an_optimizer_is_loaded_by_its_job(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}})
    bcp.load(tmp_path, {"model": {"w": torch.ones(2)}})
    assert kinds(tmp_path) == ["load", "save"]


@pytest.mark.parametrize("role", [None, "actor"])
@pytest.mark.parametrize("sealed", ["", "metadata.arrow", "telemetry"])
def test_a_load_writes_nothing_into_a_sealed_checkpoint(tmp_path: Path, sealed: str, role: str | None) -> None:
    """Modes that let nobody write mean a seal also to an administrator, who could write."""
    path = tmp_path / "ckpt"
    bcp.save(path, training(), role=role)
    folder = path if role is None else path / role
    place = folder / sealed
    place.chmod(place.stat().st_mode & ~0o222)
    try:
        before = contents(path)
        bcp.load(path, training(), role=role, options=bcp.LoadOptions(record=True))
        assert contents(path) == before
        (data,) = (folder / "model").iterdir()
        data.write_bytes(data.read_bytes()[:-8] + b"damaged!")
        before = contents(path)
        with pytest.raises(bcp.CorruptError):
            bcp.load(path, training(), role=role, options=bcp.LoadOptions(record=True))
        assert contents(path) == before
    finally:
        place.chmod(0o755)
