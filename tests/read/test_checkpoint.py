"""A checkpoint without a model: what is in it, and any part of it, held against readers that are not bcp's."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import documented, folders, same_bits
from golden.cases import CASES
from samples import sample

import bcp
from bcp.backends import LocalBackend, MemoryBackend, register
from bcp.format.metadata import METADATA_KEY, decode_metadata, encode_layout, encode_metadata
from bcp.runtime import bridge as _bridge
from bcp.testing.storage_fakes import CountingBackend

READABLE = [name for name, case in CASES.items() if not case.codecs and not case.tar]
BLOCK = 1 << 20


@pytest.fixture
def trained() -> dict[str, Any]:
    """Return states with an optimizer that has made a step."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra_states": {"epoch": 3}}


# -- all of it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample(READABLE, *READABLE[::4]))
def test_every_tensor_is_that_of_the_reader_made_from_the_documentation(name: str) -> None:
    chance = random.Random(name)  # noqa: S311 -- no secret
    for path in folders(name):
        expected, ckpt = documented(path), bcp.Checkpoint(path)
        assert set(ckpt.tensors) == set(expected)
        for (kind, fqn), tensor in expected.items():
            info = ckpt[kind, fqn]
            assert (info.shape, info.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert info.nbytes == tensor.nbytes
            assert same_bits(ckpt.read(fqn, kind=kind), tensor)
            index = tuple(slice(*sorted((chance.randint(0, size), chance.randint(0, size)))) for size in tensor.shape)
            assert same_bits(ckpt.read(fqn, index, kind=kind), tensor[index].contiguous())


STREAMS = [("settings", 1), *((name, at) for name in READABLE for at in (1000, 1 << 20))]


@pytest.mark.parametrize(("name", "budget"), sample(STREAMS, *STREAMS[::3]))
def test_a_stream_has_every_element_once(name: str, budget: int) -> None:
    for path in folders(name):
        expected, ckpt = documented(path), bcp.Checkpoint(path)
        found = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        count = dict.fromkeys(expected, 0)
        for info, box, data in ckpt.stream(None, budget_bytes=budget):
            assert data.numel() == 1 or data.nbytes <= budget
            where = tuple(slice(at, at + n) for at, n in zip(box.offsets, box.lengths, strict=True))
            found[info.kind, info.name][where] = data
            count[info.kind, info.name] += data.numel()
        for key, tensor in expected.items():
            if ckpt[key].tied_to:
                assert count[key] == 0
            else:
                assert count[key] == tensor.numel(), "an element came twice, or not at all"
                assert same_bits(found[key], tensor)


def test_a_stream_keeps_the_order_of_the_files_and_the_names_that_were_asked_for(tmp_path: Path) -> None:
    states = {"model": {f"layers.{n}.{part}": torch.full((n + 1,), n) for n in range(12) for part in ("w", "b")}}
    bcp.save(tmp_path, states)
    backend = CountingBackend(LocalBackend(tmp_path))
    pieces = list(bcp.Checkpoint(backend).stream(glob="layers.1*.w"))
    assert [piece.info.name for piece in pieces] == ["layers.1.w", "layers.10.w", "layers.11.w"]
    assert all(same_bits(piece.data, states["model"][piece.info.name]) for piece in pieces)
    assert backend.calls["read_into"] + backend.calls["read_scattered"] == 1, "neighbours come in one read"


async def _drop(_started: Callable[[], None], *, held: list[Any]) -> None:
    held.clear()
    gc.collect()


async def _ended(background: _bridge.Background[None]) -> None:
    await background


def test_a_stream_that_is_left_early_ends_its_reads(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {f"{n}": torch.rand(1000) for n in range(20)}})
    with bcp.Checkpoint(tmp_path) as ckpt:
        pieces = ckpt.stream(budget_bytes=8000)
        next(pieces)
        pieces.close()
        held = [ckpt.stream(budget_bytes=8000)]
        next(held[0])
        asyncio.run(_ended(_bridge.start(partial(_drop, held=held), name="garbage on bcp's own thread")))
        assert len(list(ckpt.stream())) == 20


# -- parts ----------------------------------------------------------------------------------------


def indices(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield every tuple of integers and of slices with ends from one below to one above the dimension."""
    per_dim = []
    for size in shape:
        ends = [None, *range(-size - 1, size + 2)]
        per_dim.append([*range(-size, size), *(slice(a, b) for a in ends for b in ends)])
    return itertools.product(*per_dim)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_any_index_reads_what_torch_takes(shape: tuple[int, ...]) -> None:
    MemoryBackend.forget("indices")
    tensor = torch.rand(shape)
    bcp.save(MemoryBackend("indices"), {"model": {"w": tensor}})
    ckpt = bcp.Checkpoint(MemoryBackend("indices"))
    cases = list(indices(shape))
    for index in random.Random(1).sample(cases, min(len(cases), 200)):  # noqa: S311 -- no secret
        assert same_bits(ckpt.read("w", index), tensor[index].contiguous()), index


@pytest.mark.parametrize(
    "index", [..., 1, slice(1, None), (..., 2), (1, ...), (0, ..., slice(1, 3)), np.s_[-1], np.int64(1)]
)
def test_a_short_index_and_an_ellipsis_are_those_of_torch(tmp_path: Path, index: Any) -> None:
    tensor = torch.rand(2, 3, 4)
    bcp.save(tmp_path, {"model": {"w": tensor}})
    assert same_bits(bcp.Checkpoint(tmp_path).read("w", index), tensor[index].contiguous())


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (3, "index 3 of dimension 0 is outside of its 3 indices"),
        ((0, -5), "index -5 of dimension 1 is outside of its 4 indices"),
        ((0, 0, 0), "has 2 dimensions, and the index (0, 0, 0) has 3"),
        ((..., ...), "has 2 ellipses"),
        (slice(None, None, 2), "dimension 0 has step 2"),
        ("w", "the index of dimension 0 is 'w'"),
        (True, "the index of dimension 0 is True"),
        (1.0, "the index of dimension 0 is 1.0"),
    ],
)
def test_an_index_that_fits_no_tensor_is_refused(tmp_path: Path, index: Any, says: str) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.rand(3, 4)}})
    with pytest.raises(bcp.InputError) as caught:
        bcp.Checkpoint(tmp_path).read("w", index)
    assert says in str(caught.value)
    assert "model: w float32[3, 4]" in str(caught.value)


def test_only_the_blocks_with_wanted_bytes_are_read(tmp_path: Path) -> None:
    tensor = torch.arange(8 * BLOCK // 4, dtype=torch.int32).reshape(8, -1)
    bcp.save(tmp_path, {"model": {"w": tensor}})
    backend = CountingBackend(LocalBackend(tmp_path))
    ckpt = bcp.Checkpoint(backend)
    before = backend.read.total()
    assert same_bits(ckpt.read("w", (5, slice(10, 20))), tensor[5, 10:20])
    first = backend.read.total() - before
    assert BLOCK <= sum(n for key, n in backend.read.items() if key.startswith("model/")) <= 2 * BLOCK
    ckpt.read("w", (5, slice(10, 20)))
    assert backend.read.total() - before - first <= 2 * BLOCK, "receipts are read once"
    assert backend.calls["get"] == 2, "metadata and one receipt"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_another_dtype_is_torchs_conversion(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.rand(5, 7) * 100
    bcp.save(tmp_path, {"model": {"w": tensor}})
    assert same_bits(bcp.Checkpoint(tmp_path).read("w", np.s_[1:, 2:5], dtype=dtype), tensor[1:, 2:5].to(dtype))


def flipped(data: bytes | bytearray | memoryview) -> bytes:
    return bytes(255 - byte for byte in data)


def test_encoded_files_are_decoded(tmp_path: Path) -> None:
    codec = bcp.extend.Codec(
        "flip", lambda data: bytes(255 - byte for byte in data), lambda data: bytes(255 - byte for byte in data)
    )
    tensor = torch.rand(50, 3)
    bcp.save(tmp_path, {"model": {"w": tensor}}, options=bcp.SaveOptions(codecs=[codec]))
    ckpt = bcp.Checkpoint(tmp_path)
    assert ckpt.codecs == ("flip",)
    with pytest.raises(bcp.errors.MissingCodecError, match="flip"):
        ckpt.read("w")
    options = bcp.LoadOptions(codecs=[codec])
    assert same_bits(bcp.Checkpoint(tmp_path, options=options).read("w", np.s_[7:9]), tensor[7:9])
    assert bcp.Checkpoint(tmp_path).verify(), "checksums are of the stored bytes"


# -- facts ----------------------------------------------------------------------------------------


def test_the_facts_are_those_of_the_save(tmp_path: Path, trained: dict[str, Any]) -> None:
    path = tmp_path / "run" / "step-00000042"
    saved = bcp.save(path, trained)
    ckpt = bcp.Checkpoint(path)
    assert (ckpt.step, ckpt.operation, ckpt.world_size, ckpt.framework) == (42, saved.operation, 1, "plain")
    assert ckpt.kinds == ("model", "optimizer", "extra_states")
    assert ckpt.names() == list(ckpt) == sorted(trained["model"].state_dict())
    assert ckpt.names("optimizer", "state.*.exp_avg") == [f"state.{name}.exp_avg" for name in ckpt.names()]
    assert "0.weight" in ckpt
    assert ("optimizer", "state.0.weight.exp_avg") in ckpt
    assert "1.nothing" not in ckpt
    assert ckpt.nbytes >= sum(value.nbytes for value in trained["model"].state_dict().values())
    assert ckpt.version == bcp.__version__
    assert repr(ckpt["0.weight"]) == "model: 0.weight float32[4, 8]"


def test_values_and_objects_are_those_of_the_optimizer_and_the_caller(tmp_path: Path, trained: dict[str, Any]) -> None:
    bcp.save(tmp_path, trained)
    ckpt = bcp.Checkpoint(tmp_path)
    group = trained["optimizer"].state_dict()["param_groups"][0]
    for key in ("lr", "betas", "eps", "weight_decay"):
        assert ckpt.values["optimizer", f"param_groups.0.weight.{key}"] == group[key]
    assert ckpt.object("extra_states") == {"epoch": 3}
    with pytest.raises(bcp.FqnMismatchError, match="no extra_states of rank 1; ranks 0 to 0"):
        ckpt.object("extra_states", 1)
    with pytest.raises(bcp.FqnMismatchError, match="no dataloader of rank 0; no rank"):
        ckpt.object("dataloader")
    with pytest.raises(bcp.InputError, match="kind='model'"):
        ckpt.object("model")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Own:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return shutil.rmtree, (str(tmp_path / "precious"),)

    (tmp_path / "precious").mkdir()
    bcp.save(tmp_path / "ckpt", {"extra_states": {"own": Own()}}, options=bcp.SaveOptions(allow_pickle=True))
    with pytest.raises(bcp.CheckpointError, match="allow_pickle"):
        bcp.Checkpoint(tmp_path / "ckpt").object("extra_states")
    assert (tmp_path / "precious").is_dir()


def test_a_name_that_is_not_there_is_told_with_one_that_is(tmp_path: Path, trained: dict[str, Any]) -> None:
    bcp.save(tmp_path, trained)
    ckpt = bcp.Checkpoint(tmp_path)
    with pytest.raises(bcp.FqnMismatchError, match=r"no model tensor 'layers\.0\.weight'; it has '0\.weight'"):
        ckpt.read("layers.0.weight")
    with pytest.raises(bcp.FqnMismatchError, match="and optimizer has one: pass kind='optimizer'"):
        ckpt.read("state.0.weight.exp_avg")
    with pytest.raises(KeyError):
        ckpt.tensors["model", "nothing"]
    for ask in (ckpt.names, lambda kind: ckpt.read("0.weight", kind=kind), lambda kind: next(ckpt.stream(kind))):
        with pytest.raises(bcp.InputError, match="kind='weights'"):
            ask("weights")


def test_names_of_a_stranger_neither_move_the_cursor_nor_run_in_a_notebook(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"\x1b[2Jw<script>": torch.rand(2)}})
    ckpt = bcp.Checkpoint(tmp_path)
    assert "\x1b" not in repr(ckpt["\x1b[2Jw<script>"])
    assert "<script>" not in ckpt._repr_html_()
    assert "\x1b" not in ckpt._repr_html_()


@pytest.mark.parametrize("name", sample(READABLE, *READABLE[::4]))
def test_the_places_of_a_tensor_are_its_bytes(tmp_path: Path, name: str) -> None:
    for path in folders(name):
        expected, ckpt = documented(path), bcp.Checkpoint(path)
        if ckpt.refers:  # the places are those in a whole copy
            path = Path(bcp.tools.copy(path, tmp_path / path.name).path)  # noqa: PLW2901 -- the same checkpoint
        for (kind, fqn), tensor in expected.items():
            found = torch.zeros_like(tensor)
            for place in ckpt.places(fqn, kind):
                with (path / place.key).open("rb") as file:
                    head = 0 if CASES[name].is_foreign else 8 + int.from_bytes(file.read(8), "little")
                    file.seek(head + place.start)
                    data = torch.frombuffer(bytearray(file.read(place.stop - place.start)), dtype=tensor.dtype)
                block = torch.zeros(place.box.lengths, dtype=tensor.dtype)
                block.view(-1)[place.first : place.first + len(data)] = data
                mask = torch.zeros(place.box.lengths, dtype=torch.bool)
                mask.view(-1)[place.first : place.first + len(data)] = True
                where = tuple(slice(at, at + n) for at, n in zip(place.box.offsets, place.box.lengths, strict=True))
                found[where] = torch.where(mask, block, found[where])
            assert same_bits(found, tensor), (kind, fqn)


def test_a_commit_without_a_time_is_shown_and_told(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.rand(2)}})
    file = tmp_path / METADATA_KEY
    metadata = decode_metadata(file.read_bytes(), "")
    file.write_bytes(encode_metadata(encode_layout(metadata.layout), replace(metadata.commit, created="never")))
    ckpt = bcp.Checkpoint(tmp_path)
    assert "at never UTC" in repr(ckpt)
    with pytest.raises(bcp.CorruptError, match=r"metadata\.arrow says that it was committed at 'never'"):
        _ = ckpt.created


def test_tied_tensors_name_each_other(tmp_path: Path) -> None:
    weight = torch.rand(3)
    bcp.save(tmp_path, {"model": {"a": weight, "b": weight}})
    ckpt = bcp.Checkpoint(tmp_path)
    assert (ckpt["a"].tied_to, ckpt["b"].tied_to) == ("", "a")
    assert same_bits(ckpt.read("b"), weight)
    assert "tied to a" in repr(ckpt["b"])


def test_a_role_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}}, role="actor")
    assert same_bits(bcp.Checkpoint(tmp_path, role="actor").read("w"), torch.ones(2))
    with pytest.raises(bcp.NotACheckpointError, match="role"):
        _ = bcp.Checkpoint(tmp_path).step, bcp.Checkpoint(tmp_path).operation


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"role": "../x"}, "role='../x'"),
        ({"options": bcp.SaveOptions()}, "options is a SaveOptions"),
        ({"options": bcp.LoadOptions(rename=[("a", "b")])}, "rename= or edit="),
        ({"options": bcp.LoadOptions(edit=lambda graph: graph)}, "rename= or edit="),
        ({"storage_options": {"key": "secret"}}, "takes none"),
    ],
)
def test_bad_arguments_are_refused_at_once(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(bcp.InputError, match=says):
        bcp.Checkpoint(tmp_path, **arguments)


@pytest.mark.parametrize("budget", [0, -1, True, 1.5, "1"])
def test_a_budget_that_is_none_is_refused(tmp_path: Path, budget: Any) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}})
    with pytest.raises(bcp.InputError, match="budget_bytes"):
        next(bcp.Checkpoint(tmp_path).stream(budget_bytes=budget))


# -- what happens meanwhile -----------------------------------------------------------------------


def test_the_table_of_contents_is_read_once_and_at_first_use(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}})
    backend = CountingBackend(LocalBackend(tmp_path))
    with bcp.Checkpoint(backend) as ckpt:
        assert not backend.calls
        _ = ckpt.operation, ckpt.tensors, ckpt.nbytes, repr(ckpt)
        assert backend.calls == {"get": 1}


def test_a_checkpoint_that_was_replaced_says_so(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}})
    ckpt = bcp.Checkpoint(tmp_path)
    assert ckpt.world_size == 1
    again = bcp.save(tmp_path, {"model": {"w": torch.ones(2)}}, overwrite=True)
    with pytest.raises(bcp.CorruptError) as caught:
        ckpt.read("w")
    assert any(again.operation in note and "open it again" in note for note in caught.value.__notes__)
    assert bcp.Checkpoint(tmp_path).operation == again.operation


def test_a_damaged_block_is_noticed(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(1000)}})
    (file,) = (tmp_path / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(bcp.CorruptError, match="checksum"):
        bcp.Checkpoint(tmp_path).read("w")


async def _look(path: Path) -> None:
    async with bcp.AsyncCheckpoint(path) as ckpt:
        first, second = await asyncio.gather(ckpt.read("w"), ckpt.read("w", 1))
        assert same_bits(first, torch.arange(3.0))
        assert same_bits(second, torch.tensor(1.0))
        assert [piece.info.name async for piece in ckpt.stream()] == ["w"]
        assert await ckpt.object("extra_states") == {"epoch": 1}
        assert await ckpt.values() == {}
        assert await ckpt.verify()
    opened = await bcp.AsyncCheckpoint(path)
    assert opened.names() == ["w"]
    with pytest.raises(bcp.InputError, match="is not open"):
        _ = bcp.AsyncCheckpoint(path).operation


def test_storage_is_let_go_of_if_there_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcp.backends._factories", {})
    closed = []

    class Closing(MemoryBackend):
        async def aclose(self) -> None:
            closed.append(self)

    async def look() -> None:
        async with bcp.AsyncCheckpoint("closing://nothing/here"):
            pass

    register("closing", lambda _: Closing("closing"))
    with pytest.raises(bcp.NotACheckpointError):
        asyncio.run(look())
    assert len(closed) == 1


def test_a_coroutine_looks_into_it(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.arange(3.0)}, "extra_states": {"epoch": 1}})
    asyncio.run(_look(tmp_path))


def test_it_works_inside_of_a_running_loop(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.arange(3.0)}})

    async def inside() -> torch.Tensor:
        return bcp.Checkpoint(tmp_path).read("w")

    assert same_bits(asyncio.run(inside()), torch.arange(3.0))


def test_roles_are_the_checkpoints_below_a_path(tmp_path: Path) -> None:
    states = {"model": {"w": torch.ones(2)}}
    for role in ("critic", "actor"):
        bcp.save(tmp_path, states, role=role)
    bcp.save(tmp_path / "step-3", states)
    (tmp_path / "torn" / "model").mkdir(parents=True)
    assert bcp.Checkpoint(tmp_path).roles == ["actor", "critic"]
    assert bcp.Checkpoint(tmp_path, role="actor").roles == []
    assert bcp.Checkpoint(tmp_path / "nowhere").roles == []


def test_an_object_behind_a_codec_needs_the_codec(tmp_path: Path) -> None:
    marked = bcp.extend.Codec("marked", lambda data: b"m" + bytes(data), lambda data: bytes(data)[1:])
    options = bcp.SaveOptions(codecs=[marked])
    bcp.save(tmp_path / "c", {"model": {"w": torch.ones(2)}, "extra_states": {"epoch": 3}}, options=options)
    with pytest.raises(bcp.errors.MissingCodecError, match="'marked'"):
        bcp.Checkpoint(tmp_path / "c").object("extra_states")
    opened = bcp.Checkpoint(tmp_path / "c", options=bcp.LoadOptions(codecs=[marked]))
    assert opened.object("extra_states") == {"epoch": 3}


@pytest.mark.parametrize(
    "facts", [{"name": "\ud800"}, {1: None}, {"inner": {1: None}}, {"x": (1, 2)}, {"x": float("nan")}]
)
def test_facts_that_json_changes_are_refused(facts: dict[Any, Any]) -> None:
    with pytest.raises(bcp.InputError, match="metadata"):
        bcp.SaveOptions(metadata=facts)


@pytest.mark.parametrize("dtype", ["bf16", float, 3])
def test_a_dtype_that_is_none_is_refused(tmp_path: Path, dtype: Any) -> None:
    bcp.save(tmp_path, {"model": {"w": torch.ones(2)}})
    with pytest.raises(bcp.InputError, match=r"pass a dtype of torch"):
        bcp.Checkpoint(tmp_path).read("w", dtype=dtype)
