"""The choice of a codec by measurement: only where storage is slower than compression."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bcp._calls import choose_call, require_asyncio
from bcp._plain import plain
from bcp.backends.place import Path
from bcp.errors import BcpError
from bcp.planners import Framework
from bcp.protocols import Codec, Coordinator, States
from bcp.runtime import bridge

__all__ = ["achoose_codecs", "choose_codecs"]


async def achoose_codecs(
    path: Path,
    states: States,
    *,
    codec: Codec | None = None,
    framework: Framework = None,
    storage_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
) -> list[Codec]:
    """Measure whether saves end sooner with a codec, from a coroutine; see :func:`choose_codecs`.

    Example::

        codecs = await bcp.achoose_codecs("ckpt", states)
        await bcp.asave("ckpt/step-200", states, options=bcp.SaveOptions(codecs=codecs))

    """
    try:
        require_asyncio()
        call = choose_call(path, states, codec, framework, storage_options, coordinator)
        return await call.run(None)
    except BcpError as error:
        raise plain(error) from error.__cause__


def choose_codecs(
    path: Path,
    states: States,
    *,
    codec: Codec | None = None,
    framework: Framework = None,
    storage_options: Mapping[str, Any] | None = None,
    coordinator: Coordinator | None = None,
) -> list[Codec]:
    """Measure whether saves to storage end sooner with a codec than without; return it in a list, or an empty list.

    The call is collective, as :func:`bcp.save`, and all ranks get the same answer. Each rank encodes a sample of the
    tensors, 16 MiB. Then all ranks write 8, 8 and 72 MiB at the same time, beside the checkpoints to come, and delete
    these files. The codec is chosen if the last rank would be done in less than 0.9 of the time.

    Call it once, when the states have values as in training: zeros compress too well. On a local disk of GB/s the
    answer is an empty list, and on storage of 50 MB/s it is zstd. Loads need no ``codecs=`` for :func:`bcp.zstd`. A
    memory tier takes no codecs.

    Args:
        path: where the checkpoints of the run will be, as for :class:`bcp.Run`.
        states: as for :func:`bcp.save`.
        codec: the one in question; None for :func:`bcp.zstd`.
        framework: as for :func:`bcp.save`.
        storage_options: as in :class:`bcp.SaveOptions`.
        coordinator: as for :func:`bcp.save`.

    Returns:
        A list for ``SaveOptions(codecs=...)``. A line of the log says what was measured.

    Raises:
        InputError: the states cannot be saved.
        MissingExtraError: zstandard is not installed.
        StorageError: storage failed.
        PeerError: another rank failed, died or fell silent.

    Example::

        codecs = bcp.choose_codecs("ckpt", states)
        bcp.save("ckpt/step-200", states, options=bcp.SaveOptions(codecs=codecs))

    """
    try:
        call = choose_call(path, states, codec, framework, storage_options, coordinator)
        return bridge.run(partial(call.run, None))
    except BcpError as error:
        raise plain(error) from error.__cause__
