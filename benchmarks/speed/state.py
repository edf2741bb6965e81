"""The state that everybody saves: a GPT in bf16, its AdamW moments in fp32, a step count of each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.speed.gpt import Gpt

__all__ = ["State", "equal_tensors", "gpt"]

LAYERS = 16
VOCAB = 16
"""Rows of the embedding, in widths: 16,384 at width 1024."""
BYTES_PER_PARAMETER = 2 + 4 + 4
POOL = 1 << 22


@dataclass(frozen=True, slots=True)
class State:
    """The same tensors twice: as bcp takes them, in a module and its optimizer, and as others do, in a nested dict.

    Attributes:
        states: for bcp.
        tensors: for everybody else: kind -> name -> tensor.
        update: runs the optimizer's step, with all its hooks; there are no gradients, so that nothing changes.
    """

    states: Mapping[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    update: Callable[[], object]

    @property
    def nbytes(self) -> int:
        """Bytes that this process holds."""
        return sum(tensor.nbytes for _, tensor in self.local())

    def local(self) -> Iterator[tuple[str, Tensor]]:
        """Go through the memory of all tensors, by name."""
        for kind, named in self.tensors.items():
            for name, tensor in named.items():
                yield f"{kind}.{name}", tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()

    def fill(self, seed: int = 0) -> None:
        """Put random numbers in, at the speed of a copy; no two tensors get the same.

        Step counts do not depend on the seed: every rank has them, and they are equal.
        """
        pool = torch.rand(POOL, generator=torch.Generator().manual_seed(seed))
        pools = {dtype: pool.to(dtype) for dtype in (torch.float32, torch.bfloat16)}
        for index, (_, tensor) in enumerate(self.local()):
            if tensor.ndim == 0:
                tensor.fill_(index + 1)
                continue
            flat, source = tensor.view(-1), pools[tensor.dtype]
            first = 7919 * (index + 1) % (POOL // 2)
            for start in range(0, len(flat), POOL // 2):
                piece = flat[start : start + POOL // 2]
                piece.copy_(source[first : first + len(piece)])

    def clear(self) -> None:
        """Put zeros in, so that a load that does nothing is noticed."""
        for _, tensor in self.local():
            tensor.zero_()

    def digest(self) -> str:
        """Return a checksum of all that is in it."""
        total = xxhash.xxh3_128()
        for name, tensor in self.local():
            total.update(name.encode())
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()


def gpt(nbytes: int, spread: Callable[[nn.Module], object] = id) -> State:
    """Make a GPT of about ``nbytes`` over all ranks, all zeros; ``spread`` may cut the module over ranks."""
    width = 8 * max(1, round(math.sqrt(nbytes / BYTES_PER_PARAMETER / (12 * LAYERS + VOCAB)) / 8))
    with torch.device("meta"):
        module = Gpt(width=width, layers=LAYERS, vocab=VOCAB * width, heads=8).to(torch.bfloat16)
    spread(module)
    module.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(module.parameters())
    tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind in ("model", "step", "exp_avg", "exp_avg_sq")}
    for name, parameter in module.named_parameters():
        state = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
        }
        optimizer.state[parameter] = state
        for kind, tensor in {"model": parameter.data, **state}.items():
            tensors[kind][name] = tensor
    made = State({"model": module, "optimizer": optimizer}, tensors, optimizer.step)
    made.clear()
    return made


def equal_tensors(count: int, nbytes: int) -> State:
    """Make ``count`` fp32 tensors of equal size, together of ``nbytes``, all zeros."""
    tensors = {"model": {f"tensor.{index}": torch.zeros(nbytes // count // 4) for index in range(count)}}
    return State(tensors, tensors, lambda: None)
