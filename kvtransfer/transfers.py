"""The open transfers of an endpoint, which connect each hand-off state machine to its link and its ranks.

`Incoming` and `Outgoing` perform the actions of a DestinationHandoff and a SourceHandoff, and pass
the ranks' part events to the hand-off. `TransferManager` starts, finds and removes transfers.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, TypeAlias

from baton.clock import Clock
from baton.errors import ProtocolError
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.destination import DestinationHandoff, DestinationState
from baton.kvtransfer.protocol.handoff import (
    Action,
    CloseReceive,
    Finished,
    Granted,
    GrantedTransfer,
    HandoffTimeouts,
    OpenReceive,
    PageLedger,
    Push,
    Send,
    StopPushes,
    Timeline,
    TransferEnded,
    TransferSize,
    Verify,
)
from baton.kvtransfer.protocol.messages import AnyMessage, Grant, PullRequest, TransferRequest, Wrote
from baton.kvtransfer.protocol.pull import Lend
from baton.kvtransfer.protocol.source import SourceHandoff, SourceState
from baton.kvtransfer.ranks.messages import (
    ClosePart,
    ForgetPart,
    GrantPart,
    HashUnits,
    OpenPart,
    PartEvent,
    PartHashed,
    PartOpened,
    PartReached,
    PartStopped,
    PartVerified,
    PartWritten,
    Performer,
    PushPart,
    ReachPeer,
    Route,
    StopPart,
    VerifyPart,
    WriterDied,
    WriterStopped,
)
from baton.kvtransfer.settings import EndpointSettings
from baton.kvtransfer.transports.message_stream import Call
from baton.kvtransfer.transports.receive_registration import ReceiveRegistrations


class Incoming:
    """A transfer that arrives at this replica: performs the actions of its DestinationHandoff.

    Messages to the source are held back until every rank has opened its part: a rank in another process has
    to receive its order first, and on a GPU the steps that may still write the pages have to end. When the
    transfer ends, the held messages are sent. The endpoint's thread makes all calls.
    """

    def __init__(
        self,
        handoff: DestinationHandoff,
        link: Link,
        routes: Sequence[Route],
        num_units: int,
        on_finished: Callable[["Incoming", Finished], None],
    ) -> None:
        self.handoff = handoff
        self.link = link
        self._routes = routes
        self._num_units = num_units
        self._on_finished = on_finished
        self._opening: set[int] = set()  # parts that their ranks have not opened yet
        self._held_messages: list[AnyMessage] = []

    @property
    def is_over(self) -> bool:
        """Return True when the transfer has ended and no writer can write its pages."""
        return self.handoff.state is DestinationState.CLOSED

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform the actions of the hand-off in their order."""
        for action in actions:
            match action:
                case Send(message):
                    self._send(message)
                case OpenReceive(part, after):
                    self._open(part, after)
                case CloseReceive(part, is_confirmed):
                    close = ClosePart(transfer=self.handoff.transfer, part=part, is_confirmed=is_confirmed)
                    self._routes[part].executor.perform(close)
                case Verify(part, digests):
                    verify = VerifyPart(transfer=self.handoff.transfer, part=part, digests=digests)
                    self._routes[part].executor.perform(verify)
                case Finished():
                    self._send_held_messages()
                    self._on_finished(self, action)

    def receive(self, message: AnyMessage) -> None:
        """Process a message of the source. An illegal message drops the link and ends the transfer."""
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        else:
            if isinstance(message, Wrote) and self._is_current(message):
                self._hash(message)
        self.perform(actions)

    def on_part_event(self, event: PartEvent) -> None:
        """Process an event from the rank of one of the parts."""
        match event:
            case PartOpened():
                self._opened(event.part)
            case WriterStopped():
                self.perform(self.handoff.writer_stopped(event.part))
            case WriterDied():
                self.perform(self.handoff.fail("the source's process died"))
            case PartVerified():
                self.perform(self.handoff.verified(event.part, event.corrupt_units))

    def on_rank_lost(self, executor: Performer, reason: str, *, is_dead: bool) -> None:
        """End the transfer if the lost rank has a part in it.

        is_dead: the rank's process is known to have ended, so its pages and their writers no longer exist.
        """
        parts = [route.part for route in self._routes if route.executor is executor]
        if not parts:
            return
        self.perform(self.handoff.fail(reason))
        if is_dead:
            for part in parts:
                self.perform(self.handoff.writer_stopped(part))

    def forget(self) -> None:
        """Tell the ranks to delete the parts' state; called once the transfer is over."""
        for route in self._routes:
            route.executor.perform(ForgetPart(transfer=self.handoff.transfer, part=route.part))

    def _send(self, message: AnyMessage) -> None:
        if self._opening:
            self._held_messages.append(message)
        else:
            self.link.send(message)

    def _open(self, part: int, after: int) -> None:
        _, executor, peer, layers = self._routes[part]
        self._opening.add(part)
        order = OpenPart(
            transfer=self.handoff.transfer,
            part=part,
            epoch=self.handoff.epoch,
            num_units=self._num_units,
            pages=tuple(self.handoff.pages),
            generations=self.handoff.generations(),
            source=peer,
            layers=layers,
            digest_key=self.link.digest_key(self.handoff.transfer),
            after=after,
        )
        executor.perform(order)

    def _opened(self, part: int) -> None:
        self._opening.discard(part)
        if not self._opening:
            self._send_held_messages()

    def _send_held_messages(self) -> None:
        messages, self._held_messages = self._held_messages, []
        self._opening.clear()
        for message in messages:
            self.link.send(message)

    def _is_current(self, wrote: Wrote) -> bool:
        """Return True when the hand-off has accepted the message and still receives."""
        handoff = self.handoff
        return wrote.epoch == handoff.epoch and handoff.state is DestinationState.RECEIVING

    def _hash(self, wrote: Wrote) -> None:
        units = HashUnits(transfer=self.handoff.transfer, part=wrote.part, first=wrote.first, stop=wrote.stop)
        self._routes[wrote.part].executor.perform(units)


class Outgoing:
    """A transfer that leaves this replica: performs the actions of its SourceHandoff.

    The endpoint's thread makes all calls.
    """

    def __init__(
        self,
        handoff: SourceHandoff,
        link: Link,
        routes: Sequence[Route],
        num_units: int,
        clock: Clock,
        on_finished: Callable[["Outgoing", Finished], None],
    ) -> None:
        self.handoff = handoff
        self.link = link
        self.timeline = Timeline(clock, num_units * len(routes))
        self._routes = routes
        self._on_finished = on_finished
        self._num_pages_told = [0] * len(routes)  # part -> source pages that its rank knows
        self._unreached: set[int] = set()  # parts whose transports are not open yet
        self._stopping: set[int] = set()  # parts that may still read or write
        self._on_reached: Call | None = None

    @property
    def is_over(self) -> bool:
        """Return True when the transfer has ended and no push runs."""
        return self.handoff.state is SourceState.CLOSED

    def start(self) -> None:
        """Open the transports of all parts, as far as possible, and then write the offered pages."""
        self._reach(lambda: self.perform(self.handoff.opened()))

    def accept_pull(self, incarnation: bytes, lend: Lend) -> None:
        """Open the transports, then lend and write the pages that the peer wants, or refuse.

        incarnation: the incarnation of this endpoint. lend: finds the wanted pages by their keys.
        """

        def accept() -> None:
            self.timeline.offered()
            self.perform(self.handoff.accept_pull(incarnation, lend))

        self._reach(accept)

    def offer(self, pages: Sequence[int], num_units: int, group: int | None) -> None:
        """Add computed pages; see `SourceHandoff.offer`."""
        self.timeline.offered()
        self.perform(self.handoff.offer(pages, num_units, group))

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform the actions of the hand-off in their order."""
        for action in actions:
            match action:
                case Send(message):
                    self.link.send(message)
                case Granted(request):
                    self._grant(request)
                case Push():
                    self._push(action)
                case StopPushes():
                    self._stop()
                case Finished():
                    self.timeline.finished()
                    self._on_finished(self, action)

    def send_released(self) -> None:
        """Tell the destination that no rank writes its pages; called once all ranks have stopped."""
        self.perform(self.handoff.released())

    def receive(self, message: AnyMessage) -> None:
        """Process a message of the destination. An illegal message drops the link and ends the transfer."""
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        self.perform(actions)

    def on_part_event(self, event: PartEvent) -> None:
        """Process an event from the rank of one of the parts."""
        match event:
            case PartReached():
                self._reached(event.part)
            case PartWritten():
                self._written(event)
            case PartHashed():
                self._hashed(event)
            case PartStopped():
                self._stopped(event.part)

    def on_rank_lost(self, executor: Performer, reason: str, *, is_dead: bool) -> None:
        """End the transfer if the lost rank has a part in it.

        is_dead: the rank's process is known to have ended, so the rank sends no more bytes.
        """
        parts = [route.part for route in self._routes if route.executor is executor]
        if not parts:
            return
        self.perform(self.handoff.fail(reason))
        if is_dead:
            for part in parts:
                self._stopped(part)

    def forget(self) -> None:
        """Tell the ranks to delete the parts' state; called once the transfer is over."""
        for route in self._routes:
            route.executor.perform(ForgetPart(transfer=self.handoff.transfer, part=route.part))

    def _reach(self, on_reached: Call) -> None:
        self._on_reached = on_reached
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
            route.executor.perform(reach)

    def _reached(self, part: int) -> None:
        self._unreached.discard(part)
        if not self._unreached and self._on_reached is not None:
            on_reached, self._on_reached = self._on_reached, None
            self.timeline.opened()
            on_reached()

    def _grant(self, request: TransferRequest) -> None:
        for route in self._routes:
            order = GrantPart(
                transfer=self.handoff.transfer,
                part=route.part,
                epoch=request.epoch,
                pages=request.pages,
                generations=request.generations,
                is_bulk=isinstance(
                    request, PullRequest
                ),  # no request waits for its first token on this transfer
            )
            route.executor.perform(order)

    def _push(self, push: Push) -> None:
        pages = self.handoff.pages
        more_pages = tuple(pages[self._num_pages_told[push.part] :])
        self._num_pages_told[push.part] = len(pages)
        self.timeline.pushed()
        order = PushPart(
            transfer=self.handoff.transfer,
            part=push.part,
            first=push.first,
            stop=push.stop,
            more_pages=more_pages,
            after=push.after,
        )
        self._routes[push.part].executor.perform(order)

    def _written(self, event: PartWritten) -> None:
        if self.handoff.outcome is None:
            outcome = event.outcome
            self.timeline.wrote(
                event.stop - event.first,
                gather_s=outcome.spans.gather_s,
                moving_s=outcome.spans.total_s,
                num_bytes=outcome.num_bytes,
                num_messages=outcome.num_messages,
            )
        if not event.outcome.is_done:
            self.perform(self.handoff.push_failed(event.part, event.first, event.stop, event.outcome.reason))

    def _hashed(self, event: PartHashed) -> None:
        push = event.part, event.first, event.stop
        if event.reason:
            self.perform(self.handoff.push_failed(*push, event.reason))
        else:
            self.perform(self.handoff.pushed(*push, event.digests))

    def _stop(self) -> None:
        self._stopping = {route.part for route in self._routes}
        for route in self._routes:
            route.executor.perform(StopPart(transfer=self.handoff.transfer, part=route.part))

    def _stopped(self, part: int) -> None:
        if part not in self._stopping:
            return
        self._stopping.remove(part)
        if not self._stopping:
            self.perform(self.handoff.pushes_stopped())


End: TypeAlias = Outgoing | Incoming


class Routing(Protocol):
    """The ranks of a replica; `Ranks` implements it."""

    @property
    def registrations(self) -> ReceiveRegistrations:
        """Return the receive registrations of rank 0."""
        ...

    @property
    def transports(self) -> tuple[str, ...]:
        """Return the names of the transports that rank 0 listens with."""
        ...

    def complaint(self) -> str | None:
        """Return the reason why no transfer can begin; None when no rank is lost."""
        ...

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> Sequence[Route]:
        """Return one route for each part of a transfer over the link, in the order of the parts."""
        ...

    def drop(self, link: Link) -> None:
        """Close the transports of a lost link."""
        ...


class TransferManager:
    """Owns the open transfers: `outgoing` and `incoming`, by transfer id.

    A transfer stays open until no writer or reader uses its pages. The endpoint's thread makes all calls.
    """

    def __init__(self, settings: EndpointSettings, ledger: PageLedger, clock: Clock, ranks: Routing) -> None:
        self.outgoing: dict[bytes, Outgoing] = {}
        self.incoming: dict[bytes, Incoming] = {}
        self._settings = settings
        self._ledger = ledger
        self._clock = clock
        self._ranks = ranks
        self._epochs = count(1)
        self._ended: list[TransferEnded] = []
        self._granted: list[GrantedTransfer] = []

    # New transfers.

    def num_parts(self, link: Link, num_layer_groups: int = 1, *, is_source: bool) -> int:
        """Return the number of parts of a transfer over the link.

        is_source: this replica is the source. Raises ValueError when there are more groups than layers.
        """
        return len(self._settings.parts(link.hello, num_layer_groups, is_source=is_source))

    def page_tokens(self, link: Link) -> int:
        """Return the larger of the two sides' page sizes, in tokens.

        Page sizes are powers of two, so every multiple of the larger one is a page boundary on both sides.
        """
        return max(self._settings.layout.page_size, link.hello.layout.page_size)

    def timeouts(self, link: Link, *, is_source: bool) -> HandoffTimeouts:
        """Return the ledger, clock, timing and page sizes for a new hand-off over the link."""
        return self._settings.timeouts(link.hello, self._ledger, self._clock, is_source=is_source)

    def complaint(self, link: Link, request: TransferRequest) -> str | None:
        """Return why the peer may not request this new transfer; None when it may."""
        num_groups = _num_layer_groups(request)
        if num_groups > self._settings.layout.num_layers:
            return f"the transfer has {num_groups} groups of {self._settings.layout.num_layers} layers"
        num_parts = self.num_parts(link, num_groups, is_source=True)
        if request.num_parts != num_parts:
            return f"the transfer has {request.num_parts} parts, the ranks of both sides need {num_parts}"
        if isinstance(request, PullRequest):
            return None  # `borrow` checks the rest and refuses the pull without dropping the link
        if request.position % self.page_tokens(link):
            return f"a transfer from token {request.position} on, which starts no page"
        num_pages = self.timeouts(link, is_source=True).num_destination_pages(request.num_units)
        if len(request.pages) != num_pages:
            return f"the grant has {len(request.pages)} pages, the transfer needs {num_pages}"
        return None

    def depart(self, link: Link, request: TransferRequest) -> Outgoing:
        """Open an outgoing transfer for a peer's request, which `complaint` has accepted."""
        handoff = SourceHandoff(request, self.timeouts(link, is_source=True))
        routes = self._ranks.routes(link, _num_layer_groups(request), is_source=True)
        outgoing = Outgoing(handoff, link, routes, request.num_units, self._clock, self._finished)
        self.outgoing[request.transfer] = outgoing
        if isinstance(request, Grant):
            unit_tokens = min(self._settings.layout.page_size, link.hello.layout.page_size)
            self._granted.append(
                GrantedTransfer(
                    request.transfer,
                    request.position,
                    request.num_units,
                    unit_tokens,
                    request.num_layer_groups,
                )
            )
        return outgoing

    def arrive(self, link: Link, size: TransferSize) -> Incoming:
        """Open an incoming transfer with a new epoch."""
        handoff = DestinationHandoff(size, next(self._epochs), self.timeouts(link, is_source=False))
        routes = self._ranks.routes(link, size.num_layer_groups, is_source=False)
        incoming = Incoming(handoff, link, routes, size.num_units, self._finished)
        self.incoming[size.transfer] = incoming
        return incoming

    def can_begin(self, end: End) -> bool:
        """Return True when the link and all ranks are alive; otherwise end the transfer and return False."""
        complaint = self._ranks.complaint()
        if end.link.is_lost:
            end.perform(end.handoff.peer_lost())
        elif complaint is not None:
            end.perform(end.handoff.fail(complaint))
        return not end.link.is_lost and complaint is None

    # Open transfers.

    def ends(self) -> list[End]:
        """Return a copy of all open transfers."""
        return [*self.outgoing.values(), *self.incoming.values()]

    def end_of(self, transfer: bytes) -> End | None:
        """Return the open transfer of this id; None when none is open."""
        return self.outgoing.get(transfer) or self.incoming.get(transfer)

    def tick(self, link_to: Callable[[bytes], Link | None]) -> None:
        """Check leases and deadlines, send heartbeats, and remove the transfers that are over.

        Callers call it at least once a heartbeat. link_to: returns an open link to the process of an
        incarnation, or None.
        """
        for end in self.ends():
            if end.link.is_lost:  # the remaining messages use another link to the same process
                end.link = link_to(end.link.hello.incarnation) or end.link
            end.perform(end.handoff.tick())
        for end in self.ends():
            if end.is_over:
                end.forget()
                self.outgoing.pop(end.handoff.transfer, None)
                self.incoming.pop(end.handoff.transfer, None)

    def take_ended(self) -> list[TransferEnded]:
        """Return the transfers that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_granted(self) -> list[GrantedTransfer]:
        """Return the transfers that peers have granted pages for since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def _finished(self, end: End, finished: Finished) -> None:
        handoff = end.handoff
        times = end.timeline.times() if isinstance(end, Outgoing) else None
        ended = TransferEnded(
            handoff.transfer, finished.outcome, finished.reason, tuple(handoff.pages), times
        )
        self._ended.append(ended)


def _num_layer_groups(request: TransferRequest) -> int:
    """Return the number of layer groups; 1 for a pull, whose pages are already computed in all layers."""
    return request.num_layer_groups if isinstance(request, Grant) else 1
