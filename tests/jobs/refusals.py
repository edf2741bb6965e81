"""Calls whose arguments one rank of ``ranks4`` gets wrong, and user code that fails in one."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import bcp

GUILTY = 2
TIMEOUT = 3600.0  # a rank that waits for it does not come back in time
Said = tuple[str, int | None, str]


class _Path(os.PathLike[str]):
    def __fspath__(self) -> str:
        raise ZeroDivisionError("a path that fails")


class _States(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        raise ZeroDivisionError("states that fail")


class _Planner:
    name = "mine"

    def local_shards(self, *_: Any) -> Any:
        raise ZeroDivisionError("a planner that fails")

    load_targets = local_shards


class Failing:
    """Something with a state that fails in one rank, as user code does."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def state_dict(self) -> Any:
        if dist.get_rank() == GUILTY:
            raise self.error
        return {"step": 7}

    def load_state_dict(self, _state: Any) -> None:
        return


def states() -> dict[str, Any]:
    return {"model": {"w": torch.arange(4096.0)}}


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "states None": (lambda: {"states": None}, "InputError", "states is NoneType, not a mapping"),
    "a module": (lambda: {"states": torch.nn.Linear(1, 1)}, "InputError", "states is Linear, not a mapping"),
    "kind": (lambda: {"states": {**states(), "modle": {}}}, "InputError", "states has ['modle']"),
    "leaf": (lambda: {"states": {"model": {"w": torch.empty(1, device="meta")}}}, "StateError", "meta"),
    "states fail": (lambda: {"states": _States()}, "ZeroDivisionError", "states that fail"),
    "framework": (lambda: {"framework": "nonsense"}, "InputError", "framework='nonsense' is unknown"),
    "no framework": (lambda: {"framework": 5}, "InputError", "framework=5 is neither a name nor a planner"),
    "planner": (lambda: {"framework": _Planner()}, "ZeroDivisionError", "a planner that fails"),
    "options": (lambda: {"options": {"timeout": 5}}, "InputError", "options is a dict; pass bcp."),
    "empty options": (lambda: {"options": {}}, "InputError", "options is a dict; pass bcp."),
    "role": (lambda: {"role": "a/b"}, "InputError", "role='a/b' cannot name"),
    "path None": (lambda: {"path": None}, "InputError", "path=None is of type NoneType; pass a directory"),
    "path 5": (lambda: {"path": 5}, "InputError", "path=5 is of type int; pass a directory"),
    "path bytes": (lambda: {"path": b"x"}, "InputError", "path=b'x' is of type bytes; pass a directory"),
    "path empty": (lambda: {"path": ""}, "InputError", "the path is empty"),
    "scheme": (lambda: {"path": "nosuch://bucket/run"}, "InputError", "unknown scheme nosuch://"),
    "path fails": (lambda: {"path": _Path()}, "ZeroDivisionError", "a path that fails"),
}
ANYWHERE = [name for name in BAD if not name.startswith("path") and name not in ("role", "scheme")]


def _waited(pending: Any) -> None:
    pending.wait()


async def _asave_in_background(**arguments: Any) -> None:
    await (await bcp.asave(**arguments, async_checkpoint=True))


async def _aprepare(**arguments: Any) -> None:
    await (await bcp.aprepare(**arguments))


ENTRIES: dict[str, Callable[..., Any]] = {
    "save": bcp.save,
    "save async": lambda **arguments: _waited(bcp.save(**arguments, async_checkpoint=True)),
    "asave": lambda **arguments: asyncio.run(bcp.asave(**arguments)),
    "asave async": lambda **arguments: asyncio.run(_asave_in_background(**arguments)),
    "prepare": lambda **arguments: _waited(bcp.prepare(**arguments)),
    "aprepare": lambda **arguments: asyncio.run(_aprepare(**arguments)),
    "load": bcp.load,
    "aload": lambda **arguments: asyncio.run(bcp.aload(**arguments)),
}


def good(entry: str, path: Path) -> dict[str, Any]:
    """Return arguments of a call that works."""
    kind = bcp.LoadOptions if "load" in entry else bcp.SaveOptions
    arguments = {"states": states(), "options": kind(timeout=TIMEOUT)}
    return arguments if "prepare" in entry else {**arguments, "path": path}


def outcome(call: Callable[[], Any]) -> Said:
    """Return what a call raises: type, rank that is to blame, text."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 -- the test looks at whatever it is
        return type(error).__name__, getattr(error, "rank", None), str(error)
    return "nothing", None, ""


def refused(path: Path, entry: str) -> dict[str, Said]:
    """Make a call with every kind of bad argument in one rank; in between and afterwards all ranks save."""
    bcp.save(path / "there", states(), overwrite=True)
    said = {}
    for name in ANYWHERE if "prepare" in entry else BAD:
        arguments = good(entry, path / "there" if "load" in entry else path / "new")
        if dist.get_rank() == GUILTY:
            arguments.update(BAD[name][0]())
        said[name] = outcome(lambda arguments=arguments: ENTRIES[entry](**arguments))
    bcp.save(path / "there", states(), overwrite=True)
    return said


def only_here(path: Path) -> dict[str, Said]:
    """Make calls of which one rank's differ in an argument that only a save has."""
    first: dict[str, Any] = {"path": path / "new", "states": states()}
    guilty = dist.get_rank() == GUILTY
    save: Callable[..., Any] = ENTRIES["save" if guilty else "save async"]
    return {
        "lazy": outcome(lambda: save(**first, snapshot="lazy" if guilty else None)),
        "snapshot": outcome(lambda: bcp.save(**first, snapshot="bogus" if guilty else None)),
        "options": outcome(lambda: bcp.save(**first, options=bcp.LoadOptions() if guilty else bcp.SaveOptions())),
        "other call": outcome(
            lambda: bcp.load(path, {}) if guilty else bcp.save(**first, options=bcp.SaveOptions(timeout=TIMEOUT))
        ),
        "nothing": outcome(lambda: bcp.save(path / "new", states())),
    }


def several(path: Path) -> list[Said]:
    """Make bad calls in two ranks, then in all."""
    rank = dist.get_rank()
    two = {1: {"framework": 5}, 3: {"role": ".."}}.get(rank, {})
    arguments = good("save", path / "new")
    return [
        outcome(lambda: bcp.save(**{**arguments, **two})),
        outcome(lambda: bcp.save(**{**arguments, "framework": 5})),
        outcome(lambda: bcp.save(**arguments)),
    ]


def nothing_anywhere(path: Path, entry: str) -> tuple[Said, bool, Said]:
    """Pass empty states on all ranks; return what that raises, whether it left files, and what the next call raises."""
    bcp.save(path / "there", states(), overwrite=True)
    arguments = good(entry, path / "there" if "load" in entry else path / "new")
    first = outcome(lambda: ENTRIES[entry](**{**arguments, "states": {}}))
    dist.barrier()
    return first, (path / "new").exists(), outcome(lambda: ENTRIES[entry](**arguments))


def run_of_some(path: Path) -> dict[str, Any]:
    """Save in a run in which only one rank has states, resume in a second one, and return its states."""
    for step in (0, 1):
        states: dict[str, Any] = {"model": {"w": torch.full((8,), 1.0 - step)}} if dist.get_rank() == GUILTY else {}
        with bcp.Run(path, states, save=1) as run:
            assert run.resume() == step
            run.maybe_save(step + 1)
    return states


def user_code(path: Path, entry: str) -> dict[str, Said]:
    """Save what fails in one rank when it is asked for its state; save again afterwards."""
    errors = (TypeError("no state"), bcp.InputError("no state"), KeyboardInterrupt("now"), SystemExit("now"))
    said = {}
    for error in errors:
        arguments = {**good(entry, path / "new"), "states": {**states(), "extra_states": {"mine": Failing(error)}}}
        said[type(error).__name__] = outcome(lambda arguments=arguments: ENTRIES[entry](**arguments))
    bcp.save(path / "new", states())
    return said


def subset(path: Path, saved: tuple[int, ...], loaded: tuple[int, ...]) -> None:
    """Save a model whose mesh is a subset of the ranks, and load it into another; the other ranks hold nothing."""
    weight, bias = torch.arange(35.0).view(7, 5), torch.arange(7.0)
    bcp.save(path, _sharded(saved, weight, bias), options=bcp.SaveOptions(timeout=TIMEOUT))
    target = _sharded(loaded, torch.zeros(7, 5), torch.zeros(7))
    report = bcp.load(path, target, options=bcp.LoadOptions(timeout=TIMEOUT))
    assert not report.unexpected
    mine = _sharded(loaded, weight, bias)
    assert len(_parameters(target)) == (2 if dist.get_rank() in loaded else 0)
    for name, tensor in _parameters(target).items():
        assert torch.equal(tensor.to_local(), _parameters(mine)[name].to_local()), name


def _sharded(ranks: tuple[int, ...], weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Any]:
    """Return the states of a rank: a module sharded over some, one without parameters, or nothing."""
    mesh = _mesh(ranks)
    if dist.get_rank() not in ranks:
        return [{}, {"model": {}}, {"model": torch.nn.Identity()}, {}][dist.get_rank()]
    module = torch.nn.Linear(5, 7)
    for name, tensor in (("weight", weight), ("bias", bias)):
        setattr(module, name, torch.nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])))
    return {"model": module}


def _parameters(states: dict[str, Any]) -> dict[str, Any]:
    return dict(states["model"].named_parameters()) if isinstance(states.get("model"), torch.nn.Module) else {}


@functools.cache
def _mesh(ranks: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh over some ranks; collective over all."""
    return DeviceMesh("cpu", list(ranks))
