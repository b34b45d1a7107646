"""The two ends of a transfer, which connect each hand-off state machine to its link and its ranks.

`Incoming` and `Outgoing` perform the actions of a DestinationHandoff and a SourceHandoff, and pass
the ranks' part events to the hand-off.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from baton.clock import Clock
from baton.errors import ProtocolError
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.destination import DestinationHandoff
from baton.kvtransfer.protocol.handoff import (
    Action,
    CloseReceive,
    Finished,
    Handoff,
    Hash,
    OpenReceive,
    Push,
    Send,
    StopPushes,
    Timeline,
    Verify,
)
from baton.kvtransfer.protocol.messages import AnyMessage, PullRequest, TransferRequest
from baton.kvtransfer.protocol.source import SourceHandoff
from baton.kvtransfer.ranks.messages import (
    ClosePart,
    ForgetPart,
    HashUnits,
    OpenPart,
    PartCommand,
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

HandoffT = TypeVar("HandoffT", bound=Handoff)


class TransferEnd(ABC, Generic[HandoffT]):
    """One end of a transfer. The endpoint's thread makes all calls."""

    def __init__(self, handoff: HandoffT, link: Link, routes: Sequence[Route]) -> None:
        self.handoff = handoff
        self.link = link
        self._routes = routes

    @abstractmethod
    def perform(self, actions: Sequence[Action]) -> None:
        """Perform the actions of the hand-off in their order."""

    @abstractmethod
    def on_part_event(self, event: PartEvent) -> None:
        """Process an event from the rank of one of the parts."""

    @abstractmethod
    def _on_rank_dead(self, part: int) -> None:
        """Process the death of the process that had this part: the process writes no more."""

    def receive(self, message: AnyMessage) -> None:
        """Process a message of the peer. An illegal message drops the link and ends the transfer."""
        try:
            actions = self.handoff.receive(message)
        except ProtocolError as error:
            self.link.drop(error)
            actions = self.handoff.peer_lost()
        self.perform(actions)

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
                self._on_rank_dead(part)

    def forget(self) -> None:
        """Tell the ranks to delete the parts' state; called once the transfer is over."""
        for route in self._routes:
            self._command(ForgetPart(transfer=self.handoff.transfer, part=route.part))

    def _command(self, command: PartCommand) -> None:
        self._routes[command.part].executor.perform(command)


class Incoming(TransferEnd[DestinationHandoff]):
    """A transfer that arrives at this replica: performs the actions of its DestinationHandoff.

    Messages to the source are held back until every rank has opened its part: a rank in another process has
    to receive its order first, and on a GPU the steps that may still write the pages have to end. When the
    transfer ends, the held messages are sent.
    """

    def __init__(
        self,
        handoff: DestinationHandoff,
        link: Link,
        routes: Sequence[Route],
        num_units: int,
        on_finished: Callable[["Incoming", Finished], None],
    ) -> None:
        super().__init__(handoff, link, routes)
        self._num_units = num_units
        self._on_finished = on_finished
        self._opening: set[int] = set()  # parts that their ranks have not opened yet
        self._held_messages: list[AnyMessage] = []

    def perform(self, actions: Sequence[Action]) -> None:
        transfer = self.handoff.transfer
        for action in actions:
            match action:
                case Send(message):
                    self._send(message)
                case OpenReceive(part, after):
                    self._open(part, after)
                case CloseReceive(part, is_confirmed):
                    self._command(ClosePart(transfer=transfer, part=part, is_confirmed=is_confirmed))
                case Hash(part, first, stop):
                    self._command(HashUnits(transfer=transfer, part=part, first=first, stop=stop))
                case Verify(part, digests):
                    self._command(VerifyPart(transfer=transfer, part=part, digests=digests))
                case Finished():
                    self._send_held_messages()
                    self._on_finished(self, action)

    def on_part_event(self, event: PartEvent) -> None:
        match event:
            case PartOpened():
                self._opened(event.part)
            case WriterStopped():
                self.perform(self.handoff.writer_stopped(event.part))
            case WriterDied():
                self.perform(self.handoff.fail("the source's process died"))
            case PartVerified():
                self.perform(self.handoff.verified(event.part, event.corrupt_units))

    def _on_rank_dead(self, part: int) -> None:
        self.perform(self.handoff.writer_stopped(part))

    def _send(self, message: AnyMessage) -> None:
        if self._opening:
            self._held_messages.append(message)
        else:
            self.link.send(message)

    def _open(self, part: int, after: int) -> None:
        route = self._routes[part]
        self._opening.add(part)
        self._command(
            OpenPart(
                transfer=self.handoff.transfer,
                part=part,
                epoch=self.handoff.epoch,
                num_units=self._num_units,
                pages=tuple(self.handoff.pages),
                generations=self.handoff.generations(),
                source=route.peer,
                layers=route.layers,
                digest_key=self.link.digest_key(self.handoff.transfer),
                after=after,
            )
        )

    def _opened(self, part: int) -> None:
        self._opening.discard(part)
        if not self._opening:
            self._send_held_messages()

    def _send_held_messages(self) -> None:
        messages, self._held_messages = self._held_messages, []
        self._opening.clear()
        for message in messages:
            self.link.send(message)


class Outgoing(TransferEnd[SourceHandoff]):
    """A transfer that leaves this replica: performs the actions of its SourceHandoff."""

    def __init__(
        self,
        handoff: SourceHandoff,
        link: Link,
        routes: Sequence[Route],
        num_units: int,
        clock: Clock,
        on_finished: Callable[["Outgoing", Finished], None],
    ) -> None:
        super().__init__(handoff, link, routes)
        self.timeline = Timeline(clock, num_units * len(routes))
        self._on_finished = on_finished
        self._num_pages_sent = [0] * len(routes)  # part -> source pages that its rank knows
        self._unreached: set[int] = set()  # parts without an open transport
        self._stopping: set[int] = set()  # parts that may still read or write
        self._begin: Callable[[], list[Action]] | None = None

    def start(self, request: TransferRequest, begin: Callable[[], list[Action]]) -> None:
        """Tell the ranks the destination's pages and open the transports of all parts, as far as possible.

        begin: called once the transports are open; returns the first actions.
        """
        self._begin = begin
        self._unreached = {route.part for route in self._routes}
        for route in self._routes:
            self._command(
                ReachPeer(
                    transfer=self.handoff.transfer,
                    part=route.part,
                    link=self.link.number,
                    destination=route.peer,
                    layers=route.layers,
                    digest_key=self.link.digest_key(self.handoff.transfer),
                    epoch=request.epoch,
                    pages=request.pages,
                    generations=request.generations,
                    is_bulk=isinstance(request, PullRequest),  # no first token waits for these pages
                )
            )

    def offer(self, pages: Sequence[int], num_units: int, group: int | None) -> None:
        """Add computed pages; see `SourceHandoff.offer`."""
        self.timeline.offered()
        self.perform(self.handoff.offer(pages, num_units, group))

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    self.link.send(message)
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

    def on_part_event(self, event: PartEvent) -> None:
        match event:
            case PartReached():
                self._reached(event.part)
            case PartWritten():
                self._written(event)
            case PartHashed():
                self._hashed(event)
            case PartStopped():
                self._stopped(event.part)

    def _on_rank_dead(self, part: int) -> None:
        self._stopped(part)

    def _reached(self, part: int) -> None:
        self._unreached.discard(part)
        if not self._unreached and self._begin is not None:
            begin, self._begin = self._begin, None
            self.timeline.opened()
            self.perform(begin())

    def _push(self, push: Push) -> None:
        pages = self.handoff.pages
        more_pages = tuple(pages[self._num_pages_sent[push.part] :])
        self._num_pages_sent[push.part] = len(pages)
        self.timeline.pushed()
        self._command(
            PushPart(
                transfer=self.handoff.transfer,
                part=push.part,
                first=push.first,
                stop=push.stop,
                more_pages=more_pages,
                after=push.after,
            )
        )

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
            self._command(StopPart(transfer=self.handoff.transfer, part=route.part))

    def _stopped(self, part: int) -> None:
        if part not in self._stopping:
            return
        self._stopping.remove(part)
        if not self._stopping:
            self.perform(self.handoff.pushes_stopped())


End: TypeAlias = Outgoing | Incoming
