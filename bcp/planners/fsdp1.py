"""The planner for FSDP1 (``FullyShardedDataParallel``): flat parameters, read where they lie and never gathered.

FSDP1 lays the parameters of a unit end to end, pads them, and gives each rank one equal part of that. So of every
original parameter a rank has one flat interval, or nothing, inside of its local shard (paper sec. 4.4, Fig. 7).
"""

# ruff: noqa: SLF001 -- FSDP1 documents nothing of this; probe() checks that it is there
from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bcp.errors import InputError, MismatchError, StateError
from bcp.plan.box import Box
from bcp.plan.read.renamed import CheckpointNames
from bcp.planners.torch_native import PlainPlanner
from bcp.protocols import ObjectKey, States
from bcp.runtime.imports import importing
from bcp.state.detection import InspectedStates
from bcp.state.dtensor import is_dtensor
from bcp.state.hooks import is_sharded_tensor
from bcp.state.inventory import Leaves, probe
from bcp.state.load_path import customs_of, save_customs_of
from bcp.state.modules import Finish, ParamNames, add_module, add_state, in_turn, is_fsdp1, is_fsdp1_type
from bcp.state.names import cleaner, dotted, walk
from bcp.state.optimizers import OPTIMIZER, Slot, optimizers_in, slots_of
from bcp.state.placement import LocalInterval, Placement, ShardedLeaf

if TYPE_CHECKING:  # as a torch without FSDP1 will do for everything else
    from torch.distributed.fsdp._flat_param import FlatParamHandle, _ShardParamInfo

__all__ = ["Fsdp1Planner", "holds_fsdp1"]

_HANDLE = ("uses_sharded_strategy", "needs_unshard", "reshard")
_SHARD = ("offset_in_shard", "intra_param_start_idx", "intra_param_end_idx")
_FLAT = (
    *("_param_infos", "_shared_param_infos", "_shard_param_infos", "_fqns", "_shapes", "_strides", "_params"),
    *("_param_extensions", "_sharded_size", "_full_param_padded"),
)
"""Private attributes of FSDP1's classes that the planner uses."""

_FLAT_NAME = "_flat_param"
"""By this name a module has its flat parameter among its parameters, where ``use_orig_params`` is false."""

_Managed = Mapping[int, Mapping[str, ShardedLeaf]]
"""By id of the module, by name in it: where a parameter is that the module itself may have nothing of."""


class Fsdp1Planner(PlainPlanner):
    """Parameters and optimizer states are views of FSDP's own sharded memory, in full precision.

    ``state_dict()``, which gathers every unit, is not called. The planner reads the parameters, buffers and extra state
    of each module, and loads the extra state of each module by itself. Modules with hooks or overrides of
    ``state_dict`` and ``load_state_dict`` are refused where FSDP1 has cut their parameters. Any sharding strategy,
    mixed precision and either ``use_orig_params`` will do, before the first forward and between forward and backward,
    too. Padding is never stored.

    A load writes into the same views, and drops the unsharded copies that FSDP may have kept, as after a forward
    without gradients. Without ``use_orig_params`` the optimizer counts the steps of a whole unit as one.
    """

    name = "fsdp1"
    fills_meta = False

    def probe(self) -> str:
        """Return the running and the tested versions. Raises InputError if torch lacks a private attribute."""
        super().probe()
        try:
            with importing:
                from torch.distributed.fsdp import _flat_param as flat  # noqa: PLC0415 -- where nobody uses it, not at all
        except ImportError as error:
            raise InputError(f"this torch, {torch.__version__}, has no FSDP1 that bcp could read: {error}") from error
        tested = probe({flat.FlatParamHandle: _HANDLE, flat._ShardParamInfo: _SHARD}, self.name)
        stated = flat.FlatParameter.__annotations__  # only instances have them
        if missing := [name for name in _FLAT if name not in stated]:
            raise InputError(f"{tested}, whose FlatParameter has no {', '.join(missing)}; pin torch or upgrade bcp")
        return tested

    def _add_model(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Finish:
        """Add the leaves of modules themselves, and the local intervals of flat parameters."""
        if states.get("model") is None:
            return super()._add_model(leaves, states, saved)
        return add_state(leaves, "model", states["model"], _add_module)

    def _slots(self, leaves: Leaves, states: States, saved: CheckpointNames | None = None) -> Sequence[Slot] | None:
        """Find the slots of the optimizers: of a flat parameter, one for each parameter in it."""
        optimizers = optimizers_in(states.get(OPTIMIZER))
        if optimizers is None:
            _check_placed(states.get(OPTIMIZER))
            return super()._slots(leaves, states, saved)
        placed = _placed(leaves)
        names = ParamNames(leaves, states.get("model"), saved)
        slots = slots_of(optimizers, lambda parameter: [""] if id(parameter) in placed else names(parameter))
        return [
            parameter_slot for slot in slots for parameter_slot in _named(slot, placed.get(id(slot.parameter)), names)
        ]

    def _settle(self, states: States, objects: Mapping[ObjectKey, Any]) -> None:
        """Drop caches that still have the values from before the load."""
        super()._settle(states, objects)
        for module in _modules(states):
            for handle in _handles(module):
                _drop_unsharded(handle)


def holds_fsdp1(states: States) -> bool:
    """Whether a module of the model is, or contains, a ``FullyShardedDataParallel``."""
    return any(map(is_fsdp1_type, {type(part) for part in InspectedStates.of(states).modules}))


def _modules(states: States) -> Iterator[nn.Module]:
    """Yield the modules of the model, which may stand in containers."""
    leaves = (leaf for _, leaf in walk(states.get("model"), "states['model']"))
    yield from (leaf for leaf in leaves if isinstance(leaf, nn.Module))


def _handles(module: nn.Module) -> Iterator[FlatParamHandle]:
    """Yield the handles of a module's flat parameters; an FSDP module without parameters of its own has none."""
    for part in module.modules():
        handle: Any = getattr(part, "_handle", None) if is_fsdp1(part) else None
        if handle is not None:
            yield handle


# -- the model --------------------------------------------------------------------------------


def _add_module(leaves: Leaves, kind: str, module: nn.Module, prefix: str) -> Finish:
    """Take the leaves of a module with FSDP modules in it, or without any.

    Modules with hooks or overrides of ``state_dict`` or ``load_state_dict`` are taken whole by these, unless FSDP1 has
    a part of their parameters. Raises StateError then.
    """
    clean, managed = cleaner(module), _managed(module)
    finishes, apart = [], _apart(module, managed, loading=leaves.loading)
    for path, part in module.named_modules(remove_duplicate=False):
        path_prefix, managed_leaves = f"{path}." if path else "", managed.get(id(part), {})
        if path_prefix in apart:
            finishes.append(add_module(leaves, kind, part, prefix + clean(path_prefix)))
        if any(map(path_prefix.startswith, apart)):
            continue
        for name, leaf in managed_leaves.items():
            leaves.add(kind, prefix + clean(path_prefix + name), leaf)
        own = _own_state(part, path_prefix, {*managed_leaves, _FLAT_NAME})
        named = {raw: (prefix + clean(raw), value) for raw, value in own.items()}
        finishes.append(_add_own(leaves, kind, part, path_prefix, named))
    return in_turn(finishes)


def _apart(module: nn.Module, managed: _Managed, *, loading: bool) -> tuple[str, ...]:
    """Return the raw prefixes of the outermost modules with hooks or overrides of their own.

    Raises StateError if FSDP1 manages parameters inside of one.
    """
    found = {**save_customs_of(module), **(customs_of(module).all if loading else {})}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if prefix in found and any(managed.get(id(inside)) for inside in part.modules()):
            raise StateError(
                f"states['model']: {found[prefix]} cannot run on parameters that FSDP1 has cut: bcp gathers none. "
                "Use FSDP2 (fully_shard), or remove it before the call"
            )
    return tuple(sorted(prefix for prefix in found if not any(prefix != p and prefix.startswith(p) for p in found)))


def _own_state(part: nn.Module, path_prefix: str, without: Collection[str]) -> dict[str, Any]:
    """Return one module's own leaves except ``without``. Raises StateError, from its error, if the module raised."""
    own: dict[str, Any] = {}
    try:
        part._save_to_state_dict(own, path_prefix, keep_vars=True)
    except Exception as error:
        raise StateError(
            f"the {type(part).__name__} {path_prefix[:-1]!r} raised {type(error).__name__}: {error} when asked for its "
            "state; repair it, or leave it out of the states"
        ) from error
    return {raw: value for raw, value in own.items() if raw.removeprefix(path_prefix) not in without}


def _add_own(
    leaves: Leaves, kind: str, part: nn.Module, path_prefix: str, own: Mapping[str, tuple[str, Any]]
) -> Finish:
    """Add the leaves of one module itself: (FQN, value) by the module's own name, which begins with ``path_prefix``.

    Tensors that it made for the save, and extra state, go back by its own name.
    """
    memory = {id(tensor) for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
    takes = {f"{path_prefix}{name}" for name in (*part._parameters, *part._buffers)}
    takes |= {f"{path_prefix}_extra_state"} if type(part).set_extra_state is not nn.Module.set_extra_state else set()
    if leaves.loading:
        leaves.refuse([], [f"{kind}: {fqn}" for raw, (fqn, _) in own.items() if raw not in takes])
    made: dict[str, torch.Tensor] = {}
    for raw, (fqn, value) in own.items():
        if not isinstance(value, torch.Tensor) or raw == f"{path_prefix}_extra_state":
            leaves.add_object(kind, fqn, value)
            continue
        leaves.add(kind, fqn, value)
        if id(value) not in memory:
            made[raw] = value

    def finish(objects: Mapping[ObjectKey, Any]) -> None:
        state = {**made, **{raw: objects[kind, fqn] for raw, (fqn, _) in own.items() if (kind, fqn) in objects}}
        wrong: list[str] = []
        label = f"{type(part).__name__} {path_prefix[:-1]!r}"
        try:
            if state:
                part._load_from_state_dict(state, path_prefix, {}, False, [], [], wrong)  # noqa: FBT003 -- torch's signature
        except Exception as error:
            raise MismatchError(
                f"{label} raised {type(error).__name__}: {error} when it was given its state; repair it"
            ) from error
        if wrong:
            raise MismatchError(f"{label} refused its state: {'; '.join(wrong)}; build the target as it was saved")

    return finish


def _managed(module: nn.Module) -> _Managed:
    """Find every parameter that FSDP1 manages; one of several names is one leaf, in whichever unit the names are."""
    managed: dict[int, dict[str, ShardedLeaf]] = {}
    originals: dict[int, ShardedLeaf] = {}
    for handle in _handles(module):
        flat = handle.flat_param
        where = [managed.setdefault(id(owner), {}) for _, owner, _ in flat._param_infos]
        for index, (name, *_) in enumerate(flat._param_infos):
            where[index][name] = _leaf(handle, index)
            originals |= {} if flat._params is None else {id(flat._params[index]): where[index][name]}
        for name, owner, _, first_name, first_owner, _ in flat._shared_param_infos:
            managed.setdefault(id(owner), {})[name] = managed[id(first_owner)][first_name]
    for part in module.modules():
        managed_leaves = managed.setdefault(id(part), {})
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) in originals:  # another unit's, which FSDP1 does not take a second time
                managed_leaves.setdefault(name, originals[id(parameter)])
    return managed


def _leaf(handle: FlatParamHandle, index: int) -> ShardedLeaf:
    """Return the local interval of one original parameter, as a part of the tensor that the optimizer steps.

    Raises StateError if the interval cannot be told, or FSDP1 is at work right now.
    """
    _check_readable(handle, index)
    flat = handle.flat_param
    shape = tuple(flat._shapes[index])
    first, stop, offset = _interval(flat._shard_param_infos[index])
    if flat._params is None:
        return ShardedLeaf(
            flat, Placement(shape, tuple(flat._sharded_size), (LocalInterval(Box.whole(shape), first, stop, offset),))
        )
    local = (stop - first,) if handle.uses_sharded_strategy else shape
    return ShardedLeaf(flat._params[index], Placement(shape, local, (LocalInterval(Box.whole(shape), first, stop),)))


def _interval(info: _ShardParamInfo) -> tuple[int, int, int]:
    """Return (start, stop, offset in the local shard) of the part of a parameter that is here; 0 where none is."""
    offset, first, last = info.offset_in_shard, info.intra_param_start_idx, info.intra_param_end_idx
    return (0, 0, 0) if offset is None or first is None or last is None else (first, last + 1, offset)


def _check_readable(handle: FlatParamHandle, index: int) -> None:
    """Raise StateError where the local shard does not have plain row-major intervals of a parameter right now."""
    flat = handle.flat_param
    label = f"the parameter {flat._fqns[index]!r} of the FSDP1 unit {type(handle._fully_sharded_module).__name__}"
    if handle._training_state.name != "IDLE":
        raise StateError(
            f"{label} is in use ({handle._training_state.name.lower()}); save and load outside of forward, backward "
            "and summon_full_params"
        )
    if flat._param_extensions[index] is not None:
        raise StateError(
            f"{label} is a piece of a DTensor: FSDP1 over tensor parallelism is not supported; use FSDP2 (fully_shard)"
        )
    if not _is_row_major(tuple(flat._shapes[index]), tuple(flat._strides[index])):
        raise StateError(
            f"{label} had strides {flat._strides[index]} when FSDP1 flattened it: its shards are not in row-major "
            "order; make it contiguous before wrapping it"
        )


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether memory of such strides is in row-major order without gaps."""
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return all(n <= 1 or have == want for n, have, want in zip(shape, stride, rows, strict=True)) or 0 in shape


def _drop_unsharded(handle: FlatParamHandle) -> None:
    """Let FSDP1 gather a unit anew when it is needed; it would go on with the values that it still has."""
    kept = handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded")
    if kept and not handle.needs_unshard():
        handle.reshard(free_unsharded_flat_param=True)


# -- the optimizer ----------------------------------------------------------------------------


def _check_placed(state: object) -> None:
    """Raise StateError for an optimizer state dict with tensors that do not say which part of a parameter they are.

    ``optim_state_dict()`` under ``SHARDED_STATE_DICT`` gives ShardedTensors or DTensors, and 0-d step counts.
    """
    for path, leaf in walk(state, f"states[{OPTIMIZER!r}]"):
        if isinstance(leaf, torch.Tensor) and not (is_sharded_tensor(leaf) or is_dtensor(leaf) or leaf.dim() == 0):
            raise StateError(
                f"states['optimizer'] is no torch optimizer: of the tensor {dotted(path)!r} in a state dict it cannot "
                "be told which part of which parameter it is; pass the optimizer itself, or the state dict that "
                "FullyShardedDataParallel.optim_state_dict() makes under SHARDED_STATE_DICT"
            )


def _placed(leaves: Leaves) -> dict[int, list[tuple[ShardedLeaf, list[str]]]]:
    """Return the parts of the stepped tensors, by their ids: each with its names in the model."""
    placed: dict[int, dict[int, tuple[ShardedLeaf, list[str]]]] = {}
    for fqn, leaf in leaves.tensors.get("model", {}).items():
        if isinstance(leaf, ShardedLeaf):
            parts = placed.setdefault(id(leaf.tensor), {})
            parts.setdefault(id(leaf), (leaf, []))[1].append(fqn)
    return {tensor: list(parts.values()) for tensor, parts in placed.items()}


def _named(
    slot: Slot, parts: Iterable[tuple[ShardedLeaf, list[str]]] | None, param_names: ParamNames
) -> Iterator[Slot]:
    """Yield the slots of a stepped tensor: itself, or one for each parameter of which it has a part.

    A parameter without local data is never stepped, and has no states.
    """
    if parts is None:
        yield slot
        return
    for leaf, names in parts:
        fqn, *tied = param_names.in_order(names)
        nothing = not slot.parameter.numel() and math.prod(leaf.placement.shape) > 0
        state = None if nothing else slot.state
        yield replace(slot, fqn=fqn, tied=tied, placement=leaf.placement, state=state)
