"""A sample of ``benchmarks.chaos_tiers``, and its parts: who judges lives has to see what is wrong with them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import Ranks
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- the usual name

from bcp.format.metadata import receipt_key
from bcp.tiers.notes import Mark
from benchmarks.chaos import ROOT
from benchmarks.chaos_tiers.memories import Marked, flip
from benchmarks.chaos_tiers.network import NAMESPACES, Network
from benchmarks.chaos_tiers.plan import ENDS, MEANWHILE, plan
from benchmarks.chaos_tiers.store import Store
from benchmarks.chaos_tiers.training import MOMENTUM, RATE, SHAPES, Layout, difference, make_states, train, truth

STEPS = 7
AGENTS = {"agent", "agent's child", "agents"}


def test_a_seed_names_its_kills_and_all_ends_come_equally_often() -> None:
    lives = plan(5, 200, 20)
    assert lives == plan(5, 200, 20) != plan(6, 200, 20)
    assert sum(life.kills for life in lives) == 200
    assert sum(life.by_torchrun for life in lives) == 20
    ends = Counter(life.end for life in lives)
    assert {*ends} == {*ENDS}
    assert max(ends.values()) - min(ends.values()) <= 1
    others = Counter(life.meanwhile for life in lives)
    assert {*others} == {*MEANWHILE, None}
    assert sum(others[each] for each in AGENTS) == 200 - len(lives)


def trained(layout: Layout) -> tuple[str, str, str]:
    """Return what is wrong with a training, with one in which an element differs, and with one of another step."""
    states = make_states(layout, 2)
    for step in range(1, STEPS + 1):
        train(states, step)
    right, other_step = difference(states, STEPS), difference(states, STEPS - 1)
    weight = states["model"][0].weight
    local = weight.detach() if layout == "replicas" else weight.detach().to_local()
    local.view(torch.int32)[-1, -1] ^= 1
    return right, difference(states, STEPS), other_step


@pytest.mark.dist
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "replicas"])
def test_each_layout_has_the_bits_of_the_truth(ranks4: Ranks, layout: Layout) -> None:
    for right, damaged, other_step in ranks4.run(trained, layout):
        assert not right
        assert damaged == "0.weight has other values"
        assert other_step


def test_the_truth_is_what_torch_computes_from_a_loss() -> None:
    """The gradient of a sum of products with constants is these constants."""
    name = "1.weight"
    value, momentum = truth(STEPS)[name]
    before = [torch.from_numpy(truth(step)[name][1]) for step in range(STEPS + 1)]
    parameter = nn.Parameter(torch.from_numpy(truth(0)[name][0]))
    optimizer = torch.optim.SGD([parameter], lr=RATE, momentum=MOMENTUM)
    for step in range(1, STEPS + 1):
        gradient = before[step] - MOMENTUM * before[step - 1]
        optimizer.zero_grad()
        F.linear(parameter.reshape(1, -1), gradient.reshape(1, -1)).sum().backward()
        optimizer.step()
    assert np.array_equal(parameter.detach().numpy(), value)
    assert np.array_equal(optimizer.state[parameter]["momentum_buffer"].numpy(), momentum)
    assert value.shape == SHAPES[name]


def test_one_bit_flips_in_a_file_that_was_digested(tmp_path: Path) -> None:
    found = []
    for rank, step in ((0, 3), (1, 3), (2, 4)):
        mark = Mark(f"{step:016x}", rank)
        for key in (f"model/{rank:05d}-{mark.operation}.safetensors", receipt_key(rank, mark.operation)):
            if key.startswith("model") or rank == 1:  # the newest step was not digested
                (tmp_path / key).parent.mkdir(exist_ok=True)
                (tmp_path / key).write_bytes(bytes(100))
        found.append(Marked(mark, step, tmp_path))
    drawn = random.Random(1)  # noqa: S311 -- no secret
    flipped = flip(found, drawn)
    assert flipped == found[1]
    bits = {
        path.name[:5]: sum(byte.bit_count() for byte in path.read_bytes()) for path in (tmp_path / "model").iterdir()
    }
    assert bits == {"00000": 0, "00001": 1, "00002": 0}
    assert flip([], drawn) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts are root's")
def test_hosts_have_networks_of_their_own_and_leave_nothing() -> None:
    with Network(2) as network:
        code = "import socket, sys; s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[0])"
        command = [*network.command(1), sys.executable, "-c", code]
        mine = subprocess.run([*command, network.address(1)], capture_output=True, text=True, check=True)  # noqa: S603 -- ours
        assert mine.stdout.strip() == network.address(1)
        assert subprocess.run([*command, network.address(0)], capture_output=True, check=False).returncode  # noqa: S603 -- same
        names = {path.name for path in NAMESPACES.iterdir()}
        assert {*network.hosts} <= names
    assert not {*network.hosts} & {path.name for path in NAMESPACES.iterdir()}


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts are root's")
def test_a_silent_storage_lets_nobody_write_until_it_is_thawed(tmp_path: Path) -> None:
    code = "import sys; open(sys.argv[1], 'w').write('x'); print('written', flush=True)"
    with Store(tmp_path / "store") as store:
        (store.folder / "before").write_text("x")
        store.freeze()
        command = [sys.executable, "-c", code, str(store.folder / "after")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:  # noqa: S603 -- ours
            assert (store.folder / "before").read_text() == "x"
            store.thaw()
            assert writer.communicate()[0] == b"written\n"
        assert (store.folder / "after").read_text() == "x"
    assert not [*store.folder.iterdir()]


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "torchrun"), [(3, 0), pytest.param(12, 1, marks=pytest.mark.kills)], ids=["few", "more"]
)
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and mounts are root's")
def test_a_job_on_four_hosts_loses_no_more_than_the_table_says(kills: int, torchrun: int, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.chaos_tiers", "--kills", str(kills), "--torchrun", str(torchrun)]
    command += ["--seed", "7", "--json", str(figures), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603 -- our own
    assert done.returncode == 0, done.stdout + done.stderr
    values = {figure["name"]: figure["value"] for figure in json.loads(figures.read_text())}
    assert values["kills"] == kills
