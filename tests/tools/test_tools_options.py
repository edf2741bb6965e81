"""All tools call the options of a source ``storage_options``, and those of a target ``target_options``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import bcp
from bcp.backends import LocalBackend
from bcp.extend import Backend, register_backend


@pytest.fixture
def opened(tmp_path: Path) -> dict[str, Any]:
    """Register two schemes for folders below the test's own, and return the options that each was opened with."""
    options: dict[str, Any] = {}

    def local(url: str, **storage_options: Any) -> Backend:
        scheme, _, path = url.partition("://")
        options.setdefault(scheme, []).append(storage_options)
        return LocalBackend(tmp_path / path)

    for scheme in ("from", "into"):
        register_backend(scheme, local)
    return options


@pytest.mark.parametrize(
    ("tool", "source", "target"),
    [
        (bcp.tools.copy, "ckpt", "copy"),
        (bcp.tools.import_files, "hf", "imported"),
        (partial(bcp.tools.import_files, options=bcp.SaveOptions(storage_options={"replaced": 1})), "hf", "imported"),
        (partial(bcp.tools.export_hf, like="from://hf"), "ckpt", "exported"),
        (bcp.tools.export_dcp, "ckpt", "exported"),
        (bcp.tools.export_torch, "ckpt", "exported/model.pt"),
        (bcp.tools.export_safetensors, "ckpt", "exported/model.safetensors"),
    ],
)
def test_options_go_to_the_storage_that_they_are_for(
    opened: dict[str, Any], tmp_path: Path, tool: Callable[..., Any], source: str, target: str
) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {"w": torch.ones(3)}})
    bcp.tools.export_hf(tmp_path / "ckpt", tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text("{}")
    tool(f"from://{source}", f"into://{target}", storage_options={"key": "a"}, target_options={"key": "b"})
    assert opened["from"]
    assert all(options == {"key": "a"} for options in opened["from"])
    assert opened["into"]
    assert all(options == {"key": "b"} for options in opened["into"])
