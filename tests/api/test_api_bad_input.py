"""What cannot be saved is refused with words that help, before anything is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from checkpoints import MIB, Gate, entries, files, model, training
from torch import nn

import bcp


def refused(path: Path, states: Any, kind: type[Exception], match: str, **how: Any) -> None:
    """Check that a save and a load raise the same, and write nothing."""
    before = files(path)
    for call in (bcp.save, bcp.load):
        with pytest.raises(kind, match=match):
            call(path / "c", states, **how)
    assert files(path) == before


# -- states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [nn.Linear(2, 2), None, [torch.ones(2)], 5], ids=["module", "None", "list", "int"])
def test_states_that_are_no_mapping_are_refused(tmp_path: Path, states: Any) -> None:
    refused(tmp_path, states, bcp.InputError, "not a mapping; its keys are model, optimizer, dataloader, extra_states")
    assert entries(tmp_path) == []


def test_no_states_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, {}, bcp.InputError, "states has nothing; its keys are model, optimizer, dataloader, extra_states")


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    states = {**model(), "modle": {}, "optim": {}}
    refused(tmp_path, states, bcp.InputError, r"states has \['modle', 'optim'\]; its keys are model, optimizer, data")


def test_an_empty_model_is_a_checkpoint(tmp_path: Path) -> None:
    report = bcp.save(tmp_path, {"model": {}})
    assert (report.nbytes, report.files) == (0, ())
    assert bcp.load(tmp_path, {"model": {}}).nbytes == 0


LEAVES: dict[str, tuple[Any, str]] = {
    "lazy": (nn.LazyLinear(3), r"model tensor 'weight' on rank 0 is uninitialized; run one forward"),
    "meta": ({"a": torch.empty(3, device="meta")}, r"model tensor 'a' on rank 0 is on the meta device.*to_empty\(\)"),
    "sparse": (
        {"a": torch.ones(3).to_sparse()},
        r"model tensor 'a' on rank 0 has the layout torch.sparse_coo; pass to_",
    ),
    "twice": (
        {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)},
        r"two leaves of model are named 'a\.b' on rank 0; ren",
    ),
    "key": ({"a": {(1, 2): torch.ones(2)}}, r"states\['model'\] has the key \(1, 2\) of type tuple at a; use strings"),
    "kind": (5, r"states\['model'\] is a int; pass a module, a list of modules, a nested mapping or a tensor"),
    "optimizer": (
        {"o": training()["optimizer"]},
        r"states\['model'\] has an optimizer at 'o'; pass it.* as states\['op",
    ),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_cannot_be_saved_is_named(tmp_path: Path, name: str) -> None:
    leaf, match = LEAVES[name]
    with pytest.raises(bcp.StateError, match=match):
        bcp.save(tmp_path / "c", {"model": leaf})
    assert entries(tmp_path) == []


def test_an_optimizer_without_its_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        bcp.StateError, match=r"a parameter of shape \(16, 8\) that is not in states\['model'\]; pass the"
    ):
        bcp.save(tmp_path / "c", {"optimizer": training()["optimizer"]})
    assert entries(tmp_path) == []


def test_extra_states_that_cannot_be_saved_are_named(tmp_path: Path) -> None:
    with pytest.raises(bcp.StateError, match=r"extra_states.*pass plain values"):
        bcp.save(tmp_path / "c", {**model(), "extra_states": {"gate": Gate()}})
    assert entries(tmp_path) == []


@pytest.mark.parametrize("mode", [False, True], ids=["sync", "async"])
def test_a_state_that_changes_during_its_snapshot_is_refused(tmp_path: Path, *, mode: bool) -> None:
    bcp.save(tmp_path, model(1, count=MIB))
    before = files(tmp_path)
    states = model(2, count=MIB)

    async def train(item: Any) -> Any:
        states["model"]["w"].add_(1)
        return item

    options = bcp.SaveOptions(edit=lambda graph: graph.before("d2h", bcp.extend.Stage("train", train)), part_bytes=MIB)
    with pytest.raises(
        bcp.StateChangedError, match=r"model tensor 'w' was written to \d times on rank 0 while its snap"
    ):
        bcp.save(tmp_path, states, overwrite=True, async_checkpoint=mode, options=options)
    assert files(tmp_path) == before
    bcp.save(tmp_path, model(3, count=MIB), overwrite=True)


def test_without_the_guard_nobody_looks(tmp_path: Path) -> None:
    states = model()

    async def train(item: Any) -> Any:
        states["model"]["w"].add_(1)
        return item

    edit = {"edit": lambda graph: graph.before("d2h", bcp.extend.Stage("train", train))}
    bcp.save(tmp_path, states, options=bcp.SaveOptions(guard=False, **edit))


# -- paths, roles, frameworks, options ---------------------------------------------------------------


def test_an_older_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    bcp.save(tmp_path, model(1))
    before = files(tmp_path)
    with pytest.raises(
        bcp.ExistsError, match=f"{tmp_path} holds a committed checkpoint; pass overwrite=True"
    ) as caught:
        bcp.save(tmp_path, model(2))
    assert isinstance(caught.value, FileExistsError)
    assert files(tmp_path) == before
    bcp.save(tmp_path, model(2), options=bcp.SaveOptions(overwrite=True))


@pytest.mark.parametrize("below", ["", "model", "receipts"])
def test_a_file_in_the_way_of_a_directory(tmp_path: Path, below: str) -> None:
    path = tmp_path / "c"
    (path / below).parent.mkdir(exist_ok=True)
    (path / below).write_bytes(b"mine")
    with pytest.raises(bcp.StorageError, match="a file is where a directory has to be: save to another path"):
        bcp.save(path, model())
    assert list(files(tmp_path).values()) == [b"mine"]


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        path, match = Path("/proc/bcp"), "/proc/bcp"
    else:
        path, match = tmp_path / "locked", "check the permissions"
        path.mkdir(mode=0o500)
    with pytest.raises(bcp.StorageError, match=match):
        bcp.save(path, model())


@pytest.mark.parametrize("path", ["foo://x", "file://host/x"])
def test_an_unknown_scheme_is_refused(path: str) -> None:
    for call in (bcp.save, bcp.load):
        with pytest.raises(bcp.InputError, match=path):
            call(path, model())


@pytest.mark.parametrize("path", ["~nobody-of-that-name/run", "a\0b", ""])
def test_a_path_that_cannot_be_is_refused(path: str) -> None:
    for call in (bcp.save, bcp.load):
        with pytest.raises(bcp.InputError, match=r"the path (is empty|')"):
            call(path, model())


@pytest.mark.parametrize(
    "role", ["", "..", ".", "a/b", "/abs", "a b", "model", "optimizer", "receipts", "metadata.arrow"]
)
def test_a_role_that_is_no_name_is_refused(tmp_path: Path, role: str) -> None:
    refused(
        tmp_path, model(), bcp.InputError, "cannot name a directory of a checkpoint: use letters, digits", role=role
    )


def test_an_unknown_framework_is_refused(tmp_path: Path) -> None:
    bcp.save(tmp_path / "c", model())
    match = "framework='fsdp9' is unknown; known are .*ddp, .*fsdp2, .*plain"
    refused(tmp_path, model(), bcp.InputError, match, framework="fsdp9")


BAD_SAVES: list[dict[str, Any]] = [
    *({name: value} for name in ("part_bytes", "io_workers", "copy_workers", "timeout") for value in (0, -1)),
    *({"budget_bytes": value} for value in (0, -1)),
    {"part_bytes": MIB + 1},
    {"part_bytes": float(MIB)},
    {"budget_bytes": 1.5},
    {"timeout": float("nan")},
    {"timeout": "soon"},
    {"balance": "best"},
]
BAD_LOADS: list[dict[str, Any]] = [
    *({name: 0} for name in ("budget_bytes", "read_bytes", "exchange_bytes", "io_workers", "copy_workers", "timeout")),
    {"read_bytes": MIB + 1},
    {"read_bytes": float(MIB)},
]


@pytest.mark.parametrize("bad", BAD_SAVES, ids=str)
def test_bad_save_options_are_refused_when_they_are_made(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(bcp.InputError, match=f"{name}='?{value}"):
        bcp.SaveOptions(**bad)


@pytest.mark.parametrize("bad", BAD_LOADS, ids=str)
def test_bad_load_options_are_refused_when_they_are_made(bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(bcp.InputError, match=f"{name}='?{value}"):
        bcp.LoadOptions(**bad)


def test_misspelt_options_are_refused() -> None:
    with pytest.raises(TypeError, match="overwrit"):
        bcp.SaveOptions(overwrit=True)  # type: ignore[call-arg]


NONE = bcp.extend.Codec("none", encode=bytes, decode=bytes)
BAD_EDITS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown stage": (
        {"edit": lambda graph: graph.after("nowhere", bcp.extend.Stage("x", anyio.sleep))},
        r"no stage named 'nowhere'; there are \[d2h, serialize, upload, checksum",
    ),
    "same name": ({"edit": lambda graph: graph.then(bcp.extend.Stage("d2h", anyio.sleep))}, "two stages named 'd2h'"),
    "nothing": ({"edit": lambda _: None}, r"options.edit returned None; it has to return the graph to run"),
    "codec named as a stage": ({"codecs": [bcp.extend.Codec("upload", bytes, bytes)]}, "two stages named 'upload'"),
    "codec twice": ({"codecs": [NONE, NONE]}, "two stages named 'none'"),
}


@pytest.mark.parametrize("name", BAD_EDITS)
def test_a_graph_that_cannot_run_leaves_not_even_a_directory(tmp_path: Path, name: str) -> None:
    options, match = BAD_EDITS[name]
    with pytest.raises(bcp.InputError, match=match):
        bcp.save(tmp_path / "c", model(), options=bcp.SaveOptions(**options))
    assert entries(tmp_path) == []


@pytest.mark.parametrize("options", [bcp.SaveOptions, bcp.LoadOptions])
def test_codecs_that_are_no_codecs_are_refused(options: Any) -> None:
    with pytest.raises(bcp.InputError, match="zstd"):
        options(codecs=["zstd"])


@pytest.mark.parametrize("states", [{"model": {"w": {10**5000: 1}}}, {"extra_states": {"a": {10**5000: 1}}}])
def test_a_key_of_thousands_of_digits_is_refused(tmp_path: Path, states: dict[str, Any]) -> None:
    with pytest.raises(bcp.StateError, match=r"digits.*shorter key"):
        bcp.save(tmp_path / "ckpt", states)
    assert not (tmp_path / "ckpt").exists()


def test_a_path_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    for call in (bcp.save, bcp.load):
        with pytest.raises(bcp.InputError, match=r"ckpt-\\ud800.*surrogates"):
            call(f"{tmp_path}/ckpt-\ud800", {"model": {"w": torch.ones(3)}})


@pytest.mark.parametrize("place", ["simplecache::http://u:pw@h/x?sig=S", " http://h/x?sig=S"])
def test_urls_that_are_none_are_no_folders(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bcp.InputError, match="is taken by no backend") as caught:
        bcp.save(place, model())
    assert "sig" not in str(caught.value)
    assert "pw" not in str(caught.value)
    assert not [*tmp_path.iterdir()]


def test_a_scheme_in_capitals_is_a_scheme(tmp_path: Path) -> None:
    bcp.save(f"FILE://{tmp_path}/c", model())
    bcp.load(tmp_path / "c", model())


def test_places_and_roles_of_other_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(bcp.InputError, match="role=3 cannot name"):
        bcp.save(tmp_path, model(), role=3)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(bcp.InputError, match="path=None is a NoneType"):
        bcp.latest(None)  # type: ignore[arg-type]  # the same
