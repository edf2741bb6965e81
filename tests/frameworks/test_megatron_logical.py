"""How sharded state dicts are read, with stand-ins for Megatron's classes: nothing here needs it installed."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn

from bcp.errors import InputError, StateError
from bcp.plan.box import Box
from bcp.planners.megatron import MegatronPlanner, MegatronRng, holds_megatron, rng
from bcp.planners.megatron.logical import LogicalShard, flat_placement, fresh_placement, logical_shards, named
from bcp.planners.megatron.model import LogicalShards, add_model
from bcp.planners.megatron.slots import optimizers_of
from bcp.state.inventory import Leaves
from bcp.state.placement import LocalInterval


@dataclass
class ShardedTensor:
    """What Megatron says of a local tensor."""

    key: str
    data: torch.Tensor | None
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: tuple[int, ...] = (0, 0, 0)
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    local_shape: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        self.local_shape = tuple(self.data.shape) if self.data is not None else ()


@dataclass
class ShardedTensorFactory:
    """What Megatron makes several sharded tensors of one with."""

    key: str
    data: torch.Tensor
    make: Callable[[torch.Tensor], Any]
    replica_id: tuple[int, ...] = (0, 0, 0)

    def build(self) -> Any:
        return self.make(self.data)


@dataclass
class ShardedObject:
    """What Megatron says of an object."""

    key: str
    data: Any
    replica_id: tuple[int, ...] = (0, 0, 0)

    @property
    def unique_key(self) -> str:
        return f"{self.key}/shard_0_1"


@dataclass
class LocalNonpersistentObject:
    """What is not stored."""

    obj: Any


class Chunk(nn.Module):
    """A module that says itself how it is sharded."""

    def __init__(self, sharded: Mapping[str, Any]) -> None:
        super().__init__()
        self.sharded, self.loaded = sharded, {}  # type: ignore[var-annotated]

    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> Mapping[str, Any]:
        assert metadata == {"non_homogeneous_layers": True}
        metadata["dp_cp_group"] = None  # as Megatron does
        return self.sharded

    def load_state_dict(self, state: Any, *, strict: bool) -> None:  # type: ignore[override]
        assert not strict
        self.loaded = dict(state)


class Float16Module(nn.Module):
    """A wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def halves(tensor: torch.Tensor) -> list[ShardedTensor]:
    """As SwiGLU: this is the second of two ranks, and each half is cut by itself."""
    one, two = tensor.chunk(2)
    return [ShardedTensor("w", one, (8, 3), (2, 0)), ShardedTensor("w", two, (8, 3), (6, 0))]


def test_a_sharded_tensor_is_one_block() -> None:
    leaf = ShardedTensor("w", torch.zeros(2, 3), (4, 3), (2, 0), (0, 1, 3), allow_shape_mismatch=True)
    box = Box((2, 0), (2, 3))
    assert logical_shards(leaf) == [LogicalShard("w", (4, 3), (LocalInterval.whole(box),), main=False, flexible=True)]
    leaf.replica_id = (0, 0, 3)
    assert logical_shards(leaf)[0].main, "data-parallel replicas are told apart by what they hold"


def test_a_factory_is_one_shard_of_several_blocks() -> None:
    (shard,) = logical_shards(ShardedTensorFactory("w", torch.zeros(4, 3), halves))
    assert shard.shape == (8, 3)
    assert shard.spans == (LocalInterval(Box((2, 0), (2, 3)), 0, 6, 0), LocalInterval(Box((6, 0), (2, 3)), 0, 6, 6))


def test_a_flat_interval_is_cut_out_of_every_block() -> None:
    (shard,) = logical_shards(ShardedTensorFactory("w", torch.zeros(4, 3), halves))
    first, second = (span.box for span in shard.spans)
    assert flat_placement(shard, 4, 9).spans == (LocalInterval(first, 4, 6, 0), LocalInterval(second, 0, 3, 2))
    assert flat_placement(shard, 7, 12).spans == (LocalInterval(second, 1, 6, 0), LocalInterval(first, 0, 0))
    assert flat_placement(shard, 4, 9).local == (5,)
    unstated = flat_placement(shard, 4, 9, stated=False)
    assert (unstated.local, unstated.numel) == ((5,), 0)
    assert {span.box for span in unstated.spans} == {first, second}
    fresh = fresh_placement(shard, torch.zeros(4, 3), 4, 9)
    assert fresh.spans == (LocalInterval(first, 4, 6, 4), LocalInterval(second, 0, 3, 6))
    assert fresh.local == (4, 3)


def test_parts_that_are_rows_of_columns_are_runs() -> None:
    def left_and_right(tensor: torch.Tensor) -> list[ShardedTensor]:
        return [ShardedTensor(f"w.{at}", part, (2, 2), (0, 0)) for at, part in enumerate(tensor.chunk(2, dim=1))]

    left, right = logical_shards(ShardedTensorFactory("w", torch.zeros(2, 4), left_and_right))
    box = Box.whole((2, 2))
    assert (left.fqn, left.spans) == ("w.0", (LocalInterval(box, 0, 2, 0), LocalInterval(box, 2, 4, 4)))
    assert (right.fqn, right.spans) == ("w.1", (LocalInterval(box, 0, 2, 2), LocalInterval(box, 2, 4, 6)))


def test_a_factory_that_copies_is_traced() -> None:
    def reversed_rows(tensor: torch.Tensor) -> list[ShardedTensor]:
        return [ShardedTensor("w", tensor.flip(0).contiguous(), (3, 2), (0, 0))]

    (shard,) = logical_shards(ShardedTensorFactory("w", torch.zeros(3, 2), reversed_rows))
    box = Box.whole((3, 2))
    assert shard.spans == (LocalInterval(box, 0, 2, 4), LocalInterval(box, 2, 4, 2), LocalInterval(box, 4, 6, 0))


def test_a_factory_that_transposes_or_drops_elements_is_refused() -> None:
    def transposed(tensor: torch.Tensor) -> list[ShardedTensor]:
        return [ShardedTensor("w", tensor.t().contiguous(), (3, 2), (0, 0))]

    with pytest.raises(StateError, match=r"'w' rearranges the elements .* SequentialMLP"):
        logical_shards(ShardedTensorFactory("w", torch.zeros(2, 3), transposed))
    with pytest.raises(StateError, match="'w' makes more or less of its tensor"):
        logical_shards(ShardedTensorFactory("w", torch.zeros(4, 3), lambda tensor: halves(tensor)[:1]))


@pytest.mark.parametrize(
    ("key", "offsets", "name"),
    [
        ("decoder.layers.mlp.linear_fc2.weight", (3,), "decoder.layers.3.mlp.linear_fc2.weight"),
        ("decoder.layers.1.mlp.experts.experts.fc1.weight", (5,), "decoder.layers.1.mlp.experts.experts.5.fc1.weight"),
        ("decoder.layers.mlp.experts.experts.fc1.w", (1, 5), "decoder.layers.1.mlp.experts.experts.5.fc1.w"),
        ("experts", (2,), "experts.2"),
        ("mine", (2, 4), "mine.2.4"),
    ],
)
def test_prepended_axes_are_numbers_in_the_name(key: str, offsets: tuple[int, ...], name: str) -> None:
    leaf = ShardedTensor(key, torch.zeros(2), (*(9 for _ in offsets), 4), (*offsets, 2), prepend_axis_num=len(offsets))
    assert named(leaf) == name
    assert logical_shards(leaf)[0].spans == (LocalInterval.whole(Box((2,), (2,))),)


@pytest.mark.parametrize(("rows", "kept"), [(9, 3), (8, 2), (7, 1), (6, 0), (5, 0), (20, 3)])
def test_a_padded_tensor_is_shortened_to_what_both_have(rows: int, kept: int) -> None:
    leaf = ShardedTensor("w", torch.zeros(3, 2), (9, 2), (6, 0), allow_shape_mismatch=True)
    shard = logical_shards(leaf)[0].fitted((rows, 2))
    assert shard.shape == (rows, 2)
    assert shard.spans == ((LocalInterval.whole(Box((6, 0), (kept, 2))),) if kept else ())
    leaf.allow_shape_mismatch = False
    assert logical_shards(leaf)[0].fitted((rows, 2)).shape == (9, 2)


def slices_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + length) for low, length in zip(box.offsets, box.lengths, strict=True))


@pytest.mark.parametrize(
    "shape", [(9, 4, 2), (9, 3, 3), (8, 4, 3), (7, 2, 2), (12, 5, 4), (9, 2, 1), (5, 4, 3), (9, 4, 0)]
)
def test_a_tensor_of_other_lengths_is_cut_to_what_both_have(shape: tuple[int, ...]) -> None:
    """The whole tensor is cut by torch's own slices, and its runs are collected where the spans say."""
    whole = torch.arange(1, 9 * 4 * 3 + 1).view(9, 4, 3)
    local = whole[6:].contiguous()
    leaf = ShardedTensor("w", local, (9, 4, 3), (6, 0, 0), allow_shape_mismatch=True)
    shard = logical_shards(leaf)[0].fitted(shape)
    found, expected = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    overlap = tuple(slice(low, min(a, b)) for low, a, b in zip((6, 0, 0), (9, 4, 3), shape, strict=True))
    expected[overlap] = whole[overlap]
    for span in shard.spans:
        block = torch.zeros(span.box.lengths, dtype=torch.int64).flatten()
        block[span.start : span.stop] = local.flatten()[span.offset : span.offset + span.stop - span.start]
        found[slices_of(span.box)] += block.view(span.box.lengths)
    assert torch.equal(found, expected)
    assert shard.shape == shape


def test_a_flattened_range_is_refused() -> None:
    leaf = ShardedTensor("w", torch.zeros(2), (9, 2), (6, 0))
    leaf.flattened_range = slice(0, 2)  # type: ignore[attr-defined]  # of other versions
    with pytest.raises(StateError, match=r"'w' has a flattened_range.*pass the optimizer itself"):
        logical_shards(leaf)


def test_objects_go_back_to_where_they_were() -> None:
    bare, shard = ShardedObject("bare", 1), ShardedObject("m._extra_state", io.BytesIO(b"abc"))
    chunk = Chunk({"local.m._extra_state": shard, "local.n._extra_state": ShardedObject("n._extra_state", None)})
    state = {"chunk": Float16Module(chunk), "bare": bare, "steps": 3, "runtime": LocalNonpersistentObject(object())}
    leaves = Leaves()
    finish = add_model(leaves, LogicalShards(), state)
    assert leaves.objects == {
        "model": {"m._extra_state/shard_0_1": b"abc", "bare/shard_0_1": 1, "steps": 3},
    }
    finish({("model", "m._extra_state/shard_0_1"): b"new", ("model", "bare/shard_0_1"): 2, ("model", "steps"): 4})
    assert chunk.loaded["local.m._extra_state"].getvalue() == b"new"
    assert (bare.data, state["steps"]) == (2, 4)


def test_only_the_first_replica_of_an_object_is_saved() -> None:
    leaves = Leaves()
    add_model(leaves, LogicalShards(), {"a": ShardedObject("a", 1, (0, 0, 1)), "b": ShardedObject("b", 1, (0, 1, 0))})
    assert not leaves.objects


def test_memory_of_one_name_and_place_is_filled_twice() -> None:
    first, second = torch.zeros(2), torch.zeros(2)
    leaves = Leaves()
    state = [ShardedTensor("w", first, (2,), (0,)), ShardedTensor("w", second, (2,), (0,), (1, 0, 0))]
    add_model(leaves, LogicalShards(), state)
    assert [tensor.data_ptr() for tensor in leaves.to_load({("model", "w")}).tensors] == [
        first.data_ptr(),
        second.data_ptr(),
    ]
    assert [tensor.data_ptr() for tensor in leaves.to_save().tensors] == [first.data_ptr()]


def test_shards_of_one_key_in_different_places_are_one_tensor() -> None:
    low, high, again = torch.zeros(2, 3), torch.ones(1, 3), torch.ones(1, 3)
    leaves = Leaves()
    shards = [(low, (0, 0), (0, 0, 0)), (high, (2, 0), (0, 0, 0)), (again, (2, 0), (1, 0, 0))]
    add_model(leaves, LogicalShards(), [ShardedTensor("w", data, (3, 3), at, replica) for data, at, replica in shards])
    held, wanted = leaves.to_save(), leaves.to_load({("model", "w")})
    assert [held.table.box(row) for row in range(2)] == [Box((0, 0), (2, 3)), Box((2, 0), (1, 3))]
    assert [tensor.data_ptr() for tensor in held.tensors] == [low.data_ptr(), high.data_ptr()]
    assert {tensor.data_ptr() for tensor in wanted.tensors} == {each.data_ptr() for each in (low, high, again)}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ShardedTensor("w", torch.ones(1), (4,), (2,)), r"are of tensors of shape \[3\] and \[4\]"),
        (ShardedTensor("w", torch.ones(1), (4,), (0,)), r"are of tensors of shape \[3\] and \[4\]"),
        (ShardedTensor("w", torch.ones(1).half(), (3,), (2,)), "with dtypes torch.float32 and torch.float16"),
        (ShardedTensor("w", torch.ones(1, device="meta"), (3,), (2,)), "is on the meta device"),
        (torch.ones(1), "two leaves of model are named 'w'"),
    ],
)
def test_shards_of_one_key_must_be_of_one_tensor(other: Any, words: str) -> None:
    first = ShardedTensor("w", torch.ones(1), (3,), (0,))
    state = [first, other] if isinstance(other, ShardedTensor) else {"a": first, "w": other}
    with pytest.raises(StateError, match=rf"'w' on rank 0.*{words}|{words} on rank 0"):
        add_model(Leaves(), LogicalShards(), state)


def test_what_is_no_megatron_model_is_refused() -> None:
    with pytest.raises(StateError, match=r"has a Linear at 'head', which has no sharded_state_dict"):
        add_model(Leaves(), LogicalShards(), {"head": nn.Linear(1, 1)})
    with pytest.raises(StateError, match="'w' has no data"):
        add_model(Leaves(), LogicalShards(), [ShardedTensor("w", None, (2,), (0,))])


class LayerWiseDistributedOptimizer:
    """Muon's."""


class Chain(LayerWiseDistributedOptimizer):
    """It is a chain itself."""

    chained_optimizers = ()


class HybridDeviceOptimizer:
    """That of CPU offload."""


class FP32Optimizer:
    """One that can be read."""

    optimizer: Any = HybridDeviceOptimizer()


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (LayerWiseDistributedOptimizer(), "is a LayerWiseDistributedOptimizer, .* use_distributed_optimizer"),
        (Chain(), "is a LayerWiseDistributedOptimizer"),
        (FP32Optimizer(), "is a HybridDeviceOptimizer, .* optimizer_cpu_offload=False"),
        (object(), "is a object; pass what get_megatron_optimizer"),
        ({"state": {}, "param_groups": [1]}, "at 'param_groups.0' is a int; pass what get_megatron_optimizer"),
    ],
)
def test_optimizers_that_cannot_be_read_are_refused(optimizer: object, words: str) -> None:
    with pytest.raises(StateError, match=words):
        optimizers_of(optimizer, lambda: "tested")


def test_an_attribute_that_is_gone_is_named() -> None:
    class Float16OptimizerWithFloat16Params:
        optimizer = config = float16_groups = None

    with pytest.raises(InputError, match="tested, in which Float16OptimizerWithFloat16Params has no fp32_from_float16"):
        optimizers_of(Float16OptimizerWithFloat16Params(), lambda: "tested")


def test_frozen_models_have_no_optimizer() -> None:
    class Stub:
        is_stub_optimizer = True

    assert optimizers_of([Stub()], lambda: "tested") == []


def test_tracked_generators_stay_the_same_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tracker:
        def __init__(self) -> None:
            self.states = {
                "graph": torch.Generator().manual_seed(1),
                "plain": torch.Generator().manual_seed(2).get_state(),
            }

        def get_states(self) -> dict[str, Any]:
            return dict(self.states)

        def set_states(self, states: dict[str, Any]) -> None:
            self.states = states

    tracker = Tracker()
    generator = tracker.states["graph"]
    monkeypatch.setattr(rng, "_tracker", lambda: tracker)
    saved = rng._states()
    drawn = float(torch.rand((), generator=generator))
    tracker.states["plain"] = torch.Generator().manual_seed(3).get_state()
    MegatronRng().load_state_dict({"rng_state": saved})
    assert tracker.states["graph"] is generator
    assert float(torch.rand((), generator=generator)) == drawn
    assert torch.equal(tracker.states["plain"], torch.Generator().manual_seed(2).get_state())


def test_megatron_is_known_by_its_classes() -> None:
    kind = type("GPTModel", (nn.Module,), {"__module__": "megatron.core.models.gpt.gpt_model"})
    own = type("Own", (kind,), {"__module__": "mine"})
    optimizer = type("ChainedOptimizer", (), {"__module__": "megatron.core.optimizer.optimizer"})
    assert holds_megatron({"model": [own()]})
    assert holds_megatron({"model": Float16Module(own())})
    assert holds_megatron({"optimizer": optimizer()})
    assert not holds_megatron({"model": nn.Linear(1, 1), "optimizer": {"step": 1}})
    assert not holds_megatron({})


def test_without_megatron_the_probe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="install megatron-core"):
        MegatronPlanner().probe()
