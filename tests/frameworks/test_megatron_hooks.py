"""Hooks of ``load_state_dict`` of modules that Megatron's planner loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bcp
from bcp.errors import FqnMismatchError, StateError

mapping = pytest.importorskip("megatron.core.dist_checkpointing.mapping")


class Chunk(nn.Linear):
    """A module as Megatron's are, with an object beside its weights, which it may not take."""

    def __init__(self, *, takes: bool = True) -> None:
        super().__init__(4, 4, bias=False)
        self.takes, self.norm, self.steps = takes, 0.0, int(torch.randint(0, 9999, ()))

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        steps = mapping.ShardedObject("steps", self.steps, (1,), (0,))
        return {"weight": mapping.ShardedTensor.from_rank_offsets("weight", self.weight), "steps": steps}

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if self.takes and prefix + "steps" in state:
            self.steps = state.pop(prefix + "steps")
        super()._load_from_state_dict(state, prefix, *args)

    def measure(self) -> None:
        self.norm = self.weight.detach().norm().item()


# Megatron's own overrides are known
Chunk._load_from_state_dict.__module__ = "megatron.core.stand_in"


def test_post_hooks_run_when_the_weights_are_there(tmp_path: Path) -> None:
    source, target = Chunk(), Chunk()
    target.register_load_state_dict_post_hook(lambda module, _: module.measure())
    bcp.save(tmp_path / "c", {"model": source}, framework="megatron")
    bcp.load(tmp_path / "c", {"model": target}, framework="megatron")
    assert torch.equal(target.weight, source.weight)
    assert (target.steps, target.norm) == (source.steps, source.weight.detach().norm().item())


def test_pre_hooks_of_others_are_refused(tmp_path: Path) -> None:
    source, target = Chunk(), Chunk()
    target.register_load_state_dict_pre_hook(lambda *_: None)
    bcp.save(tmp_path / "c", {"model": source}, framework="megatron")
    with pytest.raises(StateError, match=r"the pre-hook of load_state_dict of Chunk is not Megatron's"):
        bcp.load(tmp_path / "c", {"model": target}, framework="megatron")


def test_objects_that_a_module_does_not_take_are_an_error(tmp_path: Path) -> None:
    source, target = Chunk(), Chunk(takes=False)
    bcp.save(tmp_path / "c", {"model": source}, framework="megatron")
    with pytest.raises(FqnMismatchError, match="model: steps"):
        bcp.load(tmp_path / "c", {"model": target}, framework="megatron")
    report = bcp.load(tmp_path / "c", {"model": target}, framework="megatron", strict=False)
    assert report.unexpected == ("model: steps/shard_0_1",)
