"""An edited checkpoint has the bits that it had, under other names; an edit is whole or nothing."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from golden.cases import CASES, codecs_of
from golden.expected import DATA, Expected, flat_bytes, read
from ranks import Ranks
from samples import sample
from stranger import read_checkpoint, read_others
from torch.distributed import checkpoint as dcp
from torch.distributed import get_rank
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import bcp
from bcp.backends import LocalBackend
from bcp.errors import InputError, StorageError
from bcp.format.metadata import operation_of
from bcp.testing.storage_fakes import CountingBackend, FaultyBackend

READABLE = [name for name, case in CASES.items() if not (case.tar or case.codecs or case.is_foreign)]


def trained(path: Path | str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Save a model of two layers, with its optimizer, and an object of the rank."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(30, 20), "b": torch.nn.Linear(20, 5)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model["b"](model["a"](torch.ones(2, 30))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    bcp.save(path, {"model": model, "optimizer": optimizer, "extra_states": {"step": 7}}, overwrite=True)
    return model, optimizer


def owner(name: str, model: set[str]) -> tuple[str, str, str]:
    """Split the name of an optimizer's entry into section, parameter and key; the parameter is "" for none."""
    section, _, rest = name.partition(".")
    fits = [known for known in model if rest.startswith(f"{known}.")]
    best = max(fits, key=len, default="")
    return section, best, rest[len(best) + 1 :]


def moved(name: str, model: set[str], gone: set[str]) -> str | None:
    """Return the name of an optimizer's entry after the edit; None if it went with its parameter."""
    section, parameter, key = owner(name, model)
    if section == "own":
        return None
    if section not in ("state", "param_groups") or not parameter:
        return name
    return None if parameter in gone else f"{section}.net.{parameter}.{key}"


# -- against the values that were stored without bcp -----------------------------------------------------


@pytest.mark.parametrize("name", sample(READABLE, *READABLE[::3]))
def test_every_golden_checkpoint_after_an_edit(tmp_path: Path, name: str) -> None:
    record = read(DATA / name)
    shutil.copytree(DATA / name / "checkpoint", tmp_path / "checkpoint")
    for part in record.parts:
        path = tmp_path / "checkpoint" / part.folder / (part.role or "")
        edit_and_compare(path, part, random.Random(name))  # noqa: S311 -- a choice, no secret


def edit_and_compare(path: Path, part: Expected, dice: random.Random) -> None:
    model = {each.partition("/")[2] for each in (*part.tensors, *part.values) if each.startswith("model/")}
    stored = bcp.Checkpoint(path).tensors.values()
    ties = {each for info in stored if info.tied_to for each in (info.name, info.tied_to)}
    names = sorted(model - ties)
    gone = set(dice.sample(names, len(names) // 4))
    floats = [each for each in names if each not in gone and is_float(part.tensors.get(f"model/{each}"))]
    cast = dice.sample(floats, len(floats) // 3)
    others, objects = read_others(path)
    own = ["optimizer:own.*"] if any(each.startswith("own.") for _, each in others) else []
    added = {"new": torch.arange(6).view(2, 3), "none": torch.zeros(0, 2), "one": torch.tensor(2.5)}
    casts = dict.fromkeys(cast, torch.float64)
    assert bcp.tools.edit(path, rename=[("^", "net.")], drop=[*gone, *own], cast=casts, add=added).added == 3

    def new_name(kind: str, name: str) -> str | None:
        if kind == "model":
            return None if name in gone else f"net.{name}"
        return moved(name, model, gone) if kind == "optimizer" else name

    expected = {f"model/{key}": tensor for key, tensor in added.items()}
    for each, tensor in part.tensors.items():
        kind, _, name = each.partition("/")
        if (new := new_name(kind, name)) is not None:
            expected[f"{kind}/{new}"] = tensor.double() if kind == "model" and name in cast else tensor
    found = {f"{kind}/{name}": tensor for (kind, name), tensor in read_checkpoint(path).items()}
    assert found.keys() == expected.keys()
    for each, tensor in expected.items():
        assert (f"torch.{found[each].dtype}", found[each].shape) == (str(tensor.dtype), tuple(tensor.shape)), each
        assert found[each].data.tobytes() == flat_bytes(tensor).numpy().tobytes(), each
    values = {(kind, new): value for (kind, name), value in others.items() if (new := new_name(kind, name)) is not None}
    assert read_others(path) == (values, objects)
    ckpt = bcp.Checkpoint(path)
    assert bool(ckpt.verify())
    for each, tensor in expected.items():
        kind, _, name = each.partition("/")
        assert torch.equal(flat_bytes(ckpt.read(name, kind=kind)), flat_bytes(tensor)), each


def is_float(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point()


@pytest.mark.parametrize("name", ["zstd", "codec-pair"])
def test_codecs_go_on(tmp_path: Path, name: str) -> None:
    record = read(DATA / name)
    codecs = codecs_of(record.codecs)
    (part,) = record.parts
    path = shutil.copytree(DATA / name / "checkpoint", tmp_path / "checkpoint")
    with pytest.raises(bcp.MissingCodecError):
        bcp.tools.edit(path, rename=[("^", "net.")])
    bcp.tools.edit(path, rename=[("^", "net.")], cast={"*": torch.float64}, options=bcp.SaveOptions(codecs=codecs))
    ckpt = bcp.Checkpoint(path, options=bcp.LoadOptions(codecs=codecs))
    assert ckpt.codecs == tuple(record.codecs)
    assert bool(ckpt.verify())
    for each, tensor in part.tensors.items():
        kind, _, known = each.partition("/")
        if kind == "model":
            wanted = tensor.double() if tensor.is_floating_point() else tensor
            assert torch.equal(ckpt.read(f"net.{known}"), wanted), each


# -- as a user does it -----------------------------------------------------------------------------------


def test_a_model_with_other_names_trains_on_as_the_old_one(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path)
    bcp.tools.edit(tmp_path, rename={"a.weight": "x.weight", "a.bias": "x.bias"})
    target = torch.nn.ModuleDict({"x": torch.nn.Linear(30, 20), "b": torch.nn.Linear(20, 5)})
    fresh = torch.optim.AdamW(target.parameters(), lr=1)
    states: dict[str, Any] = {"model": target, "optimizer": fresh, "extra_states": {}}
    bcp.load(tmp_path, states)
    assert states["extra_states"] == {"step": 7}
    for net, steps in ((model, optimizer), (target, fresh)):
        net["b"](net["a" if net is model else "x"](torch.full((2, 30), 2.0))).square().sum().backward()
        steps.step()
    assert torch.equal(model["a"].weight, target["x"].weight)
    assert torch.equal(model["b"].bias, target["b"].bias)


def test_what_is_dropped_frees_its_files(tmp_path: Path) -> None:
    model, _ = trained(tmp_path)
    dry = bcp.tools.edit(tmp_path, drop=["optimizer:*", "extra_states:*"], dry_run=True)
    assert bcp.Checkpoint(tmp_path).kinds == ("model", "optimizer", "extra_states")
    result = bcp.tools.edit(tmp_path, drop=["optimizer:*", "extra_states:*"])
    assert (dry.operation, dry.freed_nbytes, dry.dropped) == ("", result.freed_nbytes, result.dropped)
    assert result.freed_nbytes == sum(8 * each.numel() + 4 for each in model.parameters())
    assert not list(tmp_path.glob("optimizer/*"))
    assert not list(tmp_path.glob("extra_states/*"))
    ckpt = bcp.Checkpoint(tmp_path)
    assert ckpt.kinds == ("model",)
    assert bool(ckpt.verify())
    assert not ckpt.verify().others
    bcp.load(tmp_path, {"model": model})


def test_edits_follow_each_other(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path)
    bcp.tools.edit(tmp_path, cast={"a.*": torch.bfloat16}, metadata={"git": "1", "note": "x"})
    bcp.tools.edit(tmp_path, rename={"a.weight": "z", "b.weight": "c"}, metadata={"note": None})
    bcp.tools.edit(tmp_path, drop=["a.bias"], add={"a.bias": torch.ones(2)}, cast={"z": torch.float32})
    ckpt = bcp.Checkpoint(tmp_path)
    assert ckpt.names() == ["a.bias", "b.bias", "c", "z"]
    assert (ckpt.world_size, ckpt.user_metadata) == (1, {"git": "1"})
    assert torch.equal(ckpt.read("z"), model["a"].weight.bfloat16().float())
    assert torch.equal(ckpt.read("a.bias"), torch.ones(2))
    state = optimizer.state[model["b"].weight]["exp_avg"]
    assert torch.equal(ckpt.read("state.c.exp_avg", kind="optimizer"), state)
    assert bool(ckpt.verify())
    copied = bcp.tools.copy(tmp_path, tmp_path.parent / "copy")
    assert not bcp.tools.diff(tmp_path, tmp_path.parent / "copy")
    assert copied.operation == ckpt.operation
    assert bcp.tools.collect(tmp_path, min_age_seconds=0) == []
    assert bool(bcp.Checkpoint(tmp_path).verify())
    bcp.save(tmp_path, {"model": model}, overwrite=True)
    assert len({operation_of(str(file.relative_to(tmp_path))) for file in tmp_path.glob("model/*")}) == 1
    assert bcp.tools.remove(tmp_path.parent / "copy").kept == ()
    assert not (tmp_path.parent / "copy").exists()


def test_a_copy_of_the_edited_one_replaces_a_copy_of_the_old_one(tmp_path: Path) -> None:
    trained(tmp_path / "a")
    bcp.tools.copy(tmp_path / "a", tmp_path / "b")
    bcp.tools.edit(tmp_path / "a", drop=["optimizer:*"], add={"new": torch.ones(3)})
    bcp.tools.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert not bcp.tools.diff(tmp_path / "a", tmp_path / "b")
    assert not list((tmp_path / "b").glob("optimizer/*"))
    assert bcp.Checkpoint(tmp_path / "b").verify().others == ()


def test_tied_tensors(tmp_path: Path) -> None:
    embed, head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
    head.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "head": head})
    bcp.save(tmp_path, {"model": model})
    bcp.tools.edit(tmp_path, rename={"head.weight": "a"})
    ckpt = bcp.Checkpoint(tmp_path)
    assert (ckpt["a"].tied_to, ckpt.nbytes) == ("embed.weight", 96)
    bcp.tools.edit(tmp_path, cast={"a": torch.bfloat16})
    ckpt = bcp.Checkpoint(tmp_path)
    assert (ckpt["embed.weight"].dtype, ckpt["a"].tied_to, ckpt.nbytes) == ("bfloat16", "embed.weight", 48)
    bcp.tools.edit(tmp_path, drop=["embed.weight"])
    ckpt = bcp.Checkpoint(tmp_path)
    assert (ckpt.names(), ckpt["a"].tied_to) == (["a"], "")
    assert torch.equal(ckpt.read("a"), embed.weight.bfloat16())
    assert bool(ckpt.verify())


def test_tensors_of_a_file_are_added(tmp_path: Path) -> None:
    model, _ = trained(tmp_path / "ckpt")
    torch.save({"extra": torch.arange(4), "b.weight": torch.zeros(2)}, tmp_path / "more.pt")
    with pytest.raises(InputError, match=r"has model 'b\.weight' already"):
        bcp.tools.edit(tmp_path / "ckpt", add=tmp_path / "more.pt")
    assert bcp.tools.edit(tmp_path / "ckpt", drop=["b.weight"], add=tmp_path / "more.pt").added == 2
    ckpt = bcp.Checkpoint(tmp_path / "ckpt")
    assert torch.equal(ckpt.read("extra"), torch.arange(4))
    assert torch.equal(ckpt.read("b.weight"), torch.zeros(2))
    assert torch.equal(ckpt.read("a.weight"), model["a"].weight)


def test_a_name_fits_itself_whatever_is_in_it(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"w[0]": torch.ones(2), "w0": torch.ones(2), "w[1]": torch.ones(2), "n": 5}})
    result = bcp.tools.edit(tmp_path, drop=["w[0]"], cast={"w[1]": torch.float64}, rename={"n": "m"})
    assert result.dropped == ("model: w0", "model: w[0]")
    ckpt = bcp.Checkpoint(tmp_path)
    assert (ckpt.names(), ckpt["w[1]"].dtype) == (["w[1]"], "float64")
    assert dict(ckpt.values) == {("model", "m"): 5}


# -- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({}, "nothing would change"),
        ({"rename": {"nope": "x"}}, "nope"),
        ({"rename": {"a.weight": "b.weight"}}, "b.weight"),
        ({"rename": lambda _: 3}, "name"),
        ({"drop": ["nope*"]}, r"drop='nope\*' fits no name"),
        ({"drop": "a.*"}, "pass a list"),
        ({"drop": ["extra_states:step"]}, r"extra_states:\*"),
        ({"drop": ["dataloader:*"]}, "fits no name"),
        ({"cast": {"a.*": torch.int8}}, "dtype with a point"),
        ({"cast": {"optimizer:*.step": torch.bfloat16}}, "fits no tensor"),
        ({"cast": {"a.*": "bfloat16"}}, "dtype with a point"),
        ({"add": {"a.weight": torch.ones(1)}}, "has model 'a.weight' already"),
        ({"add": {"x": [1.0]}}, "a list; pass dense tensors"),
        ({"add": {"x": torch.eye(2).to_sparse()}}, "pass dense tensors"),
        ({"metadata": {"x": object()}}, "metadata cannot be written as JSON"),
        ({"cast": {"*": torch.float32}}, "nothing would change"),
        ({"rename": {"state.a.weight.exp_avg": "x"}}, "model lacks: state"),
        ({"rename": {3: "x"}}, "model lacks: 3"),
        ({"rename": {"a.weight": "\udc80"}}, r"rename has the name '\\udc80', which UTF-8 cannot encode"),
        ({"add": {"\udc80": torch.ones(1)}}, "add has the name .* UTF-8"),
        ({"add": {1: torch.ones(1)}}, "names are strings"),
        ({"add": {"x": torch.ones(1, device="meta")}}, "'x', on meta; pass"),
        ({"cast": [("a.*", torch.bfloat16)]}, "pass a dict of patterns"),
        ({"drop": None}, "pass a list of patterns"),
        ({"drop": (name for name in ["a.*"])}, "pass a list of patterns"),
        ({"metadata": ["x"]}, "pass a dict of facts"),
    ],
)
def test_bad_arguments_change_nothing(tmp_path: Path, wishes: dict[str, Any], words: str) -> None:
    trained(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match=words):
        bcp.tools.edit(tmp_path, **wishes)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(InputError, match="'x', quantized; pass"):
        bcp.tools.edit(tmp_path, add={"x": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)})


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no fp4")
def test_a_cast_that_torch_cannot_do_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(InputError, match=r"torch\.float32 to torch\.float4\S+: torch .* does not convert"):
        bcp.tools.edit(tmp_path, cast={"a.*": torch.float4_e2m1fn_x2}, dry_run=True)


def test_other_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(bcp.NotACheckpointError):
        bcp.tools.edit(tmp_path, drop=["a"])
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(InputError, match="bcp import"):
        bcp.tools.edit(tmp_path / "w.pt", drop=["w"])


# -- failures --------------------------------------------------------------------------------------------

WISHES: dict[str, Any] = {"rename": {"a.weight": "x"}, "drop": ["optimizer:*"], "cast": {"b.*": torch.bfloat16}}


def test_a_failure_anywhere_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    trained(tmp_path / "start")
    counted = CountingBackend(LocalBackend(shutil.copytree(tmp_path / "start", tmp_path / "count")))
    bcp.tools.edit(counted, **WISHES)
    outcomes = set()
    for operation, times in counted.calls.items():
        for nth in range(1, times + 1):
            path = shutil.copytree(tmp_path / "start", tmp_path / f"{operation}-{nth}")
            backend = FaultyBackend(LocalBackend(path), operation, StorageError("the disk is gone"), nth=nth)
            words = ""
            try:
                bcp.tools.edit(backend, **WISHES)
            except bcp.BcpError as error:
                words = str(error)
            assert not words or "the disk is gone" in words
            ckpt = bcp.Checkpoint(path)
            assert bool(ckpt.verify())
            # files of an edit that may be committed later stay
            assert ckpt.verify().others == () or "no known outcome" in words
            outcomes.add(
                (ckpt.names(), ckpt.kinds) == (["a.bias", "b.bias", "b.weight", "x"], ("model", "extra_states"))
            )
    assert outcomes == {True, False}


@pytest.mark.parametrize("folder", ["", "run/step-00000001"])
def test_gc_deletes_what_an_edit_has_emptied_and_not_deleted(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder
    model, _ = trained(path)
    backend = FaultyBackend(LocalBackend(path), "delete", StorageError("the disk is gone"))
    edited = bcp.tools.edit(backend, rename={"a.weight": "x"}, drop=["optimizer:*", "extra_states:*"])
    assert edited.freed_nbytes == 0
    names = [operation_of(str(file.relative_to(path))) for file in path.glob("optimizer/*")]
    assert bcp.tools.collect(tmp_path, dry_run=True)[0].is_old is False
    (remains,) = bcp.tools.collect(tmp_path, min_age_seconds=0)
    assert (remains.place, [remains.operation], remains.files, remains.deleted) == (folder, names, 2, True)
    assert not [*path.glob("optimizer/*"), *path.glob("extra_states/*")]
    assert bool(bcp.Checkpoint(path).verify())
    assert torch.equal(bcp.Checkpoint(path).read("x"), model["a"].weight)
    assert bcp.tools.collect(tmp_path, min_age_seconds=0) == []


def test_an_answer_that_is_lost_is_asked_for(tmp_path: Path) -> None:
    trained(tmp_path)
    inner = LocalBackend(tmp_path)

    class Lost(CountingBackend):
        async def put_if(self, key: str, data: Any, version: Any) -> Any:
            await super().put_if(key, data, version)
            raise StorageError("no answer")

    bcp.tools.edit(Lost(inner), rename={"a.weight": "x"})
    assert "x" in bcp.Checkpoint(tmp_path)


def test_a_clean_up_that_fails_says_so(tmp_path: Path) -> None:
    trained(tmp_path)
    fault = StorageError("the disk is gone")
    bcp.tools.edit(FaultyBackend(LocalBackend(tmp_path), "delete", fault), drop=["optimizer:*"])
    assert list(tmp_path.glob("optimizer/*"))
    with pytest.raises(StorageError, match="the disk is gone"):
        bcp.tools.collect(FaultyBackend(LocalBackend(tmp_path), "delete", fault), min_age_seconds=0)
    assert [each.deleted for each in bcp.tools.collect(tmp_path, min_age_seconds=0)] == [True]
    assert not list(tmp_path.glob("optimizer/*"))


def test_a_dry_run_reads_the_table_of_contents_alone(tmp_path: Path) -> None:
    trained(tmp_path)
    backend = CountingBackend(LocalBackend(tmp_path))
    bcp.tools.edit(backend, rename={"a.weight": "x"}, cast={"b.*": torch.bfloat16}, dry_run=True)
    assert set(backend.calls) <= {"version", "get", "list"}
    assert backend.calls["get"] == 1


@pytest.mark.parametrize("other", ["save", "edit"])
def test_another_commit_meanwhile_wins(tmp_path: Path, other: str) -> None:
    model, _ = trained(tmp_path)

    async def rival(_: str) -> None:
        if other == "save":
            await bcp.asave(tmp_path, {"model": model}, overwrite=True)
        else:
            await bcp.tools.aedit(tmp_path, drop=["b.bias"])

    backend = FaultyBackend(LocalBackend(tmp_path), "put_if", rival)
    with pytest.raises(bcp.ExistsError):
        bcp.tools.edit(backend, **WISHES)
    ckpt = bcp.Checkpoint(tmp_path)
    assert "x" not in ckpt
    assert ("b.bias" in ckpt) == (other == "save")
    assert bool(ckpt.verify())
    assert ckpt.verify().others == ()


@pytest.mark.parametrize("operation", ["put", "read_into", "put_if"])
@pytest.mark.parametrize("other", ["gc", "copy"])
def test_an_edit_whose_files_are_deleted_is_not_committed(tmp_path: Path, operation: str, other: str) -> None:
    """A copy of the same checkpoint has the metadata that the edit has found, and sweeps the files of others."""
    trained(tmp_path / "a")
    bcp.tools.copy(tmp_path / "a", tmp_path / "b")

    async def rival(_: str) -> None:
        if other == "gc":
            await bcp.tools.acollect(tmp_path / "a", min_age_seconds=0)
        else:
            await bcp.tools.aremove(tmp_path / "a", force=True)
            await bcp.tools.acopy(tmp_path / "b", tmp_path / "a")

    backend = FaultyBackend(
        LocalBackend(tmp_path / "a"), operation, rival, key="receipts" if operation != "put_if" else ""
    )
    with pytest.raises(StorageError, match=r"disappeared during the edit.*dit again"):
        bcp.tools.edit(backend, cast={"a.*": torch.bfloat16})
    assert bool(bcp.Checkpoint(tmp_path / "a").verify())
    assert not bcp.tools.diff(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(("operation", "error"), [("read_into", bcp.CorruptError), ("put", bcp.ExistsError)])
def test_an_error_says_that_a_save_has_replaced_the_checkpoint(
    tmp_path: Path, operation: str, error: type[Exception]
) -> None:
    model, _ = trained(tmp_path)

    async def rival(_: str) -> None:
        await bcp.asave(tmp_path, {"model": model}, overwrite=True)

    with pytest.raises(error) as caught:
        bcp.tools.edit(FaultyBackend(LocalBackend(tmp_path), operation, rival), **WISHES)
    winner = bcp.Checkpoint(tmp_path).operation
    assert winner in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert bcp.Checkpoint(tmp_path).verify().others == ()


# -- many ranks, and other readers -----------------------------------------------------------------------


def test_one_state_of_a_family_is_dropped(tmp_path: Path) -> None:
    """The states of a parameter share their places: another one leads them when the first is gone."""
    _, optimizer = trained(tmp_path)
    bcp.tools.edit(tmp_path, drop=["optimizer:state.a.weight.exp_avg"], cast={"optimizer:*.exp_avg_sq": torch.float64})
    bcp.tools.edit(tmp_path, drop=["optimizer:state.b.*.exp_avg"])
    ckpt = bcp.Checkpoint(tmp_path)
    assert bool(ckpt.verify())
    found = read_checkpoint(tmp_path)
    names = {0: "a.weight", 1: "a.bias", 2: "b.weight", 3: "b.bias"}
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        state, name = optimizer.state[parameter], f"state.{names[number]}"
        squares = found["optimizer", f"{name}.exp_avg_sq"]
        assert squares.data.tobytes() == flat_bytes(state["exp_avg_sq"].double()).numpy().tobytes()
        assert (("optimizer", f"{name}.exp_avg") in found) == (names[number] == "a.bias")
        assert torch.equal(ckpt.read(f"{name}.step", kind="optimizer"), state["step"])


def by_rows(whole: torch.Tensor) -> DTensor:
    return distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(0)])


def saved_by_all(path: Path) -> None:
    """Save uneven shards of one tensor, and another one whole."""
    whole = torch.arange(70.0).view(10, 7)
    states = {"model": {"shard": by_rows(whole), "whole": whole.clone()}, "extra_states": {"rank": get_rank()}}
    bcp.save(path, states)


def loaded_by_all(path: Path) -> tuple[torch.Tensor, torch.Tensor, bool]:
    shard, more = by_rows(torch.zeros(10, 7, dtype=torch.bfloat16)), torch.zeros(3)
    states: dict[str, Any] = {"model": {"cut": shard, "more": more}, "extra_states": {}}
    bcp.load(path, states)
    return shard.full_tensor(), more, states["extra_states"]["rank"] == get_rank()


@pytest.mark.dist
def test_ranks_save_and_load(ranks4: Ranks, tmp_path: Path) -> None:
    ranks4.run(saved_by_all, tmp_path / "ckpt")
    bcp.tools.edit(
        tmp_path / "ckpt",
        rename={"shard": "cut"},
        drop=["whole"],
        cast={"shard": torch.bfloat16},
        add={"more": torch.ones(3)},
    )
    ckpt = bcp.Checkpoint(tmp_path / "ckpt")
    assert (ckpt.world_size, bool(ckpt.verify())) == (4, True)
    for cut, more, is_own in ranks4.run(loaded_by_all, tmp_path / "ckpt"):
        assert torch.equal(cut, torch.arange(70.0).view(10, 7).bfloat16())
        assert torch.equal(more, torch.ones(3))
        assert is_own


class TwoPass(torch.optim.SGD):
    """Has an entry of each parameter in its state dict that is no state."""

    def state_dict(self) -> dict[str, Any]:
        means = {0: {"mean": 2.5, "peak": torch.ones(2)}}
        return {**super().state_dict(), "means": {"state": means, "param_groups": self._groups()}}

    def _groups(self) -> list[Any]:
        return super().state_dict()["param_groups"]


def test_an_entry_that_names_a_parameter_keeps_its_name(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    bcp.save(tmp_path, {"model": model, "optimizer": TwoPass(model.parameters())})
    assert [name for _, name in bcp.Checkpoint(tmp_path).values if ".weight." in name and name.startswith("own.")]
    for drop in ([], ["optimizer:own.*.mean", "optimizer:own.*.param_groups.*"]):  # numbers, then tensors alone
        with pytest.raises(InputError, match=r"optimizer:own\.\*"):
            bcp.tools.edit(tmp_path, rename={"weight": "w"}, drop=drop)
    bcp.tools.edit(tmp_path, rename={"bias": "b"})
    bcp.tools.edit(tmp_path, rename={"weight": "w"}, drop=["optimizer:own.*"])
    assert bcp.Checkpoint(tmp_path).names() == ["b", "w"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # DCP's, in a single process
def test_dcp_reads_what_it_has_saved_by_the_new_names(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    state = {"model": {"a": weight, "b": torch.ones(2)}, "epoch": 3}
    dcp.save(state, storage_writer=bcp.dcp.StorageWriter(tmp_path), no_dist=True)
    bcp.tools.edit(tmp_path, rename={"a": "net.a"}, drop=["b"])
    target = {"model": {"net.a": torch.zeros(2, 3)}, "epoch": 0}
    dcp.load(target, storage_reader=bcp.dcp.StorageReader(tmp_path), no_dist=True)
    assert torch.equal(target["model"]["net.a"], weight)
    assert target["epoch"] == 3
