"""All ranks of a mesh in one process: torch's own scatter and gather of DTensors, and their reading by bcp.

Local tensors come from ``distribute_tensor``, whole ones from ``full_tensor``. Both are torch's code, but for the
all-gather, which puts together the tensors that the ranks pass to it.

As a program it compares them on all meshes of up to 4 dimensions and 12 ranks, for hours::

    PYTHONPATH=tests/support python tests/unit/planners/every_rank.py
"""

from __future__ import annotations

import argparse
import collections
import itertools
import logging
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from planning import assembled, pieces
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as specs
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from bcp.errors import StateError
from bcp.planners import Fsdp2Planner

__all__ = ["MISSING", "EveryRank", "Verdict", "factors_of", "meshes", "placements_of", "strided", "verdict"]

Verdict = tuple[str, str]
"""torch's gather: "same", "permuted" or "fails"; bcp's reading: "same", "as gathered", "refused" or "wrong"."""

PLANNER = Fsdp2Planner()

NEEDED: list[tuple[Any, str]] = [
    (specs, "ShardOrderEntry"),
    (specs.DTensorSpec, "use_strided_shard_as_shard_order"),
    (funcol, "all_gather_single"),
    (_redistribute, "_gen_transform_infos"),
    (_redistribute, "clear_redistribute_planner_cache"),
]
MISSING = [name for owner, name in NEEDED if not hasattr(owner, name)]
"""Private names that this module takes the place of, and that the installed torch has not (torch 2.6) or no longer."""


def strided(factor: int, dim: int = 0) -> Placement:
    """Return a strided shard."""
    return _StridedShard(dim, split_factor=factor)


class _NotYetError(Exception):
    """Another rank has not passed its tensor to an all-gather."""


class EveryRank:
    """The ranks of one mesh, each with a mesh object of its own."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        ranks = torch.arange(math.prod(shape)).view(*shape)
        self.meshes = [DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank) for rank in range(ranks.numel())]
        self.ranks = ranks

    def scattered(self, whole: torch.Tensor, placements: Sequence[Placement]) -> list[DTensor]:
        """Distribute a tensor by torch's own rules."""
        return [distribute_tensor(whole, mesh, placements, src_data_rank=None) for mesh in self.meshes]

    def made(
        self, whole: torch.Tensor, placements: Sequence[Placement], parts: Iterable[torch.Tensor]
    ) -> list[DTensor]:
        """Make DTensors of local tensors."""
        known: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        each = zip(self.meshes, parts, strict=True)
        return [DTensor.from_local(local, mesh, placements, **known) for mesh, local in each]

    def viewed(self, tensors: Sequence[DTensor], shape: Sequence[int]) -> list[DTensor]:
        """View tensors in another shape; torch remembers the mesh of one rank for all, which is set right here."""
        views = [tensor.view(*shape) for tensor in tensors]
        order = {"use_strided_shard_as_shard_order": views[0]._spec.use_strided_shard_as_shard_order}
        return [_placed(view, mesh, **order) for view, mesh in zip(views, self.meshes, strict=True)]

    def ordered(self, tensors: Sequence[DTensor], *mesh_dims: int) -> list[DTensor]:
        """Let tensors state that these mesh dimensions cut dimension 0 in this order."""
        order = (specs.ShardOrderEntry(0, mesh_dims),)
        return [_placed(tensor, tensor.device_mesh, shard_order=order) for tensor in tensors]

    def gathered(self, tensors: Sequence[DTensor]) -> list[torch.Tensor]:
        """Return ``full_tensor()`` of every rank.

        A rank that comes to an all-gather before the others begins anew when these have passed their tensors to it.
        """
        passed: list[list[torch.Tensor]] = [[] for _ in tensors]
        done: dict[int, torch.Tensor] = {}
        while len(done) < len(tensors):
            for rank in {*range(len(tensors))} - {*done}:
                try:
                    with self._all_gather(rank, passed):
                        done[rank] = tensors[rank].full_tensor()
                except _NotYetError:
                    pass
        return [done[rank] for rank in range(len(tensors))]

    @contextmanager
    def _all_gather(self, rank: int, passed: list[list[torch.Tensor]]) -> Iterator[None]:
        """Put tensors together that the ranks have passed; empty torch's caches, which are meant for one rank."""
        steps = itertools.count()

        def all_gather(tensor: torch.Tensor, gather_dim: int, group: Any, _: str = "") -> torch.Tensor:
            step = next(steps)
            if len(passed[rank]) == step:
                passed[rank].append(tensor.clone())
            others = self.ranks.movedim(group[1], -1).reshape(-1, self.shape[group[1]])
            together = next(row for row in others.tolist() if rank in row)
            if any(len(passed[other]) <= step for other in together):
                raise _NotYetError
            return torch.cat([passed[other][step] for other in together], gather_dim)

        torchs, funcol.all_gather_single = funcol.all_gather_single, all_gather
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()
        try:
            yield
        finally:
            funcol.all_gather_single = torchs

    def read(self, tensors: Sequence[DTensor]) -> torch.Tensor:
        """Return the whole tensor that bcp's shards of all ranks make."""
        parts = [piece for tensor in tensors for piece in pieces(PLANNER.local_shards({"model": {"t": tensor}}))]
        return assembled(parts)["model", "t"] if parts else torch.zeros(tensors[0].shape, dtype=tensors[0].dtype)


def verdict(
    ranks: EveryRank, shape: Sequence[int], placements: Sequence[Placement], *, in_order: bool = False
) -> Verdict:
    """Compare torch's gather and bcp's reading of a scattered tensor with that tensor.

    bcp may also read, as FSDP2's, what torch gathers: the checkpoint then has what ``full_tensor`` returns.

    Args:
        ranks: of the mesh.
        shape: of the tensor.
        placements: of the tensor.
        in_order: whether torch is told that strided shards are cuts in mesh order, as it says itself of views.

    """
    whole = torch.arange(math.prod(shape)).view(*shape)
    tensors = ranks.scattered(whole, placements)
    if in_order:
        tensors = [_placed(tensor, tensor.device_mesh, use_strided_shard_as_shard_order=False) for tensor in tensors]
    try:
        full = ranks.gathered(tensors)
        torchs = "same" if all(torch.equal(each, whole) for each in full) else "permuted"
    except (RuntimeError, AssertionError):
        full, torchs = [], "fails"
    try:
        read = ranks.read(tensors)
    except StateError:
        return torchs, "refused"
    if torch.equal(read, whole):
        return torchs, "same"
    return torchs, "as gathered" if full and all(torch.equal(each, read) for each in full) else "wrong"


def _placed(tensor: DTensor, mesh: DeviceMesh, **order: Any) -> DTensor:
    """Return a tensor on another mesh, of which torch is told in which order the mesh dimensions cut it."""
    spec = tensor._spec
    told = specs.DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta, **order)
    return DTensor(tensor._local_tensor, told, requires_grad=False)


def meshes(dims: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of all meshes of so many dimensions and up to so many ranks."""
    every = itertools.product(range(1, ranks + 1), repeat=dims)
    return (shape for shape in every if math.prod(shape) <= ranks)


def factors_of(mesh: Sequence[int]) -> list[int]:
    """Return the split factors that a mesh may give a meaning to, and two that it may not."""
    subsets = itertools.chain.from_iterable(itertools.combinations(mesh, count) for count in range(len(mesh) + 1))
    return sorted({math.prod(subset) for subset in subsets} | ({2, 3} if len(mesh) < 3 else set()))


def placements_of(mesh: Sequence[int], tensor_dims: int = 1) -> Iterator[tuple[Placement, ...]]:
    """Yield all placements on a mesh."""
    kinds: list[Placement] = [Replicate()]
    for dim in range(tensor_dims):
        kinds += [Shard(dim), *(strided(factor, dim) for factor in factors_of(mesh))]
    return itertools.product(kinds, repeat=len(mesh))


def _main() -> None:
    """Compare everything, or a part that a seed chooses; print counts, and whatever is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh-dims", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--ranks", type=int, default=12)
    parser.add_argument("--tensor-dims", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="of all cases, drawn at random")
    parser.add_argument("--in-order", action="store_true")
    options = parser.parse_args()
    logging.disable()  # torch says of each gather that it takes several steps
    counts: collections.Counter[Verdict] = collections.Counter()
    draw = random.Random(0)  # noqa: S311 -- no secret
    for mesh in itertools.chain.from_iterable(meshes(dims, options.ranks) for dims in options.mesh_dims):
        ranks, world = EveryRank(mesh), math.prod(mesh)
        sizes = sorted({1, 5, 9, 13, world, world + 1, 2 * world - 1, 3 * world})
        shapes = [(size, *(7, 4)[: options.tensor_dims - 1]) for size in sizes]
        for placements, shape in itertools.product(placements_of(mesh, options.tensor_dims), shapes):
            if draw.random() < options.share:
                found = verdict(ranks, shape, placements, in_order=options.in_order)
                counts[found] += 1
                if found[1] == "wrong":
                    sys.stdout.write(f"{mesh} {placements} {shape} {found}\n")
        sys.stdout.write(f"{mesh} {dict(counts)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _main()
