"""Arguments that one rank refuses are refused by all, at once: nobody waits for the timeout, which is an hour here."""

from __future__ import annotations

from pathlib import Path

import pytest
import refusals
import torch
from ranks import Ranks
from refusals import BAD, ENTRIES, GUILTY, Said
from samples import sample

pytestmark = pytest.mark.dist


def check(said: list[Said], kind: str, text: str, guilty: tuple[int, ...] = (GUILTY,)) -> None:
    """Check that the guilty ranks raise their own error, and all others one that names the first of them and has it."""
    for rank, (name, blamed, words) in enumerate(said):
        if rank in guilty:
            assert (name, text in words) == (kind, True), words
        else:
            assert (name, blamed) == ("PeerError", guilty[0]), words
            assert f"{kind}: " in words
            assert text in words


@pytest.mark.parametrize("entry", sample(ENTRIES, *list(ENTRIES)[::2]))
def test_bad_arguments_in_one_rank(ranks4: Ranks, tmp_path: Path, entry: str) -> None:
    said = ranks4.run(refusals.refused, tmp_path, entry)
    assert not (tmp_path / "new").exists()
    for name in said[0]:
        check([each[name] for each in said], *BAD[name][1:])


def test_arguments_that_only_a_save_has(ranks4: Ranks, tmp_path: Path) -> None:
    said = ranks4.run(refusals.only_here, tmp_path)
    check([each["lazy"] for each in said], "InputError", "snapshot='lazy' needs async_checkpoint=True")
    check([each["snapshot"] for each in said], "InputError", "snapshot='bogus' is unknown")
    check([each["options"] for each in said], "InputError", "options is a LoadOptions; pass bcp.SaveOptions(...)")
    assert "doing different things" in said[GUILTY]["other call"][2]
    assert all(each["other call"][0] in ("InputError", "PeerError") for each in said)
    assert all(each["nothing"][0] == "nothing" for each in said), said


def test_bad_arguments_in_several_ranks(ranks4: Ranks, tmp_path: Path) -> None:
    said = ranks4.run(refusals.several, tmp_path)
    first = [each[0] for each in said]
    check([first[0], first[1], first[2]], "InputError", "framework=5", (1,))
    assert "cannot name a directory" in first[3][2]
    for each in said:
        assert each[1][:2] == ("InputError", None)
        assert "framework=5" in each[1][2]
        assert each[2][0] == "nothing"


@pytest.mark.parametrize("entry", ["save", "save async", "asave", "asave async", "prepare"])
def test_user_code_that_fails_in_one_rank(ranks4: Ranks, tmp_path: Path, entry: str) -> None:
    said = ranks4.run(refusals.user_code, tmp_path, entry)
    for name in said[0]:
        for rank, (kind, blamed, text) in enumerate(each[name] for each in said):
            if rank == GUILTY:
                assert kind in (name, "StateError"), text
            else:
                assert (kind, blamed) == ("PeerError", GUILTY), text
                assert "no" in text


@pytest.mark.parametrize(("saved", "loaded"), [((0, 1), (0, 1)), ((1, 3), (0, 1, 2)), ((0, 1, 2, 3), (1, 3))])
def test_ranks_that_hold_nothing_take_part(
    ranks4: Ranks, tmp_path: Path, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    ranks4.run(refusals.subset, tmp_path, saved, loaded)


@pytest.mark.parametrize("entry", sample(ENTRIES, *list(ENTRIES)[1::2]))
def test_empty_states_on_all_ranks(ranks4: Ranks, tmp_path: Path, entry: str) -> None:
    for first, wrote, then in ranks4.run(refusals.nothing_anywhere, tmp_path, entry):
        assert first[0] == "InputError"
        assert "states has nothing on all 4 ranks" in first[2]
        assert "{'model': {}}" in first[2]
        assert not wrote
        assert then[0] == "nothing", then[2]


def test_a_run_in_which_only_one_rank_has_states(ranks4: Ranks, tmp_path: Path) -> None:
    fresh = ranks4.run(refusals.run_of_some, tmp_path)
    assert [torch.equal(states["model"]["w"], torch.ones(8)) if states else None for states in fresh] == [
        None,
        None,
        True,
        None,
    ]
