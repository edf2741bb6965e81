"""Storage of bcp for users of torch.distributed.checkpoint: backends, format and checksums in one line.

:class:`StorageWriter` and :class:`StorageReader` go into ``dcp.save``, ``dcp.async_save`` and ``dcp.load``. A written
checkpoint is an ordinary one of bcp, so :class:`bcp.Checkpoint` opens it and :func:`bcp.load` loads it.

``import bcp.dcp`` imports neither torch nor anything else that takes time. The first use of a name does.
"""

from typing import TYPE_CHECKING

from bcp.runtime.imports import lazy_names

if TYPE_CHECKING:
    from bcp.dcp.reader import StorageReader
    from bcp.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {"bcp.dcp.reader": ["StorageReader"], "bcp.dcp.writer": ["StorageWriter"]},
        __all__,
        together=["bcp.dcp.reader", "bcp.dcp.writer"],
    )
