"""fake-gcs-server and its front, as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode
from urllib.request import Request, urlopen

BUCKET = "bcp-test"


class GcsServer:
    """Both servers, from entering to leaving the context. They end with this process too, however it ends.

    Attributes:
        url: of the front.
        direct: of fake-gcs-server itself, which is faster and ignores preconditions.
    """

    def __enter__(self) -> Self:
        script = Path(__file__).with_name("gcs_front.py")
        self.process = subprocess.Popen(  # noqa: S603 -- our own script
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the front of fake-gcs-server does not start; its error is on stderr"
        urls = json.loads(line)
        self.url, self.direct = urls["url"], urls["direct"]
        for bucket in (BUCKET, "zonal-bucket"):
            self.post("/storage/v1/b?project=test", {"name": bucket})
        self.log()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)

    def post(self, path: str, content: object) -> bytes:
        body, headers = json.dumps(content).encode(), {"Content-Type": "application/json"}
        with urlopen(Request(self.url + path, body, headers)) as response:  # noqa: S310 -- our own server
            return bytes(response.read())

    def faults(self, *faults: dict[str, Any], seed: int | None = None) -> None:
        """Let the front make these faults, and no others; ``seed`` is that of their rates."""
        self.post("/__faults__", {"faults": faults, "seed": seed})

    def hits(self) -> list[int]:
        """Return how often each fault was made."""
        with urlopen(f"{self.url}/__faults__") as response:  # noqa: S310 -- our own server
            return [fault.get("hits", 0) for fault in json.load(response)]

    def names(self, prefix: str) -> list[str]:
        """Return the names of all objects with a prefix, as fake-gcs-server itself lists them."""
        found, token = [], ""
        while True:
            query = urlencode({"prefix": prefix, "pageToken": token})
            with urlopen(f"{self.direct}/storage/v1/b/{BUCKET}/o?{query}") as response:  # noqa: S310 -- our own server
                page = json.load(response)
            found += [item["name"] for item in page.get("items", ())]
            if not (token := page.get("nextPageToken", "")):
                return found

    def log(self) -> list[dict[str, str]]:
        """Return the requests since the last call."""
        log: list[dict[str, str]] = json.loads(self.post("/__log__", None))
        return log

    def requests(self) -> list[str]:
        """Return method and URL of the requests since the last call."""
        return [request["key"] for request in self.log()]
