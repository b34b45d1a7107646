"""What a router says of itself, for operators."""

from bisect import bisect_left
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from baton.pressure import QueueStatus
from baton.wire_types import Count, Id, Name

# Upper bounds of what is counted together; what takes longer than the last is counted after it.
ROUTING_BOUNDS_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)

RedisState: TypeAlias = Literal["none", "up", "down"]
_NUM_COUNTS: Final = len(ROUTING_BOUNDS_S) + 1
Counts: TypeAlias = Annotated[tuple[Count, ...], Meta(min_length=_NUM_COUNTS, max_length=_NUM_COUNTS)]


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Id
    node: Name = ""  # the machine, by the name that operators know
    pid: Count = 0
    num_attempts: Count = 0  # under way, that it has sent out
    redis: RedisState = "none"
    routing_counts: Counts = (0,) * _NUM_COUNTS  # attempts, by how long the choice took
    routing_s: Annotated[float, Meta(ge=0)] = 0.0  # that they took together
    counters: dict[Annotated[str, Meta(max_length=64)], Count] = {}
    queue: QueueStatus = QueueStatus()

    @property
    def blind_share(self) -> float:
        """Of its decisions, those about a worker that had not told what it holds."""
        return self.counters.get("blind_decisions", 0) / max(1, self.counters.get("decisions", 0))

    def routing_quantile_s(self, share: float) -> float:
        """So many were routed within this: an upper bound, infinite beyond the last one."""
        num_left = share * sum(self.routing_counts)
        for bound_s, count in zip((*ROUTING_BOUNDS_S, float("inf")), self.routing_counts, strict=True):
            num_left -= count
            if num_left <= 0:
                return bound_s
        return 0.0


class RoutingTimes:
    """Counts how long choices took."""

    def __init__(self) -> None:
        self.counts = [0] * _NUM_COUNTS
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(ROUTING_BOUNDS_S, seconds)] += 1
        self.total_s += seconds
