"""The arguments of a run, as its users pass them."""

from __future__ import annotations

import os
from dataclasses import replace

from bcp.backends.local import fixed
from bcp.errors import InputError
from bcp.options import SaveOptions
from bcp.policies.save import SavePolicy, as_save_policy, divided
from bcp.protocols import States
from bcp.runs.preemption import Preemption
from bcp.runs.roles import LAUNCH, Role
from bcp.state.guard import torch_optimizers

__all__ = ["below", "check_arguments", "check_lazy", "place_of", "with_launch"]


def place_of(path: object) -> str:
    """Return a URL, or an absolute path without ``~``: the process may change its directory.

    Raises:
        InputError: it is neither.

    Example:
        >>> place_of("s3://bucket/run-7")
        's3://bucket/run-7'

    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path={path!r} is a {type(path).__name__}; pass a directory or a URL, as 'ckpt/run-7'")
    place = os.fspath(path)
    if not isinstance(place, str) or not place:
        raise InputError(f"path={path!r} is no path; pass a directory or a URL, as 'ckpt/run-7'")
    return fixed(place)


def check_arguments(
    while_saving: object,
    standby_steps: object,
    tolerate: object,
    preemption: object,
    framework: object,
    **callbacks: object,
) -> None:
    """Check the arguments of a run that no other place checks.

    Raises:
        InputError: one cannot be used.

    """
    if while_saving not in ("wait", "skip"):
        raise InputError(f"while_saving={while_saving!r}: pass 'wait' or 'skip'")
    if standby_steps is not None and not _is_whole(standby_steps, 1):
        raise InputError(f"standby_steps={standby_steps!r}: pass a whole number of steps of at least 1, or None")
    if not _is_whole(tolerate, 0):
        raise InputError(f"tolerate={tolerate!r}: pass 0 or a whole number of failed saves in a row")
    if preemption is not None and not isinstance(preemption, Preemption):
        raise InputError(f"preemption={preemption!r}: pass bcp.Preemption(grace_seconds=30), or None")
    if framework is not None and not isinstance(framework, str) and not hasattr(framework, "local_shards"):
        raise InputError(f"framework={framework!r} is neither a name nor a planner; pass None to detect it")
    for name, callback in callbacks.items():
        if not callable(callback):
            raise InputError(f"{name}={callback!r} cannot be called; pass a function of two arguments")


def check_lazy(options: SaveOptions, states: States) -> None:
    """Check that lazy snapshots can hold back the optimizer's steps, before training begins.

    Raises:
        InputError: the states have no optimizer, or one whose steps cannot be held back.

    """
    if options.snapshot != "lazy":
        return
    if "optimizer" not in states:
        raise InputError(
            "save_options has snapshot='lazy', which holds back the optimizer's steps until everything is copied: pass "
            "states['optimizer'], or save with snapshot='eager'"
        )
    torch_optimizers(states["optimizer"])


def below(path: str, role: Role) -> str:
    """Return the folder of a role of a run.

    Raises:
        InputError: it is no role.

    """
    if not isinstance(role, Role):
        raise InputError(f"role={role!r}: pass bcp.Role('actor', of=['actor', 'critic'], launch=...), or None")
    return f"{path.rstrip('/')}/{role.name}"


def with_launch(options: SaveOptions, role: Role, save: SavePolicy | int | None) -> SaveOptions:
    """Return options whose checkpoints name the launch of all roles.

    Raises:
        InputError: the caller's metadata use this name, or roles would save at different steps.

    """
    if LAUNCH in options.metadata:
        raise InputError(f"save_options.metadata has {LAUNCH!r}, which a run of several roles sets: leave it out")
    if save is not None and divided(as_save_policy(save))[1] is not None:
        raise InputError(
            f"save={save!r} reads a clock, so that each role would save at other steps, and no step would be whole: "
            "pass steps, as 100 or bcp.policies.AtSteps([...]), or save=None and call run.save(step) in all roles"
        )
    return replace(options, metadata={**options.metadata, LAUNCH: role.launch})


def _is_whole(value: object, least: int) -> bool:
    """Whether a value is an int of at least so much; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
