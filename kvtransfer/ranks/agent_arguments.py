"""The arguments of the agents of ranks. A process that starts ranks needs no torch, and neither does this."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.config.engine import RankSidecar
from baton.messages.workers import Address
from baton.rpc.auth import Generations

MAX_REPLICA_BYTES: Final = 32
AGENT: Final = "baton.kvtransfer.ranks.agent:RankAgent"


class AgentsPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place where `RankAgents` meets the agents of other nodes."""

    address: Address
    replica: Annotated[bytes, Meta(max_length=MAX_REPLICA_BYTES)]  # random; agents with another are refused


class AgentNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of an agent on another node than rank 0's."""

    rank_zero: AgentsPlace
    host: str  # the address of the agent's node, on which it listens for sources
    keys: Generations  # of workers; they never cross the network
    link_timeout_s: float  # of WorkerConfig


class AgentArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of an agent, as JSON."""

    address: str = ""  # of rank 0's unix socket, on the same node
    secret: bytes = b""  # which the two ends of that socket share
    node: AgentNode | None = None  # None: the node is rank 0's

    def sidecar(self) -> RankSidecar:
        """Return the agent as the sidecar of a rank."""
        return RankSidecar(factory=AGENT, arguments=msgspec.json.encode(self).decode())
