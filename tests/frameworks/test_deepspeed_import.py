"""Folders that DeepSpeed itself has saved: read by bcp, and trained on with other frameworks and other ranks.

The oracles are training without shards, and DeepSpeed's own converters.
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed_job
import pytest
import torch
from any_to_any import How, Task, by_deepspeed, dtype_of, goes_on
from exact import Exact, Twin, trained
from fsdp1 import Layout
from hostile import Evil, repickled
from logical import State, differences, logical
from ranks import Ranks
from samples import sample

import bcp
from bcp.backends import LocalBackend
from bcp.testing.storage_fakes import CountingBackend

pytestmark = pytest.mark.dist

STEP = "global_step2"
TWO = Layout("ddp", size=2)
Own = Callable[[str], Path]


@pytest.fixture(scope="module")
def own(deepspeed4: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Own:
    """Give the folder that DeepSpeed has saved after two steps, which is made once."""
    paths: dict[str, Path] = {}

    def path_of(kind: str) -> Path:
        if kind not in paths:
            paths[kind] = tmp_path_factory.mktemp("own")
            deepspeed4.run(deepspeed_job.save_own, paths[kind], kind)
        return paths[kind]

    return path_of


@pytest.fixture
def copied(own: Own, tmp_path: Path) -> Callable[[str], Path]:
    """Give a copy of the step's folder, to damage it."""
    return lambda kind: Path(shutil.copytree(own(kind) / STEP, tmp_path / "copy"))


def twin_of(kind: str, **model: Any) -> Twin:
    return trained(2, 4, dtype=dtype_of(kind), **model)


def untied(state: State) -> State:
    """Leave out the second names of tied tensors: DeepSpeed keeps the optimizer's states by the other name."""
    return {(kind, name.replace("head.", "table.")): tensor for (kind, name), tensor in state.items()}


def weights(ckpt: bcp.Checkpoint) -> dict[str, torch.Tensor]:
    return {name: ckpt.read(name) for name in ckpt.names()}


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].float(), other[name].float()) for name in one)


ALL = ["z0/fp32", "z1/fp32", "z2/fp32", "z3/fp32", "z1/bf16", "z2/bf16", "z3/bf16", "z1/bf16-all", "z2/fp16", "z3/fp16"]
MORE = ["z3-hpz/fp32", "z2-offload/bf16", "z3-offload/bf16"]


@pytest.mark.parametrize("kind", sample([*ALL, *MORE], *ALL[:7], "z2/fp16", "z3-hpz/fp32"))
def test_an_import_is_what_unsharded_training_gives(own: Own, tmp_path: Path, kind: str) -> None:
    bcp.tools.import_files(own(kind), tmp_path / "imported")
    found, wanted = untied(logical(tmp_path / "imported")), untied(twin_of(kind).state())
    if kind.startswith("z3"):  # its files have weights as fp32 masters only
        low = dtype_of(kind)
        found = {name: t.to(low) if name[0] == "model" and t.is_floating_point() else t for name, t in found.items()}
    assert not differences(found, wanted)


def test_stage_0_in_16_bits_is_what_bcp_saves(deepspeed4: Ranks, tmp_path: Path) -> None:
    deepspeed4.run(deepspeed_job.save_own, tmp_path / "own", "z0/bf16-all", Exact, tmp_path / "saved")
    bcp.tools.import_files(tmp_path / "own", tmp_path / "imported")
    assert not differences(untied(logical(tmp_path / "imported")), untied(logical(tmp_path / "saved")))


FROZEN = partial(Exact, frozen=True)


@pytest.mark.parametrize("kind", sample(["z2/bf16", "z2/fp32", "z3/fp32", "z3/bf16"], "z2/fp32", "z3/bf16"))
def test_weights_are_those_of_deepspeeds_converter(deepspeed4: Ranks, tmp_path: Path, kind: str) -> None:
    deepspeed4.run(deepspeed_job.save_own, tmp_path, kind, FROZEN)
    wanted = deepspeed4.run(deepspeed_job.merged, tmp_path)[0]
    ckpt = bcp.Checkpoint(tmp_path)
    masters = {name: ckpt.tensors.get(("optimizer", f"state.{name}.master_param")) for name in ckpt.names()}
    found = weights(ckpt) | {
        name: ckpt.read(f"state.{name}.master_param", kind="optimizer") for name, master in masters.items() if master
    }
    found["head.weight"] = found["table.weight"]
    same_weights(found, wanted)
    assert {"fixed.weight", "fixed.bias", "steps"} < found.keys()


@pytest.mark.parametrize("kind", sample(["z1/bf16", "z1/fp32", "z3/fp32", "z3/bf16"], "z1/bf16", "z3/fp32"))
def test_a_universal_checkpoint(deepspeed4: Ranks, own: Own, tmp_path: Path, kind: str) -> None:
    deepspeed4.run(deepspeed_job.universal, own(kind) / STEP, tmp_path / "universal" / STEP)
    ckpt = bcp.Checkpoint(tmp_path / "universal")  # latest_universal names the folder
    source = bcp.Checkpoint(own(kind))
    for kind_of, name in (*source.tensors, *ckpt.tensors):
        assert torch.equal(ckpt.read(name, kind=kind_of), source.read(name, kind=kind_of)), name
    assert ckpt.values == source.values
    folder = tmp_path / "universal" / STEP / "zero"
    for file in folder.glob("*/exp_avg*.pt"):
        there = torch.load(file)
        wanted = there["param"] if isinstance(there, dict) else there
        found = ckpt.read(f"state.{file.parent.name}.{file.stem}", kind="optimizer")
        assert torch.equal(found.reshape(wanted.shape), wanted)
    (folder / "cube" / "exp_avg.pt").unlink()
    shutil.rmtree(folder / "gain")
    with pytest.raises(bcp.CorruptError, match="has no zero/gain"):
        bcp.Checkpoint(folder.parent).names()


CHANGES: list[tuple[str, How]] = [
    ("z1/fp32", TWO),
    ("z2/fp32", "tp_fsdp2"),
    ("z3/fp32", TWO),
    ("z3/fp32", "tp_fsdp2"),
    ("z3/fp32", "z2/fp32"),
    ("z1/bf16", "z3/bf16"),
    ("z1/bf16", TWO),
    ("z3/bf16", "z2/bf16"),
    ("z3/bf16", "z3/bf16/pairs"),
    ("z2/fp16", "z3/fp16-anew"),
    ("z0/fp32", "z3/fp32"),
    ("z3-hpz/fp32", TWO),
]


@pytest.mark.parametrize(
    ("before", "after"),
    sample(CHANGES, ("z1/fp32", TWO), ("z3/fp32", "tp_fsdp2"), ("z3/bf16", "z2/bf16"), ("z0/fp32", "z3/fp32")),
)
def test_training_goes_on_from_deepspeeds_own_files(
    pool_of: Callable[[How], Ranks], tmp_path: Path, own: Own, before: str, after: How
) -> None:
    task = Task(options=bcp.LoadOptions(cast=by_deepspeed(after)))
    goes_on(pool_of(after), own(before), tmp_path, twin_of(before), after, task)


def test_facts_of_the_engine_are_user_metadata(own: Own, tmp_path: Path) -> None:
    facts = bcp.Checkpoint(own("z3/fp32")).user_metadata["deepspeed"]
    assert (facts["global_steps"], facts["epoch"], facts["left_out"]) == (2, 3, ["odd"])
    options = bcp.SaveOptions(metadata={"mine": 1})
    bcp.tools.import_files(own("z3/fp32"), tmp_path / "copy", options=options)
    folder = shutil.copytree(own("z3/fp32") / STEP, tmp_path / "there")
    bcp.tools.import_files(folder, copy=False, options=options)
    for path in (tmp_path / "copy", folder):
        assert bcp.Checkpoint(path).user_metadata == {"mine": 1, "deepspeed": facts}
    assert not bcp.tools.diff(tmp_path / "copy", folder)
    assert bcp.Checkpoint(folder).world_size == 4


def test_only_pickles_are_read_to_list_tensors(own: Own) -> None:
    backend = CountingBackend(LocalBackend(own("z1/bf16") / STEP))
    ckpt = bcp.Checkpoint(backend)
    ckpt.names()
    backend.read.clear()
    assert ckpt.read("cube", (slice(1, 2),)).numel() == 10
    assert backend.read.keys() == {"mp_rank_00_model_states.pt"}
    assert sum(backend.read.values()) <= 32  # 10 elements of bf16, in units of 8 bytes


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Save a file of model states anew, with a change of its dict."""
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_3_mp_rank_00_optim_states.pt"])
def test_a_malicious_pickle_is_refused_by_name(copied: Callable[[str], Path], tmp_path: Path, file: str) -> None:
    folder = copied("z1/fp32")
    repickled(folder / file, pickle.dumps({"module": Evil(tmp_path / "made")}, 2))
    with pytest.raises(bcp.CheckpointError, match=rf"{file} names posix\.mkdir, which bcp does not read; nothing"):
        bcp.Checkpoint(folder).names()
    assert not (tmp_path / "made").exists()


def test_a_missing_rank(copied: Callable[[str], Path]) -> None:
    folder = copied("z3/fp32")
    (folder / "zero_pp_rank_3_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(bcp.CorruptError, match=r"optimizer states of 3 ranks, and .*rank_0.* says 4"):
        bcp.Checkpoint(folder).names()
    (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(bcp.CorruptError, match="2 files of optimizer states, and none of rank 1"):
        bcp.Checkpoint(folder).names()


@pytest.mark.parametrize("kind", ["z2/fp32", "z3/fp32"])
def test_lying_shapes(copied: Callable[[str], Path], kind: str) -> None:
    folder = copied(kind)
    for path in folder.glob("*model_states.pt"):
        changed(path, lambda state: state["param_shapes"][-1].update({"table.weight": torch.Size([1 << 40, 1 << 40])}))
    with pytest.raises(bcp.CorruptError, match=r"the parameters of group \d have \d+ elements, and the files"):
        bcp.Checkpoint(folder).names()


def test_a_frozen_parameter_without_a_slice(deepspeed4: Ranks, tmp_path: Path) -> None:
    deepspeed4.run(deepspeed_job.save_own, tmp_path, "z3/fp32", FROZEN)
    path = tmp_path / STEP / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    changed(path, lambda state: state["frozen_param_fragments"].update({"fixed.bias": torch.zeros(0)}))
    with pytest.raises(bcp.CorruptError, match=r"rank_2.* no slice of 1 elements of the frozen parameter 'fixed.bias'"):
        bcp.Checkpoint(tmp_path).names()
    changed(path, lambda state: state["frozen_param_fragments"].pop("fixed.bias"))
    with pytest.raises(bcp.CorruptError, match=r"rank_2.* has no slice of 1 elements"):
        bcp.Checkpoint(tmp_path).names()


@pytest.mark.parametrize(
    ("tag", "words"),
    [("../secret", "leaves the folder"), ("/etc", "leaves the folder"), ("", "leaves"), ("global_step9", "names")],
)
def test_latest_names_another_folder(own: Own, tmp_path: Path, tag: str, words: str) -> None:
    root = shutil.copytree(own("z1/fp32"), tmp_path / "root")
    (root / "latest").write_text(tag)
    with pytest.raises(bcp.CorruptError, match=words):
        bcp.Checkpoint(root).names()


def test_the_folder_above_without_latest_says_what_to_pass(own: Own, tmp_path: Path) -> None:
    root = shutil.copytree(own("z1/fp32"), tmp_path / "root")
    (root / "latest").unlink()
    with pytest.raises(bcp.NotACheckpointError, match=rf"has one of DeepSpeed in {STEP}: pass .*root/{STEP}"):
        bcp.Checkpoint(root).names()


@pytest.mark.parametrize("name", ["mp_rank_01_model_states.pt", "layer_00-model_00-model_states.pt"])
def test_parts_of_a_model_need_a_universal_checkpoint(copied: Callable[[str], Path], name: str) -> None:
    folder = copied("z1/fp32")
    shutil.copy(folder / "mp_rank_00_model_states.pt", folder / name)
    with pytest.raises(bcp.CheckpointError, match="ds_to_universal"):
        bcp.Checkpoint(folder).names()


TIMES = sample([30, 300], 30)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("kind", ["z1/bf16", "z3/fp32"])
def test_changed_bytes(copied: Callable[[str], Path], kind: str, times: int) -> None:
    folder, chance = copied(kind), random.Random(7)  # noqa: S311 -- no secret
    files = sorted(folder.glob("*.pt"))
    for _ in range(times):
        file = chance.choice(files)
        data = file.read_bytes()
        damaged = bytearray(data)
        for _ in range(chance.choice([1, 2, 8])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.1:
            del damaged[chance.randrange(len(damaged)) :]
        file.write_bytes(damaged)
        with suppress(bcp.CheckpointError):
            ckpt = bcp.Checkpoint(folder)
            for name in ckpt.names():
                ckpt.read(name)
            _ = ckpt.values
        file.write_bytes(data)
