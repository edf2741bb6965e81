"""What the ranks of ``ranks4`` do to show that defects of other checkpoint libraries are none of bcp's.

Run as a program (``python peer_defects.py DIRECTORY``) it is a whole job of one process.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

if __name__ != "__main__":  # the program imports it when it has looked at torch
    from layouts import bits_of, coordinator_of, mesh_of, shard

    import bcp
    from bcp.backends import resolve
    from bcp.coordinators import GrpcCoordinator
    from bcp.testing.storage_fakes import FaultyBackend


MOST_SECONDS = 240
"""How long the job may take: 4 s alone; ten times that where ten processes share the machine."""

# -- one process: nothing is patched, nothing stays behind -------------------------------------------


def functions(prefixes: tuple[str, ...]) -> dict[str, object]:
    """Return the functions and classes of all those modules, and the functions of their classes, by name."""
    found: dict[str, object] = {}
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] in prefixes}
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                attributes = list(vars(value).items())
                found |= {f"{name}.{key}.{k}": v for k, v in attributes if isinstance(v, types.FunctionType)}
    return found


def processes() -> Iterator[Path]:
    """Yield the stat files of the processes that run."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if stat.exists():
            yield stat


def main() -> None:
    """Save and load in every way; say what changed in torch, and which children there are."""
    import torch.distributed.fsdp  # noqa: PLC0415 -- what upstream patches

    faulthandler.dump_traceback_later(MOST_SECONDS - 30, exit=True)
    watched = ("torch", "asyncio", "threading", "pickle", "socket", "os", "numpy", "anyio")
    states: dict[str, Any] = {"model": nn.Linear(4, 4), "extra_states": {"step": 1}}
    states["optimizer"] = torch.optim.AdamW(states["model"].parameters())
    before = functions(watched)
    import bcp  # noqa: PLC0415 -- now

    path = Path(sys.argv[1])
    bcp.save(path / "a", states)
    bcp.save(path / "b", states, async_checkpoint=True).wait()
    bcp.load(path / "a", states)
    after = functions(watched)
    changed = [name for name, value in before.items() if after.get(name) is not value]
    sys.stdout.write(f"looked at {len(before)} functions, changed: {changed}\n")
    children = [
        int(child) for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    ]
    sys.stdout.write(f"session {os.getsid(0)}, children {children}\n")
    bcp.save(path / "c", states, async_checkpoint=True)


# -- several ranks -----------------------------------------------------------------------------------

_watching: list[tuple[list[str], list[str]]] = []
_hooked: list[bool] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _watching:
        return
    unpickled, addresses = _watching[-1]
    if event == "pickle.find_class":
        unpickled.append(".".join(map(str, args)))
    elif event in ("socket.connect", "socket.bind", "socket.sendto"):
        addresses.append(str(args[1][0] if isinstance(args[1], tuple) else args[1]))
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        addresses.append(str(args[0]))


@contextmanager
def audit() -> Iterator[tuple[list[str], list[str]]]:
    """Collect the classes that are looked up by pickles, and the addresses that Python code uses."""
    if not _hooked:
        sys.addaudithook(_hook)  # stays for good, and does nothing outside of this context
        _hooked.append(True)
    _watching.append(([], []))
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


def replicated(value: float = 1.0) -> dict[str, Any]:
    return {"model": {f"w{n}": torch.full((300_000 + n,), float(value)) for n in range(8)}}


def audited(path: Path) -> tuple[list[str], list[str]]:
    """Save twice and load, watched. The ranks of a job have connections of their own for that."""
    group = dist.new_group() if dist.is_initialized() else None  # torch looks for this host's address
    with audit() as seen:
        ranks = None if group is None else GrpcCoordinator.over(group)
        bcp.save(path, {**replicated(), "extra_states": {"step": 1}}, coordinator=ranks)
        bcp.save(path, {**replicated(2), "extra_states": {"step": 2}}, overwrite=True, coordinator=ranks)
        extra: dict[str, Any] = {}
        bcp.load(path, {**replicated(0), "extra_states": extra}, coordinator=ranks)
    assert extra == {"step": 2}
    return seen


def fail_in_background(path: Path) -> tuple[str, str]:
    """Run out of space on rank 2 after the snapshot."""
    fault = OSError(errno.ENOSPC, "No space left on device") if dist.get_rank() == 2 else _nothing
    backend = FaultyBackend(resolve(path), "commit", fault, key="model")
    if dist.get_rank() == 2:
        backend = FaultyBackend(resolve(path), "write_part", fault)
    try:  # the others hear of it at once, perhaps before their own snapshot is done
        bcp.save(backend, replicated(), async_checkpoint=True).wait(60)
    except bcp.BcpError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


async def _nothing(_: str) -> None:
    pass


def plans_cached(path: Path) -> list[bool]:
    states = {"model": {"only in this test": torch.ones(5)}}
    return [bcp.save(path / str(step), states).plan_cached for step in range(3)]


def save_ddp(path: Path) -> tuple[int, tuple[str, ...]]:
    """Save a DDP model that has taken a step; return the bytes that this rank wrote, and the names of parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(200, 200 + 10 * n) for n in (0,)), nn.Linear(200, 300))
    ddp = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(ddp.parameters())
    ddp(torch.ones(2, 200)).sum().backward()
    optimizer.step()
    report = bcp.save(path, {"model": ddp, "optimizer": optimizer})
    return report.nbytes, tuple(name for name, _ in net.named_parameters())


ROWS = 1000
COLUMNS = 1024


def whole() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def save_sharded(path: Path, placements: tuple[str, ...]) -> None:
    """Save a tensor cut over all four ranks, with a leaf beside it that is no tensor."""
    mesh = (4,) if len(placements) == 1 else (2, 2)
    bcp.save(path, {"model": {"w": shard(whole(), mesh, placements), "epoch": 7}})


def load_sharded(path: Path, size: int, placements: tuple[str, ...]) -> tuple[bool, Any, int]:
    """Load it on the first ranks; say if the rows are right, what the other leaf is, and how many bytes were read."""
    mesh = (size,) if len(placements) == 1 else (2, 2)
    mesh_of(mesh)
    if dist.get_rank() >= size:
        return True, 7, 0
    wanted, target = shard(whole(), mesh, placements), shard(torch.zeros(ROWS, COLUMNS), mesh, placements)
    states: dict[str, Any] = {"model": {"w": target, "epoch": 0}}
    report = bcp.load(path, states, coordinator=coordinator_of(size), overlap_loading=False)
    right = bits_of(target.to_local()) == bits_of(wanted.to_local())
    return right, states["model"]["epoch"], report.read_nbytes


def collectives(path: Path) -> list[int]:
    """Save and load; return the training group's count of collectives before and after."""
    group = dist.distributed_c10d._get_default_group()
    counts = [group._get_sequence_number_for_group()]
    dist.barrier()
    counts.append(group._get_sequence_number_for_group())
    bcp.save(path, replicated())
    bcp.load(path, replicated(0))
    counts.append(group._get_sequence_number_for_group())
    return counts


def load_damaged(path: Path) -> tuple[str, str]:
    """Load what somebody has damaged; return what is said."""
    try:
        bcp.load(path, replicated(0))
    except bcp.BcpError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def save_replicated(path: Path) -> None:
    bcp.save(path, replicated())


def fail_and_save_again(path: Path) -> list[str]:
    """Save three times with a stage that fails on rank 1, then for real; return what was said."""

    async def fail(_: Any) -> Any:
        raise RuntimeError("a bug in a stage")

    edit = (
        (lambda graph: graph.after("d2h", bcp.extend.Stage("mine", fail)))
        if dist.get_rank() == 1
        else (lambda graph: graph)
    )
    said = []
    for _ in range(3):
        try:
            bcp.save(path, replicated(), async_checkpoint=True, options=bcp.SaveOptions(edit=edit)).wait(60)
        except bcp.BcpError as error:
            said.append(type(error).__name__)
    bcp.save(path, replicated(3))
    target = replicated(0)
    bcp.load(path, target)
    assert all(tensor.eq(3).all() for tensor in target["model"].values())
    return said


if __name__ == "__main__":
    main()
