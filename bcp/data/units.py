"""The state of a unit, outside of any stream: as plain values, cut, split and merged.

A unit is a virtual shard, or one part of it. Parts exist if the number of readers does not divide the virtual shards.
Every shard is then split by whole samples, and no sample is lost, cut or fed twice (paper section 3.3, Fig. 9).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from math import gcd
from typing import Any

import numpy as np
import torch

from bcp.data.recipe import Recipe, Tokens
from bcp.errors import StateError

__all__ = ["Unit", "UnitState", "from_plain", "needed_count", "needed_units", "parse_units", "reshard", "to_plain"]

_NAME = re.compile(r"([0-9]{5,18})(?:\.([0-9]{1,18})of([0-9]{1,18}))?")
_MOST = 1 << 60
"""Largest counter of a state. A stream counts on from there for ever, in 64 bits."""

_MOST_LAG = 1 << 20
"""Positions of a source by which one part of a shard may be behind another one. Parts differ in the lengths of their
samples only: after 10^10 samples a part, the lag is some 10^5."""

_FIELDS = {"samples": 5, "backlog": 3, "cursors": 2}
"""Tables of a state, and their columns."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """The consumed frontier of a unit, and the tokens beyond it that were read already.

    Attributes:
        cursors: int64[sources, 2]: epoch and position of the next sample of each source. A position at or behind the
            end belongs to the next epoch, which begins when the source is drawn again.
        draws: how many times a source was drawn.
        samples: int64[n, 5]: the samples that tokens were read of, in order: source, epoch, index, 1 if the sample
            began in a consumed window, and its tokens beyond the frontier.
        tokens: int64[m]: these tokens.
        backlog: int64[k, 3]: source, epoch and index of samples that are read before any is drawn. A merge makes it.
        at: windows that all readers together had consumed.
    """

    cursors: Tokens
    draws: int
    samples: Tokens
    tokens: Tokens
    backlog: Tokens
    at: int = 0

    def is_exhausted(self, recipe: Recipe, unit: int) -> bool:
        """Tell whether nothing is left to read. Tokens may be left to consume."""
        return not len(self.backlog) and not recipe.open_sources(unit, self.cursors)

    def is_ended(self, recipe: Recipe, unit: int) -> bool:
        """Tell whether nothing is left to consume."""
        return not len(self.samples) and self.is_exhausted(recipe, unit)

    def after(self, windows: int, recipe: Recipe, unit: int) -> UnitState | None:
        """Return the state after some more windows were consumed, or None if not all of their tokens are here.

        It takes over this state's memory, which may change; this state must not be used afterwards. A copy would read
        all of the memory, and be slow where another process wrote it.
        """
        cut = windows * recipe.context
        if cut > len(self.tokens) and not self.is_exhausted(recipe, unit):
            return None
        if not cut:
            return self
        rows = 64
        while rows < len(self.samples) and self.samples[:rows, 4].sum() <= cut:
            rows *= 2  # not all of them at once: a gigabyte of tokens has many, and few of them are cut
        lengths = self.samples[:rows, 4]
        stops = np.cumsum(lengths)
        kept = (stops > cut) | (stops - lengths >= cut)
        first = int(np.argmax(kept)) if kept.any() else len(self.samples)
        samples = self.samples[first:]
        if len(samples) and stops[first] - lengths[first] < cut:
            samples[0, 3:] = 1, stops[first] - cut
        return replace(self, samples=samples, tokens=self.tokens[cut:])


@dataclass(frozen=True, slots=True)
class Unit:
    """The place of a unit: part ``part`` of ``parts`` of virtual shard ``shard``.

    Attributes:
        shard: number of the virtual shard.
        part: number of the part.
        parts: how many parts the shard has, 1 for an undivided one.
    """

    shard: int
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        return f"{self.shard:05d}" + (f".{self.part}of{self.parts}" if self.parts > 1 else "")

    def number(self, shards: int) -> int:
        """Return the unit's number: it owns the positions of this number modulo ``shards * parts``."""
        return self.shard + shards * self.part


def parse_units(ids: Iterable[str], shards: int) -> dict[str, Unit]:
    """Return the units of a checkpoint by their ids.

    Raises:
        StateError: an id is there twice, or is none of this loader's, or units are of different saves.

    """
    units: dict[str, Unit] = {}
    for name in ids:
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        unit = Unit(int(match[1]), int(match[2] or 0), int(match[3] or 1)) if match else None
        if unit is None or str(unit) != name or unit.shard >= shards or unit.part >= unit.parts:
            raise StateError(f"unit {name!r} is none of a token loader with {shards} virtual shards")
        if name in units:
            raise StateError(f"unit {name!r} is in the checkpoint twice; one reader owns each unit")
        units[name] = unit
    parts = {unit.parts for unit in units.values()}
    if len(parts) > 1:
        raise StateError(f"units of {sorted(parts)} parts a virtual shard are mixed; all come from one save")
    return units


def needed_count(unit: Unit, parts: int) -> int:
    """Return how many units :func:`needed_units` returns. An id of a checkpoint may claim any number of parts."""
    return parts // gcd(unit.parts, parts)


def needed_units(unit: Unit, parts: int) -> list[Unit]:
    """Return which units of a checkpoint, with ``parts`` parts a shard, have samples for a unit."""
    step = gcd(unit.parts, parts)
    return [Unit(unit.shard, part, parts) for part in range(unit.part % step, parts, step)]


def reshard(unit: Unit, recipe: Recipe, parts: int, states: Sequence[UnitState]) -> UnitState:
    """Return a unit's state from those of the units it needs, in their order.

    The result depends on the arguments alone. Readers that take different parts of one unit agree about each sample.
    """
    common = gcd(unit.parts, parts)
    middle = Unit(unit.shard, unit.part % common, common)
    whole = states[0]
    if len(states) > 1:
        whole = _merge(middle.number(recipe.shards), recipe.shards * common, recipe, states)
    if common == unit.parts:
        return whole
    return _split(
        whole, unit.number(recipe.shards), recipe.shards * unit.parts, unit.part // common, unit.parts // common
    )


def _split(state: UnitState, number: int, units: int, part: int, parts: int) -> UnitState:
    """Return one of some parts: every ``parts``-th buffered sample and position. The first has the begun sample."""
    cursors = state.cursors.copy()
    cursors[:, 1] += (number - cursors[:, 1]) % units
    samples = state.samples[part::parts]
    return replace(
        state,
        cursors=cursors,
        samples=samples,
        tokens=_joined(_pieces(state)[part::parts]),
        backlog=state.backlog[part::parts],
    )


def _merge(number: int, units: int, recipe: Recipe, states: Sequence[UnitState]) -> UnitState:
    """Return the unit that was split into these parts, in the order of the parts.

    The cursor of a source is the first position that no part has come to. Samples before it that a part has not read
    become the backlog. Parts that have read nothing since the split give the unit that was split.
    """
    parts = len(states)
    cursors = np.empty_like(states[0].cursors)
    backlogs: list[list[tuple[int, int, int]]] = [[tuple(row) for row in state.backlog.tolist()] for state in states]
    for source in range(len(cursors)):
        own = [(int(epoch), int(position)) for epoch, position in (state.cursors[source] for state in states)]
        last = max((epoch, max(position - (parts - 1) * units, number)) for epoch, position in own)
        cursors[source] = last
        for part, (epoch, position) in enumerate(own):
            positions = _positions(source, (epoch, position), last, number + part * units, parts * units, recipe)
            backlogs[part].extend(
                (source, sample_epoch, recipe.index(source, sample_epoch, place)) for sample_epoch, place in positions
            )
    rows = [row for row in chain(*zip_longest(*(state.samples for state in states))) if row is not None]
    pieces = [piece for piece in chain(*zip_longest(*(_pieces(state) for state in states))) if piece is not None]
    backlog = [row for row in chain(*zip_longest(*backlogs)) if row is not None]
    return UnitState(
        cursors=cursors,
        draws=max(state.draws for state in states),
        samples=np.array(rows, dtype=np.int64).reshape(-1, 5),
        tokens=_joined(pieces),
        backlog=np.array(backlog, dtype=np.int64).reshape(-1, 3),
        at=max(state.at for state in states),
    )


def _positions(
    source: int, start: tuple[int, int], stop: tuple[int, int], first: int, step: int, recipe: Recipe
) -> Iterable[tuple[int, int]]:
    """Yield epoch and position of a part's own positions from ``start`` until ``stop``.

    Raises StateError before the first one if there are more than a part can be behind another one.
    """
    size = len(recipe.sources[source].samples)
    a_epoch = len(range(first, size, step))
    lag = (stop[0] - start[0]) * a_epoch
    lag += len(range(first, min(size, stop[1]), step)) - len(range(first, min(size, start[1]), step))
    if lag > _MOST_LAG:
        raise StateError(
            f"units of the dataloader are damaged: source {recipe.sources[source].name!r} is at epoch {start[0]}, "
            f"position {start[1]} in one part of a virtual shard, and at {stop[0]}, {stop[1]} in another; load another "
            "checkpoint"
        )
    for epoch in range(start[0], stop[0] + 1) if lag > 0 else ():
        begin = start[1] if epoch == start[0] else first
        for position in range(begin, min(size, stop[1]) if epoch == stop[0] else size, step):
            yield epoch, position


def _pieces(state: UnitState) -> list[Tokens]:
    return np.split(state.tokens, np.cumsum(state.samples[:, 4])[:-1]) if len(state.samples) else []


def _joined(pieces: Sequence[Tokens]) -> Tokens:
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def to_plain(state: UnitState) -> dict[str, Any]:
    """Return a state as a dict of integers and of int64 tensors, which share their memory with it."""
    return {
        "at": state.at,
        "draws": state.draws,
        "cursors": torch.from_numpy(state.cursors),
        "samples": torch.from_numpy(state.samples),
        "tokens": torch.from_numpy(state.tokens),
        "backlog": torch.from_numpy(state.backlog),
    }


def from_plain(name: str, value: Any, recipe: Recipe, unit: Unit) -> UnitState:
    """Return a checked state.

    Raises:
        StateError: a part of it is missing, or contradicts another part or the sources; the message names the unit.

    """
    try:
        tables = {field: _table(value[field], width) for field, width in _FIELDS.items()}
        state = UnitState(
            **tables, tokens=_table(value["tokens"], None), draws=int(value["draws"]), at=int(value["at"])
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"unit {name!r} is no state of a token loader: {type(error).__name__}: {error}") from error
    number, units = unit.number(recipe.shards), recipe.shards * unit.parts
    lengths = [len(source.samples) for source in recipe.sources]
    checks = {
        f"{len(state.cursors)} cursors for {len(lengths)} sources": len(state.cursors) == len(lengths),
        "a counter is negative": min(state.draws, state.at, *(table.min(initial=0) for table in tables.values())) >= 0,
        f"a counter is above {_MOST}": max(state.draws, state.at, *(t.max(initial=0) for t in tables.values()))
        <= _MOST,
        "a sample has more tokens than the buffer": bool((state.samples[:, 4] <= len(state.tokens)).all()),
        "an epoch is later than all draws could lead": int(state.cursors[:, 0].max(initial=0)) <= state.draws,
    }
    if all(checks.values()):
        checks["a cursor is not on a position of this unit"] = bool((state.cursors[:, 1] % units == number).all())
        for field in ("samples", "backlog"):
            rows = tables[field]
            known = (rows[:, 0] < len(lengths)).all() and all(
                (rows[rows[:, 0] == source, 2] < length).all() for source, length in enumerate(lengths)
            )
            checks[f"{field} names a sample that no source has"] = bool(known)
        total = int(state.samples[:, 4].sum())
        checks[f"{total} tokens of samples, but {len(state.tokens)} in the buffer"] = total == len(state.tokens)
    for problem, passed in checks.items():
        if not passed:
            raise StateError(f"unit {name!r} of the dataloader is damaged: {problem}")
    return state


def _table(value: Any, width: int | None) -> Tokens:
    """Return a tensor as int64 of one dimension, or of two with ``width`` columns."""
    table = torch.as_tensor(value)
    if table.dtype != torch.int64 or table.ndim != (1 if width is None else 2) or (width and table.shape[1] != width):
        raise ValueError(f"shape {list(table.shape)} and dtype {table.dtype}")
    numpy: Tokens = table.detach().cpu().numpy()
    return numpy
