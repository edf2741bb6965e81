"""Foreign checkpoints in stores: folders, files by their URLs, and round trips between bcp and other libraries."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alike import alike_in_any_order
from dcp_states import state_of, trained
from ranks import Ranks
from round_trips import (
    LAYOUTS,
    Alone,
    Store,
    across_the_bridge,
    check,
    load_by_dcp,
    load_rows,
    save_by_dcp,
    states_of,
    store_at,
    through,
)
from safetensors.torch import load_file, save_file
from samples import sample
from servers.hdfs import MiniHdfs
from servers.s3 import S3Server
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

import bcp
from bcp.backends import resolve

pytest_plugins = ["servers.hdfs_fixtures", "servers.s3_fixtures"]

DATA = {"hub": "model.safetensors", "dcp": "__0_0.distcp"}
"""A file with tensors in each folder."""


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


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
async def test_s3(server: S3Server, tmp_path: Path) -> None:
    await compare(written(tmp_path), server.place(), server.options)


@pytest.mark.anyio
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
async def test_hdfs(hdfs: MiniHdfs, tmp_path: Path) -> None:
    await compare(written(tmp_path), f"{hdfs.url}/foreign", {})


# -- round trips ---------------------------------------------------------------------------------------

TRIPS = [*itertools.product(["dcp", "bridge", "torch", "hf"], [1, 3], ["local", "s3", "hdfs"])]
TRIPS += [("dcp", 4, store) for store in ("local", "s3", "hdfs")]
KEPT = [("dcp", 3, "s3"), ("bridge", 3, "s3"), ("torch", 1, "s3"), ("torch", 3, "local")]
KEPT += [("hf", 3, "hdfs")]
"""Each library on several ranks, and each storage; the others are cases of ``make test-all``."""

BOTH = ("model", "optimizer")
NAMES = ("hub", "dcp", "one.pt")


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("peer", "size", "where"), sample(TRIPS, *KEPT))
def test_a_round_trip(peer: str, size: int, where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    ranks = Alone() if size == 1 else request.getfixturevalue(f"ranks{size}")
    TRIP[peer](ranks, LAYOUTS[size], store_at(where, tmp_path / "store", request), tmp_path)


def of_dcp(ranks: Any, layout: str, store: Store, folder: Path) -> None:
    """DCP, bcp, DCP: from the ranks of a mesh to the same ranks, where these can be in two dimensions to others."""
    expected = ranks.run(save_by_dcp, folder / "dcp", layout)[0]
    store.put(folder / "dcp", "dcp")
    check(ranks.run(through, store, "dcp", partial(states_of, layout, *BOTH), bcp.tools.export_dcp))
    back = store.get("again", folder / "back")
    for found in ranks.run(load_by_dcp, back, {"fsdp_tp": "hsdp"}.get(layout, layout)):
        assert alike_in_any_order(found, expected)


def of_the_bridge(ranks: Any, layout: str, store: Store, _: Path) -> None:
    """DCP over bcp's storage."""
    assert ranks.run(across_the_bridge, store, layout) == [True] * ranks.size


def of_torch(ranks: Any, layout: str, store: Store, folder: Path) -> None:
    """``torch.save``, bcp, ``torch.load``."""
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "one.pt")
    store.put(folder / "one.pt", "one.pt")
    check(ranks.run(through, store, "one.pt", partial(states_of, layout, *BOTH), bcp.tools.export_torch))
    found = torch.load(store.get("again.pt", folder / "back"), weights_only=True)
    expected = state_of(model, optimizer, flat=True)
    assert alike_in_any_order(found, {"model": dict(expected["model"]), "optimizer": expected["optim"]})
    other, stepped = trained(seed=3)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(other, stepped, found["optimizer"], options=flat)
    assert alike_in_any_order(stepped.state_dict(), optimizer.state_dict())


def of_hugging_face(ranks: Any, layout: str, store: Store, folder: Path) -> None:
    """A folder as of ``save_pretrained``, bcp, such a folder: with shards, an index and a configuration.

    ``tests/exports/test_export_minilm.py`` does the same with transformers.
    """
    model, out = trained()[0].state_dict(), folder / "hub"
    out.mkdir()
    names = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(model)}
    for file in set(names.values()):
        save_file({name: model[name] for name in names if names[name] == file}, out / file, metadata={"format": "pt"})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (out / "config.json").write_text('{"dtype": "float32"}')
    store.put(out, "hub")
    export = partial(bcp.tools.export_hf, shard_bytes=1000, like=store.place("hub"))
    ways = ranks.run(through, store, "hub", partial(states_of, layout, "model"), export)
    check(ways)
    back = store.get("again", folder / "back")
    assert {path.name for path in back.iterdir()} == set(ways[0].files)
    assert len(ways[0].files) > 3
    found = {name: each for path in back.glob("*.safetensors") for name, each in load_file(path).items()}
    assert alike_in_any_order(found, dict(model))
    assert (back / "config.json").read_bytes() == (out / "config.json").read_bytes()


TRIP = {"dcp": of_dcp, "bridge": of_the_bridge, "torch": of_torch, "hf": of_hugging_face}


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("name", "where"), sample(itertools.product(NAMES, ["local", "s3", "hdfs"]), *((name, "local") for name in NAMES))
)
def test_each_rank_reads_its_rows_and_no_byte_more(
    name: str, where: str, ranks3: Ranks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    whole = {"a": torch.rand(300, 64), "b": torch.rand(9, 4).bfloat16(), "c": torch.arange(6)}
    if name == "hub":
        (tmp_path / name).mkdir()
        save_file(whole, tmp_path / name / "model.safetensors")
    elif name == "dcp":
        dcp.save({"model": whole}, checkpoint_id=tmp_path / name, no_dist=True)
    else:
        torch.save({"model": whole}, tmp_path / name)
    store = store_at(where, tmp_path / "store", request)
    store.put(tmp_path / name, name)
    for rank, way in enumerate(ranks3.run(load_rows, store, name, whole)):
        assert way.read == way.needed == 300 * 64 * 4 // 3 + 9 * 4 * 2 // 3 + 6 * 8 // 3
        assert way.counted == way.read if rank else way.counted > way.read
