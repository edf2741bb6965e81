"""A tree of ranks, in which the ranks of one host are together. Pure topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bcp.errors import InputError

__all__ = ["Place", "Tree"]


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in the tree.

    Attributes:
        rank: this rank.
        world_size: how many ranks there are.
        parent: the rank above it; None for rank 0.
        children: the ranks right below it.
        sizes: how many ranks each child stands for, itself included.
        order: all ranks as a walk through the tree meets them: a rank, then each of its children's subtrees. Rank 0
            alone has to know it, and it is empty for all others.
    """

    rank: int
    world_size: int
    parent: int | None
    children: tuple[int, ...]
    sizes: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many ranks this one stands for, itself included."""
        return 1 + sum(self.sizes)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that this one talks to."""
        return self.children if self.parent is None else (self.parent, *self.children)


@dataclass(frozen=True, slots=True)
class Tree:
    """The tree, with rank 0 at its root.

    The lowest rank of each host leads it. The ranks of a host hang below their leader, and the leaders below
    rank 0, both with the same fan-out: a leader has at most ``fanout`` children on its host and ``fanout`` leaders.

    Attributes:
        parents: the rank above each rank; None for rank 0.
        children: the ranks below each rank, ascending in each of the two kinds.
    """

    parents: tuple[int | None, ...]
    children: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, hosts: Sequence[str], fanout: int) -> Tree:
        """Grow the tree of the ranks that live on these hosts, one a rank.

        100,000 ranks take 0.1 s. Raises InputError where there is no rank, or the fan-out is less than 1.
        """
        if not hosts or fanout < 1:
            raise InputError(f"{len(hosts)} ranks, fan-out {fanout}: both have to be at least 1")
        on_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            on_host.setdefault(host, []).append(rank)
        parents: list[int | None] = [None] * len(hosts)
        children: list[list[int]] = [[] for _ in hosts]
        for ranks in (*on_host.values(), [ranks[0] for ranks in on_host.values()]):
            for position, rank in enumerate(ranks[1:]):
                parent = ranks[position // fanout]
                parents[rank] = parent
                children[parent].append(rank)
        return cls(tuple(parents), tuple(map(tuple, children)))

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, each one right before its children's subtrees."""
        order: list[int] = []
        waiting = [0]
        while waiting:
            rank = waiting.pop()
            order.append(rank)
            waiting.extend(reversed(self.children[rank]))
        return tuple(order)

    def places(self) -> list[Place]:
        """Return every rank's place."""
        order = self.order
        sizes = [1] * len(order)
        for rank in reversed(order):
            if (parent := self.parents[rank]) is not None:
                sizes[parent] += sizes[rank]
        return [
            Place(
                rank,
                len(order),
                self.parents[rank],
                children,
                tuple(sizes[child] for child in children),
                order if rank == 0 else (),
            )
            for rank, children in enumerate(self.children)
        ]
