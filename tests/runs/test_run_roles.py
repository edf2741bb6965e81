"""A run of several roles: a step counts once all of them have committed it, in one launch."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from servers.s3 import S3Server
from torch import distributed as dist

import bcp
from bcp.coordinators.tree.coordinator import GrpcCoordinator
from bcp.policies import AnyKept, Best, EveryKSteps, EverySeconds
from bcp.runs.launches import LAUNCHES_KEY, Launch

pytest_plugins = ["servers.s3_fixtures"]
NAMES = ("actor", "critic")
_numbers = itertools.count()


class World:
    """One role of a launch. Its weights say in which launch and at which step they were saved."""

    def __init__(self, path: Path | str, name: str, launch: str, of: Sequence[str] = NAMES, **options: Any) -> None:
        self.model = torch.zeros(2, dtype=torch.int64)
        self.launch = launch
        settings = {"save": None, "keep": 10, "preemption": bcp.Preemption(signals=()), **options}
        self.run = bcp.Run(path, {"model": {"w": self.model}}, role=bcp.Role(name, of=of, launch=launch), **settings)

    def save(self, step: int, metrics: dict[str, float] | None = None) -> None:
        """Save a step, and wait until the older ones are deleted."""
        self.model.copy_(torch.tensor([int(self.launch), step]))
        pending = self.run.save(step, metrics)
        assert pending is not None
        pending.wait()
        self.run.pin(step, pinned=False)  # waits for the housekeeping


def launched(path: Path | str, names: Sequence[str] = NAMES, **options: Any) -> list[World]:
    """Begin a launch of its own."""
    number = str(next(_numbers))
    return [World(path, name, number, **options) for name in names]


def saved(path: Path, steps: dict[str, Sequence[int]]) -> None:
    """Let each role save its own steps, in a new launch, and end."""
    for world, name in zip(launched(path), NAMES, strict=True):
        with world.run as run:
            run.resume()
            for step in steps[name]:
                world.save(step)


def resumed(path: Path, names: Sequence[str] = NAMES, **goal: Any) -> list[list[int]]:
    """Resume all roles in this order in a new launch; return their weights."""
    weights = []
    for world in launched(path, names):
        with world.run as run:
            assert run.resume(**goal) == world.model[1]
            weights.append(world.model.tolist())
    return weights


def steps_of(path: Path, name: str) -> set[int]:
    return {info.step for info in bcp.Run(path / name, {}).list() if info.is_committed}


def damage(path: Path) -> None:
    """Change the last bytes of a checkpoint's model."""
    (file,) = (path / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-8:] = bytes(each ^ 0xFF for each in data[-8:])
    file.write_bytes(data)


# -- whole steps -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("actor", "critic"), ("critic", "actor")])
@pytest.mark.parametrize("ahead", NAMES)
def test_a_step_that_one_role_lacks_does_not_count(tmp_path: Path, names: Sequence[str], ahead: str) -> None:
    saved(tmp_path, {name: [2, 4] if name == ahead else [2] for name in NAMES})
    for name in NAMES:
        assert bcp.latest(tmp_path, role=name) == f"{tmp_path}/{name}/step-00000002"
    first, second = resumed(tmp_path, names)
    assert first == second
    assert first[1] == 2


def test_a_new_run_has_no_whole_step(tmp_path: Path) -> None:
    with pytest.raises(bcp.InputError, match="no roles yet"):
        bcp.latest(tmp_path, role="actor")
    saved(tmp_path, {"actor": [2], "critic": []})
    assert bcp.latest(tmp_path, role="actor") is None
    assert resumed(tmp_path) == [[0, 0], [0, 0]]
    with pytest.raises(bcp.InputError, match="actor, critic"):
        bcp.latest(tmp_path, role="reward")


def test_the_first_role_decides_for_all(tmp_path: Path) -> None:
    saved(tmp_path, {"actor": [2, 4], "critic": [2]})
    actor, critic = launched(tmp_path)
    assert actor.run.resume() == 2
    commit = tmp_path / "critic" / "step-00000004"
    shutil.copytree(tmp_path / "actor" / "step-00000004", commit)  # as if a killed job's commit had come through now
    assert critic.run.resume() == 2
    assert critic.run.resumed.passed_over[0].reason == f"launch {critic.launch!r} goes on from step 2"
    for world in (actor, critic):
        world.run.close()


def test_steps_of_two_launches_make_no_whole(tmp_path: Path) -> None:
    saved(tmp_path, {"actor": [2, 4], "critic": [2]})
    actor, critic = launched(tmp_path)
    assert [actor.run.resume(), critic.run.resume()] == [2, 2]
    critic.save(4)  # the actor's step 4 is of the launch before
    assert bcp.latest(tmp_path, role="critic") == f"{tmp_path}/critic/step-00000002"
    for world in (actor, critic):
        world.run.close()
    first, second = resumed(tmp_path)
    assert first == second
    assert first[1] == 2


def test_on_s3(server: S3Server) -> None:
    place, options = f"{server.place()}/rl", server.options
    given = {"save_options": bcp.SaveOptions(storage_options=options), "keep": 1}
    given["load_options"] = bcp.LoadOptions(storage_options=options)
    for whole, steps in ((0, ([2, 4], [2])), (2, ([4], [4, 6])), (4, ([], []))):
        for world, own in zip(launched(place, **given), steps, strict=True):
            with world.run as run:
                assert run.resume() == whole
                for step in own:
                    world.save(step)
    assert bcp.latest(place, role="critic", storage_options=options) == f"{place}/critic/step-00000004"


def test_three_roles(tmp_path: Path) -> None:
    of = ("actor", "critic", "reward")
    worlds = launched(tmp_path, of, of=of)
    for world, steps in zip(worlds, ([2, 4, 6], [2, 4], [2, 4, 6]), strict=True):
        with world.run as run:
            run.resume()
            for step in steps:
                world.save(step)
    for world in launched(tmp_path, of[::-1], of=of):
        with world.run as run:
            assert run.resume() == 4


def test_roles_with_several_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    assert ranks4.run(two_worlds, tmp_path, "1") == [0, 0, 0, 0]
    assert ranks4.run(two_worlds, tmp_path, "2") == [4, 4, 4, 4]


def two_worlds(path: Path, launch: str) -> int:
    """Be one of two ranks of the actor, or of the critic, which is one save behind."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    name = NAMES[rank // 2]
    role = bcp.Role(name, of=NAMES, launch=launch)
    weights = torch.zeros(3)
    states = {"model": {f"w{rank % 2}": weights}}
    coordinator = GrpcCoordinator.over(groups[rank // 2])
    with bcp.Run(path, states, save=2, role=role, coordinator=coordinator) as run:
        step = run.resume()
        assert weights.tolist() == [step + rank] * 3 if step else [0.0] * 3
        for later in range(step + 1, step + (7 if name == "actor" else 6)):
            weights.fill_(later + rank)
            run.maybe_save(later)
    return step


# -- retention ---------------------------------------------------------------------------------------------


def test_retention_sees_whole_steps_only(tmp_path: Path) -> None:
    actor, critic = launched(tmp_path, keep=1)
    for world in (actor, critic):
        world.run.resume()
    for step in (2, 4, 6):
        actor.save(step)
    assert steps_of(tmp_path, "actor") == {2, 4, 6}  # none is whole
    critic.save(2)
    critic.save(4)
    assert steps_of(tmp_path, "critic") == {4}
    actor.save(8)
    assert steps_of(tmp_path, "actor") == {4, 6, 8}  # step 2 will never be whole again
    critic.save(6)
    critic.save(8)
    assert steps_of(tmp_path, "critic") == {8}
    actor.save(10)
    assert steps_of(tmp_path, "actor") == {8, 10}
    for world in (actor, critic):
        world.run.close()
    assert bcp.latest(tmp_path, role="critic") == f"{tmp_path}/critic/step-00000008"


def test_retention_of_one_role_alone(tmp_path: Path) -> None:
    (actor,) = launched(tmp_path, ["actor"], of=["actor"], keep=1)
    with actor.run as run:
        run.resume()
        for step in (2, 4, 6):
            actor.save(step)
    assert steps_of(tmp_path, "actor") == {6}


def test_pins_and_metrics_of_one_role_hold_for_all(tmp_path: Path) -> None:
    keep = AnyKept(1, Best("loss"))
    actor, critic = launched(tmp_path, keep=keep)
    for world in (actor, critic):
        world.run.resume()
    for step, loss in ((2, 0.5), (4, 0.1), (6, 0.3), (8, 0.4), (10, 0.6)):
        actor.save(step, {"loss": loss})
        if step == 2:
            actor.run.pin(2)
        critic.save(step)
    assert steps_of(tmp_path, "critic") == {2, 4, 10}
    assert critic.run.best() == f"{tmp_path}/critic/step-00000004"
    for world in (actor, critic):
        world.run.close()


def test_a_ledger_that_cannot_be_read_deletes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    actor, critic = launched(tmp_path, keep=1)
    for world in (actor, critic):
        world.run.resume()
        world.save(2)
    ledger = (tmp_path / "critic" / "run.json").read_bytes()
    (tmp_path / "critic" / "run.json").write_bytes(ledger.replace(b'"version": 1', b'"version": 99'))
    actor.save(4)
    assert steps_of(tmp_path, "actor") == {2, 4}
    assert "no checkpoint is deleted now" in caplog.text
    (tmp_path / "critic" / "run.json").write_bytes(ledger)
    for world in (actor, critic):
        world.run.close()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_saves_and_kills(tmp_path: Path, seed: int) -> None:
    """The newest whole step is the one that a list of all commits names; every resumption has equal weights."""
    chance = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (1,), generator=chance))

    commits: dict[str, dict[int, str]] = {name: {} for name in NAMES}
    for _ in range(4):
        whole = [step for step in commits["actor"] if commits["actor"][step] == commits["critic"].get(step)]
        newest, order = max(whole, default=0), NAMES if draw(2) else NAMES[::-1]
        worlds = dict(zip(order, launched(tmp_path, order, keep=AnyKept(1, EveryKSteps(6))), strict=True))
        expected = [int(commits["actor"][newest]), newest] if newest else [0, 0]
        step = dict.fromkeys(NAMES, newest)
        for world in worlds.values():
            assert world.run.resume() == newest
            assert world.model.tolist() == expected
        for _ in range(draw(8)):
            name = NAMES[draw(2)]
            step[name] += 2
            worlds[name].save(step[name])
            commits[name][step[name]] = worlds[name].launch
        for world in worlds.values():  # a killed job would leave the same: all of its saves are durable
            world.run.close()
    whole = [step for step in commits["actor"] if commits["actor"][step] == commits["critic"].get(step)]
    assert resumed(tmp_path)[0][1] == max(whole, default=0)


# -- damage and loss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("actor", "critic"), ("critic", "actor")])
def test_a_step_that_is_damaged_in_one_role_is_given_up_by_all(tmp_path: Path, names: Sequence[str]) -> None:
    saved(tmp_path, {name: [2, 4] for name in NAMES})
    damage(tmp_path / "critic" / "step-00000004")
    worlds = dict(zip(names, launched(tmp_path, names), strict=True))
    for name in names:
        if name == "actor":
            assert worlds[name].run.resume() == 4
        else:
            with pytest.raises(bcp.CorruptError):
                worlds[name].run.resume()
    for world in worlds.values():
        world.run.close()
    first, second = resumed(tmp_path, names)
    assert first == second
    assert first[1] == 2


def test_a_lost_folder_is_no_new_run(tmp_path: Path) -> None:
    saved(tmp_path, {name: [2] for name in NAMES})
    resumed(tmp_path)
    (tmp_path / "critic").rename(tmp_path / "away")
    for name in NAMES:
        (world,) = launched(tmp_path, [name])
        with pytest.raises(bcp.CorruptError, match=r"critic has resumed in launch .*, and .*/critic has no ledger now"):
            world.run.resume()
        world.run.close()
    (tmp_path / "away").rename(tmp_path / "critic")
    assert resumed(tmp_path)[0][1] == 2


def test_a_run_that_has_gone_on_does_not_begin_anew_by_itself(tmp_path: Path) -> None:
    saved(tmp_path, {name: [2] for name in NAMES})
    resumed(tmp_path)
    shutil.rmtree(tmp_path / "critic" / "step-00000002")
    (world,) = launched(tmp_path, ["actor"])
    with pytest.raises(bcp.CorruptError, match=r"no step of the run .* critic has no committed checkpoint of it"):
        world.run.resume()
    world.run.close()
    assert [weights[1] for weights in resumed(tmp_path, fresh=True)] == [0, 0]


def test_an_earlier_step_in_all_roles(tmp_path: Path) -> None:
    saved(tmp_path, {name: [2, 4, 6] for name in NAMES})
    assert [weights[1] for weights in resumed(tmp_path, step=4)] == [4, 4]
    actor, critic = launched(tmp_path)
    assert actor.run.resume(step=4) == 4
    with pytest.raises(bcp.InputError, match=r"critic calls resume\(\), and launch .* with resume\(step=4\)"):
        critic.run.resume()
    assert critic.run.resume(step=4) == 4
    for world in (actor, critic):
        world.save(5)
        world.run.close()
    assert resumed(tmp_path)[0][1] == 5
    (world,) = launched(tmp_path, ["actor"])
    shutil.rmtree(tmp_path / "critic" / "step-00000002")
    with pytest.raises(bcp.InputError, match="step 2: critic has no committed checkpoint of it"):
        world.run.resume(step=2)
    world.run.close()


def test_a_step_that_was_saved_beside_another_is_not_mixed_with_it(tmp_path: Path) -> None:
    """One role, and then the other one, has step 4 in two folders, of two launches. The older ones make a whole."""
    saved(tmp_path, {name: [2, 4] for name in NAMES})
    for name in NAMES:
        bcp.Run(tmp_path / name, {}).pin(4)
    old = resumed(tmp_path)
    for again in NAMES:
        worlds = dict(zip(NAMES, launched(tmp_path), strict=True))
        for world in worlds.values():
            world.run.resume(step=2)
        worlds[again].save(4)
        worlds[again].run.mark(4, "verified")  # else the mark "suspect" of its older folder counts
        for world in worlds.values():
            world.run.close()
        assert {path.name for path in (tmp_path / again).glob("step-*4")} == {"step-00000004", "step-000000004"}
        for names in (NAMES, NAMES[::-1]):
            assert bcp.latest(tmp_path, role=again) == f"{tmp_path}/{again}/step-00000004"
            assert resumed(tmp_path, names) == old


def test_the_chosen_step_is_that_of_all(tmp_path: Path) -> None:
    saved(tmp_path, {"actor": [2, 4], "critic": [2]})
    for world in launched(tmp_path):
        with world.run as run:
            assert run.choose({}) == 2
            assert run.resume() == 2


# -- one launch at a time -----------------------------------------------------------------------------------


def test_a_role_resumes_once_in_a_launch(tmp_path: Path) -> None:
    world = World(tmp_path, "actor", "1000")
    world.run.resume()
    again = World(tmp_path, "actor", "1000")
    with pytest.raises(bcp.RunTakenError, match="restart all roles with another launch="):
        again.run.resume()
    again.run.close()
    world.save(2)  # it still has its folder
    world.run.close()


def test_a_launch_that_was_followed_stops_writing(tmp_path: Path) -> None:
    old = World(tmp_path, "critic", "1001")
    old.run.resume()
    (actor,) = launched(tmp_path, ["actor"])
    actor.run.resume()
    with pytest.raises(bcp.RunTakenError, match="'1001'"):
        old.run.save(2).wait()  # type: ignore[union-attr]  # it has begun
    with pytest.raises(bcp.RunTakenError):
        old.run.close()
    late = World(tmp_path, "critic", "1001")
    with pytest.raises(bcp.RunTakenError, match="that no launch had before"):
        late.run.resume()
    late.run.close()
    actor.run.close()


def test_the_roles_of_a_run_stay(tmp_path: Path) -> None:
    saved(tmp_path, {name: [2] for name in NAMES})
    (world,) = launched(tmp_path, ["actor"], of=("actor", "critic", "reward"))
    with pytest.raises(bcp.InputError, match="has a run of the roles actor, critic"):
        world.run.resume()
    world.run.close()


def test_one_folder_has_one_kind_of_run(tmp_path: Path) -> None:
    saved(tmp_path, {name: [2] for name in NAMES})
    with pytest.raises(bcp.InputError, match="has a run of the roles actor, critic: pass role="):
        bcp.latest(tmp_path)
    with (
        bcp.Run(tmp_path, {"model": {"w": torch.zeros(2)}}) as run,
        pytest.raises(bcp.InputError, match="has a run of the roles actor, critic: pass role="),
    ):
        run.resume()
    assert not (tmp_path / "run.json").exists()
    with bcp.Run(tmp_path / "plain", {"model": {"w": torch.zeros(2)}}, save=1) as run:
        run.resume()
        run.maybe_save(1)
    (world,) = launched(tmp_path / "plain", ["actor"])
    with pytest.raises(bcp.InputError, match="has checkpoints of a run without roles"):
        world.run.resume()
    world.run.close()


@pytest.mark.parametrize(
    ("name", "of", "launch", "words"),
    [
        ("actor", ["critic"], "1", "name each role once"),
        ("actor", ["actor", "actor"], "1", "name each role once"),
        ("actor", "actor", "1", "pass a list"),
        ("../actor", ["../actor"], "1", "cannot name the folder"),
        ("step-10", ["step-10"], "1", "cannot name the folder"),
        ("model", ["model"], "1", "cannot name the folder"),
        ("a" * 129, ["a" * 129], "1", "128 are the most"),
        ("actor", ["actor"], "", "no id of a launch"),
        ("actor", ["actor"], 7, "no id of a launch"),
        ("actor", ["actor"], "x" * 129, "no id of a launch"),
    ],
)
def test_roles_that_cannot_be(name: str, of: Any, launch: Any, words: str) -> None:
    with pytest.raises(bcp.InputError, match=words):
        bcp.Role(name, of=of, launch=launch)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"save": EverySeconds(60)}, "reads a clock"),
        ({"save_options": bcp.SaveOptions(metadata={"bcp.launch": "x"})}, "leave it out"),
        ({"role": "actor"}, r"pass bcp.Role\('actor'"),
    ],
)
def test_arguments_that_fit_no_role(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    role = bcp.Role("actor", of=NAMES, launch="1")
    with pytest.raises(bcp.InputError, match=words):
        bcp.Run(tmp_path, {}, **{"role": role, **options})
    assert list(tmp_path.iterdir()) == []


# -- the file ------------------------------------------------------------------------------------------------


LAUNCH = Launch(roles=NAMES, id="7", step=4, saved="6", joined={"actor": "a1"}, newest=4, earlier=("5", "6"))


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (b'"step": 4', b'"step": -4', bcp.CorruptError),
        (b'"step": 4', b'"step": true', bcp.CorruptError),
        (b'"step": 4', b'"step": "4"', bcp.CorruptError),
        (b'"actor",', b'"../actor",', bcp.CorruptError),
        (b'"actor":', b'"..":', bcp.CorruptError),
        (b'"id": "7"', b'"id": 7', bcp.CorruptError),
        (b'"saved": "6"', b'"saved": 6', bcp.CorruptError),
        (b'"roles": [', b'"rolls": [', bcp.CorruptError),
        (b'"version": 1', b'"version": "1"', bcp.CorruptError),
        (b"{", b"", bcp.CorruptError),
        (b'"version": 1', b'"version": 2', bcp.FormatVersionError),
    ],
)
def test_a_file_that_is_not_sound(tmp_path: Path, old: bytes, new: bytes, error: type[Exception]) -> None:
    data = LAUNCH.to_bytes()
    assert Launch.from_bytes(data, "roles.json") == LAUNCH
    assert data.count(old) >= 1
    (tmp_path / LAUNCHES_KEY).write_bytes(data.replace(old, new, 1))
    with pytest.raises(error, match=r"roles\.json"):
        bcp.latest(tmp_path, role="actor")
    (world,) = launched(tmp_path, ["actor"])
    with pytest.raises(error, match=r"roles\.json"):
        world.run.resume()
    world.run.close()
