"""Tensors and values of a foreign checkpoint as they are found, by the names of bcp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bcp.errors import CorruptError
from bcp.interop.catalogue import Piece
from bcp.interop.torch_content import Name, TorchContent
from bcp.interop.torch_file import shared
from bcp.interop.torch_pickle import Stored, value_text
from bcp.interop.unpickle import Record

__all__ = ["MASTER", "OPTIMIZER", "Found"]

OPTIMIZER = "optimizer"
MASTER = "master_param"
"""The name of fp32 masters in checkpoints of bcp; see :mod:`bcp.plan.read.renamed`."""

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of a dynamic loss scaler that change; see :mod:`bcp.planners.deepspeed`."""

LEFT = ("params", "param_names")
"""Entries of a group that are no hyper-parameters."""


@dataclass(slots=True)
class Found:
    """Tensors and values as they are found.

    Attributes:
        pieces: the tensors.
        values: JSON text of other leaves.
        tied: names without data of their own.
        most: how many parts a value may have.
    """

    pieces: list[Piece] = field(default_factory=list)
    values: dict[Name, str] = field(default_factory=dict)
    tied: dict[Name, str] = field(default_factory=dict)
    most: int = 0

    def add_value(self, name: str, value: Any, where: str) -> None:
        """Add a value of the optimizer."""
        self.values[OPTIMIZER, name] = value_text(value, self.most, where)

    def add_hyper(self, names: Iterable[str], group: Any, where: str) -> None:
        """Add the hyper-parameters of a group to each of its parameters. Raises CorruptError if the group is none."""
        if not isinstance(group, Mapping):
            raise CorruptError(f"{where} has a {type(group).__name__} for a group of parameters; get the file again")
        texts = {str(key): value_text(value, self.most, where) for key, value in group.items() if key not in LEFT}
        for name in names:
            self.values.update(((OPTIMIZER, f"param_groups.{name}.{key}"), text) for key, text in texts.items())

    def add_scaler(self, about: Mapping[str, Any], where: str) -> None:
        """Add a dynamic loss scale."""
        scaler = about.get("loss_scaler")
        if isinstance(scaler, Record) and scaler.get("dynamic"):
            state = scaler.state
        elif about.get("dynamic_loss_scale") and "cur_scale" in about:
            state = about
        else:
            return
        for key in SCALER:
            if key in state:
                self.add_value(f"loss_scaler.{key}", state[key], where)

    async def add_module(self, content: TorchContent, module: Mapping[str, Any]) -> None:
        """Add tensors and values of a module's state."""
        tensors = {("model", str(name)): leaf for name, leaf in module.items() if isinstance(leaf, Stored)}
        own, tied = shared(tensors, content.where)
        await self.add_tensors(content, {name: tensors[name] for name in own})
        self.tied.update(tied)
        for name, leaf in module.items():
            if not isinstance(leaf, Stored):
                self.values["model", str(name)] = value_text(leaf, self.most, content.where)

    async def add_tensors(self, content: TorchContent, tensors: Mapping[Name, Stored]) -> None:
        """Add whole tensors of a file."""
        places = await content.places(tensors)
        self.pieces.extend(
            Piece.whole(*name, leaf.dtype, leaf.shape, content.key, places[name]) for name, leaf in tensors.items()
        )
