"""The steps of a load, in the order in which ``_workflow.aload`` takes them (paper sec. 3.3)."""

from bcp._load.objects import ask, put_values
from bcp._load.opening import RESTARTS, open_checkpoint
from bcp._load.overlaps import put_shared
from bcp._load.reads import LoadPlan, budget_of, contents, exchange, exchange_devices, found_items, plan_reads
from bcp._load.result import result, say_if_half_loaded
from bcp._load.targets import LoadRequest

__all__ = [
    "RESTARTS",
    "LoadPlan",
    "LoadRequest",
    "ask",
    "budget_of",
    "contents",
    "exchange",
    "exchange_devices",
    "found_items",
    "open_checkpoint",
    "plan_reads",
    "put_shared",
    "put_values",
    "result",
    "say_if_half_loaded",
]
