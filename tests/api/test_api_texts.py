"""Texts of errors, events, logs and bars: no secret of a URL, and no character that commands a terminal."""

from __future__ import annotations

import io
import json
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from logs import captured_logs

import bcp
import bcp.backends
from bcp.__main__ import main

ESCAPE = "\x1b[31m\x9b2J"
ONCE = bcp.RetryPolicy(allowance=0)
SECRETS = ("hunter2", "5ec4e7", "5ignature")


def states() -> dict[str, Any]:
    return {"model": {"w": torch.ones(3)}}


def texts_of(error: BaseException | None) -> str:
    """Return all that Python prints of an error, its causes and its notes."""
    return "".join(traceback.format_exception(error))


def refuse_secrets(*texts: object) -> None:
    for text in texts:
        assert not [secret for secret in SECRETS if secret in str(text)], text


class _Forbidding(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(403)

    do_HEAD = do_PUT = do_POST = do_GET  # noqa: N815 -- the base class's names

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def forbidding_server() -> Iterator[str]:
    """Run a server that refuses every request; yields its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Forbidding) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("query", ["sig=5ec4e7", "X-Amz-Signature=5ec4e7&X-Amz-Date=1"])
def test_a_signed_url_that_is_refused_is_shown_without_its_query(query: str) -> None:
    events: list[Any] = []
    with forbidding_server() as address, captured_logs() as lines:
        url = f"http://user:hunter2@{address}/run?{query}"
        options: dict[str, Any] = {"retries": ONCE, "observe": events.append, "timeout": 30}
        for call in (
            lambda: bcp.load(url, states(), options=bcp.LoadOptions(**options)),
            lambda: bcp.save(url, states(), options=bcp.SaveOptions(**options)),
            lambda: bcp.report(url, retries=ONCE),
            lambda: bcp.latest(url),
        ):
            with pytest.raises(bcp.BcpError) as caught:
                call()
            assert address in str(caught.value)
            refuse_secrets(texts_of(caught.value))
    assert events
    refuse_secrets(*events, *lines)


@pytest.mark.parametrize(
    "url",
    [
        "vault://user:hunter2@host/run?sig=5ec4e7",
        "vault://host/run?a=b#access_token=5ec4e7",
        "s3://bucket/run?X-Amz-Signature=5ec4e7",
        "https://hunter2@host/run",
    ],
)
def test_an_unknown_url_is_shown_without_secrets(url: str, tmp_path: Path) -> None:
    words = bcp.backends.shown(url)
    refuse_secrets(words)
    assert words.startswith(url.partition(":")[0])
    with pytest.raises(bcp.InputError) as caught:
        bcp.save(tmp_path, states(), options=bcp.SaveOptions(storage_options={"a": 1, url: 2}))
    refuse_secrets(texts_of(caught.value))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://AKID:5ec4e7/hunter2@bucket/x", "s3://AKID:***@bucket/x"),
        ("s3://AKID:5/hunter2@bucket/x", "s3://AKID:***@bucket/x"),
        ("nosuch://user:5ec4e7/hunter2@host/x", "nosuch://user:***@host/x"),
        ("nosuch://user:hunter2@5ec4e7/hunter2@host/x", "nosuch://user:***@host/x"),
        ("https://user:5ec4e7?/hunter2@host/x?sig=5ec4e7", "https://user:***@host/x?***"),
        ("nosuch::s3://AKID:5ec4e7/hunter2@bucket", "nosuch::s3://AKID:***@bucket"),
    ],
)
def test_a_password_may_have_a_slash(url: str, words: str) -> None:
    assert bcp.backends.shown(url) == words
    with pytest.raises(bcp.BcpError) as caught:
        bcp.latest(url)
    refuse_secrets(caught.value)


@pytest.mark.parametrize("url", ["hdfs://user:5ec4e7/hunter2@host/x", "gs:///x?token=hunter2"])
def test_a_refused_url_is_shown_without_a_password(url: str) -> None:
    with pytest.raises(bcp.InputError) as caught:
        bcp.save(url, states())
    refuse_secrets(texts_of(caught.value))


@pytest.mark.parametrize(
    "path",
    [
        "s3://bucket/a@b:c/x",
        "hdfs://namenode:8020/a@b/x",
        "http://[::1]:8080/a@b",
        "file:///a:b/c@d",
        "/a:b/c@d",
        "s3://bucket/a:b@c",
    ],
)
def test_a_path_with_an_at_sign_is_shown(path: str) -> None:
    assert bcp.backends.shown(path) == path


def test_a_key_of_a_store_may_have_a_question_mark() -> None:
    assert bcp.backends.shown("s3://bucket/what?/run#1") == "s3://bucket/what?/run#1"
    assert bcp.backends.shown("/local/what?sig=no#1") == "/local/what?sig=no#1"


class _Refused:
    """A write whose error quotes a signed URL, as those of clients of HTTP do."""

    def __init__(self, key: str) -> None:
        self._key = key

    async def __aenter__(self) -> Any:
        raise bcp.StorageError(f"PUT https://user:hunter2@host/{self._key}?sig=5ignature: 403") from OSError(
            f"403, message='no', url='https://host/{self._key}?sig=5ec4e7'"
        )

    async def __aexit__(self, *_: object) -> None:
        pass


def test_recordings_and_logs_of_a_failure_have_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, backend = io.StringIO(), bcp.backends.MemoryBackend("quoting")
    monkeypatch.setattr(backend, "open_write", lambda key, _nbytes=None: _Refused(key))
    bcp.telemetry.configure(logs="json", stream=stream)
    try:
        with pytest.raises(bcp.BcpError, match=r"https://user:\*\*\*@host/model/\S+\?\*\*\* 403"):
            bcp.save(backend, states())
    finally:
        bcp.telemetry.configure()
    report = bcp.report(backend)
    assert report.recordings[0].failures
    refuse_secrets(report.text(), json.dumps(report.data()), stream.getvalue())


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    return tmp_path / f"run{ESCAPE}"


def test_console_lines_and_errors_have_escapes_and_json_is_exact(strange: Path) -> None:
    streams = {}
    for form in ("console", "json"):
        streams[form] = io.StringIO()
        bcp.telemetry.configure(logs=form, stream=streams[form], run=f"r{ESCAPE}")
        try:
            bcp.save(strange / form, states())
            with pytest.raises(bcp.ShapeMismatchError):
                bcp.load(strange / form, {"model": {"w": torch.ones(4)}})
        finally:
            bcp.telemetry.configure()
    console = streams["console"].getvalue()
    assert "\x1b" not in console
    assert "\x9b" not in console
    assert console.count(r"run\x1b[31m\x9b2J") >= 2
    saved, failed = map(json.loads, streams["json"].getvalue().splitlines())
    assert saved["run"] == failed["run"] == f"r{ESCAPE}"
    assert saved["path"] == failed["path"] == str(strange / "json")


def test_errors_have_escapes(strange: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(bcp.NotACheckpointError, match=r"run\\x1b\[31m\\x9b2J"):
        bcp.load(strange, states())
    assert main(["report", str(strange)]) != 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "\x9b" not in printed.out + printed.err


def test_a_bar_has_escapes(strange: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bcp.save(strange, states(), progress=True)
    line = capsys.readouterr().err
    assert "\x1b" not in line
    assert r"run\x1b[31m\x9b2J" in line
