"""A transfer that arrives at this replica: has its parts done what its DestinationHandoff asks for.

What the source needs to hear before it writes waits until every rank has opened its part: a rank in another
process has to be told first, and on a GPU steps that may still write the pages have to end. Once the transfer
has ended nothing waits.
"""

from collections.abc import Callable, Sequence

from baton.errors import ProtocolError
from baton.kvtransfer.destination_handoff import DestinationHandoff, DestinationState
from baton.kvtransfer.handoff import Action, CloseLanding, Finished, OpenLanding, Send, Verify
from baton.kvtransfer.link import Link
from baton.kvtransfer.messages import AnyMessage, Wrote
from baton.kvtransfer.rank_messages import (
    ClosePart,
    ForgetPart,
    HashUnits,
    OpenPart,
    PartEvent,
    PartOpened,
    PartVerified,
    VerifyPart,
    WriterDied,
    WriterStopped,
)
from baton.kvtransfer.rank_plane import Performer
from baton.kvtransfer.ranks import Route


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
                case OpenLanding(part, after):
                    self._open(part, after)
                case CloseLanding(part, is_confirmed):
                    close = ClosePart(transfer=self.handoff.transfer, part=part, is_confirmed=is_confirmed)
                    self._routes[part].plane.perform(close)
                case Verify(part, digests):
                    verify = VerifyPart(transfer=self.handoff.transfer, part=part, digests=digests)
                    self._routes[part].plane.perform(verify)
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

    def lose(self, plane: Performer, reason: str, *, is_dead: bool) -> None:
        """A rank is lost; is_dead: for certain, and with it its pages and whoever wrote there."""
        parts = [route.part for route in self._routes if route.plane is plane]
        if not parts:
            return
        self.perform(self.handoff.fail(reason))
        if is_dead:
            for part in parts:
                self.perform(self.handoff.writer_stopped(part))

    def forget(self) -> None:
        """It is over: nobody needs to know of its parts any more."""
        for route in self._routes:
            route.plane.perform(ForgetPart(transfer=self.handoff.transfer, part=route.part))

    def _say(self, message: AnyMessage) -> None:
        if self._opening:
            self._unsaid.append(message)
        else:
            self.link.send(message)

    def _open(self, part: int, after: int) -> None:
        _, plane, peer, layers = self._routes[part]
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
        plane.perform(order)

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
        self._routes[wrote.part].plane.perform(units)
