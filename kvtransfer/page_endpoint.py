"""One replica's endpoint of page transfers, independent of sockets and device memory.

The life of a transfer, in the calls of the two workers:

1. Both workers know the transfer's id. The destination calls `grant`, which reserves pages and sends the
   source a Grant.
2. The source finds the grant in `take_granted`, and calls `offer` as pages are computed. A grant may arrive
   before its request: the source keeps the transfer until `abort` or the end of the transfer.
3. Both workers call `poll` in their loops. `poll` does all the work that touches the ledger and returns the
   transfers that ended.
4. `pull` is the alternative to `grant`: the destination requests pages that a peer already holds. The peer's
   `lend` finds the pages by their keys.

`KvEndpoint` adds sockets and ranks; the simulator adds simulated wires and ranks. Both pass received messages
and part events to this class. The thread that owns the ledger makes all calls.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence

from baton.clock import Clock
from baton.errors import WireError
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.handoff import (
    GrantedTransfer,
    Owner,
    PageLedger,
    TransferEnded,
    answer_to_unknown,
)
from baton.kvtransfer.protocol.messages import AnyMessage, Grant, PullRequest, TransferRequest
from baton.kvtransfer.protocol.pull import ID_BYTES, Lend, WantedPage, check_pull, lend_nothing, transfer_size
from baton.kvtransfer.ranks.messages import PartEvent, Performer, default_layer_groups
from baton.kvtransfer.settings import EndpointSettings
from baton.kvtransfer.transfers import Incoming, Routing, TransferManager


class PageEndpoint(ABC):
    """Starts, feeds and ends the transfers of one replica; see the steps above.

    Owns the open transfers. The caller owns the ledger and the ranks.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        incarnation: bytes,
        ledger: PageLedger,
        clock: Clock,
        ranks: Routing,
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.lend: Lend = lend_nothing  # a worker whose pages may be pulled replaces it
        self._ranks = ranks
        self._transfer_manager = TransferManager(settings, ledger, clock, ranks)
        self._outgoing, self._incoming = self._transfer_manager.outgoing, self._transfer_manager.incoming

    @abstractmethod
    def poll(self) -> list[TransferEnded]:
        """Process received events and due timers without blocking; return the newly ended transfers."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Return event counts since the start, by name, for metrics."""

    @property
    def num_open(self) -> int:
        """Return the number of transfers that hold local pages, as source or as destination."""
        return len(self._outgoing) + len(self._incoming)

    # Calls of the worker.

    def grant(
        self,
        link: Link,
        transfer: bytes,
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
        position: int = 0,
        num_layer_groups: int | None = None,
    ) -> None:
        """Reserve local pages and grant them to the peer. The caller has made room for the pages.

        transfer: the id, 16 bytes, which the peer's worker also knows; an id must not be used twice.
        position: the token of the sequence at which the units begin, a page boundary on both sides; the
        caller holds the tokens before it. adopter: the owner of the pages once they are verified.
        num_layer_groups: the source may offer pages separately for this many groups of layers, which
        `layer_groups` cuts; None: a number that suits the source's layout.
        Raises ValueError when a value is out of range or the id is in use.
        """
        if self._is_known(transfer):
            raise ValueError(f"transfer {transfer.hex()} was started before")
        if num_layer_groups is None:
            num_layer_groups = default_layer_groups(link.hello.layout)
        incoming = self._arrive(link, transfer, num_units, deadline_s, position, num_layer_groups)
        if self._transfer_manager.can_begin(incoming):
            incoming.perform(incoming.handoff.grant(adopter, self._ranks.transports))

    def offer(
        self, transfer: bytes, pages: Sequence[int], num_units: int, *, group: int | None = None
    ) -> None:
        """Append pages to the transfer and send all units that are computed.

        pages: the pages that follow the pages offered before. num_units: all units computed so far; on a GPU,
        by the stream that is current here and in `poll`. Other ranks send their parts once they have computed
        them. group: the group of layers that is computed; only the first group's offer contains the pages.
        Does nothing when the transfer is not open.
        """
        outgoing = self._outgoing.get(transfer)
        if outgoing is not None:
            outgoing.offer(pages, num_units, group)

    def pull(
        self,
        link: Link,
        wanted: Sequence[WantedPage],
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
    ) -> bytes:
        """Request the peer's pages `wanted` and return the transfer's id. The caller has made room for them.

        adopter: the owner of the local pages once they are verified. Raises ValueError when the request is
        too large for one transfer.
        """
        num_pages = self._transfer_manager.timeouts(link, is_source=False).num_destination_pages(num_units)
        check_pull(wanted, num_pages)
        incoming = self._arrive(link, self._new_id(), num_units, deadline_s)
        if self._transfer_manager.can_begin(incoming):
            holder, transports = link.hello.incarnation, self._ranks.transports
            incoming.perform(incoming.handoff.pull(adopter, holder, wanted, transports))
        return incoming.handoff.transfer

    def abort(self, transfer: bytes, reason: str) -> None:
        """Cancel the transfer and tell the peer; `poll` reports its end. Does nothing when it is not open."""
        end = self._transfer_manager.end_of(transfer)
        if end is not None:
            end.perform(end.handoff.abort(reason))

    def take_granted(self) -> list[GrantedTransfer]:
        """Return the transfers that peers have granted pages for since the last call."""
        return self._transfer_manager.take_granted()

    # Events from peers and ranks.

    def _on_link_lost(self, link: Link) -> None:
        for end in self._transfer_manager.ends():
            if end.link is link:
                end.perform(end.handoff.peer_lost())
        self._ranks.drop(link)

    def _on_part_event(self, event: PartEvent) -> None:
        end = self._transfer_manager.end_of(event.transfer)
        if end is not None:
            end.on_part_event(event)

    def _on_rank_lost(self, executor: Performer, reason: str, *, is_dead: bool) -> None:
        """End the transfers that have a part at this rank of the replica."""
        for end in self._transfer_manager.ends():
            end.on_rank_lost(executor, reason, is_dead=is_dead)

    def _received(self, link: Link, message: AnyMessage) -> None:
        if link.is_lost:
            return
        match message:
            case Grant() | PullRequest():
                self._requested(link, message)
            case _:
                self._dispatch(link, message)

    def _dispatch(self, link: Link, message: AnyMessage) -> None:
        """Pass the message to its transfer, over any link of the process that the transfer began with."""
        end = self._transfer_manager.end_of(getattr(message, "transfer", b""))
        if end is not None and end.link.hello.incarnation == link.hello.incarnation:
            end.receive(message)
        elif (answer := answer_to_unknown(message)) is not None:
            link.send(answer)

    def _requested(self, link: Link, request: TransferRequest) -> None:
        complaint = self._transfer_manager.complaint(link, request)
        if self._is_known(request.transfer):
            complaint = "the peer requested a transfer whose id is in use"
        if complaint is not None:
            link.drop(WireError(complaint, reason="protocol"))
            return
        outgoing = self._transfer_manager.depart(link, request)
        if not self._transfer_manager.can_begin(outgoing):
            return
        if isinstance(request, Grant):
            outgoing.start()
        else:
            outgoing.accept_pull(self.incarnation, self.lend)

    def _arrive(
        self,
        link: Link,
        transfer: bytes,
        num_units: int,
        deadline_s: float,
        position: int = 0,
        num_layer_groups: int = 1,
    ) -> Incoming:
        num_parts = self._transfer_manager.num_parts(link, num_layer_groups, is_source=False)
        if position % self._transfer_manager.page_tokens(link):
            raise ValueError(f"a transfer from token {position} on, which starts no page")
        size = transfer_size(transfer, num_units, num_parts, deadline_s, position, num_layer_groups)
        return self._transfer_manager.arrive(link, size)

    def _new_id(self) -> bytes:
        return secrets.token_bytes(ID_BYTES)

    def _is_known(self, transfer: bytes) -> bool:
        """Return True when the id belongs to an open transfer or to pages that a source may still write."""
        return self._transfer_manager.end_of(transfer) is not None or transfer in self._ranks.registrations
