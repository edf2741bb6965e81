"""Jobs that save to S3 through an integration, are killed in a save, and resume from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_jobs import Job

import bcp

pytestmark = [pytest.mark.hosts, pytest.mark.long]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from servers.s3 import moto_server  # noqa: PLC0415 -- other tests of this folder need no server

    with moto_server() as running:
        yield running


def on(server: Any, url: str) -> dict[str, str]:
    """Return the environment of a job that saves to a URL of the server."""
    key, secret = server.options["key"], server.options["secret"]
    signed = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_DEFAULT_REGION": "us-east-1"}
    return {"RUN_URL": url, "AWS_ENDPOINT_URL": server.url, **signed}


def steps(server: Any, url: str) -> list[int]:
    options = bcp.SaveOptions(storage_options=server.options)
    return [info.step for info in bcp.Run(url, {}, save_options=options).list() if info.is_committed]


@pytest.mark.parametrize(("program", "mode"), [("transformers_job.py", ["plain"]), ("accelerate_job.py", [])])
def test_a_run_in_s3_is_killed_and_goes_on(program: str, mode: list[str], server: Any, tmp_path: Path) -> None:
    alone = Job(program, tuple(mode)).run(tmp_path / "alone")
    url = server.place()
    job = Job(program, tuple(mode), environment=on(server, url))
    job.kill_in_save(tmp_path / "run", 2)
    assert steps(server, url) == [4]
    again = job.run(tmp_path / "run", *(["resume"] if mode else []))
    assert again["resumed"] == 4
    assert tail(again["losses"]) == tail(alone["losses"])
    assert steps(server, url)[-1] == max(step for step, _ in tail(alone["losses"]))
    assert not list((tmp_path / "run").rglob("step-*"))


def tail(losses: Any) -> list[tuple[int, float]]:
    """Return the losses of the steps after the resumption; some jobs report all, and some the last life's."""
    pairs = losses.items() if isinstance(losses, dict) else losses
    return [(int(step), loss) for step, loss in pairs if int(step) > 4]
