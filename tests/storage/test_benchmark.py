"""The storage benchmark's counting servers, with the clients that it measures on them."""

from __future__ import annotations

import socket
from urllib.request import Request, urlopen

import pytest

from benchmarks.figures import Figures
from benchmarks.storage.__main__ import Storage, gcs, measure, s3
from benchmarks.storage.counting import Stored
from benchmarks.storage.counting_gcs import CountingGcs
from benchmarks.storage.payload import MIB, filled, payload_crc
from benchmarks.storage.section import Way, check_written

NBYTES = 65 * MIB  # more than two parts of bcp and one chunk of gcsfs
WAY = Way("write", "a client", "a way")


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(Storage("GCS", "bcp gs://", ["gcsfs"], ["gcsfs, tuned"], gcs), id="gcs", marks=pytest.mark.long),
        pytest.param(Storage("S3", "bcp s3://", [], [], s3), id="s3"),
    ],
)
def test_a_small_run(storage: Storage) -> None:
    found = measure(storage, NBYTES, 1, Figures())  # raises if anything else is written or read than the payload
    clients = {storage.ours, *storage.plain}
    assert {(way.kind, way.client) for way in found.taken} >= {
        (kind, one) for kind in ("write", "read") for one in clients
    }


def test_data_is_counted_and_answered_with_its_checksum() -> None:
    server = CountingGcs(MIB)
    url = f"{server.url}/upload/storage/v1/b/bucket/o?uploadType=media&name=object"
    data = bytes(filled(MIB))
    for is_checking in (True, False, False):
        server.take_stock(is_checking=is_checking)
        with urlopen(Request(url, data, method="POST")) as response:  # noqa: S310 -- our own server
            assert response.status == 200
        assert server.take_stock(is_checking=False) == (MIB, {"object": Stored(MIB, payload_crc(MIB))})


def test_a_client_that_hangs_up_is_not_counted() -> None:
    server = CountingGcs(MIB)
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        head = "POST /upload/storage/v1/b/bucket/o?uploadType=media&name=x HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"
        client.sendall(head.encode() + bytes(500))
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    assert server.take_stock(is_checking=True) == (0, {})


@pytest.mark.parametrize(
    ("counted", "objects"),
    [
        (MIB - 1, {"object": Stored(MIB, payload_crc(MIB))}),
        (MIB, {"object": Stored(MIB - 1, payload_crc(MIB))}),
        (MIB, {"object": Stored(MIB, payload_crc(MIB) ^ 1)}),
        (MIB, {"object": Stored(MIB, payload_crc(MIB)), "left": Stored(1, 0)}),
        (MIB, {}),
    ],
)
def test_a_write_that_was_none_is_refused(counted: int, objects: dict[str, Stored]) -> None:
    check_written(WAY, "object", MIB, MIB, {"object": Stored(MIB, payload_crc(MIB))})
    with pytest.raises(SystemExit):
        check_written(WAY, "object", MIB, counted, objects)
