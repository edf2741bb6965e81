"""Objects that raise while they take their state: the error names them, and has theirs as its cause."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import bcp


class Picky:
    """Looks for a key that it does not write."""

    def state_dict(self) -> dict[str, int]:
        return {"v": 1}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.v = state["w"]


class Reader:
    """A dataloader with one unit, which it does not take back."""

    reader, readers = 0, 1

    def shared_state(self) -> int:
        return 1

    def unit_states(self) -> Mapping[str, int]:
        return {"0": 1}

    def wanted_units(self, _: Any, ids: Sequence[str]) -> Sequence[str]:
        return ids

    def load_units(self, _: Any, units: Mapping[str, Any]) -> None:
        raise ValueError(f"no room for {units}")

    def prepare(self, step: int) -> None:
        pass


CASES = {
    "extra_states": ({"extra_states": {"sampler": Picky()}}, KeyError, r"the Picky at extra_states\.sampler"),
    "dataloader": ({"dataloader": Picky()}, KeyError, r"the Picky at dataloader"),
    "units": ({"dataloader": Reader()}, ValueError, r"the Reader at .*dataloader"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_the_object(tmp_path: Path, case: str) -> None:
    states, cause, words = CASES[case]
    bcp.save(tmp_path / "step-1", states)

    def resume() -> None:
        with bcp.Run(tmp_path, states, save=1) as run:
            run.resume()

    calls: list[Callable[[], object]] = [lambda: bcp.load(tmp_path / "step-1", states), resume]
    for call in calls:
        with pytest.raises(bcp.StateError, match=rf"{words}.* raised {cause.__name__}: .*leave it out") as caught:
            call()
        assert isinstance(caught.value.__cause__, cause)


def test_a_refusal_of_the_object_stays_as_it_is(tmp_path: Path) -> None:
    class Refusing(Picky):
        def load_state_dict(self, _: Mapping[str, int]) -> None:
            raise bcp.MismatchError("another length")

    states = {"extra_states": {"sampler": Refusing()}}
    bcp.save(tmp_path, states)
    with pytest.raises(bcp.MismatchError, match="another length") as caught:
        bcp.load(tmp_path, states)
    assert any("the Refusing at extra_states.sampler" in note for note in caught.value.__notes__)
