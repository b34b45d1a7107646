"""The commands that this router sends to Redis, in order, a batch a round trip.

1. The router calls `joined`, `left`, `pages` and `share`; none of them waits or fails.
2. While the link is up, commands queue here. While it is down, or when too many have queued, they are
   dropped, and their workers are stale.
3. When the queue is empty, the pages of a stale worker are sent again, out of the index. Events that arrive
   meanwhile are in the index by then: the router applies events before it calls `pages`.
4. Every few seconds leases are renewed, and a snapshot is written of a worker that has changed.
"""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import Final, NamedTuple, Self

import numpy as np

from baton.messages.control import KvEventBatch
from baton.messages.workers import Tier, Worker
from baton.router.index.holder import HOST_BIT, Values
from baton.router.index.prefix_index import PrefixIndex
from baton.router.index.prompt_keys import first_halves, with_zeros
from baton.router.index.table import Keys
from baton.router.redis.client import KEEP_MS, Argument, Command, Names, Reply
from baton.router.redis.messages import AnyShared, Codec, SharedJoined, SharedLeft, Snapshot

STREAM_ENTRIES: Final = 16_384
MAX_STREAM_BYTES: Final = 2**26
MAX_PAGES: Final = 2**24
PAGE_BYTES: Final = 96


class RedisBudget(NamedTuple):
    """The share of Redis that one namespace takes, by the memory limit of Redis.

    Measured with Redis 7.0: a page of one holder takes 64 to 96 bytes, the most while the table
    doubles. An entry of the stream or of a snapshot takes a quarter more than its length. Of a gibibyte:

        5.6 million pages       512 MiB     90 million tokens, at 16 a page
        their snapshots         107 MiB     16 bytes for each page of each holder, and a quarter
        the stream, usually      40 MiB     what is added up here is 32
        the stream, at most     270 MiB     entries of half a mebibyte, then smaller ones: see below

    The stream keeps STREAM_ENTRIES, and fewer when the newest is large: as many of its size as fill the
    share. Entries before a smaller one stay, so all together may take 1 + ln(largest / (share /
    STREAM_ENTRIES)) times the share: 6.5 times for the largest entries.
    """

    num_pages: int = MAX_PAGES
    stream_bytes: int = MAX_STREAM_BYTES

    @classmethod
    def of(cls, max_memory_bytes: int) -> Self:
        """The budget for a memory limit; 0: no limit."""
        if not max_memory_bytes:
            return cls()
        num_pages = min(MAX_PAGES, max_memory_bytes // 2 // PAGE_BYTES)
        return cls(num_pages, min(MAX_STREAM_BYTES, max_memory_bytes // 32))

    def num_entries(self, num_bytes: int) -> int:
        """The number of entries that the stream keeps after one of `num_bytes` was added."""
        return max(1, min(STREAM_ENTRIES, self.stream_bytes // max(1, num_bytes)))


MAX_QUEUED: Final = 8192
MAX_BATCH: Final = 64
MAX_CHUNKS: Final = 2
CHUNK_PAGES: Final = 2048  # of a stale worker in one command: a few milliseconds of this process
LEASE_MS: Final = 10_000
SNAPSHOT_MS: Final = KEEP_MS


class RedisOutbox:
    """Queues commands, and makes up for dropped ones."""

    def __init__(
        self, names: Names, codec: Codec, router_id: str, index: PrefixIndex, counters: Counter[str]
    ) -> None:
        self.workers: dict[str, Worker] = {}  # connected to this router, by id
        self.is_open = False
        self.room = RedisBudget()
        self._names = names
        self._codec = codec
        self._router_id = router_id
        self._index = index
        self._counters = counters
        self._queue: deque[Command] = deque()
        self._stale: dict[str, None] = {}
        self._afresh: Iterator[Command] | None = None  # of a stale worker; sent before the queue
        self._snapshots: dict[str, int] = {}  # worker -> the next number in its snapshot; the oldest first

    def __len__(self) -> int:
        return len(self._queue) + len(self._stale) + (self._afresh is not None)

    def joined(self, worker: Worker) -> None:
        """A worker has connected to this router."""
        self.workers[worker.id] = worker
        self._put(self.join(worker))
        self.share(SharedJoined(worker=worker))

    def left(self, worker_id: str) -> None:
        """A worker has left this router."""
        if self.workers.pop(worker_id, None) is None:
            return
        self._stale.pop(worker_id, None)
        self._snapshots.pop(worker_id, None)
        self._put(Command("leave", (worker_id,), worker_id))
        self.buried(worker_id)

    def buried(self, worker_id: str) -> None:
        """Redis has removed the worker, perhaps another router's: drop its snapshot, tell others."""
        self._put(Command("", ("DEL", self.snapshot_key(worker_id)), worker_id))
        self.share(SharedLeft(worker=worker_id))

    def pages(self, worker_id: str, events: KvEventBatch) -> None:
        """Send events that have been applied to the index."""
        if worker_id not in self.workers:
            return
        if events.is_afresh:
            self._stale.pop(worker_id, None)
        if worker_id not in self._stale:
            self._put(self._apply(worker_id, events))

    def share(self, message: AnyShared) -> None:
        """Send a message to the other routers."""
        body = self._codec.encode_shared(message)
        fields: tuple[Argument, ...] = ("*", "r", self._router_id, "m", body)
        limit: tuple[Argument, ...] = ("MAXLEN", "~", self.room.num_entries(len(body)))
        self._put(Command("", ("XADD", self._names.events, *limit, *fields)))

    def open(self) -> None:
        """The link is up."""
        self.is_open = True

    def close(self) -> None:
        """The link is down: drop the queue, all workers are stale."""
        self.is_open = False
        self._queue.clear()
        self._afresh = None
        self._snapshots.clear()
        self._stale = dict.fromkeys(self.workers)

    def take_batch(self) -> list[Command]:
        """The commands to send next."""
        while not self._queue and self._stale and self._afresh is None:
            worker_id = next(iter(self._stale))
            del self._stale[worker_id]
            if self._index.is_known(worker_id):  # else the worker is about to report all its pages
                self._afresh = self._all_afresh(worker_id)
        if self._afresh is not None:
            chunks = list(islice(self._afresh, MAX_CHUNKS))
            if chunks:
                return chunks
            self._afresh = None
        return [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]

    def answered(self, command: Command, reply: Reply) -> None:
        """Take the reply to a command of `take_batch`."""
        if isinstance(reply, Exception):
            self._mark_stale(command.worker_id)
        elif command.script == "join" and reply == -2:
            self._counters["redis_fenced"] += 1
            self.workers.pop(command.worker_id, None)
            self._snapshots.pop(command.worker_id, None)
        elif command.script == "apply" and reply in (-1, -2):
            self._counters["redis_gaps"] += 1
            worker = self.workers.get(command.worker_id)
            if worker is not None and reply == -1:
                self._put(self.join(worker))
            self._mark_stale(command.worker_id)

    def rejoined(self, worker: Worker, next_number: int) -> None:
        """After a new connection, Redis knows the worker up to this number."""
        self._stale.pop(worker.id, None)
        if next_number == -2:
            self.answered(self.join(worker), next_number)
        elif self._index.is_known(worker.id) and self._index.next_number(worker.id) != next_number:
            self._mark_stale(worker.id)

    def join(self, worker: Worker) -> Command:
        """The command that adds a worker."""
        return Command(
            "join", (worker.id, worker.name, self._codec.encode_worker(worker), LEASE_MS), worker.id
        )

    def renew(self) -> Command:
        """The command that renews the leases of this router's workers."""
        return Command("renew", (LEASE_MS, KEEP_MS, *self.workers))

    def relieve(self, *, of_all: bool) -> Command:
        """The command that frees memory. of_all: drop everything, not only old events and snapshots."""
        return Command("relieve", (int(of_all), *map(self.snapshot_key, self.workers)))

    def snapshot_key(self, worker_id: str) -> str:
        """The key of a worker's snapshot."""
        return f"{self._names.workers}:{worker_id}"

    def next_to_snapshot(self) -> str | None:
        """The worker that needs a snapshot most: one without any, or with the oldest; None: no worker."""
        without = (worker_id for worker_id in self.workers if worker_id not in self._snapshots)
        for worker_id in chain(without, self._snapshots):
            number = self._index.next_number(worker_id)
            if number is not None and self._snapshots.get(worker_id) != number:
                return worker_id
        return None

    def snapshot(self, worker_id: str, stream_id: str) -> Command | None:
        """The command that writes a snapshot. stream_id: of the last entry, as read before this call."""
        number = self._index.next_number(worker_id)
        if number is None:
            return None
        keys, values = self._index.export(worker_id)
        body = Snapshot(number, stream_id, keys.astype("<u8").tobytes(), values.astype("<u8").tobytes())
        sealed = self._codec.encode_snapshot(worker_id, body)
        self._snapshots.pop(worker_id, None)
        self._snapshots[worker_id] = number
        return Command("", ("SET", self.snapshot_key(worker_id), sealed, "PX", SNAPSHOT_MS), worker_id)

    def _put(self, command: Command) -> None:
        if not self.is_open:
            return
        if len(self._queue) >= MAX_QUEUED:
            self._counters["redis_overflows"] += 1
            self._queue.clear()
            self._afresh = None
            self._stale = dict.fromkeys(self.workers)
            self._queue.extend(map(self.join, self.workers.values()))
        if command.script != "apply" or command.worker_id not in self._stale:
            self._queue.append(command)

    def _mark_stale(self, worker_id: str) -> None:
        if worker_id in self.workers:
            self._stale[worker_id] = None

    def _apply(self, worker_id: str, events: KvEventBatch) -> Command:
        pages = np.array(events.pages, np.int64)
        body = self._codec.encode_pages(worker_id, events)
        arguments = (
            worker_id,
            self._router_id,
            events.first,
            int(events.is_afresh),
            int(events.tier is Tier.HOST),
            first_halves(events.keys),
            (pages >= 0).astype(np.uint8).tobytes(),
            body,
            self.room.num_entries(len(body)),
            self.room.num_pages,
        )
        return Command("apply", arguments, worker_id)

    def _all_afresh(self, worker_id: str) -> Iterator[Command]:
        """All pages of a worker, numbered so that the worker's next event follows."""
        first = self._index.next_number(worker_id) or 0
        keys, values = self._index.export(worker_id)
        return self._in_chunks(worker_id, keys, values, first - keys.size)

    def _in_chunks(self, worker_id: str, keys: Keys, values: Values, first: int) -> Iterator[Command]:
        is_afresh = True
        for some_keys, some_values in _chunks(keys, values):
            yield self._apply(worker_id, events_of(some_keys, some_values, first, is_afresh=is_afresh))
            first, is_afresh = first + some_keys.size, False
        if is_afresh:
            yield self._apply(worker_id, events_of(keys, values, first, is_afresh=True))


def events_of(keys: Keys, values: Values, first: int, *, is_afresh: bool) -> KvEventBatch:
    """Pages of one tier as events."""
    pages = values >> np.uint64(32) & np.uint64(2**31 - 1)
    return KvEventBatch(
        first=first,
        keys=with_zeros(keys.astype("<u8").tobytes()),
        pages=tuple(pages.tolist()),
        generations=tuple((values & np.uint64(2**32 - 1)).tolist()),
        tier=Tier.HOST if values.size and values[0] >= HOST_BIT else Tier.DEVICE,
        is_afresh=is_afresh,
    )


def _chunks(keys: Keys, values: Values) -> Iterator[tuple[Keys, Values]]:
    on_host = values >= HOST_BIT
    for chosen in (~on_host, on_host):
        for start in range(0, int(np.count_nonzero(chosen)), CHUNK_PAGES):
            part = slice(start, start + CHUNK_PAGES)
            yield keys[chosen][part], values[chosen][part]
