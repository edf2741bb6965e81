"""Lives of a job that are killed one after the other; each next one is judged by what docs/tiers.md promises."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import bcp
from benchmarks.chaos_tiers.job import PER_HOST, Order, folder_of, run_of
from benchmarks.chaos_tiers.life import LOOK_SECONDS, SILENCE_SECONDS, HungError, Life
from benchmarks.chaos_tiers.memories import agents_of, committed, flip, is_copied, kill, marked, used
from benchmarks.chaos_tiers.network import Network
from benchmarks.chaos_tiers.plan import HOSTS, LifePlan
from benchmarks.chaos_tiers.store import Store
from benchmarks.chaos_tiers.training import SHAPES, truth

__all__ = ["Campaign", "Outcome"]

NBYTES = sum(8 * rows * (rest[0] if rest else 1) for rows, *rest in SHAPES.values())
"""Bytes of a snapshot: parameters and momenta."""

MOST_NBYTES, MOST_FILES = 4 * NBYTES, 800
"""Most bytes of data and files on a host; of ended saves it keeps up to 256 notes of each kind.

A host has a quarter of a snapshot, or a third if it is one of three. It has up to five of its own, copies of two, and
the one from which the life has begun, in the layout before. Files are longer than their tensors by up to a sixth here.
"""

LAST_STEPS, TRIES = 3, 5
KINDS = "model", "optimizer"
MOMENTUM = "state.{}.momentum_buffer"
"""Name of a momentum in a checkpoint."""

NO_ANSWER = "does not serve this job"
"""In the reason for which a copy was passed over: the next copy was read at once, as docs/tiers.md says."""


@dataclass(slots=True)
class Outcome:
    """What a campaign has found.

    Attributes:
        kills: by kind, and how often something fell silent.
        by_torchrun: kills in lives that torchrun has started.
        lost: words about steps that were lost beyond the table in docs/tiers.md.
        wrong: words about values, or promises other than that.
        hung: words about what has not come in time.
        near: resumptions from memory without a byte of storage.
        unanswered: resumptions from memory that have read files in storage, for an agent did not answer in time.
        far: resumptions from storage.
        fewer: resumptions of 6 ranks without a byte of storage.
        returned: kills of all ranks behind a call, with agents, whose snapshot became durable without a further life.
        resumed: seconds from the start of a life until all ranks have resumed.
        most_nbytes: bytes of data files on a host.
        most_files: files on a host.
    """

    kills: Counter[str] = field(default_factory=Counter)
    by_torchrun: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    near: int = 0
    unanswered: int = 0
    far: int = 0
    fewer: int = 0
    returned: int = 0
    resumed: list[float] = field(default_factory=list)
    most_nbytes: int = 0
    most_files: int = 0


class Campaign:
    """One job, from its first life to its end.

    Attributes:
        outcome: so far.
    """

    def __init__(self, network: Network, store: Store, root: Path, work: Path, seed: int) -> None:
        """Take an empty directory on a tmpfs for the memories, and one for what processes write."""
        self._network, self._store, self._root, self._work = network, store, root, work
        self._run, self._drawn = run_of(root), random.Random(seed)  # noqa: S311 -- no secret
        self._hosts = [*range(HOSTS)]
        self._least = self._most = 0
        self._why = "the first life"
        self.outcome = Outcome()

    def run(self, lives: Sequence[LifePlan], minutes: float = float("inf")) -> Outcome:
        """Live and kill as planned, and begin no life after so many minutes; then train to an end."""
        until = time.monotonic() + 60 * minutes
        for life in lives:
            if time.monotonic() > until:
                print(f"{minutes} minutes are over before life {life.number}", flush=True)
                break
            try:
                self._live(life)
            except HungError as error:
                self._say(self.outcome.hung, life, str(error))
                kill(agents_of(self._root))
                self._least, self._most = 0, 10**9
        self._end(len(lives))
        return self.outcome

    def close(self) -> None:
        """Kill the agents that are left."""
        kill(agents_of(self._root))

    # -- one life ----------------------------------------------------------------------------------

    def _live(self, plan: LifePlan) -> None:
        """Start a life, see it resume, and kill it."""
        began = time.monotonic()
        life = self._started(plan)
        try:
            self._resumed(plan, life, began)
            first = life.step_of_all("resume")
            if plan.meanwhile is not None:
                life.wait(lambda: life.step_of_all("mark") > first, "the first step")
                self._disturb(plan, life)
            self._strike(plan, life, first)
        finally:
            life.close()
        self._look_at_storage(plan)

    def _started(self, plan: LifePlan, *, ends_well: bool = False) -> Life:
        order = Order(
            root=str(self._root),
            log=str(self._work / f"life-{plan.number}.lines"),
            hosts=self._hosts,
            layout=plan.layout,
            durable=plan.durable,
            point=plan.point,
            victim=-1 if ends_well else plan.victim % (PER_HOST * len(self._hosts)),
            steps=plan.steps if plan.point or ends_well else 0,
            pause=plan.pause,
        )
        return Life(self._network, self._work, plan.number, order, by_torchrun=plan.by_torchrun)

    def _resumed(self, plan: LifePlan, life: Life, began: float) -> None:
        """Wait until all ranks are back, and judge from where."""
        life.wait(lambda: len(life.lines("resume")) == life.size, f"all ranks resume after {self._why}")
        self.outcome.resumed.append(time.monotonic() - began)
        lines = life.lines("resume")
        steps = {line.step for line in lines}
        if len(steps) > 1:
            self._say(self.outcome.wrong, plan, f"ranks have resumed from steps {sorted(steps)}")
        step = min(steps)
        if step < self._least:
            self._say(self.outcome.lost, plan, f"{lines[0].text}, and {self._least} was to be kept after {self._why}")
        if step > self._most:
            self._say(self.outcome.wrong, plan, f"resumed from step {step}, and {self._most} was the last one")
        for line in life.lines("wrong"):
            self._say(self.outcome.wrong, plan, f"step {line.step} on rank {line.rank}: {line.text}")
        near = {line.hosts > 0 for line in lines}
        opened = sum(line.opened for line in lines)
        reasons = life.passed_over() if near == {True} and opened else []
        unanswered = bool(reasons) and all(NO_ANSWER in reason for reason in reasons)
        if near == {True} and opened and not unanswered:
            words = "\n".join(reasons)
            self._say(self.outcome.wrong, plan, f"{opened} files of storage were opened: {lines[0].text}\n{words}")
        self.outcome.unanswered += unanswered
        is_near = near == {True} and not opened
        self.outcome.near += is_near
        self.outcome.far += near != {True} and step > 0
        self.outcome.fewer += is_near and life.size < HOSTS * PER_HOST
        print(f"life {plan.number}: {life.size} ranks, {plan.layout}, {lines[0].text}", flush=True)

    def _disturb(self, plan: LifePlan, life: Life) -> None:
        """Let something happen to agents or storage while the job goes on."""
        kind, host = plan.meanwhile, folder_of(self._root, self._hosts[plan.host % len(self._hosts)])
        agents = agents_of(self._root if kind == "agents" else host)
        time.sleep(plan.moment)
        self._count(plan, str(kind))
        if kind == "silent storage":
            self._silence(plan, life)
            return
        before = life.newest()
        if kind == "silent agent":
            kill(agents, signal.SIGSTOP)
        else:
            kill([each for each in agents if "--child" in each.info["cmdline"]] if kind == "agent's child" else agents)
        life.wait(lambda: life.newest() > before + 1 or plan.point, f"steps behind {kind!r}")
        if kind == "silent agent":
            time.sleep(plan.moment)
            kill(agents, signal.SIGCONT)

    def _silence(self, plan: LifePlan, life: Life) -> None:
        """Let storage be silent for some steps; but a save of a step that has a folder there waits for it."""
        self._store.freeze()
        try:
            before = life.newest()
            asked = any(int(path.name[5:13]) > before for path in self._run.glob("step-*"))
            life.wait(lambda: life.newest() > before + 1 or plan.point or asked, "steps beside a silent storage")
            time.sleep(plan.moment)
        finally:
            self._store.thaw()

    def _strike(self, plan: LifePlan, life: Life, first: int) -> None:
        """End a life as planned; note from where the next one has to go on."""
        end, count = plan.end, len(self._hosts)
        place = plan.host % count
        hit = [self._hosts[place]]
        if end in ("neighbours wiped", "opposite hosts wiped"):
            hit.append(self._hosts[(place + (1 if end == "neighbours wiped" or count < HOSTS else 2)) % count])
        if plan.point:
            life.wait(lambda: self._has_struck(life), f"the victim dies at {plan.point!r}")
        else:
            aim = first + plan.steps
            life.wait(lambda: life.step_of_all("mark") >= aim, f"step {aim}")
            if end in ("host lost", "host left out"):
                life.wait(lambda: self._copied(life) > first, "a snapshot that all hosts have copied")
            time.sleep(plan.moment)
        copied = self._copied(life)
        self._count(plan, end)
        if end == "rank":
            life.kill([life.order.victim])
        elif end == "host's ranks":
            life.kill(life.ranks_of(hit[0]))
        elif end in ("all ranks", "bit"):
            life.kill(range(life.size))
        elif end == "ranks and agents":
            life.kill(range(life.size))
            kill(agents_of(self._root))
        elif end not in ("copies", "before mark", "after mark", "returned"):
            self._lose(life, hit, is_wiped=end != "host left out")
        if not plan.is_alone:
            time.sleep(plan.moment)
            life.kill(range(life.size))
        life.end(f"after {end!r}")
        self._expect(plan, life, first, copied, hit)

    def _has_struck(self, life: Life) -> bool:
        dead = [not each for each in life.alive()]
        return bool(dead) and (all(dead) if life.order.point == "returned" else any(dead))

    def _lose(self, life: Life, hosts: Sequence[int], *, is_wiped: bool) -> None:
        """Let hosts go down, with their ranks, agents and memories; or let ranks end on a host that is left out."""
        for host in hosts:
            life.kill_torchrun(host)
            life.kill(life.ranks_of(host))
            if is_wiped:
                folder = folder_of(self._root, host)
                kill(agents_of(folder))
                while agents_of(folder):
                    time.sleep(0.01)
                shutil.rmtree(folder)

    def _expect(self, plan: LifePlan, life: Life, first: int, copied: int, hit: Sequence[int]) -> None:
        """Note the oldest step from which the next life may go on, as the table in docs/tiers.md has it."""
        durable = max(committed(self._run), default=0)
        self._most, self._why = max(life.newest(), durable), f"{plan.end!r} on {hit} in life {plan.number}"
        kept = max(first, life.step_of_all("mark"))
        if plan.end in ("host wiped", "opposite hosts wiped", "host lost", "host left out"):
            self._least = max(copied, durable)
            if plan.end == "opposite hosts wiped" and len(self._hosts) < HOSTS:  # of three, any two are neighbours
                self._least = durable
        elif plan.end == "neighbours wiped":
            self._least = durable
        else:
            self._least = kept
        if plan.end == "returned" and plan.meanwhile in (None, "agent's child", "silent agent"):
            _wait(lambda: kept in committed(self._run), f"the agents make step {kept} durable: {life.words()}")
            self.outcome.returned += 1
        self._hosts = [*range(HOSTS)]
        if plan.end in ("host lost", "host left out"):
            self._hosts.remove(hit[0])
        if plan.end == "bit":
            self._flip(kept, durable)

    def _flip(self, kept: int, durable: int) -> None:
        """Flip a bit in the memory of a host."""
        everywhere = [each for host in self._hosts for each in marked(folder_of(self._root, host))]
        flipped = flip(everywhere, self._drawn)
        if flipped is None:
            return
        others = [each for each in everywhere if each.mark == flipped.mark and each.host != flipped.host]
        self._least = kept if others or flipped.step < kept else durable
        self._why += f", of rank {flipped.mark.rank} in step {flipped.step}, with {len(others)} other copies"

    def _copied(self, life: Life) -> int:
        """Return the newest step of this life that all hosts have copied; 0 for none."""
        hosts = [folder_of(self._root, host) for host in self._hosts]
        return max((step for each, step in life.operations().items() if is_copied(hosts, each)), default=0)

    # -- storage and the end -----------------------------------------------------------------------

    def _look_at_storage(self, plan: LifePlan) -> None:
        """Compare the newest checkpoint with the truth, and look how much the hosts have."""
        there = committed(self._run)
        if there:
            step, path = [*there.items()][-1]
            if wrong := _difference(path, step):
                self._say(self.outcome.wrong, plan, f"{path.name} in storage: {wrong}")
        for host in self._hosts:
            nbytes, files = used(folder_of(self._root, host))
            self.outcome.most_nbytes = max(self.outcome.most_nbytes, nbytes)
            self.outcome.most_files = max(self.outcome.most_files, files)
            if nbytes > MOST_NBYTES or files > MOST_FILES:
                self._say(self.outcome.wrong, plan, f"host {host} has {files} files, {nbytes} bytes of data")

    def _end(self, number: int) -> None:
        """Let a last life end well: storage has its last step, the agents end, and the memories are empty."""
        last = LifePlan(number, steps=LAST_STEPS)
        life, began = self._started(last, ends_well=True), time.monotonic()
        try:
            self._resumed(last, life, began)
            life.end("which the run ends well")
            if life.codes() != [0] * life.size:
                self._say(self.outcome.wrong, last, f"the last life ended with {life.codes()}: {life.words()}")
            _wait(lambda: not agents_of(self._root), "the agents end behind the run")
            step = life.step_of_all("end")
            if max(committed(self._run), default=0) != step:
                self._say(self.outcome.wrong, last, f"storage has {[*committed(self._run)]} behind step {step}")
            self._look_at_storage(last)
            left = [used(folder_of(self._root, host))[0] for host in self._hosts]
            if any(left):
                self._say(self.outcome.wrong, last, f"the hosts have {left} bytes of data behind the end")
        except HungError as error:
            self._say(self.outcome.hung, last, str(error))
        finally:
            life.close()

    def _count(self, plan: LifePlan, kind: str) -> None:
        self.outcome.kills[kind] += 1
        self.outcome.by_torchrun += plan.by_torchrun and not kind.startswith("silent")

    def _say(self, words: list[str], plan: LifePlan, text: str) -> None:
        words.append(f"life {plan.number}: {text}")
        print(f"!! {words[-1]}\n   {plan}", flush=True)


def _difference(path: Path, step: int) -> str:
    """Say what of a checkpoint is not the truth; empty for nothing. An agent may be replacing it by a newer save."""
    tries = 0
    while True:
        try:
            with bcp.Checkpoint(path) as checkpoint:
                for name, both in truth(step).items():
                    for key, kind, whole in zip((name, MOMENTUM.format(name)), KINDS, both, strict=True):
                        if not np.array_equal(checkpoint.read(key, kind=kind).numpy(), whole):
                            return f"{key} of {kind} has other values"
        except bcp.BcpError as error:
            tries += 1
            if tries == TRIES:
                return str(error)
            time.sleep(LOOK_SECONDS)
        else:
            return ""


def _wait(is_true: Callable[[], object], what: str) -> None:
    """Wait until something is true. Raises HungError."""
    end = time.monotonic() + SILENCE_SECONDS
    while not is_true():
        if time.monotonic() > end:
            raise HungError(f"not in {SILENCE_SECONDS:.0f} s: {what}")
        time.sleep(LOOK_SECONDS)
