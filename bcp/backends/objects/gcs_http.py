"""Requests to Google Cloud Storage's JSON API, over gcsfs's session and with its credentials.

gcsfs's ``_call`` is not used. It retries by itself, copies the bytes that it sends, and refreshes credentials on the
event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, cast
from urllib.parse import quote, urlencode
from weakref import finalize

import aiohttp
import anyio
from aiohttp.abc import AbstractStreamWriter
from gcsfs.core import GCSFileSystem
from google.auth.exceptions import TransportError
from requests.exceptions import ConnectionError as NoConnectionError
from yarl import URL

from bcp.backends.objects.session import PerLoop, drop_connection
from bcp.backends.objects.store import ConditionError, RequestError
from bcp.backends.small import check_small
from bcp.protocols import Version
from bcp.runtime.threads import in_thread

__all__ = ["Answer", "GcsHttp"]

MIB = 1 << 20
SLICE_BYTES = MIB // 2
"""Bytes that the socket receives in one call. asyncio copies the rest that the kernel does not take at once."""

HEADERS_SECONDS = 60.0
"""Lifetime of a request's headers with credentials. gcsfs refreshes credentials 300 s before they expire."""

LAYOUT_SECONDS = 5.0
_BUSY = frozenset({429, 503})
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_RATE_REASONS = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_METHODS = frozenset({"google_default", "cache", "cloud", "token", "anon", "browser"})
_SECRET = re.compile(r"((?:token|secret|assertion)=|bearer\s+)[^\s&'\")]+", re.IGNORECASE)
_CREDENTIALS = (
    "check the credentials: GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or "
    "storage_options={'token': ...}"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer to a request that it has carried out."""

    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the body's fields."""
        try:
            return cast("dict[str, Any]", json.loads(self.body or b"{}"))
        except ValueError as error:
            raise RequestError(f"an answer that is not JSON: {self.body[:100]!r}", transient=True) from error

    def generation(self) -> Version:
        """Return the generation of the object that was read."""
        try:
            return self.headers["x-goog-generation"]
        except KeyError:
            raise RequestError("an answer without the header x-goog-generation; does a proxy remove it?") from None


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Session:
    """gcsfs on one event loop."""

    system: Any
    client: aiohttp.ClientSession
    base: str
    params: dict[str, str]
    timeout: aiohttp.ClientTimeout
    headers: dict[str, str] = field(default_factory=dict, repr=False)
    until: float = 0.0

    def url(self, path: str, query: Mapping[str, str]) -> URL:
        """Return the URL of a quoted path."""
        pairs = urlencode({**self.params, **query}, quote_via=quote)
        return URL(f"{self.base}{path}?{pairs}" if pairs else f"{self.base}{path}", encoded=True)


class GcsHttp:
    """Makes single requests to one bucket. The shared layer makes failed ones again."""

    def __init__(self, bucket: str, options: Mapping[str, Any]) -> None:
        """Take the settings; the first request opens a session.

        Args:
            bucket: its name.
            options: of ``gcsfs.GCSFileSystem``.

        """
        self.bucket = bucket
        self._options = dict(options)
        self._secrets = set(_secret_texts(options.get("token")))
        self._sessions: PerLoop[_Session] = PerLoop(self._open, _close)

    def __repr__(self) -> str:
        return f"<GcsHttp of {self.bucket}>"

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        data: memoryview | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Make one request, and return the answer if the server has carried it out.

        Args:
            method: of HTTP.
            path: below the endpoint, quoted.
            query: parameters of the URL.
            data: bytes to send. The buffer is not used any more when this returns or raises.
            fields: sent as JSON instead.

        Raises:
            RequestError: the request failed.
            FileNotFoundError: the server says 404, and not that the bucket is absent.
            ConditionError: a precondition does not hold.

        """
        session = await self._sessions.here()
        return await self._call(session, method, path, query or {}, data, fields)

    async def _call(
        self,
        session: _Session,
        method: str,
        path: str,
        query: Mapping[str, str],
        data: memoryview | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Answer:
        headers = await self._headers(session)
        body = None if data is None else _Body(data)
        sent: _Body | bytes | None = body
        if fields is not None:
            sent, headers["Content-Type"] = json.dumps(fields).encode(), "application/json"
        url = session.url(path, query)
        try:
            with self._connection_errors():
                async with session.client.request(
                    method, url, data=sent, headers=headers, timeout=session.timeout, allow_redirects=False
                ) as response:
                    return await self._answer(session, response, body)
        except BaseException:
            _drop(body)
            raise

    async def _answer(self, session: _Session, response: aiohttp.ClientResponse, body: _Body | None) -> Answer:
        """Return the answer of a request that was carried out."""
        check_small(f"{self!r}: {response.url.path}", response.content_length or 0)
        answer = Answer(response.headers, await response.read())
        if response.status < 300:  # noqa: PLR2004 -- redirections are none
            return answer
        _drop(body)
        raise self._refused(session, response.status, answer)

    async def fill(self, path: str, query: Mapping[str, str], start: int, out: memoryview) -> tuple[int, Version]:
        """Read bytes from ``start`` on straight into ``out``.

        Returns:
            The number of bytes that were there, and the object's generation.

        Raises:
            RequestError: the request failed, or the connection ended early.
            FileNotFoundError: there is no such object.
            ConditionError: a precondition does not hold.

        """
        session = await self._sessions.here()
        headers = await self._headers(session)
        headers["Range"] = f"bytes={start}-{start + len(out) - 1}"
        with self._connection_errors():
            async with session.client.get(
                session.url(path, query), headers=headers, timeout=session.timeout, allow_redirects=False
            ) as response:
                answer = Answer(response.headers, b"")
                if response.status == 416:  # noqa: PLR2004 -- the object ends before the range
                    return 0, answer.generation()
                if response.status not in (200, 206):
                    raise self._refused(session, response.status, replace(answer, body=await response.read()))
                expected = _expected(response, start, len(out))
                filled = await _copy(response, out)
                if filled < expected:
                    raise RequestError(f"the connection ended after {filled} of {expected} bytes", transient=True)
                return filled, answer.generation()

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._sessions.aclose()

    # -- sessions and credentials -------------------------------------------------------------

    async def _open(self) -> _Session:
        """Open gcsfs's session. The constructor may ask a metadata server for credentials, so a thread runs it."""
        options = {**self._options, "asynchronous": True, "skip_instance_cache": True}
        system = await self._private("gcsfs did not start", partial(GCSFileSystem, **options))
        session = _Session(
            system=system,
            client=await _client(system),
            base=system._location.rstrip("/"),  # noqa: SLF001 -- the endpoint by option or environment
            params={name: str(value) for name, value in system._get_params({}).items()},  # noqa: SLF001 -- userProject
            timeout=_timeout(system.requests_timeout),
        )
        finalize(session, _abandon, session.client, asyncio.get_running_loop(), os.getpid())
        try:
            await self._refuse_zonal(session)
        except BaseException:
            await session.client.close()
            raise
        return session

    async def _refuse_zonal(self, session: _Session) -> None:
        """Refuse a Rapid bucket, whose objects only gRPC can write. Servers that do not say are taken as ordinary."""
        layout: dict[str, Any] = {}
        with anyio.move_on_after(LAYOUT_SECONDS):
            try:
                layout = (await self._call(session, "GET", f"{self.path}/storageLayout", {})).json()
            except (RequestError, FileNotFoundError, ConditionError):
                return
        if layout.get("locationType") == "zone":
            raise RequestError(
                f"{self.bucket!r} is a Rapid (zonal) bucket; its objects are written by gRPC appends, which this "
                "version of bcp does not make. Use a regional or multi-regional bucket"
            )

    async def _headers(self, session: _Session) -> dict[str, str]:
        """Return headers with credentials. A refresh blocks, so a thread makes it."""
        if time.monotonic() >= session.until:
            get = session.system._get_headers  # noqa: SLF001 -- adds the credentials, after a refresh if need be
            session.headers = await self._private("no credentials", get, None)
            session.until = time.monotonic() + HEADERS_SECONDS
            _, _, token = session.headers.get("Authorization", session.headers.get("authorization", "")).partition(" ")
            self._secrets |= {token} - {""}
        return {**session.headers, "Accept-Encoding": "identity"}

    async def _private(self, failure: str, function: Callable[..., Any], *args: object) -> Any:
        """Call gcsfs in a thread. Its errors may quote tokens, so they are shown in part and never chained."""
        try:
            return await in_thread(function, *args)
        except Exception as error:  # noqa: BLE001 -- whatever google-auth, requests and gcsfs raise
            transient = isinstance(error, (TransportError, NoConnectionError))
            text = self._shown(f"{failure}: {type(error).__name__}: {error}; {_CREDENTIALS}")
        raise RequestError(text, transient=transient, unreachable=transient)

    # -- errors -------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        """The bucket's path below the endpoint."""
        return f"/storage/v1/b/{quote(self.bucket, safe='')}"

    def no_bucket(self, error: Exception) -> RequestError:
        """Return the error of a bucket that is not there."""
        return RequestError(f"{error}; there is no bucket {self.bucket!r}: correct the URL, or create the bucket")

    def _shown(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return _SECRET.sub(r"\1***", text)

    def _refused(self, session: _Session, status: int, answer: Answer) -> Exception:
        """Return the error of an answer that is no success."""
        message, reasons = _words(answer.body)
        text = self._shown(f"{status} {message}")
        if status == 404:  # noqa: PLR2004 -- not found
            return self.no_bucket(RequestError(text)) if "bucket does not exist" in message else FileNotFoundError(text)
        if status == 412:  # noqa: PLR2004 -- precondition failed
            return ConditionError(text)
        if status in _TRANSIENT or reasons & _RATE_REASONS:
            busy = status in _BUSY or bool(reasons & _RATE_REASONS)
            return RequestError(text, transient=True, slow_down=busy, after=_retry_after(answer.headers))
        if status == 401:  # noqa: PLR2004 -- unauthorized
            session.until = 0.0
            text = f"{text}; {_CREDENTIALS}"
        if status == 403:  # noqa: PLR2004 -- forbidden
            text = f"{text}; {_CREDENTIALS}; they need the role Storage Object User on {self.bucket!r}"
        return RequestError(text)

    @contextmanager
    def _connection_errors(self) -> Iterator[None]:
        """Turn errors of the connection into the store's."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            final = isinstance(error, (aiohttp.ClientConnectorCertificateError, aiohttp.InvalidURL))
            unreachable = isinstance(error, aiohttp.ClientConnectorError)
            text = self._shown(f"{type(error).__name__}: {error}")
            made = RequestError(text, transient=not final, unreachable=unreachable)
            # A ClientResponseError has the request's headers in its arguments, and there the token.
            raise made from (None if isinstance(error, aiohttp.ClientResponseError) else error)


class _Body(aiohttp.Payload):
    """Sends a buffer by slices of it."""

    def __init__(self, data: memoryview) -> None:
        super().__init__(data, content_type="application/octet-stream")
        self._size = len(data)
        self._writer: AbstractStreamWriter | None = None

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write all of it. The first slice is small: aiohttp joins it with the headers."""
        self._writer = writer
        starts = [0, *range(4096, len(self._value), SLICE_BYTES)]
        for start, end in zip(starts, [*starts[1:], len(self._value)], strict=True):
            await writer.write(self._value[start:end])

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return it as text, as aiohttp's debugging aids do."""
        return bytes(self._value).decode(encoding, errors)

    def drop(self) -> None:
        """Abort the connection. An orderly close would first send the rest of the buffer that the transport has."""
        transport = getattr(self._writer, "transport", None)
        if transport is not None:
            drop_connection(transport)


def _drop(body: _Body | None) -> None:
    if body is not None:
        body.drop()


async def _client(system: Any) -> aiohttp.ClientSession:
    """Return a session over the connector of gcsfs's own, which has the user's settings and certificates.

    gcsfs's is detached from it. Its finalizer would close a session of one event loop on another.
    """
    own = await system._set_session()  # noqa: SLF001 -- there is no other way to the connector
    connector = own.connector
    own.detach()
    return aiohttp.ClientSession(**{**system.session_kwargs, "connector": connector})


async def _close(session: _Session) -> None:
    await session.client.close()


def _abandon(client: aiohttp.ClientSession, loop: asyncio.AbstractEventLoop, pid: int) -> None:
    """Close the connections of a session that is garbage, on its loop if that runs. A forked child closes none."""
    connector = client.connector
    if connector is None or connector.closed or os.getpid() != pid:
        return
    client.detach()
    if loop.is_running():
        loop.call_soon_threadsafe(connector._close)  # noqa: SLF001 -- as aiohttp's own finalizer
    else:
        connector._close()  # noqa: SLF001 -- as above


async def _copy(response: aiohttp.ClientResponse, out: memoryview) -> int:
    """Copy a body into a buffer, piece by piece as it arrives."""
    filled = 0
    while filled < len(out):
        piece, is_end_of_chunk = await response.content.readchunk()
        if not piece and not is_end_of_chunk:
            break
        taken = min(len(piece), len(out) - filled)
        out[filled : filled + taken] = piece[:taken]
        filled += taken
    return filled


def _expected(response: aiohttp.ClientResponse, start: int, wanted: int) -> int:
    """Return the number of wanted bytes that the body has; refuse a body that begins elsewhere."""
    if response.status == 200 and start == 0:  # noqa: PLR2004 -- the whole object
        return min(wanted, response.content_length or 0)
    match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != start:
        raise RequestError(f"the server sent another range than the one from byte {start} on")
    return min(wanted, int(match[2]) - start)


def _words(body: bytes) -> tuple[str, set[str]]:
    """Return message and reasons of an error."""
    text = body.decode(errors="replace").strip()
    try:
        error = json.loads(text)["error"]
        reasons = {str(entry.get("reason")) for entry in error.get("errors", ())}
        return str(error["message"]), reasons
    except (ValueError, TypeError, KeyError, AttributeError):
        return text[:300] or "without a message", set()


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the server asks to wait."""
    text = headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError):
        return None


def _timeout(seconds: Any) -> aiohttp.ClientTimeout:
    return seconds if isinstance(seconds, aiohttp.ClientTimeout) else aiohttp.ClientTimeout(total=seconds)


def _secret_texts(token: object) -> Iterator[str]:
    """Return the secret texts of gcsfs's option ``token``: a raw token, or fields of a service account."""
    if isinstance(token, str) and token not in _METHODS:
        yield token
    if isinstance(token, Mapping):
        yield from (str(value) for name, value in token.items() if "key" in name or "token" in name or "secret" in name)
