"""Old checkpoints move between two places of a server, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from cooled_runs import OLD, STEPS, assert_loads, train
from servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server

import bcp

pytest_plugins = ["servers.s3_fixtures"]


@pytest.fixture
def options(server: S3Server) -> dict[str, object]:
    """Pass everything by options, and nothing by the environment."""
    return {"endpoint_url": server.url, "key": ACCESS_KEY, "secret": SECRET_KEY}


def test_a_run_in_s3_is_cooled_to_s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACCESS_KEY_ID", ACCESS_KEY), ("SECRET_ACCESS_KEY", SECRET_KEY), ("ENDPOINT_URL", server.url)):
        monkeypatch.setenv(f"AWS_{name}", value)
    hot, cold = server.place(), server.place()
    train(hot)
    assert [each.step for each in bcp.cool(hot, to=cold, days=0) if each.files == 2] == list(OLD)
    assert len(server.names(cold)) == 2 * len(OLD) + 1
    for step in STEPS:
        assert_loads(hot, step)
        assert bcp.tools.verify(f"{hot}/step-{step:08d}")
    assert bcp.promote(hot, 1).files == 2
    assert_loads(hot, 1, bcp.LoadOptions(cold=None))
    bcp.tools.remove(f"{hot}/step-00000002")
    train(hot, (4,), keep=1)
    assert [name.rpartition("/")[2] for name in server.names(cold)] == ["cold-of.json"]


def test_options_of_the_run_count_for_a_place_of_its_scheme(
    server: S3Server, options: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    hot, cold = server.place(), server.place()
    train(tmp_path / "run")
    for step in STEPS:
        name = f"step-{step:08d}"
        bcp.tools.copy(tmp_path / "run" / name, f"{hot}/{name}", target_options=options)
    bcp.tools.pin(hot, 1, storage_options=options)  # makes the ledger
    assert [each.step for each in bcp.cool(hot, to=cold, days=0, storage_options=options)] == list(OLD)
    for step in STEPS:
        assert_loads(hot, step, bcp.LoadOptions(storage_options=options))
    assert bcp.cool(tmp_path / "run", to=server.place(), days=0, cold_options=options)[0].files == 2
    assert bcp.promote(tmp_path / "run", 1, cold_options=options).files == 2
    assert_loads(tmp_path / "run", 1)
