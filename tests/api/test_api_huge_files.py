"""A small file of a checkpoint that has become huge: it is refused by its size, and the step before it counts."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bcp
from bcp.backends import LocalBackend
from bcp.backends.hdfs.store import HdfsStore
from bcp.backends.objects import ObjectBackend
from bcp.protocols import Buffer

HUGE = 40 << 30  # a sparse file takes no space on disk
SAYS = rf"has {HUGE} bytes, and {1 << 30} is the most"


def run_of_three(folder: Path) -> dict[str, Any]:
    states = {"model": {"w": torch.zeros(4)}}
    with bcp.Run(folder, states, save=1) as run:
        run.resume()
        for step in (1, 2, 3):
            states["model"]["w"].fill_(step)
            pending = run.maybe_save(step)
            assert pending is not None
            pending.wait()
    return states


def grow(folder: Path, name: str) -> None:
    (file,) = folder.glob(name)
    os.truncate(file, HUGE)


@pytest.mark.parametrize("url", ["{}", "local://{}"], ids=["directory", "fsspec"])
@pytest.mark.parametrize("name", ["metadata.arrow", "receipts/*"])
def test_a_huge_file_is_refused_and_an_older_step_counts(tmp_path: Path, name: str, url: str) -> None:
    states = run_of_three(tmp_path)
    grow(tmp_path / "step-00000003", name)
    place = url.format(tmp_path)
    with pytest.raises(bcp.CorruptError, match=SAYS) as caught:
        bcp.load(f"{place}/step-00000003", states)
    assert name.rstrip("*") in str(caught.value)
    assert bcp.latest(place) == f"{place}/step-00000003"  # committed, as every other step with a damaged file
    with bcp.Run(place, states, save=1) as run:
        assert run.resume() == 2
        assert states["model"]["w"].tolist() == [2.0] * 4
        states["model"]["w"].fill_(30.0)
        pending = run.maybe_save(3)
        assert pending is not None
        pending.wait()
    bcp.load(f"{place}/step-00000003", {"model": {"w": (w := torch.zeros(4))}})
    assert w.tolist() == [30.0] * 4


def test_a_save_replaces_a_checkpoint_with_huge_metadata(tmp_path: Path) -> None:
    states = {"model": {"w": torch.ones(4)}}
    bcp.save(tmp_path, states)
    grow(tmp_path, "metadata.arrow")
    with pytest.raises(bcp.ExistsError):
        bcp.save(tmp_path, states)
    bcp.save(tmp_path, states, overwrite=True)
    bcp.load(tmp_path, states)
    assert len(list((tmp_path / "receipts").iterdir())) == 1


def test_of_a_huge_ledger_the_head_is_kept(tmp_path: Path) -> None:
    states = run_of_three(tmp_path)
    ledger = (tmp_path / "run.json").read_bytes()
    grow(tmp_path, "run.json")
    assert bcp.latest(tmp_path) == f"{tmp_path}/step-00000003"
    with bcp.Run(tmp_path, states, save=1) as run:
        assert run.resume() == 3
    assert len(json.loads((tmp_path / "run.json").read_bytes())["checkpoints"]) == 3
    (copy,) = tmp_path.glob("run.json.broken-*")
    assert copy.read_bytes() == ledger.ljust((16 << 20) + 1, b"\0")


def test_a_file_that_memory_does_not_suffice_for_is_named(tmp_path: Path) -> None:
    class Full(LocalBackend):
        async def get(self, key: str) -> Buffer:
            raise MemoryError(key)

    states = {"model": {"w": torch.ones(4)}}
    bcp.save(tmp_path, states)
    with pytest.raises(bcp.CorruptError, match=r"metadata\.arrow.*does not fit into the memory"):
        bcp.load(Full(tmp_path), states)


class _Huge(BaseHTTPRequestHandler):
    """Answers a GET as a store that holds a huge object, and sends a few bytes of it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2" if "storageLayout" in self.path else str(HUGE))
        self.send_header("ETag", '"1"')
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(b"{}")
        self.wfile.flush()
        self.close_connection = "storageLayout" not in self.path

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Huge) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_size_that_an_object_store_tells_counts(endpoint: str) -> None:
    gcs = {"token": "anon", "endpoint_url": endpoint}
    s3 = {"key": "key", "secret": "secret", "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    for url, options in (("gs://bucket/ckpt", gcs), ("s3://bucket/ckpt", s3)):
        with pytest.raises(bcp.CorruptError, match=SAYS) as caught:
            bcp.load(url, {"model": {}}, options=bcp.LoadOptions(storage_options=options))
        assert "metadata.arrow" in str(caught.value)


@pytest.mark.anyio
async def test_the_size_that_a_namenode_tells_counts() -> None:
    class Hdfs:
        cluster = SimpleNamespace(url="hdfs://namenode")

        async def open(self, _: str) -> object:
            return SimpleNamespace(state=SimpleNamespace(nbytes=HUGE, version="1"))

    backend = ObjectBackend(HdfsStore(Hdfs(), "/ckpt"), bcp.RetryPolicy())  # type: ignore[arg-type]  # only what is read
    with pytest.raises(bcp.CorruptError, match=SAYS):
        await backend.get("metadata.arrow")
