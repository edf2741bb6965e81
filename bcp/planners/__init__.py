"""One planner per training framework, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from bcp.errors import InputError
from bcp.planners.deepspeed import DeepSpeedPlanner, holds_deepspeed
from bcp.planners.fsdp1 import Fsdp1Planner, holds_fsdp1
from bcp.planners.fsdp2 import Fsdp2Planner, VeScalePlanner, holds_ddp, holds_dtensors, holds_ragged
from bcp.planners.megatron import MegatronPlanner, MegatronRng, holds_megatron
from bcp.planners.torch_native import DdpPlanner, PlainPlanner
from bcp.protocols import Planner, States
from bcp.state.detection import InspectedStates
from bcp.state.guard import check_unchanged, versions

__all__ = [
    "DdpPlanner",
    "DeepSpeedPlanner",
    "Framework",
    "FrameworkName",
    "Fsdp1Planner",
    "Fsdp2Planner",
    "MegatronPlanner",
    "MegatronRng",
    "PlainPlanner",
    "VeScalePlanner",
    "check_unchanged",
    "planner",
    "register",
    "versions",
]

FrameworkName = Literal["plain", "ddp", "fsdp1", "fsdp2", "vescale", "deepspeed", "megatron"]
"""Names of bcp's own planners."""

Framework = FrameworkName | Planner | None
"""A planner, the name of one of bcp's own, or None to detect it.

Names of :func:`register` work too. Type checkers do not know them: typed code passes a planner.
"""

Factory = Callable[[], Planner]
Detects = Callable[[States], bool]

_KNOWN: dict[str, tuple[Factory, Detects]] = {}
"""By name; what is registered last is asked first whether the states are its own."""


def register(name: str, factory: Factory, detects: Detects | None = None) -> None:
    """Make a planner known, as ``framework=name``; replaces one of the same name.

    Args:
        name: the value that callers pass as ``framework``. Typed code passes a planner, see :data:`Framework`.
        factory: makes the planner. A method ``probe()`` of the planner is called before every use. It raises if the
            planner cannot read the installed framework.
        detects: says whether states are this framework's, for ``framework=None``; planners that were registered
            later are asked first. None: never chosen by itself.

    """
    _KNOWN.pop(name, None)
    _KNOWN[name] = (factory, detects or (lambda _: False))


def planner(framework: str | None, states: States) -> Planner:
    """Return the planner of a framework; None finds out which one the states are of.

    Raises InputError if no planner of that name is known, or if it cannot work with the installed versions.
    """
    seen = InspectedStates(states)
    name = framework or next(name for name in reversed(_KNOWN) if _KNOWN[name][1](seen))
    if name not in _KNOWN:
        raise InputError(f"framework={framework!r} is unknown; known are {', '.join(sorted(_KNOWN))}")
    made = _KNOWN[name][0]()
    if probe := getattr(made, "probe", None):
        probe()
    return made


register("plain", PlainPlanner, lambda _: True)
register("ddp", DdpPlanner, holds_ddp)
register("fsdp2", Fsdp2Planner, holds_dtensors)
register("vescale", VeScalePlanner, holds_ragged)
register("fsdp1", Fsdp1Planner, holds_fsdp1)
register("deepspeed", DeepSpeedPlanner, holds_deepspeed)
register("megatron", MegatronPlanner, holds_megatron)
