"""The emulated machine: streams that are threads, events, and the clocks that say which work is ordered.

Every stream has a vector clock, and all host threads share one. Work that no clock orders is a race, and it is
recorded when it is queued. So a race is found in every run, however the threads happen to be scheduled.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

Clock = dict[int, int]
PATIENCE = 60.0
"""Seconds after which a wait is a deadlock of the test."""

POOL = 32
"""Side streams of a device; torch hands them out in turn."""

raw = threading.local()
"""``raw.on``: the calling thread sees host memory, as torch itself does."""


def merge(into: Clock, other: Clock) -> None:
    for number, tick in other.items():
        if tick > into.get(number, 0):
            into[number] = tick


@dataclass(slots=True)
class Access:
    """One queued use of a stretch of memory."""

    low: int
    high: int
    write: bool
    lane: int
    tick: int
    epoch: int
    what: str


@dataclass(slots=True)
class Touch:
    """What work will do to memory: ``ledger`` is the list of accesses of a device block, or of host memory."""

    ledger: list[Access]
    low: int
    high: int
    write: bool


@dataclass(slots=True)
class Work:
    """One queued operation."""

    job: Callable[[], object]
    touches: Sequence[Touch]
    what: str
    late: float | None = None


@dataclass(slots=True)
class Point:
    """A place in the work of a stream."""

    clock: Clock
    flag: threading.Event = field(default_factory=threading.Event)


class Lane:
    """A queue of work on a device, and the thread that does it."""

    def __init__(self, machine: Machine, device: int, number: int) -> None:
        self.machine, self.device, self.number = machine, device, number
        self.clock: Clock = {}
        self.epoch = 0
        self.captured: list[Work] | None = None
        self.mode, self.owner = "", 0
        self.queued = self.done = 0  # pieces of work, without marks; the stream's thread alone counts ``done``
        self.queue: queue.SimpleQueue[tuple[float, Callable[[], object]] | None] = queue.SimpleQueue()
        self.rng = random.Random(f"{machine.seed}/{number}")  # noqa: S311 -- no secret
        self.slow = self.rng.choice((0.0, 0.2, 1.0)) * machine.slow
        self.thread = threading.Thread(target=self._run, name=f"late-{device}-{number}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        raw.on = True
        while (entry := self.queue.get()) is not None:
            late, job = entry
            if late:
                time.sleep(late)
            try:
                job()
            except Exception:  # noqa: BLE001 -- shown by the test
                self.machine.defect(f"work on a stream raised: {traceback.format_exc()}")

    def put(self, work: Work) -> Point:
        """Queue work after all that the calling thread and this stream know of; return its end."""
        machine = self.machine
        machine.require_parent()
        with machine.lock:
            machine.drain()
            if self.captured is not None:
                self.captured.append(work)
                return Point(dict(self.clock))
            merge(self.clock, machine.host)
            tick = self.clock[self.number] = self.clock.get(self.number, 0) + 1
            for touch in work.touches:
                machine.note(self, touch, tick, work.what)
            point = Point(dict(self.clock))
            late = machine.delay(self) if work.late is None else work.late
            self._queue(late, work.job)
            return point

    def mark(self) -> Point:
        """Return the end of all that is queued."""
        machine = self.machine
        machine.require_parent()
        with machine.lock:
            machine.drain()
            merge(self.clock, machine.host)
            self.epoch += 1
            point = Point(dict(self.clock))
            self.queue.put((0.0, point.flag.set))
            return point

    def follow(self, point: Point) -> None:
        """Let what comes next wait for a point of another stream."""
        self.machine.require_parent()
        with self.machine.lock:
            self.machine.drain()
            merge(self.clock, point.clock)
            self._queue(0.0, lambda: self.machine.reached(point))

    def _queue(self, late: float, job: Callable[[], object]) -> None:
        def counted() -> None:
            try:
                job()
            finally:
                self.done += 1

        self.queued += 1
        self.queue.put((late, counted))

    def idle(self) -> Point | None:
        """Return the end of all that is queued if the stream has come to it."""
        with self.machine.lock:
            return self.mark() if self.done == self.queued else None


class Machine:
    """Accelerators of one kind.

    Attributes:
        kind: device type, as in ``"cuda"``.
        devices: how many there are.
        counts: how often each thing was done, as in ``counts["d2h"]``.
        waits: for each wait of the host: what it was for, and whether an event loop ran in the thread.
        on_loop: calls of the driver in threads in which an event loop ran.
        host: the clock of the host's threads.
        flight: queued accesses to host memory.
    """

    def __init__(self, kind: str = "cuda", devices: int = 2, seed: int = 0, slow: float = 0.002) -> None:
        self.kind, self.devices, self.seed, self.slow = kind, devices, seed, slow
        self.final: list[str] = []
        self.pid = os.getpid()
        self.lock = threading.RLock()
        self.local = threading.local()
        self.host: Clock = {}
        self.flight: list[Access] = []
        self.counts: Counter[str] = Counter()
        self.waits: list[tuple[str, bool]] = []
        self.on_loop: list[str] = []
        self.relaxed: set[int] = set()
        self.hurry = 0.3  # seconds of random delays in all
        self.on_drain: list[Callable[[], None]] = []
        self.on_stream: Callable[[], object] = int
        self.lanes: list[Lane] = []
        self.defaults = [self.lane(device) for device in range(devices)]
        self.side: list[list[Lane]] = [[] for _ in range(devices)]
        self.handed = [0] * devices
        self._defects: list[str] = []
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)

    def lane(self, device: int) -> Lane:
        with self.lock:
            self.lanes.append(made := Lane(self, device, len(self.lanes) + 1))
            return made

    def side_lane(self, device: int) -> Lane:
        """Return the next stream of torch's pool."""
        self.require_parent()
        with self.lock:
            lanes, number = self.side[device], self.handed[device]
            self.handed[device] += 1
            if len(lanes) < POOL:
                lanes.append(self.lane(device))
            return lanes[number % POOL]

    # -- defects

    @property
    def defects(self) -> list[str]:
        """What was done wrong so far, in this process and in its forked children."""
        while True:
            try:
                text = os.read(self._told, 65536).decode()
            except BlockingIOError:
                break
            self._defects += text.splitlines()
        with self.lock:
            self.drain()
            return list(dict.fromkeys(self._defects))

    def defect(self, text: str) -> None:
        """Record something that was done wrong, once."""
        if self.forked:
            os.write(self._tell, f"{text.splitlines()[0]}\n".encode())
        else:
            self._defects.append(text)

    def forgive(self) -> list[str]:
        """Forget the defects, and return them."""
        found = self.defects
        self._defects.clear()
        return found

    @property
    def forked(self) -> bool:
        return os.getpid() != self.pid

    def require_parent(self) -> None:
        if self.forked:
            raise RuntimeError(f"Cannot re-initialize {self.kind.upper()} in forked subprocess")

    def forbid(self, what: str) -> None:
        """Record what no thread may do while a stream captures; and whether it is done on an event loop."""
        if asyncio._get_running_loop() is not None:
            self.on_loop.append(what)
        me = threading.get_ident()
        for lane in list(self.lanes):
            everywhere = lane.mode == "global" and me not in self.relaxed
            if lane.captured is not None and (everywhere or lane.owner == me):
                self.defect(f"{what} while a stream of device {lane.device} captured a graph")

    # -- order

    def drain(self) -> None:
        for each in self.on_drain:
            each()

    def note(self, lane: Lane, touch: Touch, tick: int, what: str) -> None:
        """Compare an access with those that are not over, and add it to them."""
        if touch.high <= touch.low:
            return
        ledger, clock = touch.ledger, lane.clock
        if ledger and self.host.get(ledger[0].lane, 0) >= ledger[0].tick:
            ledger[:] = [old for old in ledger if self.host.get(old.lane, 0) < old.tick]
        for old in ledger:
            overlap = old.low < touch.high and touch.low < old.high and (old.write or touch.write)
            if overlap and clock.get(old.lane, 0) < old.tick:
                self.defect(f"race: {what} on stream {lane.number} does not wait for {old.what} on stream {old.lane}")
        last = ledger[-1] if ledger else None
        if last and (last.lane, last.epoch, last.write, last.high) == (lane.number, lane.epoch, touch.write, touch.low):
            last.high, last.tick = touch.high, tick
        else:
            ledger.append(Access(touch.low, touch.high, touch.write, lane.number, tick, lane.epoch, what))

    def pending(self, ledger: Sequence[Access], clock: Clock, low: int, high: int, *, write: bool) -> list[Access]:
        """Return the accesses to a stretch that a clock does not know to be over."""
        return [
            old
            for old in ledger
            if old.low < high and low < old.high and (old.write or write) and clock.get(old.lane, 0) < old.tick
        ]

    def use_host(self, low: int, high: int, what: str, *, write: bool) -> None:
        """Record it if the host uses memory that a queued copy still uses."""
        if self.flight and not self.forked:
            with self.lock:
                for old in self.pending(self.flight, self.host, low, high, write=write):
                    self.defect(f"host: {what} while {old.what} on stream {old.lane} is under way")

    def delay(self, lane: Lane) -> float:
        late = min(lane.rng.expovariate(1.0) * lane.slow, 0.005) if lane.slow and lane.rng.random() < 0.5 else 0.0
        late = min(late, self.hurry)
        self.hurry -= late
        return late if late > 5e-5 else 0.0

    # -- waits of the host

    def reached(self, point: Point) -> None:
        if not point.flag.wait(PATIENCE):
            raise TimeoutError("a stream did not come to an event: a deadlock of the test?")

    def wait(self, point: Point, what: str) -> None:
        """Let the calling thread wait for a point."""
        self.forbid(what)
        self.counts[what] += 1
        self.waits.append((what, asyncio._get_running_loop() is not None))
        self.reached(point)
        self.know(point)

    def query(self) -> None:
        """Record a question that waits for nothing."""
        self.require_parent()
        self.forbid("event query")
        self.counts["event query"] += 1

    def know(self, point: Point) -> None:
        with self.lock:
            self.drain()
            merge(self.host, point.clock)

    def synchronize(self, device: int) -> None:
        """Wait for a whole device."""
        self.require_parent()
        self.forbid("device synchronize")
        self.counts["device synchronize"] += 1
        self.waits.append(("device synchronize", asyncio._get_running_loop() is not None))
        for point in [lane.mark() for lane in list(self.lanes) if lane.device == device]:
            self.reached(point)
            self.know(point)

    # -- the calling thread

    @property
    def device(self) -> int:
        self.require_parent()
        return getattr(self.local, "device", 0)

    @device.setter
    def device(self, number: int) -> None:
        self.require_parent()
        if not 0 <= number < self.devices:
            raise RuntimeError(f"{self.kind} error: invalid device ordinal {number}")
        self.local.device = number

    def current(self, device: int | None = None) -> Lane:
        """Return the calling thread's current stream of a device."""
        device = self.device if device is None else device
        return getattr(self.local, "lanes", {}).get(device) or self.defaults[device]

    def choose(self, lane: Lane) -> None:
        """Make a stream the calling thread's current one, and its device too, as torch does."""
        if not hasattr(self.local, "lanes"):
            self.local.lanes = {}
        self.local.lanes[lane.device] = lane
        self.device = lane.device

    # -- graphs

    @contextmanager
    def capture(self, mode: str = "global") -> Iterator[Graph]:
        """Capture what is queued on the caller's current stream into a graph, in place of running it."""
        lane = self.current()
        lane.captured, lane.mode, lane.owner = [], mode, threading.get_ident()
        graph = Graph(self, lane.captured)
        try:
            yield graph
        finally:
            lane.captured, lane.mode = None, ""

    def close(self) -> None:
        """Finish all work, and end the threads."""
        for lane in list(self.lanes):
            lane.captured = None
        for point in [lane.mark() for lane in list(self.lanes)]:
            self.reached(point)
        for lane in self.lanes:
            lane.queue.put(None)
            lane.thread.join(PATIENCE)
        os.close(self._told)
        os.close(self._tell)


@dataclass
class Graph:
    """Captured work."""

    machine: Machine
    works: list[Work]

    def replay(self) -> None:
        """Queue it on the caller's current stream; no hook of Python is called."""
        lane = self.machine.current()
        for work in self.works:
            lane.put(work)


_machines: list[Machine] = []


def machine() -> Machine:
    """Return the machine that is emulated now."""
    return _machines[-1]


def emulated() -> Machine | None:
    return _machines[-1] if _machines else None
