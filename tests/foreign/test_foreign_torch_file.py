"""Files of ``torch.save`` by reference, held against ``torch.load``."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import Evil, repickled

import bcp


class Net(torch.nn.Module):
    """A model with a buffer and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(self.embed(x)))


def trained(seed: int) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.125, betas=(0.5, 0.75))
    for _ in range(3):
        net(torch.arange(9)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_flat_state_dict_is_a_model(tmp_path: Path) -> None:
    net, _ = trained(0)
    torch.save(net.state_dict(), tmp_path / "model.pt")
    ckpt = bcp.Checkpoint(tmp_path / "model.pt")
    expected = torch.load(tmp_path / "model.pt", weights_only=True)
    assert ckpt.names() == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(ckpt.read(name), tensor)
        assert ckpt[name].dtype == str(tensor.dtype).removeprefix("torch.")
    assert ckpt["head.weight"].tied_to == "embed.weight"
    assert ckpt.nbytes == sum(tensor.nbytes for name, tensor in expected.items() if name != "head.weight")
    target = trained(1)[0]
    result = bcp.load(tmp_path / "model.pt", {"model": target})
    assert same(dict(target.state_dict()), dict(net.state_dict()))
    assert result.read_nbytes == ckpt.nbytes
    assert result.unverified


@pytest.mark.parametrize("named", [False, True])
def test_model_and_optimizer_are_loaded_into_live_ones(tmp_path: Path, *, named: bool) -> None:
    net, optimizer = trained(0)
    if named:
        saved = torch.optim.AdamW(net.named_parameters(), lr=0.125, betas=(0.5, 0.75))
        saved.load_state_dict(optimizer.state_dict())
        optimizer = saved
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ckpt.pt")
    other, other_optimizer = trained(1)
    bcp.load(tmp_path / "ckpt.pt", {"model": other, "optimizer": other_optimizer})
    assert same(dict(other.state_dict()), dict(net.state_dict()))
    state, wanted = other_optimizer.state_dict(), optimizer.state_dict()
    assert same(state["state"], wanted["state"])
    assert [group["lr"] for group in state["param_groups"]] == [0.125]
    assert [group["betas"] for group in state["param_groups"]] == [(0.5, 0.75)]


def grouped(*, is_decayed: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return two norms with parameters of one shape, and their optimizer: groups by module, or by decay."""
    one, two = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)
    groups = (
        [[one.weight, two.weight], [one.bias, two.bias]] if is_decayed else [[*one.parameters()], [*two.parameters()]]
    )
    decays = [{"params": group, "weight_decay": 0.5**number} for number, group in enumerate(groups)]
    return torch.nn.Sequential(one, two), torch.optim.SGD(decays, lr=0.5, momentum=0.5)


@pytest.mark.parametrize("is_decayed", [False, True])
def test_numbers_of_groups_mean_what_they_mean_to_torch(tmp_path: Path, *, is_decayed: bool) -> None:
    net, optimizer = grouped(is_decayed=True)
    net(torch.rand(3, 4)).square().sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "o.pt")
    (target, found), (_, expected) = grouped(is_decayed=is_decayed), grouped(is_decayed=is_decayed)
    bcp.load(tmp_path / "o.pt", {"model": target, "optimizer": found})
    expected.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True)["optimizer"])
    assert same(found.state_dict(), expected.state_dict())


def test_names_are_those_of_a_save_of_bcp(tmp_path: Path) -> None:
    net, optimizer = trained(0)
    state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "ckpt.pt")
    bcp.save(tmp_path / "own", state)
    own, found = bcp.Checkpoint(tmp_path / "own"), bcp.Checkpoint(tmp_path / "ckpt.pt")
    assert {name for name in found.tensors if not name[1].endswith(".step")} == {
        name for name in own.tensors if not name[1].endswith(".step")
    }
    assert {name for name in own.values if name[1].startswith("param_groups")} <= set(found.values)


def test_other_entries_are_names_that_nobody_wants(tmp_path: Path) -> None:
    net, _ = trained(0)
    torch.save({"model": net.state_dict(), "epoch": 3, "name": "run"}, tmp_path / "ckpt.pt")
    with pytest.raises(bcp.FqnMismatchError, match="model: epoch"):
        bcp.load(tmp_path / "ckpt.pt", {"model": trained(1)[0]})
    result = bcp.load(tmp_path / "ckpt.pt", {"model": trained(1)[0]}, strict=False)
    assert result.unexpected == ("model: epoch", "model: name")
    assert bcp.Checkpoint(tmp_path / "ckpt.pt").values["model", "epoch"] == 3


def test_plain_values_are_those_of_torch(tmp_path: Path) -> None:
    values = {
        "none": None,
        "flag": True,
        "big": 1 << 70,
        "small": -3,
        "rate": 1e-3,
        "infinite": float("inf"),
        "text": "ü",
        "bytes": b"\0\xff",
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
    }
    torch.save({"w": torch.ones(2), **values}, tmp_path / "v.pt")
    found = bcp.Checkpoint(tmp_path / "v.pt").values
    assert found == {("model", name): value for name, value in values.items()}


def test_nested_containers_are_named_as_in_a_save(tmp_path: Path) -> None:
    state = {"block": OrderedDict(w=torch.ones(2)), "list": [torch.zeros(1), {"x": torch.full((1,), 5.0)}], 7: 1}
    torch.save(state, tmp_path / "n.pt")
    bcp.save(tmp_path / "own", {"model": state})
    own, found = bcp.Checkpoint(tmp_path / "own"), bcp.Checkpoint(tmp_path / "n.pt")
    assert found.names() == own.names()
    assert found.values == own.values


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.int8],
)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    data = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(2, 3)
    torch.save({"w": data, "p": torch.nn.Parameter(torch.ones(2))}, tmp_path / "d.pt")
    found = bcp.Checkpoint(tmp_path / "d.pt").read("w")
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), data.view(torch.uint8))


def test_parts_of_one_storage_that_do_not_meet(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    torch.save({"a": flat[:5], "b": flat[5:].view(7, 1)}, tmp_path / "f.pt")
    ckpt = bcp.Checkpoint(tmp_path / "f.pt")
    assert torch.equal(ckpt.read("a"), flat[:5])
    assert torch.equal(ckpt.read("b"), flat[5:].view(7, 1))


def test_opening_and_listing_import_no_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    program = "import sys, bcp; bcp.Checkpoint(sys.argv[1]).names(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "w.pt")], check=True)  # noqa: S603 -- our own program


# -- refused by name ------------------------------------------------------------------------------


def refused(path: Path, words: str) -> None:
    with pytest.raises(bcp.CheckpointError, match=words):
        bcp.Checkpoint(path).names()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"w": torch.ones(3, 4).t()}, "'w' of shape .4, 3. has strides .1, 4."),
        ({"w": torch.ones(4)[::2]}, "'w' of shape .2. has strides .2."),
        ({"w": torch.ones(1).expand(4)}, "'w' of shape .4. has strides .0."),
        ({"w": (flat := torch.ones(4))[:3], "v": flat[2:]}, "'w' and model tensor 'v' share|'v' and model tensor 'w'"),
        ({"w": torch.ones(2).to_sparse()}, "_rebuild_sparse_tensor"),
        ({"w": Namespace(x=1)}, "argparse.Namespace"),
        (torch.ones(2), "no dict of tensors"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two entries named 'a.b'"),
        ({("a",): torch.ones(1)}, "a key of type tuple, which bcp does not read; save it anew"),
        ({"w": {1}}, "has a set, which bcp does not read; save it anew"),
        ({"w": frozenset({1})}, "has a set, which bcp does not read; save it anew"),
    ],
    ids=str,
)
def test_what_has_no_place_by_reference(tmp_path: Path, state: Any, words: str) -> None:
    torch.save(state, tmp_path / "w.pt", pickle_protocol=4)
    with pytest.raises(bcp.CheckpointError, match=words) as caught:
        bcp.Checkpoint(tmp_path / "w.pt").names()
    assert not isinstance(caught.value, bcp.CorruptError)  # the file is sound


def test_a_value_of_another_type_is_told_when_it_is_read(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "odd": 1j}, tmp_path / "w.pt")
    target = {"w": torch.zeros(2)}
    result = bcp.load(tmp_path / "w.pt", {"model": target}, strict=False)
    assert result.unexpected == ("model: odd",)
    assert target["w"].tolist() == [1.0, 1.0]
    with pytest.raises(bcp.CheckpointError, match=r"model: odd cannot be read.*it is a complex"):
        _ = bcp.Checkpoint(tmp_path / "w.pt").values


def test_the_old_format(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused(tmp_path / "old.pt", r"before torch 1\.6.*torch\.load")


def test_an_optimizer_whose_numbers_tell_nothing(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.SGD([net[1].weight], lr=1.0, momentum=0.5)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "o.pt")
    refused(tmp_path / "o.pt", "numbers 1 parameters, and the 2 tensors of the model do not tell")


def test_a_folder_with_a_file_says_to_pass_it(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    refused(tmp_path, r"has w\.pt, a file of torch\.save: pass that file")


# -- hostile files --------------------------------------------------------------------------------


def rewritten(path: Path, data: bytes) -> Path:
    """Write a file of torch.save with another pickle."""
    torch.save({"w": torch.ones(4)}, path)
    repickled(path, data)
    return path


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "function", [os.mkdir, eval, getattr, __import__, subprocess.call, bytearray], ids=attrgetter("__name__")
)
def test_nothing_of_a_hostile_pickle_is_called(tmp_path: Path, function: Callable[..., Any], protocol: int) -> None:
    made = tmp_path / "made"
    argument = str(made) if function is os.mkdir else f"__import__('os').mkdir({str(made)!r})"
    path = rewritten(tmp_path / "evil.pt", pickle.dumps({"w": Evil(argument, function)}, protocol))
    refused(path, "which bcp does not read; nothing of it was run")
    with pytest.raises(bcp.CheckpointError, match="nothing of it was run"):
        bcp.load(path, {"model": {"w": torch.zeros(4)}})
    assert not made.exists()


TENSOR = "ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = "((Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI4\ntQ"


def tensor(offset: int = 0, size: str = "(I4\nt", stride: str = "(I1\nt", storage: str = STORAGE) -> bytes:
    """Return the pickle of a dict with a tensor ``w``."""
    return f"(dVw\n{TENSOR}{storage}I{offset}\n{size}{stride}I00\n(dtRs.".encode()


def test_the_pickles_of_these_tests_are_read(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "w.pt", tensor())
    assert bcp.Checkpoint(path).read("w").tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "damaged: EOFError"),
        (b"\x80\x02}", "damaged"),
        (tensor()[:-20], "damaged"),
        (tensor(offset=1), "said to end with byte 20 of a storage of 16"),
        (tensor(offset=-1), "damaged"),
        (tensor(size="(I5\nt"), "said to end with byte 20"),
        (tensor(size=f"(I{1 << 61}\nI{1 << 61}\nt", stride=f"(I{1 << 61}\nI1\nt"), "said to end|impossible"),
        (tensor(size="(I-4\nt"), "no possible shape"),
        (tensor(size="(I2\nI2\nt"), "damaged: ValueError: a tensor of shape"),
        (tensor(size="I4\n"), "no possible shape"),
        (tensor(storage=STORAGE.replace("V0\n", "V../../x\n")), "its zip has no data/../../x"),
        (tensor(storage=STORAGE.replace("FloatStorage", "QInt8Storage")), "torch.QInt8Storage"),
        (b"(Vx\nVy\nos\nsystem\n.", "damaged"),
        (b"(ios\nsystem\n.", "damaged"),
        (b"cos\nsystem\n(Vls\ntR.", "os.system"),
        (b"ctorch\nSize\n(dbVx\n.", "damaged|no dict"),
        (b"\x82\x01.", "damaged"),
        (b"\x96" + (1 << 40).to_bytes(8, "little") + b"x.", "damaged"),
        (b"\x8e" + (1 << 40).to_bytes(8, "little") + b"x.", "damaged"),
        (b"\x95" + (1 << 40).to_bytes(8, "little") + b"x.", "damaged"),
        (b"(lr\xff\xff\xff\x7f.", "damaged|nothing|no"),
        (b"(lq\x00(h\x00h\x00l" + b"0" + b"h\x00h\x00a.", "contains itself"),
    ],
    ids=range(22),
)
def test_a_damaged_pickle_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = rewritten(tmp_path / "bad.pt", data)
    if words == "damaged|nothing|no":  # a large number of a memo takes no memory
        assert bcp.Checkpoint(path).names() == []
        return
    refused(path, words)


def test_a_value_that_grows_when_it_is_walked(tmp_path: Path) -> None:
    value: list[Any] = [0]
    for _ in range(60):
        value = [value, value]
    refused(rewritten(tmp_path / "laughs.pt", pickle.dumps({"w": value}, 2)), "larger than its pickle can be")


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    for nbytes in [0, 3, *range(5, len(data), 97), len(data) - 1]:
        (tmp_path / "cut.pt").write_bytes(data[:nbytes])
        refused(tmp_path / "cut.pt", "cut.pt")


def test_a_zip_of_something_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/readme", "hello")
    refused(tmp_path / "x.pt", "its zip has no data.pkl")


def test_a_compressed_zip(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(400)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as plain, zipfile.ZipFile(tmp_path / "z.pt", "w", 8) as packed:
        for info in plain.infolist():
            packed.writestr(info.filename, plain.read(info))
    refused(tmp_path / "z.pt", "is compressed")


def test_a_big_endian_host(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(data.replace(b"little", b"bigbig"))
    refused(tmp_path / "w.pt", "saved by a big-endian host")


def test_an_entry_that_is_there_twice(tmp_path: Path) -> None:
    rewritten(tmp_path / "w.pt", tensor())
    with zipfile.ZipFile(tmp_path / "w.pt", "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(next(name for name in archive.namelist() if name.endswith("data.pkl")), b"}.")
    refused(tmp_path / "w.pt", r"its zip has data\.pkl twice")


def as_large(data: bytes, header_shift: int = 0) -> bytes:
    """Return a zip whose directory has all numbers in 64 bits, as one of more than 4 GiB has them."""
    end = data.rindex(b"PK\x05\x06")
    count, _, first = struct.unpack_from("<HII", data, end + 10)
    entries, at = b"", first
    for _ in range(count):
        fixed, name_length, extra_length = bytearray(data[at : at + 46]), *struct.unpack_from("<HH", data, at + 28)
        nbytes, header = struct.unpack_from("<I", data, at + 24)[0], struct.unpack_from("<I", data, at + 42)[0]
        struct.pack_into("<II", fixed, 20, 0xFFFFFFFF, 0xFFFFFFFF)
        struct.pack_into("<HH", fixed, 30, 28, 0)
        struct.pack_into("<I", fixed, 42, 0xFFFFFFFF)
        name = data[at + 46 : at + 46 + name_length]
        entries += bytes(fixed) + name + struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, header + header_shift)
        at += 46 + name_length + extra_length
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(entries), first)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, first + len(entries), 1)
    last = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return data[:first] + entries + end64 + locator + last


def test_numbers_of_64_bits(tmp_path: Path) -> None:
    weight = torch.rand(50)
    torch.save({"w": weight}, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(as_large(data))
    assert torch.equal(torch.load(tmp_path / "w.pt", weights_only=True)["w"], weight)
    assert torch.equal(bcp.Checkpoint(tmp_path / "w.pt").read("w"), weight)
    for shift in (1, 1 << 40, (1 << 64) - 1 - len(data)):
        (tmp_path / "w.pt").write_bytes(as_large(data, shift))
        refused(tmp_path / "w.pt", "is truncated or damaged")


def test_a_hostile_file_takes_no_memory(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "w.pt", tensor())
    data = path.read_bytes()
    hostile = [as_large(data, 1 << 40), data[:-4] + b"\xff" * 4]
    hostile += [
        rewritten(path, code + (1 << 36).to_bytes(8, "little") + b"x.").read_bytes() for code in (b"\x96", b"\x8e")
    ]
    hostile += [rewritten(path, b"(lr\xff\xff\xff\x7f.").read_bytes()]
    for body in hostile:
        path.write_bytes(body)
        tracemalloc.start()
        try:
            with suppress(bcp.CheckpointError):
                bcp.Checkpoint(path).names()
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()
