"""Checkpoints that older versions of bcp wrote load to the last bit, for ever; ``write.py`` writes new ones."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
import torch
from golden import jobs
from golden.cases import CASES, STORE, codecs_of, copy_in, seeded
from golden.described import described, text_of
from golden.expected import DATA, Record, check_plain, flat_bytes, read
from ranks import Ranks
from stranger import KINDS, read_checkpoint, read_others, read_tables

import bcp
from bcp.backends import MemoryBackend

PLAIN = [name for name, case in CASES.items() if case.ranks == 1]
READABLE = [name for name, case in CASES.items() if not case.codecs and not case.tar]

SINCE = {"run": ["metrics"]}
"""Facts of a commit that saves have today, and that these cases are too old for."""


@pytest.fixture
def place(tmp_path: Path) -> Callable[[str], Path]:
    """Give the path of a golden checkpoint; one in a tar file is unpacked."""

    def path_of(name: str) -> Path:
        if CASES[name].tar:
            with tarfile.open(DATA / name / "checkpoint.tar.xz") as tar:
                tar.extractall(tmp_path, filter="data")
            return tmp_path / "checkpoint"
        return DATA / name / "checkpoint"

    return path_of


def check(path: Path, record: Record) -> None:
    for part in record.parts:
        check_plain(path / part.folder, part, codecs_of(record.codecs))


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return time of change and bytes of every file and directory below a path."""
    found = [root, *root.rglob("*")]
    return {str(each): (each.stat().st_mtime_ns, each.read_bytes() if each.is_file() else b"") for each in found}


def copied(name: str, path: Path) -> Path:
    return shutil.copytree(DATA / name / "checkpoint", path)


# -- loads -------------------------------------------------------------------------------------------


def test_all_checkpoints_are_there() -> None:
    assert sorted(CASES) == sorted(folder.name for folder in DATA.iterdir())


@pytest.mark.parametrize("name", CASES)
def test_it_loads_to_the_last_bit_in_one_process(place: Callable[[str], Path], name: str) -> None:
    check(place(name), read(DATA / name))


@pytest.mark.parametrize("name", READABLE)
def test_the_documentation_is_enough_to_read_it(name: str) -> None:
    for part in read(DATA / name).parts:
        path = DATA / name / "checkpoint" / part.folder / (part.role or "")
        found = {f"{kind}/{fqn}": tensor for (kind, fqn), tensor in read_checkpoint(path).items()}
        assert found.keys() == part.tensors.keys()
        for fqn, tensor in part.tensors.items():
            assert (f"torch.{found[fqn].dtype}", found[fqn].shape) == (str(tensor.dtype), tuple(tensor.shape)), fqn
            assert found[fqn].data.tobytes() == flat_bytes(tensor).numpy().tobytes(), fqn
        others, extras = read_others(path)
        values = {f"{kind}/{dotted}" for kind, dotted in others if kind != "dataloader"}
        assert values == part.values.keys()
        units = {f"{one}/{unit}" for one, (_, units) in part.units.items() for unit in ("", *units)}
        assert {dotted for kind, dotted in others if kind == "dataloader"} == units
        assert {kind for kind, _ in extras} == part.extras.keys()


def test_a_token_loader_goes_on_with_the_windows_that_come_next() -> None:
    loader = jobs.token_loader(0, 1)
    options = bcp.LoadOptions(record=False, strict=False)  # the checkpoint has another state, too
    bcp.load(DATA / "dataloaders" / "checkpoint", {"dataloader": {"train": loader}}, options=options)
    batch = next(loader)
    windows = [list(each) for each in zip(batch.windows, batch.tokens.tolist(), strict=True)]
    assert windows == read(DATA / "dataloaders").facts["windows"]


def test_objects_of_a_store_load_from_a_store() -> None:
    MemoryBackend.forget("golden")
    anyio.run(copy_in, DATA / "store" / "checkpoint")
    (part,) = read(DATA / "store").parts
    check_plain(STORE, part)
    MemoryBackend.forget("golden")


# -- runs and reports --------------------------------------------------------------------------------


def test_a_run_resumes_and_its_ledger_is_kept(tmp_path: Path) -> None:
    url, record = copied("run", tmp_path / "run"), read(DATA / "run")
    assert bcp.latest(url) == f"{url}/{record.facts['latest']}"
    assert bcp.latest(url, trust="verified") == f"{url}/step-00000001"
    states = {"model": {"w": torch.zeros(6, 4)}, "extra_states": {"progress": {"step": 0}, "rng": bcp.RngState()}}
    options = bcp.LoadOptions(record=False)
    with seeded(), bcp.Run(str(url), states, keep=9, run_id="golden", load_options=options) as run:
        assert run.resume() == record.facts["resumes"]
        assert [passed.step for passed in run.resumed.passed_over] == [3]
        own = bcp.RngState().state_dict()  # other tests may have imported frameworks, which add theirs
        random_states = described({key: own[key] for key in ("python", "numpy", "torch")})
    (expected,) = (part for part in record.parts if part.folder == record.facts["latest"])
    assert torch.equal(states["model"]["w"], expected.tensors["model/w"])
    progress = {"progress": states["extra_states"]["progress"]}
    assert expected.extras["extra_states"]["dict"] == [*described(progress)["dict"], ["rng", random_states]]
    ledger = json.loads((url / "run.json").read_text())
    entries = [{key: value for key, value in entry.items() if key != "committed"} for entry in ledger["checkpoints"]]
    assert entries == record.facts["entries"]
    assert ledger["total_lives"] == record.facts["total_lives"] + 1
    assert [life["ended"] for life in ledger["lives"]] == ["finished"] * 3


def test_steps_that_refer_to_others_are_copied_whole_and_a_run_goes_on(tmp_path: Path) -> None:
    run, record = copied("since", tmp_path / "run"), read(DATA / "since")
    assert {name: list(bcp.Checkpoint(run / name).refers) for name in record.facts["refers"]} == record.facts["refers"]
    bcp.tools.copy(run / "step-00000004", tmp_path / "whole")
    states = {"model": {"frozen": torch.zeros(5, 1024), "late": torch.zeros(3, 1024), "head": torch.zeros(9)}}
    states["extra_states"] = {"progress": {"step": 0}, "rng": bcp.RngState()}
    options = {"load_options": bcp.LoadOptions(record=False), "save_options": jobs.options()}
    with seeded(), bcp.Run(run, states, save=1, keep=1, since="auto", **options) as job:
        assert job.resume() == 4
        job.maybe_save(5)  # blocks have another size now, so that it is full
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000005"]
    shutil.rmtree(run)
    (expected,) = (part for part in record.parts if part.folder == "step-00000004")
    for (kind, fqn), tensor in read_checkpoint(tmp_path / "whole").items():
        assert tensor.data.tobytes() == flat_bytes(expected.tensors[f"{kind}/{fqn}"]).numpy().tobytes()


def test_a_report_reads_the_recordings() -> None:
    report, facts = bcp.report(DATA / "recorded" / "checkpoint"), read(DATA / "recorded").facts
    assert not report.unreadable
    found = [
        {
            "kind": one.kind,
            "step": one.step,
            "world_size": one.world_size,
            "hosts": [rank.host for rank in one.ranks],
        }
        for one in report.recordings
    ]
    assert found == facts["recordings"]
    for one in report.recordings:
        stored = {name for name in one.events.column("kind").to_pylist() if name}
        assert {"phase", "stage"} <= stored
    assert report.recordings[0].ranks[0].figures["state_nbytes"] == facts["state_nbytes"]
    assert "step 12" in report.text()


def test_a_run_without_its_ledger_has_the_metrics_of_its_commits(tmp_path: Path) -> None:
    url, record = copied("run-metrics", tmp_path / "run"), read(DATA / "run-metrics")
    (url / "run.json").unlink()
    states = {"model": {"w": torch.zeros(6, 4)}, "extra_states": {"progress": {"step": 0}, "rng": bcp.RngState()}}
    with seeded(), bcp.Run(str(url), states, keep=9, load_options=bcp.LoadOptions(record=False)) as run:
        assert run.resume() == 3
    entries = json.loads((url / "run.json").read_text())["checkpoints"]
    assert [entry["metrics"] for entry in entries] == [entry["metrics"] for entry in record.facts["entries"]]


# -- loads write nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "zstd", "roles", "fsdp2-tp", "dataloaders"])
def test_a_load_without_a_recording_writes_nothing(tmp_path: Path, name: str) -> None:
    path = copied(name, tmp_path / "copy")
    for each in [*path.rglob("*"), path]:
        each.chmod(0o555 if each.is_dir() else 0o444)  # does not stop root, and so the files are compared
    before = contents(path)
    check(path, read(DATA / name))
    assert contents(path) == before
    for each in [path, *path.rglob("*")]:
        each.chmod(0o755 if each.is_dir() else 0o644)


# -- the writer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_a_save_of_today_has_the_same_names_and_forms(tmp_path: Path, name: str) -> None:
    record = read(DATA / name)
    parts, _ = CASES[name].write(tmp_path / "fresh", _no_pool)
    assert [(part.folder, part.role) for part in parts] == [(part.folder, part.role) for part in record.parts]
    for part, golden in zip(parts, record.parts, strict=True):
        inner = Path(part.folder) / (part.role or "")
        fresh = form_of(tmp_path / "fresh" / inner)
        fresh["facts"] = [fact for fact in fresh["facts"] if fact not in SINCE.get(name, ())]
        assert fresh == form_of(DATA / name / "checkpoint" / inner)
        assert {key: (each.dtype, each.shape) for key, each in part.tensors.items()} == {
            key: (each.dtype, each.shape) for key, each in golden.tensors.items()
        }


def _no_pool() -> Ranks:
    raise AssertionError("a case of one process needs no ranks")


SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""Settings of AdamW that every version of torch has."""


def form_of(path: Path) -> dict[str, Any]:
    """Return the form of a checkpoint: file names, columns, names and dtypes of tensors, texts of values."""
    tables, facts = read_tables(path / "metadata.arrow")
    files = [file for file in path.rglob("*") if file.is_file()]
    below = {re.sub("[0-9a-f]{16}", "OPERATION", str(file.relative_to(path))) for file in files}
    tensors = [
        (
            KINDS[row["kind"]],
            row["fqn"],
            row["dtype"],
            row["shape"][: row["ndim"]],
            row["tied_to"],
            row["requires_grad"],
        )
        for row in tables["tensors"]
    ]
    texts = {
        (row["kind"], row["path"]): row["value"]
        for file in path.glob("receipts/*.arrow")
        for row in read_tables(file)[0]["objects"]
        if not row["value"].startswith('{"torch":')  # a zip file, which may differ from version to version of torch
    }
    values = [
        (row["kind"], row["path"], row["rank"], texts.get((row["kind"], row["path"])))
        for row in tables["objects"]
        if "param_groups" not in row["path"] or row["path"].rpartition(".")[2] in SETTINGS or ".own_" in row["path"]
    ]
    return {
        "files": {name for name in below if not name.startswith(("telemetry/", "actor/", "critic/"))},
        "facts": sorted(facts),
        "about": (facts["framework"], facts["codecs"], facts["part_bytes"]),
        "tensors": tensors,
        "values": values,
        "extras": tables["extras"],
        "columns": columns_of(path / "metadata.arrow"),
        "receipts": [columns_of(file) for file in sorted(path.glob("receipts/*.arrow"))],
        "headers": [header_of(file) for file in sorted(path.glob("*/*.safetensors"))],
    }


def columns_of(file: Path) -> dict[str, list[str]]:
    """Return name and type of each column of each table; numbers may be wider or narrower."""
    data, found = file.read_bytes()[:-24], {}
    source = pa.BufferReader(data)
    while source.tell() < len(data):
        with pa.ipc.open_stream(source) as stream:
            table = stream.read_all()
        name = table.schema.metadata[b"bcp.table"].decode()
        found[name] = [f"{each.name} {'int' if pa.types.is_integer(each.type) else each.type}" for each in table.schema]
    return {**found, "end": [repr(file.read_bytes()[-8:])]}


def header_of(file: Path) -> dict[str, Any]:
    """Return the dtypes in the header of a data file, and how its data section is aligned."""
    image = file.read_bytes()
    nbytes = int.from_bytes(image[:8], "little")
    header = json.loads(image[8 : 8 + nbytes])
    about = header.pop("__metadata__", None)
    return {"aligned": (8 + nbytes) % 4096, "about": about, **{name: each["dtype"] for name, each in header.items()}}


def sets_in_order(description: Any) -> Any:
    """Return a description of an archive, whose sets are lists in the order of the process's hashes, in one order."""
    if isinstance(description, dict):
        return {key: sets_in_order(each) for key, each in description.items()}
    if not isinstance(description, list):
        return description
    each = [sets_in_order(one) for one in description]
    if each[:2] in (["bcp", "set"], ["bcp", "frozenset"]):
        each[2] = sorted(each[2], key=text_of)
    return each


def test_an_archive_of_today_has_the_same_forms(tmp_path: Path) -> None:
    CASES["values"].write(tmp_path / "fresh", _no_pool)
    fresh, golden = (read_others(path)[1] for path in (tmp_path / "fresh", DATA / "values" / "checkpoint"))
    assert fresh.keys() == golden.keys()
    for key, archive in golden.items():
        values = [sets_in_order(described(torch.load(io.BytesIO(each)))) for each in (fresh[key], archive)]
        assert text_of(values[0]) == text_of(values[1]), key


def test_the_writer_replaces_nothing() -> None:
    from golden import write  # noqa: PLC0415 -- a script

    before = (DATA / "plain" / "expected.json").stat()
    with closing(Ranks(4)) as unused, pytest.raises(FileExistsError, match="stays as it is"):
        write.write("plain", unused)
    assert (DATA / "plain" / "expected.json").stat() == before
