"""What the integrations share: checks of a trainer's methods and settings, and its own state in a checkpoint."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import bcp

__all__ = ["HostState", "check_methods", "check_settings", "check_version", "step_of"]

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_methods(
    owner: Any, methods: Mapping[str, Sequence[str]], package: str, version: str, replaced_by: type | None = None
) -> None:
    """Check that a trainer still has the methods or functions that an integration needs.

    A renamed method would not be replaced, and nothing would be saved, without a word.

    Args:
        owner: class or module of the trainer.
        methods: the first parameters of each method without ``self``, by its name.
        package: of the trainer, as bcp names its integration.
        version: of the package.
        replaced_by: class with methods in the place of the owner's; each has to take all parameters.

    Raises:
        InputError: the owner lacks a method, or its parameters are others.

    Example:
        >>> check_methods(str, {"title": ()}, "builtins", "3")

    """
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        found = [] if method is None else _parameters(method, owner)
        is_known = method is not None and found[: len(expected)] == [*expected]
        if not is_known or (replaced_by and not _takes(getattr(replaced_by, name), found)):
            there = "does not have it" if method is None else f"has the parameters ({', '.join(found)})"
            raise bcp.InputError(
                f"bcp needs {owner.__name__}.{name}({', '.join(expected)}), and {package} {version} {there}: "
                f"install a version that docs/integrations/{package}.md lists"
            )


def check_version(package: str, version: str, oldest: str, why: str) -> None:
    """Check that a trainer is new enough to resume as it would have gone on.

    Args:
        package: of the trainer.
        version: of the package.
        oldest: the first version that resumes right, as in "2.5".
        why: what older ones do wrong.

    Raises:
        InputError: the version is older.

    Example:
        >>> check_version("trainers", "2.10.1", "2.5", "older ones repeat samples")

    """
    numbers = [[int(number) for number in re.findall(r"\d+", each)[:2]] for each in (version, oldest)]
    if numbers[0] < numbers[1]:
        raise bcp.InputError(f"bcp needs {package} {oldest} or newer, and this is {version}: {why}")


def _parameters(method: Any, owner: Any) -> list[str]:
    """Return the names of a method's parameters without ``self``, and without ``*args`` and ``**kwargs``."""
    own = int(isinstance(owner, type))
    parameters = [*inspect.signature(method).parameters.values()][own:]
    return [parameter.name for parameter in parameters if parameter.kind not in VARIABLE]


def _takes(method: Any, passed: Sequence[str]) -> bool:
    """Return whether a method of bcp has these parameters, or takes any."""
    own = inspect.signature(method).parameters
    return own.keys() >= {*passed} or any(parameter.kind in VARIABLE for parameter in own.values())


def check_settings(refused: Mapping[str, tuple[object, str]]) -> None:
    """Refuse settings of a trainer that would not be honoured.

    Args:
        refused: whether a setting is set, and why it does not go with bcp, by its name.

    Raises:
        InputError: one is set.

    Example:
        >>> check_settings({"save_only_model": (False, "a run resumes")})

    """
    for name, (is_set, why) in refused.items():
        if is_set:
            raise bcp.InputError(f"{name} does not go with bcp: {why}")


def step_of(checkpoint: str, run: str, argument: str) -> int:
    """Return the step of a checkpoint of a run, from its path.

    Args:
        checkpoint: its path.
        run: the path of the run.
        argument: of the trainer, for the message.

    Raises:
        InputError: it is no path of a checkpoint in the run.

    Example:
        >>> step_of("s3://bucket/run-7/step-00000200", "s3://bucket/run-7", "ckpt_path")
        200

    """
    folder, _, name = checkpoint.rstrip("/").rpartition("/")
    number = name.removeprefix("step-")
    if not (name.startswith("step-") and number.isdecimal() and folder == run.rstrip("/")):
        raise bcp.InputError(
            f"{argument}={checkpoint!r} is no checkpoint of the run {run}: pass '{run}/step-00000100' or another one. "
            "bcp.load reads weights from elsewhere, before training"
        )
    return int(number)


class HostState:
    """A trainer's own state as an extra state: it commits with the weights, and the trainer takes it back itself.

    Attributes:
        loaded: the state of the last load; None before the first.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        """Remember how to read the state, at each save. It has plain values, as for ``states["extra_states"]``."""
        self._read = read
        self.loaded: Any = None

    def state_dict(self) -> Any:
        """Return the state as it is now."""
        return self._read()

    def load_state_dict(self, state: Any) -> None:
        """Keep a loaded state."""
        self.loaded = state
