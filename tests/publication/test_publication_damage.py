"""Damaged and hostile publications: refused with the place, and nothing of the version is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from published import assert_folder, stepped, weights

import bcp
from bcp.publication.encoding import pack, unpack
from bcp.publication.folder import NOTE
from bcp.publication.index import INDEX, VersionIndex, decode

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Versions 1 and 2, and a folder at version 1."""
    bcp.publish(weights(), tmp_path / "pub", 1)
    bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull()
    bcp.publish(stepped(weights(), 2), tmp_path / "pub", 2)
    return tmp_path


def pull(root: Path, folder: str = "engine") -> bcp.PullResult:
    return bcp.Subscriber(root / "pub", root / folder).pull()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def delta_of(root: Path) -> Path:
    return next((root / "pub" / "weight_v000002").glob("delta*"))


def change_index(root: Path, change: Change, version: int = 2) -> None:
    path = root / "pub" / f"weight_v{version:06d}" / INDEX
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# -- damage ------------------------------------------------------------------------------------------


def test_a_flipped_bit_of_a_delta_is_found_before_anything_is_written(root: Path) -> None:
    before = {path.name: path.read_bytes() for path in (root / "engine").iterdir()}
    data, refused = delta_of(root).read_bytes(), list[str]()
    for at in range(8 + int.from_bytes(data[:8], "little"), len(data), 7):
        flip(delta_of(root), at)
        try:
            pull(root)
        except bcp.CorruptError as error:
            refused.append(str(error))
            assert {path.name: path.read_bytes() for path in (root / "engine").iterdir()} == before
        else:  # a bit that zstd does not use
            assert_folder(root / "engine", stepped(weights(), 2))
            for name, content in before.items():
                (root / "engine" / name).write_bytes(content)
        flip(delta_of(root), at)
    assert len(refused) > 20
    assert all(re.search(r"version 2 .*tensor '(embed.weight|layers.0.proj|scale)'", words) for words in refused)
    assert pull(root).version == 2


def test_the_message_has_both_digests(root: Path) -> None:
    path = delta_of(root)
    data, wrong = path.read_bytes(), zstandard.ZstdCompressor(level=1).compress(b"\1\0")
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    first, last = header["scale"]["data_offsets"]
    assert last - first == len(wrong)  # a sound stream of a bfloat16, with another difference
    path.write_bytes(data[: begin + first] + wrong + data[begin + last :])
    want = json.loads((root / "pub" / "weight_v000002" / INDEX).read_text())["bcp"]["digests"]["scale"]
    with pytest.raises(bcp.CorruptError, match=f"'scale' makes the digest [0-9a-f]{{32}}, and {want} was published"):
        pull(root)


def test_a_flipped_bit_of_an_anchor(root: Path) -> None:
    path = next((root / "pub" / "weight_v000001").glob("model-*"))
    flip(path, path.stat().st_size - 3)
    with pytest.raises(bcp.CorruptError, match=r"version 1 .*tensor '.*' of the anchor has digest"):
        pull(root, "fresh")
    assert not list((root / "fresh").glob("*.safetensors"))
    flip(path, path.stat().st_size - 3)
    assert pull(root, "fresh").anchor == 1


@pytest.mark.parametrize("damage", ["flipped", "torn", "new"])
def test_a_damaged_tensor_of_the_folder_is_repaired(root: Path, damage: str) -> None:
    new, path = stepped(weights(), 2), next((root / "engine").glob("*.safetensors"))
    data = path.read_bytes()
    old, made = (each["embed.weight"].view(torch.uint8).numpy().tobytes() for each in (weights(), new))
    at = data.index(old)
    half = {"flipped": bytes([old[0] ^ 4]) + old[1:], "torn": made[:300] + old[300:], "new": made}[damage]
    path.write_bytes(data[:at] + half + data[at + len(old) :])
    result = pull(root)
    assert result.repaired == (() if damage == "new" else ("embed.weight",))
    assert_folder(root / "engine", new)


@pytest.mark.parametrize("reached", [1, 2, 3, 4])
def test_a_tensor_goes_on_from_any_version(tmp_path: Path, reached: int) -> None:
    models = [{name: torch.randn(64, 64) for name in "abc"}]
    subscriber = bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")
    for version in (1, 2, 3, 4):
        models.append({name: value + (torch.arange(64) == version) for name, value in models[-1].items()})
        bcp.publish(models[-1], tmp_path / "pub", version)
        subscriber.pull(version=1)
    path = next((tmp_path / "engine").glob("*.safetensors"))
    data = path.read_bytes()
    for name in "ab":  # as if a call had been killed behind these
        data = data.replace(*(models[version][name].numpy().tobytes() for version in (1, reached)))
    path.write_bytes(data)
    note = json.loads((tmp_path / "engine" / NOTE).read_text())
    (tmp_path / "engine" / NOTE).write_text(json.dumps(note | {"towards": 4}))
    result = subscriber.pull()
    assert (result.before, result.anchor, result.deltas, result.repaired) == (0, 0, 3, ())
    assert_folder(tmp_path / "engine", models[4])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1"}', '{"version": 1, "publication": 2, "towards": 1}'])
def test_a_damaged_note_begins_with_the_anchor(root: Path, text: str) -> None:
    (root / "engine" / NOTE).write_text(text)
    result = pull(root)
    assert (result.before, result.anchor) == (0, 1)
    assert_folder(root / "engine", stepped(weights(), 2))


def test_a_damaged_version_is_left_behind_by_an_anchor(root: Path) -> None:
    change_index(root, lambda content: content.clear())
    with pytest.raises(bcp.CorruptError, match="publish an anchor"):
        pull(root)
    with pytest.raises(bcp.CorruptError, match="publish an anchor"):
        bcp.publish(weights(4), root / "pub", 3)
    assert bcp.publish(weights(4), root / "pub", 3, anchor_every=1).is_anchor
    assert pull(root).anchor == 3
    assert_folder(root / "engine", weights(4))


# -- strangers ---------------------------------------------------------------------------------------


def everywhere(where: str, value: str) -> Change:
    return lambda content: content.update({where: dict.fromkeys(content[where], value)})


def in_metadata(name: str, value: object) -> Change:
    return lambda content: content["metadata"].update({name: value})


def in_bcp(name: str, value: object) -> Change:
    return lambda content: content["bcp"].update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        everywhere("weight_map", "../weight_v000001/model.safetensors"),
        everywhere("weight_map", "/etc/passwd.safetensors"),
        everywhere("weight_map", "delta/../../x.safetensors"),
        everywhere("weight_map", ".hidden.safetensors"),
        everywhere("weight_map", "missing.safetensors"),
        everywhere("weight_map", "delta\\x.safetensors"),
        in_metadata("version", "000003"),
        in_metadata("version", 2),
        in_metadata("base_version", "000002"),
        in_metadata("base_version", "-00001"),
        in_metadata("delta_encoding", "add"),
        in_metadata("compression_format", "lz4"),
        in_metadata("checksum_format", "adler32"),
        in_metadata("total_size", 1 << 80),
        in_metadata("total_size", -1),
        in_metadata("total_size", "1"),
        in_bcp("anchor", 0),
        in_bcp("anchor", 10**30),
        in_bcp("anchor", 2),
        in_bcp("anchor", 1.0),
        in_bcp("publication", "x" * 1000),
        in_bcp("digests", {}),
        in_bcp("digests", {"embed.weight": "x"}),
        lambda content: content["bcp"]["digests"].update(dict.fromkeys(content["bcp"]["digests"], "0" * 32)),
        lambda content: content["weight_map"].update({"unknown": next(iter(content["weight_map"].values()))}),
        lambda content: content["weight_map"].popitem(),
        lambda content: content.update(weight_map=[]),
        lambda content: content.update(bcp=None),
    ],
)
def test_an_index_of_a_stranger_writes_nothing(root: Path, change: Change) -> None:
    change_index(root, change)
    before = {path.name: path.read_bytes() for path in (root / "engine").iterdir()}
    for folder in ("engine", "fresh"):
        with pytest.raises(bcp.CorruptError):
            pull(root, folder)
        bcp_names = [path.name for path in root.iterdir()]
        assert sorted(bcp_names) in (["engine", "pub"], ["engine", "fresh", "pub"])
    assert {path.name: path.read_bytes() for path in (root / "engine").iterdir()} == before


@pytest.mark.parametrize("text", ["", "[]", '{"version": -1}', '{"version": true}', '{"version": 1e9}', "{" * 9999])
def test_a_damaged_latest_is_refused(root: Path, text: str) -> None:
    (root / "pub" / "latest.json").write_text(text)
    with pytest.raises(bcp.CorruptError, match=r"latest\.json"):
        pull(root)


def test_streams_of_a_stranger_take_no_memory() -> None:
    compress = zstandard.ZstdCompressor().compress
    bomb = compress(bytes(1 << 20))
    words = "version 2: tensor 'w'"
    for stream, encoding in [
        (bomb, "xor"),
        (bomb, "overwrite"),
        (b"", "xor"),
        (bomb[:9], "xor"),
        (compress(bytes(64)) + b"more", "xor"),
        (compress(b""), "overwrite"),
        (compress(b"\x02\0\0\0\0\0\0\0\7"), "overwrite"),  # two positions are said to be there
        (compress(b"\x01\0\0\0\x40\0\0\0\7"), "overwrite"),  # the position 64 of 64 bytes
        (compress(b"\xff\xff\xff\xff\0\0\0\0\7"), "overwrite"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64)), "xor"),
    ]:
        with pytest.raises(bcp.CorruptError, match=words):
            unpack(stream, 64, encoding, words)
    assert pack(np.zeros(64, np.uint8), np.zeros(64, np.uint8), "xor") is None


def test_a_stream_of_another_shape_is_refused(root: Path) -> None:
    path = delta_of(root)
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    for old, new in ((b'"U8"', b'"I8"'), (b'"shape":[', b'"shape":[1,')):
        header = data[8:begin].replace(old, new).rstrip()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[begin:])
        with pytest.raises(bcp.CorruptError, match="no stream of bytes"):
            pull(root)


def test_an_index_comes_back_as_it_was() -> None:
    digests = {"a": "0" * 32, "b": "1" * 32}
    files, delta = dict.fromkeys(digests, "model-1.safetensors"), {"a": "delta/delta-1.safetensors"}
    for index in (
        VersionIndex(7, "p", 7, "", files, {}, digests, 8),
        VersionIndex(7, "p", 7, "xor", files, delta, digests, 8, 4),
        VersionIndex(7, "p", 5, "overwrite", {}, {"a": "delta-1.safetensors"}, digests, 0, 4),
        VersionIndex(7, "p", 5, "xor", {}, {}, digests),
    ):
        assert decode(index.encode(), 7, "index") == index
