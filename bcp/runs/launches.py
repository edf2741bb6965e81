"""The file ``roles.json`` of a run of several roles: which launch goes on, and from which step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bcp.backends.place import ROLE
from bcp.backends.small import get_small
from bcp.errors import CorruptError
from bcp.protocols import Backend, Version
from bcp.runs.ledger import LARGEST_STEP, MOST_BYTES, newer
from bcp.runs.ledger_file import versioned

__all__ = ["LAUNCHES_KEY", "Launch", "stored_launch"]

LAUNCHES_KEY = "roles.json"
VERSION = 1
KEPT_IDS = 1000
"""Ids of earlier launches that are remembered, so that none of them comes back."""

_MOST_TEXT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of all roles, as the first role that resumes decides it for all.

    Attributes:
        roles: names of all roles, sorted.
        id: of the launch.
        goal: what the roles asked for, as words.
        step: where all roles go on; 0 for a new run.
        saved: launch in which the checkpoints of that step were saved; "" for none.
        joined: a token of the process that has resumed, for each role that has.
        newest: the step of the newest checkpoint that a launch has gone on from; 0 for none.
        earlier: ids of earlier launches, the newest last.

    Example:
        >>> launch = Launch(roles=("actor", "critic"), id="job-7", step=40, joined={"actor": "a1"})
        >>> Launch.from_bytes(launch.to_bytes(), "roles.json") == launch
        True

    """

    roles: Sequence[str]
    id: str
    goal: str = ""
    step: int = 0
    saved: str = ""
    joined: Mapping[str, str] = field(default_factory=dict)
    newest: int = 0
    earlier: Sequence[str] = ()

    def followed(self, by: Launch) -> Launch:
        """Return the next launch, which remembers the ids before it."""
        return replace(by, earlier=(*self.earlier, self.id)[-KEPT_IDS:])

    def with_role(self, name: str, token: str) -> Launch:
        """Note that a role has resumed."""
        return replace(self, joined={**self.joined, name: token})

    def to_bytes(self) -> bytes:
        """Return the contents of the file."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"version": VERSION, **fields}, indent=1).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Launch:
        """Read the contents, which any program may have written. Unknown fields are left out.

        Args:
            data: the contents.
            where: name of the file, for messages.

        Raises:
            FormatVersionError: a newer bcp wrote it.
            CorruptError: it is no such file; the message says why.

        """
        try:
            fields = json.loads(data.decode())
            version = fields["version"]
            if type(version) is not int:
                raise TypeError(f"version {version!r}")  # noqa: TRY301 -- as other contents that are none
            if version > VERSION:
                raise newer(where, version, VERSION)
            launch = cls(
                roles=tuple(fields["roles"]),
                id=fields["id"],
                goal=fields["goal"],
                step=fields["step"],
                saved=fields["saved"],
                joined=dict(fields["joined"]),
                newest=fields["newest"],
                earlier=tuple(fields["earlier"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorruptError(
                f"{where} does not say which launch of the roles goes on: {type(error).__name__}: {error}. Restore it, "
                "or delete it, so that the next launch makes a new one"
            ) from error
        launch._check(where)
        return launch

    def _check(self, where: str) -> None:
        """Raise CorruptError for fields of other types or sizes."""
        texts = [*self.roles, self.id, self.goal, self.saved, *self.joined, *self.joined.values(), *self.earlier]
        steps = (self.step, self.newest)
        are_texts = all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in texts)
        are_texts = are_texts and all(map(ROLE.fullmatch, (*self.roles, *self.joined)))  # names of folders
        if not are_texts or not all(type(step) is int and 0 <= step <= LARGEST_STEP for step in steps):
            raise CorruptError(
                f"{where} has fields that are no names and no steps. Restore it, or delete it, so that the next launch "
                "makes a new one"
            )


async def stored_launch(backend: Backend, url: str) -> tuple[Launch | None, Version | None]:
    """Return the last launch, with a version that is not newer than it; None for none.

    Raises:
        CorruptError: the file cannot be read.
        FormatVersionError: a newer bcp has written it.
        StorageError: storage failed.

    """

    async def read() -> bytes:
        return bytes(await get_small(backend, LAUNCHES_KEY, MOST_BYTES))

    data, version = await versioned(backend, url, LAUNCHES_KEY, read)
    return None if data is None else Launch.from_bytes(data, f"{url}/{LAUNCHES_KEY}"), version
