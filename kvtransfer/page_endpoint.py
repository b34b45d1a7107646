"""A replica's place in the traffic of pages, less what carries it: its transfers, and who may ask for them.

The life of a transfer, in the calls of the two sides' owners:

1. The source calls `link` for the destination's address, once, and `start` for each request. It calls
   `offer` as pages are computed: they leave once there is room, and `take_granted` names the transfer then.
2. At the destination `admit` is asked for each reservation: it makes room and names who adopts the pages.
3. Both call `poll` in their loops, which does all the work that touches the ledger and returns what ended.
4. `pull` asks a peer for pages that it holds; from there on it is its transfer, as above. The peer's `lend`
   finds them, by their keys.

`KvEndpoint` talks over sockets and moves bytes by its ranks; the simulator has wires and ranks of its own.
Either tells this class what it hears. All calls are made by the thread that owns the ledger.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence

from baton.clock import Clock
from baton.errors import WireError
from baton.kvtransfer.links import Link
from baton.kvtransfer.protocol.handoff import Owner, PageLedger, TransferEnded, answer_to_unknown
from baton.kvtransfer.protocol.messages import AnyMessage, PullRequest, Refuse, Reserve
from baton.kvtransfer.protocol.pull import ID_BYTES, Lend, WantedPage, check_pull, lend_nothing, reservation
from baton.kvtransfer.ranks.messages import PartEvent, Performer
from baton.kvtransfer.settings import Admit, EndpointSettings
from baton.kvtransfer.transfers import Routing, TransferManager


class PageEndpoint(ABC):
    def __init__(
        self,
        settings: EndpointSettings,
        incarnation: bytes,
        ledger: PageLedger,
        admit: Admit,
        clock: Clock,
        ranks: Routing,
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.lend: Lend = lend_nothing  # whoever has pages to be pulled sets it
        self._admit = admit
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

    def start(
        self,
        link: Link,
        num_units: int,
        *,
        deadline_s: float,
        transfer: bytes | None = None,
        position: int = 0,
        num_layer_groups: int = 1,
    ) -> bytes:
        """Ask the peer for pages, and return the id of a transfer that ends within `deadline_s`.

        Units are counted from the token `position` of the sequence on, which starts a page on both sides: a
        destination that holds the tokens before needs no more. transfer: 16 bytes that no transfer had yet,
        by which `admit` may know the request; None: they are made here. num_layer_groups: of layers, as of
        `layer_groups`, in which pages may be offered; each is a piece of its own on the way.
        """
        if transfer is not None and self._is_known(transfer):
            raise ValueError(f"transfer {transfer.hex()} was started before")
        num_parts = self._transfer_manager.num_parts(link, num_layer_groups, is_source=True)
        transfer = self._new_id() if transfer is None else transfer
        request = reservation(transfer, num_units, num_parts, deadline_s, position)
        request = self._transfer_manager.checked(link, request, num_layer_groups)
        outgoing = self._transfer_manager.depart(link, request)
        if self._transfer_manager.can_begin(outgoing):
            outgoing.start()
        return request.transfer

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
        num_parts = self._transfer_manager.num_parts(link, is_source=False)
        request = reservation(self._new_id(), num_units, num_parts, deadline_s)
        check_pull(
            wanted, self._transfer_manager.timeouts(link, is_source=False).num_destination_pages(num_units)
        )
        incoming = self._transfer_manager.arrive(link, request)
        if self._transfer_manager.can_begin(incoming):
            holder, transports = link.hello.incarnation, self._ranks.transports
            incoming.perform(incoming.handoff.pull(adopter, holder, wanted, transports))
        return request.transfer

    def abort(self, transfer: bytes, reason: str) -> None:
        end = self._transfer_manager.end_of(transfer)
        if end is not None:
            end.perform(end.handoff.abort(reason))

    def take_granted(self) -> list[bytes]:
        """The transfers, begun by `start`, that have been granted pages since the last call."""
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
            case Reserve() | PullRequest():
                self._asked(link, message)
            case _:
                self._hand_on(link, message)

    def _hand_on(self, link: Link, message: AnyMessage) -> None:
        """To the end of its transfer, whichever link of the same process it came over."""
        end = self._transfer_manager.end_of(getattr(message, "transfer", b""))
        if end is not None and end.link.hello.incarnation == link.hello.incarnation:
            end.receive(message)
        elif (answer := answer_to_unknown(message)) is not None:
            link.send(answer)

    def _asked(self, link: Link, request: Reserve | PullRequest) -> None:
        complaint = self._transfer_manager.complaint(link, request)
        if self._is_known(request.transfer):
            complaint = "a transfer that was asked for before"
        if complaint is not None:
            link.drop(WireError(complaint, reason="protocol"))
        elif isinstance(request, Reserve):
            self._reserve(link, request)
        else:
            outgoing = self._transfer_manager.depart(link, request)
            if self._transfer_manager.can_begin(outgoing):
                outgoing.accept_pull(self.incarnation, self.lend)

    def _reserve(self, link: Link, request: Reserve) -> None:
        num_pages = self._transfer_manager.timeouts(link, is_source=False).num_destination_pages(
            request.num_units
        )
        complaint = self._ranks.complaint()
        adopter = self._admit(request, num_pages) if complaint is None else None
        if adopter is None:
            link.send(Refuse(transfer=request.transfer, reason=complaint or "no room"))
            return
        incoming = self._transfer_manager.arrive(link, request)
        incoming.perform(incoming.handoff.grant(adopter, self._ranks.transports))

    def _new_id(self) -> bytes:
        return secrets.token_bytes(ID_BYTES)

    def _is_known(self, transfer: bytes) -> bool:
        """Ids are minted once; one that comes again is no new transfer's."""
        return self._transfer_manager.end_of(transfer) is not None or transfer in self._ranks.registrations
