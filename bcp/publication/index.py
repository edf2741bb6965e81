"""The index of a version: what its files have, and the digest of every tensor of the version."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bcp.errors import CorruptError, InputError
from bcp.format.foreign_files import is_inside
from bcp.interop.reading import from_json
from bcp.publication.encoding import ENCODINGS

__all__ = ["DELTA", "FOLDERS", "INDEX", "MOST_VERSION", "VersionIndex", "decode", "folder_of", "version_in", "whole"]

INDEX = "model.safetensors.index.json"
FOLDERS = "weight_v"
DELTA = "delta"
"""The folder in that of an anchor with its delta. Readers of SGLang look at no folders there."""

MOST_VERSION = 10**12
COMPRESSION, CHECKSUM = "zstd", "xxh3-128"
_FOLDER = re.compile(rf"{FOLDERS}(\d{{6,13}})")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


@dataclass(frozen=True, slots=True)
class VersionIndex:
    """A committed version.

    Attributes:
        version: its number.
        publication: id of the publication. One that was deleted and begun anew has another id.
        anchor: number of the newest anchor up to this version. It is ``version`` for an anchor.
        encoding: of the delta; "" if there is none.
        files: the file of each tensor of an anchor; empty for a delta.
        deltas: the file of each tensor that differs from the version before.
        digests: digest of every tensor of the version, by name.
        nbytes: bytes of the anchor's tensors; 0 for a delta.
        delta_nbytes: bytes of the streams of the delta; 0 if there is none.
    """

    version: int
    publication: str
    anchor: int
    encoding: str
    files: Mapping[str, str]
    deltas: Mapping[str, str]
    digests: Mapping[str, str]
    nbytes: int = 0
    delta_nbytes: int = 0

    @property
    def is_anchor(self) -> bool:
        """Whether the version has all tensors."""
        return self.anchor == self.version

    @property
    def keys(self) -> set[str]:
        """Names of its files, the index among them."""
        return {INDEX, *self.files.values(), *self.deltas.values()}

    def encode(self) -> bytes:
        """Return the index as a file. ``metadata`` and ``weight_map`` are what readers of SGLang know."""
        base = {"base_version": f"{self.version - 1:06d}", "delta_encoding": self.encoding}
        formats = {"compression_format": COMPRESSION, "checksum_format": CHECKSUM}
        delta = {**base, **formats, "total_size": self.delta_nbytes}
        about = {"version": f"{self.version:06d}"}
        more = {"publication": self.publication, "anchor": self.anchor, "digests": dict(self.digests)}
        content: dict[str, Any] = {"metadata": about | delta, "weight_map": dict(self.deltas), "bcp": more}
        if self.is_anchor:
            content["metadata"] = about | {"checksum_format": CHECKSUM, "total_size": self.nbytes}
            content["weight_map"] = dict(self.files)
            if self.encoding:
                more[DELTA] = {"metadata": delta, "weight_map": dict(self.deltas)}
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def folder_of(version: int) -> str:
    """Return the name of a version's folder."""
    return f"{FOLDERS}{version:06d}"


def version_in(folder: str) -> int | None:
    """Return the version in the name of a folder; None if it is no version's."""
    match = _FOLDER.fullmatch(folder)
    return int(match[1]) if match and folder_of(int(match[1])) == folder else None


def whole(name: str, version: object) -> int:
    """Return a version that a caller has passed. Raises InputError for what is none."""
    if type(version) is not int or not 0 < version < MOST_VERSION:
        raise InputError(f"{name}={version!r} is no version; pass a whole number from 1 on, as the step of training")
    return version


def decode(data: bytes, version: int, where: str) -> VersionIndex:
    """Read an index. No name leaves its folder, and no number is out of bounds.

    Raises:
        CorruptError: it is damaged, or was not written by :func:`bcp.publish`.

    """
    content = from_json(data, where)
    try:
        about, more = content["metadata"], content["bcp"]
        anchor, is_anchor = more["anchor"], "delta_encoding" not in about
        parts = more.get(DELTA) if is_anchor else content
        delta = _Delta("", {}, 0) if parts is None else _delta(parts, version)
        files = _names(content["weight_map"], _FILE) if is_anchor else {}
        digests = _names(more["digests"], _DIGEST)
        found = VersionIndex(
            version, _text(more["publication"]), anchor, delta.encoding, files, delta.files, digests,
            _size(about["total_size"]) if is_anchor else 0, delta.nbytes,
        )  # fmt: skip
        is_sound = about["version"] == f"{version:06d}" and about["checksum_format"] == CHECKSUM
        is_sound = is_sound and type(anchor) is int and 0 < anchor <= version and is_anchor == found.is_anchor
        names = files if is_anchor else digests
        is_sound = is_sound and names.keys() == digests.keys() and delta.files.keys() <= digests.keys()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"{where} is damaged, or no index of bcp.publish: {type(error).__name__}: {str(error)[:200]}; publish an "
            "anchor as a newer version"
        ) from error
    if not is_sound:
        raise CorruptError(
            f"{where} is damaged, or no index of bcp.publish: its version, its anchor and its tensors contradict each "
            "other; publish an anchor as a newer version"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Delta:
    encoding: str
    files: Mapping[str, str]
    nbytes: int


def _delta(parts: Any, version: int) -> _Delta:
    about = parts["metadata"]
    if about["delta_encoding"] not in ENCODINGS or about["compression_format"] != COMPRESSION:
        raise ValueError(f"the encoding {str(about['delta_encoding'])[:40]!r} is unknown")
    if about["base_version"] != f"{version - 1:06d}" or about["checksum_format"] != CHECKSUM:
        raise ValueError(f"it builds on version {str(about['base_version'])[:40]!r}")
    pattern = re.compile(rf"({DELTA}/)?{_FILE.pattern}")
    return _Delta(about["delta_encoding"], _names(parts["weight_map"], pattern), _size(about["total_size"]))


def _names(found: Any, pattern: re.Pattern[str]) -> dict[str, str]:
    """Return a map of texts whose values match a pattern."""
    for name, text in found.items():
        if not pattern.fullmatch(text):
            raise ValueError(f"{name[:80]!r} has {text[:80]!r}")
        if "/" in text and not is_inside(text):
            raise ValueError(f"{text[:80]!r} leaves the folder")
    return dict(found)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > 100:  # noqa: PLR2004 -- an id
        raise ValueError(f"{str(value)[:80]!r} is no id")
    return value


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]!r} is no number of bytes")
    return value
