"""What DeepSpeed keeps of each parameter on this rank, as flat intervals: weights, fp32 masters, optimizer states.

ZeRO-3 cuts every parameter into equal runs; ZeRO-1, ZeRO-2 and BF16_Optimizer lay all parameters of a group in a row
and cut that. Both times it is one 1-D fp32 tensor that the inner torch optimizer steps, and a parameter is an
interval of it. Nothing here imports DeepSpeed, gathers or copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from bcp.errors import StateError
from bcp.plan.box import Box
from bcp.planners.leaves import Leaves, state_dict_of
from bcp.planners.model import Finish
from bcp.planners.names import cleaner
from bcp.planners.placement import Leaf, Placement, Sharded, Span
from bcp.protocols import ObjectKey

__all__ = ["Held", "add_partitioned", "held_by", "is_marked", "is_partitioned"]


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank's optimizer keeps of one parameter.

    Attributes:
        parameter: the model's.
        fp32: what the inner optimizer steps, and the key of its states: a partition of many parameters in a row, or
            the parameter's own fp32 copy.
        placement: where in the parameter ``fp32`` lies; None where it is all of it.
        group: the inner optimizer's group with the hyper-parameters.
    """

    parameter: nn.Parameter
    fp32: torch.Tensor
    placement: Placement | None
    group: dict[str, Any]

    @property
    def master(self) -> Leaf | None:
        """The fp32 master; None where the model's own memory is what is stepped."""
        weights: torch.Tensor = getattr(self.parameter, "ds_tensor", self.parameter)
        if self.fp32.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr():
            return None
        return Sharded(self.fp32, self.placement) if self.placement else self.fp32


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 keeps a run of the parameter on each rank."""
    return hasattr(parameter, "ds_tensor")


def is_marked(parameter: nn.Parameter) -> bool:
    """Whether a ZeRO optimizer has taken the parameter over."""
    return is_partitioned(parameter) or hasattr(parameter, "_hp_mapping")


def held_by(optimizer: Any) -> Iterator[Held]:
    """Yield what a DeepSpeed optimizer keeps of every parameter that it steps, also where this rank has none of it.

    Raises:
        StateError: it is none that can be read.

    """
    for mark, read in _READERS.items():
        if hasattr(optimizer, mark):
            return read(optimizer)
    raise StateError(
        f"states['optimizer'] leads to a {type(optimizer).__name__}, of which it is not known where it keeps its "
        "states; leave it out of the states where the engine does not train"
    )


def add_partitioned(leaves: Leaves, module: nn.Module) -> Finish:
    """Take the leaves of a module under ZeRO-3: of parameters this rank's run, of buffers everything.

    A parameter that is whole at the moment, as small (persistent) ones always are between steps, is loaded there too.

    Raises:
        StateError: a parameter is being gathered, or two leaves have one name.

    """
    clean, placed, names = cleaner(module), {}, {}
    for raw, value in state_dict_of(module, "states['model']", keep_vars=True).items():
        name: ObjectKey = ("model", clean(raw))
        if not isinstance(value, torch.Tensor) or raw.rpartition(".")[2] == "_extra_state":
            leaves.add_object(*name, value)
            names[raw] = name
        elif isinstance(value, nn.Parameter) and is_partitioned(value):
            if id(value) not in placed:
                placed[id(value)] = _run_of(value, name[1])
            leaves.add(*name, placed[id(value)])
            if _is_whole(value):
                leaves.also(*name, value.data)
        else:
            leaves.add(*name, value)

    def finish(objects: Any) -> None:
        _drop_second_copies(module)
        state = {raw: objects[name] for raw, name in names.items() if name in objects}
        if state:
            module.load_state_dict(state, strict=False)

    return finish


def _is_whole(parameter: Any) -> bool:
    """Whether all of a ZeRO-3 parameter is in ``data`` at the moment, as a copy."""
    return bool(parameter.ds_status.name == "AVAILABLE")


def _drop_second_copies(module: Any) -> None:
    """Let ZeRO++ (``zero_hpz_partition_size``) make its second copies anew of the runs, as it does after a step."""
    for parameter in module.parameters():
        parameter.ds_secondary_tensor = None


def _run_of(parameter: Any, fqn: str) -> Sharded:
    """Return this rank's run of a ZeRO-3 parameter's weights."""
    if parameter.ds_status.name == "INFLIGHT":
        raise StateError(f"ZeRO-3 is gathering {fqn!r} at the moment; save and load between steps")
    return Sharded(parameter.ds_tensor, _run_in(parameter, tuple(parameter.ds_tensor.shape)))


def _run_in(parameter: Any, local: tuple[int, ...], at: int = 0) -> Placement:
    """Place this rank's run of a ZeRO-3 parameter in a local tensor; the last ranks' runs are short, or empty."""
    shape, length = tuple(parameter.ds_shape), parameter.ds_tensor.ds_numel
    start = min(distributed.get_rank(parameter.ds_process_group) * length, parameter.ds_numel)
    return Placement(shape, local, (Span(Box.whole(shape), start, min(start + length, parameter.ds_numel), at),))


def _zero3(optimizer: Any) -> Iterator[Held]:
    """Read ZeRO-3: per sub-group one tensor of the padded runs of its parameters."""
    partitions = zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)
    for number, (parameters, fp32) in enumerate(partitions):
        group, at = optimizer.optimizer.param_groups[optimizer.sub_group_to_group_id[number]], 0
        for parameter in parameters:
            yield Held(parameter, fp32, _run_in(parameter, tuple(fp32.shape), at), group)
            at += parameter.ds_tensor.ds_numel


def _zero12(optimizer: Any) -> Iterator[Held]:
    """Read ZeRO-1 and ZeRO-2."""
    return _rows(
        optimizer, optimizer.bit16_groups, optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups
    )


def _bf16(optimizer: Any) -> Iterator[Held]:
    """Read BF16_Optimizer, which is what ZeRO-1 is with bf16 weights and fp32 gradients."""
    return _rows(optimizer, optimizer.bf16_groups, optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition)


def _fused(optimizer: Any) -> Iterator[Held]:
    """Read FP16_Optimizer (stage 0): per group all parameters in a row, whole on every rank."""
    return _rows(optimizer, optimizer.fp16_groups, optimizer.fp16_groups_flat, optimizer.fp32_groups_flat)


def _rows(optimizer: Any, groups: Any, rows: Any, partitions: Any) -> Iterator[Held]:
    """Read groups whose weights lie in a row, of which the fp32 partitions of the ranks are equal lengths.

    Where a parameter lies in the row is read from its memory. DeepSpeed's own record, ``_hp_mapping``, is of other
    elements with ``round_robin_gradients`` (0.19.8), which lays the parameters in another order than it assumes.
    """
    per_group = zip(groups, rows, partitions, optimizer.optimizer.param_groups, strict=True)
    for number, (parameters, row, fp32, group) in enumerate(per_group):
        ranks = getattr(optimizer, "real_dp_process_group", None)
        low = distributed.get_rank(ranks[number]) * fp32.numel() if ranks else 0
        for parameter in parameters:
            shape, begin = tuple(parameter.shape), parameter.storage_offset() - row.storage_offset()
            if parameter.untyped_storage().data_ptr() != row.untyped_storage().data_ptr():
                raise StateError(
                    f"a parameter of shape {list(shape)} lies elsewhere than where DeepSpeed put it; "
                    "change weights in place, without setting .data"
                )
            start = min(max(low - begin, 0), parameter.numel())
            stop = min(max(low + fp32.numel() - begin, start), parameter.numel())
            span = Span(Box.whole(shape), start, stop, max(begin - low, 0) if stop > start else 0)
            yield Held(parameter, fp32, Placement(shape, tuple(fp32.shape), (span,)), group)


def _unfused(optimizer: Any) -> Iterator[Held]:
    """Read FP16_UnfusedOptimizer (stage 0): an fp32 copy of every parameter, whole on every rank."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, optimizer.optimizer.param_groups, strict=True)
    for parameters, masters, group in groups:
        for parameter, fp32 in zip(parameters, masters, strict=True):
            yield Held(parameter, fp32, None, group)


_READERS: dict[str, Callable[[Any], Iterator[Held]]] = {
    "fp32_partitioned_groups_flat": _zero3,
    "single_partition_of_fp32_groups": _zero12,
    "fp32_groups_flat_partition": _bf16,
    "fp32_groups_flat": _fused,
    "fp32_groups": _unfused,
}
"""By the attribute in which an optimizer keeps its fp32 tensors."""
