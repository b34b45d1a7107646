"""A replica's end of all page transfers, without the sockets and memory that carry them.

The life of a transfer, in the calls of the two workers:

1. Both workers know the transfer's id. The destination calls `grant`: pages are reserved, and the source is
   told to write them.
2. The source learns of the grant from `take_granted`, and calls `offer` as pages are computed. A grant may
   come before its request: the source keeps the transfer until `abort` or its end.
3. Both call `poll` in their loops, which does all the work that touches the ledger and returns what ended.
4. `pull` instead asks a peer for pages that it holds already. The peer's `lend` finds them by their keys.

`KvEndpoint` uses sockets and ranks; the simulator has wires and ranks of its own. Both tell this class what
they receive. The thread that owns the ledger makes all calls.
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
        self.lend: Lend = lend_nothing  # the worker that has pages to be pulled sets it
        self._ranks = ranks
        self._transfer_manager = TransferManager(settings, ledger, clock, ranks)
        self._outgoing, self._incoming = self._transfer_manager.outgoing, self._transfer_manager.incoming

    @abstractmethod
    def poll(self) -> list[TransferEnded]:
        """Do what is due, without waiting; the transfers that have ended since the last call."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """What went wrong or well since the start, by name: for metrics."""

    @property
    def num_open(self) -> int:
        """Transfers that hold pages here, as source or as destination."""
        return len(self._outgoing) + len(self._incoming)

    # What the owner asks for.

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
        """Reserve pages here and tell the peer to write them. The caller has made room for the pages.

        transfer: 16 bytes, the id that the peer's worker knows too; no transfer may have had it before.
        Units are counted from the token `position` of the sequence on, which starts a page on both sides: the
        caller holds the tokens before it. adopter: the owner of the pages once they are verified.
        num_layer_groups: the source may offer pages by as many groups of layers, cut by `layer_groups`; None:
        by as many as suit its layout.
        Raises ValueError for values that no transfer can have.
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
        """These pages follow those offered before; `num_units` units are computed by now, on a GPU by the
        stream that is current here and in `poll`. Other ranks send their part once they have computed it.
        group: of this group of layers only; the other groups' offers of the same pages follow, without them.
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
        """Ask the peer for its pages `wanted`. The caller has made room for as much."""
        num_pages = self._transfer_manager.timeouts(link, is_source=False).num_destination_pages(num_units)
        check_pull(wanted, num_pages)
        incoming = self._arrive(link, self._new_id(), num_units, deadline_s)
        if self._transfer_manager.can_begin(incoming):
            holder, transports = link.hello.incarnation, self._ranks.transports
            incoming.perform(incoming.handoff.pull(adopter, holder, wanted, transports))
        return incoming.handoff.transfer

    def abort(self, transfer: bytes, reason: str) -> None:
        end = self._transfer_manager.end_of(transfer)
        if end is not None:
            end.perform(end.handoff.abort(reason))

    def take_granted(self) -> list[GrantedTransfer]:
        """Return the transfers that peers have granted pages for since the last call."""
        return self._transfer_manager.take_granted()

    # What peers and ranks say.

    def _lost(self, link: Link) -> None:
        for end in self._transfer_manager.ends():
            if end.link is link:
                end.perform(end.handoff.peer_lost())
        self._ranks.drop(link)

    def _hear(self, event: PartEvent) -> None:
        end = self._transfer_manager.end_of(event.transfer)
        if end is not None:
            end.hear(event)

    def _lose(self, executor: Performer, reason: str, *, is_dead: bool) -> None:
        """A rank of ours."""
        for end in self._transfer_manager.ends():
            end.lose(executor, reason, is_dead=is_dead)

    def _received(self, link: Link, message: AnyMessage) -> None:
        if link.is_lost:
            return
        match message:
            case Grant() | PullRequest():
                self._requested(link, message)
            case _:
                self._hand_on(link, message)

    def _hand_on(self, link: Link, message: AnyMessage) -> None:
        """To the end of its transfer, whichever link of the same process it came over."""
        end = self._transfer_manager.end_of(getattr(message, "transfer", b""))
        if end is not None and end.link.hello.incarnation == link.hello.incarnation:
            end.receive(message)
        elif (answer := answer_to_unknown(message)) is not None:
            link.send(answer)

    def _requested(self, link: Link, request: TransferRequest) -> None:
        complaint = self._transfer_manager.complaint(link, request)
        if self._is_known(request.transfer):
            complaint = "a transfer that was requested before"
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
        """Ids are minted once; one that comes again is no new transfer's."""
        return self._transfer_manager.end_of(transfer) is not None or transfer in self._ranks.registrations
