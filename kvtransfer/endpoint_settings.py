"""What an endpoint is told about itself and its cluster."""

import msgspec

from baton.kvtransfer.choose import AUTO
from baton.kvtransfer.handoff import Timing
from baton.kvtransfer.messages import PROTOCOL, Hello
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
