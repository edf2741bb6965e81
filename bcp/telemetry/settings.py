"""The settings of telemetry in this process.

The one question that traces and metrics ask before they do anything: has the application installed an SDK?
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

__all__ = ["COARSE", "GROUPS", "MOST_SPANS", "is_sdk", "settings"]

_API = ("opentelemetry.trace", "opentelemetry.metrics")


def is_sdk(provider: object) -> bool:
    """Return whether a provider of tracers or meters does anything: the API's own ones do nothing."""
    return not type(provider).__module__.startswith(_API)


COARSE = frozenset({"operation", "phase"})
"""Groups of spans that are on by default."""

GROUPS = COARSE | {"stage", "item", "request", "measure"}
"""All groups of spans: a save or load as a whole, its phases, its stages, the parts in a stage, requests to storage,
and blocks that users measure themselves."""

MOST_SPANS = 32
"""Default of :attr:`Settings.most_spans`: a span takes 15 us of a core, and 100 GB of one rank are 3,000 parts."""


@dataclass(slots=True)
class Settings:
    """The settings; :func:`bcp.telemetry.configure` changes them.

    Attributes:
        run: name of the run, ``$BCP_RUN`` by default.
        spans: groups of spans that are made.
        most_spans: spans of items, and of requests, that one save or load makes on one rank.
    """

    run: str = field(default_factory=lambda: os.environ.get("BCP_RUN", ""))
    spans: frozenset[str] = COARSE
    most_spans: int = MOST_SPANS


settings = Settings()
