"""Assembles the page from the files in ``assets`` and the data of the recordings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from bcp.errors import InputError, MissingExtraError
from bcp.runtime.imports import importing
from bcp.telemetry.page.data import data_of, packed, squeezed
from bcp.telemetry.recording import Recording

__all__ = ["page"]

_SCRIPTS = ("data.js", "theme.js", "chart.js", "grid.js", "heat.js", "timeline.js", "storage.js", "run.js", "main.js")


def page(
    recordings: Sequence[Recording], *, findings: Sequence[Sequence[str]] = (), highlights: Sequence[str] = ()
) -> str:
    """Return one HTML page about recordings, which needs no network and no other file.

    The page shows highlights and failures first, then findings, figures and a heat map of the ranks. The timeline of a
    rank, its queues, the throughput, the storage requests and the balance follow. Several recordings add trends over
    the steps.

    Args:
        recordings: the saves and loads. The newest one is shown first.
        findings: for each recording, sentences that are shown above its figures.
        highlights: sentences about all recordings, which come first on the page.

    Raises:
        InputError: there is no recording.
        MissingExtraError: ``vl-convert-python`` is not installed.

    Example:
        >>> Path("report.html").write_text(page([recording]), encoding="utf-8")
    """
    if not recordings:
        raise InputError("a report needs at least one recording of a save or load")
    parts = {
        "style": _asset("page.css"),
        "vega": _vega(),
        "data": packed(data_of(recordings, findings, highlights)),
        "script": "\n".join(map(_asset, _SCRIPTS)),
    }
    return re.sub(r"\{\{([a-z]+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


@cache
def _vega() -> str:
    """Return the code of vega-embed with Vega, compressed."""
    try:
        with importing:
            import vl_convert  # noqa: PLC0415 -- optional: bcp-checkpoint[report]
    except ImportError as error:
        raise MissingExtraError(
            "a report draws with Vega, which vl-convert-python has and which is not installed: "
            "pip install 'bcp-checkpoint[report]'"
        ) from error
    code: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return squeezed(code.encode("utf-8"))


@cache
def _asset(name: str) -> str:
    return files("bcp.telemetry.page").joinpath("assets", name).read_text(encoding="utf-8")
