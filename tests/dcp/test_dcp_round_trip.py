"""One process: the same state through bcp's storage and DCP's own, and between DCP and bcp's saves and loads."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from alike import alike_in_any_order, exactly_alike
from dcp_states import emptied, state_of, trained
from fake_store import FakeStore
from stranger import read_checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.backends.objects import ObjectBackend
from bcp.testing.storage_fakes import CountingBackend

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def save(state: dict[str, Any], path: Any, *, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(path, **options), planner=planner, no_dist=True)


def load(state: dict[str, Any], path: Any, **options: Any) -> dict[str, Any]:
    """Return a state dict of the same structure, loaded from the path."""
    found = emptied(state)
    dcp.load(found, storage_reader=bcp.dcp.StorageReader(path, **options), no_dist=True)
    return found


def plain(state: Any) -> Any:
    """Return nested dicts as those of type dict, which DCP makes of them."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def tensors() -> dict[str, Any]:
    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint16, torch.int64, torch.bool]
    dtypes += [torch.complex64, torch.complex128, torch.float8_e4m3fn]
    base = torch.arange(24.0).reshape(4, 6)
    return {
        **{str(dtype): torch.arange(5.0).to(dtype) for dtype in dtypes},
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(3, 0, 2),
        "none": torch.zeros(0),
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.ones(1).expand(3, 4),
        "parameter": torch.nn.Parameter(base.clone()),
        "nested": {"list": [base, {"deep": base + 1}], "": base + 2},
    }


def values() -> dict[str, Any]:
    return {
        "model": {"w": torch.ones(2), "_extra_state": {"scale": 3.0, "history": [1, 2]}},
        "step": 7,
        "loss": float("nan"),
        "best": -0.0,
        "flag": True,
        "nothing": None,
        "name": "run 7, é",
        "raw": b"\x00\xff",
        "betas": (0.9, 0.95),
        "ids": [1, 2, 3],
        "big": 10**60,
        "set": {1, 2},
        "ordered": OrderedDict(b=1, a=2),
        "dtype": torch.bfloat16,
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "random": random.Random(3),  # noqa: S311 -- no secret
        "numpy": np.random.default_rng(4),
    }


def names() -> dict[str, Any]:
    odd = ["", " ", "a/b", "../../x", "\0", "é", "[0:4]", "x", "x#2", "model.x", "model.", "optim.", "optim.state."]
    odd += ["optim.lr", "dcp.x", "__metadata__", "model.model.y", "optimizer.state.q", ":dcp", "a" * 3000]
    return {**{name: torch.full((2,), float(number)) for number, name in enumerate(odd)}, "model": 1, "optim": [2]}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "flattened": lambda: state_of(*trained(), flat=True),
    "nested": lambda: state_of(*trained(), flat=False),
    "optimizer": lambda: state_of(*trained(), flat=False, key="optimizer"),
    "raw optimizer": lambda: {"optim": trained()[1].state_dict()},
    "model without prefix": lambda: {**trained()[0].state_dict(), "step": 3},
    "app": lambda: {"app": state_of(*trained(), flat=False)},
    "tensors": tensors,
    "values": values,
    "names": names,
    "a value alone": lambda: {"step": 3},
    "nothing": dict,
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_comes_back_as_from_dcp_s_own_storage(case: str, tmp_path: Path) -> None:
    state, theirs = STATES[case](), emptied(STATES[case]())
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    save(state, tmp_path / "bcp")
    found = load(state, tmp_path / "bcp")
    assert alike_in_any_order(found, theirs)
    assert bcp.Checkpoint(tmp_path / "bcp").verify()


def test_a_reader_made_from_the_documentation_finds_the_tensors(tmp_path: Path) -> None:
    state = state_of(*trained(), flat=True)
    save(state, tmp_path)
    found = read_checkpoint(tmp_path)
    tensors = {("model", name): value for name, value in state["model"].items()}
    tensors |= {("optimizer", name): value for name, value in state["optim"].items() if isinstance(value, torch.Tensor)}
    assert found.keys() == tensors.keys()
    for key, (dtype, shape, data) in found.items():
        assert (f"torch.{dtype}", tuple(shape)) == (str(tensors[key].dtype), tuple(tensors[key].shape))
        assert data.tobytes() == tensors[key].contiguous().numpy().tobytes()


def test_values_keep_types_and_bits(tmp_path: Path) -> None:
    save(values(), tmp_path)
    assert exactly_alike(plain(load(values(), tmp_path)), plain(values()))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("key", ["optim", "optimizer"])
def test_bcp_loads_what_dcp_has_saved(key: str, flat: bool, tmp_path: Path) -> None:  # noqa: FBT001 -- pytest's
    model, optimizer = trained()
    save(state_of(model, optimizer, flat=flat, key=key), tmp_path)
    other, stepped = trained(seed=1, steps=0)
    bcp.load(tmp_path, {"model": other, "optimizer": stepped})
    assert exactly_alike(other.state_dict(), model.state_dict())
    assert alike_in_any_order(stepped.state_dict(), optimizer.state_dict())
    with bcp.Checkpoint(tmp_path) as ckpt:
        assert (ckpt.framework, ckpt.world_size, ckpt.kinds) == ("dcp", 1, ("model", "optimizer"))
        assert ckpt.values["optimizer", "param_groups.2.bias.lr"] == 1e-3
        assert torch.equal(ckpt.read("2.weight"), model[2].weight)


def test_bcp_loads_the_state_of_torch_s_tutorial(tmp_path: Path) -> None:
    model, optimizer = trained()
    save({"app": state_of(model, optimizer, flat=False)}, tmp_path)
    other, stepped = trained(seed=1, steps=0)
    bcp.load(tmp_path, {"model": other, "optimizer": stepped})
    assert exactly_alike(other.state_dict(), model.state_dict())
    assert alike_in_any_order(stepped.state_dict(), optimizer.state_dict())


def test_other_names_are_left_out_of_a_load_that_is_not_strict(tmp_path: Path) -> None:
    model, optimizer = trained()
    save({**state_of(model, optimizer, flat=True), "step": 7, "ema": model.state_dict()}, tmp_path)
    other = trained(seed=1)[0]
    with pytest.raises(bcp.FqnMismatchError, match=r"names that no rank wants.*pass strict=False"):
        bcp.load(tmp_path, {"model": other})
    bcp.load(tmp_path, {"model": other}, strict=False)
    assert exactly_alike(other.state_dict(), model.state_dict())
    assert bcp.Checkpoint(tmp_path).values["model", "step"] == 7


def test_dcp_loads_what_bcp_has_saved(tmp_path: Path) -> None:
    model, optimizer = trained()
    bcp.save(tmp_path, {"model": model, "optimizer": optimizer})
    other, stepped = trained(seed=1, steps=1)
    found = state_of(other, stepped, flat=True)
    dcp.load(found, storage_reader=bcp.dcp.StorageReader(tmp_path), no_dist=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_state_dict(other, stepped, model_state_dict=found["model"], optim_state_dict=found["optim"], options=options)
    assert exactly_alike(other.state_dict(), model.state_dict())
    assert alike_in_any_order(stepped.state_dict(), optimizer.state_dict())


def test_dcp_loads_tied_tensors_that_bcp_has_stored_once(tmp_path: Path) -> None:
    weight = torch.rand(3, 4)
    bcp.save(tmp_path, {"model": {"a": weight, "b": weight}})
    state = {"model": {"a": torch.zeros(3, 4), "b": torch.zeros(3, 4)}}
    found = load(state, tmp_path)
    assert torch.equal(found["model"]["a"], weight)
    assert torch.equal(found["model"]["b"], weight)


def test_dcp_converts_dtypes_as_with_its_own_storage(tmp_path: Path) -> None:
    save({"model": {"w": torch.rand(5, 3)}}, tmp_path / "bcp")
    dcp.save({"model": {"w": torch.zeros(5, 3)}}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    found = {"model": {"w": torch.zeros(3, 5, dtype=torch.bfloat16).T}}
    dcp.load(found, storage_reader=bcp.dcp.StorageReader(tmp_path / "bcp"), no_dist=True)
    saved = bcp.Checkpoint(tmp_path / "bcp").read("w")
    assert torch.equal(found["model"]["w"], saved.bfloat16())


@pytest.mark.parametrize("place", [lambda: "memory://dcp-any/step-3", lambda: ObjectBackend(FakeStore())])
def test_any_storage_takes_a_checkpoint(place: Callable[[], Any]) -> None:
    path, state = place(), state_of(*trained(), flat=False)
    save(state, path)
    assert alike_in_any_order(load(state, path), plain(state))
    assert bcp.Checkpoint(path).verify()
    MemoryBackend.forget("dcp-any")


def test_a_checkpoint_id_takes_the_place_of_the_path(tmp_path: Path) -> None:
    state, found = {"w": torch.ones(3)}, {"w": torch.zeros(3)}
    writer, reader = bcp.dcp.StorageWriter(tmp_path / "other"), bcp.dcp.StorageReader()
    dcp.save(state, checkpoint_id=tmp_path / "step-1", storage_writer=writer, no_dist=True)
    dcp.save(state, checkpoint_id=str(tmp_path / "step-2"), storage_writer=writer, no_dist=True)
    dcp.load(found, checkpoint_id=tmp_path / "step-2", storage_reader=reader, no_dist=True)
    assert torch.equal(found["w"], state["w"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
    assert repr(writer) == f"StorageWriter('{tmp_path / 'step-2'}')"
    assert repr(reader) == f"StorageReader('{tmp_path / 'step-2'}')"


def test_a_process_of_its_own_can_save(tmp_path: Path) -> None:
    """DCP pickles the writer for ``AsyncCheckpointerType.PROCESS``."""
    writer = pickle.loads(pickle.dumps(bcp.dcp.StorageWriter(tmp_path, options=bcp.SaveOptions(step=3))))  # noqa: S301
    dcp.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert bcp.Checkpoint(tmp_path).names() == ["w"]


def test_facts_of_the_caller_are_committed(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path, options=bcp.SaveOptions(metadata={"git": "4f1c9e2"}))
    assert bcp.Checkpoint(tmp_path).user_metadata == {"git": "4f1c9e2"}


def test_a_role_has_a_place_of_its_own(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path, role="actor")
    assert torch.equal(bcp.Checkpoint(tmp_path, role="actor").read("w"), torch.ones(3))
    assert torch.equal(load({"w": torch.ones(3)}, tmp_path, role="actor")["w"], torch.ones(3))


def test_codecs_go_through_both_ways(tmp_path: Path) -> None:
    import zlib  # noqa: PLC0415 -- for this test

    codec = bcp.extend.Codec("zlib", zlib.compress, zlib.decompress)
    state = state_of(*trained(), flat=True)
    save(state, tmp_path, options=bcp.SaveOptions(codecs=[codec], part_bytes=1 << 20))
    found = load(state, tmp_path, options=bcp.LoadOptions(codecs=[codec]))
    assert alike_in_any_order(found, plain(state))
    with pytest.raises(dcp.CheckpointException, match="MissingCodecError"):
        load(state, tmp_path)


def test_a_part_of_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    state = state_of(*trained(), flat=True)
    save(state, tmp_path)
    found = load({"model": {"2.bias": state["model"]["2.bias"]}}, tmp_path)
    assert torch.equal(found["model"]["2.bias"], state["model"]["2.bias"])


def test_dcp_reads_a_file_of_torch_save(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "w.pt")
    target = {"model": {"w": torch.zeros(4)}}
    dcp.load(target, storage_reader=bcp.dcp.StorageReader(tmp_path / "w.pt"), no_dist=True)
    assert target["model"]["w"].tolist() == [1.0] * 4


def test_a_planner_that_does_not_flatten_keeps_nested_values(tmp_path: Path) -> None:
    state = {"w": torch.rand(3), "nested": {"tensor": torch.rand(2, 2), "list": [1, {"x": None}]}}
    save(state, tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    found = {"w": torch.zeros(3), "nested": None}
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = bcp.dcp.StorageReader(tmp_path)
    dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
    assert exactly_alike(found, state)
    assert reader.read_metadata().planner_data is None


def test_a_load_reads_the_blocks_of_its_boxes_alone(tmp_path: Path) -> None:
    state = {"model": {"large": torch.rand(4 << 20), "small": torch.rand(8)}}
    save(state, tmp_path)
    backend = CountingBackend(LocalBackend(tmp_path))
    found = load({"model": {"small": state["model"]["small"]}}, backend)
    assert torch.equal(found["model"]["small"], state["model"]["small"])
    assert sum(nbytes for key, nbytes in backend.read.items() if key.startswith("model/")) <= 2 << 20


@pytest.mark.parametrize("case", STATES)
def test_everything_is_loaded_without_a_state_dict(case: str, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner  # noqa: PLC0415 -- private
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # noqa: PLC0415

    state, found = STATES[case](), []
    for writer, reader in [
        (bcp.dcp.StorageWriter(tmp_path / "bcp"), bcp.dcp.StorageReader(tmp_path / "bcp")),
        (dcp.FileSystemWriter(tmp_path / "dcp"), dcp.FileSystemReader(tmp_path / "dcp")),
    ]:
        dcp.save(state, storage_writer=writer, no_dist=True)
        found.append({})
        _load_state_dict(found[-1], storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert alike_in_any_order(*found)
