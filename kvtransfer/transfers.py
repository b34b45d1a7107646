"""The transfers that are open at an endpoint: their state machines, their parts at the ranks, their life."""

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

# A transfer that arrives at this replica: has its parts done what its DestinationHandoff asks for.
#
# What the source needs to hear before it writes waits until every rank has opened its part: a rank in another
# process has to be told first, and on a GPU steps that may still write the pages have to end. Once the
# transfer has ended nothing waits.


class Incoming:
    """All calls are made by the endpoint's thread."""

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
        self._opening: set[int] = set()  # parts whose ranks have yet to say that they are open
        self._unsaid: list[AnyMessage] = []

    @property
    def is_over(self) -> bool:
        return self.handoff.state is DestinationState.CLOSED

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self._say(message)
                case OpenReceive(part, after):
                    self._open(part, after)
                case CloseReceive(part, is_confirmed):
                    close = ClosePart(transfer=self.handoff.transfer, part=part, is_confirmed=is_confirmed)
                    self._routes[part].executor.perform(close)
                case Verify(part, digests):
                    verify = VerifyPart(transfer=self.handoff.transfer, part=part, digests=digests)
                    self._routes[part].executor.perform(verify)
                case Finished():
                    self._say_what_waited()
                    self._on_finished(self, action)

    def receive(self, message: AnyMessage) -> None:
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        else:
            if isinstance(message, Wrote) and self._is_current(message):
                self._hash(message)
        self.perform(actions)

    def hear(self, event: PartEvent) -> None:
        """What the rank of one of its parts has to say."""
        match event:
            case PartOpened():
                self._opened(event.part)
            case WriterStopped():
                self.perform(self.handoff.writer_stopped(event.part))
            case WriterDied():
                self.perform(self.handoff.fail("the source's process died"))
            case PartVerified():
                self.perform(self.handoff.verified(event.part, event.corrupt_units))

    def lose(self, executor: Performer, reason: str, *, is_dead: bool) -> None:
        """A rank is lost; is_dead: for certain, and with it its pages and whoever wrote there."""
        parts = [route.part for route in self._routes if route.executor is executor]
        if not parts:
            return
        self.perform(self.handoff.fail(reason))
        if is_dead:
            for part in parts:
                self.perform(self.handoff.writer_stopped(part))

    def forget(self) -> None:
        """It is over: nobody needs to know of its parts any more."""
        for route in self._routes:
            route.executor.perform(ForgetPart(transfer=self.handoff.transfer, part=route.part))

    def _say(self, message: AnyMessage) -> None:
        if self._opening:
            self._unsaid.append(message)
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
            self._say_what_waited()

    def _say_what_waited(self) -> None:
        unsaid, self._unsaid = self._unsaid, []
        self._opening.clear()
        for message in unsaid:
            self.link.send(message)

    def _is_current(self, wrote: Wrote) -> bool:
        """Whether the hand-off, which has heard it, took it for more than a stale word."""
        handoff = self.handoff
        return wrote.epoch == handoff.epoch and handoff.state is DestinationState.RECEIVING

    def _hash(self, wrote: Wrote) -> None:
        units = HashUnits(transfer=self.handoff.transfer, part=wrote.part, first=wrote.first, stop=wrote.stop)
        self._routes[wrote.part].executor.perform(units)


# A transfer that leaves this replica: has its parts done what its SourceHandoff asks for.


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
    ) -> None:
        self.handoff = handoff
        self.link = link
        self.timeline = Timeline(clock, num_units * len(routes))
        self._routes = routes
        self._on_finished = on_finished
        self._num_told = [0] * len(routes)  # pages that the rank of each part knows
        self._unreached: set[int] = set()
        self._stopping: set[int] = set()
        self._then: Call | None = None

    @property
    def is_over(self) -> bool:
        return self.handoff.state is SourceState.CLOSED

    def start(self) -> None:
        """Write what is offered, once the transports of every part are open, or none will be."""
        self._reach(lambda: self.perform(self.handoff.opened()))

    def accept_pull(self, incarnation: bytes, lend: Lend) -> None:
        """As `start`, with pages that the peer has named; incarnation: of this endpoint."""

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
                case Granted(request):
                    self._grant(request)
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

    def lose(self, executor: Performer, reason: str, *, is_dead: bool) -> None:
        """A rank is lost; is_dead: for certain, so that nothing leaves it any more."""
        parts = [route.part for route in self._routes if route.executor is executor]
        if not parts:
            return
        self.perform(self.handoff.fail(reason))
        if is_dead:
            for part in parts:
                self._stopped(part)

    def forget(self) -> None:
        """It is over: nobody needs to know of its parts any more."""
        for route in self._routes:
            route.executor.perform(ForgetPart(transfer=self.handoff.transfer, part=route.part))

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
            route.executor.perform(reach)

    def _reached(self, part: int) -> None:
        self._unreached.discard(part)
        if not self._unreached and self._then is not None:
            then, self._then = self._then, None
            self.timeline.opened()
            then()

    def _grant(self, request: TransferRequest) -> None:
        for route in self._routes:
            told = GrantPart(
                transfer=self.handoff.transfer,
                part=route.part,
                epoch=request.epoch,
                pages=request.pages,
                generations=request.generations,
                is_bulk=isinstance(request, PullRequest),  # no first token waits for a pull
            )
            route.executor.perform(told)

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
    """The ranks of a replica; see `Ranks`."""

    @property
    def registrations(self) -> ReceiveRegistrations: ...

    @property
    def transports(self) -> tuple[str, ...]: ...

    def complaint(self) -> str | None: ...

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> Sequence[Route]: ...

    def drop(self, link: Link) -> None: ...


class TransferManager:
    """An end is kept from its first call until no writer or reader is in its pages. One thread calls."""

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

    # A new one.

    def num_parts(self, link: Link, num_layer_groups: int = 1, *, is_source: bool) -> int:
        """Of a transfer over the link; is_source: from here to there. ValueError: more groups than layers."""
        return len(self._settings.parts(link.hello, num_layer_groups, is_source=is_source))

    def page_tokens(self, link: Link) -> int:
        """Of the larger pages of the two sides, which are powers of two: where one starts, both do."""
        return max(self._settings.layout.page_size, link.hello.layout.page_size)

    def timeouts(self, link: Link, *, is_source: bool) -> HandoffTimeouts:
        return self._settings.timeouts(link.hello, self._ledger, self._clock, is_source=is_source)

    def complaint(self, link: Link, request: TransferRequest) -> str | None:
        """Return why the peer may not request this new transfer; None when it may."""
        num_groups = _num_layer_groups(request)
        if num_groups > self._settings.layout.num_layers:
            return f"a transfer of {num_groups} groups of {self._settings.layout.num_layers} layers"
        num_parts = self.num_parts(link, num_groups, is_source=True)
        if request.num_parts != num_parts:
            return f"a transfer of {request.num_parts} parts between ranks that make {num_parts}"
        if isinstance(request, PullRequest):
            return None  # the holder refuses it alone
        if request.position % self.page_tokens(link):
            return f"a transfer from token {request.position} on, which starts no page"
        num_pages = self.timeouts(link, is_source=True).num_destination_pages(request.num_units)
        if len(request.pages) != num_pages:
            return f"{len(request.pages)} pages are granted, {num_pages} are needed"
        return None

    def depart(self, link: Link, request: TransferRequest) -> Outgoing:
        """Begin to send: the peer has requested this transfer, and `complaint` found nothing."""
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
        """Begin to receive."""
        handoff = DestinationHandoff(size, next(self._epochs), self.timeouts(link, is_source=False))
        routes = self._ranks.routes(link, size.num_layer_groups, is_source=False)
        incoming = Incoming(handoff, link, routes, size.num_units, self._finished)
        self.incoming[size.transfer] = incoming
        return incoming

    def can_begin(self, end: End) -> bool:
        """Else it has ended."""
        complaint = self._ranks.complaint()
        if end.link.is_lost:
            end.perform(end.handoff.peer_lost())
        elif complaint is not None:
            end.perform(end.handoff.fail(complaint))
        return not end.link.is_lost and complaint is None

    # Those that are open.

    def ends(self) -> list[End]:
        return [*self.outgoing.values(), *self.incoming.values()]

    def end_of(self, transfer: bytes) -> End | None:
        return self.outgoing.get(transfer) or self.incoming.get(transfer)

    def tick(self, link_to: Callable[[bytes], Link | None]) -> None:
        """To be called at least once a heartbeat. link_to: a link to the process of this incarnation."""
        for end in self.ends():
            if end.link.is_lost:  # what is left to be said goes over another link to the same process
                end.link = link_to(end.link.hello.incarnation) or end.link
            end.perform(end.handoff.tick())
        for end in self.ends():
            if end.is_over:
                end.forget()
                self.outgoing.pop(end.handoff.transfer, None)
                self.incoming.pop(end.handoff.transfer, None)

    def take_ended(self) -> list[TransferEnded]:
        """Those that have ended since the last call."""
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
    """Pulled pages are computed already: all their layers leave together."""
    return request.num_layer_groups if isinstance(request, Grant) else 1
