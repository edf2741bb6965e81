"""A model whose training is exact to the last bit however it is parallelised, and its unsharded twin.

``Exact`` returns a sum of layers that do not feed each other; each gets small integers made of the batch and its
output is weighted with small integers. So every gradient is a small integer whatever the weights are, its mean over 2,
4 or 8 ranks is exact in fp32 and bf16 in any order of summation, and Adam's moments are exact with betas that are
sums of few powers of two: what is left is one rounding for each element, the same wherever the element lies.

::

    model, optimizer = wrap(Exact()), AdamW(model.parameters(), **ADAMW)
    for step in range(2):
        model(batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # what a checkpoint has to hold now, and what the parameters are after one more step:
    trained(2, world_size).state()
    trained(3, world_size).state()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from logical import State
from torch import nn, optim

__all__ = ["ADAMW", "Block", "Exact", "Twin", "as_dtype", "batch", "grouped", "trained"]

ADAMW: dict[str, Any] = {"lr": 2**-6, "betas": (0.5, 0.75), "eps": 2**-20, "weight_decay": 0.125}
"""What :class:`torch.optim.AdamW` is made with."""

SLOW: dict[str, Any] = {"lr": 2**-7, "weight_decay": 0.0}
"""What a second parameter group has of its own."""

ROWS = 3


def batch(step: int, rank: int) -> torch.Tensor:
    """Return what one data-parallel rank gets in one step: int64[ROWS], numbers that differ by step and by rank."""
    return torch.arange(ROWS) * 7 + step * 5 + rank * 3


class Block(nn.Module):
    """A unit to wrap or to shard: two matrices, a bias and a vector."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        total = _linear(self.up, rows, 1) + _linear(self.down, rows, 2)
        return total + _weighed(self.scale.unsqueeze(0).expand(len(rows), -1), rows, 3)


class Exact(nn.Module):
    """Matrices of odd sizes, vectors, one element, three dimensions, an embedding tied to a head, nested blocks.

    The weights follow from ``seed`` alone. ``steps`` counts forward passes, in a persistent integer buffer.
    """

    def __init__(self, seed: int = 0, *, blocks: int = 2, tied: bool = True, frozen: bool = False) -> None:
        """Make the weights.

        Args:
            seed: what they follow from.
            blocks: how many blocks there are.
            tied: whether ``head.weight`` is ``table.weight``.
            frozen: add a layer, ``fixed``, that needs no gradients.

        """
        super().__init__()
        self.inp = nn.Linear(7, 10)
        self.blocks = nn.ModuleList(Block(10, 13) for _ in range(blocks))
        self.cube = nn.Parameter(torch.empty(3, 5, 2))
        self.gain = nn.Parameter(torch.empty(1))
        self.table = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight
        if frozen:
            self.fixed = nn.Linear(5, 3).requires_grad_(requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch. Its gradients are exact, its value is not."""
        self.steps += 1
        total = _linear(self.inp, rows, 4) + _linear(self.head, rows, 5)
        for index, block in enumerate(self.blocks):
            total = total + block(rows + 1000 * index)
        total = total + _weighed(self.cube.reshape(1, -1).expand(len(rows), -1), rows, 6)
        total = total + _weighed(self.gain.unsqueeze(0).expand(len(rows), -1), rows, 7)
        total = total + _weighed(self.table(rows % self.table.num_embeddings), rows, 8)
        return total + _linear(self.fixed, rows, 9) if hasattr(self, "fixed") else total


class Twin:
    """The same model in one piece, with plain torch, fed what all data-parallel ranks get together.

    Attributes:
        model: the model.
        masters: FQN to the memory that the optimizer steps: the parameters themselves, or their fp32 masters.
        optimizer: plain AdamW.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        model: nn.Module | None = None,
        slow: Sequence[str] = (),
        **how: Any,
    ) -> None:
        """Start with ``Exact(**how)``, or with a model of the caller's.

        A ``dtype`` other than fp32 is the model's; fp32 masters are then made of the rounded weights. ``slow``: see
        :func:`grouped`.
        """
        self.model = (Exact(**how) if model is None else model).to(dtype)
        named = {fqn: p for fqn, p in _sorted_parameters(self.model) if p.requires_grad}
        low = dtype is not torch.float32
        self.masters = {fqn: p.detach().float().requires_grad_() if low else p for fqn, p in named.items()}
        self.optimizer = optim.AdamW(grouped(self.masters, slow), **ADAMW)

    def step(self, step: int, world_size: int) -> None:
        """Take one step with the mean of the gradients of that many data-parallel ranks."""
        rows = torch.cat([batch(step, rank) for rank in range(world_size)])
        (self.model(rows) / world_size).backward()
        parameters = dict(_sorted_parameters(self.model))
        for fqn, master in self.masters.items():
            gradient = parameters[fqn].grad
            assert gradient is not None
            master.grad = gradient.to(master.dtype)
        self.optimizer.step()
        for fqn, master in self.masters.items():
            parameters[fqn].data.copy_(master.data)  # itself, where there is no other master
        self.model.zero_grad()

    def state(self) -> State:
        """Return what a checkpoint of this state has to hold, as copies: tensors only, without hyper-parameters."""
        values = self.model.state_dict().items()
        model = {("model", fqn): value for fqn, value in values if isinstance(value, torch.Tensor)}
        found = {("optimizer", f"state.{fqn}.{key}"): value for fqn, key, value in self._optimizer_state()}
        return {name: value.detach().clone() for name, value in {**model, **found}.items()}

    def _optimizer_state(self) -> Sequence[tuple[str, str, torch.Tensor]]:
        """Return (FQN, key, tensor) of all states, fp32 masters included where they are memory of their own."""
        parameters = dict(_sorted_parameters(self.model))
        found = [(fqn, key, v) for fqn, p in self.masters.items() for key, v in self.optimizer.state[p].items()]
        return found + [(fqn, "master_param", p) for fqn, p in self.masters.items() if p is not parameters[fqn]]


def trained(steps: int, world_size: int, **how: Any) -> Twin:
    """Return a twin that took some steps, numbered from 0, as that many data-parallel ranks take them together.

    ``how`` is for :class:`Twin`. The state of ``trained(n)`` is what a checkpoint after n steps holds, that of
    ``trained(n + 1)`` what the next step makes of it. After a change of the number of ranks go on with
    :meth:`Twin.step`.
    """
    twin = Twin(**how)
    for step in range(steps):
        twin.step(step, world_size)
    return twin


def as_dtype(state: State, dtype: torch.dtype) -> State:
    """Say what a state of fp32 masters, or of fp32 weights, is in a model of another dtype."""
    names = [fqn for kind, fqn in state if kind == "model" and state[kind, fqn].is_floating_point()]
    keeper = {fqn: "head.weight" if fqn == "table.weight" else fqn for fqn in names}
    fp32 = {
        fqn: state.get(("optimizer", f"state.{keeper[fqn]}.master_param"), state["model", fqn]).float() for fqn in names
    }
    rest = {name: value for name, value in state.items() if not name[1].endswith("master_param")}
    weights = {("model", fqn): value.to(dtype) for fqn, value in fp32.items()}
    low = dtype is not torch.float32
    masters = {("optimizer", f"state.{fqn}.master_param"): fp32[fqn] for fqn in set(keeper.values()) if low}
    return {**rest, **weights, **masters}


def grouped(named: Mapping[str, torch.Tensor], slow: Sequence[str]) -> list[dict[str, Any]]:
    """Return parameter groups: those whose name's last segment is in ``slow`` get one of their own, the second."""
    groups: list[list[torch.Tensor]] = [[], []]
    for fqn, parameter in named.items():
        groups[fqn.rpartition(".")[2] in slow].append(parameter)
    return [{"params": groups[0]}, *([{"params": groups[1], **SLOW}] if groups[1] else [])]


def _sorted_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by name, a tied one by the first of its names in sorted order: bcp's name for its state."""
    named = sorted(model.named_parameters(remove_duplicate=False), key=lambda item: item[0])
    seen: set[int] = set()
    return [(fqn, p) for fqn, p in named if not (id(p) in seen or seen.add(id(p)))]


def _linear(layer: nn.Linear, rows: torch.Tensor, salt: int) -> torch.Tensor:
    """Feed a layer with integers from -2 to 2 that follow from the batch, and weigh what comes out."""
    fed = _scattered(rows, layer.in_features, salt) % 5 - 2
    return _weighed(layer(fed.to(layer.weight.dtype)), rows, salt)


def _weighed(output: torch.Tensor, rows: torch.Tensor, salt: int) -> torch.Tensor:
    """Sum up an output of shape [len(rows), n], each element weighed with -1, 1 or 2."""
    weights = torch.tensor([-1, 1, 2], dtype=output.dtype, device=output.device)
    return (output * weights[_scattered(rows, output.shape[1], salt + 50) % 3]).sum()


def _scattered(rows: torch.Tensor, width: int, salt: int) -> torch.Tensor:
    """Make numbers >= 0 without a pattern that could cancel out: int64[len(rows), width]."""
    columns = torch.arange(width, device=rows.device)
    mixed = (rows.unsqueeze(1) * 1009 + columns * 9176 + salt * 733 + 77) * 40503
    return (mixed ^ (mixed >> 7)) * 31 >> 5 & 0xFFFF
