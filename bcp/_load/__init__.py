"""The steps of a load, in the order in which ``_workflow.aload`` takes them (paper sec. 3.3)."""

from bcp._load.objects import ask, needed_receipts, put_values
from bcp._load.opening import check_stored, fetch_receipts, open_checkpoint, say_if_replaced
from bcp._load.overlaps import put_shared
from bcp._load.reads import LoadPlan, budget_of, contents, exchange, exchange_devices, plan_reads, read_items
from bcp._load.report import lay_out, load_context, report, say_if_half_loaded
from bcp._load.targets import LoadRequest

__all__ = [
    "LoadPlan",
    "LoadRequest",
    "ask",
    "budget_of",
    "check_stored",
    "contents",
    "exchange",
    "exchange_devices",
    "fetch_receipts",
    "lay_out",
    "load_context",
    "needed_receipts",
    "open_checkpoint",
    "plan_reads",
    "put_shared",
    "put_values",
    "read_items",
    "report",
    "say_if_half_loaded",
    "say_if_replaced",
]
