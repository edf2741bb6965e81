"""The fixture of a server of S3, for ``pytest_plugins`` of a test module. All modules of a process share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers.s3 import S3Server, moto_server


@pytest.fixture(scope="session")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running
