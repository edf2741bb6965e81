"""The fixture of a server of S3; a test module names this one in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers.s3 import S3Server, moto_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running
