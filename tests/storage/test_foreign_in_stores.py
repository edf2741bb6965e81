"""Foreign checkpoints in stores: folders, and files by their URLs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from servers.hdfs import MiniHdfs
from servers.s3 import S3Server, moto_server

import bcp
from bcp.backends import resolve

pytest_plugins = ["servers.hdfs_fixtures"]
pytestmark = pytest.mark.anyio

DATA = {"hub": "model.safetensors", "dcp": "__0_0.distcp"}
"""A file with tensors in each folder."""


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with moto_server() as running:
        yield running


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return {"w": torch.rand(300, 40), "half": torch.rand(17).bfloat16(), "step": torch.tensor(3)}


def written(folder: Path) -> dict[str, bytes]:
    """Write a folder of each format, and files of both; return all files."""
    for name in ("hub", "dcp", "deep/down"):
        (folder / name).mkdir(parents=True)
    save_file(tensors(), folder / "hub" / "model.safetensors")
    dcp.save({"model": tensors(), "epoch": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    save_file(tensors(), folder / "one.safetensors")
    torch.save({"model": tensors()}, folder / "deep" / "down" / "two.pt")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


async def compare(files: dict[str, bytes], url: str, options: dict[str, Any]) -> None:
    """Put the files into a store, and read all of it there."""
    backend = resolve(url, options)
    for key, data in files.items():
        await backend.put(key, data)
    for place in ("hub", "dcp", "one.safetensors", "deep/down/two.pt"):
        await read(f"{url}/{place}", options)
    for place in ("hub", "dcp"):
        await bcp.tools.aimport_files(f"{url}/{place}", copy=False, storage_options=options)
        await read(f"{url}/{place}", options)
        with pytest.raises(bcp.ExistsError, match="was imported at"):
            await bcp.tools.aimport_files(f"{url}/{place}", copy=False, storage_options=options)
        await bcp.tools.aimport_files(f"{url}/{place}", copy=False, overwrite=True, storage_options=options)
        await backend.put(f"{place}/{DATA[place]}", b"shorter")
        with pytest.raises(bcp.CorruptError, match="has 7 bytes, and had"):
            await read(f"{url}/{place}", options)
        assert (await bcp.tools.aremove(f"{url}/{place}", storage_options=options)).files == 1
        assert {info.key for info in await backend.list(f"{place}/")} == {key for key in files if key.startswith(place)}
    await backend.aclose()


async def read(url: str, options: dict[str, Any]) -> None:
    """Read all of a checkpoint."""
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    load = bcp.LoadOptions(storage_options=options, strict=False)
    result = await bcp.aload(url, {"model": target}, options=load)
    assert result.unverified
    assert result.read_nbytes < result.nbytes + 32
    for name, tensor in tensors().items():
        assert torch.equal(target[name], tensor), (url, name)
    async with bcp.AsyncCheckpoint(url, storage_options=options) as ckpt:
        assert torch.equal(await ckpt.read("w", (slice(7, 9),)), tensors()["w"][7:9])
        assert (await ckpt.verify()).unverified == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
async def test_s3(server: S3Server, tmp_path: Path) -> None:
    await compare(written(tmp_path), server.place(), server.options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
async def test_hdfs(hdfs: MiniHdfs, tmp_path: Path) -> None:
    await compare(written(tmp_path), f"{hdfs.url}/foreign", {})
