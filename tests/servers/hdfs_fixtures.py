"""Fixtures of HDFS; a test module names this one in ``pytest_plugins``. All modules of a process share the servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from servers.hdfs import MiniHdfs

_roots = itertools.count()


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    with MiniHdfs(tmp_path_factory.mktemp("hdfs")) as servers:
        yield servers


@pytest.fixture
def url(hdfs: MiniHdfs) -> str:
    return f"{hdfs.url}/test/{next(_roots)}"


@pytest.fixture
def mended(hdfs: MiniHdfs) -> Iterator[MiniHdfs]:
    """The servers, which are as they were after the test."""
    yield hdfs
    for command in ("start-namenode 0", "start-datanode 0", "start-datanode 1", "safemode-leave", "await 0"):
        hdfs.command(command)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniHdfs]:
    with MiniHdfs(tmp_path_factory.mktemp("pair"), pair=True) as servers:
        yield servers
