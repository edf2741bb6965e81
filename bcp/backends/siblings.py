"""The folders beside a checkpoint: those of other steps of its run."""

from __future__ import annotations

from functools import partial

from bcp._log import log
from bcp.backends.cold import STEP_FOLDER
from bcp.backends.cooled import CooledBackend, cooled_child
from bcp.backends.local import LocalBackend
from bcp.backends.objects.retry import in_turns
from bcp.backends.prefixed import PrefixedBackend, child
from bcp.backends.small import get_small
from bcp.errors import CorruptError, FormatVersionError, NotACheckpointError
from bcp.format.metadata import METADATA_KEY, decode_commit
from bcp.protocols import Backend, folders_of
from bcp.runtime.threads import in_thread, in_thread_gc_paused

__all__ = ["folder_name", "referring", "sibling"]


def folder_name(step: int) -> str:
    """Return the name of the folder to which references of a step lead.

    Example:
        >>> folder_name(1000)
        'step-00001000'

    """
    return f"step-{step:08d}"


async def sibling(backend: Backend, name: str) -> Backend | None:
    """Return storage over a folder beside a checkpoint; None if the backend does not know what is beside it.

    It need not be closed: the backend's owner closes the connections.

    Args:
        backend: over the checkpoint.
        name: of the other folder.

    """
    if isinstance(backend, CooledBackend) and (side := await backend.side()) is not None:
        return cooled_child(await side[0].run(), name, side[0])
    found = await _above(backend)
    return None if found is None else child(found[0], name)


async def referring(backend: Backend) -> list[str]:
    """Return the folders beside a checkpoint whose metadata refer to it.

    All folders of steps are asked. Damaged metadata refer to nothing, for nobody can load such a checkpoint. Metadata
    of a newer version may refer to anything.

    Args:
        backend: over the checkpoint; it may be uncommitted.

    Raises:
        StorageError: storage failed.

    """
    found = await _above(backend)
    if found is None or not STEP_FOLDER.fullmatch(found[1]):
        return []
    run, name = found
    step = int(name.rpartition("-")[2])
    if name != folder_name(step):  # no reference leads there
        return []
    others = sorted(other for other in await folders_of(run) if STEP_FOLDER.fullmatch(other) and other != name)
    asked = await in_turns(partial(_refers, run, other, step) for other in others)
    return [other for other, refers in zip(others, asked, strict=True) if refers]


async def _refers(run: Backend, name: str, step: int) -> bool:
    """Whether the metadata in a folder refer to a step."""
    try:
        data = await get_small(child(run, name), METADATA_KEY)
        return step in (await in_thread_gc_paused(decode_commit, data, f"{name}/{METADATA_KEY}")).refers
    except FileNotFoundError:
        return False
    except FormatVersionError:
        return True
    except (CorruptError, NotACheckpointError) as error:
        log.warning("damaged metadata are taken for those without references", checkpoint=name, error=repr(error))
        return False


async def _above(backend: Backend) -> tuple[Backend, str] | None:
    """Return storage over the folder above a checkpoint, and the checkpoint's name there; None if it is not known."""
    if isinstance(backend, CooledBackend):
        side = await backend.side()
        return await _above(backend.hot) if side is None else (await side[0].run(), side[1])
    if isinstance(backend, PrefixedBackend):
        above, _, name = backend.prefix.rpartition("/")
        return (child(backend.whole, above) if above else backend.whole), name
    if isinstance(backend, LocalBackend):
        root = await in_thread(backend.root.resolve)
        return LocalBackend(root.parent), root.name
    return None
