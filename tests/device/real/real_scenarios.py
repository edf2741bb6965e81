"""Scenarios on a real accelerator of torch, that of ``backend.cpp``; each is a test of ``test_real_backend.py``.

They run in a process of their own: torch takes one accelerator a process, for good.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import IO

import real_facts  # noqa: F401 -- as the next three: it registers scenarios
import real_failures  # noqa: F401
import real_loads  # noqa: F401
import real_saves  # noqa: F401
from real_backend import Backend
from real_support import SCENARIOS, synchronize

__all__ = ["SCENARIOS"]


def main() -> None:
    """Run the scenarios that come by standard input, one line each: its name and a folder."""
    faulthandler.enable()
    warnings.simplefilter("error")
    late = Backend(Path(sys.argv[1]))
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what is printed otherwise goes to the log
        answer(late, answers)


def answer(late: Backend, answers: IO[str]) -> None:
    for line in sys.stdin:
        name, folder = json.loads(line)
        error = ""
        try:
            SCENARIOS[name](late, Path(folder))
            synchronize()
            assert not (found := late.defects()), found
        except BaseException:  # noqa: BLE001 -- the test says it
            error = traceback.format_exc()
        late.settle()
        answers.write(json.dumps(error) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
