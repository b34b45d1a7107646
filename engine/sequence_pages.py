"""Gives sequences their pages and takes them back: the part of applying a plan that touches the ledgers."""

from baton.engine.prefix_cache import PrefixCache
from baton.engine.sequence import Sequence, SequenceStatus


class SequencePages:
    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._host = cache.host

    def claim(self, sequence: Sequence) -> list[bytes]:
        """Hold what the prefix cache has for an admitted sequence, so that no eviction takes it.

        Every admitted sequence claims before any of them allocates. Returns the keys of the pages that
        are on the host, to be given to `restore`.
        """
        if sequence.page_table:
            return []
        if sequence.status is SequenceStatus.SWAPPED:
            match = self._cache.match_swapped(sequence)
        else:
            match = self._cache.match(sequence)
        self._pool.share(match.device_pages, sequence.key)
        sequence.page_table += match.device_pages
        for key in match.host_keys:
            self._host.pin(key)
        return match.host_keys

    def restore(self, sequence: Sequence, host_keys: list[bytes]) -> None:
        """Bring back what is on the host and set how far the sequence is computed."""
        if sequence.status is SequenceStatus.SWAPPED:
            self._swap_in(sequence)
        elif not sequence.num_computed_tokens:
            for key in host_keys:
                self._fetch(sequence, key)
            num_pages = len(sequence.page_table)
            sequence.num_computed_tokens = num_pages * self._pool.page_size
            sequence.num_known_pages = num_pages
            if not sequence.num_preemptions:
                if not sequence.needs_prompt_logprobs:
                    self._cache.count(sequence.num_tokens, sequence.num_computed_tokens)
                num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
                sequence.num_cached_tokens = num_cached_tokens

    def grow(self, sequence: Sequence, num_pages: int) -> None:
        """Append fresh pages; room has been made."""
        sequence.page_table += self._pool.allocate(num_pages, sequence.key)

    def drop(self, sequence: Sequence) -> None:
        """Let go of everything the sequence holds, on the device and on the host."""
        if sequence.status is SequenceStatus.SWAPPED:
            self._host.give_up(sequence.key)
            sequence.host_pages.clear()
        self._pool.release(sequence.page_table, sequence.key)
        self._clear_table(sequence)
        sequence.num_computed_tokens = 0

    def swap_out(self, sequence: Sequence) -> None:
        """Let go of the device pages after a copy of what is computed to the host."""
        num_pages = self._pool.pages_for(sequence.num_computed_tokens)
        sequence.host_pages = self._host.swap_out(sequence.key, sequence.page_table[:num_pages])
        self._pool.release(sequence.page_table, sequence.key)
        self._clear_table(sequence)

    def _swap_in(self, sequence: Sequence) -> None:
        """Share the full pages that the device still knows, copy the others back and make them known."""
        table = sequence.page_table
        for page in self._cache.match_swapped(sequence).device_pages[len(table) :]:
            self._pool.share((page,), sequence.key)
            table.append(page)
        sequence.num_known_pages = len(table)
        num_missing = self._pool.pages_for(sequence.num_computed_tokens) - len(table)
        self._cache.make_room(num_missing)
        pages = self._pool.allocate(num_missing, sequence.key)
        self._host.swap_in(sequence.key, pages)
        sequence.host_pages.clear()
        table += pages
        self._cache.register(sequence)

    def _fetch(self, sequence: Sequence, key: bytes) -> None:
        page = self._cache.page_of(key)
        if page is not None:  # another sequence admitted by the same plan has brought it back
            self._pool.share((page,), sequence.key)
            sequence.page_table.append(page)
            return
        self._cache.make_room(1)
        self.grow(sequence, 1)
        self._host.fetch(key, sequence.page_table[-1])
        self._cache.learn_fetched(sequence, key)

    def _clear_table(self, sequence: Sequence) -> None:
        sequence.page_table.clear()
        sequence.table_version += 1
        sequence.num_known_pages = 0
