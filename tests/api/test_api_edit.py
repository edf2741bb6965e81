"""Custom stages and codecs: at every place of both graphs, and what a load without them says."""

from __future__ import annotations

import array
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from checkpoints import MIB, entries, equal, files

import bcp

SAVE_STAGES = ["d2h", "serialize", "zlib", "place", "upload", "checksum"]
LOAD_STAGES = ["read", "deserialize", "h2d", "exchange"]

ZSTD = bcp.extend.Codec(
    "zstd",
    encode=lambda data: zstandard.ZstdCompressor(level=1).compress(data),
    decode=lambda data: zstandard.ZstdDecompressor().decompress(data),
)
ZLIB = bcp.extend.Codec("zlib", encode=lambda data: zlib.compress(data, 1), decode=zlib.decompress, workers=3)
INVERT = bcp.extend.Codec(
    "invert", encode=lambda data: bytes(255 - b for b in data), decode=lambda data: bytes(255 - b for b in data)
)


def weights() -> dict[str, torch.Tensor]:
    return {"big": torch.arange(700_000.0), "small": torch.arange(10), "t": torch.arange(6.0).view(2, 3).t()}


def loaded(path: Path, options: bcp.LoadOptions) -> dict[str, torch.Tensor]:
    target = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    bcp.load(path, {"model": target}, options=options)
    return target


# -- edits -------------------------------------------------------------------------------------------


class Eye:
    """A stage that sees items go by and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def __call__(self, item: Any) -> Any:
        self.seen.append(type(item).__name__)
        return item


def put_before(graph: bcp.extend.Graph, name: str, eye: Eye) -> bcp.extend.Graph:
    return graph.before(name, bcp.extend.Stage("eye", eye))


def put_after(graph: bcp.extend.Graph, name: str, eye: Eye) -> bcp.extend.Graph:
    return graph.after(name, bcp.extend.Stage("eye", eye, workers=3))


def put_beside(graph: bcp.extend.Graph, name: str, eye: Eye) -> bcp.extend.Graph:
    return graph.after(name, bcp.extend.tee(bcp.extend.Stage("one", eye), bcp.extend.Stage("other", eye)))


def put_around(graph: bcp.extend.Graph, name: str, eye: Eye) -> bcp.extend.Graph:
    (old,) = [stage for stage in graph.stages if stage.name == name]

    async def run(item: Any) -> Any:
        return await old.run(await eye(item))

    return graph.replacing(name, bcp.extend.Stage(name, run, workers=old.workers, ordered=old.ordered))


Edit = Callable[[bcp.extend.Graph, str, Eye], bcp.extend.Graph]
edits = pytest.mark.parametrize("edit", [put_before, put_after, put_beside, put_around])


@edits
@pytest.mark.parametrize("name", SAVE_STAGES)
def test_every_place_of_the_save_graph(tmp_path: Path, edit: Edit, name: str) -> None:
    eye = Eye()
    options = bcp.SaveOptions(edit=lambda graph: edit(graph, name, eye), codecs=[ZLIB], part_bytes=MIB)
    bcp.save(tmp_path, {"model": weights()}, options=options)
    assert len(eye.seen) == (6 if edit is put_beside else 3), "2.7 MiB are three parts"
    assert equal(loaded(tmp_path, bcp.LoadOptions(codecs=[ZLIB])), weights())


@edits
@pytest.mark.parametrize("name", LOAD_STAGES)
def test_every_place_of_the_load_graph(tmp_path: Path, edit: Edit, name: str) -> None:
    bcp.save(tmp_path, {"model": weights()})
    eye = Eye()
    options = bcp.LoadOptions(edit=lambda graph: edit(graph, name, eye), read_bytes=MIB)
    assert equal(loaded(tmp_path, options), weights())
    assert len(eye.seen) == (6 if edit is put_beside else 3)


def test_the_names_of_the_stages(tmp_path: Path) -> None:
    names: list[tuple[str, ...]] = []

    def look(graph: bcp.extend.Graph) -> bcp.extend.Graph:
        names.append(graph.names)
        return graph

    bcp.save(tmp_path, {"model": weights()}, options=bcp.SaveOptions(edit=look, codecs=[ZLIB]))
    bcp.save(tmp_path, {"model": weights()}, overwrite=True, options=bcp.SaveOptions(edit=look))
    loaded(tmp_path, bcp.LoadOptions(edit=look))
    plain = tuple(name for name in SAVE_STAGES if name not in {"zlib", "place"})
    assert names == [tuple(SAVE_STAGES), plain, tuple(LOAD_STAGES)]


def test_a_stage_behind_d2h_changes_what_is_saved_and_not_what_is_trained(tmp_path: Path) -> None:
    live = weights()

    async def halve(part: bcp.extend.HostPart) -> bcp.extend.HostPart:
        for name, tensor in part.tensors.items():
            if name.startswith("big"):
                tensor.mul_(0.5)
        return part

    options = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("halve", halve)), part_bytes=MIB)
    bcp.save(tmp_path, {"model": live}, options=options)
    assert equal(live, weights())
    found = loaded(tmp_path, bcp.LoadOptions())
    assert torch.equal(found["big"], weights()["big"] * 0.5)
    assert torch.equal(found["t"], weights()["t"])


def test_a_stage_that_changes_lengths_is_told_of_codecs(tmp_path: Path) -> None:
    async def shorten(blob: Any) -> Any:
        import dataclasses  # noqa: PLC0415 -- as a user would

        return dataclasses.replace(blob, data=blob.data[:-1])

    options = bcp.SaveOptions(edit=lambda graph: graph.before("upload", bcp.extend.Stage("shorten", shorten)))
    with pytest.raises(bcp.BcpError, match=r"custom stage changed its length; use SaveOptions\(codecs="):
        bcp.save(tmp_path, {"model": weights()}, options=options)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("name", SAVE_STAGES)
def test_a_stage_that_fails_is_named_and_nothing_is_left(tmp_path: Path, name: str) -> None:
    async def fail(_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    options = bcp.SaveOptions(edit=lambda graph: graph.after(name, bcp.extend.Stage("mine", fail)), codecs=[ZLIB])
    with pytest.raises(bcp.StageError, match=r"stage 'mine' failed on model part 0.*ZeroDivisionError") as caught:
        bcp.save(tmp_path, {"model": weights()}, options=options)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.stage == "mine"
    assert [entry for entry in entries(tmp_path) if "." in entry] == []


def test_a_generator_that_is_closed_in_a_stage_is_a_failure_of_bcp(tmp_path: Path) -> None:
    async def fail(_: Any) -> Any:
        raise GeneratorExit("a generator inside was closed")

    options = bcp.SaveOptions(edit=lambda graph: graph.before("upload", bcp.extend.Stage("mine", fail)))
    with pytest.raises(bcp.StageError, match=r"stage 'mine' failed on model part 0.*GeneratorExit"):
        bcp.save(tmp_path, {"model": weights()}, options=options)
    assert [entry for entry in entries(tmp_path) if "." in entry] == []


# -- codecs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codecs", [[ZSTD], [INVERT, ZSTD], [ZSTD, ZLIB]], ids=["zstd", "invert,zstd", "zstd,zlib"])
def test_codecs_are_undone_whatever_order_the_load_has_them_in(tmp_path: Path, codecs: list[bcp.extend.Codec]) -> None:
    states = {"model": weights(), "extra_states": {"step": 3}}
    report = bcp.save(tmp_path, states, options=bcp.SaveOptions(codecs=codecs, part_bytes=MIB))
    assert report.nbytes < 0.75 * report.state_nbytes
    assert all(name.endswith(".bcp") for name in report.files)
    assert equal(loaded(tmp_path, bcp.LoadOptions(codecs=codecs[::-1], read_bytes=MIB)), weights())
    extra: dict[str, Any] = {}
    bcp.load(tmp_path, {"extra_states": extra}, options=bcp.LoadOptions(codecs=[*codecs, *codecs]))
    assert extra == {"step": 3}


def test_a_missing_codec_is_named(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": weights()}, options=bcp.SaveOptions(codecs=[ZLIB, ZSTD]))
    with pytest.raises(
        bcp.MissingCodecError, match=r"codec 'zstd', which this load does not have \(it has \['zlib'\]\)"
    ):
        loaded(tmp_path, bcp.LoadOptions(codecs=[ZLIB]))
    with pytest.raises(bcp.MissingCodecError, match=r"'zlib', 'zstd'.*pass LoadOptions\(codecs=\[\.\.\.\]\)"):
        loaded(tmp_path, bcp.LoadOptions())


def test_a_codec_that_is_no_inverse_is_noticed(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": weights()}, options=bcp.SaveOptions(codecs=[ZLIB]))
    wrong = bcp.extend.Codec("zlib", encode=zlib.compress, decode=lambda data: zlib.decompress(data)[:-1])
    with pytest.raises(bcp.CorruptError, match=r"decoded part 0 to \d+ bytes, \d+ were encoded"):
        loaded(tmp_path, bcp.LoadOptions(codecs=[wrong]))


def test_a_codec_that_fails_is_named(tmp_path: Path) -> None:
    def fail(_: Any) -> bytes:
        raise RuntimeError("no key")

    broken = bcp.extend.Codec("crypt", encode=fail, decode=bytes)
    with pytest.raises(bcp.StageError, match="stage 'crypt' failed on model part 0"):
        bcp.save(tmp_path, {"model": weights()}, options=bcp.SaveOptions(codecs=[broken]))
    assert files(tmp_path) == {}


@pytest.mark.parametrize("name", ["", "UPPER", "a b", "a/b"])
def test_a_codec_has_a_sound_name(name: str) -> None:
    with pytest.raises(bcp.InputError, match="lower-case letters, digits"):
        bcp.extend.Codec(name, encode=bytes, decode=bytes)


@pytest.mark.parametrize("where", ["every other byte", "on another device", "of two dimensions"])
def test_a_stage_may_hand_on_bytes_in_any_order_of_memory_but_not_elsewhere(tmp_path: Path, where: str) -> None:
    bcp.save(tmp_path, {"model": weights()})

    async def change(chunk: Any) -> Any:
        ways = {
            "every other byte": lambda data: torch.stack([data, data], 1).reshape(-1)[::2],
            "on another device": lambda data: data.to("meta"),
            "of two dimensions": lambda data: data.view(-1, 1),
        }
        return replace(chunk, data=ways[where](chunk.data))

    options = bcp.LoadOptions(edit=lambda graph: graph.after("deserialize", bcp.extend.Stage("change", change)))
    if where == "every other byte":
        assert equal(loaded(tmp_path, options), weights())
        return
    with pytest.raises(bcp.BcpError, match="a custom stage changed them"):
        loaded(tmp_path, options)


@pytest.mark.parametrize(
    "shape",
    [
        lambda data: memoryview(data).cast("B", (1, len(data))),
        lambda data: np.frombuffer(data, np.uint8).view(np.int8),
        lambda data: array.array("H", bytes(data) + bytes(len(data) % 2)),
        bytearray,
    ],
    ids=["two dimensions", "int8", "items of two bytes", "bytearray"],
)
def test_a_codec_may_return_any_contiguous_buffer(tmp_path: Path, shape: Callable[[Any], Any]) -> None:
    bcp.save(tmp_path, {"model": weights()}, options=bcp.SaveOptions(codecs=[bcp.extend.Codec("odd", shape, bytes)]))
    decode = bcp.extend.Codec("odd", shape, lambda data: memoryview(bytes(data)).cast("B", (1, len(data))))
    assert equal(loaded(tmp_path, bcp.LoadOptions(codecs=[decode])), weights())
