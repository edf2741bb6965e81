"""The saves of a run on one rank: a save that is due, and a standby snapshot in the place of the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from bcp._calls import SaveCall, save_call
from bcp.coordinators import coordinator as coordinator_for
from bcp.errors import BcpError
from bcp.events import SaveResult
from bcp.options import SaveOptions
from bcp.planners import Framework
from bcp.protocols import Coordinator
from bcp.runs.bases import Bases
from bcp.runs.calls import Body
from bcp.runs.keeper import Keeper
from bcp.runs.names import free_name, in_order
from bcp.runs.plans import agreed, told
from bcp.runs.resuming import Resumed
from bcp.runs.saves import Saves, Standby
from bcp.runs.states import RunStates
from bcp.runs.tiered import Tiered
from bcp.runtime.bridge import Background
from bcp.tiers.saving import Aim, NoRoomError

__all__ = ["Saver"]


class Saver:
    """Begins the saves of a run, and holds its snapshots.

    Attributes:
        metrics: of the steps that are being saved, until the keeper has them.
    """

    def __init__(
        self,
        url: str,
        states: RunStates,
        framework: Framework,
        given: Coordinator | None,
        options: SaveOptions,
        saves: Saves,
        standby: Standby,
        keeper: Callable[[], Keeper | None],
        tiered: Tiered | None,
        bases: Bases | None,
    ) -> None:
        """Remember the parts; nothing is read yet."""
        self._bases = bases
        self._tiered, self._last_durable = tiered, 0
        self._aimed = 0, 0
        self._there: dict[int, tuple[str, ...]] = {}
        self._place: tuple[int, str] | None = None
        self._url, self._states, self._framework, self._given = url, states, framework, given
        self._options, self._saves, self._standby, self._keeper = options, saves, standby, keeper
        self.metrics: dict[int, Mapping[str, float]] = {}

    def resumed(self, resumed: Resumed) -> None:
        """Remember the folders that were there, on all ranks alike."""
        self._there, self._last_durable = in_order(resumed.folders), resumed.step
        if self._bases is not None:
            self._bases.resumed(resumed)

    def save(self, step: int, *, durable: bool) -> Body[Background[SaveResult]]:
        """Begin a save, once the one before has ended; return when training may go on.

        Args:
            step: of the save.
            durable: whether it is to be durable, whatever the policy says; without tiers all saves are.

        """
        yield from self._replace_standby(step)
        yield self._saves.ended
        self._saves.raise_failure()
        name = yield from self._name(step)
        if self._tiered is None:
            background = self._saves.begin(step, self._call(step, name, self._options))
        else:
            background = yield from self._keep(self._tiered, step, name, durable=durable)
        try:
            yield background.astarted
        except NoRoomError as error:
            background = yield from self._store(step, name, error)
        except BcpError:
            self._saves.raise_failure()  # unless it is tolerated
        return background

    def _store(self, step: int, name: str, full: NoRoomError) -> Body[Background[SaveResult]]:
        """Begin a save to storage in the place of one for which a host has no room. All ranks know of that."""
        self._saves.warn("step %d is saved to storage, for the memory of a host is full: %s", step, full)
        if self._aimed[0] != step:
            self._aimed, self._last_durable = (step, self._last_durable), step
        background = self._saves.begin(step, self._call(step, name, self._options))
        try:
            yield background.astarted
        except BcpError:
            self._saves.raise_failure()
        return background

    def _keep(self, tiered: Tiered, step: int, name: str, *, durable: bool) -> Body[Background[SaveResult]]:
        """Begin a save into the memory of the hosts."""
        replaces = yield from self._replaced(step, name)
        aimed, before = self._aimed
        if aimed == self._last_durable and aimed > (self._saves.drains.newest or 0):  # it has failed, on all ranks
            self._last_durable = before
        is_durable = durable or tiered.is_due(step, self._last_durable)
        if is_durable:
            self._aimed, self._last_durable = (step, self._last_durable), step
        awaited = {step, self._saves.step, *self._saves.drains.steps}
        self.metrics = {each: self.metrics[each] for each in self.metrics if each in awaited or each >= step}
        aim = Aim(step, name, is_durable, replaces, tiered.branch, tiered.on_full)
        call = tiered.call(aim, self._states.now(), self._framework, self._given, self.metrics.get(step))
        began = time.monotonic()
        return self._saves.begin_kept(step, call, partial(tiered.durable, aim, began), stays=not is_durable)

    def _replaced(self, step: int, name: str) -> Body[str]:
        """Return the operation of the checkpoint that a save replaces; empty for none.

        Storage is asked only where the resumption has found a folder of the step. So training goes on while it is
        silent.
        """
        if name not in self._there.get(step, ()):
            return ""
        keeper = self._keeper()

        async def answer() -> bytes:
            return b"" if keeper is None else (await keeper.replaced_by(step, name)).encode()

        ranks, what = coordinator_for(self._given), f"replace the checkpoint of step {step}"
        found: bytes = yield partial(told, ranks, what, self._options.timeout, answer)
        return found.decode()

    def hold(self, step: int) -> Body[None]:
        """Hold a snapshot of this step in host memory, instead of the one before."""
        yield from self._replace_standby(step)
        options, name = self._standby.options(self._options), (yield from self._name(step))
        yield self._standby.begin(step, self._call(step, name, options), self._saves).astarted

    async def drop_standby(self) -> None:
        """Give up the held snapshot, if any, and the empty folder that its save has made."""
        dropped, keeper = await self._standby.drop(), self._keeper()
        if dropped is not None and keeper is not None and self._place is not None:
            await keeper.drop(self._place[1])  # the place of the snapshot: no other save has begun since

    def _replace_standby(self, step: int) -> Body[None]:
        """Give up the held snapshot once all ranks have come to this step: one that hangs before it still needs it."""
        ranks = coordinator_for(self._given)
        if self._standby.holds and ranks.world_size > 1:
            name = f"replace the standby at step {step}"
            yield partial(agreed, ranks, name, self._options.timeout, lambda: True)
        yield self.drop_standby

    def _name(self, step: int) -> Body[str]:
        """Return the folder of a save: a new one if rank 0 knows of a checkpoint of the step that has to stay.

        The ranks agree only where the resumption has found a folder of the step. A step that is saved twice, as a
        standby snapshot and as the last save, has one folder.
        """
        if self._place is None or self._place[0] != step:
            there, keeper, stays = self._there.get(step, ()), self._keeper(), False
            by_agents = self._tiered is not None
            if there:
                stays = keeper is not None and (yield partial(keeper.has_to_stay, step, by_agents=by_agents))
                ranks, answer = coordinator_for(self._given), stays
                name = f"choose the folder of step {step}"
                stays = yield partial(agreed, ranks, name, self._options.timeout, lambda: answer)
            self._place = step, free_name(step, there, beside=stays)
        return self._place[1]

    def aside(self, step: int) -> str:
        """Return the folder of a save by ranks that are left: beside those that the resumption has found."""
        return free_name(step, self._there.get(step, ()), beside=True)

    def _call(self, step: int, name: str, options: SaveOptions) -> SaveCall[SaveResult]:
        """Take this rank's place in a save, in the caller's thread. A checkpoint in the folder is replaced."""
        keeper = self._keeper()
        return save_call(
            f"{self._url}/{name}",
            self._states.now(),
            self._framework,
            None,
            replace(options, step=step, overwrite=True),
            self._given,
            background=True,
            permit=None if keeper is None else keeper.permit(step, name),
            metrics=self.metrics.get(step),
            earlier=None if self._bases is None else self._bases.at(step, name),
        )

    async def aclose(self) -> None:
        """Close the connections to earlier checkpoints."""
        if self._bases is not None:
            await self._bases.aclose()
