"""Copies of other hosts' snapshots, which an agent fetches from their agents (Gemini, paper sec. 7).

A host tells which of its snapshots are to be copied. The other one asks for them, compares each block with its digest
on arrival, and marks its copy as trainers mark theirs. So a recovery finds copies like any other files. Memory of
copies is used again for the next ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from bcp._log import log
from bcp._messages.tiers import Offered, Sources
from bcp.agent.fetching import fetched_receipt
from bcp.agent.pace import Pace
from bcp.agent.parity import ParityKeeper
from bcp.agent.rescue import lost_before
from bcp.errors import BcpError, CorruptError
from bcp.format.metadata import receipt_key
from bcp.format.receipt import FileReceipt, Receipt
from bcp.pipeline import Pipeline, Stage
from bcp.protocols import Backend
from bcp.read.windows import Window, windows_of, wrong_block
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import PART_BYTES, key_of, run_windows
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import COPYING, Mark, Noted, told
from bcp.tiers.peer import peer_at
from bcp.tiers.wire import OFFER

__all__ = ["Copier", "needed_operations"]

GENERATIONS = 2
"""Newer snapshots of this host, behind which the copies of a host that is not there any more can go."""

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
                        await self._fetch_rank(lost.files, mark)
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
            held = self._held.get(name, "")
            offered = Offered.decode(bytes(await files.get(f"{OFFER}{number}-{held}")))
            if offered.operation in ("", held):
                return
            marks = [Mark(offered.operation, rank) for rank in offered.ranks]
            await in_thread(self.folder.note_copies, marks, name)
            for mark in marks:
                if not await in_thread(self.folder.is_marked, mark):
                    await self._fetch_rank(files, mark)
            self._held[name] = offered.operation
            await in_thread(self._tidy)

    async def _fetch_rank(self, files: Backend, mark: Mark) -> None:
        """Fetch the files of one rank, then mark them."""
        intent, receipt, data = await fetched_receipt(files, mark, self.folder)
        key = receipt_key(mark.rank, mark.operation)
        for file in receipt.files:
            await self._fetch_file(files, receipt, file)
        await self.folder.files.put(key, data)
        await in_thread(self.folder.prepare, intent)
        await in_thread(self.folder.mark, mark)

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
                old = next((each for each in self._free() if each.stat().st_size == nbytes), None)
                if old is None:
                    self.folder.make(path, nbytes, "a copy of another host's file")
                else:
                    old.rename(path)
        if not nbytes:
            return bytearray()
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)

    def _free(self) -> list[Path]:
        """Return the files of copies that are not needed any more; they count no more. Blocks, while arranging."""
        copies, there = self.folder.copies(), self.folder.data_files()
        own = {mark.operation: age for mark, age in self.folder.own_ages().items()}
        is_marked = {mark for mark in copies if self.folder.is_marked(mark)}
        needed = needed_operations(copies, is_marked, self.folder.sources().nodes, own)
        needed |= {self._rescued, *self.folder.awaited()}
        old = [mark for mark in copies if mark.operation not in needed and self.folder.take(mark)]
        return [path for mark in old for path in there.get(mark, ())]

    def _tidy(self) -> None:
        """Give back the memory of copies that are not needed any more. Blocks."""
        with told(self.folder.root), self.folder.arranging():
            for path in self._free():
                path.unlink(missing_ok=True)
            there = self.folder.data_files()
            for mark in self.folder.copies():
                if mark not in there and not self.folder.is_marked(mark):
                    self.folder.forget_copy(mark)


def needed_operations(
    copies: Mapping[Mark, Noted], is_marked: Collection[Mark], sources: Collection[str], own: Mapping[str, float]
) -> set[str]:
    """Return the operations whose copies have to stay.

    Of a host that this one copies, these are the newest one and the newest whole one beside it: trainers choose the
    next one when all hosts have the one before. Those of other hosts, which may be lost, stay until this host has two
    newer snapshots of its own.

    Args:
        copies: all copies, whole or not.
        is_marked: those whose files are whole.
        sources: names of the hosts that this one copies.
        own: when this host's own snapshots were prepared, by operation.

    """
    needed: set[str] = set()
    for name in {noted.name for noted in copies.values()}:
        groups: dict[str, list[Mark]] = {}
        for mark, noted in sorted(copies.items(), key=lambda each: -each[1].age):
            if noted.name == name:
                groups.setdefault(mark.operation, []).append(mark)
        whole = [operation for operation, marks in groups.items() if {*marks} <= {*is_marked}]
        if name in sources:
            newest = next(iter(groups))
            needed |= {newest, *[each for each in whole if each != newest][:1]}
        elif whole:
            age = max(copies[mark].age for mark in groups[whole[0]])
            if sum(other > age for other in own.values()) < GENERATIONS:
                needed.add(whole[0])
    return needed
