"""Fixtures of Google Cloud Storage; a test module names this one in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from servers.gcs import BUCKET, GcsServer

from bcp.backends.objects import ObjectBackend
from bcp.backends.objects.gcs import GcsStore, open_gcs
from bcp.protocols import RetryPolicy

QUICK = RetryPolicy(first_pause_seconds=1e-3, longest_pause_seconds=1e-2, allowance=100_000)


class Gcs:
    """Opens backends for one test, all with the same root."""

    def __init__(self, server: GcsServer) -> None:
        self.server = server
        self.root = uuid4().hex

    def __call__(self, url: str | None = None, policy: RetryPolicy = QUICK, **options: Any) -> ObjectBackend:
        """Open one; an option that is None is left out."""
        options = {"token": "anon", "endpoint_url": self.server.url, **options}
        given = {name: value for name, value in options.items() if value is not None}
        backend = open_gcs(url or f"gs://{BUCKET}/{self.root}", given, policy)
        assert isinstance(backend, ObjectBackend)
        return backend

    def store(self, **options: Any) -> GcsStore:
        """Open one, and return the store below, which makes no request again."""
        store = self(**options).store
        assert isinstance(store, GcsStore)
        return store

    async def names(self) -> list[str]:
        """Return all names below the root, those of parts too."""
        names, after = list[str](), None
        while True:
            page, after = await self.store()._api.names(f"{self.root}/", after)
            names += [info.key for info in page]
            if after is None:
                return names


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def gcs(gcs_server: GcsServer) -> Iterator[Gcs]:
    yield Gcs(gcs_server)  # sessions end with their event loops
    gcs_server.faults()
