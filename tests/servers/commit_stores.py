"""The stores of ``benchmarks.commit_table``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from servers.answers import answer_front
from servers.cell_files import Files
from servers.cell_fsspec import Fsspec
from servers.cell_hdfs import HdfsServers
from servers.cell_http import S3, Gcs
from servers.gcs import GcsServer
from servers.hdfs import MiniHdfs
from servers.nfs import Mount
from servers.s3 import moto_server

from benchmarks.commit_table.trial import Store


@contextmanager
def gcs() -> Iterator[Store]:
    with GcsServer() as server, answer_front(server.url, Gcs.kind_of, Gcs.refusal) as front:
        yield Gcs(server, front)


@contextmanager
def s3() -> Iterator[Store]:
    with moto_server() as server, answer_front(server.url, S3.kind_of, S3.refusal) as front:
        yield S3(server, front)


@contextmanager
def hdfs() -> Iterator[Store]:
    with TemporaryDirectory(prefix="bcp-cells-") as folder, MiniHdfs(Path(folder)) as servers:
        yield HdfsServers(servers.url)


@contextmanager
def files() -> Iterator[Store]:
    with TemporaryDirectory(prefix="bcp-cells-") as folder, Mount(Path(folder, "server"), Path(folder, "a")) as mount:
        yield Files(mount)


@contextmanager
def other() -> Iterator[Store]:
    yield Fsspec()


STORES = {"GCS": gcs, "S3": s3, "HDFS": hdfs, "shared files": files, "fsspec": other}
