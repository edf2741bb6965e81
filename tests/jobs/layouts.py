"""Random layouts of DTensors, and the ranks of a sub-world: for tests that run inside ``ranks4``."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from bcp.coordinators import GrpcCoordinator
from bcp.coordinators.hosts import private_connection
from bcp.coordinators.tree.coordinator import FANOUT
from bcp.coordinators.tree.rendezvous import StoreRendezvous

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 4), (4, 1), (2, 1), (1, 3)]
DTYPES = ["float32", "bfloat16", "float64", "int64", "uint8", "float8_e4m3fn", "complex64", "bool"]


@dataclass(frozen=True)
class World:
    """A mesh over the first ranks, and how each tensor is placed on it: "R", "S0", "S1" ... or "T0" (strided)."""

    mesh: tuple[int, ...]
    placements: tuple[tuple[str, ...], ...]

    @property
    def size(self) -> int:
        return math.prod(self.mesh)


@dataclass(frozen=True)
class Case:
    """Tensors, the world that saves them, and the world that loads them."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    saved: World
    loaded: World
    overlap: bool
    transposed: bool


def placement_names(shape: tuple[int, ...], mesh: tuple[int, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw a placement for each mesh dimension."""
    dims = [f"S{dim}" for dim in range(len(shape))]
    plain = st.tuples(*(st.sampled_from(["R", *dims]) for _ in mesh))
    if len(mesh) != 2 or not shape:
        return plain
    strided = st.sampled_from([("T0", "S0"), ("T0", "R"), *((("T0", "S1"),) if len(shape) > 1 else ())])
    return st.one_of(plain, plain, strided)


@st.composite
def worlds(draw: st.DrawFn, shapes: tuple[tuple[int, ...], ...]) -> World:
    mesh = draw(st.sampled_from(MESHES))
    return World(mesh, tuple(draw(placement_names(shape, mesh)) for shape in shapes))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = st.lists(st.integers(1, 13), max_size=3).map(tuple)
    big = st.sampled_from([(700, 333), (5, 70000), (400001,)])
    shapes = tuple(draw(st.lists(st.one_of(shape, shape, shape, big), min_size=1, max_size=4)))
    return Case(
        shapes=shapes,
        dtypes=tuple(draw(st.sampled_from(DTYPES)) for _ in shapes),
        saved=draw(worlds(shapes)),
        loaded=draw(worlds(shapes)),
        overlap=draw(st.booleans()),
        transposed=draw(st.booleans()),
    )


# -- on the ranks ------------------------------------------------------------------------------------


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Make a mesh over the first ranks; collective over the whole world, so called everywhere in the same order."""
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape), mesh_dim_names=names)


@functools.cache
def coordinator_of(size: int) -> GrpcCoordinator:
    """Coordinate the first ``size`` ranks."""
    store = private_connection(distributed_c10d._get_default_store())
    rank = dist.get_rank()
    return GrpcCoordinator(rank, size, StoreRendezvous(store, f"first{size}", rank, size, FANOUT))


def values(index: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return the global tensor: bytes that differ everywhere, as any dtype."""
    count = math.prod(shape)
    if dtype == "bool":
        return (torch.arange(count) % 3 == 0).view(shape)
    itemsize = getattr(torch, dtype).itemsize
    generator = torch.Generator().manual_seed(index)
    raw = torch.randint(1, 120, (max(count, 1) * itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, dtype))[:count].view(shape)


def placed(name: str, mesh: tuple[int, ...]) -> Placement:
    if name == "R":
        return Replicate()
    return Shard(int(name[1:])) if name[0] == "S" else _StridedShard(int(name[1:]), split_factor=mesh[1])


def shard(whole: torch.Tensor, mesh: tuple[int, ...], names: tuple[str, ...]) -> DTensor:
    """Cut this rank's piece out, by torch's own rules and without communication."""
    bits = whole.view(torch.uint8) if whole.dtype.is_complex is False and whole.itemsize == 1 else whole
    placements = [placed(name, mesh) for name in names]
    made = distribute_tensor(bits.clone(), mesh_of(mesh), placements, src_data_rank=None)
    local = made.to_local().view(whole.dtype) if bits is not whole else made.to_local()
    return DTensor.from_local(
        local, mesh_of(mesh), placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits_of(left) == bits_of(right)


def bits_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1).clone()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
