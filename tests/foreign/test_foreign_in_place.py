"""An import without a copy: metadata of bcp over the files of another library, and these files stay as they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from tasks import on_ranks
from test_foreign_hugging_face import weights, write_folder
from torch.distributed.checkpoint.state_dict import get_state_dict

import bcp
from bcp.backends import LocalBackend, MemoryBackend, swap
from bcp.errors import CheckpointError, StorageError
from bcp.format.metadata import METADATA_KEY, decode_commit, decode_metadata
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def hub(folder: Path) -> Path:
    return write_folder(folder, weights())


def one_shard(folder: Path) -> Path:
    folder.mkdir()
    save_file(weights(), folder / "anything.safetensors")
    return folder


def of_dcp(folder: Path) -> Path:
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    model, states = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optim": states}, checkpoint_id=folder, no_dist=True)
    return folder


WAYS = [hub, one_shard, of_dcp]


def contents(ckpt: bcp.Checkpoint) -> dict[Any, Any]:
    """Return every tensor as bytes, and every value."""
    tensors: dict[Any, Any] = {}
    for kind, name in ckpt.tensors:
        found = ckpt.read(name, kind=kind)
        raw = found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        tensors[kind, name] = (found.dtype, tuple(found.shape), raw)
    return tensors | {key: repr(value) for key, value in ckpt.values.items()}


def foreign_files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return bytes and time of change of all files but bcp's metadata."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != METADATA_KEY)
    return {str(file.relative_to(folder)): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def imported(folder: Path, **keywords: Any) -> Path:
    bcp.tools.import_files(folder, copy=False, **keywords)
    return folder


# -- what is opened ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_folder_is_what_it_was_and_its_files_stay(tmp_path: Path, way: Callable[[Path], Path]) -> None:
    folder = way(tmp_path / "there")
    before, files = contents(bcp.Checkpoint(folder)), foreign_files(folder)
    result = bcp.tools.import_files(folder, copy=False, options=bcp.SaveOptions(metadata={"from": "the hub"}))
    assert foreign_files(folder) == files
    with bcp.Checkpoint(folder) as ckpt:
        assert contents(ckpt) == before
        assert (result.path, result.operation) == (ckpt.path, ckpt.operation)
        assert (result.tensors, result.values, result.nbytes) == (len(ckpt.tensors), len(ckpt.values), 0)
        assert ckpt.user_metadata == {"from": "the hub"}
        assert ckpt.created.year > 2000
        assert ckpt.version == bcp.__version__
        assert "without checksums, imported without a copy at" in repr(ckpt)
        found = ckpt.verify()
    assert found
    assert found.unverified == found.files == sum(name.endswith((".safetensors", ".distcp")) for name in files)
    data = (folder / METADATA_KEY).read_bytes()
    assert data[-8:] == b"BCPMETA\x02"
    assert decode_commit(data, "").operation == result.operation


@pytest.mark.parametrize("way", WAYS)
def test_an_opening_reads_nothing_but_the_metadata(tmp_path: Path, way: Callable[[Path], Path]) -> None:
    folder = way(tmp_path / "there")
    backend = CountingBackend(LocalBackend(folder))
    bcp.Checkpoint(backend).names()
    assert set(backend.read) - {METADATA_KEY}  # headers
    backend = CountingBackend(LocalBackend(imported(folder)))
    with bcp.Checkpoint(backend) as ckpt:
        names = ckpt.names()
        _ = ckpt.values
        assert set(backend.read) <= {METADATA_KEY}
        ckpt.read(names[0])
    assert set(backend.read) - {METADATA_KEY}


def test_a_load_reads_the_same_bytes_as_one_of_the_foreign_files(tmp_path: Path) -> None:
    folder, counts, found = hub(tmp_path / "hub"), [], []
    for _ in range(2):
        backend = CountingBackend(LocalBackend(folder))
        target = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
        result = bcp.load(backend, {"model": target})
        assert result.unverified
        counts.append(result.read_nbytes)
        found.append(target)
        imported(folder, overwrite=True)
    assert counts[0] == counts[1] == sum(tensor.nbytes for tensor in weights().values())
    assert all(torch.equal(found[1][name], tensor) for name, tensor in weights().items())
    assert not list(folder.glob("telemetry"))


def test_tools_take_the_folder(tmp_path: Path) -> None:
    folder = imported(of_dcp(tmp_path / "dcp"))
    assert not bcp.tools.diff(of_dcp(tmp_path / "twin"), folder)
    bcp.tools.import_files(folder, tmp_path / "copy")
    assert not bcp.tools.diff(folder, tmp_path / "copy")
    assert bcp.Checkpoint(tmp_path / "copy").metadata.foreign is None
    bcp.tools.export_safetensors(folder, tmp_path / "out.safetensors")
    assert bcp.Checkpoint(tmp_path / "out.safetensors").names() == bcp.Checkpoint(folder).names()
    with pytest.raises(bcp.InputError, match="bcp import"):
        bcp.tools.copy(folder, tmp_path / "other")
    assert bcp.tools.collect(folder, min_age_seconds=0) == []


def test_the_dcp_bridge_reads_it(tmp_path: Path) -> None:
    folder = imported(hub(tmp_path / "hub"))
    state = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    dcp.load({"model": state}, storage_reader=bcp.dcp.StorageReader(folder), no_dist=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in weights().items())


def test_values_may_be_left_out(tmp_path: Path) -> None:
    folder = of_dcp(tmp_path / "dcp")
    assert bcp.Checkpoint(folder).values
    assert bcp.tools.import_files(folder, copy=False, values=False).values == 0
    ckpt = bcp.Checkpoint(folder)
    assert ckpt.values == {}
    assert ckpt.names() == ["bias", "weight"]


def test_a_value_that_cannot_be_read_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "path": tmp_path}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="path"):
        imported(tmp_path / "dcp")
    assert not (tmp_path / "dcp" / METADATA_KEY).exists()
    imported(tmp_path / "dcp", values=False)
    assert torch.equal(bcp.Checkpoint(tmp_path / "dcp").read("w"), torch.ones(3))


def test_a_run_goes_on_from_an_imported_step_and_never_deletes_its_files(tmp_path: Path) -> None:
    """Retention deletes the metadata alone, and no later job takes the folder for an interrupted save."""
    folder = tmp_path / "run" / "step-1"
    folder.parent.mkdir()
    save_file({"w": torch.full((4,), 5.0)}, folder.parent / "w.safetensors")
    folder.mkdir()
    (folder.parent / "w.safetensors").rename(folder / "model.safetensors")
    files = foreign_files(imported(folder))
    assert bcp.latest(tmp_path / "run") == str(folder)
    model = {"w": torch.zeros(4)}
    for last in (3, 5):
        with bcp.Run(str(tmp_path / "run"), {"model": model}, save=1, keep=1) as run:
            first = run.resume()
            if first == 1:
                assert torch.equal(model["w"], torch.full((4,), 5.0))
                run.pin(1, pinned=False)  # a new ledger pins all that it finds
            for step in range(first + 1, last + 1):
                run.maybe_save(step)
    assert not (folder / METADATA_KEY).exists()
    assert foreign_files(folder) == files
    assert [step.name for step in sorted((tmp_path / "run").glob("step-0*"))] == ["step-00000005"]


# -- files that were changed ---------------------------------------------------------------------------


def test_a_file_of_another_size_is_named(tmp_path: Path) -> None:
    folder = imported(one_shard(tmp_path / "there"))
    file = folder / "anything.safetensors"
    data = file.read_bytes()
    file.write_bytes(data + b"\0")
    words = rf"anything.safetensors has {len(data) + 1} bytes, and had {len(data)} .* changed since .*--overwrite"
    for look in (lambda: bcp.Checkpoint(folder).names(), lambda: bcp.load(folder, {"model": weights()})):
        with pytest.raises(bcp.CorruptError, match=words):
            look()
    file.write_bytes(data)
    assert bcp.Checkpoint(folder).names() == sorted(weights())


def test_a_missing_file_and_a_link_are_named_and_a_new_import_reads_what_is_there(tmp_path: Path) -> None:
    folder = imported(one_shard(tmp_path / "there"))
    file = folder / "anything.safetensors"
    file.rename(folder / "b.safetensors")
    for _ in range(2):
        with pytest.raises(bcp.CorruptError, match=r"anything\.safetensors is missing or a link"):
            bcp.Checkpoint(folder).names()
        file.unlink(missing_ok=True)
        file.symlink_to(folder / "b.safetensors")
    file.unlink()
    with pytest.raises(bcp.ExistsError, match="overwrite=True"):
        imported(folder)
    imported(folder, overwrite=True)
    assert torch.equal(bcp.Checkpoint(folder).read("lm_head.weight"), weights()["lm_head.weight"])
    (folder / "b.safetensors").unlink()
    with pytest.raises(bcp.NotACheckpointError, match="no files of a library"):
        imported(folder, overwrite=True)
    assert (folder / METADATA_KEY).exists()


# -- what is refused -----------------------------------------------------------------------------------


def test_one_file_is_refused_with_words_that_help(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    before = foreign_files(tmp_path)
    for name in ("x.pt", "x.safetensors"):
        with pytest.raises(bcp.InputError, match=r"is one file, .* pass the folder, .* pass a target"):
            imported(tmp_path / name)
    assert foreign_files(tmp_path) == before
    assert not (tmp_path / METADATA_KEY).exists()


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub")
    with pytest.raises(bcp.InputError, match="is for a copy"):
        bcp.tools.import_files(folder, tmp_path / "other", copy=False)
    with pytest.raises(bcp.InputError, match="pass a target"):
        bcp.tools.import_files(folder)
    codec = bcp.extend.Codec("same", bytes, bytes)
    with pytest.raises(bcp.InputError, match="options has codecs="):
        imported(folder, options=bcp.SaveOptions(codecs=[codec]))
    with pytest.raises(bcp.InputError, match="target_options= are for a target"):
        imported(folder, options=bcp.SaveOptions(storage_options={"a": 1}))
    with pytest.raises(bcp.InputError, match="target_options= are for a target"):
        bcp.tools.import_files(folder, copy=False, target_options={"a": 1})
    assert not (folder / METADATA_KEY).exists()


def test_a_checkpoint_of_bcp_is_never_replaced(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub")
    operation = bcp.save(folder, {"model": {"own": torch.ones(2)}}).operation
    for overwrite in (False, True):
        with pytest.raises(bcp.InputError, match=f"a checkpoint of bcp, of operation {operation}"):
            imported(folder, overwrite=overwrite)
    assert bcp.Checkpoint(folder).names() == ["own"]


def test_damaged_metadata_are_not_replaced(tmp_path: Path) -> None:
    folder = imported(hub(tmp_path / "hub"))
    data = bytearray((folder / METADATA_KEY).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / METADATA_KEY).write_bytes(data)
    with pytest.raises(bcp.CorruptError, match="checksum"):
        imported(folder, overwrite=True)
    files = foreign_files(folder)
    bcp.tools.remove(folder, force=True)
    assert foreign_files(folder) == files
    imported(folder)


def test_a_file_with_a_name_of_bcp_is_refused(tmp_path: Path) -> None:
    """A sweep would delete it as the remains of a save."""
    (tmp_path / "model").mkdir()
    name = "model/00000-0123456789abcdef.safetensors"
    save_file({"w": torch.ones(3)}, tmp_path / name)
    (tmp_path / "a.safetensors.index.json").write_text(f'{{"weight_map": {{"w": "{name}"}}}}')
    with pytest.raises(CheckpointError):
        imported(tmp_path)
    assert sorted(foreign_files(tmp_path)) == ["a.safetensors.index.json", name]


# -- deletions -----------------------------------------------------------------------------------------


def test_a_removal_deletes_the_metadata_alone(tmp_path: Path) -> None:
    folder = imported(of_dcp(tmp_path / "dcp"))
    files = foreign_files(folder)
    result = bcp.tools.remove(folder)
    assert (result.files, result.kept) == (1, tuple(sorted(files)))
    assert foreign_files(folder) == files
    assert not (folder / METADATA_KEY).exists()
    assert bcp.Checkpoint(folder).names() == ["bias", "weight"]


def test_a_save_over_it_leaves_the_foreign_files(tmp_path: Path) -> None:
    folder = imported(of_dcp(tmp_path / "dcp"))
    files = foreign_files(folder)
    with pytest.raises(bcp.ExistsError):
        bcp.save(folder, {"model": {"w": torch.ones(3)}})
    for _ in range(2):
        bcp.save(folder, {"model": {"w": torch.ones(3)}}, overwrite=True)
        assert bcp.tools.collect(folder, min_age_seconds=0) == []
        assert bcp.Checkpoint(folder).names() == ["w"]
        assert {name: file for name, file in foreign_files(folder).items() if name in files} == files
    bcp.tools.remove(folder)
    assert foreign_files(folder) == files


# -- all or nothing ------------------------------------------------------------------------------------


def test_of_two_imports_one_wins(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub")

    class Overtaken(LocalBackend):
        """Another import ends just before this one's commit."""

        async def put_if(self, key: str, data: Any, expected: Any) -> Any:
            await bcp.tools.aimport_files(folder, copy=False, overwrite=expected is not None)
            return await super().put_if(key, data, expected)

    for overwrite in (False, True):
        with pytest.raises(bcp.ExistsError, match="since the import began"):
            bcp.tools.import_files(Overtaken(folder), copy=False, overwrite=overwrite)
        assert bcp.Checkpoint(folder).names() == sorted(weights())
    assert [file.name for file in folder.iterdir() if "bcp-tmp" in file.name] == []


def test_a_kill_before_the_commit_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the folder, made just before the commit, is what a kill leaves."""
    folder, killed, create = hub(tmp_path / "hub"), tmp_path / "killed", swap._create

    def snapshot(temp: Path, final: Path) -> bool | None:
        shutil.copytree(folder, killed)
        return create(temp, final)

    with monkeypatch.context() as patched:
        patched.setattr(swap, "_create", snapshot)
        imported(folder)
    left = sorted(file.name for file in killed.iterdir() if not (folder / file.name).exists())
    assert len(left) == 1
    assert left[0].endswith(".bcp-tmp")
    assert bcp.Checkpoint(killed).metadata.commit.created == ""
    assert bcp.Checkpoint(imported(killed)).names() == sorted(weights())


def test_storage_that_cannot_be_written_to_says_so(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub")
    backend = FaultyBackend(LocalBackend(folder), "put_if", StorageError("the file system is read-only"))
    with pytest.raises(StorageError, match=r"was not imported: .*read-only.* with a copy"):
        bcp.tools.import_files(backend, copy=False)
    assert not (folder / METADATA_KEY).exists()


def test_a_commit_whose_answer_was_lost_is_found(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub")

    class Lost(LocalBackend):
        async def put_if(self, key: str, data: Any, expected: Any) -> Any:
            await super().put_if(key, data, expected)
            raise StorageError("the connection broke")

    bcp.tools.import_files(Lost(folder), copy=False)
    assert bcp.Checkpoint(folder).names() == sorted(weights())


def test_an_object_store(tmp_path: Path) -> None:
    stored = MemoryBackend("in-place")._objects
    for file in hub(tmp_path / "hub").iterdir():
        stored[f"llama/{file.name}"] = file.read_bytes()
    try:
        bcp.tools.import_files("memory://in-place/llama", copy=False)
        ckpt = bcp.Checkpoint("memory://in-place/llama")
        assert decode_metadata(bytes(stored[f"llama/{METADATA_KEY}"]), "").foreign is not None
        assert torch.equal(ckpt.read("lm_head.weight"), weights()["lm_head.weight"])
    finally:
        MemoryBackend.forget("in-place")


# -- several ranks -------------------------------------------------------------------------------------


def loads(folder: Path, count: int) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Load on some ranks of this process; return the tensors of each, and the bytes that each has read."""
    targets = [{name: torch.zeros_like(tensor) for name, tensor in weights().items()} for _ in range(count)]

    async def load(rank: int, ranks: Any) -> Any:
        return await bcp.aload(folder, {"model": targets[rank]}, framework="plain", coordinator=ranks)

    results = on_ranks(count, load)
    assert all(result.unverified for result in results), results
    return targets, [result.read_nbytes for result in results]


def test_three_ranks_import_once_and_read_what_they_read_of_the_foreign_files(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub")
    _, before = loads(folder, 3)
    results = on_ranks(3, lambda _, ranks: bcp.tools.aimport_files(folder, copy=False, coordinator=ranks))
    assert len({result.operation for result in results}) == 1
    targets, after = loads(folder, 3)
    assert before == after
    assert all(torch.equal(target[name], tensor) for target in targets for name, tensor in weights().items())
