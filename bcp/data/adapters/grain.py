"""Grain's datasets as virtual shards. Read with grain 0.2.18.

``ElasticIterator`` has one state for all of its readers: :class:`bcp.data.adapters.Replicated`. Any other iterator of
Grain is opaque: :class:`bcp.data.adapters.PerReader`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bcp.data.adapters.virtual_shards import VirtualShards
from bcp.errors import InputError, MissingExtraError

try:
    import grain
except ImportError as error:
    raise MissingExtraError(
        "bcp.data.adapters.grain needs grain, which is not installed: pip install 'bcp-checkpoint[grain]'"
    ) from error

__all__ = ["GrainShards"]


class GrainShards(VirtualShards):
    """Reads Grain's datasets in virtual shards, for any number of readers up to theirs.

    Each virtual shard is an ``IterDataset`` with an iterator and a state of its own, with any operations: filters,
    packing, mixtures, prefetching. Order and change of readers are those of :class:`VirtualShards`.

    Args:
        dataset: a ``MapDataset``. Virtual shard ``v`` has its elements ``v`` modulo ``shards``, so readers in step see
            the dataset's own order. Or a function that makes the ``IterDataset`` of a virtual shard from its number, in
            every process alike.
        shards: how many virtual shards, fixed for the life of a run.
        reader: number of this reader, its data-parallel rank.
        readers: how many readers there are, at most ``shards``.
        read_options: threads and buffer of one virtual shard of a ``MapDataset``; None for 1 thread and 16 elements.
            Grain's own default would be 16 threads for each.

    Raises:
        InputError: the dataset is neither, or there are more readers than virtual shards.

    Example::

        def packed(shard: int) -> grain.IterDataset:
            return pack(source[shard::96].to_iter_dataset(grain.ReadOptions(num_threads=1)))

        for batch in GrainShards(packed, shards=96, reader=rank, readers=world_size):
            train(batch)

    """

    def __init__(
        self,
        dataset: Any,
        *,
        shards: int,
        reader: int = 0,
        readers: int = 1,
        read_options: Any = None,
    ) -> None:
        make: Callable[[int], Any]
        if isinstance(dataset, grain.MapDataset):
            options = read_options or grain.ReadOptions(num_threads=1, prefetch_buffer_size=16)

            def make(shard: int) -> Any:
                return dataset[shard::shards].to_iter_dataset(options)

        elif callable(dataset) and read_options is None:
            make = dataset
        else:
            raise InputError(
                f"GrainShards: {type(dataset).__name__} with read_options={read_options}; pass a MapDataset, or a"
                " function that makes the IterDataset of a virtual shard and has read options of its own"
            )

        def open_shard(shard: int) -> Any:
            made = make(shard)
            if not isinstance(made, grain.IterDataset | grain.MapDataset):
                raise InputError(f"GrainShards: virtual shard {shard} is {type(made).__name__}, and no IterDataset")
            return iter(made)

        super().__init__(open_shard, shards=shards, reader=reader, readers=readers)
