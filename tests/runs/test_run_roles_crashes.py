"""Roles that die between any two writes: all go on from one whole step, and the newest one is never deleted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import torch

import bcp
from bcp.backends import MemoryBackend, child, register
from bcp.errors import StorageError
from bcp.format.metadata import METADATA_KEY, decode_commit
from bcp.policies import AnyKept, EveryKSteps
from bcp.protocols import Buffer, ObjectInfo, PartWriter, Version

NAMES = ("actor", "critic")
_numbers = itertools.count(1)


class Life:
    """One process: it dies before one of its writes, and does nothing more."""

    def __init__(self, store: str, dies_at: int = -1) -> None:
        self.store, self.dies_at, self.writes = store, dies_at, 0
        self.dead = self.loses_answer = False
        self.before: Callable[[str], None] = lambda _key: None

    def look(self) -> None:
        if self.dead:
            raise StorageError("the process is dead")

    async def write(self, key: str) -> None:
        await asyncio.to_thread(self.before, key)
        self.dead = self.dead or self.writes == self.dies_at
        self.look()
        self.writes += 1


class Mortal:
    """The storage of one life."""

    def __init__(self, url: str, life: Life) -> None:
        self._life, whole = life, MemoryBackend(life.store)
        prefix = url.partition("://")[2]
        self._whole = child(whole, prefix)

    async def put(self, key: str, data: Buffer) -> None:
        await self._life.write(key)
        await self._whole.put(key, data)

    async def version(self, key: str) -> Version | None:
        self._life.look()
        return await self._whole.version(key)

    async def put_if(self, key: str, data: Buffer, expected: Version | None) -> Version | None:
        await self._life.write(key)
        made = await self._whole.put_if(key, data, expected)
        return None if self._life.loses_answer else made

    @asynccontextmanager
    async def open_write(self, key: str, nbytes: int | None = None) -> AsyncIterator[PartWriter]:
        self._life.look()
        async with self._whole.open_write(key, nbytes) as parts:
            yield parts
            await self._life.write(key)

    async def read_into(self, key: str, start: int, out: memoryview) -> None:
        self._life.look()
        await self._whole.read_into(key, start, out)

    async def get(self, key: str) -> Buffer:
        self._life.look()
        return await self._whole.get(key)

    async def list(self, prefix: str = "") -> Sequence[ObjectInfo]:
        self._life.look()
        return await self._whole.list(prefix)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._life.write(key)
            await self._whole.delete([key])

    async def aclose(self) -> None:
        await self._whole.aclose()


register("mortal", Mortal)


class World:
    """One role of a launch. Its weights say in which launch and at which step they were saved."""

    def __init__(self, life: Life, name: str, launch: str, **options: Any) -> None:
        self.life, self.name, self.launch = life, name, launch
        self.model = torch.zeros(2, dtype=torch.int64)
        given = {"life": life}
        settings = {"save": None, "keep": 1, "preemption": bcp.Preemption(signals=()), **options}
        self.run = bcp.Run(
            "mortal://rl",
            {"model": {"w": self.model}},
            role=bcp.Role(name, of=NAMES, launch=launch),
            save_options=bcp.SaveOptions(storage_options=given),
            load_options=bcp.LoadOptions(storage_options=given),
            **settings,
        )

    def resume(self, **goal: Any) -> list[int]:
        assert self.run.resume(**goal) == self.model[1]
        return self.model.tolist()

    def save(self, step: int) -> None:
        """Save a step, and wait until older ones are deleted."""
        self.model.copy_(torch.tensor([int(self.launch), step]))
        pending = self.run.save(step)
        assert pending is not None
        pending.wait()
        self.run.pin(step, pinned=False)  # waits for the housekeeping

    def end(self) -> None:
        with suppress(bcp.BcpError):
            self.run.close()


@pytest.fixture
def store() -> Iterator[str]:
    name = f"roles-{next(_numbers)}"
    yield name
    MemoryBackend.forget(name)


def worlds_of(store: str, names: Sequence[str] = NAMES, **options: Any) -> dict[str, World]:
    """Begin a launch of its own."""
    launch = str(next(_numbers))
    return {name: World(Life(store), name, launch, **options) for name in names}


def objects(store: str) -> dict[str, bytes]:
    return MemoryBackend(store)._objects


def commits(store: str, name: str) -> set[tuple[int, str]]:
    """Return step and launch of each committed checkpoint of a role, by the objects alone."""
    found = set()
    for key, data in objects(store).copy().items():
        root, role, folder, *rest = key.split("/") if key.count("/") == 3 else ("", "", "", "")
        if root == "rl" and role == name and rest == [METADATA_KEY]:
            with suppress(bcp.NotACheckpointError):  # a test has spoilt it
                found.add((int(folder.removeprefix("step-")), str(decode_commit(data, key).user["bcp.launch"])))
    return found


def whole(store: str) -> set[tuple[int, str]]:
    """Return step and launch of each whole step."""
    return commits(store, "actor") & commits(store, "critic")


def newest(store: str) -> list[int]:
    """Return the weights of the newest whole step."""
    step, launch = max(whole(store), default=(0, "0"))
    return [int(launch), step]


def resumed(store: str, names: Sequence[str] = NAMES, **goal: Any) -> list[list[int]]:
    """Resume all roles in this order in a new launch; return their weights."""
    weights = []
    for world in worlds_of(store, names).values():
        weights.append(world.resume(**goal))
        world.run.close()
    return weights


# -- a crash at each write ---------------------------------------------------------------------------------

KEEP = {"actor": 1, "critic": AnyKept(1, EveryKSteps(4))}
ORDERS = {
    "together": "acacac",
    "actor first": "aacacc",
    "critic first": "ccaaca",
}


def attempt(
    store: str, order: Sequence[str], saves: str, dies: dict[str, int], keep: dict[str, Any] = KEEP, **goal: Any
) -> dict[str, World]:
    """Run a launch in which processes die, until nobody can go on; its writes never undo the newest whole step."""
    launch, seen = str(next(_numbers)), max(whole(store), default=(0, ""))
    worlds = {name: World(Life(store, dies.get(name, -1)), name, launch, keep=keep[name]) for name in order}

    def check(key: str) -> None:
        nonlocal seen
        now = max(whole(store), default=(0, ""))
        assert now[0] >= seen[0] or goal, f"the newest whole step {seen} was lost before the write of {key}: {now}"
        seen = now

    at: dict[str, int] = {}
    weights = []
    for name, world in worlds.items():
        world.life.before = check
        try:
            weights.append(world.resume(**goal))
            at[name] = weights[-1][1]
        except bcp.BcpError:
            assert world.life.dead
    assert weights[1:] in ([], weights[:1]), "the roles have gone on from different checkpoints"
    for letter in saves:
        name = NAMES[letter == "c"]
        if name in at:
            at[name] += 2
            try:
                worlds[name].save(at[name])
            except bcp.BcpError:
                assert worlds[name].life.dead
                del at[name]
    for world in worlds.values():
        world.end()
    assert max(whole(store), default=(0, ""))[0] >= seen[0] or goal
    return worlds


def crash(store: str, victim: str, at: int, saves: str, **goal: Any) -> bool:
    """Let a role die before one of its writes in the second launch; return whether it has died."""
    attempt(store, NAMES, "acac", {}, keep=dict.fromkeys(NAMES, 10) if goal else KEEP)
    victims = attempt(store, NAMES[::-1], saves, {victim: at}, **goal)
    expected = newest(store)
    first, second = resumed(store, (victim, *(name for name in NAMES if name != victim)))
    assert first == second
    if goal:
        assert (first[1], str(first[0])) in whole(store)
    else:
        assert first == expected
    attempt(store, NAMES, "aaccac", {})
    expected = newest(store)
    assert resumed(store) == [expected, expected]
    return victims[victim].life.dead


@pytest.mark.parametrize("victim", NAMES)
@pytest.mark.parametrize("at", range(3, 50, 16))
def test_a_crash_at_some_writes(store: str, victim: str, at: int) -> None:
    crash(store, victim, at, ORDERS["together"])


@pytest.mark.long
@pytest.mark.parametrize("victim", NAMES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("goal", [{}, {"step": 2}], ids=["newest", "back"])
def test_a_crash_at_each_write(victim: str, order: str, goal: dict[str, Any]) -> None:
    for at in itertools.count():
        name = f"roles-{next(_numbers)}"
        if not crash(name, victim, at, ORDERS[order], **goal):
            assert at > 20
            return
        MemoryBackend.forget(name)


# -- what is not whole ---------------------------------------------------------------------------------------


def pinned_twins(store: str) -> None:
    """Save step 4 in a first launch and pin it in both roles; save it again beside in the actor alone, and die."""
    for world in worlds_of(store, keep=10).values():
        world.resume()
        world.save(2)
        world.save(4)
        world.run.pin(4)
        world.end()
    worlds = worlds_of(store, keep=10)
    for world in worlds.values():
        world.resume(step=2)
    actor = worlds["actor"]
    actor.model.copy_(torch.tensor([int(actor.launch), 4]))
    actor.run.save(4).wait()  # type: ignore[union-attr]  # it has begun
    for world in worlds.values():
        world.end()


@pytest.mark.parametrize("names", [NAMES, NAMES[::-1]])
def test_two_folders_of_a_step_are_not_mixed(store: str, names: Sequence[str]) -> None:
    pinned_twins(store)
    assert len(commits(store, "actor")) == 3
    expected = newest(store)
    assert resumed(store, names) == [expected, expected]


def spoil(store: str, name: str, step: int, data: bytes | None) -> None:
    key = f"rl/{name}/step-{step:08d}/{METADATA_KEY}"
    if data is None:
        del objects(store)[key]
    else:
        objects(store)[key] = data


@pytest.mark.parametrize("names", [NAMES, NAMES[::-1]])
@pytest.mark.parametrize("data", [None, b"nothing of the kind" * 9], ids=["gone", "damaged"])
def test_metadata_that_cannot_be_read_make_no_whole(store: str, names: Sequence[str], data: bytes | None) -> None:
    for world in worlds_of(store, keep=10).values():
        world.resume()
        world.save(2)
        world.save(4)
        world.end()
    spoil(store, "critic", 4, data)
    first, second = resumed(store, names)
    assert first == second
    assert first[1] == 2
    attempt(store, NAMES, "aaccac", {}, step=2)
    assert resumed(store, names)[0][1] == 8


def test_a_stale_role_deletes_nothing_from_under_the_next_launch(store: str) -> None:
    """The critic's last save comes through late, when the next launch has gone on from an older step."""
    old = worlds_of(store)
    for world in old.values():
        world.resume()
        world.save(2)
    old["actor"].save(4)
    new = worlds_of(store)
    critic, began = old["critic"], list[list[int]]()

    def begin(key: str) -> None:
        if key.endswith(METADATA_KEY) and not began:
            began.append(new["actor"].resume())

    critic.life.before = begin
    critic.run.save(4).wait()  # type: ignore[union-attr]  # it has begun
    with pytest.raises(bcp.RunTakenError):
        critic.run.close()
    assert began == [[int(critic.launch), 2]]
    assert new["critic"].resume() == began[0]
    for world in (*new.values(), *old.values()):
        world.end()


def test_a_deletion_that_begins_while_a_launch_begins_is_told(store: str) -> None:
    """The critic notes a deletion of step 2 after the actor's listing: the actor does not train on."""
    old = worlds_of(store)
    for world in old.values():
        world.resume()
        world.save(2)
    old["actor"].save(4)
    new, critic = worlds_of(store), old["critic"]

    def race(key: str) -> None:
        if key == "roles.json":
            critic.save(4)  # its job looks for another launch before there is one

    new["actor"].life.before = race
    with pytest.raises(bcp.CorruptError, match="critic of the launch before has begun to delete it"):
        new["actor"].resume()
    for world in (*new.values(), *old.values()):
        world.end()
    assert resumed(store)[0][1] == 4


# -- what is lost, and what other programs do ----------------------------------------------------------------


def drop_folder(store: str, name: str) -> None:
    for key in [key for key in objects(store) if key.startswith(f"rl/{name}/")]:
        del objects(store)[key]


def test_a_lost_folder_is_told_by_each_restart(store: str) -> None:
    """The run's first launch has whole steps. A restart that has failed must not hide the loss from the next one."""
    attempt(store, NAMES, "acac", {})
    drop_folder(store, "critic")
    for name in (*NAMES, *NAMES):
        world = worlds_of(store, [name])[name]
        with pytest.raises(bcp.CorruptError, match=r"critic has resumed in launch .* has no ledger now"):
            world.run.resume()
        world.end()
    assert resumed(store, fresh=True) == [[0, 0], [0, 0]]


def test_pins_hold_while_a_step_is_not_whole(store: str) -> None:
    """The actor has saved a pinned step again, beside: the critic's checkpoint still completes the pinned one."""
    pinned_twins(store)
    worlds_of_pins = worlds_of(store, keep=1)
    critic = worlds_of_pins["critic"]
    for world in worlds_of_pins.values():
        world.resume(step=2)
    critic.run.pin(4, pinned=False)
    for step in (6, 8):
        for world in worlds_of_pins.values():
            world.save(step)
    assert {step for step, _ in commits(store, "critic")} == {4, 8}
    for world in worlds_of_pins.values():
        world.end()


def test_checkpoints_without_a_launch_are_taken_if_asked_for(store: str) -> None:
    for name in NAMES:
        given = {"life": Life(store)}
        model = torch.zeros(2, dtype=torch.int64)
        options = bcp.SaveOptions(storage_options=given), bcp.LoadOptions(storage_options=given)
        with bcp.Run(
            f"mortal://rl/{name}", {"model": {"w": model}}, save=2, save_options=options[0], load_options=options[1]
        ) as run:
            run.resume()
            for step in (1, 2, 3, 4):
                model[1] = step
                run.maybe_save(step)
    world = worlds_of(store, ["actor"])["actor"]
    with pytest.raises(bcp.InputError, match=r"saved without roles.*resume\(step=4\).*fresh=True"):
        world.run.resume()
    world.end()
    assert resumed(store, step=4) == [[0, 4], [0, 4]]


def test_a_file_of_roles_whose_answer_is_lost(store: str) -> None:
    attempt(store, NAMES, "acac", {})
    expected = newest(store)
    worlds = worlds_of(store)
    actor = worlds["actor"]

    def lose(key: str) -> None:
        actor.life.loses_answer = key == "roles.json"

    actor.life.before = lose
    assert [world.resume() for world in worlds.values()] == [expected, expected]
    for world in worlds.values():
        world.end()


def test_a_ledger_that_cannot_be_written_fails_the_save_of_an_old_step(store: str) -> None:
    """The other role would take the new checkpoint for the old one, and delete what is whole."""
    for world in worlds_of(store, keep=10).values():
        world.resume()
        for step in (2, 4):
            world.save(step)
        world.end()
    worlds = worlds_of(store, keep=10)
    for world in worlds.values():
        world.resume(step=2)
    actor = worlds["actor"]

    def fail(key: str) -> None:
        if key == "run.json":
            raise StorageError("no ledger now")

    actor.life.before = fail
    with pytest.raises(StorageError, match="no ledger now"):
        actor.run.save(4).wait()  # type: ignore[union-attr]  # it has begun
    for world in worlds.values():
        world.end()
    assert len(whole(store)) == 2


@pytest.mark.parametrize("data", [None, b""], ids=["gone", "damaged"])
def test_damage_of_all_whole_steps_is_no_new_run(store: str, data: bytes | None) -> None:
    attempt(store, NAMES, "acac", {})
    spoil(store, "critic", 4, data)
    drop_folder(store, "critic/step-00000002")
    for name in (*NAMES, *NAMES):
        world = worlds_of(store, [name])[name]
        with pytest.raises(bcp.CorruptError, match=r"no step of the run .* is whole any more"):
            world.run.resume()
        world.end()


def test_two_roles_that_join_at_the_same_moment(store: str) -> None:
    """The actor has chosen step 2, and writes it. Meanwhile the critic's late save comes through, and it joins."""
    old = worlds_of(store, keep=10)
    for world in old.values():
        world.resume()
        world.save(2)
    old["actor"].save(4)
    new, weights = worlds_of(store), list[list[int]]()

    def race(key: str) -> None:
        if key == "roles.json" and not weights:
            old["critic"].save(4)
            weights.append(new["critic"].resume())

    new["actor"].life.before = race
    assert new["actor"].resume() == weights[0] == newest(store)
    assert weights[0][1] == 4
    for world in (*new.values(), *old.values()):
        world.end()


def test_a_step_that_one_role_has_verified_stays_in_all(store: str) -> None:
    """The mark of the critic comes later, when newer steps are whole."""
    worlds = worlds_of(store)
    for world in worlds.values():
        world.resume()
        world.save(2)
    worlds["actor"].run.mark(2, "verified")
    for step in (4, 6):
        for world in worlds.values():
            world.save(step)
    worlds["critic"].run.mark(2, "verified")
    for world in worlds.values():
        world.end()
    assert [weights[1] for weights in resumed(store, trust="verified")] == [2, 2]
