"""Holds optimizer steps back while the tensors that they change are being copied.

Notices writes to the state while its snapshot is being taken, which would tear the checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from bcp.errors import InputError, StateChangedError
from bcp.protocols import LocalShards
from bcp.runtime.accelerator import capturing
from bcp.runtime.process import in_forked_child, process_lock
from bcp.state.optimizer_parts import parts_of

__all__ = [
    "StepHold",
    "being_loaded",
    "check_not_loading",
    "check_unchanged",
    "torch_optimizers",
    "version",
    "versions",
]

_UNTRACKED = -1
"""Version of a tensor that torch does not count writes of: one made under ``torch.inference_mode()``."""


_loads: dict[int, Sequence[torch.Tensor]] = {}
"""Tensors that the loads of this process are filling, by ``id``; changes atomically under the interpreter."""

in_forked_child(_loads.clear)


@contextmanager
def being_loaded(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let no snapshot of these tensors begin: a load counts its writes before they begin, not when they have ended."""
    own_tensors = list(tensors)
    _loads[id(own_tensors)] = own_tensors
    try:
        yield
    finally:
        _loads.pop(id(own_tensors), None)  # a forked child has forgotten it


def check_not_loading(shards: LocalShards, rank: int) -> None:
    """Check that no load of this process is filling a shard. Raises StateChangedError, which names the first shard."""
    filled = {tensor.untyped_storage().data_ptr() for tensors in list(_loads.values()) for tensor in tensors} - {0}
    for row, tensor in enumerate(shards.tensors if filled else ()):
        if tensor.untyped_storage().data_ptr() in filled:
            meta = shards.table.meta(row)
            raise StateChangedError(
                f"{meta.kind} tensor {meta.fqn!r} is being loaded on rank {rank} while it is to be saved; save when "
                "the load has returned"
            )


def versions(shards: LocalShards) -> list[int]:
    """Return how often each shard's memory was written to so far, as autograd counts it.

    Every in-place operation counts, those under ``no_grad`` and of fused optimizers too; a write through ``.data``,
    numpy or a raw pointer does not.
    """
    try:
        return [tensor._version for tensor in shards.tensors]  # noqa: SLF001 -- torch's only name for it
    except RuntimeError:  # of one that is not counted
        return [version(tensor) for tensor in shards.tensors]


def check_unchanged(shards: LocalShards, before: list[int], rank: int) -> None:
    """Compare with earlier :func:`versions`. Raises StateChangedError, which names the first changed tensor."""
    if versions(shards) == before:  # as a rule
        return
    for row, (tensor, earlier) in enumerate(zip(shards.tensors, before, strict=True)):
        if (now := version(tensor)) != earlier:
            meta = shards.table.meta(row)
            raise StateChangedError(
                f"{meta.kind} tensor {meta.fqn!r} was written to {now - earlier} times on rank {rank} while its "
                "snapshot was being taken; wait for the snapshot (async_checkpoint=True returns after it) "
                "before the next optimizer step"
            )


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written to, as :func:`versions` does."""
    return _UNTRACKED if tensor.is_inference() else tensor._version  # noqa: SLF001 -- torch's only name for it


_EARLY = frozenset({"MuonWithAuxAdam"})
"""DeepSpeed's optimizers (0.19) whose momentum its ZeRO optimizers make anew from the gradients, before the step."""


def torch_optimizers(given: object) -> tuple[list[Optimizer], bool]:
    """Find the ``torch.optim`` optimizers in the ``optimizer`` state: one, several, or in wrappers.

    Megatron-LM's optimizers, DeepSpeed's and Accelerate's keep theirs in ``optimizer``, chained ones in
    ``chained_optimizers``; whatever they do with parameters they do after that one's ``step``. Also says whether any
    was in a wrapper. Raises InputError if an object's steps, or a part of them, cannot be held back.
    """
    optimizers = dict(_optimizers(given, wrapped=False))
    for optimizer, wrapped in optimizers.items():
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise InputError(
                f"{type(optimizer).__name__} was made with capturable=True: its steps may be replayed from a CUDA "
                "graph, where they cannot be held back; save with snapshot='eager'"
            )
        if wrapped and type(optimizer).__name__ in _EARLY:
            raise InputError(
                f"{type(optimizer).__name__} has states that DeepSpeed changes before its step begins, where that "
                "cannot be held back; save with snapshot='eager'"
            )
    return list(optimizers), any(optimizers.values())


def _optimizers(given: Any, *, wrapped: bool) -> Iterator[tuple[Optimizer, bool]]:
    """Walk through containers and wrappers."""
    if getattr(given, "is_stub_optimizer", False):  # Megatron-LM's, on a rank that has nothing to step
        return
    inner = getattr(given, "chained_optimizers", None) or getattr(given, "optimizer", None)
    if isinstance(given, Optimizer) and getattr(type(given).step, "hooked", False):
        parts = [part for part in parts_of(given) if getattr(type(part).step, "hooked", False)]
        yield from ((part, wrapped) for part in parts)
    elif isinstance(given, (list, tuple)):
        for child in given:
            yield from _optimizers(child, wrapped=wrapped)
    elif isinstance(given, Mapping) and given:
        yield from _optimizers(list(given.values()), wrapped=wrapped)
    elif inner is not None:
        yield from _optimizers(inner, wrapped=True)
    else:
        raise InputError(
            f"snapshot='lazy' has to hold back the optimizer's steps until everything is copied, and "
            f"{type(given).__name__} has none; pass the optimizer itself in states['optimizer'] (a "
            "torch.optim.Optimizer, or a wrapper that has it in .optimizer), or save with snapshot='eager'"
        )


class _Gate:
    """The hook of one optimizer: its steps wait here while somebody holds them."""

    def __init__(self) -> None:
        self.changed = Condition()  # guards the fields below
        self.holds: set[StepHold] = set()
        self.waiting: list[float] = []  # start time of each step that waits
        self.captured = False  # whether a step was captured into a CUDA graph: its replay calls no hook

    def __call__(self, *_: object) -> None:
        """Wait if somebody holds the step; called before every one, by torch."""
        if capturing():
            self.captured = True
        if self.holds:
            self._wait()

    def _wait(self) -> None:
        """Wait until there is no hold. The lock comes first: torch.compile stops tracing at it, without a warning."""
        with self.changed:
            began = time.monotonic()
            self.waiting.append(began)
            try:
                self.changed.wait_for(lambda: not self.holds)
            finally:
                self.waiting.remove(began)


_gates: WeakKeyDictionary[Optimizer, _Gate] = WeakKeyDictionary()
_gates_lock = process_lock()


def _open_in_child() -> None:
    """Hold nothing back in a forked child: the save goes on in the parent only."""
    for gate in _gates.values():
        gate.changed, gate.holds, gate.waiting = Condition(), set(), []


in_forked_child(_open_in_child)


def _gate(optimizer: Optimizer) -> _Gate:
    """Return the optimizer's gate.

    Its hook comes first, as those of others may change parameters, and it stays: torch walks through the hooks while
    a step waits in one.
    """
    with _gates_lock:
        gate = _gates.get(optimizer)
        if gate is None:
            gate = _gates[optimizer] = _Gate()
            handle = optimizer.register_step_pre_hook(gate)
            hooks = optimizer._optimizer_step_pre_hooks  # noqa: SLF001 -- there is no other way to be the first
            for other in [key for key in hooks if key != handle.id]:
                hooks[other] = hooks.pop(other)
        return gate


class StepHold:
    """Keeps the steps of some optimizers from beginning, from now until ``release``."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        """Hold the steps from now on. Raises InputError if a CUDA graph has captured a step since the first hold."""
        self.waited_seconds = 0.0  # how long steps have waited for the release, in all
        self._gates = [_gate(optimizer) for optimizer in optimizers]
        for gate, optimizer in zip(self._gates, optimizers, strict=True):
            if gate.captured:
                raise InputError(
                    f"a step of {type(optimizer).__name__} was captured into a CUDA graph: it is replayed without the "
                    "hook that would hold it back; save with snapshot='eager'"
                )
        for gate in self._gates:
            with gate.changed:
                gate.holds.add(self)

    def __repr__(self) -> str:
        held = sum(self in gate.holds for gate in self._gates)
        return f"<StepHold of {len(self._gates)} optimizers: {held} held, {self.waited_seconds:.3f} s waited>"

    def release(self) -> None:
        """Let the steps begin; does nothing the second time."""
        for gate in self._gates:
            with gate.changed:
                if self in gate.holds:
                    gate.holds.remove(self)
                    self.waited_seconds += sum(time.monotonic() - began for began in gate.waiting)
                    gate.changed.notify_all()
