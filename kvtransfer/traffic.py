"""The transfers that are open at an endpoint, and who may begin another."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, TypeAlias

import msgspec

from baton.clock import Clock
from baton.kvtransfer.destination_handoff import DestinationHandoff
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.endpoint_settings import EndpointSettings
from baton.kvtransfer.handoff import Finished, Terms
from baton.kvtransfer.incoming import Incoming
from baton.kvtransfer.landing import Landings
from baton.kvtransfer.ledger import PageLedger
from baton.kvtransfer.link import Link
from baton.kvtransfer.messages import Pull, Reserve
from baton.kvtransfer.outgoing import Outgoing
from baton.kvtransfer.ranks import Route
from baton.kvtransfer.source_handoff import SourceHandoff

End: TypeAlias = Outgoing | Incoming


class Routing(Protocol):
    """The ranks of a replica; see `Ranks`."""

    @property
    def landings(self) -> Landings: ...

    @property
    def transports(self) -> tuple[str, ...]: ...

    def complaint(self) -> str | None: ...

    def routes(self, link: Link, num_layer_groups: int, *, is_source: bool) -> Sequence[Route]: ...

    def drop(self, link: Link) -> None: ...


class Traffic:
    """An end is kept from its first call until nobody is in its pages any more. One thread calls."""

    def __init__(self, settings: EndpointSettings, ledger: PageLedger, clock: Clock, ranks: Routing) -> None:
        self.outgoing: dict[bytes, Outgoing] = {}
        self.incoming: dict[bytes, Incoming] = {}
        self._settings = settings
        self._ledger = ledger
        self._clock = clock
        self._ranks = ranks
        self._epochs = count(1)
        self._ended: list[Ended] = []
        self._granted: list[bytes] = []

    # A new one.

    def num_parts(self, link: Link, num_layer_groups: int = 1, *, is_source: bool) -> int:
        """Of a transfer over the link; is_source: from here to there. ValueError: more groups than layers."""
        return len(self._settings.parts(link.hello, num_layer_groups, is_source=is_source))

    def page_tokens(self, link: Link) -> int:
        """Of the larger pages of the two sides, which are powers of two: where one starts, both do."""
        return max(self._settings.layout.page_size, link.hello.layout.page_size)

    def terms(self, link: Link, *, is_source: bool) -> Terms:
        return self._settings.terms(link.hello, self._ledger, self._clock, is_source=is_source)

    def complaint(self, link: Link, request: Reserve | Pull) -> str | None:
        """Why the peer may not ask for this transfer, which is new; None when it may."""
        num_groups = _num_layer_groups(request)
        if num_groups > self._settings.layout.num_layers:
            return f"a transfer of {num_groups} groups of {self._settings.layout.num_layers} layers"
        num_parts = self.num_parts(link, num_groups, is_source=isinstance(request, Pull))
        if request.num_parts != num_parts:
            return f"a transfer of {request.num_parts} parts between ranks that make {num_parts}"
        if isinstance(request, Reserve) and request.position % self.page_tokens(link):
            return f"a transfer from token {request.position} on, which starts no page"
        return None

    def checked(self, link: Link, request: Reserve, num_layer_groups: int) -> Reserve:
        """Our own request, of pages that leave by groups of layers. ValueError: the peer would refuse it."""
        request = msgspec.structs.replace(request, num_layer_groups=num_layer_groups)
        complaint = self.complaint(link, request)
        if complaint is not None:
            raise ValueError(complaint)
        return request

    def depart(self, link: Link, request: Reserve | Pull) -> Outgoing:
        handoff = SourceHandoff(request, self.terms(link, is_source=True))
        routes = self._ranks.routes(link, _num_layer_groups(request), is_source=True)
        outgoing = Outgoing(
            handoff, link, routes, request.num_units, self._clock, self._finished, self._granted_to
        )
        self.outgoing[request.transfer] = outgoing
        return outgoing

    def arrive(self, link: Link, request: Reserve) -> Incoming:
        handoff = DestinationHandoff(request, next(self._epochs), self.terms(link, is_source=False))
        routes = self._ranks.routes(link, request.num_layer_groups, is_source=False)
        incoming = Incoming(handoff, link, routes, request.num_units, self._finished)
        self.incoming[request.transfer] = incoming
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

    def take_ended(self) -> list[Ended]:
        """Those that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_granted(self) -> list[bytes]:
        """Those that we asked for and that were granted pages since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def _granted_to(self, transfer: bytes) -> None:
        self._granted.append(transfer)

    def _finished(self, end: End, finished: Finished) -> None:
        handoff = end.handoff
        times = end.timeline.times() if isinstance(end, Outgoing) else None
        ended = Ended(handoff.transfer, finished.outcome, finished.reason, tuple(handoff.pages), times)
        self._ended.append(ended)


def _num_layer_groups(request: Reserve | Pull) -> int:
    """What is pulled is computed already: all layers of it leave together."""
    return request.num_layer_groups if isinstance(request, Reserve) else 1
