"""Folders of Megatron-core's ``torch_dist`` by reference: DCP's files, Megatron's keys, and ``common.pt`` beside them.

Names are those that a save of the model and the optimizer by bcp has: layers and experts have numbers in the name, and
no axis in the tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.format.foreign_files import unread
from bcp.interop.catalogue import Catalogue, Piece
from bcp.interop.dcp_files import METADATA, dcp_parts
from bcp.interop.dcp_metadata import DcpMetadata
from bcp.interop.dcp_names import Name
from bcp.interop.facts import facts_of
from bcp.interop.found import MASTER, OPTIMIZER, Found
from bcp.interop.reading import Opened
from bcp.interop.torch_content import TorchContent, torch_content
from bcp.interop.torch_pickle import TORCH_NAMES, Stored, Unread, value_text
from bcp.interop.unpickle import Allowed, Opaque, Record
from bcp.plan.numbered import axes_of, numbered

__all__ = ["is_megatron", "megatron_folder"]

COMMON, ABOUT = "common.pt", "metadata.json"
BACKEND = "torch_dist"
STATE = re.compile(r"(?:chained_(\d{1,9})\.)?optimizer\.state\.([^.]+)\.(.+)")
BUCKETS = re.compile(r"(?:chained_\d{1,9}\.)?optimizer\.distributed\..*")
SHARD = re.compile(r"(.+)/shard_([\d.]{1,200})_([\d.]{1,200})")
MASTERS = ("param", "fp32_param")
NOT_SAVED = ("step", "is_expert_parallel")
"""Entries of groups that a save of bcp has elsewhere, or not: see :mod:`bcp.planners.megatron.slots`."""

MOST_NUMBERS = 1 << 20
"""Layers and experts in one range of a file."""

COMMON_NAMES: Allowed = Opaque(
    {
        **TORCH_NAMES,
        ("argparse", "Namespace"): Record.named("Namespace"),
        ("types", "SimpleNamespace"): Record.named("SimpleNamespace"),
        ("signal", "Signals"): Record.named("Signals"),
    },
    ("megatron.",),
)
"""All names in ``common.pt``. Arguments of the job have classes of Megatron: they are records, and are left out."""


def is_megatron(keys: Iterable[str]) -> bool:
    """Whether a folder with these files may be one of Megatron."""
    return {METADATA, COMMON, ABOUT} <= set(keys)


async def megatron_folder(opened: Opened) -> Catalogue:
    """List the tensors and values of a folder.

    Raises:
        CheckpointError: the folder has another format of Megatron, or a pickle has other classes.
        CorruptError: a file is missing or damaged, or does not have what ``.metadata`` says.

    """
    about = await opened.read_json(ABOUT)
    backend = about.get("sharded_backend") if isinstance(about, Mapping) else None
    if backend != BACKEND:
        raise CheckpointError(
            f"{opened.path}/{ABOUT} says {str(backend)[:40]!r}, and bcp reads {BACKEND!r} of Megatron: load it with "
            "Megatron, and save it with --ckpt-format torch_dist"
        )
    made: list[_Names] = []

    def naming(meta: DcpMetadata) -> _Names:
        made.append(_Names(meta, opened.path))
        return made[0]

    parts = await dcp_parts(opened, naming)
    (names,) = made
    content = await torch_content(opened, COMMON, COMMON_NAMES)
    if not isinstance(content.value, Mapping):
        raise CorruptError(f"{content.where} has no dict; get the file again")
    found = Found(parts.pieces, parts.values, most=content.pickle_nbytes)
    left_out = [*names.left_out, *await _add_common(found, content, names.parameters)]
    if names.has_buckets:
        reason = unread(
            f"{opened.path}: the distributed optimizer's states are buckets (dp_reshardable), whose order only the job "
            "knows; load them with Megatron, and save with --dist-ckpt-optim-fully-reshardable, or load the model alone"
        )
        parameters = dict.fromkeys(piece.name for piece in found.pieces)
        found.values.update(((OPTIMIZER, f"state.{name}.step"), reason) for name in parameters)
    user = facts_of("megatron", content.value, {"optimizer"}, left_out)
    return Catalogue("megatron", found.pieces, opened.sizes, found.values, found.tied, ranks=parts.ranks, user=user)


class _Names:
    """Megatron's keys as names of bcp.

    Attributes:
        parameters: names of parameters with states, by the number of their optimizer in a chain.
        left_out: objects that are no states of the model.
        has_buckets: whether the optimizer's states have no names.
    """

    allowed: Allowed = MappingProxyType({**TORCH_NAMES, ("_io", "BytesIO"): Record.named("BytesIO")})

    def __init__(self, meta: DcpMetadata, where: str) -> None:
        self.parameters: dict[int, dict[str, None]] = defaultdict(dict)
        self.left_out: list[str] = []
        self.has_buckets = False
        self._where = where
        self._dtypes = {chunk.name: chunk.dtype for chunk in meta.chunks}
        if meta.is_flattened:
            raise CheckpointError(
                f"{where} has flattened ranges of Megatron-core before 0.16, whose shapes are not in the files: "
                "load it with Megatron, and save it with --dist-ckpt-optim-fully-reshardable"
            )

    def boxes(self, piece: Piece) -> Iterable[Piece]:
        """Return a box by the names of its layers and experts."""
        if BUCKETS.fullmatch(piece.name):
            self.has_buckets = True
            return
        match = STATE.fullmatch(piece.name)
        if match is None:
            yield from (replace(part, kind="model") for part in self._numbered(piece, piece.name))
            return
        chain, state, key = int(match[1] or 0), match[2], match[3]
        is_master = state in MASTERS
        for part in self._numbered(piece, key):
            self.parameters[chain][part.name] = None
            if not is_master or self._dtypes.get(key) != piece.dtype:  # else the weights are the masters
                name = f"state.{part.name}.{MASTER if is_master else state}"
                yield replace(part, kind=OPTIMIZER, name=name)

    def _numbered(self, piece: Piece, key: str) -> Iterator[Piece]:
        """Yield a piece for each layer or expert in a box."""
        axes = len(axes_of(key))
        if not axes or axes > len(piece.shape) or 0 in piece.length:
            yield replace(piece, name=key)
            return
        lengths, rest = piece.length[:axes], piece.length[axes:]
        if prod(lengths) > MOST_NUMBERS:
            raise CorruptError(f"{self._where}: {piece.name!r} has a range of {prod(lengths)} layers; get it again")
        step = prod(rest) * piece.itemsize
        ranges = (range(first, first + count) for first, count in zip(piece.offset[:axes], lengths, strict=True))
        for at, indices in enumerate(product(*ranges)):
            yield replace(
                piece,
                name=numbered(key, indices),
                shape=piece.shape[axes:],
                offset=piece.offset[axes:],
                length=rest,
                start=piece.start + at * step,
            )

    def value(self, name: str, value: Any, words: str, most: int) -> Iterable[tuple[Name, str]]:
        """Return an extra state of a module; empty ones are left out, as in a save of bcp."""
        match = SHARD.fullmatch(name)
        if BUCKETS.fullmatch(name):
            self.has_buckets = True
        elif match is None or not match[1].endswith("_extra_state"):
            self.left_out.append(name)
        elif (found := _extra_state(value, words)) not in (None, b""):
            yield ("model", _shard(*match.groups())), value_text(found, most, words)


def _extra_state(value: Any, words: str) -> Any:
    """Return an extra state: bytes, or a value; None if it is empty."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, Record) and value.name == "BytesIO" and isinstance(value.state, tuple) and value.state:
        return value.state[0]
    if isinstance(value, Stored):
        return Unread(f"{words} is a tensor of shape {list(value.shape)}") if value.nbytes else None
    return value


def _shard(key: str, offsets: str, shape: str) -> str:
    """Return the key of an object with the number of its layer in the name."""
    axes = len(axes_of(key))
    first, sizes = offsets.split("."), shape.split(".")
    if axes > len(first) or axes > len(sizes):
        return f"{key}/shard_{offsets}_{shape}"
    rest = ".".join(first[axes:]) or "0", ".".join(sizes[axes:]) or "1"
    return f"{numbered(key, list(map(int, first[:axes])))}/shard_{rest[0]}_{rest[1]}"


async def _add_common(found: Found, content: TorchContent, parameters: Mapping[int, Mapping[str, None]]) -> list[str]:
    """Add hyper-parameters and counts of steps. Return what groups of one optimizer have of their own.

    The groups do not say which parameters they have. So what all of them agree about is added to each parameter.
    """
    left_out: list[str] = []
    for chain, state in _optimizers(content.value.get("optimizer")):
        names, groups = list(parameters.get(chain, ())), _groups(state, content.where)
        keys = dict.fromkeys(key for group in groups for key in group)
        texts = [{key: value_text(group[key], found.most, content.where) for key in group} for group in groups]
        same = [key for key in keys if len({text.get(key) for text in texts}) == 1]
        found.add_hyper(names, {key: groups[0][key] for key in same if key not in NOT_SAVED}, content.where)
        left_out += [f"optimizer {chain}: {key} of {len(groups)} groups" for key in keys if key not in same]
        states = state.get("state")
        step = states.get("common_step") if isinstance(states, Mapping) else None
        if isinstance(step, Stored) and names:
            await found.add_tensors(content, {(OPTIMIZER, f"state.{names[0]}.step"): step})
            found.tied.update(((OPTIMIZER, f"state.{name}.step"), f"state.{names[0]}.step") for name in names[1:])
        elif "step" in same:
            for name in names:
                found.add_value(f"state.{name}.step", groups[0]["step"], content.where)
    return left_out


def _optimizers(state: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the inner optimizers' states by their numbers in a chain."""
    if not isinstance(state, Mapping):
        return
    chained = state if state and all(type(key) is int for key in state) else {0: state}
    for number, each in chained.items():
        inner = each.get("optimizer") if isinstance(each, Mapping) else None
        if isinstance(inner, Mapping):
            yield number, inner


def _groups(state: Mapping[str, Any], where: str) -> Sequence[Mapping[str, Any]]:
    groups = state.get("param_groups", [])
    if isinstance(groups, list):
        groups = list({id(group): group for group in groups}.values())  # a pickle may refer to one very often
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CorruptError(f"{where} has param_groups that are no groups; get the file again")
    return groups
