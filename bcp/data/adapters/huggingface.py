"""Streaming sets of Hugging Face ``datasets`` as virtual shards. Read with datasets 5.2.0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from bcp.data.adapters.virtual_shards import VirtualShards
from bcp.errors import InputError, MissingExtraError, StateError

try:
    from datasets import IterableDataset
    from datasets.distributed import split_dataset_by_node
except ImportError as error:
    raise MissingExtraError(
        "bcp.data.adapters.huggingface needs datasets, which is not installed: pip install 'bcp-checkpoint[datasets]'"
    ) from error

__all__ = ["HuggingFaceShards"]


class HuggingFaceShards(VirtualShards):
    """Reads a streaming ``datasets.IterableDataset`` in virtual shards, for any number of readers up to theirs.

    Virtual shard ``v`` has the files (``dataset.num_shards``) ``v`` modulo ``shards``, or the samples ``v`` modulo
    ``shards`` of all files. Its place in them is ``state_dict`` of an ``IterableDataset`` of its own. Order and change
    of readers are those of :class:`VirtualShards`. An epoch of a virtual shard begins when its last one is over, with
    ``set_epoch``.

    A buffer of ``shuffle`` is refused: its samples are in no state of ``datasets``, and a resumed run would never see
    them. Shuffle the files by ``shuffle(seed, buffer_size=1)``, and samples before they are written to files.

    Args:
        dataset: the whole dataset, not split by node. Its operations apply to each virtual shard by itself.
        shards: how many virtual shards, fixed for the life of a run; None for ``dataset.num_shards``.
        reader: number of this reader, its data-parallel rank.
        readers: how many readers there are, at most ``shards``.
        epochs: how often each sample is read; None for without end.
        by: how the dataset is dealt to the virtual shards. ``"files"``: by files, at least ``shards`` of them.
            ``"samples"``: every virtual shard reads all of the dataset and leaves out the samples of the others.

    Raises:
        InputError: the dataset is no ``IterableDataset``, is split by node already or has a shuffle buffer, or has
            fewer files than there are virtual shards.

    Example::

        dataset = load_dataset("allenai/c4", "en", split="train", streaming=True)  # 1024 files
        for sample in HuggingFaceShards(dataset, shards=96, reader=rank, readers=world_size):
            train(sample)

    """

    def __init__(
        self,
        dataset: Any,
        *,
        shards: int | None = None,
        reader: int = 0,
        readers: int = 1,
        epochs: int | None = 1,
        by: Literal["files", "samples"] = "files",
    ) -> None:
        _check(dataset)
        files = int(dataset.num_shards)
        count = files if shards is None else shards
        if count < 1 or (epochs is not None and epochs < 1) or by not in ("files", "samples"):
            raise InputError(f"HuggingFaceShards(shards={count}, epochs={epochs}, by={by!r}) is out of range")
        if count > files and by == "files":
            raise InputError(
                f"HuggingFaceShards(shards={count}): the dataset has {files} files to deal; pass at most as many"
                " shards, call dataset.reshard(), which makes more of Parquet files, or pass by='samples'"
            )
        self._run = {"files": files, "epochs": epochs, "by": by}

        def open_shard(shard: int) -> _Shard:
            if by == "samples":
                whole = dataset.shard(num_shards=1, index=0)  # two splits of one dataset would share a place in it
                return _Shard(split_dataset_by_node(whole, shard, count, strategy="examples"), epochs)
            return _Shard(dataset.shard(num_shards=count, index=shard, contiguous=False), epochs)

        super().__init__(open_shard, shards=count, reader=reader, readers=readers)

    def shared_state(self) -> dict[str, Any]:
        """Return the values that a run must not change, equal on all readers."""
        return super().shared_state() | self._run


class _Shard:
    """The samples of one virtual shard in all epochs."""

    def __init__(self, dataset: Any, epochs: int | None) -> None:
        self._dataset, self._epochs = dataset, epochs
        self._state: Any = (
            dataset.state_dict()
        )  # until the first sample: the dataset would not return one it has loaded
        self._samples: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._samples is None:
            self._samples = iter(self._dataset)
        end = object()
        sample = next(self._samples, end)
        if sample is end:
            epoch = int(self._dataset.epoch) + 1
            if epoch == self._epochs:
                raise StopIteration
            self._dataset.set_epoch(epoch)
            self._samples = iter(self._dataset)
            sample = next(self._samples)  # an epoch without samples is the end, or there would be none
        self._state = None
        return sample

    def state_dict(self) -> Any:
        return self._dataset.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        form = self._dataset.state_dict()
        for saved, wanted in ((state, form), (state["examples_iterable"], form["examples_iterable"])):
            if saved.keys() != wanted.keys() or saved.get("type") != wanted.get("type"):
                raise StateError(f"the dataset's state has the fields {sorted(wanted)}, and not {sorted(saved)}")
        self._dataset.set_epoch(state["epoch"])
        self._dataset.load_state_dict(state)
        self._state = state


def _check(dataset: Any) -> None:
    """Refuse datasets whose state does not hold all that it takes to go on, and those that are a part already."""
    if not isinstance(dataset, IterableDataset):
        raise InputError(
            f"HuggingFaceShards: {type(dataset).__name__} is no IterableDataset; load it with streaming=True, or call"
            " to_iterable_dataset(num_shards=...)"
        )
    if not (hasattr(dataset, "_ex_iterable") and hasattr(dataset, "_distributed")):
        raise InputError(
            "HuggingFaceShards cannot see whether this dataset has a shuffle buffer: it knows the inside of datasets"
            " 5.2.0"
        )
    if dataset._distributed is not None:  # noqa: SLF001 -- there is no public way to ask
        raise InputError("HuggingFaceShards: the dataset is split by node already; pass the whole dataset")
    nodes = [dataset._ex_iterable]  # noqa: SLF001 -- there is no public way to ask
    while nodes:
        node = nodes.pop()
        if (size := getattr(node, "buffer_size", 1)) > 1:
            raise InputError(
                f"HuggingFaceShards: the dataset has a shuffle buffer of {size} samples, which its state lacks, so a"
                " resumed run would lose them: shuffle(seed, buffer_size=1) shuffles files alone"
            )
        nodes += [node.ex_iterable] if hasattr(node, "ex_iterable") else getattr(node, "ex_iterables", [])
