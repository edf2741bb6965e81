"""``ShardedTensor`` in any layout, made without communication, FSDP1's sharded state dicts, and what is refused."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dtensor_layouts
import fsdp1
import layouts
import torch
from exact import ADAMW, Exact
from fsdp1 import Layout, group_of, prepare
from layouts import coordinator_of, mesh_of, same_bits
from ranks import kept
from silent import load, save
from torch import distributed as dist
from torch import nn, optim
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel.fsdp import _chunk_tensor

import bcp

Shape = tuple[int, ...]
Block = tuple[int, Shape, Shape]
"""(rank, offsets, sizes)."""

SHAPES: dict[Shape, str] = {(9, 7): "float32", (3, 5, 2): "bfloat16", (5,): "int64"}


@contextmanager
def strict_warnings() -> Iterator[None]:
    """Let no warning pass: torch warns of every function of a ShardedTensor that is called."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- layouts -----------------------------------------------------------------------------------------


def _chunks(shape: Shape, world: int, dim: int) -> list[Block]:
    """Cut one dimension as ``torch.chunk`` does; the last ranks may have nothing."""
    parts = torch.arange(shape[dim]).chunk(world)
    return [
        (
            rank,
            tuple(int(part[0]) if at == dim else 0 for at in range(len(shape))),
            tuple(len(part) if at == dim else length for at, length in enumerate(shape)),
        )
        for rank, part in enumerate(parts)
    ]


def _dealt(shape: Shape, world: int) -> list[Block]:
    """Deal rows out, the last one first: several local shards a rank."""
    rows = range(shape[0] - 1, -1, -1)
    return [(row % world, (row, *(0 for _ in shape[1:])), (1, *shape[1:])) for row in rows]


def _grid(shape: Shape, world: int) -> list[Block]:
    """Cut every dimension in two uneven parts, and deal the blocks out."""
    halves = [((0, length // 3), (length // 3, length - length // 3)) for length in shape]
    corners = itertools.product(*halves)
    return [
        (number % world, tuple(first for first, _ in corner), tuple(size for _, size in corner))
        for number, corner in enumerate(corners)
    ]


BLOCKS: dict[str, Callable[[Shape, int], list[Block]]] = {
    "rows": lambda shape, world: _chunks(shape, world, 0),
    "columns": lambda shape, world: _chunks(shape, world, len(shape) - 1),
    "dealt": _dealt,
    "grid": _grid,
    "last rank": lambda shape, world: [(world - 1, tuple(0 for _ in shape), shape)],
}
DTENSORS = {"S0": ("S0",), "S-1": ("S-1",)}
LAYOUTS = [*BLOCKS, *DTENSORS, "plain"]


def sharded(whole: torch.Tensor, blocks: Sequence[Block], group: dist.ProcessGroup | None = None) -> ShardedTensor:
    """Cut a ``ShardedTensor`` out of a tensor, by torch's own constructor."""
    metas = [ShardMetadata(list(at), list(sizes), f"rank:{rank}/cpu") for rank, at, sizes in blocks]
    shards = [
        Shard(_block(whole, meta).clone(), meta)
        for (rank, *_), meta in zip(blocks, metas, strict=True)
        if rank == dist.get_rank()
    ]
    said = ShardedTensorMetadata(metas, whole.shape, TensorProperties(whole.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, said, process_group=group)


def _block(whole: torch.Tensor, meta: ShardMetadata) -> torch.Tensor:
    at = zip(meta.shard_offsets, meta.shard_sizes, strict=True)
    return whole[tuple(slice(first, first + size) for first, size in at)]


def _laid_out(whole: torch.Tensor, how: str, world: int) -> torch.Tensor:
    """Give this rank its part of a tensor."""
    if how in BLOCKS:
        return sharded(whole, BLOCKS[how](tuple(whole.shape), world), group_of(world))
    if how in DTENSORS:
        (name,) = DTENSORS[how]
        return layouts.shard(whole, (world,), (f"S{whole.dim() - 1}" if name == "S-1" else name,))
    return whole.clone()


def whole_state() -> dict[str, torch.Tensor]:
    """Return the values: a tensor of each shape for each layout."""
    pairs = itertools.product(LAYOUTS, SHAPES.items())
    return {
        f"{how}.{len(shape)}": layouts.values(number, shape, dtype)
        for number, (how, (shape, dtype)) in enumerate(pairs)
    }


def _state(world: int, shift: int, *, zeros: bool) -> dict[str, torch.Tensor]:
    """Lay the tensors out, each in the layout that many places behind its own."""
    turned = {how: LAYOUTS[(at + shift) % len(LAYOUTS)] for at, how in enumerate(LAYOUTS)}
    return {
        fqn: _laid_out(torch.zeros_like(whole) if zeros else whole, turned[fqn.rpartition(".")[0]], world)
        for fqn, whole in whole_state().items()
    }


def save_layouts(path: Path, world: int) -> None:
    """Save a tensor of every shape in every layout."""
    prepare()
    if dist.get_rank() < world:
        state = _state(world, 0, zeros=False)
        with strict_warnings():
            bcp.save(path, {"model": state}, coordinator=coordinator_of(world))


def load_layouts(path: Path, world: int, shifts: Sequence[int]) -> list[str]:
    """Load every tensor into every layout; return the names of those that torch gathers otherwise than they were."""
    prepare()
    wrong: list[str] = []
    for shift in shifts if dist.get_rank() < world else ():
        state = _state(world, shift, zeros=True)
        with strict_warnings():
            bcp.load(path, {"model": state}, coordinator=coordinator_of(world))
        for fqn, whole in whole_state().items():
            if not same_bits(_gathered(state[fqn], whole), whole):
                wrong.append(f"{fqn}, shifted by {shift}")
    return wrong


def _gathered(tensor: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, gathered by torch; on ranks that do not gather, what it should be."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if not isinstance(tensor, ShardedTensor):
        return tensor
    out = torch.zeros_like(whole) if dist.get_rank() == 0 else None
    tensor.gather(0, out, dtype=whole.dtype)
    return whole if out is None else out


# -- FSDP1 -------------------------------------------------------------------------------------------


def _sharded_states(model: nn.Module, optimizer: optim.Optimizer, size: int) -> dict[str, Any]:
    """Return the state dicts that FSDP1 gathers under SHARDED_STATE_DICT: ShardedTensors, without a device mesh."""
    with _type_of(model, StateDictType.SHARDED_STATE_DICT):
        states = {
            "model": model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer, group=group_of(size)),
        }
    assert isinstance(states["model"]["cube"], ShardedTensor)
    assert isinstance(states["optimizer"]["state"]["cube"]["exp_avg"], ShardedTensor)
    return states


@contextmanager
def _type_of(model: nn.Module, kind: StateDictType) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and tells so
        with FullyShardedDataParallel.state_dict_type(model, kind):
            yield


def _built(layout: Layout, seed: int) -> tuple[nn.Module, optim.Optimizer]:
    """Wrap ``Exact``; replicas of shards by groups of processes, as with a device mesh there are DTensors."""
    if layout.strategy != "HYBRID_SHARD":
        return fsdp1.built(layout, Exact(seed, tied=False))
    with kept():
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = rows[dist.get_rank() // 2], columns[dist.get_rank() % 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(
            Exact(seed, tied=False),
            process_group=groups,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=layout.orig,
            auto_wrap_policy=ModuleWrapPolicy({fsdp1.Block}),
        )
    return model, optim.AdamW(model.parameters(), **ADAMW)


def train(path: Path, layout: Layout) -> None:
    """Train two steps, and save the sharded state dicts, and the module and its optimizer themselves."""
    prepare()
    if dist.get_rank() >= layout.size:
        return
    model, optimizer = _built(layout, 0)
    for number in range(2):
        fsdp1.step(layout, model, optimizer, number)
    states = _sharded_states(model, optimizer, layout.size)
    with strict_warnings():
        save(path / "dicts", states, layout.size)
        save(path / "native", {"model": model, "optimizer": optimizer}, layout.size)


def go_on(source: Path, path: Path, layout: Layout, *, strict: bool = True) -> None:
    """Load into the state dicts of other weights, give them to FSDP1, take the third step, and save that."""
    prepare()
    if dist.get_rank() >= layout.size:
        return
    model, optimizer = _built(layout, 9)
    fsdp1.step(layout, model, optimizer, 7)
    states = _sharded_states(model, optimizer, layout.size)
    with strict_warnings():
        load(source, states, layout.size, bcp.LoadOptions(strict=strict))
    with _type_of(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(states["model"])
        flat = FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, states["optimizer"], group=group_of(layout.size)
        )
    optimizer.load_state_dict(flat)
    fsdp1.step(layout, model, optimizer, 2)
    save(path, {"model": model, "optimizer": optimizer}, layout.size)


def copy_model(source: Path, path: Path, how: str) -> None:
    """Load a model into another layout, and save it again."""
    model = dtensor_layouts.shard(how, Exact(9, tied=False))
    load(source, {"model": model})
    save(path, {"model": model})


def copy_native(source: Path, path: Path, layout: Layout) -> None:
    """Load the tensors of state dicts into an FSDP1 module and its optimizer, which has no states yet, and save these.

    Hyper-parameters have other names in a state dict.
    """
    prepare()
    model, optimizer = fsdp1.built(layout, Exact(9, tied=False))
    states = {"model": model, "optimizer": optimizer}
    load(source, states, options=bcp.LoadOptions(strict=False))
    save(path, states)


def module_and_dict(path: Path) -> None:
    """Save the FSDP1 module itself beside the sharded state dict of its optimizer, and load both back."""
    prepare()
    layout = Layout()
    for seed, act in ((0, save), (9, load)):
        model, optimizer = fsdp1.built(layout, Exact(seed, tied=False))
        for number in range(2):
            fsdp1.step(layout, model, optimizer, number + seed)
        act(path, {"model": model, "optimizer": _sharded_states(model, optimizer, 4)["optimizer"]})
    save(path.with_name("again"), {"model": model})


# -- ShardedTensors inside of modules ----------------------------------------------------------------


class Table(nn.Module):
    """Has plain memory, and says in its state dict which rows of one table that is, as torchrec's modules do."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        whole = torch.arange(20.0).view(10, 2) + fill
        self.blocks = _dealt((10, 2), dist.get_world_size())
        mine = [at for rank, at, _ in self.blocks if rank == dist.get_rank()]
        self.rows = nn.Parameter(torch.stack([whole[row] for row, _ in mine]))
        self.taken = 0
        self.register_state_dict_post_hook(Table._to_sharded)
        self.register_load_state_dict_pre_hook(Table._from_sharded)

    @staticmethod
    def _to_sharded(module: Table, state: dict[str, Any], prefix: str, _: Any) -> None:
        made = sharded(torch.zeros(10, 2), module.blocks)
        for shard, row in zip(made.local_shards(), module.rows.detach(), strict=True):
            shard.tensor = row.unsqueeze(0)
        state[prefix + "table"] = made
        del state[prefix + "rows"]

    @staticmethod
    def _from_sharded(module: Table, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if state.pop(prefix + "table", None) is not None:
            module.taken += 1


def modules(path: Path) -> tuple[bool, int]:
    """Save a module with sharded rows, and load it; return whether they came back, and how often it was told."""
    source, target = nn.Sequential(Table(0)), nn.Sequential(Table(50))
    with strict_warnings():
        bcp.save(path, {"model": source})
        bcp.load(path, {"model": target})
    return torch.equal(source[0].rows, target[0].rows), target[0].taken


class Sharded(nn.Module):
    """Has a parameter that is a ShardedTensor, and an optimizer that keeps another one for it, as torchrec's do."""

    def __init__(self, fill: float, *, stepped: bool = True) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls functions of it
            self.table = nn.Parameter(sharded(torch.full((9, 4), fill), _dealt((9, 4), 4)))
            self.optimizer = optim.SGD([self.table])
        if stepped:
            self.optimizer.state[self.table]["sum"] = sharded(torch.full((9, 4), fill + 1), _dealt((9, 4), 4))

    @property
    def states(self) -> dict[str, Any]:
        return {"model": self, "optimizer": self.optimizer}

    @property
    def local(self) -> list[torch.Tensor]:
        kept = self.optimizer.state.get(self.table, {}).values()
        return [shard.tensor.detach() for each in (self.table, *kept) for shard in each.local_shards()]


def parameters(path: Path) -> tuple[bool, list[str]]:
    """Save and load a module whose parameter is one; return whether it came back, and what is refused."""
    source, target = Sharded(1.0), Sharded(5.0)
    with strict_warnings():
        bcp.save(path, source.states)
        bcp.load(path, target.states)
        said = [
            _said(bcp.load, path, Sharded(7.0, stepped=False).states),
            _said(bcp.save, path.with_name("bad"), {"model": nn.Linear(1, 1), "optimizer": source.optimizer}),
        ]
    return all(torch.equal(*pair) for pair in zip(target.local, source.local, strict=True)), said


def _said(act: Callable[[Path, Mapping[str, Any]], object], path: Path, states: Mapping[str, Any]) -> str:
    try:
        act(path, states)
    except bcp.BcpError as error:
        return f"{type(error).__name__}: {error}"
    return "went well"


def nested(path: Path) -> bool:
    """Save and load what FSDP1's extension makes of tensor parallel ShardedTensors: their shards are ones, too."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    whole = torch.arange(42.0).view(6, 7)

    def made(values: torch.Tensor, dim: int) -> ShardedTensor:
        ranks = dist.get_process_group_ranks(mesh["tp"].get_group())
        blocks = [(ranks[number], at, sizes) for number, at, sizes in _chunks(tuple(values.shape), 2, dim)]
        parallel = sharded(values, blocks, mesh["tp"].get_group())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch asks a ShardedTensor for its size, and warns of that
            return _chunk_tensor(parallel, mesh["dp"].get_local_rank(), 2, 4, mesh["dp"].get_group())

    source = {"rows": made(whole, 0), "wide": made(whole[:, :6].contiguous(), 1), "plain": whole}
    target = {"rows": made(torch.zeros(6, 7), 0), "wide": made(torch.zeros(6, 6), 1), "plain": torch.zeros(6, 7)}
    plain = {"rows": torch.zeros(6, 7), "wide": torch.zeros(6, 6), "plain": made(torch.zeros(6, 7), 0)}
    with strict_warnings():
        bcp.save(path, {"model": source})
        bcp.load(path, {"model": target})
        bcp.load(path, {"model": plain})
    pairs = [*zip(_inner(target["rows"]), _inner(source["rows"]), strict=True)]
    pairs += zip(_inner(target["wide"]), _inner(source["wide"]), strict=True)
    pairs += [(plain["rows"], whole), (plain["wide"], whole[:, :6])]
    return all(torch.equal(got, wanted) for got, wanted in pairs)


def _inner(tensor: Any) -> list[torch.Tensor]:
    return [each.tensor for shard in tensor.local_shards() for each in shard.tensor.local_shards()]


# -- ties, shared memory, roots -----------------------------------------------------------------------


def ties(path: Path) -> dict[str, str]:
    """Save tensors that share all their memory or a part of it; return what differs after a load."""
    whole = torch.arange(36.0).view(9, 4)
    first = sharded(whole, _dealt((9, 4), 4))
    partly = sharded(whole, _dealt((9, 4), 4))
    for shard in partly.local_shards():
        shard.tensor = shard.tensor + 100
    for own, other in zip(partly.local_shards()[-1:], first.local_shards()[-1:], strict=True):
        own.tensor = other.tensor  # of the lowest rows the memory is shared, of the others it is not
    states = {"a": first, "b": first, "c": partly, "d": sharded(whole + 7, _chunks((9, 4), 2, 0))}
    target = {name: sharded(torch.zeros(9, 4), _dealt((9, 4), 4)) for name in states}
    with strict_warnings():
        bcp.save(path, {"model": states})
        bcp.load(path, {"model": target})
    pairs = {name: (target[name].local_shards(), states[name].local_shards()) for name in "abc"}
    return {
        name: f"{[shard.tensor for shard in got]} is not {[shard.tensor for shard in wanted]}"
        for name, (got, wanted) in pairs.items()
        if not all(torch.equal(x.tensor, y.tensor) for x, y in zip(got, wanted, strict=True))
    }


def root(path: Path, how: str, other: str) -> tuple[bool, str]:
    """Save a tensor that is the whole model, load it into one, and into a dict; return what a module is told."""
    prepare()
    whole = layouts.values(3, (9, 7), "float32")
    with strict_warnings():
        bcp.save(path, {"model": _laid_out(whole, how, 4)})
        target = _laid_out(torch.zeros_like(whole), other, 4)
        bcp.load(path, {"model": target})
        named = {"model": torch.zeros_like(whole)}
        bcp.load(path, {"model": named})
    right = same_bits(_gathered(target, whole), whole) and same_bits(named["model"], whole)
    return right, _said(bcp.load, path, {"model": nn.Linear(7, 9, bias=False)})


# -- what is refused ---------------------------------------------------------------------------------


def _meta(tensor: ShardedTensor) -> None:
    tensor.local_shards()[0].tensor = torch.zeros(1, 4, device="meta")


def _other_shape(tensor: ShardedTensor) -> None:
    tensor.local_shards()[-1].tensor = torch.zeros(2, 4)


def _outside(tensor: ShardedTensor) -> None:
    tensor.local_shards()[0].metadata.shard_offsets[0] = 9


def _other_rank(tensor: ShardedTensor) -> None:
    tensor.local_shards()[0].metadata.shard_offsets = [0]


def _two_dtypes(tensor: ShardedTensor) -> None:
    tensor.local_shards()[-1].tensor = torch.zeros(1, 4, dtype=torch.float16)


def _dtensor(tensor: ShardedTensor) -> None:
    local = tensor.local_shards()[0].tensor
    tensor.local_shards()[0].tensor = DTensor.from_local(local, mesh_of((4,)), [Replicate()], run_check=False)


def _sparse(tensor: ShardedTensor) -> None:
    tensor.local_shards()[0].tensor = tensor.local_shards()[0].tensor.to_sparse()


def _freed(tensor: ShardedTensor) -> None:
    tensor.local_shards()[-1].tensor.untyped_storage().resize_(0)


def _rrefs(tensor: ShardedTensor) -> None:
    tensor._init_rrefs = True


def _remote(tensor: ShardedTensor) -> None:
    tensor._remote_shards = {1: []} | {2: []}


BROKEN: Mapping[str, Callable[[ShardedTensor], None]] = {
    "meta": _meta,
    "shape": _other_shape,
    "outside": _outside,
    "dimensions": _other_rank,
    "dtypes": _two_dtypes,
    "DTensor": _dtensor,
    "sparse": _sparse,
    "freed": _freed,
    "init_rrefs": _rrefs,
    "remote": _remote,
}


def refused(path: Path, good: Path, case: str, kind: str) -> tuple[str, str, list[torch.Tensor]]:
    """Break a tensor on every rank; return what a save and a load say of it, and a second target of the load."""
    mesh_of((4,))
    states = []
    for _ in range(2):
        tensor = sharded(torch.ones(9, 4), _dealt((9, 4), 4))
        BROKEN[case](tensor)
        states.append({kind: {"deep": [{"table": tensor}], "other": torch.zeros(3)}})
    saving, loading = _said(bcp.save, path, states[0]), _said(bcp.load, good, states[1])
    return saving, loading, [state[kind]["other"] for state in states]


def save_good(path: Path, kind: str) -> None:
    """Save what :func:`refused` loads."""
    bcp.save(path, {kind: {"deep": [{"table": torch.ones(9, 4)}], "other": torch.ones(3)}})
