"""The settings of telemetry in this process."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

__all__ = ["COARSE", "GROUPS", "Settings", "settings"]

COARSE = frozenset({"operation", "phase"})
"""Groups of spans that are on by default."""

GROUPS = COARSE | {"stage", "item", "request", "measure"}
"""All groups of spans: a save or load as a whole, its phases, its stages, the parts in a stage, requests to storage,
and blocks that users measure themselves."""


@dataclass(slots=True)
class Settings:
    """The settings; :func:`bcp.telemetry.configure` changes them.

    Attributes:
        run: name of the run, ``$BCP_RUN`` by default.
        spans: groups of spans that are made.
    """

    run: str = field(default_factory=lambda: os.environ.get("BCP_RUN", ""))
    spans: frozenset[str] = COARSE


settings = Settings()
