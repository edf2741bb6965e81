"""The door for third parties: stages, codecs, backends, planners, dataloaders, coordinators and observers.

A class that has the methods of a protocol is enough; nothing has to be inherited from. ``docs/extending.md`` builds one
of each with these names and those of ``bcp`` only; no name is in both. ``bcp.testing`` has a conformance suite for
backends, planners and coordinators.

**Stages** see every part of a save or load: :class:`Stage` is a named async function, :func:`tee` lets several stages
see each item, and :class:`Pipeline` is the graph that ``SaveOptions(edit=...)`` gets and returns, a :data:`Graph`. A
stage behind ``d2h`` gets a :class:`HostPart`. A stage calls blocking code by :func:`in_thread`.

**Codecs** change bytes on their way to storage and back: :class:`Codec`.

**Backends** store objects: :class:`Backend`, whose ``open_write`` yields a :class:`PartWriter` and whose ``list``
returns :class:`ObjectInfo`. :func:`check_key` and :class:`Tiling` refuse bad keys and parts, :func:`content_version`
is for storage without versions of its own, and :func:`flat_view` returns the bytes of any buffer.
:func:`register_backend` makes a backend known by the scheme of its URLs. :class:`Sweeper` (with :class:`Unfinished`),
:class:`FolderLister`, :class:`ScatterReader` and :class:`CpuAwareWriter` are optional.

**Planners** read the state of a training framework: :class:`Planner`. It returns :class:`LocalShards` to save and
:class:`LoadTargets` to load: tensors, and a :class:`ShardTable` of one :class:`ShardRow` each, with the
:class:`TensorMeta` of its tensor and a :class:`bcp.Box` of it. A load tells it the :class:`CheckpointNames`.
:class:`Refused` has entries that a module does not take back. :func:`register_planner` makes a planner known as
``framework=name``.

**Dataloaders** that any number of readers can load: :class:`ShardedState`.

**Coordinators** let ranks agree: :class:`Coordinator` begins an operation and yields an :class:`Agreement`.
:data:`REFUSED` names an operation whose arguments were refused. :class:`FailureReporter` is optional.

**Observers** get every :data:`Event` of one save or load: an :data:`Observer` is the function for
``SaveOptions(observe=...)``. Events are :class:`PhaseEvent`, :class:`StageStart`, :class:`StageEvent`,
:class:`BudgetEvent`, :class:`RequestEvent`, :class:`RetryEvent` and :class:`TierEvent`.

Example::

    async def report_size(part: bcp.extend.HostPart) -> bcp.extend.HostPart:
        print(part.name, part.nbytes)
        return part


    stage = bcp.extend.Stage("report-size", report_size)
    bcp.save("ckpt", states, options=bcp.SaveOptions(edit=lambda graph: graph.after("d2h", stage)))

"""

from typing import TYPE_CHECKING

from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp.backends import register as register_backend
    from bcp.backends.keys import Tiling, check_key, content_version
    from bcp.events import (
        BudgetEvent,
        Event,
        Observer,
        PhaseEvent,
        RequestEvent,
        RetryEvent,
        StageEvent,
        StageStart,
        TierEvent,
    )
    from bcp.options import Graph
    from bcp.pipeline import Pipeline, Stage, tee
    from bcp.plan.read.renamed import CheckpointNames
    from bcp.plan.shards import ShardRow, ShardTable, TensorMeta
    from bcp.planners import register as register_planner
    from bcp.protocols import (
        REFUSED,
        Agreement,
        Backend,
        Codec,
        Coordinator,
        CpuAwareWriter,
        FailureReporter,
        FolderLister,
        LoadTargets,
        LocalShards,
        ObjectInfo,
        PartWriter,
        Planner,
        Refused,
        ScatterReader,
        ShardedState,
        Sweeper,
        Unfinished,
        flat_view,
    )
    from bcp.runtime.threads import in_thread
    from bcp.stages.items import HostPart

__all__ = [
    "REFUSED",
    "Agreement",
    "Backend",
    "BudgetEvent",
    "CheckpointNames",
    "Codec",
    "Coordinator",
    "CpuAwareWriter",
    "Event",
    "FailureReporter",
    "FolderLister",
    "Graph",
    "HostPart",
    "LoadTargets",
    "LocalShards",
    "ObjectInfo",
    "Observer",
    "PartWriter",
    "PhaseEvent",
    "Pipeline",
    "Planner",
    "Refused",
    "RequestEvent",
    "RetryEvent",
    "ScatterReader",
    "ShardRow",
    "ShardTable",
    "ShardedState",
    "Stage",
    "StageEvent",
    "StageStart",
    "Sweeper",
    "TensorMeta",
    "TierEvent",
    "Tiling",
    "Unfinished",
    "check_key",
    "content_version",
    "flat_view",
    "in_thread",
    "register_backend",
    "register_planner",
    "tee",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "bcp.backends": ["register as register_backend"],
            "bcp.backends.keys": ["Tiling", "check_key", "content_version"],
            "bcp.events": [
                "BudgetEvent",
                "Event",
                "Observer",
                "PhaseEvent",
                "RequestEvent",
                "RetryEvent",
                "StageEvent",
                "StageStart",
                "TierEvent",
            ],
            "bcp.options": ["Graph"],
            "bcp.pipeline": ["Pipeline", "Stage", "tee"],
            "bcp.plan.read.renamed": ["CheckpointNames"],
            "bcp.plan.shards": ["ShardRow", "ShardTable", "TensorMeta"],
            "bcp.planners": ["register as register_planner"],  # imports torch, which a backend or a codec does not need
            "bcp.protocols": [
                "REFUSED",
                "Agreement",
                "Backend",
                "Codec",
                "Coordinator",
                "CpuAwareWriter",
                "FailureReporter",
                "FolderLister",
                "LoadTargets",
                "LocalShards",
                "ObjectInfo",
                "PartWriter",
                "Planner",
                "Refused",
                "ScatterReader",
                "ShardedState",
                "Sweeper",
                "Unfinished",
                "flat_view",
            ],
            "bcp.runtime.threads": ["in_thread"],
            "bcp.stages.items": ["HostPart"],  # imports torch, too
        },
        __all__,
    )
