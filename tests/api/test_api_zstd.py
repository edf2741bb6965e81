"""Checkpoints with bcp's own codec: loads and tools read them without being told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import on_ranks
from torch import nn

import bcp
from bcp import tools
from bcp.protocols import Coordinator

OPTIONS = bcp.SaveOptions(codecs=[bcp.zstd()], part_bytes=1 << 20)


def trained() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(300, 700), nn.Linear(700, 300).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "extra_states": {"note": "kept", "table": torch.arange(50)}}


def fresh() -> dict[str, Any]:
    states = trained()
    for tensor in states["model"].state_dict().values():
        tensor.zero_()
    return {**states, "extra_states": {"note": "", "table": torch.zeros(50, dtype=torch.int64)}}


def assert_same(states: dict[str, Any]) -> None:
    expected = trained()
    for kind in ("model", "optimizer"):
        torch.testing.assert_close(states[kind].state_dict(), expected[kind].state_dict(), rtol=0, atol=0)
    assert states["extra_states"]["note"] == "kept"
    assert states["extra_states"]["table"].equal(torch.arange(50))


def test_a_load_knows_the_codec(tmp_path: Path) -> None:
    result = bcp.save(tmp_path / "a", trained(), options=OPTIONS)
    assert result.nbytes < 0.9 * result.state_nbytes
    states = fresh()
    bcp.load(tmp_path / "a", states)
    assert_same(states)


def test_a_codec_of_the_same_name_comes_first(tmp_path: Path) -> None:
    bcp.save(tmp_path / "a", trained(), options=OPTIONS)
    seen = []

    def decode(data: Any) -> Any:
        seen.append(len(data))
        return bcp.zstd().decode(data)

    own = bcp.extend.Codec("bcp.zstd", bytes, decode)
    states = fresh()
    bcp.load(tmp_path / "a", states, options=bcp.LoadOptions(codecs=[own]))
    assert_same(states)
    assert seen


def test_tools_need_no_codec(tmp_path: Path) -> None:
    bcp.save(tmp_path / "a", trained(), options=OPTIONS)
    weight = trained()["model"][0].weight
    with bcp.Checkpoint(tmp_path / "a") as checkpoint:
        assert checkpoint.codecs == ("bcp.zstd",)
        assert checkpoint.read("0.weight").equal(weight)
        assert checkpoint.read("0.weight", (slice(3, 5), slice(5, 12))).equal(weight[3:5, 5:12])
        assert checkpoint.object("extra_states")["note"] == "kept"
    assert not tools.verify(tmp_path / "a").damage
    tools.copy(tmp_path / "a", tmp_path / "b")
    states = fresh()
    bcp.load(tmp_path / "b", states)
    assert_same(states)
    bcp.save(tmp_path / "plain", trained(), options=bcp.SaveOptions())
    assert tools.diff(tmp_path / "a", tmp_path / "plain").equal
    tools.export_hf(tmp_path / "a", tmp_path / "hf")
    assert bcp.Checkpoint(tmp_path / "hf").read("0.weight").equal(weight)


def test_ranks_with_other_shards(tmp_path: Path) -> None:
    bcp.save(tmp_path / "a", trained(), options=OPTIONS)

    async def call(_: int, coordinator: Coordinator) -> dict[str, Any]:
        states = fresh()
        await bcp.aload(tmp_path / "a", states, coordinator=coordinator, overlap_loading=True)
        return states

    for states in on_ranks(3, call):
        assert_same(states)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    bcp.save(tmp_path / "a", trained(), options=OPTIONS)
    [path] = (tmp_path / "a" / "model").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(bcp.CorruptError, match=path.name):
        bcp.load(tmp_path / "a", fresh())
