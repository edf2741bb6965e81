"""Files and pickles of DeepSpeed: names of files in a folder, and classes in the files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bcp.errors import CheckpointError, CorruptError
from bcp.format.foreign_files import is_inside
from bcp.interop.reading import Opened
from bcp.interop.torch_content import TorchContent
from bcp.interop.torch_pickle import TORCH_NAMES
from bcp.interop.unpickle import Allowed, Call, Record

__all__ = [
    "DEEPSPEED_NAMES",
    "MODEL",
    "STATES",
    "Folder",
    "Shape",
    "check_one_model",
    "deepspeed_roots",
    "is_deepspeed",
    "section",
    "shapes_of",
]

Shape = tuple[int, ...]
LATEST = ("latest", "latest_universal")
"""Files that name the newest folder beside them."""

MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_(\d{1,9})_optim_states\.pt")
OTHERS = re.compile(r"(layer_|expp_rank_).*_states\.pt|layer_.*expert_.*\.pt")
"""Files of layers of a pipeline, and of experts."""

UNIVERSAL = "zero/"
MOST_NAME_BYTES = 4096
STATES = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "universal_checkpoint_info",
}
"""Keys of a file of model states that are no facts."""


def _tensor(function: Any, kind: Any, arguments: Any, _: Any) -> Any:
    """Stand for ``torch._tensor._rebuild_from_type_v2``: a tensor with attributes; they are left out."""
    if not isinstance(function, Call) or kind != "Tensor" or not isinstance(arguments, tuple):
        raise ValueError("a tensor of another class")
    return function.function(*arguments)


DEEPSPEED_NAMES: Allowed = {
    **TORCH_NAMES,
    ("torch", "Tensor"): "Tensor",
    ("torch._tensor", "_rebuild_from_type_v2"): Call(_tensor),
    ("argparse", "Namespace"): Record.named("Namespace"),  # Megatron-DeepSpeed's arguments, in the client state
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): Call(lambda stage: stage),
    ("deepspeed.utils.tensor_fragment", "fragment_address"): Record.named("fragment_address"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): Record.named("LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): Record.named("DynamicLossScaler"),
}
"""All names in pickles of DeepSpeed."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of one checkpoint.

    Attributes:
        opened: the folder that was passed.
        prefix: the folder of the checkpoint below it, with a slash; empty if it is the same.
        model: files of model states, by (data-parallel rank or -1, model-parallel rank).
        optimizer: files of optimizer states, by (data-parallel rank, model-parallel rank).
        others: files of pipeline layers or experts.
    """

    opened: Opened
    prefix: str
    model: Mapping[tuple[int, int], str]
    optimizer: Mapping[tuple[int, int], str]
    others: tuple[str, ...]

    @property
    def where(self) -> str:
        """The folder in messages."""
        return f"{self.opened.path}/{self.prefix}".rstrip("/")

    @property
    def universal(self) -> list[str]:
        """Files of a universal checkpoint: one for each state of each parameter."""
        below = self.prefix + UNIVERSAL
        return sorted(key for key in self.opened.sizes if key.startswith(below) and key.endswith(".pt"))

    @classmethod
    async def of(cls, opened: Opened) -> Folder:
        """Find the checkpoint in a folder. Raises CorruptError if ``latest`` names a folder that is not there."""
        roots = deepspeed_roots(opened.sizes)
        prefix = "" if "" in roots else await _newest(opened, roots)
        names = {key: key.removeprefix(prefix) for key in opened.sizes if key.startswith(prefix)}
        model = {_ranks(match): key for key, name in names.items() if (match := MODEL.fullmatch(name))}
        optimizer = {_ranks(match): key for key, name in names.items() if (match := OPTIMIZER.fullmatch(name))}
        others = tuple(sorted(key for key, name in names.items() if OTHERS.fullmatch(name)))
        return cls(opened, prefix, model, optimizer, others)


def _ranks(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1] or -1), int(match[2])


def deepspeed_roots(keys: Iterable[str]) -> set[str]:
    """Return the folders with files of model states, with a slash: at most one level down."""
    cut = (key.rpartition("/") for key in keys)
    return {folder + slash for folder, slash, name in cut if "/" not in folder and MODEL.fullmatch(name)}


def is_deepspeed(keys: Collection[str]) -> bool:
    """Whether a folder with these files is a checkpoint of DeepSpeed, or has a file that names one."""
    roots = deepspeed_roots(keys)
    return "" in roots or (bool(roots) and any(name in keys for name in LATEST))


async def _newest(opened: Opened, roots: Collection[str]) -> str:
    """Return the folder that ``latest`` names, with a slash."""
    name = next(name for name in LATEST if name in opened.sizes)
    data = await opened.read(name, 0, min(opened.sizes[name], MOST_NAME_BYTES))
    tag = data.decode("utf-8", "replace").strip()
    if not is_inside(tag) or "/" in tag:
        raise CorruptError(f"{opened.path}/{name} names {tag[:80]!r}, which leaves the folder; pass the step's folder")
    if f"{tag}/" not in roots:
        raise CorruptError(
            f"{opened.path}/{name} names {tag[:80]!r}, which has no files of model states; the save has not ended, or "
            f"the folder is gone: pass one of {', '.join(sorted(roots))[:200]}"
        )
    return f"{tag}/"


def section(content: TorchContent, key: str, kind: type = dict) -> Any:
    """Return an entry of the dict in a file. Raises CorruptError if it has none of this type."""
    found = content.value.get(key) if isinstance(content.value, Mapping) else None
    if not isinstance(found, kind):
        raise CorruptError(f"{content.where} has no {key}; get the file again, or pass another step")
    return found


def shapes_of(content: TorchContent) -> list[dict[str, Shape]]:
    """Return the shapes of parameters, by group and name, in the order of their elements."""
    groups = section(content, "param_shapes", list)
    seen: set[Any] = set()
    for group in groups:
        if not isinstance(group, dict) or not all(map(_is_named_shape, group.items())):
            raise CorruptError(f"{content.where} has param_shapes that are no shapes; get the file again")
        if twice := seen & group.keys():
            raise CorruptError(f"{content.where} has the shape of {min(twice)!r:.80} in two groups; get the file again")
        seen |= group.keys()
    return groups  # type: ignore[no-any-return]  # checked above


def _is_named_shape(item: tuple[Any, Any]) -> bool:
    name, shape = item
    return isinstance(name, str) and isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)


def check_one_model(folder: Folder) -> None:
    """Raise CheckpointError for files of tensor-parallel or pipeline ranks, and of experts."""
    parts = sorted({rank for _, rank in (*folder.model, *folder.optimizer)})
    if folder.others or parts != [0]:
        what = f"{folder.others[0]}" if folder.others else f"files of {len(parts)} model-parallel ranks"
        raise CheckpointError(
            f"{folder.where} has {what}, and ZeRO's files do not say how tensors were cut: make a universal checkpoint "
            "of it (python -m deepspeed.checkpoint.ds_to_universal), and pass that"
        )
