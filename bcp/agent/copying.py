"""Copies of other hosts' snapshots, which an agent fetches from their agents (Gemini, paper sec. 7).

A host tells which of its snapshots are to be copied. The other one asks for them, compares each block with its digest
on arrival, and marks its copy as trainers mark theirs. So a recovery finds copies like any other files. Memory of
copies is used again for the next ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from bcp._log import log
from bcp._messages.tiers import Offered, Sources, Traffic, WrittenTwin
from bcp.agent.fetching import fetched_receipt
from bcp.agent.pace import Pace
from bcp.agent.parity import ParityKeeper
from bcp.agent.rescue import lost_before
from bcp.agent.twins import compared, drift_of
from bcp.errors import BcpError, CorruptError, StorageError
from bcp.format.metadata import receipt_key
from bcp.format.receipt import FileReceipt, Receipt
from bcp.pipeline import Pipeline, Stage
from bcp.protocols import Backend
from bcp.read.windows import Window, windows_of, wrong_block
from bcp.runtime.threads import in_thread
from bcp.tiers.copies import TwinState, free_copies, twin_state
from bcp.tiers.digests import PART_BYTES, key_of, run_windows
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import COPYING, Mark, told
from bcp.tiers.peer import peer_at
from bcp.tiers.wire import OFFER

__all__ = ["Copier"]

LONGEST_PAUSE_SECONDS = 5.0


@dataclass(slots=True)
class Copier:
    """Fetches the snapshots of the hosts that the trainers have chosen for this one.

    Attributes:
        folder: the memory of this host.
        poll_seconds: how often it asks.
        pace: of what it fetches.
        stuck: snapshots that wait for a host which may be lost.
    """

    folder: NodeFolder
    poll_seconds: float
    pace: Pace
    stuck: set[str] = field(default_factory=set)
    _held: dict[str, str] = field(default_factory=dict)
    _told: dict[str, str] = field(default_factory=dict)
    _lost: dict[str, str] = field(default_factory=dict)
    _rescued: str = ""
    _fetched: int = 0
    _by_twins: int = 0
    _parity: ParityKeeper = field(init=False)

    def __post_init__(self) -> None:
        self._parity = ParityKeeper(self.folder, self.pace)

    async def run(self) -> None:
        """Fetch until it is cancelled. Behind a failure it waits longer each time, unless the hosts change."""
        pause = self.poll_seconds
        while True:
            sources = await in_thread(self.folder.sources)
            pause = self.poll_seconds if await self.round(sources) else min(2 * pause, LONGEST_PAUSE_SECONDS)
            with anyio.move_on_after(pause):
                while await in_thread(self.folder.sources) == sources:  # noqa: ASYNC110 -- trainers change the file
                    await anyio.sleep(self.poll_seconds)

    async def round(self, sources: Sources) -> bool:
        """Ask each host once, and fetch what it offers; return whether all have answered."""
        if sources.place >= 0:
            if await in_thread(self.folder.copies):  # of a life without parity, or of a lost host
                await in_thread(self._tidy)
            is_well, troubles = await self._parity.round(sources), self._parity.troubles
        else:
            await in_thread(self._parity.retire)
            is_well, troubles = await self._copy(sources), self._told
        for operation in sorted(self.stuck):
            is_well = await self._rescue(operation) and is_well
        self._lost = {name: error for name, error in self._lost.items() if name in self.stuck}
        lost = {f"a lost host in operation {name}": error for name, error in self._lost.items()}
        await in_thread(self.folder.put_troubles, COPYING, troubles | lost)
        return is_well

    async def _copy(self, sources: Sources) -> bool:
        """Fetch what each host offers."""
        is_well = True
        for number, (name, address) in enumerate(zip(sources.nodes, sources.addresses, strict=True), 1):
            files = peer_at(name, address, await in_thread(self.folder.token))
            try:
                await self._fetch(files, name, number)
            except (BcpError, OSError) as error:
                tell = log.info if name in self._told else log.warning
                tell("a snapshot of another host is not copied yet", host=name, error=str(error))
                self._told[name] = str(error)
                is_well = False
            else:
                self._told.pop(name, None)
            finally:
                await files.aclose()
        self._told = {name: error for name, error in self._told.items() if name in sources.nodes}
        return is_well

    async def _rescue(self, operation: str) -> bool:
        """Rebuild the files of a lost host from parity, where this host is the one to do it; they become copies."""
        try:
            async with lost_before(self.folder, operation) as lost:
                if lost is None:
                    return True
                self._rescued = operation
                await in_thread(self.folder.note_copies, lost.marks, lost.name)
                for mark in lost.marks:
                    if not await in_thread(self.folder.is_marked, mark):
                        await self._fetch_rank(lost.files, mark, lost.name)
                log.info("the files of a lost host are rebuilt from parity", host=lost.name, operation=operation)
        except (BcpError, OSError) as error:
            tell = log.info if operation in self._lost else log.warning
            tell("the files of a lost host are not rebuilt yet", operation=operation, error=str(error))
            self._lost[operation] = str(error)
            return False
        finally:
            self._rescued = ""
        self._lost.pop(operation, None)
        return True

    async def _fetch(self, files: Backend, name: str, number: int) -> None:
        """Fetch the newest snapshot that a host offers, and tell it so, until it offers no other one."""
        while True:
            held, before = self._held.get(name, ""), (self._fetched, self._by_twins)
            offered = Offered.decode(bytes(await files.get(f"{OFFER}{number}-{held}")))
            if offered.operation in ("", held):
                return
            marks = [Mark(offered.operation, rank) for rank in offered.ranks]
            await in_thread(self.folder.note_copies, marks, name)
            if TwinState.WRITING in await in_thread(self._states, marks):
                return  # the next round finds them whole
            for mark in marks:
                if not await in_thread(self.folder.is_marked, mark):
                    await self._fetch_rank(files, mark, name)
            self._held[name] = offered.operation
            fetched, by_twins = self._fetched - before[0], self._by_twins - before[1]
            log.info("a snapshot of another host is copied", host=name, network=fetched, twins=by_twins)
            await in_thread(self.folder.put_traffic, Traffic(self._fetched, self._by_twins))
            await in_thread(self._tidy)

    def _states(self, marks: Sequence[Mark]) -> list[TwinState]:
        with told(self.folder.root), self.folder.arranging():
            return [twin_state(self.folder, mark) for mark in marks if not self.folder.is_marked(mark)]

    async def _fetch_rank(self, files: Backend, mark: Mark, name: str) -> None:
        """Fetch the files of one rank, but for those that a twin has written here; then mark them."""
        intent, receipt, data = await fetched_receipt(files, mark, self.folder)
        key, twin = receipt_key(mark.rank, mark.operation), await in_thread(self._twin, mark)
        for file in receipt.files:
            path = self.folder.root / key_of(receipt, file)
            if twin is not None and path.exists() and path.stat().st_size == file.stored_nbytes:
                differing = await compared(path, files, receipt, file, self.pace, twin.differing)
                self._count(differing.fetched, file.stored_nbytes - differing.fetched)
                if differing.blocks:
                    drift = drift_of(differing, receipt, file, intent.step, host=name, twin=twin.writer)
                    log.warning("replicas have drifted: %s", drift.said, step=intent.step)
                    await in_thread(self.folder.put_drift, drift, file.kind)
            else:
                await self._fetch_file(files, receipt, file)
                self._count(file.stored_nbytes, 0)
        await self.folder.files.put(key, data)
        await in_thread(self.folder.prepare, intent)
        await in_thread(self._mark, mark, twin)

    def _twin(self, mark: Mark) -> WrittenTwin | None:
        """Return which rank of this host has written files whole; let the files be the agent's else. Blocks."""
        with told(self.folder.root), self.folder.arranging():
            if twin_state(self.folder, mark) is TwinState.WHOLE:
                return self.folder.twins()[mark]
            self.folder.forget_twin(mark)
            return None

    def _mark(self, mark: Mark, twin: WrittenTwin | None) -> None:
        """Mark files, unless the trainers that have written them have taken them back. Blocks."""
        with told(self.folder.root), self.folder.arranging():
            if twin is not None and mark not in self.folder.twins():
                raise StorageError(f"rank {twin.writer} has taken back its files of rank {mark.rank}: they come again")
            self.folder.mark(mark)
            self.folder.forget_twin(mark)

    def _count(self, fetched: int, by_twins: int) -> None:
        self._fetched += fetched
        self._by_twins += by_twins

    async def _fetch_file(self, files: Backend, receipt: Receipt, file: FileReceipt) -> None:
        """Fetch a file by parts into its memory; every block is compared with its digest."""
        key = key_of(receipt, file)
        memory = await in_thread(self._room, self.folder.root / key, file.stored_nbytes)

        async def fetch(window: Window) -> Window:
            await self.pace.take(window.nbytes)
            out = memoryview(memory)[window.start : window.start + window.nbytes]
            await files.read_into(window.key, window.start, out)
            if wrong := await in_thread(wrong_block, window, out):
                raise CorruptError(f"from {files!r}: {wrong}")
            return window

        start: Pipeline[Window, Window] = Pipeline()
        await run_windows(start.then(Stage("fetch", fetch, workers=2)), windows_of(key, file, PART_BYTES))

    def _room(self, path: Path, nbytes: int) -> mmap.mmap | bytearray:
        """Return the memory of a file: that of an old copy of this size, or new memory. Blocks."""
        with told(path), self.folder.arranging():
            path.parent.mkdir(0o700, exist_ok=True)
            if path.exists() and path.stat().st_size != nbytes:
                path.unlink()
            if not path.exists():
                old = next(
                    (each for each in free_copies(self.folder, self._rescued) if each.stat().st_size == nbytes), None
                )
                if old is None:
                    self.folder.make(path, nbytes, "a copy of another host's file")
                else:
                    old.rename(path)
        if not nbytes:
            return bytearray()
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)

    def _tidy(self) -> None:
        """Give back the memory of copies that are not needed any more. Blocks."""
        with told(self.folder.root), self.folder.arranging():
            for path in free_copies(self.folder, self._rescued):
                path.unlink(missing_ok=True)
            there = self.folder.data_files()
            for mark in self.folder.copies():
                if mark not in there and not self.folder.is_marked(mark):
                    self.folder.forget_copy(mark)
