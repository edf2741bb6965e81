"""Extra states and dataloader states: one compact byte object each (paper sec. 3.2).

``collect`` takes a snapshot and ``pack`` turns it into bytes; ``unpack`` and ``restore`` are their inverses. Bytes are
read with ``torch.load(weights_only=True)`` unless the caller trusts them; numpy's numbers travel as tensors, so that
its random state needs no trust.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from bcp.errors import CheckpointError, StateError
from bcp.planners.archive import check_archive, check_paths
from bcp.planners.leaves import state_dict_of
from bcp.protocols import Stateful

__all__ = ["check_changeable", "collect", "pack", "restore", "unpack"]

_NUMPY_DTYPES = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
)
"""Those that torch has, too."""

_Path = tuple[Any, ...]


def collect(value: Any, where: str = "extra_states") -> Any:
    """Take a deep snapshot: later changes of ``value`` do not show in it.

    What has ``state_dict`` and ``load_state_dict``, at any level of mappings, lists and tuples, gives its state.
    Mappings become dicts. Tensors are copied to the CPU.

    Raises:
        StateError: a tensor in it is a DTensor or on the meta device: extra states are this rank's own, whole values;
            or a ``state_dict()`` raised, or a value cannot be copied, or contains itself.

    """
    try:
        return _collected(value, where)
    except RecursionError as error:
        raise StateError(f"{where} is nested too deep; does it contain itself?") from error


def _collected(value: Any, where: str) -> Any:
    """Do it, level by level."""
    if isinstance(value, Stateful):
        return _collected(state_dict_of(value, where), where)
    if isinstance(value, torch.Tensor):
        return _plain(value, where).to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _collected(child, f"{where}.{key}") for key, child in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        items = [_collected(child, f"{where}.{index}") for index, child in enumerate(value)]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, np.ma.MaskedArray):
        raise StateError(
            f"{where} is a masked array, of which only the values would be kept; pass its data and its mask"
        )
    try:
        return copy.deepcopy(value)
    except RecursionError:
        raise
    except Exception as error:
        raise StateError(
            f"{where} is a {type(value).__name__} that cannot be copied: {type(error).__name__}: {error}; "
            "pass plain values"
        ) from error


def pack(obj: Any, where: str = "extra_states") -> bytes:
    """Serialize a snapshot into one byte object.

    Raises:
        StateError: something in it cannot be pickled, or is a DTensor or on the meta device.

    """
    arrays: dict[_Path, bool] = {}
    out = io.BytesIO()
    try:
        value = _without_arrays(obj, (), arrays, where)
        torch.save({"value": value, "arrays": list(arrays.items())}, out)
    except StateError:
        raise
    except Exception as error:
        raise StateError(f"{where} cannot be serialized: {type(error).__name__}: {error}; pass plain values") from error
    return out.getvalue()


def unpack(data: bytes | bytearray | memoryview, *, trust: bool, where: str) -> Any:
    """Read what :func:`pack` wrote; tensors are on the CPU.

    Args:
        data: the bytes.
        trust: unpickle anything, which may run code. Only for checkpoints that you wrote.
        where: what is read, for messages.

    Raises:
        CheckpointError: the bytes are damaged, or hold objects that only ``trust=True`` reads.

    """
    try:
        stream = io.BytesIO(data)
        check_archive(stream)
        stream.seek(0)
        packed = torch.load(stream, map_location="cpu", weights_only=not trust)
        check_paths((path for path, _ in packed["arrays"]), len(data))
        return _with_arrays(packed["value"], dict(packed["arrays"]))
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        reason = next((line.strip() for line in lines if "Unsupported" in line), lines[0])
        advice = "" if trust else "; if you wrote this checkpoint yourself, trust=True reads objects of any class"
        raise CheckpointError(f"{where} cannot be read: {type(error).__name__}: {reason}{advice}") from error


def restore(target: Any, loaded: Any, where: str = "extra_states") -> None:
    """Put a loaded value back into ``target``, in place.

    Mappings are updated key by key (keys that the checkpoint lacks stay, new ones are added), lists take the loaded
    items, what is :class:`~bcp.protocols.Stateful` takes its state; other values are replaced where they stand, a
    tensor of the same shape and dtype by copying into it.

    Raises:
        StateError: ``target`` itself cannot be changed, or not into what was loaded.

    """
    check_changeable(target, where)
    if _restored(target, loaded, where) is not target:
        raise _unchangeable(target, where, f"a loaded {type(loaded).__name__}")


def check_changeable(target: object, where: str) -> None:
    """Look whether :func:`restore` may put anything back into ``target``, before it is known what.

    Raises:
        StateError: nothing can be.

    """
    if not isinstance(target, (Stateful, MutableMapping, list, torch.Tensor)):
        raise _unchangeable(target, where, "what is loaded")


def _unchangeable(target: object, where: str, loaded: str) -> StateError:
    return StateError(
        f"{where} is a {type(target).__name__} and cannot take {loaded} in place; pass a dict, a list, or an object "
        "with load_state_dict"
    )


def _restored(target: Any, loaded: Any, where: str) -> Any:
    """Return ``target`` after it took the loaded value, or the value that is to stand in its place."""
    if isinstance(target, Stateful):
        return _stateful_restored(target, loaded, where)
    if isinstance(target, MutableMapping) and isinstance(loaded, Mapping):
        for key, value in loaded.items():
            target[key] = _restored(target[key], value, f"{where}.{key}") if key in target else value
        return target
    if isinstance(target, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return _sequence_restored(target, loaded, where)
    if isinstance(target, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return _tensor_restored(target, loaded)
    return loaded


def _stateful_restored(target: Stateful, loaded: Any, where: str) -> Stateful:
    """Give a state to its owner; what that raises says which one it was."""
    try:
        target.load_state_dict(loaded)
    except Exception as error:
        error.add_note(f"bcp: raised while the {type(target).__name__} at {where} took its state")
        raise
    return target


def _sequence_restored(target: Any, loaded: Any, where: str) -> Any:
    """Restore item by item where both have equally many, so that a list of schedulers works; else take the items."""
    items = list(loaded)
    if len(target) == len(items):
        pairs = enumerate(zip(target, loaded, strict=True))
        items = [_restored(old, new, f"{where}.{index}") for index, (old, new) in pairs]
    if isinstance(target, list):
        target[:] = items
        return target
    return tuple(items) if type(target) is tuple else loaded


def _tensor_restored(target: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Copy into a tensor of the same kind, so that others who hold it see the value; else return the loaded one."""
    if target.shape != loaded.shape or target.dtype != loaded.dtype or target.is_meta:
        return loaded
    with torch.no_grad():
        target.copy_(loaded)
    return target


def _plain(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Refuse a tensor that is not whole here; return any other without its autograd history."""
    if isinstance(tensor, DTensor):
        raise StateError(f"{where} is a DTensor; put it under states['model'], which reshards it, or pass to_local()")
    if tensor.is_meta:
        raise StateError(f"{where} is on the meta device and has no values; materialise it with to_empty() first")
    return tensor.detach()


def _without_arrays(value: Any, path: _Path, arrays: dict[_Path, bool], where: str) -> Any:
    """Return the value with numpy's numbers as tensors; note where they were, and whether they were scalars."""
    if isinstance(value, torch.Tensor):
        plain = _plain(value, where)
        whole = plain.layout is not torch.strided or plain.untyped_storage().nbytes() == plain.nbytes
        return plain if whole else plain.clone()  # torch.save would store all of the memory that a view looks into
    if isinstance(value, (np.ndarray, np.generic)) and str(value.dtype) in _NUMPY_DTYPES:
        arrays[path] = isinstance(value, np.generic)
        return torch.from_numpy(np.array(value))
    if type(value) is dict:
        return {k: _without_arrays(child, (*path, k), arrays, f"{where}.{k}") for k, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_arrays(child, (*path, i), arrays, where) for i, child in enumerate(value))
    return value


def _with_arrays(value: Any, arrays: Mapping[_Path, bool]) -> Any:
    """Undo :func:`_without_arrays`; only containers on the way to an array are visited.

    A hostile value may contain one list in many places: 1.8 KB of 40 such levels would take a walk of 2^40 steps.
    """
    if () in arrays:
        array = value.numpy()
        return array[()] if arrays[()] else array
    below: dict[Any, dict[_Path, bool]] = {}
    for (key, *rest), scalar in arrays.items():
        below.setdefault(key, {})[tuple(rest)] = scalar
    if below and type(value) in (dict, list, tuple):
        items = value.copy() if type(value) is dict else list(value)
        for key, inside in below.items():
            with suppress(LookupError):  # a key that is not equal to itself, as nan
                items[key] = _with_arrays(items[key], inside)
        return tuple(items) if type(value) is tuple else items
    return value
