from __future__ import annotations

import pytest
import torch
from planning import Name, fill, names, saved_by
from torch import nn, optim

from bcp.errors import MismatchError, StateError
from bcp.plan.box import Box
from bcp.plan.read.renamed import CheckpointNames
from bcp.protocols import LoadTargets
from bcp.state.inventory import Leaves
from bcp.state.optimizer_restore import slot_targets
from bcp.state.optimizers import Slot, add_slots
from bcp.state.placement import LocalInterval, Placement, ShardedLeaf

WHOLE = Box.whole((3, 4))


def sharded(*spans: LocalInterval, local: int = 20, shape: tuple[int, ...] = (3, 4)) -> ShardedLeaf:
    return ShardedLeaf(torch.arange(local).float(), Placement(shape, (local,), spans))


def test_a_flat_interval_is_a_view_of_local_memory() -> None:
    leaf = sharded(LocalInterval(WHOLE, 2, 7, offset=5))
    (part,) = leaf.parts("w")
    assert (part.box, part.start, part.stop) == (WHOLE, 2, 7)
    assert part.view.tolist() == [5, 6, 7, 8, 9]
    part.view.fill_(-1)
    assert leaf.tensor[4:11].tolist() == [4, -1, -1, -1, -1, -1, 10]


def test_a_whole_box_has_its_own_shape() -> None:
    upper, lower = Box((0, 0), (1, 4)), Box((1, 0), (2, 4))
    parts = list(sharded(LocalInterval.whole(lower, offset=8), LocalInterval.whole(upper, offset=3)).parts("w"))
    assert [tuple(part.view.shape) for part in parts] == [(2, 4), (1, 4)]
    assert parts[0].view.flatten().tolist() == list(range(8, 16))


def test_one_span_that_is_all_of_the_local_tensor_need_not_be_contiguous() -> None:
    local = torch.arange(12.0).view(4, 3).t()
    (part,) = ShardedLeaf(local, Placement((3, 4), (3, 4), (LocalInterval.whole(WHOLE),))).parts("w")
    assert part.view.data_ptr() == local.data_ptr()
    assert torch.equal(part.view, local)
    two = Placement((3, 4), (3, 4), (LocalInterval(WHOLE, 0, 4), LocalInterval(WHOLE, 4, 12, offset=4)))
    with pytest.raises(StateError, match=r"w: 2 parts of it lie in memory that is not contiguous"):
        list(ShardedLeaf(local, two).parts("w"))


def test_a_local_tensor_that_was_replaced_is_an_error() -> None:
    leaf = ShardedLeaf(torch.zeros(7), Placement((3, 4), (20,), (LocalInterval(WHOLE, 0, 12),)))
    with pytest.raises(StateError, match=r"w: its placement is of a local tensor of shape \[20\], but that is \[7\]"):
        list(leaf.parts("w"))


def test_what_is_not_here_is_stated_as_an_empty_interval() -> None:
    leaves = Leaves()
    leaves.add("model", "w", sharded(LocalInterval(WHOLE, 3, 3)))
    table = leaves.to_save().table
    assert (len(table), table.box(0), table.nbytes.tolist()) == (1, WHOLE, [0])
    assert table.meta(0).shape == (3, 4)
    assert table.meta(0).stride == (4, 1)


def test_tied_leaves_are_one_object_even_where_nothing_is_here() -> None:
    tied, other = sharded(LocalInterval(WHOLE, 0, 0)), sharded(LocalInterval(WHOLE, 0, 0))
    leaves = Leaves()
    for name, leaf in {"a": tied, "b": tied, "c": other}.items():
        leaves.add("model", name, leaf)
    assert names(leaves.to_save()) == {"a": "", "b": "a", "c": ""}


def test_a_copy_is_loaded_too_and_not_saved() -> None:
    leaves, copy = Leaves(), torch.zeros(3, 4)
    leaves.add("model", "w", sharded(LocalInterval(WHOLE, 2, 7)))
    leaves.also("model", "w", copy)
    assert len(leaves.to_save().table) == 1
    shards = leaves.to_load([("model", "w")])
    assert [tuple(tensor.shape) for tensor in shards.tensors] == [(5,), (3, 4)]
    assert shards.tensors[1].data_ptr() == copy.data_ptr()


def test_a_copy_of_a_tied_leaf_is_loaded_by_the_name_that_was_saved() -> None:
    leaves, leaf, copy = Leaves(), torch.zeros(3, 4), torch.zeros(3, 4)
    leaves.add("model", "a", leaf)
    leaves.add("model", "b", leaf)
    leaves.also("model", "a", copy)
    shards = leaves.to_load([("model", "b")])
    assert [tensor.data_ptr() for tensor in shards.tensors] == [leaf.data_ptr(), copy.data_ptr()]


# -- slots ----------------------------------------------------------------------------------------


def slot_of(
    optimizer: optim.Optimizer, parameter: torch.Tensor, span: LocalInterval, fqn: str = "w", **more: object
) -> Slot:
    placement = Placement((3, 4), tuple(parameter.shape), (span,))
    return Slot(fqn, parameter, optimizer.param_groups[0], optimizer.state, placement=placement, **more)  # type: ignore[arg-type]  # a test's shorthand


def targets_of(slots: list[Slot], saved: CheckpointNames) -> LoadTargets:
    leaves = Leaves()
    check, finish = slot_targets(leaves, slots, saved)
    return LoadTargets(leaves.to_load(saved.rows), check, finish)


def trained() -> tuple[CheckpointNames, dict[Name, torch.Tensor], dict[Name, object]]:
    """An ordinary optimizer's checkpoint of a parameter w of shape (3, 4)."""
    w = nn.Parameter(torch.ones(3, 4))
    optimizer = optim.AdamW([w], lr=0.125)
    for _ in range(2):
        w.grad = torch.arange(12.0).view(3, 4)
        optimizer.step()
    leaves = Leaves()
    add_slots(leaves, [Slot("w", w, optimizer.param_groups[0], optimizer.state)])
    shards = leaves.to_save()
    values = {(m.kind, m.fqn): tensor for m, tensor in zip(metas(shards), shards.tensors, strict=True)}
    return saved_by(shards), values, dict(shards.objects)


def metas(shards):
    return [shards.table.meta(row) for row in range(len(shards.table))]


def test_states_that_do_not_exist_yet_are_made_in_local_shape() -> None:
    saved, values, objects = trained()
    flat = nn.Parameter(torch.full((20,), 7.0))
    fresh = optim.AdamW([flat], lr=1.0)
    targets = targets_of([slot_of(fresh, flat, LocalInterval(WHOLE, 2, 7, offset=5))], saved)
    assert flat.eq(7.0).all()
    targets.check(objects)
    for row, tensor in enumerate(targets.shards.tensors):
        meta = targets.shards.table.meta(row)
        whole = values[meta.kind, meta.fqn]
        tensor.copy_(whole.flatten()[2:7] if whole.dim() else whole)
    assert not fresh.state
    targets.finish(objects)
    assert sorted(fresh.state[flat]) == ["exp_avg", "exp_avg_sq", "step"]
    assert tuple(fresh.state[flat]["exp_avg"].shape) == (20,)
    assert fresh.param_groups[0]["lr"] == 0.125
    assert fresh.state[flat]["step"].item() == 2
    assert torch.equal(fresh.state[flat]["exp_avg"][5:10], values["optimizer", "state.w.exp_avg"].flatten()[2:7])
    assert fresh.state[flat]["exp_avg"][:5].eq(0).all()
    assert fresh.state[flat]["exp_avg"][10:].eq(0).all()


def test_a_state_of_another_shape_cannot_be_placed() -> None:
    flat = nn.Parameter(torch.zeros(20))
    optimizer = optim.SGD([flat])
    optimizer.state[flat]["row"] = torch.zeros(3)
    with pytest.raises(StateError, match=r"the state 'row' of 'w' has the shape \[3\], its parameter \[20\]"):
        add_slots(Leaves(), [slot_of(optimizer, flat, LocalInterval(WHOLE, 0, 12))])


def test_a_master_is_saved_unless_the_model_has_its_values() -> None:
    flat = nn.Parameter(torch.zeros(20))
    optimizer = optim.SGD([flat])
    for master_saved in (True, False):
        leaves, master = Leaves(), sharded(LocalInterval(WHOLE, 0, 12))
        add_slots(
            leaves, [slot_of(optimizer, flat, LocalInterval(WHOLE, 0, 12), master=master, master_saved=master_saved)]
        )
        assert ("state.w.master_param" in leaves.tensors["optimizer"]) == master_saved
        wanted = targets_of(
            [slot_of(optimizer, flat, LocalInterval(WHOLE, 0, 12), master=master, master_saved=master_saved)],
            saved_by(),
        )
        assert "state.w.master_param" in wanted.shards.table.tensors.fqn


def test_a_saved_master_does_not_become_a_state_of_an_optimizer_without() -> None:
    flat = nn.Parameter(torch.zeros(20))
    leaves = Leaves()
    leaves.add("optimizer", "state.w.master_param", sharded(LocalInterval(WHOLE, 0, 12)))
    leaves.add("optimizer", "state.w.exp_avg", sharded(LocalInterval(WHOLE, 0, 12)))
    fresh = optim.AdamW([flat])
    targets_of([slot_of(fresh, flat, LocalInterval(WHOLE, 0, 12))], saved_by(leaves.to_save())).finish({})
    assert list(fresh.state[flat]) == ["exp_avg"]


class FusedAdam(optim.SGD):
    """As Apex and Transformer Engine have it: steps are an int of the group."""


@pytest.mark.parametrize("in_group", [False, True])
def test_a_step_count_that_is_a_number_is_a_tensor_in_the_checkpoint(*, in_group: bool) -> None:
    w = nn.Parameter(torch.zeros(3, 4))

    def slots(optimizer: optim.Optimizer) -> list[Slot]:
        return [Slot("w", w, optimizer.param_groups[0], optimizer.state, step_in_group=in_group)]

    def counter(optimizer: optim.Optimizer) -> dict[str, object]:
        return optimizer.param_groups[0] if in_group else optimizer.state[w]

    source, target = FusedAdam([w]), FusedAdam([w])
    counter(source)["step"] = 12
    leaves = Leaves()
    add_slots(leaves, slots(source))
    shards = leaves.to_save()
    assert metas(shards)[0].fqn == "state.w.step"
    assert not any(path.endswith("step") for _, path in shards.objects)
    if not in_group:
        counter(target)["step"] = 0
    saved = saved_by(shards)
    fill(targets_of(slots(target), saved), {("optimizer", "state.w.step"): torch.tensor(12.0)}, saved, shards.objects)
    assert counter(target)["step"] == 12
    assert type(counter(target)["step"]) is int


def test_one_count_for_parameters_that_were_saved_after_different_steps_is_an_error() -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    target = FusedAdam([a, b])
    leaves, values = Leaves(), {}
    for fqn, steps in (("a", 3.0), ("b", 4.0)):
        values["optimizer", f"state.{fqn}.step"] = torch.tensor(steps)
        leaves.add("optimizer", f"state.{fqn}.step", torch.tensor(steps))
    saved = saved_by(leaves.to_save())
    group = target.param_groups[0]
    found = [Slot(name, p, group, target.state, step_in_group=True) for name, p in (("a", a), ("b", b))]
    with pytest.raises(MismatchError, match=r"counts the steps of 'a', saved after 3, and of 'b', saved after 4"):
        fill(targets_of(found, saved), values, saved, {})
    assert "step" not in group


@pytest.mark.parametrize("steps", [(3.0, 3.0), (3.0, 4.0)])
def test_parts_of_one_flat_parameter_are_counted_as_one(steps: tuple[float, float]) -> None:
    flat = nn.Parameter(torch.zeros(20))
    target = optim.AdamW([flat])
    leaves, values = Leaves(), {}
    for fqn, count in zip("ab", steps, strict=True):
        values["optimizer", f"state.{fqn}.step"] = torch.tensor(count)
        leaves.add("optimizer", f"state.{fqn}.step", torch.tensor(count))
    saved = saved_by(leaves.to_save())
    found = [slot_of(target, flat, LocalInterval(WHOLE, 0, 7, at), fqn) for fqn, at in (("a", 0), ("b", 7))]
    targets = targets_of(found, saved)
    if steps[0] == steps[1]:
        fill(targets, values, saved, {})
        assert target.state[flat]["step"].item() == 3
        return
    with pytest.raises(MismatchError, match=r"counts the steps of 'a', saved after 3, and of 'b', saved after 4"):
        fill(targets, values, saved, {})
    assert not target.state
