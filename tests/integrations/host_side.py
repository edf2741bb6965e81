"""What the jobs of this folder do beside training: hold a save, and report."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import bcp

_begun = 0


def save_options(**options: Any) -> bcp.SaveOptions:
    """Return options whose save of number ``$HOLD_SAVE`` never gets to its upload, and says so in the file ``$HELD``."""

    def edit(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        global _begun
        _begun += 1
        if _begun != int(os.environ.get("HOLD_SAVE", "0")):
            return graph

        def hold(part: Any) -> Any:
            Path(os.environ["HELD"]).touch()
            time.sleep(3600)
            return part

        async def stage(part: Any) -> Any:
            return await bcp.extend.in_thread(hold, part)

        return graph.before("upload", bcp.extend.Stage("hold", stage))

    return bcp.SaveOptions(edit=edit, **options)


def report(**values: Any) -> None:
    """Print what the test compares. Floats keep all their digits."""
    print("RESULT", json.dumps(values), flush=True)
