"""Whole runs on servers of object stores, on HDFS and on a file system of fsspec: killed, resumed, swept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import stored_run
from forked import run_forked
from servers.gcs import BUCKET, GcsServer
from servers.s3 import S3Server

from bcp.backends import resolve
from bcp.runs.folder import step_name

pytest_plugins = ["servers.gcs_fixtures", "servers.hdfs_fixtures", "servers.s3_fixtures"]
STEPS, KILLED = 12, 8


def test_on_s3(server: S3Server) -> None:
    two_lives(server.place(), server.options)


def test_on_google_cloud_storage(gcs_server: GcsServer) -> None:
    two_lives(f"gs://{BUCKET}/whole-run", {"token": "anon", "endpoint_url": gcs_server.url})


@pytest.mark.long
def test_on_hdfs(url: str) -> None:
    two_lives(f"{url}/whole-run", {})


def test_on_a_file_system_of_fsspec(tmp_path: Path) -> None:
    two_lives(f"local://{tmp_path}/new/run", {})


def life(url: str, options: Mapping[str, Any], *words: int) -> subprocess.CompletedProcess[str]:
    """Run one life of the job in a process of its own."""
    command = [sys.executable, stored_run.__file__, url, json.dumps(dict(options)), *map(str, words)]
    return run_forked(command, timeout=300)


async def folders(url: str, options: Mapping[str, Any]) -> list[str]:
    """Return the first parts of all names in the folder."""
    backend = resolve(url, options)
    names = {info.key.partition("/")[0] for info in await backend.list()}
    await backend.aclose()
    return sorted(names)


def two_lives(url: str, options: Mapping[str, Any]) -> None:
    """Kill a run in the middle of a save, go on in another process, and compare with a loop without bcp."""
    first = life(url, options, STEPS, KILLED)
    assert first.returncode == -signal.SIGKILL, first.stderr
    second = life(url, options, STEPS)
    assert second.returncode == 0, second.stderr
    outcome = json.loads(second.stdout)
    assert outcome["resumed"] in (KILLED - stored_run.SAVE_EVERY, KILLED)
    undisturbed = stored_run.Training()
    for _ in range(STEPS):
        undisturbed.step()
    assert outcome["digest"] == undisturbed.digest()
    assert anyio.run(folders, url, options) == ["run.json", step_name(STEPS - stored_run.SAVE_EVERY), step_name(STEPS)]
