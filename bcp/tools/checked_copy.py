"""Copy one data file between two places: every block is compared with its checksum on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bcp.errors import CorruptError
from bcp.format.receipt import FileReceipt
from bcp.pipeline import Budget, Pipeline, Stage, unwrap_stage_errors
from bcp.protocols import Backend, PartWriter, at_once_of
from bcp.read.windows import Window, windows_of, wrong_block
from bcp.runtime.threads import in_thread

__all__ = ["copy_data_file"]

PART_BYTES = 32 << 20
"""Bytes that are read, compared and written at once; a store with 10,000 parts an object takes files of 320 GB."""


async def copy_data_file(
    origin: Backend,
    key: str,
    goal: Backend,
    goal_key: str,
    file: FileReceipt,
    told: Callable[[int], object],
) -> None:
    """Copy a data file by parts, several at once. It appears whole in the target, or not at all.

    Args:
        origin: has the file.
        key: of the file there.
        goal: takes the copy.
        goal_key: of the copy.
        file: the file's receipt.
        told: called with the bytes of each part.

    Raises:
        CorruptError: the file is missing, or a block differs from its checksum.
        StorageError: storage failed.

    """
    workers = min(at_once_of(origin), at_once_of(goal))
    windows = windows_of(key, file, PART_BYTES)
    number = {window.name: index for index, window in enumerate(windows)}

    async def move(writer: PartWriter, window: Window) -> None:
        memory = memoryview(bytearray(window.nbytes))
        try:
            await origin.read_into(key, window.start, memory)
        except FileNotFoundError as error:
            raise CorruptError(f"{key} of the source is missing; restore it") from error
        if wrong := await in_thread(partial(wrong_block, window, memory)):
            raise CorruptError(f"the source is damaged: {wrong}")
        await writer.write_part(number[window.name], window.start, memory)
        told(window.nbytes)

    start: Pipeline[Window, Window] = Pipeline()
    largest = max((window.nbytes for window in windows), default=1)
    with unwrap_stage_errors():
        async with goal.open_write(goal_key, file.stored_nbytes) as writer:
            graph = start.then(Stage("copy", partial(move, writer), workers=workers))
            await graph.run(windows, budget=Budget(max(largest, 1) * workers))
