"""Known pages that are fetched from a peer: which, and for how long they are waited for.

A pull is a bet that fetching is faster than computing. So it has a deadline of its own, after which whoever
wanted the pages computes what they would have held; so it does after any other failure.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from baton.clock import Clock
from baton.kvtransfer.ended import Ended
from baton.kvtransfer.handoff import Outcome
from baton.kvtransfer.ledger import Owner
from baton.kvtransfer.link import Link
from baton.kvtransfer.pull import WantedPage

LEAST_DEADLINE_S: Final = 1.0
MOST_DEADLINE_S: Final = 60.0
PATIENCE: Final = 3.0  # times as long as it should take
FIRST_BYTES_PER_S: Final = 100e6  # until something has been measured
LEAST_BYTES_PER_S: Final = 1e6
NEWEST_SHARE: Final = 0.25  # of the latest pull in what is expected of the next


class Puller(Protocol):
    """An endpoint, as far as pulls need one: see `PageEndpoint.pull`."""

    def pull(
        self,
        link: Link,
        wanted: Sequence[WantedPage],
        num_units: int,
        adopter: Owner,
        *,
        deadline_s: float,
    ) -> bytes: ...


class PlannedPull(NamedTuple):
    wanted: tuple[WantedPage, ...]  # in order
    num_units: int
    num_pages: int  # of ours
    num_tokens: int


def plan_pull(
    held: Sequence[WantedPage], page_sizes: tuple[int, int], first: int, stop: int
) -> PlannedPull | None:
    """Of positions [first, stop) as much as can be had; None for nothing.

    held: by the other side, all pages from position 0 on. page_sizes: ours and the holder's, in tokens.
    `first` starts a page of both.
    """
    ours, theirs = page_sizes
    unit = min(page_sizes)
    stop = min(stop, len(held) * theirs) // unit * unit
    if stop <= first:
        return None
    wanted = tuple(held[first // theirs : -(-stop // theirs)])
    num_tokens = stop - first
    return PlannedPull(wanted, num_tokens // unit, -(-num_tokens // ours), num_tokens)


class Pull(NamedTuple):
    """One that has ended."""

    transfer: bytes
    pages: tuple[int, ...] | None  # None: they do not come
    num_bytes: int
    seconds: float
    reason: str


class Pulls:
    """Those that are under way. What it expects of the next it has learned from those before."""

    def __init__(self, endpoint: Puller, clock: Clock) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._begun: dict[bytes, tuple[float, int]] = {}  # transfer -> when, bytes
        self._bytes_per_s = FIRST_BYTES_PER_S

    def begin(self, link: Link, plan: PlannedPull, adopter: Owner) -> bytes:
        """The id of the transfer, of which `take` will tell. The caller has made room for the pages.

        ValueError for what is too much for one transfer.
        """
        layout = link.hello.layout
        num_bytes = plan.num_tokens * layout.token_bytes * layout.tp_size
        deadline_s = self.deadline_s(num_bytes)
        transfer = self._endpoint.pull(link, plan.wanted, plan.num_units, adopter, deadline_s=deadline_s)
        self._begun[transfer] = self._clock.now_s(), num_bytes
        return transfer

    def deadline_s(self, num_bytes: int) -> float:
        return min(MOST_DEADLINE_S, max(LEAST_DEADLINE_S, PATIENCE * num_bytes / self._bytes_per_s))

    def take(self, ended: Ended) -> Pull | None:
        """None for another transfer than a pull."""
        begun = self._begun.pop(ended.transfer, None)
        if begun is None:
            return None
        began_s, num_bytes = begun
        seconds = max(1e-6, self._clock.now_s() - began_s)
        has_come = ended.outcome is Outcome.ADOPTED
        if has_come:
            self._learn(num_bytes / seconds)
        elif seconds >= LEAST_DEADLINE_S:  # it may have been too slow for what was expected
            self._learn(num_bytes / (PATIENCE * seconds))
        pages = ended.pages if has_come else None
        return Pull(ended.transfer, pages, num_bytes, seconds, ended.reason)

    def _learn(self, bytes_per_s: float) -> None:
        expected = (1 - NEWEST_SHARE) * self._bytes_per_s + NEWEST_SHARE * bytes_per_s
        self._bytes_per_s = max(LEAST_BYTES_PER_S, expected)
