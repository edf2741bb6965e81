"""The choice of a codec: measured on all ranks, the same on all of them, and without a trace in storage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks import on_ranks

import bcp
from bcp import _save as saving
from bcp._messages.planning import CodecTrial
from bcp._save import codec_trial
from bcp._save.codec_trial import measured, pays
from bcp.backends import MemoryBackend
from bcp.errors import StorageError
from bcp.extend import Codec
from bcp.protocols import Coordinator
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

MB = 10**6


def trial(storage_mbps: float, codec_mbps: float = 200.0, stored: float = 0.7, nbytes: int = 100 * MB) -> CodecTrial:
    return CodecTrial(nbytes, MB, int(stored * MB), 1 / codec_mbps, MB, 1 / storage_mbps)


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ([trial(50)], True),
        ([trial(1000)], False),  # encoding is slower
        ([trial(199)], False),  # hardly faster
        ([trial(150)], True),
        ([trial(50, stored=0.95)], False),  # too little is gained
        ([trial(50, stored=1.01)], False),
        ([trial(1000), trial(50)], True),  # the save ends with the slowest rank
        ([trial(1000), trial(50, codec_mbps=40)], False),
        ([trial(50), trial(50, stored=0.99, nbytes=MB)], True),  # a rank with next to nothing
        ([trial(math.inf)], False),  # no time could be measured
        ([CodecTrial(0, 0, 1, 0.0, MB, 1.0)], False),  # no tensors
        ([CodecTrial(0, 0, 1, 0.0, MB, 1.0), trial(50)], True),
    ],
)
def test_when_a_codec_pays(trials: list[CodecTrial], *, chosen: bool) -> None:
    assert pays(trials) is chosen
    assert all(not math.isnan(each) for each in measured(trials).values())


def states(nbytes: int = 3 << 20) -> dict[str, Any]:
    return {"model": {"w": torch.randn(nbytes // 4096, 1024), "scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)}}


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> list[CodecTrial]:
    """Answer trials with figures of our own, one a rank."""
    answers: list[CodecTrial] = []

    async def tried(*_: Any) -> CodecTrial:
        return answers.pop()

    monkeypatch.setattr(saving, "tried", tried)
    return answers


@pytest.mark.parametrize("mbps", [50, 1000])
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_choose_the_same(measures: list[CodecTrial], tmp_path: Path, world_size: int, mbps: float) -> None:
    measures += [trial(mbps), *[trial(1000)] * (world_size - 1)]
    codec = Codec("mine", bytes, bytes)

    async def call(_: int, coordinator: Coordinator) -> list[Codec]:
        return await bcp.achoose_codecs(tmp_path, states(), codec=codec, coordinator=coordinator)

    assert on_ranks(world_size, call) == [[codec] if mbps == 50 else []] * world_size


def test_by_default_it_is_zstd(measures: list[CodecTrial], tmp_path: Path) -> None:
    measures.append(trial(50))
    [codec] = bcp.choose_codecs(tmp_path, states())
    assert codec.name == "bcp.zstd"


def test_a_real_trial_leaves_nothing(tmp_path: Path) -> None:
    """The answer depends on the machine."""
    store = CountingBackend(MemoryBackend())
    assert len(bcp.choose_codecs(store, states())) <= 1
    assert len(bcp.choose_codecs(tmp_path / "run", states())) <= 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert store.calls["open_write"] == store.calls["delete"] == 3


@pytest.mark.anyio
async def test_a_sample_has_bytes_of_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[bytes]()
    monkeypatch.setattr(codec_trial, "PIECE_BYTES", 1024)
    tensors = {str(number): torch.full((64, 256), float(number)) for number in range(1, 5)}
    tensors["transposed"] = torch.full((256, 64), 5.0).t()

    def encode(data: Any) -> bytes:
        seen.append(bytes(data))
        return b""

    await bcp.achoose_codecs(MemoryBackend(), {"model": tensors}, codec=Codec("mine", encode, bytes))
    values = torch.frombuffer(bytearray(seen[0]), dtype=torch.float32)
    assert len(seen[0]) == codec_trial.PIECES * 1024
    assert set(values.tolist()) == {1.0, 2.0, 3.0, 4.0, 5.0}


@pytest.mark.parametrize("step", ["open_write", "write_part", "commit", "delete"])
def test_storage_that_fails_on_one_rank(step: str) -> None:
    stores = [FaultyBackend(MemoryBackend(), step, StorageError("it is full"), nth=nth) for nth in (99, 1)]

    async def call(rank: int, coordinator: Coordinator) -> list[Codec]:
        return await bcp.achoose_codecs(stores[rank], states(), coordinator=coordinator)

    first, second = on_ranks(2, call)
    assert isinstance(first, bcp.PeerError)
    assert first.rank == 1
    assert isinstance(second, StorageError)


def test_states_that_cannot_be_saved_on_one_rank(tmp_path: Path) -> None:
    async def call(rank: int, coordinator: Coordinator) -> list[Codec]:
        own = {"model": {"w": torch.eye(2).to_sparse()}} if rank else states()
        return await bcp.achoose_codecs(tmp_path, own, coordinator=coordinator)

    first, second = on_ranks(2, call)
    assert isinstance(first, bcp.PeerError)
    assert isinstance(second, bcp.InputError)
    assert [*tmp_path.iterdir()] == []


def test_ranks_that_disagree(tmp_path: Path) -> None:
    async def call(rank: int, coordinator: Coordinator) -> list[Codec]:
        codec = Codec(f"mine-{rank}", bytes, bytes)
        return await bcp.achoose_codecs(tmp_path, states(), codec=codec, coordinator=coordinator)

    assert all(isinstance(error, bcp.BcpError) and "mine-" in str(error) for error in on_ranks(2, call))


@pytest.mark.parametrize("codec", ["zstd", 1, [bcp.zstd]])
def test_no_codec_at_all(tmp_path: Path, codec: Any) -> None:
    with pytest.raises(bcp.InputError, match=r"is no bcp.extend.Codec; pass one"):
        bcp.choose_codecs(tmp_path, states(), codec=codec)
