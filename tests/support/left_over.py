"""Looks at a server's own listing for what a killed job has left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.chaos_storage import leftovers

PATHS = {"older": 4, "part": 2, "twice": 2, "commit": 2}
"""Checkpoints of the job in ``remote.py``, and how many ranks have saved each one last."""


def without_recordings(names: Iterable[str]) -> list[str]:
    """Return the names of a checkpoint's own files: what saves and loads record beside them varies."""
    return [name for name in names if "telemetry" not in name.split("/")]


def assert_nothing_left(url: str, names: Sequence[str], options: Mapping[str, Any] | None = None) -> None:
    """Assert that the names below a URL are those of the committed checkpoints, and no others."""
    left = [name for name in names if name.partition("/")[0] not in PATHS]
    for path, ranks in PATHS.items():
        mine = [name.removeprefix(f"{path}/") for name in names if name.startswith(f"{path}/")]
        left += leftovers(f"{url}/{path}", mine, options or {})
        assert sum(name.startswith("receipts/") for name in mine) == ranks, mine
    assert not left
