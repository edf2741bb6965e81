"""Versions of weights arrive bit by bit, by bcp's subscriber and by a reader of SGLang's description."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from published import assert_folder, followed, stepped, weights

import bcp
from bcp.backends import LocalBackend, MemoryBackend
from bcp.publication import encoding
from bcp.publication.index import INDEX

Model = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def published(root: Path | str, last: int, **more: object) -> list[Model]:
    """Publish versions 1 to ``last``; return the model of each, and of version 0 in front."""
    models = [weights(), weights()]
    for version in range(2, last + 1):
        models.append(stepped(models[-1], version))
    for version in range(1, last + 1):
        bcp.publish(models[version], root, version, **more)  # type: ignore[arg-type]
    return models


@pytest.mark.parametrize("way", ["xor", "overwrite"])
@pytest.mark.parametrize("has_cache", [True, False])
def test_all_readers_get_the_weights(tmp_path: Path, way: str, *, has_cache: bool) -> None:
    cache = tmp_path / "cache" if has_cache else None
    models = published(tmp_path / "pub", 5, encoding=way, anchor_every=3, cache=cache)
    for version in range(1, 6):
        read = followed(tmp_path / "pub", version)
        assert read == {name: raw(value) for name, value in models[version].items()}
        bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull(version=version)
        assert_folder(tmp_path / "engine", models[version])


def test_a_subscriber_that_missed_three_catches_up_by_deltas(tmp_path: Path) -> None:
    model = {"w": torch.zeros(64, 64), "b": torch.zeros(64)}
    bcp.publish(model, tmp_path / "pub", 1)
    subscriber = bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")
    assert subscriber.pull() == bcp.PullResult(1, 0, anchor=1, nbytes=4 * 65 * 64)
    for version in (2, 3, 4, 5):
        model["w"][version] += 1
        bcp.publish(model, tmp_path / "pub", version, anchor_every=4)
    result = subscriber.pull()
    assert (result.before, result.anchor, result.deltas, result.repaired) == (1, 0, 4, ())
    assert_folder(tmp_path / "engine", model)
    assert subscriber.pull() == bcp.PullResult(5, 5)
    fresh = bcp.Subscriber(tmp_path / "pub", tmp_path / "fresh").pull()
    assert (fresh.anchor, fresh.deltas) == (5, 0)
    assert_folder(tmp_path / "fresh", model)


def test_an_anchor_is_taken_where_it_has_fewer_bytes(tmp_path: Path) -> None:
    model = {"w": torch.zeros(4096)}
    bcp.publish(model, tmp_path / "pub", 1)
    subscriber = bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")
    subscriber.pull()
    for version in (2, 3, 4):
        model = {"w": torch.rand(4096)}  # no delta is smaller than this
        bcp.publish(model, tmp_path / "pub", version, anchor_every=3)
    result = subscriber.pull()
    assert (result.before, result.anchor, result.deltas) == (1, 4, 0)
    assert_folder(tmp_path / "engine", model)


def test_a_checkpoint_is_published_under_names_of_hugging_face(tmp_path: Path) -> None:
    embed = torch.nn.Embedding(4, 2)
    states = {"embed.weight": embed.weight, "head.weight": embed.weight, "net.bias": torch.ones(3)}
    bcp.save(tmp_path / "ckpt", {"model": states})
    names = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}
    want = {"model.embed_tokens.weight": embed.weight.detach().bfloat16(), "net.bias": torch.ones(3).bfloat16()}
    with bcp.Checkpoint(tmp_path / "ckpt") as ckpt:
        bcp.publish(ckpt, tmp_path / "pub", 1, rename=names, dtype=torch.bfloat16)
    assert bcp.publish(tmp_path / "ckpt", tmp_path / "pub", 2, rename=names, dtype="bfloat16").changed == 0
    live = bcp.publish(states, tmp_path / "pub", 3, rename=lambda name: names.get(name, name), dtype="bfloat16")
    assert (live.has_delta, live.changed) == (True, 0)
    bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull()
    assert_folder(tmp_path / "engine", want)


def test_a_module_is_published_with_the_files_beside_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text('{"torch_dtype": "float32"}')
    (tmp_path / "like" / "tokenizer.json").write_text("{}")
    bcp.publish(model, tmp_path / "pub", 1, like=tmp_path / "like", dtype="bfloat16")
    bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull()
    assert json.loads((tmp_path / "engine" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    assert (tmp_path / "engine" / "tokenizer.json").exists()
    assert_folder(tmp_path / "engine", {name: value.bfloat16() for name, value in model.state_dict().items()})


def test_many_files(tmp_path: Path) -> None:
    models = published(tmp_path / "pub", 2, shard_bytes=300)
    assert len(list((tmp_path / "pub" / "weight_v000001").glob("*.safetensors"))) > 2
    bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull()
    assert_folder(tmp_path / "engine", models[2])


@pytest.mark.anyio
async def test_memory_and_coroutines(tmp_path: Path, anyio_backend: str) -> None:
    del anyio_backend
    url, model = f"memory://{tmp_path.name}/pub", weights()
    await bcp.apublish(model, url, 1)
    await bcp.apublish(stepped(model, 2), url, 2)
    subscriber = bcp.Subscriber(url, tmp_path / "engine")
    assert (await subscriber.apull()).deltas == 1
    assert {patch.name async for patch in subscriber.apatches(2)} == {"embed.weight", "layers.0.proj", "scale"}
    await bcp.apublish(weights(3), MemoryBackend(f"{tmp_path.name}-2"), 1)


@pytest.mark.parametrize("way", ["xor", "overwrite"])
@pytest.mark.parametrize("pulled", [None, 2, 3])
def test_patches_lead_from_one_version_to_the_next(tmp_path: Path, way: str, pulled: int | None) -> None:
    models = published(tmp_path / "pub", 4, encoding=way, anchor_every=2)
    subscriber = bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")
    if pulled is not None:
        subscriber.pull(version=pulled)
    live = {name: value.clone() for name, value in models[2].items()}
    for name, shape, indices, values in subscriber.patches(3):
        assert shape == tuple(live[name].shape)
        assert not (live[name].reshape(-1)[indices] == values).any()  # elements that are equal are no part of it
        live[name].view(-1)[indices] = values
    assert all(torch.equal(value, models[3][name]) for name, value in live.items())
    first = {patch.name: patch.values.view(patch.shape) for patch in subscriber.patches(1)}
    assert all(torch.equal(value, models[1][name]) for name, value in first.items())
    next(subscriber.patches(3))  # a caller may stop early


# -- versions ----------------------------------------------------------------------------------------


def test_every_version_is_newer(tmp_path: Path) -> None:
    published(tmp_path / "pub", 2)
    for version in (1, 2):
        with pytest.raises(bcp.ExistsError, match="pass version=3"):
            bcp.publish(weights(), tmp_path / "pub", version)
    for version in (0, -1, True, 1.0, "1", 10**12):
        with pytest.raises(bcp.InputError, match="is no version"):
            bcp.publish(weights(), tmp_path / "pub", version)  # type: ignore[arg-type]
    with pytest.raises(bcp.InputError, match="the newest is 2"):
        bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull(version=3)


def test_a_gap_and_another_layout_make_anchors(tmp_path: Path) -> None:
    model = weights()
    assert bcp.publish(model, tmp_path / "pub", 1).is_anchor
    assert bcp.publish(model, tmp_path / "pub", 3).is_anchor
    assert not bcp.publish(model, tmp_path / "pub", 4).is_anchor
    wider = {**model, "more": torch.ones(3)}
    assert bcp.publish(wider, tmp_path / "pub", 5).is_anchor
    assert bcp.publish({**wider, "scale": torch.ones(1).bfloat16()}, tmp_path / "pub", 6).is_anchor
    assert followed(tmp_path / "pub", 3) == {name: raw(value) for name, value in model.items()}
    bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull(version=5)
    assert_folder(tmp_path / "engine", wider)


def test_two_publishers_of_one_version(tmp_path: Path) -> None:
    models = published(tmp_path / "pub", 1)

    class Slow(LocalBackend):
        """Another publisher comes while this one writes its data."""

        @asynccontextmanager
        async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[Any]:  # type: ignore[override]
            with pytest.raises(bcp.ExistsError, match=r"has claimed version 2 \d+ s ago.*claim_seconds=0"):
                await bcp.apublish(weights(5), tmp_path / "pub", 2)
            await bcp.apublish(stepped(models[1], 7), tmp_path / "pub", 2, claim_seconds=0)
            async with super().open_write(key, nbytes) as writer:
                yield writer

    with pytest.raises(bcp.ExistsError, match="taken over the claim of version 2"):
        bcp.publish(stepped(models[1], 2), Slow(tmp_path / "pub"), 2)
    assert followed(tmp_path / "pub", 2) == {name: raw(value) for name, value in stepped(models[1], 7).items()}
    assert bcp.publish(models[1], tmp_path / "pub", 3).version == 3


def test_a_torn_publication_is_unseen(tmp_path: Path) -> None:
    models = published(tmp_path / "pub", 1)

    class Torn(LocalBackend):
        async def put_if(self, key: str, data: object, expected: str | None) -> str | None:
            if b'"sealed"' in bytes(data):  # type: ignore[call-overload]
                raise SystemExit
            return await super().put_if(key, data, expected)  # type: ignore[arg-type]

    with pytest.raises(SystemExit):
        bcp.publish(weights(8), Torn(tmp_path / "pub"), 2)
    assert list((tmp_path / "pub" / "weight_v000002").iterdir())
    subscriber = bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")
    assert subscriber.pull().version == 1
    bcp.publish(stepped(models[1], 2), tmp_path / "pub", 2, claim_seconds=0)
    assert followed(tmp_path / "pub", 2) == {name: raw(value) for name, value in stepped(models[1], 2).items()}


def test_a_failure_leaves_no_file_and_no_claim(tmp_path: Path) -> None:
    published(tmp_path / "pub", 1)
    before = sorted(path.name for path in (tmp_path / "pub").iterdir())

    class Full(LocalBackend):
        async def put_if(self, key: str, data: object, expected: str | None) -> str | None:
            raise bcp.StorageError(f"full: {key}, {len(bytes(data))}, {expected}")  # type: ignore[call-overload]

    class FullLater(LocalBackend):
        def open_write(self, key: str, nbytes: int | None = None) -> object:  # type: ignore[override]
            raise bcp.StorageError(f"full: {key}, {nbytes}")

    for backend in (Full(tmp_path / "pub"), FullLater(tmp_path / "pub")):
        with pytest.raises(bcp.StorageError, match="full"):
            bcp.publish(weights(1), backend, 2)
    assert sorted(path.name for path in (tmp_path / "pub").iterdir()) == before
    bcp.publish(weights(1), tmp_path / "pub", 2)


def test_a_publication_that_begins_anew_is_another_one(tmp_path: Path) -> None:
    published(tmp_path / "pub", 3)
    subscriber = bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")
    subscriber.pull()
    shutil.rmtree(tmp_path / "pub")
    model = weights(9)
    for version in (1, 2, 3):
        model = stepped(model, version)
        bcp.publish(model, tmp_path / "pub", version)
    assert subscriber.pull().anchor == 1
    assert_folder(tmp_path / "engine", model)


# -- refusals ----------------------------------------------------------------------------------------


def test_sources_that_cannot_be_published(tmp_path: Path) -> None:
    for source, words in [
        ({}, "no tensors"),
        ({"a": 1}, "no tensor; pass a state_dict"),
        ({"a": torch.ones(2, device="meta")}, "no bytes to publish"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, "no dtype complex128"),
        ({"a": torch.ones(2), "b": torch.ones(3)}, "to both"),
    ]:
        with pytest.raises(bcp.InputError, match=words):
            bcp.publish(source, tmp_path / "pub", 1, rename={"b": "a"})
    with pytest.raises(bcp.NotACheckpointError):
        bcp.publish(tmp_path / "nothing", tmp_path / "pub", 1)
    with pytest.raises(bcp.InputError, match="encoding='add'"):
        bcp.publish(weights(), tmp_path / "pub", 1, encoding="add")
    with pytest.raises(TypeError, match="no keyword 'chache'"):
        bcp.publish(weights(), tmp_path / "pub", 1, chache="x")  # type: ignore[call-arg]
    assert not (tmp_path / "pub").exists()
    with pytest.raises(bcp.NotACheckpointError, match="no published version"):
        bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull()


def test_values_of_a_module_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: object) -> None:
            pass

    with pytest.raises(bcp.InputError, match=r"'_extra_state', which is no tensor; pass a state_dict"):
        bcp.publish(Counting(2, 2), tmp_path / "pub", 1)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    encoding._zstandard.cache_clear()
    with pytest.raises(bcp.MissingExtraError, match=r"pip install 'bcp-checkpoint\[publish\]'"):
        bcp.publish(weights(), tmp_path / "pub", 1)
    with pytest.raises(bcp.MissingExtraError, match="zstandard"):
        bcp.Subscriber(tmp_path / "pub", tmp_path / "engine")


@pytest.mark.anyio
async def test_pulls_of_one_folder_take_turns(tmp_path: Path, anyio_backend: str) -> None:
    del anyio_backend
    await bcp.apublish(weights(), tmp_path / "pub", 1)
    results: list[bcp.PullResult] = []

    async def pull() -> None:
        results.append(await bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").apull())

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(pull)
    assert sorted(result.anchor for result in results) == [0, 0, 1]
    assert_folder(tmp_path / "engine", weights())


def test_live_tensors_of_any_layout(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    live = {
        "columns": base.t(),
        "part": base[1:3, ::2],
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "eighth": torch.ones(5).to(torch.float8_e4m3fn),
    }
    bcp.publish(live, tmp_path / "pub", 1)
    live["columns"] = (base + 1).t()
    live["flags"] = torch.tensor([True, True])
    assert bcp.publish(live, tmp_path / "pub", 2).changed == 2
    bcp.Subscriber(tmp_path / "pub", tmp_path / "engine").pull()
    found = bcp.Checkpoint(tmp_path / "engine")
    for name, value in live.items():
        assert raw(found.read(name)) == raw(value.detach()), name
        assert found.read(name).dtype == value.dtype
    assert [(patch.name, len(patch.indices)) for patch in bcp.Subscriber(tmp_path / "pub", "x").patches(2)] == [
        ("columns", 24),
        ("flags", 1),
    ]


def test_the_index_has_what_readers_of_sglang_ask_for(tmp_path: Path) -> None:
    published(tmp_path / "pub", 2)
    anchor, delta = (
        json.loads((tmp_path / "pub" / f"weight_v00000{version}" / INDEX).read_text()) for version in (1, 2)
    )
    assert "delta_encoding" not in anchor["metadata"]
    assert delta["metadata"] == {
        "version": "000002",
        "base_version": "000001",
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
        "total_size": delta["metadata"]["total_size"],
    }
