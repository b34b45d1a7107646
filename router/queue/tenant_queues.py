"""The requests that wait at the router, in the order in which they are dispatched.

The life of a waiting request:

1. It is added. The class of the lowest rank comes strictly first; within a rank the next tenant in turn
   (baton/fair_queue.py); within a tenant the lowest priority number, then the earliest due time, then
   arrival.
2. It is taken when its turn comes, and its tenant is charged its work; or it is removed for any reason.
3. A tenant at its quota is held: its requests stay, and other tenants' requests bypass them. Once released,
   the tenant continues as if it had just begun to wait.

This module reads no clock and no capacity. Every operation on one request or tenant takes microseconds, even
with a million requests.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final, Generic, TypeAlias, TypeVar

from baton.fair_queue import FairShare
from baton.messages.control import Submit
from baton.request import AttemptKey
from baton.router.in_flight import SchedulingClass
from baton.router.queue.quotas import RequestWork
from baton.tenants import MAX_CLASSES, SchedulingKey

Item = TypeVar("Item")
Order: TypeAlias = tuple[int, float, int]  # priority, due time, unique number; the least is first
BLOCK_SIZE: Final = 64
MAX_COMPARED: Final = 32
MIN_KEPT: Final = 1024  # deadlines of requests that wait or did


_Entry: TypeAlias = tuple[Order, float, Item]  # with the item's work


class WorkLine(Generic[Item]):
    """Items in order, each with its work, and the sum of the work before any place among them.

    The items are kept in sorted blocks of about `block_size`. `add` and `remove` change one block;
    `work_before` sums the blocks before a place and a part of one block. Each operation takes a few
    microseconds, with ten items or a million, and leaves no work to a later one.
    """

    __slots__ = ("_block_size", "_blocks", "_lasts", "_works", "num", "work")

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        """A block has a quarter of `block_size` to twice as many items; the first may have fewer."""
        self.num = 0
        self.work = 0.0  # of all items
        self._block_size = block_size
        self._blocks: list[list[_Entry[Item]]] = []  # none is empty; no two orders are equal
        self._lasts: list[Order] = []  # of each block
        self._works: list[float] = []  # sum of each block

    def __iter__(self) -> Iterator[Item]:
        return (item for block in self._blocks for _, _, item in block)

    def first(self) -> Item:
        """The item with the least order. The line must not be empty."""
        return self._blocks[0][0][2]

    def add(self, order: Order, item: Item, work: float) -> None:
        """Add an item. Its order must be unique."""
        self.num += 1
        self.work += work
        if not self._blocks:
            self._put(0, 0, [(order, work, item)])
            return
        number = min(bisect_left(self._lasts, order), len(self._lasts) - 1)
        block = self._blocks[number]
        insort(block, (order, work, item))
        self._lasts[number] = block[-1][0]
        self._works[number] += work
        if len(block) > 2 * self._block_size:
            self._put(number, number + 1, block)

    def remove(self, order: Order) -> None:
        """Remove the item that was added with this order; it must be here."""
        self.num -= 1
        number = bisect_left(self._lasts, order)
        block = self._blocks[number]
        found, work, _ = block.pop(bisect_left(block, (order,)))
        assert found == order, order
        self.work = self.work - work if self.num else 0.0
        if number and 4 * len(block) < self._block_size:
            self._put(number - 1, number + 1, self._blocks[number - 1] + block)
        elif block:
            self._lasts[number] = block[-1][0]
            self._works[number] -= work
        else:
            self._put(number, number + 1, block)

    def work_before(self, order: Order) -> float:
        """The work of all items with a lesser order."""
        number = bisect_left(self._lasts, order)
        if number == len(self._blocks):
            return self.work
        block = self._blocks[number]
        return sum(self._works[:number]) + _work_of(block[: bisect_left(block, (order,))])

    def check_integrity(self) -> None:
        """Raise AssertionError when the sums and bounds are not those of the blocks."""
        orders = [order for block in self._blocks for order, _, _ in block]
        assert orders == sorted(orders) and len(orders) == self.num
        assert self._lasts == [block[-1][0] for block in self._blocks], "no block is empty"
        for block, work in zip(self._blocks, self._works, strict=True):
            assert abs(_work_of(block) - work) <= 1e-6 * (1 + work)
        assert abs(sum(self._works) - self.work) <= 1e-6 * (1 + self.work)

    def _put(self, first: int, end: int, block: list[_Entry[Item]]) -> None:
        """Put a block in place of the blocks [first, end): none if it is empty, its halves if it is large."""
        half = len(block) // 2 if len(block) > 2 * self._block_size else len(block)
        blocks = [part for part in (block[:half], block[half:]) if part]
        self._blocks[first:end] = blocks
        self._lasts[first:end] = [part[-1][0] for part in blocks]
        self._works[first:end] = map(_work_of, blocks)


def _work_of(block: list[_Entry[Item]]) -> float:
    return sum([work for _, work, _ in block])


class QueuedAttempt:
    """One attempt from its submission to its end. It waits until `is_dispatched`."""

    __slots__ = (
        *("ahead_tenant", "charged", "due_s", "gateway", "is_computed", "is_dispatched", "key"),
        *("num_ahead", "order", "rank", "request", "scheduling_key", "since_s", "submit", "tenant", "work"),
    )

    def __init__(
        self, gateway: str, submit: Submit, *, since_s: float, due_s: float, work: RequestWork
    ) -> None:
        """since_s: arrival at the gateway. due_s: when it should be dispatched. work: expected."""
        request = submit.request
        self.gateway = gateway
        self.submit = submit
        self.request = request
        self.key = request.key
        self.tenant = request.tenant
        self.scheduling_key: SchedulingKey = request.scheduling_key
        self.rank = request.scheduling_key.rank
        self.since_s = since_s
        self.due_s = due_s
        self.charged = work  # to its tenant; corrected as work becomes known
        self.work = work.total  # charged at its dispatch
        self.order: Order = (request.priority, due_s, 0)  # the queue sets the number
        self.is_dispatched = False
        self.is_computed = False  # the prompt's work is known
        self.num_ahead = 0  # requests that waited when this one came
        self.ahead_tenant = ""  # with the most of these

    @property
    def received_s(self) -> float:
        """When the router received it, by the router's clock."""
        return self.since_s + self.submit.age_s

    def queued_s(self, now_s: float) -> float:
        """Seconds that it has waited for its turn: since its arrival at the gateway, or since its submission
        when it continues a stream.
        """
        return max(0.0, now_s - (self.received_s if self.submit.is_begun else self.since_s))


class _Lane:
    """The waiting requests of one tenant in one rank."""

    __slots__ = ("line", "weight")

    def __init__(self) -> None:
        self.line: WorkLine[QueuedAttempt] = WorkLine()
        self.weight = 1.0


class TenantQueues:
    """All waiting requests."""

    def __init__(self) -> None:
        self._shares = [FairShare() for _ in range(MAX_CLASSES)]  # by rank
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._ranks: dict[str, list[int]] = {}  # tenant -> ranks of its lanes
        self._held: set[str] = set()  # tenants
        self._queued: dict[AttemptKey, QueuedAttempt] = {}  # in the order of arrival
        self._num_added = 0
        self._work = [0.0] * MAX_CLASSES
        self._num = [0] * MAX_CLASSES

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._queued

    def __iter__(self) -> Iterator[QueuedAttempt]:
        """All waiting requests in the order of arrival."""
        return iter(self._queued.values())

    def add(self, waiting: QueuedAttempt) -> None:
        """Add a request. Its key must be new."""
        assert waiting.key not in self._queued, waiting.key
        self._num_added += 1
        priority, due_s, _ = waiting.order
        waiting.order = (priority, due_s, self._num_added)
        if self._queued:
            waiting.num_ahead, waiting.ahead_tenant = len(self._queued), self._busiest_tenant()
        self._queued[waiting.key] = waiting
        place = (waiting.rank, waiting.tenant)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = _Lane()
            self._ranks.setdefault(waiting.tenant, []).append(waiting.rank)
        lane.line.add(waiting.order, waiting, waiting.work)
        lane.weight = waiting.scheduling_key.weight
        self._num[waiting.rank] += 1
        self._work[waiting.rank] += waiting.work
        if waiting.tenant not in self._held:
            self._shares[waiting.rank].join(waiting.tenant, lane.weight)

    def _busiest_tenant(self) -> str:
        """The tenant with the most waiting requests, of the MAX_COMPARED that have waited longest."""
        lanes = islice(self._lanes.items(), MAX_COMPARED)
        (_, tenant), _ = max(lanes, key=lambda entry: entry[1].line.num)
        return tenant

    def first(self) -> QueuedAttempt | None:
        """The next request in turn; None when all waiting tenants are held."""
        for rank, share in enumerate(self._shares):
            if (tenant := share.first()) is not None:
                return self._lanes[rank, tenant].line.first()
        return None

    def heads(self) -> Iterator[QueuedAttempt]:
        """The first request of each rank of each tenant that is not held."""
        for (_, tenant), lane in self._lanes.items():
            if tenant not in self._held:
                yield lane.line.first()

    def take(self, waiting: QueuedAttempt) -> None:
        """Remove the first request, and charge its tenant its work."""
        self._shares[waiting.rank].serve(waiting.tenant, waiting.work)
        self.remove(waiting)

    def correct(self, rank: int, tenant: str, work: float) -> None:
        """Charge a tenant `work` more; give back if negative."""
        self._shares[rank].correct(tenant, work)

    def age(self) -> None:
        """Advance one age of the fair shares. Call at even intervals."""
        for share in self._shares:
            share.age()

    def hold(self, tenant: str) -> None:
        """Let other tenants' requests bypass those of this tenant."""
        if tenant in self._held:
            return
        self._held.add(tenant)
        for rank in self._ranks.get(tenant, ()):
            self._shares[rank].leave(tenant)

    def release(self, tenant: str, *, was_away: bool = True) -> None:
        """End `hold`. was_away: False for a tenant that was only skipped: it loses no credit."""
        if tenant not in self._held:
            return
        self._held.remove(tenant)
        for rank in self._ranks.get(tenant, ()):
            self._shares[rank].join(tenant, self._lanes[rank, tenant].weight, was_away=was_away)

    @property
    def work(self) -> float:
        """The work of all waiting requests."""
        return sum(self._work)

    def lag_of(self, waiting: QueuedAttempt) -> float:
        """Return the virtual-time lag of the request's tenant behind the tenant that was served last.

        In work divided by weight; positive: the tenant has a deficit.
        """
        share = self._shares[waiting.rank]
        return share.present - share.clock(waiting.tenant)

    def known_lag(self, scheduling_class: SchedulingClass) -> float | None:
        """Return the virtual-time lag of any tenant; None when nothing was charged to the tenant here."""
        share, tenant = self._shares[scheduling_class.rank], scheduling_class.tenant
        return share.present - share.clock(tenant) if share.is_known(tenant) else None

    def num_of(self, tenant: str) -> int:
        """The number of a tenant's waiting requests."""
        return sum(self._lanes[rank, tenant].line.num for rank in self._ranks.get(tenant, ()))

    def of_rank(self, rank: int) -> Iterator[QueuedAttempt]:
        """The requests of a rank in the order of arrival."""
        return (waiting for waiting in self._queued.values() if waiting.rank == rank)

    def last_rank(self) -> int | None:
        """The lowest class with waiting requests."""
        return max((rank for rank, num in enumerate(self._num) if num), default=None)

    def work_before(self, waiting: QueuedAttempt) -> float:
        """Return the work that is dispatched before this request if nothing else arrives.

        This is all work of higher classes, the earlier work of its tenant, and other tenants' shares until
        its turn.
        """
        rank, weight = waiting.rank, waiting.scheduling_key.weight
        share, lane = self._shares[rank], self._lanes.get((rank, waiting.tenant))
        priority, due_s, number = waiting.order
        own, others, weights = 0.0, self._work[rank], share.weights
        if lane is not None:
            own = lane.line.work_before((priority, due_s, number or self._num_added + 1))
            others -= lane.line.work
            weights -= lane.weight
        until_turn = max(0.0, own / weight - self.lag_of(waiting)) * max(0.0, weights)
        return sum(self._work[:rank]) + own + min(max(0.0, others), until_turn)

    def check_integrity(self) -> None:
        """Raise AssertionError when the counts are not those of the waiting requests."""
        assert sum(lane.line.num for lane in self._lanes.values()) == len(self._queued) == sum(self._num)
        for (rank, tenant), lane in self._lanes.items():
            lane.line.check_integrity()
            assert lane.line.num > 0 and rank in self._ranks[tenant], (rank, tenant)
            assert all(self._queued[waiting.key] is waiting for waiting in lane.line)
        for rank, share in enumerate(self._shares):
            open_lanes = {tenant for of, tenant in self._lanes if of == rank and tenant not in self._held}
            assert len(share) == len(open_lanes), rank

    def remove(self, waiting: QueuedAttempt) -> None:
        """Remove a waiting request without a charge."""
        del self._queued[waiting.key]
        self._num[waiting.rank] -= 1
        rest = self._work[waiting.rank] - waiting.work
        self._work[waiting.rank] = rest if self._num[waiting.rank] else 0.0
        place = (waiting.rank, waiting.tenant)
        lane = self._lanes[place]
        lane.line.remove(waiting.order)
        if not lane.line.num:
            del self._lanes[place]
            self._ranks[waiting.tenant].remove(waiting.rank)
            if not self._ranks[waiting.tenant]:
                del self._ranks[waiting.tenant]
            if waiting.tenant not in self._held:
                self._shares[waiting.rank].leave(waiting.tenant)


class Deadlines:
    """The times after which waiting requests are refused."""

    def __init__(self, queues: TenantQueues) -> None:
        self._queues = queues
        # A heap. Entries of requests that do not wait are void.
        self._times: list[tuple[float, AttemptKey]] = []

    def __len__(self) -> int:
        """The number of kept times, void ones included."""
        return len(self._times)

    def add(self, at_s: float, key: AttemptKey) -> None:
        """Set the deadline of a waiting request."""
        heappush(self._times, (at_s, key))
        if len(self._times) > 2 * len(self._queues) + MIN_KEPT:  # most are void
            self._times = [entry for entry in self._times if entry[1] in self._queues]
            heapify(self._times)

    def passed(self, now_s: float) -> Iterator[AttemptKey]:
        """The waiting requests past their deadline, each once."""
        while self._times and self._times[0][0] <= now_s:
            _, key = heappop(self._times)
            if key in self._queues:
                yield key
