"""Policies of a run: when to save, how often that pays, and which checkpoints to keep.

They are pure: no input or output, no clock of their own. A run passes them the time and its measurements.
"""

from typing import TYPE_CHECKING

from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp.policies.frequency import Tuned, interval
    from bcp.policies.keep import (
        AnyKept,
        Best,
        ClosestTo,
        Entry,
        EveryKSteps,
        Everything,
        KeepPolicy,
        LastDays,
        Latest,
        Pinned,
        as_keep_policy,
        doomed,
    )
    from bcp.policies.save import (
        AnyOf,
        AtSteps,
        Continuously,
        Costs,
        EverySeconds,
        EverySteps,
        FirstStep,
        Moment,
        OnPreemption,
        SavePolicy,
        as_save_policy,
    )

__all__ = [
    "AnyKept",
    "AnyOf",
    "AtSteps",
    "Best",
    "ClosestTo",
    "Continuously",
    "Costs",
    "Entry",
    "EveryKSteps",
    "EverySeconds",
    "EverySteps",
    "Everything",
    "FirstStep",
    "KeepPolicy",
    "LastDays",
    "Latest",
    "Moment",
    "OnPreemption",
    "Pinned",
    "SavePolicy",
    "Tuned",
    "as_keep_policy",
    "as_save_policy",
    "doomed",
    "interval",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "bcp.policies.frequency": ["Tuned", "interval"],
            "bcp.policies.keep": [
                "AnyKept",
                "Best",
                "ClosestTo",
                "Entry",
                "EveryKSteps",
                "Everything",
                "KeepPolicy",
                "LastDays",
                "Latest",
                "Pinned",
                "as_keep_policy",
                "doomed",
            ],
            "bcp.policies.save": [
                "AnyOf",
                "AtSteps",
                "Continuously",
                "Costs",
                "EverySeconds",
                "EverySteps",
                "FirstStep",
                "Moment",
                "OnPreemption",
                "SavePolicy",
                "as_save_policy",
            ],
        },
        __all__,
    )
