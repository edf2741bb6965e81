"""Names of torch.distributed.checkpoint (DCP), and the kinds and names that bcp stores them under.

``get_state_dict`` gives a model and an optimizer, and DCP joins the keys of nested dicts by dots:

=============================  =========================================
name in DCP                    kind and name in bcp
=============================  =========================================
``model.X``                    ``model``, ``X``
``optim.state.X.exp_avg``      ``optimizer``, ``state.X.exp_avg``
``optim.param_groups.X.lr``    ``optimizer``, ``param_groups.X.lr``
``optim.param_groups.0.lr``    ``optimizer``, ``dcp.param_groups.0.lr``
any other name                 ``model``, the name itself
=============================  =========================================

``optimizer.`` stands for ``optim.`` in a state dict with that key. If model and optimizer lie below one other key, as
in ``app.model.X`` of torch's tutorials, that key belongs to the prefix. The fourth row is for state dicts that are not
flattened, whose groups have numbers and a list ``params``. A state dict without any ``model.X`` has its model's names
in the last row. A name that is taken gets ``#2``, ``#3`` ... appended.

The first receipt of a checkpoint records what the rules alone do not tell, so every name comes back as it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from bcp.errors import CorruptError, StateError
from bcp.protocols import ObjectKey

__all__ = ["GROUPS", "Names", "assigned"]

Path = tuple[str | int, ...]
"""Keys and list indices that lead through a nested state dict to a value; joined by dots they are its name."""

MODEL = "model."
OPTIMIZERS = ("optim.", "optimizer.")
SECTIONS = ("state.", "param_groups.")
GROUPS = "dcp."
"""Begins the names of hyper-parameters that have the number of a group in place of the name of a parameter."""

_OUTER = re.compile(r"([^.]+\.)(?:(model)|(?:optim|optimizer)\.(?:state|param_groups))\..+", re.DOTALL)
_PARAMS = re.compile(r"param_groups\.[0-9]+\.params")
_STATE = re.compile(r"(state)\.(.+)\.([^.]+)", re.DOTALL)
_GROUP = re.compile(r"(param_groups)\.([0-9]{1,6})\.(.+)", re.DOTALL)
_LARGEST_INDEX = 10**6
"""DCP fills lists up to an index of a path, and a damaged record could ask for any."""


@dataclass(frozen=True, slots=True)
class Names:
    """The way back: from kinds and names of a checkpoint to names of DCP.

    The defaults are those of a checkpoint that ``bcp.save`` has written.

    Attributes:
        model: prefix of the model's names in DCP; "" if they have none.
        optimizer: prefix of the optimizer's names in DCP.
        is_grouped: whether hyper-parameters have numbers of groups in DCP. Then ``param_groups.X.lr`` is for bcp alone.
        others: names in DCP of the tensors and values that have another one than their prefix gives.
        paths: by name in DCP, paths in the nested state dict that are not the usual ones; None: there are no paths.
    """

    model: str = MODEL
    optimizer: str = OPTIMIZERS[0]
    is_grouped: bool = False
    others: Mapping[ObjectKey, str] = field(default_factory=dict)
    paths: Mapping[str, Path] | None = field(default_factory=dict)

    def in_dcp(self, key: ObjectKey) -> str | None:
        """Return the name in DCP of a kind and name; None for a value that DCP has under another name."""
        kind, name = key
        if key in self.others:
            return self.others[key]
        if kind == "model":
            return self.model + name
        if not self.is_grouped:
            return self.optimizer + name
        return None if name.startswith(SECTIONS[1]) else self.optimizer + name.removeprefix(GROUPS)

    def path(self, key: ObjectKey) -> Path:
        """Return the path of a tensor or value in the nested state dict that DCP has flattened."""
        name = self.in_dcp(key) or ""
        unusual = self.paths or {}
        return unusual[name] if name in unusual else self._usual_path(key, name)

    def _usual_path(self, key: ObjectKey, name: str) -> Path:
        """Return the path that ``get_state_dict`` leads to."""
        if key in self.others:
            return (name,)
        prefix = self.model if key[0] == "model" else self.optimizer
        rest, above = name.removeprefix(prefix), prefix.split(".")[:-1]
        if key[0] == "optimizer" and self.is_grouped:
            if match := _GROUP.fullmatch(rest):
                return *above, match[1], int(match[2]), match[3]
            if match := _STATE.fullmatch(rest):
                return *above, *match.groups()
        return *above, rest

    def with_paths(self, paths: Mapping[str, Path], keys: Mapping[str, ObjectKey]) -> Names:
        """Return the same with these paths, of which only unusual ones are kept."""
        unusual = {name: path for name, path in paths.items() if self._usual_path(keys[name], name) != path}
        return replace(self, paths=unusual)

    def encode(self) -> str:
        """Return the record for a receipt, as JSON."""
        others = [[*key, name] for key, name in sorted(self.others.items())]
        fields = [self.model, self.optimizer, self.is_grouped, others, self.paths]
        return json.dumps(fields, separators=(",", ":"), sort_keys=True)

    @classmethod
    def decode(cls, text: str, where: str) -> Names:
        """Read a record; ``where`` names its file in messages. Raises CorruptError if it is none."""
        try:
            model, optimizer, is_grouped, others, paths = json.loads(text)
            known = {(kind, name): fqn for kind, name, fqn in others}
            found = None if paths is None else {fqn: tuple(path) for fqn, path in paths.items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(f"{where} has a damaged record of names: {error}; restore it") from error
        texts = [model, optimizer, *(part for key, fqn in known.items() for part in (*key, fqn))]
        leads = all(path and all(map(_is_step, path)) for path in (found or {}).values())
        if not (leads and type(is_grouped) is bool and all(type(text) is str for text in texts)):
            raise CorruptError(f"{where} has a damaged record of names: a name or path is none; restore it")
        return cls(model, optimizer, is_grouped, known, found)


def _is_step(step: object) -> bool:
    return type(step) is str or (type(step) is int and 0 <= step <= _LARGEST_INDEX)


def assigned(fqns: Collection[str]) -> tuple[dict[str, ObjectKey], Names]:
    """Give every name of DCP a kind and a name, and return the way back. Equal names give equal results.

    Raises StateError for a name that UTF-8 cannot encode.

    Example:
        >>> keys, names = assigned(["model.w", "optim.state.w.exp_avg", "step"])
        >>> keys["model.w"], keys["optim.state.w.exp_avg"], keys["step"]
        (('model', 'w'), ('optimizer', 'state.w.exp_avg'), ('model', 'step'))
        >>> names.in_dcp(("model", "step")), names.in_dcp(("model", "w"))
        ('step', 'model.w')
    """
    ordered = sorted(fqns)
    for fqn in ordered:
        _check(fqn)
    outer = _outer(ordered)
    model = outer + MODEL if any(fqn.startswith(outer + MODEL) for fqn in ordered) else ""
    begins = {outer + prefix: tuple(outer + prefix + section for section in SECTIONS) for prefix in OPTIMIZERS}
    used = (prefix for prefix in begins if any(fqn.startswith(begins[prefix]) for fqn in ordered))
    optimizer = next(used, outer + OPTIMIZERS[0])
    parts = [fqn.removeprefix(optimizer) for fqn in ordered if fqn.startswith(begins[optimizer])]
    is_grouped = any(map(_PARAMS.fullmatch, parts))
    keys: dict[str, ObjectKey] = {}
    for fqn in ordered:
        if fqn.startswith(begins[optimizer]):
            rest = fqn.removeprefix(optimizer)
            keys[fqn] = ("optimizer", GROUPS + rest if is_grouped and rest.startswith(SECTIONS[1]) else rest)
        elif fqn.startswith(model):
            keys[fqn] = ("model", fqn.removeprefix(model))
    others = _others([fqn for fqn in ordered if fqn not in keys], set(keys.values()))
    return {**keys, **{fqn: key for key, fqn in others.items()}}, Names(model, optimizer, is_grouped, others)


def _outer(fqns: Collection[str]) -> str:
    """Return the key around model and optimizer, with its dot; "" if there is none, or more than one."""
    plain = (MODEL, *(prefix + section for prefix in OPTIMIZERS for section in SECTIONS))
    if any(fqn.startswith(plain) for fqn in fqns):
        return ""
    found = {(match[1], match[2] is not None) for match in map(_OUTER.fullmatch, fqns) if match}
    both = [key for key, is_model in found if is_model and (key, False) in found]
    return both[0] if len(both) == 1 else ""


def _others(fqns: Collection[str], taken: Collection[ObjectKey]) -> dict[ObjectKey, str]:
    """Keep names that have no prefix; number those that are taken."""
    others: dict[ObjectKey, str] = {}
    for fqn in fqns:
        name, number = fqn, 2
        while ("model", name) in others or ("model", name) in taken:
            name, number = f"{fqn}#{number}", number + 1
        others["model", name] = fqn
    return others


def _check(fqn: str) -> None:
    try:
        fqn.encode()
    except UnicodeEncodeError as error:
        raise StateError(f"the state dict has the name {fqn!r}, which UTF-8 cannot encode; rename it") from error
