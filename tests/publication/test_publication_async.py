"""Publications in the background, and the cache of their base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import followed, stepped, weights

import bcp


def raw(model: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in model.items()}


def test_tensors_may_change_once_the_call_returns(tmp_path: Path) -> None:
    model = weights()
    expected = raw(model)
    pending = bcp.publish_async(model, tmp_path / "pub", 1)
    for value in model.values():
        value.zero_()
    assert pending.wait().is_anchor
    assert followed(tmp_path / "pub", 1) == expected


def test_a_step_of_the_optimizer_waits_for_the_copy(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.5) for part in model]
    expected = raw({name: value.clone() for name, value in model.state_dict().items()})
    pending = bcp.publish_async(model, tmp_path / "pub", 1, optimizer=optimizers)
    model(torch.randn(3, 6)).sum().backward()  # changes buffers
    for optimizer in optimizers:
        optimizer.step()
    pending.wait()
    assert followed(tmp_path / "pub", 1) == expected
    assert raw(model.state_dict()) != expected


def test_a_checkpoint_in_the_background(tmp_path: Path) -> None:
    bcp.save(tmp_path / "ckpt", {"model": weights()})
    assert bcp.publish_async(tmp_path / "ckpt", tmp_path / "pub", 1).wait().version == 1
    assert followed(tmp_path / "pub", 1) == raw(weights())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(bcp.InputError, match="the source is a checkpoint"):
        bcp.publish_async(tmp_path / "ckpt", tmp_path / "pub", 2, optimizer=optimizer)


def test_errors_come_from_the_call_or_from_the_handle(tmp_path: Path) -> None:
    with pytest.raises(bcp.InputError, match="encoding='add'"):
        bcp.publish_async(weights(), tmp_path / "pub", 1, encoding="add")
    bcp.publish(weights(), tmp_path / "pub", 1)
    with pytest.raises(bcp.ExistsError, match="has version 1 already"):
        bcp.publish_async(weights(), tmp_path / "pub", 1).wait()


@pytest.mark.parametrize("what", ["flipped", "cut", "gone", "others"])
def test_a_cache_is_not_trusted(tmp_path: Path, what: str) -> None:
    """Files that are damaged are not used, and files of others are left."""
    model, cache = weights(), tmp_path / "cache"
    bcp.publish(model, tmp_path / "pub", 1, cache=cache)
    files = sorted(cache.iterdir())
    assert len(files) == len(model)
    (cache / "notes.txt").write_text("mine")
    for path in files:
        if what == "gone":
            path.unlink()
        elif what != "others":
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data if what == "flipped" else data[:-1])
    for version in (2, 3, 4):
        model = stepped(model, version)
        assert bcp.publish(model, tmp_path / "pub", version, cache=cache).has_delta
        assert followed(tmp_path / "pub", version) == raw(model)
    assert (cache / "notes.txt").read_text() == "mine"
    assert len(list(cache.iterdir())) <= 2 * len(model) + 1


def test_a_cache_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(bcp.StorageError, match=r"cannot be a publisher's cache.*pass another cache="):
        bcp.publish(weights(), tmp_path / "pub", 1, cache=tmp_path / "file")
    assert not list(tmp_path.rglob("*.safetensors"))
