from __future__ import annotations

import collections
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bcp.errors import CheckpointError, StateError
from bcp.state import values
from bcp.state.objects import collect, restore
from bcp.state.packed import pack, unpack
from bcp.state.values import decode_value, decode_values, encode_value, encode_values

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def alike(one, other):
    """Equal with types, where nan is nan and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    return repr(one) == repr(other)


@given(VALUES)
def test_values_come_back_as_they_were(value):
    assert alike(decode_value(encode_value(value), allow_pickle=False, where="x"), value)


@pytest.mark.parametrize(
    "value",
    [
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.Size([2, 3]),
        1 << 20000,
        {1, 2},
        1 + 2j,
        {(1, 2): "a"},
        [{"tuple": 1}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types(value):
    back = decode_value(encode_value(value), allow_pickle=False, where="x")
    assert type(back) is type(value)
    assert back == value


def test_numpy_and_tensor_values_need_no_allow_pickle():
    value = decode_value(encode_value({"a": np.float64(0.5), "t": torch.arange(3)}), allow_pickle=False, where="x")
    assert type(value["a"]) is np.float64
    assert value["t"].tolist() == [0, 1, 2]


def test_values_are_readable():
    assert encode_value([1, 0.1, "a", None, True]) == '[1,0.1,"a",null,true]'
    assert encode_value((0.9, math.inf)) == '{"tuple":[0.9,{"float":"inf"}]}'


class Custom:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom)

    __hash__ = None


def test_own_classes_need_allow_pickle():
    with pytest.raises(StateError, match=r"optimizer lr is a .*Custom, which only allow_pickle=True would read again"):
        encode_value(Custom(), where="optimizer lr")
    text = encode_value(Custom(), allow_pickle=True)
    with pytest.raises(CheckpointError, match=r"the value of optimizer: lr cannot be read.*Custom.*allow_pickle=True"):
        decode_value(text, allow_pickle=False, where="optimizer: lr")
    assert decode_value(text, allow_pickle=True, where="x") == Custom()


@pytest.mark.parametrize(
    "text", ["{", '{"nope":1}', '{"dtype":"nn"}', '{"bytes":"?"}', "{}", '{"torch":"AAAA"}', '{"int":3}']
)
def test_damaged_values(text):
    with pytest.raises(CheckpointError, match="the value of k cannot be read"):
        decode_value(text, allow_pickle=False, where="k")


def test_packed_values_with_a_stray_character_are_damaged():
    text = encode_value({"t": torch.arange(3)} | {"a": np.float64(0.5)}).replace('"torch":"', '"torch":"!')
    assert '"torch":"!' in text
    with pytest.raises(CheckpointError, match="the value of k cannot be read"):
        decode_value(text, allow_pickle=False, where="k")


def test_values_that_cannot_be_encoded():
    with pytest.raises(StateError, match=r"the key k cannot be serialized.*pass plain values"):
        encode_value(lambda: 0, where="the key k")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(StateError, match="the key k contains itself"):
        encode_value(loop, where="the key k")


class Counter:
    def __init__(self, count=0) -> None:
        self.state = {"count": count, "ema": torch.tensor([float(count)])}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def through_bytes(value):
    return unpack(pack(collect(value)), allow_pickle=False, where="extra_states of rank 0")


def test_extra_states_round_trip_with_statefuls_and_random_states():
    np.random.seed(3)  # noqa: NPY002 -- the legacy state is what users save
    source = {
        "scheduler": Counter(5),
        "nested": {"loaders": [Counter(1), Counter(2)]},
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},  # noqa: NPY002
        "step": 7,
        "scalar": np.int64(4),
    }
    loaded = through_bytes(source)
    schedulers = [Counter(), Counter(), Counter()]
    target = {"scheduler": schedulers[0], "nested": {"loaders": schedulers[1:]}, "rng": {}, "step": 0, "mine": 1}
    restore(target, loaded)
    assert [scheduler.state["count"] for scheduler in schedulers] == [5, 1, 2]
    assert target["scheduler"] is schedulers[0]
    assert (target["step"], target["mine"], type(target["scalar"])) == (7, 1, np.int64)
    random.setstate(target["rng"]["python"])
    torch.set_rng_state(target["rng"]["torch"])
    expected = np.random.randint(1000)  # noqa: NPY002
    np.random.set_state(target["rng"]["numpy"])  # noqa: NPY002
    assert np.random.randint(1000) == expected  # noqa: NPY002


def test_snapshots_do_not_change_with_their_source():
    source = {"c": Counter(1), "list": [1], "bytes": bytearray(b"a"), "array": np.zeros(2)}
    source["view"] = torch.arange(8)[2:4]
    packed = pack(collect(source))
    source["c"].state["ema"].fill_(9)
    source["c"].state["count"] = 9
    source["list"].append(2)
    source["bytes"][0] = 9
    source["array"][0] = 9
    source["view"].fill_(9)
    loaded = unpack(packed, allow_pickle=False, where="x")
    assert loaded["c"]["count"] == 1
    assert loaded["c"]["ema"].item() == 1.0
    assert (loaded["list"], loaded["bytes"], loaded["array"].tolist()) == ([1], bytearray(b"a"), [0.0, 0.0])
    assert loaded["view"].tolist() == [2, 3]


def test_bytes_are_compact():
    view = torch.zeros(1_000_000)[:2]
    assert len(pack({"view": view})) < 5000
    assert len(pack(collect({"view": view}))) < 5000


def test_mappings_of_other_types_need_no_allow_pickle():
    value = collections.defaultdict(list, a=[np.ones(2)])
    assert through_bytes(value)["a"][0].tolist() == [1.0, 1.0]


def test_restore_in_place():
    seen = [1]
    tensor = torch.zeros(2)
    target = {"list": seen, "tensor": tensor, "resized": torch.zeros(1), "pair": (Counter(), 1)}
    owner = target["pair"][0]
    loaded = {"list": [2, 3], "tensor": torch.ones(2), "resized": torch.ones(3), "pair": (Counter(4).state, 5)}
    restore(target, loaded)
    assert seen == [2, 3]
    assert tensor.tolist() == [1.0, 1.0]
    assert target["tensor"] is tensor
    assert target["resized"].shape == (3,)
    assert target["pair"] == (owner, 5)
    assert owner.state["count"] == 4
    top = Counter()
    restore(top, {"count": 3})
    assert top.state == {"count": 3}
    restore(seen, (9,))
    assert seen == [9]


@pytest.mark.parametrize(("target", "loaded"), [(5, 5), ((1,), (1,)), ({}, [1]), ([], {"a": 1}), (None, {})])
def test_restore_refuses_what_cannot_change(target, loaded):
    with pytest.raises(StateError, match=r"cannot take (a loaded|what is loaded)"):
        restore(target, loaded)


def test_failing_owners_are_named():
    class Picky(Counter):
        def load_state_dict(self, _):
            raise KeyError("gone")

    with pytest.raises(KeyError) as caught:
        restore({"a": {"b": Picky()}}, {"a": {"b": {}}})
    assert caught.value.__notes__ == ["bcp: raised while the Picky at extra_states.a.b took its state"]


def test_extras_refuse_what_is_not_here():
    with pytest.raises(StateError, match=r"extra_states\.a\.0 is on the meta device"):
        pack({"a": [torch.empty(1, device="meta")]})
    with pytest.raises(StateError, match=r"cannot be serialized.*pass plain values"):
        pack({"f": lambda: 0})


def test_what_fails_while_a_snapshot_is_taken_is_named():
    class Broken(Counter):
        def state_dict(self):
            raise AttributeError("no optimizer yet")

    with pytest.raises(
        StateError, match=r"of the Broken at extra_states\.scheduler raised AttributeError: no opt"
    ) as caught:
        collect({"scheduler": Broken()})
    assert type(caught.value.__cause__) is AttributeError
    with pytest.raises(StateError, match=r"extra_states\.stream cannot be serialized: TypeError"):
        pack({"stream": (i for i in range(3))})


def test_unpack_says_what_is_wrong():
    with pytest.raises(CheckpointError, match=r"extra_states of rank 3 cannot be read.*Custom.*allow_pickle=True"):
        unpack(pack({"c": Custom()}, allow_pickle=True), allow_pickle=False, where="extra_states of rank 3")
    with pytest.raises(CheckpointError, match="extra_states of rank 3 cannot be read"):
        unpack(pack({"c": 1})[:50], allow_pickle=True, where="extra_states of rank 3")


def test_what_stands_under_many_keys_is_encoded_once(monkeypatch):
    shared, calls = [1, 2], []

    def encode(value, *, where, allow_pickle):
        assert not allow_pickle
        calls.append(where)
        return encode_value(value)

    monkeypatch.setattr(values, "encode_value", encode)
    objects = {("optimizer", name): shared for name in "abc"} | {("optimizer", "d"): [1, 2], ("model", "e"): True}
    keys = [*objects][1:]
    assert encode_values(objects, keys) == {key: encode_value(objects[key]) for key in keys}
    assert calls == ["optimizer b", "optimizer d", "model e"]


def test_values_that_are_made_when_they_are_asked_for_are_kept_apart():
    class Made(dict):
        def __getitem__(self, key) -> list[str]:
            return [key[1]]  # gone before the next one is made, which may then have its id

    keys = [("model", str(n)) for n in range(100)]
    assert encode_values(Made(), keys) == {key: f'["{key[1]}"]' for key in keys}


def test_equal_texts_give_one_object_if_nobody_can_change_it():
    texts = [encode_value(value) for value in (0.1, 0.0, -0.0, True, 1, (0.9, (0.95,)), [1], ([1],), {"a": 1})]
    names = [("optimizer", f"{n}.{turn}") for turn in "xy" for n in range(len(texts))]
    found = decode_values(((name, text, "w") for name, text in zip(names, texts * 2, strict=True)), allow_pickle=False)
    pairs = [(found["optimizer", f"{n}.x"], found["optimizer", f"{n}.y"]) for n in range(len(texts))]
    assert [encode_value(one) for one, _ in pairs] == texts
    assert [one is other for one, other in pairs] == [True] * 6 + [False] * 3
    assert [one == other for one, other in pairs] == [True] * 9


def endless():
    value = {"a": []}
    value["a"].append(value)
    return value


def deep():
    value = 1
    for _ in range(3000):
        value = [value]
    return value


@pytest.mark.parametrize("make", [endless, deep])
def test_values_without_an_end_are_refused(make):
    with pytest.raises(StateError, match="extra_states is nested too deep; does it contain itself"):
        collect(make())


def test_masked_arrays_are_refused():
    with pytest.raises(StateError, match=r"extra_states\.a is a masked array"):
        pack({"a": np.ma.masked_array([1.0, 2.0], mask=[0, 1])})
