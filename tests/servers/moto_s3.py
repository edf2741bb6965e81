"""A process with moto's S3, which is started by :mod:`servers.s3`.

Around moto is what a real server does and moto does not: each request is one step, checksums are compared, and unknown
access keys are refused.
"""

from __future__ import annotations

import base64
import io
import sys
import threading
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from urllib.parse import parse_qs

import google_crc32c

crc32c = ModuleType("crc32c")  # moto wants that package, and computes a CRC32 in place of a CRC32C without it
crc32c.__spec__ = ModuleSpec("crc32c", None)
crc32c.crc32c = google_crc32c.value  # type: ignore[attr-defined]
sys.modules["crc32c"] = crc32c

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

Start = Callable[..., Any]
ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>{}</Message><Resource>/</Resource></Error>"


class Strict:
    """A WSGI application around moto's."""

    def __init__(self, access_key: str) -> None:
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.access_key = access_key
        self.lock = threading.Lock()
        self.parts: dict[tuple[str, int], bytes] = {}

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        refusal = self.refusal(environ, body)
        if refusal is not None:
            status, code, message = refusal
            return self.refused(environ, start, status, code, message)

        def start_once(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start(status, [header for header in headers if header[0].lower() != "server"], *rest)

        answers: list[str] = []

        def start_later(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
            answers.append(status)
            environ["bcp.headers"] = headers

        try:
            with self.lock:
                answer = b"".join(self.moto(environ, start_later))
        except Exception:
            if "uploadId=" not in environ.get("QUERY_STRING", ""):
                raise
            return self.refused(environ, start, "404 Not Found", "NoSuchUpload", "The upload does not exist.")
        start_once(answers[-1], environ["bcp.headers"])
        return [answer]

    @staticmethod
    def refused(environ: dict[str, Any], start: Start, status: str, code: str, message: str) -> Iterable[bytes]:
        text = b"" if environ["REQUEST_METHOD"] == "HEAD" else ERROR.format(code, message).encode()
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [text]

    def refusal(self, environ: dict[str, Any], body: bytes) -> tuple[str, str, str] | None:
        """Return status, code and message for a request that a real server would refuse."""
        signed = environ.get("HTTP_AUTHORIZATION", "")
        if f"Credential={self.access_key}/" not in signed:
            return "403 Forbidden", "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist."
        if environ.get("HTTP_X_AMZ_CONTENT_SHA256") not in ("UNSIGNED-PAYLOAD", None):
            return "400 Bad Request", "XAmzContentSHA256Mismatch", "data was hashed to sign it"
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        upload = query.get("uploadId", [""])[0]
        stored = body
        if upload and environ["REQUEST_METHOD"] == "PUT":
            self.parts[upload, int(query["partNumber"][0])] = body
        elif upload and environ["REQUEST_METHOD"] == "POST":
            stored = b"".join(data for (name, _), data in sorted(self.parts.items()) if name == upload)
        given = environ.get("HTTP_X_AMZ_CHECKSUM_CRC32C")
        if given and given != base64.b64encode(google_crc32c.value(stored).to_bytes(4, "big")).decode():
            return "400 Bad Request", "BadDigest", "The CRC32C you specified did not match what we received."
        return None


class Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log(self, *_: Any) -> None:
        return


def main(access_key: str) -> None:
    server = make_server("127.0.0.1", 0, Strict(access_key), threaded=True, request_handler=Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the test process closes it or is gone


if __name__ == "__main__":
    main(sys.argv[1])
