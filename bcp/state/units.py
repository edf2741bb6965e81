"""Sharded states among the dataloader's: found, prepared, asked for their units, and told apart from opaque objects.

One unit of a sharded state as memory to write, without a copy; and as it was again, in the memory that was read.

The *image* of a unit: its large tensors, those with larger elements first, so that each is aligned; a list of them as
JSON; all else as an archive of :func:`~bcp.state.packed.pack`; zeros; and the three numbers of ``_END``. An image
has a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import math
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from bcp._messages.planning import Claim
from bcp.errors import BcpError, CheckpointError, InputError, StateError
from bcp.plan.shards import OPAQUE_KINDS
from bcp.plan.units import unit_path
from bcp.protocols import ShardedState, Stateful, States
from bcp.state.memory import dtype_name
from bcp.state.packed import pack, unpack

__all__ = [
    "UnitImage",
    "Units",
    "collect_units",
    "image_of",
    "opaque_states",
    "prefetch_data_state",
    "remember",
    "sharded_states",
    "unit_in",
]

ALIGNMENT = 64
_END = struct.Struct("<3Q")
"""Start and bytes of the list of tensors, and bytes of the archive behind it."""

_DTYPES = {dtype_name(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


@dataclass(frozen=True, slots=True)
class UnitImage:
    """A unit to write."""

    tensors: Sequence[torch.Tensor]  # contiguous, of the CPU, in the order of the image; the unit's own memory
    tail: bytes  # the bytes behind them

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        return sum(tensor.nbytes for tensor in self.tensors) + len(self.tail)

    def digest(self) -> str:
        """Return 32 hex digits (xxh3-128) that tell images apart."""
        state = xxhash.xxh3_128(self.tail)
        for tensor in self.tensors:
            state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return state.hexdigest()


def image_of(state: Any, where: str, *, allow_pickle: bool) -> UnitImage:
    """Make the image of a unit's state, whose tensors nobody may change until they are written.

    The state is nested Python values and tensors; ``allow_pickle`` is as for :func:`~bcp.state.packed.pack`. Raises
    StateError, which names the value, if something in it cannot be serialized, or not be read again.
    """
    outside: list[torch.Tensor] = []
    packed = pack(state, where, allow_pickle=allow_pickle, outside=outside)
    order = sorted(range(len(outside)), key=lambda number: -outside[number].itemsize)
    tensors = [outside[number] for number in order]
    rows = [[number, dtype_name(outside[number].dtype), list(outside[number].shape)] for number in order]
    head = json.dumps(rows, separators=(",", ":")).encode()
    start = sum(tensor.nbytes for tensor in tensors)
    padding = bytes(-(start + len(head) + len(packed) + _END.size) % ALIGNMENT)
    return UnitImage(tensors, head + packed + padding + _END.pack(start, len(head), len(packed)))


def unit_in(image: torch.Tensor, *, allow_pickle: bool, where: str) -> Any:
    """Return the state of a unit; its large tensors are in the memory of the image: uint8, aligned to 64 bytes.

    Raises CheckpointError if the image is damaged, or holds objects that only ``allow_pickle=True`` reads.
    """
    data = image.numpy().data
    try:
        start, head, packed = _END.unpack_from(data, len(data) - _END.size)
        tensors = _tensors(image[:start], json.loads(bytes(data[start : start + head])))
    except (struct.error, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{where} cannot be read: {error}; load another checkpoint") from error
    return unpack(data[start + head : start + head + packed], allow_pickle=allow_pickle, where=where, outside=tensors)


def _tensors(memory: torch.Tensor, rows: Sequence[tuple[int, str, list[int]]]) -> list[torch.Tensor]:
    """Cut memory into the tensors that lie in it, by number; ValueError unless they fill it."""
    tensors: dict[int, torch.Tensor] = {}
    offset = 0
    for number, name, shape in rows:
        dtype = _DTYPES[name]
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=1) < 1 or nbytes > len(memory) - offset:
            raise ValueError(f"a tensor of shape {shape} and dtype {name} does not fit into {len(memory)} bytes")
        tensors[number] = memory[offset : offset + nbytes].view(dtype).reshape(shape)
        offset += nbytes
    if offset != len(memory) or sorted(tensors) != list(range(len(rows))):
        raise ValueError(f"{len(rows)} tensors do not fill {len(memory)} bytes")
    return [tensors[number] for number in range(len(rows))]


DATALOADER = "dataloader"
_latest: list[weakref.ref[ShardedState]] = []


@dataclass(frozen=True, slots=True)
class Units:
    """The units of the sharded states of this rank."""

    claims: Sequence[Claim]  # one claim for each state
    images: Mapping[str, UnitImage]  # by path in the claims (see bcp.plan.units.claimed_paths)

    def shared_digests(self) -> dict[str, str]:
        """Return the digest of each state's shared part, which is the same on all ranks, by the state's name."""
        return {claim.name: self.images[unit_path(claim.name)].digest() for claim in self.claims}


def sharded_states(states: States) -> dict[str, ShardedState]:
    """Find the sharded states by name: ``states["dataloader"]`` itself, or values of its mappings.

    A name is keys joined by ``/``, empty for ``states["dataloader"]`` itself. Raises InputError if two states
    would have one name.
    """
    named_states: dict[str, ShardedState] = {}
    _find(states.get(DATALOADER), "", named_states)
    return named_states


def _find(value: Any, name: str, named_states: dict[str, ShardedState]) -> None:
    if isinstance(value, ShardedState):
        if name in named_states:
            raise InputError(f"two dataloader states would be named {name!r}; rename one of the keys")
        named_states[name] = value
    elif _is_container(value):
        for key, child in value.items():
            _find(child, f"{name}/{key}" if name else str(key), named_states)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, Stateful)


def opaque_states(states: States) -> dict[str, Any]:
    """Return the values that are stored as one opaque object a rank, by kind.

    These are extra states, and a dataloader without its sharded states. If nothing is left of it, it has none.
    """
    opaque = {kind: states[kind] for kind in OPAQUE_KINDS if kind in states}
    if sharded_states(states):
        rest = _rest(opaque.pop(DATALOADER))
        if rest:
            opaque[DATALOADER] = rest
    return opaque


def _rest(value: Any) -> Any:
    """Return a mapping without the sharded states in it, and without mappings that held nothing else."""
    if isinstance(value, ShardedState):
        return None
    if not _is_container(value):
        return value
    kept = {key: (child, _rest(child)) for key, child in value.items()}
    return {key: rest for key, (child, rest) in kept.items() if not _is_gone(child, rest)}


def _is_gone(child: Any, rest: Any) -> bool:
    return isinstance(child, ShardedState) or (_is_container(child) and len(child) > 0 and not rest)


def remember(named_states: Mapping[str, ShardedState]) -> None:
    """Take note of the states of the latest save or load, for as long as they live."""
    _latest[:] = [weakref.ref(state) for state in named_states.values() if type(state).__weakrefoffset__]


def prefetch_data_state(step: int, states: States | None = None, *, every_steps: int = 1) -> bool:
    """Let the dataloaders gather their states now, during the step before a save (paper sec. 4.5).

    The save then finds them gathered, and takes off the samples that the loop has consumed meanwhile. Without this call
    a save is as correct, and waits until the workers of every loader have sent their buffers. Returns at once, and
    never communicates.

    Args:
        step: the number of the step that begins now.
        states: those that will be saved. None: those of the latest save or load of this process.
        every_steps: a save follows each step whose number plus one is a multiple of it; at all other steps nothing is
            done. So it may be called at every step.

    Returns:
        Whether any state was told to prepare.

    Raises:
        InputError: ``every_steps`` is not positive.

    Example::

        for step in range(1000):
            bcp.prefetch_data_state(step, states, every_steps=100)
            train(next(loader))
            if (step + 1) % 100 == 0:
                bcp.save_async(f"run/{step + 1}", states)

    """
    if every_steps < 1:
        raise InputError(f"prefetch_data_state(every_steps={every_steps}): pass after how many steps a save follows")
    if (step + 1) % every_steps:
        return False
    alive = [reference() for reference in _latest] if states is None else list(sharded_states(states).values())
    live_states = [state for state in alive if state is not None]
    for state in live_states:
        state.prepare(step + 1)
    return bool(live_states)


def collect_units(states: States, *, allow_pickle: bool) -> Units:
    """Ask the sharded states for their units.

    Raises InputError if an id is no text, is empty, or has a slash. Raises StateError if a state raised, or if a value
    in a unit cannot be serialized.
    """
    claims, images = [], {}
    named_states = sharded_states(states)
    remember(named_states)
    for name, state in sorted(named_states.items()):
        where = f"dataloader {name!r}" if name else "dataloader"
        shared, units = _asked(state, where)
        for unit in units:
            if not isinstance(unit, str) or not unit or "/" in unit:
                raise InputError(f"{where}: {unit!r} is no id of a unit; ids are texts without a slash")
        claim = Claim(name, int(state.reader), int(state.readers), tuple(units))
        claims.append(claim)
        images[unit_path(name)] = image_of(shared, f"{where}: its shared state", allow_pickle=allow_pickle)
        for unit, value in units.items():
            images[unit_path(name, unit)] = image_of(value, f"{where}, unit {unit!r}", allow_pickle=allow_pickle)
    return Units(claims, images)


def _asked(state: ShardedState, where: str) -> tuple[Any, Mapping[str, Any]]:
    """Return the shared part and the units of a state."""
    try:
        return state.shared_state(), state.unit_states()
    except BcpError as error:
        error.add_note(f"bcp: raised while the {type(state).__name__} at {where} was asked for its state")
        raise
    except Exception as error:
        raise StateError(
            f"the {type(state).__name__} at {where} was asked for its state and raised {type(error).__name__}: "
            f"{error}; repair it, or leave it out of the states"
        ) from error
