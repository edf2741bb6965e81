"""Messages of ranks that publish the weights of a sharded model together."""

from __future__ import annotations

import re

from bcp._messages.base import Count, Message, expect, prepare

__all__ = ["BegunVersion", "PublishedVersion", "WrittenFiles"]

CLAIM = re.compile(r"[0-9a-f]{16}")


class BegunVersion(Message, frozen=True):
    """Rank 0 has claimed a version."""

    claim: str  # id of the claim, in the names of files
    version: Count
    before: Count  # the committed version that the delta leads from; 0 for none
    is_anchor: bool  # whether the version has all tensors
    has_delta: bool

    def __post_init__(self) -> None:
        expect(
            CLAIM.fullmatch(self.claim) is not None,
            self.before < self.version,
            self.is_anchor or self.has_delta,
            not self.has_delta or self.before > 0,
            reason=f"claim {self.claim!r} of version {self.version} after {self.before}",
        )


class WrittenFiles(Message, frozen=True):
    """The files of a version that one rank has written."""

    files: dict[str, str]  # the file of each tensor of an anchor
    deltas: dict[str, str]  # the file of each stream
    digests: dict[str, str]  # of each tensor of this rank
    nbytes: Count  # of the anchor's tensors
    delta_nbytes: Count  # of the streams

    def __post_init__(self) -> None:
        expect(
            self.files.keys() <= self.digests.keys(),
            self.deltas.keys() <= self.digests.keys(),
            reason="a file has a tensor without a digest",
        )


class PublishedVersion(Message, frozen=True):
    """The outcome, from rank 0."""

    path: str
    version: Count
    is_anchor: bool
    has_delta: bool
    tensors: Count
    changed: Count
    nbytes: Count
    delta_nbytes: Count
    deleted: tuple[Count, ...]


prepare(__name__)
