"""Jobs of torchrun's on real servers: four ranks are killed at any moment of a save, and two go on.

What is left is asked of the servers themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen
from uuid import uuid4

import pytest
from left_over import assert_nothing_left
from remote import assert_survives_kills
from servers.gcs import BUCKET
from servers.hdfs import MiniHdfs
from servers.rgw import rgw_server
from servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server, moto_server

if TYPE_CHECKING:
    from servers.gcs import GcsServer

pytest_plugins = ["servers.gcs_fixtures"]
pytestmark = [pytest.mark.dist, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    with MiniHdfs(tmp_path_factory.mktemp("hdfs")) as servers:
        yield servers


@pytest.mark.long
@pytest.mark.kills
def test_gcs(gcs_server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.url)
    root, options = uuid4().hex, {"token": "anon"}
    assert_survives_kills(f"gs://{BUCKET}/{root}", tmp_path, options)
    names = [name.removeprefix(f"{root}/") for name in gcs_server.names(f"{root}/")]
    assert_nothing_left(f"gs://{BUCKET}/{root}", names, options)


def on_s3(server: S3Server, marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    url = server.place()
    assert_survives_kills(url, marks)
    root = url.removeprefix("s3://").partition("/")[2]
    assert_nothing_left(url, [name.removeprefix(f"{root}/") for name in server.names(url)])


@pytest.mark.long
@pytest.mark.kills
def test_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto_server() as server:
        on_s3(server, tmp_path, monkeypatch)


@pytest.mark.rgw
def test_rgw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rgw_server() as server:
        on_s3(server, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.kills
def test_hdfs(hdfs: MiniHdfs, tmp_path: Path) -> None:
    root = f"/runs/{uuid4().hex}"
    assert_survives_kills(f"{hdfs.url}{root}", tmp_path)
    assert_nothing_left(f"{hdfs.url}{root}", files(hdfs, root))


@pytest.mark.long
@pytest.mark.kills
def test_a_file_system_of_fsspec(hdfs: MiniHdfs, tmp_path: Path) -> None:
    """fsspec's own client of WebHDFS, through the generic adapter."""
    root, options = f"/runs/{uuid4().hex}", {"user": "root"}
    assert_survives_kills(f"webhdfs://{hdfs.web}{root}", tmp_path, options)
    assert_nothing_left(f"webhdfs://{hdfs.web}{root}", files(hdfs, root), options)


def files(hdfs: MiniHdfs, root: str, folder: str = "") -> list[str]:
    """List all files below a directory, as the NameNode does."""
    found = []
    with urlopen(f"http://{hdfs.web}/webhdfs/v1{root}/{folder}?op=LISTSTATUS") as answer:
        entries = json.load(answer)["FileStatuses"]["FileStatus"]
    for entry in entries:
        name = f"{folder}{entry['pathSuffix']}"
        found += files(hdfs, root, f"{name}/") if entry["type"] == "DIRECTORY" else [name]
    return found
