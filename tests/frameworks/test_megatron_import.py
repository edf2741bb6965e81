"""Folders that Megatron itself has saved, loaded into other layouts: by bcp, and by Megatron, which is the oracle."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import megatron_jobs
import megatron_own
import pytest
from hostile import Evil, repickled
from logical import differences, hyper, logical
from megatron_gpt import Layout, Net
from ranks import Ranks
from samples import sample

import bcp

pytestmark = pytest.mark.dist

FULL, BUCKETS = "fully_reshardable", "dp_reshardable"
LLAMA, BF16, MOE = Net(), Net(bf16=True), Net(experts=4)
PLAIN, TIED = Net(bf16=True, distopt=False), Net(llama=False, tied=True)
TP2, PP2, DP4, EP2, EP4, TP2_PP2 = Layout(tp=2), Layout(pp=2), Layout(), Layout(ep=2), Layout(ep=4), Layout(tp=2, pp=2)
CASES = [
    (LLAMA, TP2, PP2, ""),
    (LLAMA, PP2, DP4, "numbered"),
    (BF16, PP2, TP2, ""),
    (MOE, EP2, EP4, ""),
    (PLAIN, TP2, PP2, ""),
    (TIED, TP2_PP2, TP2, ""),
]


@pytest.fixture(scope="module")
def own(megatron4: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder that Megatron has saved on four ranks."""
    path = tmp_path_factory.mktemp("own")
    megatron4.run(megatron_own.save_own, BF16, TP2, path / "saved", FULL)
    return path / "saved" / "own"


@pytest.mark.parametrize(("net", "before", "after", "numbered"), sample(CASES, CASES[2], CASES[3]))
def test_a_load_is_that_of_megatron(
    megatron4: Ranks, tmp_path: Path, net: Net, before: Layout, after: Layout, numbered: str
) -> None:
    megatron4.run(megatron_own.save_own, net, before, tmp_path, FULL, numbered)
    megatron4.run(megatron_own.load_own, net, after, tmp_path / "own", tmp_path / "by-megatron", numbered)
    megatron4.run(megatron_jobs.reload, net, after, tmp_path / "own", tmp_path / "by-bcp", 2)
    assert not differences(logical(tmp_path / "by-megatron"), logical(tmp_path / "by-bcp"))
    assert not differences(logical(tmp_path / "bcp"), logical(tmp_path / "by-bcp"))
    assert hyper(tmp_path / "bcp") == hyper(tmp_path / "by-bcp")


def test_an_import_has_the_bits_of_a_save_by_bcp(own: Path, tmp_path: Path) -> None:
    bcp.tools.import_files(own, tmp_path / "imported")
    found, wanted = logical(tmp_path / "imported"), logical(own.parent / "bcp")
    steps = {name: tensor for name, tensor in wanted.items() if name[1].endswith(".step")}
    assert not differences(found, {name: tensor for name, tensor in wanted.items() if name not in steps})
    values = bcp.Checkpoint(tmp_path / "imported").values
    assert all(values[name] == tensor.item() for name, tensor in steps.items())
    facts = bcp.Checkpoint(own).user_metadata["megatron"]
    assert facts["iteration"] == 2
    assert facts["left_out"] == ["optimizer 0: wd_mult of 2 groups", "args"]


def test_buckets_of_the_distributed_optimizer_have_no_names(megatron4: Ranks, tmp_path: Path) -> None:
    megatron4.run(megatron_own.save_own, LLAMA, TP2, tmp_path, BUCKETS)
    said = megatron4.run(megatron_own.load_model, LLAMA, PP2, tmp_path / "own", tmp_path / "model")
    assert all("dp_reshardable" in words and "--dist-ckpt-optim-fully-reshardable" in words for words in said), said
    wanted = {name: tensor for name, tensor in logical(tmp_path / "bcp").items() if name[0] == "model"}
    assert not differences(logical(tmp_path / "model"), wanted)
    with pytest.raises(bcp.CheckpointError, match="dp_reshardable"):
        bcp.tools.import_files(tmp_path / "own", tmp_path / "imported")
    assert not (tmp_path / "imported" / "metadata.arrow").exists()


@pytest.mark.parametrize("file", ["common.pt", ".metadata"])
def test_a_malicious_pickle_is_refused_by_name(own: Path, tmp_path: Path, file: str) -> None:
    folder = Path(shutil.copytree(own, tmp_path / "copy"))
    pickled = pickle.dumps({"optimizer": Evil(tmp_path / "made")}, 4)
    if file == ".metadata":
        (folder / file).write_bytes(pickled)
    else:
        repickled(folder / file, pickled)
    with pytest.raises(bcp.CheckpointError, match=rf"{file} names posix\.mkdir, which bcp does not read; nothing"):
        bcp.Checkpoint(folder).names()
    assert not (tmp_path / "made").exists()


def test_classes_of_megatron_are_not_imported(own: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(own, tmp_path / "copy"))
    repickled(folder / "common.pt", b"\x80\x02}X\x04\x00\x00\x00argscmegatron.nowhere\nanything\n)Rs.")
    assert bcp.Checkpoint(folder).user_metadata["megatron"]["left_out"][-1] == "args"


def test_another_backend_of_megatron(own: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(own, tmp_path / "copy"))
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(bcp.CheckpointError, match=r"says 'zarr', and bcp reads 'torch_dist'"):
        bcp.Checkpoint(folder).names()


def test_a_cut_file_and_a_missing_one(own: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(own, tmp_path / "copy"))
    file = max(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(bcp.CorruptError, match=rf"is said to lie in bytes \d+ to \d+ of {file.name}, which has \d+"):
        bcp.Checkpoint(folder).names()
    file.unlink()
    with pytest.raises(bcp.CorruptError, match=f"names {file.name}, which is missing or a link"):
        bcp.Checkpoint(folder).names()
