"""The commands that a router sends to Redis: a queue, and snapshots that make up for dropped commands.

`RedisOutbox` sends commands in order, a batch each round trip:

1. While the link is up, commands queue here. While the link is down, or when too many have queued, commands
   are dropped, and their workers are stale: Redis may lack some of their events.
2. A stale worker's events are dropped until its snapshot is written. One snapshot is written before each
   batch. It has the dropped events too: the router applies events to its index before it calls `pages`. Other
   routers find a gap in the worker's numbers and read the snapshot.
3. Leases are renewed every few seconds. Workers with changed pages get new snapshots in turn.
"""

import asyncio
from collections import Counter, deque
from itertools import chain
from typing import Final

from baton.messages.control import KvEventBatch
from baton.messages.workers import Worker
from baton.router.index.prefix_index import PrefixIndex
from baton.router.redis.client import KEEP_MS, Argument, Command, Names, Reply
from baton.router.redis.messages import MESSAGE, WORKER, AnyShared, Codec, Snapshot, pages_of, snapshot_of

STREAM_ENTRIES: Final = 16_384
MAX_STREAM_BYTES: Final = 2**26
MAX_QUEUED: Final = 8192
MAX_BATCH: Final = 64
LEASE_MS: Final = 10_000
SNAPSHOT_MS: Final = KEEP_MS


def stream_budget(max_memory_bytes: int) -> int:
    """The bytes of the stream by the memory limit of Redis; 0: no limit.

    Measured with Redis 7.0: an entry of the stream or of a snapshot takes a quarter more than its length. Of
    a gibibyte:

        snapshots of all that an index holds   42 MB    4 million pages of 8 bytes, and a quarter
        the stream, usually                    40 MiB   the budget is 32
        the stream, at most                   270 MiB   entries of half a mebibyte, then smaller ones

    The stream keeps fewer entries the larger the newest entry is (`max_entries`). Entries before a smaller
    one stay, so all together may take 1 + ln(largest / (budget / STREAM_ENTRIES)) times the budget: 6.5 times
    for the largest entries.
    """
    return min(MAX_STREAM_BYTES, max_memory_bytes // 32) if max_memory_bytes else MAX_STREAM_BYTES


def max_entries(entry_bytes: int, budget_bytes: int) -> int:
    """The number of entries that the stream keeps after one of `entry_bytes` was added."""
    return max(1, min(STREAM_ENTRIES, budget_bytes // max(1, entry_bytes)))


class RedisOutbox:
    """Queues commands, and makes up for dropped ones by snapshots."""

    def __init__(
        self, names: Names, codec: Codec, router_id: str, index: PrefixIndex, counters: Counter[str]
    ) -> None:
        self.workers: dict[str, Worker] = {}  # connected to this router, by id
        self.is_open = False
        self.has_unsent = asyncio.Event()  # set by each new command
        self.budget_bytes = MAX_STREAM_BYTES  # see `stream_budget`
        self.names = names
        self.codec = codec
        self.router_id = router_id
        self.index = index
        self.counters = counters
        self._queue: deque[Command] = deque()
        self._stale: dict[str, None] = {}
        self._snapshots: dict[str, int] = {}  # worker -> the next number in its snapshot; the oldest first

    def __len__(self) -> int:
        """The number of unsent commands and stale workers."""
        return len(self._queue) + len(self._stale)

    @property
    def has_stale(self) -> bool:
        """True when the next snapshot is of a stale worker."""
        return bool(self._stale)

    def joined(self, worker: Worker) -> None:
        """A worker has connected to this router."""
        self.workers[worker.id] = worker
        self._put(self.join(worker))

    def left(self, worker_id: str) -> None:
        """A worker has left this router."""
        if worker_id not in self.workers:
            return
        self._drop(worker_id)
        self._put(Command("leave", (worker_id,), worker_id))

    def pages(self, worker_id: str, events: KvEventBatch) -> None:
        """Send events that have been applied to the index."""
        if worker_id in self.workers and worker_id not in self._stale:
            self._put(self._publish(worker_id, events, is_restart=events.is_snapshot))

    def share(self, message: AnyShared) -> None:
        """Send a message to the other routers."""
        body = self.codec.encode(MESSAGE, message)
        fields: tuple[Argument, ...] = ("*", "r", self.router_id, "m", body)
        limit: tuple[Argument, ...] = ("MAXLEN", "~", max_entries(len(body), self.budget_bytes))
        self._put(Command("", ("XADD", self.names.events, *limit, *fields)))

    def open(self) -> None:
        """The link is up."""
        self.is_open = True

    def close(self) -> None:
        """The link is down: drop the queue, all workers are stale."""
        self.is_open = False
        self._queue.clear()
        self._snapshots.clear()
        self._stale = dict.fromkeys(self.workers)

    def mark_stale(self, worker_id: str) -> None:
        """Have the worker's snapshot written next; it includes the events that wait here."""
        if worker_id in self.workers:
            self._stale[worker_id] = None
            others = (each for each in self._queue if (each.script, each.worker_id) != ("publish", worker_id))
            self._queue = deque(others)

    def take_batch(self) -> list[Command]:
        """The commands to send next."""
        return [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]

    def answered(self, command: Command, reply: Reply) -> None:
        """Take the reply to a command of `take_batch` or `snapshot`."""
        if isinstance(reply, Exception):
            self.mark_stale(command.worker_id)
        elif command.script == "join" and reply == -2:
            self.counters["redis_fenced"] += 1
            self._drop(command.worker_id)
        elif command.script == "publish" and reply < 0:
            self.counters["redis_gaps"] += 1
            self.mark_stale(command.worker_id)

    def rejoined(self, worker: Worker, next_number: int) -> None:
        """After a new connection, Redis knows the worker up to this number."""
        self._stale.pop(worker.id, None)
        if next_number == -2:
            self.answered(self.join(worker), next_number)
        elif self.index.is_known(worker.id) and self.index.next_number(worker.id) != next_number:
            self.mark_stale(worker.id)

    def join(self, worker: Worker) -> Command:
        """The command that adds a worker."""
        body = self.codec.encode(WORKER, worker)
        return Command("join", (worker.id, worker.name, worker.incarnation, body, LEASE_MS), worker.id)

    def renew(self) -> Command:
        """The command that renews the leases of this router's workers."""
        return Command("renew", (LEASE_MS, KEEP_MS, *self.workers))

    def relieve(self, *, of_all: bool) -> Command:
        """The command that frees memory. of_all: drop everything, not only old events and snapshots."""
        return Command("relieve", (int(of_all), *map(self.names.snapshot, self.workers)))

    def next_to_snapshot(self) -> str | None:
        """The worker that needs a snapshot most: a stale one, then one without any, then the oldest.

        None when the snapshots of all workers are up to date.
        """
        if self._stale:
            return next(iter(self._stale))
        without = (worker_id for worker_id in self.workers if worker_id not in self._snapshots)
        for worker_id in chain(without, self._snapshots):
            number = self.index.next_number(worker_id)
            if number is not None and self._snapshots.get(worker_id) != number:
                return worker_id
        return None

    def snapshot(self, worker_id: str, stream_id: str) -> list[Command]:
        """The commands that write a snapshot. stream_id: of the last entry, as read before this call.

        A stale worker joins again first, and its numbers continue after the snapshot. Nothing is written of a
        worker with unknown pages: the worker is about to report them.
        """
        commands, number = [], self.index.next_number(worker_id)
        is_stale = worker_id in self._stale
        self._stale.pop(worker_id, None)
        if is_stale:
            commands.append(self.join(self.workers[worker_id]))
        if number is None:
            return commands
        body = Snapshot(number, stream_id, self.index.export(worker_id))
        sealed = self.codec.encode(snapshot_of(worker_id), body)
        self._snapshots.pop(worker_id, None)
        self._snapshots[worker_id] = number
        key = self.names.snapshot(worker_id)
        commands.append(Command("", ("SET", key, sealed, "PX", SNAPSHOT_MS), worker_id))
        if is_stale:
            nothing = KvEventBatch(first=number, keys=b"")
            commands.append(self._publish(worker_id, nothing, is_restart=True))
        return commands

    def _put(self, command: Command) -> None:
        if not self.is_open:
            return
        if len(self._queue) >= MAX_QUEUED:
            self.counters["redis_overflows"] += 1
            self._queue.clear()
            self._stale = dict.fromkeys(self.workers)
        if command.script != "publish" or command.worker_id not in self._stale:
            self._queue.append(command)
            self.has_unsent.set()

    def _drop(self, worker_id: str) -> None:
        self.workers.pop(worker_id, None)
        self._stale.pop(worker_id, None)
        self._snapshots.pop(worker_id, None)

    def _publish(self, worker_id: str, events: KvEventBatch, *, is_restart: bool) -> Command:
        body = self.codec.encode(pages_of(worker_id), events)
        most = max_entries(len(body), self.budget_bytes)
        arguments = (worker_id, self.router_id, events.first, events.num_changes, int(is_restart), body, most)
        return Command("publish", arguments, worker_id)
