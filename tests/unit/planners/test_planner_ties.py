"""States whose tensors are tied, or were when they were saved, through a whole strict load."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import bcp


def net(*, tied, seed=0):
    torch.manual_seed(seed)
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("tok", "head", "other")})
    if tied:
        model["head"].weight = model["tok"].weight
    return model


def trained(model):
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    model["head"](model["other"](model["tok"](torch.ones(1, 4)))).pow(2).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("saved_tied", [True, False])
@pytest.mark.parametrize("target_tied", [True, False])
def test_every_way_loads_strictly(tmp_path, saved_tied, target_tied):
    source, target = net(tied=saved_tied), net(tied=target_tied, seed=9)
    with torch.no_grad():
        source["head"].weight.copy_(source["tok"].weight)
    bcp.save(tmp_path, {"model": source})
    report = bcp.load(tmp_path, {"model": target}, strict=True)
    assert (report.missing, report.unexpected) == ((), ())
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    assert (target["tok"].weight is target["head"].weight) is target_tied


def test_values_that_differ_are_a_mismatch_and_a_rename_chooses_one(tmp_path):
    source, target = net(tied=False), net(tied=True, seed=9)
    bcp.save(tmp_path, {"model": source})
    with pytest.raises(bcp.MismatchError, match=r"'head\.weight' and model tensor 'tok\.weight'"):
        bcp.load(tmp_path, {"model": target}, strict=True)
    for left_out, taken in (("tok", "head"), ("head", "tok")):
        bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(rename={f"{left_out}.weight": None}))
        assert torch.equal(target["tok"].weight, source[taken].weight)


def test_a_name_that_the_checkpoint_lacks_is_not_missing_if_it_has_a_tied_one(tmp_path):
    source, target = net(tied=False), net(tied=True, seed=9)
    bcp.save(tmp_path, {"model": {name: value for name, value in source.state_dict().items() if "head" not in name}})
    bcp.load(tmp_path, {"model": target}, strict=True)
    assert torch.equal(target["head"].weight, source["tok"].weight)


def test_a_tied_name_of_another_shape_is_a_mismatch(tmp_path):
    bcp.save(tmp_path, {"model": {"a": torch.ones(3), "b": torch.ones(4)}})
    tied = torch.zeros(3)
    with pytest.raises(bcp.ShapeMismatchError, match=r"b is \[4\] in the checkpoint, \[3\] in the target"):
        bcp.load(tmp_path, {"model": {"a": tied, "b": tied}})
    assert not tied.any()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_optimizer_states_of_untied_weights_load_into_tied_ones(tmp_path, lr):
    source, target = net(tied=False), net(tied=True, seed=9)
    optimizer, fresh = trained(source), optim.AdamW(target.parameters(), lr=0.5)
    optimizer.param_groups[0]["lr"] = lr
    bcp.save(tmp_path, {"model": source, "optimizer": optimizer})
    states = {"model": target, "optimizer": fresh}
    with pytest.raises(bcp.MismatchError, match=r"'state\.head\.weight\.exp_avg' and optimizer tensor 'state\.tok"):
        bcp.load(tmp_path, states, strict=True)
    assert not fresh.state
    report = bcp.load(tmp_path, states, strict=True, options=bcp.LoadOptions(rename={"tok.weight": None}))
    assert report.unexpected == ()
    assert fresh.param_groups[0]["lr"] == pytest.approx(0.1)
    moment = optimizer.state[source["head"].weight]["exp_avg"]
    assert torch.equal(fresh.state[target["tok"].weight]["exp_avg"], moment)


def test_equal_optimizer_states_of_untied_weights_load_into_tied_ones(tmp_path):
    source, target = net(tied=False), net(tied=True, seed=9)
    optimizer, fresh = trained(source), optim.AdamW(target.parameters(), lr=0.5)
    tok, head = source["tok"].weight, source["head"].weight
    with torch.no_grad():
        head.copy_(tok)
    for key, value in optimizer.state[tok].items():
        optimizer.state[head][key].copy_(value)
    bcp.save(tmp_path, {"model": source, "optimizer": optimizer})
    assert bcp.load(tmp_path, {"model": target, "optimizer": fresh}, strict=True).unexpected == ()
    assert torch.equal(fresh.state[target["tok"].weight]["exp_avg"], optimizer.state[tok]["exp_avg"])


def test_optimizer_states_of_tied_weights_load_into_untied_ones_that_have_none_yet(tmp_path):
    source, target = net(tied=True), net(tied=False, seed=9)
    optimizer, fresh = trained(source), optim.AdamW(target.parameters(), lr=0.5)
    bcp.save(tmp_path, {"model": source, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": target, "optimizer": fresh}, strict=True)
    moment = optimizer.state[source["tok"].weight]["exp_avg"]
    for name in ("head", "tok"):
        assert torch.equal(fresh.state[target[name].weight]["exp_avg"], moment)


def test_optimizer_states_are_those_of_the_name_that_the_checkpoint_has(tmp_path):
    source, target = net(tied=False), net(tied=True, seed=9)
    del source["head"]
    optimizer = optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    source["other"](source["tok"](torch.ones(1, 4))).sum().backward()
    optimizer.step()
    fresh = optim.SGD(target.parameters(), lr=0.5, momentum=0.9)
    bcp.save(tmp_path, {"model": source, "optimizer": optimizer})
    bcp.load(tmp_path, {"model": target, "optimizer": fresh}, strict=True)
    moment = optimizer.state[source["tok"].weight]["momentum_buffer"]
    assert torch.equal(fresh.state[target["head"].weight]["momentum_buffer"], moment)
