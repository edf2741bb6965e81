"""One cell: a save whose requests get the cell's answers, and the judgement of what it told and what it left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import bcp
from bcp.errors import BcpError, ExistsError
from bcp.format.metadata import METADATA_KEY, decode_metadata, operation_of
from bcp.plan.layout import find
from bcp.protocols import Backend, RetryPolicy
from bcp.telemetry.store import FOLDER
from benchmarks.commit_table.cells import Answer, Cell, Fault

__all__ = ["POLICY", "Outcome", "Store", "Wire", "requests_of", "try_cell"]

MIB = 1 << 20
POLICY = RetryPolicy(
    deadline_seconds=20.0, attempt_seconds=5.0, first_pause_seconds=0.002, longest_pause_seconds=0.01, allowance=12
)
"""A store that never answers well is given up after a dozen requests, without long pauses."""

OLD, NEW, NEXT = 1, 2, 3
_REMAINS = "0123456789abcdef"  # operation of a save that was killed
_WINNER = re.compile(r"committed a checkpoint at .*, operation ([0-9a-f]{16})", re.DOTALL)
_NOT_COMMITTED = re.compile(r"(?:was|is) not\s+committed")


class Wire(Protocol):
    """The way from bcp to one path of a store.

    Attributes:
        calm: the path, for saves and loads whose requests are all answered well.
    """

    calm: Backend

    def backend(self) -> Backend:
        """Return a new backend of the path; whoever asks closes it."""

    def arm(self, faults: Sequence[Fault]) -> None:
        """Give requests these answers from now on. A stale answer is the one of now."""

    def disarm(self) -> tuple[list[str], list[int]]:
        """Give all requests the store's own answers again; return the kinds of the requests since, and the hits."""

    async def names(self) -> Sequence[str]:
        """Return the names of all objects and unfinished uploads, as the store itself lists them."""


class Store(Protocol):
    """A kind of storage.

    Attributes:
        name: for figures.
        at_once: how many cells may be tried at once.
    """

    name: str
    at_once: int

    def wire(self) -> Wire:
        """Return the way to a path where nothing is."""

    def answers(self, request: str) -> Sequence[Answer]:
        """Return the answers that a request of this kind may get."""

    async def aclose(self) -> None:
        """Close connections."""

    def doubts(self) -> Sequence[Fault]:
        """Return faults after which a save cannot know whether it has committed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The judgement of one cell.

    Attributes:
        cell: the cell.
        hits: how often each of its faults was met.
        told: the error of the save; empty if it returned.
        found: what loads afterwards.
        problems: what must not be, in words; empty if all is well.
    """

    cell: Cell
    hits: Sequence[int]
    told: str
    found: str
    problems: Sequence[str]

    def __str__(self) -> str:
        return f"{self.cell}: told {self.told or 'saved'!r}, found {self.found}: {'; '.join(self.problems) or 'well'}"


@dataclass(slots=True)
class _Found:
    """What is at a path: the value of the checkpoint and its operation, or why none loads."""

    value: int | None = None
    operation: str = ""
    words: str = ""
    is_there: bool = False  # there is metadata


@dataclass(slots=True)
class _Judge:
    """Collects problems."""

    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:  # noqa: FBT001 -- reads as a sentence
        if not holds:
            self.problems.append(problem)


def states_of(value: int, *, large: bool) -> dict[str, Any]:
    """Return states that are full of one value: small ones, or one tensor of three parts beside them."""
    model = {f"w{number}": torch.full((50,), float(value)) for number in range(3)}
    if large:
        model["large"] = torch.full((11 * MIB,), value, dtype=torch.uint8)
    return {"model": model, "extra_states": {"value": value}}


async def _save(backend: Backend, value: int, *, overwrite: bool, large: bool = False, record: bool = False) -> None:
    """Save states of one value."""
    options = bcp.SaveOptions(overwrite=overwrite, part_bytes=5 * MIB, record=record)
    await bcp.asave(backend, states_of(value, large=large), options=options)


async def _load(backend: Backend) -> _Found:
    """Load what is there."""
    found = _Found(words="nothing")
    try:
        metadata = decode_metadata(await backend.get(METADATA_KEY), "")
    except FileNotFoundError:
        return found
    found.is_there, found.operation = True, metadata.commit.operation
    states = states_of(0, large=find(metadata.layout, "model", "large") is not None)
    try:
        await bcp.aload(backend, states, options=bcp.LoadOptions(record=False))
    except Exception as error:  # noqa: BLE001 -- is told
        found.words = f"{type(error).__name__}: {error}"
        return found
    values = {int(value) for tensor in states["model"].values() for value in (tensor.min(), tensor.max())}
    values.add(states["extra_states"]["value"])
    found.value = values.pop() if len(values) == 1 else None
    found.words = f"value {found.value}" if found.value is not None else f"a mixture of {sorted(values)}"
    return found


async def _litter(backend: Any) -> None:
    """Leave what a killed save leaves: a data file, and an upload with a part."""
    await backend.put(f"model/00000-{_REMAINS}.safetensors", b"remains")
    if hasattr(backend, "root"):
        (backend.root / "model" / f".00000-{_REMAINS}.safetensors.{_REMAINS}.bcp-tmp").write_bytes(b"remains")
    else:
        upload = await backend.store.begin(f"optimizer/00000-{_REMAINS}.safetensors", 11 * MIB)
        await upload.part(0, 0, memoryview(bytes(5 * MIB)))


async def _begin(store: Store, cell: Cell) -> Wire:
    """Make the path as it is before the cell's save."""
    wire = store.wire()
    if cell.mode != "fresh":
        await _save(wire.calm, OLD, overwrite=False)
    if cell.mode == "remains":
        backend = wire.backend()
        await _litter(backend)
        await backend.aclose()
    await wire.calm.list()  # answers that may come again as stale ones
    await wire.calm.version(METADATA_KEY)
    await _load(wire.calm)
    return wire


async def _save_with_faults(wire: Wire, cell: Cell) -> BaseException | None:
    """Make the cell's save; return its error, or None if it returned."""
    backend = wire.backend()
    wire.arm(cell.faults)
    try:
        await _save(backend, NEW, overwrite=cell.mode != "fresh", large=cell.large, record=True)
    except BaseException as error:  # noqa: BLE001 -- is judged
        return error
    finally:
        await backend.aclose()
    return None


async def requests_of(store: Store, cell: Cell) -> list[str]:
    """Return the requests of a cell's save by their kinds, in order; after the cell's last fault where it has some."""
    wire = await _begin(store, cell)
    await _save_with_faults(wire, cell)
    requests, _ = wire.disarm()
    if cell.faults:
        requests = requests[requests.index(cell.faults[-1].request) + 1 :]
    return requests


async def try_cell(store: Store, cell: Cell) -> Outcome:
    """Save with the cell's answers, and judge."""
    wire = await _begin(store, cell)
    told = await _save_with_faults(wire, cell)
    _, hits = wire.disarm()
    found = await _load(wire.calm)
    judge = _Judge()
    _judge_words(judge, told, found)
    _judge_store(judge, cell, told, found)
    await _judge_next(judge, wire)
    text = "" if told is None else f"{type(told).__name__}: {told}"
    return Outcome(cell, hits, text, found.words, judge.problems)


def _judge_words(judge: _Judge, told: BaseException | None, found: _Found) -> None:
    """Compare what the caller was told with what is there."""
    if told is None:
        judge.expect(found.value == NEW, "untrue: the save returned, and its values do not load")
        return
    judge.expect(isinstance(told, BcpError), "foreign: the error is no BcpError")
    text = str(told)
    if _NOT_COMMITTED.search(text):
        judge.expect(found.value != NEW, "untrue: 'not committed' of a save whose values load")
    if winner := _WINNER.search(text):
        judge.expect(winner[1] == found.operation, "untrue: another operation is there than the one that is named")
        judge.expect(found.value != NEW, "untrue: the save's own operation is named as another job's")
    if isinstance(told, ExistsError) and "another job committed" not in text and "is committing" not in text:
        judge.expect(found.is_there, "untrue: a committed checkpoint is named, and none is there")


def _judge_store(judge: _Judge, cell: Cell, told: BaseException | None, found: _Found) -> None:
    """Look at what loads: the old values or the new ones, whole."""
    if cell.mode == "fresh":
        judge.expect(found.value == NEW or not found.is_there, "lost: metadata is there, and nothing loads")
        return
    judge.expect(found.value in (OLD, NEW), "lost: neither the old checkpoint nor the new one loads")
    if told is not None and isinstance(told, ExistsError):
        judge.expect("holds a committed checkpoint" not in str(told), "untrue: overwrite=True was passed")


async def _judge_next(judge: _Judge, wire: Wire) -> None:
    """Save again: it succeeds, loads, and leaves nothing of saves before."""
    try:
        await _save(wire.calm, NEXT, overwrite=True)
    except Exception as error:  # noqa: BLE001 -- is told
        judge.problems.append(f"next: the next save fails: {type(error).__name__}: {error}")
        return
    found = await _load(wire.calm)
    judge.expect(found.value == NEXT, f"next: the next save does not load: {found.words}")
    others = [name for name in await wire.names() if name != METADATA_KEY and not name.startswith(FOLDER)]
    left = [name for name in others if operation_of(name) != found.operation]
    judge.expect(not left, f"left over: {left}")
