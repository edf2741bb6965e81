from __future__ import annotations

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import random
import struct

import numpy as np
import pytest
import torch
from alike import exactly_alike, state_of
from lacking import lacking
from nested import nested

from bcp.errors import CheckpointError, StateError
from bcp.state import native_values as native
from bcp.state.packed import pack, unpack
from bcp.state.values import decode_value, encode_value

Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 -- one of the types to be tried


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Row(list):
    pass


class Pair(tuple):
    __slots__ = ()


class Table(dict):
    pass


class OwnArray(np.ndarray):
    pass


class OwnTensor(torch.Tensor):
    pass


@dataclasses.dataclass
class Config:
    rate: float = 0.1


def nan(bits: int) -> float:
    return struct.unpack(">d", bits.to_bytes(8, "big"))[0]


def ordered() -> collections.OrderedDict[str, object]:
    value = collections.OrderedDict(b=np.float32(1), a=[2])
    value._metadata = {"": {"version": 1}}
    return value


def spawned() -> np.random.Generator:
    generator = np.random.default_rng(7)
    generator.spawn(2)
    generator.random(3)
    generator.integers(10, dtype=np.int32)
    return generator


def gaussian() -> np.random.RandomState:
    generator = np.random.RandomState(3)
    generator.standard_normal()
    return generator


def read() -> io.BytesIO:
    stream = io.BytesIO(b"state")
    stream.seek(2)
    return stream


def drawn(generator):
    generator.random()
    return generator


def torch_generator() -> torch.Generator:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    return generator


STRUCTURED = np.dtype([("a", "<i2"), ("b", ">f8", (2,)), ("c", [("d", "U3"), ("e", "M8[ms]")])])
SPARSE_DTYPE = np.dtype({"names": ["a", "b"], "formats": ["i4", "u1"], "offsets": [4, 0], "itemsize": 12})
ALIGNED = np.dtype([("a", "i1"), ("b", [("c", "i1"), ("d", "q")])], align=True)
TITLED = np.dtype([(("a title", "a"), "i4"), ("b", "i4")])
FORTRAN = np.asfortranarray(np.arange(6.0).reshape(2, 3))

EXACT = {
    "none": None,
    "bools and ints": [True, 1, False, 0, -1, 1.0],
    "huge ints": (10**18, -(10**17999), 2**2000, -(2**2040), 2**63),
    "floats": [0.0, -0.0, 1e-320, float("inf"), float("-inf")],
    "nans": [nan(0x7FF8000000000000), nan(0xFFF8000000000000), nan(0x7FF8000000000001), nan(0xFFF0000000000123)],
    "complex": (complex(-0.0, 0.0), complex(0.0, -0.0), complex(float("nan"), 1)),
    "text": ["a\0", "\ud800", "é", ""],
    "bytes": (b"", b"\xff\0", bytearray(b"a")),
    "tuples": ((), ((1,), [2]), ("bcp", "int", "0x1"), ["bcp", "int"]),
    "keys": {1: "a", "1": "b", (1, "x"): "c", None: "d", 2.5: "e", frozenset([1]): "f", -(10**700): "g", b"h": "i"},
    "number keys": {True: 1, 2: True, -0.0: 1.0},
    "numpy keys": {np.int64(3): 1, np.str_("a"): 2},
    "marked keys": {"bcp": ("bcp", 1, 2)},
    "ordered": ordered(),
    "counter": collections.Counter("aab"),
    "counts": collections.Counter({"a": -1, "b": 0.5}),
    "default": collections.defaultdict(list, a=[1], b=[np.int8(1)]),
    "no default": collections.defaultdict(None, a=1),
    "deque": collections.deque([1, (2,)], maxlen=3),
    "endless deque": collections.deque(),
    "sets": [{1, 2}, set(), {(1, 2), "a"}, {np.float64(1)}],
    "frozen sets": frozenset([frozenset([1]), "a"]),
    "range": range(3, -9, -2),
    "slice": slice(None, np.int64(3), 2),
    "stream": read(),
    "torch's own": [
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.Size([2, 3]),
        torch.strided,
        torch.per_tensor_affine,
    ],
    "numpy dtypes": [np.dtype("f4"), np.dtype(">i8"), STRUCTURED],
    "numpy scalars": [
        *(np.float64(-0.0), np.float32("nan"), np.float16(1), np.int8(-1), np.uint64(2**64 - 1), np.bool_(1)),
        *(np.complex64(1j), np.longdouble(1) / 3, np.clongdouble(1j), np.longlong(1), np.ulonglong(2), np.intc(3)),
        *(np.str_("a\0"), np.bytes_(b"a\0"), np.str_(""), np.void(b"ab"), np.zeros(1, STRUCTURED)[0]),
        *(np.datetime64("2026-11-22"), np.datetime64("NaT"), np.timedelta64(3, "s"), np.timedelta64(1)),
    ],
    "arrays": [np.arange(3), np.zeros((0, 3)), np.array(1.5), np.ones((2, 1, 2), "f2"), np.array([True, False])],
    "arrays in other orders": [FORTRAN, FORTRAN[:, ::2], np.arange(9).reshape(3, 3)[1:, ::-1], np.arange(4)[::-1]],
    "arrays of other bytes": [np.arange(3, dtype=">i4"), np.array([1.5, -0.0], ">f8"), np.array([1j], ">c16")],
    "arrays of text": [
        np.array(["a", "bcd"]),
        np.array(["é"], ">U2"),
        np.array([b"a", b"\0b"]),
        np.array(["ab"], "U9"),
    ],
    "arrays of times": [np.array(["2026-01-01", "NaT"], "M8[D]"), np.array([1, 2], ">m8[3s]")],
    "arrays of records": [
        np.zeros(2, ALIGNED),
        np.ones(1, TITLED),
        np.zeros(2, STRUCTURED),
        np.ones((2, 2), SPARSE_DTYPE),
        np.zeros(2, "V3"),
    ],
    "long arrays": [np.array([1, 2], np.longdouble) / 3, np.arange(3, dtype=np.longlong), np.ones(2, np.clongdouble)],
    "generators of numpy": [spawned(), drawn(np.random.Generator(np.random.MT19937(3)))],
    "other generators of numpy": [drawn(np.random.Generator(k(3))) for k in (np.random.SFC64, np.random.PCG64DXSM)],
    "bit generators": [np.random.Philox(3), np.random.PCG64(np.random.SeedSequence(2**200, spawn_key=(1, 2)))],
    "bit generators of other seeds": [
        *(np.random.PCG64(np.random.SeedSequence(3, pool_size=pool)) for pool in (8, 1024)),
        *(np.random.PCG64(seeds) for seeds in ([1, 2**80], np.arange(3), range(3))),
    ],
    "legacy generators": [gaussian(), np.random.RandomState(np.random.PCG64(1))],
    "generator of torch": torch_generator(),
    "generator of Python": drawn(random.Random(3)),  # noqa: S311 -- a value
    "tensors": [
        torch.arange(3),
        torch.tensor(-0.0),
        torch.zeros(0, 2),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(2, 3).T,
    ],
    "views": [torch.arange(9.0)[2:4], torch.ones(1).expand(3), torch.tensor([1j]).conj().imag],
    "dtypes": [torch.arange(4).to(torch.uint8).view(d) for d in (torch.float8_e4m3fn, torch.uint16, torch.float8_e5m2)],
}

EXOTIC = {
    "sparse": torch.Tensor.to_sparse,
    "sparse rows": torch.Tensor.to_sparse_csr,
    "sparse columns": torch.Tensor.to_sparse_csc,
    "nested": lambda eye: nested([eye[:1], eye]),
    "quantized": lambda eye: torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
}

REFUSED = {
    "masked array": (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), "is a masked array; pass its data and its mask"),
    "masked constant": (np.ma.masked, "is a masked array"),
    "matrix": (
        np.ones((1, 1)).view(np.matrix),
        r"is a numpy.matrix of dtype float64, which only allow_pickle=True would read again",
    ),
    "recarray": (np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), "is a numpy.*recarray"),
    "record": (np.rec.array([(1,)], dtype=[("a", "i4")])[0], r"is a numpy.*record, which only allow_pickle"),
    "record dtype": (np.dtype((np.record, [("a", "i4")])), "is a numpy.dtype.* only allow_pickle"),
    "array of records": (np.zeros(2, np.dtype((np.record, [("a", "i4")]))), "is a numpy.ndarray of dtype .*record"),
    "objects": (np.array([None, 1], object), "is a numpy.ndarray of dtype object"),
    "objects inside": (np.zeros(1, [("a", "i4"), ("b", "O")]), "is a numpy.ndarray of dtype"),
    "metadata": (np.zeros(1, np.dtype("i4", metadata={"a": 1})), "is a numpy.ndarray of dtype int32"),
    "no bytes": (np.zeros(2, np.dtype([])), "is a numpy.ndarray of dtype"),
    "own array": (np.arange(3).view(OwnArray), r"is a .*OwnArray of dtype int64"),
    "own tensor": (
        torch.ones(2).as_subclass(OwnTensor),
        r"is a .*OwnTensor, which only allow_pickle=True would read again",
    ),
    "untyped storage": (torch.arange(3).untyped_storage(), "is an UntypedStorage, .* pass a tensor of it"),
    "namedtuple": (
        Point(1, 2),
        r"is a .*Point, which only allow_pickle=True would read again; pass plain values, or save with",
    ),
    "list": (Row([1]), "is a .*Row, which only"),
    "tuple": (Pair((1, 2)), "is a .*Pair, which only"),
    "dict": (Table(a=1), "is a .*Table, which only"),
    "str": (Text("a"), "is a .*Text, which only"),
    "int": (Whole(1), "is a .*Whole, which only"),
    "key": ({Text("a"): 1}, "a key of x is a .*Text"),
    "enum": (Colour.RED, "is a .*Colour, which only"),
    "int enum": (Level.LOW, "is a .*Level, which only"),
    "dataclass": (Config(), "is a .*Config, which only"),
    "factory": (collections.defaultdict(Config), r"is a collections.defaultdict, which only|cannot be serialized"),
    "datetime": (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "is a datetime.datetime, which only"),
    "timedelta": (dt.timedelta(1), "is a datetime.timedelta, which only"),
    "decimal": (decimal.Decimal("0.1"), "is a decimal.Decimal, which only"),
    "fraction": (fractions.Fraction(1, 3), "is a fractions.Fraction, which only"),
    "path": (pathlib.PurePosixPath("a"), "is a pathlib.*PurePosixPath, which only"),
    "array": (array.array("i", [1]), "is a array.array, which only"),
    "class": (Config, "is a type, which only"),
    "ellipsis": (..., "is a ellipsis, which only"),
    "function": (lambda: 0, r"cannot be serialized: .*; pass plain values"),
    "generator": ((i for i in range(3)), r"cannot be serialized: TypeError"),
    "view of memory": (memoryview(b"a"), "cannot be serialized"),
    "memory format": (
        torch.channels_last,
        "(cannot be serialized|is a .*memory_format, which only)",
    ),  # as torch has it
    "meta": (torch.empty(1, device="meta"), "is on the meta device"),
    "lazy": (torch.nn.UninitializedParameter(), "is uninitialized; run one forward pass"),
    "int4": (torch.empty(2, dtype=torch.int4), "cannot be serialized"),
    "mkldnn": (torch.eye(3).to_mkldnn(), "cannot be serialized"),
    "functional": (torch._to_functional_tensor(torch.ones(2)), "cannot be serialized"),
    "seeds of many words": (
        np.random.default_rng(np.random.SeedSequence(1, pool_size=1025)),
        "is a numpy.random.*Generator, which only",
    ),
    "seeds of many bits": (np.random.PCG64(2 ** (1 << 18)), "is a numpy.random.*PCG64, which only"),
    "integer of many digits": (2 ** (1 << 18), "is an integer of 262145 bits, more than 262144; save it as bytes"),
}


def through_pack(value, where="x", *, allow_pickle=False):
    return unpack(pack(value, where, allow_pickle=allow_pickle), allow_pickle=allow_pickle, where=where)


def through_text(value, where="x", *, allow_pickle=False):
    return decode_value(
        encode_value(value, where=where, allow_pickle=allow_pickle), allow_pickle=allow_pickle, where=where
    )


WAYS = pytest.mark.parametrize("way", [through_pack, through_text])


@WAYS
@pytest.mark.parametrize("name", EXACT)
def test_what_is_packed_comes_back_with_its_type_and_bits(name, way):
    value = EXACT[name]
    assert exactly_alike(value, value)
    assert exactly_alike(way(value), value)
    assert exactly_alike(way({"a": [(value, {"b": value})]}), {"a": [(value, {"b": value})]})
    assert exactly_alike(way(value, allow_pickle=True), value)


@WAYS
@pytest.mark.parametrize("name", EXOTIC)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on what is in beta or deprecated
def test_tensors_of_other_layouts_come_back(name, way):
    value = EXOTIC[name](torch.eye(3))
    assert exactly_alike(way({"a": [value]}), {"a": [value]})


@WAYS
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # as above
def test_what_would_not_come_back_is_refused_with_its_name(name, way):
    value, said = REFUSED[name]
    with pytest.raises(StateError, match=f"^{said}" if "key" in said else f"^x {said}"):
        way(value)
    deep = {"a": [(1, {"b": value, "c": torch.ones(1)})]}
    with pytest.raises(StateError, match=r"x\.a\.0\.1\.b"):
        way(deep)
    with pytest.raises(StateError, match=r"x\.a\.0\.1\.b"):
        way(collections.OrderedDict(deep))


@WAYS
@pytest.mark.parametrize("name", ["matrix", "own array", "namedtuple", "list", "enum", "dataclass", "decimal", "key"])
def test_with_allow_pickle_objects_of_any_class_are_pickled(name, way):
    value, _ = REFUSED[name]
    back = way([value], allow_pickle=True)[0]
    assert type(back) is type(value)
    assert np.all(back == value)


def test_with_allow_pickle_a_masked_array_keeps_its_mask():
    value = through_pack({"a": np.ma.masked_array([1.0, 2.0], mask=[0, 1])}, allow_pickle=True)["a"]
    assert (type(value), value.mask.tolist(), value.data.tolist()) == (np.ma.MaskedArray, [False, True], [1.0, 2.0])


def torch_saves(value):
    try:
        torch.save(value, io.BytesIO())
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("name", ["function", "meta", "int4", "lazy", "untyped storage", "mkldnn", "memory format"])
def test_allow_pickle_does_not_help_what_cannot_be_pickled(name):
    value, said = REFUSED[name]
    if name == "memory format" and torch_saves(value):
        lacking("memory formats that cannot be pickled")
    with pytest.raises(StateError, match=rf"^x\.a\.0 {said}"):
        pack({"a": [value], "b": Config()}, "x", allow_pickle=True)


def test_classes_that_torch_was_told_to_be_safe_need_no_allow_pickle():
    with torch.serialization.safe_globals([Config]):
        assert through_pack({"a": Config(0.5)}) == {"a": Config(0.5)}
    with pytest.raises(StateError, match=r"^x\.a is a .*Config"):
        through_pack({"a": Config(0.5)})


@pytest.mark.filterwarnings("ignore::UserWarning")  # as above
def test_broken_quantized_tensors_are_refused():
    for dtype in (torch.quint8, torch.qint32, torch.quint4x2):
        with pytest.raises(StateError, match=r"^x\.a cannot be serialized: RuntimeError"):
            pack({"a": torch.empty(2, dtype=dtype)}, "x")


def test_tensors_without_values_are_refused():
    fake = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake.FakeTensorMode():
        value = torch.ones(2)
    for allow_pickle in (False, True):
        with pytest.raises(StateError, match=r"^x\.a is a FakeTensor, which has no values"):
            pack({"a": value}, "x", allow_pickle=allow_pickle)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"^x\.a has lost its memory"):
        pack({"a": freed}, "x")
    torch.func.vmap(_refused_inside)(torch.ones(2, 2))


def _refused_inside(row):
    with pytest.raises(StateError, match=r"^x\.a cannot be serialized"):
        pack({"a": row}, "x")
    return row


def test_tensors_that_share_memory_come_back_apart():
    whole = torch.arange(4.0)
    back = through_pack({"a": whole, "b": whole.view(torch.int32), "c": whole[1:], "d": whole})
    assert torch.equal(back["b"].view(torch.float32), whole)
    back["a"].fill_(9)
    assert back["c"].tolist() == [1.0, 2.0, 3.0]
    assert torch.equal(back["d"], whole)


def test_parameters_come_back_as_tensors():
    back = through_pack([torch.nn.Parameter(torch.ones(2)), torch.ones(1, requires_grad=True) * 2])
    assert [(type(each), each.requires_grad) for each in back] == [(torch.Tensor, False)] * 2


def test_a_generator_goes_on_where_it_was():
    for name in (name for name in EXACT if "generator" in name):
        value = EXACT[name]
        for one in value if isinstance(value, list) else [value]:
            back = through_pack(one)
            assert state_of(back) is not None
            if hasattr(one, "spawn") and isinstance(one, np.random.Generator):
                assert exactly_alike(back.spawn(1)[0], through_pack(one).spawn(1)[0])


@pytest.mark.parametrize("described", ["|O", [("a", "|O")], "no dtype", [("a", "<i4")] * 2])
def test_arrays_of_a_hostile_checkpoint_are_refused(described, monkeypatch):
    monkeypatch.setattr(native, "_described", lambda _: described)
    data = pack({"a": np.arange(4)})
    with pytest.raises(CheckpointError, match="x cannot be read"):
        unpack(data, allow_pickle=False, where="x")


HOSTILE = {
    "seeds of many words": ("BitGenerator", ("PCG64", {}, {"entropy": 1, "pool_size": 2**40})),
    "seeds of many bits": ("BitGenerator", ("PCG64", {}, {"entropy": ["0x" + "1" * 2**17], "pool_size": 4})),
    "seeds of many children": ("Generator", ("PCG64", {}, {"entropy": 1, "spawn_key": [1] * 2**19, "pool_size": 4})),
    "integer of many digits": ("int", "0x" + "1" * 2**17),
}


@pytest.mark.timeout(300)  # what is not refused takes hours
@pytest.mark.parametrize("name", HOSTILE)
def test_seeds_and_integers_that_take_hours_are_refused(name):
    out = io.BytesIO()
    torch.save({"value": ("bcp", *HOSTILE[name])}, out)
    with pytest.raises(CheckpointError, match=r"x cannot be read: .*at most"):
        unpack(out.getvalue(), allow_pickle=False, where="x")


def test_a_form_of_a_later_version_is_refused(monkeypatch):
    monkeypatch.setattr("bcp.state.packed.take_apart", lambda _: ("quaternion", 1))
    data = pack({"a": np.arange(4)})
    with pytest.raises(CheckpointError, match=r"x cannot be read: .*'quaternion', which this bcp does not know"):
        unpack(data, allow_pickle=False, where="x")


def test_an_endless_value_is_refused():
    value = {"a": []}
    value["a"].append(value)
    for way in (pack, encode_value):
        with pytest.raises(StateError, match=r"nested too deep|contains itself"):
            way(value)


def test_arrays_of_an_older_archive_are_refused():
    out = io.BytesIO()
    torch.save({"value": {"a": torch.ones(3)}, "arrays": [(("a",), False)]}, out)
    with pytest.raises(CheckpointError, match="a development version before") as caught:
        unpack(out.getvalue(), allow_pickle=False, where="x")
    assert "allow_pickle" not in str(caught.value)
