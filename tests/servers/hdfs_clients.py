"""Clients of a test HDFS."""

from __future__ import annotations

from typing import Any

from bcp.backends.hdfs import open_hdfs
from bcp.backends.hdfs.client import Hdfs
from bcp.backends.hdfs.store import HdfsStore
from bcp.backends.objects import ObjectBackend
from bcp.protocols import RetryPolicy

QUICK = RetryPolicy(deadline_seconds=60, attempt_seconds=10, first_pause_seconds=0.05, longest_pause_seconds=0.5)


def backend_of(url: str, policy: RetryPolicy = QUICK, **options: Any) -> tuple[ObjectBackend, Hdfs]:
    """Open a backend; return its client too."""
    backend = open_hdfs(url, options, policy)
    store = backend.store
    assert isinstance(store, HdfsStore)
    return backend, store.hdfs


async def names(backend: ObjectBackend) -> list[str]:
    """List all objects and unfinished files."""
    return [*(info.key for info in await backend.list()), *(one.name for one in await backend.unfinished())]
