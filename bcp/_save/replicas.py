"""Replicas with different values: found before anything is written, named, and left to one writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bcp._log import log
from bcp._messages.planning import DifferingReplicas, ReplicaDigests
from bcp._save.samples import ReplicaRows, name_id, tensor_ids
from bcp.errors import StateError
from bcp.plan.columns import Ints, Words
from bcp.plan.layout import Layout
from bcp.plan.shards import KINDS, MAY_DIFFER, ONE_WRITER, ShardTable
from bcp.plan.write.survey import digest
from bcp.runtime.cache import LruCache

__all__ = ["KnownReplicas", "encode_digests", "find_differing", "recalled", "remember"]

SHOWN, SHOWN_RANKS = 5, 8
"""Tensors in a message, and ranks of each."""

NOTHING = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class KnownReplicas:
    """The table of a rank for the saves into one folder, after earlier ones have found differences."""

    table: ShardTable  # with marks of the tensors whose replicas differed
    values: Words = field(default_factory=NOTHING.copy)  # names of the values that differed; they are not compared

    def with_differing(self, differing: DifferingReplicas) -> KnownReplicas:
        """Give differing tensors one writer.

        If a parameter or an optimizer state differs, ranks have trained apart. A sample may miss differences of other
        tensors, so all tensors get one writer then: the checkpoint has the state of one replica.
        """
        table, tensors = self.table, self.table.tensors
        names = tensor_ids(tensors)
        chosen = np.isin(np.array(names, dtype=np.uint64), np.frombuffer(differing.tensors, dtype="<u8"))
        marks = np.zeros(len(names), dtype=np.int64) if table.marks is None else table.marks.copy()
        marks[chosen] |= ONE_WRITER | MAY_DIFFER
        if differing.is_trained:
            marks |= ONE_WRITER
        values = np.union1d(self.values, np.frombuffer(differing.values, dtype="<u8"))
        return KnownReplicas(replace(table, marks=marks) if differing.tensors else table, values)


_known: LruCache[tuple[str, bytes], KnownReplicas] = LruCache(16)
"""By folder of a checkpoint and digest of a table without marks."""


def recalled(table: ShardTable, folder: str) -> KnownReplicas:
    """Return what earlier saves into a folder have found."""
    return _known.get((folder, digest(table))) or KnownReplicas(table)


def remember(table: ShardTable, folder: str, known: KnownReplicas) -> None:
    """Remember it for later saves."""
    _known.put((folder, digest(table)), known)


def encode_digests(rows: ReplicaRows, digests: Words) -> bytes:
    """Return the message of one rank: the name, the place and the digest of each of its replicas."""
    columns = (rows.name, rows.shard[:, 0], digests[:, 0])
    return ReplicaDigests(*(column.astype("<u8").tobytes() for column in columns)).encode()


def find_differing(messages: Sequence[bytes], layout: Layout, path: str, *, refuse: bool) -> DifferingReplicas:
    """Find the tensors and values whose replicas differ; on rank 0.

    ``messages`` are those of :func:`encode_digests` of all ranks. Logs a warning. Raises StateError instead if
    ``refuse``.
    """
    ranks, tensors = _differing(messages), layout.tensors
    rows = {row: number for row, number in enumerate(tensor_ids(tensors)) if number in ranks}
    values = {key: number for key in layout.objects if (number := name_id(*key)) in ranks}
    labels = [(f"{tensors[row].kind} tensor {tensors.fqn[row]!r}", number) for row, number in rows.items()]
    labels += [(f"{kind} value {name!r}", number) for (kind, name), number in values.items()]
    if labels:
        _tell([_shown(label, ranks[number]) for label, number in labels], path, refuse=refuse)
    is_trained = any(KINDS[tensors.kind[row]] == "optimizer" or bool(tensors.requires_grad[row]) for row in rows)
    names, value_names = (np.array([*named.values()], dtype="<u8").tobytes() for named in (rows, values))
    return DifferingReplicas(names, value_names, is_trained)


def _tell(labels: Sequence[str], path: str, *, refuse: bool) -> None:
    shown = ", ".join(labels[:SHOWN]) + (f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else "")
    if refuse:
        raise StateError(
            f"{path}: ranks have different values of {len(labels)} replicas: {shown}. {_REMEDY}. replicas='warn' saves "
            "the values of the lowest of these ranks"
        )
    log.warning(
        "replicas have different values; the checkpoint has those of the lowest rank, whole",
        path=path,
        count=len(labels),
        replicas=shown,
        remedy=f"{_REMEDY}; replicas='error' refuses such a save",
    )


_REMEDY = (
    "average or broadcast them between the ranks before the save; pass the DistributedDataParallel module itself if it "
    "broadcasts its buffers; or put values of each rank into extra_states"
)


def _shown(label: str, ranks: Ints) -> str:
    """Name a tensor or a value, and the ranks that hold its differing replicas."""
    more = f", ... ({len(ranks)} ranks)" if len(ranks) > SHOWN_RANKS else ""
    return f"{label} (ranks {', '.join(map(str, ranks[:SHOWN_RANKS].tolist()))}{more})"


def _differing(messages: Sequence[bytes]) -> dict[int, Ints]:
    """Return the ranks that hold differing replicas of a tensor or a value, by the digest of the name."""
    decoded = ReplicaDigests.decode_all(messages)
    columns = [[getattr(message, name) for message in decoded] for name in ("name", "shard", "value")]
    name, shard, value = (np.frombuffer(b"".join(parts), dtype="<u8") for parts in columns)
    rank = np.repeat(np.arange(len(decoded)), [len(part) // 8 for part in columns[0]])
    order = np.argsort(shard, kind="stable")
    name, shard, value, rank = name[order], shard[order], value[order], rank[order]
    begin = np.flatnonzero(np.diff(shard, prepend=~shard[:1]))
    bounds = np.append(begin, len(shard))
    differs = value != np.repeat(value[begin], np.diff(bounds))
    found: dict[int, Ints] = {}
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if differs[start:stop].any():
            number = int(name[start])
            found[number] = np.union1d(found.get(number, rank[:0]), rank[start:stop])
    return found
