"""This process's place in the job, as a launcher gives it in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bcp.errors import InputError

__all__ = ["Place"]

_PORTS = range(1, 1 << 16)


@dataclass(frozen=True, slots=True)
class Place:
    """One rank, and where the job's store is.

    Attributes:
        rank: this rank.
        world_size: how many ranks there are.
        server: host and port of the store; None for a process alone, which needs none.
        serves: whether this process serves the store, as rank 0 does without an agent of torchrun.
    """

    rank: int = 0
    world_size: int = 1
    server: tuple[str, int] | None = None
    serves: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read the place from the variables of ``init_method="env://"``.

        Raises:
            InputError: some are missing or wrong.

        """
        if not environment.get("RANK") and not environment.get("WORLD_SIZE"):
            return cls()
        rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if rank not in range(world_size):
            raise InputError(f"RANK={rank} has to be at least 0 and less than WORLD_SIZE={world_size}")
        if world_size == 1:
            return cls()
        host, port = environment.get("MASTER_ADDR", ""), _number(environment, "MASTER_PORT")
        if not host or port not in _PORTS:
            raise InputError(f"MASTER_ADDR={host!r} and MASTER_PORT={port} do not say where the job's store is")
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(rank, world_size, (host, port), serves=rank == 0 and not agent)

    @property
    def store(self) -> str:
        """Return the store's name for people."""
        return "the store" if self.server is None else "{}:{}".format(*self.server)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{name}={text!r} is no number; start the doctor with a launcher as torchrun, or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT on every rank"
        ) from None
