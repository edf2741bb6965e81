"""The blocks of docs/storage.md that need a server, each on a real one, with settings by environment variables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from servers.gcs import GcsServer
from servers.hdfs import MiniHdfs
from servers.s3 import ACCESS_KEY, SECRET_KEY, moto_server

import bcp

PAGE = Path(__file__).parents[2] / "docs" / "storage.md"
BLOCK = re.compile(r"^```python (gs|s3|hdfs)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BUCKET = "my-bucket"
NAMENODE = "hdfs://namenode:8020"


@contextmanager
def gs(_: Path, environ: pytest.MonkeyPatch) -> Iterator[str]:
    with GcsServer() as server:
        server.post("/storage/v1/b?project=test", {"name": BUCKET})
        environ.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield f"gs://{BUCKET}"


@contextmanager
def s3(_: Path, environ: pytest.MonkeyPatch) -> Iterator[str]:
    with moto_server() as server:
        server.bucket(BUCKET)
        environ.setenv("AWS_ENDPOINT_URL", server.url)
        environ.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        environ.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        yield f"s3://{BUCKET}"


@contextmanager
def hdfs(folder: Path, _: pytest.MonkeyPatch) -> Iterator[str]:
    with MiniHdfs(folder) as server:
        yield server.url


SERVERS = {"gs": (gs, f"gs://{BUCKET}"), "s3": (s3, f"s3://{BUCKET}"), "hdfs": (hdfs, NAMENODE)}


@pytest.mark.parametrize("name", SERVERS)
def test_the_blocks_of_a_server_run_on_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    found = [match for match in BLOCK.finditer(text) if match[1] == name]
    assert found
    start, written = SERVERS[name]
    with start(tmp_path, monkeypatch) as url:
        weights = torch.arange(6.0)
        states = {"model": {"weights": weights.clone()}}
        namespace = {"bcp": bcp, "states": states}
        for match in found:
            source = "\n" * text.count("\n", 0, match.start(2)) + match[2].replace(written, url)
            exec(compile(source, PAGE, "exec"), namespace)  # noqa: S102 -- our own page
        states["model"]["weights"].zero_()
        path = re.search(rf"{written}/[\w/-]+", found[0][2])
        assert path is not None
        bcp.load(path[0].replace(written, url), states)
        assert torch.equal(states["model"]["weights"], weights)
