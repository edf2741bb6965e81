"""The store of ``s3://``: single requests, by aiobotocore."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp

from bcp._log import log
from bcp.backends.objects.parts import checksum, encoded
from bcp.backends.objects.retry import in_turns
from bcp.backends.objects.s3_client import Client, Options, S3Error, Secrets, connected, content_of, error_of, etag_of
from bcp.backends.objects.s3_upload import S3Upload
from bcp.backends.objects.session import PerLoop
from bcp.backends.objects.store import ConditionError, If, RequestError, Stat
from bcp.backends.small import check_small
from bcp.protocols import ObjectInfo, Unfinished, Version

__all__ = ["S3Store"]

MIB = 1 << 20


class S3Store:
    """Objects of one bucket below one prefix. A version is an ETag, without quotes.

    Attributes:
        checksums: whether the server keeps CRC32Cs, as far as is known. It is asked with every request until one is
            refused or ignored.
    """

    least_part = 5 * MIB
    most_part = 5 << 30
    most_parts = 10_000
    most_keys = 1000
    at_once = 8

    def __init__(self, bucket: str, prefix: str, options: Options, requests: int) -> None:
        self.name = f"s3://{bucket}/{prefix}".rstrip("/")
        self.bucket = bucket
        self.checksums = True
        self._root = f"{prefix}/" if prefix else ""
        self._clients = PerLoop(partial(connected, options, requests, Secrets()), _close)
        self._bare_etags = False
        self._deletes_many = True
        self._conditions_hold: bool | None = None
        self._bucket_is_there = False

    def __repr__(self) -> str:
        return f"S3Store({self.name})"

    # -- requests -----------------------------------------------------------------------------

    async def client(self) -> Client:
        """Return the client of the running event loop."""
        return await self._clients.here()

    async def call(self, operation: str, data: memoryview | None = None, **params: Any) -> dict[str, Any]:
        """Make one request to the bucket; see :meth:`Client.call`."""
        client = await self.client()
        answer = await client.call(operation, {"Bucket": self.bucket, **params}, data)
        self._bucket_is_there = True
        return answer

    async def call_for(self, operation: str, key: str, data: memoryview | None = None, **params: Any) -> dict[str, Any]:
        """Make one request for an object."""
        return await self.call(operation, data, Key=self._root + key, **params)

    async def send(self, operation: str, key: str, data: memoryview, crc: int | None, **params: Any) -> dict[str, Any]:
        """Make a request with data, whose CRC32C the server compares if it can."""
        if not self.checksums or crc is None:
            return await self.call_for(operation, key, data, **params)
        try:
            return await self.call_for(operation, key, data, ChecksumCRC32C=encoded(crc), **params)
        except S3Error as error:
            if not _refuses_checksums(error):
                raise
            self.checksums = False
            return await self.call_for(operation, key, data, **params)

    # -- small objects ------------------------------------------------------------------------

    async def put(self, key: str, data: memoryview, condition: If | None = None) -> Version:
        """Store an object by one request."""
        crc = await checksum(data) if self.checksums else None
        send = partial(self.send, "put_object", key, data, crc)
        if condition is None:
            return etag_of(await send())
        if condition.version is None:
            made = etag_of(await _on_condition(partial(send, IfNoneMatch="*")))
            await self._check_conditions(partial(send, IfNoneMatch="*"))
            return made
        version = condition.version
        try:
            return etag_of(await _on_condition(partial(send, IfMatch=self._condition(version)), missing=True))
        except ConditionError:
            if self._bare_etags or (stat := await self.stat(key)) is None or stat.version != version:
                raise
        # The object does have this ETag: Ceph RGW up to 17 compares it with the quotes. The server compares once more.
        answer = await _on_condition(partial(send, IfMatch=version), missing=True)
        self._bare_etags = True
        return etag_of(answer)

    async def _check_conditions(self, again: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> None:
        """Store the same object once more, which has to be refused; once, for some servers ignore conditions."""
        if self._conditions_hold is not None:
            return
        try:
            await _on_condition(again)
        except ConditionError:
            self._conditions_hold = True
        except S3Error as error:  # the object itself is stored
            log.info("the server's conditions were not tested", store=self.name, error=error.said)
        else:
            self._conditions_hold = False
            log.warning(
                "the server ignores If-None-Match: if two jobs save to one path at once, both may commit, and the "
                "checkpoint of one is lost; let no two jobs save to one path",
                store=self.name,
            )

    def _condition(self, version: Version) -> str:
        return version if self._bare_etags else f'"{version}"'

    async def stat(self, key: str) -> Stat | None:
        """Return size and ETag of an object."""
        try:
            answer = await self.call_for("head_object", key)
        except S3Error as error:
            if not error.is_missing_key:
                raise
            await self._check_bucket()
            return None
        return Stat(int(answer["ContentLength"]), etag_of(answer))

    async def _check_bucket(self) -> None:
        """Raise if there is no bucket: the answer to HEAD does not say which of bucket and object is missing."""
        if self._bucket_is_there:
            return

        try:
            await self.call("head_bucket")
        except S3Error as error:
            if error.is_missing_key:
                raise error_of("NoSuchBucket", f"there is no bucket {self.bucket!r}", status=404) from None
            if error.transient:
                raise
            self._bucket_is_there = True  # it must not be looked at

    async def get(self, key: str) -> tuple[bytes, Version]:
        """Read an object whole."""
        answer = await self._found(key, partial(self.call_for, "get_object", key))
        async with self._content(answer) as content:
            check_small(f"{self!r}: {key!r}", int(answer.get("ContentLength") or 0))
            data = await (await self.client()).guarded(content.read())
        return data, etag_of(answer)

    async def read(self, key: str, start: int, out: memoryview, version: Version | None) -> tuple[int, Version]:
        """Fill ``out`` as the bytes come in."""
        if not out:
            return await self._nothing(key, version)
        params: dict[str, Any] = {"Range": f"bytes={start}-{start + len(out) - 1}"}
        if version is not None:
            params["IfMatch"] = f'"{version}"'
        request = partial(self.call_for, "get_object", key, **params)
        try:
            answer = await self._found(key, partial(_on_condition, request))
        except S3Error as error:
            if error.status != 416:  # noqa: PLR2004 -- HTTP's: the object has no such byte
                raise
            return await self._nothing(key, version, start)
        self._check_range(answer, start)
        async with self._content(answer) as content:
            nbytes = await (await self.client()).guarded(_stream(content, out))
        whole = min(int(answer["ContentLength"]), len(out))
        if nbytes < whole:
            raise RequestError(f"the connection was lost after {nbytes} of {whole} bytes", transient=True)
        return nbytes, etag_of(answer)

    def _check_range(self, answer: Mapping[str, Any], start: int) -> None:
        """Raise if the server has sent other bytes than it was asked for."""
        if not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-") and start:
            answer["Body"].close()
            raise RequestError(f"the server does not know ranges: it answered {answer.get('ContentRange')!r}")

    def _content(self, answer: Mapping[str, Any]) -> _Content:
        return _Content(content_of(answer))

    async def _found(self, key: str, request: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
        """Make a request for an object that has to be there."""
        try:
            return await request()
        except S3Error as error:
            if not error.is_missing_key:
                raise
            raise FileNotFoundError(f"{self.name} has no object {key!r}") from None

    async def _nothing(self, key: str, version: Version | None, start: int | None = None) -> tuple[int, Version]:
        """Return that there are no bytes, of an object that is there and has the version."""
        stat = await self.stat(key)
        if stat is None:
            raise FileNotFoundError(f"{self.name} has no object {key!r}")
        if version not in (None, stat.version):
            raise ConditionError
        if start is not None and stat.nbytes > start:
            raise RequestError("the object was replaced by a longer one meanwhile", transient=True)
        return 0, stat.version

    # -- lists and deletion -------------------------------------------------------------------

    async def list(self, prefix: str, after: str | None) -> tuple[Sequence[ObjectInfo], str | None]:
        """List objects by pages of a thousand."""
        more: dict[str, Any] = {} if after is None else {"ContinuationToken": after}
        page = await self.call("list_objects_v2", Prefix=self._root + prefix, **more)
        listed = [
            ObjectInfo(entry["Key"][len(self._root) :], int(entry["Size"]), entry["LastModified"].timestamp())
            for entry in page.get("Contents", [])
        ]
        infos = [info for info in listed if info.key and not info.key.endswith("/")]  # consoles make some for folders
        return infos, page["NextContinuationToken"] if page.get("IsTruncated") else None

    async def folders(self, prefix: str, after: str | None) -> tuple[Sequence[str], str | None]:
        """List common prefixes by pages of a thousand prefixes and objects."""
        above = self._root + prefix
        more: dict[str, Any] = {} if after is None else {"ContinuationToken": after}
        page = await self.call("list_objects_v2", Prefix=above, Delimiter="/", **more)
        names = [str(entry["Prefix"])[len(above) : -1] for entry in page.get("CommonPrefixes", [])]
        return [name for name in names if name], page["NextContinuationToken"] if page.get("IsTruncated") else None

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, all by one request if the server knows that."""
        if len(keys) > 1 and self._deletes_many:
            try:
                await self._delete_many(keys)
            except S3Error as error:
                if error.transient or error.code not in _NO_BATCHES:
                    raise
                self._deletes_many = False
            else:
                return
        await in_turns(partial(self._delete_one, key) for key in keys)

    async def _delete_one(self, key: str) -> None:
        try:
            await self.call_for("delete_object", key)
        except S3Error as error:
            if not error.is_missing_key:
                raise

    async def _delete_many(self, keys: Sequence[str]) -> None:
        objects = [{"Key": self._root + key} for key in keys]
        answer = await self.call("delete_objects", Delete={"Objects": objects, "Quiet": True})
        errors = [error for error in answer.get("Errors", []) if error.get("Code") != "NoSuchKey"]
        if errors:
            errors.sort(key=lambda error: error_of(str(error.get("Code")), "").transient)  # a final one counts
            first = errors[0]
            message = f"{first.get('Message', '')} (of {first.get('Key')!r}, and {len(errors) - 1} more)"
            raise error_of(str(first.get("Code", "")), message)

    # -- uploads ------------------------------------------------------------------------------

    async def begin(self, key: str, nbytes: int | None) -> S3Upload:
        """Begin a multipart upload, with a CRC32C of the whole object if the server keeps such."""
        answer: dict[str, Any] | None = None
        if self.checksums:
            try:
                answer = await self.call_for(
                    "create_multipart_upload", key, ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT"
                )
            except S3Error as error:
                if not _refuses_checksums(error):
                    raise
            self.checksums = answer is not None and answer.get("ChecksumType") == "FULL_OBJECT"
        if answer is None:
            answer = await self.call_for("create_multipart_upload", key)
        return S3Upload(self, key, str(answer["UploadId"]), nbytes, checksums=self.checksums)

    async def unfinished(self, after: str | None) -> tuple[Sequence[Unfinished], str | None]:
        """List multipart uploads below the root."""
        more = {} if after is None else dict(zip(("KeyMarker", "UploadIdMarker"), json.loads(after), strict=True))
        page = await self.call("list_multipart_uploads", Prefix=self._root, **more)
        own_uploads = [upload for upload in page.get("Uploads", []) if upload["Key"].startswith(self._root)]
        unfinished = [Unfinished(upload["Key"][len(self._root) :], upload["UploadId"]) for upload in own_uploads]
        is_more = bool(page.get("IsTruncated"))
        return unfinished, json.dumps([page["NextKeyMarker"], page["NextUploadIdMarker"]]) if is_more else None

    async def discard(self, unfinished: Unfinished) -> None:
        """Abort a multipart upload."""
        await self.abort(unfinished.key, unfinished.name)

    async def abort(self, key: str, upload: str) -> bool:
        """Abort a multipart upload; return whether there was one."""
        try:
            await self.call_for("abort_multipart_upload", key, UploadId=upload)
        except S3Error as error:
            if error.code != "NoSuchUpload" and not error.is_missing_key:
                raise
            return False
        return True

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        await self._clients.aclose()


_NO_BATCHES = {
    "MissingContentMD5", "NotImplemented", "MethodNotAllowed", "MalformedXML", "InvalidRequest", "InvalidArgument",
    "405", "501",
}  # fmt: skip
_NO_CHECKSUMS = {"NotImplemented", "InvalidRequest", "InvalidArgument", "UnsupportedArgument", "501", "400"}


class _Content:
    """The stream of an answer; its connection is closed if the stream was not read to its end."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aenter__(self) -> aiohttp.StreamReader:
        return self._response.content

    async def __aexit__(self, *_: object) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


async def _stream(content: aiohttp.StreamReader, out: memoryview) -> int:
    """Fill a buffer from a stream; return how many bytes there were."""
    offset = 0
    async for chunk, _ in content.iter_chunks():
        piece = chunk[: len(out) - offset] if len(chunk) > len(out) - offset else chunk
        out[offset : offset + len(piece)] = piece
        offset += len(piece)
        if offset == len(out) and len(piece) < len(chunk):
            break
    return offset


def _refuses_checksums(error: S3Error) -> bool:
    return not error.transient and error.code in _NO_CHECKSUMS


async def _on_condition(
    request: Callable[[], Coroutine[Any, Any, dict[str, Any]]], *, missing: bool = False
) -> dict[str, Any]:
    """Make a request on a condition, which does not hold either if the object is ``missing``."""
    try:
        return await request()
    except S3Error as error:
        if not error.is_condition and not (missing and error.is_missing_key):
            raise
    raise ConditionError


async def _close(client: Client) -> None:
    await client.stack.aclose()
