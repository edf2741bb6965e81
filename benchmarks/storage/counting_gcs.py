"""The JSON API of Google Cloud Storage, as far as bcp and gcsfs use it to write and read."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any

from bcp.backends.objects.parts import combined, encoded
from benchmarks.storage.counting import PAYLOAD, Client, CountingServer, Request, Stored
from benchmarks.storage.payload import payload_crc

__all__ = ["CountingGcs"]

BUCKET = "bucket"
_OBJECTS = f"/storage/v1/b/{BUCKET}/o"
_UPLOAD_ID = re.compile(r"\.bcp-part-[0-9a-f]{16}-")
_HEAD_BYTES = 4096


class CountingGcs(CountingServer):
    """Media, multipart and resumable uploads, compose, delete, metadata, ranged reads."""

    _ids = count(1)
    _sessions: dict[str, str]

    def __init__(self, nbytes: int) -> None:
        self._sessions = {}
        super().__init__(nbytes)

    def handle(self, client: Client, request: Request) -> None:
        """Answer a request."""
        if request.path.startswith("/upload/"):
            self._upload(client, request)
            return
        body = client.read(request.nbytes)
        name = request.path.partition(f"{_OBJECTS}/")[2]
        if request.method == "GET" and name.endswith(PAYLOAD):
            if request.query.get("alt") == "media":
                client.send_payload(request, {"x-goog-generation": "1"})
            else:
                _describe(client, name, Stored(self.nbytes, payload_crc(self.nbytes)))
        elif request.method == "DELETE":
            self.objects.pop(name, None)
            client.answer("204 No Content")
        elif name.endswith("/compose"):
            self._compose(client, name.removesuffix("/compose"), json.loads(body))
        else:
            client.answer("404 Not Found", b'{"error": {"message": "Not Found"}}')

    def _compose(self, client: Client, name: str, fields: dict[str, Any]) -> None:
        sources = [self.objects[source["name"]] for source in fields["sourceObjects"]]
        crc = combined((source.crc, source.nbytes) for source in sources)
        self._store(client, name, Stored(sum(source.nbytes for source in sources), crc))

    def _upload(self, client: Client, request: Request) -> None:
        kind = request.query["uploadType"]
        if "upload_id" in request.query:
            self._resume(client, request)
        elif kind == "media":
            name = request.query["name"]
            self._store(client, name, Stored(request.nbytes, client.receive(request.nbytes, _place(name))))
        elif kind == "resumable":
            session = str(next(self._ids))
            self._sessions[session] = json.loads(client.read(request.nbytes))["name"]
            location = f"{self.url}{request.path}?uploadType=resumable&upload_id={session}"
            client.answer("200 OK", headers={"Location": location})
        else:
            self._multipart(client, request)

    def _multipart(self, client: Client, request: Request) -> None:
        """Take metadata and data in one body, as gcsfs writes it, with single line feeds."""
        boundary = re.search(r'boundary="?([^";]+)', request.headers["content-type"])
        assert boundary is not None  # noqa: S101 -- gcsfs sends it
        head = client.read(min(_HEAD_BYTES, request.nbytes))
        (name,) = re.findall(rb'"name": "([^"]+)"', head.split(b"\n\n")[1])
        begin = len(b"\n\n".join(head.split(b"\n\n")[:2])) + 2
        tail = len(f"\n--{boundary[1]}--")
        client.unread(head[begin:])
        crc = client.receive(request.nbytes - begin - tail, _place(name.decode()))
        client.read(tail)
        self._store(client, name.decode(), Stored(request.nbytes - begin - tail, crc))

    def _resume(self, client: Client, request: Request) -> None:
        """Take the next chunk of a resumable upload."""
        name = self._sessions[request.query["upload_id"]]
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", request.headers["content-range"])
        assert match is not None  # noqa: S101 -- gcsfs sends it
        first, last, whole = map(int, match.groups())
        before = self.objects.get(name, Stored(0, 0)) if first else Stored(0, 0)
        crc = client.receive(request.nbytes, f"{name} {first}")
        self.objects[name] = Stored(
            before.nbytes + request.nbytes, combined([(before.crc, before.nbytes), (crc, request.nbytes)])
        )
        if last + 1 < whole:
            client.answer("308 Resume Incomplete", headers={"Range": f"bytes=0-{last}"})
        else:
            _describe(client, name, self.objects[name])

    def _store(self, client: Client, name: str, stored: Stored) -> None:
        self.objects[name] = stored
        _describe(client, name, stored)


def _place(name: str) -> str:
    return _UPLOAD_ID.sub(".part-", name)


def _describe(client: Client, name: str, stored: Stored) -> None:
    fields = {
        "name": name, "bucket": BUCKET, "generation": "1", "size": str(stored.nbytes), "crc32c": encoded(stored.crc)
    }  # fmt: skip
    client.answer("200 OK", json.dumps(fields).encode(), {"Content-Type": "application/json"})
