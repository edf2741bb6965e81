"""The course of an export: ranks that share the work, memory, and bytes read."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import assert_same
from fake_store import FakeStore
from safetensors.torch import load as loads
from safetensors.torch import load_file, save_file
from tasks import on_ranks

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.backends.objects import ObjectBackend
from bcp.coordinators import SoloCoordinator
from bcp.errors import ExistsError, InputError, PeerError
from bcp.testing.storage_fakes import CountingBackend

STATES = {f"layer.{n}": torch.full((100,), n, dtype=torch.float32) for n in range(7)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a checkpoint."""
    bcp.save(tmp_path / "ckpt", {"model": STATES})
    return tmp_path / "ckpt"


# -- several ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3, 9])
def test_ranks_share_the_files(count: int, path: Path, tmp_path: Path) -> None:
    targets = [CountingBackend(LocalBackend(tmp_path / "hf")) for _ in range(count)]

    async def call(rank: int, ranks: Any) -> Any:
        return await bcp.tools.aexport_hf(path, targets[rank], shard_bytes=400, coordinator=ranks)

    results = on_ranks(count, call)
    assert {result.files for result in results} == {
        (*(f"model-{n:05d}-of-00007.safetensors" for n in range(1, 8)), "model.safetensors.index.json")
    }
    found = {
        name: tensor for file in results[0].files[:-1] for name, tensor in load_file(tmp_path / "hf" / file).items()
    }
    assert_same(found, STATES)
    assert [target.calls["open_write"] for target in targets] == [len(range(rank, 7, count)) for rank in range(count)]
    assert [target.calls["put"] for target in targets] == [1, *[0] * (count - 1)], "rank 0 writes the index"
    assert {result.nbytes for result in results} == {7 * 400}


def test_one_file_is_written_by_one_rank(path: Path, tmp_path: Path) -> None:
    async def call(_: int, ranks: Any) -> Any:
        return await bcp.tools.aexport_torch(path, tmp_path / "model.pt", kind="model", coordinator=ranks)

    assert [result.files for result in on_ranks(3, call)] == [("model.pt",)] * 3
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True), STATES)


@pytest.mark.parametrize("rank_at_fault", range(3))
def test_what_one_rank_cannot_use_no_rank_writes(rank_at_fault: int, path: Path, tmp_path: Path) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        glob = "nothing" if rank == rank_at_fault else "*"
        return await bcp.tools.aexport_hf(path, tmp_path / "hf", glob=glob, coordinator=ranks)

    errors = on_ranks(3, call)
    assert [isinstance(error, PeerError) for error in errors] == [rank != rank_at_fault for rank in range(3)]
    assert all("nothing" in str(error) for error in errors)
    assert not (tmp_path / "hf").exists()


def test_what_one_rank_refuses_at_the_call_all_ranks_hear_of(path: Path, tmp_path: Path) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        budget_bytes = 0 if rank == 1 else 1
        return await bcp.tools.aexport_hf(path, tmp_path / "hf", budget_bytes=budget_bytes, coordinator=ranks)

    errors = on_ranks(2, call)
    assert isinstance(errors[0], PeerError)
    assert "budget_bytes=0" in str(errors[0])
    assert isinstance(errors[1], InputError)


def test_other_arguments_on_another_rank(path: Path, tmp_path: Path) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        return await bcp.tools.aexport_hf(path, tmp_path / "hf", shard_bytes=400 + 400 * rank, coordinator=ranks)

    errors = on_ranks(2, call)
    assert all(isinstance(error, InputError) for error in errors)
    for rank, files in ((1, 4), (0, 7)):
        words = f"rank {rank} (has )?{path} of operation .* to {tmp_path}/hf, overwrite=False, {files} files with 2800 "
        assert all(re.search(words, str(error)) for error in errors)
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "given",
    [
        [{"dtype": "bfloat16"}, {"dtype": "float16"}],
        [{}, {"rename": {"layer.0": "layer.x"}}],
        [{"glob": "layer.1"}, {"glob": "layer.2"}],
    ],
)
def test_other_files_of_the_same_size_on_another_rank(given: list[Any], path: Path, tmp_path: Path) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        return await bcp.tools.aexport_hf(path, tmp_path / "hf", shard_bytes=400, coordinator=ranks, **given[rank])

    errors = on_ranks(2, call)
    assert all(isinstance(error, InputError) for error in errors)
    digests = re.findall(r"with digest ([0-9a-f]+)", str(errors[0]))
    assert len(digests) == len({*digests}) == 2
    assert not (tmp_path / "hf").exists()


def test_an_export_takes_its_place_at_the_call(path: Path, tmp_path: Path) -> None:
    threads = []

    class Noting(SoloCoordinator):
        def begin(self, operation: str, timeout: float) -> Any:
            threads.append(threading.get_ident())
            return super().begin(operation, timeout)

    asyncio.run(bcp.tools.aexport_hf(path, tmp_path / "hf", coordinator=Noting()))
    assert threads == [threading.get_ident()], "not on bcp's own loop, where a later call might come first"


def test_another_save_on_another_rank(path: Path, tmp_path: Path) -> None:
    async def call(rank: int, ranks: Any) -> Any:
        source = bcp.Checkpoint(path)
        if rank == 1:
            await bcp.asave(path, {"model": STATES}, overwrite=True)
        assert source.metadata
        return await bcp.tools.aexport_hf(source, tmp_path / "hf", coordinator=ranks)

    errors = on_ranks(2, call)
    assert all(isinstance(error, InputError) and "no save replaces meanwhile" in str(error) for error in errors)
    assert not (tmp_path / "hf").exists()


def test_a_target_in_the_way_is_told_to_all(path: Path, tmp_path: Path) -> None:
    bcp.tools.export_hf(path, tmp_path / "hf")

    async def call(_: int, ranks: Any) -> Any:
        return await bcp.tools.aexport_hf(path, tmp_path / "hf", coordinator=ranks)

    assert [type(error) for error in on_ranks(2, call)] == [ExistsError] * 2


# -- stores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_bytes", [1 << 20, 256 << 20])
def test_an_object_store_takes_parts_of_any_size(budget_bytes: int, tmp_path: Path) -> None:
    states = {"w": torch.arange(3_000_000.0), "v": torch.ones(3)}
    bcp.save(tmp_path / "ckpt", {"model": states})
    store = FakeStore()
    bcp.tools.export_hf(tmp_path / "ckpt", ObjectBackend(store), shard_bytes=1 << 20, budget_bytes=budget_bytes)
    found: dict[str, torch.Tensor] = {}
    for key, (data, _) in store.objects.items():
        found |= loads(data) if key.endswith(".safetensors") else {}
    assert_same(found, states)
    assert not store.uploads


def test_a_url_of_a_file(path: Path) -> None:
    for export, name in ((bcp.tools.export_torch, "model.pt"), (bcp.tools.export_safetensors, "model.safetensors")):
        result = export(path, f"memory://exports-of-a-url/deep/{name}", kind="model")
        assert result.path == f"memory://exports-of-a-url/deep/{name}"
        with pytest.raises(ExistsError):
            export(path, f"memory://exports-of-a-url/deep/{name}", kind="model")
    data = asyncio.run(MemoryBackend("exports-of-a-url").get("deep/model.safetensors"))
    assert_same(loads(bytes(data)), STATES)


# -- memory and bytes ---------------------------------------------------------------------------------

MEASURE = """
import json, sys
import torch, bcp
import torch.distributed.checkpoint, torch._utils
from bcp.tools import export_dcp, export_hf, export_safetensors, export_torch

def peak():  # ru_maxrss would be that of the parent until exec
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10

path, out = sys.argv[1:]
export_torch("small", "small.pt"), export_dcp("small", "small.dcp"), export_hf("small", "small.hf")
before = peak()
grown = {}
for name, export in {
    "hf": export_hf, "safetensors": export_safetensors, "torch": export_torch, "dcp": export_dcp
}.items():
    export(path, f"{out}/{name}", budget_bytes=16 << 20)
    grown[name] = peak() - before
print(json.dumps(grown))
"""


@pytest.mark.long
def test_memory_is_bounded_whatever_the_size_of_a_tensor(tmp_path: Path) -> None:
    bcp.save(tmp_path / "large", {"model": {"w": torch.zeros(48 << 20, dtype=torch.float32)}})
    bcp.save(tmp_path / "small", {"model": {"w": torch.zeros(1)}})
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "large"), str(tmp_path / "out")]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True).stdout  # noqa: S603 -- ours
    grown = json.loads(out.splitlines()[-1])
    assert max(grown.values()) < 64 << 20, "16 MiB of budget, and 192 MiB of a tensor"
    assert (tmp_path / "out" / "torch").stat().st_size > 192 << 20


@pytest.mark.parametrize("export", ["safetensors", "torch"])
def test_every_byte_is_read_about_once(export: str, tmp_path: Path) -> None:
    states = {f"w{n}": torch.zeros(3 << 18) for n in range(8)}
    bcp.save(tmp_path / "ckpt", {"model": states})
    source = CountingBackend(LocalBackend(tmp_path / "ckpt"))
    function = bcp.tools.export_safetensors if export == "safetensors" else bcp.tools.export_torch
    result = function(source, tmp_path / "out" / "model", kind="model")
    data = sum(nbytes for key, nbytes in source.read.items() if key.startswith("model/"))
    assert result.nbytes == 24 << 20
    assert result.nbytes <= data < result.nbytes + (3 << 20), "blocks at the ends of parts are read twice"


def test_a_pattern_reads_what_it_names(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": {f"w{n}": torch.zeros(3 << 18) for n in range(8)}})
    source = CountingBackend(LocalBackend(tmp_path / "ckpt"))
    bcp.tools.export_safetensors(source, tmp_path / "model.safetensors", glob="w3")
    assert sum(nbytes for key, nbytes in source.read.items() if key.startswith("model/")) <= 4 << 20


def sources(folder: Path) -> dict[str, tuple[Path, str]]:
    """Write six tensors of 1 MiB as a checkpoint and as a Hugging Face folder; return the beginnings of data files."""
    states = {f"w{n}": torch.full((256, 1024), float(n)) for n in range(6)}
    bcp.save(folder / "ckpt", {"model": states})
    (folder / "hub").mkdir()
    save_file(states, folder / "hub" / "model.safetensors")
    return {"bcp": (folder / "ckpt", "model/"), "hugging face": (folder / "hub", "model.")}


@pytest.mark.parametrize("source", ["bcp", "hugging face"])
@pytest.mark.parametrize(
    "export", [partial(bcp.tools.aexport_hf, shard_bytes=1 << 20), partial(bcp.tools.aexport_dcp, file_bytes=1 << 20)]
)
def test_each_rank_reads_the_bytes_of_its_files(export: Callable[..., Any], source: str, tmp_path: Path) -> None:
    path, data = sources(tmp_path)[source]
    backends = [CountingBackend(LocalBackend(path)) for _ in range(3)]

    async def call(rank: int, ranks: Any) -> Any:
        return await export(backends[rank], tmp_path / "out", coordinator=ranks)

    assert [result.nbytes for result in on_ranks(3, call)] == [6 << 20] * 3
    read = [sum(nbytes for key, nbytes in backend.read.items() if key.startswith(data)) for backend in backends]
    more = 2 << 20 if source == "bcp" else 2048  # a block at the end of each file, or the header of the source
    assert all(2 << 20 <= nbytes <= (2 << 20) + more for nbytes in read), "two of six files"


def test_one_rank_reads_the_bytes_of_a_single_file(tmp_path: Path) -> None:
    backends = [CountingBackend(LocalBackend(sources(tmp_path)["bcp"][0]))]
    backends += [CountingBackend(LocalBackend(tmp_path / "ckpt")) for _ in range(2)]

    async def call(rank: int, ranks: Any) -> Any:
        return await bcp.tools.aexport_torch(backends[rank], tmp_path / "all.pt", coordinator=ranks)

    assert [result.nbytes for result in on_ranks(3, call)] == [6 << 20] * 3
    read = [sum(nbytes for key, nbytes in backend.read.items() if key.startswith("model/")) for backend in backends]
    assert read == [(6 << 20) + 4096, 0, 0], "all blocks, and with the first one a header"
