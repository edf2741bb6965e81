"""Every name of DCP comes back, whatever it is; those of get_state_dict become the names that bcp.load looks for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcp.dcp.names import Names, assigned
from bcp.errors import CorruptError, StateError

PARTS = st.sampled_from(
    [
        "",
        "model",
        "optim",
        "optimizer",
        "state",
        "param_groups",
        "0",
        "1",
        "params",
        "lr",
        "w",
        "dcp",
        "x#2",
        "é",
        "a/b",
    ]
)
NAMES = st.lists(PARTS, min_size=1, max_size=5).map(".".join) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=8
)


@given(st.sets(NAMES, max_size=30))
def test_every_name_comes_back(fqns: set[str]) -> None:
    keys, names = assigned(fqns)
    assert keys.keys() == fqns
    assert len(set(keys.values())) == len(fqns)
    again = Names.decode(names.encode(), "a receipt")
    assert again == names
    assert {fqn: again.in_dcp(key) for fqn, key in keys.items()} == {fqn: fqn for fqn in fqns}


@pytest.mark.parametrize("optimizer", ["optim", "optimizer"])
def test_states_get_the_names_that_bcp_gives_them(optimizer: str) -> None:
    state = {
        "model.0.weight": ("model", "0.weight"),
        f"{optimizer}.state.0.weight.exp_avg": ("optimizer", "state.0.weight.exp_avg"),
        f"{optimizer}.param_groups.0.weight.lr": ("optimizer", "param_groups.0.weight.lr"),
        "ema.0.weight": ("model", "ema.0.weight"),
        "step": ("model", "step"),
    }
    assert assigned(state)[0] == state


def test_groups_with_numbers_make_place_for_hyper_parameters_by_parameter() -> None:
    keys, names = assigned(["optim.param_groups.0.lr", "optim.param_groups.0.params", "optim.state.0.exp_avg"])
    assert keys["optim.param_groups.0.lr"] == ("optimizer", "dcp.param_groups.0.lr")
    assert keys["optim.state.0.exp_avg"] == ("optimizer", "state.0.exp_avg")
    assert names.in_dcp(("optimizer", "param_groups.w.lr")) is None


def test_a_model_without_prefix_keeps_its_names() -> None:
    keys, names = assigned(["layers.0.w", "optimizer.state.layers.0.w.exp_avg", "train_state"])
    assert keys["layers.0.w"] == ("model", "layers.0.w")
    assert not names.others


def test_a_key_around_model_and_optimizer_belongs_to_the_prefix() -> None:
    app = ["app.model.w", "app.optim.state.w.exp_avg", "app.step"]
    keys, names = assigned(app)
    assert [keys[fqn] for fqn in app] == [("model", "w"), ("optimizer", "state.w.exp_avg"), ("model", "app.step")]
    assert names.path(("optimizer", "state.w.exp_avg")) == ("app", "optim", "state.w.exp_avg")
    for other in (["ema.model.w", "w"], [*app, "b.model.w", "b.optim.state.w.exp_avg"], [*app, "model.w"]):
        assert assigned(other)[0][other[0]] == ("model", other[0])


def test_a_name_that_is_taken_gets_a_number() -> None:
    keys, names = assigned(["x", "model.x", "model.x#2"])
    assert keys == {"x": ("model", "x#3"), "model.x": ("model", "x"), "model.x#2": ("model", "x#2")}
    assert names.in_dcp(("model", "x#3")) == "x"


@given(st.sets(NAMES, max_size=20), st.data())
def test_every_path_comes_back(fqns: set[str], data: st.DataObject) -> None:
    keys, names = assigned(fqns)
    paths = {}
    for fqn in sorted(fqns):
        cuts = data.draw(st.sets(st.sampled_from([at for at, char in enumerate(fqn) if char == "."] or [-1])))
        ends = [*sorted(cuts - {-1}), len(fqn)]
        parts = [fqn[first:last] for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
        paths[fqn] = tuple(int(part) if part in ("0", "1") and data.draw(st.booleans()) else part for part in parts)
    again = Names.decode(names.with_paths(paths, keys).encode(), "a receipt")
    assert {fqn: again.path(key) for fqn, key in keys.items()} == paths


def test_usual_paths_need_no_record() -> None:
    flat = {"model.0.w": ("model", "0.w"), "optim.state.0.w.step": ("optim", "state.0.w.step"), "step": ("step",)}
    nested = {
        "model.0.w": ("model", "0.w"),
        "optim.state.0.w.step": ("optim", "state", "0.w", "step"),
        "optim.param_groups.0.params": ("optim", "param_groups", 0, "params"),
    }
    for paths in (flat, nested):
        keys, names = assigned(paths)
        assert names.with_paths(paths, keys).paths == {}


def test_a_name_without_utf8_is_refused() -> None:
    with pytest.raises(StateError, match=r"'a\\ud800', which UTF-8 cannot encode; rename it"):
        assigned(["a\ud800"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[[[[",
        '["a","b",1,[],{}]',
        '["a","b",true,[["model","x",7]],{}]',
        '["a","b",true,[],[]]',
        '["a","b",true,[],{"x":[1.5]}]',
        '["a","b",true,[],{"x":[]}]',
        '["a","b",true,[],{"x":["l",99999999999]}]',
    ],
)
def test_a_damaged_record_is_a_corrupt_receipt(text: str) -> None:
    with pytest.raises(CorruptError, match=r"receipts/0 has a damaged record of names: .*; restore it"):
        Names.decode(text, "receipts/0")
