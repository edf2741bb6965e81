from __future__ import annotations

import pytest
import torch
from planning import assembled, pieces, saved_by
from ragged import Mesh, RaggedDTensor, Shard
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import Replicate

from bcp.errors import StateError
from bcp.planners import Fsdp2Planner, planner

FSDP2 = Fsdp2Planner()


def lookalike(local, shape, *placements: object, mesh=(2,), coordinate=(1,)):
    """A DTensor that is none of torch's; nothing here is ragged."""
    return RaggedDTensor(local, shape, Mesh(mesh, coordinate), placements)


def stating(tensor, *chunks: tuple[tuple[int, ...], tuple[int, ...]]):
    """Let a tensor state its blocks, by a closure on the tensor itself."""
    stated = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in chunks]
    tensor.__create_chunk_list__ = lambda: stated
    return tensor


# -- blocks that a tensor states itself --------------------------------------------------------------


def test_a_closure_on_the_local_tensor_counts_more_than_the_placements():
    local = stating(torch.arange(6.0).view(2, 3), ((5, 0), (2, 3)))
    shards = FSDP2.local_shards({"model": {"t": lookalike(local, (7, 3), Shard(0))}})
    assert (shards.table.box(0).offsets, shards.table.box(0).lengths) == ((5, 0), (2, 3))
    assert shards.tensors[0].data_ptr() == local.data_ptr()


def test_a_local_tensor_without_elements_states_none_or_an_empty_block():
    for chunks in ([], [((7, 0), (0, 3))]):
        local = stating(torch.zeros(0, 3), *chunks)
        shards = FSDP2.local_shards({"model": {"t": lookalike(local, (7, 3), Shard(0))}})
        assert not shards.tensors


REFUSED = {
    r"of shape \(2, 3\) states 2 blocks, and has no __get_tensor_shard__": [((0, 0), (1, 3)), ((1, 0), (1, 3))],
    r"of shape \(2, 3\) states 0 blocks, and has no __get_tensor_shard__": [],
    r"states a block Box\(offsets=\(0, 0\), lengths=\(3, 3\)\) but gives \(2, 3\)": [((0, 0), (3, 3))],
    r"states a block Box\(offsets=\(0, 0\), lengths=\(0, 3\)\) but gives \(2, 3\)": [((0, 0), (0, 3))],
}


@pytest.mark.parametrize("message", REFUSED)
def test_statements_that_cannot_be_are_refused(message):
    local = stating(torch.zeros(2, 3), *REFUSED[message])
    with pytest.raises(StateError, match=rf"model tensor 't' on rank 0: .*{message}"):
        FSDP2.local_shards({"model": {"t": lookalike(local, (7, 3), Shard(0))}})


def test_states_lie_where_the_parameter_says_that_it_does():
    net = nn.Module()
    net.w = nn.Parameter(lookalike(torch.ones(2, 3), (7, 3), Shard(0)))
    stating(net.w._local_tensor, ((5, 0), (2, 3)))
    optimizer = torch.optim.AdamW(net.parameters())
    net.w.grad = torch.ones_like(net.w)
    optimizer.step()
    shards = FSDP2.local_shards({"model": net, "optimizer": optimizer})
    boxes = {shards.table.meta(row).fqn: shards.table.box(row).offsets for row in range(len(shards.tensors))}
    placed = dict.fromkeys(("w", "state.w.exp_avg", "state.w.exp_avg_sq"), (5, 0))
    assert boxes == {**placed, "state.w.step": ()}
    fresh = torch.optim.AdamW(net.parameters())
    targets = FSDP2.load_targets({"model": net, "optimizer": fresh}, saved_by(shards))
    assert len(targets.shards.tensors) == len(shards.tensors)
    targets.finish(shards.objects)
    assert isinstance(fresh.state[net.w]["exp_avg"], RaggedDTensor)


def test_parameters_of_megatron_fsdp_that_state_nothing_are_refused_in_an_optimizer():
    rows = Shard(0)
    parameter = nn.Parameter(lookalike(torch.ones(2, 3), (7, 3), rows))
    parameter.__fsdp_param__ = True
    stated = lookalike(stating(parameter._local_tensor[:], ((5, 0), (2, 3))), (7, 3), rows)
    states = {"model": {"w": stated}, "optimizer": torch.optim.SGD([parameter], momentum=0.9)}
    with pytest.raises(StateError, match=r"the parameter 'w' of states\['optimizer'\] is sharded by Megatron-FSDP"):
        FSDP2.local_shards(states)
    stating(parameter._local_tensor, ((5, 0), (2, 3)))
    assert FSDP2.local_shards(states).table.box(0).offsets == (5, 0)


def test_an_unmarked_tensor_before_a_marked_one_of_its_form_changes_nothing():
    FSDP2.local_shards({"model": {"t": torch.ones(2, 3)}})
    for mark in ("_mfsdp_parameter_group", "megatron_fsdp_dist_index"):
        marked = torch.ones(2, 3)
        setattr(marked, mark, object())
        with pytest.raises(StateError, match=r"model tensor 't' on rank 0 is sharded by Megatron-FSDP"):
            FSDP2.local_shards({"model": {"t": marked}})
    replicated = lookalike(torch.ones(2, 3), (2, 3), Replicate())
    replicated.__fsdp_param__ = True
    assert len(FSDP2.local_shards({"model": {"t": replicated}}).tensors) == 1


def test_a_mesh_that_cuts_in_an_order_of_its_own_is_refused():
    tensor = lookalike(torch.ones(2, 3), (8, 3), Shard(0), Shard(0), mesh=(2, 2), coordinate=(0, 1))
    tensor.device_mesh._shard_order = [1, 0]
    with pytest.raises(StateError, match=r"model tensor 't' on rank 0 is sharded by Megatron-FSDP"):
        FSDP2.local_shards({"model": {"t": tensor}})


# -- DTensors that are none of torch's ----------------------------------------------------------------


class _StridedShard(Shard):
    def __init__(self, dim: int, split_factor: int) -> None:
        super().__init__(dim)
        self.split_factor = split_factor


class InterleavedShard(Shard):
    """What veScale's older version derives from its Shard: the elements lie in another order."""

    def __repr__(self) -> str:
        return "InterleavedShard(0)"


def test_placements_are_known_by_name():
    whole = torch.arange(16.0).view(8, 2)
    parts = []
    for coordinate in (0, 1):
        rows = [0, 1, 4, 5] if coordinate == 0 else [2, 3, 6, 7]
        made = lookalike(whole[rows], (8, 2), _StridedShard(0, 2), Replicate(), mesh=(2, 1), coordinate=(coordinate, 0))
        assert planner(None, {"model": {"t": made}}).name == "fsdp2"
        parts += pieces(FSDP2.local_shards({"model": {"t": made}}))
    assert torch.equal(assembled(parts)["model", "t"], whole)


def test_placements_that_are_derived_from_known_ones_are_refused():
    with pytest.raises(
        StateError, match=r"model tensor 't' on rank 0 has the placement InterleavedShard\(0\): .*order"
    ):
        FSDP2.local_shards({"model": {"t": lookalike(torch.zeros(4, 2), (8, 2), InterleavedShard(0))}})
