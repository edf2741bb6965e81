"""One rank of the job that ``benchmarks.chaos_tiers`` kills: below torchrun, or as a fork of a warm process.

    torchrun ... -m benchmarks.chaos_tiers.job ORDER.json

It tells what it does in a file that all ranks append lines to: :class:`Line`.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import distributed as dist

import bcp
from bcp.extend import Stage
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import Mark
from benchmarks.chaos_tiers.network import enter
from benchmarks.chaos_tiers.training import Layout, difference, make_states, train

__all__ = ["PER_HOST", "Line", "Order", "Point", "folder_of", "forked"]

PER_HOST = 2
"""Ranks of a host."""

Point = Literal["", "copies", "before mark", "after mark", "returned"]
"""Where a rank kills itself: at a part of its copies, with all parts copied, or behind its mark. All ranks do so once
``released()`` has returned."""


class Order(msgspec.Struct):
    """What the ranks of one life are to do.

    Attributes:
        root: directory of the campaign, with the memories of the hosts and the run.
        log: file of the lines.
        hosts: numbers of the hosts, in the order of the ranks.
        layout: of the model.
        durable: every so many steps a snapshot goes to storage.
        point: where the victim dies.
        victim: the rank.
        steps: after so many steps of this life the victim dies, or the run ends if there is no victim.
        pause: seconds of each step.
    """

    root: str
    log: str
    hosts: list[int]
    layout: Layout
    durable: int
    point: Point = ""
    victim: int = -1
    steps: int = 0
    pause: float = 0.0


class Line(msgspec.Struct):
    """What a rank tells.

    Attributes:
        rank: that tells it.
        word: "start", "resume", "begin", "mark", "end" or "wrong".
        step: of the training.
        text: id of the process, the operation, or what is wrong.
        hosts: whose memories were read, in "resume".
        opened: files of checkpoints in storage that were opened for it.
    """

    rank: int
    word: str
    step: int = 0
    text: str = ""
    hosts: int = 0
    opened: int = 0


def folder_of(root: str | os.PathLike[str], host: int) -> Path:
    """Return the memory of a host."""
    return Path(root) / f"host-{host}"


def run_of(root: str | os.PathLike[str]) -> Path:
    """Return the run's directory in storage."""
    return Path(root) / "store" / "run"


@dataclass(slots=True)
class _Rank:
    """One rank."""

    order: Order
    rank: int
    log: int
    step: int = 0
    last: int = -1
    parts: int = 0
    opened: int = 0
    is_resuming: bool = False

    def tell(self, word: str, text: str = "", **more: int) -> None:
        """Append a line; it is there, whole, when this returns."""
        os.write(self.log, msgspec.json.encode(Line(self.rank, word, self.step, text, **more)) + b"\n")

    def dies_at(self, point: Point) -> None:
        """Die, if it is this point of the last step."""
        is_victim = self.order.victim == self.rank or point == "returned"
        if self.order.point == point and is_victim and self.step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self) -> None:
        """Train until the order or a kill ends it."""
        order, host = self.order, self.order.hosts[self.rank // PER_HOST]
        states = make_states(order.layout, PER_HOST)
        tiers = bcp.Tiers(folder=folder_of(order.root, host), node=f"host-{host}", copies=2)
        options = bcp.SaveOptions(edit=self._edited, record=False)
        with bcp.Run(
            run_of(order.root),
            states,
            save=1,
            durable=order.durable,
            keep=2,
            tiers=tiers,
            save_options=options,
            load_options=bcp.LoadOptions(record=False),
        ) as run:
            self.is_resuming = True
            self.step = first = run.resume()
            self.is_resuming = False
            if first and (wrong := difference(states, first)):
                self.tell("wrong", wrong)
            self.tell("resume", str(run.resumed), hosts=run.resumed.hosts, opened=self.opened)
            self.last = first + order.steps if order.steps else -1
            for self.step in itertools.count(first + 1):
                train(states, self.step)
                self.tell("begin")
                self.parts = 0
                pending = run.maybe_save(self.step)
                if self.step == self.last and order.point == "returned" and pending is not None:
                    pending.released()
                    self.dies_at("returned")
                if self.step == self.last and order.victim < 0:
                    break
                time.sleep(order.pause)
        self.tell("end")

    def _edited(self, graph: Any) -> Any:
        async def count(item: Any) -> Any:
            self.parts += 1
            if self.parts > 1:
                self.dies_at("copies")
            return item

        return graph.before("d2h", Stage("count", count, workers=1))

    def watch(self) -> None:
        """Look at the marks of this process, and at files of checkpoints that it opens in storage."""
        mark = NodeFolder.mark

        def marked(folder: NodeFolder, each: Mark) -> None:
            self.dies_at("before mark")
            mark(folder, each)
            self.tell("mark", each.operation)
            self.dies_at("after mark")

        NodeFolder.mark = marked  # type: ignore[assignment,method-assign]  # the class as this process has it
        memories = f"{self.order.root}/host-"

        def heard(event: str, words: tuple[Any, ...]) -> None:
            if self.is_resuming and event == "open":
                path = os.fsdecode(words[0]) if isinstance(words[0], str | bytes) else ""
                self.opened += path.endswith(".safetensors") and not path.startswith(memories)

        sys.addaudithook(heard)


def rank_of(order: Order) -> None:
    """Be the rank that the environment names."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    one = _Rank(order, rank, log)
    one.tell("start", str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    one.watch()
    one.run()
    dist.destroy_process_group()


def forked(order: Order, rank: int, host: str, address: tuple[str, int], errors: str) -> None:
    """Be a rank in a process that was forked: enter its host, and have the variables that torchrun would give it."""
    os.setpgid(0, 0)
    out = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    enter(host)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(len(order.hosts) * PER_HOST),
        LOCAL_RANK=str(rank % PER_HOST),
        LOCAL_WORLD_SIZE=str(PER_HOST),
        MASTER_ADDR=address[0],
        MASTER_PORT=str(address[1]),
    )
    rank_of(order)


if __name__ == "__main__":
    rank_of(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Order))
