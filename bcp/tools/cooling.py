"""Move old checkpoints of a run to a cold place, under paths that stay, and bring them back (paper sec. 5.1)."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from bcp._log import log
from bcp._text import shown
from bcp.backends.cold import (
    FOLDER_SUFFIX,
    MARK_KEY,
    MOST_PLACES,
    STEP_FOLDER,
    ColdPlace,
    ColdPlaces,
    ColdRecord,
    OpenPlace,
    change_record,
    is_cold_url,
    mark_of,
    run_words,
    stored_record,
    url_parts,
)
from bcp.backends.links import links_of
from bcp.backends.local import fixed
from bcp.errors import CorruptError, InputError
from bcp.format.metadata import LEDGER_KEY, METADATA_KEY
from bcp.policies.checks import amount
from bcp.policies.keep import DAY
from bcp.protocols import Backend, folders_of
from bcp.runs.folder import Folder
from bcp.runs.latest import folder_of
from bcp.runs.ledger import Ledger
from bcp.runs.names import step_of, whole_step
from bcp.runtime.threads import in_thread
from bcp.tools.calls import Progress, called, counting, ignore_progress
from bcp.tools.moving import Move, discard, unfinished_of

__all__ = ["CoolResult", "acool", "apromote", "cool", "promote"]

Path = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class CoolResult:
    """The outcome of :func:`bcp.cool` or :func:`bcp.promote` for one checkpoint.

    Attributes:
        step: its step.
        path: of the checkpoint. It is the same before and after.
        files: number of data files that were moved.
        nbytes: bytes of these files.
        reason: why the files stay where they are; "" if they do not.
        is_damaged: whether the reason is damage of the checkpoint.
    """

    step: int
    path: str
    files: int
    nbytes: int
    reason: str = ""
    is_damaged: bool = False


def cool(
    path: Path,
    *,
    to: Path,
    days: float = 7.0,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    cold_options: Mapping[str, Any] | None = None,
    progress: Progress = ignore_progress,
) -> list[CoolResult]:
    """Move the data files of a run's old checkpoints to a cheaper place. Their paths stay valid.

    Use it when fast storage is too small or too expensive for all checkpoints of a run. Metadata and receipts stay in
    the run's folder. Loads, resumptions and all tools work on the old path, and read moved files from the cold place.

    Each file is copied, read back and compared with its checksums before it is deleted in the run's folder. A call that
    fails or is killed loses nothing, and another call ends the work. A job may train in the run meanwhile. The run's
    newest checkpoint, its newest one that is not suspect, and its newest verified one stay: a restart reads them.

    The run's folder names the cold place in ``cold.json``, so each reader of the run needs access to both. Retention
    and :func:`bcp.tools.remove` delete the cold files with their checkpoint.

    Args:
        path: the run's folder, as for :class:`bcp.Run`.
        to: path or URL of the cold place, for this run alone.
        days: move checkpoints that were committed, or promoted, longer ago.
        dry_run: move nothing, and return what would be moved.
        storage_options: for the file system of the run's URL.
        cold_options: for that of the cold place. None: ``storage_options``, if both are of one scheme. Readers do the
            same.
        progress: called with the bytes that were copied, and with those of all files to move.

    Returns:
        One record for each checkpoint of that age with data files in the run's folder, the oldest first.

    Raises:
        InputError: the path is no run with a ledger; ``to`` is the run's folder or lies in it, belongs to another run,
            is one or a checkpoint, or cannot be a cold place; or ``days`` is negative. Nothing was written.
        CorruptError: the run's record of cold places is damaged.
        StorageError: storage failed, the cold place cannot be written to, or a copy differs from its file. The file
            stays.

    Example:
        >>> with bcp.Run("ckpt/run-10", {"model": torch.nn.Linear(4, 4)}, save=10) as run:
        ...     _ = run.resume(), run.maybe_save(10)
        >>> bcp.cool("ckpt/run-10", to="cold/run-10", days=7)
        []

    """

    def function() -> Awaitable[list[CoolResult]]:
        return acool(
            path,
            to=to,
            days=days,
            dry_run=dry_run,
            storage_options=storage_options,
            cold_options=cold_options,
            progress=progress,
        )

    return called(function, f"cool {shown(str(path))}")


async def acool(
    path: Path,
    *,
    to: Path,
    days: float = 7.0,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    cold_options: Mapping[str, Any] | None = None,
    progress: Progress = ignore_progress,
) -> list[CoolResult]:
    """Do the same as :func:`cool` from a coroutine."""
    amount("cool", "days", days, zero=True)
    async with await _Run.opened(path, storage_options, cold_options) as run:
        url = await in_thread(partial(_cold_url, to, run.where))
        moves = await run.old(time.time() - days * DAY)
        if dry_run:
            return [CoolResult(step, move.path, len(sizes), sum(sizes.values())) for step, move, sizes in moves]
        if not moves and not await run.has(url):
            return []
        place = await run.join(url, {move.name for _, move, _ in moves})
        left = await unfinished_of(place.backend)
        gone = await run.sweep(place)
        told = counting(progress, sum(sum(sizes.values()) for _, _, sizes in moves))
        results = [await _cooled(step, replace(move, told=told), place) for step, move, _ in moves]
        whole = {move.name for (_, move, _), result in zip(moves, results, strict=True) if not result.reason} | gone
        await discard(place.backend, [each for each in left if each.key.partition(f"{FOLDER_SUFFIX}/")[0] in whole])
        return results


def promote(
    path: Path,
    step: int,
    *,
    storage_options: Mapping[str, Any] | None = None,
    cold_options: Mapping[str, Any] | None = None,
    progress: Progress = ignore_progress,
) -> CoolResult:
    """Bring the data files of a checkpoint back from a cold place, so that loads are fast again.

    The copies in the cold place stay until the checkpoint is deleted. For ``days`` from now :func:`cool` leaves the
    checkpoint alone; then it only compares the copies and deletes the files here.

    Args:
        path: the run's folder, as for :class:`bcp.Run`.
        step: of a committed checkpoint.
        storage_options: as for :func:`cool`.
        cold_options: as for :func:`cool`.
        progress: called with the bytes that were copied, and with those of all files to copy.

    Returns:
        The number of files that came back, and their bytes. 0 if all of them were here.

    Raises:
        InputError: the path is no run with a ledger, or the run has no committed checkpoint of that step.
        CorruptError: a file is missing, or all of its copies are damaged.
        ExistsError: another save has committed there meanwhile.
        NotACheckpointError: the checkpoint was deleted meanwhile.
        StorageError: storage failed. Another call ends the work.

    Example:
        >>> with bcp.Run("ckpt/run-10", {"model": torch.nn.Linear(4, 4)}, save=10) as run:
        ...     _ = run.resume(), run.maybe_save(10)
        >>> bcp.promote("ckpt/run-10", 10).files
        0

    """
    return called(
        lambda: apromote(path, step, storage_options=storage_options, cold_options=cold_options, progress=progress),
        f"promote step {step} of {shown(str(path))}",
    )


async def apromote(
    path: Path,
    step: int,
    *,
    storage_options: Mapping[str, Any] | None = None,
    cold_options: Mapping[str, Any] | None = None,
    progress: Progress = ignore_progress,
) -> CoolResult:
    """Do the same as :func:`promote` from a coroutine."""
    step = whole_step(step)
    async with await _Run.opened(path, storage_options, cold_options) as run:
        moves = await run.moves([step])
        if not moves:
            steps = ", ".join(str(entry.step) for entry in run.ledger.entries[-10:])
            raise InputError(
                f"{run.where} has no committed checkpoint of step {step} to promote; it has {steps or 'none'}"
            )
        now, names = time.time(), [move.name for _, move in moves]

        def promoted(record: ColdRecord) -> ColdRecord:
            cold = [name for name in names if name in record.cooled]
            return replace(record, promoted={**record.promoted, **dict.fromkeys(cold, now)})

        await change_record(run.folder.backend, run.where, promoted)
        missing = 0
        for _, move in moves:
            there = await move.data_sizes()
            missing += sum(info.nbytes for info in await move.view.cold_files() if info.key not in there)
        told = counting(progress, missing)
        done = [await replace(move, told=told).promote() for _, move in moves]
    files, nbytes = sum(moved.files for moved in done), sum(moved.nbytes for moved in done)
    return CoolResult(step, f"{run.where}/{names[0]}", files, nbytes)


async def _cooled(step: int, move: Move, place: OpenPlace) -> CoolResult:
    """Move a checkpoint. A damaged one stays as it is, and is no reason to leave the others."""
    try:
        moved = await move.cool(place)
    except CorruptError as error:
        log.warning("a damaged checkpoint is not moved to the cold place", checkpoint=move.path, error=str(error))
        return CoolResult(step, move.path, 0, 0, str(error), is_damaged=True)
    return CoolResult(step, move.path, moved.files, moved.nbytes, moved.reason)


@dataclass(slots=True)
class _Run:
    """A run whose checkpoints are moved.

    Attributes:
        folder: of the run.
        where: its path without links, or its URL.
        ledger: as it was read.
        places: its cold places.
    """

    folder: Folder
    where: str
    ledger: Ledger
    places: ColdPlaces

    @classmethod
    async def opened(
        cls, path: Path, storage_options: Mapping[str, Any] | None, cold_options: Mapping[str, Any] | None
    ) -> _Run:
        """Open a run, and read its ledger. Raises InputError if there is none."""
        folder, text = folder_of(path, storage_options)
        try:
            where = text if "://" in text else await in_thread(os.path.realpath, text)
            ledger = await _ledger(folder, where)
            await folder.steps()
            places = ColdPlaces(folder.backend, where, storage_options, cold_options=cold_options)
            return cls(folder, where, ledger, places)
        except BaseException:
            await folder.aclose()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.places.aclose()
        await self.folder.aclose()

    async def moves(self, steps: Sequence[int]) -> list[tuple[int, Move]]:
        """Return the moves of the committed folders of some steps. Links lead to what is not the run's."""
        links = set(await links_of(self.folder.backend))
        listed = set(self.folder.listed.folders)
        found = []
        for step in steps:
            names = set(self.folder.names_of(step) if step in listed else ()) - links
            found += [(step, self.move(name)) for name in sorted(names) if await self.folder.commit_of(name)]
        return found

    def move(self, name: str) -> Move:
        """Return the move of a folder."""
        return Move(self.folder.backend, shown(self.where), name, self.places, lambda _: None)

    async def old(self, before: float) -> list[tuple[int, Move, Mapping[str, int]]]:
        """Return the moves of checkpoints of an age that have data files here, and the sizes of these files."""
        record, _ = await stored_record(self.folder.backend, self.where)
        entries = self.ledger.entries
        sound = [entry.step for entry in entries if entry.trust != "suspect"]
        verified = [entry.step for entry in entries if entry.trust == "verified"]
        stay = {max(steps, default=-1) for steps in ([entry.step for entry in entries], sound, verified)}
        chosen = [entry.step for entry in entries if entry.committed <= before and entry.step not in stay]
        found = []
        for step, move in await self.moves(chosen):
            if record.promoted.get(move.name, 0.0) <= before and (sizes := await move.data_sizes()):
                found.append((step, move, sizes))
        return found

    async def has(self, url: str) -> bool:
        """Whether a place is one of the run's, by the run's record or by the mark of the place."""
        record, _ = await stored_record(self.folder.backend, self.where)
        if record.place(url) is not None:
            return True
        place = await self.places.opened(ColdPlace(url, ""))
        mark = await mark_of(place.backend, url)
        return bool(mark) and _is_own(mark, await in_thread(run_words, self.where), self.ledger.run_id)

    async def join(self, url: str, names: set[str]) -> OpenPlace:
        """Make a place one of the run's, and note the folders that are about to be moved there.

        The place gets its mark first, so a place that cannot be written to is found out before anything of the run is
        touched.

        Raises:
            InputError: the place belongs to another run, or is one or a checkpoint.
            StorageError: storage failed, or a place that is the run's has lost its mark.

        """
        record, _ = await stored_record(self.folder.backend, self.where)
        known = record.place(url)
        if known is None and len(record.places) >= MOST_PLACES:
            raise InputError(f"{shown(self.where)} has {len(record.places)} cold places already; choose one of them")
        if known is None:
            opened = await self.places.opened(ColdPlace(url, ""))
            await _refuse_if_taken(opened.backend, url)
            run = await in_thread(run_words, self.where)
            known = ColdPlace(url, await _marked(opened.backend, url, run, self.ledger.run_id))
        place = await self.places.opened(known)
        if not await self.places.owns(place):
            raise InputError(_of_another(url, place.owner))
        listed = {name for step in self.folder.listed.folders for name in self.folder.names_of(step)}
        copied = set(await _cold_folders(place))

        def joined(record: ColdRecord) -> ColdRecord:
            places = (*(each for each in record.places if each != known), known)
            cooled = (record.cooled & listed) | copied | names
            promoted = {name: when for name, when in record.promoted.items() if name in cooled}
            return ColdRecord(places, cooled, promoted)

        await change_record(self.folder.backend, self.where, joined)
        return place

    async def sweep(self, place: OpenPlace) -> set[str]:
        """Delete the copies of checkpoints that are gone: their deletion and a move met, or the move was killed.

        Return the names of their folders.
        """
        leaving = {removal.step for removal in self.ledger.removing}
        known = leaving | {entry.step for entry in self.ledger.entries}
        gone = {name for name in await _cold_folders(place) if step_of(name) not in known}
        for name in sorted(gone):
            await self.move(name).sweep(place)
        return gone


async def _cold_folders(place: OpenPlace) -> list[str]:
    """Return the names of the run's folders that have copies in a place."""
    names = [
        name.removesuffix(FOLDER_SUFFIX) for name in await folders_of(place.backend) if name.endswith(FOLDER_SUFFIX)
    ]
    return [name for name in names if step_of(name) is not None]


async def _ledger(folder: Folder, where: str) -> Ledger:
    """Read the ledger of a run. Raises InputError if there is none that can be read."""
    ledger = await folder.peek()
    if ledger is None:
        raise InputError(await _no_run(folder, where))
    return ledger


async def _no_run(folder: Folder, where: str) -> str:
    """Say why a folder without a ledger that can be read is not the one to pass."""
    if names := await folder.roles():
        return (
            f"{shown(where)} has a run of several roles: pass the folder of each of them, as {shown(where)}/{names[0]}"
        )
    if await folder.has_ledger():
        return f"{shown(where)}: the ledger of the run cannot be read, so nothing is moved; resume the run first"
    return (
        f"{shown(where)} is not the folder of a run: it has no ledger (run.json). Pass the folder of a bcp.Run; "
        "checkpoints without a run are moved by bcp.tools.copy"
    )


def _of_another(url: str, run: str) -> str:
    """Return the error of a place that is noted for another run."""
    return (
        f"the cold place {shown(url)} belongs to the run {run}; choose one for this run alone. If that run was moved "
        f"here, correct its name in {MARK_KEY} there"
    )


def _of_namesake(url: str, run: str, run_id: str, own_id: str) -> str:
    """Return the error of a place of another run whose folder has the same path, as on another host."""
    return (
        f"the cold place {shown(url)} belongs to another run at {run}, with the id {run_id}, as on another host, and "
        f"this one has the id {own_id}; choose a place for this run alone. If this is that run with a new ledger, "
        f"correct its id in {MARK_KEY} there"
    )


def _is_own(mark: Mapping[str, str], run: str, run_id: str) -> bool:
    """Whether the mark of a place is that of a run. Other hosts may have other runs at the same path."""
    return mark["run"] == run and mark["id"] in ("", run_id)


async def _refuse_if_taken(place: Backend, url: str) -> None:
    """Raise InputError for the folder of a run or of a checkpoint: who deletes that would delete cold files, too."""
    for key, words in ((LEDGER_KEY, "the folder of a run"), (METADATA_KEY, "a checkpoint")):
        if await place.version(key) is not None:
            raise InputError(f"to={shown(url)!r} is {words}; choose a place that nothing else uses")


async def _marked(place: Backend, url: str, run: str, run_id: str) -> str:
    """Put the mark of the run into a new cold place; return its token.

    Raises:
        InputError: the place belongs to another run.
        StorageError: the place cannot be written to.

    """
    mark = await mark_of(place, url)
    if not mark:
        token = secrets.token_hex(8)
        own = {"run": run, "mark": token, "id": run_id}
        await place.put(f"{MARK_KEY}.new", b"")  # put_if makes no directory
        made = await place.put_if(MARK_KEY, json.dumps(own).encode() + b"\n", None)
        await place.delete([f"{MARK_KEY}.new"])
        mark = own if made is not None else await mark_of(place, url)
    if mark.get("run") != run:
        raise InputError(_of_another(url, mark.get("run", "")))
    if not _is_own(mark, run, run_id):
        raise InputError(_of_namesake(url, run, mark["id"], run_id))
    return mark["mark"]


def _cold_url(to: Path, run: str) -> str:
    """Return the path or URL of a cold place as the record has it. Blocks.

    Raises:
        InputError: it cannot be the cold place of the run.

    """
    if not isinstance(to, str | os.PathLike) or not os.fsdecode(to):
        raise InputError(f"to={to!r} is a {type(to).__name__}; pass the path or URL of a folder, as 'gs://cold/run-7'")
    url = fixed(os.fsdecode(to))
    if shown(url) != url:
        raise InputError(f"to={shown(url)!r} has a secret in it, and the run's folder names it; pass cold_options=")
    if not is_cold_url(url, run):
        raise InputError(
            f"to={url!r}: a run with another kind of storage cannot have a cold place there; use a path, gs://, s3://, "
            "hdfs:// or a scheme of bcp.backends.register"
        )
    inner, outer = url_parts(url), url_parts(run)
    if inner[: len(outer)] == outer:
        words = "is the folder of the run" if inner == outer else "lies in the folder of the run"
        raise InputError(f"to={url!r} {words} {shown(run)}; choose a place outside of it")
    if any(map(STEP_FOLDER.fullmatch, inner)):
        raise InputError(
            f"to={url!r} lies in a checkpoint of a run, which deletes it with all that is in it; choose a place outside"
        )
    return url.rstrip("/") or "/"
