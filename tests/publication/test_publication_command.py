"""``bcp publish`` and ``bcp pull``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published import assert_folder, stepped, weights

import bcp
from bcp.cli import main


def test_publish_and_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    bcp.save("a", {"model": weights()})
    bcp.save("b", {"model": stepped(weights(), 2)})
    assert main(["publish", "a", "pub", "--version", "1"]) == 0
    assert "weight_v000001: an anchor of 1.3 kB; all tensors to download" in capsys.readouterr().out
    assert main(["pull", "pub", "engine"]) == 0
    assert "engine: version 1; anchor 1, 1.3 kB" in capsys.readouterr().out
    assert main(["publish", "b", "pub", "--version", "2", "--keep", "1", "--cache", "cache"]) == 0
    assert "weight_v000002: a delta; 3 of 5 tensors changed" in capsys.readouterr().out
    assert main(["pull", "pub", "engine", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["version"], result["before"], result["deltas"]) == (2, 1, 1)
    assert_folder("engine", stepped(weights(), 2))
    assert main(["pull", "pub", "engine"]) == 0
    assert "version 2; nothing to do" in capsys.readouterr().out
    assert main(["publish", "b", "pub", "--version", "3", "--json", "--dtype", "float32"]) == 0
    assert json.loads(capsys.readouterr().out)["is_anchor"] is True


def test_wrong_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    bcp.save("a", {"model": weights()})
    assert main(["pull", "nothing", "engine"]) == 2
    assert main(["publish", "nothing", "pub", "--version", "1"]) == 2
    assert main(["publish", "a", "pub", "--version", "0"]) == 2
    assert main(["publish", "a", "pub", "--version", "1"]) == 0
    assert main(["publish", "a", "pub", "--version", "1"]) == 1
    assert "pass version=2" in capsys.readouterr().err
