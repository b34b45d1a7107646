"""Finds pages by their contents, on the device and on the host, so that no prompt is computed twice.

1. A page becomes known when it is full and computed (`register`), with prompt and generated tokens alike.
2. `match` finds the longest chain of known pages that starts a sequence: first on the device, then on the
   host. At least one token is always left to compute, because its logits are needed.
3. Pages without users stay CACHED in the pool until `make_room` evicts them, oldest leaf first, to the host
   tier if it has pages. All pages of a tenant, with any salt, form a group in `FairLru`: a tenant that
   fills the cache evicts its own pages.
4. `take_changes` reports the pages that became known or unknown since the last call.

Invariant: the holder of a known page holds the known page before it. Two sequences that compute the same page
at the same time would break this, so the second one releases its copy and shares the first. Known pages are
therefore prefix-closed. A transfer that releases its pages front to back can cut a chain; `_forget` then
forgets the pages after the cut too.

`HostTier` keeps known pages that the device has evicted. A `DiskTier` below it, if there is one, has copies
of them. `prefetch` brings the pages of a waiting sequence from the disk to the host, where `match` finds
them; `poll` takes the reports of the disk.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from itertools import count, takewhile
from math import inf
from typing import Final

from baton.engine.cache.disk_tier import DiskTier, Loaded
from baton.engine.cache.page_pool import PagePool, PageState
from baton.engine.scheduler.sequence import PageCopy, Sequence
from baton.errors import IntegrityError
from baton.fair_queue import FairLru, Group
from baton.messages.control import PageChanges
from baton.messages.workers import Tier
from baton.pages import PageKeys

NUM_COMPARED: Final = 16  # oldest host pages, of which the one that saves the fewest seconds is evicted
MAX_CHANGED_KEYS: Final = 1 << 16  # some eight megabytes


class ChangedKeys:
    """The keys of pages that a prefix cache has learned, moved to another tier or forgotten since `take`.

    A reader looks up the tier of each page when it takes the keys, so a page that became known and unknown
    in between is in none. Before the first `take`, beyond MAX_CHANGED_KEYS, and after `note_all`, everything
    counts as changed.
    """

    def __init__(self) -> None:
        self._keys: dict[bytes, None] | None = None  # in order; None: everything may have changed

    def note(self, key: bytes) -> None:
        """Record a changed key."""
        if self._keys is None:
            return
        self._keys[key] = None
        if len(self._keys) > MAX_CHANGED_KEYS:
            self._keys = None

    def note_all(self) -> None:
        """Record that everything may have changed."""
        self._keys = None

    def take(self) -> list[bytes] | None:
        """The changed keys since the last call; None: everything may have changed."""
        keys, self._keys = self._keys, {}
        return None if keys is None else list(keys)


class HostTier:
    """The ledger of `num_pages` pages of host memory; 0 turns the tier off.

    A host page is in one of five states:

    - free;
    - cached: the contents of one evicted device page, found by its key; `FairLru` says which page goes first;
    - pinned: cached contents that are about to return to the device;
    - leaving: its last reader is the batch that runs now;
    - loading: the disk tier writes the contents of a key to it.

    The ledger moves no bytes: `take_copies` gives the collected copies to the batch, which runs all copies to
    the host before all copies to the device. A batch must therefore not write a host page that the batch
    reads: the page stays "leaving" until `begin_step`.
    """

    def __init__(self, num_pages: int = 0) -> None:
        self.num_pages = num_pages
        self.changed = ChangedKeys()  # shared with the prefix cache; the tier notes the keys that it drops
        self.cached: FairLru[bytes] = FairLru()  # keys
        self.disk: DiskTier | None = None
        self.compute_page_s = inf  # seconds to compute the tokens of a page; not known yet
        self._generation = [0] * num_pages  # of each page, grows when it gets other contents
        # key -> (host page, group); group None: the key was forgotten since the order
        self._loading: dict[bytes, tuple[int, Group | None]] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._stored: list[bytes] = []  # keys of pages that the disk tier has not been offered
        self._cached: dict[bytes, tuple[int, Group]] = {}  # key -> (host page, group)
        self._pinned: dict[bytes, int] = {}
        self._leaving: list[int] = []
        self._to_host: dict[int, int] = {}  # host page -> device page; the last writer wins
        self._to_device: dict[int, int] = {}  # device page -> host page

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    def __contains__(self, key: bytes) -> bool:
        return key in self._cached or key in self._pinned

    def page_of(self, key: bytes) -> int | None:
        return self._cached[key][0] if key in self._cached else self._pinned.get(key)

    def known_keys(self) -> list[bytes]:
        """The keys of all cached and pinned pages."""
        return [*self._cached, *self._pinned]

    def written_pages(self) -> list[tuple[bytes, int]]:
        """Return the cached keys and their pages, without pages that no step has copied yet."""
        return [(key, page) for key, (page, _) in self._cached.items() if page not in self._to_host]

    def begin_step(self) -> None:
        """The copies taken before have run: free the host pages that they read."""
        self._free += self._leaving
        self._leaving.clear()

    def take_copies(self) -> tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]]:
        """(copies to the host, copies to the device) since the last call."""
        if not self._to_host and not self._to_device:
            return (), ()
        to_host = tuple((device, host) for host, device in self._to_host.items())
        to_device = tuple(self._to_device.items())
        self._to_host.clear()
        self._to_device.clear()
        return to_host, to_device

    # Cached pages.

    def store(self, key: bytes, device_page: int, group: Group = b"") -> None:
        """Cache the content of a device page that is being evicted, if there is room."""
        if key in self:
            raise IntegrityError(f"key {key.hex()} is on the device and on the host")
        if self.num_available:
            host_page = self._take_page()
            self._cached[key] = host_page, group
            self.cached.add(key, group)
            self._to_host[host_page] = device_page
            if self.disk is not None:
                self._stored.append(key)

    def pin(self, key: bytes) -> None:
        """Keep a cached page until it is fetched. Idempotent."""
        if key in self._cached:
            self._pinned[key] = self._uncache(key)

    def fetch(self, key: bytes, device_page: int) -> None:
        """Move a pinned page back to the device."""
        host_page = self._pinned.pop(key)
        self._to_device[device_page] = host_page
        self._leaving.append(host_page)

    def drop(self, key: bytes) -> None:
        """Forget a page, if it is here."""
        if key in self:
            host_page = self._uncache(key) if key in self._cached else self._pinned.pop(key)
            self._to_host.pop(host_page, None)
            self._free.append(host_page)

    def forget_all(self) -> None:
        """Forget every cached page, here and on disk: some may be copies of contents that are not valid."""
        for key in list(self._cached):
            self.drop(key)
        # Ordered writes to disk find that the contents are others, also those of pages that were fetched.
        for host_page in range(self.num_pages):
            self._generation[host_page] += 1
        self._loading = {key: (page, None) for key, (page, _) in self._loading.items()}
        self.changed.note_all()
        if self.disk is not None:
            self.disk.forget_all()

    # Pages on disk.

    @property
    def num_places(self) -> int:
        """Pages that fit on the host and on disk."""
        return self.num_pages + (0 if self.disk is None else self.disk.num_places)

    def is_loading(self, keys: Ordered[bytes]) -> bool:
        """True while a page with one of these keys comes from the disk."""
        return bool(self._loading) and any(key in self._loading for key in keys)

    def load(self, keys: Ordered[bytes], group: Group, mark: int) -> None:
        """Order the pages on disk from the start of a chain, as far as there is room beside those that are
        here; `end_load` follows.

        mark: after which no launched step uses a host page that is free now.
        """
        disk = self.disk
        if disk is None or disk.is_stalled:
            return
        chain = [*takewhile(lambda key: key in self or key in self._loading or key in disk.keys, keys)]
        here = [key for key in chain if key in self._cached]
        for key in here:  # no room is made of the chain itself
            self.cached.remove(key, self._cached[key][1])
        absent = [key for key in chain if key not in self and key not in self._loading]
        ordered = {key: self._take_page() for key in absent[: self.num_available - len(here)]}
        for key in reversed(here):  # as the newest, the end of the chain first
            self.cached.add(key, self._cached[key][1])
        for key, host_page in ordered.items():
            self._to_host.pop(host_page, None)
            self._loading[key] = host_page, group
        if ordered:
            disk.load(ordered.items(), mark)

    def end_load(self, key: bytes, *, is_wanted: bool) -> None:
        """Cache a page that was read. is_wanted: the contents are valid, and not on the device."""
        host_page, group = self._loading.pop(key)
        if is_wanted and group is not None and key not in self:
            self._cached[key] = host_page, group
            self.cached.add(key, group)
        else:
            self._free.append(host_page)

    def offer(self, mark: int) -> None:
        """Give the disk tier the pages that were stored in steps before `mark`."""
        if self.disk is not None:
            stored, self._stored = self._stored, []
            for key in stored:
                host_page = self._cached[key][0] if key in self._cached else None
                if host_page in self._to_host:  # no step has been given the copy
                    self._stored.append(key)
                elif host_page is not None:
                    self.disk.write(key, host_page, self._generation[host_page], mark)

    def is_current(self, host_page: int, generation: int) -> bool:
        """True when the page has had no other contents since. From any thread."""
        return self._generation[host_page] == generation

    def check_integrity(self) -> None:
        """Every host page is in exactly one place; raises IntegrityError."""
        places = [
            *self._free,
            *self._leaving,
            *(page for page, _ in self._cached.values()),
            *self._pinned.values(),
            *(page for page, _ in self._loading.values()),
        ]
        if sorted(places) != list(range(self.num_pages)):
            raise IntegrityError(f"{self.num_pages} host pages, found {sorted(places)}")

    def _take_page(self) -> int:
        if self._free:
            host_page = self._free.pop()
        else:
            key = self.cached.next_of_least_value(self._value_s, NUM_COMPARED)
            if key is None:
                raise IntegrityError("no host page is left although room was promised")
            self.changed.note(key)
            host_page = self._uncache(key)
        self._generation[host_page] += 1
        return host_page

    def _value_s(self, key: bytes) -> float:
        """Return the seconds that a host page saves if its tokens come again.

        A page with a copy on disk saves the faster of reading and computing; other pages save computing.
        """
        if self.disk is not None and key in self.disk.keys:
            return min(self.disk.page_s, self.compute_page_s)
        return self.compute_page_s

    def _uncache(self, key: bytes) -> int:
        """Remove a key from the cached pages; return its host page."""
        host_page, group = self._cached.pop(key)
        self.cached.remove(key, group)
        return host_page


_NO_PAGE: Final = -1


class PrefixCache:
    """The known pages of a pool, on the device and in the tiers below it.

    page_keys: None turns the cache off; no page is hashed, matched or kept then.
    """

    def __init__(self, pool: PagePool, page_keys: PageKeys | None, host: HostTier | None = None) -> None:
        self.pool = pool
        self.host = host if host is not None else HostTier()
        self.enabled = page_keys is not None
        self.num_cut_pages = 0  # forgotten with an earlier page of their chain; 0 unless transfers cut chains
        self.num_queried_tokens = 0  # tokens of all sequences that looked for a prefix, here or by a claim
        self.num_hit_tokens = 0  # found
        self.changed = self.host.changed
        self._page_keys = page_keys
        num_pages = pool.num_pages
        self._page_of: dict[bytes, int] = {}
        self._key: list[bytes | None] = [None] * num_pages
        self._parent = [_NO_PAGE] * num_pages  # of known pages
        self._num_children = [0] * num_pages

    def extend_keys(self, sequence: Sequence, num_pages: int) -> None:
        """Compute the keys of the first `num_pages` full pages of the sequence, hashing only new pages."""
        if self._page_keys is not None and num_pages > len(sequence.page_keys):
            self._page_keys.extend(sequence.page_keys, sequence.token_ids, num_pages, sequence.cache_salt)

    def match(self, sequence: Sequence) -> tuple[list[int], list[bytes]]:
        """The longest known prefix of the sequence, as far as its keys reach: the device pages, and the keys
        of the host pages after them. Pure.
        """
        if sequence.needs_prompt_logprobs:
            return [], []
        keys = sequence.page_keys[: (sequence.num_tokens - 1) // self.pool.page_size]
        device_pages = self._known_pages(keys)
        host_keys: list[bytes] = []
        if self.host.num_pages:
            for key in keys[len(device_pages) :]:
                if key not in self.host:
                    break
                host_keys.append(key)
        return device_pages, host_keys

    def find(self, token_ids: Ordered[int], salt: bytes) -> list[int]:
        """The device pages of the longest known prefix that leaves a token to compute. Pure."""
        page_size = self.pool.page_size
        keys = self.keys_of(token_ids, salt, page_size)
        return self._known_pages(keys[: (len(token_ids) - 1) // page_size])

    def keys_of(self, token_ids: Ordered[int], salt: bytes, page_size: int) -> list[bytes]:
        """The keys of all full pages of that size; empty when the cache is off."""
        keys: list[bytes] = []
        if self._page_keys is not None:
            self._page_keys.of_size(page_size).extend(keys, token_ids, len(token_ids) // page_size, salt)
        return keys

    def count(self, num_queried_tokens: int, num_hit_tokens: int) -> None:
        """Count one lookup."""
        if self.enabled:
            self.num_queried_tokens += num_queried_tokens
            self.num_hit_tokens += num_hit_tokens

    def page_of(self, key: bytes) -> int | None:
        """The device page with this key."""
        return self._page_of.get(key)

    def take_changes(self, *, is_snapshot: bool) -> PageChanges:
        """Return the changes since the last call; all pages with is_snapshot or after too many changes."""
        self.poll()
        changed = self.changed.take()
        if changed is None or is_snapshot:
            on_disk = () if self.host.disk is None else self.host.disk.keys
            changed = list(dict.fromkeys((*self._page_of, *self.host.known_keys(), *on_disk)))
            is_snapshot = True
        keys: dict[Tier | None, list[bytes]] = {None: []}
        for key in changed:
            keys.setdefault(self._tier_of(key), []).append(key)
        return PageChanges(is_snapshot, keys)

    def prefetch(self, sequence: Sequence) -> bool:
        """Order the pages on disk that continue the known prefix of a sequence; True while some are to
        come from a disk that does not hang. Orders none when computing pages is faster than reading them.
        """
        if self.host.disk is None or self.host.disk.is_stalled or sequence.needs_prompt_logprobs:
            return False
        keys = sequence.page_keys[: (sequence.num_tokens - 1) // self.pool.page_size]
        outside = keys[len(self._known_pages(keys)) :]
        is_on_disk = next((key in self.host.disk.keys for key in outside if key not in self.host), False)
        if not is_on_disk or self.host.disk.pays(self.host.compute_page_s):
            self.host.load(outside, sequence.cache_group, self.pool.launched)
        return self.host.is_loading(keys)

    def load(self, keys: Ordered[bytes]) -> Callable[[], bool] | None:
        """Order the pages of a chain that are only on disk, for a peer.

        Returns None when no page is to come; else a function that returns True while pages are to come.
        """
        if self.host.disk is None:
            return None
        self.poll()
        outside = [key for key in keys if key not in self._page_of]
        self.host.load(outside, b"", self.pool.launched)

        def is_coming() -> bool:
            self.poll()
            return self.host.is_loading(outside)

        return is_coming if self.host.is_loading(outside) else None

    def poll(self) -> None:
        """Take the reports of the disk tier, and offer it the pages of the steps that were launched."""
        if self.host.disk is None:
            return
        for report in self.host.disk.take_reports():
            if isinstance(report, Loaded):
                is_wanted = report.is_valid and report.key not in self._page_of
                self.host.end_load(report.key, is_wanted=is_wanted)
            self.changed.note(report.key)
        self.host.offer(self.pool.launched)

    def flush(self, disk: DiskTier, copy: Callable[[tuple[PageCopy, ...]], None], until_s: float) -> None:
        """Write the pages of the host tier to a disk that has stopped, then copy the device's pages over them
        and write those, as many as the disk has places for.

        copy: makes these copies to the host, and waits for them and for those of earlier steps. Ends at
        until_s, by time.monotonic(): the pages that were written then need no others.
        """
        copy(())
        disk.put(self.host.written_pages(), until_s)
        # Parents come before children, and none is dropped for another.
        absent = disk.touch([*self._page_of][: disk.num_places])
        for first in range(0, len(absent), self.host.num_pages):
            if time.monotonic() > until_s:
                return
            part = absent[first : first + self.host.num_pages]
            copy(tuple((self._page_of[key], host_page) for host_page, key in enumerate(part)))
            disk.put(zip(part, count()), until_s)

    def set_weight(self, group: Group, weight: float) -> None:
        """Set the eviction weight of the pages of this group."""
        for cached in (self.pool.cached, self.host.cached):
            cached.set_weight(group, weight)

    def learn_fetched(self, sequence: Sequence, key: bytes) -> None:
        """Register the last page of the sequence's table, which has just come from the host."""
        table = sequence.page_table
        self._learn(table[-1], key, table[-2] if len(table) > 1 else _NO_PAGE, sequence.cache_group)

    def register(self, sequence: Sequence) -> None:
        """Make the full, computed pages of the sequence known; where a page is known already, share that
        page.
        """
        if not self.enabled:
            return
        num_full = sequence.num_computed_tokens // self.pool.page_size
        self.extend_keys(sequence, num_full)
        table, keys = sequence.page_table, sequence.page_keys
        for index in range(sequence.num_known_pages, num_full):
            parent = table[index - 1] if index else _NO_PAGE
            if index and self._key[parent] != keys[index - 1]:
                break  # the chain is cut before this page: no lookup could find it
            page, known = table[index], self._page_of.get(keys[index])
            if known is None:
                self._learn(page, keys[index], parent, sequence.cache_group)
            elif known != page:
                self._replace(sequence, index, known)
        sequence.num_known_pages = num_full

    def forget(self, pages: list[int]) -> None:
        """Make these pages, and all pages after them, unknown: their contents are not valid.

        The tiers below forget all their pages: no record says which were copied from these.
        """
        for page in reversed(pages):
            self._forget(page)
        if self.host.num_pages:
            self.host.forget_all()

    def make_room(self, num_pages: int, *, keep: bool = True) -> None:
        """Evict until `num_pages` are free.

        keep: copy evicted pages to the host tier. False for pages that are written outside the step.
        """
        while self.pool.num_free < num_pages:
            page = self.pool.cached.next_out()
            if page is None:
                raise IntegrityError(f"{num_pages} pages were promised, {self.pool.num_free} are available")
            self._evict(page, keep)

    def check_integrity(self) -> None:
        """Both directions agree, parents are known, cached pages have a key. Raises IntegrityError."""
        num_children = [0] * self.pool.num_pages
        for key, page in self._page_of.items():
            parent = self._parent[page]
            if self._key[page] != key or (parent != _NO_PAGE and self._key[parent] is None):
                raise IntegrityError(f"page {page} does not have key {key.hex()}, or its parent is lost")
            if key in self.host:
                raise IntegrityError(f"key {key.hex()} is on the device and on the host")
            if parent != _NO_PAGE:
                num_children[parent] += 1
        if num_children != self._num_children:
            raise IntegrityError("the numbers of children do not match the parents")
        for page in range(self.pool.num_pages):
            if self.pool.state(page) is PageState.CACHED and self._key[page] is None:
                raise IntegrityError(f"page {page} is cached without a key")

    def _tier_of(self, key: bytes) -> Tier | None:
        """The highest tier that has the page."""
        if key in self._page_of:
            return Tier.DEVICE
        if key in self.host:
            return Tier.HOST
        return Tier.DISK if self.host.disk is not None and key in self.host.disk.keys else None

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
        """Make a page and the pages after it unknown."""
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
