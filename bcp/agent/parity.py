"""The parity of other hosts' snapshots, which an agent keeps in the place of copies (RAID 5 over the hosts of a group).

Each host of a group tells which of its snapshots is to be copied. Once all of them tell the same one, the agent fetches
a segment of each other host, compares blocks with their digests on arrival, and adds the segments to a stripe. Intents
and receipts are kept whole. Memory of old stripes is used again.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from bcp._log import log
from bcp._messages.tiers import Intent, Offered, ParityRecord, Sources
from bcp.agent.fetching import fetched_receipt
from bcp.agent.offers import offered
from bcp.agent.pace import Pace
from bcp.errors import BcpError, CorruptError
from bcp.events import OWN_HOST
from bcp.format.receipt import Receipt
from bcp.pipeline import Pipeline, Stage
from bcp.plan.parity import Row, segment_for
from bcp.protocols import Backend
from bcp.read.windows import Window, windows_of, wrong_block
from bcp.runtime.threads import in_thread
from bcp.tiers.digests import PART_BYTES, key_of, run_windows
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import LEFT, Mark, told
from bcp.tiers.packing import packed
from bcp.tiers.parity import row_of, xor
from bcp.tiers.peer import peer_at
from bcp.tiers.wire import OFFER

__all__ = ["ParityKeeper"]

KEPT = 2
"""Stripes that stay: the newest one, and the one before it, since other hosts may not have the newest yet."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What another host of the group offers."""

    name: str
    address: str
    files: Backend
    told: Offered


@dataclass(frozen=True, slots=True)
class Part:
    """What another host of the group has in a stripe.

    Attributes:
        number: of the host in the group.
        offer: of the host.
        intent: of one of its ranks.
        receipts: of its files, by rank.
        row: its files.
        segment: the one in this stripe.
    """

    number: int
    offer: Offer
    intent: Intent
    receipts: Sequence[Receipt]
    row: Row
    segment: int

    def windows(self) -> list[Window]:
        """Return the blocks of its segment."""
        found = []
        files = {key_of(receipt, file): file for receipt in self.receipts for file in receipt.files}
        for key, start, stop in self.row.pieces(self.segment, 0, self.row.nbytes(self.segment)):
            begin, end = np.searchsorted(files[key].blocks.stored_start, (start, stop)).tolist()
            found += windows_of(key, files[key], PART_BYTES, begin=begin, end=end)
        return found


@dataclass(slots=True)
class ParityKeeper:
    """Keeps the stripes of one host.

    Attributes:
        folder: the memory of this host.
        pace: of what it fetches.
        troubles: the last error with each host.
    """

    folder: NodeFolder
    pace: Pace
    troubles: dict[str, str] = field(default_factory=dict)
    _held: dict[tuple[str, ...], str] = field(default_factory=dict)

    async def round(self, sources: Sources) -> bool:
        """Ask all other hosts of the group, and make a stripe of what they all offer; return whether that went well.

        The next round tells them that this host has the stripe.
        """
        held = self._held.get(sources.nodes, "")
        self.troubles = {name: error for name, error in self.troubles.items() if name in (*sources.nodes, OWN_HOST)}
        token = await in_thread(self.folder.token)
        async with AsyncExitStack() as stack:
            offers: list[Offer] = []
            for number, (name, address) in enumerate(zip(sources.nodes, sources.addresses, strict=True), 1):
                files = peer_at(name, address, token)
                stack.push_async_callback(files.aclose)
                try:
                    offer = Offered.decode(bytes(await files.get(f"{OFFER}{number}-{held}")))
                except (BcpError, OSError) as error:
                    self._tell(name, error)
                else:
                    self.troubles.pop(name, None)
                    offers.append(Offer(name, address, files, offer))
            if len(offers) < len(sources.nodes):
                return False
            own = await in_thread(offered, self.folder)
            if own.operation in ("", held) or any(each.told.operation != own.operation for each in offers):
                return True
            try:
                await self._make(sources.place, own, offers)
            except (BcpError, OSError) as error:
                self._tell(OWN_HOST, error)
                return False
        self.troubles.pop(OWN_HOST, None)
        self._held = {sources.nodes: own.operation}
        return True

    def retire(self) -> None:
        """Give back the stripes of a group that is none any more, behind newer snapshots of this host. Blocks."""
        stripes = self.folder.parity.ages()
        if not stripes:
            return
        own = {mark.operation: age for mark, age in self.folder.own_ages().items()}
        for operation in stripes.keys() - self.folder.awaited():
            if sum(other > stripes[operation] for other in own.values()) >= KEPT:
                self.folder.parity.give_back(operation)

    def _tell(self, name: str, error: Exception) -> None:
        tell = log.info if name in self.troubles else log.warning
        tell("the parity of a snapshot is not made yet", host=name, error=str(error))
        self.troubles[name] = str(error)

    async def _make(self, place: int, own: Offered, offers: Sequence[Offer]) -> None:
        """Make the stripe of a snapshot that all hosts of a group offer, unless it is here."""
        operation = own.operation
        with self.folder.parity.holding(operation) as record:
            if record is not None:
                return  # that of an earlier group stays: lost files may follow from it
        await in_thread(partial(self.folder.parity.give_back, operation, but_stripe=True))
        parts = [await self._part(place, number, offer, len(offers) + 1) for number, offer in enumerate(offers, 1)]
        memory = await in_thread(self._room, operation, max(part.row.nbytes(part.segment) for part in parts))
        for part in parts:
            await self._add(part, memory)
        await in_thread(self.folder.parity.mark, _record(place, own, parts))
        await in_thread(self._tidy)

    async def _part(self, place: int, number: int, offer: Offer, size: int) -> Part:
        """Fetch intents and receipts of the host so many places before this one."""
        member, receipts = (place - number) % size, []
        intent: Intent | None = None
        for rank in offer.told.ranks:
            mark = Mark(offer.told.operation, rank)
            intent, receipt, data = await fetched_receipt(offer.files, mark, self.folder)
            await in_thread(self.folder.parity.put_known, mark, intent.with_receipt(data))
            receipts.append(receipt)
        if intent is None:
            raise CorruptError(f"{offer.name} offers operation {offer.told.operation} with files of no rank")
        return Part(member, offer, intent, receipts, row_of(receipts, size), segment_for(member, place, size))

    async def _add(self, part: Part, memory: memoryview) -> None:
        """Add what a host has in the stripe; every block is compared with its digest."""
        base = int(part.row.bounds[part.segment])
        begin = dict(zip(part.row.keys, part.row.begin.tolist(), strict=False))

        async def add(window: Window) -> Window:
            await self.pace.take(window.nbytes)
            got = memoryview(bytearray(window.nbytes))
            await part.offer.files.read_into(window.key, window.start, got)
            if wrong := await in_thread(wrong_block, window, got):
                raise CorruptError(f"from {part.offer.files!r}: {wrong}")
            start = begin[window.key] + window.start - base
            await in_thread(xor, memory[start : start + window.nbytes], got)
            return window

        start: Pipeline[Window, Window] = Pipeline()
        await run_windows(start.then(Stage("add", add, workers=2)), part.windows())

    def _room(self, operation: str, nbytes: int) -> memoryview:
        """Return memory of zeros for a stripe: that of an old stripe of this size, or new memory. Blocks."""
        parity = self.folder.parity
        path = parity.stripe(operation)
        with told(path), self.folder.arranging():
            if path.exists() and path.stat().st_size != nbytes:
                path.unlink()
            for other in self._free(operation):
                old = parity.stripe(other)
                if parity.give_back(other, but_stripe=True) and old.exists():
                    if not path.exists() and old.stat().st_size == nbytes:
                        old.rename(path)
                    old.unlink(missing_ok=True)
            is_new = not path.exists()
            if is_new:
                self.folder.make(path, nbytes, "the parity of other hosts' files")
        if not nbytes:
            return memoryview(bytearray())
        with path.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), nbytes))
        if not is_new:
            np.frombuffer(memory, np.uint8)[:] = 0
        return memory

    def _free(self, operation: str = "") -> set[str]:
        """Return the stripes that are not needed, given the save whose stripe is being made. Blocks."""
        ages, ended = self.folder.parity.ages(), self.folder.ended()
        whole = sorted((each for each in ages if ended.get(each) != LEFT), key=lambda each: -ages[each])
        kept = [operation, *(each for each in whole if each != operation)] if operation else whole
        return self.folder.parity.operations() - {*kept[:KEPT], *self.folder.awaited()}

    def _tidy(self) -> None:
        """Give back the memory of stripes that are not needed any more. Blocks."""
        with told(self.folder.parity.root), self.folder.arranging():
            for operation in self._free():
                self.folder.parity.give_back(operation)


def _record(place: int, own: Offered, parts: Sequence[Part]) -> ParityRecord:
    """Say whose files are in a stripe."""
    others, intent = {part.number: part.offer for part in parts}, parts[0].intent
    numbers = range(len(parts) + 1)
    return ParityRecord(
        own.operation,
        intent.step,
        intent.world_size,
        place,
        tuple(others[each].name if each in others else "" for each in numbers),
        tuple(others[each].address if each in others else "" for each in numbers),
        tuple(packed(others[each].told.ranks if each in others else own.ranks) for each in numbers),
    )
