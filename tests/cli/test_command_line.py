"""The command ``bcp`` as its user runs it: tables, JSON, exit statuses, and words for wrong calls."""

from __future__ import annotations

import io
import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_forked
from safetensors.torch import load_file, save_file
from torch import distributed

import bcp
from bcp.__main__ import main
from bcp._messages.tiers import ParityRecord, Sources
from bcp.cli import COMMANDS
from bcp.cli.screen import failed
from bcp.cli.tiers import _numbers
from bcp.telemetry.amounts import bytes_words
from bcp.tiers.folder import NodeFolder
from bcp.tiers.notes import COMMITTED, COPYING
from bcp.tiers.packing import packed

FACTS = {"git": "4f1c9e2", "note": "\x1b[31mred"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a run of two checkpoints, and go to its parent."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    options = bcp.SaveOptions(metadata=FACTS)
    with bcp.Run("run", {"model": model}, save=1, save_options=options) as run:
        run.resume()
        for step in (1, 2):
            with torch.no_grad():
                model.bias.fill_(step)
            run.maybe_save(step, {"loss": 1 / step})
    return Path("run")


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    """Run a command, and return its standard output."""
    assert main(words) == status, capsys.readouterr()
    return capsys.readouterr().out


def data(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    return json.loads(said(capsys, *words, "--json", status=status))


def test_an_error_is_printed_with_its_notes_by_one_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = bcp.CorruptError("model/a is missing; restore it")
    error.add_note("Operation b has replaced the checkpoint")
    assert failed(error) == 1
    assert capsys.readouterr().err == "bcp: model/a is missing; restore it\nOperation b has replaced the checkpoint\n"
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    printed = {}
    for rank in range(3):
        monkeypatch.setattr(distributed, "get_rank", lambda rank=rank: rank)
        for blamed in range(2):
            failed(bcp.PeerError(blamed, "died"))
            printed[rank, blamed] = bool(capsys.readouterr().err)
    assert [key for key, is_printed in printed.items() if is_printed] == [(0, 1), (1, 0)]


@pytest.mark.usefixtures("run")
def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "ls", "run").splitlines()
    assert lines[0].split() == ["step", "committed", "size", "state", "metrics", "path"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]
    assert "loss=0.5" in lines[2]
    assert [(each["step"], each["is_committed"]) for each in data(capsys, "ls", "run")] == [(1, True), (2, True)]
    assert main(["ls", "run/step-00000001"]) == 2
    assert "is one checkpoint" in capsys.readouterr().err
    assert main(["ls", "nowhere"]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "show", "run/step-00000002")
    assert "float32  [2, 3]" in text
    assert '"git": "4f1c9e2"' in text
    assert "\x1b" not in text
    found = data(capsys, "show", "run/step-00000002", "*ias")
    assert [each["name"] for each in found["tensors"]] == ["bias"]
    assert (found["metadata"], found["metrics"], found["step"], found["ranks"]) == (FACTS, {"loss": 0.5}, 2, 1)
    assert main(["show", "run/step-00000002", "nope*"]) == 1
    assert "no tensor that matches 'nope*'" in capsys.readouterr().err
    assert main(["show", "run", "--kind", "weights"]) == 2
    assert "kinds are model" in capsys.readouterr().err


def test_show_lists_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 2)
    path = str(tmp_path / "c")
    bcp.save(path, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.125)})
    assert "param_groups.weight.lr" in said(capsys, "show", path, "--values")
    found = data(capsys, "show", path, "*.lr", "--values")
    assert {(each["name"], each["value"]) for each in found} == {
        (f"param_groups.{w}.lr", 0.125) for w in ("weight", "bias")
    }


def test_show_lists_few_of_many_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bcp.save(tmp_path / "c", {"model": {f"w{n:03}": torch.zeros(2) for n in range(100)}})
    assert "and 60 more tensors" in said(capsys, "show", str(tmp_path / "c"))
    assert len(said(capsys, "show", str(tmp_path / "c"), "w*").splitlines()) > 100


@pytest.mark.usefixtures("run")
def test_cat(capsys: pytest.CaptureFixture[str]) -> None:
    path = "run/step-00000002"
    assert "tensor([2., 2.])" in said(capsys, "cat", path, "bias")
    weight = bcp.Checkpoint(path).read("weight")
    assert data(capsys, "cat", path, "weight") == weight.tolist()
    assert data(capsys, "cat", path, "weight", "--index", "1, 0:2") == weight[1, 0:2].tolist()
    assert data(capsys, "cat", path, "weight", "--index", "[..., -1]") == weight[..., -1].tolist()
    for wrong, words in (
        ("1.5", "no integer, slice"),
        ("7", "outside of its 2"),
        ("::2", "has step 2"),
        ("1:2:3:4", "no integer, slice"),
    ):
        assert main(["cat", path, "weight", "--index", wrong]) == 2
        assert words in capsys.readouterr().err
    assert main(["cat", path, "nothing"]) == 1
    assert "no tensor and no value 'nothing' of kind model" in capsys.readouterr().err
    assert main(["cat", path, "wieght"]) == 1
    assert "near are weight" in capsys.readouterr().err
    assert main(["cat", path, "weight", "--kind", "optimizer"]) == 1
    assert "pass --kind model" in capsys.readouterr().err
    assert "random" in said(capsys, "cat", path, "extra_states")


def strict(text: str) -> Any:
    """Read JSON, and refuse NaN and Infinity, which only Python takes."""
    return json.loads(text, parse_constant=pytest.fail)


def test_json_has_no_nan_and_takes_every_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {"nan": float("nan"), "bytes": b"ab", "dtype": torch.float16, "c1": "\x9b31m"}
    tensors = {"w": torch.tensor([math.nan, -math.inf, 1.0]), "c": torch.tensor([1 + 2j]), "\u4e2d\x9b": torch.ones(2)}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    bcp.save(one, {"model": tensors | values, "extra_states": {"lr": math.inf, (1, 2): torch.float32}})
    bcp.save(two, {"model": tensors | values | {"w": torch.zeros(3)}})
    cases = {
        "w": ["nan", "-inf", 1.0],
        "c": [[1.0, 2.0]],
        "nan": "nan",
        "bytes": "b'ab'",
        "dtype": "torch.float16",
        "c1": "\x9b31m",
        "extra_states": {"lr": "inf", "(1, 2)": "torch.float32"},
    }
    for name, expected in cases.items():
        text = said(capsys, "cat", one, name, "--json")
        assert (strict(text), text.isascii()) == (expected, True)
    (found,) = strict(said(capsys, "diff", one, two, "--json", status=1))["tensors"]
    assert (found["elements"], found["largest"]) == (3, "nan")
    assert said(capsys, "show", one, "--json").isascii()


def test_ranks_that_cannot_be_joined_are_a_wrong_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["import", str(tmp_path / "w.pt"), str(tmp_path / "c")]) == 2
    assert "the ranks cannot be joined: " in capsys.readouterr().err


def test_import_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = "hub/step-7"
    Path(folder).mkdir(parents=True)
    save_file({"w": torch.arange(3.0)}, f"{folder}/model.safetensors")
    assert "1 tensors and 0 values" in said(capsys, "import", folder, "--no-copy")
    assert main(["import", folder, "--no-copy"]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert data(capsys, "import", folder, "--no-copy", "--overwrite")["nbytes"] == 0
    assert main(["import", folder, "other", "--no-copy"]) == 2
    assert main(["import", folder]) == 2
    assert data(capsys, "cat", folder, "w") == [0.0, 1.0, 2.0]
    assert data(capsys, "show", folder)["framework"] == "safetensors"
    assert [each["step"] for each in data(capsys, "ls", "hub")] == [7]
    assert "unverified: 1 files" in said(capsys, "verify", folder)
    assert said(capsys, "diff", folder, f"{folder}/model.safetensors").startswith("equal")
    assert main(["cp", folder, "copy"]) == 2
    assert "bcp import" in capsys.readouterr().err.replace("\n", " ")
    assert "deleted 1 files" in (words := said(capsys, "rm", "-y", folder))
    assert "1 files of others stay" in words
    assert [file.name for file in Path(folder).iterdir()] == ["model.safetensors"]


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["run/step-00000001", "run/step-00000002"]
    assert said(capsys, "verify", *paths).count("sound: ") == 2
    (file,) = (run / "step-00000002" / "model").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "DAMAGED" in said(capsys, "verify", *paths, status=1)
    found = data(capsys, "verify", *paths, status=1)
    assert [each["sound"] for each in found] == [True, False]
    assert file.name in found[1]["damage"][0]
    assert "no data was read" in said(capsys, "verify", "--fast", *paths)
    assert said(capsys, "verify", "nowhere", paths[0], status=2).startswith(str(Path(paths[0]).absolute()))


@pytest.mark.usefixtures("run")
def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = "run/step-00000001", "run/step-00000002"
    assert said(capsys, "diff", one, one).startswith("equal: 2 tensors")
    text = said(capsys, "diff", one, two, status=1)
    assert text.splitlines()[-3].split() == ["tensor", "model", "bias", "2", "2", "1"]
    found = data(capsys, "diff", one, two, status=1)
    assert [(each["name"], each["largest"]) for each in found["tensors"]] == [("bias", 1.0)]


@pytest.mark.usefixtures("run")
def test_diff_of_some_names(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("diff", "run/step-00000001", "run/step-00000002", "--glob")
    assert said(capsys, *words, "wei*").startswith("equal: 1 tensors")
    assert "1 differences; 0 tensors are equal" in said(capsys, *words, "bias", status=1)
    assert main([*words, "nothing"]) == 1
    assert "no tensor and no value that matches" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_pin(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "pin", "run", "1") == "run: step 1 is pinned\n"
    assert [each["pinned"] for each in data(capsys, "ls", "run")] == [True, False]
    assert main(["rm", "-y", "run/step-00000001"]) == 2
    assert "bcp pin --off" in capsys.readouterr().err
    assert said(capsys, "pin", "run", "1", "--off") == "run: step 1 is not pinned\n"
    said(capsys, "rm", "-y", "run/step-00000001")
    assert main(["pin", "run", "7"]) == 2
    assert "has no checkpoint of step 7" in capsys.readouterr().err


@pytest.mark.usefixtures("run")
def test_cp_and_rm(capsys: pytest.CaptureFixture[str]) -> None:
    source = "run/step-00000002"
    assert "copy: " in said(capsys, "cp", source, "copy")
    assert bcp.Checkpoint("copy").verify()
    assert bcp.Checkpoint("copy").user_metadata == FACTS
    assert main(["cp", source, "copy"]) == 1
    assert "pass overwrite=True" in capsys.readouterr().err
    assert data(capsys, "cp", source, "other")["operation"] == bcp.Checkpoint(source).operation
    said(capsys, "rm", "-y", "copy", "other")
    assert not Path("copy").exists()
    assert bcp.Checkpoint(source).verify()


@pytest.mark.usefixtures("run")
def test_edit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = "run/step-00000001"
    words = said(capsys, "edit", path, "--replace", "^w=kernel.w", "--drop", "bias", "--dry-run")
    assert words == (
        f"{Path(path).absolute()}: tensors: 1 renamed, 1 dropped, 0 cast, 0 added; would write 0 bytes, "
        "would free 0 bytes\n"
        "  drops model: bias\n"
    )
    assert bcp.Checkpoint(path).names() == ["bias", "weight"]
    torch.save({"new": torch.ones(2)}, "new.pt")
    wishes = [
        "--rename",
        "weight=w",
        "--cast",
        "*=torch.bfloat16",
        "--add",
        "new.pt",
        "--note",
        "git=4f",
        "--note",
        "n=[1]",
    ]
    deep = "[" * 20_000
    wishes += ["--note", f"deep={deep}"]
    found = data(capsys, "edit", "-y", path, *wishes)
    assert (found["renamed"], found["cast"], found["added"]) == (1, 2, 1)
    ckpt = bcp.Checkpoint(path)
    assert {name: ckpt[name].dtype for name in ckpt.names()} == {"bias": "bfloat16", "new": "float32", "w": "bfloat16"}
    assert ckpt.user_metadata == {**FACTS, "git": "4f", "n": [1], "deep": deep}
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    assert main(["edit", path, "--drop", "bias"]) == 130
    assert "drops model: bias" in capsys.readouterr().err
    assert "bias" in bcp.Checkpoint(path)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "words",
    [
        ["-y"],
        ["-y", "--rename", "weight"],
        ["-y", "--rename", "weight="],
        ["-y", "--rename", "weight=\udcff"],
        ["-y", "--rename", "weight=w", "--replace", "w=x"],
        ["-y", "--rename", "weight=w", "--rename", "weight=x"],
        ["-y", "--rename", "weight=w", "--drop", "weight"],
        ["-y", "--cast", "*=int9"],
        ["-y", "--cast", "*=float16", "--cast", "*=bfloat16"],
        ["-y", "--cast", "*"],
        ["-y", "--drop", "nothing"],
        ["-y", "--add", "nowhere.pt"],
    ],
)
def test_an_edit_that_is_refused_changes_nothing(words: list[str]) -> None:
    path = "run/step-00000001"
    before = bcp.Checkpoint(path).operation
    assert main(["edit", path, *words]) == 2
    assert bcp.Checkpoint(path).operation == before


@pytest.mark.usefixtures("run")
def test_json_has_what_was_done_before_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["run/step-00000001", "nowhere", "run/step-00000002"]
    assert [each["sound"] for each in data(capsys, "verify", *paths, status=2)] == [True, True]
    assert [each["kept"] for each in data(capsys, "rm", "-y", *paths, status=2)] == [[]]
    assert [each["step"] for each in data(capsys, "ls", "run")] == [2]


@pytest.mark.usefixtures("run")
def test_rm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("no").open("w+") as answers:
        answers.write("n\n")
        answers.seek(0)
        monkeypatch.setattr(sys, "stdin", answers)
        assert main(["rm", "run/step-00000001"]) == 130
    assert bcp.Checkpoint("run/step-00000001").verify()


def test_gc(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "gc", "run") == "no remains\n"
    assert main(["gc", "nowhere"]) == 2
    assert "there is nothing at" in capsys.readouterr().err
    (run / "step-00000002" / "metadata.arrow").unlink()
    assert "stays: younger than a day" in said(capsys, "gc", "run", "--dry-run")
    assert "would be deleted" in said(capsys, "gc", "run", "--dry-run", "--now")
    assert [each["deleted"] for each in data(capsys, "gc", "run", "--now")] == [True]
    assert [each["step"] for each in data(capsys, "ls", "run") if each["is_committed"]] == [1]


def test_tiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory, store = tmp_path / "memory", tmp_path / "run"
    tiers = bcp.Tiers(folder=memory, agent="external")
    run = bcp.Run(store, {"model": torch.nn.Linear(3, 2)}, save=1, durable=1000, tiers=tiers)
    run.resume()
    for step in (1, 2):
        pending = run.maybe_save(step)
        assert pending is not None
        pending.released()
    NodeFolder(memory).note_copies(NodeFolder(memory).marks()[:1], "node-3")
    lines = said(capsys, "tiers", str(memory)).splitlines()
    assert lines[:4] == [
        f"run     {store}",
        "ranks   0",
        f"agent   none: start the job again, or start python -m bcp.agent {memory} {store}",
        "copies  of no other host",
    ]
    assert lines[4].startswith("newest  memory ")
    assert lines[5] == "queue   empty"
    assert [line.split()[0] for line in lines[7:]] == ["step", "2", "1"]
    assert all("0 of 1" in line and line.endswith("in memory") for line in lines[8:])
    found = data(capsys, "tiers", str(memory))
    assert (found["run"], found["ranks"], found["is_served"]) == (str(store), [0], False)
    assert sorted(each["copied_from"] for each in found["snapshots"]) == ["", "node-3"]
    assert all(each["nbytes"] > 0 and each["world_size"] == 1 for each in found["snapshots"])
    assert found["queue"] == {"snapshots": 0, "nbytes": 0}
    for each in found["snapshots"]:
        NodeFolder(memory).want(each["operation"])
    NodeFolder(memory).put_troubles(COPYING, {"node-2": "it is silent"})
    lines = said(capsys, "tiers", str(memory)).splitlines()
    [own] = [each for each in data(capsys, "tiers", str(memory))["snapshots"] if not each["copied_from"]]
    assert lines[5:7] == [
        f"queue   1 on their way to storage, {bytes_words(own['nbytes'])}",
        "fails   copies of node-2: it is silent",
    ]
    assert data(capsys, "tiers", str(memory))["queue"] == {"snapshots": 1, "nbytes": own["nbytes"]}
    assert found["seconds"]["memory"] >= 0
    assert found["seconds"]["copies"] is found["seconds"]["storage"] is None
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError
    for each in found["snapshots"]:
        NodeFolder(memory).end(each["operation"], COMMITTED)
    lines = said(capsys, "tiers", str(memory)).splitlines()
    assert lines[2] == "agent   none, and none is needed"
    assert not any(line.startswith("fails") for line in lines)
    keep_parity(NodeFolder(memory))
    lines = said(capsys, "tiers", str(memory)).splitlines()
    assert lines[1] == "ranks   none lives here"
    assert lines[3] == "copies  parity with node-2, node-1"
    [line] = [line for line in lines if "parity of node-1, node-2" in line]
    assert line.split()[0] == "7"
    assert "1, 4-5 of 6" in line
    [stripe] = [each for each in data(capsys, "tiers", str(memory))["snapshots"] if each["parity_of"]]
    assert (stripe["nbytes"], stripe["ranks"], stripe["copied_from"]) == (1000, [1, 4, 5], "")
    said(capsys, "tiers", str(tmp_path), status=2)
    assert {*tmp_path.iterdir()} == {memory, store}, "nothing is made"


def keep_parity(folder: NodeFolder) -> None:
    """Let a host have a stripe of a snapshot."""
    operation, ranks = "0123456789abcdef", (packed([0, 2]), packed([1]), packed([4, 5]))
    folder.put_sources(Sources(("node-2", "node-1"), ("", ""), place=0))
    folder.parity.stripe(operation).write_bytes(bytes(1000))
    folder.parity.mark(ParityRecord(operation, 7, 6, 0, ("", "node-1", "node-2"), ("", "", ""), ranks))


@pytest.mark.parametrize(
    ("ranks", "words"), [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0, 2-3, 7"), ((5, 6), "5-6")]
)
def test_ranks_in_few_words(ranks: tuple[int, ...], words: str) -> None:
    assert _numbers(ranks) == words


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nothing"], "No such command"),
        (["show"], "Missing argument 'PATH'"),
        (["verify"], "Missing argument 'PATH...'"),
        (["ls", "s3://bucket/run", "--storage-option", "endpoint"], "has to be NAME=VALUE"),
        (["show", "odd+://x"], "unknown scheme"),
        (["show", "."], "is not a checkpoint"),
    ],
)
def test_wrong_calls_are_status_2(
    words: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert reason in captured.err
    assert captured.out == ""


def test_names_beyond_the_encoding_of_the_terminal_are_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bcp.save(tmp_path / "c", {"model": {"\u4e2d\xe9": torch.ones(2)}})
    with (tmp_path / "out").open("w", encoding="latin-1") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["show", str(tmp_path / "c")]) == 0
    assert "\\u4e2d\xe9" in (tmp_path / "out").read_text("latin-1")


@pytest.mark.usefixtures("run")
def test_output_that_nobody_takes_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["show", "run/step-00000001"]) == 1
        with suppress(OSError):
            full.close()
    assert "bcp: [Errno 28]" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["show", "run/step-00000001"]) == 0
    assert main(["show", "nowhere"]) == 2


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "--help")
    assert all(f"  {name} " in text for name in COMMANDS)
    assert said(capsys, "--version").split() == ["bcp,", "version", bcp.__version__]
    for name in COMMANDS:
        assert said(capsys, name, "--help").startswith(f"Usage: bcp {name} ")


# -- exports ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("run")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # DCP's, in a single process
def test_exports_are_read_by_their_owners(capsys: pytest.CaptureFixture[str]) -> None:
    source = "run/step-00000002"
    expected = {name: bcp.Checkpoint(source).read(name) for name in ("bias", "weight")}

    def same(found: dict[str, torch.Tensor]) -> bool:
        return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)

    said(capsys, "export", "safetensors", source, "model.safetensors")
    assert same(load_file("model.safetensors"))
    assert data(capsys, "export", "hf", source, "hf", "--shard-size", "1KB")["tensors"] == 2
    assert same(load_file("hf/model.safetensors"))
    assert data(capsys, "export", "hf", source, "hf", "--shard-size", "0.5 TiB", "--overwrite")["tensors"] == 2
    said(capsys, "export", "torch", source, "model.pt", "--kind", "model")
    assert same(torch.load("model.pt", weights_only=True))
    said(capsys, "export", "dcp", source, "dcp", "--kind", "model")
    found = {"model": {name: torch.zeros_like(tensor) for name, tensor in expected.items()}}
    distributed.checkpoint.load(found, checkpoint_id="dcp", no_dist=True)
    assert same(found["model"])


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    "words",
    [["--dtype", "float33"], ["--glob", "nothing*"], ["--shard-size", "5 parsecs"], ["--shard-size", "9" * 400]],
)
def test_an_export_that_is_refused_writes_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "hf", "run/step-00000002", "hf", *words]) in (1, 2)
    assert words[1].rstrip("*") in capsys.readouterr().err
    assert not Path("hf").exists()


@pytest.mark.usefixtures("run")
def test_an_export_in_another_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "export", "safetensors", "run/step-00000001", "half.safetensors", "--dtype", "bf16")
    assert {tensor.dtype for tensor in load_file("half.safetensors").values()} == {torch.bfloat16}
    assert main(["export", "safetensors", "run/step-00000001", "half.safetensors"]) == 1
    assert "overwrite" in capsys.readouterr().err
    said(capsys, "export", "safetensors", "run/step-00000001", "half.safetensors", "--overwrite")


@pytest.mark.parametrize("stream", ["None", "open('/dev/null')"])
def test_a_closed_stream_changes_no_status(stream: str) -> None:
    program = f"import sys; from bcp.runtime.process import leave; sys.stderr = {stream}"
    close = "" if stream == "None" else "; sys.stderr.close()"
    done = run_forked([sys.executable, "-c", f"{program}{close}; leave(2)"])
    assert done.returncode == 2
