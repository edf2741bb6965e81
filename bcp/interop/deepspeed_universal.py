"""Universal checkpoints of DeepSpeed by reference: a folder for each parameter, with a file for each state of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.interop.catalogue import Piece
from bcp.interop.deepspeed_names import DEEPSPEED_NAMES, UNIVERSAL, Folder, Shape, section, shapes_of
from bcp.interop.found import MASTER, OPTIMIZER, Found
from bcp.interop.reading import at_once
from bcp.interop.torch_content import TorchContent, torch_content
from bcp.interop.torch_pickle import Stored

__all__ = ["add_universal"]

WEIGHTS = "fp32.pt"
COMMON = "optimizer_state.pt"


async def add_universal(found: Found, folder: Folder, contents: Sequence[TorchContent]) -> None:
    """Add the tensors and values of a universal checkpoint.

    Weights are those of the module's file, if it has them whole. Else they are the masters.

    Raises:
        CheckpointError: a tensor has no known shape, or a pickle has other classes.
        CorruptError: a file is missing or damaged.

    """
    below = folder.prefix + UNIVERSAL
    keys = [key for key in folder.universal if key != below + COMMON]
    files = await at_once(folder.opened.backend, keys, lambda key: torch_content(folder.opened, key, DEEPSPEED_NAMES))
    parameters: dict[str, dict[str, TorchContent]] = defaultdict(dict)
    for key, content in zip(keys, files, strict=True):
        name, _, state = key.removeprefix(below).rpartition("/")
        parameters[name][state] = content
    shapes, groups = _shapes(contents)
    module = section(contents[0], "module")
    whole = await _add_module(found, contents)
    for name, states in parameters.items():
        if WEIGHTS not in states:
            raise CorruptError(f"{folder.where} has {UNIVERSAL}{name}, and no {WEIGHTS} in it; get the files again")
        if name in shapes or name not in whole:
            await _add(found, name, states, (shapes.get(name), module.get(name), name in whole))
    lacking = sorted(shapes.keys() - parameters.keys())
    if lacking:
        raise CorruptError(f"{folder.where} has no {UNIVERSAL}{lacking[0]} and {len(lacking) - 1} more; get it again")
    await _add_common(found, folder, groups, parameters)


def _shapes(contents: Sequence[TorchContent]) -> tuple[dict[str, Shape], list[list[str]]]:
    """Return the shapes of parameters on one rank, and the names of each group."""
    shapes: dict[str, Shape] = {}
    groups: list[list[str]] = []
    for content in contents:
        for at, group in enumerate(shapes_of(content)):
            groups.extend([] for _ in range(at + 1 - len(groups)))
            groups[at].extend(name for name in group if name not in shapes)
            shapes.update(group)
    return shapes, groups


async def _add_module(found: Found, contents: Sequence[TorchContent]) -> set[str]:
    """Add what the module's file has whole: all of it in stages 1 and 2, else buffers; return the names."""
    first = contents[0]
    module = section(first, "module")
    buffers = section(first, "buffer_names", list)
    known = shapes_of(first)
    trained = {name for group in known for name in group}
    is_whole = len(contents) == 1 and all(
        isinstance(leaf, Stored) and leaf.shape == group[name]
        for group in known
        for name in group
        if (leaf := module.get(name)) is not None
    )
    kept = {name: leaf for name, leaf in module.items() if is_whole or name in buffers or not isinstance(leaf, Stored)}
    await found.add_module(first, kept)
    tied = first.value.get("shared_params") or {}
    found.tied.update((("model", name), other) for name, other in tied.items() if name not in kept and other in trained)
    lost = sorted(map(str, module.keys() - kept.keys() - trained - tied.keys()))
    if lost:
        raise CheckpointError(
            f"{first.where} has no elements of {lost[0]!r} and {len(lost) - 1} more, which were not trained; a "
            "universal checkpoint leaves frozen parameters out: pass the folder that it was made of"
        )
    return set(kept)


async def _add(
    found: Found, name: str, states: Mapping[str, TorchContent], about: tuple[Shape | None, Any, bool]
) -> None:
    """Add the states of a parameter, and its weights if the module lacks them.

    ``about`` has the shape on one rank, the module's tensor, and whether this tensor is the weights.
    """
    shape, weight, is_whole = about
    for file, content in states.items():
        state, leaf = file.removesuffix(".pt"), content.value
        tensor = leaf.get("param") if isinstance(leaf, Mapping) else leaf
        if not isinstance(tensor, Stored):
            found.add_value(f"state.{name}.{state}", leaf, content.where)
            continue
        start = (await content.places({(OPTIMIZER, name): tensor}))[OPTIMIZER, name]
        own = () if file != WEIGHTS and not tensor.shape else _shape(tensor, shape, content.where)
        names = [(OPTIMIZER, f"state.{name}.{state}")]
        if file == WEIGHTS:
            is_master = not isinstance(weight, Stored) or weight.dtype != tensor.dtype
            names = [(OPTIMIZER, f"state.{name}.{MASTER}")] if is_master else []
            names += [] if is_whole else [("model", name)]
        found.pieces.extend(Piece.whole(*each, tensor.dtype, own, content.key, start) for each in names)


def _shape(tensor: Stored, shape: Shape | None, where: str) -> Shape:
    """Return the shape of a parameter. Stage 3 leaves tensors flat."""
    if len(tensor.shape) != 1 or shape is None or len(shape) == 1:
        return tensor.shape
    if prod(shape) != prod(tensor.shape):
        raise CheckpointError(
            f"{where} has {prod(tensor.shape)} elements in a row, and the shape of one rank's part is {list(shape)}: "
            "make the universal checkpoint anew with a newer DeepSpeed"
        )
    return shape


async def _add_common(
    found: Found, folder: Folder, groups: Sequence[Sequence[str]], parameters: Mapping[str, Mapping[str, Any]]
) -> None:
    """Add hyper-parameters, and counts of steps that stand by group."""
    key = folder.prefix + UNIVERSAL + COMMON
    if key not in folder.opened.sizes:
        raise CorruptError(f"{folder.where} has no {UNIVERSAL}{COMMON}; get the files again")
    content = await torch_content(folder.opened, key, DEEPSPEED_NAMES)
    about: Any = content.value
    inner = about.get("optimizer_state_dict", about) if isinstance(about, Mapping) else {}
    hyper, states = (inner.get(part) or () for part in ("param_groups", "state"))
    for group in hyper:
        members = group.get("params", ()) if isinstance(group, Mapping) else ()
        inside = [number for number in members if type(number) is int and 0 <= number < len(groups)]
        found.add_hyper((name for number in inside for name in groups[number]), group, content.where)
    for number, names in enumerate(groups):
        state = states.get(number) if isinstance(states, Mapping) else None
        step = state.get("step") if isinstance(state, Mapping) else None
        left = [name for name in names if "step.pt" not in parameters[name]]
        if isinstance(step, Stored) and left:
            await found.add_tensors(content, {(OPTIMIZER, f"state.{left[0]}.step"): step})
            found.tied.update(((OPTIMIZER, f"state.{name}.step"), f"state.{left[0]}.step") for name in left[1:])
        elif step is not None:
            for name in left:
                found.add_value(f"state.{name}.step", step, content.where)
    found.add_scaler(about, content.where)
