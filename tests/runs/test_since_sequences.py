"""Random lives of a run whose saves refer to each other: each kept step loads bit-equal, and nothing else is left.

The oracle are copies of the tensors at each save, kept outside. Blocks have 4 KiB here, so that little is written.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, note, settings
from hypothesis import strategies as st

import bcp
from bcp import _save as saving
from bcp._save import bases, keeping, leader
from bcp.format.metadata import METADATA_KEY, Commit, decode_commit, operation_of
from bcp.runs.keeper import Keeper

BLOCK = 4096
TENSORS = 6
Model = dict[str, torch.Tensor]


def fresh() -> Model:
    return {f"w{n}": torch.full((BLOCK,), n, dtype=torch.uint8) for n in range(TENSORS)}


@contextmanager
def small_blocks() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (saving, leader, keeping):
            stack.enter_context(mock.patch.object(module, "BLOCK_BYTES", BLOCK))
        stack.enter_context(mock.patch.object(bases, "FULL_EVERY", 4))
        yield


@dataclass(frozen=True)
class Life:
    """One life of the job: the tensors that change before each save, and how it ends."""

    changes: list[list[int]]
    keep: int
    end: str
    back: int
    since: bool


@dataclass
class World:
    """A run, and what it has to hold."""

    run: Path
    truth: dict[str, Model] = field(default_factory=dict)  # by operation
    counter: int = 10

    def commits(self) -> dict[str, Commit]:
        found = {}
        for path in sorted(self.run.glob(f"step-*/{METADATA_KEY}")):
            found[path.parent.name] = decode_commit(path.read_bytes(), path.parent.name)
        return found

    def steps(self) -> list[int]:
        return sorted({int(name[5:]) for name in self.commits()})

    def nth(self, number: int) -> int | None:
        steps = self.steps()
        return steps[number % len(steps)] if steps else None

    # -- what happens ----------------------------------------------------------------------------------

    def live(self, life: Life) -> None:
        killed = self.run.parent / "killed"

        def copying(graph: Any) -> Any:
            async def copy(item: Any) -> Any:
                shutil.rmtree(killed, ignore_errors=True)
                shutil.copytree(self.run, killed)
                return item

            return graph.after("upload", bcp.extend.Stage("copy", copy))

        async def nothing(*_: object) -> None:
            pass

        def committed(step: int, result: Any) -> None:
            del step
            self.truth[result.operation] = {name: tensor.clone() for name, tensor in held.items()}

        options = bcp.SaveOptions(record=False, edit=copying if life.end == "before" else (lambda graph: graph))
        model, held, back = fresh(), Model(), self.nth(life.back) if life.back >= 0 else None
        with ExitStack() as stack:
            if life.end == "after":
                stack.enter_context(mock.patch.object(Keeper, "committed", nothing))
                stack.enter_context(mock.patch.object(Keeper, "close", nothing))
            run = bcp.Run(
                self.run,
                {"model": model},
                save=1,
                keep=life.keep,
                since="auto" if life.since else None,
                save_options=options,
                load_options=bcp.LoadOptions(record=False),
                on_commit=committed,
            )
            stack.enter_context(run)
            step = run.resume(step=back) if back is not None and self.sound(back) else run.resume()
            for changes in life.changes:
                step += 1
                for number in changes:
                    self.counter += 1
                    model[f"w{number}"].fill_(self.counter % 251)
                held = {name: tensor.clone() for name, tensor in model.items()}
                pending = run.maybe_save(step)
                assert pending is not None
                pending.wait()
        if life.end == "before" and killed.exists():
            shutil.rmtree(self.run)
            killed.rename(self.run)
        elif life.end == "close":
            self.check_retention(life, step)

    def sound(self, step: int) -> bool:
        """Whether a run may be asked for a step."""
        return any(entry["step"] == step for entry in self.ledger()["checkpoints"])

    def ledger(self) -> dict[str, Any]:
        path = self.run / "run.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"checkpoints": []}
        return found

    def act(self, action: str, number: int) -> None:
        step = self.nth(number)
        if step is None:
            return
        with suppress(bcp.InputError, bcp.NotACheckpointError):  # refused: it is needed
            if action == "remove":
                for name in [name for name in self.commits() if int(name[5:]) == step]:
                    bcp.tools.remove(self.run / name, force=True)
            elif action == "suspect":
                bcp.Run(self.run, {}).mark(step, "suspect")
            elif action in ("pin", "unpin"):
                bcp.tools.pin(self.run, step, pinned=action == "pin")
            elif action == "collect":
                bcp.tools.collect(self.run, min_age_seconds=0)
            else:
                (self.run / "run.json").unlink(missing_ok=True)

    # -- what has to hold --------------------------------------------------------------------------------

    def check(self) -> None:
        """Each committed folder loads to the last bit, and has no file too many."""
        commits = self.commits()
        needed = {step for commit in commits.values() for step in commit.refers}
        for name, commit in commits.items():
            model = {key: torch.zeros_like(tensor) for key, tensor in fresh().items()}
            bcp.load(self.run / name, {"model": model}, options=bcp.LoadOptions(record=False))
            for key, tensor in self.truth[commit.operation].items():
                assert torch.equal(model[key], tensor), (name, key)
            files = [path.relative_to(self.run / name).as_posix() for path in (self.run / name).rglob("*.*")]
            operations = {operation for file in files if (operation := operation_of(file))}
            assert commit.operation in operations
            if int(name[5:]) not in needed:
                assert operations == {commit.operation}

    def check_retention(self, life: Life, step: int) -> None:
        """The folders are those that the policy keeps, and those to which one of these refers."""
        if not life.changes:
            return
        entries = self.ledger()["checkpoints"]
        sound = [entry["step"] for entry in entries if entry["trust"] != "suspect"]
        every = [entry["step"] for entry in entries]
        kept = {*sorted(every)[-life.keep :], *sorted(sound)[-life.keep :]}
        kept |= {entry["step"] for entry in entries if entry["pinned"]}
        refers: dict[int, set[int]] = {}
        for name, commit in self.commits().items():
            refers.setdefault(int(name[5:]), set()).update(commit.refers)
        for one in sorted(refers, reverse=True):
            kept |= refers[one] if one in kept else set()
        found = {int(path.name[5:]) for path in self.run.glob("step-*")}
        assert kept <= found
        assert {one for one in found if one <= step} <= kept
        assert "saving" not in self.ledger()


lives = st.builds(
    Life,
    st.lists(st.lists(st.integers(0, TENSORS - 1), max_size=3), max_size=4),
    st.integers(1, 3),
    st.sampled_from(["close", "close", "close", "before", "after"]),
    st.sampled_from([-1, -1, -1, 0, 1, 2]),
    st.sampled_from([True, True, True, False]),
)
actions = st.tuples(
    st.sampled_from(["remove", "remove", "suspect", "pin", "unpin", "collect", "lose"]), st.integers(0, 9)
)


SEVERAL_FOLDERS: list[Life | tuple[str, int]] = [
    Life([[0, 0, 0]], 1, "close", -1, since=True),
    ("remove", 0),
    Life([[], [0], [0, 4], []], 1, "close", -1, since=True),
    Life([[1, 0], [], [], [0]], 1, "after", 0, since=True),
    Life([], 1, "close", -1, since=True),
    Life([[], []], 1, "close", 0, since=True),
]
"""A step has folders that refer to different steps."""


@pytest.mark.parametrize("examples", [12, pytest.param(150, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_every_kept_step_loads_after_any_sequence(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @example(SEVERAL_FOLDERS)
    @given(st.lists(lives | actions, min_size=2, max_size=9))
    def runs(sequence: list[Life | tuple[str, int]]) -> None:
        with tempfile.TemporaryDirectory() as folder, small_blocks():
            world = World(Path(folder) / "run")
            world.run.mkdir()
            for each in sequence:
                note(f"{each} after {[*world.commits()]}")
                world.live(each) if isinstance(each, Life) else world.act(*each)
                world.check()

    runs()
