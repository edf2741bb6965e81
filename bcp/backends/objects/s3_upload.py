"""Multipart uploads to S3."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from bcp.backends.objects.parts import checksum, combined, encoded
from bcp.backends.objects.s3_client import S3Error, etag_of
from bcp.errors import CorruptError
from bcp.runtime.threads import in_thread

if TYPE_CHECKING:
    from bcp.backends.objects.s3_store import S3Store

__all__ = ["S3Upload"]

_DIGESTS = {"BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch"}
_MD5_DIGITS = 32


class S3Upload:
    """One multipart upload.

    The server compares each part with its CRC32C, and the object with a CRC32C that is combined from the parts'. A
    server without checksums is asked for the object's ETag, which has to be the digest of the parts' ETags. Any
    other ETag lets the object's size decide.
    """

    def __init__(self, store: S3Store, key: str, upload: str, nbytes: int | None, *, checksums: bool) -> None:
        self._store = store
        self._key = key
        self._upload = upload
        self._nbytes = nbytes
        self._checksums = checksums
        self._parts: dict[int, _Part] = {}
        self._finishes = False

    def __repr__(self) -> str:
        return f"S3Upload({self._store.name}, {self._key!r}, {len(self._parts)} parts)"

    async def part(self, index: int, offset: int, data: memoryview) -> None:
        """Store a part; S3 counts them from 1."""
        del offset
        crc = await checksum(data) if self._checksums else None
        answer = await self._store.send(
            "upload_part", self._key, data, crc, PartNumber=index + 1, UploadId=self._upload
        )
        self._parts[index] = _Part(str(answer["ETag"]), len(data), crc, answer.get("ChecksumCRC32C"))

    async def finish(self) -> None:
        """Let the object appear, and compare it with the sent parts."""
        parts = [{"PartNumber": index + 1, **self._parts[index].named()} for index in sorted(self._parts)]
        params: dict[str, Any] = {"UploadId": self._upload, "MultipartUpload": {"Parts": parts}}
        crc = await self._crc()
        if crc is not None:
            params |= {"ChecksumCRC32C": encoded(crc), "ChecksumType": "FULL_OBJECT"}
        self._finishes = True
        try:
            answer = await self._store.call_for("complete_multipart_upload", self._key, **params)
        except S3Error as error:
            if error.code in _DIGESTS:
                raise CorruptError(
                    f"{self._store.name}: {self._key!r} was changed on its way to storage: {error.said}; save again"
                ) from error
            if error.code != "NoSuchUpload" or not await self._is_mine():
                raise
            return
        if etag_of(answer) != self._etag() and answer.get("ChecksumCRC32C") != params.get("ChecksumCRC32C", ""):
            await self._check()

    async def abort(self) -> None:
        """Remove the parts, or the object if an attempt to finish was carried out and its answer lost.

        No metadata can name the object: a save commits only after all its uploads have ended well.
        """
        exists = await self._store.abort(self._key, self._upload)
        if not exists and self._finishes and await self._is_mine():
            await self._store.delete([self._key])

    # -- what was stored ----------------------------------------------------------------------

    async def _crc(self) -> int | None:
        """Return the CRC32C of the whole object; None if that of a part is not known."""
        known = [(part.crc, part.nbytes) for _, part in sorted(self._parts.items()) if part.crc is not None]
        if not self._checksums or len(known) < len(self._parts):
            return None
        return await in_thread(combined, known)

    def _etag(self) -> str | None:
        """Return the ETag that S3 gives an object of these parts; None if the parts' are no MD5 digests."""
        etags = [part.etag.strip('"') for _, part in sorted(self._parts.items())]
        if any(len(etag) != _MD5_DIGITS for etag in etags):
            return None
        try:
            digests = b"".join(map(bytes.fromhex, etags))
        except ValueError:
            return None
        return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(etags)}"

    async def _is_mine(self) -> bool:
        """Whether the object is of this upload's parts, by its checksum or its ETag."""
        crc = await self._crc()
        params: dict[str, Any] = {} if crc is None else {"ChecksumMode": "ENABLED"}
        try:
            answer = await self._store.call_for("head_object", self._key, **params)
        except S3Error as error:
            if error.is_missing_key:
                return False
            raise
        if crc is not None and answer.get("ChecksumCRC32C") == encoded(crc):
            return int(answer["ContentLength"]) == self._size()
        return etag_of(answer) == self._etag()

    async def _check(self) -> None:
        """Compare the object's size: for servers without checksums, whose ETags are no digests of the parts'."""
        stat = await self._store.stat(self._key)
        size = self._size()
        if stat is None or stat.nbytes != size:
            content = "no object" if stat is None else f"{stat.nbytes} bytes"
            raise CorruptError(f"{self._store.name}: {self._key!r} has {content} in place of {size}; save again")

    def _size(self) -> int:
        return sum(part.nbytes for part in self._parts.values())


class _Part:
    """A part that was stored: ETag, bytes, CRC32C, and the CRC32C that the server has answered."""

    __slots__ = ("crc", "etag", "nbytes", "server_crc")

    def __init__(self, etag: str, nbytes: int, crc: int | None, server_crc: str | None) -> None:
        self.etag = etag
        self.nbytes = nbytes
        self.crc = crc
        self.server_crc = server_crc

    def named(self) -> dict[str, str]:
        """Return it as CompleteMultipartUpload names it."""
        return (
            {"ETag": self.etag} if self.server_crc is None else {"ETag": self.etag, "ChecksumCRC32C": self.server_crc}
        )
