"""Data that resumes exactly: no sample is lost or fed twice, on any number of readers and workers.

:class:`TokenLoader` packs samples into windows for pre-training. :class:`Frontier` hands out prompts to loops that
complete them out of order.
"""

from __future__ import annotations

from bcp.data.frontier import Frontier
from bcp.data.loader import Batch, SampleId, TokenLoader
from bcp.data.recipe import Source

__all__ = ["Batch", "Frontier", "SampleId", "Source", "TokenLoader"]
