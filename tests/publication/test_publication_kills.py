"""A publisher or a subscriber that is killed within any write: the next call goes on, and nothing torn is served."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from published import assert_folder, followed, stepped, weights

import bcp

TESTS = Path(__file__).parents[1]
JOB = TESTS / "jobs" / "killed_publication.py"
PATHS = (TESTS.parent, TESTS / "support")
Model = dict[str, torch.Tensor]
LAST = 4
PUBLISHER_WRITES = SUBSCRIBER_WRITES = 60
"""More than there are."""


def model_of(version: int) -> Model:
    model = weights()
    for step in range(2, version + 1):
        model = stepped(model, step)
    return model


def raw(version: int) -> dict[str, bytes]:
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in model_of(version).items()}


def died(what: str, root: Path, version: int, write: int) -> bool:
    """Run a job; say whether it was killed within that write. A job with fewer writes has ended well."""
    command = [sys.executable, str(JOB), what, str(root), str(version), str(write)]
    job = run_forked(command, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))})
    assert job.returncode in (0, -signal.SIGKILL), job.stderr
    return job.returncode != 0


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Versions 1 to 3 with a cache, and an engine's folder at version 1."""
    root = tmp_path / "start"
    for version in (1, 2, 3):
        bcp.publish(model_of(version), root / "published", version, anchor_every=2, cache=root / "cache")
        if version == 1:
            bcp.Subscriber(root / "published", root / "engine").pull()
    return root


def publisher_is_killed(start: Path, root: Path, write: int) -> bool:
    """Kill a publisher of version 4; look at the publication, and publish again."""
    shutil.copytree(start, root)
    was_killed = died("publish", root, LAST, write)
    newest = bcp.Subscriber(root / "published", root / "engine").pull().version
    assert newest in (LAST - 1, LAST)
    assert_folder(root / "engine", model_of(newest))
    more: Any = {"anchor_every": 2, "keep": 2, "claim_seconds": 0, "cache": root / "cache"}
    if newest < LAST:
        try:
            bcp.publish(model_of(LAST), root / "published", LAST, **more)
        except bcp.ExistsError:  # the claim was sealed, and this call has ended the commit
            assert followed(root / "published", LAST) == raw(LAST)
    bcp.publish(model_of(LAST + 1), root / "published", LAST + 1, **more)
    for version in (LAST, LAST + 1):
        assert followed(root / "published", version) == raw(version)
    bcp.Subscriber(root / "published", root / "engine").pull()
    assert_folder(root / "engine", model_of(LAST + 1))
    folders = sorted(path.name for path in (root / "published").glob("weight_v*"))
    assert folders == ["weight_v000003", "weight_v000004", "weight_v000005"]
    assert not list((root / "published").rglob("*.bcp-tmp"))
    return was_killed


def subscriber_is_killed(start: Path, root: Path, write: int) -> bool:
    """Kill a subscriber on its way; pull again."""
    shutil.copytree(start, root)
    was_killed = died("pull", root, 3, write)
    subscriber = bcp.Subscriber(root / "published", root / "engine")
    subscriber.pull(version=3)
    assert_folder(root / "engine", model_of(3))
    assert subscriber.pull() == bcp.PullResult(3, 3)
    return was_killed


@pytest.mark.parametrize("write", [1, 6, 9, 13])
def test_a_publisher_is_killed(start: Path, tmp_path: Path, write: int) -> None:
    assert publisher_is_killed(start, tmp_path / "root", write)


@pytest.mark.parametrize("write", [2, 4, 5])
def test_a_subscriber_is_killed(start: Path, tmp_path: Path, write: int) -> None:
    assert subscriber_is_killed(start, tmp_path / "root", write)


@pytest.mark.long
@pytest.mark.kills
@pytest.mark.parametrize("is_new", [False, True])
def test_a_subscriber_is_killed_within_every_write(start: Path, tmp_path: Path, *, is_new: bool) -> None:
    if is_new:
        shutil.rmtree(start / "engine")
    kills = [subscriber_is_killed(start, tmp_path / str(write), write) for write in range(1, SUBSCRIBER_WRITES)]
    assert kills == sorted(kills, reverse=True)
    assert 5 < sum(kills) < SUBSCRIBER_WRITES - 1


@pytest.mark.long
@pytest.mark.kills
def test_a_publisher_is_killed_within_every_write(start: Path, tmp_path: Path) -> None:
    kills = [publisher_is_killed(start, tmp_path / str(write), write) for write in range(1, PUBLISHER_WRITES)]
    assert kills == sorted(kills, reverse=True)
    assert 10 < sum(kills) < PUBLISHER_WRITES - 1
