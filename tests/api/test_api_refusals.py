"""A refused call takes its place among the operations of all ranks. Here ranks are tasks of one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from checkpoints import files, model
from test_api_bad_ranks import outcomes

import bcp
from bcp.coordinators import grpc_coordinators, memory_coordinators
from bcp.protocols import Coordinator

REFUSED: dict[str, Any] = {"modle": {}}
"""States that a rank refuses by itself."""

NEVER = 3600.0
"""Seconds of silence after which a rank is given up: nobody here waits for them."""


@pytest.mark.anyio
@pytest.mark.parametrize("coordinators", [memory_coordinators, grpc_coordinators])
async def test_operations_stay_in_step_after_refusals(
    tmp_path: Path, coordinators: Callable[[int], list[Coordinator]]
) -> None:
    ranks = coordinators(3)
    options = bcp.SaveOptions(timeout=NEVER, overwrite=True)
    for guilty in range(3):

        def states(rank: Coordinator, guilty: int = guilty) -> Any:
            return REFUSED if rank.rank == guilty else model()

        saved = await outcomes(ranks, lambda rank: bcp.asave(tmp_path, states(rank), options=options, coordinator=rank))
        loaded = await outcomes(
            ranks,
            lambda rank: bcp.aload(tmp_path, states(rank), options=bcp.LoadOptions(timeout=NEVER), coordinator=rank),
        )
        for rank, error in (*enumerate(saved), *enumerate(loaded)):
            assert isinstance(error, bcp.InputError if rank == guilty else bcp.PeerError)
            assert "states has ['modle']; its keys are" in str(error)
    assert files(tmp_path) == {}
    saved = await outcomes(ranks, lambda rank: bcp.asave(tmp_path, model(), options=options, coordinator=rank))
    assert all(isinstance(each, bcp.SaveResult) for each in saved)


@pytest.mark.anyio
async def test_two_refused_calls_under_way_at_once(tmp_path: Path) -> None:
    ranks = memory_coordinators(2)

    async def both(rank: Coordinator) -> list[Any]:
        found: list[Any] = [None, None, None]

        async def one(number: int, states: Any) -> None:
            try:
                found[number] = await bcp.asave(tmp_path / str(number), states, coordinator=rank)
            except bcp.BcpError as error:
                found[number] = error

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(one, number, REFUSED if number != rank.rank and number < 2 else model())
        return found

    first, second = await outcomes(ranks, both)
    assert [type(each) for each in first] == [bcp.PeerError, bcp.InputError, bcp.SaveResult]
    assert [type(each) for each in second] == [bcp.InputError, bcp.PeerError, bcp.SaveResult]


@pytest.mark.anyio
async def test_a_refused_rank_raises_its_own_error_even_if_nobody_comes(tmp_path: Path) -> None:
    first, _ = memory_coordinators(2)
    options = bcp.SaveOptions(timeout=0.5)
    with pytest.raises(bcp.InputError, match=r"states has \['modle'\]") as caught:
        await bcp.asave(tmp_path, REFUSED, options=options, coordinator=first)
    assert "rank 1 has not begun it" in caught.value.__notes__[0]


@pytest.mark.anyio
@pytest.mark.parametrize("coordinators", [memory_coordinators, grpc_coordinators])
async def test_a_call_of_rank_0_alone_is_told_that_every_rank_calls(
    tmp_path: Path, coordinators: Callable[[int], list[Coordinator]]
) -> None:
    first, _ = coordinators(2)
    with pytest.raises(bcp.PeerError, match=r"rank 1.* has not begun it .* Every rank has to make this call"):
        await bcp.asave(tmp_path, model(), options=bcp.SaveOptions(timeout=0.5), coordinator=first)


@pytest.mark.anyio
async def test_a_rank_that_calls_something_else_and_is_refused(tmp_path: Path) -> None:
    def call(rank: Coordinator) -> Any:
        if rank.rank:
            return bcp.aload(tmp_path, REFUSED, options=bcp.LoadOptions(timeout=NEVER), coordinator=rank)
        return bcp.asave(tmp_path, model(), options=bcp.SaveOptions(timeout=NEVER), coordinator=rank)

    first, second = await outcomes(memory_coordinators(2), call)
    assert isinstance(first, bcp.InputError | bcp.PeerError)
    assert isinstance(second, bcp.InputError)
    assert "states has ['modle']" in str(second)
    assert files(tmp_path) == {}


@pytest.mark.parametrize("call", [bcp.save, bcp.load])
def test_a_refused_call_keeps_no_tensor_alive(tmp_path: Path, call: Callable[..., Any]) -> None:
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    states = {"model": {"w": tensor}, "modle": {}}
    gc.disable()
    try:
        try:
            call(tmp_path, states)
        except bcp.InputError:
            pass
        else:
            raise AssertionError
        del states, tensor
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"timeout": 1}, 5, bcp.LoadOptions(), bcp.SaveOptions])
def test_options_of_another_kind_are_refused(tmp_path: Path, options: Any) -> None:
    with pytest.raises(bcp.InputError, match=r"options is a \w+; pass bcp\.SaveOptions\(\.\.\.\)"):
        bcp.save(tmp_path, model(), options=options)
    with pytest.raises(bcp.InputError, match=r"options is a \w+; pass bcp\.SaveOptions\(\.\.\.\)"):
        bcp.prepare(model(), options=options)
    if not isinstance(options, bcp.LoadOptions):
        with pytest.raises(bcp.InputError, match=r"options is a \w+; pass bcp\.LoadOptions\(\.\.\.\)"):
            bcp.load(tmp_path, model(), options=options)


class HalfABackend:
    """Has some of a backend's methods."""

    def open_write(self) -> None: ...
    def read_into(self) -> None: ...


@pytest.mark.parametrize("path", [None, 5, b"bytes", ["a"], HalfABackend()], ids=lambda path: type(path).__name__)
def test_a_path_of_another_type_is_refused(path: Any) -> None:
    for call in (bcp.save, bcp.load):
        with pytest.raises(bcp.InputError, match=r"pass a directory, a URL, or an object|is no backend: it has no"):
            call(path, model())


@pytest.mark.parametrize("value", ["-1", "nonsense", "0"])
def test_a_bad_environment_variable_is_told_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("BCP_TIMEOUT", value)
    with pytest.raises(bcp.InputError, match=r"timeout|BCP_TIMEOUT"):
        bcp.save(tmp_path, model())


def test_what_is_no_coordinator_is_refused(tmp_path: Path) -> None:
    for call in (bcp.save, bcp.load):
        with pytest.raises(bcp.InputError, match=r"coordinator=5 has no begin\(\); pass a bcp\.protocols\.Coordinator"):
            call(tmp_path, model(), coordinator=5)  # type: ignore[arg-type]
