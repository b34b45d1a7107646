"""The arguments of the agents of ranks. A process that starts ranks needs no torch, and neither does this."""

from typing import Final

import msgspec

from baton.config.engine import RankSidecar
from baton.rpc.connection import RankNetwork

AGENT: Final = "baton.kvtransfer.ranks.agent:RankAgent"


class AgentArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of an agent, as JSON."""

    address: str = ""  # of rank 0's unix socket, on the same node
    secret: bytes = b""  # which the two ends of that socket share
    network: RankNetwork | None = None  # None: the agent is on rank 0's node

    def sidecar(self) -> RankSidecar:
        """Return the agent as the sidecar of a rank."""
        return RankSidecar(factory=AGENT, arguments=msgspec.json.encode(self).decode())
