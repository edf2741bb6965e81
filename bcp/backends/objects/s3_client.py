"""Connections to S3: a client from s3fs's options, requests by it, and errors without secrets.

Errors of S3, as :class:`~bcp.backends.objects.RequestError`, without secrets.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import aiohttp
import botocore.exceptions as boto
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession
from botocore import UNSIGNED
from botocore.loaders import Loader, create_loader
from botocore.parsers import ResponseParserError

from bcp.backends.objects.session import drop_connection
from bcp.backends.objects.store import RequestError
from bcp.errors import InputError
from bcp.protocols import Version
from bcp.runtime.threads import in_thread

__all__ = ["Client", "Options", "S3Error", "Secrets", "Sending", "connected", "content_of", "error_of", "etag_of"]

_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_SLOW_DOWN_STATUS = {429, 503}
_SLOW_DOWN = {
    "SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "TooManyRequests",
    "TooManyRequestsException", "RequestLimitExceeded", "BandwidthLimitExceeded",
}  # fmt: skip
_TRANSIENT = {
    "InternalError", "RequestTimeout", "RequestTimeoutException", "OperationAborted", "ConditionalRequestConflict",
    "IncompleteBody",
    "BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch",  # bytes were changed on their way
}  # fmt: skip
_HINTS = {
    "NoSuchBucket": "create the bucket, or correct its name",
    "InvalidAccessKeyId": "check the credentials",
    "SignatureDoesNotMatch": "check the credentials",
    "ExpiredToken": "get new credentials",
    "InvalidToken": "check the credentials",
    "TokenRefreshRequired": "get new credentials",
    "RequestTimeTooSkewed": "set this host's clock",
    "PermanentRedirect": "pass the bucket's region as storage_options={'region': ...}",
    "AuthorizationHeaderMalformed": "pass the bucket's region as storage_options={'region': ...}",
    "IllegalLocationConstraintException": "pass the bucket's region as storage_options={'region': ...}",
    "NotImplemented": "the server does not know this request",
}
_FORBIDDEN = "check the credentials and what they permit; a key that does not exist is also 403 without s3:ListBucket"
_NO_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or storage_options={'key': ..., 'secret': ...}; "
    "{'anon': True} for a public bucket"
)
_URL_DETAILS = re.compile(r"(?P<scheme>\w+://)(?:[^/\s@:'\"]*:[^\s@'\"]*@)?(?P<rest>[^\s?'\"]*)(?:\?[^\s'\"]*)?")
_LEAST_SECRET = 6  # characters; shorter values, as in tests, are ordinary words


class Secrets:
    """Texts that no message may show: keys, tokens, and a URL's login and query."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def __repr__(self) -> str:
        return "Secrets()"

    def add(self, *values: str | None) -> None:
        """Add some."""
        self._values.update(value for value in values if value and len(value) >= _LEAST_SECRET)

    def clean(self, text: str) -> str:
        """Return a text without them."""
        text = _URL_DETAILS.sub(r"\g<scheme>\g<rest>", text)
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, "***")
        return text


class S3Error(RequestError):
    """One request to S3 failed.

    Attributes:
        code: the server's code, as in ``"NoSuchKey"``; of a request without an answer, the error's class.
        status: the HTTP status; 0 for a request without an answer.
    """

    def __init__(
        self, message: str, *, code: str = "", status: int = 0, after: float | None = None, **kind: bool
    ) -> None:
        super().__init__(message, after=after, **kind)
        self.code = code
        self.status = status

    @property
    def is_missing_key(self) -> bool:
        """Whether the object is not there. A HEAD request has no code but the status."""
        return self.code in ("NoSuchKey", "404", "NotFound") or (self.status == 404 and not self.code)  # noqa: PLR2004

    @property
    def is_condition(self) -> bool:
        """Whether a condition does not hold."""
        return self.status == 412 or self.code == "PreconditionFailed"  # noqa: PLR2004 -- HTTP's


def request_error(error: Exception, secrets: Secrets) -> S3Error:
    """Return the error as one that says whether to try again."""
    if isinstance(error, S3Error):
        return error
    if isinstance(error, boto.ClientError):
        return _answered(error.response, secrets)
    text = secrets.clean(f"{type(error).__name__}: {error}".rstrip(": "))
    code = type(error).__name__
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return S3Error(f"{text}; {_NO_CREDENTIALS}", code=code)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return S3Error(f"{text}; pass the certificates as AWS_CA_BUNDLE", code=code)
    if isinstance(error, _TRANSIENT_ERRORS) and not isinstance(error, _FINAL_ERRORS):
        return S3Error(text, code=code, transient=True, unreachable=isinstance(error, _NOT_CONNECTED))
    return S3Error(text, code=code)


FAILURES = (boto.BotoCoreError, boto.ClientError, ResponseParserError, aiohttp.ClientError, OSError, ValueError)
"""Errors that requests raise."""

_NOT_CONNECTED = (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)
_TRANSIENT_ERRORS = (
    *_NOT_CONNECTED,
    boto.HTTPClientError,  # all that an HTTP client raises: time limits, connections that are refused or lost
    boto.ResponseStreamingError,
    boto.CredentialRetrievalError,
    boto.MetadataRetrievalError,
    ResponseParserError,  # an answer that was cut
    aiohttp.ClientError,
    OSError,
)
_FINAL_ERRORS = (aiohttp.InvalidURL, FileNotFoundError, PermissionError)


def _answered(response: Mapping[str, Any], secrets: Secrets) -> S3Error:
    """Return the error that a server has answered."""
    answer = response.get("ResponseMetadata", {})
    headers = answer.get("HTTPHeaders", {})
    error = response.get("Error", {})
    return error_of(
        secrets.clean(str(error.get("Code", ""))),
        secrets.clean(str(error.get("Message", ""))),
        status=int(answer.get("HTTPStatusCode", 0)),
        after=headers.get("retry-after"),
        region=headers.get("x-amz-bucket-region", ""),
    )


def error_of(code: str, message: str, *, status: int = 0, after: str | None = None, region: str = "") -> S3Error:
    """Return the error for a code and a message of a server."""
    text = " ".join(str(word) for word in (status or "", code if code != str(status) else "", message) if word)
    hint = _HINTS.get(code, _FORBIDDEN if status == 403 or code == "AccessDenied" else "")  # noqa: PLR2004 -- HTTP's
    if region and "region" in hint:
        hint += f"; the server says {region}"
    slow_down = status in _SLOW_DOWN_STATUS or code in _SLOW_DOWN
    return S3Error(
        f"{text}; {hint}" if hint else text,
        code=code,
        status=status,
        after=float(after) if after and after.isdigit() else None,
        transient=status in _TRANSIENT_STATUS or code in _TRANSIENT,
        slow_down=slow_down,
    )


T = TypeVar("T")
SLICE_BYTES = 512 << 10
"""Bytes that are handed to a socket at once; few enough that the event loop is not held up."""

_IGNORED = {
    "asynchronous", "batch_size", "cache_regions", "default_block_size", "default_cache_type", "default_fill_cache",
    "fixed_upload_size", "listings_expiry_time", "local_expiry_check", "loop", "max_concurrency", "max_paths",
    "skip_instance_cache", "use_listings_cache", "version_aware",
}  # fmt: skip
"""Options of s3fs that concern its files and caches, of which there are none here."""

_NAMES = {
    "anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "password", "profile", "region", "region_name",
    "requester_pays", "s3_additional_kwargs", "secret", "token", "use_ssl", "username", "verify",
}  # fmt: skip
_SECRET_NAMES = re.compile(r"(?i)secret|token|password|access_key|customerkey|customer_key")
_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}


@dataclass(frozen=True, slots=True, repr=False)
class Options:
    """Settings of a client, in botocore's words.

    Attributes:
        client: arguments of ``create_client``.
        config: arguments of botocore's ``Config``.
        profile: a profile of AWS's configuration files.
        extra: parameters for every request that knows them, as ``ServerSideEncryption``.
        anonymous: whether requests are not signed.
    """

    client: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    profile: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    anonymous: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Options:
        """Take options by the names that s3fs gives them.

        Raises:
            InputError: an option has no meaning here; the message has its name and not its value.

        """
        unknown = sorted(set(options) - _NAMES - _IGNORED)
        if unknown:
            raise InputError(
                f"unknown options for s3://: {', '.join(unknown)}; known are {', '.join(sorted(_NAMES))}, as in s3fs"
            )
        given = {name: value for name, value in options.items() if value is not None}
        client = dict(given.get("client_kwargs", {}))
        _take(client, "aws_access_key_id", given.get("key", given.get("username")))
        _take(client, "aws_secret_access_key", given.get("secret", given.get("password")))
        _take(client, "aws_session_token", given.get("token"))
        _take(client, "region_name", given.get("region_name", given.get("region")))
        for name in ("endpoint_url", "use_ssl", "verify"):
            _take(client, name, given.get(name))
        extra = dict(given.get("s3_additional_kwargs", {}))
        if given.get("requester_pays"):
            extra["RequestPayer"] = "requester"
        anonymous = bool(given.get("anon"))
        if anonymous:
            client = {name: value for name, value in client.items() if not name.startswith("aws_")}
        return cls(client, given.get("config_kwargs", {}), given.get("profile"), extra, anonymous)

    def secrets(self) -> Iterator[str]:
        """List the values that no message may show."""
        for name, value in [*self.client.items(), *self.extra.items()]:
            if isinstance(value, str) and _SECRET_NAMES.search(name):
                yield value

    def to_config(self, requests: int) -> AioConfig:
        """Return a configuration for so many requests at a time, without retries and without SHA-256 of data.

        A request with data has the data's CRC32C among its signed headers where the server knows checksums. Over https
        botocore itself leaves the data out of the signature.
        """
        config: dict[str, Any] = {**_TIMEOUTS, "max_pool_connections": requests, **self.config}
        config["retries"] = {"total_max_attempts": 1, "mode": "standard"}
        config["s3"] = {**(config.get("s3") or {}), "payload_signing_enabled": False}
        config.setdefault("request_checksum_calculation", "when_required")
        config.setdefault("response_checksum_validation", "when_required")
        if self.anonymous:
            config["signature_version"] = UNSIGNED
        return AioConfig(**config)


def _take(client: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        client[name] = value


# -- data of a request ------------------------------------------------------------------------


class Sending:
    """The data of one request, written from the caller's buffer; aiobotocore itself would copy it.

    Attributes:
        data: the data.
        times: how often it was sent.
        is_written: whether all of it was handed over.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.is_written = False
        self.times = 0
        self._is_stopped = False
        self._transports: list[asyncio.WriteTransport] = []

    async def write(self, writer: Any) -> None:
        """Write the data to a connection of aiohttp, in slices."""
        if self._is_stopped:
            raise ConnectionAbortedError("the request was given up")
        self.times += 1
        if writer.transport is not None:
            self._transports.append(writer.transport)
        for start in range(0, len(self.data), SLICE_BYTES):
            await writer.write(self.data[start : start + SLICE_BYTES])
        self.is_written = True

    def stop(self) -> None:
        """Let go of the buffer: drop connections that may still have some of it to send."""
        self._is_stopped = True
        for transport in self._transports:
            drop_connection(transport)


class _Body(aiohttp.payload.Payload):
    """Data as aiohttp takes it."""

    def __init__(self, sending: Sending) -> None:
        super().__init__(sending, content_type="application/octet-stream")
        self._size = len(sending.data)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return it as text, which nothing asks for."""
        raise TypeError(f"the data of a request is no text ({encoding}, {errors})")

    async def write(self, writer: Any) -> None:
        """Write all."""
        await self._value.write(writer)

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        """Write all; the length that is asked for is its own."""
        del content_length
        await self._value.write(writer)


_sending: ContextVar[Sending | None] = ContextVar("bcp_s3_sending", default=None)


def _put_data_in(request: Any, **_: Any) -> None:
    """Give a signed request its data, just before it is sent."""
    sending = _sending.get()
    if sending is not None:
        request.body = _Body(sending)


@contextmanager
def _sends(data: memoryview) -> Iterator[Sending]:
    """Send data with the request of the block. The buffer is not read any more after it.

    A server that has taken all of it has answered without an error. Any other connection is dropped.
    """
    sending, succeeded = Sending(data), False
    token = _sending.set(sending)
    try:
        yield sending
        succeeded = sending.is_written
    finally:
        _sending.reset(token)
        if not succeeded:
            sending.stop()


# -- the client -------------------------------------------------------------------------------


@dataclass(slots=True, repr=False)
class Client:
    """A client of one event loop.

    Attributes:
        boto: aiobotocore's client.
        extra: parameters for every request that knows them.
        secrets: texts that no message may show.
        stack: closes the client.
    """

    boto: Any
    extra: Mapping[str, Any]
    secrets: Secrets
    stack: AsyncExitStack

    async def call(self, operation: str, params: Mapping[str, Any], data: memoryview | None = None) -> dict[str, Any]:
        """Make one request.

        Args:
            operation: its name in botocore, as in ``"put_object"``.
            params: its parameters, without the data.
            data: its data.

        Raises:
            S3Error: it failed.

        """
        known = self._known(operation)
        given = {**{name: value for name, value in self.extra.items() if name in known}, **params}
        if data is None:
            return await self.guarded(getattr(self.boto, operation)(**given))
        with _sends(data) as sending:
            try:
                return await self.guarded(getattr(self.boto, operation)(ContentLength=len(data), **given))
            except S3Error as error:
                if not error.is_condition or sending.times == 1:
                    raise
            # aiohttp itself sends a PUT again if a kept connection breaks; the first one may have been carried out
            raise S3Error("the request was sent twice, and the second one failed its condition", transient=True)

    def _known(self, operation: str) -> Mapping[str, Any]:
        """Return the parameters of an operation."""
        name = self.boto.meta.method_to_api_mapping[operation]
        return self.boto.meta.service_model.operation_model(name).input_shape.members  # type: ignore[no-any-return]

    async def guarded(self, work: Awaitable[T]) -> T:
        """Await something of aiobotocore or aiohttp; its errors become :class:`S3Error`.

        The originals are dropped, also as contexts: some hold signed requests.
        """
        try:
            return await work
        except FAILURES as error:
            failed = request_error(error, self.secrets)
        raise failed


def content_of(response: Mapping[str, Any]) -> aiohttp.ClientResponse:
    """Return aiohttp's response of a request whose answer is a stream."""
    body = response["Body"]
    raw: aiohttp.ClientResponse = body.raw_stream if hasattr(body, "raw_stream") else body.__wrapped__
    return raw


def etag_of(answer: Mapping[str, Any]) -> Version:
    """Return the ETag of an answer, without quotes."""
    return str(answer["ETag"]).removeprefix("W/").strip('"')


@cache
def _loader(path: str | None) -> Loader:
    return create_loader(path)


def _session(options: Options) -> AioSession:
    """Return a session whose descriptions are read. Takes 0.2 s: for a thread."""
    session = AioSession(profile=options.profile)
    loader = _loader(session.get_config_variable("data_path"))
    session.register_component("data_loader", loader)
    for name in ("_retry", "endpoints", "partitions", "sdk-default-configuration"):
        loader.load_data_with_path(name)
    for name in ("service-2", "endpoint-rule-set-1"):
        loader.load_service_model("s3", name)
    return session


async def connected(options: Options, requests: int, secrets: Secrets) -> Client:
    """Make a client for the running event loop.

    Raises:
        S3Error: there is no such profile, or there are no credentials.

    """
    secrets.add(*options.secrets())
    client = Client(None, options.extra, secrets, AsyncExitStack())
    await client.guarded(_open(client, options, requests))
    return client


async def _open(client: Client, options: Options, requests: int) -> None:
    """Give a client its connections."""
    session = await in_thread(_session, options)
    if not options.anonymous and "aws_access_key_id" not in options.client:
        credentials = await session.get_credentials()
        if credentials is None:
            raise boto.NoCredentialsError
        frozen = await credentials.get_frozen_credentials()
        client.secrets.add(frozen.access_key, frozen.secret_key, frozen.token)
    made = session.create_client("s3", config=options.to_config(requests), **options.client)
    client.boto = await client.stack.enter_async_context(made)
    client.boto.meta.events.register("before-send.s3", _put_data_in)
