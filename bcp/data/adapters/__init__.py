"""Adapters that make dataloaders of other libraries into a :class:`bcp.protocols.ShardedState`.

Three adapters need no library. :class:`PerReader` keeps one opaque unit for each reader, and :class:`Replicated` has a
shared state alone. :class:`VirtualShards` deals iterators with states of their own to any number of readers. The
modules :mod:`~bcp.data.adapters.torchdata`, :mod:`~bcp.data.adapters.grain`, :mod:`~bcp.data.adapters.huggingface` and
:mod:`~bcp.data.adapters.mosaic` know the rules of one library each. None is imported from here.
"""

from typing import TYPE_CHECKING

from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp.data.adapters.opaque import PerReader, Replicated
    from bcp.data.adapters.virtual_shards import VirtualShards

__all__ = ["PerReader", "Replicated", "VirtualShards"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "bcp.data.adapters.opaque": ["PerReader", "Replicated"],
            "bcp.data.adapters.virtual_shards": ["VirtualShards"],
        },
        __all__,
    )
