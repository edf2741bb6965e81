"""Folders that ByteCheckpoint 0.0.2 has saved, on two ranks under DDP, FSDP1 and FSDP2."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hostile import Evil
from others import fully_sharded
from ranks import Ranks
from safetensors.torch import load_file

import bcp

DATA = Path(__file__).parent.parent / "data" / "foreign"
KINDS = ["ddp", "fsdp", "fsdp2"]


def expected() -> dict[str, torch.Tensor]:
    return load_file(DATA / "expected.safetensors")


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(DATA / f"bytecheckpoint-{kind}", tmp_path / "copy"))


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_values(kind: str) -> None:
    ckpt = bcp.Checkpoint(DATA / f"bytecheckpoint-{kind}")
    found = {f"{part}: {name}": ckpt.read(name, kind=part) for part, name in ckpt.tensors}
    wanted = expected()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert ckpt.values["optimizer", "param_groups.0.bias.lr"] == 0.25
    assert ckpt.values["optimizer", "param_groups.1.weight.lr"] == 0.125
    assert ckpt.values["optimizer", "param_groups.1.weight.betas"] == (0.5, 0.75)
    facts = ckpt.user_metadata["bytecheckpoint"]
    extra = [f"extra_state/extra_state_rank_{rank}.pt" for rank in (0, 1)]
    assert facts == {"version": "0.0.2", "left_out": extra}


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on(kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    bcp.load(DATA / f"bytecheckpoint-{kind}", {"model": model, "optimizer": optimizer})
    wanted = expected()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[f"model: {name}"])
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(value, wanted[f"optimizer: state.{name}.{key}"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_of_fsdp2_go_on(ranks4: Ranks, kind: str) -> None:
    wanted = expected()
    for found in ranks4.run(fully_sharded, DATA / f"bytecheckpoint-{kind}"):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_import_with_a_copy_and_without(tmp_path: Path, copied: Callable[[str], Path]) -> None:
    folder = copied("fsdp2")
    bcp.tools.import_files(folder, tmp_path / "imported")
    bcp.tools.import_files(folder, copy=False)
    assert not bcp.tools.diff(folder, tmp_path / "imported")
    assert bcp.Checkpoint(folder).user_metadata == bcp.Checkpoint(tmp_path / "imported").user_metadata


def test_malicious_pickles_are_refused_by_name(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("fsdp2")
    metadata = folder / "optimizer" / ".metadata"
    sound = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(Evil(tmp_path / "made"), 4))
    with pytest.raises(bcp.CheckpointError, match=r"optimizer/\.metadata names posix\.mkdir, which bcp does not read"):
        bcp.Checkpoint(folder).names()
    of_tensor = b"ctorch._utils\n_rebuild_tensor_v2\n"
    assert of_tensor in sound
    metadata.write_bytes(sound.replace(of_tensor, b"cposix\nsystem\n".ljust(len(of_tensor) - 1, b"0") + b"\n"))
    with pytest.raises(bcp.CheckpointError, match=r"__0_0\.distcp: 'state.* names posix\.system"):
        bcp.Checkpoint(folder).names()
    assert not (tmp_path / "made").exists()


def test_a_cut_file_a_missing_one_and_one_elsewhere(copied: Callable[[str], Path]) -> None:
    folder = copied("fsdp2")
    file, metadata = folder / "model" / "__1_0.distcp", folder / "model" / ".metadata"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(bcp.CorruptError, match=r"is said to lie in bytes \d+ to 104 of model/__1_0.distcp, .* 103"):
        bcp.Checkpoint(folder).names()
    file.unlink()
    with pytest.raises(bcp.CorruptError, match=r"model/__1_0\.distcp, which is missing or a link"):
        bcp.Checkpoint(folder).names()
    metadata.write_bytes(metadata.read_bytes().replace(b"__1_0.distcp", b"../../secret"))
    with pytest.raises(bcp.CorruptError, match=r"'model/\.\./\.\./secret', which leaves the folder"):
        bcp.Checkpoint(folder).names()


def test_changed_bytes(copied: Callable[[str], Path]) -> None:
    folder, chance = copied("fsdp"), random.Random(7)  # noqa: S311 -- no secret
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "extra" not in str(path)]
    for _ in range(60):
        file = chance.choice(files)
        data = file.read_bytes()
        damaged = bytearray(data)
        for _ in range(chance.choice([1, 2, 8])):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        with suppress(bcp.CheckpointError):
            ckpt = bcp.Checkpoint(folder)
            for part, name in ckpt.tensors:
                ckpt.read(name, kind=part)
            _ = ckpt.values
        file.write_bytes(data)
