"""Simple mistakes get short answers: few frames, the name that was meant, and a warning if nothing was loaded."""

from __future__ import annotations

import asyncio
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import entries, model, training
from torch.utils.data import DataLoader

import bcp
from bcp._load.targets import advice

# -- tracebacks --------------------------------------------------------------------------------------


def saved(path: Path) -> Path:
    bcp.save(path, model())
    return path


def uncommitted(path: Path) -> Path:
    (saved(path) / "metadata.arrow").unlink()
    return path


def corrupt(path: Path) -> Path:
    file = saved(path) / "metadata.arrow"
    file.write_bytes(file.read_bytes()[:-30] + b"x" * 6 + file.read_bytes()[-24:])
    return path


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Path], Path], Any, dict[str, Any]]] = {
    "nowhere": (bcp.NotACheckpointError, "load", lambda path: path, model(), {}),
    "uncommitted": (bcp.UncommittedError, "load", uncommitted, model(), {}),
    "corrupt": (bcp.CorruptError, "load", corrupt, model(), {}),
    "mismatch": (bcp.ShapeMismatchError, "load", saved, model(count=7), {}),
    "missing": (bcp.FqnMismatchError, "load", saved, {"model": {"v": torch.ones(1)}}, {}),
    "kind": (bcp.InputError, "load", saved, {"models": {}}, {}),
    "role": (bcp.InputError, "load", saved, model(), {"role": "../x"}),
    "option": (bcp.InputError, "load", saved, model(), {"framework": "none"}),
    "exists": (bcp.ExistsError, "save", saved, model(), {}),
    "leaf": (bcp.StateError, "save", lambda path: path, {"model": {"w": torch.ones(2, device="meta")}}, {}),
    "states": (bcp.InputError, "save", lambda path: path, [1], {}),
}


def call(how: str, name: str, *args: Any, **options: Any) -> Any:
    """Call ``bcp.save`` or ``bcp.load``, its twin, or the save that goes on in the background."""
    if how == "sync":
        return getattr(bcp, name)(*args, **options)
    if how == "async":
        return asyncio.run(getattr(bcp, "a" + name)(*args, **options))
    if how == "pending":
        return bcp.save(*args, async_checkpoint=True, **options).wait()

    async def pending() -> Any:
        return await (await bcp.asave(*args, async_checkpoint=True, **options))

    return asyncio.run(pending())


@pytest.mark.parametrize(
    ("how", "mistake"),
    [
        (how, mistake)
        for mistake, (_, name, *_) in MISTAKES.items()
        for how in ("sync", "async", *(("pending", "apending") if name == "save" else ()))
    ],
)
def test_a_mistake_has_few_frames_in_bcp(tmp_path: Path, how: str, mistake: str) -> None:
    kind, name, prepare, states, options = MISTAKES[mistake]
    path = prepare(tmp_path / "c")
    with pytest.raises(kind) as caught:
        call(how, name, path, states, **options)
    error = caught.value
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/bcp/" in frame.filename]
    assert 1 <= len(ours) <= 2
    assert error.__cause__ is None
    text = "".join(traceback.format_exception(error))
    assert text.count("Traceback (most recent call last)") == 1
    assert "anyio" not in text


def test_an_error_of_somebody_else_keeps_its_traceback_and_cause(tmp_path: Path) -> None:
    def broken(_: Any) -> Any:
        raise ZeroDivisionError("mine")

    async def stage(item: Any) -> Any:
        return broken(item)

    edit = bcp.SaveOptions(edit=lambda graph: graph.after("d2h", bcp.extend.Stage("mine", stage)))
    with pytest.raises(bcp.StageError, match="stage 'mine' failed on") as caught:
        bcp.save(tmp_path, model(), options=edit)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    text = "".join(traceback.format_exception(caught.value))
    assert "in broken" in text
    assert "graph.py" in text


# -- paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["step-1000", "step-2000"],
            "checkpoints step-1000, step-2000; pass one of them, as in .*/step-2000",
        ),
        (["9", "10", "100"], "checkpoints 9, 10, 100; pass one of them, as in .*/100$"),
        (["latest"], "checkpoints latest; pass one"),
        (
            ["step-9/actor", "step-10/critic"],
            "checkpoints step-9, step-10; pass one of them, as in .*/step-10$",
        ),
        (["run/a/b"], "checkpoints run; pass one"),
        (
            [f"step-{row}" for row in range(12)],
            "checkpoints step-0, .*, step-9 and 2 more; pass one of them, as in .*/step-11",
        ),
        (["actor", "critic"], "no checkpoint of its own, but roles below it: actor, critic; pass role="),
    ],
)
def test_the_folder_of_checkpoints_is_told_from_one_of_roles(tmp_path: Path, names: list[str], message: str) -> None:
    bcp.save(tmp_path / "one", {"model": {}})
    for name in names:
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "metadata.arrow").write_bytes((tmp_path / "one" / "metadata.arrow").read_bytes())
    with pytest.raises(bcp.NotACheckpointError, match=f"run holds {message}"):
        bcp.load(tmp_path / "run", model())


# -- names -------------------------------------------------------------------------------------------


def test_a_prefix_of_the_target_is_recognised_and_the_advice_works(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"a.w": torch.ones(2), "b.w": torch.ones(3)}})
    target = {"model": {"module.a.w": torch.zeros(2), "module.b.w": torch.zeros(3)}}
    with pytest.raises(bcp.FqnMismatchError, match=r"without 'module\.': pass LoadOptions") as caught:
        bcp.load(tmp_path, target)
    assert "rename=[('^', 'module.')]" in str(caught.value)
    bcp.load(tmp_path, target, options=bcp.LoadOptions(rename=[("^", "module.")]))
    assert all(tensor.eq(1).all() for tensor in target["model"].values())


def test_a_prefix_of_the_checkpoint_is_recognised_and_the_advice_works(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"model.net.a": torch.ones(2), "model.net.b": torch.ones(3)}})
    target = {"model": {"a": torch.zeros(2), "b": torch.zeros(3)}}
    with pytest.raises(bcp.FqnMismatchError, match=r"with 'model\.net\.' in front: pass LoadOptions") as caught:
        bcp.load(tmp_path, target)
    assert "rename=[('^model\\\\.net\\\\.', '')]" in str(caught.value)
    bcp.load(tmp_path, target, options=bcp.LoadOptions(rename=[("^model\\.net\\.", "")]))
    assert all(tensor.eq(1).all() for tensor in target["model"].values())


def test_a_misspelt_name_is_recognised(tmp_path: Path) -> None:
    bcp.save(tmp_path, {"model": {"layers.0.weight": torch.ones(2), "layers.0.bias": torch.ones(2)}})
    target = {"model": {"layers.0.wieght": torch.ones(2), "layers.0.bias": torch.ones(2)}}
    with pytest.raises(bcp.FqnMismatchError, match=r"has 'layers\.0\.weight' \(for 'layers\.0\.wieght'\)"):
        bcp.load(tmp_path, target)


def test_names_that_only_end_alike_are_no_advice() -> None:
    known = {"encoder.weight", "decoder.bias"}
    assert advice(["weight", "scale"], known) == ""
    assert "rename" not in advice(["x.bias", "y.zzzzzz"], {"bias"})
    assert advice(["anything"], set()) == ""


def test_advice_looks_at_few_of_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    close = advice.__globals__["get_close_matches"]

    def counted(name: str, names: Any, *rest: Any) -> list[str]:
        compared.append(len(names))
        return list(close(name, names, *rest))

    monkeypatch.setitem(advice.__globals__, "get_close_matches", counted)
    known = {f"layers.{row}.weight" for row in range(20_000)}
    assert "'layers.5.weight'" in advice([f"layers.5.wieght{row}" for row in range(10_000)], known)
    assert len(compared) == 3
    assert max(compared) <= 200


# -- nothing loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_load_of_nothing_warns_at_the_callers_line(tmp_path: Path, how: str) -> None:
    bcp.save(tmp_path, model())
    target = {"model": {"v": torch.zeros(3)}}
    reports = []

    async def load() -> bcp.LoadResult:
        return await bcp.aload(tmp_path, target, strict=False)

    with pytest.warns(bcp.NothingLoadedWarning, match="nothing of 'model' .*1 missing, 1 unexpected") as seen:
        reports.append(bcp.load(tmp_path, target, strict=False) if how == "sync" else asyncio.run(load()))
    assert [warning.filename for warning in seen] == [__file__]
    assert [report.unmatched for report in reports] == [("model",)]


def test_a_load_of_a_part_does_not_warn(tmp_path: Path) -> None:
    bcp.save(tmp_path, {**training(), "extra_states": {"step": 1}})
    target = training(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = bcp.load(tmp_path, {"model": {"0.weight": torch.zeros(16, 8), "no": torch.zeros(1)}}, strict=False)
        assert report.unmatched == ()
        assert bcp.load(tmp_path, {"model": {}}, strict=False).unmatched == ()
        assert bcp.load(tmp_path, {**target, "extra_states": {}}).unmatched == ()


def test_an_optimizer_of_which_nothing_was_saved_is_warned_of(tmp_path: Path) -> None:
    states = training()
    bcp.save(tmp_path, {"model": states["model"]})
    with pytest.warns(bcp.NothingLoadedWarning, match="nothing of 'optimizer'"):
        report = bcp.load(tmp_path, training(seed=1), strict=False)
    assert report.unmatched == ("optimizer",)


# -- keys of extra states ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["extra_states", "dataloader"])
def test_a_key_that_the_checkpoint_lacks_is_refused_before_anything_is_touched(tmp_path: Path, kind: str) -> None:
    bcp.save(tmp_path, {**model(1.0), kind: {"step": 7, "rng": torch.ones(2)}})
    target = {**model(0.0), kind: {"step": 0, "epoch": 3, 5: "five"}}
    with pytest.raises(bcp.FqnMismatchError, match=rf"wants 2 keys .* lacks: {kind}: epoch; {kind}: 5; pass strict"):
        bcp.load(tmp_path, target)
    assert not target["model"]["w"].any()
    assert target[kind] == {"step": 0, "epoch": 3, 5: "five"}
    report = bcp.load(tmp_path, target, strict=False)
    assert report.missing == (f"{kind}: epoch", f"{kind}: 5")
    assert target["model"]["w"].eq(1).all()
    assert (target[kind]["step"], target[kind]["epoch"], list(target[kind])) == (7, 3, ["step", "epoch", 5, "rng"])


@pytest.mark.parametrize("target", [{}, {"step": 0}, {"step": 0, "rng": None}])
def test_keys_that_only_the_checkpoint_has_are_added(tmp_path: Path, target: dict[str, Any]) -> None:
    bcp.save(tmp_path, {"extra_states": {"step": 7, "rng": "r"}})
    report = bcp.load(tmp_path, {"extra_states": target})
    assert target == {"step": 7, "rng": "r"}
    assert report.missing == report.unexpected == ()


def test_what_takes_its_state_by_itself_decides_by_itself(tmp_path: Path) -> None:
    class Owner(dict):  # type: ignore[type-arg]  # a mapping that is also an owner
        def state_dict(self) -> dict[str, Any]:
            return {"only": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self["took"] = state

    owner = Owner(other=2)
    bcp.save(tmp_path, {"extra_states": owner})
    bcp.load(tmp_path, {"extra_states": owner})
    assert owner["took"] == {"only": 1}


def test_a_damaged_extra_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    bcp.save(tmp_path, {**model(1.0), "extra_states": {"step": 7}})
    (file,) = (tmp_path / "extra_states").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    target = {**model(0.0), "extra_states": {"step": 0}}
    with pytest.raises(bcp.CorruptError, match=file.name) as caught:
        bcp.load(tmp_path, target)
    assert not target["model"]["w"].any()
    assert not [note for note in getattr(caught.value, "__notes__", []) if "half loaded" in note]


# -- words that say what to pass instead ---------------------------------------------------------------


def test_an_error_of_a_resumption_names_the_checkpoint(tmp_path: Path) -> None:
    bcp.save(tmp_path / "step-5", {"model": {"w": torch.zeros(2)}})
    with bcp.Run(tmp_path, {"model": {"w": torch.zeros(3)}}) as run, pytest.raises(bcp.MismatchError) as caught:
        run.resume()
    assert f"in the load of {tmp_path}/step-5" in caught.value.__notes__


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_none_in_place_of_a_state_is_refused(tmp_path: Path, kind: str) -> None:
    for refused in (
        lambda: bcp.save(tmp_path, {**training(), kind: None}),
        lambda: bcp.load(tmp_path, {kind: None}, strict=False),
        lambda: bcp.Run(tmp_path, {**training(), kind: None}),
    ):
        with pytest.raises(
            bcp.InputError, match=rf"^states\['{kind}'\] is None; leave the key out, or pass the {kind}$"
        ):
            refused()
    assert entries(tmp_path) == []


def test_a_state_of_no_kind_belongs_to_the_extra_states(tmp_path: Path) -> None:
    states = {**model(), "scheduler": 1}
    for refused in (lambda: bcp.save(tmp_path, states), lambda: bcp.Run(tmp_path, states)):
        with pytest.raises(bcp.InputError, match=r"^states has \['scheduler'\].* goes into states\['extra_states'\]$"):
            refused()


@pytest.mark.parametrize("level", [lambda loader: loader, lambda loader: {"train": loader}])
def test_torch_s_own_loader_is_refused_by_name_of_others(tmp_path: Path, level: Callable[..., Any]) -> None:
    loader: DataLoader[int] = DataLoader([1, 2])  # type: ignore[arg-type]  # a list is a dataset to torch
    with pytest.raises(bcp.StateError, match=r"pass torchdata's StatefulDataLoader or a bcp\.data\.TokenLoader"):
        bcp.save(tmp_path, {"dataloader": level(loader)})
