"""The conformance suite that every planner has to pass.

::

    class TestMine(PlannerSuite):
        def planner(self):
            return MyPlanner()

        def states(self, rank, world_size, seed):
            return {"model": my_shard_of_a_model(rank, world_size, seed)}

All ranks live in one process, one after the other. Needs pytest and anyio's pytest plugin, which comes with anyio.
"""
# ruff: noqa: S101 -- a suite is made of assertions

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bcp._api import aload, asave
from bcp.backends import MemoryBackend
from bcp.coordinators import memory_coordinators
from bcp.errors import BcpError, FqnMismatchError
from bcp.plan.read.renamed import CheckpointNames
from bcp.plan.shards import ShardTable, TensorMeta, TensorTable
from bcp.protocols import Coordinator, LoadTargets, LocalShards, Planner, States

__all__ = ["PlannerSuite"]

Name = tuple[str, str]
"""Kind and FQN of a tensor."""

Elements = npt.NDArray[np.uint8]
"""uint8[numel, itemsize]: the bytes of each element of a whole tensor, in row-major order."""


class PlannerSuite:
    """Subclass it and override :meth:`planner` and :meth:`states`.

    Attributes:
        resharded: numbers of ranks that save and that load.
    """

    pytestmark = pytest.mark.anyio
    resharded: Sequence[tuple[int, int]] = ((1, 1), (1, 3), (2, 3), (3, 2), (3, 1))

    @pytest.fixture
    def anyio_backend(self) -> str:
        """Run on asyncio."""
        return "asyncio"

    def planner(self) -> Planner:
        """Return a new planner; every suite overrides this."""
        raise NotImplementedError("override the method `planner`")

    def states(self, rank: int, world_size: int, seed: int) -> States:
        """Return new states of one rank; every suite overrides this.

        The whole tensors of all ranks depend on the seed only. Other seeds give other values in tensors of the same
        names, shapes and dtypes.
        """
        raise NotImplementedError("override the method `states`")

    def target_states(self, rank: int, world_size: int) -> States:
        """Return the states that a load fills, with other values than seed 0; for instance a new optimizer's."""
        return self.states(rank, world_size, seed=1)

    # -- the shards of a save -----------------------------------------------------------------

    def test_name(self) -> None:
        """A planner has a name, and its probe accepts the installed framework."""
        planner = self.planner()
        assert isinstance(planner.name, str)
        assert planner.name
        if probe := getattr(planner, "probe", None):
            probe()

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_shards_tile_every_tensor(self, world_size: int) -> None:
        """Shards of all ranks cover every element once, replicas aside, and replicas have equal bits."""
        assert _whole([self._local_shards(rank, world_size) for rank in range(world_size)])

    def test_whole_tensors_are_those_of_any_number_of_ranks(self) -> None:
        """The same whole tensors result from one rank and from three ranks."""
        tensors_of_one, tensors_of_three = (
            _whole([self._local_shards(rank, size) for rank in range(size)]) for size in (1, 3)
        )
        _check_equal(tensors_of_one, tensors_of_three)

    def test_shards_are_live_memory(self) -> None:
        """Tensors are the framework's memory and no copies; they need no gradient."""
        states = self.states(0, 1, seed=0)
        shards, other = self.planner().local_shards(states), self.planner().local_shards(states)
        assert [t.data_ptr() for t in shards.tensors] == [t.data_ptr() for t in other.tensors]
        assert not any(tensor.requires_grad for tensor in shards.tensors)
        for tensor in shards.tensors:
            tensor.zero_()
        assert not any(torch.count_nonzero(tensor) for tensor in self.planner().local_shards(states).tensors)

    def test_calls_state_equal_tables(self) -> None:
        """Two calls state equal tables for the same states, and two ranks of one layout for other values."""
        states = self.states(0, 2, seed=0)
        first = self.planner().local_shards(states).table
        for other in (states, self.states(0, 2, seed=1)):
            _check_equal_tables(first, self.planner().local_shards(other).table)

    def test_objects_are_those_of_the_table(self) -> None:
        """The table names every leaf that is not a tensor."""
        shards = self._local_shards(0, 2)
        assert sorted(shards.table.objects) == sorted(shards.objects)

    def test_nothing_is_communicated(self) -> None:
        """Both methods read the states of one rank, and no operation of a process group runs."""
        source, target = self.states(0, 2, seed=0), self.target_states(0, 2)
        with _NoCollectives():
            shards = self.planner().local_shards(source)
            self.planner().load_targets(target, _names([shards]))

    # -- the targets of a load ----------------------------------------------------------------

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_targets_change_nothing_before_finish(self, world_size: int) -> None:
        """``load_targets`` and ``check`` leave every tensor and object of the states as it was."""
        saved = [self._local_shards(rank, world_size) for rank in range(world_size)]
        states = self.target_states(0, world_size)
        before = self.planner().local_shards(states)
        copies, objects = [t.clone() for t in before.tensors], copy.deepcopy(dict(before.objects))
        targets = self.planner().load_targets(states, _names(saved))
        targets.check(_objects(saved))
        after = self.planner().local_shards(states)
        _check_equal_tables(before.table, after.table)
        assert all(_bits(clone) == _bits(other) for clone, other in zip(copies, after.tensors, strict=True))
        _check_equal_objects(objects, after.objects)

    def test_targets_keep_names_that_the_checkpoint_lacks(self) -> None:
        """Names of the model that a checkpoint lacks stay in the targets, so that bcp refuses the load."""
        states = self.target_states(0, 1)
        wanted = _metas([self.planner().local_shards(states).table])
        targets = self.planner().load_targets(states, _names([]))
        target_metas = _metas([targets.shards.table])
        assert {name for name in wanted if name[0] == "model"} <= target_metas.keys()

    @pytest.mark.parametrize("case", range(5))
    def test_what_ranks_save_other_ranks_load(self, case: int) -> None:
        """Every bit and every object of a save arrives, on another number of ranks."""
        before, after = self._resharded(case)
        saved = [self._local_shards(rank, before) for rank in range(before)]
        values, objects, names = _whole(saved), _objects(saved), _names(saved)
        targets = [self.target_states(rank, after) for rank in range(after)]
        for states in targets:
            _fill(self.planner().load_targets(states, names), values, names, copy.deepcopy(objects))
        loaded = [self.planner().local_shards(states) for states in targets]
        _check_equal(values, _whole(loaded))
        _check_equal_objects(objects, _objects(loaded))

    # -- saves and loads of bcp ---------------------------------------------------------------

    @pytest.mark.parametrize("case", range(5))
    async def test_a_checkpoint_loads_on_other_ranks(self, case: int) -> None:
        """A checkpoint of bcp has every bit of the states, and loads on another number of ranks."""
        before, after = self._resharded(case)
        saved = [self.states(rank, before, seed=0) for rank in range(before)]
        loaded = [self.target_states(rank, after) for rank in range(after)]
        store = MemoryBackend("planner suite")
        try:
            await self._on_ranks(asave, store, saved)
            await self._on_ranks(aload, store, loaded)
        finally:
            MemoryBackend.forget("planner suite")
        sides = [[self.planner().local_shards(states) for states in side] for side in (saved, loaded)]
        _check_equal(*map(_whole, sides))
        _check_equal_objects(*map(_objects, sides))

    async def test_a_load_of_other_names_is_refused(self) -> None:
        """A load raises if the checkpoint lacks the target's names, and changes no tensor."""
        store = MemoryBackend("planner suite")
        states = self.target_states(0, 1)
        before = [_bits(tensor) for tensor in self.planner().local_shards(states).tensors]
        try:
            await asave(store, {"model": {"no name of the planner": torch.zeros(1)}}, framework="plain")
            with pytest.raises(FqnMismatchError):
                await aload(store, states, framework=self.planner())
        finally:
            MemoryBackend.forget("planner suite")
        assert before == [_bits(tensor) for tensor in self.planner().local_shards(states).tensors]

    # -- helpers ------------------------------------------------------------------------------

    def _resharded(self, case: int) -> tuple[int, int]:
        if case >= len(self.resharded):
            pytest.skip(f"there are {len(self.resharded)} pairs")
        return self.resharded[case]

    def _local_shards(self, rank: int, world_size: int) -> LocalShards:
        return self.planner().local_shards(self.states(rank, world_size, seed=0))

    async def _on_ranks(self, call: Any, store: MemoryBackend, states: Sequence[States]) -> None:
        """Call ``asave`` or ``aload`` for all ranks at once."""
        errors: list[BcpError] = []

        async def on_rank(rank_states: States, coordinator: Coordinator) -> None:
            try:
                await call(store, rank_states, framework=self.planner(), coordinator=coordinator)
            except BcpError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for rank_states, coordinator in zip(states, memory_coordinators(len(states)), strict=True):
                group.start_soon(partial(on_rank, rank_states, coordinator))
        if errors:
            raise errors[0]


class _NoCollectives(TorchDispatchMode):
    """Fails for every operation of a process group."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, unless it communicates."""
        del types
        assert "c10d" not in func.namespace, f"the planner communicates: it calls {func}"
        return func(*args, **(kwargs or {}))


def _bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements, in row-major order."""
    return _elements(tensor).tobytes()


def _elements(tensor: torch.Tensor) -> Elements:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not len(flat):
        return np.zeros((0, tensor.element_size()), np.uint8)
    return flat.view(torch.uint8).numpy().reshape(-1, tensor.element_size()).copy()


def _places(table: ShardTable, row: int) -> npt.NDArray[np.int64]:
    """Return the row-major position in the whole tensor of every element of a shard, in the shard's order."""
    box, shape = table.box(row), table.meta(row).shape
    block = tuple(slice(low, low + count) for low, count in zip(box.offsets, box.lengths, strict=True))
    every = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).reshape(shape)
    return every[block].reshape(-1)[int(table.start[row]) : int(table.stop[row])]


def _whole(ranks: Sequence[LocalShards]) -> dict[Name, Elements]:
    """Put the shards of all ranks together; check that they tile every tensor that is not tied to another."""
    metas = _metas([shards.table for shards in ranks])
    numel = {name: int(np.prod(meta.shape, dtype=np.int64)) for name, meta in metas.items() if not meta.tied_to}
    values = {name: np.zeros((count, metas[name].itemsize), np.uint8) for name, count in numel.items()}
    holders = {name: np.zeros(count, np.int64) for name, count in numel.items()}
    seen: dict[tuple[Name, bytes], bytes] = {}
    for rank, shards in enumerate(ranks):
        assert len(shards.table) == len(shards.tensors), f"rank {rank}: a table has one row for each tensor"
        for row, tensor in enumerate(shards.tensors):
            meta, places = shards.table.meta(row), _places(shards.table, row)
            name = (meta.kind, meta.fqn)
            _check_shard(f"{meta.kind} tensor {meta.fqn!r} on rank {rank}", shards.table, row, tensor)
            bits = _elements(tensor)
            if replica := seen.get((name, places.tobytes())):
                assert replica == bits.tobytes(), f"replicas of {name} differ on rank {rank} and a rank before it"
                continue
            seen[name, places.tobytes()] = bits.tobytes()
            values[name][places] = bits
            holders[name][places] += 1
    for name, count in holders.items():
        assert (count == 1).all(), f"shards of {name} leave a gap, or overlap without being replicas"
    return values


def _check_shard(where: str, table: ShardTable, row: int, tensor: torch.Tensor) -> None:
    """Check that a shard's tensor is as its row in the table says."""
    meta, box = table.meta(row), table.box(row)
    start, stop = int(table.start[row]), int(table.stop[row])
    assert str(tensor.dtype) == f"torch.{meta.dtype}", where
    assert tensor.element_size() == meta.itemsize, where
    assert 0 <= start <= stop <= box.numel, where
    ends = [low + count for low, count in zip(box.offsets, box.lengths, strict=True)]
    assert all(end <= size for end, size in zip(ends, meta.shape, strict=True)), where
    shapes = [(stop - start,)] if stop - start < box.numel else [(stop - start,), box.lengths]
    assert tuple(tensor.shape) in shapes, where
    assert not meta.tied_to, f"{where} is tied to {meta.tied_to!r}, so it has no shards of its own"


def _metas(tables: Sequence[ShardTable]) -> dict[Name, TensorMeta]:
    """Return the tensors of all ranks by name; check that ranks agree on shape and dtype."""
    metas: dict[Name, TensorMeta] = {}
    for table in tables:
        for row in range(len(table.tensors)):
            meta = table.tensors[row]
            first = metas.setdefault((meta.kind, meta.fqn), meta)
            facts = [(tensor.shape, tensor.dtype, tensor.itemsize, tensor.tied_to) for tensor in (first, meta)]
            assert facts[0] == facts[1], f"ranks disagree about {meta.kind} tensor {meta.fqn!r}"
    return metas


def _names(ranks: Sequence[LocalShards]) -> CheckpointNames:
    """Return the names in a checkpoint of these ranks."""
    metas = _metas([shards.table for shards in ranks])
    rows = {name: row for row, name in enumerate(metas)}
    return CheckpointNames(rows, frozenset(_objects(ranks)), TensorTable.build(list(metas.values())))


def _objects(ranks: Sequence[LocalShards]) -> dict[Name, Any]:
    """Return copies of the leaves of all ranks that are not tensors."""
    return copy.deepcopy({name: value for shards in ranks for name, value in shards.objects.items()})


def _fill(
    targets: LoadTargets, values: Mapping[Name, Elements], saved: CheckpointNames, objects: Mapping[Name, Any]
) -> None:
    """Do the work of a load on one rank: check, fill every tensor, finish."""
    targets.check(objects)
    table = targets.shards.table
    for row, tensor in enumerate(targets.shards.tensors):
        meta = table.meta(row)
        _check_shard(f"target {meta.fqn!r}", table, row, tensor)
        tied_to = saved.meta((meta.kind, meta.fqn)).tied_to
        elements = values[meta.kind, tied_to or meta.fqn][_places(table, row)]
        source = torch.from_numpy(elements.reshape(-1)).view(tensor.dtype) if elements.size else tensor.new_empty(0)
        tensor.copy_(source.reshape(tensor.shape))
    targets.finish(objects)


def _check_equal(tensors: Mapping[Name, Elements], other: Mapping[Name, Elements]) -> None:
    assert tensors.keys() == other.keys()
    assert [name for name in tensors if not np.array_equal(tensors[name], other[name])] == []


def _check_equal_tables(table: ShardTable, other: ShardTable) -> None:
    assert list(_metas([table]).values()) == list(_metas([other]).values())
    for column in fields(ShardTable):
        if column.name != "tensors":
            assert np.array_equal(getattr(table, column.name), getattr(other, column.name)), column.name


def _check_equal_objects(objects: Mapping[Name, Any], other: Mapping[Name, Any]) -> None:
    assert objects.keys() == other.keys()
    for name, value in objects.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: bool(a == b)
        assert equal(value, other[name]), name
