"""One training that moves between DeepSpeed, FSDP2 and DDP, again and again, in the same processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from any_to_any import How, Task, data_parallel, goes_on, train
from exact import trained
from fsdp1 import Layout
from logical import differences, logical
from ranks import Ranks

import bcp

pytestmark = pytest.mark.dist

FSDP2, DDP = Layout("fsdp2"), Layout("ddp")
CHAINS: list[list[How]] = [
    ["z1/fp32", FSDP2, "z2/fp32", DDP, "z3/fp32", FSDP2, DDP, "z1/fp32"],
    [FSDP2, "z3/fp32", "z1/fp32", DDP, "z2/fp32", "z3/fp32", DDP, FSDP2],
]


@pytest.mark.long
@pytest.mark.parametrize("chain", CHAINS, ids=["from ZeRO-1", "from FSDP2"])
def test_every_hop_of_a_chain_is_exact(deepspeed4: Ranks, tmp_path: Path, chain: list[How]) -> None:
    """Each hop is loaded into other weights, saved again, trained for a step, and saved for the next hop."""
    first, *hops = chain
    path = tmp_path / "first"
    deepspeed4.run(train, path, first)
    twin = trained(2, data_parallel(first))
    assert not differences(logical(path), twin.state())
    for number, how in enumerate(hops):
        goes_on(deepspeed4, path, tmp_path / str(number), twin, how, Task(number=2 + number))
        path = tmp_path / str(number) / "stepped"


def test_masters_survive_a_chain_of_16_and_32_bits(deepspeed4: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "first"
    deepspeed4.run(train, path, "z1/bf16")
    twin = trained(2, 4, dtype=torch.bfloat16)
    hops: list[How] = [FSDP2, "z3/bf16", DDP, "z2/bf16"]
    for number, how in enumerate(hops):
        task = Task(number=2 + number, options=bcp.LoadOptions(cast=True))
        goes_on(deepspeed4, path, tmp_path / str(number), twin, how, task)
        path = tmp_path / str(number) / "stepped"
