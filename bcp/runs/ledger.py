"""The ledger of a run, ``run.json``: its checkpoints, the lives of the job, and who writes now.

A ledger is a value: each change makes a new one. Storage may hold anything, so reading checks every field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeVar, cast

from bcp.errors import CorruptError, FormatVersionError, InputError
from bcp.format.metadata import LARGEST_STEP, OPERATION
from bcp.policies.keep import Entry

__all__ = [
    "LARGEST_STEP",
    "MOST_BYTES",
    "VERSION",
    "WITH_REFERENCES",
    "Ledger",
    "Life",
    "Removal",
    "Saving",
    "newer",
    "numbers",
]

T = TypeVar("T")
Trust = Literal["unknown", "verified", "suspect"]

VERSION, WITH_REFERENCES = 1, 2
"""Versions of a ledger. Without knowledge of references a job would delete what others refer to."""

MOST_BYTES = 16 << 20
"""Largest size of a ledger. 10,000 checkpoints with three metrics each take 3 MB."""

KEPT_LIVES = 100
_MOST_TEXT = 4096
_TRUSTS = ("unknown", "verified", "suspect")
_ENDS = ("finished", "preempted", "failed")


@dataclass(frozen=True, slots=True)
class Life:
    """One life of the job: from its start, or restart, to its end.

    Attributes:
        started: when, in Unix seconds.
        host: name of rank 0's host.
        pid: rank 0's process id there.
        ended: ``"finished"``, ``"preempted"`` or ``"failed"``; "" while it runs, and for ever if it was killed.
        hours: how long it is known to have run.

    Example:
        >>> Life(1_700_000_000.0, "node-7", 4242).ended
        ''

    """

    started: float
    host: str
    pid: int
    ended: str = ""
    hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Removal:
    """A deletion that has begun.

    Attributes:
        step: step of the checkpoint.
        version: of its commit object, as the backend names it; "" if that was gone already. A checkpoint of this step
            with another version is a new one.
        entry: the checkpoint's entry, if it had one: its marks hold until its bytes are gone.

    Example:
        >>> Ledger(run_id="pretrain", owner="a1", removing=(Removal(1000, "8f0e"),)).without(1000).removing
        ()

    """

    step: int
    version: str
    entry: Entry | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Saving:
    """A save that has begun, and that may refer to other checkpoints.

    Attributes:
        step: its step.
        refers: steps of these checkpoints.

    Example:
        >>> Ledger(run_id="pretrain", owner="a1", saving=(Saving(1000, (500,)),)).referred()
        frozenset({500})

    """

    step: int
    refers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The memory of a run.

    Attributes:
        run_id: name of the run.
        owner: token of the job that took the folder last; only that job writes.
        version: of the file's format, without references.
        entries: the committed checkpoints, by step.
        removing: deletions that have begun. Their checkpoints are no entries any more.
        saving: saves that have begun, and may refer to other checkpoints.
        lives: the last 100 lives of the job, the oldest first.
        total_lives: how many there were.
        branch: another one each time that the run goes back. Snapshots in memory of another branch count for nothing.
        failures: how many lives were killed or ended with an error.
        observed_hours: how long all lives are known to have run, together.

    Example:
        >>> ledger = Ledger(run_id="pretrain", owner="a1").with_checkpoint(1000, 1_700_000_000.0, {"loss": 2.5})
        >>> [entry.step for entry in ledger.marked(1000, "verified", "evaluated").entries]
        [1000]
        >>> Ledger.from_bytes(ledger.to_bytes(), "run.json") == ledger
        True

    """

    run_id: str
    owner: str
    version: int = VERSION
    entries: tuple[Entry, ...] = ()
    removing: tuple[Removal, ...] = ()
    saving: tuple[Saving, ...] = ()
    lives: tuple[Life, ...] = ()
    total_lives: int = 0
    branch: str = ""
    failures: int = 0
    observed_hours: float = 0.0

    # -- checkpoints --------------------------------------------------------------------------

    def entry(self, step: int) -> Entry | None:
        """Return the entry of a step; None if the ledger has no checkpoint of it."""
        return next((entry for entry in self.entries if entry.step == step), None)

    def referred(self, by: Collection[int] | None = None) -> frozenset[int]:
        """Return the steps to which checkpoints refer, and saves that have begun.

        Args:
            by: only those of these steps; None: of all.

        """
        entries = (*self.entries, *(removal.entry for removal in self.removing if removal.entry is not None))
        referring = [(entry.step, entry.refers) for entry in entries]
        referring += [(saving.step, saving.refers) for saving in self.saving]
        return frozenset(base for step, refers in referring if by is None or step in by for base in refers)

    def beginning(self, step: int, refers: Iterable[int]) -> Ledger:
        """Note that a save begins which may refer to other checkpoints: they stay until the save is noted."""
        others = tuple(saving for saving in self.saving if saving.step != step)
        return replace(self, saving=(*others, Saving(step, tuple(sorted(set(refers))))))

    def settled(self, steps: Collection[int]) -> Ledger:
        """Forget that saves of these steps have begun."""
        return replace(self, saving=tuple(saving for saving in self.saving if saving.step not in steps))

    def with_checkpoint(
        self,
        step: int,
        committed: float,
        metrics: Mapping[str, float],
        launch: str | None = None,
        refers: Iterable[int] = (),
    ) -> Ledger:
        """Add a checkpoint. One of the same step is replaced: its pin stays, its trust does not.

        Args:
            step: its step.
            committed: when it was committed, in Unix seconds.
            metrics: numbers by name. One that is not finite is left out: no policy could compare it.
            launch: of the roles, if the run has several.
            refers: steps whose checkpoints have some of its blocks.

        Raises:
            InputError: the step, a metric's name or its value is no such thing.

        """
        if type(step) is not int or not 0 <= step <= LARGEST_STEP:
            raise InputError(f"step={step!r} has to be a whole number of 0 or more")
        noted = {name: value for name, value in numbers(metrics).items() if math.isfinite(value)}
        known = self.entry(step)
        pinned = known is not None and known.pinned
        entry = Entry(step=step, committed=float(committed), metrics=noted, pinned=pinned, launch=launch)
        return self.with_entries([replace(entry, refers=tuple(sorted(set(refers))))]).settled([step])

    def with_entries(self, entries: Iterable[Entry]) -> Ledger:
        """Add entries; those of the same steps are replaced."""
        by_step = {entry.step: entry for entry in self.entries}
        by_step.update({entry.step: entry for entry in entries})
        removing = tuple(removal for removal in self.removing if removal.step not in by_step)
        return replace(self, entries=tuple(by_step[step] for step in sorted(by_step)), removing=removing)

    def only(self, steps: set[int]) -> Ledger:
        """Drop the entries and the deletions of all other steps."""
        return replace(
            self,
            entries=tuple(entry for entry in self.entries if entry.step in steps),
            removing=tuple(removal for removal in self.removing if removal.step in steps),
        )

    def leaving(self, step: int, version: str) -> Ledger:
        """Note that the deletion of a checkpoint begins: from here on it is no entry.

        Args:
            step: its step.
            version: of its commit object, or "".

        """
        begun = [removal.entry for removal in self.removing if removal.step == step]
        removal = Removal(step, version, self.entry(step) or next(iter(begun), None))
        forgotten = self.without(step)
        return replace(forgotten, removing=(*forgotten.removing, removal))

    def staying(self, step: int, committed: float) -> Ledger:
        """Take the deletion of a whole checkpoint back: it is an entry again, with its marks.

        Args:
            step: its step; one that is not being deleted is no error.
            committed: Unix seconds, for a checkpoint whose time is not known.

        """
        removals = [removal for removal in self.removing if removal.step == step]
        return self.with_entries(removal.entry or Entry(step=step, committed=committed) for removal in removals)

    def without(self, step: int) -> Ledger:
        """Forget a checkpoint and its deletion; one that is not there is no error."""
        steps = {entry.step for entry in self.entries} | {removal.step for removal in self.removing}
        return self.only(steps - {step})

    def marked(self, step: int, trust: Trust, reason: str = "", about: Collection[str] = ()) -> Ledger:
        """Say how far a checkpoint is to be trusted.

        Args:
            step: its step.
            trust: one of the three words.
            reason: why.
            about: operations of the checkpoints of the step that are meant; empty for whatever is there.

        Raises:
            InputError: the run has no checkpoint of that step, or ``trust`` is none of the three words.

        """
        if trust not in _TRUSTS:
            raise InputError(f"trust={trust!r} is unknown; use one of {', '.join(map(repr, _TRUSTS))}")
        if not isinstance(reason, str):
            raise InputError(f"reason={reason!r} has to be a string")
        return self._with(step, trust=trust, reason=_storable(reason), about=tuple(about))

    def pinned(self, step: int, yes: bool = True) -> Ledger:  # noqa: FBT001, FBT002 -- reads as a sentence
        """Keep a checkpoint under any policy; ``yes=False`` gives it back to the policies.

        Raises:
            InputError: the run has no checkpoint of that step.

        """
        return self._with(step, pinned=bool(yes))

    def doubted(self, step: int, *, stays: bool) -> Ledger:
        """Take back what is known of a checkpoint that is about to be saved again: its trust, and its launch.

        Args:
            step: its step; one that is not there is no error.
            stays: the checkpoint stays beside the new one, so one that was verified is pinned.

        """
        entry = self.entry(step)
        if entry is None:
            return self
        if entry.trust == "verified":
            entry = replace(entry, trust="unknown", reason="", pinned=entry.pinned or stays)
        return self.with_entries([replace(entry, launch=None)])

    def _with(self, step: int, **changes: Any) -> Ledger:
        """Change the entry of a step."""
        entry = self.entry(step)
        if entry is None:
            steps = [entry.step for entry in self.entries]
            more = f" and {len(steps) - 10} older ones" if len(steps) > 10 else ""  # noqa: PLR2004 -- as below
            step_text = ", ".join(map(str, steps[-10:])) + more if steps else "none yet"
            raise InputError(f"run {self.run_id!r} has no checkpoint of step {step!r}; it has {step_text}")
        return self.with_entries([replace(entry, **changes)])

    # -- lives --------------------------------------------------------------------------------

    def with_life(self, life: Life) -> Ledger:
        """Begin a life. The one before is a failure if it was killed, or ended with an error."""
        failed = bool(self.lives) and self.lives[-1].ended in ("", "failed")
        lives = (*self.lives, replace(life, host=_storable(life.host)))
        return replace(
            self,
            lives=lives[-KEPT_LIVES:],
            total_lives=self.total_lives + 1,
            failures=self.failures + failed,
        )

    def ended(self, ending: Literal["finished", "preempted", "failed"]) -> Ledger:
        """Say how the current life ended.

        Raises:
            InputError: ``ending`` is none of the three words.

        """
        if ending not in _ENDS:
            raise InputError(f"ending={ending!r} is unknown; use one of {', '.join(map(repr, _ENDS))}")
        return self._with_last(ended=ending)

    def observed(self, hours: float) -> Ledger:
        """Say for how many hours the current life has run so far. Less than before changes nothing.

        Raises:
            InputError: ``hours`` is no finite number.

        """
        if not math.isfinite(hours):
            raise InputError(f"hours={hours} has to be a finite number")
        if not self.lives or hours <= self.lives[-1].hours:
            return self
        more = hours - self.lives[-1].hours
        return replace(self._with_last(hours=float(hours)), observed_hours=self.observed_hours + more)

    def _with_last(self, **changes: Any) -> Ledger:
        return replace(self, lives=(*self.lives[:-1], *(replace(life, **changes) for life in self.lives[-1:])))

    # -- bytes --------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Return the contents of ``run.json``.

        Raises:
            InputError: there are more than 16 MiB.

        """
        fields: dict[str, object] = {
            "version": WITH_REFERENCES if self.saving or self.referred() else self.version,
            "run_id": self.run_id,
            "owner": self.owner,
            "failures": self.failures,
            "observed_hours": self.observed_hours,
            "total_lives": self.total_lives,
            "lives": [{name: getattr(life, name) for name in Life.__slots__} for life in self.lives],
            "checkpoints": [_fields(entry) for entry in self.entries],
            "removing": [_removal_fields(removal) for removal in self.removing],
        }
        if self.branch:
            fields["branch"] = self.branch
        if self.saving:
            fields["saving"] = [{"step": saving.step, "refers": list(saving.refers)} for saving in self.saving]
        data = json.dumps(fields, indent=1, allow_nan=False).encode() + b"\n"
        if len(data) > MOST_BYTES:
            raise InputError(
                f"the ledger of run {self.run_id!r} takes {len(data)} bytes for {len(self.entries)} checkpoints, and "
                f"{MOST_BYTES} is the most; keep fewer checkpoints, or note fewer metrics"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Ledger:
        """Read the contents of ``run.json``, which any program may have written. Unknown fields are left out.

        Args:
            data: the contents.
            where: name of the file, for messages.

        Raises:
            FormatVersionError: a newer bcp wrote it.
            CorruptError: it is no ledger; the message says why.

        """
        try:
            return cls._read(data, where)
        except (ValueError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise CorruptError(f"{where} is no ledger of a run: {error}") from error

    @classmethod
    def _read(cls, data: bytes, where: str) -> Ledger:
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has {len(data)} bytes, and {MOST_BYTES} is the most")
        fields = _Fields(json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant), "it")
        version = fields.integer("version", 1)
        if version > WITH_REFERENCES:
            raise newer(where, version, WITH_REFERENCES)
        entries = fields.rows("checkpoints", _entry)
        removing = fields.rows("removing", _removal)
        steps = [*(entry.step for entry in entries), *(removal.step for removal in removing)]
        if len(set(steps)) < len(steps):
            raise ValueError("two of its checkpoints have one step")
        lives = fields.rows("lives", _life)
        return cls(
            run_id=fields.text("run_id", least=1),
            owner=fields.text("owner"),
            entries=tuple(sorted(entries, key=lambda entry: entry.step)),
            removing=removing,
            saving=fields.rows("saving", _saving) if "saving" in fields.values else (),
            lives=lives[-KEPT_LIVES:],
            total_lives=max(fields.integer("total_lives", 0), len(lives)),
            branch=fields.text("branch") if "branch" in fields.values else "",
            failures=fields.integer("failures", 0),
            observed_hours=fields.number("observed_hours", 0.0),
        )


def newer(where: str, version: int, known: int) -> FormatVersionError:
    """Return the error of a file that a newer bcp wrote."""
    return FormatVersionError(
        f"{where} has version {version}, and this bcp knows {known}: a newer bcp wrote it; update bcp, or use another "
        "folder"
    )


class _Fields:
    """A JSON object whose fields are asked for by type; ``ValueError`` names one that is not of it."""

    def __init__(self, value: object, subject: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{subject} is no JSON object")  # noqa: TRY004 -- one kind of error for all contents
        self.values = cast("dict[str, Any]", value)
        self._subject = subject

    def _of(self, name: str, kind: type[T], fits: Callable[[T], bool]) -> T:
        value = self.values.get(name)
        if type(value) is not kind or not fits(value):
            raise ValueError(f"{self._subject} has {str(value)[:50]!r} as {name!r}")
        return value

    def text(self, name: str, least: int = 0) -> str:
        return self._of(name, str, lambda text: least <= len(text) <= _MOST_TEXT and _is_unicode(text))

    def truth(self, name: str) -> bool:
        return self._of(name, bool, lambda _: True)

    def integer(self, name: str, least: int) -> int:
        return self._of(name, int, lambda number: least <= number <= LARGEST_STEP)

    def number(self, name: str, least: float = -math.inf) -> float:
        value = self.values.get(name)
        if type(value) is int and abs(value) <= LARGEST_STEP:
            self.values[name] = float(value)
        return self._of(name, float, lambda number: math.isfinite(number) and number >= least)

    def rows(self, name: str, row: Callable[[_Fields], T]) -> tuple[T, ...]:
        items: list[object] = self._of(name, list, lambda _: True)
        return tuple(row(_Fields(item, f"an item of {name!r}")) for item in items)


def _entry(fields: _Fields) -> Entry:
    metrics = _Fields(fields.values.get("metrics"), "'metrics'")
    trust = fields.text("trust")
    if trust not in _TRUSTS:
        raise ValueError(f"a checkpoint has {trust[:50]!r} as 'trust'")
    if not all(map(_is_name, metrics.values)):
        raise ValueError("a metric has no proper name")
    return Entry(
        step=fields.integer("step", 0),
        committed=fields.number("committed"),
        metrics={name: metrics.number(name) for name in metrics.values},
        trust=cast("Trust", trust),
        reason=fields.text("reason"),
        pinned=fields.truth("pinned"),
        launch=fields.text("launch") if "launch" in fields.values else None,
        about=tuple(_operations(fields)),
        refers=_refers(fields) if "refers" in fields.values else (),
    )


def _saving(fields: _Fields) -> Saving:
    return Saving(fields.integer("step", 0), _refers(fields))


def _refers(fields: _Fields) -> tuple[int, ...]:
    """Return the steps to which a checkpoint refers. Raises ValueError if they are no steps."""
    refers = fields.values["refers"]
    if not isinstance(refers, list) or not all(type(step) is int and 0 <= step <= LARGEST_STEP for step in refers):
        raise ValueError(f"a checkpoint has {str(refers)[:50]!r} as 'refers'")
    return tuple(sorted(set(refers)))


def _operations(fields: _Fields) -> Iterator[str]:
    for each in fields.values.get("about", ()):
        if not isinstance(each, str) or not OPERATION.fullmatch(each):
            raise ValueError(f"a checkpoint has {str(each)[:50]!r} in 'about'")
        yield each


def _removal(fields: _Fields) -> Removal:
    step, known = fields.integer("step", 0), fields.values.get("checkpoint")  # older ledgers have no such field
    entry = None if known is None else _entry(_Fields(known, "'checkpoint'"))
    if entry is not None and entry.step != step:
        raise ValueError(f"the deletion of step {step} has the entry of step {entry.step}")
    return Removal(step, fields.text("version"), entry)


def _life(fields: _Fields) -> Life:
    ended = fields.text("ended")
    if ended not in ("", *_ENDS):
        raise ValueError(f"a life has {ended[:50]!r} as 'ended'")
    return Life(
        fields.number("started"), fields.text("host"), fields.integer("pid", 0), ended, fields.number("hours", 0.0)
    )


def _fields(entry: Entry) -> dict[str, object]:
    """Return an entry as JSON."""
    fields: dict[str, object] = {
        "step": entry.step,
        "committed": entry.committed,
        "metrics": dict(entry.metrics),
        "trust": entry.trust,
        "reason": entry.reason,
        "pinned": entry.pinned,
    }
    fields |= {} if entry.launch is None else {"launch": entry.launch}
    fields |= {"refers": list(entry.refers)} if entry.refers else {}
    return fields | ({"about": list(entry.about)} if entry.about else {})


def _removal_fields(removal: Removal) -> dict[str, object]:
    """Return a deletion as JSON; with its entry, if that says more than the step."""
    entry, fields = removal.entry, {"step": removal.step, "version": removal.version}
    if entry is None or not (entry.metrics or entry.pinned or entry.trust != "unknown" or entry.refers):
        return fields
    return {**fields, "checkpoint": _fields(entry)}


def numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics as plain floats: a scalar of torch or numpy is one, too.

    Raises:
        InputError: they are no mapping, or one has no proper name or is no number.

    Example:
        >>> numbers({"loss": 2})
        {'loss': 2.0}

    """
    if not isinstance(metrics, Mapping):
        raise InputError(
            f"metrics={str(metrics)[:100]} are a {type(metrics).__name__}; pass a dict, as {{'loss': 2.5}}"
        )
    floats = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_name(name):
            raise InputError(f"metrics: {name!r} is no name; use a string of 1 to {_MOST_TEXT} characters")
        try:
            floats[name] = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise InputError(f"metrics: {name!r} is {str(value)[:100]}, and has to be a number ({error})") from error
    return floats


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= _MOST_TEXT and _is_unicode(name)


def _is_unicode(text: str) -> bool:
    """Whether a string has no lone surrogate, which no file and no terminal takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _storable(text: str) -> str:
    return text[:_MOST_TEXT].encode(errors="replace").decode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a JSON object has one name twice")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"it has the number {name}")
