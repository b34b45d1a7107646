"""The ledger of host-memory pages, where KV pages wait outside the device.

A host page is in one of five states:

- free;
- cached: the content of one evicted device page, found by its key; `FairLru` says which page goes first;
- pinned: cached content that is about to return to the device;
- swapped: owned by one preempted sequence;
- leaving: its last reader is the batch that runs now.

The ledger moves no bytes. It collects (device_page, host_page) copies, and `take_copies` gives them to the
batch, which runs all copies to the host before all copies to the device. A host page that a batch reads must
therefore not be written by the same batch: it stays "leaving" until `begin_step`.
"""

from collections.abc import Hashable
from typing import Final, TypeAlias

from baton.errors import IntegrityError
from baton.fair_queue import FairLru, Group

PageCopy: TypeAlias = tuple[int, int]  # (device_page, host_page), in either direction
MAX_CHANGED_KEYS: Final = 1 << 16  # some eight megabytes


class ChangedKeys:
    """The keys of pages that a prefix cache has learned, moved to another tier or forgotten since `take`.

    A reader looks up the place of each page when it takes the keys, so a page that came and went in between
    is not reported. Before the first `take`, beyond `limit` keys, and after `note_all`, everything counts as
    changed.
    """

    def __init__(self, limit: int = MAX_CHANGED_KEYS) -> None:
        self._limit = limit
        self._keys: dict[bytes, None] | None = None  # in order; None: everything may have changed

    def __len__(self) -> int:
        return len(self._keys or ())

    def note(self, key: bytes) -> None:
        """Record a changed key."""
        if self._keys is None:
            return
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys = None

    def note_all(self) -> None:
        """Record that everything may have changed."""
        self._keys = None

    def take(self) -> list[bytes] | None:
        """The changed keys since the last call; None: everything may have changed."""
        keys, self._keys = self._keys, {}
        return None if keys is None else list(keys)


class HostTier:
    """`num_pages` host pages; 0 turns the tier off."""

    def __init__(self, num_pages: int = 0) -> None:
        self.num_pages = num_pages
        self.changed = ChangedKeys()  # shared with the prefix cache; the tier notes the keys that it drops
        self.cached: FairLru[bytes] = FairLru()  # keys
        self.clear()

    def clear(self) -> None:
        """Drop all pages and all copies."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        self.cached.clear()
        self._cached: dict[bytes, tuple[int, Group]] = {}  # key -> (host page, group)
        self._pinned: dict[bytes, int] = {}
        self._swapped: dict[Hashable, list[int]] = {}
        self._leaving: list[int] = []
        self._to_host: dict[int, int] = {}  # host page -> device page; the last writer wins
        self._to_device: dict[int, int] = {}  # device page -> host page

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def __contains__(self, key: bytes) -> bool:
        return key in self._cached or key in self._pinned

    def page_of(self, key: bytes) -> int | None:
        return self._cached[key][0] if key in self._cached else self._pinned.get(key)

    def known_keys(self) -> list[bytes]:
        """The keys of all cached and pinned pages."""
        return [*self._cached, *self._pinned]

    def begin_step(self) -> None:
        """The copies taken before have run: free the host pages that they read."""
        self._free += self._leaving
        self._leaving.clear()

    def take_copies(self) -> tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]]:
        """(copies to the host, copies to the device) since the last call."""
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

    def pin(self, key: bytes) -> None:
        """Keep a cached page until it is fetched. Idempotent."""
        if key in self._cached:
            self._pinned[key] = self._give_up(key)

    def fetch(self, key: bytes, device_page: int) -> None:
        """Move a pinned page back to the device."""
        self._copy_to_device(self._pinned.pop(key), device_page)

    def drop(self, key: bytes) -> None:
        """Forget a page that is on the device again, if it is here."""
        if key in self:
            host_page = self._give_up(key) if key in self._cached else self._pinned.pop(key)
            self._to_host.pop(host_page, None)
            self._free.append(host_page)

    # Pages of preempted sequences.

    def swap_out(self, owner: Hashable, device_pages: list[int]) -> list[int]:
        """Take one host page for each device page; the caller has checked `num_available`."""
        if len(device_pages) > self.num_available:
            raise IntegrityError(f"{len(device_pages)} host pages asked for, {self.num_available} left")
        host_pages = [self._take_page() for _ in device_pages]
        self._swapped[owner] = host_pages
        self._to_host.update(zip(host_pages, device_pages, strict=True))
        return list(host_pages)

    def swap_in(self, owner: Hashable, device_pages: list[int]) -> None:
        """Copy the owner's last len(device_pages) pages back and release all its pages."""
        host_pages = self._swapped.pop(owner)
        num_dropped = len(host_pages) - len(device_pages)
        self._free += host_pages[:num_dropped]
        for host_page, device_page in zip(host_pages[num_dropped:], device_pages, strict=True):
            self._copy_to_device(host_page, device_page)

    def give_up(self, owner: Hashable) -> None:
        """Release the pages of an owner that ended while swapped out."""
        for host_page in self._swapped.pop(owner):
            self._to_host.pop(host_page, None)
            self._free.append(host_page)

    def check_integrity(self) -> None:
        """Every host page is in exactly one place; raises IntegrityError."""
        places = [
            *self._free,
            *self._leaving,
            *(page for page, _ in self._cached.values()),
            *self._pinned.values(),
        ]
        for host_pages in self._swapped.values():
            places += host_pages
        if sorted(places) != list(range(self.num_pages)):
            raise IntegrityError(f"{self.num_pages} host pages, found {sorted(places)}")

    def _take_page(self) -> int:
        if self._free:
            return self._free.pop()
        key = self.cached.next_out()
        if key is None:
            raise IntegrityError("no host page is left although room was promised")
        self.changed.note(key)
        return self._give_up(key)

    def _give_up(self, key: bytes) -> int:
        """Remove a key from the cached pages; return its host page."""
        host_page, group = self._cached.pop(key)
        self.cached.remove(key, group)
        return host_page

    def _copy_to_device(self, host_page: int, device_page: int) -> None:
        self._to_device[device_page] = host_page
        self._leaving.append(host_page)
