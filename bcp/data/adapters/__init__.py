"""Adapters that make dataloaders of other libraries into a :class:`bcp.protocols.ShardedState`.

Three adapters need no library. :class:`PerReader` keeps one opaque unit for each reader, and :class:`Replicated` has a
shared state alone. :class:`VirtualShards` deals iterators with states of their own to any number of readers. The
modules :mod:`~bcp.data.adapters.torchdata`, :mod:`~bcp.data.adapters.grain`, :mod:`~bcp.data.adapters.huggingface` and
:mod:`~bcp.data.adapters.mosaic` know the rules of one library each. None is imported from here.
"""

from __future__ import annotations

from bcp.data.adapters.opaque import PerReader, Replicated
from bcp.data.adapters.virtual_shards import VirtualShards

__all__ = ["PerReader", "Replicated", "VirtualShards"]
