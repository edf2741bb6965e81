"""Errors of S3, as :class:`~bcp.backends.objects.RequestError`, without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp
import botocore.exceptions as boto
from botocore.parsers import ResponseParserError

from bcp.backends.objects.store import RequestError

__all__ = ["FAILURES", "S3Error", "Secrets", "error_of", "request_error"]

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
        """Begin with none."""
        self._values: set[str] = set()

    def __repr__(self) -> str:
        """Show none."""
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

    def __init__(self, said: str, *, code: str = "", status: int = 0, after: float | None = None, **kind: bool) -> None:
        """Take code and status, and the attributes of every :class:`RequestError`."""
        super().__init__(said, after=after, **kind)
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
    said = secrets.clean(f"{type(error).__name__}: {error}".rstrip(": "))
    code = type(error).__name__
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return S3Error(f"{said}; {_NO_CREDENTIALS}", code=code)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return S3Error(f"{said}; pass the certificates as AWS_CA_BUNDLE", code=code)
    if isinstance(error, _TRANSIENT_ERRORS) and not isinstance(error, _FINAL_ERRORS):
        return S3Error(said, code=code, transient=True, unreachable=isinstance(error, _NOT_CONNECTED))
    return S3Error(said, code=code)


FAILURES = (boto.BotoCoreError, boto.ClientError, ResponseParserError, aiohttp.ClientError, OSError, ValueError)
"""What requests raise."""

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
    said = " ".join(str(word) for word in (status or "", code if code != str(status) else "", message) if word)
    hint = _HINTS.get(code, _FORBIDDEN if status == 403 or code == "AccessDenied" else "")  # noqa: PLR2004 -- HTTP's
    if region and "region" in hint:
        hint += f"; the server says {region}"
    slow_down = status in _SLOW_DOWN_STATUS or code in _SLOW_DOWN
    return S3Error(
        f"{said}; {hint}" if hint else said,
        code=code,
        status=status,
        after=float(after) if after and after.isdigit() else None,
        transient=status in _TRANSIENT_STATUS or code in _TRANSIENT,
        slow_down=slow_down,
    )
