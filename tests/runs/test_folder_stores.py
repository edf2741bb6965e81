"""The folder of a run on servers of object stores, on HDFS and on a file system of fsspec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from servers.s3 import S3Server

from bcp.backends import resolve
from bcp.backends.hdfs import open_hdfs
from bcp.errors import RunTakenError
from bcp.protocols import Backend, RetryPolicy
from bcp.runs.folder import Folder, step_name

if TYPE_CHECKING:
    from servers.gcs_fixtures import Gcs

pytest_plugins = ["servers.gcs_fixtures", "servers.hdfs_fixtures", "servers.s3_fixtures"]
pytestmark = pytest.mark.anyio
QUICK = RetryPolicy(first_pause_seconds=1e-4, longest_pause_seconds=1e-3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_on_s3(server: S3Server) -> None:
    url = server.place()
    await two_lives(lambda: server.backend(url, QUICK), url)


async def test_on_google_cloud_storage(gcs: Gcs) -> None:
    await two_lives(gcs, "gs://bucket/run")


@pytest.mark.long
async def test_on_hdfs(url: str) -> None:
    await two_lives(lambda: open_hdfs(url, {}), url)


async def test_on_a_file_system_of_fsspec(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/new/run"
    await two_lives(lambda: resolve(url), url)
    assert sorted(path.name for path in (tmp_path / "new" / "run").iterdir()) == ["run.json", step_name(20)]


async def save(backend: Backend, step: int, last: str = "metadata.arrow") -> None:
    for name in ("model/00000-1.safetensors", "receipts/00000-1.arrow", last):
        await backend.put(f"{step_name(step)}/{name}", b"%d" % step)


async def two_lives(opened: Callable[[], Backend], url: str) -> None:
    """Begin a run in a place that does not exist yet, die within a deletion, and go on in another process."""
    backend = opened()
    first = Folder(backend, url)
    assert await first.steps() == []
    assert (await first.take("pretrain")).total_lives == 1
    for step in (10, 20, 30):
        await save(backend, step)
        await first.change(lambda ledger, step=step: ledger.with_checkpoint(step, 1.0, {}))  # type: ignore[misc]  # mypy knows no default here
    await save(backend, 15, last="half")
    await first.remove(10)
    assert await first.steps() == [30, 20, 15]
    await backend.delete([f"{step_name(30)}/{name}" for name in ("metadata.arrow", "receipts/00000-1.arrow")])

    second = Folder(opened(), url)
    ledger = await second.take("pretrain")
    assert ledger.failures == 1
    assert [entry.step for entry in ledger.entries] == [20, 30], "folders of entries are not asked for commit objects"
    with pytest.raises(RunTakenError, match="another job took the folder"):
        await first.change(lambda ledger: ledger.without(20))
    await second.remove(30)
    assert await second.leftovers({15}) == []
    assert await second.leftovers(set()) == [15]
    await second.remove(15)
    assert await second.steps() == [20]
    assert [info.key.partition("/")[0] for info in await backend.list()] == ["run.json", *[step_name(20)] * 3]
    await second.aclose()
    await first.aclose()
