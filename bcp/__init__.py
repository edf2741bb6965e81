"""Asynchronous, resharding checkpoints for large foundation model training.

``bcp.save``, ``bcp.save_async`` and ``bcp.load`` serve ordinary code, ``bcp.asave`` and ``bcp.aload`` coroutines, and
``bcp.Run`` a whole training loop. Options, results and errors are plain data. ``bcp.extend`` is the door for stages,
codecs, backends, planners, coordinators and observers of others; no name is in both.

``import bcp`` imports neither torch nor anything else that takes time. The first use of a name does.

Example::

    bcp.save("ckpt/step-200", states)
    bcp.load("ckpt/step-200", states)

"""

from typing import TYPE_CHECKING

from bcp import errors
from bcp.errors import *  # noqa: F403 -- the error tree is public as a whole
from bcp.errors import NothingLoadedWarning
from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp import extend, policies, telemetry, tools
    from bcp._api import aload, aprepare, asave, load, prepare, save, save_async
    from bcp._choice import achoose_codecs, choose_codecs
    from bcp._pending import Pending
    from bcp._report import Report, report
    from bcp._version import __version__
    from bcp.events import LoadResult, SaveResult
    from bcp.interop.megatron_names import MegatronNames
    from bcp.options import LoadOptions, SaveOptions
    from bcp.plan.box import Box
    from bcp.plan.read.renames import Moved
    from bcp.planners import Framework, MegatronRng
    from bcp.protocols import RetryPolicy
    from bcp.publication.publishing import PublishResult, apublish, publish, publish_async
    from bcp.publication.subscriber import PullResult, Subscriber
    from bcp.read.checkpoint import AsyncCheckpoint, Checkpoint
    from bcp.runs.following import await_for_next, wait_for_next
    from bcp.runs.latest import alatest, latest
    from bcp.runs.listing import StepInfo
    from bcp.runs.preemption import Preemption
    from bcp.runs.roles import Role
    from bcp.runs.run import Run
    from bcp.runs.survivors import Survivors
    from bcp.stages.zstd import zstd
    from bcp.state.random_states import RngState
    from bcp.state.trainable import trainable
    from bcp.state.units import prefetch_data_state
    from bcp.tiers.options import Tiers
    from bcp.tools.cooling import acool, apromote, cool, promote

__all__ = [
    "AsyncCheckpoint",
    "Box",
    "Checkpoint",
    "Framework",
    "LoadOptions",
    "LoadResult",
    "MegatronNames",
    "MegatronRng",
    "Moved",
    "NothingLoadedWarning",
    "Pending",
    "Preemption",
    "PublishResult",
    "PullResult",
    "Report",
    "RetryPolicy",
    "RngState",
    "Role",
    "Run",
    "SaveOptions",
    "SaveResult",
    "StepInfo",
    "Subscriber",
    "Survivors",
    "Tiers",
    "__version__",
    "achoose_codecs",
    "acool",
    "alatest",
    "aload",
    "aprepare",
    "apromote",
    "apublish",
    "asave",
    "await_for_next",
    "choose_codecs",
    "cool",
    "extend",
    "latest",
    "load",
    "policies",
    "prefetch_data_state",
    "prepare",
    "promote",
    "publish",
    "publish_async",
    "report",
    "save",
    "save_async",
    "telemetry",
    "tools",
    "trainable",
    "wait_for_next",
    "zstd",
]
__all__ += errors.__all__

if not TYPE_CHECKING:  # a type checker that saw a __getattr__ would accept every name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "bcp._api": ["aload", "aprepare", "asave", "load", "prepare", "save", "save_async"],
            "bcp._choice": ["achoose_codecs", "choose_codecs"],
            "bcp._pending": ["Pending"],
            "bcp._report": ["Report", "report"],
            "bcp._version": ["__version__"],
            "bcp.backends": [],  # messages of errors name functions of it
            "bcp.data": [],  # as bcp.testing: a thread may ask before the one that imports it has told the package
            "bcp.dcp": [],
            "bcp.events": ["LoadResult", "SaveResult"],
            "bcp.extend": [],
            "bcp.interop.megatron_names": ["MegatronNames"],
            "bcp.options": ["LoadOptions", "SaveOptions"],
            "bcp.plan.box": ["Box"],
            "bcp.plan.read.renames": ["Moved"],
            "bcp.planners": ["Framework", "MegatronRng"],
            "bcp.policies": [],
            "bcp.protocols": ["RetryPolicy"],
            "bcp.publication.publishing": ["PublishResult", "apublish", "publish", "publish_async"],
            "bcp.publication.subscriber": ["PullResult", "Subscriber"],
            "bcp.read.checkpoint": ["AsyncCheckpoint", "Checkpoint"],
            "bcp.runs.following": ["await_for_next", "wait_for_next"],
            "bcp.runs.latest": ["alatest", "latest"],
            "bcp.runs.listing": ["StepInfo"],
            "bcp.runs.preemption": ["Preemption"],
            "bcp.runs.roles": ["Role"],
            "bcp.runs.run": ["Run"],
            "bcp.runs.survivors": ["Survivors"],
            "bcp.stages.zstd": ["zstd"],
            "bcp.state.random_states": ["RngState"],
            "bcp.state.trainable": ["trainable"],
            "bcp.state.units": ["prefetch_data_state"],
            "bcp.telemetry": [],
            "bcp.testing": [],
            "bcp.tiers.options": ["Tiers"],
            "bcp.tools": [],
            "bcp.tools.cooling": ["acool", "apromote", "cool", "promote"],
        },
        __all__,
        together=["bcp._api", "bcp.runs.run"],  # no later save, load or run imports anything
    )
