"""Prefix pulls: a worker fetches cached prefix pages from a peer instead of computing them.

1. `PulledPrefixes.begin` claims the prefix pages that are cached locally, makes room, and requests the
   following pages from the worker that the router named. Without a usable source, nothing begins.
2. `take` handles the end of the transfer: the sequence gets the pages, or all pages are released and the
   engine computes the prefix.
3. `drop` cancels a pull. Pages that arrive after the cancellation are released.

The router's source is a hint. The requesting worker derives the keys of the pages from the sequence's own
tokens, and the holder looks the keys up before it sends any page.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from baton.clock import Clock
from baton.kvtransfer.links import KvLinks, Link
from baton.kvtransfer.protocol.handoff import HandoffOutcome, Owner, TransferEnded
from baton.messages.bounds import MAX_PULLED_PAGES
from baton.messages.control import PullSource
from baton.request import FilledPages

# A pull is a bet that fetching is faster than computing. Each pull therefore has its own deadline; after the
# deadline, or after any other failure, the worker computes the prefix itself.

LEAST_DEADLINE_S: Final = 1.0
MOST_DEADLINE_S: Final = 60.0
PATIENCE: Final = 3.0  # deadline, in multiples of the expected duration
FIRST_BYTES_PER_S: Final = 100e6  # assumed before the first measurement
LEAST_BYTES_PER_S: Final = 1e6
NEWEST_SHARE: Final = 0.25  # weight of the latest pull in the bandwidth EWMA
MAX_PULLS: Final = 64  # concurrent; requests beyond this limit compute their prefix

WaiterT = TypeVar("WaiterT")
logger = logging.getLogger(__name__)


class PullingEndpoint(Protocol):
    """The part of an endpoint that pulls need; `PageEndpoint` implements and documents it."""

    def pull(
        self, link: Link, wanted: Sequence[bytes], num_units: int, adopter: Owner, *, deadline_s: float
    ) -> bytes: ...
    def abort(self, transfer: bytes, reason: str) -> None: ...


class PlannedPull(NamedTuple):
    """The pages to request from a holder, and the local space that their contents need."""

    wanted: tuple[bytes, ...]  # keys of the holder's pages, in token order
    num_units: int
    num_pages: int  # local pages to reserve
    num_tokens: int


def plan_pull(
    held: Sequence[bytes], page_sizes: tuple[int, int], first: int, stop: int
) -> PlannedPull | None:
    """Plan a pull of the longest available part of token positions [first, stop) that one pull may have.

    Returns None when the holder has none of these positions. held: the keys of the holder's pages from
    position 0 on. page_sizes: the local and the holder's page size, in tokens. `first` is a page boundary on
    both sides.
    """
    ours, theirs = page_sizes
    unit = min(page_sizes)
    stop = min(stop, len(held) * theirs, first + MAX_PULLED_PAGES * unit) // unit * unit
    if stop <= first:
        return None
    wanted = tuple(held[first // theirs : -(-stop // theirs)])
    num_tokens = stop - first
    return PlannedPull(wanted, num_tokens // unit, -(-num_tokens // ours), num_tokens)


class Prefix(Protocol):
    """The prefix of one request's sequence; the engine's SoughtPrefix implements and documents it."""

    @property
    def owner(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    def claim(self, multiple_of: int) -> FilledPages: ...
    def keys(self, page_size: int) -> list[bytes]: ...


class PageSizes(Protocol):
    """The page layout of a store."""

    @property
    def page_size(self) -> int: ...


class Store(Protocol):
    """The page store that receives pulled pages; the engine's Replica implements and documents it."""

    @property
    def pages(self) -> PageSizes: ...
    def make_room(self, num_pages: int) -> bool: ...
    def release(self, filled: FilledPages) -> None: ...


class Pulled(NamedTuple, Generic[WaiterT]):
    """The end of a pull."""

    waiter: WaiterT
    filled: FilledPages | None  # None: the pull failed, and the engine computes the whole prefix
    num_bytes: int  # that were pulled; 0 after a failure
    seconds: float


class _Pull(NamedTuple, Generic[WaiterT]):
    waiter: WaiterT | None  # None: the pull was dropped, and its claim is released
    claim: FilledPages
    plan: PlannedPull
    began_s: float
    num_bytes: int


class PulledPrefixes(Generic[WaiterT]):
    """The prefix pulls of one worker, and the local pages that their requests claimed.

    WaiterT is the worker's handle of a request. `counters` counts successful, failed and skipped pulls, and
    pulled bytes. The bandwidth of earlier pulls sets the deadline of the next pull.
    """

    def __init__(self, store: Store, endpoint: PullingEndpoint, links: KvLinks, clock: Clock) -> None:
        self.counters: Counter[str] = Counter()
        self._store = store
        self._endpoint = endpoint
        self._links = links
        self._clock = clock
        self._pulls: dict[bytes, _Pull[WaiterT]] = {}  # transfer -> running pull
        self._bytes_per_s = FIRST_BYTES_PER_S

    def begin(self, waiter: WaiterT, source: PullSource | None, prefix: Prefix) -> bool:
        """Start a pull for the request; return False when none starts. `take` reports the end of the pull."""
        if source is None:
            return False
        link = self._links.to(source.worker)
        may_begin = len(self._pulls) < MAX_PULLS and prefix.num_tokens > 0
        has_begun = link is not None and may_begin and self._pull(waiter, source, prefix, link)
        self.counters["pulls_not_begun"] += not has_begun
        return has_begun

    def take(self, ended: TransferEnded) -> Pulled[WaiterT] | None:
        """Return the finished pull; None when the transfer is not a pull or the pull was dropped."""
        pull = self._pulls.pop(ended.transfer, None)
        if pull is None:
            return None
        waiter, claim, plan, began_s, num_bytes = pull
        seconds = max(1e-6, self._clock.now_s() - began_s)
        is_adopted = ended.outcome is HandoffOutcome.ADOPTED
        pages, owner = ended.pages if is_adopted else (), claim.owner
        self._learn(num_bytes, seconds, is_adopted=is_adopted)
        if waiter is None:
            self._store.release(FilledPages(pages, plan.num_tokens, owner))
            return None
        if not is_adopted:
            logger.info(
                "request %s: the prefix pull failed, this worker computes the prefix: %s", owner, ended.reason
            )
            self.counters["pulls_failed"] += 1
            self._store.release(claim)
            return Pulled(waiter, None, 0, seconds)
        self.counters["pulls"] += 1
        self.counters["pulled_bytes"] += num_bytes
        filled = FilledPages(claim.pages + pages, claim.num_tokens + plan.num_tokens, owner)
        return Pulled(waiter, filled, num_bytes, seconds)

    def drop(self, waiter: WaiterT) -> None:
        """Cancel the request's pull, if one runs, and release its claimed pages."""
        for transfer, pull in self._pulls.items():
            if pull.waiter is waiter:
                self._pulls[transfer] = pull._replace(waiter=None)
                self._store.release(pull.claim)
                self._endpoint.abort(transfer, "the pull was cancelled")

    def deadline_s(self, num_bytes: int) -> float:
        """Return the time limit for a pull of this size, in seconds from its start."""
        return min(MOST_DEADLINE_S, max(LEAST_DEADLINE_S, PATIENCE * num_bytes / self._bytes_per_s))

    def _pull(self, waiter: WaiterT, source: PullSource, prefix: Prefix, link: Link) -> bool:
        page_sizes = self._store.pages.page_size, link.hello.layout.page_size
        claim = prefix.claim(max(page_sizes))
        held = prefix.keys(page_sizes[1])[: source.num_tokens // page_sizes[1]]
        plan = plan_pull(held, page_sizes, claim.num_tokens, prefix.num_tokens)
        if plan is None or not self._store.make_room(plan.num_pages):
            self._store.release(claim)
            return False
        num_bytes = plan.num_tokens * link.hello.layout.sent_token_bytes
        try:
            transfer = self._endpoint.pull(
                link, plan.wanted, plan.num_units, prefix.owner, deadline_s=self.deadline_s(num_bytes)
            )
        except ValueError as error:
            logger.warning("request %s: the prefix cannot be pulled: %s", prefix.owner, error)
            self._store.release(claim)
            return False
        self._pulls[transfer] = _Pull(waiter, claim, plan, self._clock.now_s(), num_bytes)
        return True

    def _learn(self, num_bytes: int, seconds: float, *, is_adopted: bool) -> None:
        """Update the expected bandwidth, which was too high when a pull failed after a long time."""
        if not is_adopted and seconds < LEAST_DEADLINE_S:
            return
        measured = num_bytes / seconds if is_adopted else num_bytes / (PATIENCE * seconds)
        expected = (1 - NEWEST_SHARE) * self._bytes_per_s + NEWEST_SHARE * measured
        self._bytes_per_s = max(LEAST_BYTES_PER_S, expected)
