"""Holds pages outside live sequences: for prompts that are received, and for readers such as transfers."""

from collections.abc import Sequence as Ordered

from baton.engine.cache.page_pool import Owner
from baton.engine.cache.prefix_cache import PrefixCache
from baton.engine.scheduler.sequence import PageCopy, Sequence, SequenceKey, SequenceQueues
from baton.engine.scheduler.step_planner import HEADROOM_TOKENS
from baton.errors import IntegrityError
from baton.request import FilledPages


class ExternalPageHolds:
    """Pages that are held outside live sequences, and how many more pages such holders may reserve.

    1. `claim` holds the longest known prefix of a prompt before there is a sequence, so that only the rest of
       the prompt must be received.
    2. `settle` gives claimed and received pages to a new sequence; `release` releases them instead.
    3. `kept` has the ended sequences with pages that stay until `release_kept`, for a reader such as a
       transfer.
    4. `pin` finds pages by their keys for a reader, which holds them until `release`.
    5. `num_reservable` says how many pages a reservation may take; the page pool has the holders.

    The watermark: the pages that are not held outside are always enough for the longest live sequence alone,
    at its greatest length. Preemption frees all pages except those held outside, so live sequences can end
    one after another however long a transfer takes. A reservation also leaves the pages that admission keeps
    back: those that running prefills still need, the headroom of running sequences, and those of the first
    waiting sequence, so that small reservations do not starve that sequence. A later sequence may wait until
    the holder releases the reservation: the engine sets no time limit.
    """

    def __init__(self, cache: PrefixCache, queues: SequenceQueues) -> None:
        self.kept: dict[SequenceKey, Sequence] = {}  # ended sequences
        self._claims: dict[Owner, frozenset[int]] = {}
        self._cache = cache
        self._pool = cache.pool
        self._queues = queues

    def claim(
        self, token_ids: Ordered[int], salt: bytes, owner: Owner, *, multiple_of: int = 1
    ) -> FilledPages:
        """Hold the known prefix of a prompt, cut to a multiple of `multiple_of` tokens.

        Raises ValueError if the owner has a claim already.
        """
        if owner in self._claims:
            raise ValueError(f"{owner} has claimed pages already")
        known = self._cache.find(token_ids, salt)
        while len(known) * self._pool.page_size % multiple_of:
            known.pop()
        self._pool.share(known, owner)
        if known:
            self._claims[owner] = frozenset(known)
        return FilledPages(tuple(known), len(known) * self._pool.page_size, owner)

    def release(self, pages: Ordered[int], owner: Owner) -> None:
        """Release claimed or pinned pages. IntegrityError, with nothing released, if the owner lacks one."""
        self._pool.check_used_by(pages, owner)
        self._pool.release(pages, owner)
        self._pool.accounts.close(owner)
        self._end_claim(pages, owner)

    def pin(self, keys: Ordered[bytes], reader: Owner) -> tuple[list[int], list[PageCopy]] | None:
        """Hold the pages with these keys: the pages, and the copies from the host to make before they are
        read.

        None, with nothing held, if a page is absent or there is no room. Pages on the host are copied to
        device pages that only the reader knows.
        """
        known = {key: self._cache.page_of(key) for key in keys}
        on_host = {key: self._cache.host.page_of(key) for key, page in known.items() if page is None}
        if None in on_host.values() or len(known) != len(keys):
            return None
        found = [page for page in known.values() if page is not None]
        self._pool.share(found, reader)
        if on_host and len(on_host) > self.num_reservable():
            self._pool.release(found, reader)
            return None
        self._cache.make_room(len(on_host), keep=False)
        copies = dict(zip(on_host, self._pool.allocate(len(on_host), reader), strict=True))
        pages = [copies[key] if page is None else page for key, page in known.items()]
        return pages, [(copies[key], page) for key, page in on_host.items() if page is not None]

    def check(self, filled: FilledPages, sequence: Sequence) -> None:
        """ValueError unless the sequence can start with these pages."""
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
        """Give the pages to the sequence and its scheduling key, register the full ones, and count the lookup
        of its claim, if it had one.

        IntegrityError, with nothing done, if the owner lacks a page, or if another holder uses the last page,
        which the sequence will write.
        """
        pool, last = self._pool, filled.pages[-1]
        pool.check_used_by(filled.pages, filled.owner)
        if filled.num_tokens % pool.page_size and (
            pool.is_known(last) or not pool.is_only_held_by(last, filled.owner)
        ):
            raise IntegrityError(f"page {last} is filled in part and shared: {sequence.key} cannot write it")
        pool.accounts.book(sequence.key, sequence.scheduling_key)
        pool.hand_over(filled.pages, filled.owner, sequence.key)
        pool.accounts.close(filled.owner)
        num_claimed = len(self._claims.get(filled.owner, ()))
        self._cache.count(sequence.num_tokens, num_claimed * pool.page_size)
        self._end_claim(filled.pages, filled.owner)
        sequence.page_table = list(filled.pages)
        sequence.num_computed_tokens = filled.num_tokens
        sequence.num_cached_tokens = min(filled.num_tokens, sequence.num_prompt_tokens)
        self._cache.register(sequence)

    def release_kept(self, key: SequenceKey) -> None:
        """Release the pages that are kept for a sequence, if any."""
        sequence = self.kept.pop(key, None)
        if sequence is None:
            return
        self._pool.release(sequence.page_table, key)
        sequence.page_table.clear()
        sequence.table_version += 1

    def num_reservable(self) -> int:
        """Pages, free or evictable, that a reservation may have now."""
        pool, queues = self._pool, self._queues
        num_pages = pool.num_available - queues.num_running * pool.pages_for(HEADROOM_TOKENS)
        for sequence in (*queues.prefilling.values(), *queues.waiting[:1]):
            num_pages -= pool.num_missing(sequence.num_tokens, len(sequence.page_table))
        longest = max((s.max_num_tokens for s in queues.by_key.values()), default=0)
        num_spare = pool.num_available - pool.pages_for(longest)
        if num_spare < num_pages:  # else the live sequences' own pages need not be counted
            num_pages = min(num_pages, num_spare + self._num_preemptible())
        return max(0, num_pages)

    def _end_claim(self, pages: Ordered[int], owner: Owner) -> None:
        rest = self._claims.pop(owner, frozenset()).difference(pages)
        if rest:
            self._claims[owner] = rest

    def _num_preemptible(self) -> int:
        """Pages that are not available now, and would be if every live sequence were preempted."""
        pages: set[int] = set()
        pages.update(*(sequence.page_table for sequence in self._queues.by_key.values()))
        pages -= self._pool.held_outside()
        pages.difference_update(*self._claims.values())
        pages.difference_update(*(sequence.page_table for sequence in self.kept.values()))
        return len(pages)
