"""Ranks that are left when others have died save what they hold together, and the next life goes on from it."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import surviving_job
import torch
from agents import agent, until
from ranks import Ranks, ended, forkserver, meeting_place
from samples import sample
from test_run_tiers_ranks import kill_agents
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import bcp
from bcp.errors import BcpError, CoverageError, InputError, PeerError
from bcp.format.metadata import METADATA_KEY
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import COMMITTED

WIDTH = 24
PATIENCE = 240.0
pytestmark = pytest.mark.dist


def make_states(kind: str) -> dict[str, Any]:
    """Make plain replicas, HSDP-like DTensors on a mesh of 2 x 2, or fully sharded ones."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for module in model:
            for name, weight in [*module.named_parameters()]:
                placed = distribute_tensor(weight.detach(), mesh, [Replicate(), Shard(0)])
                module.register_parameter(name, nn.Parameter(placed))
    if kind == "sharded":
        fully_shard(model)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "extra_states": {"step": 0},
    }


def train(states: dict[str, Any], step: int) -> None:
    """Do a step with gradients that all ranks know, so that no rank needs another one."""
    states["extra_states"]["step"] = step  # before the optimizer: an error in between must not show
    for number, weight in enumerate(states["model"].parameters()):
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        gradient = torch.full_like(local, step + number / 8)
        if isinstance(weight, DTensor):
            mesh, placements = weight.device_mesh, weight.placements
            gradient = DTensor.from_local(gradient, mesh, placements, shape=weight.shape, stride=weight.stride())
        weight.grad = gradient
    states["optimizer"].step()


def values(states: dict[str, Any]) -> list[torch.Tensor]:
    """Return weights and momenta, whole: torch's own gather."""
    weights = [*states["model"].parameters()]
    momenta = [states["optimizer"].state[weight]["momentum_buffer"] for weight in weights]
    return [each.full_tensor() if isinstance(each, DTensor) else each.detach().clone() for each in (*weights, *momenta)]


def begun(root: Path, kind: str, node: int) -> tuple[bcp.Run, dict[str, Any], int]:
    """Begin a life of the run on a host; return its first step, too, and check the states that it goes on from."""
    states = make_states(kind)
    tiers = bcp.Tiers(folder=root / f"node-{node}", node=f"n{node}", agent="external", survivors=True)
    run = bcp.Run(root / "run", states, save=2, durable=1000, tiers=tiers)
    step = run.resume()
    assert states["extra_states"]["step"] == step
    if step:
        expected = make_states(kind)
        for earlier in range(1, step + 1):
            train(expected, earlier)
        assert all(map(torch.equal, values(states), values(expected)))
    return run, states, step


def leave(run: bcp.Run) -> None:
    """End a run as a process that dies by an exception."""
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError


def lived(
    root: Path, kind: str, left: tuple[int, ...], steps: int = 3, wrong: Callable[..., None] | None = None
) -> tuple[str, str] | bcp.Survivors | None:
    """Train some steps; then let all ranks die but those that are left. Return what these make of it, or the error."""
    rank = dist.get_rank()
    run, states, first = begun(root, kind, rank // 2)
    for step in range(first + 1, first + steps + 1):
        train(states, step)
        run.maybe_save(step)
    states["extra_states"]["step"] = -1  # by a step that does not end
    torch.rand(7)
    dist.barrier()
    if rank not in left:
        leave(run)
        return None
    states["extra_states"]["root"] = str(root)
    if wrong is not None:
        wrong(run, states, rank)
    try:
        return run.save_survivors(patience=PATIENCE, end_groups=False)  # those of the pool
    except BcpError as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    finally:
        leave(run)


def resumed(root: Path, kind: str, nodes: tuple[int, ...]) -> tuple[int, int]:
    """Begin the next life; return its step, and of how many memories it is."""
    run, _, step = begun(root, kind, nodes[dist.get_rank()])
    hosts = run.resumed.hosts
    dist.barrier()
    leave(run)
    return step, hosts


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Return a place for a job on two hosts, each with its agent."""
    with ExitStack() as stack:
        for node in (0, 1):
            stack.enter_context(agent(tmp_path / f"node-{node}", tmp_path / "run", f"n{node}"))
        yield tmp_path


def take_away(path: Path) -> None:
    """Remove a checkpoint; its agent may just remove its own record of it."""

    def is_gone() -> bool:
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    until(is_gone, "it is gone")


def committed(root: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob(f"run/step-*/{METADATA_KEY}"))


@pytest.mark.parametrize(
    ("kind", "left"), [("plain", (1, 2, 3)), ("plain", (2,)), ("hybrid", (0, 2, 3)), ("hybrid", (1, 2))]
)
def test_survivors_save_alone(kind: str, left: tuple[int, ...], ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    """The newest snapshot is of step 2. The survivors save step 3, on which three ranks go on, and then four."""
    told = ranks4.run(lived, root, kind, left)
    path = str(root / "run" / "step-00000003")
    assert told == [bcp.Survivors(3, left, path) if rank in left else None for rank in range(4)]
    assert str(told[left[0]]) == f"ranks {', '.join(map(str, left))} have saved step 3 in memory"
    until(lambda: committed(root) == [3], "the agents make it durable")
    operation = bcp.Checkpoint(path).operation
    folders = [NodeFolder(root / f"node-{node}") for node in {rank // 2 for rank in left}]
    until(lambda: all(each.ended().get(operation) == COMMITTED for each in folders), "all agents know of it")
    take_away(root / "run" / "step-00000003")
    hosts = len({rank // 2 for rank in left})
    assert ranks3.run(resumed, root, "plain", (0, 1, 0)) == [(3, hosts)] * 3
    assert 3 not in committed(root), "an agent that has no files of step 3 may store step 2"
    assert ranks4.run(resumed, root, kind, (0, 0, 1, 1)) == [(3, hosts)] * 4


def test_shards_that_nobody_holds(ranks4: Ranks, root: Path) -> None:
    """Ranks 0 and 2 of HSDP hold the same half. The words have the numbers of the job."""
    told = ranks4.run(lived, root, "hybrid", (0, 2))
    assert told[1] is told[3] is None
    assert told[0] == told[2]
    kind, words = told[0]
    assert kind == CoverageError.__name__
    assert words.startswith("ranks 0, 2 save step 3 alone, without ranks 1, 3: model tensor '0.bias'")
    assert f"no rank holds the block [{WIDTH // 2}:{WIDTH}]; other parts are held by ranks 0, 2" in words
    assert words.endswith("the next start goes on from the newest snapshot before")
    assert ranks4.run(resumed, root, "hybrid", (0, 0, 1, 1)) == [(2, 2)] * 4


def test_fully_sharded_states(ranks4: Ranks, root: Path) -> None:
    told = ranks4.run(lived, root, "sharded", (1, 2, 3))
    for kind, words in told[1:]:
        assert kind == CoverageError.__name__
        assert f"no rank holds the block [0:{WIDTH // 4}]; other parts are held by ranks 1, 2, 3" in words
    assert ranks4.run(resumed, root, "sharded", (0, 0, 1, 1)) == [(2, 2)] * 4


def one_more_step(run: bcp.Run, states: dict[str, Any], rank: int) -> None:
    if rank == 3:
        train(states, 4)
        run._step_ended(4)  # maybe_save would wait for the other ranks


def test_different_steps(ranks4: Ranks, root: Path) -> None:
    told = ranks4.run(lived, root, "plain", (1, 2, 3), 3, one_more_step)
    for kind, words in told[1:]:
        assert kind == InputError.__name__
        assert "ended different steps: step 3 on ranks 1, 2; step 4 on ranks 3" in words
    assert ranks4.run(resumed, root, "plain", (0, 0, 1, 1)) == [(2, 2)] * 4


class TornError(Exception):
    """Ends an optimizer step in its middle."""


def tear(_: bcp.Run, states: dict[str, Any], rank: int) -> None:
    """Let rank 2 fail when the first of its weights is written."""
    if rank == 2:
        optimizer = states["optimizer"]
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": [None], "lr": 0.1})
        with pytest.raises(AttributeError):
            train(states, 4)


def write(_: bcp.Run, states: dict[str, Any], rank: int) -> None:
    if rank == 2:
        with torch.no_grad():
            states["model"][1].bias.add_(1.0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (tear, "1 optimizer steps have begun since the run was told that step 3 has ended"),
        (write, "'1.bias' of the model was written to 1 times since step 3 has ended"),
    ],
)
def test_states_of_no_step(wrong: Callable[..., None], words: str, ranks4: Ranks, root: Path) -> None:
    _, first, torn, last = ranks4.run(lived, root, "plain", (1, 2, 3), 3, wrong)
    assert torn[0] == InputError.__name__
    assert words in torn[1]
    assert first == last
    assert first[0] == PeerError.__name__
    assert f"rank 2 cannot save: {words}" in first[1]
    assert ranks4.run(resumed, root, "plain", (0, 0, 1, 1)) == [(2, 2)] * 4


def test_a_step_that_is_in_memory_is_not_saved_again(ranks4: Ranks, root: Path) -> None:
    """The last save of all ranks is that of the last step, and its files are all there."""
    left = (0, 3)
    told = ranks4.run(lived, root, "plain", left, 2)
    assert told == [bcp.Survivors(2, left, "") if rank in left else None for rank in range(4)]
    assert str(told[0]) == "ranks 0, 3 need not save step 2 again"
    assert ranks4.run(resumed, root, "plain", (0, 0, 1, 1)) == [(2, 2)] * 4


def lose_the_other_host(_: bcp.Run, states: dict[str, Any], rank: int) -> None:
    """Take the snapshots of host 0 away once its ranks have gone; its agent goes on."""
    folder = Path(states["extra_states"]["root"]) / "node-0"
    if rank == 2:
        until(lambda: not NodeFolder(folder).members(), "its ranks have gone")
        for path in folder.glob("intents/*"):
            path.unlink()


def test_a_step_whose_files_a_lost_host_had_is_saved_again(ranks4: Ranks, ranks3: Ranks, root: Path) -> None:
    left = (2, 3)
    told = ranks4.run(lived, root, "plain", left, 2, lose_the_other_host)
    assert told[2:] == [bcp.Survivors(2, left, str(root / "run" / "step-00000002"))] * 2
    assert ranks3.run(resumed, root, "plain", (1, 1, 1)) == [(2, 1)] * 3


class Reader:
    """A sharded state that nobody asks."""

    reader, readers = 0, 1
    shared_state = unit_states = wanted_units = load_units = prepare = print


def unwatched(root: Path, states: dict[str, Any]) -> str:
    tiers = bcp.Tiers(folder=root / "node-0", node="n0", agent="external", survivors=True)
    run = bcp.Run(root / "run", states, save=2, tiers=tiers)
    with pytest.raises(InputError) as caught:
        run.resume()
    return str(caught.value)


def test_states_that_cannot_be_watched(root: Path) -> None:
    """Whoever asks for survivors learns at the resumption that his states do not allow it."""
    weight = torch.nn.Linear(2, 2).weight
    captured = torch.optim.Adam([weight], capturable=True)
    assert "capturable=True" in unwatched(root, {"model": {"w": weight}, "optimizer": captured})
    assert "pass optimizers of torch" in unwatched(root, {"model": {"w": weight}, "optimizer": {"m": weight.detach()}})
    words = unwatched(root, {"model": {"w": weight}, "dataloader": {"train": Reader()}})
    assert "the sharded dataloader 'train'" in words


def test_a_run_that_has_not_asked_for_it(tmp_path: Path) -> None:
    tiers = bcp.Tiers(folder=tmp_path / "memory", agent="external")
    run = bcp.Run(tmp_path / "run", {"model": nn.Linear(2, 2)}, save=1, tiers=tiers)
    run.resume()
    with pytest.raises(InputError, match=r"pass tiers=Tiers\(survivors=True\)"):
        run.save_survivors()
    leave(run)
    with pytest.raises(InputError, match="survivors=1"):
        bcp.Tiers(survivors=1)  # type: ignore[arg-type]  # the wrong type


def life(server: dist.TCPStore, root: Path, nodes: tuple[int, ...], steps: int, victim: int = -1) -> list[Any]:
    """Run a job on hosts up to a step; return what its ranks say, None for one that was killed."""
    size, says = len(nodes), root / f"life-{len([*root.glob('life-*')])}"
    says.mkdir()
    processes = [
        forkserver().Process(target=surviving_job.main, args=(rank, size, server.port, root, node, steps, victim, says))
        for rank, node in enumerate(nodes)
    ]
    for process in processes:
        process.start()
    codes = ended(processes, PATIENCE)
    died = [-signal.SIGKILL if rank == victim else 1 for rank in range(size)]
    assert codes == ([0] * size if victim < 0 else died)
    return [json.loads((says / str(rank)).read_text()) if rank != victim else None for rank in range(size)]


@pytest.mark.parametrize("victim", sample([0, 2], 0))
def test_a_job_loses_no_step_with_a_rank(victim: int, tmp_path: Path) -> None:
    """One of four ranks is killed in step 7, behind a snapshot of step 4. The next life goes on behind step 6."""
    server = meeting_place()
    try:
        first = life(server, tmp_path, (0, 0, 1, 1), 7, victim)
        left = [rank for rank in range(4) if rank != victim]
        words = f"ranks {', '.join(map(str, left))} have saved step 6 in memory"
        assert [first[rank]["survivors"] for rank in left] == [words] * 3
        second = life(server, tmp_path, (1, 0, 1), 10)
    finally:
        kill_agents(tmp_path)
    assert [(each["resumed"], each["hosts"]) for each in second] == [(6, 2)] * 3
    for told, steps in ((first, 6), (second, 10)):
        expected = [weight.tolist() for weight in surviving_job.oracle(steps)]
        assert all(each["weights"] == expected for each in told if each is not None)
    assert [each["drawn"]["7"] for each in second] == [first[rank]["drawn"]["7"] for rank in left], "random numbers"
