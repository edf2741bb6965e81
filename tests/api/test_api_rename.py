"""A checkpoint loads into a target that calls its tensors something else, or cuts them otherwise."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import flip
from layouts import mesh_of
from ranks import Ranks
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import bcp
from bcp.plan.box import Box
from bcp.plan.read.renamed import CheckpointNames
from bcp.plan.read.renames import Moved
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
from bcp.protocols import LoadTargets, LocalShards, States


def net(*, seed: int, names: Sequence[str] = ("one", "two"), sizes: Sequence[int] = (8, 16, 4)) -> nn.Module:
    """Return linear layers in a row."""
    torch.manual_seed(seed)
    return Row({name: nn.Linear(n, m) for name, n, m in zip(names, sizes, sizes[1:], strict=False)})


class Row(nn.ModuleDict):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def trained(model: nn.Module, *, steps: int = 2, width: int = 8, **how: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.01, **how})
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1 + step, 4 * width).view(4, width)).square().sum().backward()
        optimizer.step()
    return optimizer


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return parameters and their states by name."""
    out = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        out |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return out


RENAMES = {
    "dict": {
        f"{old}.{leaf}": f"{new}.{leaf}" for old, new in (("one", "a"), ("two", "b")) for leaf in ("weight", "bias")
    },
    "regex": [(r"^one\.", "a."), (r"^two\.", "b.")],
    "callable": lambda fqn: fqn.replace("one", "a").replace("two", "b"),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_a_module_and_its_optimizer_load_under_other_names(tmp_path: Path, rename: Any) -> None:
    source, target = net(seed=0), net(seed=1, names=("a", "b"))
    saved = trained(source, lr=0.01, betas=(0.8, 0.9))
    optimizer = torch.optim.AdamW(target.parameters(), lr=1.0)
    bcp.save(tmp_path, {"model": source, "optimizer": saved})
    states = {"model": target, "optimizer": optimizer}
    report = bcp.load(tmp_path, states, options=bcp.LoadOptions(rename=rename))
    assert (report.missing, report.unexpected) == ((), ())
    expected = states_of(source, saved)
    found = states_of(target, optimizer)
    assert found.keys() == {name.replace("one", "a").replace("two", "b") for name in expected}
    for name, value in expected.items():
        assert torch.equal(found[name.replace("one", "a").replace("two", "b")], value), name
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.01, (0.8, 0.9))


def test_what_is_missing_has_the_targets_name_and_what_is_unexpected_the_checkpoints(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"old": torch.ones(2), "lone": torch.ones(2), "out": torch.ones(2)}})
    target = {"new": torch.zeros(2), "other": torch.zeros(2)}
    options = bcp.LoadOptions(rename={"old": "new", "lone": "renamed", "out": None})
    with pytest.raises(bcp.FqnMismatchError, match=r"the checkpoint lacks: model: other;"):
        bcp.load(tmp_path, {"model": target}, options=options)
    report = bcp.load(tmp_path, {"model": target}, options=options, strict=False)
    assert report.missing == ("model: other",)
    assert report.unexpected == ("model: lone",)
    assert target["new"].tolist() == [1, 1]


def test_errors_show_both_names(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"old": torch.ones(2, 3)}})
    options = bcp.LoadOptions(rename={"old": "new"})
    with pytest.raises(
        bcp.ShapeMismatchError, match=r"model: new \(saved as model: old\) is \[2, 3\] in the checkpoint"
    ):
        bcp.load(tmp_path, {"model": {"new": torch.ones(3)}}, options=options)
    with pytest.raises(bcp.DtypeMismatchError, match=r"model: new \(saved as model: old\) is float32 .*cast=True"):
        bcp.load(tmp_path, {"model": {"new": torch.ones(2, 3).half()}}, options=options)
    (file,) = (tmp_path / "model").iterdir()
    flip(file, -1)
    with pytest.raises(bcp.CorruptError, match=r"model: new \(saved as model: old\)"):
        bcp.load(tmp_path, {"model": {"new": torch.ones(2, 3)}}, options=options)


def test_an_error_of_the_rename_is_one_of_the_input_and_touches_nothing(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}})
    target = {"w": torch.zeros(2)}
    for rename, match in (({"v": "w"}, "lacks: v"), (lambda fqn: fqn[99], "IndexError")):
        with pytest.raises(bcp.InputError, match=match):
            bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(rename=rename))
    assert target["w"].tolist() == [0, 0]


def test_ties_follow(tmp_path: Path) -> None:
    source = net(seed=0, names=("tok", "head"), sizes=(4, 4, 4))
    source["head"].weight = source["tok"].weight
    saved = trained(source, width=4)
    bcp.save(tmp_path, {"model": source, "optimizer": saved})
    target = net(seed=1, names=("embedding", "output"), sizes=(4, 4, 4))
    target["output"].weight = target["embedding"].weight
    optimizer = torch.optim.AdamW(target.parameters())
    options = bcp.LoadOptions(rename=[("^tok", "embedding"), ("^head", "output")])
    report = bcp.load(tmp_path, {"model": target, "optimizer": optimizer}, options=options)
    assert (report.missing, report.unexpected) == ((), ())
    assert torch.equal(target["output"].weight, source["tok"].weight)
    state = saved.state[source["tok"].weight]["exp_avg"]
    assert torch.equal(optimizer.state[target["embedding"].weight]["exp_avg"], state)
    lone = {
        "model": {"output.weight": torch.zeros(4, 4), **{f"{n}.bias": torch.zeros(4) for n in ("embedding", "output")}}
    }
    for name in ("output", "embedding"):  # whichever of the two was saved: one is enough
        lone["model"] = {
            f"{name}.weight": torch.zeros(4, 4),
            "embedding.bias": torch.zeros(4),
            "output.bias": torch.zeros(4),
        }
        assert bcp.load(tmp_path, lone, options=options).unexpected == ()
        assert torch.equal(lone["model"][f"{name}.weight"], source["tok"].weight)


# -- blocks ------------------------------------------------------------------------------------------


class Heads:
    """Cut ``qkv`` into q, k and v, whose rows take turns, and transpose ``w``; join ``gate`` and ``up``."""

    def blocks(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        stem, _, leaf = fqn.rpartition(".")
        rest, zeros = shape[1:], (0,) * (len(shape) - 1)
        if stem == "qkv":
            third = (shape[0] // 3, *rest)
            return [
                Moved(Box((3 * row + which, *zeros), (1, *rest)), f"{name}.{leaf}", third, (row, *zeros))
                for row in range(third[0])
                for which, name in enumerate("qkv")
            ]
        if stem in ("gate", "up"):
            double = (2 * shape[0], *rest)
            return [Moved(Box.whole(shape), f"fc1.{leaf}", double, (shape[0] * (stem == "up"), *zeros))]
        if fqn == "w.weight":
            return [Moved(Box.whole(shape), fqn, shape[::-1], (0, 0), transposed=True)]
        return [Moved.whole(fqn, shape)]


def put_together(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Do what :class:`Heads` says with torch; names have ``.<leaf>`` or ``.<leaf>/<state>`` behind the layer."""
    out = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.partition(".")
        if stem == "qkv":
            out |= {f"{new}.{leaf}": tensor[at::3] if tensor.dim() else tensor for at, new in enumerate("qkv")}
        elif stem == "gate":
            out[f"fc1.{leaf}"] = torch.cat([tensor, tensors[f"up.{leaf}"]]) if tensor.dim() else tensor
        elif stem == "w":
            out[name] = tensor.t() if tensor.dim() == 2 else tensor
        elif stem != "up":
            out[name] = tensor
    return out


def stepped(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **how)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def heads_source() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    source = nn.ModuleDict({name: nn.Linear(8, 12) for name in ("qkv", "gate", "up")})
    source["w"], source["last"] = nn.Linear(6, 5), nn.Linear(5, 4)
    return source, stepped(source, amsgrad=True)


def heads_target() -> nn.Module:
    torch.manual_seed(1)
    target = nn.ModuleDict({name: nn.Linear(8, 4) for name in ("q", "k", "v")})
    target["fc1"], target["w"], target["last"] = nn.Linear(8, 24), nn.Linear(5, 6, bias=False), nn.Linear(5, 4)
    target["w"].register_parameter("bias", nn.Parameter(torch.randn(5)))
    return target


def heads_differences(target: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Say what was not loaded as torch would have cut it."""
    expected, found = put_together(states_of(*heads_source())), states_of(target, optimizer)
    wrong = [name for name in expected if not torch.equal(whole(found[name]), expected[name])]
    return wrong + sorted(found.keys() ^ expected.keys())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def test_tensors_are_cut_joined_and_transposed_with_their_states(tmp_path: Path) -> None:
    source, saved = heads_source()
    bcp.save(tmp_path, {"model": source, "optimizer": saved})
    target = heads_target()
    optimizer = torch.optim.AdamW(target.parameters(), lr=1.0)
    states = {"model": target, "optimizer": optimizer}
    report = bcp.load(tmp_path, states, options=bcp.LoadOptions(rename=Heads()))
    assert (report.missing, report.unexpected) == ((), ())
    assert heads_differences(target, optimizer) == []
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_a_block_that_no_target_wants_is_unexpected(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"qkv.bias": torch.arange(6.0)}})
    target = {"q.bias": torch.zeros(2), "k.bias": torch.zeros(2)}
    options = bcp.LoadOptions(rename=Heads())
    with pytest.raises(bcp.FqnMismatchError, match=r"no rank wants: model: qkv\.bias \(what becomes v\.bias\);"):
        bcp.load(tmp_path, {"model": target}, options=options)
    report = bcp.load(tmp_path, {"model": target}, options=options, strict=False)
    assert report.unexpected == ("model: qkv.bias (what becomes v.bias)",)
    assert [each.tolist() for each in target.values()] == [[0, 3], [1, 4]]
    with pytest.warns(bcp.NothingLoadedWarning, match="nothing of 'model'"):
        report = bcp.load(tmp_path, {"model": {"other": torch.zeros(2)}}, options=options, strict=False)
    assert report.unexpected == ("model: qkv.bias",)


class Twice:
    """Offer a vector whole, and its halves as well."""

    def blocks(self, fqn: str, shape: tuple[int, ...]) -> Sequence[Moved]:
        halves = [Moved(Box((at,), (2,)), f"{fqn}.{at}", (2,), (0,)) for at in (0, 2)]
        return [Moved.whole(fqn, shape), *halves, replace(halves[1], fqn="again")]


@pytest.mark.parametrize("wanted", [("w",), ("w", "w.0"), ("w.0", "w.2"), ("w.0", "again")])
def test_of_several_offers_one_is_enough(tmp_path: Path, wanted: Sequence[str]) -> None:
    values = torch.arange(4.0)
    bcp.save(tmp_path, {"model": {"w": values}})
    offers = {"w": values, "w.0": values[:2], "w.2": values[2:], "again": values[2:]}
    target = {"model": {name: torch.zeros_like(offers[name]) for name in wanted}}
    assert bcp.load(tmp_path, target, options=bcp.LoadOptions(rename=Twice())).unexpected == ()
    assert all(torch.equal(target["model"][name], offers[name]) for name in wanted)


def test_a_source_that_the_checkpoint_lacks_leaves_a_gap(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"gate.bias": torch.ones(2)}})
    with pytest.raises(
        bcp.CoverageError, match=r"'fc1\.bias', which is \[4\], of 'gate\.bias', and these give it 2 of"
    ):
        bcp.load(tmp_path, {"model": {"fc1.bias": torch.ones(4)}}, options=bcp.LoadOptions(rename=Heads()))


def test_sources_of_two_dtypes_need_a_cast(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"gate.bias": torch.ones(2), "up.bias": torch.full((2,), 2.0).bfloat16()}})
    target = {"fc1.bias": torch.zeros(4)}
    with pytest.raises(bcp.DtypeMismatchError, match=r"fc1\.bias \(saved as model: up\.bias\) is bfloat16"):
        bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(rename=Heads()))
    bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(rename=Heads(), cast=True))
    assert target["fc1.bias"].tolist() == [1, 1, 2, 2]


def test_a_cut_tensor_of_another_shape_is_a_mismatch(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"qkv.bias": torch.arange(6.0)}})
    target = {"q.bias": torch.zeros(3), "k.bias": torch.zeros(2), "v.bias": torch.zeros(2)}
    with pytest.raises(bcp.ShapeMismatchError, match=r"model: q\.bias \(saved as model: qkv\.bias\) is \[2\] in the"):
        bcp.load(tmp_path, {"model": target}, options=bcp.LoadOptions(rename=Heads()))


class Flat:
    """A planner whose ranks hold flat intervals of every tensor, as ZeRO does."""

    name = "flat"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], rank: int, count: int) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self.rows: list[ShardRow] = []
        for fqn, shape in shapes.items():
            box, meta = Box.whole(shape), TensorMeta("model", fqn, "float32", 4, shape)
            start, stop = (box.numel * each // count for each in (rank, rank + 1))
            self.rows.append(ShardRow(meta, box, start, stop))
            self.memory[fqn] = torch.full((stop - start,), -1.0)

    def local_shards(self, states: States) -> LocalShards:
        raise NotImplementedError

    def load_targets(self, _: States, saved: CheckpointNames) -> LoadTargets:
        assert {fqn for _, fqn in saved.names("model")} >= set(self.memory)
        shards = LocalShards(ShardTable.build(self.rows), list(self.memory.values()))
        return LoadTargets(shards, lambda _: None, lambda _: None)


def load_on_ranks(path: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Load into FSDP2 shards, then into flat intervals; return what differs, and this rank's intervals."""
    mesh = mesh_of((4,))
    target = heads_target()
    for layer in target.values():
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(target.parameters(), lr=1.0)
    options = bcp.LoadOptions(rename=Heads())
    report = bcp.load(path, {"model": target, "optimizer": optimizer}, options=options)
    assert (report.missing, report.unexpected) == ((), ())
    shapes = {name: tuple(parameter.shape) for name, parameter in target.named_parameters()}
    flat = Flat(shapes, dist.get_rank(), 4)
    bcp.load(path, {"model": {}}, framework=flat, options=options)
    return heads_differences(target, optimizer), flat.memory


@pytest.mark.dist
def test_shards_and_flat_intervals_are_filled_on_every_rank(ranks4: Ranks, tmp_path: Path) -> None:
    source, saved = heads_source()
    bcp.save(tmp_path, {"model": source, "optimizer": saved})
    found = ranks4.run(load_on_ranks, tmp_path)
    assert [wrong for wrong, _ in found] == [[]] * 4
    for name, value in put_together(dict(source.named_parameters())).items():
        assert torch.equal(torch.cat([memory[name] for _, memory in found]), value.reshape(-1)), name


# -- masters -----------------------------------------------------------------------------------------

EXACT = torch.tensor([1.0 + 2**-20, -3.0, 0.1, 1e-30])
"""Values that bf16 does not have."""


def mixed() -> dict[str, Any]:
    """Return a bf16 model and its fp32 masters."""
    states = {"w": {"exp_avg": torch.ones(4), "master_param": EXACT.clone()}}
    return {"model": {"w": EXACT.bfloat16()}, "optimizer": {"state": states}}


def full() -> dict[str, Any]:
    """Return the same, trained in fp32: its masters are the model."""
    return {"model": {"w": EXACT.clone()}, "optimizer": {"state": {"w": {"exp_avg": torch.ones(4)}}}}


def blank(states: dict[str, Any]) -> dict[str, Any]:
    made = copy.deepcopy(states)
    for tensor in (
        *made["model"].values(),
        *(t for state in made["optimizer"]["state"].values() for t in state.values()),
    ):
        tensor.zero_()
    return made


def test_a_model_is_loaded_from_masters_of_its_dtype(tmp_path: Path) -> None:
    bcp.save(tmp_path, mixed())
    target = blank(full())
    report = bcp.load(tmp_path, target)
    assert (report.missing, report.unexpected) == ((), ())
    assert torch.equal(target["model"]["w"], EXACT)
    lone = {"w": torch.zeros(4)}
    assert bcp.load(tmp_path, {"model": lone}).unexpected == ()
    assert torch.equal(lone["w"], EXACT)


def test_masters_are_loaded_from_a_model_of_their_dtype(tmp_path: Path) -> None:
    bcp.save(tmp_path, full())
    target = blank(mixed())
    with pytest.raises(bcp.DtypeMismatchError, match=r"model: w is float32 in the checkpoint, bfloat16 .*cast=True"):
        bcp.load(tmp_path, target)
    report = bcp.load(tmp_path, target, options=bcp.LoadOptions(cast=True))
    assert (report.missing, report.unexpected) == ((), ())
    assert torch.equal(target["optimizer"]["state"]["w"]["master_param"], EXACT)
    assert torch.equal(target["model"]["w"], EXACT.bfloat16())
    lone = {"state": {"w": {"exp_avg": torch.zeros(4), "master_param": torch.zeros(4)}}}
    bcp.load(tmp_path, {"optimizer": lone})
    assert torch.equal(lone["state"]["w"]["master_param"], EXACT)


def test_masters_of_a_bf16_model_alone_need_a_cast(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": mixed()["model"]})
    target = {"state": {"w": {"master_param": torch.zeros(4)}}}
    match = r"optimizer: state\.w\.master_param \(saved as model: w\) is bfloat16"
    with pytest.raises(bcp.DtypeMismatchError, match=match):
        bcp.load(tmp_path, {"optimizer": target})
    bcp.load(tmp_path, {"optimizer": target}, options=bcp.LoadOptions(cast=True))
    assert torch.equal(target["state"]["w"]["master_param"], EXACT.bfloat16().float())


def test_a_tied_name_is_loaded_from_the_master_of_the_other(tmp_path: Path) -> None:
    shared = EXACT.bfloat16()
    states = {"head": {"master_param": EXACT.clone()}}
    bcp.save(tmp_path, {"model": {"head": shared, "tok": shared}, "optimizer": {"state": states}})
    target = {"tok": torch.zeros(4)}
    assert bcp.load(tmp_path, {"model": target}).unexpected == ()
    assert torch.equal(target["tok"], EXACT)


def test_masters_that_nobody_wants_are_not_unexpected_with_their_model(tmp_path: Path) -> None:
    bcp.save(tmp_path, mixed())
    target = blank(mixed())
    del target["optimizer"]["state"]["w"]["master_param"]
    report = bcp.load(tmp_path, target)
    assert report.unexpected == ()
    with pytest.raises(bcp.FqnMismatchError, match=r"no rank wants: optimizer: state\.w\.master_param"):
        bcp.load(tmp_path, {"optimizer": target["optimizer"]})


def test_masters_go_where_their_model_goes(tmp_path: Path) -> None:
    exact = torch.arange(6) + 2.0**-12
    states = {"qkv.bias": {"master_param": exact}}
    bcp.save(tmp_path, {"model": {"qkv.bias": exact.bfloat16()}, "optimizer": {"state": states}})
    options = bcp.LoadOptions(rename=Heads())
    names = ("q.bias", "k.bias", "v.bias")
    target = {name: torch.zeros(2) for name in names}
    assert bcp.load(tmp_path, {"model": target}, options=options).unexpected == ()
    half = {name: torch.zeros(2).bfloat16() for name in names}
    masters = {"state": {name: {"master_param": torch.zeros(2)} for name in names}}
    bcp.load(tmp_path, {"model": half, "optimizer": masters}, options=options)
    for at, name in enumerate(names):
        assert torch.equal(target[name], exact[at::3])
        assert torch.equal(masters["state"][name]["master_param"], exact[at::3])
        assert torch.equal(half[name], exact[at::3].bfloat16())


def test_masters_of_a_renamed_fp32_model_come_from_it(tmp_path: Path) -> None:
    bcp.save(tmp_path, full())
    target = {"state": {"v": {"exp_avg": torch.zeros(4), "master_param": torch.zeros(4)}}}
    bcp.load(tmp_path, {"optimizer": target}, options=bcp.LoadOptions(rename={"w": "v"}))
    assert torch.equal(target["state"]["v"]["master_param"], EXACT)
