"""A user's program, which ``make check`` types strictly: every lazy name has its type, and a wrong name is an error."""

from __future__ import annotations

from typing import assert_type

import torch

import bcp
import bcp.testing
from bcp import InputError, Run, load
from bcp.extend import HostPart, Stage


async def program(model: torch.nn.Module, part: HostPart) -> None:
    """Use names of every kind: functions, classes, modules and errors."""
    states = {"model": model, "extra_states": {"rng": bcp.RngState()}}
    assert_type(bcp.save("ckpt", states), bcp.SaveResult)
    assert_type(bcp.save("ckpt", states, async_checkpoint=True), bcp.Pending[bcp.SaveResult])
    assert_type(bcp.save_async("ckpt", states).wait(), bcp.SaveResult)
    assert_type(await bcp.aload("ckpt", states), bcp.LoadResult)
    assert_type(load("ckpt", states), bcp.LoadResult)
    assert_type(bcp.latest("run"), str | None)
    assert_type(bcp.report("ckpt").text(), str)
    assert_type(Run("run", states).resume(), int)
    assert_type(bcp.policies.LastDays(3), bcp.policies.LastDays)
    assert_type(bcp.telemetry.Alerts(max_stall=1.0), bcp.telemetry.Alerts)
    assert_type(bcp.extend.TensorMeta.__name__, str)
    assert_type(part.tensor, torch.Tensor)
    assert_type(bcp.errors.InputError("words"), InputError)
    assert_type(bcp.__version__, str)
    assert_type(bcp.testing.CountingBackend.__name__, str)
    Stage("no function", None)  # type: ignore[arg-type]  # a name that is Any would take it
    bcp.sav("ckpt", states)  # type: ignore[attr-defined]  # a module with a __getattr__ would have it
    bcp.testing.suite()  # type: ignore[attr-defined]  # same
    bcp.extend.suite()  # type: ignore[attr-defined]  # same
