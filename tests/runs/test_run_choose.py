"""A run that comes back in two parts, begins anew, tells what is durable, and finds its best checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from ranks import Ranks

import bcp
from bcp.format.metadata import METADATA_KEY
from bcp.policies import AnyKept, Best


class Holder:
    """An object with a state, as the settings of a trainer."""

    def __init__(self, value: int = 0) -> None:
        self.value, self.loads = value, 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value, self.loads = state["value"], self.loads + 1


def states(value: float = 0.0, holder: Holder | None = None) -> dict[str, Any]:
    extra = {"trainer": holder or Holder(), "epoch": int(value), "other": [value]}
    return {"model": {"w": torch.full((4,), value)}, "extra_states": extra}


def saved(path: Path, *steps: int, **options: Any) -> None:
    """Save some steps, whose weights are their numbers."""
    target: dict[str, Any] = states()
    with bcp.Run(path, target, save=None, keep=10, **options) as run:
        run.resume()
        for step in steps:
            target["model"]["w"].fill_(step)
            target["extra_states"] = states(step, Holder(step))["extra_states"]
            run.save(step, {"loss": float(step % 4)})


def damage(path: Path, step: int, kind: str) -> None:
    """Change the last bytes of a data file."""
    (file,) = (path / f"step-{step:08d}" / kind).iterdir()
    data = bytearray(file.read_bytes())
    data[-8:] = bytes(each ^ 0xFF for each in data[-8:])
    file.write_bytes(data)


def marks(path: Path) -> dict[int, tuple[str, bool]]:
    return {info.step: (info.trust, info.pinned) for info in bcp.Run(path, {}).list()}


# -- two parts --------------------------------------------------------------------------------------------


def test_the_small_states_come_before_the_models(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    late: dict[str, Any] = {}
    with bcp.Run(tmp_path, late, save=None) as run:
        asked = {"trainer": Holder(), "epoch": 0}
        assert run.choose(asked) == 4
        assert (asked["trainer"].value, asked["epoch"]) == (4, 4)  # type: ignore[attr-defined]  # a Holder
        assert sorted(asked) == ["epoch", "trainer"]  # no key that was not asked for
        late |= states(0.0, Holder())
        assert run.resume() == 4
    assert late["model"]["w"].tolist() == [4.0] * 4
    assert late["extra_states"]["trainer"].value == 4
    assert late["extra_states"]["other"] == [4.0]


def test_a_new_run_is_chosen_too(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None) as run:
        holder = Holder(7)
        assert run.choose({"trainer": holder}) == 0
        assert holder.loads == 0
        assert run.resume() == 0
        run.save(1)
    assert bcp.latest(tmp_path) is not None


def test_a_newer_checkpoint_that_comes_between_is_not_loaded(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    target = states()
    with bcp.Run(tmp_path, target, save=None) as run:
        assert run.choose({"epoch": 0}) == 2
        bcp.save(tmp_path / "step-00000009", states(9))
        assert run.resume() == 2
    assert target["extra_states"]["epoch"] == 2


def test_a_damaged_choice_raises_and_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    damage(tmp_path, 4, "model")
    target = states()
    with bcp.Run(tmp_path, target, save=None) as run:
        assert run.choose({"epoch": 0}) == 4  # its small states are whole
        with pytest.raises(bcp.CorruptError):
            run.resume()
        extra = {"epoch": 0}
        assert run.choose(extra) == 2
        assert extra == {"epoch": 2}
        assert run.resume() == 2
        assert [choice.step for choice in run.resumed.passed_over] == [4]
        assert "CorruptError" in run.resumed.passed_over[0].reason
        run.save(5)
    assert target["extra_states"]["epoch"] == 2


@pytest.mark.parametrize("step", [None, 2])
def test_the_only_checkpoint_is_damaged(tmp_path: Path, step: int | None) -> None:
    saved(tmp_path, 2)
    damage(tmp_path, 2, "model")
    with bcp.Run(tmp_path, states(), save=None) as run:
        assert run.choose({"epoch": 0}, step=step) == 2
        with pytest.raises(bcp.CorruptError):
            run.resume()
        with pytest.raises(bcp.CheckpointError, match=r"step 2 passed over: CorruptError|step 2: .*CorruptError"):
            run.choose({"epoch": 0}, step=step)
        with pytest.raises(bcp.CheckpointError, match="CorruptError"):
            run.resume(step=step)
        assert run.resume(fresh=True) == 0
        run.save(1)


def test_damaged_small_states_are_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    damage(tmp_path, 4, "extra_states")
    with bcp.Run(tmp_path, states(), save=None) as run:
        extra = {"epoch": 0}
        assert run.choose(extra) == 2
        assert run.resume() == 2
        assert [choice.step for choice in run.resumed.passed_over] == [4]


def test_a_choice_of_a_step_and_of_verified_ones(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6)
    bcp.Run(tmp_path, {}).mark(4, "verified")
    with bcp.Run(tmp_path, states(), save=None) as run:
        assert run.choose({"epoch": 0}, trust="verified") == 4
        with pytest.raises(bcp.InputError, match=r"resume\(step=2\) after choose\(trust='verified'\)"):
            run.resume(step=2)
        assert run.resume() == 4
    with bcp.Run(tmp_path, states(), save=None, keep=10) as run:
        assert run.choose({"epoch": 0}, step=2) == 2
        assert run.resume(step=2) == 2
        run.save(3)
    assert marks(tmp_path) == {
        2: ("unknown", False),
        3: ("unknown", False),
        4: ("suspect", True),  # it was verified
        6: ("suspect", False),
    }


def test_a_key_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with bcp.Run(tmp_path, states(), save=None) as run:
        with pytest.raises(bcp.MismatchError, match="extra_states: unknown"):
            run.choose({"unknown": 1})
        assert run.choose({"epoch": 0}) == 2
        assert run.resume() == 2


def test_refused(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None) as run:
        with pytest.raises(bcp.InputError, match="pass a dict"):
            run.choose(["epoch"])  # type: ignore[arg-type]  # on purpose
        with pytest.raises(bcp.InputError, match="trust='most'"):
            run.choose({}, trust="most")  # type: ignore[arg-type]  # on purpose
        with pytest.raises(bcp.InputError, match="fresh=1"):
            run.resume(fresh=1)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(bcp.InputError, match=r"resume\(step=3, fresh=True\)"):
            run.resume(step=3, fresh=True)
        with pytest.raises(bcp.InputError, match=r"call resume\(\)"):
            run.reapply_random_states()
        with pytest.raises(bcp.InputError, match=r"call resume\(\)"):
            run.committed()
        with pytest.raises(bcp.InputError, match="no policy: pass keep="):
            run.best()
        run.resume()
        with pytest.raises(bcp.InputError, match="called already"):
            run.choose({})


def test_lazy_snapshots_need_an_optimizer_at_the_resumption(tmp_path: Path) -> None:
    late: dict[str, Any] = {}
    options = bcp.SaveOptions(snapshot="lazy")
    with pytest.raises(bcp.InputError, match="optimizer"):
        bcp.Run(tmp_path, states(), save_options=options)
    with bcp.Run(tmp_path, late, save_options=options) as run:
        late |= states()
        with pytest.raises(bcp.InputError, match="optimizer"):
            run.resume()


# -- begin anew --------------------------------------------------------------------------------------------


def test_a_fresh_start_marks_what_is_there_with_its_first_commit(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    run = bcp.Run(tmp_path, {})
    run.mark(2, "verified")
    target = states(1.5)
    with bcp.Run(tmp_path, target, save=None, keep=10) as run:
        assert run.resume(fresh=True) == 0
        assert target["model"]["w"].tolist() == [1.5] * 4
        assert [(each.step, each.reason) for each in run.resumed.passed_over] == [
            (4, "resume(fresh=True) was asked for"),
            (2, "resume(fresh=True) was asked for"),
        ]
        assert marks(tmp_path) == {2: ("verified", False), 4: ("unknown", False)}
        run.save(1)
    assert marks(tmp_path) == {1: ("unknown", False), 2: ("suspect", True), 4: ("suspect", False)}
    with bcp.Run(tmp_path, target, save=None) as run:
        assert run.resume() == 1


def test_a_fresh_start_drops_a_choice(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    target = states(1.5)
    with bcp.Run(tmp_path, target, save=None) as run:
        assert run.choose({"epoch": 0}) == 2
        assert run.resume(fresh=True) == 0
        run.save(1)
    assert target["model"]["w"].tolist() == [1.5] * 4
    assert marks(tmp_path) == {1: ("unknown", False), 2: ("suspect", False)}


def test_a_fresh_start_in_an_empty_folder(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None) as run:
        assert run.resume(fresh=True) == 0
        run.save(1)
    assert marks(tmp_path) == {1: ("unknown", False)}


# -- random states ------------------------------------------------------------------------------------------


def drawn() -> tuple[Any, ...]:
    return random.random(), np.random.random(), torch.rand(1).item()  # noqa: NPY002, S311 -- the global states


def test_random_states_are_set_again(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with bcp.Run(tmp_path, states(), save=None) as run:
        run.resume()
        first = drawn()
        drawn()
        run.reapply_random_states()
        assert drawn() == first


def test_a_new_run_has_none_to_set(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None) as run:
        run.resume()
        first = drawn()
        run.reapply_random_states()
        assert drawn() != first


# -- what is durable -----------------------------------------------------------------------------------------


def test_each_durable_step_is_told_once(tmp_path: Path) -> None:
    with bcp.Run(tmp_path, states(), save=None, keep=10) as run:
        run.resume()
        assert run.committed() == ()
        for step in (1, 2):
            pending = run.save(step)
            assert pending is not None
            pending.wait()
        assert run.committed() == (1, 2)
        assert run.committed() == ()
        run.save(3)
    assert run.committed() == (3,)
    assert run.committed() == ()


def test_a_failed_save_is_not_told(tmp_path: Path) -> None:
    fails = [True, False]

    async def fail(part: Any) -> Any:
        if fails[0]:
            raise bcp.errors.StorageError("no")
        return part

    options = bcp.SaveOptions(edit=lambda graph: graph.before("upload", bcp.extend.Stage("fail", fail)))
    with bcp.Run(tmp_path, states(), save=None, tolerate=1, save_options=options) as run:
        run.resume()
        pending = run.save(1)
        assert pending is not None
        with pytest.raises(bcp.BcpError):
            pending.wait()
        assert run.committed() == ()
        del fails[0]
        run.save(2)
    assert run.committed() == (2,)


def loop_of_committed(path: Path) -> list[tuple[int, ...]]:
    told = []
    with bcp.Run(path, states(), save=None) as run:
        run.resume()
        for step in range(1, 7):
            if step % 2:
                run.save(step)
            told.append(tuple(run.committed()))
    return [*told, tuple(run.committed())]


def test_ranks_learn_the_same(ranks4: Ranks, tmp_path: Path) -> None:
    by_rank = ranks4.run(loop_of_committed, tmp_path)
    assert all(told == by_rank[0] for told in by_rank)
    assert [step for told in by_rank[0] for step in told] == [1, 3, 5]


# -- the best ---------------------------------------------------------------------------------------------------


def test_the_best_checkpoint(tmp_path: Path) -> None:
    keep = AnyKept(1, Best("loss"))
    with bcp.Run(tmp_path, states(), save=None, keep=keep) as run:
        run.resume()
        assert run.best() is None
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.75), (4, float("nan"))):
            run.save(step, {"loss": loss})
        assert run.best() == f"{tmp_path}/step-00000002"
        assert run.best("loss") == f"{tmp_path}/step-00000002"
        with pytest.raises(bcp.InputError, match="best of 'accuracy' by no policy"):
            run.best("accuracy")
        bcp.Run(tmp_path, {}).mark(2, "suspect")
        run.save(5, {"loss": 0.9})
        assert run.best() == f"{tmp_path}/step-00000005"
        run.save(6, {"loss": 0.1})  # is waited for
        assert run.best() == f"{tmp_path}/step-00000006"


def test_several_policies_of_the_best(tmp_path: Path) -> None:
    keep = AnyKept(Best("loss"), Best("accuracy", mode="max"))
    with bcp.Run(tmp_path, states(), save=None, keep=keep) as run:
        run.resume()
        run.save(1, {"loss": 0.5, "accuracy": 0.5})
        run.save(2, {"loss": 0.75, "accuracy": 0.75})
        with pytest.raises(bcp.InputError, match="'loss', 'accuracy': say metric="):
            run.best()
        assert run.best("accuracy") == f"{tmp_path}/step-00000002"
        assert run.best("loss") == f"{tmp_path}/step-00000001"


def two_parts_of_four_ranks(path: Path) -> tuple[Any, ...]:
    saved_here = states()
    keep = AnyKept(2, Best("loss"))
    with bcp.Run(path, saved_here, save=None, keep=keep) as run:
        run.resume()
        for step in (2, 4, 6):
            saved_here["model"]["w"].fill_(step)
            run.save(step, {"loss": 1 / step})
        best = run.best()
    late: dict[str, Any] = {}
    with bcp.Run(path, late, save=None, keep=keep) as run:
        step = run.choose({"epoch": 0})
        late |= states()
        resumed = run.resume()
        run.reapply_random_states()
    return best, step, resumed, late["model"]["w"].tolist()


def test_two_parts_on_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    by_rank = ranks4.run(two_parts_of_four_ranks, tmp_path)
    assert by_rank == [(f"{tmp_path}/step-00000006", 6, 6, [6.0] * 4)] * 4


def damaged_for_all(path: Path) -> tuple[str, int, int]:
    with bcp.Run(path, states(), save=None) as run:
        run.choose({"epoch": 0})
        try:
            run.resume()
        except bcp.BcpError as error:
            kind = type(error).__name__
        return kind, run.choose({"epoch": 0}), run.resume()


def test_a_damaged_choice_is_one_for_all_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    damage(tmp_path, 4, "model")
    assert ranks4.run(damaged_for_all, tmp_path) == [("CorruptError", 2, 2)] * 4


def test_from_coroutines(tmp_path: Path) -> None:
    saved(tmp_path, 2)

    async def train() -> None:
        late: dict[str, Any] = {}
        async with bcp.Run(tmp_path, late, save=None, keep=Best("loss")) as run:
            assert await run.achoose({"epoch": 0}) == 2
            late |= states()
            assert await run.aresume() == 2
            await run.asave(3, {"loss": 0.5})
            assert await run.abest() == f"{tmp_path}/step-00000003"
            assert await run.acommitted() == (3,)

    anyio.run(train)
    assert (tmp_path / "step-00000003" / METADATA_KEY).exists()
