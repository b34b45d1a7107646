"""Status of routers: the overload level, the queue and its tenants, and routing times.

The overload levels, from the lowest. Each level adds a measure to those of the levels below:

    CALM           nothing
    QUEUE          requests wait at the router, ordered by shares and deadlines
    LOCAL_PREFILL  longer prompts are computed on their decode worker
    SMALL_CHUNKS   workers compute prompts in smaller chunks, so that running answers wait less
    MAKE_ROOM      workers preempt sequences of the lowest class; their KV is computed again later, or copied
                   back from the host tier (cache.host_cache_memory_bytes)
    CLIP           answers get shorter, and alternatives fewer, where the tenant allows it
    SHED           waiting requests of the lowest class are refused, where the tenant allows it
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from functools import lru_cache, partial
from itertools import product, zip_longest
from math import inf, log2
from typing import Annotated, ClassVar, Final, Literal, Self, TypeAlias

import msgspec
from msgspec import Meta

from baton.messages.bounds import Count, Id, Name, Seconds
from baton.tenants import Refusal

MAX_HISTOGRAMS: Final = 64  # of one process
MAX_TENANTS: Final = 1024  # in one status: the tenants with most queued requests and most work


class OverloadLevel(IntEnum):
    """An overload level; the module describes each."""

    CALM = 0
    QUEUE = 1
    LOCAL_PREFILL = 2
    SMALL_CHUNKS = 3
    MAKE_ROOM = 4
    CLIP = 5
    SHED = 6

    @property
    def small_chunks(self) -> bool:
        """True when workers compute prompts in smaller chunks."""
        return self >= OverloadLevel.SMALL_CHUNKS

    @property
    def makes_room(self) -> bool:
        """True when workers preempt sequences of the lowest class while pages are short."""
        return self >= OverloadLevel.MAKE_ROOM


Escalations: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=32)], Count], Meta(max_length=len(OverloadLevel))
]


class TenantStatus(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One tenant as one router sees it. The router counts here, since its start."""

    tenant: Annotated[str, Meta(max_length=128)]
    weight: float = 1.0
    num_queued: Count = 0
    num_active: Count = 0  # dispatched and not ended
    oldest_wait_s: Seconds = 0.0  # of the queued requests
    work_tokens: Count = 0  # computed prompt tokens and generated tokens
    num_dispatched: Count = 0
    waited_s: float = 0.0  # sum over the dispatched requests
    num_met: Count = 0  # first tokens within their ttft_ms, of the requests with one
    num_missed: Count = 0
    num_degraded: Count = 0
    refused: dict[Refusal, Count] = {}

    def count_refused(self, refusal: Refusal) -> None:
        """Count a refused request."""
        self.refused[refusal] = self.refused.get(refusal, 0) + 1


class QueueStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The queue of one router."""

    level: OverloadLevel = OverloadLevel.CALM
    num_queued: Count = 0
    oldest_wait_s: Seconds = 0.0
    escalations: Escalations = {}  # level -> how often the router rose to it since its start
    tenants: Annotated[tuple[TenantStatus, ...], Meta(max_length=MAX_TENANTS)] = ()
    num_left_out: Count = 0  # further tenants, for lack of room in the message


def joined(queues: Iterable[QueueStatus]) -> QueueStatus:
    """Return the queues of several routers as if one router had seen all requests."""
    every = list(queues)
    tenants: dict[str, TenantStatus] = {}
    for status in (status for queue in every for status in queue.tenants):
        other = tenants.get(status.tenant)
        tenants[status.tenant] = status if other is None else _sum(other, status)
    return QueueStatus(
        level=max((queue.level for queue in every), default=OverloadLevel.CALM),
        num_queued=sum(queue.num_queued for queue in every),
        oldest_wait_s=max((queue.oldest_wait_s for queue in every), default=0.0),
        escalations=dict(sum((Counter(queue.escalations) for queue in every), Counter())),
        tenants=tuple(tenants.values())[:MAX_TENANTS],
        num_left_out=max(0, len(tenants) - MAX_TENANTS) + sum(queue.num_left_out for queue in every),
    )


def _sum(one: TenantStatus, other: TenantStatus) -> TenantStatus:
    counts = {
        name: getattr(one, name) + getattr(other, name) for name in (*_COUNTS, "work_tokens", "waited_s")
    }
    return TenantStatus(
        tenant=one.tenant,
        weight=one.weight,
        oldest_wait_s=max(one.oldest_wait_s, other.oldest_wait_s),
        refused={
            refusal: one.refused.get(refusal, 0) + other.refused.get(refusal, 0)
            for refusal in {*one.refused, *other.refused}
        },
        **counts,
    )


_COUNTS: Final = (
    *("num_queued", "num_active", "num_dispatched"),
    *("num_met", "num_missed", "num_degraded"),
)

MAX_STREAMS: Final = 32  # of one gateway; the requests of further ones count together
MAX_CELLS: Final = 256  # combinations of lengths of one stream; further ones count as the nearest
BUCKETS_AN_OCTAVE: Final = 4
NEARBY: Final = 4  # buckets; a cell this near is found without a look at all cells
MAX_LENGTHS: Final = 2**12  # of which the buckets are remembered
_NUM_BUCKETS: Final = BUCKETS_AN_OCTAVE * 64 + 1
_Bucket: TypeAlias = Annotated[int, Meta(ge=0, lt=_NUM_BUCKETS)]
_Cell: TypeAlias = Annotated[int, Meta(ge=0, lt=_NUM_BUCKETS**3)]


@lru_cache(maxsize=MAX_LENGTHS)
def bucket(num_tokens: int) -> int:
    """Return the bucket of a length: BUCKETS_AN_OCTAVE buckets for each doubling."""
    return round(BUCKETS_AN_OCTAVE * log2(num_tokens + 1))


def cell_of(num_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> int:
    """Return the three buckets of a request's lengths as one number, which may be a key of JSON."""
    prompt, cached, output = bucket(num_tokens), bucket(num_cached_tokens), bucket(num_output_tokens)
    return (prompt * _NUM_BUCKETS + cached) * _NUM_BUCKETS + output


def buckets_of(cell: int) -> tuple[int, int, int]:
    """Return the buckets of the prompt, its cached tokens and the answer: the inverse of `cell_of`."""
    rest, output = divmod(cell, _NUM_BUCKETS)
    prompt, cached = divmod(rest, _NUM_BUCKETS)
    return prompt, cached, output


class StreamCounts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The requests of one tenant and class at one gateway since the gateway started. No count ever falls."""

    tenant: Annotated[str, Meta(max_length=128)] = ""
    priority: Annotated[str, Meta(max_length=128)] = ""  # the class
    # Bucket of the prompt -> requests, refused ones included.
    arrived: Annotated[dict[_Bucket, Count], Meta(max_length=BUCKETS_AN_OCTAVE * 64)] = {}
    ended: Annotated[dict[_Cell, Count], Meta(max_length=MAX_CELLS)] = {}  # cell -> answered requests
    num_met: Count = 0  # requests that met all their objectives
    num_missed: Count = 0  # requests that missed one

    def arrive(self, num_tokens: int) -> None:
        """Count a request with a prompt of so many tokens."""
        prompt = bucket(num_tokens)
        self.arrived[prompt] = self.arrived.get(prompt, 0) + 1

    def end(self, num_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> None:
        """Count an answered request."""
        cell = cell_of(num_tokens, num_cached_tokens, num_output_tokens)
        if cell not in self.ended and len(self.ended) >= MAX_CELLS:
            cell = _nearest(cell, self.ended)
        self.ended[cell] = self.ended.get(cell, 0) + 1


RedisState: TypeAlias = Literal["none", "up", "down"]


class Histogram(msgspec.Struct, array_like=True):
    """Values counted in buckets: bucket i has the values in (BOUNDS[i - 1], BOUNDS[i]], the last the rest.

    The bounds are those of the class, and messages do not carry them. `counts` ends with the last bucket that
    is not empty, so a message with many histograms stays small.
    """

    counts: Annotated[list[Count], Meta(max_length=65)] = []
    sum: float = 0.0

    BOUNDS: ClassVar[tuple[float, ...]] = ()

    def __post_init__(self) -> None:
        if len(self.counts) > len(self.BOUNDS) + 1:
            raise ValueError(f"{len(self.BOUNDS)} bounds have one bucket more, got {len(self.counts)} counts")

    @property
    def num(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.add(bisect_left(self.BOUNDS, value), 1)
        self.sum += value

    def add(self, bucket: int, num: int) -> None:
        """Count `num` values in a bucket; `sum` is the caller's."""
        counts = self.counts
        while len(counts) <= bucket:
            counts.append(0)
        counts[bucket] += num

    def copy(self) -> Self:
        """Return a copy that does not change with the original."""
        return type(self)(self.counts.copy(), self.sum)

    def add_since(self, before: Self, now: Self) -> None:
        """Count the values that `now` has and an earlier copy of it, `before`, has not."""
        for index, (old, new) in enumerate(zip_longest(before.counts, now.counts, fillvalue=0)):
            self.add(index, max(0, new - old))
        self.sum += now.sum - before.sum

    def quantile(self, share: float) -> float:
        """Return the upper bound of the quantile's bucket: inf beyond the last bound, 0 without values."""
        num_left = share * self.num
        for bound, count in zip((*self.BOUNDS, inf), self.counts, strict=False):
            num_left -= count
            if count and num_left <= 0:
                return bound
        return 0.0

    def estimate(self, share: float) -> float:
        """Return the quantile as Prometheus' histogram_quantile does, evenly spread within its bucket.

        Values beyond the last bound count as the last bound. 0 without values.
        """
        num_left, lower = share * self.num, 0.0
        for bound, count in zip(self.BOUNDS, self.counts, strict=False):
            if count and num_left <= count:
                return lower + (bound - lower) * num_left / count
            num_left -= count
            lower = bound
        return self.BOUNDS[-1] if self.num else 0.0


class Times(Histogram):
    """Durations in seconds, from 10 us to 2 minutes."""

    BOUNDS = (
        *(1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05),
        *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0),
    )


class Sizes(Histogram):
    """Numbers of tokens, in powers of 2."""

    BOUNDS = tuple(float(2**power) for power in range(16))


class RoutingTimes(Histogram):
    """Seconds to choose the workers of an attempt."""

    BOUNDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)


# By name. A worker or a router names its histograms itself.
TimesByName: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Times], Meta(max_length=MAX_HISTOGRAMS)
]


def snapshot(times: Mapping[str, Times]) -> dict[str, Times]:
    """Return copies of the histograms that have values."""
    return {name: each.copy() for name, each in times.items() if each.counts}


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One router process, for operators."""

    id: Id
    node: Name = ""  # name of the machine, for operators
    pid: Count = 0
    num_attempts: Count = 0  # dispatched by this router and not ended
    redis: RedisState = "none"
    routing: RoutingTimes = msgspec.field(default_factory=RoutingTimes)
    counters: dict[Annotated[str, Meta(max_length=64)], Count] = {}
    times: TimesByName = {}
    queue: QueueStatus = QueueStatus()

    @property
    def blind_share(self) -> float:
        """The share of decisions about a worker that had not reported its pages."""
        return self.counters.get("blind_decisions", 0) / max(1, self.counters.get("decisions", 0))


# The differences between a cell and those at most NEARBY buckets away, the nearest first.
_NEAR: Final = tuple(
    (prompt * _NUM_BUCKETS + cached) * _NUM_BUCKETS + output
    for distance in range(1, NEARBY + 1)
    for prompt, cached, output in product(range(-distance, distance + 1), repeat=3)
    if abs(prompt) + abs(cached) + abs(output) == distance
)


def _nearest(cell: int, cells: Collection[int]) -> int:
    near = next((cell + each for each in _NEAR if cell + each in cells), None)
    return min(cells, key=partial(_distance, cell)) if near is None else near


def _distance(one: int, other: int) -> int:
    return sum(abs(a - b) for a, b in zip(buckets_of(one), buckets_of(other), strict=True))
