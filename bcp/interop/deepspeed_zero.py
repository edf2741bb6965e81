"""ZeRO's partitions by reference: flat runs of parameters, of their fp32 masters, and of their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import ceil, prod
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import DTYPES, Piece
from bcp.interop.deepspeed_names import DEEPSPEED_NAMES, Folder, Shape, section
from bcp.interop.found import MASTER
from bcp.interop.reading import at_once
from bcp.interop.torch_content import TorchContent, torch_content
from bcp.interop.torch_pickle import Stored

__all__ = ["Flat", "Group", "Partition", "Run", "partitions_of", "runs_of_rows", "runs_of_slices"]

_WEIGHTS = 3
"""The stage of ZeRO that cuts each parameter by itself."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A tensor of one dimension in a file: its dtype, number of elements, file, and first byte."""

    dtype: str
    numel: int
    key: str
    start: int

    def piece(self, kind: str, name: str, shape: Shape, run: Run) -> Piece:
        """Return the elements of a run."""
        start = self.start + run.at * DTYPES[self.dtype]
        return Piece(kind, name, self.dtype, shape, (0,) * len(shape), shape, self.key, start, (run.first, run.stop))


@dataclass(frozen=True, slots=True)
class Group:
    """The partition of a group of parameters on one rank.

    Attributes:
        fp32: the masters.
        states: the optimizer's states of as many elements.
        single: the states of one element, as ``step``, as pieces of files.
        values: the states that are no tensors.
    """

    fp32: Flat
    states: Mapping[str, Flat]
    single: Mapping[str, Flat]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a parameter in the partition of a rank.

    Attributes:
        rank: the rank.
        group: the group in the rank's file.
        at: first element in the partition.
        first: first element in the parameter.
        stop: one past the last.
    """

    rank: int
    group: int
    at: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Partition:
    """The file of one rank.

    Attributes:
        groups: the groups in the file.
        stage: of ZeRO.
        hyper: the optimizer's ``param_groups``.
        about: the whole state of DeepSpeed's optimizer.
    """

    groups: Sequence[Group]
    stage: int
    hyper: Sequence[Mapping[str, Any]]
    about: Mapping[str, Any] = field(repr=False)


async def partitions_of(folder: Folder) -> list[Partition]:
    """Read the files of optimizer states, several at once; one for each rank.

    Raises:
        CheckpointError: states are of another kind than flat tensors, or a pickle has other classes.
        CorruptError: a rank's file is missing, or a file is damaged.

    """
    keys = [folder.optimizer.get((rank, 0), "") for rank in range(len(folder.optimizer))]
    if "" in keys:
        raise CorruptError(
            f"{folder.where} has {len(keys)} files of optimizer states, and none of rank {keys.index('')}; get it again"
        )

    async def look(key: str) -> Partition:
        return await _partition(await torch_content(folder.opened, key, DEEPSPEED_NAMES))

    found = await at_once(folder.opened.backend, keys, look)
    for key, partition in zip(keys, found, strict=True):
        said = partition.about.get("partition_count")
        count = max(said, default=0) if isinstance(said, list) else said
        if count != len(keys):
            raise CorruptError(
                f"{folder.where} has optimizer states of {len(keys)} ranks, and {key} says {count}: files are missing, "
                "or are of another save"
            )
        shape = [partition.stage, len(partition.groups)]
        if shape != [found[0].stage, len(found[0].groups)]:
            raise CorruptError(
                f"{folder.where}: {key} and {keys[0]} have other stages or groups: they are of two saves"
            )
    return found


async def _partition(content: TorchContent) -> Partition:
    """Return the partition in a file."""
    about = section(content, "optimizer_state_dict")
    if "ds_zero_partition_groups" in about:
        raise CheckpointError(
            f"{content.where} has experts of AutoEP, whose partitions differ; bcp does not read them: make a universal "
            "checkpoint of it (python -m deepspeed.checkpoint.ds_to_universal)"
        )
    stage = about.get("zero_stage", 1)  # BF16_Optimizer does not say it
    inner = about.get("optimizer_state_dict" if stage == _WEIGHTS else "base_optimizer_state")
    masters = about.get("fp32_flat_groups" if stage == _WEIGHTS else "single_partition_of_fp32_groups")
    if isinstance(inner, list):
        raise CheckpointError(
            f"{content.where} is of an elastic checkpoint, which has no hyper-parameters; save it anew without "
            "elastic_checkpoint"
        )
    is_sound = isinstance(inner, dict) and isinstance(inner.get("state"), dict) and isinstance(masters, list)
    if type(stage) is not int or not is_sound or not isinstance(inner.get("param_groups"), list):
        raise CorruptError(f"{content.where} has no states of a ZeRO optimizer; get the file again")
    tensors = dict(_tensors(masters, inner["state"], content.where))
    places = await content.places({("optimizer", f"{name} of group {at}"): t for (at, name), t in tensors.items()})
    flats = {
        (at, name): Flat(t.dtype, prod(t.shape), content.key, places["optimizer", f"{name} of group {at}"])
        for (at, name), t in tensors.items()
    }
    groups: list[Group] = []
    by_group: list[dict[str, Flat]] = [{} for _ in masters]
    for (at, name), flat in flats.items():
        by_group[at][name] = flat
    for at, named in enumerate(by_group):
        own = {name: flat for name, flat in named.items() if name != MASTER}
        shaped = {name for name in own if tensors[at, name].shape}
        groups.append(
            Group(
                flats[at, MASTER],
                {name: flat for name, flat in own.items() if name in shaped},
                {name: flat for name, flat in own.items() if name not in shaped},
                {name: leaf for name, leaf in inner["state"].get(at, {}).items() if name not in own},
            )
        )
        _check_lengths(groups[-1], f"{content.where}: group {at}")
    return Partition(groups, stage, inner["param_groups"], about)


def _tensors(masters: Sequence[Any], states: Mapping[Any, Any], where: str) -> Iterator[tuple[tuple[int, str], Stored]]:
    """Yield the tensors of groups by group and name."""
    for at, master in enumerate(masters):
        if not isinstance(master, Stored) or len(master.shape) != 1:
            raise CorruptError(f"{where}: the fp32 partition of group {at} is no flat tensor; get the file again")
        yield (at, MASTER), master
    for at, state in states.items():
        if type(at) is not int or not 0 <= at < len(masters) or not isinstance(state, dict):
            raise CorruptError(f"{where} has a state of group {at!r:.40} of {len(masters)}; get the file again")
        for name, leaf in state.items():
            if isinstance(leaf, Stored):
                yield (at, str(name)), leaf
                if len(leaf.shape) > 1:
                    raise CheckpointError(
                        f"{where}: the state {str(name)[:40]} of group {at} has shape {list(leaf.shape)}; bcp reads "
                        "flat states, as Adam's are: load it with DeepSpeed, and save it with bcp.save"
                    )


def _check_lengths(group: Group, words: str) -> None:
    """Compare the states with the masters; DeepSpeed has cut the padding off masters alone."""
    for name, flat in group.states.items():
        if flat.numel < group.fp32.numel:
            raise CheckpointError(
                f"{words} has {flat.numel} elements of {name[:40]}, and {group.fp32.numel} of the masters; bcp reads "
                "states as long as them: load it with DeepSpeed, and save it with bcp.save"
            )


def runs_of_rows(
    shapes: Sequence[Mapping[str, Shape]], partitions: Sequence[Partition], where: str
) -> Iterator[tuple[str, Shape, list[Run]]]:
    """Yield (name, shape, runs) of parameters in a row that ranks divide: stages 1 and 2.

    Raises CorruptError if rows and files differ in length.
    """
    paddings = partitions[0].about.get("param_alignment_paddings")
    for at, group in enumerate(shapes):
        ends = list(accumulate((partition.groups[at].fp32.numel for partition in partitions), initial=0))
        padding = _paddings(paddings, at, len(group), where)
        begin, rank = 0, 0
        for (name, shape), gap in zip(group.items(), padding, strict=True):
            stop, runs = begin + prod(shape), []
            if stop > ends[-1]:
                raise CorruptError(_too_short(where, at, ends[-1], stop))
            while rank < len(partitions) and ends[rank + 1] <= begin:
                rank += 1
            for owner in range(rank, len(partitions)):
                first, last = max(begin, ends[owner]), min(stop, ends[owner + 1])
                if first < last:
                    runs.append(Run(owner, at, first - ends[owner], first - begin, last - begin))
                if ends[owner + 1] >= stop:
                    break
            yield name, shape, runs
            begin = stop + gap
        unit = 2 * len(partitions)  # DeepSpeed aligns rows to it
        if ceil(begin / unit) != ceil(ends[-1] / unit):
            raise CorruptError(_too_short(where, at, ends[-1], begin))


def _too_short(where: str, group: int, found: int, wanted: int) -> str:
    return (
        f"{where}: the parameters of group {group} have {wanted} elements, and the files of ranks {found}: files are "
        "missing, or are of another save"
    )


def _paddings(paddings: Any, group: int, count: int, where: str) -> Sequence[int]:
    """Return how many elements lie behind each parameter."""
    if paddings is None:
        return [0] * count
    found = paddings[group] if isinstance(paddings, list) and group < len(paddings) else None
    if not isinstance(found, list) or len(found) != count or not all(type(gap) is int and gap >= 0 for gap in found):
        raise CorruptError(f"{where} has no paddings of the {count} parameters of group {group}; get it again")
    return found


def runs_of_slices(
    shapes: Sequence[Mapping[str, Shape]], partitions: Sequence[Partition], where: str
) -> Iterator[tuple[str, Shape, list[Run]]]:
    """Yield (name, shape, runs) of parameters each of which all ranks divide: stage 3.

    Raises CorruptError if parameters and files differ in length.
    """
    ends = list(accumulate((group.fp32.numel for group in partitions[0].groups), initial=0))
    for rank, partition in enumerate(partitions):
        if [group.fp32.numel for group in partition.groups] != [b - a for a, b in pairwise(ends)]:
            raise CorruptError(f"{where}: the partitions of ranks 0 and {rank} have other lengths; get the files again")
    begin = group = 0
    for name, shape in ((name, shape) for some in shapes for name, shape in some.items()):
        numel = prod(shape)
        length = ceil(numel / len(partitions))
        if begin + length > ends[-1]:
            raise CorruptError(_too_short(where, group, ends[-1], begin + length))
        while group + 1 < len(ends) - 1 and ends[group + 1] <= begin:
            group += 1
        yield name, shape, list(_slices(ends, begin, length, numel, group, len(partitions)))
        begin += length
    if begin != ends[-1]:
        raise CorruptError(_too_short(where, group, ends[-1], begin))


def _slices(ends: Sequence[int], begin: int, length: int, numel: int, group: int, ranks: int) -> Iterator[Run]:
    """Yield the runs of a parameter whose slices lie at ``begin`` of all ranks' groups in a row."""
    for rank in range(ranks):
        first, stop, at = rank * length, min((rank + 1) * length, numel), begin
        own = group
        while first < stop:
            count = min(stop - first, ends[own + 1] - at)
            if count:
                yield Run(rank, own, at - ends[own], first, first + count)
            first, at, own = first + count, at + count, own + 1
