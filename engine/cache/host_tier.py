"""The ledger of host-memory pages, where KV pages wait outside the device.

A host page is free, cached (the content of one evicted device page, found by its key;
baton/fair_queue.py says which goes first), pinned (cached content that is about to return to the
device), swapped (owned by one preempted sequence) or leaving (its last reader is the batch now being
executed).

Nothing here moves a byte. Decisions collect as (device_page, host_page) copies; `take_copies` hands
them to the batch, which runs all copies to the host before all copies to the device. That order makes
one rule necessary: a host page that is read by a batch is not written by the same batch, so it stays
"leaving" until the next one (`begin_step`).
"""

from baton.engine.cache.page_events import ChangedKeys
from baton.engine.cache.page_pool import Owner
from baton.engine.scheduler.plan import PageCopy
from baton.errors import IntegrityError
from baton.fair_queue import FairLru, Group


class HostTier:
    def __init__(self, num_pages: int = 0) -> None:
        self.num_pages = num_pages
        self.changed = ChangedKeys()  # of the prefix cache: it notes what comes here, this what is dropped
        self.cached: FairLru[bytes] = FairLru()  # keys
        self.clear()

    def clear(self) -> None:
        """Hold nothing, and owe no copy."""
        self._free = list(range(self.num_pages - 1, -1, -1))
        self.cached.clear()
        self._cached: dict[bytes, tuple[int, Group]] = {}  # key -> host page, whose share it is in
        self._pinned: dict[bytes, int] = {}
        self._swapped: dict[Owner, list[int]] = {}
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
        """Of all pages with known contents."""
        return [*self._cached, *self._pinned]

    def begin_step(self) -> None:
        """The copies taken before have run: the host pages they read are free."""
        self._free += self._leaving
        self._leaving.clear()

    def take_copies(self) -> tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]]:
        """(to host, to device) since the last call, each a tuple of (device_page, host_page)."""
        to_host = tuple((device, host) for host, device in self._to_host.items())
        to_device = tuple(self._to_device.items())
        self._to_host.clear()
        self._to_device.clear()
        return to_host, to_device

    # Cached pages.

    def store(self, key: bytes, device_page: int, group: Group = b"") -> None:
        """Keep the content of a device page that is being evicted, if there is any room."""
        if key in self:
            raise IntegrityError(f"key {key.hex()} is on the device and on the host")
        if self.num_available:
            host_page = self._take_page()
            self._cached[key] = host_page, group
            self.cached.add(key, group)
            self._to_host[host_page] = device_page

    def pin(self, key: bytes) -> None:
        """Keep a cached page from being dropped until it is fetched. Pinning twice is pinning once."""
        if key in self._cached:
            self._pinned[key] = self._give_up(key)

    def fetch(self, key: bytes, device_page: int) -> None:
        """Bring a pinned page back to the device; it leaves the host."""
        self._copy_to_device(self._pinned.pop(key), device_page)

    def drop(self, key: bytes) -> None:
        """The device holds this content again: forget the host's, if any."""
        if key in self:
            host_page = self._give_up(key) if key in self._cached else self._pinned.pop(key)
            self._to_host.pop(host_page, None)
            self._free.append(host_page)

    # Pages of preempted sequences.

    def swap_out(self, owner: Owner, device_pages: list[int]) -> list[int]:
        """Take one host page for each device page; the caller has checked `num_available`."""
        if len(device_pages) > self.num_available:
            raise IntegrityError(f"{len(device_pages)} host pages asked for, {self.num_available} left")
        host_pages = [self._take_page() for _ in device_pages]
        self._swapped[owner] = host_pages
        self._to_host.update(zip(host_pages, device_pages, strict=True))
        return list(host_pages)

    def swap_in(self, owner: Owner, device_pages: list[int]) -> None:
        """Bring back the owner's last len(device_pages) pages and give up all of them."""
        host_pages = self._swapped.pop(owner)
        num_dropped = len(host_pages) - len(device_pages)
        self._free += host_pages[:num_dropped]
        for host_page, device_page in zip(host_pages[num_dropped:], device_pages, strict=True):
            self._copy_to_device(host_page, device_page)

    def give_up(self, owner: Owner) -> None:
        """The owner ended while swapped out."""
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
            raise IntegrityError("a host page was promised, none can be had")
        self.changed.note(key)
        return self._give_up(key)

    def _give_up(self, key: bytes) -> int:
        """The host page of a cached key, which is in the cache no longer."""
        host_page, group = self._cached.pop(key)
        self.cached.remove(key, group)
        return host_page

    def _copy_to_device(self, host_page: int, device_page: int) -> None:
        self._to_device[device_page] = host_page
        self._leaving.append(host_page)
