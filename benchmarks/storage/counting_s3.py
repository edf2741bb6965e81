"""The REST API of S3, as far as bcp, s3fs and obstore use it to write and read."""

from __future__ import annotations

import hashlib
import re

from bcp.backends.objects.parts import combined, encoded
from benchmarks.storage.counting import PAYLOAD, Client, CountingServer, Request, Stored

__all__ = ["CountingS3"]

_XML = "<?xml version='1.0' encoding='UTF-8'?>"
_DATE = "Mon, 23 Nov 2026 10:00:00 GMT"
_CRC = "x-amz-checksum-crc32c"


class CountingS3(CountingServer):
    """Single and multipart uploads with CRC-32Cs as AWS checks them, delete, metadata, ranged reads."""

    _parts: dict[str, dict[int, Stored]]

    def __init__(self, nbytes: int) -> None:
        self._parts = {}
        super().__init__(nbytes)

    def handle(self, client: Client, request: Request) -> None:
        """Answer a request."""
        name = request.path.split("/", 2)[2]
        if request.method == "PUT":
            self._put(client, request, name)
            return
        body = client.read(request.nbytes)
        if request.method == "POST" and "uploads" in request.query:
            self._begin(client, request, name)
        elif request.method == "POST" and "uploadId" in request.query:
            self._complete(client, request, name, body)
        elif request.method == "GET" and name.endswith(PAYLOAD):
            client.send_payload(request, {"ETag": _etag(PAYLOAD), "Last-Modified": _DATE})
        elif request.method == "HEAD" and name.endswith(PAYLOAD):
            client.answer_head(self.nbytes, {"ETag": _etag(PAYLOAD), "Last-Modified": _DATE})
        elif request.method == "DELETE":
            client.answer("204 No Content")
        else:
            client.answer("404 Not Found", f"{_XML}<Error><Code>NoSuchKey</Code></Error>".encode())

    def _put(self, client: Client, request: Request, name: str) -> None:
        """Take an object or a part; refuse data whose CRC-32C is not the one that was sent along."""
        number = request.query.get("partNumber")
        place = name if number is None else f"{name} {number}"
        stored = Stored(request.nbytes, client.receive(request.nbytes, place))
        said = request.headers.get(_CRC)
        if said not in (None, encoded(stored.crc)):
            client.answer("400 Bad Request", f"{_XML}<Error><Code>BadDigest</Code></Error>".encode())
            return
        if number is None:
            self.objects[name] = stored
        else:
            self._parts.setdefault(request.query["uploadId"], {})[int(number)] = stored
        headers = {} if said is None else {_CRC: said}
        client.answer("200 OK", headers={"ETag": _etag(place), **headers})

    def _begin(self, client: Client, request: Request, name: str) -> None:
        upload = hashlib.sha256(name.encode()).hexdigest()
        self._parts[upload] = {}
        headers = {}
        if request.headers.get("x-amz-checksum-algorithm") == "CRC32C":
            headers = {"x-amz-checksum-algorithm": "CRC32C", "x-amz-checksum-type": "FULL_OBJECT"}
        text = f"<UploadId>{upload}</UploadId>"
        bucket = request.path.split("/", 2)[1]
        inside = f"<Bucket>{bucket}</Bucket><Key>{name}</Key>{text}"
        body = f"{_XML}<InitiateMultipartUploadResult>{inside}</InitiateMultipartUploadResult>"
        client.answer("200 OK", body.encode(), {"Content-Type": "application/xml", **headers})

    def _complete(self, client: Client, request: Request, name: str, body: bytes) -> None:
        """Put parts together; refuse them if they have another CRC-32C than the one that was sent along."""
        numbers = sorted(map(int, re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)))
        parts = self._parts.pop(request.query["uploadId"])
        pieces = [parts[number] for number in numbers]
        crc = combined((part.crc, part.nbytes) for part in pieces)
        if request.headers.get(_CRC) not in (None, encoded(crc)):
            client.answer("400 Bad Request", f"{_XML}<Error><Code>BadDigest</Code></Error>".encode())
            return
        self.objects[name] = Stored(sum(part.nbytes for part in pieces), crc)
        digests = b"".join(_digest(f"{name} {number}") for number in numbers)
        etag = f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(numbers)}"'
        inside = f"<Key>{name}</Key><ETag>{etag}</ETag><ChecksumCRC32C>{encoded(crc)}</ChecksumCRC32C>"
        text = f"{_XML}<CompleteMultipartUploadResult>{inside}</CompleteMultipartUploadResult>"
        client.answer("200 OK", text.encode(), {"Content-Type": "application/xml"})


def _digest(place: str) -> bytes:
    return hashlib.md5(place.encode(), usedforsecurity=False).digest()


def _etag(place: str) -> str:
    return f'"{_digest(place).hex()}"'
