"""One rank's node in one operation: its frames, and its watch over the neighbours. There is no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from bcp._messages.coordination import Abort
from bcp.coordinators.peers import LEFT, Heartbeats, different
from bcp.coordinators.tree.frames import Frame, FrameError, Kind, Values, bytes_of, digest_of, text_of, unpack_number
from bcp.coordinators.tree.relay import LocalMember, NodeContext, Relay
from bcp.protocols import REFUSED

__all__ = ["FailureDetector", "OperationState"]

_ASK, _RENEW = 0.4, 0.5  # parts of the timeout after which a silent neighbour is asked, and dialled anew

_ALL_CALL = ". Every rank has to make this call: leave out conditions such as `if rank == 0`"
"""Hint for ranks that never began an operation."""


class FailureDetector:
    """Signs of life, counted on a clock that stands still while this rank itself sleeps.

    A rank that was stopped, or whose interpreter stood still, finds its neighbours' signs only after it has woken up.
    So the time that it missed does not count.
    """

    def __init__(self, timeout: float, pause: float, now: float) -> None:
        self.awake = 0.0  # seconds that this rank has been awake since it began
        self.timeout = timeout  # seconds that a neighbour may be late or silent
        self._pause = pause
        self._looked = now
        self._signs = 0
        self._heartbeats = Heartbeats((), 0.0)

    def __repr__(self) -> str:
        return f"<FailureDetector for {self.awake:.1f} s, {self._heartbeats!r}>"

    def watch(self, neighbours: Iterable[int]) -> None:
        """Watch these ranks from now on; a rank without a sign within the timeout is late."""
        self._heartbeats = Heartbeats(neighbours, self.awake)

    def note(self, rank: int) -> None:
        """Record a sign of life."""
        self._signs += 1
        self._heartbeats.note(rank, str(self._signs).encode(), self.awake)

    def leave(self, rank: int) -> None:
        """Stop watching a rank."""
        self._heartbeats.note(rank, LEFT, self.awake)

    def look(self, now: float) -> tuple[int, float, bool] | None:
        """Return (rank, seconds, whether it had ever begun) of the rank that is late or silent longest, or None."""
        self.awake += min(now - self._looked, 2 * self._pause)
        self._looked = now
        return self._heartbeats.lost(self.timeout, self.awake)


class OperationState:
    """The operation of one number on one node.

    The first frame of a neighbour begins it, or this node's own rank. Neighbours' frames are kept until the rank has
    come as far.
    """

    def __init__(self, number: int, node: NodeContext) -> None:
        self.number = number
        self.member: LocalMember | None = None  # this node's rank; None until it has begun
        self.ended: Abort | None = None  # the cause of the end
        self.left = False  # whether this node's rank has left
        self.gone: set[int] = set()  # neighbours that have left, or whose connection broke
        self._node = node
        self._relay = Relay(
            number, node, self.gone, report_peer_failure=self.report_peer_failure, hand_over=self._hand_over
        )
        self._digests: dict[int, bytes] = {}
        self._detector: FailureDetector | None = None

    def __repr__(self) -> str:
        state = "ended" if self.ended else "left" if self.left else "under way" if self.member else "not begun"
        return f"<OperationState {self.number} of rank {self._node.rank}: {state}, {len(self.gone)} neighbours gone>"

    @property
    def over(self) -> bool:
        """Whether no frame can come any more."""
        place = self._node.place
        return self.left and place is not None and self.gone.issuperset(place.neighbours)

    # -- this node's own rank -----------------------------------------------------------------

    def begin(self, member: LocalMember, now: float) -> None:
        """Let this node's rank begin, at ``now`` seconds."""
        self.member = member
        if self.ended is not None:
            member.end(self.ended)
            return
        self._detector = FailureDetector(member.timeout, member.beat, now)
        if self._node.place is not None:
            self._introduce()

    def resume(self) -> None:
        """Send all frames that this node would have sent, had it had its place in the tree from the beginning."""
        if self.ended is not None:
            self._tell_all(Frame(Kind.ABORT, self.number, body=self.ended.encode()))
        elif self.member is not None:
            self._introduce()
            self._relay.advance()
        if self.left:
            self._tell_all(Frame(Kind.LEFT, self.number))

    def give(self, number: int, verb: str, payload: bytes) -> None:
        """Take the payload of this node's rank in a step."""
        if self.ended is None:
            self._relay.give(number, verb, payload)

    def reply(self, number: int, frame: Frame, answers: Values | None) -> None:
        """Answer a step on rank 0, with ``frame`` for all or ``answers`` in walk order."""
        if self.ended is None:
            self._relay.reply(number, frame, answers)

    def beat(self, now: float) -> None:
        """Give a sign of life, and check those of the neighbours."""
        if self._detector is None:
            return
        lost = self._detector.look(now)
        place = self._node.place
        if place is None:
            self._look_for_absent(self._detector)
            return
        for rank in place.neighbours:
            if rank not in self.gone and self._node.connected(rank):
                self._look_at_edge(rank, self._detector)
        if lost is not None:
            self._report_silence(*lost, self._detector)

    def leave(self) -> None:
        """Let this node's rank leave; its error, if there is one, was told before."""
        self.left = True
        if self._node.place is not None:
            self._tell_all(Frame(Kind.LEFT, self.number))

    # -- the end ------------------------------------------------------------------------------

    def end(self, abort: Abort, source: int | None = None) -> None:
        """End the operation for this rank and the whole tree; ``source`` is the neighbour that sent the abort."""
        if self.ended is not None:
            return
        self.ended = abort
        self._detector = None
        self._relay.stop()
        if self.member is not None and not self.left:
            self.member.end(abort)
        if self._node.place is not None:
            self._tell_all(Frame(Kind.ABORT, self.number, body=abort.encode()), but=source)
        elif source is None:
            self._node.announce(self.number, abort)

    def report_peer_failure(self, rank: int, cause: str, hint: str = "") -> None:
        """End the operation because of a rank; the message names this rank's own step."""
        doing = f"operation {self.number}" if self.member is None else repr(self.member.operation)
        verb = self._relay.verb
        waits = "" if verb is None else f", while rank {self._node.rank} was in {verb}"
        self.end(Abort(rank, f"{cause}, in {doing}{waits}; see the log of rank {rank}{hint}"))

    def lose(self, rank: int, cause: str) -> None:
        """Record that the connection to a neighbour broke; end the operation, unless the neighbour had left."""
        if rank not in self.gone:
            self.gone.add(rank)
            if not (self.left and rank == self._parent):  # who has all answers needs nobody above
                self.report_peer_failure(rank, cause)

    # -- the neighbours -----------------------------------------------------------------------

    def take(self, rank: int, frame: Frame) -> None:
        """Take a neighbour's frame. Raises :class:`FrameError` or :class:`MessageError` if it is impossible."""
        match frame.kind:
            case Kind.JOIN:
                self._take_join(rank, frame)
            case Kind.BEAT | Kind.ASK:
                self._note(rank)
            case Kind.LEFT:
                self._take_leave(rank)
            case Kind.SAY:
                self._take_words(rank, frame)
            case Kind.ABORT:
                self.end(Abort.decode(frame.body, rank), source=rank)
            case Kind.OLD:
                self._take_old(rank, frame)
            case _ if self.ended is None:
                self._take_step(rank, frame)

    def sign(self, rank: int) -> None:
        """Record a sign of life of a neighbour that is sending a long frame."""
        if rank in self._digests:
            self._note(rank)

    def _take_step(self, rank: int, frame: Frame) -> None:
        """Take a frame that belongs to a step."""
        match frame.kind:
            case Kind.UP:
                self._note(rank)  # a subtree is complete only when the child's own rank has given its part
                self._relay.take_up(rank, frame)
            case Kind.DOWN | Kind.EACH:
                self._relay.take_down(rank, frame)
            case _:
                raise FrameError(f"a frame {frame.kind.name} in the middle of an operation")

    def _take_join(self, rank: int, frame: Frame) -> None:
        """Watch a neighbour that has begun; tell it if the operation has ended already."""
        self._digests[rank] = frame.body
        self._note(rank)
        self._compare(rank)
        if self.ended is not None:
            self._node.send(rank, Frame(Kind.ABORT, self.number, body=self.ended.encode()))

    def _take_leave(self, rank: int) -> None:
        """Expect nothing more of a neighbour; report it if this rank waits for it."""
        self.gone.add(rank)
        if self._detector is not None:
            self._detector.leave(rank)
        self._relay.advance()

    def _take_old(self, rank: int, frame: Frame) -> None:
        """End the operation, which is over already on a neighbour."""
        current, _ = unpack_number(frame.body, 0)
        where = f"{self._node.name(rank)}, which is at operation {current}"
        self.report_peer_failure(rank, f"operation {self.number} is over already on {where}: an old operation id")

    def _take_words(self, rank: int, frame: Frame) -> None:
        """Compare a neighbour's own words with this rank's; a difference ends the operation."""
        operation_name = None if self.member is None else self.member.operation
        own_words = operation_name if frame.step == 0 else self._relay.verb_of(frame.step)
        if own_words is not None and self.ended is None and bytes_of(own_words) != frame.body:
            self.end(different(self._node.rank, own_words, rank, text_of(frame.body)))

    # -- helpers ------------------------------------------------------------------------------

    @property
    def _parent(self) -> int | None:
        return None if self._node.place is None else self._node.place.parent

    def _introduce(self) -> None:
        """Tell the neighbours this rank's operation, and watch them from now on."""
        place, member, detector = self._node.place, self.member, self._detector
        if place is None or member is None or detector is None:
            return
        detector.watch(place.neighbours)
        self._tell_all(Frame(Kind.JOIN, self.number, body=digest_of(member.operation)))
        for rank in self._digests:
            detector.note(rank)
            self._compare(rank)
        for rank in self.gone:
            detector.leave(rank)

    def _compare(self, rank: int) -> None:
        """Tell a neighbour in another operation the words of this rank's; the neighbour does the same."""
        if self.member is None or self.ended is not None or self.member.operation == REFUSED:
            return
        if self._digests[rank] not in (digest_of(self.member.operation), digest_of(REFUSED)):
            self._relay.hold()  # its own words are on their way, and end the operation
            self._node.send(rank, Frame(Kind.SAY, self.number, body=bytes_of(self.member.operation)))

    def _hand_over(self, step: int, answer: bytes | Values) -> None:
        if self.member is not None and not self.left:
            self.member.hand_over(step, answer)

    def _tell_all(self, frame: Frame, but: int | None = None) -> None:
        for rank in () if self._node.place is None else self._node.place.neighbours:
            if rank != but:
                self._node.send(rank, frame)

    def _note(self, rank: int) -> None:
        if self._detector is not None:  # there are neighbours, so this node has its place, and has said what it does
            self._detector.note(rank)

    def _late(self, rank: int, seconds: float) -> str:
        return f"{self._node.name(rank)} has not begun it {seconds:.1f} s after rank {self._node.rank}"

    def _look_at_edge(self, rank: int, detector: FailureDetector) -> None:
        """Give a neighbour a sign of life; ask for one if the edge is silent, and dial anew if it stays so."""
        quiet = min(self._node.quiet(rank), detector.awake)
        self._node.send(rank, Frame(Kind.ASK if quiet >= _ASK * detector.timeout else Kind.BEAT, self.number))
        if quiet >= _RENEW * detector.timeout:
            self._node.renew(rank)

    def _report_silence(self, rank: int, seconds: float, joined: bool, detector: FailureDetector) -> None:  # noqa: FBT001 -- as look() says
        """End the operation because of a neighbour without a sign of life, or of the edge to it."""
        name, trouble = self._node.name(rank), self._node.trouble(rank)
        quiet = self._node.quiet(rank)
        if quiet >= _RENEW * detector.timeout:  # its node answers, whatever the rank does
            self.report_peer_failure(
                rank, f"the connection to {name} has given no sign of life for {quiet:.1f} s{trouble}"
            )
        elif joined:
            self.report_peer_failure(rank, f"{name} has given no sign of life for {seconds:.1f} s")
        elif not self._report_server_failure(detector):
            self.report_peer_failure(rank, f"{self._late(rank, seconds)}{trouble}", _ALL_CALL)

    def _look_for_absent(self, detector: FailureDetector) -> None:
        """Report a rank that keeps this one waiting for its place in the tree, once the time is over."""
        if detector.awake <= detector.timeout or self._report_server_failure(detector):
            return
        absent = self._node.absent()
        if absent is not None:
            cause = f"{self._late(absent, detector.awake)}{self._node.trouble(absent)}"
            self.report_peer_failure(absent, cause, _ALL_CALL)
        elif detector.awake > 2 * detector.timeout:  # rank 0 is there, and will say whom it waits for; unless it died
            self.report_peer_failure(
                0, f"rank 0 has not told the others their places in the tree after {detector.awake:.1f} s"
            )

    def _report_server_failure(self, detector: FailureDetector) -> bool:
        """Report the server of the store if the store has kept this rank waiting; return whether it has."""
        silence = self._node.silence(detector.timeout / 2)  # a store that was heard since then is not why
        if silence:
            self.report_peer_failure(0, silence)
        return bool(silence)
