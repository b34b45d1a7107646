"""What an endpoint is told about itself and its cluster."""

from collections.abc import Callable

import msgspec

from baton.clock import Clock
from baton.kvtransfer.choose import AUTO
from baton.kvtransfer.handoff import Terms, Timing
from baton.kvtransfer.ledger import Owner, PageLedger
from baton.kvtransfer.messages import PROTOCOL, Hello, Reserve
from baton.kvtransfer.transfer_plan import TransferPlan, plan_transfer
from baton.layout import PageLayout


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: bytes  # the cluster's
    fingerprint: str  # of the model
    layout: PageLayout
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0  # 0: one that is free
    transport: str = AUTO
    timing: Timing = Timing()
    num_hashing_threads: int = 1

    def hello(self, incarnation: bytes) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            incarnation=incarnation,
            fingerprint=self.fingerprint,
            layout=self.layout,
            rank=self.rank,
        )

    def plan(self, peer: Hello, *, is_source: bool) -> TransferPlan:
        """Of what moves between this rank and the peer's; is_source: from here to there."""
        ours, theirs = (self.layout, self.rank), (peer.layout, peer.rank)
        (source, source_rank), (destination, rank) = (ours, theirs) if is_source else (theirs, ours)
        return plan_transfer(source, destination, source_rank, rank)

    def terms(self, peer: Hello, ledger: PageLedger, clock: Clock, *, is_source: bool) -> Terms:
        plan = self.plan(peer, is_source=is_source)
        return Terms(
            ledger=ledger,
            clock=clock,
            timing=self.timing,
            source_units_per_page=plan.source.units_per_page,
            destination_units_per_page=plan.destination.units_per_page,
        )


# Asked for each reservation with the pages that it needs: makes room for them and says who adopts them.
Admit = Callable[[Reserve, int], Owner | None]


def refuse_all(request: Reserve, num_pages: int) -> Owner | None:
    """The `admit` of a rank that only sends."""
    return None
