"""Random states, ways of saving and failures, on accelerators that run late.

``python tests/device/test_random.py --cases 1000 --seed 7`` runs more of them; a failing one is named by its seed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from late import accelerators, memory, sleep
from samples import sample
from torch import nn

import bcp
from bcp.backends.memory import MemoryBackend

CASES = int(os.environ.get("BCP_DEVICE_CASES", "30"))
MIB = 1 << 20
SIZES = (0, 1, 3, 100, 5_000, 70_000, 300_000)
DTYPES = (
    torch.float32,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.complex64,
    torch.int64,
    torch.uint8,
)
WAYS = ("save", "background", "asave", "lazy")


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare all bits, of NaN too."""
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(
        *(each.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for each in (one, other))
    )


@dataclass
class State:
    """What a case saves: ``live`` is on devices; ``wanted`` has the same values on the CPU."""

    live: dict[str, torch.Tensor] = field(default_factory=dict)
    wanted: dict[str, torch.Tensor] = field(default_factory=dict)


class Case:
    """One random case."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)  # noqa: S311 -- no secret
        self.seed = seed
        self.kind = rng.choice(("cuda", "cuda", "xpu"))
        self.devices = rng.choice((1, 1, 2, 3))
        self.current = rng.randrange(self.devices)
        self.own_stream = rng.random() < 0.5
        self.way = rng.choice(WAYS)
        self.prepared = rng.random() < 0.3
        self.fails = rng.choice(("", "", "", "d2h", "upload", "memory", "cancel", "load", "load memory"))
        self.many = rng.random() < 0.2
        self.count = rng.randrange(12)
        self.options = bcp.SaveOptions(
            part_bytes=MIB,
            budget_bytes=rng.choice((None, MIB, 3 * MIB)),
            copy_workers=rng.randrange(1, 5),
            snapshot="lazy" if self.way == "lazy" else "eager",
            overwrite=True,
        )
        self.reading = bcp.LoadOptions(
            read_bytes=MIB, budget_bytes=rng.choice((2 * MIB, 8 * MIB)), copy_workers=rng.randrange(1, 5)
        )

    def __repr__(self) -> str:
        stream = "own stream" if self.own_stream else "default stream"
        return f"<{self.seed}: {self.devices} {self.kind}, {self.way} on the {stream}, fails={self.fails!r}>"

    # -- the state

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=self.generator)
        return made.to(dtype)

    def place(self) -> str:
        number = self.rng.randrange(self.devices + 1)
        return "cpu" if number == self.devices else f"{self.kind}:{number}"

    def tensor(self, dtype: torch.dtype, size: int, place: str) -> torch.Tensor:
        """Return memory of some layout; its contents do not matter yet."""
        layout = self.rng.choice(("plain", "plain", "plain", "transposed", "strided", "rows", "slice"))
        rows = max(1, min(7, size))
        shape = (rows, size // rows)
        if layout == "transposed":
            return torch.zeros(shape[::-1], dtype=dtype, device=place).t()
        if layout == "strided":
            return torch.zeros((2 * rows, shape[1] + 2), dtype=dtype, device=place)[::2, 1:-1]
        if layout == "rows":
            return torch.zeros((rows + 3, shape[1]), dtype=dtype, device=place)[2 : 2 + rows]
        if layout == "slice":
            return torch.zeros(2 * size + 1, dtype=dtype, device=place)[size : 2 * size]
        return torch.zeros(shape if self.rng.random() < 0.5 else (size,), dtype=dtype, device=place)

    def make(self) -> State:
        self.generator = torch.Generator().manual_seed(self.seed)
        state = State()
        for number in range(self.count):
            dtype, size = self.rng.choice(DTYPES), self.rng.choice(SIZES)
            live = self.tensor(dtype, size, self.place())
            if dtype.is_floating_point and dtype.itemsize > 1 and self.rng.random() < 0.6:
                live = nn.Parameter(live)
            state.live[f"t{number}"] = live
            state.wanted[f"t{number}"] = self.values(tuple(live.shape), dtype)
        if self.many:
            flat, place = self.values((400,), torch.float32), self.place()
            whole = torch.zeros(400, device=place)
            for number in range(100):
                part = slice(4 * number, 4 * number + self.rng.randrange(5))
                state.live[f"s{number}"] = whole[part]
                state.wanted[f"s{number}"] = flat[part].clone()
        if "t0" in state.live and self.rng.random() < 0.3:
            state.live["tied"], state.wanted["tied"] = state.live["t0"], state.wanted["t0"]
        return state

    def write(self, state: State) -> None:
        """Queue the values, behind slow work; the memory of the CPU has them at once."""
        staged = {name: state.wanted[name].to(live.device) for name, live in state.live.items()}
        self.settle()
        for device in range(self.devices):
            sleep(self.rng.random() * 0.003, device=device)
        with torch.no_grad():
            for name, live in state.live.items():
                live.copy_(staged[name])

    def destroy(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrite everything on the caller's stream, at once."""
        with torch.no_grad():
            for live in tensors.values():
                live.fill_(1)
                live.view(-1)[:3].zero_() if live.is_contiguous() else live.zero_()

    def settle(self) -> None:
        for device in range(self.devices):
            torch.accelerator.synchronize(device)

    # -- a save

    def optimizer(self, state: State) -> tuple[torch.optim.Optimizer | None, list[nn.Parameter]]:
        stepped = {id(live): live for live in state.live.values() if isinstance(live, nn.Parameter) and live.numel()}
        parameters = list(stepped.values())
        if not parameters:
            return None, []
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, foreach=False), parameters

    def failing(self, name: str, *, after: bool = False) -> Callable[[Any], Any]:
        """Let a random item fail before a stage."""
        left = [self.rng.randrange(3)]

        async def fail(item: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("injected")
            return item

        stage = bcp.extend.Stage("fail", fail)
        return lambda graph: graph.after(name, stage) if after else graph.before(name, stage)

    def saved(self, path: Any, states: Any, options: bcp.SaveOptions, then: Callable[[], None]) -> None:
        """Save; do something as soon as the caller may go on."""
        if self.way == "save":
            bcp.save(path, states, options=options)
            then()
        elif self.way == "asave":

            async def work() -> None:
                await bcp.asave(path, states, options=options)
                then()

            asyncio.run(work())
        else:
            pending = bcp.save(path, states, async_checkpoint=True, options=options)
            then()
            pending.wait()

    def fail_once(self, path: Any, states: Any) -> None:
        """Let one save fail."""
        options = self.options
        if self.fails in ("d2h", "upload"):
            options = replace(options, edit=self.failing(self.fails))
        elif self.fails == "cancel":
            with suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(bcp.asave(path, states, overwrite=True), self.rng.random() * 0.03))
            return
        elif self.fails == "memory":
            memory().refuse = 1
        else:
            return
        try:
            self.saved(path, states, options, lambda: None)
        except (bcp.BcpError, torch.OutOfMemoryError) as error:
            assert "injected" in str(error) or "out of memory" in str(error), error  # noqa: PT017 -- any may be raised
        memory().refuse = 0

    # -- all of it

    def run(self, path: Any) -> None:
        with accelerators(self.kind, self.devices, self.seed) as machine, ExitStack() as stack:
            torch.accelerator.set_device_index(self.current)
            state = self.make()
            self.settle()
            if self.own_stream:
                for device in range(self.devices):
                    stack.enter_context(torch.Stream(device=torch.device(self.kind, device)))
                torch.accelerator.set_device_index(self.current)
            self.check(path, state)
            stack.close()
            del state
        assert not machine.final, machine.final

    def check(self, path: Any, state: State) -> None:
        states: dict[str, Any] = {"model": state.live}
        optimizer, stepped = self.optimizer(state) if self.way == "lazy" else (None, [])
        if self.way == "lazy" and optimizer is None:
            self.way, self.options = "background", bcp.SaveOptions(overwrite=True)
        if optimizer is not None:
            optimizer.step()
            states["optimizer"] = optimizer
        states["extra_states"] = {"e": torch.zeros(5, device=torch.device(self.kind, self.current))}
        self.settle()
        if self.prepared:
            bcp.prepare(states, options=self.options).wait()
        self.write(state)
        self.fail_once(path, states)
        states["extra_states"]["e"].fill_(5)

        def then() -> None:
            others = {n: t for n, t in state.live.items() if not any(t is one for one in stepped)}
            self.destroy(others)
            if optimizer is not None:
                optimizer.step()

        self.saved(path, states, self.options, then)
        self.check_loads(path, state, states)

    def check_loads(self, path: Any, state: State, states: dict[str, Any]) -> None:
        found = {name: torch.zeros(wanted.shape, dtype=wanted.dtype) for name, wanted in state.wanted.items()}
        target: dict[str, Any] = {"model": found}
        if "extra_states" in states:
            target["extra_states"] = {"e": torch.zeros(5)}
        bcp.load(path, target, options=self.reading)
        wrong = [name for name, wanted in state.wanted.items() if not alike(found[name], wanted)]
        assert not wrong, f"saved: {wrong}"
        self.destroy(state.live)
        if self.fails.startswith("load"):
            failing = self.reading
            if self.fails == "load":
                failing = replace(failing, edit=self.failing("exchange"))
            else:
                memory().refuse = self.rng.randrange(1, 4)
            with suppress(bcp.BcpError, torch.OutOfMemoryError):
                bcp.load(path, {"model": state.live}, options=failing)
            memory().refuse = 0
            self.destroy(state.live)
        bcp.load(path, {"model": state.live}, options=self.reading)
        streams = [torch.Stream(device=torch.device(self.kind, device)) for device in range(self.devices)]
        with ExitStack() as stack:
            for stream in streams:  # nothing orders them with the load
                stack.enter_context(stream)
            seen = {name: live.detach().clone() for name, live in state.live.items()}
            wrong = [name for name, wanted in state.wanted.items() if not alike(seen[name].cpu(), wanted)]
        assert not wrong, f"loaded: {wrong}"


def run(seed: int, folder: Path) -> None:
    case = Case(seed)
    in_memory = case.rng.random() < 0.5
    path = MemoryBackend(f"late {seed}") if in_memory else folder / str(seed)
    try:
        case.run(path)
    except BaseException as error:
        error.add_note(repr(case))
        raise
    finally:
        MemoryBackend.forget(f"late {seed}")


@pytest.mark.parametrize("seed", sample(range(CASES), *range(0, CASES, 3)))
def test_a_random_case(tmp_path: Path, seed: int) -> None:
    run(seed, tmp_path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    failed, began = [], time.monotonic()
    for seed in range(given.seed, given.seed + given.cases):
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(seed, Path(folder))
            except Exception as error:  # noqa: BLE001 -- all are shown
                failed.append(seed)
                print(f"{seed}: {type(error).__name__}: {error} {error.__notes__}", file=sys.stderr)  # noqa: T201
    seconds = time.monotonic() - began
    print(f"{given.cases} cases, {len(failed)} failed {failed}, {seconds:.1f} s")  # noqa: T201
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
