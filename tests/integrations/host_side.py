"""What the jobs of this folder do beside training: hold a save, and report."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import bcp

_begun = count(1)
"""Numbers of the saves of this process."""


def save_options(**options: Any) -> bcp.SaveOptions:
    """Return options whose save of number ``$HOLD_SAVE`` stops before its upload, and makes the file ``$HELD``."""

    def edit(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        if next(_begun) != int(os.environ.get("HOLD_SAVE", "0")):
            return graph

        def hold(part: Any) -> Any:
            Path(os.environ["HELD"]).touch()
            time.sleep(3600)
            return part

        async def stage(part: Any) -> Any:
            return await bcp.extend.in_thread(hold, part)

        return graph.before("upload", bcp.extend.Stage("hold", stage))

    return bcp.SaveOptions(edit=edit, **options)


def tiny_llama(**settings: Any) -> Any:
    """Return the configuration of a Llama of two layers."""
    from transformers import LlamaConfig  # noqa: PLC0415 -- of some jobs

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, **sizes, **settings)


def report(**values: Any) -> None:
    """Print what the test compares. Floats keep all their digits."""
    sys.stdout.write(f"RESULT {json.dumps(values)}\n")
    sys.stdout.flush()
