"""Memory of the emulated machine: of its devices, with a caching allocator, and page-locked memory of the host."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from late_machine import Access, Clock, Lane, Machine, Touch, Work, emulated, raw

POISON = 0xCD
ROUND = 512
PAGE = 4096
MAP_NORESERVE = 0x4000
ARENA = 1 << 31
"""Address space of a device; only pages that are written to take memory."""

_base = torch._C.TensorBase
_data_ptr = torch.UntypedStorage.data_ptr


@dataclass(slots=True)
class Block:
    """A stretch of device memory that a tensor owns, or that is free."""

    device: int
    offset: int
    nbytes: int
    lane: Lane
    ledger: list[Access] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)  # lanes named to record_stream
    holder: Any = None


@dataclass(slots=True)
class Pinned:
    """Page-locked memory that torch allocated; ``used``: whether a queued copy ever used it."""

    address: int
    nbytes: int
    rounded: int
    memory: mmap.mmap
    used: bool = False
    holder: Any = None


@dataclass(slots=True)
class Ref:
    """What a queued operation knows of a tensor: an address. It keeps no device memory alive, as no kernel does."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conj: bool
    neg: bool
    block: Block | None

    @classmethod
    def of(cls, tensor: torch.Tensor, block: Block | None) -> Ref:
        shape, stride = tuple(tensor.shape), tensor.stride()
        start = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        return cls(start, shape, stride, tensor.dtype, tensor.is_conj(), tensor.is_neg(), block)

    @property
    def high(self) -> int:
        if 0 in self.shape:
            return self.address
        last = sum((count - 1) * step for count, step in zip(self.shape, self.stride, strict=True))
        return self.address + (last + 1) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        """Return the memory as a tensor of the host, with a version counter of its own."""
        size = self.high - self.address
        if not size:
            return torch.empty(self.shape, dtype=self.dtype)
        data = torch.frombuffer((ctypes.c_char * size).from_address(self.address), dtype=torch.uint8)
        plain = data.view(self.dtype).as_strided(self.shape, self.stride)
        plain = plain.conj() if self.conj else plain
        return torch._neg_view(plain) if self.neg else plain

    def touch(self, machine: Machine, *, write: bool) -> Touch:
        ledger = machine.flight if self.block is None else self.block.ledger
        return Touch(ledger, self.address, self.high, write)


class Memory:
    """The memory of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.arenas = [
            mmap.mmap(-1, ARENA, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
            for _ in range(machine.devices)
        ]
        self.starts = [address_of(arena) for arena in self.arenas]
        self.ends = [0] * machine.devices
        self.blocks: dict[int, Block] = {}
        self.free: defaultdict[tuple[int, int], list[Block]] = defaultdict(list)  # by lane and size
        self.freed: deque[tuple[Block, Clock, Clock]] = deque()
        self.refuse = 0
        self.limits = [ARENA] * machine.devices
        self.pinned: dict[int, Pinned] = {}
        self.host_free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self.host_reserved = 0
        self.registered: dict[int, int] = {}
        self.closed = False
        machine.on_drain.append(self.drain)

    # -- devices

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """Return the block that a tensor lies in; None for memory of the host."""
        try:
            pointer = _data_ptr(_base.untyped_storage(tensor))
        except (RuntimeError, NotImplementedError, ValueError):  # without a storage
            return None
        for start in self.starts:
            if start <= pointer < start + ARENA:
                return self.blocks.get(pointer)
        return None

    def allocate(
        self, shape: Iterable[int], dtype: torch.dtype, device: int, stride: Iterable[int] | None = None
    ) -> torch.Tensor:
        """Return new memory of a device, from what is free on the caller's current stream; poisoned there."""
        machine = self.machine
        machine.require_parent()
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta") if stride else None
        like = torch.empty(tuple(shape), dtype=dtype, device="meta") if like is None else like
        nbytes = like.untyped_storage().nbytes()
        block = self._take(max(-(-nbytes // ROUND), 1) * ROUND, machine.current(device))
        data = np.frombuffer(self.arenas[device], np.uint8, max(nbytes, 1), block.offset)
        data = data.view()  # what the storage keeps, and nothing else does
        self._watch(data, block)
        made = torch.from_numpy(data)
        return made[:nbytes].view(dtype).as_strided(like.shape, like.stride())

    def _take(self, size: int, lane: Lane) -> Block:
        with self.machine.lock:
            self.machine.drain()
            if self.refuse:
                self.refuse -= 1
                if not self.refuse:
                    self._no_room(size)
            if (pool := getattr(self.machine.local, "pool", None)) is not None:
                pool.nbytes += size
            if free := self.free[lane.number, size]:
                block = free.pop()
                block.shared.clear()
            else:
                if self.ends[lane.device] + size > self.limits[lane.device]:
                    self._no_room(size)
                block = Block(lane.device, self.ends[lane.device], size, lane)
                self.ends[lane.device] += size
            start = self.starts[lane.device] + block.offset
            self.blocks[start] = block
            poison = Work(lambda: ctypes.memset(start, POISON, size), (), "allocation", late=0.0)
            if lane.captured is None:
                lane.put(poison)
            self.machine.counts["allocate"] += 1
            return block

    def _no_room(self, size: int) -> NoReturn:
        raise torch.OutOfMemoryError(f"{self.machine.kind} out of memory. Tried to allocate {size} bytes")

    def _watch(self, data: np.ndarray, block: Block) -> None:
        machine = self.machine

        def gone(_: object) -> None:  # in any thread, at any time: no lock
            if not machine.forked:
                self.freed.append((block, dict(block.lane.clock), dict(machine.host)))

        block.holder = weakref.ref(data, gone)

    def drain(self) -> None:
        """Take back what was freed: its stream uses it again at once, so other streams have to be done with it."""
        while self.freed:
            block, clock, host = self.freed.popleft()
            known = {n: max(clock.get(n, 0), host.get(n, 0)) for n in clock.keys() | host.keys()}
            low = self.starts[block.device] + block.offset
            for old in self.machine.pending(block.ledger, known, low, low + block.nbytes, write=True):
                if old.lane not in block.shared:
                    self.machine.defect(
                        f"lifetime: device memory was freed while {old.what} on stream {old.lane} uses it"
                    )
            block.ledger.clear()
            self.blocks.pop(low, None)
            self.free[block.lane.number, block.nbytes].append(block)

    # -- host

    def pin(self, nbytes: int) -> torch.Tensor:
        """Return uint8[nbytes] of page-locked memory, as torch's allocator does: of a power of two bytes."""
        rounded = max(1 << (max(nbytes, 1) - 1).bit_length(), PAGE)
        free = self.host_free[rounded]
        if free:
            memory = free.pop()
        else:
            self.machine.require_parent()
            self.machine.forbid("allocation of page-locked memory")
            self.machine.counts["pin"] += 1
            memory = mmap.mmap(-1, rounded)
            self.host_reserved += rounded
        ctypes.memset(address_of(memory), POISON, rounded)
        data = np.frombuffer(memory, np.uint8, max(nbytes, 1)).view()
        one = Pinned(data.ctypes.data, nbytes, rounded, memory)

        def gone(_: object) -> None:
            if self.closed:
                return
            if self.machine.forked:
                if one.used:
                    self.machine.defect("A forked child freed page-locked memory of torch: CUDA aborts there")
                return
            if self.pinned.pop(one.address, None):
                self.host_free[rounded].append(memory)

        one.holder = weakref.ref(data, gone)
        self.pinned[one.address] = one
        return torch.from_numpy(data)[:nbytes]

    def stats(self) -> dict[str, int]:
        """Return what ``torch.cuda.host_memory_stats`` does."""
        return {
            "allocated_bytes.current": sum(one.rounded for one in list(self.pinned.values())),
            "reserved_bytes.current": self.host_reserved,
            "num_host_alloc": self.machine.counts["pin"],
        }

    @property
    def locked_nbytes(self) -> int:
        """Bytes of host memory that are page-locked, by whatever call."""
        return self.host_reserved + sum(self.registered.values())

    def empty_host_cache(self) -> None:
        self.host_reserved -= sum(size * len(each) for size, each in self.host_free.items())
        self.host_free.clear()

    def register(self, address: int, nbytes: int, _flags: int = 0) -> int:
        self.machine.require_parent()
        self.machine.forbid("cudaHostRegister")
        self.machine.counts["register"] += 1
        if any(low < address + nbytes and address < low + size for low, size in list(self.registered.items())):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered[address] = nbytes
        return 0

    def unregister(self, address: int) -> int:
        if self.machine.forked:
            self.machine.defect("A forked child unregistered page-locked memory")
            return 3  # cudaErrorInitializationError
        self.machine.forbid("cudaHostUnregister")
        self.machine.counts["unregister"] += 1
        nbytes = self.registered.pop(address, None)
        if nbytes is None:
            return 713  # cudaErrorHostMemoryNotRegistered
        self.machine.use_host(address, address + nbytes, "unregister", write=True)
        return 0

    def unmapped(self, low: int, high: int) -> None:
        """Take note that the host's memory there is given back to the operating system."""
        if self.closed or self.machine.forked:
            return
        for start, nbytes in list(self.registered.items()):
            if start < high and low < start + nbytes:
                self.machine.defect("memory was unmapped while it was registered")
                self.registered.pop(start, None)
        self.machine.use_host(low, high, "munmap", write=True)

    def is_pinned(self, low: int, high: int) -> bool:
        ranges = [(one.address, one.address + one.rounded) for one in list(self.pinned.values())]
        ranges += [(start, start + nbytes) for start, nbytes in list(self.registered.items())]
        return any(start <= low and high <= stop for start, stop in ranges)

    def use_pinned(self, low: int) -> None:
        """Take note that a queued copy uses the memory: torch records an event for it when it is freed."""
        for one in list(self.pinned.values()):
            if one.address <= low < one.address + one.rounded:
                one.used = True

    def close(self) -> None:
        self.closed = True


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


_memories: list[Memory] = []


def memory() -> Memory:
    """Return the memory of the machine that is emulated now."""
    return _memories[-1]


def block_of(tensor: object) -> Block | None:
    """Return the device memory of a tensor; None for the host's, and in the threads of streams."""
    if emulated() is None or getattr(raw, "on", False) or not isinstance(tensor, torch.Tensor):
        return None
    return memory().block_of(tensor)


@contextmanager
def as_host():
    """Let the calling thread use tensors as plain memory, whatever they pose as."""
    before = getattr(raw, "on", False)
    raw.on = True
    try:
        yield
    finally:
        raw.on = before
