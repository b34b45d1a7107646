"""Pages that others than live sequences hold, and how many more they may have.

1. `claim` takes hold of the longest known prefix of a prompt before there is a sequence for it, so that
   only the rest need come from elsewhere.
2. `settle` makes claimed and received pages those of a new sequence; `release` lets them go instead.
3. `keep` takes the pages of a sequence that has ended until `release_kept`, for whoever still reads them.
4. `lend` finds pages by their keys for a reader, who holds them until `release`.
5. `num_reservable` says how many pages a reservation may take; leases are the pool's own business.

The watermark: what outsiders do not hold is always enough for the longest live sequence, whatever it may
grow to, alone. Preemption frees all but what outsiders hold, so live sequences can end one after another,
however long a transfer takes. Nor may a reservation take what a newcomer could not: pages that running
prefills still need, the headroom of running sequences, and what the first of those that wait is waiting for,
so that small reservations do not starve it. A sequence that comes after a reservation was granted may have to
wait for it; reservations end by their deadlines.
"""

from collections.abc import Sequence as Ordered
from typing import NamedTuple

from baton.engine.cache.page_pool import Owner
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.plan import PageCopy
from baton.engine.scheduler.queues import SequenceQueues
from baton.engine.scheduler.sequence import FilledPages, Sequence, SequenceKey
from baton.engine.scheduler.step_planner import HEADROOM_TOKENS
from baton.errors import IntegrityError


class PageHold(NamedTuple):
    pages: list[int]  # in the order of the keys
    copies: tuple[PageCopy, ...]  # from the host, to be made before anybody reads them


class ExternalPageHolds:
    def __init__(self, cache: PrefixCache, queues: SequenceQueues) -> None:
        self.kept: dict[SequenceKey, Sequence] = {}
        self._claims: dict[Owner, frozenset[int]] = {}
        self._cache = cache
        self._pool = cache.pool
        self._queues = queues

    def claim(self, known: Ordered[int], owner: Owner) -> FilledPages:
        """known: pages that the cache has found for the beginning of a prompt. ValueError: has a claim."""
        if owner in self._claims:
            raise ValueError(f"{owner} has claimed pages already")
        self._pool.share(known, owner)
        if known:
            self._claims[owner] = frozenset(known)
        return FilledPages(tuple(known), len(known) * self._pool.page_size, owner)

    def release(self, pages: Ordered[int], owner: Owner) -> None:
        """IntegrityError, with nothing released, when they are not all the owner's."""
        self._pool.check_used_by(pages, owner)
        self._pool.release(pages, owner)
        self._pool.accounts.close(owner)
        self._end_claim(pages, owner)

    def lend(self, keys: Ordered[bytes], borrower: Owner) -> PageHold | None:
        """Hold what these keys name. What is on the host alone is lent as copies, which nobody else finds, as
        long as the borrower has them. None, and nothing is held: not all is here, or there is no room for it.
        """
        known = {key: self._cache.page_of(key) for key in keys}
        on_host = {key: self._cache.host.page_of(key) for key, page in known.items() if page is None}
        if None in on_host.values() or len(known) != len(keys):
            return None
        found = [page for page in known.values() if page is not None]
        self._pool.share(found, borrower)
        if on_host and len(on_host) > self.num_reservable():
            self._pool.release(found, borrower)
            return None
        self._cache.make_room(len(on_host), keep=False)
        copies = dict(zip(on_host, self._pool.allocate(len(on_host), borrower), strict=True))
        pages = [copies[key] if page is None else page for key, page in known.items()]
        return PageHold(
            pages, tuple((copies[key], page) for key, page in on_host.items() if page is not None)
        )

    def check(self, filled: FilledPages, sequence: Sequence) -> None:
        """ValueError unless these pages can be what the sequence starts with."""
        pages, num_tokens, pool = filled.pages, filled.num_tokens, self._pool
        if not 0 < num_tokens < sequence.num_tokens:
            raise ValueError(
                f"sequence {sequence.key} of {sequence.num_tokens} tokens: pages with KV of 1 to "
                f"{sequence.num_tokens - 1} of them can be brought, got {num_tokens}"
            )
        if len(pages) != pool.pages_for(num_tokens) or len(set(pages)) != len(pages):
            raise ValueError(
                f"sequence {sequence.key}: {num_tokens} tokens are in {pool.pages_for(num_tokens)} different "
                f"pages, got {len(set(pages))} in a table of {len(pages)}"
            )
        if not 0 <= min(pages) <= max(pages) < pool.num_pages:
            raise ValueError(f"sequence {sequence.key}: the pool has {pool.num_pages} pages, got {pages}")
        if sequence.needs_prompt_logprobs:
            raise ValueError(f"sequence {sequence.key}: prompt_logprobs need the whole prompt computed")

    def settle(self, filled: FilledPages, sequence: Sequence) -> None:
        """Make them the sequence's, on its account, and full ones known. IntegrityError, with nothing done,
        when the owner does not use them all, or one that the sequence will write on is not its alone.
        """
        pool, last = self._pool, filled.pages[-1]
        pool.check_used_by(filled.pages, filled.owner)
        if filled.num_tokens % pool.page_size and (
            pool.is_known(last) or not pool.is_only_used_by(last, filled.owner)
        ):
            raise IntegrityError(f"page {last} is filled in part and shared: {sequence.key} cannot write it")
        pool.accounts.book(sequence.key, sequence.account_name)
        pool.hand_over(filled.pages, filled.owner, sequence.key)
        pool.accounts.close(filled.owner)
        self._end_claim(filled.pages, filled.owner)
        sequence.page_table = list(filled.pages)
        sequence.num_computed_tokens = filled.num_tokens
        sequence.num_cached_tokens = min(filled.num_tokens, sequence.num_prompt_tokens)
        self._cache.register(sequence)

    def keep(self, sequence: Sequence) -> None:
        self.kept[sequence.key] = sequence

    def release_kept(self, key: SequenceKey) -> None:
        """Nothing happens when no pages of this sequence are kept."""
        sequence = self.kept.pop(key, None)
        if sequence is None:
            return
        self._pool.release(sequence.page_table, key)
        sequence.page_table.clear()
        sequence.table_version += 1

    def _end_claim(self, pages: Ordered[int], owner: Owner) -> None:
        rest = self._claims.pop(owner, frozenset()).difference(pages)
        if rest:
            self._claims[owner] = rest

    def num_reservable(self) -> int:
        """Pages that are free, or will be after eviction, and that a reservation may have now."""
        pool, queues = self._pool, self._queues
        num_pages = pool.num_available - queues.num_running * pool.pages_for(HEADROOM_TOKENS)
        for sequence in (*queues.prefilling.values(), *queues.waiting[:1]):
            num_pages -= max(0, pool.pages_for(sequence.num_tokens) - len(sequence.page_table))
        longest = max((s.max_num_tokens for s in queues.by_key.values()), default=0)
        num_spare = pool.num_available - pool.pages_for(longest)
        if num_spare < num_pages:  # else the live sequences' own pages need not be counted
            num_pages = min(num_pages, num_spare + self._num_preemptible())
        return max(0, num_pages)

    def _num_preemptible(self) -> int:
        """Pages that would be available if every live sequence were preempted, and are not now."""
        pages: set[int] = set()
        pages.update(*(sequence.page_table for sequence in self._queues.by_key.values()))
        pages -= self._pool.held_outside()
        pages.difference_update(*self._claims.values())
        pages.difference_update(*(sequence.page_table for sequence in self.kept.values()))
        return len(pages)
