"""What ranks do with modules whose ``load_state_dict()`` does more than copy, under FSDP1 and FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hooked_modules import Cached, Fused
from silent import load, save
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import bcp


class Counted(nn.Linear):
    """A hook that looks at the weight after a load."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls, self.norm = 0, 0.0
        self.register_load_state_dict_post_hook(self.look)

    @staticmethod
    def look(module: Any, _: Any) -> None:
        module.calls += 1
        weight = module.weight.detach()
        module.norm = (weight.full_tensor() if isinstance(weight, DTensor) else weight).norm().item()


class Halved(nn.Linear):
    """Entries that a hook changes on their way out and in."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_state_dict_post_hook(lambda *args: self.scale(args[1], args[2], 0.5))
        self.register_load_state_dict_pre_hook(lambda *args: self.scale(args[1], args[2], 2.0))

    @staticmethod
    def scale(state: dict[str, Any], prefix: str, by: float) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].detach() * by


def _model(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), make())


def fsdp2(path: Path) -> dict[str, Any]:
    """Save and load both under FSDP2; return what the hooks did."""
    done: dict[str, Any] = {}
    for make in (Counted, Halved):
        source, target = (fully_shard(_model(seed, make)) for seed in (1, 2))
        bcp.save(path / make.__name__, {"model": source})
        report = bcp.load(path / make.__name__, {"model": target})
        pairs = zip(source.parameters(), target.parameters(), strict=True)
        done[make.__name__] = all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)  # type: ignore[attr-defined]
        done[f"{make.__name__} report"] = report.missing + report.unexpected
        if make is Counted:
            weight = source[1].weight.full_tensor()  # type: ignore[index, union-attr, operator]
            done["calls"], done["norm"] = target[1].calls, target[1].norm == weight.norm().item()  # type: ignore[index, union-attr]
    return done


def _fsdp1(seed: int, make: Callable[[], nn.Module], *, apart: bool) -> nn.Module:
    model = _model(seed, make)
    ignored = [model[1]] if apart else []  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu"), ignored_modules=ignored
        )


def fsdp1(path: Path) -> dict[str, Any]:
    """Save and load modules that FSDP1 cuts, and ones that it ignores."""
    done: dict[str, Any] = {}
    for make in (Cached, Fused):
        source, target = (_fsdp1(seed, make, apart=True) for seed in (1, 2))
        save(path / make.__name__, {"model": source})
        load(path / make.__name__, {"model": target})
        pairs = zip(source.parameters(), target.parameters(), strict=True)
        done[make.__name__] = all(torch.equal(a, b) for a, b in pairs)
        cache = getattr(target[1], "cache", None)  # type: ignore[index]
        done[f"{make.__name__} cache"] = cache is None or torch.equal(cache, target[1].w.detach().exp())  # type: ignore[index, union-attr, operator]
    said: dict[str, str] = {}
    save(path / "plain", {"model": _fsdp1(1, lambda: nn.Linear(8, 8), apart=False)})
    for name, call in {
        "load": lambda: load(path / "plain", {"model": _fsdp1(1, Counted, apart=False)}),
        "save": lambda: save(path / "halved", {"model": _fsdp1(1, Halved, apart=False)}),
    }.items():
        try:
            call()
        except bcp.BcpError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return {**done, "said": said}
