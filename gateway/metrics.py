"""What a gateway counts.

Plain integers and lists, written on the event loop alone: an observation for each token must cost nothing
that shows. Labels have few values, which no client chooses.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from baton.gateway.counts import Counts, HistogramCounts
from baton.gateway.tenants_counts import Tallies

TTFT_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
ITL_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_BOUNDS_S: Final = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 600.0)
ROUTES: Final = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"}
    | {"/health", "/ping", "/metrics", "/version", "/v1/stream", "/ui"}
)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> HistogramCounts:
        return HistogramCounts(tuple(self._counts), self._sum)


class Metrics:
    """Of one gateway process; `counts` is what is shown of it."""

    def __init__(self, gateway: str = "") -> None:
        self.gateway = gateway
        self.requests: Counter[tuple[str, int]] = Counter()  # by route and status
        self.refused: Counter[str] = Counter()  # connections, by the server, before any route
        self.num_open = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.clients_gone = 0
        self.clients_given_up = 0  # they read too slowly
        self.unknown_keys = 0
        self.tenants = Tallies()
        self.tenants_file: Counter[str] = Counter()  # what came of its changes
        self.ttft = Histogram(TTFT_BOUNDS_S)
        self.itl = Histogram(ITL_BOUNDS_S)
        self.duration = Histogram(REQUEST_BOUNDS_S)

    def answered(self, path: str, status: int) -> None:
        self.requests[path if path in ROUTES else "other", status] += 1

    def counts(self, events: Mapping[str, int]) -> Counts:
        """events: of the service, by name."""
        return Counts(
            gateway=self.gateway,
            requests=tuple((route, status, count) for (route, status), count in self.requests.items()),
            refused=dict(self.refused),
            events=dict(events),
            num_open=self.num_open,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            clients_gone=self.clients_gone,
            clients_given_up=self.clients_given_up,
            unknown_keys=self.unknown_keys,
            tenants=self.tenants.counts(),
            tenants_file=dict(self.tenants_file),
            ttft=self.ttft.counts(),
            itl=self.itl.counts(),
            duration=self.duration.counts(),
        )
