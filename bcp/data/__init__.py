"""Data that resumes exactly: no sample is lost or fed twice, on any number of readers and workers.

:class:`TokenLoader` packs samples into windows for pre-training. :class:`Frontier` hands out prompts to loops that
complete them out of order.
"""

from typing import TYPE_CHECKING

from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp.data.frontier import Frontier
    from bcp.data.loader import Batch, SampleId, TokenLoader
    from bcp.data.recipe import Source

__all__ = ["Batch", "Frontier", "SampleId", "Source", "TokenLoader"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "bcp.data.adapters": [],
            "bcp.data.frontier": ["Frontier"],
            "bcp.data.loader": ["Batch", "SampleId", "TokenLoader"],
            "bcp.data.recipe": ["Source"],
        },
        __all__,
    )
