"""The S3 backend over Ceph RGW, which knows no checksums, and compares ETags in a way of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers.rgw import rgw_server
from servers.s3 import S3Server
from test_s3 import QUICK, TestOnMoto, parts_of, read, write

from bcp.errors import StorageError
from bcp.protocols import Backend

pytestmark = [pytest.mark.rgw, pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rgw() -> Iterator[S3Server]:
    with rgw_server() as running:
        yield running


class TestOnRgw(TestOnMoto):
    many, page = 1200, 1000
    pytestmark = [pytest.mark.rgw, pytest.mark.anyio]  # noqa: RUF012 -- as pytest wants it

    @pytest.fixture
    def backend(self, rgw: S3Server) -> Backend:
        return self.opened(rgw, rgw.url, QUICK)


del TestOnMoto  # which would be collected here, too


async def test_checksums_are_left_out(rgw: S3Server) -> None:
    backend = rgw.backend(rgw.place(), QUICK)
    parts = [*parts_of(2), b"the rest"]
    await write(backend, "a", parts)
    assert not backend.store.checksums
    assert await read(backend, "a", sum(map(len, parts))) == b"".join(parts)


async def test_a_wrong_secret(rgw: S3Server) -> None:
    backend = rgw.backend(rgw.place(), QUICK, secret="wrong-secret-0123456789")  # noqa: S106 -- a wrong one
    with pytest.raises(StorageError, match=r"403 SignatureDoesNotMatch.*check the credentials") as caught:
        await backend.put("a", b"")
    assert "wrong-secret" not in str(caught.value)
