"""Which of a model's tensors are the parameters that an optimizer numbers."""

from __future__ import annotations

from typing import Any

import pytest

from bcp.errors import CheckpointError
from bcp.interop.optimizer_numbers import is_packed, packed_entries
from bcp.interop.torch_pickle import Stored

NORM = [("norm.weight", (4,)), ("norm.bias", (4,)), ("norm.mean", (4,)), ("norm.var", (4,)), ("norm.count", ())]


def stored(*shape: int) -> Stored:
    return Stored("0", "float32", 0, shape, (1,) * len(shape))


def model(*named: tuple[str, tuple[int, ...]]) -> list[tuple[str, Stored]]:
    return [(name, stored(*shape)) for name, shape in named]


def state(*shapes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return the state of an optimizer with one group."""
    states = {number: {"m": stored(*shape), "step": 3} for number, shape in enumerate(shapes)}
    return {"state": states, "param_groups": [{"lr": 0.5, "params": [*range(len(shapes))], **more}]}


def names(entries: Any) -> list[str]:
    return [name.removeprefix("state.").removesuffix(".m") for name, _ in entries if name.endswith(".m")]


def test_parameters_come_before_buffers_in_each_module() -> None:
    tensors = model(("up.weight", (8, 4)), *NORM, ("down.weight", (4, 8)), ("down.bias", (4,)))
    found = names(packed_entries(state((8, 4), (4,), (4,), (4, 8), (4,)), tensors, "f"))
    assert found == ["up.weight", "norm.weight", "norm.bias", "down.weight", "down.bias"]


def test_hyper_parameters_are_those_of_each_parameter() -> None:
    entries = dict(packed_entries(state((2,), betas=(1, 2)), model(("w", (2,))), "f"))
    assert entries["param_groups.w.lr"] == 0.5
    assert entries["param_groups.w.betas"] == (1, 2)
    assert entries["state.w.step"] == 3
    assert entries["state.w.:number=0:0"] is None


def test_names_of_the_groups_come_first() -> None:
    entries = dict(packed_entries(state((2,), (2,), param_names=["b", "a"]), model(("a", (2,)), ("b", (2,))), "f"))
    assert {"state.b.m", "state.a.m"} <= entries.keys()
    assert not any(":number=" in name for name in entries)


@pytest.mark.parametrize(
    ("shapes", "tensors"),
    [
        ([(2,)], [("a.w", (2,)), ("b.w", (2,))]),
        ([(3,)], [("w", (2,))]),
        ([(2,), (2,)], [("w", (2,))]),
        ([(2,), (3,)], [("a.w", (3,)), ("b.w", (2,))]),
    ],
    ids=["two fit", "none fits", "too few", "another order"],
)
def test_doubt_is_an_error(shapes: list[tuple[int, ...]], tensors: list[Any]) -> None:
    with pytest.raises(CheckpointError, match="do not tell which ones they are"):
        list(packed_entries(state(*shapes), model(*tensors), "f"))


def test_entries_of_no_parameter_are_an_error() -> None:
    odd = state((2,))
    odd["state"]["global"] = {"x": 1}
    with pytest.raises(CheckpointError, match=r"entries of no parameter: \['global'\]"):
        list(packed_entries(odd, model(("w", (2,))), "f"))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"state": {}},
        {"state": {}, "param_groups": {}},
        {"state": {}, "param_groups": [{"params": ["w"]}]},
        {"state": {}, "param_groups": [{"lr": 1}]},
        {"state": 3, "param_groups": []},
        3,
    ],
    ids=str,
)
def test_what_is_no_state_of_an_optimizer(value: Any) -> None:
    assert not is_packed(value)
