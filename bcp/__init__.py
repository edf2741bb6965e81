"""Asynchronous, resharding checkpoints for large foundation model training.

``bcp.save``, ``bcp.save_async`` and ``bcp.load`` serve ordinary code, ``bcp.asave`` and ``bcp.aload`` coroutines, and
``bcp.Run`` a whole training loop. Options, reports, events and errors are plain data. ``bcp.extend`` is the door for
stages, codecs, backends, planners and coordinators of others.

Example::

    bcp.save("ckpt/step-200", states)
    bcp.load("ckpt/step-200", states)

"""

from bcp import errors, extend, policies, telemetry
from bcp._api import aload, aprepare, asave, load, prepare, save, save_async
from bcp._pending import Pending
from bcp._report import Report, report
from bcp._version import __version__
from bcp.errors import *  # noqa: F403 -- the error tree is public as a whole
from bcp.errors import NothingLoadedWarning
from bcp.events import (
    BudgetEvent,
    Event,
    LoadReport,
    PhaseEvent,
    RequestEvent,
    RetryEvent,
    SaveReport,
    StageEvent,
    StageStart,
)
from bcp.interop.megatron_names import MegatronNames
from bcp.options import Graph, LoadOptions, SaveOptions
from bcp.pipeline import Pipeline, Stage, tee
from bcp.plan.box import Box
from bcp.plan.read.renames import Moved
from bcp.planners import Framework, MegatronRng
from bcp.protocols import Agreement, Backend, Codec, Coordinator, PartWriter, Planner, RetryPolicy
from bcp.runs.latest import alatest, latest
from bcp.runs.preemption import Preemption
from bcp.runs.run import Run
from bcp.stages.items import HostPart
from bcp.state.random_states import RngState
from bcp.state.units import prefetch_data_state

__all__ = [
    "Agreement",
    "Backend",
    "Box",
    "BudgetEvent",
    "Codec",
    "Coordinator",
    "Event",
    "Framework",
    "Graph",
    "HostPart",
    "LoadOptions",
    "LoadReport",
    "MegatronNames",
    "MegatronRng",
    "Moved",
    "NothingLoadedWarning",
    "PartWriter",
    "Pending",
    "PhaseEvent",
    "Pipeline",
    "Planner",
    "Preemption",
    "Report",
    "RequestEvent",
    "RetryEvent",
    "RetryPolicy",
    "RngState",
    "Run",
    "SaveOptions",
    "SaveReport",
    "Stage",
    "StageEvent",
    "StageStart",
    "__version__",
    "alatest",
    "aload",
    "aprepare",
    "asave",
    "extend",
    "latest",
    "load",
    "policies",
    "prefetch_data_state",
    "prepare",
    "report",
    "save",
    "save_async",
    "tee",
    "telemetry",
]
__all__ += errors.__all__
