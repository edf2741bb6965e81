"""Llama-3.1-405B as Megatron-LM shards it (paper, Table 8): what every rank of a job holds, without any tensor.

Tensor parallelism cuts the matrices, pipeline parallelism the layers; the model is replicated over data-parallel ranks
and its optimizer, three fp32 states, is sharded over them with ZeRO-1, in one of two ways:

- A, as the paper words it: all parameters of one (TP, PP) group are laid end to end and cut into DP equal shares;
- B, as Megatron-core does it: buckets, closed once they have at least ``max(40M, 1M x DP)`` elements, are cut each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bcp.plan.box import Box
from bcp.plan.columns import Ints
from bcp.plan.shards import ShardRow, ShardTable, TensorMeta

__all__ = ["STATES", "Job", "stages"]

LAYERS, HIDDEN, FFN, VOCAB, QKV = 126, 16384, 53248, 128256, 18432
STATES = ("exp_avg", "exp_avg_sq", "fp32_param")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model: its global shape, the dimension that TP cuts (-1: none), in how many stacked parts."""

    fqn: str
    shape: tuple[int, ...]
    cut: int = -1
    parts: int = 1

    def boxes(self, tp: int, rank: int) -> list[Box]:
        """Return the blocks that a TP rank holds, in the order in which they lie in its memory."""
        if self.cut < 0:
            return [Box.whole(self.shape)]
        whole = self.shape[self.cut] // self.parts
        size = whole // tp
        found = []
        for part in range(self.parts):
            offsets, lengths = [0] * len(self.shape), list(self.shape)
            offsets[self.cut], lengths[self.cut] = part * whole + rank * size, size
            found.append(Box(tuple(offsets), tuple(lengths)))
        return found


@dataclass(frozen=True, slots=True)
class Job:
    """A job's parallelism and its variant of ZeRO-1 (``"A"`` or ``"B"``). Ranks count TP first, then DP, then PP."""

    tp: int
    dp: int
    pp: int
    zero: str

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.tp * self.dp * self.pp

    def rank(self, tp: int, dp: int, pp: int) -> int:
        """Return the number of a rank."""
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self) -> Iterator[tuple[int, int, ShardTable, Ints, Ints]]:
        """Yield (tp, pp, table, start, stop) of every data-parallel group.

        The table's optimizer rows are whole; what DP rank d has is ``start[d]`` to ``stop[d]``, int64[dp, rows].
        """
        for pp, parameters in enumerate(stages(self.pp)):
            for tp in range(self.tp):
                table = _table(parameters, self.tp, tp)
                yield tp, pp, table, *_flat(table, self.dp, self.zero)

    def table(self, rank: int) -> ShardTable:
        """Return what one rank holds."""
        tp, dp, pp = rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)
        table = _table(stages(self.pp)[pp], self.tp, tp)
        start, stop = _flat(table, self.dp, self.zero)
        return replace(table, start=start[dp], stop=stop[dp])


def stages(pp: int) -> list[list[Parameter]]:
    """Return the parameters of each pipeline stage; the first and the last have one layer less than the others."""
    middle = (LAYERS + 2) // pp
    found = []
    first = 0
    for stage in range(pp):
        count = middle - (stage == 0) - (stage == pp - 1)
        parameters = [one for layer in range(first, first + count) for one in _layer(layer)]
        if stage == 0:
            parameters.insert(0, Parameter("embedding.weight", (VOCAB, HIDDEN), 0))
        if stage == pp - 1:
            parameters += [Parameter("norm.weight", (HIDDEN,)), Parameter("output.weight", (VOCAB, HIDDEN), 0)]
        found.append(parameters)
        first += count
    return found


def _layer(number: int) -> list[Parameter]:
    name = f"decoder.layers.{number}"
    return [
        Parameter(f"{name}.input_norm.weight", (HIDDEN,)),
        Parameter(f"{name}.attention.qkv.weight", (QKV, HIDDEN), 0),
        Parameter(f"{name}.attention.proj.weight", (HIDDEN, HIDDEN), 1),
        Parameter(f"{name}.mlp_norm.weight", (HIDDEN,)),
        Parameter(f"{name}.mlp.fc1.weight", (2 * FFN, HIDDEN), 0, parts=2),  # gate and up, stacked
        Parameter(f"{name}.mlp.fc2.weight", (HIDDEN, FFN), 1),
    ]


def _table(parameters: list[Parameter], tp: int, rank: int) -> ShardTable:
    """Return the table of a TP rank, with the optimizer unsharded: model rows first, then those of each state."""
    rows = [
        ShardRow(TensorMeta("model", one.fqn, "bfloat16", 2, one.shape, _stride(one.shape), "cuda"), box)
        for one in parameters
        for box in one.boxes(tp, rank)
    ]
    for state in STATES:
        rows += [
            ShardRow(
                TensorMeta(
                    "optimizer", f"state.{one.fqn}.{state}", "float32", 4, one.shape, _stride(one.shape), "cuda"
                ),
                box,
            )
            for one in parameters
            for box in one.boxes(tp, rank)
        ]
    return ShardTable.build(rows)


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*(int(np.prod(shape[dim + 1 :])) for dim in range(len(shape) - 1)), 1)


def _flat(table: ShardTable, dp: int, zero: str) -> tuple[Ints, Ints]:
    """Cut the optimizer's rows: returns start and stop of every row on every DP rank."""
    numel = table.length.prod(axis=1)
    boxes = len(table) // (1 + len(STATES))
    size = numel[:boxes]
    bucket = np.zeros(boxes, dtype=np.int64)
    if zero == "B":
        bucket = _buckets(size, max(40_000_000, 1_000_000 * dp))
    begin = np.cumsum(size) - size
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    base = begin[first][bucket]  # where the row's bucket begins
    share = -(-np.bincount(bucket, weights=size).astype(np.int64) // dp)[bucket]
    low = np.arange(dp)[:, None] * share + base - begin
    start, stop = np.clip(low, 0, size), np.clip(low + share, 0, size)
    start, stop = np.where(start < stop, start, 0), np.where(start < stop, stop, 0)
    model = np.zeros((dp, boxes), dtype=np.int64)
    return (
        np.concatenate([model, *[start] * len(STATES)], axis=1),
        np.concatenate([model + size, *[stop] * len(STATES)], axis=1),
    )


def _buckets(numel: Ints, least: int) -> Ints:
    """Number the bucket of every box (gate and up are two): closed as soon as it has so many elements."""
    bucket, filled, found = 0, 0, []
    for size in numel.tolist():
        found.append(bucket)
        filled += size
        if filled >= least:
            bucket, filled = bucket + 1, 0
    return np.array(found, dtype=np.int64)
