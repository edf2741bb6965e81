"""Folders of DeepSpeed by reference: ZeRO's partitions, states of stage 0, and universal checkpoints.

Names are those that a save of the engine by bcp has: ``state.X.exp_avg``, ``state.X.master_param``, and
``param_groups.X.lr``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import Catalogue, Piece
from bcp.interop.deepspeed_names import DEEPSPEED_NAMES, STATES, Folder, Shape, check_one_model, section, shapes_of
from bcp.interop.deepspeed_universal import add_universal
from bcp.interop.deepspeed_zero import Flat, Partition, Run, partitions_of, runs_of_rows, runs_of_slices
from bcp.interop.facts import facts_of
from bcp.interop.found import MASTER, OPTIMIZER, Found
from bcp.interop.optimizer_numbers import is_packed, packed_entries
from bcp.interop.reading import Opened, at_once
from bcp.interop.torch_content import TorchContent, torch_content
from bcp.interop.torch_file import untied
from bcp.interop.torch_pickle import Stored

__all__ = ["deepspeed_folder"]

NAME = "deepspeed"
WEIGHTS = 3


async def deepspeed_folder(opened: Opened) -> Catalogue:
    """List the tensors and values of a folder.

    Raises:
        CheckpointError: the files do not say how tensors were cut (tensor and pipeline parallelism, experts), or their
            pickles have other classes.
        CorruptError: a file is missing or damaged, or files are of two saves.

    """
    folder = await Folder.of(opened)
    keys = [folder.model[rank] for rank in sorted(folder.model)]
    contents = await at_once(opened.backend, keys, lambda key: torch_content(opened, key, DEEPSPEED_NAMES))
    first, partitions = contents[0], list[Partition]()
    found = Found(most=max(content.pickle_nbytes for content in contents))
    if folder.universal:
        await add_universal(found, folder, contents)
    else:
        check_one_model(folder)
        partitions = await partitions_of(folder)
        await (_add_zero(found, folder, contents, partitions) if partitions else _add_whole(found, first))
    return Catalogue(
        NAME,
        found.pieces,
        opened.sizes,
        found.values,
        found.tied,
        ranks=max(len(partitions), len(contents)),
        user=facts_of(NAME, first.value, STATES),
    )


async def _add_zero(
    found: Found, folder: Folder, contents: Sequence[TorchContent], partitions: Sequence[Partition]
) -> None:
    """Add the weights, masters and states of a ZeRO optimizer."""
    first, stage = contents[0], partitions[0].stage
    module, shapes = section(first, "module"), shapes_of(first)
    if len(shapes) != len(partitions[0].groups):
        raise CorruptError(
            f"{folder.where}: {first.key} has {len(shapes)} groups of parameters, and the optimizer's files "
            f"{len(partitions[0].groups)}: they are of two saves"
        )
    rows = (runs_of_slices if stage == WEIGHTS else runs_of_rows)(shapes, partitions, folder.where)
    parameters = list(rows)
    for name, shape, runs in parameters:
        _add_parameter(found, (name, shape, runs), partitions, module.get(name), is_cut=stage == WEIGHTS)
    groups = [list(group) for group in shapes]
    _add_singles(found, groups, partitions[0], first.where)
    _add_groups(found, groups, partitions[0], folder.where)
    found.add_scaler(partitions[0].about, folder.where)
    if stage == WEIGHTS:
        await _add_rest(found, folder, contents, {name for name, _, _ in parameters})
    else:
        await found.add_module(first, module)


def _add_parameter(
    found: Found,
    parameter: tuple[str, Shape, list[Run]],
    partitions: Sequence[Partition],
    weight: Any,
    *,
    is_cut: bool,
) -> None:
    """Add masters and states of a parameter; and its weights, if the module's file lacks them."""
    name, shape, runs = parameter
    for run in runs:
        group = partitions[run.rank].groups[run.group]
        if is_cut:
            found.pieces.append(group.fp32.piece("model", name, shape, run))
        if not isinstance(weight, Stored) or weight.dtype != group.fp32.dtype:
            found.pieces.append(group.fp32.piece(OPTIMIZER, f"state.{name}.{MASTER}", shape, run))
        for state, flat in group.states.items():
            found.pieces.append(flat.piece(OPTIMIZER, f"state.{name}.{state}", shape, run))


def _add_singles(found: Found, groups: Sequence[Sequence[str]], partition: Partition, where: str) -> None:
    """Add states of one element, as ``step``: all parameters of a group have the same one."""
    for names, group in zip(groups, partition.groups, strict=True):
        for state, flat in group.single.items():
            for name in names[:1]:
                whole = f"state.{name}.{state}"
                found.pieces.append(Piece.whole(OPTIMIZER, whole, flat.dtype, (), flat.key, flat.start))
            found.tied.update(((OPTIMIZER, f"state.{name}.{state}"), whole) for name in names[1:])
        for state, value in group.values.items():
            for name in names:
                found.add_value(f"state.{name}.{state}", value, where)


def _add_groups(found: Found, groups: Sequence[Sequence[str]], partition: Partition, where: str) -> None:
    """Add the hyper-parameters; in stage 3 a group consists of several sub-groups."""
    left = set(range(len(groups)))
    for at, hyper in enumerate(partition.hyper):
        members = hyper.get("params") if isinstance(hyper, Mapping) else None
        if not isinstance(members, list) or not all(type(member) is int for member in members):
            raise CorruptError(f"{where}: group {at} of the optimizer has no list of partitions; get the files again")
        if len(set(members)) < len(members) or not left.issuperset(members):
            raise CorruptError(
                f"{where}: group {at} of the optimizer names a partition that is not there, or is another group's; get "
                "the files again"
            )
        left -= set(members)
        found.add_hyper((name for member in members for name in groups[member]), hyper, where)


async def _add_rest(found: Found, folder: Folder, contents: Sequence[TorchContent], known: set[str]) -> None:
    """Add buffers, frozen parameters and tied names of stage 3, whose module has empty tensors for parameters."""
    first = contents[0]
    module, tied = section(first, "module"), section(first, "shared_params")
    frozen = await _add_frozen(found, folder, contents)
    pairs = {name: other for name, other in tied.items() if other in known or other in frozen}
    found.tied.update((("model", str(name)), other) for name, other in pairs.items())
    buffers = {name for name in section(first, "buffer_names", list) if isinstance(name, str)}
    rest = {name: leaf for name, leaf in module.items() if name in buffers or not isinstance(leaf, Stored)}
    await found.add_module(first, rest)
    if lost := sorted(map(str, module.keys() - known - frozen - pairs.keys() - rest.keys())):
        raise CorruptError(
            f"{folder.where} has no elements of {lost[0]!r} and {len(lost) - 1} more of the module's parameters; get "
            "the files again, or convert them with DeepSpeed's zero_to_fp32.py"
        )


async def _add_frozen(found: Found, folder: Folder, contents: Sequence[TorchContent]) -> set[str]:
    """Add frozen parameters, of which each rank's file of model states has a slice; return their names."""
    first = contents[0]
    frozen = first.value.get("frozen_param_shapes") or {}
    if not isinstance(frozen, Mapping):
        raise CorruptError(f"{first.where} has frozen_param_shapes that are no shapes; get the file again")
    if frozen and len(contents) != len(folder.optimizer):
        raise CorruptError(
            f"{folder.where} has model states of {len(contents)} ranks, and optimizer states of "
            f"{len(folder.optimizer)}; get the missing files"
        )
    for rank, content in enumerate(contents):
        slices = content.value.get("frozen_param_fragments") or {}
        tensors = {("model", str(name)): leaf for name, leaf in slices.items() if isinstance(leaf, Stored)}
        places = await content.places(tensors)
        for name, shape in frozen.items():
            length, numel = ceil(prod(shape) / len(contents)), prod(shape)
            tensor = tensors.get(("model", name))
            if tensor is None or prod(tensor.shape) != length:
                raise CorruptError(
                    f"{content.where} has no slice of {length} elements of the frozen parameter {name!r}; get it again"
                )
            begin = min(rank * length, numel)
            flat = Flat(tensor.dtype, length, content.key, places["model", name])
            found.pieces.append(flat.piece("model", name, shape, Run(rank, 0, 0, begin, min(begin + length, numel))))
    return set(frozen)


async def _add_whole(found: Found, content: TorchContent) -> None:
    """Add the states of stage 0: each rank has all of them, and rank 0 has saved them."""
    module = section(content, "module")
    await found.add_module(content, module)
    about = content.value.get("optimizer")
    if not isinstance(about, Mapping):
        return
    found.add_scaler(about, content.where)
    packed = about.get("optimizer_state_dict", about)
    if "fp32_groups_flat" in about or not is_packed(packed):
        raise CheckpointError(
            f"{content.where} has flat states of a 16-bit optimizer of stage 0, and no names of parameters: load it "
            "with DeepSpeed, and save it with bcp.save"
        )
    model = [(str(name), leaf) for name, leaf in module.items() if isinstance(leaf, Stored)]
    entries = list(packed_entries(_with_masters(packed, about, content.where), untied(model), content.where))
    await found.add_tensors(content, {(OPTIMIZER, name): leaf for name, leaf in entries if isinstance(leaf, Stored)})
    for name, leaf in entries:
        if not isinstance(leaf, Stored):
            found.add_value(name, leaf, content.where)


def _with_masters(packed: Mapping[str, Any], about: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the state of an optimizer with the masters of a 16-bit optimizer, which has them by group and place."""
    masters = about.get("fp32_groups")
    if masters is None:
        return dict(packed)
    groups = [group["params"] for group in packed["param_groups"]]
    is_sound = isinstance(masters, list) and all(isinstance(some, list) for some in masters)
    if not is_sound or [len(some) for some in masters] != [len(group) for group in groups]:
        raise CorruptError(f"{where} has masters and groups of other lengths; get the file again")
    state = {number: dict(packed["state"].get(number, {})) for group in groups for number in group}
    for group, some in zip(groups, masters, strict=True):
        for number, master in zip(group, some, strict=True):
            state[number][MASTER] = master
    return {**packed, "state": state}
