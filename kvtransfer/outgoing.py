"""A transfer that leaves this replica: has its parts done what its SourceHandoff asks for."""

from collections.abc import Callable, Sequence

from baton.clock import Clock
from baton.errors import ProtocolError
from baton.kvtransfer.handoff import Action, Finished, Granted, Push, Send, StopPushes
from baton.kvtransfer.link import Link
from baton.kvtransfer.message_stream import Call
from baton.kvtransfer.messages import AnyMessage, Grant, Pull
from baton.kvtransfer.pull import Lend
from baton.kvtransfer.rank_messages import (
    ForgetPart,
    GrantPart,
    PartEvent,
    PartHashed,
    PartReached,
    PartStopped,
    PartWritten,
    PushPart,
    ReachPeer,
    StopPart,
)
from baton.kvtransfer.rank_plane import Performer
from baton.kvtransfer.ranks import Route
from baton.kvtransfer.source_handoff import SourceHandoff, SourceState
from baton.kvtransfer.timeline import Timeline
from baton.kvtransfer.transport import Progress, TransferStatus


class Outgoing:
    """All calls are made by the endpoint's thread."""

    def __init__(
        self,
        handoff: SourceHandoff,
        link: Link,
        routes: Sequence[Route],
        num_units: int,
        clock: Clock,
        on_finished: Callable[["Outgoing", Finished], None],
        on_granted: Callable[[bytes], None],
    ) -> None:
        """on_granted: told the transfer's id once the peer has made room, if we had to ask for it."""
        self.handoff = handoff
        self.link = link
        self.timeline = Timeline(clock, num_units * len(routes))
        self._routes = routes
        self._on_finished = on_finished
        self._on_granted = on_granted
        self._num_told = [0] * len(routes)  # pages that the rank of each part knows
        self._unreached: set[int] = set()
        self._stopping: set[int] = set()
        self._then: Call | None = None

    @property
    def is_over(self) -> bool:
        return self.handoff.state is SourceState.CLOSED

    def start(self) -> None:
        """Ask for pages, once the transports of every part are open, or none will be."""
        self._reach(lambda: self.perform(self.handoff.start()))

    def accept_pull(self, incarnation: bytes, lend: Lend) -> None:
        """As `start`, but with pages that the peer has named; incarnation: of this endpoint."""

        def accept() -> None:
            self.timeline.offered()
            self.perform(self.handoff.accept_pull(incarnation, lend))

        self._reach(accept)

    def offer(self, pages: Sequence[int], num_units: int, group: int | None) -> None:
        self.timeline.offered()
        self.perform(self.handoff.offer(pages, num_units, group))

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.link.send(message)
                case Granted(grant):
                    self._grant(grant)
                case Push():
                    self._push(action)
                case StopPushes():
                    self._stop()
                case Finished():
                    self.timeline.finished()
                    self._on_finished(self, action)

    def let_go(self) -> None:
        """No rank writes any more: the peer's pages are its own again."""
        self.perform(self.handoff.released())

    def receive(self, message: AnyMessage) -> None:
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        self.perform(actions)

    def hear(self, event: PartEvent) -> None:
        """What the rank of one of its parts has to say."""
        match event:
            case PartReached():
                self._reached(event.part)
            case PartWritten():
                self._written(event)
            case PartHashed():
                self._hashed(event)
            case PartStopped():
                self._stopped(event.part)

    def lose(self, plane: Performer, reason: str, *, is_dead: bool) -> None:
        """A rank is lost; is_dead: for certain, so that nothing leaves it any more."""
        parts = [route.part for route in self._routes if route.plane is plane]
        if not parts:
            return
        self.perform(self.handoff.fail(reason))
        if is_dead:
            for part in parts:
                self._stopped(part)

    def forget(self) -> None:
        """It is over: nobody needs to know of its parts any more."""
        for route in self._routes:
            route.plane.perform(ForgetPart(transfer=self.handoff.transfer, part=route.part))

    def _reach(self, then: Call) -> None:
        self._then = then
        self._unreached = {route.part for route in self._routes}
        for route in self._routes:
            reach = ReachPeer(
                transfer=self.handoff.transfer,
                part=route.part,
                link=self.link.number,
                destination=route.peer,
                layers=route.layers,
                digest_key=self.link.digest_key(self.handoff.transfer),
            )
            route.plane.perform(reach)

    def _reached(self, part: int) -> None:
        self._unreached.discard(part)
        if not self._unreached and self._then is not None:
            then, self._then = self._then, None
            self.timeline.settled()
            then()

    def _grant(self, grant: Grant | Pull) -> None:
        self.timeline.granted()
        for route in self._routes:
            told = GrantPart(
                transfer=self.handoff.transfer,
                part=route.part,
                epoch=grant.epoch,
                pages=grant.pages,
                generations=grant.generations,
                is_bulk=isinstance(grant, Pull),  # a first token waits for what was reserved, not for this
            )
            route.plane.perform(told)
        if isinstance(grant, Grant):
            self._on_granted(self.handoff.transfer)

    def _push(self, push: Push) -> None:
        pages = self.handoff.pages
        more_pages, self._num_told[push.part] = tuple(pages[self._num_told[push.part] :]), len(pages)
        self.timeline.pushed()
        order = PushPart(
            transfer=self.handoff.transfer,
            part=push.part,
            first=push.first,
            stop=push.stop,
            more_pages=more_pages,
            after=push.after,
        )
        self._routes[push.part].plane.perform(order)

    def _written(self, event: PartWritten) -> None:
        if self.handoff.outcome is None:
            status = TransferStatus.DONE if event.is_done else TransferStatus.FAILED
            progress = Progress(status, event.num_bytes, event.num_messages, event.reason, event.spans)
            self.timeline.wrote(event.stop - event.first, progress)
        if not event.is_done:
            self.perform(self.handoff.push_failed(event.part, event.first, event.stop, event.reason))

    def _hashed(self, event: PartHashed) -> None:
        push = event.part, event.first, event.stop
        if event.reason:
            self.perform(self.handoff.push_failed(*push, event.reason))
        else:
            self.perform(self.handoff.pushed(*push, event.digests))

    def _stop(self) -> None:
        self._stopping = {route.part for route in self._routes}
        for route in self._routes:
            route.plane.perform(StopPart(transfer=self.handoff.transfer, part=route.part))

    def _stopped(self, part: int) -> None:
        if part not in self._stopping:
            return
        self._stopping.remove(part)
        if not self._stopping:
            self.perform(self.handoff.pushes_stopped())
