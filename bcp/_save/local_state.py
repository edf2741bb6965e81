"""The local state of a rank: shards, values, opaque objects and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from bcp._job import SaveJob
from bcp.plan.columns import Ints
from bcp.plan.shards import ShardTable
from bcp.plan.units import encode_claims
from bcp.protocols import LocalShards
from bcp.stages.memcpy import addresses
from bcp.state.nested import leaves_of
from bcp.state.objects import check_changeable, collect
from bcp.state.packed import pack
from bcp.state.random_states import undisturbed
from bcp.state.units import UnitImage, collect_units, opaque_states

__all__ = ["LocalState", "collect_local_state"]


@dataclass(frozen=True, slots=True)
class LocalState:
    """The local state of this rank: shards of tensors, values, and opaque objects as bytes."""

    framework: str  # name of the planner
    shards: LocalShards  # the planner's shards; the table names the extras too
    address: Ints  # int64[n], where each row's first byte is, or 0 where only torch can copy it
    extras: Mapping[str, bytes]  # kind -> packed object
    units: Mapping[str, UnitImage]  # images of the shared parts and units of the rank's sharded states, by path
    shared: Mapping[str, str]  # by name of such a state, digest of its part that is equal on all ranks

    @property
    def nbytes(self) -> int:
        """Bytes of tensors, packed objects and units, replicas included."""
        units = sum(image.nbytes for image in self.units.values())
        return int(self.shards.table.nbytes.sum()) + sum(map(len, self.extras.values())) + units


def collect_local_state(job: SaveJob) -> LocalState:
    """Ask the planner for this rank's shards, and pack the opaque objects and units.

    Copies that the caller has queued from a device to host memory are over when this returns.
    """
    opaque = opaque_states(job.states)
    for kind, value in opaque.items():
        check_changeable(value, kind)
    with job.caller.streams_in_use(), undisturbed(*opaque.values()) as random_states:
        planner = job.planner()
        shards = planner.local_shards(job.states)
        collected = {kind: collect(value, kind, random_states) for kind, value in opaque.items()}
        if job.caller.streams:
            values = list({id(value): value for value in shards.objects.values()}.values())
            job.caller.wait_for_copies_to([*shards.tensors, *leaves_of(values), *leaves_of(collected)])
        extras = {kind: pack(value, kind, allow_pickle=job.options.allow_pickle) for kind, value in collected.items()}
        units = collect_units(job.states, allow_pickle=job.options.allow_pickle)
    address = addresses(shards.tensors, shards.table) if shards.address is None else shards.address
    table = _with_extras(shards.table, sorted(extras), encode_claims(units.claims))
    return LocalState(planner.name, replace(shards, table=table), address, extras, units.images, units.shared_digests())


_latest: WeakKeyDictionary[ShardTable, ShardTable] = WeakKeyDictionary()


def _with_extras(table: ShardTable, extras: Sequence[str], units: str) -> ShardTable:
    """Return the table with these extras: if it can be that of the last time, it need not be digested again."""
    latest = _latest.get(table)
    if latest is None or latest.extras != extras or latest.units != units:
        latest = _latest[table] = replace(table, extras=extras, units=units)
    return latest
