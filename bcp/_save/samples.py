"""Digests of sampled values of replicas: the same on two ranks if the sampled elements are equal bit by bit.

Which elements are sampled follows from the shard's size and the plan alone. So ranks of different tables, strides and
devices sample the same elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from bcp.plan.columns import Ints, Words, begins, concat, mix, spread
from bcp.plan.shards import KINDS, ShardTable
from bcp.plan.write.replicas import ComparedRows
from bcp.protocols import LocalShards, ObjectKey
from bcp.runtime.device import Fence, accelerators, on_side_stream
from bcp.stages.memcpy import bytes_of, bytes_row_of, move

__all__ = ["NO_SUM", "ReplicaRows", "balanced", "name_id"]

NO_SUM = bytes(16)
"""The sum of a rank without replicas."""

BLOCK_BYTES, SMALL_BLOCK_BYTES = 256, 64
"""Elements side by side that are sampled together; small blocks where few bytes are sampled."""

MANY_BYTES = 512


def name_id(kind: str, name: str) -> int:
    """Return 64 bits that stand for a tensor or a value in messages."""
    return xxhash.xxh3_64_intdigest(f"{kind} {name}".encode())


def balanced(sums: Sequence[bytes]) -> bool:
    """Return whether the sums of all ranks, by :meth:`ReplicaRows.total`, say that all replicas are equal."""
    words = np.frombuffer(b"".join(sums), dtype="<u8").reshape(-1, 2)
    return not words.sum(axis=0, dtype=np.uint64).any()


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaRows:
    """The shards that this rank compares with other ranks, and their names in messages."""

    row: Ints  # int64[m], row in the rank's table
    keys: Sequence[ObjectKey]  # k values of the rank's optimizer
    weight: Ints  # int64[m + k], how often the digest of that row, or of that value, counts in the sum
    name: Words  # uint64[m + k], :func:`name_id`
    shard: Words  # uint64[m + k, 2], a digest of the name and of the shard's place
    width: Ints  # int64[m], elements of each sampled block
    step: Ints  # int64[m], elements from one block to the next
    count: Ints  # int64[m], sampled blocks

    @classmethod
    def of(cls, table: ShardTable, compared: ComparedRows) -> ReplicaRows:
        """Name the rows of a plan, and choose the elements to sample."""
        tensors, rows = table.tensors, compared.row.tolist()
        keys = [table.objects[row] for row in compared.objects.tolist()]
        known = list(map(name_id, map(KINDS.__getitem__, tensors.kind.tolist()), tensors.fqn))
        ids = [*(known[int(table.tensor[row])] for row in rows), *(name_id(*key) for key in keys)]
        digests = b"".join(_place_digest(table, row, known[int(table.tensor[row])]) for row in rows)
        digests += b"".join(xxhash.xxh3_128_digest(repr(key).encode()) for key in keys)
        size = tensors.itemsize[table.tensor[compared.row]]
        numel = (table.stop - table.start)[compared.row]
        block = BLOCK_BYTES if compared.nbytes >= MANY_BYTES else SMALL_BLOCK_BYTES
        blocks, width = compared.nbytes // block, np.maximum(block // size, 1)
        whole = numel <= blocks * width
        return cls(
            compared.row,
            keys,
            np.concatenate([compared.weight, compared.object_weight]),
            np.array(ids, dtype=np.uint64),
            np.frombuffer(digests, dtype="<u8").reshape(-1, 2),
            np.where(whole, numel, width),
            np.where(whole, 0, (numel - width) // (blocks - 1)),
            np.where(whole, 1, blocks),
        )

    def digests(self, shards: LocalShards, address: Ints, fence: Fence) -> Words:
        """Return uint64[m + k, 2]: digests of the sampled values as they are now.

        ``address``, int64[n], is as in :class:`~bcp.protocols.LocalShards`. Device memory is sampled on bcp's own
        streams, after the fence: nothing waits that a copy of the tensors would not wait for, too.
        """
        # As memory may have been replaced since, the tensors are asked again; freed memory has the address 0.
        now = (
            shards.tensors[row].data_ptr() if known else 0
            for row, known in zip(self.row, address[self.row], strict=True)
        )
        where = np.fromiter(now, np.int64, len(self.row))
        others = [
            number for number in np.flatnonzero(address[self.row] == 0).tolist() if not self._is_host(shards, number)
        ]
        readable = (where > 0) | (address[self.row] == 0)
        readable[others] = False
        found = self._of_host(np.flatnonzero(readable), shards, where)
        with torch.no_grad():
            found |= self._of_devices(others, shards, fence)
        parts = [xxhash.xxh3_128_digest(found.get(number, b"")) for number in range(len(where))]
        parts += _value_digests([shards.objects[key] for key in self.keys])
        return np.frombuffer(b"".join(parts), dtype="<u8").reshape(-1, 2)

    def total(self, digests: Words, left_out: Words) -> bytes:
        """Return the sum of this rank's digests, 16 bytes, without those of the names ``left_out``."""
        weight = np.where(np.isin(self.name, left_out), 0, self.weight) if len(left_out) else self.weight
        words = np.stack([mix(digests[:, lane] ^ self.shard[:, lane], lane) for lane in (0, 1)], axis=1)
        total: Words = (words * weight.astype(np.uint64)[:, None]).sum(axis=0, dtype=np.uint64)
        return bytes(total.astype("<u8").data)

    def _is_host(self, shards: LocalShards, number: int) -> bool:
        """Whether elements of a row can be read by their addresses."""
        tensor = shards.tensors[int(self.row[number])]
        return (
            tensor.is_cpu
            and tensor.layout is torch.strided
            and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            and not tensor.is_conj()
            and not tensor.is_neg()
        )

    def _of_host(self, numbers: Ints, shards: LocalShards, where: Ints) -> dict[int, memoryview]:
        """Read the blocks of contiguous tensors, and single elements of others, by their addresses."""
        table = shards.table
        size = table.tensors.itemsize[table.tensor[self.row]]
        plain = numbers[where[numbers] > 0]
        index, number = spread(self.count[plain])
        pieces = [(plain[index], where[plain][index] + number * (self.step * size)[plain][index])]
        lengths = [(self.width * size)[plain][index]]
        for other in numbers[where[numbers] == 0].tolist():
            addresses = _element_addresses(shards.tensors[int(self.row[other])], self._elements(other))
            pieces.append((np.full(len(addresses), other), addresses))
            lengths.append(np.full(len(addresses), size[other]))
        owner, source, length = concat([o for o, _ in pieces]), concat([a for _, a in pieces]), concat(lengths)
        data = np.empty(int(length.sum()), dtype=np.uint8)
        begin = begins(length)
        move(data.ctypes.data + begin[:-1], source, length)
        ends = begins(np.bincount(owner, weights=length, minlength=len(self.row)).astype(np.int64)[_unique(owner)])
        view = memoryview(data.data)
        return {
            int(number): view[start:stop]
            for number, start, stop in zip(_unique(owner), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        }

    def _elements(self, number: int) -> Ints:
        """Return the flat positions of the sampled elements of one row."""
        starts = np.arange(int(self.count[number])) * self.step[number]
        return np.asarray((starts[:, None] + np.arange(int(self.width[number]))).ravel(), dtype=np.int64)

    def _of_devices(self, numbers: Sequence[int], shards: LocalShards, fence: Fence) -> dict[int, memoryview]:
        """Gather the blocks on their device, and copy them to host memory, those of one dtype and width together."""
        tensors = {number: shards.tensors[int(self.row[number])].detach() for number in numbers}
        found: dict[int, memoryview] = {}
        with on_side_stream(accelerators(list(tensors.values())), fence):
            alike: defaultdict[tuple[torch.device, torch.dtype, int], list[int]] = defaultdict(list)
            for number, tensor in tensors.items():
                alike[tensor.device, tensor.dtype, int(self.width[number])].append(number)
            for batch in alike.values():
                data = torch.cat([self._blocks(number, tensors[number]) for number in batch]).to("cpu")
                view, begin = memoryview(bytes_of(bytes_row_of(data))), 0
                for number in batch:
                    stop = begin + int(self.count[number] * self.width[number]) * data.itemsize
                    found[number], begin = view[begin:stop], stop
        return found

    def _blocks(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """View the blocks of one tensor: [count, width]."""
        dense = tensor.resolve_conj().resolve_neg().contiguous()
        shape, strides = (int(self.count[number]), int(self.width[number])), (int(self.step[number]), 1)
        return dense.as_strided(shape, strides, dense.storage_offset())


def _unique(owner: Ints) -> Ints:
    """Return each number once, in the order in which they come; equal ones are neighbours."""
    return owner[np.flatnonzero(np.diff(owner, prepend=-1))]


def _place_digest(table: ShardTable, row: int, tensor: int) -> bytes:
    """Return 16 bytes that stand for a shard: its tensor, its box, and its flat interval."""
    ndim = int(table.tensors.ndim[table.tensor[row]])
    place = [*table.offset[row, :ndim].tolist(), *table.length[row, :ndim].tolist()]
    return xxhash.xxh3_128_digest(repr((tensor, place, int(table.start[row]), int(table.stop[row]))).encode())


def _element_addresses(tensor: torch.Tensor, flat: Ints) -> Ints:
    """Return the addresses of elements of a strided tensor in host memory, by their row-major positions."""
    offset, rest = np.zeros_like(flat), flat
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        rest, index = np.divmod(rest, length)
        offset += index * stride
    return np.asarray(tensor.data_ptr() + offset * tensor.itemsize, dtype=np.int64)


_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _value_digests(values: Sequence[object]) -> list[bytes]:
    """Return the digests of values; those of types other than numbers, texts and tuples of them are all alike."""
    distinct = {id(value): value for value in values}  # the parameters of a group have the same objects
    digests = {key: xxhash.xxh3_128_digest(_text(value).encode()) for key, value in distinct.items()}
    return [digests[id(value)] for value in values]


def _text(value: object) -> str:
    """Return the type and the bits of a value."""
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(_text, value))}]"
    if type(value) is float:
        return f"float {value.hex()}"
    return f"{type(value).__name__} {value!r}" if type(value) in _SCALARS else ""
