"""The settings of an endpoint, and the values derived from them."""

import msgspec

from baton.clock import Clock
from baton.kvtransfer.protocol.handoff import HandoffTimeouts, PageLedger, Timing
from baton.kvtransfer.protocol.messages import PROTOCOL, EndpointHello
from baton.kvtransfer.protocol.transfer_plan import plan_transfer
from baton.kvtransfer.ranks.messages import PartRanks, RankSettings, parts_of
from baton.kvtransfer.transports.base import AUTO
from baton.messages.bounds import LINK_TIMEOUT_S
from baton.pages import PageLayout
from baton.rpc.auth import PAGES, KeyRing, LinkKeys, LinkSecret


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica's endpoint: its keys, model, layout, address and limits."""

    key: bytes | KeyRing  # of page links; bytes: a key that never changes
    fingerprint: str  # of the model
    layout: PageLayout
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    transport: str = AUTO
    timing: Timing = Timing()
    num_hashing_threads: int = 1
    link_timeout_s: float = LINK_TIMEOUT_S  # after which a silent link to another replica is dropped

    def hello(self, incarnation: bytes) -> EndpointHello:
        return EndpointHello(
            protocol=PROTOCOL,
            incarnation=incarnation,
            fingerprint=self.fingerprint,
            layout=self.layout,
        )

    @property
    def secret(self) -> LinkSecret:
        """The key or keys that prove links to other replicas."""
        return self.key if isinstance(self.key, bytes) else LinkKeys(self.key, PAGES)

    def for_rank(self, rank: int) -> RankSettings:
        return RankSettings(
            key=self.key if isinstance(self.key, bytes) else self.key.generations,
            layout=self.layout,
            rank=rank,
            host=self.host,
            transport=self.transport,
            num_hashing_threads=self.num_hashing_threads,
        )

    def parts(
        self, peer: EndpointHello, num_layer_groups: int = 1, *, is_source: bool
    ) -> tuple[PartRanks, ...]:
        """The parts of a transfer to or from the peer's replica. is_source: this replica is the source.

        ValueError when there are more groups than layers.
        """
        return parts_of(*self._ways(peer, is_source=is_source), num_layer_groups)

    def timeouts(
        self, peer: EndpointHello, ledger: PageLedger, clock: Clock, *, is_source: bool
    ) -> HandoffTimeouts:
        plan = plan_transfer(*self._ways(peer, is_source=is_source), 0, 0)  # all parts count the same units
        return HandoffTimeouts(
            ledger=ledger,
            clock=clock,
            timing=self.timing,
            source_units_per_page=plan.source.units_per_page,
            destination_units_per_page=plan.destination.units_per_page,
        )

    def _ways(self, peer: EndpointHello, *, is_source: bool) -> tuple[PageLayout, PageLayout]:
        return (self.layout, peer.layout) if is_source else (peer.layout, self.layout)
