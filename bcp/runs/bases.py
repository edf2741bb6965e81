"""The earlier checkpoints of a run to which its saves may refer, as one rank knows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Literal

from bcp._job import Earlier
from bcp.backends import resolve
from bcp.backends.cold import ColdPlaces
from bcp.backends.cooled import cooled_child
from bcp.errors import InputError
from bcp.format.metadata import METADATA_KEY
from bcp.format.receipt import Receipt
from bcp.options import SaveOptions
from bcp.protocols import Backend, Version
from bcp.runs.keeper import Keeper
from bcp.runs.names import step_name
from bcp.runs.resuming import Resumed

__all__ = ["Bases", "Since", "bases"]

Since = Literal["auto"]


class Bases:
    """What the saves of a run remember of each other, on one rank.

    Attributes:
        receipt: what this rank has written in the newest checkpoint; None if it is not in memory.
        compared: how many of its blocks were equal in the last two saves, and how many were compared.
        is_new: for each file of this rank, by its kind, whether all of its blocks had changed in the last save.
        newest: step and folder of the newest checkpoint of this life, or of the one that it was resumed from.
    """

    def __init__(self, url: str, options: SaveOptions, keeper: Callable[[], Keeper | None]) -> None:
        """Remember the run; nothing is opened yet."""
        self._url, self._options, self.keeper = url, options, keeper
        self._places: ColdPlaces | None = None
        self.receipt: Receipt | None = None
        self.compared = 0, 0
        self.is_new: Mapping[int, bool] = {}
        self.newest = -1, ""

    def resumed(self, resumed: Resumed) -> None:
        """Remember the checkpoint that was loaded; from the memory of hosts there is nothing to refer to."""
        self.newest = (resumed.step, resumed.name) if resumed.name and not resumed.hosts else (-1, "")

    def at(self, step: int, name: str) -> Earlier:
        """Return what a save of a step into a folder needs."""
        return _Earlier(self, step, name)

    async def folder(self, name: str) -> Backend:
        """Return storage over a folder of the run, whose files may lie in a cold place. :meth:`aclose` closes it."""
        options = self._options
        if self._places is None:
            opens = partial(resolve, self._url, options.storage_options, options.retries)
            self._places = ColdPlaces(opens, self._url, options.storage_options, options.retries)
        return cooled_child(await self._places.run(), name, self._places)

    async def aclose(self) -> None:
        """Close the connections to storage."""
        if self._places is not None:
            await self._places.aclose()


class _Earlier:
    """The checkpoints of a run to which one save may refer."""

    def __init__(self, bases: Bases, step: int, name: str) -> None:
        self._step, self._name, self._bases = step, name, bases
        self._versions: dict[int, Version] = {}

    @property
    def receipt(self) -> Receipt | None:
        return self._bases.receipt

    @receipt.setter
    def receipt(self, receipt: Receipt | None) -> None:
        self._bases.receipt = receipt

    @property
    def compared(self) -> tuple[int, int]:
        return self._bases.compared

    @property
    def is_new(self) -> Mapping[int, bool]:
        return self._bases.is_new

    async def base(self) -> str:
        """Return the folder of the newest checkpoint. References lead to folders of a run's own names only."""
        step, name = self._bases.newest
        return name if 0 <= step < self._step and name == step_name(step) else ""

    async def protects(self, steps: Collection[int]) -> bool:
        keeper = self._bases.keeper()
        if keeper is None or self._step in steps:
            return False
        return await keeper.protects(self._step, steps)

    async def gone(self, steps: Collection[int]) -> str:
        """Compare the metadata of the steps with those of the first call."""
        for step in steps:
            name = step_name(step)
            version = await (await self.folder(name)).version(METADATA_KEY)
            if version is None or self._versions.setdefault(step, version) != version:
                what = "is not there" if version is None else "was replaced"
                return (
                    f"step {self._step} refers to {name}, which {what}: somebody has deleted or replaced it while the "
                    "run saved"
                )
        keeper = self._bases.keeper()
        if keeper is not None:
            keeper.will_refer(self._step, steps)
        return ""

    async def folder(self, name: str) -> Backend:
        return await self._bases.folder(name)

    def saved(self, receipt: Receipt, compared: tuple[int, int], is_new: Mapping[int, bool]) -> None:
        if self._step < self._bases.newest[0]:  # a standby snapshot that was written late
            return
        self._bases.newest = self._step, self._name
        self._bases.receipt, self._bases.compared, self._bases.is_new = receipt, compared, is_new


def bases(
    since: Since | None, url: str, options: SaveOptions, keeper: Callable[[], Keeper | None], *, tiers: object
) -> Bases | None:
    """Return what a run's saves refer to; None for a run whose saves store everything.

    Raises:
        InputError: ``since`` is no such word, or another argument does not go with it.

    """
    if since is None:
        return None
    if since != "auto":
        raise InputError(f"since={since!r}: pass 'auto', or None for saves that store everything")
    if tiers is not None:
        raise InputError("since='auto' does not go with tiers yet: agents store whole files. Leave one of them out")
    if options.codecs:
        names = ", ".join(codec.name for codec in options.codecs)
        raise InputError(f"codecs={names} do not go with since='auto', which compares blocks as they are in memory")
    return Bases(url, options, keeper)
