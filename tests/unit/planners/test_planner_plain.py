from __future__ import annotations

import types
from typing import Self, get_args

import pytest
import torch
from nested import nested
from planning import assembled, fill, names, pieces, saved_by
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from bcp import planners
from bcp.errors import InputError, StateChangedError, StateError
from bcp.planners import FrameworkName, PlainPlanner, check_unchanged, planner, register, versions
from bcp.state.inventory import probe

PLAIN = PlainPlanner()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(3, 4)  # a user's own name that DDP uses as well
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.tok.weight


class Scaled(nn.Linear):
    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def round_trip(source, target):
    shards = PLAIN.local_shards(source)
    layout = saved_by(shards)
    fill(PLAIN.load_targets(target, layout), assembled(pieces(shards)), layout, shards.objects)


def test_module_gives_parameters_and_persistent_buffers():
    net = Net()
    shards = PLAIN.local_shards({"model": net})
    whole = assembled(pieces(shards))
    assert {fqn for _, fqn in whole} == set(net.state_dict())
    assert all(torch.equal(whole["model", fqn], value) for fqn, value in net.state_dict().items())
    meta = shards.table.meta(shards.table.tensors.fqn.index("module.weight"))
    assert (meta.dtype, meta.itemsize, meta.stride, meta.device) == ("float32", 4, (3, 1), "cpu")
    assert meta.requires_grad


def test_shards_are_live_memory():
    net = nn.Linear(2, 2)
    shards = PLAIN.local_shards({"model": net})
    with torch.no_grad():
        net.weight.fill_(7.0)
    assert shards.tensors[shards.table.tensors.fqn.index("weight")].eq(7.0).all()


def test_module_loads_in_place():
    source, target = Net(), Net()
    before = {fqn: value.data_ptr() for fqn, value in target.state_dict().items()}
    round_trip({"model": source}, {"model": target})
    assert all(torch.equal(value, target.state_dict()[fqn]) for fqn, value in source.state_dict().items())
    assert before == {fqn: value.data_ptr() for fqn, value in target.state_dict().items()}


def test_wrappers_leave_no_trace():
    net = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    compiled = torch.compile(net, backend="eager")
    assert set(names(PLAIN.local_shards({"model": compiled}))) == {"0.weight", "0.bias"}
    assert set(names(PLAIN.local_shards({"model": nn.DataParallel(Net())}))) == set(Net().state_dict())


def test_modules_may_stand_in_containers_and_chunks_share_one_namespace():
    nested = {"actor": nn.Linear(1, 1), "critics": [nn.Linear(1, 1, bias=False)]}
    assert set(names(PLAIN.local_shards({"model": nested}))) == {"actor.weight", "actor.bias", "critics.0.weight"}
    chunks = [nn.ModuleDict({"a": nn.Linear(1, 1, bias=False)}), nn.ModuleDict({"b": nn.Linear(1, 1, bias=False)})]
    assert set(names(PLAIN.local_shards({"model": chunks}))) == {"a.weight", "b.weight"}
    with pytest.raises(StateError, match=r"two leaves of model are named 'weight' on rank 0"):
        PLAIN.local_shards({"model": [nn.Linear(1, 1), nn.Linear(1, 1)]})


def test_extra_state_is_an_object():
    source, target = Scaled(2, 2), Scaled(2, 2)
    source.scale, target.scale = 3, 1
    assert PLAIN.local_shards({"model": source}).objects == {("model", "_extra_state"): {"scale": 3}}
    round_trip({"model": source}, {"model": target})
    assert target.scale == 3


def test_tensors_made_by_state_dict_hooks_are_loaded_through_load_state_dict():
    def doubled(_, state, prefix, __):
        state[prefix + "weight"] = state[prefix + "weight"].detach() * 2

    def halved(_, state, prefix, *__: object):
        if prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] / 2

    nets = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for net in nets:
        net.register_state_dict_post_hook(doubled)
        net.register_load_state_dict_pre_hook(halved)
    round_trip({"model": nets[0]}, {"model": nets[1]})
    assert torch.equal(nets[0].weight, nets[1].weight)
    assert torch.equal(nets[0].bias, nets[1].bias)


def test_tied_weights_are_held_once():
    net = Tied()
    shards = PLAIN.local_shards({"model": net})
    assert names(shards) == {"head.weight": "", "tok.weight": "head.weight"}
    assert len(shards.tensors) == 1
    mapping = {"model": dict(net.state_dict())}
    assert names(PLAIN.local_shards(mapping)) == {"head.weight": "", "tok.weight": "head.weight"}


def test_tied_target_appears_once_under_a_saved_name():
    layout = saved_by(PLAIN.local_shards({"model": {"tok.weight": torch.zeros(5, 3)}}))
    targets = PLAIN.load_targets({"model": Tied()}, layout)
    assert names(targets.shards) == {"tok.weight": ""}
    targets = PLAIN.load_targets({"model": Tied()}, saved_by())
    assert names(targets.shards) == {"head.weight": "", "tok.weight": "head.weight"}
    untied = {"head.weight": torch.zeros(5, 3), "tok.weight": torch.zeros(5, 3)}
    targets = PLAIN.load_targets({"model": untied}, saved_by(PLAIN.local_shards({"model": Tied()})))
    assert names(targets.shards) == {"head.weight": "", "tok.weight": ""}
    assert len(targets.shards.tensors) == 2


def test_views_that_differ_are_not_tied():
    base = torch.arange(9.0).view(3, 3)
    state = {"a": base, "b": base.t(), "c": base[:2], "d": base.view(torch.int32), "e": base[0:0], "f": base[0:0]}
    shards = PLAIN.local_shards({"model": state})
    assert set(names(shards).values()) == {""}
    assert len(shards.tensors) == 4
    assert len(shards.table.tensors) == 6


DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.uint16, torch.int8, torch.int64, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_round_trips(dtype):
    source = torch.arange(6).to(dtype).view(2, 3)
    target = {"t": torch.zeros(2, 3).to(dtype), "s": torch.zeros(()).to(dtype)}
    round_trip({"model": {"t": source, "s": source[1, 2]}}, {"model": target})
    assert torch.equal(target["t"].view(torch.uint8), source.view(torch.uint8))
    assert torch.equal(target["s"].view(1).view(torch.uint8), source[1, 2].view(1).view(torch.uint8))


def test_non_contiguous_and_expanded_tensors():
    state = {"t": torch.arange(12.0).view(3, 4).t(), "x": torch.arange(3.0).expand(2, 3)}
    shards = PLAIN.local_shards({"model": state})
    assert shards.table.tensors[0].stride == (1, 4)
    whole = assembled(pieces(shards))
    assert all(torch.equal(whole["model", key], value) for key, value in state.items())
    target = torch.zeros(3, 4)
    round_trip({"model": {"t": state["t"]}}, {"model": {"t": target.t()}})
    assert torch.equal(target.t(), state["t"])


def test_lazy_conjugates_are_resolved_for_saving_only():
    value = torch.tensor([1 + 2j, 3 - 1j])
    state = {"c": value.conj(), "n": value.conj().imag}
    assert state["n"].is_neg()
    whole = assembled(pieces(PLAIN.local_shards({"model": state})))
    assert whole["model", "c"].tolist() == [1 - 2j, 3 + 1j]
    assert whole["model", "n"].tolist() == [-2.0, 1.0]
    for key, view in state.items():
        with pytest.raises(StateError, match=rf"model tensor '{key}' on rank 0 is a lazy conjugate"):
            PLAIN.load_targets({"model": {key: view}}, saved_by())


def test_subclasses_without_their_own_dispatch_are_plain():
    class Marked(nn.Parameter):
        pass

    shards = PLAIN.local_shards({"model": {"p": Marked(torch.ones(2))}})
    assert type(shards.tensors[0]) is torch.Tensor


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, *_: object) -> None:
        raise NotImplementedError(func)


class Halves(Wrapper):
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        half = len(self.inner) // 2
        return [ChunkStorageMetadata(torch.Size([at]), torch.Size([half])) for at in (0, half)]

    def __get_tensor_shard__(self, index) -> torch.Tensor:
        return self.inner[index.offset[0] :][: len(self.inner) // 2]


def test_third_party_tensors_with_torchs_hooks():
    inner = torch.arange(6.0)
    shards = PLAIN.local_shards({"model": {"h": Halves(inner)}})
    assert len(shards.tensors) == 2
    assert torch.equal(assembled(pieces(shards))["model", "h"], inner)


def test_refusals_say_what_to_do():
    def sparse():
        return torch.eye(2).to_sparse()

    cases = {
        "meta device": lambda: torch.empty(2, device="meta"),
        "torch.sparse_coo": sparse,
        "torch._mkldnn": lambda: torch.ones(2).to_mkldnn(),
        "is a Wrapper": lambda: Wrapper(torch.ones(2)),
        "uninitialized": lambda: nn.LazyLinear(2).weight,
    }
    for message, make in cases.items():
        for method in (PLAIN.local_shards, lambda states: PLAIN.load_targets(states, saved_by())):
            with pytest.raises(StateError, match=rf"model tensor 'a\.0' on rank 0.*{message}.*;"):
                method({"model": {"a": [make()]}})


def test_lazy_modules_are_refused_until_they_ran_once():
    net = nn.Sequential(nn.ReLU(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    for method in (PLAIN.local_shards, lambda states: PLAIN.load_targets(states, saved_by())):
        with pytest.raises(StateError, match=r"model tensor '1\.weight' on rank 0 is uninitialized; run one forward"):
            method({"model": net, "optimizer": optimizer})
    net(torch.ones(3, 4))
    assert "2.weight" in names(PLAIN.local_shards({"model": net}))


def test_dtypes_that_torch_cannot_copy_are_refused():
    dtypes = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)]
    for dtype in dtypes:
        with pytest.raises(StateError, match=rf"'q' on rank 0 is {str(dtype)[6:]}, which torch cannot copy"):
            PLAIN.local_shards({"model": {"q": torch.empty(2, dtype=dtype)}})


def test_inference_tensors_are_saved_but_not_loaded_into():
    with torch.inference_mode():
        state = {"ok": torch.zeros(2), "made.there": torch.zeros(2)}
    state["ok"] = state["ok"].clone()
    assert len(PLAIN.local_shards({"model": state}).tensors) == 2
    with pytest.raises(StateError, match=r"'made\.there' on rank 0 was made under torch\.inference_mode\(\)"):
        PLAIN.load_targets({"model": state}, saved_by())


def test_names_must_be_text():
    for leaf in (torch.ones(1), 5):
        with pytest.raises(StateError, match=r"the model leaf 'a\.\\ud800' on rank 0 has a lone surrogate"):
            PLAIN.local_shards({"model": {"a": {"\ud800": leaf}}})
    assert ("model", "größe") in PLAIN.local_shards({"model": {"größe": 5}}).objects


def test_a_state_dict_that_raises_is_named():
    class Broken(nn.Linear):
        def get_extra_state(self):
            raise KeyError("scale")

    for states, where in (
        ({"model": nn.Sequential(Broken(1, 1))}, r"Sequential at states\['model'\]"),
        ({"model": {"actor": Broken(1, 1)}}, r"Broken at states\['model'\], 'actor'"),
        ({"optimizer": {"scaler": Broken(1, 1)}}, r"Broken at states\['optimizer'\], 'scaler'"),
    ):
        for method in (PLAIN.local_shards, lambda states: PLAIN.load_targets(states, saved_by())):
            with pytest.raises(StateError, match=rf"of the {where} raised KeyError: 'scale'") as caught:
                method(states)
            assert type(caught.value.__cause__) is KeyError


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantized_tensors_are_refused():
    with pytest.raises(StateError, match="is quantized"):
        PLAIN.local_shards({"model": {"q": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}})


def test_nested_tensors_are_refused():
    state = {"model": {"n": nested([torch.ones(2), torch.ones(3)])}}
    with pytest.raises(StateError, match="is a nested tensor"):
        PLAIN.local_shards(state)


def test_names_must_be_strings_or_ints_and_unique():
    tensor = torch.ones(1)
    assert set(names(PLAIN.local_shards({"model": {0: {"w": tensor}}}))) == {"0.w"}
    with pytest.raises(StateError, match=r"two leaves of model are named 'a\.b'"):
        PLAIN.local_shards({"model": {"a": {"b": tensor}, "a.b": torch.ones(1)}})
    with pytest.raises(StateError, match=r"the key \(1, 2\) of type tuple at a"):
        PLAIN.local_shards({"model": {"a": {(1, 2): tensor}}})
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(StateError, match="does it contain itself"):
        PLAIN.local_shards({"model": {"a": loop}})
    with pytest.raises(StateError, match="is a int; pass a module"):
        PLAIN.local_shards({"model": 5})


def test_a_list_of_tensors_is_named_by_place_and_a_lone_tensor_by_its_kind():
    pair = [torch.ones(2), nn.Parameter(torch.ones(3))]
    assert list(names(PLAIN.local_shards({"model": pair}))) == ["0", "1"]
    for kind in ("model", "optimizer"):
        assert list(names(PLAIN.local_shards({kind: pair[0]}), kind)) == [kind]
    source, target = {"model": torch.arange(3.0)}, {"model": torch.zeros(3)}
    round_trip(source, target)
    assert torch.equal(source["model"], target["model"])


def test_containers_take_their_objects_in_place():
    source = {"model": {"w": torch.ones(2), "n": [5, {"m": "x"}], "pair": (1, torch.ones(1)), "none": None, "e": {}}}
    inner = {"m": "y"}
    target = {"model": {"w": torch.zeros(2), "n": [6, inner], "pair": (2, torch.zeros(1)), "none": 3, "e": {}}}
    weight, last = target["model"]["w"], target["model"]["pair"][1]
    assert ("model", "n.1.m") in PLAIN.local_shards(source).objects
    round_trip(source, target)
    assert target["model"]["n"] == [5, {"m": "x"}]
    assert inner == {"m": "x"}
    assert target["model"]["pair"][0] == 1
    assert target["model"]["none"] is None
    assert target["model"]["w"] is weight
    assert target["model"]["pair"][1] is last
    assert weight.tolist() == [1.0, 1.0]


def test_a_root_that_cannot_be_changed_is_refused_only_if_it_would_change():
    source = {"model": {"n": 1000}}
    round_trip(source, {"model": types.MappingProxyType({"n": 1000})})
    with pytest.raises(StateError, match="cannot set 'n' in a mappingproxy"):
        round_trip(source, {"model": types.MappingProxyType({"n": 1})})
    with pytest.raises(StateError, match="is a tuple and cannot be changed in place"):
        round_trip({"model": (1, 2)}, {"model": (1, 3)})


def test_fsdp1_is_refused():
    class FullyShardedDataParallel(nn.Module):  # torch's own cannot be made without an accelerator and a group
        pass

    with pytest.raises(StateError, match=r"wrapped in FSDP1, whose .* communicates; pass framework='fsdp1'"):
        PLAIN.local_shards({"model": nn.Sequential(FullyShardedDataParallel())})


def test_expanded_targets_are_refused():
    with pytest.raises(StateError, match="elements share memory"):
        PLAIN.load_targets({"model": {"x": torch.ones(3).expand(2, 3)}}, saved_by())


def test_guard_notices_writes_however_they_happen():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    shards = PLAIN.local_shards({"model": net})
    before = versions(shards)
    check_unchanged(shards, before, rank=3)
    net(torch.ones(1, 2)).sum().backward()
    check_unchanged(shards, before, rank=3)
    optimizer.step()
    with pytest.raises(StateChangedError, match=r"model tensor 'weight' was written to .* on rank 3"):
        check_unchanged(shards, before, rank=3)


def test_guard_skips_inference_tensors():
    with torch.inference_mode():
        tensor = torch.zeros(2)
        shards = PLAIN.local_shards({"model": {"t": tensor}})
        before = versions(shards)
        tensor.add_(1)
    check_unchanged(shards, before, rank=0)


def test_registry():
    assert planner(None, {"model": nn.Linear(1, 1)}).name == "plain"
    assert planner("ddp", {}).name == "ddp"
    assert planner("fsdp2", {}).name == "fsdp2"
    assert set(get_args(FrameworkName)) == set(planners._KNOWN)
    with pytest.raises(InputError, match=r"framework='jax' is unknown; known are ddp, .*fsdp2, .*plain"):
        planner("jax", {})


def test_third_party_planners_are_asked_first(monkeypatch):
    monkeypatch.setattr(planners, "_KNOWN", dict(planners._KNOWN))

    class Mine(PlainPlanner):
        name = "mine"

    register("mine", Mine, lambda states: "mine" in states["model"])
    assert planner(None, {"model": {"mine": 1}}).name == "mine"
    assert planner(None, {"model": {}}).name == "plain"


def test_states_are_walked_through_once_to_find_their_planner():
    class Counted(dict):
        walks = 0

        def items(self):
            Counted.walks += 1
            return super().items()

    assert planner(None, {"model": Counted(w=torch.zeros(1), part=nn.Linear(1, 1))}).name == "plain"
    assert Counted.walks == 1


def test_probe_names_what_is_missing():
    assert "tested with torch" in PLAIN.probe()
    with pytest.raises(InputError, match="has no _gone; pin torch"):
        probe({torch.Tensor: ["_gone"]}, "plain")


def test_a_wrapper_that_hides_what_modules_have_is_refused():
    wrapper = nn.Sequential(nn.Linear(2, 2))
    wrapper.buffers = []  # Megatron's DistributedDataParallel keeps its gradient buffers by that name
    with pytest.raises(StateError, match="pass framework='megatron'"):
        PLAIN.local_shards({"model": wrapper})
