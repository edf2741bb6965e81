"""Digests of sampled values of replicas: the same on two ranks if the sampled elements are equal bit by bit.

Which elements are sampled follows from the shard's size and the plan alone. So ranks of different tables, strides and
devices sample the same elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
import xxhash

from bcp.plan.columns import Ints, Words, begins, concat, mix, spread
from bcp.plan.shards import KINDS, ShardTable, TensorTable
from bcp.plan.write.replicas import ComparedRows
from bcp.protocols import LocalShards, ObjectKey
from bcp.runtime.device import Fence, accelerators, on_side_stream
from bcp.stages.memcpy import bytes_of, bytes_row_of, move

__all__ = ["NO_SUM", "ReplicaRows", "balanced", "name_id", "tensor_ids"]

NO_SUM = bytes(16)
"""The sum of a rank without replicas."""

BLOCK_BYTES, SMALL_BLOCK_BYTES = 256, 64
"""Elements side by side that are sampled together; small blocks where few bytes are sampled."""

MANY_BYTES = 512


def name_id(kind: str, name: str) -> int:
    """Return 64 bits that stand for a tensor or a value in messages."""
    return xxhash.xxh3_64_intdigest(f"{kind} {name}".encode())


def tensor_ids(tensors: TensorTable) -> list[int]:
    """Return :func:`name_id` of each tensor."""
    return list(map(name_id, map(KINDS.__getitem__, tensors.kind.tolist()), tensors.fqn))


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
        tensors = table.tensors
        keys = [table.objects[row] for row in compared.objects.tolist()]
        known = tensor_ids(tensors) if len(compared.row) else []
        own = [known[tensor] for tensor in table.tensor[compared.row].tolist()]
        ids = [*own, *(name_id(*key) for key in keys)]
        places = _place_digests(table, compared.row, own)
        values = (xxhash.xxh3_128_digest(repr(key).encode()) for key in keys)
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
            _words(chain(places, values)),
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
        has_address = address[self.row] > 0
        now = (
            shards.tensors[row].data_ptr() if known else 0
            for row, known in zip(self.row.tolist(), has_address.tolist(), strict=True)
        )
        where = np.fromiter(now, np.int64, len(self.row))
        others = [number for number in np.flatnonzero(~has_address).tolist() if not self._is_host(shards, number)]
        readable = (where > 0) | ~has_address
        readable[others] = False
        found = self._of_host(np.flatnonzero(readable), shards, where)
        with torch.no_grad():
            found |= self._of_devices(others, shards, fence)
        tensors = _words(xxhash.xxh3_128_digest(found.get(number, b"")) for number in range(len(where)))
        return np.concatenate([tensors, _value_digests([shards.objects[key] for key in self.keys])])

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
        first = np.flatnonzero(np.diff(owner, prepend=-1))  # the pieces of a row are neighbours
        bounds, view = [*begin[first].tolist(), len(data)], memoryview(data.data)
        return {
            number: view[start:stop]
            for number, (start, stop) in zip(owner[first].tolist(), pairwise(bounds), strict=True)
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


def _place_digests(table: ShardTable, rows: Ints, names: Sequence[int]) -> Iterator[bytes]:
    """Yield 16 bytes that stand for each shard: the name, the box, and the flat interval."""
    columns = (table.tensors.ndim[table.tensor[rows]], table.offset[rows], table.length[rows])
    ends = (table.start[rows], table.stop[rows])
    for name, ndim, offset, length, start, stop in zip(names, *(c.tolist() for c in (*columns, *ends)), strict=True):
        yield xxhash.xxh3_128_digest(repr((name, [*offset[:ndim], *length[:ndim]], start, stop)).encode())


def _element_addresses(tensor: torch.Tensor, flat: Ints) -> Ints:
    """Return the addresses of elements of a strided tensor in host memory, by their row-major positions."""
    offset, rest = np.zeros_like(flat), flat
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        rest, index = np.divmod(rest, length)
        offset += index * stride
    return np.asarray(tensor.data_ptr() + offset * tensor.itemsize, dtype=np.int64)


_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _value_digests(values: Sequence[object]) -> Words:
    """Return uint64[k, 2]; values of types other than numbers, texts and tuples of them are all alike."""
    ids = np.fromiter(map(id, values), np.int64, len(values))  # the parameters of a group have the same objects
    _, first, place = np.unique(ids, return_index=True, return_inverse=True)
    return _words(xxhash.xxh3_128_digest(_text(values[number]).encode()) for number in first.tolist())[place]


def _words(digests: Iterable[bytes]) -> Words:
    """Return digests of 16 bytes as uint64[n, 2]."""
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def _text(value: object) -> str:
    """Return the type and the bits of a value."""
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(_text, value))}]"
    if type(value) is float:
        return f"float {value.hex()}"
    return f"{type(value).__name__} {value!r}" if type(value) in _SCALARS else ""
