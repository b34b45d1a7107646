"""The requests that wait at the router, in the order in which they are let out.

The life of one that waits:

1. It is added. Strictly first comes the class of the lowest rank, within a rank the tenant whose turn it is
   (baton/fair_queue.py), of a tenant's own requests the one of lowest priority number, then the one
   that is due first, then the one that came first.
2. It is taken when it is its turn, and its tenant charged for its work; or removed, whatever the reason.
3. A tenant that has all that it may have is held: its requests stay, others' go past them. Released, it goes
   on as one that has just begun to wait.

Nothing here knows time or capacity. Every operation on one request, or tenant, takes microseconds, of a
million requests as well.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeAlias, TypeVar

from baton.fair_queue import FairShare
from baton.messages.control import Submit
from baton.router.in_flight import Key
from baton.router.policies.prompts_ahead import SchedulingClass
from baton.tenants import MAX_CLASSES, SchedulingKey

Item = TypeVar("Item")
Order: TypeAlias = tuple[int, float, int]  # the least is first; the last number is of one thing alone
BLOCK_SIZE: Final = 128


class _Block(Generic[Item]):
    """Entry i of each is of the same thing."""

    __slots__ = ("dues", "items", "numbers", "priorities", "works")

    def __init__(self) -> None:
        self.priorities = array("q")
        self.dues = array("d")
        self.numbers = array("q")
        self.works = array("d")
        self.items: list[Item] = []

    def __len__(self) -> int:
        return len(self.items)

    @property
    def last(self) -> Order:
        return self.priorities[-1], self.dues[-1], self.numbers[-1]

    def place(self, order: Order) -> int:
        """How many come before it."""
        priority, due, number = order
        priorities, dues = self.priorities, self.dues
        first, stop = 0, len(dues)
        if not priorities[0] == priority == priorities[-1]:
            first, stop = bisect_left(priorities, priority), bisect_right(priorities, priority)
        first, stop = bisect_left(dues, due, first, stop), bisect_right(dues, due, first, stop)
        return bisect_left(self.numbers, number, first, stop)

    def insert(self, place: int, order: Order, item: Item, work: float) -> None:
        self.priorities.insert(place, order[0])
        self.dues.insert(place, order[1])
        self.numbers.insert(place, order[2])
        self.works.insert(place, work)
        self.items.insert(place, item)

    def delete(self, place: int) -> float:
        """Its work."""
        del self.priorities[place], self.dues[place], self.numbers[place], self.items[place]
        return self.works.pop(place)

    def split(self) -> "_Block[Item]":
        """The second half, which is not in this one any more."""
        half, other = len(self) // 2, _Block[Item]()
        for name in ("priorities", "dues", "numbers", "works", "items"):
            values = getattr(self, name)
            setattr(other, name, values[half:])
            del values[half:]
        return other

    def extend(self, other: "_Block[Item]") -> None:
        """By what comes after all that is in it."""
        for name in ("priorities", "dues", "numbers", "works", "items"):
            getattr(self, name).extend(getattr(other, name))


class WorkLine(Generic[Item]):
    """Things in order, each with its work, and how much work comes before any place among them.

    They are kept in blocks, each in order, of some `block_size`: to put a thing at its place or take it away
    touches one block, and the work before a place is that of the blocks before it and of a part of one. So
    each takes a few microseconds, of ten things as of a million, and nothing is ever put off for a later one
    to pay. What is compared lies side by side in memory: among a million things, to follow a reference costs
    more.
    """

    __slots__ = ("_block_size", "_blocks", "_lasts", "_works", "num", "work")

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        """A block has a quarter of `block_size` to twice as many; the first may have fewer."""
        self.num = 0
        self.work = 0.0  # of all, together
        self._block_size = block_size
        self._blocks: list[_Block[Item]] = []  # none is empty
        self._lasts: list[Order] = []  # of each block
        self._works: list[float] = []  # of all that is in each block

    def __iter__(self) -> Iterator[Item]:
        """In order."""
        return (item for block in self._blocks for item in block.items)

    def first(self) -> Item:
        """There must be one."""
        return self._blocks[0].items[0]

    def add(self, order: Order, item: Item, work: float) -> None:
        """Its order must be its own."""
        self.num += 1
        self.work += work
        if not self._blocks:
            block = _Block[Item]()
            block.insert(0, order, item, work)
            self._blocks.append(block)
            self._lasts.append(order)
            self._works.append(work)
            return
        number = min(bisect_left(self._lasts, order), len(self._lasts) - 1)
        block = self._blocks[number]
        block.insert(block.place(order), order, item, work)
        self._lasts[number] = block.last
        self._works[number] += work
        if len(block) > 2 * self._block_size:
            self._split(number)

    def remove(self, order: Order) -> None:
        """What was added with that order; it must be here."""
        self.num -= 1
        number = bisect_left(self._lasts, order)
        block = self._blocks[number]
        place = 0 if block.numbers[0] == order[2] else block.place(order)
        assert block.numbers[place] == order[2], order
        work = block.delete(place)
        self._works[number] -= work
        self.work = self.work - work if self.num else 0.0
        if not block:
            del self._blocks[number], self._lasts[number], self._works[number]
            return
        self._lasts[number] = block.last
        if 4 * len(block) < self._block_size and number:
            self._merge(number - 1)

    def work_before(self, order: Order) -> float:
        """Of all with a lesser order."""
        number = bisect_left(self._lasts, order)
        if number == len(self._blocks):
            return self.work
        block = self._blocks[number]
        return sum(self._works[:number]) + sum(block.works[: block.place(order)])

    def check_integrity(self) -> None:
        """AssertionError when the parts do not agree."""
        orders = list[Order]()
        for block, work in zip(self._blocks, self._works, strict=True):
            orders += zip(block.priorities, block.dues, block.numbers, strict=True)
            assert 0 < len(block) == len(block.works) == len(block.numbers)
            assert abs(sum(block.works) - work) <= 1e-6 * (1 + work)
        assert orders == sorted(orders) and len(orders) == self.num
        assert self._lasts == [block.last for block in self._blocks]
        assert abs(sum(self._works) - self.work) <= 1e-6 * (1 + self.work)

    def _split(self, number: int) -> None:
        block = self._blocks[number]
        other = block.split()
        self._blocks.insert(number + 1, other)
        self._lasts[number : number + 1] = [block.last, other.last]
        self._works[number : number + 1] = [sum(block.works), sum(other.works)]

    def _merge(self, number: int) -> None:
        """With the next one."""
        block = self._blocks[number]
        block.extend(self._blocks.pop(number + 1))
        self._works[number] += self._works.pop(number + 1)
        del self._lasts[number]
        if len(block) > 2 * self._block_size:
            self._split(number)


class Waiting:
    """One attempt. `order` is the queue's own."""

    __slots__ = (
        *("due_s", "gateway", "key", "order", "rank"),
        *("since_s", "scheduling_key", "submit", "tenant", "work"),
    )

    def __init__(self, gateway: str, submit: Submit, *, since_s: float, due_s: float, work: float) -> None:
        """due_s: by when it should be let out. work: tokens that it is expected to take."""
        request = submit.request
        self.gateway = gateway
        self.submit = submit
        self.key: Key = (request.request_id, request.attempt)
        self.tenant = request.tenant
        self.scheduling_key: SchedulingKey = request.scheduling_key
        self.rank = request.scheduling_key.rank
        self.since_s = since_s
        self.due_s = due_s
        self.work = work
        self.order: Order = (request.priority, due_s, 0)  # and its number, which the queue gives it

    def queued_s(self, now_s: float) -> float:
        """For how long it waits for its turn: what workers have begun with was being answered before."""
        since_s = self.since_s + (self.submit.age_s if self.submit.is_begun else 0.0)
        return max(0.0, now_s - since_s)


class _Lane:
    """What waits of one tenant in one rank."""

    __slots__ = ("line", "weight")

    def __init__(self) -> None:
        self.line: WorkLine[Waiting] = WorkLine()
        self.weight = 1.0


class TenantQueues:
    def __init__(self) -> None:
        self._shares = [FairShare() for _ in range(MAX_CLASSES)]  # by rank
        self._lanes: dict[tuple[int, str], _Lane] = {}
        self._ranks: dict[str, list[int]] = {}  # tenant -> ranks of its lanes
        self._held: set[str] = set()  # tenants
        self._queued: dict[Key, Waiting] = {}  # in the order of coming
        self._num_added = 0
        self._busy: list[int] = []  # ranks in which anybody waits, the highest class first
        self._work = [0.0] * MAX_CLASSES
        self._num = [0] * MAX_CLASSES

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, key: Key) -> bool:
        return key in self._queued

    def __iter__(self) -> Iterator[Waiting]:
        """In the order of coming."""
        return iter(self._queued.values())

    def add(self, waiting: Waiting) -> None:
        """Its key must be new."""
        assert waiting.key not in self._queued, waiting.key
        self._num_added += 1
        priority, due_s, _ = waiting.order
        waiting.order = (priority, due_s, self._num_added)
        self._queued[waiting.key] = waiting
        place = (waiting.rank, waiting.tenant)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = _Lane()
            self._ranks.setdefault(waiting.tenant, []).append(waiting.rank)
        lane.line.add(waiting.order, waiting, waiting.work)
        lane.weight = waiting.scheduling_key.weight
        if not self._num[waiting.rank]:
            insort(self._busy, waiting.rank)
        self._num[waiting.rank] += 1
        self._work[waiting.rank] += waiting.work
        if waiting.tenant not in self._held:
            self._shares[waiting.rank].join(waiting.tenant, lane.weight)

    def first(self) -> Waiting | None:
        """Whose turn it is. None: nobody waits who is not held."""
        for rank in self._busy:
            tenant = self._shares[rank].first()
            if tenant is not None:
                return self._lanes[rank, tenant].line.first()
        return None

    def heads(self) -> Iterator[Waiting]:
        """Of each tenant that is not held, in each rank, the first."""
        for (_, tenant), lane in self._lanes.items():
            if tenant not in self._held:
                yield lane.line.first()

    def take(self, waiting: Waiting) -> None:
        """Let it out, and charge its tenant its work. It must be the first."""
        self._shares[waiting.rank].serve(waiting.tenant, waiting.work)
        self._remove(waiting)

    def remove(self, key: Key) -> Waiting | None:
        """Uncharged. None: it is not here."""
        waiting = self._queued.get(key)
        if waiting is not None:
            self._remove(waiting)
        return waiting

    def correct(self, rank: int, tenant: str, work: float) -> None:
        """What was taken has used so much more than it was charged, or less."""
        self._shares[rank].correct(tenant, work)

    def age(self) -> None:
        """To be called at even intervals: how far back credit reaches is counted in them."""
        for share in self._shares:
            share.age()

    def hold(self, tenant: str) -> None:
        if tenant in self._held:
            return
        self._held.add(tenant)
        for rank in self._ranks.get(tenant, ()):
            self._shares[rank].leave(tenant)

    def release(self, tenant: str, *, was_away: bool = True) -> None:
        """was_away: else it has waited all the while, and loses nothing by it."""
        if tenant not in self._held:
            return
        self._held.remove(tenant)
        for rank in self._ranks.get(tenant, ()):
            self._shares[rank].join(tenant, self._lanes[rank, tenant].weight, was_away=was_away)

    @property
    def work(self) -> float:
        return sum(self._work)

    def lead_of(self, waiting: Waiting) -> float:
        """Work, for its weight, that its tenant has had or is to have more than who was served last.

        Below 0: it is owed so much.
        """
        share = self._shares[waiting.rank]
        return share.clock(waiting.tenant) - share.present

    def known_lead(self, scheduling_class: SchedulingClass) -> float | None:
        """The same of any tenant. None: nothing was charged to it here."""
        share = self._shares[scheduling_class.rank]
        return (
            share.clock(scheduling_class.tenant) - share.present
            if share.is_known(scheduling_class.tenant)
            else None
        )

    def is_held(self, tenant: str) -> bool:
        return tenant in self._held

    def num_of(self, tenant: str) -> int:
        return sum(self._lanes[rank, tenant].line.num for rank in self._ranks.get(tenant, ()))

    def of_rank(self, rank: int) -> Iterator[Waiting]:
        """In the order of coming."""
        return (waiting for waiting in self._queued.values() if waiting.rank == rank)

    def last_rank(self) -> int | None:
        """The lowest class that waits."""
        return self._busy[-1] if self._busy else None

    def work_before(self, waiting: Waiting) -> float:
        """That would be let out before it, if it came now and nothing else came after it.

        That of higher classes, its tenant's own, and what others are due until its tenant's turn comes.
        """
        rank, weight = waiting.rank, waiting.scheduling_key.weight
        share, lane = self._shares[rank], self._lanes.get((rank, waiting.tenant))
        priority, due_s, number = waiting.order
        own, others, weights = 0.0, self._work[rank], share.weights
        if lane is not None:
            own = lane.line.work_before((priority, due_s, number or self._num_added + 1))
            others -= lane.line.work
            weights -= lane.weight
        due = max(0.0, own / weight + self.lead_of(waiting)) * max(0.0, weights)
        return sum(self._work[:rank]) + own + min(max(0.0, others), due)

    def check_integrity(self) -> None:
        """AssertionError when the counts are not those of what waits."""
        assert sum(lane.line.num for lane in self._lanes.values()) == len(self._queued) == sum(self._num)
        for (rank, tenant), lane in self._lanes.items():
            lane.line.check_integrity()
            assert lane.line.num > 0 and rank in self._ranks[tenant], (rank, tenant)
            assert all(self._queued[waiting.key] is waiting for waiting in lane.line)
        for rank, share in enumerate(self._shares):
            open_lanes = {tenant for of, tenant in self._lanes if of == rank and tenant not in self._held}
            assert len(share) == len(open_lanes), rank

    def _remove(self, waiting: Waiting) -> None:
        del self._queued[waiting.key]
        self._num[waiting.rank] -= 1
        rest = self._work[waiting.rank] - waiting.work
        self._work[waiting.rank] = rest if self._num[waiting.rank] else 0.0
        if not self._num[waiting.rank]:
            self._busy.remove(waiting.rank)
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


MIN_KEPT: Final = 1024  # of whatever waits or did


class Deadlines:
    """When waiting is in vain, of each request that waits and has such a time."""

    def __init__(self, queues: TenantQueues) -> None:
        self._queues = queues
        self._times: list[tuple[float, Key]] = []  # a heap; those that wait no more are void

    def add(self, at_s: float, key: Key) -> None:
        heappush(self._times, (at_s, key))
        if len(self._times) > 2 * len(self._queues) + MIN_KEPT:  # most are void
            self._times = [entry for entry in self._times if entry[1] in self._queues]
            heapify(self._times)

    def passed(self, now_s: float) -> Iterator[Key]:
        """Each that waits and whose time has passed, once."""
        while self._times and self._times[0][0] <= now_s:
            _, key = heappop(self._times)
            if key in self._queues:
                yield key
