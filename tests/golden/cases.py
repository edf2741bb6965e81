"""The golden checkpoints: each is a description, a function that writes it, and the contents that it has to have."""

from __future__ import annotations

import json
import random
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import numpy as np
import torch
from any_to_any import How, data_parallel, dtype_of
from exact import Twin, trained
from fsdp1 import Layout
from golden import jobs
from golden.arithmetic import GoldenExact, numbers, of_every_dtype, of_every_type
from golden.described import described
from golden.expected import Expected, nested
from megatron_gpt import Layout as MegatronLayout
from ranks import Ranks
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp

import bcp
from bcp import _save as saving
from bcp._save import keeping, leader
from bcp.backends import resolve
from bcp.coordinators.local import memory_coordinators
from bcp.format.metadata import METADATA_KEY, decode_metadata

__all__ = ["CASES", "FRAMEWORKS", "MEGATRON", "STORE", "Case", "codecs_of", "copy_in"]

Pool = Callable[[], Ranks]
"""Gives the four processes of multi-rank cases."""

Written = tuple[list[Expected], dict[str, Any]]
"""The contents of the checkpoints of a case, and facts for its own test."""


@dataclass(frozen=True)
class Case:
    """A golden checkpoint.

    Attributes:
        description: of the checkpoint, in words.
        write: writes it to a path, perhaps with a pool, and returns its contents.
        ranks: number of processes that save it.
        codecs: codecs that it is saved with.
        tar: whether it is stored as one file, ``checkpoint.tar.xz``.
        is_foreign: whether its files are those of other libraries, without checksums.
    """

    description: str
    write: Callable[[Path, Pool], Written]
    ranks: int = 1
    codecs: tuple[str, ...] = ()
    tar: bool = False
    is_foreign: bool = False


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the random states of this process, and put them back in the end."""
    owner = bcp.RngState()
    before = owner.state_dict()
    random.seed(5)
    np.random.seed(6)  # noqa: NPY002 -- the global state
    torch.manual_seed(7)
    yield
    owner.load_state_dict(before)


def random_states() -> dict[str, Any]:
    """Return the random states of this process as RngState gives them."""
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002 -- the global state
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}


# -- codecs ------------------------------------------------------------------------------------------


def _turned(data: Any) -> bytes:
    """Return the bytes in reverse order."""
    return bytes(data)[::-1]


def _marked(data: Any) -> bytes:
    return b"golden" + bytes(data)


def _unmarked(data: Any) -> bytes:
    whole = bytes(data)
    assert whole.startswith(b"golden")
    return whole[6:]


def codecs_of(names: tuple[str, ...] | list[str]) -> list[bcp.extend.Codec]:
    """Return codecs by name."""
    import zstandard  # noqa: PLC0415 -- one case needs it

    known = {
        "zstd": (lambda data: zstandard.compress(data, 3), zstandard.decompress),
        "bcp.zstd": (bcp.zstd().encode, bcp.zstd().decode),
        "reversed": (_turned, _turned),
        "marked": (_marked, _unmarked),
    }
    return [bcp.extend.Codec(name, encode=known[name][0], decode=known[name][1]) for name in names]


# -- one process -------------------------------------------------------------------------------------


def of_twin(twin: Twin, groups: jobs.Groups) -> Expected:
    """Return the contents of a checkpoint of a twin; all its parameters have the settings of the first group."""
    found = Expected({f"{kind}/{fqn}": tensor for (kind, fqn), tensor in twin.state().items()})
    for fqn in twin.masters:
        for key, value in groups[0].items():
            found.values[f"optimizer/param_groups.{fqn}.{key}"] = value
    return found


def plain(path: Path, _: Pool) -> Written:
    """Save a module, its AdamW, a scheduler, a step and random states."""
    with seeded():
        twin = Twin(model=GoldenExact())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(twin.optimizer, [1, 5], gamma=0.5)
        for number in range(2):
            twin.step(number, 1)
            scheduler.step()
        extra = {"step": 2, "scheduler": scheduler, "rng": bcp.RngState()}
        states = {"model": twin.model, "optimizer": twin.optimizer, "extra_states": extra}
        bcp.save(path, states, options=jobs.options())
        found = of_twin(twin, jobs.settings(twin.optimizer.param_groups))
        found.extras["extra_states"] = described(
            {"step": 2, "scheduler": scheduler.state_dict(), "rng": random_states()}
        )
    return [found], {}


def dtypes(path: Path, _: Pool) -> Written:
    """Save tensors of every dtype and shape, two that are tied, and values among them."""
    tensors = of_every_dtype()
    shared = numbers("shared", (6, 5))
    tensors |= {"tied.first": shared, "tied.second": shared}
    values = {"values.text": "ü", "values.nothing": None, "values.nan": float("nan"), "values.huge": 10**600}
    values |= {"values.array": np.arange(4, dtype=">i2"), "values.truth": True, "values.dtype": torch.bfloat16}
    containers = {"in.list": [1, -0.0], "in.tuple": (0.9, 0.95)}
    bcp.save(path, {"model": nested([*tensors.items(), *values.items(), *containers.items()])}, options=jobs.options())
    values |= {f"{name}.{at}": value for name, each in containers.items() for at, value in enumerate(each)}
    return [
        Expected(
            {f"model/{name}": tensor.clone() for name, tensor in tensors.items()},
            {f"model/{name}": described(value) for name, value in values.items()},
        )
    ], {}


def settings(path: Path, _: Pool) -> Written:
    """Save an optimizer whose parameter group has a value of each form that a receipt knows."""
    model = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(numbers("settings", (2, 3)))
    (odd,) = struct.unpack(">d", bytes.fromhex("fff8000000000abc"))
    own = {
        "own_none": None,
        "own_list": [1, [True, "x"], -0.0],
        "own_tuple": ((1, 0.9), ()),
        "own_dict": {"a": 1, 2: "b"},
        "own_int": 1 << 90,
        "own_floats": [float("nan"), odd, float("inf"), float("-inf"), 5e-324],
        "own_bytes": b"\0\xff",
        "own_dtype": torch.float16,
        "own_device": torch.device("cpu", 0),
        "own_size": torch.Size([4, 0]),
        "own_archive": {"array": np.arange(3, dtype=">u2"), "set": {1, 2}},
    }
    optimizer = torch.optim.SGD([{"params": [model.weight], **own}], lr=2**-4)
    bcp.save(path, {"model": model, "optimizer": optimizer}, options=jobs.options())
    group = jobs.settings(optimizer.param_groups)[0]
    return [
        Expected(
            {"model/weight": model.weight.detach().clone()},
            {f"optimizer/param_groups.weight.{key}": value for key, value in group.items()},
        )
    ], {}


def values(path: Path, _: Pool) -> Written:
    """Save a value of every type as extra states and as the state of a dataloader."""
    states = {"extra_states": of_every_type(), "dataloader": {"cursor": (3, "shard"), "seen": np.arange(5)}}
    bcp.save(path, states, options=jobs.options())
    return [Expected(extras={kind: described(state) for kind, state in states.items()})], {}


def encoded(path: Path, _: Pool, names: tuple[str, ...]) -> Written:
    """Save a module, its AdamW and an extra state with codecs."""
    twin = Twin(model=GoldenExact())
    twin.step(0, 1)
    states = {"model": twin.model, "optimizer": twin.optimizer, "extra_states": {"step": 1}}
    bcp.save(path, states, options=jobs.options(codecs=codecs_of(names)))
    found = of_twin(twin, jobs.settings(twin.optimizer.param_groups))
    found.extras["extra_states"] = described({"step": 1})
    return [found], {}


def roles(path: Path, _: Pool) -> Written:
    """Save two models under one path."""
    twin = Twin(model=GoldenExact(1))
    twin.step(0, 1)
    bcp.save(path, {"model": twin.model, "optimizer": twin.optimizer}, role="actor", options=jobs.options())
    actor = of_twin(twin, jobs.settings(twin.optimizer.param_groups))
    actor.role = "actor"
    value = numbers("critic", (4, 6))
    bcp.save(path, {"model": {"value": value}, "extra_states": {"step": 3}}, role="critic", options=jobs.options())
    critic = Expected({"model/value": value}, extras={"extra_states": described({"step": 3})}, role="critic")
    return [actor, critic], {}


def overwritten(path: Path, _: Pool) -> Written:
    """Save twice to one path; the second state has other names, shapes and kinds."""
    first = {"model": {"old": numbers("old", (4, 4)), "kept": numbers("first", (3, 5))}}
    bcp.save(path, first, options=jobs.options())
    tensors = {"model/kept": numbers("second", (5, 3)), "model/new": numbers("new", (7,))}
    second = {"model": nested((name.removeprefix("model/"), each) for name, each in tensors.items())}
    states = {**second, "extra_states": {"generation": 2}}
    bcp.save(path, states, overwrite=True, options=jobs.options())
    return [Expected(tensors, extras={"extra_states": described({"generation": 2})})], {}


def edited(path: Path, _: Pool) -> Written:
    """Save a model and its optimizer, and edit it twice: version 2 of the metadata."""
    tensors = {"model/net.kept": numbers("kept", (4, 4)), "model/added": numbers("added", (2, 3))}
    optimizer = {"state": {"kept": {"momentum": numbers("momentum", (4, 4))}}}
    tensors |= {"optimizer/state.net.kept.momentum": optimizer["state"]["kept"]["momentum"]}
    tensors |= {"model/net.cast": numbers("cast", (5,)).double()}
    model = {
        "kept": tensors["model/net.kept"],
        "cast": numbers("cast", (5,)),
        "gone": numbers("gone", (3,)),
        "epoch": 7,
    }
    bcp.save(path, {"model": model, "optimizer": optimizer, "extra_states": {"step": 7}}, options=jobs.options())
    bcp.tools.edit(path, cast={"cast": torch.float64}, drop=["gone"])
    bcp.tools.edit(path, rename=[("^", "net.")], add={"added": tensors["model/added"]}, metadata={"git": "4f"})
    extras = {"extra_states": described({"step": 7})}
    return [Expected(tensors, {"model/net.epoch": described(7)}, extras)], {}


STORE = "memory://golden/store/step-7"


def store(path: Path, _: Pool) -> Written:
    """Save into an object store, and copy its objects to a directory."""
    tensors = {"model/w": numbers("store", (9, 5)), "model/deep.bias": numbers("bias", (5,))}
    model = nested((name.removeprefix("model/"), tensor) for name, tensor in tensors.items())
    states = {"model": model, "extra_states": {"step": 7}}
    bcp.save(STORE, states, options=jobs.options())
    anyio.run(copy_out, path)
    return [Expected(tensors, extras={"extra_states": described({"step": 7})})], {}


async def copy_out(path: Path) -> None:
    """Write every object of the store to a file."""
    backend = resolve(STORE)
    for each in await backend.list():
        file = path / each.key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(await backend.get(each.key))


async def copy_in(path: Path) -> None:
    """Put every file into the store."""
    backend = resolve(STORE)
    for key, data in files_of(path).items():
        await backend.put(key, data)


def files_of(path: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a path, by its name there."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def imported(path: Path, _: Pool) -> Written:
    """Import two folders of other libraries without a copy: shards of Hugging Face, and one of torch's own."""
    hub = {"model/deep.w": numbers("hub", (4, 3)), "model/odd": numbers("odd", (5,)).bfloat16()}
    (path / "hub").mkdir(parents=True)
    shards = {f"model-{number}-of-2.safetensors": name for number, name in enumerate(hub, 1)}
    for file, name in shards.items():
        save_file({name.removeprefix("model/"): hub[name]}, path / "hub" / file)
    places = {name.removeprefix("model/"): file for file, name in shards.items()}
    (path / "hub" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    weight, momentum = numbers("dcp", (2, 3)), numbers("momentum", (2, 3))
    settings = {"lr": 2**-4, "betas": (0.5, 0.75), "params": ["w"]}
    optimizer = {"state": {"w": {"momentum_buffer": momentum}}, "param_groups": [settings]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a save without a process group
        dcp.save({"model": {"w": weight}, "optim": optimizer}, checkpoint_id=path / "dcp", no_dist=True)
    for folder in ("hub", "dcp"):
        bcp.tools.import_files(path / folder, copy=False)
    values = {"lr": described(2**-4), "betas": described((0.5, 0.75))}
    tensors = {"model/w": weight, "optimizer/state.w.momentum_buffer": momentum}
    of_dcp = Expected(tensors, {f"optimizer/param_groups.w.{key}": value for key, value in values.items()})
    of_dcp.folder = "dcp"
    return [Expected(hub, folder="hub"), of_dcp], {}


def since(path: Path, _: Pool) -> Written:
    """Let a run save four steps, which store what has changed: version 3. Blocks have 4 KiB, so that few bytes do."""
    model = {"frozen": numbers("frozen", (5, 1024)), "late": numbers("late", (3, 1024)), "head": numbers("head", (9,))}
    parts, states = [], {"model": model, "extra_states": {"progress": {"step": 0}, "rng": bcp.RngState()}}
    small = [mock.patch.object(module, "BLOCK_BYTES", 4096) for module in (saving, leader, keeping)]
    with ExitStack() as stack:
        for patch in [*small, mock.patch("socket.gethostname", return_value="golden"), seeded()]:
            stack.enter_context(patch)
        options = {"run_id": "golden", "save_options": jobs.options()}
        job = stack.enter_context(bcp.Run(str(path), states, save=1, keep=9, since="auto", **options))
        job.resume()
        for step in (1, 2, 3, 4):
            model["head"].copy_(numbers(f"step {step}", (9,)))
            if step == 2:
                model["late"].copy_(numbers("later", (3, 1024)))
            states["extra_states"]["progress"]["step"] = step
            tensors = {f"model/{name}": tensor.clone() for name, tensor in model.items()}
            state = described({"progress": {"step": step}, "rng": random_states()})
            pending = job.maybe_save(step)
            assert pending is not None
            pending.wait()
            parts.append(Expected(tensors, extras={"extra_states": state}, folder=f"step-{step:08d}"))
    refers = {each.folder: list(decode_metadata(_metadata(path / each.folder), "").commit.refers) for each in parts}
    assert [*refers.values()] == [[], [1], [1, 2], [1, 2]]
    return parts, {"refers": refers}


def _metadata(path: Path) -> bytes:
    return (path / METADATA_KEY).read_bytes()


def run(path: Path, _: Pool) -> Written:
    """Let a run save steps 1 to 3 in two lives; mark and pin some of them."""
    parts, facts = [], {"resumes": 2, "latest": "step-00000002", "entries": [], "total_lives": 2}
    model, progress = {"w": torch.empty(6, 4)}, {"step": 0}
    states = {"model": model, "extra_states": {"progress": progress, "rng": bcp.RngState()}}
    with seeded(), mock.patch("socket.gethostname", return_value="golden"):
        for steps in ((1, 2), (3,)):
            with bcp.Run(str(path), states, save=1, keep=9, run_id="golden", save_options=jobs.options()) as job:
                first = job.resume() + 1
                assert first == steps[0]
                for step in steps:
                    model["w"].copy_(numbers(f"step {step}", (6, 4)))
                    progress["step"] = step
                    tensor, state = model["w"].clone(), described({"progress": {"step": step}, "rng": random_states()})
                    pending = job.maybe_save(step, {"loss": 1 / step, "accuracy": 0.5})
                    assert pending is not None
                    pending.wait()
                    parts.append(
                        Expected({"model/w": tensor}, extras={"extra_states": state}, folder=f"step-{step:08d}")
                    )
                if steps[0] == 3:
                    job.mark(1, "verified", "evaluated")
                    job.mark(3, "suspect", "loss spike")
                    job.pin(2)
    trusts = ((1, "verified", "evaluated"), (2, "unknown", ""), (3, "suspect", "loss spike"))
    for step, trust, reason in trusts:
        entry = {"step": step, "metrics": {"loss": 1 / step, "accuracy": 0.5}, "trust": trust, "reason": reason}
        facts["entries"].append({**entry, "pinned": step == 2})
    return parts, facts


def recorded(path: Path, _: Pool) -> Written:
    """Save and load with recordings."""
    tensors = {"model/w": numbers("recorded", (64, 8))}
    recording = bcp.SaveOptions(record=True, step=12)
    with mock.patch("socket.gethostname", return_value="golden"):
        bcp.save(path, {"model": {"w": tensors["model/w"]}}, options=recording)
        bcp.load(path, {"model": {"w": torch.zeros(64, 8)}}, options=bcp.LoadOptions(record=True, step=12))
    recordings = [{"kind": kind, "step": 12, "world_size": 1, "hosts": ["golden"]} for kind in ("save", "load")]
    return [Expected(tensors)], {"recordings": recordings, "state_nbytes": 64 * 8 * 4}


# -- many ranks --------------------------------------------------------------------------------------

MANY = 1002
"""Ranks from 1000 on have a hash in the names of their files."""


def many_ranks(path: Path, _: Pool) -> Written:
    """Save from 1002 ranks, the last two of which have hashes in their names; it takes minutes."""
    tensors = {f"model/of.{rank}": numbers(f"rank {rank}", (3, rank % 5 + 1)) for rank in (0, 500, 1000, 1001)}

    async def save(rank: int, coordinator: bcp.extend.Coordinator) -> None:
        own = {name.removeprefix("model/"): each for name, each in tensors.items() if name.endswith(f".{rank}")}
        states = {"model": nested(own.items())}
        await bcp.asave(path, states, framework="plain", coordinator=coordinator, options=jobs.options(timeout=500.0))

    async def save_all() -> None:
        async with anyio.create_task_group() as tasks:
            for rank, coordinator in enumerate(memory_coordinators(MANY)):
                tasks.start_soon(save, rank, coordinator)

    anyio.run(save_all)
    return [Expected(tensors)], {}


# -- frameworks --------------------------------------------------------------------------------------


def framework(
    path: Path, pool: Pool, how: How, *, extra: Mapping[str, Any] | None = None, balance: str = "split"
) -> Written:
    """Train the model of the other tests, and save it; the expectation is training in one piece."""
    groups = pool().run(jobs.save_exact, path, how, extra, balance)[0]
    found = of_twin(trained(jobs.STEPS, data_parallel(how), dtype=dtype_of(how), model=GoldenExact()), groups)
    if extra is not None:
        found.extras["extra_states"] = described({**extra, "rank": 0})
    return [found], {}


def megatron(path: Path, pool: Pool, layout: MegatronLayout) -> Written:
    """Train a small GPT with gradients of arithmetic; the expectation is torch's AdamW on whole parameters."""
    ranks = pool().run(jobs.save_megatron, path, layout)
    shapes = {fqn: shape for known, _ in ranks for fqn, shape in known.items()}
    groups = [group for _, known in ranks for group in known]
    found = Expected()
    for fqn, shape in shapes.items():
        weight = jobs.golden_value(fqn, shape, 0).bfloat16()
        master = weight.float()
        group = next(
            group
            for group in groups
            if not group["is_expert_parallel"] and group["wd_mult"] == described(float(len(shape) > 1))
        )
        optimizer = torch.optim.AdamW([master], weight_decay=0.1, **jobs.ADAM)
        for number in range(jobs.STEPS):
            master.grad = jobs.golden_value(fqn, shape, 100 + number)
            optimizer.step()
        found.tensors[f"model/{fqn}"] = master.bfloat16()
        states = {**optimizer.state[master], "master_param": master}
        found.tensors |= {f"optimizer/state.{fqn}.{key}": value for key, value in states.items()}
        saved = {key: value for key, value in group.items() if key != "is_expert_parallel"}  # a fact of the layout
        found.values |= {f"optimizer/param_groups.{fqn}.{key}": value for key, value in saved.items()}
    return [found], {}


def sharded_tensors(path: Path, pool: Pool) -> Written:
    """Save torch's ShardedTensor, cut into blocks in several ways."""
    pool().run(jobs.save_sharded_tensors, path)
    return [Expected({f"model/{name}": tensor for name, tensor in jobs.sharded_tensor_values().items()})], {}


def dataloaders(path: Path, pool: Pool) -> Written:
    """Save a token loader and another sharded state of two readers."""
    readers = [read for read in pool().run(jobs.save_dataloaders, path) if read is not None]
    found = Expected({"model/tokens": jobs.TOKENS}, extras={"extra_states": described({"epoch": 1})})
    for name, shared in readers[0].shared.items():
        units = {unit: each for reader in readers for unit, each in reader.units[name].items()}
        found.units[name] = [shared, dict(sorted(units.items()))]
    windows = {number: tokens for reader in readers for number, tokens in reader.windows.items()}
    return [found], {"windows": sorted(windows.items())}


FRAMEWORKS: dict[str, tuple[str, How]] = {
    "ddp": ("DDP on 2 ranks.", Layout("ddp", size=2)),
    "zero-redundancy": ("DDP with a ZeroRedundancyOptimizer on 4 ranks.", Layout("zero1")),
    "fsdp1-flat": ("FSDP1 on 4 ranks with flat parameters, whose shards are no boxes.", Layout(orig=False)),
    "fsdp1-hybrid": ("FSDP1 on 2 x 2 ranks, HYBRID_SHARD, with original parameters.", Layout(strategy="HYBRID_SHARD")),
    "fsdp2-tp": ("FSDP2 x tensor parallelism on 2 x 2 ranks.", "tp_fsdp2"),
    "hsdp": ("FSDP2 on 2 x 2 ranks, replicated and sharded.", "hsdp"),
    "ragged": ("Stand-ins for veScale's RaggedShard on 4 ranks.", "ragged"),
    "deepspeed-zero1": ("DeepSpeed ZeRO-1 in bf16 with fp32 masters on 4 ranks.", "z1/bf16"),
    "deepspeed-zero3": ("DeepSpeed ZeRO-3 in bf16 with fp32 masters on 4 ranks.", "z3/bf16"),
}
"""By name: a description, and the name by which the other tests know the layout."""

MEGATRON = {"megatron-tp2": MegatronLayout(tp=2), "megatron-pp2": MegatronLayout(pp=2)}
_MEGATRON = "Megatron-core GPT in bf16 with the distributed optimizer on 4 ranks: {}, 2 data-parallel ranks."

CASES: dict[str, Case] = {
    "plain": Case("A module, its AdamW, and a scheduler, a step and random states as extra states.", plain),
    "dtypes": Case("Nested dicts of tensors of every dtype, odd shapes, unusual bits, ties, and values.", dtypes),
    "settings": Case("An optimizer whose parameter group has a value of each form of a receipt.", settings),
    "values": Case("Extra states and a dataloader with values of every type, and no tensors of a model.", values),
    "bcp-zstd": Case(
        "A module and its AdamW through bcp's own codec, which loads know.",
        partial(encoded, names=("bcp.zstd",)),
        codecs=("bcp.zstd",),
    ),
    "zstd": Case("A module and its AdamW through the codec zstd.", partial(encoded, names=("zstd",)), codecs=("zstd",)),
    "codec-pair": Case(
        "A module and its AdamW through two codecs that do not commute.",
        partial(encoded, names=("reversed", "marked")),
        codecs=("reversed", "marked"),
    ),
    "roles": Case("Two models under one path, by the roles actor and critic.", roles),
    "store": Case("Objects of an object store, copied to a directory.", store),
    "run": Case("The folder of a run: three steps in two lives, with metrics, marks and a pin.", run),
    "run-metrics": Case("The same; each checkpoint has the metrics of its step, too.", run),
    "since": Case("The folder of a run whose steps refer to earlier ones: version 3.", since),
    "imported": Case("Folders of Hugging Face and of DCP, imported without a copy.", imported, is_foreign=True),
    "recorded": Case("A checkpoint with recordings of its save and of a load.", recorded),
    "many-ranks": Case(
        "1002 ranks, from the 1001st on with hashes in the names; a tar file.", many_ranks, MANY, tar=True
    ),
    "dataloaders": Case("A token loader and another sharded state on 2 readers.", dataloaders, 2),
    "edited": Case("Renamed, dropped, cast and added tensors, by two edits: version 2.", edited),
    "overwritten": Case("The second of two saves to one path, with other tensors.", overwritten),
    **{
        name: Case(text, partial(framework, how=how), 2 if name == "ddp" else 4)
        for name, (text, how) in FRAMEWORKS.items()
    },
    "fsdp2": Case(
        "FSDP2 on 2 ranks, with extra states of each rank.",
        partial(framework, how=Layout("fsdp2", size=2), extra={"step": 2}),
        2,
    ),
    "worst-fit": Case(
        "DDP on 4 ranks, saved with balance='worst-fit'.", partial(framework, how=Layout("ddp"), balance="worst-fit"), 4
    ),
    "megatron-tp2": Case(
        _MEGATRON.format("tensor parallelism of 2"), partial(megatron, layout=MEGATRON["megatron-tp2"]), 4
    ),
    "megatron-pp2": Case(_MEGATRON.format("2 stages"), partial(megatron, layout=MEGATRON["megatron-pp2"]), 4),
    "sharded-tensor": Case("torch's ShardedTensor on 4 ranks, cut into blocks in five ways.", sharded_tensors, 4),
}
