"""The one question that traces and metrics ask before they do anything: has the application installed an SDK?"""

from __future__ import annotations

__all__ = ["is_sdk"]

_API = ("opentelemetry.trace", "opentelemetry.metrics")


def is_sdk(provider: object) -> bool:
    """Return whether a provider of tracers or meters does anything: the API's own ones do nothing."""
    return not type(provider).__module__.startswith(_API)
