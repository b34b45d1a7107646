"""Prefixes of sequences that a peer holds, fetched from there before the rest is computed.

1. `begin` takes hold of what is known of the sequence here, makes room, and asks the worker that the router
   named for the pages that follow. It does nothing where that is not possible, or brings nothing.
2. `take` is told of the transfer's end: the pages go to the sequence, or all is let go of and it is computed.
3. `drop` ends it from outside; pages that come all the same are let go of.

What the router said of the holder is a hint: the holder compares pages, generations and keys before it sends
any, and the keys are made here, of the sequence's own tokens.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from baton.clock import Clock
from baton.kvtransfer.links import KvLinks, Link
from baton.kvtransfer.page_endpoint import PageEndpoint
from baton.kvtransfer.protocol.handoff import HandoffOutcome, Owner, TransferEnded
from baton.kvtransfer.protocol.pull import WantedPage
from baton.messages.control import PullSource
from baton.request import FilledPages

# Known pages that are fetched from a peer: which, and for how long they are waited for.
#
# A pull is a bet that fetching is faster than computing. So it has a deadline of its own, after which whoever
# wanted the pages computes what they would have held; so it does after any other failure.

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


class PrefixPull(NamedTuple):
    """One that has ended."""

    transfer: bytes
    pages: tuple[int, ...] | None  # None: they do not come
    num_bytes: int
    seconds: float
    reason: str


class PrefixPulls:
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

    def take(self, ended: TransferEnded) -> PrefixPull | None:
        """None for another transfer than a pull."""
        begun = self._begun.pop(ended.transfer, None)
        if begun is None:
            return None
        began_s, num_bytes = begun
        seconds = max(1e-6, self._clock.now_s() - began_s)
        has_come = ended.outcome is HandoffOutcome.ADOPTED
        if has_come:
            self._learn(num_bytes / seconds)
        elif seconds >= LEAST_DEADLINE_S:  # it may have been too slow for what was expected
            self._learn(num_bytes / (PATIENCE * seconds))
        pages = ended.pages if has_come else None
        return PrefixPull(ended.transfer, pages, num_bytes, seconds, ended.reason)

    def _learn(self, bytes_per_s: float) -> None:
        expected = (1 - NEWEST_SHARE) * self._bytes_per_s + NEWEST_SHARE * bytes_per_s
        self._bytes_per_s = max(LEAST_BYTES_PER_S, expected)


MAX_PULLS: Final = 64  # at a time; who comes then computes
WaiterT = TypeVar("WaiterT")
logger = logging.getLogger(__name__)


class Prefix(Protocol):
    """The beginning of a sequence; an engine has one of each request."""

    @property
    def owner(self) -> str:
        """Of the pages that are claimed and that come."""

    @property
    def num_tokens(self) -> int:
        """That may be brought."""

    def claim(self, multiple_of: int) -> FilledPages:
        """Hold the pages here that have its first tokens, a multiple of so many; perhaps none."""

    def keys(self, page_size: int) -> list[bytes]:
        """Of the pages of that size that it fills."""


class PageSizes(Protocol):
    @property
    def page_size(self) -> int: ...


class Store(Protocol):
    """Of pages: an engine."""

    @property
    def pages(self) -> PageSizes: ...

    def make_room(self, num_pages: int) -> bool: ...

    def release(self, filled: FilledPages) -> None: ...


class Pulled(NamedTuple, Generic[WaiterT]):
    """The end of a pull: `filled` None where all is to be computed."""

    waiter: WaiterT
    filled: FilledPages | None
    pull: PrefixPull


class _Fetch(NamedTuple, Generic[WaiterT]):
    waiter: WaiterT
    claim: FilledPages
    plan: PlannedPull


class PulledPrefixes(Generic[WaiterT]):
    """`counters`: pulls that ended well, or not, and bytes."""

    def __init__(self, store: Store, endpoint: PageEndpoint, links: KvLinks, clock: Clock) -> None:
        self.counters: Counter[str] = Counter()
        self._store = store
        self._endpoint = endpoint
        self._links = links
        self._pulls = PrefixPulls(endpoint, clock)
        self._fetches: dict[bytes, _Fetch[WaiterT]] = {}  # by transfer, until that has ended
        self._dropped: set[bytes] = set()

    def begin(self, waiter: WaiterT, source: PullSource | None, prefix: Prefix) -> bool:
        """Whether a transfer has begun, of which `take` will tell."""
        if source is None:
            return False
        link = self._links.to(source.worker)
        may_begin = len(self._fetches) < MAX_PULLS and prefix.num_tokens > 0
        has_begun = link is not None and may_begin and self._fetch(waiter, source, prefix, link)
        self.counters["pulls_not_begun"] += not has_begun
        return has_begun

    def take(self, ended: TransferEnded) -> Pulled[WaiterT] | None:
        """None where it was no pull, or one that nobody waits for any more."""
        pull = self._pulls.take(ended)
        if pull is None:
            return None
        waiter, claim, plan = self._fetches.pop(ended.transfer)
        pages, owner = pull.pages or (), claim.owner
        if ended.transfer in self._dropped:
            self._dropped.remove(ended.transfer)
            self._store.release(FilledPages(pages, plan.num_tokens, owner))
            return None
        if pull.pages is None:
            logger.info("request %s: its prefix is computed here: %s", owner, pull.reason)
            self.counters["pulls_failed"] += 1
            self._store.release(claim)
            return Pulled(waiter, None, pull)
        self.counters["pulls"] += 1
        self.counters["pulled_bytes"] += pull.num_bytes
        filled = FilledPages(claim.pages + pages, claim.num_tokens + plan.num_tokens, owner)
        return Pulled(waiter, filled, pull)

    def drop(self, waiter: WaiterT) -> None:
        """Nobody wants it any more; nothing happens where none has begun."""
        for transfer, fetch in self._fetches.items():
            if fetch.waiter is waiter and transfer not in self._dropped:
                self._dropped.add(transfer)
                self._store.release(fetch.claim)
                self._endpoint.abort(transfer, "not wanted any more")

    def _fetch(self, waiter: WaiterT, source: PullSource, prefix: Prefix, link: Link) -> bool:
        page_sizes = self._store.pages.page_size, link.hello.layout.page_size
        claim = prefix.claim(max(page_sizes))
        said = zip(source.pages, source.generations, prefix.keys(page_sizes[1]), strict=False)
        held = [WantedPage(*each) for each in said]
        plan = plan_pull(held, page_sizes, claim.num_tokens, min(source.num_tokens, prefix.num_tokens))
        transfer = None if plan is None else self._ask(link, plan, prefix.owner)
        if plan is None or transfer is None:
            self._store.release(claim)
            return False
        self._fetches[transfer] = _Fetch(waiter, claim, plan)
        return True

    def _ask(self, link: Link, plan: PlannedPull, owner: str) -> bytes | None:
        if not self._store.make_room(plan.num_pages):
            return None
        try:
            return self._pulls.begin(link, plan, owner)
        except ValueError as error:
            logger.warning("request %s: its prefix can't be pulled: %s", owner, error)
            return None
