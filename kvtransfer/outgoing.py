"""A transfer that leaves this rank: does what its SourceHandoff asks for.

Pieces go out over the peer's transports; the digests of a piece are taken once it is written, from the pages
it was read from, which its reader holds until then.
"""

from collections.abc import Callable, Sequence
from functools import partial

from baton.clock import Clock
from baton.errors import ProtocolError
from baton.kvtransfer.digests import UnitDigests
from baton.kvtransfer.handoff import Action, Finished, Granted, Push, Send, StopPushes
from baton.kvtransfer.hashing import Hashing
from baton.kvtransfer.link import Link, Post
from baton.kvtransfer.messages import AnyMessage, Grant, Pull
from baton.kvtransfer.peer_transports import PeerTransports
from baton.kvtransfer.source_handoff import SourceHandoff, SourceState
from baton.kvtransfer.timeline import Timeline
from baton.kvtransfer.transfer_plan import TransferPlan
from baton.kvtransfer.transport import OutgoingTransfer, Piece, Progress, TransferStatus, offsets_of


class Outgoing:
    """All calls are made by the endpoint's thread."""

    def __init__(
        self,
        handoff: SourceHandoff,
        plan: TransferPlan,
        link: Link,
        transports: PeerTransports | None,
        num_units: int,
        digests: UnitDigests,
        hashing: Hashing,
        post: Post,
        clock: Clock,
        on_finished: Callable[["Outgoing", Finished], None],
        on_granted: Callable[[bytes], None],
    ) -> None:
        self.handoff = handoff
        self.link = link
        self.timeline = Timeline(clock, num_units)
        self._plan = plan
        self._transports = transports
        self._digests = digests
        self._hashing = hashing
        self._post = post
        self._on_finished = on_finished
        self._on_granted = on_granted
        self._grant: Grant | Pull | None = None

    @property
    def is_over(self) -> bool:
        return self.handoff.state is SourceState.CLOSED

    def start(self) -> None:
        """The transports to the peer are open, or none will be."""
        self.timeline.settled()
        self.perform(self.handoff.start())

    def accept_pull(self, incarnation: bytes) -> None:
        self.timeline.settled()
        self.timeline.offered()
        self.perform(self.handoff.accept_pull(incarnation))

    def offer(self, pages: Sequence[int], num_units: int) -> None:
        self.timeline.offered()
        self.perform(self.handoff.offer(pages, num_units))

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.link.send(message)
                case Granted(grant):
                    self._grant = grant
                    self.timeline.granted()
                    self._on_granted(self.handoff.transfer)
                case Push():
                    self._push(action)
                case StopPushes():
                    assert self._transports is not None
                    self._transports.abort(self.handoff.transfer)
                    self.perform(self.handoff.pushes_stopped())
                case Finished():
                    self.timeline.finished()
                    self._on_finished(self, action)

    def let_go(self) -> None:
        """The transports are closed for good: the peer's pages are its own again."""
        self.perform(self.handoff.released())

    def receive(self, message: AnyMessage) -> None:
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        self.perform(actions)

    def _push(self, push: Push) -> None:
        grant = self._grant
        assert grant is not None and self._transports is not None
        transfer = OutgoingTransfer(
            id=self.handoff.transfer,
            epoch=grant.epoch,
            plan=self._plan,
            source_pages=tuple(self.handoff.pages),
            destination_pages=grant.pages,
            destination_generations=grant.generations,
        )
        piece = Piece(transfer, push.first, push.stop)
        self.timeline.pushed()
        self._transports.push(piece, partial(self._written, push, piece))

    def _written(self, push: Push, piece: Piece, progress: Progress) -> None:
        self.timeline.wrote(push.stop - push.first, progress)
        if progress.status is not TransferStatus.DONE:
            failed = self.handoff.push_failed(push.part, push.first, push.stop, progress.reason)
            self.perform(failed)
            return
        digests = self._hashing.submit(piece.num_bytes, self._digest, piece)
        digests.add_done_callback(lambda taken: self._post(lambda: self._pushed(push, taken.result())))

    def _pushed(self, push: Push, digests: bytes) -> None:
        self.perform(self.handoff.pushed(push.part, push.first, push.stop, digests))

    def _digest(self, piece: Piece) -> bytes:
        offset_N = offsets_of(self._plan.source, piece.first, piece.stop, piece.transfer.source_pages)
        return self._digests.take(self._plan, offset_N, piece.stop - piece.first)
