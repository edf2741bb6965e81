"""Checkpoints in Google Cloud Storage."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import pytest
import torch
from samples import sample
from servers.gcs import BUCKET

import bcp

if TYPE_CHECKING:
    from servers.gcs_fixtures import Gcs

pytest_plugins = ["servers.gcs_fixtures"]
pytestmark = pytest.mark.anyio
MIB = 1 << 20
ZLIB = bcp.extend.Codec("zlib", encode=lambda data: zlib.compress(data, 1), decode=zlib.decompress)
FAULTS = (
    {"match": ".", "rate": 0.05, "status": 503},
    {"match": ".", "rate": 0.02, "drop": "before"},
    {"match": ".", "rate": 0.02, "drop": "after"},
    {"match": "alt=media", "rate": 0.05, "cut": 1000},
)


def states(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer{number}": torch.randn(1 << 20, generator=generator) for number in range(5)}
    return {"model": {**tensors, "small": torch.randn(7, generator=generator)}, "extra_states": {"step": seed}}


def is_same(one: dict[str, object], other: dict[str, object]) -> bool:
    tensors, others = one["model"], other["model"]
    assert isinstance(tensors, dict)
    assert isinstance(others, dict)
    return all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("faults", "codecs"),
    sample(itertools.product([(), FAULTS], [(), (ZLIB,)]), ((), ()), (FAULTS, (ZLIB,))),
    ids=["ordinary-plain", "ordinary-zlib", "faults-plain", "faults-zlib"],
)
async def test_a_checkpoint_comes_back(
    gcs: Gcs, codecs: Sequence[bcp.extend.Codec], faults: tuple[dict[str, object], ...]
) -> None:
    gcs.server.faults(*faults)
    options = bcp.SaveOptions(codecs=codecs, part_bytes=4 * MIB)
    pending = await bcp.asave(gcs(), states(1), async_checkpoint=True, options=options)
    await pending
    target = states(2)
    await bcp.aload(gcs(), target, options=bcp.LoadOptions(codecs=codecs))
    assert is_same(target, states(1))
    await bcp.asave(gcs(), states(3), options=bcp.SaveOptions(codecs=codecs, part_bytes=4 * MIB, overwrite=True))
    await bcp.aload(gcs(), target, options=bcp.LoadOptions(codecs=codecs))
    assert is_same(target, states(3))
    gcs.server.faults()  # the test's own requests are made once
    assert not [name for name in await gcs.names() if "bcp-part" in name]


async def test_by_url(gcs: Gcs) -> None:
    settings = {"token": "anon", "endpoint_url": gcs.server.url}
    url, target = f"gs://{BUCKET}/{gcs.root}/step-1", states(2)

    def work() -> None:
        bcp.save(url, states(1), options=bcp.SaveOptions(storage_options=settings))
        bcp.load(url, target, options=bcp.LoadOptions(storage_options=settings))

    await anyio.to_thread.run_sync(work)
    assert is_same(target, states(1))
