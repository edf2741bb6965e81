"""The steps of a save, in the order in which ``_workflow.asave`` takes them."""

from bcp._save.codec_trial import measured, pays, tried
from bcp._save.failures import CleanUp, not_replaced, put_back, undone_on_error
from bcp._save.keeping import choose_base, remember_blocks
from bcp._save.leader import BLOCK_BYTES, Opening, Planned, commit_save
from bcp._save.local_state import LocalState, collect_local_state
from bcp._save.parts import (
    contents,
    make_receipt,
    open_files,
    owned_values,
    put_receipt,
    result,
    twin_items,
    write_items,
)
from bcp._save.plan import SavePlan, known_replicas, only_save_to, plan_writes, read_share
from bcp._save.snapshot import Snapshot, first_sizes, pinned_nbytes, rehearse

__all__ = [
    "BLOCK_BYTES",
    "CleanUp",
    "LocalState",
    "Opening",
    "Planned",
    "SavePlan",
    "Snapshot",
    "choose_base",
    "collect_local_state",
    "commit_save",
    "contents",
    "first_sizes",
    "known_replicas",
    "make_receipt",
    "measured",
    "not_replaced",
    "only_save_to",
    "open_files",
    "owned_values",
    "pays",
    "pinned_nbytes",
    "plan_writes",
    "put_back",
    "put_receipt",
    "read_share",
    "rehearse",
    "remember_blocks",
    "result",
    "tried",
    "twin_items",
    "undone_on_error",
    "write_items",
]
