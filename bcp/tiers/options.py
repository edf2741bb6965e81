"""What a user says about the memory tier of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from bcp.errors import InputError
from bcp.events import OWN_HOST, REBUILT, STORED
from bcp.tiers.wire import check_address

__all__ = ["Tiers"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- each job has a private directory there
NAME_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Keep the snapshots of a run in the memory of its hosts, where they outlive the trainers (paper sec. 3.1, 7).

    A save copies the state into files on a host's tmpfs and marks them; then training goes on. An agent on each host, a
    process of its own, makes the checkpoint durable. If trainers die behind the mark, nothing of the step is lost.
    :meth:`bcp.Run.resume` comes back from the memories, on any number of ranks in any layout, if they have all files.

    A host needs memory for two snapshots of its ranks, and for a third one while an older one is being stored. It
    counts as memory of whoever has touched it first: the limit of a container needs room for it.

    Attributes:
        folder: a directory on a tmpfs, for this job alone, the same for all ranks of a host. None: one in ``/dev/shm``
            with user and path of the run in its name. A warning tells of a directory on a disk.
        agent: ``"spawn"``: the first rank of a host starts its agent, which outlives torchrun. ``"external"``: somebody
            else runs ``python -m bcp.agent`` on each host, as schedulers need it that end all processes of a job.
        node: name of this host, other than those of all other hosts of the job, and the same after a restart. None: the
            kernel's boot id and network name space.
        listen: where the agent that is started lets other hosts of the job read, as ``HOST`` or ``HOST:PORT``. They
            need the job's secret. None: the address towards the job's other hosts, as ``$BCP_ADDRESS`` says it; the
            loopback for a job of one host.
        copies: hosts that have each file, the trainers' own host counted in. With 2, one lost host loses nothing that
            was copied. The agents copy while training goes on, and the next snapshot when all hosts have the one
            before. A host needs memory for two more snapshots, and for each copy after the first for two again.
            ``"auto"``: the same as 2, without network for tensors with replicas on several hosts, as in DDP and HSDP.
            Ranks with replicas write each other's tensors: in such a save, each rank copies and writes twice as much.
        parity: most hosts of a group, from 3 on, that keep parity of each other's files in the place of copies; None
            for copies. A group of n hosts that loses one loses nothing for which parity was made, and each host needs
            a share of a copy's memory, 1 / (n - 1). Hosts are divided evenly, with 2 hosts of a group at least.
        stride: number of hosts between a host and the one that copies it, in the order of ranks, or between neighbours
            in a group with parity. With the number of hosts in a rack, a lost rack loses nothing.
        pace: bytes a second that each host copies from others; None for no limit.
        on_full: what a save does if the tmpfs of a host has no room for it. ``"raise"``: it raises a StorageError with
            the numbers. ``"durable"``: all ranks save this step to storage themselves, with a warning; training waits
            as it does for a save without tiers.
        survivors: let :meth:`bcp.Run.save_survivors` save what the ranks that are left hold together. The run then
            looks at the states at the end of each step: it counts writes to the model and begun optimizer steps, and
            copies extra states.

    Raises:
        InputError: a value cannot be used.

    Example::

        with bcp.Run("gs://bucket/run-7", states, save=50, durable=1000, tiers=bcp.Tiers()) as run:
            for step in range(run.resume() + 1, steps + 1):
                train(step)
                run.maybe_save(step)

    """

    folder: str | os.PathLike[str] | None = None
    agent: Literal["spawn", "external"] = "spawn"
    node: str | None = None
    listen: str | None = None
    copies: int | Literal["auto"] = 1
    parity: int | None = None
    stride: int = 1
    pace: float | None = None
    on_full: Literal["raise", "durable"] = "raise"
    survivors: bool = False

    def __post_init__(self) -> None:
        if self.agent not in ("spawn", "external"):
            raise InputError(f"Tiers(agent={self.agent!r}): pass 'spawn' or 'external'")
        if self.on_full not in ("raise", "durable"):
            raise InputError(f"Tiers(on_full={self.on_full!r}): pass 'raise' or 'durable'")
        for name in ("node", "listen"):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text and text.isprintable()):
                raise InputError(f"Tiers({name}={text!r}): pass a text, or None")
        if self.listen is not None:
            check_address(self.listen)
        if self.node in (OWN_HOST, REBUILT, STORED):
            raise InputError(f"Tiers(node={self.node!r}) is a word of reports about resumptions: give the host a name")
        self._check_folder()
        self._check_copies()
        if self.pace is not None and not (isinstance(self.pace, int | float) and 0 < self.pace < float("inf")):
            raise InputError(f"Tiers(pace={self.pace!r}): pass bytes a second, as 1e9, or None")
        if not isinstance(self.survivors, bool):
            raise InputError(f"Tiers(survivors={self.survivors!r}): pass True or False")
        if self.agent == "external" and self.listen is not None:
            raise InputError(
                f"Tiers(agent='external', listen={self.listen!r}): say it to the agent, as in "
                f"python -m bcp.agent --listen {self.listen}"
            )

    def _check_folder(self) -> None:
        if self.folder is None:
            return
        if not (isinstance(self.folder, str | os.PathLike) and os.fspath(self.folder)):
            raise InputError(
                f"Tiers(folder={self.folder!r}): pass a directory on a tmpfs, as '/dev/shm/run-7', or None"
            )
        if "://" in str(os.fspath(self.folder)):
            raise InputError(
                f"Tiers(folder={self.folder!r}) is a URL: pass a directory on a tmpfs, as '/dev/shm/run-7'. The run's "
                "URL is the first argument of bcp.Run"
            )

    def _check_copies(self) -> None:
        if self.copies != "auto" and not _is_whole(self.copies, 1):
            raise InputError(f"Tiers(copies={self.copies!r}): pass a whole number from 1 on, or 'auto'")
        if not _is_whole(self.stride, 1):
            raise InputError(f"Tiers(stride={self.stride!r}): pass a whole number from 1 on")
        if self.parity is not None and not _is_whole(self.parity, 3):
            raise InputError(
                f"Tiers(parity={self.parity!r}): pass the most hosts of a group, from 3 on, or None. Two hosts keep "
                "copies of each other: pass copies=2"
            )
        if self.parity is not None and self.copies != 1:
            raise InputError(
                f"Tiers(copies={self.copies!r}, parity={self.parity}): parity is in the place of copies; pass one of "
                "them"
            )

    def root(self, url: str) -> Path:
        """Return the directory of a run on this host, absolute."""
        if self.folder is not None:
            return Path(os.fspath(self.folder)).absolute()
        return SHARED_MEMORY / f"bcp-{os.geteuid()}-{sha256(url.encode()).hexdigest()[:NAME_DIGITS]}"


def _is_whole(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least
