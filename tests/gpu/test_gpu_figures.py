"""Prints how fast state crosses the bus, against a plain copy: `pytest -m gpu -s`."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.scenarios import GPU, figures

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]
RUNS = 5
SECONDS = 20
"""Time that the writing of all runs of a figure may take, by the measured speed of the disk."""


@pytest.fixture
def room(tmp_path: Path, speed: float) -> figures.Room:
    return figures.room(tmp_path, seconds=SECONDS, runs=RUNS, speed=speed)


def test_blocking_time_of_a_snapshot_against_a_plain_copy(tmp_path: Path, room: figures.Room) -> None:
    figures.blocking_time_of_a_snapshot(tmp_path, room)


def test_load_against_a_plain_copy(tmp_path: Path, room: figures.Room) -> None:
    figures.load_time(tmp_path, room)


def test_many_small_tensors_against_one_copy(tmp_path: Path, room: figures.Room) -> None:
    figures.many_small_tensors(tmp_path, GPU, room, most=50e-6)


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_training_beside_a_save(tmp_path: Path, room: figures.Room, snapshot: str) -> None:
    figures.training_beside_a_save(tmp_path, GPU, room, snapshot=snapshot)
