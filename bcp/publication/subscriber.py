"""Follow a publication: bring a local folder to the newest version of the weights."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bcp._text import shown
from bcp.backends.place import Path, place_of
from bcp.errors import InputError, NotACheckpointError
from bcp.publication.applying import apply_deltas
from bcp.publication.chain import Chain, CommittedVersion
from bcp.publication.claims import latest_of
from bcp.publication.encoding import Bytes, changed, check_zstandard, digest
from bcp.publication.folder import Note, PulledFolder
from bcp.publication.index import whole
from bcp.runtime.imports import imported
from bcp.runtime.threads import in_thread
from bcp.tools.calls import called

if TYPE_CHECKING:
    import torch

__all__ = ["Patch", "PullResult", "Subscriber"]


class Patch(NamedTuple):
    """The changed elements of a tensor, as :meth:`Subscriber.patches` yields them.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        indices: int64, flat row-major indices of the changed elements, ascending.
        values: the new elements, in the dtype of the tensor.
    """

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class PullResult:
    """The outcome of :meth:`Subscriber.pull`.

    Attributes:
        version: that the folder has now.
        before: that it had; 0 if it had none, or if a call had been killed.
        anchor: the version whose tensors were all copied; 0 if there was no need.
        deltas: how many deltas were applied.
        nbytes: bytes of tensors and deltas that were read from the publication, without repairs.
        repaired: names of tensors that were torn or damaged in the folder, and came from anchor and deltas.
    """

    version: int
    before: int
    anchor: int = 0
    deltas: int = 0
    nbytes: int = 0
    repaired: tuple[str, ...] = ()


class Subscriber:
    """A local folder that follows a publication of :func:`bcp.publish`.

    Use it on each host of an inference engine: :meth:`pull`, and let the engine load the folder. The folder is an
    ordinary Hugging Face folder. Every tensor is compared with its digest before it is written. A call that fails or is
    killed leaves a folder that the next call repairs.

    Args:
        url: the publication: a path, a URL, or a backend.
        folder: the local folder, of this subscriber alone. Processes of one host may share it: they take turns.
        storage_options: for the file system of the URL.

    Raises:
        InputError: the path or the options cannot be any.
        MissingExtraError: ``zstandard`` is not installed.

    Example:
        >>> _ = bcp.publish(torch.nn.Linear(4, 2), "weights/run-8", 1)
        >>> subscriber = bcp.Subscriber("weights/run-8", "engine/model")
        >>> subscriber.pull().version
        1
        >>> bcp.Checkpoint("engine/model").names()
        ['bias', 'weight']

    """

    def __init__(
        self, url: Path, folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        check_zstandard()
        self._open = partial(place_of, url, None, storage_options)
        self.path = self._open().path
        self._folder = PulledFolder(folder)

    def __repr__(self) -> str:
        return f"<Subscriber of {shown(self.path)} in {self._folder.root}>"

    def pull(self, *, version: int | None = None) -> PullResult:
        """Bring the folder to a version. The way with the fewest bytes is taken: an anchor and deltas, or deltas alone.

        All deltas are checked before the first byte is written.

        Args:
            version: the version; the newest by default. Older ones work, too.

        Raises:
            InputError: the version is not published yet, or is no version.
            NotACheckpointError: nothing is published there, or the version was deleted.
            CorruptError: a tensor or an index of the publication is damaged; no delta was applied.
            StorageError: storage failed.

        Example:
            >>> model = torch.nn.Linear(4, 2)
            >>> for version in (1, 2):
            ...     _ = bcp.publish(model, "weights/run-9", version)
            >>> subscriber = bcp.Subscriber("weights/run-9", "engine/pulled")
            >>> subscriber.pull(version=1).anchor, subscriber.pull().deltas
            (1, 1)

        """
        return called(partial(self.apull, version=version), f"pull {shown(self.path)}")

    async def apull(self, *, version: int | None = None) -> PullResult:
        """Do the same as :meth:`pull` from a coroutine."""
        place = self._open()
        async with place.opened, self._folder.locked():
            chain = Chain(place.backend, place.path)
            target = await self._target(chain, version)
            note = await self._folder.note()
            before = note.version if note.is_whole else 0
            publication = (await chain.version(target)).index.publication
            if note.is_whole and (note.version, note.publication) == (target, publication):
                return PullResult(target, before)
            anchor, deltas = await _way(chain, note, target)
            if anchor is not None:
                await self._folder.take_note(Note(0, publication, target))
                await self._folder.reset(anchor, await chain.pieces(anchor.index.version, anchor=True))
                await self._folder.take_note(Note(anchor.index.version, publication, anchor.index.version))
            repaired = await apply_deltas(chain, self._folder, deltas) if deltas else []
            nbytes = sum(delta.index.delta_nbytes for delta in deltas)
            if anchor is None:
                return PullResult(target, before, 0, len(deltas), nbytes, tuple(repaired))
            nbytes += anchor.index.nbytes
            return PullResult(target, before, anchor.index.version, len(deltas), nbytes, tuple(repaired))

    def patches(self, version: int) -> Iterator[Patch]:
        """Yield the elements that a version has changed, for engines that patch live weights, as vLLM does.

        The elements lead from the version before to ``version``. An anchor without a delta yields all elements.
        Nothing is written. The folder saves reads if it has one of the two versions; then do not pull meanwhile.

        Args:
            version: a committed version.

        Raises:
            InputError: ``version`` is no version.
            NotACheckpointError: there is no such version, or it was deleted.
            CorruptError: a tensor or an index of the publication is damaged.
            StorageError: storage failed.

        Example:
            >>> model = torch.nn.Linear(4, 2)
            >>> _ = bcp.publish(model, "weights/run-10", 1)
            >>> with torch.no_grad():
            ...     _ = model.bias[1].fill_(7.0)
            >>> _ = bcp.publish(model, "weights/run-10", 2)
            >>> for name, shape, indices, values in bcp.Subscriber("weights/run-10", "engine/patched").patches(2):
            ...     print(name, shape, indices, values)
            bias (2,) tensor([1]) tensor([7.])

        """
        patches = self.apatches(version)
        try:
            while True:
                try:
                    patch = called(patches.__anext__, f"patches of {shown(self.path)}")
                except StopAsyncIteration:
                    return
                yield patch
        finally:
            called(patches.aclose, f"end patches of {shown(self.path)}")

    async def apatches(self, version: int) -> AsyncGenerator[Patch, None]:
        """Do the same as :meth:`patches` from a coroutine."""
        whole("version", version)
        place = self._open()
        async with place.opened:
            chain = Chain(place.backend, place.path)
            index = (await chain.version(version)).index
            layout = await chain.layout(version)
            is_delta = bool(index.encoding)
            read = await self.reader(chain, version)
            for name in sorted(index.deltas if is_delta else index.files):
                data, tensor = await read(name), layout[name]
                elements = data.view(np.dtype((np.void, tensor.itemsize)))
                indices = np.arange(len(elements), dtype=np.int64)
                if is_delta:
                    content = await chain.stream(version, name, tensor.nbytes)
                    indices = await in_thread(changed, content, tensor.itemsize, index.encoding)
                values = np.ascontiguousarray(elements[indices]).view(np.uint8)
                yield _patch(name, tensor.dtype, tensor.shape, indices, values)

    async def reader(self, chain: Chain, version: int) -> Callable[[str], Awaitable[Bytes]]:
        """Return a function that reads a tensor of a version: from the folder if its digest says so, else from storage.

        Args:
            chain: the publication.
            version: a committed version.

        """
        digests = (await chain.version(version)).index.digests
        note = await self._folder.note()
        has_any = note.is_whole and note.version in (version - 1, version)

        async def read(name: str) -> Bytes:
            if has_any:
                data = await self._folder.read(name)
                if await in_thread(digest, data) == digests[name]:
                    return data
            return await chain.tensor(name, version)

        return read

    async def _target(self, chain: Chain, version: int | None) -> int:
        newest = await latest_of(chain.backend, chain.path)
        if not newest:
            raise NotACheckpointError(f"{chain.path} has no published version; see that bcp.publish writes there")
        target = newest if version is None else whole("version", version)
        if target > newest:
            raise InputError(f"{chain.path} has no version {target} yet; the newest is {newest}")
        return target


async def _way(chain: Chain, note: Note, target: int) -> tuple[CommittedVersion | None, Sequence[CommittedVersion]]:
    """Return how to come to a version with few bytes: an anchor to begin with, or None for the folder; and deltas."""
    anchor, *later = await chain.since_anchor(target)
    most = anchor.index.nbytes + sum(each.index.delta_nbytes for each in later)
    own: list[CommittedVersion] = []
    version = target if 0 < note.version <= note.towards <= target else 0
    while version > note.version:
        try:
            found = await chain.version(version)
        except NotACheckpointError:  # retention has deleted it
            return anchor, later
        most -= found.index.delta_nbytes
        if not found.index.encoding or found.index.publication != note.publication or most < 0:
            return anchor, later
        own.insert(0, found)
        version -= 1
    return (None, own) if own else (anchor, later)


def _patch(name: str, dtype: str, shape: tuple[int, ...], indices: Any, values: Bytes) -> Patch:
    torch = imported("torch")
    return Patch(name, shape, torch.from_numpy(indices), torch.from_numpy(values).view(getattr(torch, dtype)))
