"""Values that are not tensors, through the public calls: what is loaded is what was saved, or the save says no."""

from __future__ import annotations

import collections
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from alike import exactly_alike, state_of
from api.checkpoints import entries, model
from torch import nn

import bcp
from bcp.runtime import device
from bcp.state.objects import restore

Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 -- one of the types to be tried


class Owner:
    """Has a state, and notes when it gave and took it."""

    def __init__(self, state: Any = None, notes: list[str] | None = None, name: str = "") -> None:
        self.state, self.notes, self.name = state, [] if notes is None else notes, name

    def state_dict(self) -> Any:
        self.notes.append(f"gave {self.name}")
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.notes.append(f"took {self.name}")
        self.state = state


class Config:
    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate


def optimizer(**group: Any) -> dict[str, Any]:
    """Return a model and its optimizer, which has values of any kind in its group and among its states."""
    net = nn.Linear(1, 1)
    return {"model": net, "optimizer": torch.optim.SGD([{"params": list(net.parameters()), **group}], lr=0.1)}


def in_model(**values: Any) -> tuple[dict[str, Any], Any]:
    states = model() | {}
    states["model"] |= values
    return states, lambda: states["model"]


def in_group(**values: Any) -> tuple[dict[str, Any], Any]:
    states = optimizer(**values)
    return states, lambda: states["optimizer"].param_groups[0]


def in_state(**values: Any) -> tuple[dict[str, Any], Any]:
    states = optimizer()
    for parameter in states["model"].parameters():
        states["optimizer"].state[parameter] = dict(values)
    return states, lambda: states["optimizer"].state[states["model"].weight]


def in_extra_states(**values: Any) -> tuple[dict[str, Any], Any]:
    states: dict[str, Any] = {"extra_states": values}
    return states, lambda: states["extra_states"]


def in_an_owner(**values: Any) -> tuple[dict[str, Any], Any]:
    states: dict[str, Any] = {"dataloader": {"owner": Owner(values)}}
    return states, lambda: states["dataloader"]["owner"].state


WAYS = [in_model, in_group, in_state, in_extra_states, in_an_owner]

VALUES: dict[str, Any] = {
    "negative zero": -0.0,
    "zero": 0.0,
    "nan": float("nan"),
    "true": True,
    "one": 1,
    "float one": 1.0,
    "big endian": np.arange(3, dtype=">f8"),
    "Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "times": np.array(["2026-11-22"], "M8[D]"),
    "scalar": np.longdouble(1) / 3,
    "text": np.str_("a"),
    "records": np.zeros(2, [("a", "i2"), ("b", ">f8")]),
    "set": frozenset({1, (2, "a")}),
    "empty": b"",
    "huge": 10**6000,
    "generator": np.random.default_rng(3),
    "legacy": np.random.RandomState(3),
    "of torch": torch.Generator().manual_seed(3),
    "of Python": random.Random(3),  # noqa: S311 -- a value
}

REFUSED = {
    "masked": np.ma.masked_array([1.0, 2.0], mask=[0, 1]),
    "matrix": np.ones((1, 1)).view(np.matrix),
    "storage": torch.arange(3).untyped_storage(),
    "objects": np.array([None]),
    "object": Config(),
    "function": lambda: 0,
}


@pytest.mark.parametrize("way", WAYS)
def test_values_come_back_exactly_whatever_stands_there(tmp_path: Path, way: Any) -> None:
    bcp.save(tmp_path, way(**VALUES)[0])
    for other in (0.0, 0, -0.0, False, 1, None):
        states, found = way(**dict.fromkeys(VALUES, other))
        bcp.load(tmp_path, states)
        assert [name for name, value in VALUES.items() if not exactly_alike(found()[name], value)] == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_values_that_would_change_are_refused_by_name(tmp_path: Path, name: str, way: Any) -> None:
    for value in (REFUSED[name], [{"deep": (REFUSED[name],)}]):
        with pytest.raises(bcp.StateError, match=r"value('| |.*\.0\.deep\.0).*(is a|cannot be ser)"):
            bcp.save(tmp_path / "c", way(value=value)[0])
        assert entries(tmp_path) == []


@pytest.mark.parametrize("way", WAYS)
def test_objects_of_any_class_are_saved_and_loaded_with_allow_pickle(tmp_path: Path, way: Any) -> None:
    trusting = bcp.SaveOptions(allow_pickle=True)
    bcp.save(tmp_path, way(value=[Config(0.5), np.ma.masked_array([1, 2], mask=[0, 1])])[0], options=trusting)
    states, found = way(value=[0, 0])
    with pytest.raises(bcp.CheckpointError, match="allow_pickle=True"):
        bcp.load(tmp_path, states, strict=False)
    bcp.load(tmp_path, states, strict=False, options=bcp.LoadOptions(allow_pickle=True))
    config, masked = found()["value"]
    assert (config.rate, masked.mask.tolist()) == (0.5, [False, True])


@pytest.mark.parametrize("pair", [(0.0, -0.0), (1, True), (1.0, 1), (float("nan"), 0.0)], ids=str)
def test_equal_values_of_other_types_replace_each_other_in_containers(tmp_path: Path, pair: tuple[Any, Any]) -> None:
    for saved, there in (pair, pair[::-1]):
        bcp.save(tmp_path, {"model": {"a": [saved], "b": (saved, 2), "c": Point(saved, {"d": saved})}}, overwrite=True)
        target: dict[str, Any] = {"a": [there], "b": (there, 2), "c": Point(there, {"d": there})}
        bcp.load(tmp_path, {"model": target})
        assert exactly_alike(target, {"a": [saved], "b": (saved, 2), "c": Point(saved, {"d": saved})})


def test_hyper_parameters_of_one_group_are_compared_bit_by_bit(tmp_path: Path) -> None:
    def groups(*rates: Any) -> dict[str, Any]:
        net = nn.Linear(1, 1)
        chosen = [{"params": [p], "rate": rate} for p, rate in zip(net.parameters(), rates, strict=True)]
        return {"model": net, "optimizer": torch.optim.SGD(chosen, lr=0.1)}

    for one, other in ((0.0, -0.0), (1, True), (torch.tensor(0.0), torch.tensor(-0.0)), ((0.0,), (-0.0,))):
        bcp.save(tmp_path, groups(one, other), overwrite=True)
        with pytest.raises(bcp.MismatchError, match="saved with rate="):
            bcp.load(tmp_path, optimizer(rate=one))
    nan = torch.tensor(float("nan"))
    bcp.save(tmp_path, groups(nan, nan.clone()), overwrite=True)
    target = optimizer(rate=torch.tensor(0.0))
    bcp.load(tmp_path, target)
    assert exactly_alike(target["optimizer"].param_groups[0]["rate"], nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1001, 2**24 + 1, 0.5])
def test_step_counts_that_are_numbers_come_back_exactly(tmp_path: Path, dtype: torch.dtype, count: float) -> None:
    states = optimizer()
    for parameter in states["model"].parameters():
        states["optimizer"].state[parameter] = {"step": count}
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        bcp.save(tmp_path, states)
        target = optimizer()
        target["model"].float()
        for parameter in target["model"].parameters():
            target["optimizer"].state[parameter] = {"step": type(count)(0)}
        bcp.load(tmp_path, target)
    finally:
        torch.set_default_dtype(default)
    assert exactly_alike(target["optimizer"].state[target["model"].weight]["step"], count)


# -- extra states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["extra_states", "dataloader"])
@pytest.mark.parametrize("root", [7, None, "text", (Owner(),), np.zeros(2), frozenset()])
def test_a_root_that_no_load_can_restore_is_refused_at_save(tmp_path: Path, kind: str, root: Any) -> None:
    with pytest.raises(bcp.StateError, match=f"^{kind} is a {type(root).__name__} and cannot take what is loaded"):
        bcp.save(tmp_path / "c", {**model(), kind: root})
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    "root",
    [{}, [1], Owner(1), torch.ones(2), np.random.default_rng(1), torch.Generator(), random.Random(1)],  # noqa: S311
)
def test_roots_that_are_restored_in_place(tmp_path: Path, root: Any) -> None:
    bcp.save(tmp_path, {"extra_states": root})
    bcp.load(tmp_path, {"extra_states": root})


def test_mappings_keep_their_type_or_become_dicts(tmp_path: Path) -> None:
    ordered = collections.OrderedDict(b=Owner(1), a=2)
    ordered._metadata = {"version": 2}  # type: ignore[attr-defined]
    kept = {"o": ordered, "c": collections.Counter(a=2), "d": collections.defaultdict(list, a=[1])}
    made = {
        "u": collections.UserDict(a=1),
        "m": collections.ChainMap({"a": 1}),
        "f": collections.defaultdict(Owner, a=1),
    }
    bcp.save(tmp_path, {"extra_states": {**kept, **made}})
    target: dict[str, Any] = {}
    bcp.load(tmp_path, {"extra_states": target})
    wanted = collections.OrderedDict(b=1, a=2)
    wanted._metadata = {"version": 2}  # type: ignore[attr-defined]
    assert exactly_alike(target, {**kept, "o": wanted, "u": {"a": 1}, "m": {"a": 1}, "f": {"a": 1}})


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on what is in beta
def test_tensors_into_which_nothing_can_be_copied_are_replaced(tmp_path: Path) -> None:
    eye, other = torch.eye(3), torch.zeros(3, 3)
    other[0, 0] = 5
    saved = {
        "csr": eye.to_sparse_csr(),
        "coo": eye.to_sparse(),
        "nested": torch.nested.nested_tensor([eye[:1], eye]),
        "quantized": torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
        "expanded": torch.arange(3.0),
        "overlapping": torch.arange(6.0).reshape(2, 3),
        "meta": torch.ones(2),
        "dense": eye.to_sparse_csr(),
    }
    target = {
        "csr": other.to_sparse_csr(),
        "coo": other.to_sparse(),
        "nested": torch.nested.nested_tensor([other, other[:2]]),
        "quantized": torch.quantize_per_channel(eye, torch.ones(3), torch.zeros(3), 0, torch.qint8),
        "expanded": torch.zeros(1).expand(3),
        "overlapping": torch.zeros(4).unfold(0, 3, 1),
        "meta": torch.empty(2, device="meta"),
        "dense": other,
    }
    bcp.save(tmp_path, {"extra_states": saved})
    bcp.load(tmp_path, {"extra_states": target})
    assert exactly_alike(target, saved)


def test_tensors_are_filled_where_they_are(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"extra_states": {"a": torch.arange(4.0), "b": torch.ones(2), "c": torch.ones(2, 3)}})
    whole = torch.zeros(8)
    target = {"a": whole[::2], "b": nn.Parameter(torch.zeros(2)), "c": torch.zeros(3, 2).T}
    held = dict(target)
    bcp.load(tmp_path, {"extra_states": target})
    assert all(target[key] is held[key] for key in held)
    assert whole.tolist() == [0, 0, 1, 0, 2, 0, 3, 0]
    assert target["b"].tolist() == [1, 1]


GENERATORS = {
    "numpy": np.random.default_rng,
    "bits": np.random.Philox,
    "legacy": np.random.RandomState,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "python": random.Random,
}


@pytest.mark.parametrize("kind", ["extra_states", "model"])
@pytest.mark.parametrize("name", GENERATORS)
def test_generators_take_their_state_in_place(tmp_path: Path, name: str, kind: str) -> None:
    saved, there = GENERATORS[name](1), GENERATORS[name](2)
    bcp.save(tmp_path, {kind: {"rng": saved, "w": torch.ones(1)}})
    target = {"rng": there, "w": torch.zeros(1)}
    bcp.load(tmp_path, {kind: target})
    assert target["rng"] is there
    assert exactly_alike(state_of(there), state_of(saved))


def test_a_generator_of_another_kind_is_replaced(tmp_path: Path) -> None:
    saved = np.random.Generator(np.random.Philox(1))
    bcp.save(tmp_path, {"extra_states": {"rng": saved}})
    target = {"rng": np.random.default_rng(1)}
    bcp.load(tmp_path, {"extra_states": target})
    assert exactly_alike(target["rng"], saved)


def test_a_container_that_refuses_an_item_is_named(tmp_path: Path) -> None:
    class Fixed(collections.UserDict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            if key in self:
                raise TypeError("it is fixed")
            super().__setitem__(key, value)

    bcp.save(tmp_path, {"extra_states": {"a": Fixed(step=1)}})
    with pytest.raises(
        bcp.StateError, match=r"^extra_states\.a\.step cannot be set in a Fixed: TypeError: it is fixed"
    ):
        bcp.load(tmp_path, {"extra_states": {"a": Fixed(step=2)}})


def test_extra_states_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"rng": bcp.RngState()}
    extra["self"] = [extra, extra]
    with pytest.raises(bcp.StateError, match="extra_states is nested too deep; does it contain itself"):
        bcp.save(tmp_path, {"extra_states": extra})


# -- random states -------------------------------------------------------------------------------------


def draw() -> list[Any]:
    """Draw a number from every global generator."""
    return [random.random(), np.random.rand(), torch.rand(1).item()]  # noqa: NPY002, S311 -- the global ones


class Drawing(Owner):
    """Draws random numbers whenever it gives or takes its state."""

    def state_dict(self) -> Any:
        return {"drawn": draw(), "state": super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        draw()
        super().load_state_dict(state["state"])


class Noisy(nn.Linear):
    """A module that draws random numbers, too."""

    def get_extra_state(self) -> Any:
        return draw()

    def set_extra_state(self, state: Any) -> None:
        assert state != draw()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_states_are_read_first_and_set_last(tmp_path: Path, *, asynchronous: bool) -> None:
    def states() -> dict[str, Any]:
        inner = [bcp.RngState(), Drawing(name="x")]
        extra = {"a": Drawing(), "rng": bcp.RngState(), "z": [Drawing(), inner]}
        return {"model": Noisy(1, 1), "extra_states": extra, "dataloader": {"rng": bcp.RngState(), "z": Drawing()}}

    saved, target = states(), states()
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 -- the global one
    torch.manual_seed(1)
    expected = draw()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    pending = bcp.save(tmp_path, saved, async_checkpoint=asynchronous)
    assert draw() == expected
    if isinstance(pending, bcp.Pending):
        pending.wait()
    bcp.load(tmp_path, target)
    assert draw() == expected


def test_random_states_are_left_alone_by_a_save_that_fails(tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(bcp.StateError, match=r"extra_states\.z"):
        bcp.save(tmp_path, {"extra_states": {"a": Drawing(), "rng": bcp.RngState(), "z": Config()}})
    assert torch.equal(torch.get_rng_state(), before)


class Devices:
    """Stands for torch.cuda, with a generator for each of its devices."""

    def __init__(self, count: int, *, used: bool = True) -> None:
        self.generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
        self.used = used

    def is_initialized(self) -> bool:
        return self.used

    def device_count(self) -> int:
        return len(self.generators)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return tuple(self.generators)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.generators[device].set_state(state)


def runs_on(monkeypatch: pytest.MonkeyPatch, devices: Devices) -> None:
    """Let this process have these devices."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: devices)
    monkeypatch.setattr(device, "devices_in_use", list)  # no tensor is on any


@pytest.mark.parametrize("count", [1, 2, 3])
def test_random_states_of_accelerators_that_were_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    states = {"rng": bcp.RngState()}
    runs_on(monkeypatch, Devices(2, used=False))
    assert "cuda" not in states["rng"].state_dict()
    saved, there = Devices(2), Devices(count)
    runs_on(monkeypatch, saved)
    wanted = [torch.rand(3, generator=generator) for generator in saved.generators]
    saved = Devices(2)
    runs_on(monkeypatch, saved)
    bcp.save(tmp_path, {"extra_states": states}, framework="plain")
    for generator in there.generators:
        torch.rand(5, generator=generator)
    runs_on(monkeypatch, there)
    bcp.load(tmp_path, {"extra_states": states}, framework="plain")
    for generator, numbers in zip(there.generators, wanted, strict=False):
        assert torch.equal(torch.rand(3, generator=generator), numbers)


def test_derived_states_differ_between_ranks_and_devices_and_are_the_same_every_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = Devices(2)
    runs_on(monkeypatch, devices)
    state = bcp.RngState().state_dict()

    def numbers(rank: int | None) -> list[Any]:
        restore({"rng": bcp.RngState()}, {"rng": state}, derive_for=rank)
        return [*draw(), *(torch.rand(1, generator=each).item() for each in devices.generators)]

    drawn = [numbers(rank) for rank in (None, 0, 1, 2, 100_000)]
    assert [numbers(rank) for rank in (None, 0, 1, 2, 100_000)] == drawn
    assert len({number for row in drawn[1:] for number in row}) == 5 * 4


class Tracker:
    """Stands for Megatron's, whose states are tensors, or generators under CUDA graphs."""

    def __init__(self, *, captured: bool) -> None:
        self.states: dict[str, Any] = {"model-parallel-rng": torch.Generator().manual_seed(1)}
        if not captured:
            self.states = {name: each.get_state() for name, each in self.states.items()}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "module",
    ["megatron.core.tensor_parallel.random", "deepspeed.runtime.activation_checkpointing.checkpointing"],
)
def test_trackers_of_frameworks_are_saved_if_they_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, *, captured: bool
) -> None:
    tracker = Tracker(captured=captured)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(get_cuda_rng_tracker=lambda: tracker))
    before = torch.Generator().manual_seed(1).get_state()
    extra = {"rng": bcp.RngState()}
    bcp.save(tmp_path, {"extra_states": extra})
    other = torch.Generator().manual_seed(2)
    live = tracker.states["model-parallel-rng"]
    if captured:
        live.set_state(other.get_state())
    else:
        tracker.states = {"model-parallel-rng": other.get_state()}
    bcp.load(tmp_path, {"extra_states": extra})
    state = tracker.states["model-parallel-rng"]
    assert torch.equal(state.get_state() if captured else state, before)
    assert not captured or state is live


def test_random_states_without_a_target_come_as_values(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"extra_states": {"rng": bcp.RngState()}})
    found: dict[str, Any] = {}
    bcp.load(tmp_path, {"extra_states": found})
    assert exactly_alike(found["rng"], bcp.RngState().state_dict())


def test_owners_are_asked_and_restored_in_the_order_of_their_keys(tmp_path: Path) -> None:
    def owners(keys: str, notes: list[str]) -> dict[str, Any]:
        inner = {key: Owner(key, notes, key) for key in keys}
        loader = {"k": Owner("k", notes, "k")}
        return {"extra_states": {"y": inner, "x": Owner("x", notes, "x")}, "dataloader": loader}

    gave: list[str] = []
    bcp.save(tmp_path, owners("bca", gave))
    assert gave == ["gave k", "gave x", "gave a", "gave b", "gave c"]
    took: list[str] = []
    target = owners("cab", took)
    bcp.load(tmp_path, target)
    assert took == ["took k", "took x", "took a", "took b", "took c"]
    assert list(target["extra_states"]) == ["y", "x"]
    empty: dict[str, Any] = {}
    bcp.load(tmp_path, {"extra_states": empty})
    assert exactly_alike(empty, {"y": {"b": "b", "c": "c", "a": "a"}, "x": "x"})
