"""Servers of S3 for tests, on loopback."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.session import get_session

from bcp.backends.objects import ObjectBackend, RetryPolicy
from bcp.backends.objects.s3 import open_s3

ACCESS_KEY = "AKIDBCPTESTACCESSKEY"
SECRET_KEY = "bcp/test+secret-0123456789"  # noqa: S105 -- of a server on loopback
_numbers = itertools.count(1)
_session = functools.cache(get_session)  # a new one reads botocore's files again, which takes 50 ms
_one_at_a_time = threading.Lock()


@dataclass
class S3Server:
    """A running server.

    Attributes:
        url: its endpoint.
    """

    url: str
    _bucket: str = ""

    @property
    def options(self) -> dict[str, Any]:
        return {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.url, "region": "us-east-1"}

    def place(self) -> str:
        """Return a URL where nothing is yet."""
        if not self._bucket:
            self._bucket = self.bucket()
        return f"s3://{self._bucket}/a root/{next(_numbers)}"

    def bucket(self, name: str = "") -> str:
        """Make a new bucket."""
        name = name or f"bucket-{os.getpid()}-{next(_numbers)}"
        store = self.backend(f"s3://{name}").store
        with ThreadPoolExecutor(1) as thread:  # this one may have a running event loop
            thread.submit(lambda: asyncio.run(store.call("create_bucket"))).result()
        return name

    def names(self, url: str) -> list[str]:
        """Return the keys below a URL, and ``upload of KEY`` for each open upload, as the server lists them."""
        bucket, _, root = url.removeprefix("s3://").partition("/")
        with _one_at_a_time:
            client = _session().create_client(
                "s3",
                region_name="us-east-1",
                endpoint_url=self.url,
                aws_access_key_id=ACCESS_KEY,
                aws_secret_access_key=SECRET_KEY,
                config=Config(s3={"payload_signing_enabled": False}),
            )
        with closing(client):
            pages = list(client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{root}/"))
            more = list(client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{root}/"))
        keys = [found["Key"] for page in pages for found in page.get("Contents", ())]
        return keys + [f"upload of {found['Key']}" for page in more for found in page.get("Uploads", ())]

    def backend(self, url: str, policy: RetryPolicy | None = None, **options: Any) -> Any:
        """Return a backend for a URL of this server."""
        backend = open_s3(url, {**self.options, **options}, policy)
        assert isinstance(backend, ObjectBackend)
        return backend


@contextmanager
def moto_server(environ: Mapping[str, str] | None = None) -> Iterator[S3Server]:
    """Run moto's server in a process of its own; it ends with this one, however that ends."""
    script = Path(__file__).with_name("moto_s3.py")
    process = subprocess.Popen(  # noqa: S603 -- our own script
        [sys.executable, str(script), ACCESS_KEY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environ or {})},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"moto's server did not start: exit code {process.wait(60)}; run {script} by hand")
        yield S3Server(f"http://127.0.0.1:{int(port)}")
    finally:
        process.stdin.close()
        process.stdout.close()
        process.kill()
        process.wait(60)
