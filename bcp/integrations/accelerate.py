"""Accelerate: a :class:`bcp.Run` over all that an ``Accelerator`` has prepared and registered.

``save_state`` writes models itself and has no place for another storage, so the run stands beside it. The lists of the
``Accelerator`` are private; they are checked by name before the run begins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import accelerate
from torch.utils.data import RandomSampler, SequentialSampler

import bcp
from bcp.integrations.common import check_version

__all__ = ["run"]

_COLLECTED = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler", "step")
_OLDEST = "1.13", "older ones resume at another position in the data, where there are several ranks"
_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")


def run(accelerator: accelerate.Accelerator, path: str | os.PathLike[str], **options: Any) -> bcp.Run:
    """Return a run over everything that ``accelerator`` has prepared and registered.

    Call it behind ``prepare`` and ``register_for_checkpointing``. What is prepared later is saved, too: the lists are
    read at each save and load.

    Args:
        accelerator: whose models, optimizers, schedulers, scaler, dataloaders and registered objects are saved.
        path: the run's folder: a directory or a URL.
        options: of :class:`bcp.Run`.

    Raises:
        InputError: nothing was prepared, a dataloader's order cannot be resumed, the kind of training is not supported,
            or this version of Accelerate is older than 1.13 or keeps its objects elsewhere.

    Example::

        run = bcp.integrations.accelerate.run(accelerator, "ckpt/run-7", save=100, keep=3)
        step = run.resume()

    """
    check_version("accelerate", accelerate.__version__, *_OLDEST)
    missing = [name for name in _COLLECTED if not hasattr(accelerator, name)]
    if missing:
        raise bcp.InputError(
            f"Accelerator of accelerate {accelerate.__version__} has no {', '.join(missing)}: bcp cannot see "
            "what it has prepared, and would save too little"
        )
    kind = accelerator.distributed_type.name
    if kind not in _SUPPORTED:
        raise bcp.InputError(
            f"{kind} is not supported by bcp.integrations.accelerate; use one of {', '.join(_SUPPORTED)}"
        )
    states = _States(accelerator)
    if "model" not in states:
        raise bcp.InputError("the accelerator has prepared no model: call run() behind prepare()")
    return bcp.Run(path, states, **options)


class _States(Mapping[str, Any]):
    """The states of a run, read from an accelerator at each save and load."""

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator, self._rest = accelerator, _Rest(accelerator)
        self._rest.check()

    def _now(self) -> dict[str, Any]:
        models, optimizers = (getattr(self._accelerator, name) for name in ("_models", "_optimizers"))
        unwrapped = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        whole = {"model": _one(models), "optimizer": _one(unwrapped), "extra_states": {"accelerate": self._rest}}
        return {kind: state for kind, state in whole.items() if state}

    def __getitem__(self, kind: str) -> Any:
        return self._now()[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def _one(found: list[Any]) -> Any:
    """Return the only object, or a dict of several by their numbers."""
    return found[0] if len(found) == 1 else {str(number): state for number, state in enumerate(found)}


class _Rest:
    """Schedulers, scaler, positions in the data, registered objects and the count of accumulated batches."""

    def __init__(self, accelerator: accelerate.Accelerator) -> None:
        self._accelerator = accelerator

    def _now(self) -> dict[str, list[Any]]:
        this: Any = self._accelerator
        loaders = [loader for loader in this._dataloaders if getattr(loader, "use_stateful_dataloader", False)]  # noqa: SLF001
        return {
            "schedulers": this._schedulers,  # noqa: SLF001
            "registered": this._custom_objects,  # noqa: SLF001
            "scaler": [] if this.scaler is None else [this.scaler],
            "dataloaders": [_Loader(loader) for loader in loaders],
        }

    def check(self) -> None:
        """Check that each order of samples can be resumed."""
        for number, loader in enumerate(self._now()["dataloaders"]):
            if not loader.is_exact:
                raise bcp.InputError(
                    f"the shuffled stateful dataloader {number} does not save its seed, and would go on in another "
                    "order: pass DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)"
                )

    def state_dict(self) -> dict[str, Any]:
        self.check()
        states = {name: [each.state_dict() for each in found] for name, found in self._now().items()}
        return {**states, "step": self._accelerator.step}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for name, found in self._now().items():
            if len(found) != len(states[name]):
                raise bcp.MismatchError(
                    f"the checkpoint has {len(states[name])} {name} of an accelerator, and this one has {len(found)}: "
                    "prepare and register the same objects, in the same order"
                )
            for each, state in zip(found, states[name], strict=True):
                each.load_state_dict(state)
        self._accelerator.step = states["step"]


class _Loader:
    """The position in a stateful dataloader of Accelerate, whose own state has neither epoch nor seed."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._sampler = loader, loader.get_sampler()
        self._has_seed = hasattr(self._sampler, "initial_seed")

    @property
    def is_exact(self) -> bool:
        return self._has_seed or not isinstance(self._sampler, RandomSampler)

    def state_dict(self) -> dict[str, Any]:
        loader, state = self._loader, self._loader.state_dict()
        active = any(each is loader for each in loader.gradient_state.dataloader_references)
        is_over = active and state.get("_iterator_finished", False)  # the loop has the epoch's last batch
        seed = self._sampler.initial_seed if self._has_seed else None
        return {"loader": state, "epoch": loader.iteration + int(is_over), "seed": seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._has_seed and state["seed"] is not None:
            self._sampler.initial_seed = state["seed"]
        self._loader.iteration = state["epoch"]
        is_plain = self._has_seed or isinstance(self._sampler, SequentialSampler)
        is_over = state["loader"].get("_iterator_finished") and not hasattr(self._loader.dataset, "state_dict")
        # an epoch that has ended needs no state: the loader would draw a random number more
        self._loader.load_state_dict({} if is_plain and is_over else state["loader"])
