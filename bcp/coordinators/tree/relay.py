"""The steps of one operation on one node: payloads of a subtree are gathered, and answers are passed down.

The file also has the interfaces of an operation's state to its node, and to the node's own rank.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from bcp._messages.coordination import Abort
from bcp.coordinators.tree.frames import DIGEST_BYTES, Frame, FrameError, Kind, Values, bytes_of, digest_of
from bcp.coordinators.tree.rendezvous import Place

__all__ = ["LocalMember", "NodeContext", "Relay"]


class NodeContext(Protocol):
    """The node of an operation's state, as far as the state uses it."""

    rank: int
    place: Place | None

    def send(self, rank: int, frame: Frame) -> None:
        """Send a neighbour a frame."""

    def name(self, rank: int) -> str:
        """Return a rank's name, with host and process if they are known."""

    def connected(self, rank: int) -> bool:
        """Return whether there is a connection to a neighbour."""

    def quiet(self, rank: int) -> float:
        """Return the seconds since anything came over the connection to a neighbour; 0 without a connection."""

    def renew(self, rank: int) -> None:
        """Dial anew beside a silent connection, if it is that to the parent."""

    def trouble(self, rank: int) -> str:
        """Return the reason why a rank has no connection, as the end of a message; may be empty."""

    def absent(self) -> int | None:
        """Return a rank that has not come and for which the tree waits; None if none is known."""

    def silence(self, seconds: float) -> str:
        """Return the cause if the way to ranks without a connection was silent for ``seconds``, else an empty text."""

    def announce(self, number: int, abort: Abort) -> None:
        """Tell ranks without a place in the tree yet that an operation has ended."""


@dataclass(frozen=True, slots=True)
class LocalMember:
    """The part of this node's own rank in the operation."""

    operation: str  # the operation's name
    timeout: float  # seconds that a neighbour may be late or silent
    beat: float  # seconds between its signs of life
    # called with the number of a step and its answer. Rank 0 gets the payloads of all, in walk order.
    hand_over: Callable[[int, bytes | Values], None]
    end: Callable[[Abort], None]  # called with the cause when the operation has ended


@dataclass(slots=True)
class _Step:
    """One step under way."""

    verb: str | None = None  # the verb of this node's rank; None until the rank has come as far
    payload: bytes = b""  # the payload of this node's rank
    # by child, the digest of its verb and the payloads of its subtree
    given: dict[int, tuple[bytes, Values]] = field(default_factory=dict)
    sent: bool = False  # whether all payloads are on their way up


class Relay:
    """Keeps the payloads of children until this node's rank and all children have given theirs."""

    def __init__(
        self,
        number: int,
        node: NodeContext,
        gone: AbstractSet[int],  # the neighbours that have left; whoever changes it calls advance()
        *,
        report_peer_failure: Callable[[int, str], None],  # called with a rank that has left early, and the cause
        hand_over: Callable[[int, bytes | Values], None],  # as LocalMember.hand_over
    ) -> None:
        """Prepare an operation without steps."""
        self._number = number
        self._node = node
        self._gone = gone
        self._report_peer_failure = report_peer_failure
        self._hand_over = hand_over
        self._steps: dict[int, _Step] = {}
        self._held = False

    def __repr__(self) -> str:
        return f"<Relay of rank {self._node.rank}, operation {self._number}: steps {sorted(self._steps)}>"

    @property
    def verb(self) -> str | None:
        """The verb that this node's rank is waiting in, the oldest if there are several."""
        return next((step.verb for step in self._steps.values() if step.verb is not None), None)

    def verb_of(self, number: int) -> str | None:
        """Return the verb of a step in which this node's rank is waiting."""
        step = self._steps.get(number)
        return None if step is None else step.verb

    def hold(self) -> None:
        """Stop sending steps up: the ranks are doing different things."""
        self._held = True

    def stop(self) -> None:
        """Forget all steps; the operation has ended."""
        self._held = True
        self._steps.clear()

    def give(self, number: int, verb: str, payload: bytes) -> None:
        """Take the payload of this node's rank in a step."""
        step = self._steps.setdefault(number, _Step())
        step.verb, step.payload = verb, payload
        self._advance(number)

    def reply(self, number: int, frame: Frame, answers: Values | None) -> None:
        """Answer a step on rank 0, with ``frame`` for all or ``answers`` in walk order."""
        del self._steps[number]
        self._pass_down(frame, answers)

    def advance(self) -> None:
        """Send complete steps up, or report a rank that has left without its payload."""
        for number in sorted(self._steps):
            self._advance(number)

    # -- up -----------------------------------------------------------------------------------

    def take_up(self, rank: int, frame: Frame) -> None:
        """Keep the payloads of a child's subtree in a step. Raises :class:`FrameError`."""
        place = self._node.place
        if place is None or rank not in place.children or frame.step == 0:
            raise FrameError(f"rank {rank} gives something to rank {self._node.rank}, in step {frame.step}")
        size = place.sizes[place.children.index(rank)]
        digest, values = frame.body[:DIGEST_BYTES], Values.unpack(frame.body[DIGEST_BYTES:], size)
        step = self._steps.setdefault(frame.step, _Step())
        if step.sent or rank in step.given:
            raise FrameError(f"rank {rank} gives something twice in step {frame.step}")
        step.given[rank] = digest, values
        self._advance(frame.step)

    def _advance(self, number: int) -> None:
        """Send a step up if the subtree is complete; report a rank that has left without its payload."""
        step, place = self._steps.get(number), self._node.place
        if step is None or step.verb is None or place is None or self._held:
            return
        if place.parent is not None and place.parent in self._gone:
            self._report_peer_failure(place.parent, f"{self._node.name(place.parent)} has left early")
        elif not step.sent and self._fits(number, step, step.verb, place):
            missing = [child for child in place.children if child not in step.given]
            early = [child for child in missing if child in self._gone]
            if early:
                self._report_peer_failure(early[0], f"{self._node.name(early[0])} has left early")
            elif not missing:
                self._send_up(number, step, place)

    def _fits(self, number: int, step: _Step, verb: str, place: Place) -> bool:
        """Return whether all payloads are of one verb; tell a child with another verb the one of this rank."""
        digest = digest_of(verb)
        for child in place.children:
            if child in step.given and step.given[child][0] != digest:
                self._node.send(child, Frame(Kind.SAY, self._number, number, bytes_of(verb)))
                return False
        return True

    def _send_up(self, number: int, step: _Step, place: Place) -> None:
        """Join the payloads of the subtree, and send them up; on rank 0 they are complete."""
        pieces = (step.given[child][1] for child in place.children)
        values = Values.joined([Values.of([step.payload]), *pieces])
        step.sent = True
        step.payload = b""
        step.given.clear()
        if place.parent is None:
            self._hand_over(number, values)
        else:
            body = digest_of(step.verb or "") + values.pack()
            self._node.send(place.parent, Frame(Kind.UP, self._number, number, body))

    # -- down ---------------------------------------------------------------------------------

    def take_down(self, rank: int, frame: Frame) -> None:
        """Pass an answer down, and hand it to this node's rank. Raises :class:`FrameError`."""
        step, place = self._steps.get(frame.step), self._node.place
        if place is None or rank != place.parent or step is None or not step.sent:
            raise FrameError(f"rank {rank} answers step {frame.step}, which rank {self._node.rank} has not asked for")
        answers = Values.unpack(frame.body, place.size) if frame.kind is Kind.EACH else None
        del self._steps[frame.step]
        self._pass_down(frame, answers)
        self._hand_over(frame.step, frame.body if answers is None else answers.distinct[answers.index[0]])

    def _pass_down(self, frame: Frame, answers: Values | None) -> None:
        """Send the children an answer: the same to all, or to each the answers of its subtree."""
        place = self._node.place
        if place is None:
            return
        if answers is None:
            for child in place.children:
                self._node.send(child, frame)
        else:
            for child, piece in zip(place.children, answers.split((1, *place.sizes))[1:], strict=True):
                self._node.send(child, Frame(Kind.EACH, frame.operation, frame.step, piece.pack()))
