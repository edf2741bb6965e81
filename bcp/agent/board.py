"""Notes of survivors who look for each other, in the memory of an agent: each key once, in the order of arrival."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from bcp._messages.tiers import Note, Post, Posted
from bcp.errors import StorageError
from bcp.runtime.process import process_lock

__all__ = ["Board"]

MOST_MEETINGS = 8
"""A job has one as a rule. The oldest one makes room."""

MOST_NOTES = 1 << 16
"""Of one meeting; each rank writes three at most."""

ANSWERED = 1 << 12
"""Notes of one answer; who needs more asks again."""


@dataclass(slots=True)
class _Meeting:
    notes: list[Note] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)


class Board:
    """The meetings at one agent. An agent that starts anew has forgotten them."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(8)
        self._meetings: dict[str, _Meeting] = {}
        self._lock = process_lock()

    def __repr__(self) -> str:
        return f"<Board of {len(self._meetings)} meetings>"

    def post(self, post: Post) -> Posted:
        """Add a note, unless its key is there; return notes that the asker has not seen.

        Raises:
            StorageError: the meeting has too many notes.

        """
        with self._lock:
            meeting = self._meetings.get(post.meeting)
            if meeting is None:
                while len(self._meetings) >= MOST_MEETINGS:
                    del self._meetings[next(iter(self._meetings))]
                meeting = self._meetings[post.meeting] = _Meeting()
            if post.key and post.key not in meeting.keys:
                if len(meeting.notes) >= MOST_NOTES:
                    raise StorageError(f"the meeting {post.meeting} has {MOST_NOTES} notes already")
                meeting.keys.add(post.key)
                meeting.notes.append(Note(post.key, post.value))
            return Posted(self._id, tuple(meeting.notes[post.seen : post.seen + ANSWERED]))
