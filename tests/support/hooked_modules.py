"""Modules with every kind of hook and override of ``state_dict()`` and ``load_state_dict()``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Fused(nn.Module):
    """One entry is made by a hook, another is live under another name; the load hook needs both."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.b = (nn.Parameter(torch.randn(4)) for _ in range(3))
        self.register_state_dict_post_hook(self.merge)
        self.register_load_state_dict_pre_hook(self.split)

    @staticmethod
    def merge(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[prefix + "qk"] = torch.cat([state.pop(prefix + "q"), state.pop(prefix + "k")])
        state[prefix + "out.b"] = state.pop(prefix + "b")

    @staticmethod
    def split(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[prefix + "q"], state[prefix + "k"] = state.pop(prefix + "qk").chunk(2)
        state[prefix + "b"] = state.pop(prefix + "out.b")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.q + self.k + self.b


class PrivateHooks(nn.Linear):
    """The same by torch's private hooks, bound to the module; a log tells the order."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.log: list[str] = []
        self._register_state_dict_hook(self.rename)
        self._register_load_state_dict_pre_hook(self.back)
        self.register_load_state_dict_post_hook(self.after)

    def rename(self, _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight").t().contiguous()

    def back(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.log = [*self.log, "pre"]
        state[prefix + "weight"] = state.pop(prefix + "kernel").t()

    @staticmethod
    def after(module: Any, _: Any) -> None:
        module.log = [*module.log, f"post {module.weight.detach().sum().item()}"]


class Cached(nn.Module):
    """A cache that is computed of the weight, and refreshed by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("cache", self.w.detach().exp(), persistent=False)
        self.calls = 0
        self.register_load_state_dict_post_hook(self.refresh)

    @staticmethod
    def refresh(module: Any, _: Any) -> None:
        module.calls += 1
        module.cache.copy_(module.w.detach().exp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cache * self.w


class Merged(nn.Linear):
    """LoRA whose delta is merged into the weight: the load takes it out first, and puts the new one in."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
        self.merge(1)

    def merge(self, sign: int) -> None:
        with torch.no_grad():
            self.weight += sign * self.up @ self.down

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        state[prefix + "weight"] = (state[prefix + "weight"] - self.up @ self.down).detach()
        return state

    def load_state_dict(self, state: Any, strict: bool = True) -> None:  # type: ignore[override]  # noqa: FBT001, FBT002 -- as torch's
        self.merge(-1)
        super().load_state_dict(state, strict)
        self.merge(1)


class Unmerging(nn.Linear):
    """The same, with the merged weight in the state dict: the override writes to the live weight before it copies."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.delta = nn.Parameter(torch.randn(4, 4))
        self.merged = True

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002 -- torch's
        with torch.no_grad():
            self.weight -= self.delta
        return super().load_state_dict(state, strict, assign)


class OwnTake(nn.Module):
    """``_save_to_state_dict`` adds a number, ``_load_from_state_dict`` takes it back."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 255, (4,), dtype=torch.uint8), requires_grad=False)
        self.scale, self.note = float(torch.rand(())), {"rows": [int(torch.randint(0, 9, ()))]}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: Any) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "codes.scale"] = torch.tensor(self.scale, dtype=torch.float64)
        destination[prefix + "note"] = self.note

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.scale = state.pop(prefix + "codes.scale").item()
        self.note = state.pop(prefix + "note")
        super()._load_from_state_dict(state, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.codes * self.scale


class Extra(nn.Linear):
    """Extra state that is computed with the weight, which has to be loaded first."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.steps, self.norm = int(torch.randint(0, 1000, ())), 0.0

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps, self.norm = state["steps"], self.weight.detach().norm().item()


class ExtraTensor(nn.Linear):
    """Extra state that is a tensor."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.counts = torch.randint(0, 9, (3,))

    def get_extra_state(self) -> torch.Tensor:
        return self.counts

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.counts = state.clone()


class Replacing(nn.Module):
    """A load that puts new parameters in the place of the old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.w = nn.Parameter(state[prefix + "w"].clone())
        super()._load_from_state_dict(state, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


class Delegating(nn.Module):
    """Both methods are those of the module inside, as wrappers of training frameworks do it."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.loads = Cached(), 0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state: Any) -> None:  # type: ignore[override]  # a signature of its own
        self.loads += 1
        self.model.load_state_dict(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Legacy(nn.Module):
    """A hook at the root that renames what an older version saved, with other hooked modules below."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.cached, self.plain = Fused(), Cached(), nn.BatchNorm1d(4)
        self._register_load_state_dict_pre_hook(self.upgrade)

    @staticmethod
    def upgrade(state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(prefix + "old.")]:
            state[prefix + "plain." + name.rpartition(".")[2]] = state.pop(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cached(self.fused(x))


class Narrowed(nn.Linear):
    """The state dict has the weight in another precision; nothing but torch's own copy takes it back."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_state_dict_post_hook(self.narrow)

    @staticmethod
    def narrow(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].detach().bfloat16()


class Wrapped(nn.Linear):
    """Methods that are wrapped on the instance."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.loaded: list[int] = []
        inner = self.load_state_dict

        def load(state: Any, *args: Any, **kwargs: Any) -> Any:
            self.loaded = [*self.loaded, len(state)]
            return inner(state, *args, **kwargs)

        self.load_state_dict = load  # type: ignore[method-assign]


class Pruning(nn.Module):
    """A post-hook that forgives a missing key, which its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.frozen = nn.Parameter(torch.randn(4)), nn.Parameter(torch.ones(4))
        self.register_state_dict_post_hook(lambda _, state, prefix, __: state.__delitem__(prefix + "frozen"))
        self.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * self.frozen


class Exported(nn.Module):
    """A copy under another name is saved, and nothing takes it back."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 5))
        self.register_state_dict_post_hook(self.export)

    @staticmethod
    def export(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[prefix + "w_t"] = state.pop(prefix + "w").detach().t().contiguous()


class Packed(nn.Module):
    """As a 4-bit linear layer: codes are a parameter, the scale is in the state dict by value, and nothing takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 255, (4, 4), dtype=torch.uint8), requires_grad=False)
        self.scale = torch.rand(4)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: Any) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "codes.scale"] = self.scale


class Untaken(nn.Linear):
    """Extra state without a method that takes it."""

    def get_extra_state(self) -> int:
        return 3

    def __init__(self) -> None:
        super().__init__(4, 4)


class NamedAsExtra(nn.Module):
    """A parameter with the name of extra states, which torch copies, and calls unexpected."""

    def __init__(self) -> None:
        super().__init__()
        self._extra_state = nn.Parameter(torch.randn(4))


class PackedBelowHook(nn.Module):
    """Only a trial tells that the hook above does not take the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = Packed(), 0
        self.register_load_state_dict_pre_hook(self.count)

    @staticmethod
    def count(module: Any, *_: Any) -> None:
        module.calls += 1


class Dropping(nn.Linear):
    """The state dict leaves out a parameter, and a load misses it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_state_dict_post_hook(lambda _, state, prefix, __: state.__delitem__(prefix + "bias"))


TAKEN = [
    *(Fused, PrivateHooks, Cached, Merged, Unmerging, OwnTake, Extra, ExtraTensor, Replacing, Delegating, Legacy),
    *(Narrowed, Wrapped, Pruning),
]
"""torch loads these strictly."""

REFUSED = [Exported, Packed, Untaken, NamedAsExtra, PackedBelowHook, Dropping]
"""torch refuses these strictly."""
