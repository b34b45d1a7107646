"""Finds pages by what is in them, so that a prompt seen before is not computed again.

1. A page becomes known when it is full and computed (`register`), prompt and generated tokens alike.
2. `match` finds the longest chain of known pages that starts a sequence: first on the device, then on
   the host. At least one token is always left to compute, or there would be no logits to sample from.
3. Pages that nobody uses stay CACHED in the pool until `make_room` evicts them, oldest leaf first, to the
   host tier if it has pages. Pages of one salt are a group there: who fills the cache evicts his own.
4. `take_changes` says what has become known or unknown since, for others who might look for it here.

Invariant: whoever holds a known page holds the known page before it. Two sequences that compute the
same page at the same time would break it, so the second one lets its copy go and shares the first.
Hence what is known is prefix-closed. A lease released front to back can cut a chain; `_evict` then
forgets what hangs below the page it takes.
"""

from collections import defaultdict
from collections.abc import Sequence as Ordered
from typing import NamedTuple

from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.page_events import NOWHERE, PageChange, PageChanges
from baton.engine.cache.page_pool import PagePool, PageState
from baton.engine.scheduler.sequence import Sequence
from baton.errors import IntegrityError
from baton.fair_queue import Group
from baton.pages import PageKeys, without_public

_NO_PAGE = -1


class PrefixMatch(NamedTuple):
    device_pages: list[int]
    host_keys: list[bytes]  # they continue the chain of device_pages

    @property
    def num_pages(self) -> int:
        return len(self.device_pages) + len(self.host_keys)


class PrefixCache:
    """`page_keys` None turns it off: nothing is hashed, nothing matches, nothing stays cached."""

    def __init__(self, pool: PagePool, page_keys: PageKeys | None, host: HostTier | None = None) -> None:
        self.pool = pool
        self.host = host if host is not None else HostTier()
        self.enabled = page_keys is not None
        self.num_cut_pages = 0  # forgotten because a page before them went first; 0 unless leases do that
        self.num_queried_tokens = 0  # of sequences and claims that have looked for a prefix so far
        self.num_hit_tokens = 0  # of those, how many were found
        self.changed = self.host.changed
        self._page_keys = page_keys
        self.clear()

    def clear(self) -> None:
        """Know nothing, on the device or on the host; the pool's own marks are its owner's to clear."""
        num_pages = self.pool.num_pages
        self.host.clear()
        self.changed.note_all()
        self._page_of: dict[bytes, int] = {}
        self._key: list[bytes | None] = [None] * num_pages
        self._parent = [_NO_PAGE] * num_pages  # of known pages
        self._num_children = [0] * num_pages

    def extend_keys(self, sequence: Sequence, num_pages: int) -> None:
        """Name the first `num_pages` full pages of the sequence, hashing only what is new."""
        if self._page_keys is not None and num_pages > len(sequence.page_keys):
            self._page_keys.extend(sequence.page_keys, sequence.token_ids, num_pages, sequence.cache_salt)

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The longest known prefix of the sequence, as far as its keys reach. Changes nothing."""
        if sequence.needs_prompt_logprobs:
            return PrefixMatch([], [])
        keys = sequence.page_keys[: (sequence.num_tokens - 1) // self.pool.page_size]
        device_pages = self._known_pages(keys)
        host_keys: list[bytes] = []
        if self.host.num_pages:
            for key in keys[len(device_pages) :]:
                if key not in self.host:
                    break
                host_keys.append(key)
        return PrefixMatch(device_pages, host_keys)

    def match_swapped(self, sequence: Sequence) -> PrefixMatch:
        """The leading full pages of a swapped-out sequence that the device still knows."""
        keys = sequence.page_keys[: sequence.num_computed_tokens // self.pool.page_size]
        return PrefixMatch(self._known_pages(keys), [])

    def find(self, token_ids: Ordered[int], salt: bytes) -> list[int]:
        """The device's pages of the longest known prefix that leaves a token to compute. Changes nothing."""
        keys: list[bytes] = []
        if self._page_keys is not None and token_ids:
            num_pages = (len(token_ids) - 1) // self.pool.page_size
            self._page_keys.extend(keys, list(token_ids), num_pages, salt)
        return self._known_pages(keys)

    def name(self, token_ids: Ordered[int], salt: bytes, page_size: int) -> list[bytes]:
        """The keys of all full pages of that size; none where nothing is looked for."""
        keys: list[bytes] = []
        if self._page_keys is not None:
            names = self._page_keys.of_size(page_size)
            names.extend(keys, list(token_ids), len(token_ids) // page_size, salt)
        return keys

    def count(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        if self.enabled:
            self.num_queried_tokens += num_queried_tokens
            self.num_hit_tokens += num_hit_tokens

    def page_of(self, key: bytes) -> int | None:
        return self._page_of.get(key)

    def take_changes(self, *, is_afresh: bool = False) -> PageChanges:
        """Of what is known, since the last call; all that is known if that is asked for, or must be told."""
        changed = self.changed.take()
        if changed is None or is_afresh:
            device = [self._place(key) for key in self._page_of]
            return PageChanges(True, device, [self._host_place(key) for key in self.host.known_keys()])
        host = [self._host_place(key) for key in changed] if self.host.num_pages else []
        return PageChanges(False, [self._place(key) for key in changed], host)

    def weigh(self, salt: bytes, weight: float) -> None:
        """What is cached under the salt has this weight from now on, beside others."""
        group = without_public(salt)
        self.pool.cached.weights[group] = self.host.cached.weights[group] = weight

    def learn_fetched(self, sequence: Sequence, key: bytes) -> None:
        """The last page of its table has just been brought back from the host."""
        table = sequence.page_table
        group = without_public(sequence.cache_salt)
        self._learn(table[-1], key, table[-2] if len(table) > 1 else _NO_PAGE, group)

    def register(self, sequence: Sequence) -> None:
        """Make the full, computed pages of the sequence known; share the known page where there is one."""
        if not self.enabled:
            return
        num_full = sequence.num_computed_tokens // self.pool.page_size
        self.extend_keys(sequence, num_full)
        table, keys = sequence.page_table, sequence.page_keys
        group = without_public(sequence.cache_salt)
        for index in range(sequence.num_known_pages, num_full):
            parent = table[index - 1] if index else _NO_PAGE
            if index and self._key[parent] != keys[index - 1]:
                break  # the chain was cut above: a page below could never be found
            page, known = table[index], self._page_of.get(keys[index])
            if known is None:
                self._learn(page, keys[index], parent, group)
            elif known != page:
                self._replace(sequence, index, known)
        sequence.num_known_pages = num_full

    def forget(self, pages: list[int]) -> None:
        """Nobody shall find these pages again, nor what follows them: their contents are not trusted."""
        for page in reversed(pages):
            self._forget(page)

    def make_room(self, num_pages: int, *, keep: bool = True) -> None:
        """Evict until `num_pages` are free. `keep` False spares the copies to the host: for pages that
        something outside the step is about to write."""
        while self.pool.num_free < num_pages:
            page = self.pool.oldest_cached()
            if page is None:
                raise IntegrityError(f"{num_pages} pages were promised, {self.pool.num_free} can be had")
            self._evict(page, keep)

    def check_integrity(self) -> None:
        """Both directions agree, parents are known, cached pages have a key. Raises IntegrityError."""
        num_children = [0] * self.pool.num_pages
        for key, page in self._page_of.items():
            parent = self._parent[page]
            if self._key[page] != key or (parent != _NO_PAGE and self._key[parent] is None):
                raise IntegrityError(f"page {page} is not what key {key.hex()} says, or its parent is lost")
            if key in self.host:
                raise IntegrityError(f"key {key.hex()} is on the device and on the host")
            if parent != _NO_PAGE:
                num_children[parent] += 1
        if num_children != self._num_children:
            raise IntegrityError("the numbers of children do not match the parents")
        for page in range(self.pool.num_pages):
            if self.pool.state(page) is PageState.CACHED and self._key[page] is None:
                raise IntegrityError(f"page {page} is cached without a key")

    def _place(self, key: bytes) -> PageChange:
        page = self._page_of.get(key, NOWHERE)
        return PageChange(key, page, 0 if page == NOWHERE else self.pool.generation(page))

    def _host_place(self, key: bytes) -> PageChange:
        page = self.host.page_of(key)
        return PageChange(key, NOWHERE if page is None else page, 0)

    def _known_pages(self, keys: list[bytes]) -> list[int]:
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def _learn(self, page: int, key: bytes, parent: int, group: Group) -> None:
        self._page_of[key] = page
        self._key[page] = key
        self.changed.note(key)
        self._parent[page] = parent
        if parent != _NO_PAGE:
            self._num_children[parent] += 1
        if self.host.num_pages:
            self.host.drop(key)
        self.pool.mark_known(page, group)

    def _replace(self, sequence: Sequence, index: int, known: int) -> None:
        own = sequence.page_table[index]
        self.pool.share((known,), sequence.key)
        self.pool.release((own,), sequence.key)
        sequence.page_table[index] = known
        sequence.table_version += 1

    def _evict(self, page: int, keep: bool) -> None:
        key = self._key[page]
        if key is None:
            raise IntegrityError(f"page {page} is cached without a key")
        if keep and self.host.num_pages:
            self.host.store(key, page, self.pool.groups[page])
        self._forget(page)

    def _forget(self, page: int) -> None:
        """And whatever hangs below it."""
        doomed = [page]
        if self._num_children[page]:
            children = defaultdict(list)
            for child in self._page_of.values():
                children[self._parent[child]].append(child)
            for parent in doomed:
                doomed += children[parent]
            self.num_cut_pages += len(doomed) - 1
        for each in reversed(doomed):
            self._unlearn(each)

    def _unlearn(self, page: int) -> None:
        key, parent = self._key[page], self._parent[page]
        if key is None:
            return
        del self._page_of[key]
        self._key[page] = None
        self.changed.note(key)
        self._parent[page] = _NO_PAGE
        if parent != _NO_PAGE:
            self._num_children[parent] -= 1
        self.pool.forget(page)
