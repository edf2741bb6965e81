from __future__ import annotations

import pytest
from ranks import forkserver


@pytest.fixture(scope="session", autouse=True)
def _workers_start_from_a_process_that_has_imported_bcp() -> None:
    """As an application may choose to. Every worker would import torch otherwise, for seconds."""
    forkserver()
