"""The saves of a run on one rank: a save that is due, and a standby snapshot in the place of the one before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from bcp._calls import SaveCall, save_call
from bcp.coordinators import coordinator as coordinator_for
from bcp.errors import BcpError
from bcp.events import SaveReport
from bcp.options import SaveOptions
from bcp.planners import Framework
from bcp.protocols import Coordinator
from bcp.runs.calls import Body
from bcp.runs.keeper import Keeper
from bcp.runs.names import step_name
from bcp.runs.plans import agreed
from bcp.runs.saves import Saves, Standby
from bcp.runs.states import RunStates
from bcp.runtime.bridge import Background

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
    ) -> None:
        """Remember the parts; nothing is read yet."""
        self._url, self._states, self._framework, self._given = url, states, framework, given
        self._options, self._saves, self._standby, self._keeper = options, saves, standby, keeper
        self.metrics: dict[int, Mapping[str, float]] = {}

    def save(self, step: int) -> Body[Background[SaveReport]]:
        """Begin a save, once the one before has ended; return when training may go on."""
        yield from self._replace_standby(step)
        yield self._saves.ended
        self._saves.raise_failure()
        background = self._saves.begin(step, self._call(step, self._options))
        try:
            yield background.astarted
        except BcpError:
            self._saves.raise_failure()  # unless it is tolerated
        return background

    def hold(self, step: int) -> Body[None]:
        """Hold a snapshot of this step in host memory, instead of the one before."""
        yield from self._replace_standby(step)
        options = self._standby.options(self._options)
        yield self._standby.begin(step, self._call(step, options), self._saves).astarted

    async def drop_standby(self) -> None:
        """Give up the held snapshot, if any, and the empty folder that its save has made."""
        dropped, keeper = await self._standby.drop(), self._keeper()
        if dropped is not None and keeper is not None:
            await keeper.drop(dropped)

    def _replace_standby(self, step: int) -> Body[None]:
        """Give up the held snapshot once all ranks have come to this step: one that hangs before it still needs it."""
        ranks = coordinator_for(self._given)
        if self._standby.holds and ranks.world_size > 1:
            name = f"replace the standby at step {step}"
            yield partial(agreed, ranks, name, self._options.timeout, lambda: True)
        yield self.drop_standby

    def _call(self, step: int, options: SaveOptions) -> SaveCall[SaveReport]:
        """Take this rank's place in a save, in the caller's thread. A checkpoint that is there is replaced."""
        keeper = self._keeper()
        return save_call(
            f"{self._url}/{step_name(step)}",
            self._states.now(),
            self._framework,
            None,
            replace(options, step=step, overwrite=True),
            self._given,
            background=True,
            permit=None if keeper is None else keeper.permit(step),
            metrics=self.metrics.get(step),
        )
